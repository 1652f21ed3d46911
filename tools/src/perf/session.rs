//! What both ends of a measurement share: queue pairs, memory, and a poll loop that also detects that the other end is
//! gone.
//!
//! `Session` works for ferroce's own protocol and for that of perftest; the control connection is a `Beside`.

mod lanes;
mod offer;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use ferroce::{
    Counter, Destination, Mr, Nanos, Psn, Qp, Qpn, RemoteAddress, Transition, WcStatus, WorkCompletion,
};
use ferroce_driver::gpu::Device;
use tracing::warn;

use super::control::PerfControl;
use super::message::PerfMessage;
use super::pattern::Origin;
use super::plan::{Layout, Operation, Plan};
use crate::endpoint::{Endpoint, RETRY_COUNT};
use crate::failure::{Failure, legible};
use crate::memory::MemorySpec;
use crate::progress::Progress;

/// One end of a measurement, with the TCP connection beside it.
pub(super) struct Session<C = PerfControl> {
    // Before the connection, whose end tells that the port is closed.
    pub(super) end: Endpoint,
    pub(super) control: C,
    pub(super) plan: Plan,
    /// Which end this is.
    pub(super) role: Origin,
    /// Of this end, and the GPU if it is one's.
    pub(super) memory: MemorySpec,
    gpu: Option<Arc<dyn Device>>,
    pub(super) lanes: Vec<QpLane>,
    regions: Option<Regions>,
    /// When the control connection was looked at, heard from, and last spoken to.
    looked: Nanos,
    heard: Nanos,
    spoke: Nanos,
    /// How many packets had come when they were counted, and since when there are no more.
    packets: u64,
    quiet: Nanos,
    /// The other end has ended its part of the lap: what has not come of it is lost.
    over: bool,
    /// Requests of the operation that had come before the lap.
    earlier: u64,
    /// Messages that this end has sent, and the line about them now and then.
    moved: u64,
    progress: Progress,
    /// The other end is gone, as its control connection tells; what is under way has until then to end by itself.
    lost: Option<(Nanos, &'static str)>,
}

/// What a session must know of the TCP connection beside it, whatever is spoken there.
pub(super) trait Beside {
    /// Whether both ends say now and then that they are still there.
    const HEARTBEATS: bool;
    /// What may be the matter if the other end goes too early.
    const ADVICE: &'static str;
    /// What may be the matter if it does not answer.
    const UNANSWERED: &'static str;

    /// Takes what has arrived. Returns whether there was anything, and whether more may come.
    fn receive(&mut self) -> Result<(bool, bool), Failure>;

    /// Whether something has arrived that is waited for, and not taken yet.
    fn has_message(&self) -> bool;

    /// Says that this end is still there.
    fn keep_alive(&mut self) -> Result<(), Failure>;

    /// Whether the other end has ended its part, where no packet has come for so long.
    fn is_over(&self, quiet: Duration) -> bool;

    /// Why nothing more will come of it, where no packet has come for so long.
    fn stuck(&self, quiet: Duration) -> Option<String>;
}

/// A queue pair and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpLane {
    qp: Qp,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    /// Where this queue pair's messages start in the other end's memory.
    remote: RemoteAddress,
    /// Where its datagrams go.
    to: Option<Destination>,
    /// Sends posted and completed in this lap.
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// Receives wanted, posted and completed in this lap.
    expected: u64,
    receives: u64,
    pub(super) received: u64,
    /// Messages of earlier laps; for atomics the value of the server's counter.
    counted: u64,
}

#[derive(Clone, Copy)]
struct Regions {
    /// What this end sends, or the other end reads.
    source: Mr,
    source_layout: Layout,
    /// What arrives at this end.
    sink: Mr,
    sink_layout: Layout,
}

const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// The other end is taken for dead after so long without a word, and what is under way then has no longer either.
const LONGEST_SILENCE: Duration = Duration::from_secs(15);
/// After the last packet, when the other end has sent everything.
const LATE: Duration = Duration::from_millis(300);
/// What has not come by then is lost.
const LOST: Duration = Duration::from_secs(2);
/// A work request on its way, in the upper half of its `wr_id`; the lower is its lane.
const SENT: u64 = 0;
const RECEIVED: u64 = 1;
/// Receives nothing, but ends when the queue pair does.
const SENTINEL: u64 = 2;

impl<C: Beside> Session<C> {
    /// `interval` is that of lines about progress.
    ///
    /// # Errors
    /// The GPU whose memory is to be used can't be opened.
    pub(super) fn new(
        mut end: Endpoint,
        control: C,
        plan: Plan,
        role: Origin,
        (memory, interval): (MemorySpec, Duration),
    ) -> Result<Session<C>, Failure> {
        let now = end.now();
        Ok(Session {
            end,
            memory,
            gpu: memory.open()?,
            control,
            plan,
            role,
            lanes: Vec::new(),
            regions: None,
            looked: now,
            heard: now,
            spoke: now,
            packets: 0,
            quiet: now,
            over: false,
            earlier: 0,
            moved: 0,
            progress: Progress::start(interval, now),
            lost: None,
        })
    }

    /// One turn of the loop: frames, completions, and now and then the control connection.
    ///
    /// # Errors
    /// A completion in error; the other end's failure. Where the other end is gone without a word,
    /// the work under way ends in error within its retries, and what waits for it is flushed.
    pub(super) fn turn(&mut self) -> Result<(), Failure> {
        self.end.poll()?;
        while let Some(wc) = self.end.completion()? {
            self.account(&wc)?;
        }
        let now = self.end.now();
        if now.since(self.looked) >= LOOK_INTERVAL {
            self.looked = now;
            self.look(now)?;
        }
        Ok(())
    }

    /// Turns until all that was posted is complete.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        while self.lanes.iter().any(|lane| lane.completed < lane.posted) {
            self.turn()?;
        }
        Ok(())
    }

    /// What this end has sent in the lap.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.lanes.iter().map(|lane| lane.posted).collect()
    }

    /// How much of what this end has sent in the lap is complete.
    pub(super) fn completed(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.completed).sum()
    }

    /// How long no packet has come.
    pub(super) fn quiet(&mut self) -> Duration {
        let now = self.end.now();
        now.since(self.quiet)
    }

    /// Keeps all lanes busy, up to so many messages on each. Returns whether something is left to be done.
    pub(super) fn keep_busy(&mut self, targets: &[u64], open: bool) -> Result<bool, Failure> {
        let depth = u64::from(self.plan.tx_depth);
        let mut left = false;
        for (index, target) in targets.iter().enumerate() {
            while open
                && self.lanes[index].posted < *target
                && self.lanes[index].posted - self.lanes[index].completed < depth
            {
                self.post(index)?;
            }
            let lane = self.lanes[index];
            left |= lane.completed < lane.posted || (open && lane.posted < *target);
        }
        Ok(left)
    }

    /// Turns until so many messages have come on each lane, or, over a service that may lose them, until no
    /// more come. Returns how many are lost. `all_sent`: the other end has said that it is done.
    pub(super) fn await_messages(&mut self, messages: &[u64], all_sent: bool) -> Result<u64, Failure> {
        let wanted: u64 = messages.iter().sum();
        loop {
            let missing = wanted.saturating_sub(self.arrived());
            let is_over = self.over || (all_sent && self.quiet() > LATE);
            if missing == 0 || (is_over && !self.plan.is_reliable()) {
                if missing == wanted && wanted > 0 {
                    let evidence = self.end.evidence();
                    return Err(Failure::run(format!("none of {wanted} messages has arrived{evidence}")));
                }
                return Ok(missing);
            }
            self.turn()?;
        }
    }

    /// Turns until no more packets come, where nobody has waited for their acknowledgement; so does an end that
    /// takes requests for those of another service, if none has come here.
    pub(super) fn drain(&mut self) -> Result<(), Failure> {
        while (!self.plan.is_reliable() || self.requests() == 0) && self.quiet() < LATE {
            self.turn()?;
        }
        Ok(())
    }

    /// Messages of the lap that have come, as far as anything tells.
    pub(super) fn arrived(&self) -> u64 {
        match self.plan.operation {
            Operation::Send => self.lanes.iter().map(|lane| lane.received).sum(),
            _ => self.requests(),
        }
    }

    /// Requests of the lap that have come.
    pub(super) fn requests(&self) -> u64 {
        self.all_requests() - self.earlier
    }

    fn all_requests(&self) -> u64 {
        self.end.context.counters().value(match self.plan.operation {
            Operation::Write | Operation::Send => Counter::RxWriteRequests,
            Operation::Read => Counter::RxReadRequests,
            Operation::Atomic => Counter::RxAtomicRequests,
        })
    }

    /// Fails if a message or its answer is lost, and nothing will repeat it, or the other end sends no more.
    pub(super) fn check_lost(&mut self, message: u64) -> Result<(), Failure> {
        let quiet = self.quiet();
        if self.plan.is_reliable() {
            return Ok(());
        }
        self.check_stuck(quiet)?;
        if quiet < LOST {
            return Ok(());
        }
        let (service, evidence) = (self.plan.service.name(), self.end.evidence());
        Err(Failure::run(format!(
            "message {message} or its answer is lost, and {service} does not retransmit{evidence}"
        )))
    }

    fn check_stuck(&self, quiet: Duration) -> Result<(), Failure> {
        match self.control.stuck(quiet) {
            Some(reason) => Err(Failure::run(reason + &self.end.evidence())),
            None => Ok(()),
        }
    }

    fn regions(&self) -> Result<Regions, Failure> {
        self.regions.ok_or_else(|| Failure::run("no queue pairs are connected yet"))
    }

    fn account(&mut self, wc: &WorkCompletion) -> Result<(), Failure> {
        let (kind, index) = (wc.wr_id >> 32, (wc.wr_id & 0xffff_ffff) as usize);
        let lane = &mut self.lanes[index];
        if wc.status != WcStatus::Success {
            let work = match kind {
                SENT => format!("{:?} {}", self.plan.operation, lane.completed).to_uppercase(),
                RECEIVED => format!("receive {}", lane.received),
                _ => "receive".into(),
            };
            if kind == SENTINEL && wc.status == WcStatus::LocLenErr {
                return Err(self.out_of_place());
            }
            let mut reason = self.end.failed(wc, &work).to_string();
            if wc.status == WcStatus::RetryExcErr {
                reason += C::UNANSWERED;
            }
            if let Some((_, how)) = self.lost {
                reason = format!("{}; {reason}", gone::<C>(how));
            }
            return Err(Failure::Run(reason));
        }
        match kind {
            SENT => {
                lane.completed += 1;
                self.moved += 1;
            }
            RECEIVED => {
                self.check_length(wc.byte_len)?;
                let lane = &mut self.lanes[index];
                lane.received += 1;
                self.post_receives(index)?;
            }
            _ => return Err(self.out_of_place()),
        }
        Ok(())
    }

    /// What a SEND is where nothing is received.
    fn out_of_place(&self) -> Failure {
        let name = self.plan.name();
        Failure::run(format!(
            "the other end sent a SEND, and this is `perf {name}`: both need the same operation"
        ))
    }

    /// Fails if a message that has come is not as long as those that are measured.
    fn check_length(&self, length: u32) -> Result<(), Failure> {
        let size = self.regions()?.sink_layout.size;
        let length = length.saturating_sub(self.plan.header());
        if length == size {
            return Ok(());
        }
        Err(Failure::run(format!(
            "a message of {length} bytes arrived instead of {size}: both ends need the same size (-s)"
        )))
    }

    /// What this end has sent, and what has come to it; an echo is no message of its own.
    pub(super) fn traffic(&self) -> u64 {
        if self.plan.echoes() { self.moved } else { self.moved + self.all_requests() }
    }

    fn look(&mut self, now: Nanos) -> Result<(), Failure> {
        if let Some(regions) = self.regions {
            self.progress.tell(now, self.traffic(), regions.source_layout.size);
        }
        self.end.check_service()?;
        let packets = self.end.context.counters().value(Counter::RcvdPkts);
        if packets != self.packets {
            (self.packets, self.quiet) = (packets, now);
        }
        if let Some((deadline, how)) = self.lost {
            return if now >= deadline { self.flush(how) } else { Ok(()) };
        }
        let (any, open) = self.control.receive()?;
        if any {
            self.heard = now;
        }
        // What it said before it went is heard first.
        if self.control.has_message() {
            return Ok(());
        }
        let silent = C::HEARTBEATS && now.since(self.heard) > LONGEST_SILENCE;
        if !open || silent {
            return self.lose(now, if open { "is silent" } else { "is closed" });
        }
        self.over |= self.control.is_over(now.since(self.quiet));
        if self.over && !self.plan.is_reliable() {
            return Ok(());
        }
        self.check_stuck(now.since(self.quiet))?;
        if now.since(self.spoke) > HEARTBEAT {
            self.spoke = now;
            self.control.keep_alive()?;
        }
        Ok(())
    }

    fn lose(&mut self, now: Nanos, how: &'static str) -> Result<(), Failure> {
        if self.lanes.is_empty() {
            return Err(Failure::run(gone::<C>(how) + &self.end.evidence()));
        }
        // What nothing repeats ends at once.
        let under_way = self.plan.is_reliable() && self.lanes.iter().any(|lane| lane.completed < lane.posted);
        let patience =
            if under_way { retry_budget(self.plan.timeout).min(LONGEST_SILENCE) } else { Duration::ZERO };
        if under_way {
            warn!("{}; outstanding work has {:.1} s to complete", gone::<C>(how), patience.as_secs_f64());
        }
        self.lost = Some((now + patience, how));
        Ok(())
    }

    /// Ends all work in error; never returns `Ok`.
    fn flush(&mut self, how: &str) -> Result<(), Failure> {
        for lane in &self.lanes {
            self.end.context.modify_qp(lane.qp, Transition::Error)?;
        }
        while let Some(wc) = self.end.completion()? {
            self.account(&wc)?;
        }
        Err(Failure::run(gone::<C>(how) + &self.end.evidence()))
    }
}

/// The cause, which stands before what follows from it.
fn gone<C: Beside>(how: &str) -> String {
    format!("the other end has ended: its control connection {how}{}", C::ADVICE)
}

pub(super) fn unexpected(message: &PerfMessage) -> Failure {
    Failure::run(format!("the other end sent {}, which was not expected", legible(&format!("{message:?}"))))
}

/// How long a work request may take to run out of retries: the timer may run to four times its
/// nominal value (IBA o9-92), and there is a first try.
fn retry_budget(timeout: u8) -> Duration {
    let nominal = Duration::from_nanos(4096 << timeout.min(31));
    4 * (u32::from(RETRY_COUNT) + 1) * nominal + Duration::from_millis(500)
}
