//! A channel: messages to and from one peer, in order, under credits, over a queue pair for each rail
//! (`channel/path.rs`).
//!
//! Each end has a ring into which the other end writes short messages and, if operations combine longer data, staging
//! memory. The sender allocates space in both, and sends another message only while fewer than [`Limits::depth`] have not
//! been taken, so no RNR NAK occurs. The number of messages taken is in every header, and in a message of its own if there
//! is no other. Short messages are copied into a mirror of the peer's ring before they are sent, so their source may change
//! immediately, and no step waits for the ACK.
//! Each message uses the rail that will probably complete it first. Messages are numbered, and taken in the order of their
//! numbers.

pub(crate) mod message;
mod path;
mod space;

use std::collections::VecDeque;
use std::time::Duration;

use arrayvec::ArrayVec;
use ferroce::{Access, Context, Cq, Gid, Mr, Nanos, PathMtu, Qp, Sge, WcStatus, WorkCompletion};
use zerocopy::{FromZeros, IntoBytes};

use crate::compute::Computer;
use crate::control::Left;
use crate::options::Options;
use crate::ports::{MAX_RAILS, Ports};
use message::{Age, Call, Grant, Header, Immediate, Place, Purpose, Remote};
pub(crate) use path::Path;
use path::{Content, Posted, RECEIVE, SPARE};
use space::Space;

/// The limits of outstanding data of a channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Messages not yet taken by the peer.
    pub(crate) depth: u32,
    /// Bytes of a ring.
    pub(crate) ring: u32,
    /// Bytes of elements of a message in the ring.
    pub(crate) eager: u32,
    /// Bytes of staging memory, for this many chunks.
    pub(crate) staging: u32,
    pub(crate) chunks: u32,
}

/// The data of this end that the peer needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) qpn: u32,
    pub(crate) psn: u32,
    pub(crate) path_mtu: u32,
    pub(crate) ring: u64,
    pub(crate) ring_key: u32,
    pub(crate) ring_bytes: u32,
    pub(crate) depth: u32,
    /// The number of the path's queue pair, from 1 on: a failed one is replaced.
    pub(crate) epoch: u32,
}

/// The result of a completion.
#[derive(Debug)]
pub(crate) enum News {
    /// Nothing to process.
    None,
    /// A message has arrived, or there is room to send again.
    Moved,
    /// A grant.
    Granted(Call, Grant),
    /// The queue pair of a rail has failed.
    Failed(WcStatus),
    /// The peer violated the protocol.
    Broken(String),
}

/// A message that has arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrival {
    pub(crate) call: Call,
    /// The memory of the elements; `None` if they were written to their destination.
    pub(crate) from: Option<(Mr, u32)>,
    pub(crate) bytes: u32,
}

/// A call of the peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heard {
    pub(crate) call: u32,
    /// When the call started there, by the clock of this rank, and how long the peer had been in no call before.
    pub(crate) began: Nanos,
    pub(crate) idle: Duration,
}

/// One end of a channel.
pub(crate) struct Channel {
    limits: Limits,
    /// By rail.
    paths: Vec<Path>,
    /// This end's memory: the ring, in which messages arrive, the mirror of the peer's ring, and staging memory.
    ring: Mr,
    mirror: Mr,
    staging: Option<Mr>,
    /// The peer knows of the staging memory.
    pub(crate) staging_is_told: bool,
    remote_staging: Option<Remote>,
    /// The peer's depth, if that is lower.
    depth: u32,

    ring_space: Space,
    staging_space: Space,
    /// Messages not yet taken by the peer, the oldest first, and the number taken so far.
    untaken: VecDeque<Room>,
    credited: u32,
    /// Messages that a failed rail did not deliver, and that were not sent again yet.
    unsent: VecDeque<Posted>,
    signals_all: bool,
    has_posted: bool,
    /// When rails were last checked.
    looked: Nanos,

    /// Messages that have arrived, from the next one in order on; those of other rails may be ahead.
    early: VecDeque<Option<Raw>>,
    arrivals: VecDeque<Message>,
    /// The call of the newest message in the ring, which is also that of the chunks after it.
    newest: Option<Call>,
    /// The last call that the peer reported.
    heard: Option<Heard>,
    taken: u32,
    told: u32,
    /// Free bytes of the ring and of staging memory that were not yet reported to the peer.
    untold: [u32; 2],
}

/// A received message, before it is parsed.
#[derive(Clone, Copy, Debug)]
struct Raw {
    place: Place,
    bytes: u32,
}

/// The space of a message in the peer's memory.
#[derive(Clone, Copy, Debug)]
enum Room {
    Ring(u32),
    Staging(u32),
    None,
}

/// A step of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) operation: u64,
    pub(crate) step: u32,
}

/// A message that has arrived.
#[derive(Clone, Copy, Debug)]
struct Message {
    /// `None` if it has been processed.
    arrival: Option<Arrival>,
    /// A device is reading it.
    is_begun: bool,
    /// The bytes that it occupies in the ring and in staging memory.
    room: [u32; 2],
}

impl Message {
    fn new(arrival: Option<Arrival>, room: [u32; 2]) -> Message {
        Message { arrival, is_begun: false, room }
    }
}

impl Channel {
    /// Creates this end, ready to receive, with a path for each completion queue.
    pub(crate) fn new(
        (ports, computer): (&mut Ports, &mut Computer),
        cqs: &[Cq],
        peer: u32,
        limits: Limits,
    ) -> Result<Channel, crate::Error> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = ports.allocate(None, limits.ring as usize)?;
        let ring = ports.register(memory, access)?;
        let mirror = ports
            .allocate(None, limits.ring as usize)
            .and_then(|memory| ports.register(memory, Access::LOCAL_WRITE));
        let mirror = match mirror {
            Ok(mirror) => mirror,
            Err(error) => {
                ports.deregister(|| Nanos::ZERO, ring)?;
                return Err(error);
            }
        };
        let mut channel = Channel {
            limits,
            paths: Vec::with_capacity(cqs.len()),
            ring,
            mirror,
            staging: None,
            staging_is_told: false,
            remote_staging: None,
            depth: limits.depth,
            ring_space: Space::new(0),
            staging_space: Space::new(0),
            untaken: VecDeque::with_capacity(limits.depth as usize),
            credited: 0,
            unsent: VecDeque::new(),
            signals_all: false,
            has_posted: false,
            looked: Nanos::ZERO,
            early: VecDeque::with_capacity(limits.depth as usize),
            arrivals: VecDeque::with_capacity(limits.depth as usize),
            newest: None,
            heard: None,
            taken: 0,
            told: 0,
            untold: [0; 2],
        };
        for (rail, cq) in cqs.iter().enumerate() {
            match Path::new(ports, rail, *cq, peer, &limits) {
                Ok(path) => channel.paths.push(path),
                Err(error) => {
                    channel.destroy((ports, computer), || Nanos::ZERO)?;
                    return Err(error);
                }
            }
        }
        Ok(channel)
    }

    /// The data that the peer needs for the path of a rail.
    pub(crate) fn link(&self, ports: &Ports, rail: usize, path_mtu: PathMtu) -> Result<Link, crate::Error> {
        let (ring, keys) = ports.keys(self.ring)?;
        let (qpn, psn, epoch) = self.paths[rail].number(ports)?;
        Ok(Link {
            qpn,
            psn,
            path_mtu: path_mtu.bytes(),
            ring,
            ring_key: keys[rail].value(),
            ring_bytes: self.limits.ring,
            depth: self.limits.depth,
            epoch,
        })
    }

    /// The paths, by rail.
    pub(crate) fn paths(&self) -> &[Path] {
        &self.paths
    }

    /// The path of a rail, if both ends have that rail.
    pub(crate) fn path(&mut self, rail: usize) -> Option<&mut Path> {
        self.paths.get_mut(rail)
    }

    /// Whether to [connect](Channel::connect) to the peer's queue pair `epoch` of a rail.
    pub(crate) fn is_to_connect(&self, now: Nanos, rail: usize, epoch: u32) -> bool {
        self.paths.get(rail).is_some_and(|path| path.is_to_connect(now, epoch))
    }

    /// Connects to the peer's end of a path.
    pub(crate) fn connect(
        &mut self,
        ports: &mut Ports,
        rail: usize,
        options: &Options,
        to: (Gid, usize),
        own_path_mtu: PathMtu,
        theirs: &Link,
    ) -> Result<(), crate::Error> {
        let Some(path) = self.paths.get_mut(rail) else { return Ok(()) };
        path.connect(ports, options, to, own_path_mtu, theirs)?;
        if self.ring_space.length() == 0 {
            self.ring_space = Space::new(theirs.ring_bytes);
            self.depth = self.limits.depth.min(theirs.depth);
        }
        Ok(())
    }

    /// The peer is ready to receive from this end's queue pair `own` of a rail. Returns whether that is new.
    pub(crate) fn open(&mut self, now: Nanos, rail: usize, own: u32) -> bool {
        self.paths.get_mut(rail).is_some_and(|path| path.open(now, own))
    }

    /// Whether the peer is ready to receive.
    pub(crate) fn is_open(&self) -> bool {
        self.paths.iter().any(Path::is_open)
    }

    /// The queue pair of a rail.
    pub(crate) fn qp(&self, rail: usize) -> Qp {
        self.paths[rail].qp
    }

    /// Frees everything.
    pub(crate) fn destroy(
        self,
        (ports, computer): (&mut Ports, &mut Computer),
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        for (rail, path) in self.paths.iter().enumerate() {
            ports.of_mut(rail).context.destroy_qp(path.qp)?;
        }
        for mr in [self.ring, self.mirror].into_iter().chain(self.staging) {
            computer.deregister(ports, &mut now, mr)?;
        }
        Ok(())
    }

    /// Whether nothing more arrives after all paths were [left](Channel::leave), and devices have copied all that has
    /// arrived.
    pub(crate) fn is_still(&self, ports: &Ports) -> bool {
        self.paths.iter().all(|path| path.is_still(ports))
    }

    /// From now on every message has a signaled completion, and earlier ones are not waited for.
    pub(crate) fn signal_all(&mut self) {
        self.signals_all = true;
    }

    /// Whether the peer has received all that was sent since [`signal_all`](Channel::signal_all).
    pub(crate) fn is_flushed(&self) -> bool {
        self.unsent.is_empty() && self.paths.iter().all(Path::is_flushed)
    }

    /// Outstanding messages are not waited for any more.
    pub(crate) fn forget(&mut self) {
        self.unsent.clear();
        self.paths.iter_mut().for_each(Path::forget);
    }

    /// Sends the ACKs that are due to the peer.
    pub(crate) fn acknowledge(&mut self, ports: &mut Ports) -> Result<(), crate::Error> {
        self.has_posted = true;
        for (rail, path) in self.paths.iter().enumerate().filter(|(_, path)| path.is_open()) {
            ports.of_mut(rail).context.acknowledge(path.qp)?;
        }
        Ok(())
    }

    /// Whether work was posted since the last call; it is sent by the next poll.
    pub(crate) fn take_posted(&mut self) -> bool {
        std::mem::take(&mut self.has_posted)
    }

    /// The most bytes of elements of a message in the ring.
    pub(crate) fn eager_bytes(&self) -> u32 {
        self.limits.eager
    }

    /// The rail for a chunk of `chunk` bytes, or for a short message (0): the one that will probably complete it first.
    /// `None` if none has room.
    fn rail_for(&self, chunk: u32) -> Option<usize> {
        let has_room = |path: &Path| path.is_open() && (path.posted.len() as u32) < self.limits.depth;
        if let [only] = self.paths.as_slice() {
            return has_room(only).then_some(0);
        }
        // A posted message can't change its rail when that rail slows down.
        let longest = u64::from(UNDER_WAY * self.limits.staging / self.limits.chunks);
        let has_room = |path: &Path| {
            has_room(path) && (chunk == 0 || path.load() == 0 || path.load() + u64::from(chunk) <= longest)
        };
        let open = || self.paths.iter().enumerate().filter(|(_, path)| has_room(path));
        let are_known = open().all(|(_, path)| path.rate().is_some());
        let cost = |path: &Path| {
            let rate = path.rate().filter(|_| are_known).unwrap_or(1.0);
            if path.is_doubted() { f64::INFINITY } else { (path.load() + u64::from(chunk)) as f64 / rate }
        };
        open().min_by(|(_, a), (_, b)| cost(a).total_cmp(&cost(b))).map(|(rail, _)| rail)
    }

    /// The rail for a message, if there is room for it: for a chunk of `chunk` bytes, or for a short message (0).
    fn may_send(&self, chunk: u32) -> Option<usize> {
        if (self.untaken.len() as u32) < self.depth { self.rail_for(chunk) } else { None }
    }

    /// The number of the next message.
    fn number(&self) -> u8 {
        self.credited.wrapping_add(self.untaken.len() as u32) as u8
    }

    /// Sends elements, or another body after the header, through the ring. Returns whether there was room.
    pub(crate) fn send_short(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        (call, age): (&Call, Age),
        purpose: Purpose,
        bytes: u32,
        fill: impl FnOnce(&mut Context, Mr, u32) -> Result<(), crate::Error>,
    ) -> Result<bool, crate::Error> {
        let Some(rail) = self.may_send(0) else { return Ok(false) };
        let length = Header::BYTES as u32 + bytes;
        let Some(offset) = self.ring_space.take(length, Immediate::UNIT) else { return Ok(false) };
        let header = Header::new(call, purpose, self.taken).of_age(age);
        self.has_told();
        ports.write(self.mirror, u64::from(offset), header.as_bytes())?;
        fill(ports, self.mirror, offset + Header::BYTES as u32)?;
        let from = Sge { mr: self.mirror, offset: u64::from(offset), length };
        let content = Content::Ring { number: self.number(), from };
        self.untaken.push_back(Room::Ring(offset));
        self.post((ports, now), rail, (content, None, false))?;
        Ok(true)
    }

    /// Sends a chunk to staging memory. Returns whether there was room.
    pub(crate) fn send_staged(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        from: Sge,
        waiting: Waiting,
    ) -> Result<bool, crate::Error> {
        let (Some(rail), Some(to)) = (self.may_send(from.length), self.remote_staging) else {
            return Ok(false);
        };
        let Some(offset) = self.staging_space.take(from.length, Immediate::UNIT) else { return Ok(false) };
        let content = Content::Staged { number: self.number(), from, offset, to };
        self.untaken.push_back(Room::Staging(offset));
        self.post((ports, now), rail, (content, Some(waiting), true))?;
        Ok(true)
    }

    /// Whether the peer has staging memory for a chunk.
    pub(crate) fn has_staging_for(&self, bytes: u32) -> bool {
        self.staging_space.length() >= bytes
    }

    /// Writes a chunk to its destination. Returns whether there was room.
    pub(crate) fn send_landing(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        from: Sge,
        to: Remote,
        waiting: Waiting,
    ) -> Result<bool, crate::Error> {
        let Some(rail) = self.may_send(from.length) else { return Ok(false) };
        let content = Content::Landing { number: self.number(), from, to };
        self.untaken.push_back(Room::None);
        self.post((ports, now), rail, (content, Some(waiting), true))?;
        Ok(true)
    }

    /// Allocates staging memory, if there is none.
    pub(crate) fn make_staging(
        &mut self,
        ports: &mut Ports,
        computer: &mut Computer,
    ) -> Result<(), crate::Error> {
        if self.staging.is_none() {
            let memory = ports.allocate(computer.device(), self.limits.staging as usize)?;
            let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
            self.staging = Some(computer.register(ports, memory, access)?);
        }
        Ok(())
    }

    /// The grant of this end, for chunks that are written to `output`.
    pub(crate) fn grant(&self, ports: &Ports, output: Option<Remote>) -> Result<Grant, crate::Error> {
        let mut grant = Grant::new_zeroed();
        if let Some(output) = output {
            grant.set_output(&output);
        }
        if let Some(staging) = self.staging {
            let (address, keys) = ports.keys(staging)?;
            grant.set_staging(&Remote { address, keys }, self.limits.staging);
        }
        Ok(grant)
    }

    /// Reports the number of taken messages to the peer, if no header has reported it for long. Returns whether it did.
    pub(crate) fn return_credits(&mut self, ports: &mut Ports, now: Nanos) -> Result<bool, crate::Error> {
        let [ring, staging] = self.untold;
        let is_due = self.taken.wrapping_sub(self.told) >= (self.depth / 4).max(1)
            || ring >= self.limits.ring / 4
            || staging >= self.limits.staging / 4;
        if !is_due {
            return Ok(false);
        }
        let has_room =
            |path: &&Path| path.is_open() && (path.posted.len() as u32) < self.limits.depth + SPARE / 2;
        let open = self.paths.iter().filter(has_room).min_by_key(|path| path.load());
        let Some(rail) = open.map(Path::rail) else { return Ok(false) };
        self.has_told();
        self.post((ports, now), rail, (Content::Credit(self.taken), None, false))?;
        Ok(true)
    }

    /// The oldest message that has not been taken, and is not being read by a device.
    pub(crate) fn arrival(&self) -> Option<&Arrival> {
        match self.arrivals.front() {
            Some(message) if message.is_begun => {
                self.next_index().and_then(|index| self.arrivals[index].arrival.as_ref())
            }
            front => front.and_then(|message| message.arrival.as_ref()),
        }
    }

    /// The index of the oldest message that has not been taken, and is not being read by a device.
    fn next_index(&self) -> Option<usize> {
        self.arrivals.iter().position(|message| message.arrival.is_some() && !message.is_begun)
    }

    /// The oldest message has been taken.
    pub(crate) fn take(&mut self) {
        let index = self.next_index();
        self.take_at(index);
    }

    /// A device has started to read the oldest message. Its memory stays occupied until [`end`](Channel::end).
    pub(crate) fn begin(&mut self) {
        if let Some(index) = self.next_index() {
            self.arrivals[index].is_begun = true;
        }
    }

    /// The device has finished reading the oldest of the messages that it had started to read.
    pub(crate) fn end(&mut self) {
        let index = self.arrivals.iter().position(|message| message.arrival.is_some() && message.is_begun);
        self.take_at(index);
    }

    /// Memory of messages is freed in order.
    fn take_at(&mut self, index: Option<usize>) {
        match index {
            None => {}
            Some(0) => {
                self.pop();
                // Messages after it that were processed earlier.
                while self.arrivals.front().is_some_and(|message| message.arrival.is_none()) {
                    self.pop();
                }
            }
            Some(index) => self.arrivals[index].arrival = None,
        }
    }

    fn pop(&mut self) {
        if let Some(message) = self.arrivals.pop_front() {
            self.taken = self.taken.wrapping_add(1);
            let [ring, staging] = message.room;
            self.untold = [self.untold[0] + ring, self.untold[1] + staging];
        }
    }

    /// The peer has been sent the number of taken messages.
    fn has_told(&mut self) {
        self.told = self.taken;
        self.untold = [0; 2];
    }

    /// Processes a completion of this channel's queue pair of a rail. Steps whose memory is free again are passed to
    /// `done`. [`next`](Channel::next) returns the messages that have arrived.
    pub(crate) fn complete(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        rail: usize,
        wc: &WorkCompletion,
        mut done: impl FnMut(Waiting),
    ) -> Result<News, crate::Error> {
        let Channel { paths, arrivals, limits, taken, .. } = self;
        // Completions of an earlier queue pair are ignored.
        let Some(path) = paths.get_mut(rail).filter(|path| path.qp == wc.qp) else { return Ok(News::None) };
        let low = wc.wr_id as u32;
        if wc.status != WcStatus::Success {
            if low == RECEIVE {
                path.has_flushed();
            }
            // A queue pair that was left is expected to fail.
            return Ok(if path.is_left() { News::None } else { News::Failed(wc.status) });
        }
        if low != RECEIVE {
            // Earlier work requests have completed too.
            let mut moved = path.posted.len() as u32 > limits.depth;
            path.completed(now, low, |posted| {
                if let Some(waiting) = posted.waiting {
                    done(waiting);
                    moved = true;
                }
            });
            moved |= !self.unsent.is_empty();
            return Ok(if moved { News::Moved } else { News::None });
        }
        path.has_received(ports, now)?;
        let Some(immediate) = wc.immediate else {
            return Ok(News::Broken(format!("{:?} without an immediate", wc.opcode)));
        };
        let (number, place) = match Immediate::parse(immediate) {
            Immediate::Credit(taken) => return Ok(self.take_credits(taken)),
            Immediate::Message(number, place) => (number, place),
        };
        let due = taken.wrapping_add(arrivals.len() as u32) as u8;
        let ahead = usize::from(number.wrapping_sub(due));
        if ahead + arrivals.len() >= limits.depth as usize || (ahead > 0 && self.paths.len() == 1) {
            return Ok(News::Broken(format!(
                "message {number} (modulo 256) instead of {due}, {} were not consumed, at most {} may be",
                arrivals.len(),
                limits.depth
            )));
        }
        while self.early.len() <= ahead {
            self.early.push_back(None);
        }
        match &mut self.early[ahead] {
            Some(_) => return Ok(News::Broken(format!("message {number} (modulo 256) arrived twice"))),
            none => *none = Some(Raw { place, bytes: wc.byte_len }),
        }
        Ok(News::None)
    }

    /// Processes the next message that has arrived.
    pub(crate) fn next(&mut self, context: &mut Context, now: Nanos) -> Result<Option<News>, crate::Error> {
        let Some(&Some(Raw { place, bytes })) = self.early.front() else { return Ok(None) };
        self.early.pop_front();
        let news = match place {
            Place::Ring(offset) => self.take_short(context, now, offset, bytes)?,
            Place::Staging(offset) => {
                let end = offset.checked_add(bytes).filter(|end| *end <= self.limits.staging);
                match (self.staging, end) {
                    (Some(staging), Some(_)) => self.arrive(Some((staging, offset)), bytes),
                    _ => News::Broken(format!("{bytes} bytes at byte {offset} of staging memory")),
                }
            }
            Place::Landed => self.arrive(None, bytes),
        };
        Ok(Some(news))
    }

    /// The call that the peer has reported since the last call of this function.
    pub(crate) fn take_heard(&mut self) -> Option<Heard> {
        self.heard.take()
    }

    /// A chunk of the call reported last.
    fn arrive(&mut self, from: Option<(Mr, u32)>, bytes: u32) -> News {
        let Some(call) = self.newest else { return News::Broken("a chunk of no call".to_owned()) };
        let room = [0, if from.is_some() { bytes } else { 0 }];
        self.arrivals.push_back(Message::new(Some(Arrival { call, from, bytes }), room));
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
                self.arrivals.push_back(Message::new(Some(Arrival { call, from, bytes }), [length, 0]));
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
                if let (staging, bytes @ 1..) = grant.staging()
                    && self.remote_staging.is_none()
                {
                    self.remote_staging = Some(staging);
                    self.staging_space = Space::new(bytes);
                }
                Ok(News::Granted(call, grant))
            }
            (purpose, bytes) => Ok(News::Broken(format!("{purpose:?} with {bytes} bytes"))),
        }
    }

    /// A message that is processed immediately.
    fn pass_over(&mut self, length: u32) {
        self.arrivals.push_back(Message::new(None, [length, 0]));
        if self.arrivals.len() == 1 {
            self.pop();
        }
    }

    fn take_credits(&mut self, taken: u32) -> News {
        let new = taken.wrapping_sub(self.credited) & Immediate::MASK;
        if self.paths.len() > 1 && new > Immediate::MASK / 2 {
            // A newer one has arrived on another rail.
            return News::None;
        }
        if new as usize > self.untaken.len() {
            return News::Broken(format!("it has consumed {new} messages of {}", self.untaken.len()));
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
        (ports, now): (&mut Ports, Nanos),
        rail: usize,
        (content, waiting, signaled): (Content, Option<Waiting>, bool),
    ) -> Result<(), crate::Error> {
        let signaled = signaled || self.signals_all;
        self.has_posted = true;
        self.paths[rail].post(ports, now, &self.limits, (content, waiting, signaled))
    }

    /// Whether another rail works, or may still start to work.
    pub(crate) fn can_do_without(&self, rail: usize) -> bool {
        let is_there = |path: &Path| path.is_open() || path.is_new();
        self.paths.iter().enumerate().any(|(other, path)| other != rail && is_there(path))
    }

    /// A rail on which nothing was received since the start although the peer is alive, unless it was reported before.
    pub(crate) fn missed(&mut self, patience: Duration) -> Option<usize> {
        let heard = self.paths.iter().filter(|path| path.is_open()).map(|path| path.heard).max()?;
        self.paths.iter_mut().position(|path| path.is_to_be_missed(heard, patience))
    }

    /// Whether the peer was recently heard on a rail other than this one.
    pub(crate) fn is_heard_without(&self, rail: usize, now: Nanos, lately: Duration) -> bool {
        let is_heard = |path: &Path| now.since(path.heard) < lately;
        self.paths.iter().enumerate().any(|(other, path)| other != rail && is_heard(path))
    }

    /// A failed rail for which the peer has not answered, on any rail. The peer is asked at most `times` times, or a
    /// quarter of that if it was not heard on any rail for `patience`.
    pub(crate) fn unanswered(&self, now: Nanos, times: u32, patience: Duration) -> Option<usize> {
        let is_heard = self.paths.iter().any(|path| now.since(path.heard) < patience);
        let times = if is_heard { times } else { times / 4 };
        self.paths.iter().position(|path| path.has_asked(times))
    }

    /// A rail with no progress for about two ACK timeouts, although the peer was heard on another one, before and after
    /// that was noticed: it may have been off its core. Rails without signaled work are probed.
    pub(crate) fn suspects(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        timeout: Duration,
    ) -> Result<Option<usize>, crate::Error> {
        if self.paths.len() == 1 {
            return Ok(None);
        }
        if now.since(self.looked) > timeout {
            // A rank that did not check its rails for long can't judge its peer.
            self.paths.iter_mut().for_each(Path::trust);
        }
        self.looked = now;
        for rail in 0..self.paths.len() {
            if self.paths[rail].is_to_be_probed(now, timeout / 2) {
                self.post((ports, now), rail, (Content::Credit(self.taken), None, true))?;
            }
        }
        let heard_by_another = |rail: usize| {
            let others =
                self.paths.iter().enumerate().filter(|(other, path)| *other != rail && path.is_open());
            others.map(|(_, path)| path.heard).max()
        };
        let heard: ArrayVec<Option<Nanos>, MAX_RAILS> = (0..self.paths.len()).map(heard_by_another).collect();
        let mut paths = self.paths.iter_mut().zip(heard);
        Ok(paths.position(|(path, heard)| heard.is_some_and(|heard| path.is_suspect(now, heard, timeout))))
    }

    /// Whether the peer should be pinged, because a rail may have failed.
    pub(crate) fn doubts(&self, now: Nanos, timeout: Duration) -> bool {
        self.paths.len() > 1 && self.paths.iter().any(|path| path.is_silent(now, timeout / 2))
    }

    /// Leaves the path of a failed rail. `patience` is the retry budget.
    pub(crate) fn leave(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        rail: usize,
        patience: Duration,
    ) -> Result<(), crate::Error> {
        self.paths.get_mut(rail).map_or(Ok(()), |path| path.leave(ports, now, patience))
    }

    /// Replaces paths that were left. Rails to report to the peer are passed to `told`, repeatedly until it answers; steps
    /// whose chunks were delivered are passed to `done`. Returns whether there is a new queue pair: messages that the peer
    /// waits for may have to be repeated.
    pub(crate) fn mend(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        again: Duration,
        mut told: impl FnMut(usize),
        mut done: impl FnMut(Waiting),
    ) -> Result<bool, crate::Error> {
        let mut renewed = false;
        for (rail, path) in self.paths.iter_mut().enumerate() {
            if path.drain(now) || path.asks(now, again) {
                told(rail);
            }
            if path.is_settled() {
                let lost =
                    path.renew(ports, &self.limits, |posted| posted.waiting.into_iter().for_each(&mut done))?;
                self.unsent
                    .extend(lost.into_iter().filter(|posted| !matches!(posted.content, Content::Credit(_))));
                renewed = true;
                // A credit may have been lost.
                self.told = self.taken.wrapping_sub(self.depth);
            }
        }
        while let Some(Posted { content, waiting, .. }) = self.unsent.front().copied() {
            let Some(rail) = self.rail_for(content.chunk()) else { break };
            self.unsent.pop_front();
            self.post((ports, now), rail, (content, waiting, true))?;
        }
        Ok(renewed)
    }

    /// Whether [`mend`](Channel::mend) has work.
    pub(crate) fn is_to_be_mended(&self) -> bool {
        !self.unsent.is_empty() || self.paths.iter().any(Path::is_left)
    }

    /// The peer has left a path. Returns the answer.
    pub(crate) fn hear_left(
        &mut self,
        (ports, now): (&mut Ports, Nanos),
        left: &Left,
        patience: Duration,
    ) -> Result<Option<Left>, crate::Error> {
        let Some(path) = self.paths.get_mut(left.rail as usize) else { return Ok(None) };
        if path.hear_left(left) {
            path.leave(ports, now, patience)?;
        }
        let known = path.left().filter(|own| (own.own, own.theirs) == (left.theirs, left.own));
        Ok(known.filter(|_| !left.is_answer).map(|own| Left { is_answer: true, ..own }))
    }

    /// The peer of the channel of a work request.
    pub(crate) fn peer_of(wr_id: u64) -> u32 {
        (wr_id >> 32) as u32
    }
}

/// The most outstanding chunks of a rail, if there are several rails.
const UNDER_WAY: u32 = 4;
