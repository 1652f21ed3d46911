//! The two processes of a job: starts them, relays their messages, waits for their end.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use ferroce::driver::machine::LineTime;
use ferroce_benches::process::Stopped;

use crate::case::Figures;
use crate::end::{FAILED, Job, Outcome, REPORT, Report, TELL};
use crate::link::Link;

/// The hidden argument for one of the two processes.
pub(crate) const END: &str = "--end";

/// The results of a job.
pub(crate) struct Answer {
    /// One for each case.
    pub(crate) figures: Vec<Figures>,
    /// The state of the machine before and after each case.
    pub(crate) states: Vec<[Option<LineTime>; 2]>,
    pub(crate) description: String,
    pub(crate) no_cycles: Option<String>,
}

/// Runs a job at both ends of a link. The role, device and addresses of the job are set here.
pub(crate) fn run(link: &Link, cores: [Option<usize>; 2], job: &Job) -> Outcome<Answer> {
    link.next_job();
    let (sender, lines) = channel();
    let mut ends = Vec::new();
    for (role, core) in cores.into_iter().enumerate() {
        let addresses = [link.address(role), link.address(1 - role)];
        let device = link.device(role);
        let job = Job { role, core, device, addresses, shared: link.shared(), ..job.clone() };
        let log = link.log(role);
        let mut command = link.command(role)?;
        command.arg(END).arg(serde_json::to_string(&job)?);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(File::create(&log)?);
        let mut process = command.spawn()?;
        let (stdin, stdout) = (process.stdin.take(), process.stdout.take());
        let (stdin, stdout) = stdin.zip(stdout).ok_or("a process without pipes")?;
        let sender = sender.clone();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if sender.send((role, Some(line))).is_err() {
                    return;
                }
            }
            let _ = sender.send((role, None));
        });
        ends.push(End { _process: Stopped(process), stdin, log });
    }
    let patience = Duration::from_secs(20) + Duration::from_millis(2 * job.millis * job.cases.len() as u64);
    let [a, b] = relay(&mut ends, &lines, Instant::now() + patience)?;
    let seen = a.seen.iter().zip(&b.seen).zip(&job.cases);
    let figures = seen.map(|((a, b), case)| Figures::of(*case, &[a.clone(), b.clone()])).collect();
    let line = |nanos: Option<u32>| Some(LineTime { cores: job.cores?, nanos: nanos? });
    let states = a.seen.iter().map(|seen| seen.line_nanos.map(line)).collect();
    Ok(Answer { figures, states, description: a.description, no_cycles: a.no_cycles })
}

struct End {
    /// The process ends with the job.
    _process: Stopped,
    stdin: ChildStdin,
    log: PathBuf,
}

type Lines = Receiver<(usize, Option<String>)>;

/// Relays messages until both ends have reported.
fn relay(ends: &mut [End], lines: &Lines, deadline: Instant) -> Outcome<[Report; 2]> {
    let mut reports = [None, None];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let (role, line) = lines.recv_timeout(left).map_err(|_| "the processes do not come to an end")?;
        let name = ["the end that starts", "the other end"][role];
        let Some(line) = line else {
            if reports[role].is_some() {
                continue;
            }
            let log = std::fs::read_to_string(&ends[role].log).unwrap_or_default();
            let last: Vec<_> = log.lines().rev().take(3).collect();
            return Err(format!("{name} ended without a report: {}", last.join(" / ")).into());
        };
        if let Some(words) = line.strip_prefix(TELL) {
            // If an end is gone, its missing report shows it.
            let _ = writeln!(ends[1 - role].stdin, "{words}");
        } else if let Some(report) = line.strip_prefix(REPORT) {
            reports[role] = Some(serde_json::from_str(report)?);
            if let [Some(_), Some(_)] = reports
                && let [Some(a), Some(b)] = std::mem::take(&mut reports)
            {
                return Ok([a, b]);
            }
        } else if let Some(reason) = line.strip_prefix(FAILED) {
            return Err(format!("{name}: {reason}").into());
        }
    }
}
