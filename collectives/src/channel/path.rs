//! A queue pair of a channel: the one to the peer's port of the same rail. A failed queue pair is replaced.
//!
//! A failed queue pair does not end the channel while another rail works. When nothing more can arrive on it, the ends
//! report to each other how many messages have arrived on it ([`Left`](crate::control::Left)); the others are sent again on
//! other rails. Then each end creates a new queue pair, and sends hellos with it until the peer answers.

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::{
    Access, AddressVector, Cq, Data, Gid, Nanos, PathMtu, Psn, Qp, QpConfig, Qpn, RKey, ReadyToReceive,
    ReceiveWorkRequest, RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge, Transition,
};

use super::message::{Immediate, Place, Remote};
use super::{Limits, Link, Waiting};
use crate::Error;
use crate::control::Left;
use crate::options::Options;
use crate::ports::{Port, Ports};

pub(crate) struct Path {
    rail: usize,
    peer: u32,
    cq: Cq,
    pub(super) qp: Qp,
    psn: Psn,
    state: State,
    /// The numbers of the connected queue pairs of this path, here and at the peer. 0 is none.
    pub(super) own: u32,
    theirs: u32,
    /// The peer's ring, with the key of this rail.
    remote_ring: RemoteAddress,
    /// When the next hello is sent; when the first one was sent; and whether it was reported that nothing was received.
    pub(crate) next_hello: Nanos,
    greeted: Option<Nanos>,
    is_missed: bool,
    /// Outstanding work requests, the oldest first, and the number of completed ones.
    pub(super) posted: VecDeque<Posted>,
    completed: u32,
    /// Work requests since the last signaled one, and the number of outstanding signaled ones.
    unsignaled: u32,
    signaled: u32,
    /// Messages received, and posted receives.
    received: u32,
    receives: u32,
    /// The number of messages received on the last failed queue pair.
    last: Option<Left>,
    /// The number of messages that the peer has received on the failed queue pair, as reported by the peer.
    came: Option<u32>,
    /// When the last completion arrived, or the first outstanding signaled work request was posted.
    progress: Nanos,
    /// Since when the path may have failed.
    doubted: Option<Nanos>,
    /// When the peer was last heard on this rail.
    pub(crate) heard: Nanos,
    load: Load,
    failures: Failures,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The peer does not know this queue pair, or this end does not know the peer's.
    Greeting,
    /// The peer is ready to receive.
    Open,
    /// It has failed, and received messages are still being taken.
    Draining,
    /// The peer was asked for the number of messages it received: how often, and when last.
    Failed { asks: u32, last: Nanos },
}

/// The failed queue pairs of a path. If they fail repeatedly although they can be connected, a new one is created after
/// longer and longer pauses: each failure delays operations until the path is left.
#[derive(Clone, Copy, Default)]
struct Failures {
    /// Failures since the last queue pair that worked for long.
    recent: u32,
    opened: Option<Nanos>,
    /// The earliest time to connect the next queue pair.
    rests_until: Nanos,
}

/// The traffic of a path.
#[derive(Default)]
struct Load {
    /// Bytes of outstanding chunks.
    bytes: u64,
    /// Bytes delivered since the start of a period in which chunks were outstanding all the time.
    moved: u64,
    since: Nanos,
    /// Bytes per second; 0 if unknown.
    rate: f64,
}

/// A work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    pub(super) content: Content,
    /// The step that waits for its memory, if any.
    pub(super) waiting: Option<Waiting>,
    is_signaled: bool,
}

/// The data of a work request, for any rail.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    /// Bytes of the mirror, to the same offset in the ring.
    Ring {
        number: u8,
        from: Sge,
    },
    /// A chunk, to staging memory.
    Staged {
        number: u8,
        from: Sge,
        offset: u32,
        to: Remote,
    },
    /// A chunk, to its destination.
    Landing {
        number: u8,
        from: Sge,
        to: Remote,
    },
    Credit(u32),
}

impl Content {
    /// The bytes of a chunk; 0 for a short message.
    pub(super) fn chunk(&self) -> u32 {
        match self {
            Content::Staged { from, .. } | Content::Landing { from, .. } => from.length,
            Content::Ring { .. } | Content::Credit(_) => 0,
        }
    }
}

impl Path {
    /// Creates a queue pair, ready to receive.
    pub(super) fn new(
        ports: &mut Ports,
        rail: usize,
        cq: Cq,
        peer: u32,
        limits: &Limits,
    ) -> Result<Path, Error> {
        let Port { context, pd, .. } = ports.of_mut(rail);
        let receives = limits.depth + SPARE;
        let config = QpConfig::rc(*pd, cq)
            .max_send_wr(limits.depth + SPARE)
            .max_recv_wr(receives)
            .max_send_sge(1)
            .max_recv_sge(1)
            .max_inline_data(0);
        let qp = context.create_qp(&config)?;
        let psn = context.random_psn();
        let mut path = Path {
            rail,
            peer,
            cq,
            qp,
            psn,
            state: State::Greeting,
            own: 1,
            theirs: 0,
            remote_ring: NOWHERE,
            next_hello: Nanos::ZERO,
            greeted: None,
            is_missed: false,
            posted: VecDeque::with_capacity((limits.depth + SPARE) as usize),
            completed: 0,
            unsignaled: 0,
            signaled: 0,
            received: 0,
            receives: 0,
            last: None,
            came: None,
            progress: Nanos::ZERO,
            doubted: None,
            heard: Nanos::ZERO,
            load: Load::default(),
            failures: Failures::default(),
        };
        if let Err(error) = path.begin(ports, receives) {
            ports.of_mut(rail).context.destroy_qp(qp)?;
            return Err(error);
        }
        Ok(path)
    }

    fn begin(&mut self, ports: &mut Ports, receives: u32) -> Result<(), Error> {
        let init = Transition::Init { access: Access::REMOTE_WRITE };
        ports.of_mut(self.rail).context.modify_qp(self.qp, init)?;
        (0..receives).try_for_each(|_| self.post_receive(ports))
    }

    /// Connects to the peer's queue pair.
    pub(super) fn connect(
        &mut self,
        ports: &mut Ports,
        options: &Options,
        (gid, gid_index): (Gid, usize),
        own_path_mtu: PathMtu,
        theirs: &Link,
    ) -> Result<(), Error> {
        let path_mtu = PathMtu::try_from(theirs.path_mtu).unwrap_or(PathMtu::Mtu256).min(own_path_mtu);
        let address = AddressVector::new(gid, gid_index).traffic_class(options.traffic_class);
        let receive = ReadyToReceive::new(address, Qpn::new(theirs.qpn), Psn::new(theirs.psn))
            .path_mtu(path_mtu)
            .max_dest_rd_atomic(0)
            .min_rnr_timer(RNR_TIMER);
        let Port { context, .. } = ports.of_mut(self.rail);
        context.modify_qp(self.qp, Transition::ReadyToReceive(receive))?;
        // No RNR NAK is expected; if one arrives, retry.
        let send = options.ready_to_send(self.psn).rnr_retry(6).max_rd_atomic(0);
        context.modify_qp(self.qp, Transition::ReadyToSend(send))?;
        self.remote_ring = RemoteAddress { addr: theirs.ring, rkey: RKey::new(theirs.ring_key) };
        self.theirs = theirs.epoch;
        Ok(())
    }

    /// The data of the queue pair that the peer needs: its QPN, its first PSN, and its number in this path.
    pub(super) fn number(&self, ports: &Ports) -> Result<(u32, u32, u32), Error> {
        let qpn = ports.of(self.rail).context.query_qp(self.qp)?.qpn.value();
        Ok((qpn, self.psn.value(), self.own))
    }

    /// The number of the peer's queue pair to which this one is connected; 0 if there is none.
    pub(crate) fn heard_of(&self) -> u32 {
        self.theirs
    }

    /// Whether to connect to the peer's queue pair `epoch`: not to a failed one, nor before this end has left its own, nor
    /// during a pause.
    pub(super) fn is_to_connect(&self, now: Nanos, epoch: u32) -> bool {
        let is_gone = self.last.is_some_and(|last| epoch <= last.theirs);
        self.state == State::Greeting && self.theirs == 0 && !is_gone && now >= self.failures.rests_until
    }

    pub(super) fn rail(&self) -> usize {
        self.rail
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state == State::Open
    }

    /// It has failed, and there is no new one.
    pub(crate) fn is_left(&self) -> bool {
        matches!(self.state, State::Draining | State::Failed { .. })
    }

    /// The peer is not known to be ready: hellos are sent.
    pub(crate) fn is_greeting(&self) -> bool {
        self.state == State::Greeting
    }

    /// Sends a hello now, and again after `again`.
    pub(crate) fn greet(&mut self, now: Nanos, again: Duration) {
        self.next_hello = now + again;
        self.greeted.get_or_insert(now);
    }

    /// Whether nothing was received since the start, although the peer was heard on another path, at `heard`, at least
    /// `patience` after the first hello on this one. Returns true only once.
    pub(super) fn is_to_be_missed(&mut self, heard: Nanos, patience: Duration) -> bool {
        let is_new = self.is_new() && !self.is_missed;
        let is_missed = is_new && self.greeted.is_some_and(|greeted| heard >= greeted + patience);
        self.is_missed |= is_missed;
        is_missed
    }

    /// Whether it was reported, for any reason, that the path does not work.
    pub(crate) fn was_missed(&self) -> bool {
        self.own > 1 || self.is_missed
    }

    /// It is the first queue pair, and the peer is not known to be ready.
    pub(crate) fn is_new(&self) -> bool {
        self.state == State::Greeting && self.own == 1
    }

    /// The peer is ready to receive from the queue pair `own`. Returns whether that is new.
    pub(super) fn open(&mut self, now: Nanos, own: u32) -> bool {
        let is_news = self.state == State::Greeting && self.own == own && self.theirs != 0;
        if is_news {
            self.state = State::Open;
            self.failures.opened = Some(now);
        }
        is_news
    }

    /// The current throughput in bytes per second, if known.
    pub(super) fn rate(&self) -> Option<f64> {
        Some(self.load.rate).filter(|rate| *rate > 0.0)
    }

    /// Bytes of outstanding chunks.
    pub(super) fn load(&self) -> u64 {
        self.load.bytes
    }

    pub(super) fn post(
        &mut self,
        ports: &mut Ports,
        now: Nanos,
        limits: &Limits,
        (content, waiting, signaled): (Content, Option<Waiting>, bool),
    ) -> Result<(), Error> {
        let signaled = signaled || self.unsignaled + 1 >= (limits.depth / 4).max(1);
        let remote = |to: &Remote, offset: u32| RemoteAddress {
            addr: to.address.wrapping_add(offset.into()),
            rkey: to.keys[self.rail],
        };
        let (to, immediate, from) = match &content {
            Content::Ring { number, from } => {
                let offset = from.offset as u32;
                let to = RemoteAddress {
                    addr: self.remote_ring.addr.wrapping_add(from.offset),
                    ..self.remote_ring
                };
                (to, Immediate::Message(*number, Place::Ring(offset)), Some(*from))
            }
            Content::Staged { number, from, offset, to } => {
                (remote(to, *offset), Immediate::Message(*number, Place::Staging(*offset)), Some(*from))
            }
            Content::Landing { number, from, to } => {
                (remote(to, 0), Immediate::Message(*number, Place::Landed), Some(*from))
            }
            Content::Credit(taken) => (NOWHERE, Immediate::Credit(*taken), None),
        };
        let from = from.map(|from| ports.sge(self.rail, from)).transpose()?;
        // The number of unsignaled work requests before it.
        let wr_id = wr_id(self.peer, self.unsignaled);
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        // Its ACK is not waited for, so it may be combined with a later one.
        let flags = SendFlags::default().signaled(signaled).lazy_ack(!signaled);
        let data = from.as_ref().map_or(Data::Inline(&[]), |from| Data::Sges(std::slice::from_ref(from)));
        let op = SendOp::WriteWithImm(to, immediate.value());
        ports.of_mut(self.rail).context.post_send(self.qp, &SendWorkRequest { wr_id, op, data, flags })?;
        if self.posted.is_empty() || (signaled && self.signaled == 0) {
            self.progress = now;
        }
        self.signaled += u32::from(signaled);
        let chunk = content.chunk();
        if chunk > 0 {
            if self.load.bytes == 0 {
                (self.load.moved, self.load.since) = (0, now);
            }
            self.load.bytes += u64::from(chunk);
        }
        self.posted.push_back(Posted { content, waiting, is_signaled: signaled });
        Ok(())
    }

    /// A send has completed, and so have the `before` ones before it.
    pub(super) fn completed(&mut self, now: Nanos, before: u32, mut each: impl FnMut(Posted)) {
        for _ in 0..=before {
            let Some(posted) = self.posted.pop_front() else { break };
            self.completed = self.completed.wrapping_add(1);
            self.signaled -= u32::from(posted.is_signaled);
            self.load.has_moved(posted.content.chunk(), now);
            each(posted);
        }
        (self.progress, self.heard, self.doubted) = (now, now, None);
    }

    /// A receive has completed with a message.
    pub(super) fn has_received(&mut self, ports: &mut Ports, now: Nanos) -> Result<(), Error> {
        self.received = self.received.wrapping_add(1);
        self.receives -= 1;
        self.heard = now;
        let is_of_use = matches!(self.state, State::Greeting | State::Open) && !ports.of(self.rail).is_gone();
        if is_of_use { self.post_receive(ports) } else { Ok(()) }
    }

    /// A receive has completed without one (flushed).
    pub(super) fn has_flushed(&mut self) {
        self.receives = self.receives.saturating_sub(1);
    }

    /// For a WRITE with immediate, which writes nothing to the buffers of its receive.
    fn post_receive(&mut self, ports: &mut Ports) -> Result<(), Error> {
        let wr = ReceiveWorkRequest { wr_id: wr_id(self.peer, RECEIVE), sges: &[] };
        ports.of_mut(self.rail).context.post_recv(self.qp, &wr)?;
        self.receives += 1;
        Ok(())
    }

    /// Whether the peer has received all signaled messages.
    pub(super) fn is_flushed(&self) -> bool {
        self.signaled == 0
    }

    /// Outstanding messages are not waited for any more.
    pub(super) fn forget(&mut self) {
        self.posted.clear();
        self.signaled = 0;
    }

    /// Whether to leave it because there is no progress although the peer was heard on another rail, at `heard`. It is
    /// first only suspected: the peer may have been off its core, and dropped packets are retransmitted after the next
    /// timeout.
    pub(super) fn is_suspect(&mut self, now: Nanos, heard: Nanos, timeout: Duration) -> bool {
        let is_old = self.is_silent(now, timeout) && heard >= self.progress + timeout / 2;
        if !is_old {
            self.doubted = None;
            return false;
        }
        let since = *self.doubted.get_or_insert(now);
        now.since(since) >= timeout * 5 / 4 && heard >= since + timeout / 2
    }

    /// Whether there has been no progress for this long.
    pub(super) fn is_silent(&self, now: Nanos, long: Duration) -> bool {
        self.state == State::Open && self.signaled > 0 && now.since(self.progress) >= long
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.doubted.is_some()
    }

    /// Clears the suspicion.
    pub(super) fn trust(&mut self) {
        self.doubted = None;
    }

    /// Whether unsignaled work is outstanding for long.
    pub(super) fn is_to_be_probed(&self, now: Nanos, patience: Duration) -> bool {
        self.state == State::Open
            && self.signaled == 0
            && !self.posted.is_empty()
            && now.since(self.progress) >= patience
    }

    /// Stops using it: the queue pair is moved to the Error state. The pause before the next queue pair depends on the
    /// retry budget, `patience`.
    pub(super) fn leave(&mut self, ports: &mut Ports, now: Nanos, patience: Duration) -> Result<(), Error> {
        if matches!(self.state, State::Greeting | State::Open) {
            self.state = State::Draining;
            self.failures.count(now, patience);
            ports.of_mut(self.rail).context.modify_qp(self.qp, Transition::Error)?;
        }
        Ok(())
    }

    /// Whether nothing more arrives, and received data is at its destination: the receives are flushed after the copies of
    /// devices. If the port is gone, no receive completes.
    pub(super) fn is_still(&self, ports: &Ports) -> bool {
        let has_come_back = !matches!(self.state, State::Greeting | State::Open) && self.receives == 0;
        has_come_back || ports.of(self.rail).is_gone()
    }

    /// Whether all messages received before it was left have been taken; then asks the peer.
    pub(super) fn drain(&mut self, now: Nanos) -> bool {
        let is_drained = self.state == State::Draining && self.receives == 0;
        if is_drained {
            self.state = State::Failed { asks: 1, last: now };
            let (rail, own, theirs, received) = (self.rail as u32, self.own, self.theirs, self.received);
            self.last = Some(Left { rail, own, theirs, received, is_answer: false });
        }
        is_drained
    }

    /// The data about the failed queue pair that the peer needs, while the peer has not reported its own, or when the peer
    /// asks again.
    pub(crate) fn left(&self) -> Option<Left> {
        self.last.map(|last| Left { is_answer: self.came.is_some() || self.state == State::Greeting, ..last })
    }

    /// Whether to ask the peer again how many messages it received on the failed queue pair, `again` after the last time.
    pub(super) fn asks(&mut self, now: Nanos, again: Duration) -> bool {
        match &mut self.state {
            State::Failed { asks, last } if self.came.is_none() && now.since(*last) >= again => {
                (*asks, *last) = (*asks + 1, now);
                true
            }
            _ => false,
        }
    }

    /// Whether the peer was asked this often without an answer. It counts requests, not time: a rank answers only while it
    /// is in an operation.
    pub(super) fn has_asked(&self, times: u32) -> bool {
        matches!(self.state, State::Failed { asks, .. } if asks > times && self.came.is_none())
    }

    /// The peer has left the queue pairs given. Returns whether they are those connected now.
    pub(super) fn hear_left(&mut self, left: &Left) -> bool {
        let is_this = left.theirs == self.own && (self.theirs == left.own || self.theirs == 0);
        if is_this {
            (self.came, self.theirs) = (Some(left.received), left.own);
        }
        is_this
    }

    /// Whether both ends know how many messages were received on the failed queue pair.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.state, State::Failed { .. }) && self.came.is_some()
    }

    /// Replaces the failed queue pair. Passes delivered work requests to `came_through`, and returns the others.
    pub(super) fn renew(
        &mut self,
        ports: &mut Ports,
        limits: &Limits,
        mut came_through: impl FnMut(Posted),
    ) -> Result<VecDeque<Posted>, Error> {
        let next = Path::new(ports, self.rail, self.cq, self.peer, limits)?;
        ports.of_mut(self.rail).context.destroy_qp(self.qp)?;
        let came = self.came.unwrap_or_default().wrapping_sub(self.completed) as usize;
        let mut posted = std::mem::take(&mut self.posted);
        posted.drain(..came.min(posted.len())).for_each(&mut came_through);
        let failures = self.failures;
        let next_hello = failures.rests_until;
        *self = Path { own: self.own + 1, last: self.last, heard: self.heard, failures, next_hello, ..next };
        Ok(posted)
    }
}

impl Failures {
    /// The number of retry budgets after which a queue pair has worked for long, so that earlier failures do not count.
    const LONG: u32 = 16;

    /// After the first failure there is no pause; then it is a quarter of the budget, about the cost of leaving a path,
    /// then twice as long each time.
    fn count(&mut self, now: Nanos, patience: Duration) {
        let lived = self.opened.take().map_or(Duration::ZERO, |opened| now.since(opened));
        if lived >= patience * Failures::LONG {
            self.recent = 0;
        }
        let rest = match self.recent {
            0 => Duration::ZERO,
            times => patience / 4 * (1 << (times - 1).min(6)),
        };
        self.rests_until = now + rest;
        self.recent = self.recent.saturating_add(1);
    }
}

impl Load {
    /// The period over which the rate is measured.
    const WINDOW: Duration = Duration::from_micros(200);

    fn has_moved(&mut self, bytes: u32, now: Nanos) {
        self.bytes -= u64::from(bytes);
        self.moved += u64::from(bytes);
        let time = now.since(self.since);
        if self.moved > 0 && time >= Load::WINDOW {
            let rate = self.moved as f64 / time.as_secs_f64();
            self.rate = if self.rate > 0.0 { (3.0 * self.rate + rate) / 4.0 } else { rate };
            (self.moved, self.since) = (0, now);
        }
    }
}

/// Work requests of a queue in addition to one per message: credits, each of which is due after a quarter of the depth, and
/// flushes.
pub(super) const SPARE: u32 = 16;

/// The lower half of the work request ID of receives. For sends it is the number of unsignaled sends before them. The upper
/// half is the peer.
pub(super) const RECEIVE: u32 = u32::MAX;

pub(super) fn wr_id(peer: u32, low: u32) -> u64 {
    u64::from(peer) << 32 | u64::from(low)
}

/// 0.64 ms: about one poll of a rank that was off its core.
const RNR_TIMER: RnrTimer = RnrTimer::new(12).unwrap();

/// An empty WRITE has no destination; address and key are not checked (IBA C9-88).
const NOWHERE: RemoteAddress = RemoteAddress { addr: 0, rkey: RKey::new(0) };
