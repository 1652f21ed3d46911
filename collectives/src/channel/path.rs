//! One of a channel's queue pairs: the one to the peer's port of the same rail. It may fail and be replaced.
//!
//! A queue pair that fails does not end the channel while another rail is left. When nothing more can arrive by it, the
//! ends tell each other how many messages have arrived by it ([`Left`](crate::control::Left)); the others are sent
//! again by other rails. Then each end creates a new queue pair, and sends hellos to the peer with it until the peer
//! answers.

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
    /// Queue pairs of this path so far, here and there: which of them are connected. 0 is none.
    pub(super) own: u32,
    theirs: u32,
    /// The peer's ring, by this rail.
    remote_ring: RemoteAddress,
    /// When the peer is told of this end again; when it was told first; and whether it was said that nothing has come of it.
    pub(crate) next_hello: Nanos,
    greeted: Option<Nanos>,
    is_missed: bool,
    /// Work requests that have not completed, the oldest first, and how many have.
    pub(super) posted: VecDeque<Posted>,
    completed: u32,
    /// Those since the last that has a completion of its own, and how many have one that has not come.
    unsignaled: u32,
    signaled: u32,
    /// Messages that came, and receives that are posted.
    received: u32,
    receives: u32,
    /// What the last queue pair that failed had received.
    last: Option<Left>,
    /// Of the failed one: how far the peer says that messages came.
    came: Option<u32>,
    /// When something last completed, or the first was posted that tells of its end.
    progress: Nanos,
    /// Since when it is doubtful that anything comes through.
    doubted: Option<Nanos>,
    /// When the peer was last heard of by this rail.
    pub(crate) heard: Nanos,
    load: Load,
    failures: Failures,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The peer does not know of it, or this end not of the peer's.
    Greeting,
    /// The peer is ready to receive.
    Open,
    /// It has failed, and what came before is not all taken so far.
    Draining,
    /// The peer is asked what came: so often so far, and when last.
    Failed { asks: u32, last: Nanos },
}

/// Queue pairs of a path that failed. One that fails again and again, though it can be connected, is taken up ever more rarely: each
/// time it holds operations up until it is left.
#[derive(Clone, Copy, Default)]
struct Failures {
    /// Since one that lived long.
    recent: u32,
    opened: Option<Nanos>,
    /// When the next queue pair may be connected.
    rests_until: Nanos,
}

/// What a path moves.
#[derive(Default)]
struct Load {
    /// Bytes of chunks that are under way.
    bytes: u64,
    /// Those that have come through since a moment from which on some were under way all the time.
    moved: u64,
    since: Nanos,
    /// Bytes per second; 0 if that is not known.
    rate: f64,
}

/// A work request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    pub(super) content: Content,
    /// Who waits for its memory, if anybody.
    pub(super) waiting: Option<Waiting>,
    is_signaled: bool,
}

/// What a work request sends, by whichever rail.
#[derive(Clone, Copy, Debug)]
pub(super) enum Content {
    /// Bytes of the mirror, to the same place in the ring.
    Ring {
        number: u8,
        from: Sge,
    },
    /// A chunk, to a place in staging memory.
    Staged {
        number: u8,
        from: Sge,
        offset: u32,
        to: Remote,
    },
    /// A chunk, to where it is wanted.
    Landing {
        number: u8,
        from: Sge,
        to: Remote,
    },
    Credit(u32),
}

impl Content {
    /// Bytes of a chunk. What is short is no load.
    pub(super) fn chunk(&self) -> u32 {
        match self {
            Content::Staged { from, .. } | Content::Landing { from, .. } => from.length,
            Content::Ring { .. } | Content::Credit(_) => 0,
        }
    }
}

impl Path {
    /// Makes a queue pair, ready for messages to come.
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
        // No RNR NAK is due; should one come, it is no reason to give up at once.
        let send = options.ready_to_send(self.psn).rnr_retry(6).max_rd_atomic(0);
        context.modify_qp(self.qp, Transition::ReadyToSend(send))?;
        self.remote_ring = RemoteAddress { addr: theirs.ring, rkey: RKey::new(theirs.ring_key) };
        self.theirs = theirs.epoch;
        Ok(())
    }

    /// What the peer must know of the queue pair: its number, its first PSN, and which of this path it is.
    pub(super) fn number(&self, ports: &Ports) -> Result<(u32, u32, u32), Error> {
        let qpn = ports.of(self.rail).context.query_qp(self.qp)?.qpn.value();
        Ok((qpn, self.psn.value(), self.own))
    }

    /// The peer's queue pair that this one is connected to; 0 if there is none.
    pub(crate) fn heard_of(&self) -> u32 {
        self.theirs
    }

    /// Whether a word of the peer's queue pair `epoch` is of use: not of one that has failed, nor before this end has left its own,
    /// nor while it rests.
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

    /// The peer is not known to be ready: it is greeted.
    pub(crate) fn is_greeting(&self) -> bool {
        self.state == State::Greeting
    }

    /// The peer is told of this end now, and once more `again` later.
    pub(crate) fn greet(&mut self, now: Nanos, again: Duration) {
        self.next_hello = now + again;
        self.greeted.get_or_insert(now);
    }

    /// Whether nothing has come of it from the start on, though the peer was heard of by another one, at `heard`, `patience` after it
    /// was told of this one. It is said once.
    pub(super) fn is_to_be_missed(&mut self, heard: Nanos, patience: Duration) -> bool {
        let is_new = self.is_new() && !self.is_missed;
        let is_missed = is_new && self.greeted.is_some_and(|greeted| heard >= greeted + patience);
        self.is_missed |= is_missed;
        is_missed
    }

    /// Whether it was said that it is not there, for any reason.
    pub(crate) fn was_missed(&self) -> bool {
        self.own > 1 || self.is_missed
    }

    /// It is the first queue pair, and the peer is not known to be ready.
    pub(crate) fn is_new(&self) -> bool {
        self.state == State::Greeting && self.own == 1
    }

    /// The peer is ready to receive from the queue pair `own`. Whether that is news.
    pub(super) fn open(&mut self, now: Nanos, own: u32) -> bool {
        let is_news = self.state == State::Greeting && self.own == own && self.theirs != 0;
        if is_news {
            self.state = State::Open;
            self.failures.opened = Some(now);
        }
        is_news
    }

    /// Bytes per second that it moved lately, if that is known.
    pub(super) fn rate(&self) -> Option<f64> {
        Some(self.load.rate).filter(|rate| *rate > 0.0)
    }

    /// Bytes of chunks that are under way.
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
        // How many are before it that have no completion of their own.
        let wr_id = wr_id(self.peer, self.unsignaled);
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        // Nobody waits for its ACK, which may come with that of a later one.
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

    /// A completion of a send says that `before` others before it have completed, too.
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

    /// A receive has completed, with a message.
    pub(super) fn has_received(&mut self, ports: &mut Ports, now: Nanos) -> Result<(), Error> {
        self.received = self.received.wrapping_add(1);
        self.receives -= 1;
        self.heard = now;
        let is_of_use = matches!(self.state, State::Greeting | State::Open) && !ports.of(self.rail).is_gone();
        if is_of_use { self.post_receive(ports) } else { Ok(()) }
    }

    /// A receive has come back without one.
    pub(super) fn has_flushed(&mut self) {
        self.receives = self.receives.saturating_sub(1);
    }

    /// For a WRITE with immediate, which brings nothing to its receive.
    fn post_receive(&mut self, ports: &mut Ports) -> Result<(), Error> {
        let wr = ReceiveWorkRequest { wr_id: wr_id(self.peer, RECEIVE), sges: &[] };
        ports.of_mut(self.rail).context.post_recv(self.qp, &wr)?;
        self.receives += 1;
        Ok(())
    }

    /// Whether the peer has received all that has a completion.
    pub(super) fn is_flushed(&self) -> bool {
        self.signaled == 0
    }

    /// Nobody waits for what is under way any more.
    pub(super) fn forget(&mut self) {
        self.posted.clear();
        self.signaled = 0;
    }

    /// Whether it is to be left, as nothing comes through though the peer was heard of by another rail, at `heard`. First there is a
    /// doubt: the peer may have been away, and what was dropped meanwhile comes with the next timeout.
    pub(super) fn is_suspect(&mut self, now: Nanos, heard: Nanos, timeout: Duration) -> bool {
        let is_old = self.is_silent(now, timeout) && heard >= self.progress + timeout / 2;
        if !is_old {
            self.doubted = None;
            return false;
        }
        let since = *self.doubted.get_or_insert(now);
        now.since(since) >= timeout * 5 / 4 && heard >= since + timeout / 2
    }

    /// Whether nothing comes through, as of now for so long.
    pub(super) fn is_silent(&self, now: Nanos, long: Duration) -> bool {
        self.state == State::Open && self.signaled > 0 && now.since(self.progress) >= long
    }

    pub(super) fn is_doubted(&self) -> bool {
        self.doubted.is_some()
    }

    /// There is no reason to doubt it.
    pub(super) fn trust(&mut self) {
        self.doubted = None;
    }

    /// Whether something is under way of which no completion tells, and which is old.
    pub(super) fn is_to_be_probed(&self, now: Nanos, patience: Duration) -> bool {
        self.state == State::Open
            && self.signaled == 0
            && !self.posted.is_empty()
            && now.since(self.progress) >= patience
    }

    /// It is of no use any more: nothing comes or leaves from now on. How long the next queue pair rests goes by the retry budget,
    /// `patience`.
    pub(super) fn leave(&mut self, ports: &mut Ports, now: Nanos, patience: Duration) -> Result<(), Error> {
        if matches!(self.state, State::Greeting | State::Open) {
            self.state = State::Draining;
            self.failures.count(now, patience);
            ports.of_mut(self.rail).context.modify_qp(self.qp, Transition::Error)?;
        }
        Ok(())
    }

    /// Nothing comes any more, and what has come is where it belongs: its receives come back behind the copies of devices. One whose
    /// port is gone gives nothing back.
    pub(super) fn is_still(&self, ports: &Ports) -> bool {
        let has_come_back = !matches!(self.state, State::Greeting | State::Open) && self.receives == 0;
        has_come_back || ports.of(self.rail).is_gone()
    }

    /// Whether all has been taken that came before it was left, as of now.
    pub(super) fn drain(&mut self, now: Nanos) -> bool {
        let is_drained = self.state == State::Draining && self.receives == 0;
        if is_drained {
            self.state = State::Failed { asks: 1, last: now };
            let (rail, own, theirs, received) = (self.rail as u32, self.own, self.theirs, self.received);
            self.last = Some(Left { rail, own, theirs, received, is_answer: false });
        }
        is_drained
    }

    /// What the peer has to know of the queue pair that failed, while it has not said the same; or that it is asked for again.
    pub(crate) fn left(&self) -> Option<Left> {
        self.last.map(|last| Left { is_answer: self.came.is_some() || self.state == State::Greeting, ..last })
    }

    /// Whether the peer is to be asked once more how far messages came by the queue pair that failed, `again` after it was asked
    /// last.
    pub(super) fn asks(&mut self, now: Nanos, again: Duration) -> bool {
        match &mut self.state {
            State::Failed { asks, last } if self.came.is_none() && now.since(*last) >= again => {
                (*asks, *last) = (*asks + 1, now);
                true
            }
            _ => false,
        }
    }

    /// Whether the peer has been asked so often in vain. Not for how long: nobody answers who is in no operation.
    pub(super) fn has_asked(&self, times: u32) -> bool {
        matches!(self.state, State::Failed { asks, .. } if asks > times && self.came.is_none())
    }

    /// The peer has left the queue pairs that it names. Whether they are those that are connected now.
    pub(super) fn hear_left(&mut self, left: &Left) -> bool {
        let is_this = left.theirs == self.own && (self.theirs == left.own || self.theirs == 0);
        if is_this {
            (self.came, self.theirs) = (Some(left.received), left.own);
        }
        is_this
    }

    /// Whether both ends know how far messages came by the queue pair that failed.
    pub(super) fn is_settled(&self) -> bool {
        matches!(self.state, State::Failed { .. }) && self.came.is_some()
    }

    /// Puts a new queue pair in place of the one that failed. What came through is told, what did not is returned.
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
    /// Retry budgets that a queue pair must have lived for, so that those before it do not count.
    const LONG: u32 = 16;

    /// The first time it is taken up at once; then after a quarter of the budget, about what it costs to leave it, then after
    /// twice as long each time.
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
    /// How long a path is watched before its rate is known anew.
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

/// Work requests that a queue has room for beyond one for each message: credits, of which a quarter of the depth is due each, and
/// flushes.
pub(super) const SPARE: u32 = 16;

/// The lower half of the work request id of receives. That of sends says how many sends before them have no completion of their
/// own. The upper half is the peer.
pub(super) const RECEIVE: u32 = u32::MAX;

pub(super) fn wr_id(peer: u32, low: u32) -> u64 {
    u64::from(peer) << 32 | u64::from(low)
}

/// 0.64 ms: about a poll of a rank that was off its core.
const RNR_TIMER: RnrTimer = RnrTimer::new(12).unwrap();

/// An empty WRITE goes nowhere; neither address nor key is looked at (IBA C9-88).
const NOWHERE: RemoteAddress = RemoteAddress { addr: 0, rkey: RKey::new(0) };
