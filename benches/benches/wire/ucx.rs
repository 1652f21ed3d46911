//! UCX over the kernel's TCP on the same link, measured by its own `ucx_perftest`: puts, which UCX implements as
//! messages there. The program is started for each result, and prints one percentile at a time.

use std::net::{IpAddr, TcpListener};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use ferroce_benches::process::Stopped;

use crate::case::{Case, RoundTrip, Seen};
use crate::end::{Outcome, PATIENCE, Stage};

const PROGRAM: &str = "ucx_perftest";
/// Messages of the first run, which determines how many fill the time of a case.
const TRIAL: u64 = 1000;

pub(crate) fn run(stage: &mut Stage<'_>) -> Outcome<String> {
    for case in &stage.job.cases {
        stage.record(|stage| match *case {
            Case::UcxRate { size } => {
                let (n, _) = fitting(stage, "ucp_put_bw", size)?;
                let said = measure(stage, "ucp_put_bw", size, n, "50")?;
                let nanos = said.map_or(0.0, |said| n as f64 * 1e9 / said.rate);
                Ok(Seen { messages: n, nanos: nanos as u64, ..Seen::default() })
            }
            Case::UcxRoundTrip { size } => {
                let (n, said) = fitting(stage, "ucp_put_lat", size)?;
                let mut there_and_back = [0; 3];
                for (rank, nanos) in ["50", "99", "99.9"].into_iter().zip(&mut there_and_back) {
                    let said = measure(stage, "ucp_put_lat", size, n, rank)?;
                    // It prints half of it, in microseconds.
                    *nanos = said.map_or(0, |said| (said.percentile * 2e3) as u64);
                }
                let [p50, p99, p999] = there_and_back;
                let round_trip = said.map(|_| RoundTrip { count: n, p50, p99, p999 });
                Ok(Seen { round_trip, ..Seen::default() })
            }
            case => Err(format!("no case of UCX: {case}").into()),
        })?;
    }
    Ok(format!("UCX_TLS=tcp {PROGRAM}, {}", version()?))
}

/// The number of messages that fill the time of a case, and the results of the run that determined it.
fn fitting(stage: &mut Stage<'_>, test: &str, size: u32) -> Outcome<(u64, Option<Said>)> {
    let said = measure(stage, test, size, TRIAL, "50")?;
    let fill = said.as_ref().map(|said| (said.rate * stage.time().as_secs_f64()) as u64);
    // Both ends use the same number.
    let n = match fill {
        Some(n) => {
            let n = n.max(TRIAL);
            stage.peer.tell(&n)?;
            n
        }
        None => stage.peer.hear()?,
    };
    Ok((n, said))
}

/// The results of a run at the starting end.
struct Said {
    /// Messages per second.
    rate: f64,
    /// Microseconds of a message.
    percentile: f64,
}

/// Runs the program at both ends.
fn measure(stage: &mut Stage<'_>, test: &str, size: u32, n: u64, rank: &str) -> Outcome<Option<Said>> {
    let deadline = Instant::now() + PATIENCE;
    if !stage.starts() {
        let port = TcpListener::bind((stage.job.addresses[0], 0))?.local_addr()?.port();
        let server = Stopped(command(port).spawn().map_err(missing)?);
        stage.peer.tell(&port)?;
        stage.peer.hear::<()>()?;
        drop(server);
        return Ok(None);
    }
    let (port, to): (u16, IpAddr) = (stage.peer.hear()?, stage.job.addresses[1]);
    let (size, count, warm_up) = (size.to_string(), n.to_string(), (n / 8).to_string());
    let said = loop {
        let mut client = command(port);
        client.arg(to.to_string()).args(["-t", test, "-s", &size, "-n", &count, "-w", &warm_up, "-R", rank]);
        let Output { status, stdout, stderr } = client.output().map_err(missing)?;
        if status.success() {
            break String::from_utf8_lossy(&stdout).into_owned();
        }
        // The server listens soon; there is no signal for it.
        if Instant::now() > deadline {
            return Err(format!("{PROGRAM}: {}", String::from_utf8_lossy(&stderr).trim()).into());
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    stage.peer.tell(&())?;
    read(&said).map(Some).ok_or_else(|| format!("{PROGRAM} printed no figures: {}", said.trim()).into())
}

fn command(port: u16) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(["-v", "-p", &port.to_string()]).env("UCX_TLS", "tcp").env("UCX_LOG_LEVEL", "error");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn missing(error: std::io::Error) -> String {
    format!("{PROGRAM} (package ucx-utils): {error}")
}

/// Parses the last line of numbers: iterations, percentile, latency in the last second and overall, MB/s in the last
/// second and overall, messages per second in the last second and overall.
fn read(said: &str) -> Option<Said> {
    let row = said.lines().rev().find(|line| line.starts_with(|c: char| c.is_ascii_digit()))?;
    let columns: Vec<f64> = row.split(',').map(str::parse).collect::<Result<_, _>>().ok()?;
    match columns[..] {
        [_, percentile, _, _, _, _, _, rate] => Some(Said { rate, percentile }),
        _ => None,
    }
}

fn version() -> Outcome<String> {
    let info = Command::new("ucx_info").arg("-v").output().map_err(missing)?;
    let text = String::from_utf8_lossy(&info.stdout);
    let line = text.lines().find(|line| line.contains("ersion")).unwrap_or("of an unknown version");
    Ok(line.trim_start_matches(['#', ' ']).to_owned())
}
