//! Connections between the two contexts: created, broken, ended and created again.

use std::borrow::Cow;
use std::ops::Range;
use std::time::Duration;

use ferroce::*;

use crate::model::{self, Disagreement, Terms, Verdict, ensure};
use crate::schedule::{Iova, Life, Plan, Service, Size};
use crate::world::{End, World, view};

/// Regions at each end whose keys may be revoked, by the peer and locally.
pub(crate) const KEYS: usize = 4;
/// Words for atomics at the start of the memory that the peer can access.
pub(crate) const WORDS: usize = 8;
/// Bytes before a received datagram.
pub(crate) const GRH: u32 = 40;
/// The Q_Key of datagrams.
pub(crate) const QKEY: u32 = 0x1234_5678;
/// The value of `rnr_retry` for an unlimited number of retries.
const RNR_ENDLESS: u8 = 7;
/// Longer than any frame of a connection stays in the network.
const TIME_WAIT: Duration = Duration::from_millis(20);

pub(crate) struct Connection {
    pub(crate) plan: Plan,
    lives: usize,
    pub(crate) halves: [Half; 2],
    pub(crate) model: model::Connection,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Phase {
    Up,
    /// It is broken, or will be; both ends are ended at this time.
    Dying(Nanos),
    /// Ended; its frames are still in the network.
    Waiting(Nanos),
    /// Ended finally.
    Over,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Drain {
    No,
    Asked,
    Done,
}

/// One end of a connection.
pub(crate) struct Half {
    pub(crate) qp: Qp,
    pub(crate) qpn: Qpn,
    pub(crate) own_cq: Option<Cq>,
    pub(crate) overflowed: bool,
    pub(crate) receives: Mr,
    pub(crate) landing: Mr,
    /// The memory that the peer can access, or its replacement.
    pub(crate) target: Mr,
    /// Its address for the peer.
    pub(crate) reach: RemoteAddress,
    /// The memory that the peer could access, after it was withdrawn.
    pub(crate) withdrawn: Option<Memory>,
    /// Memory to withdraw once the device has ended its copies.
    pub(crate) leaving: Option<Mr>,
    /// Keys to be revoked by the peer and locally, and whether a request for that was posted.
    pub(crate) keys: [(Mr, bool); KEYS],
    pub(crate) own_keys: [(Mr, bool); KEYS],
    pub(crate) window: MemoryWindow,
    pub(crate) receives_posted: u64,
    /// READs and atomics posted, and complete.
    pub(crate) landings: [u64; 2],
    pub(crate) drain: Drain,
    /// In RESET.
    pub(crate) reset: bool,
}

/// A memory window over a part of the memory that the peer can access. It is bound once per life.
pub(crate) struct MemoryWindow {
    pub(crate) mw: Mw,
    /// A bind was posted.
    pub(crate) posted: bool,
    /// The peer's address of the whole memory through it, once it is bound.
    pub(crate) reach: Option<RemoteAddress>,
    /// A request to close it was posted, or it no longer exists.
    pub(crate) closed: Option<Closed>,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Closed {
    ByOwner,
    ByPeer,
}

impl MemoryWindow {
    fn new(mw: Mw) -> MemoryWindow {
        MemoryWindow { mw, posted: false, reach: None, closed: None }
    }

    /// Its address, if it can be used.
    pub(crate) fn open(&self) -> Option<RemoteAddress> {
        self.reach.filter(|_| self.closed.is_none())
    }

    /// Checks whether it has been bound.
    pub(crate) fn look(&mut self, context: &Context, size: Size) -> Verdict {
        if self.posted && self.reach.is_none() {
            let remote = context.remote_window(self.mw)?;
            let start = size.window().start as u64;
            self.reach = remote.map(|RemoteMemory { addr, rkey, .. }| RemoteAddress {
                addr: addr.wrapping_sub(start),
                rkey,
            });
        }
        Ok(())
    }
}

pub(crate) fn access() -> Access {
    let all = [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_INVALIDATE,
        Access::FLUSH_GLOBAL,
        Access::MW_BIND,
    ];
    all.into_iter().fold(Access::NONE, |a, b| a | b)
}

/// The rights of memory that may be a GPU's, which has no atomics.
pub(crate) fn access_to(on_device: bool) -> Access {
    let all = [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::FLUSH_GLOBAL,
        Access::MW_BIND,
    ];
    if on_device { all.into_iter().fold(Access::NONE, |a, b| a | b) } else { access() }
}

/// The contents of memory of any kind.
fn all_of(memory: &Memory) -> Verdict<Cow<'_, [u8]>> {
    if memory.kind() == MemoryKind::Owned {
        return Ok(memory.bytes()?.into());
    }
    let mut bytes = vec![0; memory.len()];
    memory.read(0, &mut bytes)?;
    Ok(bytes.into())
}

impl Size {
    /// Bytes of the longest message.
    pub(crate) fn longest(self) -> u32 {
        match self {
            Size::Small => 9216,
            Size::Medium => 1 << 16,
            Size::Large => 1 << 20,
        }
    }

    /// Bytes of a receive.
    pub(crate) fn receive(self) -> u32 {
        self.longest() + GRH
    }

    /// Places for receives, and for the results of READs and atomics.
    pub(crate) fn slots(self) -> u64 {
        match self {
            Size::Small => 16,
            Size::Medium => 8,
            Size::Large => 4,
        }
    }

    /// The range that a memory window grants.
    pub(crate) fn window(self) -> Range<usize> {
        8..8 * WORDS + self.longest() as usize
    }

    /// Bytes that the peer can access.
    pub(crate) fn target(self) -> usize {
        8 * WORDS + 2 * self.longest() as usize
    }
}

impl Connection {
    pub(crate) fn life(&self) -> &Life {
        &self.plan.lives[(self.lives - 1) % self.plan.lives.len()]
    }

    pub(crate) fn is_reliable(&self) -> bool {
        self.plan.service == Service::Rc
    }
}

impl World {
    pub(crate) fn add(&mut self, plan: &Plan) -> Verdict {
        let [a, b] = &mut self.ends;
        let halves = [Half::new(a, plan, plan.on_device[0])?, Half::new(b, plan, plan.on_device[1])?];
        let nothing = Terms {
            service: model::Service::Reliable,
            psn: [0; 2],
            mtu: 256,
            memory: 0,
            rnr_endless: true,
            faithful: true,
            shared_receives: false,
            whole_reads: true,
            staged: [false; 2],
        };
        let (plan, model) = (plan.clone(), model::Connection::new(&nothing));
        self.connections.push(Connection { plan, lives: 0, halves, model, phase: Phase::Over });
        self.connect(self.connections.len() - 1)
    }

    /// Connects both ends, which are in RESET, with new memory.
    fn connect(&mut self, c: usize) -> Verdict {
        let faithful = self.faithful;
        let World { ends, connections, .. } = self;
        let connection = &mut connections[c];
        connection.lives += 1;
        let life = connection.life().clone();
        let Connection { plan, halves, .. } = connection;
        for ((end, half), on_device) in ends.iter_mut().zip(&mut *halves).zip(plan.on_device) {
            half.renew(end, plan.size, &life, on_device)?;
        }
        let gids = [0, 1].map(|e: usize| ends[e].context.port().gids[0].gid);
        for e in [0, 1] {
            let (address, peer) = (AddressVector::new(gids[1 - e], 0), halves[1 - e].qpn);
            for transition in life.transitions(plan, e, address, peer) {
                ends[e].context.modify_qp(halves[e].qp, transition)?;
            }
        }
        let is_reliable = plan.service == Service::Rc;
        connection.model = model::Connection::new(&Terms {
            service: if is_reliable { model::Service::Reliable } else { model::Service::Unreliable },
            psn: life.psn,
            mtu: life.path_mtu().bytes(),
            memory: plan.size.target(),
            rnr_endless: life.rnr_retry == RNR_ENDLESS,
            faithful,
            shared_receives: plan.srq,
            // READs into device memory are requested as far as there are chunks.
            whole_reads: !life.selective_repeat && plan.on_device == [false; 2],
            staged: plan.on_device,
        });
        connection.phase = Phase::Up;
        Ok(())
    }

    pub(crate) fn start_dying(&mut self, c: usize) {
        let connection = &mut self.connections[c];
        if connection.phase == Phase::Up {
            let linger = Duration::from_micros(connection.life().linger_us);
            connection.phase = Phase::Dying(self.now + linger);
        }
    }

    /// Advances a connection that is not up by one step. Returns whether it did.
    pub(crate) fn go_on(&mut self, c: usize) -> Verdict<bool> {
        let next = match self.connections[c].phase {
            Phase::Dying(at) if at <= self.now => {
                self.end(c)?;
                if self.closing { Phase::Over } else { Phase::Waiting(self.now + TIME_WAIT) }
            }
            Phase::Waiting(_) if self.closing => Phase::Over,
            Phase::Waiting(at) if at <= self.now => {
                self.connect(c)?;
                self.tally.reconnected += 1;
                Phase::Up
            }
            _ => return Ok(false),
        };
        self.connections[c].phase = next;
        Ok(true)
    }

    /// Both ends fail, and all their work has an outcome; then they are prepared to connect again.
    fn end(&mut self, c: usize) -> Verdict {
        self.connections[c].model.kill();
        for e in [0, 1] {
            let half = &self.connections[c].halves[e];
            if !half.reset {
                self.ends[e].context.modify_qp(half.qp, Transition::Error)?;
            }
        }
        for e in [0, 1] {
            self.wake(e)?;
            self.collect(e)?;
        }
        if self.connections[c].plan.has_device() {
            self.let_copies_end()?;
        }
        let World { ends, connections, tally, .. } = self;
        let connection = &mut connections[c];
        for (end, half) in ends.iter_mut().zip(&mut connection.halves) {
            if let Some(mr) = half.leaving.take() {
                half.withdrawn = Some(end.context.deregister(mr)?);
            }
        }
        let is_reliable = connection.is_reliable();
        let Connection { halves, model, plan, lives, .. } = connection;
        for e in [0, 1] {
            let (half, peer) = (&halves[e], &halves[1 - e]);
            let landing = view(&ends[e].context, half.landing)?;
            let memory = match &peer.withdrawn {
                Some(memory) => all_of(memory)?,
                None => view(&ends[1 - e].context, peer.target)?,
            };
            for request in model.finish(e, &landing, &memory).map_err(|d| d.at(c, e))? {
                tally.count_request(&request, is_reliable);
            }
        }
        for (end, half) in ends.iter_mut().zip(halves) {
            if half.overflowed || *lives % 2 == 0 {
                half.replace(end, plan)?;
            } else {
                end.context.modify_qp(half.qp, Transition::Reset)?;
            }
            half.reset = true;
        }
        Ok(())
    }
}

impl Half {
    fn new(end: &mut End, plan: &Plan, on_device: bool) -> Verdict<Half> {
        let size = plan.size;
        let slots = size.slots() as usize;
        let receives = end.register(slots * size.receive() as usize, on_device)?;
        let landing = end.register(slots * size.longest() as usize, on_device)?;
        let target = end.register(size.target(), on_device)?;
        let mut key = || end.register(8, false);
        let mut keys =
            || -> Verdict<[(Mr, bool); KEYS]> { Ok([key()?, key()?, key()?, key()?].map(|mr| (mr, false))) };
        let (keys, own_keys) = (keys()?, keys()?);
        let own_cq = plan.own_cq.map(|capacity| end.context.create_cq(capacity)).transpose()?;
        let qp = end.create_qp(own_cq, plan)?;
        Ok(Half {
            qp,
            qpn: end.context.query_qp(qp)?.qpn,
            own_cq,
            overflowed: false,
            receives,
            landing,
            target,
            reach: RemoteAddress { addr: 0, rkey: RKey::new(0) },
            withdrawn: None,
            leaving: None,
            keys,
            own_keys,
            window: MemoryWindow::new(end.context.alloc_mw(end.pd)?),
            receives_posted: 0,
            landings: [0; 2],
            drain: Drain::No,
            reset: true,
        })
    }

    /// Whether the memory that the peer could access was withdrawn.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.withdrawn.is_some() || self.leaving.is_some()
    }

    /// Resets it for another life.
    fn renew(&mut self, end: &mut End, size: Size, life: &Life, on_device: bool) -> Verdict {
        for (mr, used) in self.keys.iter_mut().chain(&mut self.own_keys).filter(|key| key.1) {
            let memory = end.context.deregister(*mr)?;
            *mr = end.context.register(end.pd, memory, access())?;
            *used = false;
        }
        if self.window.posted {
            end.context.dealloc_mw(self.window.mw)?;
            self.window = MemoryWindow::new(end.context.alloc_mw(end.pd)?);
        }
        let mut memory = end.context.deregister(self.target)?;
        let untouched = self.withdrawn.take().is_none() || all_of(&memory)?.iter().all(|byte| *byte == 0);
        ensure!(untouched, "a key of memory that was taken away reached what came in its place");
        memory.write(0, &vec![0; memory.len()])?;
        let iova = match life.iova {
            Iova::Zero => 0,
            Iova::Page(page) => u64::from(page) << 12,
            Iova::Top => u64::MAX - size.target() as u64 + 1,
        };
        self.target = end.context.register_at(end.pd, memory, access_to(on_device), iova)?;
        let RemoteMemory { addr, rkey, .. } = end.context.remote(self.target)?;
        self.reach = RemoteAddress { addr, rkey };
        end.poison(self.receives, 0, (size.slots() * u64::from(size.receive())) as usize)?;
        self.receives_posted = 0;
        self.landings = [0; 2];
        self.drain = Drain::No;
        self.reset = false;
        Ok(())
    }

    /// Replaces the queue pair by another one.
    pub(crate) fn replace(&mut self, end: &mut End, plan: &Plan) -> Verdict {
        end.context.destroy_qp(self.qp)?;
        if let Some(cq) = self.own_cq.take_if(|_| self.overflowed) {
            end.context.destroy_cq(cq)?;
            let capacity = plan.own_cq.unwrap_or(1);
            self.own_cq = Some(end.context.create_cq(capacity)?);
            self.overflowed = false;
        }
        self.qp = end.create_qp(self.own_cq, plan)?;
        self.qpn = end.context.query_qp(self.qp)?.qpn;
        self.reset = true;
        Ok(())
    }
}

impl End {
    fn create_qp(&mut self, own_cq: Option<Cq>, plan: &Plan) -> Verdict<Qp> {
        let cq = own_cq.unwrap_or(self.cq);
        let config = match plan.service {
            Service::Rc => QpConfig::rc(self.pd, cq),
            Service::Uc => QpConfig::uc(self.pd, cq),
            Service::Ud => QpConfig::ud(self.pd, cq),
        };
        let srq = self.shared.as_ref().map(|shared| shared.srq).filter(|_| plan.srq);
        let (max_send_wr, max_recv_wr) = (plan.depth, plan.size.slots() as u32);
        let signal_all = plan.signal_all;
        Ok(self.context.create_qp(
            &config.max_send_wr(max_send_wr).max_recv_wr(max_recv_wr).signal_all(signal_all).srq(srq),
        )?)
    }
}

impl Life {
    fn path_mtu(&self) -> PathMtu {
        PathMtu::ALL[usize::from(self.mtu_shift) % 8]
    }

    /// From RESET to RTS.
    fn transitions(&self, plan: &Plan, end: usize, address: AddressVector, peer: Qpn) -> [Transition; 3] {
        let (path_mtu, sq_psn, rq_psn) =
            (self.path_mtu(), Psn::new(self.psn[end]), Psn::new(self.psn[1 - end]));
        let init = Transition::Init { access: access() };
        // Copies of a GPU may be late by twice the time of 10.
        let timeout = if plan.has_device() { 14 } else { 10 };
        match plan.service {
            Service::Rc => {
                let receive = ReadyToReceive::new(address, peer, rq_psn)
                    .path_mtu(path_mtu)
                    .max_dest_rd_atomic(self.rd_atomic)
                    .selective_repeat(self.selective_repeat)
                    .min_rnr_timer(RnrTimer::new(self.rnr_timer).unwrap_or(RnrTimer::DEFAULT));
                let send = ReadyToSend::new(sq_psn)
                    .timeout(timeout)
                    .rnr_retry(self.rnr_retry)
                    .max_rd_atomic(self.rd_atomic);
                [init, Transition::ReadyToReceive(receive), Transition::ReadyToSend(send)]
            }
            Service::Uc => {
                let path = UnreliablePath::new(address, peer, rq_psn).path_mtu(path_mtu);
                let receive = Transition::ReadyToReceiveUnreliable(path);
                [init, receive, Transition::ReadyToSendUnreliable { sq_psn }]
            }
            Service::Ud => {
                let (init, receive) =
                    (Transition::InitDatagram { qkey: QKEY }, Transition::ReadyToReceiveDatagrams);
                [init, receive, Transition::ReadyToSendUnreliable { sq_psn }]
            }
        }
    }
}

impl Disagreement {
    pub(crate) fn at(self, c: usize, e: usize) -> Disagreement {
        Disagreement(format!("QP {c}.{e}: {}", self.0))
    }
}
