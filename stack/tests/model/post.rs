//! Posting work, to the engine and to the model.

use ferroce::*;

use crate::connection::{Closed, Connection, Drain, KEYS, Phase, QKEY, WORDS, access_to};
use crate::model::{Disagreement, Verdict};
use crate::noise::{NOISE, Window};
use crate::request::{Action, Change, Flaw, Request};
use crate::schedule::{Length, Service, Size, Verb, Work};
use crate::world::{End, SHARED, SHARED_SIZE, SharedQueue, World};

/// The most consecutive requests without a completion.
const SILENCE: usize = 64;
/// The end of the words and the start of the rest of a target.
pub(crate) const TARGET: usize = 8 * WORDS;
const LONGEST_INLINE: u32 = 64;
/// The rights that a window grants.
const WINDOW: [Access; 4] =
    [Access::REMOTE_READ, Access::REMOTE_WRITE, Access::REMOTE_ATOMIC, Access::FLUSH_GLOBAL];

/// The same for memory that may be a GPU's: the rights of its region.
fn window_to(on_device: bool) -> Access {
    let rights = access_to(on_device);
    WINDOW.into_iter().filter(|right| rights.contains(*right)).fold(Access::NONE, |a, b| a | b)
}

/// The largest path MTU that fits the ports.
const LONGEST_DATAGRAM: u32 = 4096;

/// A work request, to the model and to the engine.
pub(crate) struct Post {
    pub(crate) action: Action,
    pub(crate) op: SendOp,
    pub(crate) flaw: Option<Flaw>,
    pub(crate) through_window: bool,
    /// The place of its local memory.
    pub(crate) local: (Mr, u64),
}

/// The key that a work request revokes, at its peer or locally.
#[derive(Clone, Copy)]
enum Revokes {
    Nothing,
    Key(usize),
    Window(RKey),
}

impl World {
    /// Posts work, if that is possible now.
    pub(crate) fn post(&mut self, c: usize, e: usize, work: &Work) -> Verdict {
        if !self.connections[c].takes_work(e) {
            return Ok(());
        }
        let size = self.connections[c].plan.size;
        for (end, half) in self.ends.iter().zip(&mut self.connections[c].halves) {
            half.window.look(&end.context, size)?;
        }
        let Some((action, revokes)) = self.connections[c].action(e, work) else { return Ok(()) };
        let Connection { halves, plan, .. } = &self.connections[c];
        let key = match (action, revokes) {
            (_, Revokes::Nothing) => RKey::new(0),
            (_, Revokes::Window(key)) => key,
            (Action::LocalInvalidate, Revokes::Key(key)) => self.rkey(e, halves[e].own_keys[key].0)?,
            (_, Revokes::Key(key)) => self.rkey(1 - e, halves[1 - e].keys[key].0)?,
        };
        let window = halves[1 - e].window.open().filter(|_| work.window && action.fits(&size.window()));
        let reach = window.unwrap_or(halves[1 - e].reach);
        let op = self.op(c, e, &action, reach, key);
        let local = match action {
            Action::Read { into, .. } | Action::Atomic { into, .. } => (halves[e].landing, into),
            Action::Send { data, .. } | Action::Write { data, .. } | Action::AtomicWrite { data, .. } => {
                (self.ends[e].noise(plan, e), data.start)
            }
            _ => (self.ends[e].noise, 0),
        };
        // It completes and is never received.
        let too_long = plan.service == Service::Ud && action.length() > LONGEST_DATAGRAM;
        let flaw = too_long.then_some(Flaw::TooLong);
        let local = (local.0, local.1 as u64);
        let post = Post { action, op, flaw, through_window: window.is_some(), local };
        if self.submit(c, e, post, work)? {
            let halves = &mut self.connections[c].halves;
            halves[e].landings[0] += u64::from(action.lands());
            match (action, revokes) {
                (Action::BindWindow, _) => halves[e].window.posted = true,
                (_, Revokes::Nothing) => {}
                (_, Revokes::Window(_)) => halves[1 - e].window.closed = Some(Closed::ByPeer),
                (Action::LocalInvalidate, Revokes::Key(key)) => halves[e].own_keys[key].1 = true,
                (_, Revokes::Key(key)) => halves[1 - e].keys[key].1 = true,
            }
        }
        Ok(())
    }

    /// A signaled empty request, which shows the outcome of those before it.
    pub(crate) fn post_last(&mut self, c: usize, e: usize) -> Verdict {
        let work = Work { verb: Verb::Write, signaled: true, ..NOTHING };
        self.post(c, e, &work)
    }

    /// Posts receives: `count`, or as many as there is room for.
    pub(crate) fn post_receives(&mut self, c: usize, e: usize, count: u64) -> Verdict {
        let World { ends, connections, .. } = self;
        let connection = &mut connections[c];
        if connection.plan.srq {
            return ends[e].post_shared_receives(count);
        }
        let size = connection.plan.size;
        for _ in 0..count {
            if !connection.takes_work(e) || connection.model.receives(e) as u64 == size.slots() {
                break;
            }
            let Connection { halves, model, .. } = &mut *connection;
            let (half, context) = (&mut halves[e], &mut ends[e].context);
            let wr_id = half.receives_posted;
            let sges = receive_sges(half.receives, size, wr_id % size.slots());
            context.post_recv(half.qp, &ReceiveWorkRequest { wr_id, sges: &sges })?;
            half.receives_posted += 1;
            model.post_receive(e, wr_id, false);
        }
        Ok(())
    }

    /// As many receives as there can be.
    pub(crate) fn post_all_receives(&mut self, c: usize, e: usize) -> Verdict {
        if self.connections[c].model.receives_failed(e) {
            return Ok(());
        }
        self.post_receives(c, e, u64::MAX)
    }

    pub(crate) fn drain(&mut self, c: usize, e: usize) -> Verdict {
        let Connection { halves, model, phase, .. } = &mut self.connections[c];
        let half = &mut halves[e];
        if *phase != Phase::Up || half.drain != Drain::No {
            return Ok(());
        }
        match self.ends[e].context.modify_qp(half.qp, Transition::Drain) {
            Ok(()) => {
                half.drain = Drain::Asked;
                model.drain(e);
                Ok(())
            }
            // It has failed, and its completions were not read.
            Err(Error::State { .. }) => model.broken(),
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn resume(&mut self, c: usize, e: usize) -> Verdict {
        let Connection { halves, model, phase, .. } = &mut self.connections[c];
        let half = &mut halves[e];
        if *phase != Phase::Up || half.drain != Drain::Done {
            return Ok(());
        }
        half.drain = Drain::No;
        match self.ends[e].context.modify_qp(half.qp, Transition::Resume) {
            Err(Error::State { .. }) => model.broken(),
            other => Ok(other?),
        }
    }

    pub(crate) fn rkey(&self, e: usize, mr: Mr) -> Verdict<RKey> {
        Ok(self.ends[e].context.remote(mr)?.rkey)
    }

    /// The work request of an action on the peer's memory at `reach`; `key` is the one that it revokes, if any.
    pub(crate) fn op(&self, c: usize, e: usize, action: &Action, reach: RemoteAddress, key: RKey) -> SendOp {
        let Connection { plan, halves, .. } = &self.connections[c];
        let peer = &halves[1 - e];
        if let (Service::Ud, Action::Send { data, immediate, .. }) = (plan.service, action) {
            // The highest bit stands for the sender's own key, which is the same.
            let qkey = if data.start % 2 == 0 { QKEY } else { 1 << 31 };
            let to = Destination { ah: self.ends[e].ah, qpn: peer.qpn, qkey };
            return immediate.map_or(SendOp::SendTo(to), |immediate| SendOp::SendToWithImm(to, immediate));
        }
        let remote = |at: usize| RemoteAddress { addr: reach.addr.wrapping_add(at as u64), ..reach };
        match *action {
            Action::Send { invalidates: Some(_), .. } => SendOp::SendWithInvalidate(key),
            Action::Send { immediate: Some(immediate), .. } => SendOp::SendWithImm(immediate),
            Action::Send { .. } => SendOp::Send,
            Action::Write { at, immediate: None, .. } => SendOp::Write(remote(at)),
            Action::Write { at, immediate: Some(immediate), .. } => {
                SendOp::WriteWithImm(remote(at), immediate)
            }
            Action::Read { at, .. } => SendOp::Read(remote(at)),
            Action::Atomic { at, change: Change::Add(add), .. } => {
                SendOp::FetchAdd { remote: remote(at), add }
            }
            Action::Atomic { at, change: Change::CompareSwap { compare, swap }, .. } => {
                SendOp::CompareSwap { remote: remote(at), compare, swap }
            }
            Action::AtomicWrite { at, .. } => SendOp::AtomicWrite(remote(at)),
            Action::Flush { at, length, whole } => SendOp::Flush {
                remote: remote(at),
                length,
                selectivity: if whole { Selectivity::MemoryRegion } else { Selectivity::Range },
                kind: FlushType { global_visibility: true, persistence: false },
            },
            Action::LocalInvalidate => SendOp::LocalInvalidate(key),
            Action::BindWindow => SendOp::BindMw {
                mw: halves[e].window.mw,
                mr: halves[e].target,
                offset: plan.size.window().start as u64,
                length: plan.size.window().len() as u64,
                access: window_to(plan.on_device[e]),
            },
        }
    }

    /// Posts to both, the engine and the model. `false` if there was no room.
    pub(crate) fn submit(&mut self, c: usize, e: usize, post: Post, work: &Work) -> Verdict<bool> {
        let Post { action, op, flaw, through_window, local: (mr, offset) } = post;
        let World { ends, connections, .. } = self;
        let Connection { plan, halves, model, .. } = &mut connections[c];
        let touches = action.touches();
        let writes = matches!(action, Action::Write { .. });
        // An outstanding READ would lose its window.
        let closes = matches!(action, Action::Send { invalidates: Some(KEYS), .. });
        let flags = SendFlags::default()
            .signaled(work.signaled || model.requests(e).outstanding() >= SILENCE)
            .fence(work.fence || closes || writes && model.needs_fence(e, touches))
            .solicited(work.solicited)
            .lazy_ack(work.lazy);
        let length = action.length();
        let inline = match action {
            Action::Send { data, .. } | Action::Write { data, .. } | Action::AtomicWrite { data, .. } => {
                Some(data.bytes()).filter(|_| work.inline && length <= LONGEST_INLINE)
            }
            _ => None,
        };
        // In pieces of different lengths, some of which are empty.
        let pieces = u32::from(work.pieces);
        let cut = |i: u32| if i == pieces { length } else { length / 7 * i };
        let pieces =
            (0..pieces).map(|i| Sge { mr, offset: offset + u64::from(cut(i)), length: cut(i + 1) - cut(i) });
        let sges: Vec<Sge> = pieces.collect();
        let data = match (inline, action) {
            (Some(bytes), _) => Data::Inline(bytes),
            (None, Action::LocalInvalidate | Action::BindWindow | Action::Flush { .. }) => Data::Sges(&[]),
            (None, _) => Data::Sges(&sges),
        };
        let wr = SendWorkRequest { wr_id: model.requests(e).next_number(), op, data, flags };
        match ends[e].context.post_send(halves[e].qp, &wr) {
            Ok(()) => {
                let signaled = flags.signaled || plan.signal_all;
                let SendFlags { solicited, .. } = flags;
                model.post(e, Request { action, signaled, solicited, flaw, through_window });
                Ok(true)
            }
            Err(Error::QueueFull { .. }) => model.full(e, plan.depth).map(|()| false),
            Err(error) => Err(Disagreement(format!("post {action:?}: {error}"))),
        }
    }
}

impl End {
    fn post_shared_receives(&mut self, count: u64) -> Verdict {
        let End { context, shared, .. } = self;
        let Some(SharedQueue { srq, memory, model, .. }) = shared else { return Ok(()) };
        for _ in 0..count {
            let Some(wr_id) = (0..SHARED).find(|place| !model.outstanding().contains(place)) else { break };
            let sges = receive_sges(*memory, SHARED_SIZE, wr_id);
            context.post_srq_recv(*srq, &ReceiveWorkRequest { wr_id, sges: &sges })?;
            model.post(wr_id);
        }
        Ok(())
    }
}

/// The pieces of a receive, one of them empty.
fn receive_sges(mr: Mr, size: Size, place: u64) -> [Sge; 3] {
    let length = size.receive();
    let offset = place * u64::from(length);
    [(0, 100), (100, 0), (100, length - 100)].map(|(at, length)| Sge { mr, offset: offset + at, length })
}

impl Connection {
    /// Whether work may be posted at an end.
    fn takes_work(&self, e: usize) -> bool {
        matches!(self.phase, Phase::Up | Phase::Dying(_)) && !self.halves[e].reset
    }

    /// The action of work, and the key that it revokes, if it is possible.
    fn action(&self, e: usize, work: &Work) -> Option<(Action, Revokes)> {
        let Connection { plan, halves, model, .. } = self;
        let (longest, target) = (plan.size.longest(), plan.size.target());
        let place = work.place as usize;
        let mut length = work.length.resolve(longest, 1 << self.life().mtu_shift);
        // Datagrams that do not fit are rare.
        if plan.service == Service::Ud && !place.is_multiple_of(16) {
            length = length.min(LONGEST_DATAGRAM);
        }
        let data = Window { start: place % (NOISE - length as usize - 8), length };
        let at = TARGET + place % (target - TARGET - length as usize + 1);
        let word = place % WORDS * 8;
        let [begun, done] = halves[e].landings;
        let into = (begun % plan.size.slots() * u64::from(longest)) as usize;
        let random = u64::from(work.place).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut revokes = Revokes::Nothing;
        let action = match work.verb.on(plan.service) {
            Verb::FetchAdd | Verb::CompareSwap(_) | Verb::AtomicWrite if plan.has_device() => return None,
            Verb::Send => Action::Send { data, immediate: None, invalidates: None },
            Verb::SendWithImm => Action::Send { data, immediate: Some(work.place), invalidates: None },
            Verb::SendWithInvalidate => {
                let invalidates = match halves[1 - e].window.open().filter(|_| work.window) {
                    Some(reach) => {
                        revokes = Revokes::Window(reach.rkey);
                        KEYS
                    }
                    None => {
                        let key = halves[1 - e].keys.iter().position(|key| !key.1)?;
                        revokes = Revokes::Key(key);
                        key
                    }
                };
                Action::Send { data, immediate: None, invalidates: Some(invalidates) }
            }
            Verb::Write => Action::Write { data, at, immediate: None },
            Verb::WriteWithImm => Action::Write { data, at, immediate: Some(work.place) },
            Verb::Read => Action::Read { at, length, into },
            Verb::FetchAdd => Action::Atomic { at: word, change: Change::Add(random), into },
            Verb::CompareSwap(equal) => {
                let old = model.requests(e).word(word);
                let compare = if equal { old } else { !old };
                Action::Atomic { at: word, change: Change::CompareSwap { compare, swap: random }, into }
            }
            Verb::LocalInvalidate => {
                revokes = Revokes::Key(halves[e].own_keys.iter().position(|key| !key.1)?);
                Action::LocalInvalidate
            }
            Verb::AtomicWrite => Action::AtomicWrite { data: Window { length: 8, ..data }, at: word },
            Verb::Flush => Action::Flush { at, length, whole: place % 2 == 1 },
            Verb::BindWindow if halves[e].window.posted || halves[e].is_withdrawn() => return None,
            Verb::BindWindow => Action::BindWindow,
        };
        let room = !action.lands() || begun - done < plan.size.slots();
        room.then_some((action, revokes))
    }
}

impl Verb {
    /// The verb that replaces one that a service does not support.
    fn on(self, service: Service) -> Verb {
        match (service, self) {
            (Service::Rc, verb) => verb,
            (_, Verb::Send | Verb::SendWithInvalidate) => Verb::Send,
            (_, Verb::SendWithImm) => Verb::SendWithImm,
            (Service::Uc, Verb::LocalInvalidate | Verb::BindWindow) => self,
            (Service::Uc, Verb::Write | Verb::Read | Verb::Flush) => Verb::Write,
            (Service::Uc, _) => Verb::WriteWithImm,
            (Service::Ud, Verb::Write | Verb::Read) => Verb::Send,
            (Service::Ud, _) => Verb::SendWithImm,
        }
    }
}

impl Length {
    fn resolve(self, longest: u32, mtu: u32) -> u32 {
        let length = match self {
            Length::Bytes(bytes) => i64::from(bytes),
            Length::Packets(packets, more) => i64::from(packets) * i64::from(mtu) + i64::from(more),
            Length::Part(part) => i64::from(longest) * i64::from(part) / i64::from(u16::MAX),
        };
        length.clamp(0, longest.into()) as u32
    }
}

/// Work without bytes and without flags.
pub(crate) const NOTHING: Work = Work {
    verb: Verb::Write,
    length: Length::Bytes(0),
    place: 0,
    pieces: 1,
    window: false,
    inline: false,
    signaled: false,
    fence: false,
    solicited: false,
    lazy: false,
};
