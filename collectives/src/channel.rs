//! A channel: messages to and from one peer, in order, under credits, over a queue pair.
//!
//! Each end has a ring in which short messages of the other arrive, and, once something that is combined is longer,
//! staging memory. The sender gives out both, and a message more only while fewer than [`Limits::depth`] are not taken, so there is
//! never an RNR NAK. How many messages have been taken travels in every header, and as a message of its own where there is no
//! other. Short messages are copied into a mirror of the peer's ring before they are sent: what they were copied from may
//! change at once, and nobody waits for the ACK.

pub(crate) mod message;
mod space;

use std::collections::VecDeque;
use std::time::Duration;

use ferroce::{
    Access, AddressVector, Context, Cq, Data, Gid, Mr, Nanos, PathMtu, Pd, Psn, Qp, QpConfig, Qpn, RKey,
    ReadyToReceive, ReceiveWorkRequest, RemoteAddress, RnrTimer, SendFlags, SendOp, SendWorkRequest, Sge,
    Transition, WcStatus, WorkCompletion,
};
use zerocopy::{FromZeros, IntoBytes};

use crate::compute::Computer;
use crate::memory::{allocate, deregister, register};
use crate::options::Options;
use message::{Age, Call, Grant, Header, Immediate, Purpose};
use space::Space;

/// How much a channel may have under way.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Messages that the peer has not taken.
    pub(crate) depth: u32,
    /// Bytes of a ring.
    pub(crate) ring: u32,
    /// Bytes of elements of a message in the ring.
    pub(crate) eager: u32,
    /// Bytes of staging memory.
    pub(crate) staging: u32,
}

/// What the peer must know of this end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) path_mtu: u32,
    pub(crate) ring: u64,
    pub(crate) ring_key: u32,
    pub(crate) ring_bytes: u32,
    pub(crate) depth: u32,
}

/// What came of a completion.
#[derive(Debug)]
pub(crate) enum News {
    /// Nothing that anybody waits for.
    None,
    /// Something has arrived, or may be sent again.
    Moved,
    /// A grant.
    Granted(Call, Grant),
    /// The queue pair has failed.
    Failed(WcStatus),
    /// The peer sent what it may not.
    Broken(String),
}

/// A message that has come.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) call: Call,
    /// Where the elements are; `None` if they are at their place.
    pub(crate) from: Option<(Mr, u32)>,
    pub(crate) bytes: u32,
}

/// A call of the peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard {
    pub(crate) call: u32,
    /// When it began there, by the clock of this rank, and for how long the peer had been in no call before.
    pub(crate) began: Nanos,
    pub(crate) idle: Duration,
}

/// One end of a channel.
pub(crate) struct Channel {
    pub(crate) peer: u32,
    qp: Qp,
    psn: Psn,
    limits: Limits,
    /// What this end has of memory: where messages arrive, and whence they go.
    ring: Mr,
    mirror: Mr,
    staging: Option<Mr>,
    /// The peer knows of the staging memory.
    pub(crate) staging_is_told: bool,
    remote_ring: RemoteAddress,
    remote_staging: RemoteAddress,
    /// The peer's depth, if that is less.
    depth: u32,
    pub(crate) has_heard: bool,
    /// The peer is ready to receive.
    pub(crate) is_open: bool,
    /// When the peer is told of this end again.
    pub(crate) next_hello: Nanos,

    ring_space: Space,
    staging_space: Space,
    /// Messages that the peer has not taken, the oldest first, and how many it has, ever.
    untaken: VecDeque<Room>,
    credited: u32,
    /// Work requests that have not completed, the oldest first.
    posted: VecDeque<Posted>,
    unsignaled: u32,
    signals_all: bool,
    has_posted: bool,

    arrivals: VecDeque<Message>,
    /// Of the newest message in the ring: what chunks behind it belong to.
    newest: Option<Call>,
    /// What the peer told of last.
    heard: Option<Heard>,
    taken: u32,
    told: u32,
    /// Bytes of the ring and of staging memory that are free and of which the peer has not been told.
    untold: [u32; 2],
}

/// Where a message is at the peer.
#[derive(Clone, Copy, Debug)]
enum Room {
    Ring(u32),
    Staging(u32),
    None,
}

/// A work request. Who waits for its memory, if anybody.
#[derive(Clone, Copy, Debug)]
struct Posted {
    waiting: Option<Waiting>,
    is_signaled: bool,
}

/// A step of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) operation: u64,
    pub(crate) step: u32,
}

/// A message that has come.
#[derive(Clone, Copy, Debug)]
struct Message {
    /// `None` if it has been dealt with.
    arrival: Option<Arrival>,
    /// Bytes that it takes of the ring and of staging memory.
    room: [u32; 2],
}

impl Channel {
    /// Creates this end, ready for messages to come.
    pub(crate) fn new(
        context: &mut Context,
        (pd, cq): (Pd, Cq),
        peer: u32,
        limits: Limits,
    ) -> Result<Channel, crate::Error> {
        let receives = limits.depth + SPARE;
        let config = QpConfig::rc(pd, cq)
            .max_send_wr(limits.depth + SPARE)
            .max_recv_wr(receives)
            .max_send_sge(1)
            .max_recv_sge(1)
            .max_inline_data(0);
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let ring = register(context, pd, allocate(None, limits.ring as usize)?, access)?;
        let mirror = allocate(None, limits.ring as usize)
            .and_then(|memory| register(context, pd, memory, Access::LOCAL_WRITE));
        let made = mirror.and_then(|mirror| match context.create_qp(&config) {
            Ok(qp) => Ok((mirror, qp)),
            Err(error) => {
                context.deregister(mirror)?;
                Err(error.into())
            }
        });
        let (mirror, qp) = match made {
            Ok(made) => made,
            Err(error) => {
                context.deregister(ring)?;
                return Err(error);
            }
        };
        context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE })?;
        let psn = context.random_psn();
        let channel = Channel {
            peer,
            qp,
            psn,
            limits,
            ring,
            mirror,
            staging: None,
            staging_is_told: false,
            remote_ring: NOWHERE,
            remote_staging: NOWHERE,
            depth: limits.depth,
            has_heard: false,
            is_open: false,
            next_hello: Nanos::ZERO,
            ring_space: Space::new(0),
            staging_space: Space::new(0),
            untaken: VecDeque::with_capacity(limits.depth as usize),
            credited: 0,
            posted: VecDeque::with_capacity((limits.depth + SPARE) as usize),
            unsignaled: 0,
            signals_all: false,
            has_posted: false,
            arrivals: VecDeque::with_capacity(limits.depth as usize),
            newest: None,
            heard: None,
            taken: 0,
            told: 0,
            untold: [0; 2],
        };
        for _ in 0..receives {
            channel.post_receive(context)?;
        }
        Ok(channel)
    }

    /// What the peer must know.
    pub(crate) fn link(&self, context: &Context, path_mtu: PathMtu) -> Result<Link, crate::Error> {
        let ring = context.remote(self.ring)?;
        Ok(Link {
            qpn: context.query_qp(self.qp)?.qpn.value(),
            psn: self.psn.value(),
            path_mtu: path_mtu.bytes(),
            ring: ring.addr,
            ring_key: ring.rkey.value(),
            ring_bytes: self.limits.ring,
            depth: self.limits.depth,
        })
    }

    /// Connects to the peer's end.
    pub(crate) fn connect(
        &mut self,
        context: &mut Context,
        options: &Options,
        (gid, gid_index): (Gid, usize),
        own_path_mtu: PathMtu,
        theirs: &Link,
    ) -> Result<(), crate::Error> {
        let path_mtu = PathMtu::try_from(theirs.path_mtu).unwrap_or(PathMtu::Mtu256).min(own_path_mtu);
        let address = AddressVector::new(gid, gid_index).traffic_class(options.traffic_class);
        let receive = ReadyToReceive::new(address, Qpn::new(theirs.qpn), Psn::new(theirs.psn))
            .path_mtu(path_mtu)
            .max_dest_rd_atomic(0)
            .min_rnr_timer(RNR_TIMER);
        context.modify_qp(self.qp, Transition::ReadyToReceive(receive))?;
        // No RNR NAK is due; should one come, it is no reason to give up at once.
        let send = options.ready_to_send(self.psn).rnr_retry(6).max_rd_atomic(0);
        context.modify_qp(self.qp, Transition::ReadyToSend(send))?;
        self.remote_ring = RemoteAddress { addr: theirs.ring, rkey: RKey::new(theirs.ring_key) };
        self.ring_space = Space::new(theirs.ring_bytes);
        self.depth = self.limits.depth.min(theirs.depth);
        self.has_heard = true;
        Ok(())
    }

    /// The queue pair, whose completions are this channel's.
    pub(crate) fn qp(&self) -> Qp {
        self.qp
    }

    /// Frees everything.
    pub(crate) fn destroy(
        self,
        context: &mut Context,
        now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        context.destroy_qp(self.qp)?;
        let mut now = now;
        for mr in [self.ring, self.mirror].into_iter().chain(self.staging) {
            deregister(context, &mut now, mr)?;
        }
        Ok(())
    }

    /// Every message has a completion from now on, and none of those before it matters.
    pub(crate) fn signal_all(&mut self) {
        self.signals_all = true;
    }

    /// Whether the peer has received all that was sent since [`signal_all`](Channel::signal_all).
    pub(crate) fn is_flushed(&self) -> bool {
        !self.posted.iter().any(|posted| posted.is_signaled)
    }

    /// Nobody waits for what is under way any more.
    pub(crate) fn forget(&mut self) {
        self.posted.clear();
    }

    /// Sends the ACKs that the peer is owed.
    pub(crate) fn acknowledge(&mut self, context: &mut Context) -> Result<(), crate::Error> {
        self.has_posted = true;
        Ok(context.acknowledge(self.qp)?)
    }

    /// Whether something was posted since this was asked last: it leaves with the next poll.
    pub(crate) fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.has_posted)
    }

    /// Elements of a message in the ring, at most.
    pub(crate) fn eager_bytes(&self) -> u32 {
        self.limits.eager
    }

    fn has_room_for_work(&self) -> bool {
        (self.posted.len() as u32) < self.limits.depth + SPARE / 2
    }

    /// Whether a message may be sent, if there is room for it.
    fn may_send(&self) -> bool {
        self.is_open
            && (self.untaken.len() as u32) < self.depth
            && (self.posted.len() as u32) < self.limits.depth
    }

    /// Sends elements, or what else follows a header, by way of the ring. Returns whether there was room.
    pub(crate) fn send_short(
        &mut self,
        context: &mut Context,
        (call, age): (&Call, Age),
        purpose: Purpose,
        bytes: u32,
        fill: impl FnOnce(&mut Context, Mr, u32) -> Result<(), crate::Error>,
    ) -> Result<bool, crate::Error> {
        if !self.may_send() {
            return Ok(false);
        }
        let length = Header::BYTES as u32 + bytes;
        let Some(offset) = self.ring_space.take(length, Immediate::UNIT) else { return Ok(false) };
        let header = Header::new(call, purpose, self.taken).of_age(age);
        self.has_told();
        context.write(self.mirror, u64::from(offset), header.as_bytes())?;
        fill(context, self.mirror, offset + Header::BYTES as u32)?;
        let sge = Sge { mr: self.mirror, offset: u64::from(offset), length };
        let target = beyond(self.remote_ring, offset);
        let op = SendOp::WriteWithImm(target, Immediate::Ring(offset).value());
        self.untaken.push_back(Room::Ring(offset));
        self.post(context, op, Data::Sges(&[sge]), None, false)?;
        Ok(true)
    }

    /// Sends a chunk to staging memory. Returns whether there was room.
    pub(crate) fn send_staged(
        &mut self,
        context: &mut Context,
        from: Sge,
        waiting: Waiting,
    ) -> Result<bool, crate::Error> {
        if !self.may_send() {
            return Ok(false);
        }
        let Some(offset) = self.staging_space.take(from.length, Immediate::UNIT) else { return Ok(false) };
        let op = SendOp::WriteWithImm(beyond(self.remote_staging, offset), Immediate::Staged(offset).value());
        self.untaken.push_back(Room::Staging(offset));
        self.post(context, op, Data::Sges(&[from]), Some(waiting), true)?;
        Ok(true)
    }

    /// Whether the peer has staging memory for a chunk.
    pub(crate) fn has_staging_for(&self, bytes: u32) -> bool {
        self.staging_space.length() >= bytes
    }

    /// Writes a chunk to its place. Returns whether there was room.
    pub(crate) fn send_landing(
        &mut self,
        context: &mut Context,
        from: Sge,
        to: RemoteAddress,
        waiting: Waiting,
    ) -> Result<bool, crate::Error> {
        if !self.may_send() {
            return Ok(false);
        }
        let op = SendOp::WriteWithImm(to, Immediate::Landed.value());
        self.untaken.push_back(Room::None);
        self.post(context, op, Data::Sges(&[from]), Some(waiting), true)?;
        Ok(true)
    }

    /// Makes staging memory, if there is none.
    pub(crate) fn make_staging(
        &mut self,
        context: &mut Context,
        pd: Pd,
        computer: &mut Computer,
    ) -> Result<(), crate::Error> {
        if self.staging.is_none() {
            let memory = allocate(computer.device(), self.limits.staging as usize)?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            self.staging = Some(computer.register(context, pd, memory, access)?);
        }
        Ok(())
    }

    /// The grant of this end, for chunks that land at `output`.
    pub(crate) fn grant(
        &self,
        context: &Context,
        output: Option<RemoteAddress>,
    ) -> Result<Grant, crate::Error> {
        let mut grant = Grant::new_zeroed();
        if let Some(output) = output {
            grant.output.set(output.addr);
            grant.output_key.set(output.rkey.value());
        }
        if let Some(staging) = self.staging {
            let remote = context.remote(staging)?;
            grant.staging.set(remote.addr);
            grant.staging_key.set(remote.rkey.value());
            grant.staging_bytes.set(self.limits.staging);
        }
        Ok(grant)
    }

    /// Tells the peer how many messages have been taken, where no header has for long.
    /// Whether it did.
    pub(crate) fn return_credits(&mut self, context: &mut Context) -> Result<bool, crate::Error> {
        let [ring, staging] = self.untold;
        let is_due = self.taken.wrapping_sub(self.told) >= (self.depth / 4).max(1)
            || ring >= self.limits.ring / 4
            || staging >= self.limits.staging / 4;
        if !is_due || !self.is_open || !self.has_room_for_work() {
            return Ok(false);
        }
        self.has_told();
        let op = SendOp::WriteWithImm(NOWHERE, Immediate::Credit(self.taken).value());
        self.post(context, op, Data::Inline(&[]), None, false)?;
        Ok(true)
    }

    /// The oldest message that is not taken.
    pub(crate) fn arrival(&self) -> Option<&Arrival> {
        self.arrivals.front().and_then(|message| message.arrival.as_ref())
    }

    /// The oldest message has been taken.
    pub(crate) fn take(&mut self) {
        self.pop();
        // Those behind it that were dealt with as they came.
        while self.arrivals.front().is_some_and(|message| message.arrival.is_none()) {
            self.pop();
        }
    }

    fn pop(&mut self) {
        if let Some(message) = self.arrivals.pop_front() {
            self.taken = self.taken.wrapping_add(1);
            let [ring, staging] = message.room;
            self.untold = [self.untold[0] + ring, self.untold[1] + staging];
        }
    }

    /// The peer knows how many messages have been taken.
    fn has_told(&mut self) {
        self.told = self.taken;
        self.untold = [0; 2];
    }

    /// Takes a completion of this channel's queue pair. Steps whose memory is free again go to `done`.
    pub(crate) fn complete(
        &mut self,
        context: &mut Context,
        now: Nanos,
        wc: &WorkCompletion,
        mut done: impl FnMut(Waiting),
    ) -> Result<News, crate::Error> {
        if wc.status != WcStatus::Success {
            return Ok(News::Failed(wc.status));
        }
        let low = wc.wr_id as u32;
        if low != RECEIVE {
            // Those before it have completed too.
            let mut moved = false;
            for _ in 0..=low {
                match self.posted.pop_front() {
                    Some(Posted { waiting: Some(waiting), .. }) => {
                        done(waiting);
                        moved = true;
                    }
                    _ => moved |= self.posted.len() as u32 + 1 >= self.limits.depth,
                }
            }
            return Ok(if moved { News::Moved } else { News::None });
        }
        self.post_receive(context)?;
        let Some(immediate) = wc.immediate else {
            return Ok(News::Broken(format!("{:?} without an immediate", wc.opcode)));
        };
        match Immediate::parse(immediate) {
            Immediate::Credit(taken) => Ok(self.take_credits(taken)),
            _ if self.arrivals.len() as u32 >= self.limits.depth => {
                Ok(News::Broken(format!("more than {} messages that were not taken", self.limits.depth)))
            }
            Immediate::Ring(offset) => self.take_short(context, now, offset, wc.byte_len),
            Immediate::Staged(offset) => {
                let end = offset.checked_add(wc.byte_len).filter(|end| *end <= self.limits.staging);
                match (self.staging, end) {
                    (Some(staging), Some(_)) => Ok(self.arrive(Some((staging, offset)), wc.byte_len)),
                    _ => {
                        Ok(News::Broken(format!("{} bytes at byte {offset} of staging memory", wc.byte_len)))
                    }
                }
            }
            Immediate::Landed => Ok(self.arrive(None, wc.byte_len)),
        }
    }

    /// What the peer has told of since this was asked last.
    pub(crate) fn take_heard(&mut self) -> Option<Heard> {
        self.heard.take()
    }

    /// A chunk, of the call that was told last.
    fn arrive(&mut self, from: Option<(Mr, u32)>, bytes: u32) -> News {
        let Some(call) = self.newest else { return News::Broken("a chunk of no call".to_owned()) };
        let room = [0, if from.is_some() { bytes } else { 0 }];
        self.arrivals.push_back(Message { arrival: Some(Arrival { call, from, bytes }), room });
        News::Moved
    }

    fn take_short(
        &mut self,
        context: &Context,
        now: Nanos,
        offset: u32,
        length: u32,
    ) -> Result<News, crate::Error> {
        let end = offset.checked_add(length).filter(|end| *end <= self.limits.ring);
        let (Some(_), Some(bytes)) = (end, length.checked_sub(Header::BYTES as u32)) else {
            return Ok(News::Broken(format!("a message of {length} bytes at byte {offset} of the ring")));
        };
        let mut header = Header::new_zeroed();
        context.read(self.ring, u64::from(offset), header.as_mut_bytes())?;
        let (call, purpose) = match header.parse() {
            Ok(parsed) => parsed,
            Err(what) => {
                return Ok(News::Broken(format!(
                    "a header whose {what} is unknown: {:02x?}",
                    header.as_bytes()
                )));
            }
        };
        if let broken @ News::Broken(_) = self.take_credits(header.taken.get()) {
            return Ok(broken);
        }
        let Age { age, idle } = header.age();
        self.heard = Some(Heard { call: call.number, began: now - age, idle });
        let from = Some((self.ring, offset + Header::BYTES as u32));
        match (purpose, bytes) {
            (Purpose::Elements, bytes) => {
                self.newest = Some(call);
                self.arrivals
                    .push_back(Message { arrival: Some(Arrival { call, from, bytes }), room: [length, 0] });
                Ok(News::Moved)
            }
            (Purpose::Call, 0) => {
                self.newest = Some(call);
                self.pass_over(length);
                Ok(News::None)
            }
            (Purpose::Grant, bytes) if bytes as usize == size_of::<Grant>() => {
                let mut grant = Grant::new_zeroed();
                let at = u64::from(offset) + Header::BYTES as u64;
                context.read(self.ring, at, grant.as_mut_bytes())?;
                self.pass_over(length);
                if grant.staging_bytes.get() > 0 && self.staging_space.length() == 0 {
                    let rkey = RKey::new(grant.staging_key.get());
                    self.remote_staging = RemoteAddress { addr: grant.staging.get(), rkey };
                    self.staging_space = Space::new(grant.staging_bytes.get());
                }
                Ok(News::Granted(call, grant))
            }
            (purpose, bytes) => Ok(News::Broken(format!("{purpose:?} with {bytes} bytes"))),
        }
    }

    /// A message that is dealt with at once.
    fn pass_over(&mut self, length: u32) {
        self.arrivals.push_back(Message { arrival: None, room: [length, 0] });
        if self.arrivals.len() == 1 {
            self.pop();
        }
    }

    fn take_credits(&mut self, taken: u32) -> News {
        let new = taken.wrapping_sub(self.credited) & Immediate::MASK;
        if new as usize > self.untaken.len() {
            // An older header may come behind a newer credit: both are sent in order, so it does not.
            return News::Broken(format!("it has taken {new} messages of {}", self.untaken.len()));
        }
        for _ in 0..new {
            let room = self.untaken.pop_front();
            match room {
                Some(Room::Ring(_)) => {
                    let next = self.untaken.iter().find_map(|room| match room {
                        Room::Ring(offset) => Some(*offset),
                        _ => None,
                    });
                    self.ring_space.give_back(next);
                }
                Some(Room::Staging(_)) => {
                    let next = self.untaken.iter().find_map(|room| match room {
                        Room::Staging(offset) => Some(*offset),
                        _ => None,
                    });
                    self.staging_space.give_back(next);
                }
                _ => {}
            }
        }
        self.credited = self.credited.wrapping_add(new);
        if new > 0 { News::Moved } else { News::None }
    }

    fn post(
        &mut self,
        context: &mut Context,
        op: SendOp,
        data: Data<'_>,
        waiting: Option<Waiting>,
        signaled: bool,
    ) -> Result<(), crate::Error> {
        let signaled = signaled || self.signals_all || self.unsignaled + 1 >= (self.limits.depth / 4).max(1);
        // How many are before it that have no completion of their own.
        let wr_id = self.wr_id(self.unsignaled);
        self.unsignaled = if signaled { 0 } else { self.unsignaled + 1 };
        // Nobody waits for its ACK, which may come with that of a later one.
        let flags = SendFlags::default().signaled(signaled).lazy_ack(!signaled);
        context.post_send(self.qp, &SendWorkRequest { wr_id, op, data, flags })?;
        self.posted.push_back(Posted { waiting, is_signaled: signaled });
        self.has_posted = true;
        Ok(())
    }

    fn wr_id(&self, low: u32) -> u64 {
        u64::from(self.peer) << 32 | u64::from(low)
    }

    /// The peer of the channel that a work request was of.
    pub(crate) fn peer_of(wr_id: u64) -> u32 {
        (wr_id >> 32) as u32
    }

    /// For a WRITE with immediate, which brings nothing to its receive.
    fn post_receive(&self, context: &mut Context) -> Result<(), crate::Error> {
        Ok(context.post_recv(self.qp, &ReceiveWorkRequest { wr_id: self.wr_id(RECEIVE), sges: &[] })?)
    }
}

/// The lower half of the work request id of receives. That of sends says how many sends before them have no completion of their
/// own. The upper half is the peer.
const RECEIVE: u32 = u32::MAX;

/// Work requests that a queue has room for beyond one for each message: credits, of which a quarter of the depth is due each, and
/// flushes.
const SPARE: u32 = 16;

/// 0.64 ms: about a poll of a rank that was off its core.
const RNR_TIMER: RnrTimer = RnrTimer::new(12).unwrap();

/// An empty WRITE goes nowhere; neither address nor key is looked at (IBA C9-88).
const NOWHERE: RemoteAddress = RemoteAddress { addr: 0, rkey: RKey::new(0) };

fn beyond(start: RemoteAddress, offset: u32) -> RemoteAddress {
    RemoteAddress { addr: start.addr.wrapping_add(u64::from(offset)), ..start }
}
