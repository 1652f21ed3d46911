//! Ranks as processes of this program: starting and watching them.
//!
//! A rank reports its events on standard output, one per line. It ends when the process that started it ends.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_collectives::flight::FOLDER;
use ferroce_collectives::{Bootstrap, UniqueId};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};
use signal_hook::consts::SIGUSR1;
use signal_hook::flag;

use super::rank;
use super::report::{Event, Printer};
use super::{Args, LOCAL_SIZES};
use crate::endpoint::Interrupt;
use crate::failure::{Failure, OrFail};

/// How often an interruption is checked for.
const TICK: Duration = Duration::from_millis(50);

/// Starts the ranks and prints the events of rank 0 until all ranks have ended.
pub(super) fn run(args: &Args, ranks: u32, printer: &mut Printer) -> Result<(), Failure> {
    let interrupt = Interrupt::install()?;
    let (id, listener) = UniqueId::listen((Ipv4Addr::LOCALHOST, 0).into())?;
    let mut listener = Some(listener);
    let mut job = Job::new(args.operation.to_string());
    for rank in 0..ranks {
        // Only rank 0 takes the listener; it is started first.
        job.start(args, rank, ranks, id, listener.take())?;
    }
    let wanted = Arc::new(AtomicBool::new(false));
    flag::register(SIGUSR1, wanted.clone()).or_fail(|| "handling signals".into())?;
    while job.ranks.iter().any(|rank| !rank.has_ended) {
        interrupt.check()?;
        if wanted.swap(false, Ordering::Relaxed) {
            job.signal(Signal::USR1);
        }
        let Some((rank, heard)) = job.next() else { continue };
        match heard {
            Heard::Event(event) => match *event {
                Event::Failed { is_usage: true, reason } => return Err(Failure::usage(reason)),
                Event::Failed { is_usage: false, reason } => {
                    job.let_them_record(args, &interrupt);
                    return Err(job.failed(rank, &format!("failed: {reason}"), printer));
                }
                event => printer.hear(event)?,
            },
            Heard::Garbled(line) => {
                return Err(job.failed(rank, &format!("printed an unexpected line: '{line}'"), printer));
            }
            Heard::End => {
                if let Some(how) = job.end(rank)? {
                    interrupt.check()?;
                    job.let_them_record(args, &interrupt);
                    return Err(job.failed(rank, &how, printer));
                }
            }
        }
    }
    Ok(())
}

/// Runs as a rank that process `parent` has started.
pub(super) fn rank(args: &Args, parent: u32) -> Result<ExitCode, Failure> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(io::Error::from)
        .or_fail(|| "registering for the end of the parent process".to_owned())?;
    // The parent may have ended before this process asked to be notified of its end.
    if getppid().map(Pid::as_raw_nonzero).map(|id| id.get() as u32) != Some(parent) {
        return Err(Failure::run(format!("process {parent}, which started this rank, has ended")));
    }
    let mut tell = |event| {
        let line =
            serde_json::to_string(&event).map_err(|error| Failure::run(format!("an event: {error}")))?;
        writeln!(io::stdout(), "{line}").or_fail(|| "standard output".to_owned())
    };
    let result = bootstrap().and_then(|bootstrap| rank::run(args, bootstrap, &mut tell));
    if let Err(failure) = result {
        let is_usage = matches!(failure, Failure::Usage(_));
        tell(Event::Failed { is_usage, reason: failure.to_string() })?;
        return Ok(failure.exit_code());
    }
    Ok(ExitCode::SUCCESS)
}

/// Rank 0 inherits the listener as its standard input.
fn bootstrap() -> Result<Bootstrap, Failure> {
    let bootstrap = Bootstrap::from_env()?;
    if bootstrap.rank() > 0 {
        return Ok(bootstrap);
    }
    let listener = io::stdin().as_fd().try_clone_to_owned().or_fail(|| "the listener".to_owned())?;
    Ok(bootstrap.listener(TcpListener::from(listener)))
}

/// The rank processes. Those that have not ended are killed on drop, by process id.
struct Job {
    /// The operation that they carry out.
    operation: String,
    ranks: Vec<Rank>,
    sender: Sender<(usize, Heard)>,
    receiver: Receiver<(usize, Heard)>,
}

struct Rank {
    process: Child,
    has_ended: bool,
}

/// An event of a rank.
enum Heard {
    Event(Box<Event>),
    /// A line that is not an event.
    Garbled(String),
    /// The rank has closed its output.
    End,
}

impl Job {
    fn new(operation: String) -> Job {
        let (sender, receiver) = channel();
        Job { operation, ranks: Vec::new(), sender, receiver }
    }

    fn start(
        &mut self,
        args: &Args,
        rank: u32,
        ranks: u32,
        id: UniqueId,
        listener: Option<TcpListener>,
    ) -> Result<(), Failure> {
        let program = std::env::current_exe().or_fail(|| "finding this program's file".to_owned())?;
        let mut command = Command::new(program);
        command.arg("collective").args(args.to_arguments());
        command.args(["--as-rank-of", &std::process::id().to_string()]);
        command.env("FERROCE_UNIQUE_ID", id.to_string());
        command.env("FERROCE_RANK", rank.to_string()).env("FERROCE_SIZE", ranks.to_string());
        command.env(LOCAL_SIZES[0], ranks.to_string());
        if std::env::var_os("RUST_LOG").is_none() {
            // The header already reports where the ranks are.
            command.env("RUST_LOG", "warn");
        }
        command.stdin(listener.map_or_else(Stdio::null, |listener| OwnedFd::from(listener).into()));
        // A process group of its own: Ctrl-C is delivered to this process only, which then ends its ranks.
        command.stdout(Stdio::piped()).process_group(0);
        let mut process = command.spawn().or_fail(|| format!("starting rank {rank}"))?;
        let stdout = process.stdout.take();
        self.ranks.push(Rank { process, has_ended: false });
        let sender = self.sender.clone();
        thread::spawn(move || {
            for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
                let heard = match line {
                    Ok(line) => serde_json::from_str(&line)
                        .map_or(Heard::Garbled(line), |event| Heard::Event(Box::new(event))),
                    Err(error) => Heard::Garbled(error.to_string()),
                };
                // The receiver may be gone.
                let _ = sender.send((rank as usize, heard));
            }
            let _ = sender.send((rank as usize, Heard::End));
        });
        Ok(())
    }

    fn next(&self) -> Option<(usize, Heard)> {
        self.receiver.recv_timeout(TICK).ok()
    }

    /// Waits for a rank that has closed its output. Returns how it ended, unless successfully.
    fn end(&mut self, rank: usize) -> Result<Option<String>, Failure> {
        let Rank { process, has_ended } = &mut self.ranks[rank];
        let status = process.wait().or_fail(|| format!("waiting for rank {rank}"))?;
        *has_ended = true;
        Ok((!status.success()).then(|| format!("ended with {status}")))
    }

    /// Forwards a signal to the ranks.
    fn signal(&self, signal: Signal) {
        for Rank { process, .. } in self.ranks.iter().filter(|rank| !rank.has_ended) {
            // The process is a child that has not been waited for, so its id can't have been reused.
            let _ = kill_process(Pid::from_child(process), signal);
        }
    }

    /// If recordings are requested: waits until the ranks have noticed that one has failed and have ended. Those that
    /// have not noticed it are sent SIGTERM, so that they record.
    fn let_them_record(&mut self, args: &Args, interrupt: &Interrupt) {
        /// To notice the failure, beyond the retry budget; and to write the file.
        const MORE: Duration = Duration::from_secs(1);
        if std::env::var_os(FOLDER).is_some()
            && !self.end_within(args.options().retry_budget() + MORE, interrupt)
        {
            self.signal(Signal::TERM);
            self.end_within(MORE, interrupt);
        }
    }

    /// Whether all ranks end within this time. An interruption ends the wait.
    fn end_within(&mut self, limit: Duration, interrupt: &Interrupt) -> bool {
        let start = Instant::now();
        loop {
            for Rank { process, has_ended } in &mut self.ranks {
                *has_ended = *has_ended || !matches!(process.try_wait(), Ok(None));
            }
            if self.ranks.iter().all(|rank| rank.has_ended) {
                return true;
            }
            if interrupt.is_set() || start.elapsed() > limit {
                return false;
            }
            thread::sleep(TICK);
        }
    }

    fn failed(&self, rank: usize, what: &str, printer: &Printer) -> Failure {
        let Job { operation, ranks, .. } = self;
        let id = ranks[rank].process.id();
        Failure::run(format!("{operation}: rank {rank} (process {id}) {what}{}", printer.progress()))
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for Rank { process, has_ended } in &mut self.ranks {
            if !*has_ended {
                let _ = process.kill();
                let _ = process.wait();
            }
        }
    }
}
