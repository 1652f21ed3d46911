//! Starts the ranks as processes or as threads, reads what they report, and ends them.

use std::any::Any;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use super::rank::RankEvent;

/// An event of a rank.
#[derive(Debug)]
pub(super) enum RankNotice {
    /// Reported by the rank.
    Event(RankEvent),
    /// The rank has ended, for this reason.
    Gone(String),
}

/// The ranks of a demo. On drop they are told to stop; processes that don't are killed, by process id.
pub(super) struct Supervisor {
    ranks: Vec<Rank>,
    /// Tells threads to stop; processes stop at the end of their standard input.
    stop: Arc<AtomicBool>,
    sender: Sender<(u32, RankOutput)>,
    receiver: Receiver<(u32, RankOutput)>,
}

enum Rank {
    Process(Child),
    Thread(Option<JoinHandle<()>>),
}

enum RankOutput {
    Event(RankEvent),
    /// A line that is not an event.
    Garbled(String),
    /// The rank has closed its output.
    Closed,
}

/// The time for a rank to stop once told to.
const GRACE: Duration = Duration::from_secs(1);

impl Supervisor {
    /// No ranks yet.
    pub(super) fn new() -> Supervisor {
        let (sender, receiver) = mpsc::channel();
        Supervisor { ranks: Vec::new(), stop: Arc::default(), sender, receiver }
    }

    /// Starts the next rank as a process. It reports its events on standard output, one per line, and ends at the end
    /// of its standard input.
    ///
    /// # Errors
    /// It can't be started.
    pub(super) fn start_process(&mut self, command: &mut Command) -> std::io::Result<()> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        // A process group of its own: Ctrl-C is delivered to the demo only, which ends its ranks in good order.
        let mut child = command.process_group(0).spawn()?;
        let stdout = child.stdout.take();
        let rank = self.ranks.len() as u32;
        self.ranks.push(Rank::Process(child));
        let sender = self.sender.clone();
        thread::spawn(move || {
            for line in stdout.into_iter().flat_map(|stdout| BufReader::new(stdout).lines()) {
                let heard = match line {
                    Ok(line) => {
                        serde_json::from_str(&line).map_or(RankOutput::Garbled(line), RankOutput::Event)
                    }
                    Err(error) => RankOutput::Garbled(error.to_string()),
                };
                let _ = sender.send((rank, heard));
            }
            let _ = sender.send((rank, RankOutput::Closed));
        });
        Ok(())
    }

    /// Starts the next rank as a thread. `run` gets the flag that tells it to stop, and a function that reports an
    /// event.
    pub(super) fn start_thread(
        &mut self,
        run: impl FnOnce(Arc<AtomicBool>, &mut dyn FnMut(RankEvent)) + Send + 'static,
    ) {
        let rank = self.ranks.len() as u32;
        let closing = Closing { rank, sender: self.sender.clone() };
        let stop = self.stop.clone();
        let thread = thread::spawn(move || {
            run(stop, &mut |event| {
                let _ = closing.sender.send((closing.rank, RankOutput::Event(event)));
            });
        });
        self.ranks.push(Rank::Thread(Some(thread)));
    }

    /// The number of started ranks.
    pub(super) fn len(&self) -> usize {
        self.ranks.len()
    }

    /// The next event and its rank; `None` after `timeout`.
    pub(super) fn next(&mut self, timeout: Duration) -> Option<(u32, RankNotice)> {
        let (rank, heard) = match self.receiver.recv_timeout(timeout) {
            Ok(heard) => heard,
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
        };
        let message = match heard {
            RankOutput::Event(event) => RankNotice::Event(event),
            RankOutput::Garbled(line) => RankNotice::Gone(format!("printed an unexpected line: {line}")),
            RankOutput::Closed => RankNotice::Gone(self.ranks[rank as usize].end()),
        };
        Some((rank, message))
    }

    /// The name of a rank: for a process, with its id.
    pub(super) fn name(&self, rank: u32) -> String {
        match &self.ranks[rank as usize] {
            Rank::Process(child) => format!("rank {rank} (process {})", child.id()),
            Rank::Thread(_) => format!("rank {rank}"),
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for rank in &mut self.ranks {
            if let Rank::Process(child) = rank {
                drop(child.stdin.take());
            }
        }
        let deadline = Instant::now() + GRACE;
        for rank in &mut self.ranks {
            while !rank.has_ended() && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(2));
            }
            if let Rank::Process(child) = rank {
                let _ = child.kill();
                let _ = child.wait();
            }
        }
    }
}

impl Rank {
    fn has_ended(&mut self) -> bool {
        match self {
            Rank::Process(child) => !matches!(child.try_wait(), Ok(None)),
            Rank::Thread(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
        }
    }

    /// Waits for the end of the rank and says how it ended.
    fn end(&mut self) -> String {
        match self {
            Rank::Process(child) => match child.wait() {
                Ok(status) => format!("ended with {status}"),
                Err(error) => format!("can't be waited for: {error}"),
            },
            Rank::Thread(thread) => match thread.take().map(JoinHandle::join) {
                Some(Err(panic)) => format!("panicked: {}", panic_message(&*panic)),
                _ => "ended".to_owned(),
            },
        }
    }
}

/// Reports the end of a thread, even if it panics.
struct Closing {
    rank: u32,
    sender: Sender<(u32, RankOutput)>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        let _ = self.sender.send((self.rank, RankOutput::Closed));
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("(no message)")
}
