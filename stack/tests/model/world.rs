//! Two contexts on a simulated network, and the connections between them. Everything that is posted
//! and everything that comes back passes by the model.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
use ferroce::*;

use crate::model::{self, Completion, Disagreement, GUARD, POISON, Response, Verdict, ensure, noise};
use crate::schedule::{Iova, Life, Link, Operation, Schedule, Setup, Size};
use crate::tally::Tally;

/// Regions at each end whose keys may be revoked, by the peer and by oneself.
pub(crate) const KEYS: usize = 4;
/// Words for atomics at the start of the memory that the peer reaches.
pub(crate) const WORDS: usize = 8;
/// Longer than any frame of a connection stays in the network.
const TIME_WAIT: Duration = Duration::from_millis(20);
/// Turns without progress after which a schedule counts as stuck.
const PATIENCE: u32 = 50_000;

pub(crate) struct World {
    pub(crate) ends: [End; 2],
    pub(crate) connections: Vec<Connection>,
    network: SimNetwork,
    /// Responses sent since the last turn.
    responses: Arc<Mutex<Vec<(usize, u32, Response)>>>,
    pub(crate) now: Nanos,
    pub(crate) tally: Tally,
    /// Nothing new is begun: everything is to come to its end.
    closing: bool,
}

pub(crate) struct End {
    pub(crate) context: Context,
    pd: Pd,
    cq: Cq,
    pub(crate) noise: Mr,
    /// The application waits for the event of the shared CQ.
    asleep: Option<Notify>,
}

pub(crate) struct Connection {
    pub(crate) setup: crate::schedule::Connection,
    pub(crate) lives: usize,
    pub(crate) halves: [Half; 2],
    pub(crate) model: model::Connection,
    pub(crate) phase: Phase,
}

#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Phase {
    Up,
    /// Something has broken, or will; both ends are told at this time.
    Dying(Nanos),
    /// Ended; the frames of its life die out.
    Waiting(Nanos),
    /// Ended for good.
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
    qpn: u32,
    own_cq: Option<Cq>,
    overflowed: bool,
    pub(crate) receives: Mr,
    pub(crate) landing: Mr,
    /// What the peer reaches.
    pub(crate) target: Mr,
    /// Where the peer finds it.
    pub(crate) reach: RemoteAddress,
    /// The same, once it was taken away.
    pub(crate) withdrawn: Option<Memory>,
    /// Keys for the peer to revoke, for oneself, and whether a request to do so was posted.
    pub(crate) keys: [(Mr, bool); KEYS],
    pub(crate) own_keys: [(Mr, bool); KEYS],
    pub(crate) receives_posted: u64,
    /// READs and atomics posted, and complete.
    pub(crate) landings: [u64; 2],
    pub(crate) drain: Drain,
    /// In RESET.
    pub(crate) reset: bool,
}

pub(crate) fn access() -> Access {
    let all = [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_INVALIDATE,
    ];
    all.into_iter().fold(Access::NONE, |a, b| a | b)
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

    /// Places for receives, and for the results of READs and atomics.
    pub(crate) fn slots(self) -> u64 {
        match self {
            Size::Small => 16,
            Size::Medium => 8,
            Size::Large => 4,
        }
    }

    /// Bytes that the peer reaches.
    pub(crate) fn target(self) -> usize {
        8 * WORDS + 2 * self.longest() as usize
    }
}

fn memory(length: usize) -> Verdict<Memory> {
    Memory::zeroed(length).map_err(|error| Disagreement(error.to_string()))
}

impl From<Error> for Disagreement {
    fn from(error: Error) -> Disagreement {
        Disagreement(format!("refused: {error}"))
    }
}

impl From<RegisterError> for Disagreement {
    fn from(error: RegisterError) -> Disagreement {
        error.source.into()
    }
}

impl World {
    /// Carries out a schedule from beginning to end.
    pub(crate) fn run(schedule: &Schedule) -> Verdict<Tally> {
        let mut world = World::new(&schedule.setup)?;
        for operation in &schedule.operations {
            world.carry_out(operation)?;
        }
        world.close()?;
        world.tear_down()?;
        world.add_counters();
        Ok(world.tally)
    }

    fn new(setup: &Setup) -> Verdict<World> {
        let frames = NetworkConfig { mtu: 4200, frames: setup.frames };
        let network = SimNetwork::with_config(setup.seed, setup.link.config(), frames);
        let network = network.map_err(|error| Disagreement(error.to_string()))?;
        let responses = Arc::default();
        tap(&network, &responses);
        let count = setup.connections.len() as u32;
        let own_cqs = setup.connections.iter().filter(|c| c.own_cq.is_some()).count() as u32;
        let end = |n: usize| -> Verdict<End> {
            let address = match setup.ipv6 {
                false => [10, 0, 0, n as u8 + 1].into(),
                true => [0xfd00, 0, 0, 0, 0, 0, 0, n as u16 + 1].into(),
            };
            // Exactly as much as is used at once: what leaks is missing soon.
            let config = Config {
                seed: Some([n as u8 + 1; 32]),
                window: setup.windows[n],
                max_pds: 1,
                max_qps: count,
                max_cqs: 1 + own_cqs,
                max_mrs: 1 + count * (3 + 2 * KEYS as u32),
                ..Config::default()
            };
            let mut context = Context::open(Box::new(network.port(&[address])), &config)?;
            let pd = context.alloc_pd()?;
            let cq = context.create_cq(4096)?;
            let mut source = memory(noise().len())?;
            source.copy_from_slice(noise());
            let noise = context.register(pd, source, Access::NONE)?;
            Ok(End { context, pd, cq, noise, asleep: None })
        };
        let ends = [end(0)?, end(1)?];
        let now = Nanos(1_000_000);
        let (tally, connections) = (Tally::default(), Vec::new());
        let mut world = World { ends, connections, network, responses, now, tally, closing: false };
        for connection in &setup.connections {
            world.add(connection)?;
        }
        Ok(world)
    }

    fn add(&mut self, setup: &crate::schedule::Connection) -> Verdict {
        let [a, b] = &mut self.ends;
        let halves = [Half::new(a, setup)?, Half::new(b, setup)?];
        let model = model::Connection::new([0, 0], 256, 0, true);
        let setup = setup.clone();
        self.connections.push(Connection { setup, lives: 0, halves, model, phase: Phase::Over });
        self.connect(self.connections.len() - 1)
    }

    /// Connects both ends, which are in RESET, with memory made anew.
    fn connect(&mut self, c: usize) -> Verdict {
        let World { ends, connections, .. } = self;
        let connection = &mut connections[c];
        let Connection { setup, halves, lives, .. } = connection;
        let life = setup.lives[*lives % setup.lives.len()].clone();
        *lives += 1;
        let path_mtu = PathMtu::ALL[usize::from(life.mtu_shift - 8)];
        for (end, half) in ends.iter_mut().zip(&mut *halves) {
            half.renew(end, setup.size, &life)?;
        }
        let gids = [0, 1].map(|e: usize| ends[e].context.port().gids[0].gid);
        for e in [0, 1] {
            let receive = ReadyToReceive {
                path_mtu,
                max_dest_rd_atomic: life.rd_atomic,
                min_rnr_timer: RnrTimer::new(life.rnr_timer).unwrap_or(RnrTimer::DEFAULT),
                ..ReadyToReceive::new(
                    AddressVector::new(gids[1 - e], 0),
                    Qpn::new(halves[1 - e].qpn),
                    Psn::new(life.psn[1 - e]),
                )
            };
            let send = ReadyToSend {
                timeout: 10,
                rnr_retry: life.rnr_retry,
                max_rd_atomic: life.rd_atomic,
                ..ReadyToSend::new(Psn::new(life.psn[e]))
            };
            let init = Transition::Init { access: access() };
            for transition in [init, Transition::ReadyToReceive(receive), Transition::ReadyToSend(send)] {
                ends[e].context.modify_qp(halves[e].qp, transition)?;
            }
        }
        let target = setup.size.target();
        connection.model =
            model::Connection::new(life.psn, path_mtu.bytes(), target, life.rnr_retry == RNR_ENDLESS);
        connection.phase = Phase::Up;
        Ok(())
    }

    /// One turn of everything: frames, timers, events, completions. The application of `busy` takes
    /// no completions. Whether anything came of it.
    pub(crate) fn turn(&mut self, busy: Option<usize>) -> Verdict<bool> {
        let mut frames = 0;
        for end in &mut self.ends {
            frames += end.context.poll(self.now)?;
        }
        self.check_responses()?;
        self.take_events()?;
        let mut progress = false;
        for e in [0, 1].into_iter().filter(|e| busy != Some(*e)) {
            progress |= self.collect(e)?;
        }
        for c in 0..self.connections.len() {
            progress |= self.go_on(c)?;
        }
        if frames == 0 {
            let timeouts = self.ends.iter().filter_map(|end| end.context.next_timeout());
            let phases = self.connections.iter().filter_map(|c| match c.phase {
                Phase::Up | Phase::Over => None,
                Phase::Dying(at) | Phase::Waiting(at) => Some(at),
            });
            if let Some(next) = timeouts.chain(self.network.next_arrival()).chain(phases).min() {
                self.now = next.max(Nanos(self.now.0 + 1));
            }
        }
        Ok(progress)
    }

    fn check_responses(&mut self) -> Verdict {
        let mut responses = lock(&self.responses);
        for (e, qpn, response) in responses.drain(..) {
            if let Some(c) = self.connections.iter().position(|c| c.halves[e].qpn == qpn) {
                self.connections[c].model.respond(e, response).map_err(|d| d.at(c, e))?;
            }
        }
        Ok(())
    }

    fn take_events(&mut self) -> Verdict {
        for e in [0, 1] {
            while let Some(event) = self.ends[e].context.next_event() {
                self.take_event(e, event)?;
            }
        }
        Ok(())
    }

    fn take_event(&mut self, e: usize, event: Event) -> Verdict {
        let (Event::SqDrained(qp) | Event::QpReqErr(qp) | Event::QpAccessErr(qp)) = event else {
            return match event {
                Event::Completion(cq) if cq == self.ends[e].cq => {
                    self.ends[e].asleep = None;
                    Ok(())
                }
                Event::CqErr(cq) => self.overflow(e, cq),
                other => Err(Disagreement(format!("{other:?}"))),
            };
        };
        // The queue pair may have been replaced since.
        let Some(c) = self.connections.iter().position(|c| c.halves[e].qp == qp) else { return Ok(()) };
        let Connection { model, phase, halves, .. } = &mut self.connections[c];
        match event {
            _ if *phase == Phase::Over || matches!(phase, Phase::Waiting(_)) => Ok(()),
            Event::SqDrained(_) => {
                halves[e].drain = Drain::Done;
                self.tally.drained += 1;
                model.drained(e)
            }
            _ => model.broken(),
        }
        .map_err(|d| d.at(c, e))
    }

    /// A completion queue is full. It was too small for all the work that was posted.
    fn overflow(&mut self, e: usize, cq: Cq) -> Verdict {
        let position = self.connections.iter().position(|c| c.halves[e].own_cq == Some(cq));
        let Some(c) = position else { return Err(Disagreement("the shared CQ has overflowed".to_owned())) };
        let Connection { setup, model, .. } = &mut self.connections[c];
        let capacity = setup.own_cq.unwrap_or(0);
        let outstanding = model.outstanding(e) + model.receives(e);
        ensure!(outstanding > capacity as usize, "QP {c}.{e}: {outstanding} outstanding overflow the CQ");
        // Errors that are in it already have this for a reason.
        model.kill();
        let mut count = 0;
        while let Some(wc) = self.ends[e].context.poll_cq(cq)? {
            self.complete(e, &wc)?;
            count += 1;
        }
        let Connection { model, halves, .. } = &mut self.connections[c];
        ensure!(count == capacity || halves[e].reset, "QP {c}.{e}: {count} in a CQ full with {capacity}");
        halves[e].overflowed = true;
        model.discard(e);
        self.tally.overflows += 1;
        self.start_dying(c);
        Ok(())
    }

    /// Takes completions, unless the application sleeps.
    fn collect(&mut self, e: usize) -> Verdict<bool> {
        let own = self.connections.iter().filter_map(|c| c.halves[e].own_cq);
        let shared = Some(self.ends[e].cq).filter(|_| self.ends[e].asleep.is_none());
        let cqs: Vec<Cq> = own.chain(shared).collect();
        let mut progress = false;
        for cq in cqs {
            while let Some(wc) = self.ends[e].context.poll_cq(cq)? {
                self.complete(e, &wc)?;
                progress = true;
            }
        }
        Ok(progress)
    }

    pub(crate) fn sleep(&mut self, e: usize, notify: Notify) -> Verdict {
        if self.ends[e].asleep.is_some() {
            return Ok(());
        }
        let cq = self.ends[e].cq;
        self.ends[e].context.req_notify_cq(cq, notify)?;
        // What came before, once more after arming.
        self.take_events()?;
        self.collect(e)?;
        self.ends[e].asleep = Some(notify);
        Ok(())
    }

    /// The application looks, though no event has come: there must be nothing of the kind that it
    /// waits for.
    pub(crate) fn wake(&mut self, e: usize) -> Verdict {
        self.take_events()?;
        let Some(notify) = self.ends[e].asleep.take() else { return Ok(()) };
        while let Some(wc) = self.ends[e].context.poll_cq(self.ends[e].cq)? {
            let solicited = self.complete(e, &wc)?;
            ensure!(notify == Notify::Solicited && !solicited, "no event told of {wc:?}");
        }
        Ok(())
    }

    /// Whether it was solicited, or an error.
    fn complete(&mut self, e: usize, wc: &WorkCompletion) -> Verdict<bool> {
        let position = self.connections.iter().position(|c| c.halves[e].qp == wc.qp);
        let Some(c) = position else { return Err(Disagreement(format!("of no QP: {wc:?}"))) };
        let is_receive = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        let solicited = match is_receive {
            true => self.complete_receive(c, e, wc),
            false => self.complete_send(c, e, wc),
        };
        if wc.status != WcStatus::Success {
            self.tally.count_status(wc.status);
            if self.connections[c].phase == Phase::Up {
                self.start_dying(c);
            }
        }
        solicited.map_err(|d| d.at(c, e))
    }

    fn complete_send(&mut self, c: usize, e: usize, wc: &WorkCompletion) -> Verdict<bool> {
        let World { ends, connections, tally, .. } = self;
        let Connection { model, halves, .. } = &mut connections[c];
        let landing = ends[e].context.bytes(halves[e].landing)?;
        for request in model.complete(e, completion(wc, None), landing)? {
            halves[e].landings[1] += tally.count_request(&request);
        }
        Ok(wc.status != WcStatus::Success)
    }

    fn complete_receive(&mut self, c: usize, e: usize, wc: &WorkCompletion) -> Verdict<bool> {
        let World { ends, connections, tally, .. } = self;
        let Connection { model, halves, setup, .. } = &mut connections[c];
        let (half, context) = (&halves[e], &mut ends[e].context);
        let mut invalidated = None;
        if let Some(rkey) = wc.invalidated {
            for (i, (mr, _)) in half.keys.iter().enumerate() {
                if context.remote(*mr)?.rkey == rkey {
                    invalidated = Some(i);
                }
            }
            ensure!(invalidated.is_some(), "a key of nobody: {wc:?}");
        }
        let start = (wc.wr_id % setup.size.slots() * u64::from(setup.size.longest())) as usize;
        let end = start + setup.size.longest() as usize;
        let buffer = &context.bytes(half.receives)?[start..end];
        let memory = if half.withdrawn.is_some() { None } else { Some(context.bytes(half.target)?) };
        let solicited = model.complete_receive(e, completion(wc, invalidated), buffer, memory)?;
        if wc.status == WcStatus::Success && wc.opcode == WcOpcode::Recv {
            let used = wc.byte_len as usize;
            context.bytes_mut(half.receives)?[start..start + used].fill(POISON);
        }
        if wc.status == WcStatus::Success {
            tally.received += 1;
        }
        Ok(solicited)
    }

    pub(crate) fn start_dying(&mut self, c: usize) {
        let connection = &mut self.connections[c];
        if connection.phase == Phase::Up {
            let linger = Duration::from_micros(connection.life().linger_us);
            connection.phase = Phase::Dying(self.now + linger);
        }
    }

    /// Takes a connection that is not up one step further. Whether it did.
    fn go_on(&mut self, c: usize) -> Verdict<bool> {
        match self.connections[c].phase {
            Phase::Dying(at) if at <= self.now => {
                self.end(c)?;
                let over = Phase::Waiting(self.now + TIME_WAIT);
                self.connections[c].phase = if self.closing { Phase::Over } else { over };
                Ok(true)
            }
            Phase::Waiting(at) if at <= self.now && !self.closing => {
                self.connect(c)?;
                self.tally.reconnected += 1;
                Ok(true)
            }
            Phase::Waiting(_) if self.closing => {
                self.connections[c].phase = Phase::Over;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Both ends fail, and all their work has an outcome; then they are made ready to connect anew.
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
        }
        for e in [0, 1] {
            self.collect(e)?;
        }
        let World { ends, connections, tally, .. } = self;
        let Connection { halves, model, setup, lives, .. } = &mut connections[c];
        for e in [0, 1] {
            let (half, peer) = (&halves[e], &halves[1 - e]);
            let landing = ends[e].context.bytes(half.landing)?;
            let memory = match &peer.withdrawn {
                Some(memory) => memory,
                None => ends[1 - e].context.bytes(peer.target)?,
            };
            for request in model.finish(e, landing, memory).map_err(|d| d.at(c, e))? {
                tally.count_request(&request);
            }
        }
        for (end, half) in ends.iter_mut().zip(halves) {
            if half.overflowed || *lives % 2 == 0 {
                half.replace(end, setup)?;
            } else {
                end.context.modify_qp(half.qp, Transition::Reset)?;
            }
            half.reset = true;
        }
        Ok(())
    }

    /// Lets everything come to its end.
    fn close(&mut self) -> Verdict {
        self.closing = true;
        let mut quiet = 0;
        loop {
            for e in [0, 1] {
                self.wake(e)?;
            }
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    if !self.connections[c].model.receives_failed(e) {
                        self.post_receives(c, e, u64::MAX)?;
                    }
                    self.resume(c, e)?;
                }
            }
            let progress = self.turn(None)?;
            let over = |c: &Connection| c.phase == Phase::Over || c.phase == Phase::Up && c.model.is_idle();
            if self.connections.iter().all(over) {
                break;
            }
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    let Connection { model, phase, .. } = &self.connections[c];
                    if *phase == Phase::Up && model.ends_in_silence(e) {
                        self.post_last(c, e)?;
                    }
                }
            }
            quiet = if progress { 0 } else { quiet + 1 };
            ensure!(quiet < PATIENCE, "stuck at {:?}\n{}", self.now, self.describe());
        }
        for (c, connection) in self.connections.iter().enumerate() {
            for e in [0, 1].into_iter().filter(|_| connection.phase == Phase::Up) {
                let memory = self.ends[1 - e].context.bytes(connection.halves[1 - e].target)?;
                connection.model.settled(e, memory).map_err(|d| d.at(c, e))?;
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let mut text = String::new();
        for (c, connection) in self.connections.iter().enumerate() {
            text += &format!("connection {c}: {}\n", connection.model);
            for e in [0, 1] {
                text += &format!("  {:?}\n", self.ends[e].context.query_qp(connection.halves[e].qp));
            }
        }
        for end in &self.ends {
            text += &format!("{}\n", end.context.counters());
        }
        text
    }

    /// Nothing holds on to anything, and the context has as much to give as when it was new.
    fn tear_down(&mut self) -> Verdict {
        let World { ends, connections, .. } = self;
        for (e, end) in ends.iter_mut().enumerate() {
            let mut regions = 1;
            for Connection { halves, .. } in &mut *connections {
                let half = &halves[e];
                end.context.destroy_qp(half.qp)?;
                if let Some(cq) = half.own_cq {
                    end.context.destroy_cq(cq)?;
                }
                let keys = half.keys.iter().chain(&half.own_keys).map(|key| key.0);
                let target = Some(half.target).filter(|_| half.withdrawn.is_none());
                for mr in keys.chain([half.receives, half.landing]).chain(target) {
                    drop(end.context.deregister(mr)?);
                }
                regions += 3 + 2 * KEYS;
            }
            drop(end.context.deregister(end.noise)?);
            end.context.poll(self.now)?;
            ensure!(end.context.next_timeout().is_none(), "a timer of nobody, at end {e}");
            for _ in 0..regions {
                end.context.register(end.pd, memory(8)?, Access::NONE)?;
            }
            let config = QpConfig::rc(end.pd, end.cq);
            for Connection { setup, .. } in &*connections {
                end.context.create_qp(&config)?;
                setup.own_cq.map(|_| end.context.create_cq(1)).transpose()?;
            }
        }
        Ok(())
    }

    fn add_counters(&mut self) {
        for end in &self.ends {
            self.tally.add_engine(end.context.counters());
        }
        self.tally.add_network(&self.network.counters());
    }

    pub(crate) fn carry_out(&mut self, operation: &Operation) -> Verdict {
        match operation {
            Operation::Post(at, work) => {
                let (c, e) = self.resolve(*at);
                self.post(c, e, work)
            }
            Operation::Receive(at, count) => {
                let (c, e) = self.resolve(*at);
                self.post_receives(c, e, u64::from(*count))
            }
            Operation::Turn { count, busy } => {
                for _ in 0..*count {
                    self.turn(busy.map(usize::from))?;
                }
                Ok(())
            }
            Operation::Drain(at) => {
                let (c, e) = self.resolve(*at);
                self.drain(c, e)
            }
            Operation::Resume(at) => {
                let (c, e) = self.resolve(*at);
                self.resume(c, e)
            }
            Operation::Sleep { end, solicited } => {
                self.sleep((*end).into(), if *solicited { Notify::Solicited } else { Notify::Next })
            }
            Operation::Wake { end } => self.wake((*end).into()),
            Operation::Accident(at, accident) => {
                let (c, e) = self.resolve(*at);
                self.befall(c, e, *accident)
            }
        }
    }

    fn resolve(&self, at: crate::schedule::At) -> (usize, usize) {
        (usize::from(at.connection) % self.connections.len(), usize::from(at.end))
    }
}

/// The value of `rnr_retry` that means "without end".
const RNR_ENDLESS: u8 = 7;

impl Disagreement {
    pub(crate) fn at(self, c: usize, e: usize) -> Disagreement {
        Disagreement(format!("QP {c}.{e}: {}", self.0))
    }
}

impl Connection {
    pub(crate) fn life(&self) -> &Life {
        &self.setup.lives[(self.lives - 1) % self.setup.lives.len()]
    }
}

impl Half {
    fn new(end: &mut End, setup: &crate::schedule::Connection) -> Verdict<Half> {
        let size = setup.size;
        let mut register =
            |length| -> Verdict<Mr> { Ok(end.context.register(end.pd, memory(length)?, access())?) };
        let slots = size.slots() as usize * size.longest() as usize;
        let (receives, landing, target) = (register(slots)?, register(slots)?, register(size.target())?);
        let keys = [register(8)?, register(8)?, register(8)?, register(8)?].map(|mr| (mr, false));
        let own_keys = [register(8)?, register(8)?, register(8)?, register(8)?].map(|mr| (mr, false));
        let own_cq = setup.own_cq.map(|capacity| end.context.create_cq(capacity)).transpose()?;
        let qp = end.create_qp(own_cq, setup)?;
        Ok(Half {
            qp,
            qpn: end.context.query_qp(qp)?.qpn.value(),
            own_cq,
            overflowed: false,
            receives,
            landing,
            target,
            reach: RemoteAddress { addr: 0, rkey: RKey(0) },
            withdrawn: None,
            keys,
            own_keys,
            receives_posted: 0,
            landings: [0; 2],
            drain: Drain::No,
            reset: true,
        })
    }

    /// As new, for another life.
    fn renew(&mut self, end: &mut End, size: Size, life: &Life) -> Verdict {
        for (mr, used) in self.keys.iter_mut().chain(&mut self.own_keys).filter(|key| key.1) {
            let memory = end.context.deregister(*mr)?;
            *mr = end.context.register(end.pd, memory, access())?;
            *used = false;
        }
        let mut memory = match self.withdrawn.take() {
            Some(memory) => memory,
            None => end.context.deregister(self.target)?,
        };
        memory.fill(0);
        let iova = match life.iova {
            Iova::Zero => 0,
            Iova::Page(page) => u64::from(page) << 12,
            Iova::Top => u64::MAX - size.target() as u64 + 1,
        };
        self.target = end.context.register_at(end.pd, memory, access(), iova)?;
        let RemoteMemory { addr, rkey, .. } = end.context.remote(self.target)?;
        self.reach = RemoteAddress { addr, rkey };
        end.context.bytes_mut(self.receives)?.fill(POISON);
        self.receives_posted = 0;
        self.landings = [0; 2];
        self.drain = Drain::No;
        self.reset = false;
        Ok(())
    }

    /// Another queue pair in place of this one.
    pub(crate) fn replace(&mut self, end: &mut End, setup: &crate::schedule::Connection) -> Verdict {
        end.context.destroy_qp(self.qp)?;
        if let Some(cq) = self.own_cq.take_if(|_| self.overflowed) {
            end.context.destroy_cq(cq)?;
            let capacity = setup.own_cq.unwrap_or(1);
            self.own_cq = Some(end.context.create_cq(capacity)?);
            self.overflowed = false;
        }
        self.qp = end.create_qp(self.own_cq, setup)?;
        self.qpn = end.context.query_qp(self.qp)?.qpn.value();
        self.reset = true;
        Ok(())
    }
}

impl End {
    fn create_qp(&mut self, own_cq: Option<Cq>, setup: &crate::schedule::Connection) -> Verdict<Qp> {
        let config = QpConfig {
            max_send_wr: setup.depth,
            max_recv_wr: setup.size.slots() as u32,
            signal_all: setup.signal_all,
            ..QpConfig::rc(self.pd, own_cq.unwrap_or(self.cq))
        };
        Ok(self.context.create_qp(&config)?)
    }
}

impl Link {
    fn config(&self) -> LinkConfig {
        let rate = |thousandths: u16| f64::from(thousandths) / 1000.0;
        LinkConfig {
            loss: rate(self.loss),
            duplicate: rate(self.duplicate),
            reorder: rate(self.reorder),
            corrupt: rate(self.corrupt),
            reorder_by: self.reorder_by,
            delay: Duration::from_nanos(self.delay_ns),
            jitter: Duration::from_nanos(self.jitter_ns),
            rate: (self.gigabits > 0).then_some(self.gigabits * 1_000_000_000),
            ..LinkConfig::default()
        }
    }
}

fn completion(wc: &WorkCompletion, invalidated: Option<usize>) -> Completion {
    let WorkCompletion { wr_id, status, opcode, byte_len, immediate, .. } = *wc;
    Completion { number: wr_id, status, opcode, byte_len, immediate, invalidated }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Notes the responses that enter the network: to which end and queue pair, and what they say.
fn tap(network: &SimNetwork, responses: &Arc<Mutex<Vec<(usize, u32, Response)>>>) {
    const IPV6: [u8; 2] = [0x86, 0xdd];
    let responses = Arc::clone(responses);
    network.set_filter(Box::new(move |frame| {
        let v6 = frame[12..14] == IPV6;
        let (address, bth) = if v6 { (53, 62) } else { (33, 42) };
        let opcode = frame[bth];
        // READ Response First, Last, Only; Acknowledge; Atomic Acknowledge: with an AETH.
        if matches!(opcode, 0x0d | 0x0f..=0x12) {
            let word = |at: usize| u32::from_be_bytes([0, frame[at + 1], frame[at + 2], frame[at + 3]]);
            let response = Response {
                is_acknowledge: opcode == 0x11,
                syndrome: frame[bth + 12],
                psn: word(bth + 8),
                msn: word(bth + 12),
            };
            lock(&responses).push((usize::from(frame[address]) - 1, word(bth + 4), response));
        }
        driver::sim::Verdict::Pass
    }));
}

/// Receives are as long as the longest message, and what lies behind is looked at.
const _: () = assert!(GUARD <= 9216);
