//! One of the two processes: this program, started with a job, on its own core.
//!
//! It communicates with the process that started it through lines on its standard input and output, and through that
//! process with the other end. It does not communicate during a measurement.

use std::io::{BufRead, Write};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use ferroce::driver::cycles::ThreadCycles;
use ferroce::driver::machine::LineTime;
use ferroce::{DeviceSpec, PacketDriver};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::case::{Case, Contender, Seen};
use crate::{raw, ring, sockets, ucx, verbs};

pub(crate) type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// The job of a process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    /// 0: the end that starts. 1: the other one.
    pub(crate) role: usize,
    pub(crate) core: Option<usize>,
    /// Of both ends, if there are two.
    pub(crate) cores: Option<[usize; 2]>,
    /// As `--device` of the command.
    pub(crate) device: String,
    pub(crate) path_mtu: u32,
    /// Of this end and the other one.
    pub(crate) addresses: [IpAddr; 2],
    pub(crate) cases: Vec<Case>,
    pub(crate) millis: u64,
    /// Whether it drops root's rights before it opens anything.
    pub(crate) as_nobody: bool,
    /// The name under which shared memory is passed.
    pub(crate) shared: String,
    pub(crate) contender: Contender,
}

/// The final answer of a process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Report {
    pub(crate) seen: Vec<Seen>,
    /// The driver's description of itself.
    pub(crate) description: String,
    /// The reason that cycles were not counted.
    pub(crate) no_cycles: Option<String>,
}

/// The prefix of lines: one for the other end, one with the report, one with the reason that there is none.
pub(crate) const TELL: &str = "> ";
pub(crate) const REPORT: &str = "= ";
pub(crate) const FAILED: &str = "! ";

/// Executes a job and reports.
pub(crate) fn main(job: &str) -> Outcome<()> {
    let report = serde_json::from_str::<Job>(job).map_err(Into::into).and_then(|job| run(&job));
    let (prefix, text) = match report {
        Ok(report) => (REPORT, serde_json::to_string(&report)?),
        Err(error) => (FAILED, error.to_string()),
    };
    println!("{prefix}{}", text.replace('\n', " "));
    Ok(())
}

fn run(job: &Job) -> Outcome<Report> {
    // Before the thread is pinned: the thread that reads lines may run anywhere.
    let mut peer = Peer::new();
    own_priority();
    if let Some(core) = job.core
        && !core_affinity::set_for_current(core_affinity::CoreId { id: core })
    {
        return Err(format!("this process may not run on core {core}").into());
    }
    if job.as_nobody {
        become_nobody()?;
    }
    let (cycles, no_cycles) = match ThreadCycles::open() {
        Ok(cycles) => (Some(cycles), None),
        Err(error) => (None, Some(error.to_string())),
    };
    let mut stage = Stage { job, peer: &mut peer, cycles, seen: Vec::new() };
    let description = match job.contender {
        Contender::Raw => raw::run(&mut stage)?,
        Contender::Ferroce => verbs::run(&mut stage)?,
        Contender::Tcp => sockets::tcp(&mut stage)?,
        Contender::Udp => sockets::udp(&mut stage)?,
        Contender::Ring => ring::run(&mut stage)?,
        Contender::Ucx => ucx::run(&mut stage)?,
    };
    // Neither port is closed while the other end still handles received data.
    stage.peer.meet()?;
    Ok(Report { seen: stage.seen, description, no_cycles })
}

/// The environment of cases.
pub(crate) struct Stage<'a> {
    pub(crate) job: &'a Job,
    pub(crate) peer: &'a mut Peer,
    cycles: Option<ThreadCycles>,
    seen: Vec<Seen>,
}

impl Stage<'_> {
    pub(crate) fn starts(&self) -> bool {
        self.job.role == 0
    }

    /// Opens the device of this end, after that of the starting end: a zero-copy client of a memif has only one attempt
    /// to find its server (DPDK 22.11 closes the memory that it offers, and can't offer it again).
    pub(crate) fn open_device(&mut self) -> Outcome<Box<dyn PacketDriver>> {
        if !self.starts() {
            self.peer.hear::<()>()?;
        }
        let driver = self.job.device.parse::<DeviceSpec>()?.open()?;
        let driver = driver.into_driver().map_err(|_| "an RNIC is no packet driver")?;
        if self.starts() {
            self.peer.tell(&())?;
        }
        Ok(driver)
    }

    /// The measured time of a case.
    pub(crate) fn time(&self) -> Duration {
        Duration::from_millis(self.job.millis)
    }

    /// The warm-up time of caches, rings and clocks.
    pub(crate) fn warm_up(&self) -> Duration {
        self.time() / 8
    }

    /// The bytes that messages cycle through. They fit into a second-level cache, unless a message is larger.
    pub(crate) fn footprint(size: usize) -> usize {
        size.max(FOOTPRINT)
    }

    /// Records the results of `case`, with the CPU time of this thread and with the machine's state before and after.
    pub(crate) fn record(&mut self, case: impl FnOnce(&mut Self) -> Outcome<Seen>) -> Outcome<()> {
        let state_before = self.line_nanos()?;
        let read = |stage: &Self| stage.cycles.as_ref().and_then(|cycles| cycles.read().ok());
        let (before, start) = ((thread_time(), read(self)), Instant::now());
        let mut seen = case(self)?;
        seen.wall_nanos = start.elapsed().as_nanos() as u64;
        seen.cpu_nanos = thread_time() - before.0;
        seen.cycles = read(self).zip(before.1).map(|(now, before)| now - before);
        seen.line_nanos = [state_before, self.line_nanos()?];
        self.seen.push(seen);
        Ok(())
    }

    /// The time of a cache line between the ends' cores. The starting end measures it, while the other one leaves its
    /// core idle.
    fn line_nanos(&mut self) -> Outcome<Option<u32>> {
        self.peer.meet()?;
        let cores = self.job.cores.filter(|_| self.starts());
        let line = cores.and_then(LineTime::between);
        self.peer.meet()?;
        Ok(line.map(|line| line.nanos))
    }
}

const FOOTPRINT: usize = 512 << 10;

/// The other end, through the process that started both.
pub(crate) struct Peer {
    lines: Receiver<String>,
}

/// The longest wait for the other end, unless it has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

impl Peer {
    fn new() -> Peer {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
            // The process that started this one is gone, so nobody reads a report.
            std::process::exit(1);
        });
        Peer { lines }
    }

    pub(crate) fn tell(&self, message: &impl Serialize) -> Outcome<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{TELL}{}", serde_json::to_string(message)?)?;
        Ok(out.flush()?)
    }

    pub(crate) fn hear<T: DeserializeOwned>(&mut self) -> Outcome<T> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Ok(serde_json::from_str(&line)?),
            Err(RecvTimeoutError::Timeout) => Err("the other end says nothing".into()),
            Err(RecvTimeoutError::Disconnected) => Err("nobody to hear from".into()),
        }
    }

    /// A message that the other end has sent meanwhile, if any.
    pub(crate) fn heard<T: DeserializeOwned>(&mut self) -> Outcome<Option<T>> {
        match self.lines.try_recv() {
            Ok(line) => Ok(Some(serde_json::from_str(&line)?)),
            Err(TryRecvError::Empty) => Ok(None),
            Err(TryRecvError::Disconnected) => Err("nobody to hear from".into()),
        }
    }

    /// Sends a message and receives one of the same type.
    pub(crate) fn exchange<T: Serialize + DeserializeOwned>(&mut self, message: &T) -> Outcome<T> {
        self.tell(message)?;
        self.hear()
    }

    /// Waits until both ends are here.
    pub(crate) fn meet(&mut self) -> Outcome<()> {
        self.exchange(&()).map(|_: ()| ())
    }
}

/// A deadline for loops that wait for the other end, checked from time to time.
pub(crate) struct Watch {
    start: Instant,
    turns: u32,
}

impl Watch {
    pub(crate) fn new() -> Watch {
        Watch { start: Instant::now(), turns: 0 }
    }

    /// Whether it is time to check more than the port: one turn in 512.
    pub(crate) fn due(&mut self) -> bool {
        self.turns = self.turns.wrapping_add(1);
        self.turns.is_multiple_of(512)
    }

    /// Fails after the deadline.
    pub(crate) fn check(&self) -> Outcome<()> {
        if self.start.elapsed() > PATIENCE { Err("the other end is silent".into()) } else { Ok(()) }
    }
}

/// The scheduler groups processes by terminal session. This leaves that group and raises the priority. Without the
/// right to do so, nothing changes.
fn own_priority() {
    let _ = rustix::process::setsid();
    let _ = std::fs::write("/proc/self/autogroup", "-20");
}

fn become_nobody() -> Outcome<()> {
    const NOBODY: u32 = 65534;
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    rustix::thread::set_thread_groups(&[])?;
    rustix::thread::set_thread_gid(rustix::thread::Gid::from_raw(NOBODY))?;
    rustix::thread::set_thread_uid(rustix::thread::Uid::from_raw(NOBODY))?;
    let status = std::fs::read_to_string("/proc/thread-self/status")?;
    match status.lines().find_map(|line| line.strip_prefix("CapEff:")) {
        Some(capabilities) if capabilities.trim().chars().all(|digit| digit == '0') => Ok(()),
        _ => Err("this thread is nobody now and has capabilities all the same".into()),
    }
}

fn thread_time() -> u64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
