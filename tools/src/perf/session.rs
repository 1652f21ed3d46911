//! The common part of both ends of a measurement: queue pairs, memory, and a poll loop that also detects that the other
//! end is gone.
//!
//! `Session` supports ferroce's own protocol and that of perftest; the control connection is a `Beside`.

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

/// One end of a measurement, with its TCP connection.
pub(super) struct Session<C = PerfControl> {
    // Declared before the connection, so it is dropped first: the end of the connection signals that the port is
    // closed.
    pub(super) end: Endpoint,
    pub(super) control: C,
    pub(super) plan: Plan,
    /// Client or server.
    pub(super) role: Origin,
    /// The memory of this end, and the GPU that has it.
    pub(super) memory: MemorySpec,
    gpu: Option<Arc<dyn Device>>,
    pub(super) lanes: Vec<QpLane>,
    regions: Option<Regions>,
    /// Times of the last check of the control connection, the last message received, and the last one sent.
    looked: Nanos,
    heard: Nanos,
    spoke: Nanos,
    /// The packet count at the last check, and the time since which it has not changed.
    packets: u64,
    quiet: Nanos,
    /// The other end has finished its part of the lap: messages of it that have not arrived are lost.
    over: bool,
    /// Requests of the operation that arrived before the lap.
    earlier: u64,
    /// Messages that this end has sent, and the progress line about them.
    moved: u64,
    progress: Progress,
    /// The control connection is lost. Outstanding work may complete until this time.
    lost: Option<(Nanos, &'static str)>,
}

/// The session's view of its TCP connection, independent of the protocol.
pub(super) trait Beside {
    /// Whether both ends send heartbeats.
    const HEARTBEATS: bool;
    /// A hint for the case that the other end closes too early.
    const ADVICE: &'static str;
    /// A hint for the case that it does not answer.
    const UNANSWERED: &'static str;

    /// Reads from the connection. Returns whether anything was read, and whether the connection is open.
    fn receive(&mut self) -> Result<(bool, bool), Failure>;

    /// Whether an unread message has arrived that is waited for.
    fn has_message(&self) -> bool;

    /// Sends a heartbeat.
    fn keep_alive(&mut self) -> Result<(), Failure>;

    /// Whether the other end has finished its part, given the time since the last packet.
    fn is_over(&self, quiet: Duration) -> bool;

    /// The reason that nothing more will arrive, given the time since the last packet.
    fn stuck(&self, quiet: Duration) -> Option<String>;
}

/// A queue pair and its progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct QpLane {
    qp: Qp,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    /// The start of this queue pair's messages in the other end's memory.
    remote: RemoteAddress,
    /// The destination of its datagrams.
    to: Option<Destination>,
    /// Send WRs that were posted and completed in this lap.
    pub(super) posted: u64,
    pub(super) completed: u64,
    /// Receive WRs that are needed, were posted and were completed in this lap.
    expected: u64,
    receives: u64,
    pub(super) received: u64,
    /// Messages of earlier laps; for atomics the value of the server's counter.
    counted: u64,
}

#[derive(Clone, Copy)]
struct Regions {
    /// Memory that this end sends from, or that the other end reads.
    source: Mr,
    source_layout: Layout,
    /// Memory for data that arrives at this end.
    sink: Mr,
    sink_layout: Layout,
}

const LOOK_INTERVAL: Duration = Duration::from_millis(1);
const HEARTBEAT: Duration = Duration::from_secs(1);
/// Without a message for this long, the other end is considered dead. This is also the limit for outstanding work to
/// complete.
const LONGEST_SILENCE: Duration = Duration::from_secs(15);
/// The wait for late packets after the other end has sent everything.
const LATE: Duration = Duration::from_millis(300);
/// Without a packet for this long, what is missing is lost.
const LOST: Duration = Duration::from_secs(2);
/// A send WR. The kind is in the upper half of the `wr_id`, the lane in the lower half.
const SENT: u64 = 0;
const RECEIVED: u64 = 1;
/// A receive WR that gets no message, and completes when the queue pair enters the error state.
const SENTINEL: u64 = 2;

impl<C: Beside> Session<C> {
    /// `interval` is that of progress lines.
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

    /// One iteration of the poll loop: frames, completions, and from time to time the control connection.
    ///
    /// # Errors
    /// A completion in error, or a failure of the other end. If the other end is gone without a message, the
    /// outstanding work fails when its retries are exhausted, and queued work is flushed.
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

    /// Polls until all posted work requests are complete.
    pub(super) fn settle(&mut self) -> Result<(), Failure> {
        while self.lanes.iter().any(|lane| lane.completed < lane.posted) {
            self.turn()?;
        }
        Ok(())
    }

    /// The messages that this end has sent in the lap, by lane.
    pub(super) fn sent(&self) -> Vec<u64> {
        self.lanes.iter().map(|lane| lane.posted).collect()
    }

    /// The messages of this lap that are complete at this end.
    pub(super) fn completed(&self) -> u64 {
        self.lanes.iter().map(|lane| lane.completed).sum()
    }

    /// The time since the last packet.
    pub(super) fn quiet(&mut self) -> Duration {
        let now = self.end.now();
        now.since(self.quiet)
    }

    /// Keeps all lanes busy, up to `targets` messages on each. Returns whether work is left.
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

    /// Polls until `messages` have arrived on each lane, or, over an unreliable service, until no more arrive. Returns
    /// the number of lost messages. `all_sent`: the other end has reported that it is done.
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

    /// Polls until no more packets arrive, if the sender does not wait for acknowledgements. The same if no request of
    /// this operation has arrived: the other end may use another service.
    pub(super) fn drain(&mut self) -> Result<(), Failure> {
        while (!self.plan.is_reliable() || self.requests() == 0) && self.quiet() < LATE {
            self.turn()?;
        }
        Ok(())
    }

    /// Messages of the lap that have arrived, as far as is known.
    pub(super) fn arrived(&self) -> u64 {
        match self.plan.operation {
            Operation::Send => self.lanes.iter().map(|lane| lane.received).sum(),
            _ => self.requests(),
        }
    }

    /// Requests of the lap that have arrived.
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

    /// Fails if a message or its answer is lost and is not retransmitted, or if the other end sends no more.
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

    /// The error for a SEND that no receive WR is meant for.
    fn out_of_place(&self) -> Failure {
        let name = self.plan.name();
        Failure::run(format!(
            "the other end sent a SEND, and this is `perf {name}`: both need the same operation"
        ))
    }

    /// Fails if a received message has an unexpected length.
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

    /// Messages that this end has sent and received; echoes are not counted.
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
        // A message that the other end sent before it closed is processed first.
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
        // Over an unreliable service nothing is retransmitted, so there is nothing to wait for.
        let under_way = self.plan.is_reliable() && self.lanes.iter().any(|lane| lane.completed < lane.posted);
        let patience =
            if under_way { retry_budget(self.plan.timeout).min(LONGEST_SILENCE) } else { Duration::ZERO };
        if under_way {
            warn!("{}; outstanding work has {:.1} s to complete", gone::<C>(how), patience.as_secs_f64());
        }
        self.lost = Some((now + patience, how));
        Ok(())
    }

    /// Moves all queue pairs to the error state; never returns `Ok`.
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

/// The cause, which precedes its consequences in a message.
fn gone<C: Beside>(how: &str) -> String {
    format!("the other end has ended: its control connection {how}{}", C::ADVICE)
}

pub(super) fn unexpected(message: &PerfMessage) -> Failure {
    Failure::run(format!("the other end sent {}, which was not expected", legible(&format!("{message:?}"))))
}

/// The longest time until a work request exhausts its retries: the timer may run up to four times its nominal value
/// (IBA o9-92), and the first transmission counts as well.
fn retry_budget(timeout: u8) -> Duration {
    let nominal = Duration::from_nanos(4096 << timeout.min(31));
    4 * (u32::from(RETRY_COUNT) + 1) * nominal + Duration::from_millis(500)
}
