//! What both ends of a measurement have in common: queue pairs, memory, and a poll loop that also
//! notices when the other end is gone.

use std::net::Ipv6Addr;
use std::time::Duration;

use ferroce::{
    Access, AddressVector, Counter, Data, Gid, Memory, Mr, Nanos, PathMtu, Psn, Qp, QpConfig, Qpn, RKey,
    ReceiveWorkRequest, RemoteAddress, RemoteMemory, SendFlags, SendOp, SendWorkRequest, Sge, Transition,
    WcStatus, WorkCompletion,
};
use tracing::warn;

use super::control::Control;
use super::message::{Message, Offer};
use super::pattern::{Origin, Pattern};
use super::plan::{AtomicType, Layout, Operation, Plan};
use crate::endpoint::{Endpoint, Path, RETRY_COUNT};
use crate::failure::{Failure, OrFail, legible};

/// One end of a measurement, with the TCP connection beside it.
pub(super) struct Session<C = Control> {
    // Before the connection, whose end tells that the port is closed.
    pub(super) end: Endpoint,
    pub(super) control: C,
    pub(super) plan: Plan,
    /// Which end this is.
    pub(super) role: Origin,
    pub(super) lanes: Vec<Lane>,
    regions: Option<Regions>,
    /// When the control connection was looked at, heard from, and last spoken to.
    looked: Nanos,
    heard: Nanos,
    spoke: Nanos,
    /// How many packets had come when they were counted, and since when there are no more.
    packets: u64,
    quiet: Nanos,
    /// The other end is gone; what is under way has until then to end by itself.
    lost: Option<Nanos>,
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

    /// Whether something has arrived that nobody has taken yet.
    fn has_message(&self) -> bool;

    /// Says that this end is still there.
    fn keep_alive(&mut self) -> Result<(), Failure>;

    /// Why nothing more will come of it, where no packet has come for so long.
    fn stuck(&self, quiet: Duration) -> Option<String>;
}

/// A queue pair and how far it has come.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lane {
    qp: Qp,
    pub(super) qpn: Qpn,
    pub(super) psn: Psn,
    /// Where this queue pair's messages start in the other end's memory.
    remote: RemoteAddress,
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
/// The other end is taken for dead after so long without a word.
const LONGEST_SILENCE: Duration = Duration::from_secs(15);
/// A work request on its way, in the upper half of its `wr_id`; the lower is its lane.
const SENT: u64 = 0;
const RECEIVED: u64 = 1;
/// Receives nothing, but ends when the queue pair does.
const SENTINEL: u64 = 2;

impl<C: Beside> Session<C> {
    pub(super) fn new(mut end: Endpoint, control: C, plan: Plan, role: Origin) -> Session<C> {
        let now = end.now();
        Session {
            end,
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
            lost: None,
        }
    }

    /// Makes memory that is laid out like that, a server's counters of atomics in their own way, and
    /// the queue pairs. Returns what the other end may reach.
    pub(super) fn create(&mut self, layout: Layout, counters: Layout) -> Result<RemoteMemory, Failure> {
        let Plan { operation, qps, tx_depth, rx_depth, .. } = self.plan;
        self.plan.check_size(layout.size)?;
        self.end.replace_cq(qps * (tx_depth.next_power_of_two() + rx_depth.next_power_of_two()))?;
        let regions = self.register(layout, counters)?;
        self.regions = Some(regions);
        let config = QpConfig {
            max_send_wr: tx_depth,
            max_recv_wr: rx_depth,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpConfig::rc(self.end.pd, self.end.cq)
        };
        for lane in 0..u64::from(qps) {
            let qp = self.end.context.create_qp(&config)?;
            self.end.context.modify_qp(qp, Transition::Init { access: self.exposed_access() })?;
            let qpn = self.end.context.query_qp(qp)?.qpn;
            if operation != Operation::Send {
                let wr_id = SENTINEL << 32 | lane;
                self.end.context.post_recv(qp, &ReceiveWorkRequest { wr_id, sges: &[] })?;
            }
            let psn = self.end.context.random_psn();
            self.lanes.push(Lane {
                qp,
                qpn,
                psn,
                remote: RemoteAddress { addr: 0, rkey: RKey(0) },
                posted: 0,
                completed: 0,
                expected: 0,
                receives: 0,
                received: 0,
                counted: 0,
            });
        }
        let exposed = if operation == Operation::Read { regions.source } else { regions.sink };
        Ok(self.end.context.remote(exposed)?)
    }

    /// Connects a queue pair to one of the other end, whose memory for it is at `remote`.
    pub(super) fn connect_lane(
        &mut self,
        index: usize,
        path: &Path,
        remote: RemoteAddress,
        peer: (Qpn, Psn),
    ) -> Result<(), Failure> {
        let lane = &mut self.lanes[index];
        lane.remote = remote;
        let (qp, local_psn) = (lane.qp, lane.psn);
        self.end.connect(qp, path, local_psn, peer)
    }

    /// How the queue pairs reach the other end.
    pub(super) fn path(&self, address: AddressVector, mtu: PathMtu) -> Path {
        Path {
            address,
            mtu,
            timeout: self.plan.timeout,
            rd_atomic: self.plan.outstanding,
            selective_repeat: self.plan.selective_repeat,
        }
    }

    /// Ends the queue pairs and gives the memory back.
    pub(super) fn close(&mut self) -> Result<(), Failure> {
        for lane in self.lanes.drain(..) {
            self.end.context.destroy_qp(lane.qp)?;
        }
        if let Some(Regions { source, sink, .. }) = self.regions.take() {
            self.end.context.deregister(source)?;
            self.end.context.deregister(sink)?;
        }
        Ok(())
    }

    /// Gets ready for a lap of so many messages on each queue pair: memory filled and cleared,
    /// receives posted.
    pub(super) fn prepare(&mut self, lap: u64, messages: &[u64]) -> Result<(), Failure> {
        let Regions { source, source_layout, sink, .. } = self.regions()?;
        let atomic = self.plan.operation == Operation::Atomic;
        if !atomic {
            self.end.context.bytes_mut(sink)?.fill(0);
        }
        let bytes = self.end.context.bytes_mut(source)?;
        if bytes.len() as u64 >= source_layout.len() {
            for (lane, count) in messages.iter().enumerate() {
                for message in 0..(*count).min(source_layout.slots) {
                    let range = source_layout.range(lane, message);
                    Pattern::new(self.role, lap, lane, message).fill(&mut bytes[range]);
                }
            }
        }
        self.begin(messages)
    }

    /// Counts anew, and posts receives for so many messages on each queue pair.
    pub(super) fn begin(&mut self, messages: &[u64]) -> Result<(), Failure> {
        let receives =
            self.plan.operation == Operation::Send && (self.role == Origin::Server || self.plan.echoes());
        for (lane, count) in self.lanes.iter_mut().zip(messages) {
            (lane.posted, lane.completed, lane.receives, lane.received) = (0, 0, 0, 0);
            lane.expected = if receives { *count } else { 0 };
        }
        (0..self.lanes.len()).try_for_each(|lane| self.post_receives(lane))
    }

    /// Posts the next operation of a lane.
    pub(super) fn post(&mut self, index: usize) -> Result<(), Failure> {
        let Regions { source, source_layout, sink, sink_layout } = self.regions()?;
        let Lane { qp, remote, posted: message, counted, .. } = self.lanes[index];
        let at = |offset: u64| RemoteAddress { addr: remote.addr.wrapping_add(offset), ..remote };
        // Both ends lay out alike what is moved by address.
        let (from, into) = (source_layout.offset(index, message), sink_layout.offset(index, message));
        let (there, counter) = (at(source_layout.slot_offset(message)), at(0));
        let (op, mr, offset, length) = match self.plan.operation {
            Operation::Write => (SendOp::Write(there), source, from, source_layout.size),
            Operation::Read => (SendOp::Read(there), sink, into, sink_layout.size),
            Operation::Send => (SendOp::Send, source, from, source_layout.size),
            Operation::Atomic => {
                let value = counted + message;
                let op = match self.plan.atomic {
                    AtomicType::FetchAndAdd => SendOp::FetchAdd { remote: counter, add: 1 },
                    AtomicType::CmpAndSwap => {
                        SendOp::CompareSwap { remote: counter, compare: value, swap: value + 1 }
                    }
                };
                (op, sink, into, 8)
            }
        };
        if self.plan.doorbell() {
            let last = source_layout.range(index, message).end - 1;
            self.end.context.bytes_mut(source)?[last] = doorbell(&source_layout, message);
        }
        let data = Data::Sges(&[Sge { mr, offset, length }]);
        let wr = SendWorkRequest { wr_id: SENT << 32 | index as u64, op, data, flags: SendFlags::SIGNALED };
        self.end.context.post_send(qp, &wr)?;
        self.lanes[index].posted += 1;
        Ok(())
    }

    /// Sends a message of a latency test back if it has come, as many as `total` in all.
    pub(super) fn echo(&mut self, total: u64) -> Result<(), Failure> {
        let lane = self.lanes[0];
        let next = lane.posted;
        let arrived = match self.plan.operation {
            Operation::Write => next < total && self.rung(next)?,
            _ => lane.received > next,
        };
        if arrived && next - lane.completed < u64::from(self.plan.tx_depth) {
            self.post(0)?;
        }
        Ok(())
    }

    /// From now on messages have so many bytes, no more than the slots have.
    pub(super) fn resize(&mut self, size: u32) -> Result<(), Failure> {
        let mut regions = self.regions()?;
        regions.source_layout.size = size;
        regions.sink_layout.size = size;
        self.regions = Some(regions);
        Ok(())
    }

    /// Whether a message of a WRITE latency test has come.
    pub(super) fn rung(&self, message: u64) -> Result<bool, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let last = sink_layout.range(0, message).end - 1;
        Ok(self.end.context.bytes(sink)?[last] == doorbell(&sink_layout, message))
    }

    /// Ends a lap: compares what has arrived with what must be there. Returns how many bytes were.
    pub(super) fn verify(&mut self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let verified = self.compare(lap, messages)?;
        for (lane, count) in self.lanes.iter_mut().zip(messages) {
            lane.counted += count;
        }
        Ok(verified)
    }

    fn compare(&self, lap: u64, messages: &[u64]) -> Result<u64, Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let bytes = self.end.context.bytes(sink)?;
        if !self.plan.check || (bytes.len() as u64) < sink_layout.len() {
            return Ok(0);
        }
        let from = if self.role == Origin::Client { Origin::Server } else { Origin::Client };
        let mut verified = 0;
        for (lane, count) in messages.iter().enumerate() {
            if self.plan.operation == Operation::Atomic {
                verified += self.verify_atomics(lane, *count, bytes)?;
                continue;
            }
            for message in 0..*count {
                let bytes = &bytes[sink_layout.range(lane, message)];
                // The doorbell was compared when it rang.
                let bytes = &bytes[..bytes.len() - usize::from(self.plan.doorbell())];
                Pattern::new(from, lap, lane, message).verify(bytes).map_err(|wrong| {
                    Failure::run(format!(
                        "wrong data: byte {} of message {message} (lap {lap}, QP {}) is {:#04x} instead of {:#04x}",
                        wrong.at, self.lanes[lane].qpn, wrong.found, wrong.expected
                    ))
                })?;
                verified += bytes.len() as u64;
            }
        }
        Ok(verified)
    }

    /// The server finds its counter where `count` operations bring it, the client each value that
    /// it had before: each was done once, in order.
    fn verify_atomics(&self, lane: usize, count: u64, bytes: &[u8]) -> Result<u64, Failure> {
        let Regions { sink_layout, .. } = self.regions()?;
        let Lane { qpn, counted, .. } = self.lanes[lane];
        let value = |range: std::ops::Range<usize>| {
            bytes[range].first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
        };
        let wrong = |what: String, found: u64, expected: u64| {
            Err(Failure::run(format!("wrong value: {what} of QP {qpn} is {found} instead of {expected}")))
        };
        if self.role == Origin::Server {
            let (found, expected) = (value(sink_layout.range(lane, 0)), counted + count);
            return if found == expected { Ok(8) } else { wrong("the counter".into(), found, expected) };
        }
        for message in 0..count {
            let (found, expected) = (value(sink_layout.range(lane, message)), counted + message);
            if found != expected {
                return wrong(format!("the original of atomic {message}"), found, expected);
            }
        }
        Ok(8 * count)
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

    fn register(&mut self, layout: Layout, counters: Layout) -> Result<Regions, Failure> {
        let plan = &self.plan;
        let server = self.role == Origin::Server;
        let sends = match plan.operation {
            Operation::Write | Operation::Send => !server || plan.echoes(),
            Operation::Read => server,
            Operation::Atomic => false,
        };
        let takes = plan.operation == Operation::Atomic || !sends || plan.echoes();
        let sink_layout = if server && plan.operation == Operation::Atomic { counters } else { layout };
        let length = |used: bool, layout: Layout| if used { layout.len() } else { 8 };
        let memory = |length: u64| {
            let megabytes = length >> 20;
            usize::try_from(length)
                .map_err(|_| Failure::usage(format!("{megabytes} MiB of memory: more than an address space")))
                .and_then(|length| Memory::zeroed(length).or_fail(|| format!("{megabytes} MiB of memory")))
        };
        let access = self.exposed_access() | Access::LOCAL_WRITE;
        let (source, sink) = (memory(length(sends, layout))?, memory(length(takes, sink_layout))?);
        let Endpoint { context, pd, .. } = &mut self.end;
        let source = context.register(*pd, source, access)?;
        let sink = context.register(*pd, sink, access)?;
        Ok(Regions { source, source_layout: layout, sink, sink_layout })
    }

    /// What the other end may do.
    fn exposed_access(&self) -> Access {
        match self.plan.operation {
            Operation::Write => Access::REMOTE_WRITE,
            Operation::Read => Access::REMOTE_READ,
            Operation::Send => Access::NONE,
            Operation::Atomic => Access::REMOTE_ATOMIC,
        }
    }

    fn regions(&self) -> Result<Regions, Failure> {
        self.regions.ok_or_else(|| Failure::run("no queue pairs are connected yet"))
    }

    /// Keeps receives posted, as many as are still to come and fit.
    fn post_receives(&mut self, index: usize) -> Result<(), Failure> {
        let Regions { sink, sink_layout, .. } = self.regions()?;
        let depth = u64::from(self.plan.rx_depth);
        let lane = &mut self.lanes[index];
        while lane.receives < lane.expected && lane.receives - lane.received < depth {
            let sge =
                Sge { mr: sink, offset: sink_layout.offset(index, lane.receives), length: sink_layout.size };
            let wr = ReceiveWorkRequest { wr_id: RECEIVED << 32 | index as u64, sges: &[sge] };
            self.end.context.post_recv(lane.qp, &wr)?;
            lane.receives += 1;
        }
        Ok(())
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
            if self.lost.is_some() {
                reason += "; its control connection is closed too";
                reason += C::ADVICE;
            }
            return Err(Failure::Run(reason));
        }
        match kind {
            SENT => lane.completed += 1,
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
        if length == size {
            return Ok(());
        }
        Err(Failure::run(format!(
            "a message of {length} bytes came in place of {size}: both ends need the same size (-s)"
        )))
    }

    fn look(&mut self, now: Nanos) -> Result<(), Failure> {
        self.end.check_service()?;
        let packets = self.end.context.counters().value(Counter::RcvdPkts);
        if packets != self.packets {
            (self.packets, self.quiet) = (packets, now);
        }
        if let Some(deadline) = self.lost {
            return if now >= deadline { self.flush() } else { Ok(()) };
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
        if let Some(reason) = self.control.stuck(now.since(self.quiet)) {
            return Err(Failure::run(reason + &self.end.evidence()));
        }
        if now.since(self.spoke) > HEARTBEAT {
            self.spoke = now;
            self.control.keep_alive()?;
        }
        Ok(())
    }

    fn lose(&mut self, now: Nanos, how: &str) -> Result<(), Failure> {
        if self.lanes.is_empty() {
            return Err(Failure::run(format!(
                "the control connection {how}: the other end is gone{}{}",
                C::ADVICE,
                self.end.evidence()
            )));
        }
        let under_way = self.lanes.iter().any(|lane| lane.completed < lane.posted);
        let patience = if under_way { retry_budget(self.plan.timeout) } else { Duration::ZERO };
        warn!("the control connection {how}; work under way has {:.1} s to end", patience.as_secs_f64());
        self.lost = Some(now + patience);
        Ok(())
    }

    /// Ends all work in error; never returns `Ok`.
    fn flush(&mut self) -> Result<(), Failure> {
        for lane in &self.lanes {
            self.end.context.modify_qp(lane.qp, Transition::Error)?;
        }
        while let Some(wc) = self.end.completion()? {
            self.account(&wc)?;
        }
        Err(Failure::run(format!(
            "the control connection is closed: the other end is gone{}{}",
            C::ADVICE,
            self.end.evidence()
        )))
    }
}

impl Session {
    /// Makes the queue pairs and memory for messages of `size` bytes, and says how to reach them.
    pub(super) fn open(
        &mut self,
        size: u32,
        gid_index: usize,
        path_mtu: Option<PathMtu>,
    ) -> Result<Offer, Failure> {
        self.plan.check_size(size)?;
        let memory = self.create(Layout::new(&self.plan, size), Layout::single(&self.plan, size))?;
        let gid = self.end.context.port().gids[gid_index].gid;
        Ok(Offer {
            size,
            gid: Ipv6Addr::from(gid.0),
            qps: self.lanes.iter().map(|lane| (lane.qpn.value(), lane.psn.value())).collect(),
            memory: (memory.addr, memory.rkey.0, memory.length),
            path_mtu: path_mtu.map(PathMtu::bytes),
            largest_path_mtu: self.end.largest_path_mtu(gid_index)?.bytes(),
            selective_repeat: self.plan.selective_repeat,
        })
    }

    /// Connects the queue pairs to those of the other end.
    pub(super) fn connect(&mut self, offer: &Offer, gid_index: usize, mtu: PathMtu) -> Result<(), Failure> {
        if offer.qps.len() != self.lanes.len() {
            let (theirs, ours) = (offer.qps.len(), self.lanes.len());
            return Err(Failure::run(format!("the other end offers {theirs} queue pairs for {ours}")));
        }
        let mut path = self.path(AddressVector::new(Gid(offer.gid.octets()), gid_index), mtu);
        path.selective_repeat &= offer.selective_repeat;
        let (addr, rkey, _) = offer.memory;
        let Regions { source_layout, .. } = self.regions()?;
        let atomic = self.plan.operation == Operation::Atomic;
        let layout = if atomic { Layout::single(&self.plan, offer.size) } else { source_layout };
        for (index, &(qpn, psn)) in offer.qps.iter().enumerate() {
            let addr = addr.wrapping_add(layout.offset(index, 0));
            let remote = RemoteAddress { addr, rkey: RKey(rkey) };
            self.connect_lane(index, &path, remote, (Qpn::new(qpn), Psn::new(psn)))?;
        }
        Ok(())
    }

    /// Turns until a message of the other end is there.
    pub(super) fn wait_message(&mut self) -> Result<Message, Failure> {
        loop {
            if let Some(message) = self.control.take() {
                return Ok(message);
            }
            self.turn()?;
        }
    }

    /// The next message, which must be `wanted`.
    pub(super) fn expect(&mut self, wanted: &Message) -> Result<(), Failure> {
        let message = self.wait_message()?;
        if message == *wanted { Ok(()) } else { Err(unexpected(&message)) }
    }
}

pub(super) fn unexpected(message: &Message) -> Failure {
    Failure::run(format!("the other end sent {} out of turn", legible(&format!("{message:?}"))))
}

/// Differs from message to message in a slot, and from a cleared one.
fn doorbell(layout: &Layout, message: u64) -> u8 {
    (message / layout.slots + 1) as u8
}

/// How long a work request may take to run out of retries: the timer may run to four times its
/// nominal value (IBA o9-92), and there is a first try.
fn retry_budget(timeout: u8) -> Duration {
    let nominal = Duration::from_nanos(4096 << timeout.min(31));
    4 * (u32::from(RETRY_COUNT) + 1) * nominal + Duration::from_millis(500)
}
