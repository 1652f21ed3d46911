//! Two contexts on a simulated network, and the connections between them. Every posted work request and every completion is
//! passed to the model too.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use ferroce::driver::gpu::strict::{Strict, StrictDevice};
use ferroce::driver::gpu::{Device as _, GpuError};
use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
use ferroce::*;

use crate::connection::{Connection, Drain, GRH, Half, KEYS, Phase, access, access_to};
use crate::model::{Completion, Disagreement, POISON, SharedReceives, Verdict, ensure};
use crate::noise::noise;
use crate::schedule::{At, Link, Operation, Plan, Schedule, Service, Setup, Size};
use crate::tally::Tally;
use crate::tap::Tap;

/// Without a completion for this long, or for this many turns if time stands still, a schedule is considered stuck: no
/// retry limit takes as long.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for a connection with device memory: its ACK timeout is 16 times as long, and with a window of one packet each
/// loss in a long READ takes one.
const PATIENCE_WITH_DEVICES: Duration = Duration::from_secs(160);
const PATIENCE_TURNS: u32 = 1_000_000;
/// Longer than copies may be late, including those that wait for others in a full queue, and shorter than the ACK timeouts
/// that end a connection of hosts.
const COPIES_END: Duration = Duration::from_millis(24);
/// Receives of a shared receive queue.
pub(crate) const SHARED: u64 = 32;
/// The message size of connections that share receives.
pub(crate) const SHARED_SIZE: Size = Size::Small;

pub(crate) struct World {
    pub(crate) ends: [End; 2],
    pub(crate) connections: Vec<Connection>,
    network: SimNetwork,
    tap: Tap,
    /// The network neither reorders nor duplicates frames.
    pub(crate) faithful: bool,
    pub(crate) now: Nanos,
    pub(crate) tally: Tally,
    /// No new work is started: everything must end.
    pub(crate) closing: bool,
}

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) cq: Cq,
    pub(crate) device: Arc<StrictDevice>,
    /// The data to send, in host memory and in GPU memory.
    pub(crate) noise: Mr,
    pub(crate) device_noise: Mr,
    pub(crate) shared: Option<SharedQueue>,
    /// For the other end.
    pub(crate) ah: Ah,
    peer: Gid,
    /// The application waits for the event of the shared CQ.
    asleep: Option<Notify>,
}

/// A shared receive queue. The number of a receive is that of its place in memory.
pub(crate) struct SharedQueue {
    pub(crate) srq: Srq,
    pub(crate) memory: Mr,
    pub(crate) model: SharedReceives,
}

/// The bytes of a region of any kind of memory.
pub(crate) fn view(context: &Context, mr: Mr) -> Verdict<Cow<'_, [u8]>> {
    if let Ok(bytes) = context.bytes(mr) {
        return Ok(bytes.into());
    }
    let mut bytes = vec![0; context.remote(mr)?.length as usize];
    context.read(mr, 0, &mut bytes)?;
    Ok(bytes.into())
}

pub(crate) fn memory(length: usize) -> Verdict<Memory> {
    Memory::zeroed(length).map_err(|error| Disagreement(error.to_string()))
}

impl From<Error> for Disagreement {
    fn from(error: Error) -> Disagreement {
        Disagreement(format!("refused: {error}"))
    }
}

impl From<GpuError> for Disagreement {
    fn from(error: GpuError) -> Disagreement {
        Disagreement(format!("refused: {error}"))
    }
}

impl From<MemoryError> for Disagreement {
    fn from(error: MemoryError) -> Disagreement {
        Disagreement(format!("refused: {error}"))
    }
}

impl From<RegisterError> for Disagreement {
    fn from(error: RegisterError) -> Disagreement {
        error.source.into()
    }
}

impl World {
    /// Executes a schedule completely.
    pub(crate) fn run(schedule: &Schedule) -> Verdict<Tally> {
        let mut world = World::new(&schedule.setup)?;
        for operation in &schedule.operations {
            world.carry_out(operation)?;
        }
        world.finish()
    }

    /// Runs until everything has ended, and checks what is left.
    pub(crate) fn finish(mut self) -> Verdict<Tally> {
        self.close()?;
        self.tear_down()?;
        for end in &self.ends {
            self.tally.add_engine(end.context.counters());
        }
        self.tally.add_network(&self.network.counters());
        Ok(self.tally)
    }

    pub(crate) fn new(setup: &Setup) -> Verdict<World> {
        let frames = NetworkConfig::default().mtu(4200).frames(setup.frames);
        let network = SimNetwork::with_config(setup.seed, setup.link.config(), frames);
        let network = network.map_err(|error| Disagreement(error.to_string()))?;
        let (first, second) = (network.port(&[setup.address(0)]), network.port(&[setup.address(1)]));
        let mut world = World {
            ends: [End::new(Box::new(first), setup, 0)?, End::new(Box::new(second), setup, 1)?],
            connections: Vec::new(),
            tap: Tap::on(&network),
            network,
            faithful: setup.link.duplicate == 0 && setup.link.reorder == 0,
            now: Nanos(1_000_000),
            tally: Tally::default(),
            closing: false,
        };
        for plan in &setup.connections {
            world.add(plan)?;
        }
        Ok(world)
    }

    /// One turn of everything: frames, timers, events, completions. The application of `busy` takes no completions. Returns
    /// whether there was any progress.
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
        for (e, qpn, response) in self.tap.lock().drain(..) {
            if let Some(c) = self.connections.iter().position(|c| c.halves[e].qpn.value() == qpn) {
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
            let End { context, shared, .. } = &self.ends[e];
            if let Some(SharedQueue { srq, model, .. }) = shared {
                model.check_limit(context.query_srq(*srq)?.posted)?;
            }
        }
        Ok(())
    }

    fn take_event(&mut self, e: usize, event: Event) -> Verdict {
        let qp = match event {
            Event::SqDrained(qp)
            | Event::QpFatal(qp)
            | Event::QpReqErr(qp)
            | Event::QpAccessErr(qp)
            | Event::QpLastWqeReached(qp) => qp,
            Event::Completion(cq) => {
                if cq == self.ends[e].cq {
                    self.ends[e].asleep = None;
                }
                return Ok(());
            }
            Event::CqErr(cq) => return self.overflow(e, cq),
            Event::SrqLimitReached(_) => {
                let Some(shared) = &mut self.ends[e].shared else { return Ok(()) };
                return shared.model.limit_reached();
            }
            other => return Err(Disagreement(format!("{other:?}"))),
        };
        // The queue pair may have been replaced since.
        let Some(c) = self.connections.iter().position(|c| c.halves[e].qp == qp) else { return Ok(()) };
        let Connection { model, phase, halves, .. } = &mut self.connections[c];
        match event {
            _ if matches!(phase, Phase::Over | Phase::Waiting(_)) => Ok(()),
            // Its CQ has reported it before.
            Event::QpFatal(_) if halves[e].overflowed => Ok(()),
            Event::SqDrained(_) => {
                halves[e].drain = Drain::Done;
                self.tally.drained += 1;
                model.drained(e)
            }
            _ => model.broken(),
        }
        .map_err(|Disagreement(reason)| Disagreement(format!("{event:?}: {reason}")).at(c, e))
    }

    /// A completion queue is full. It was too small for all posted work.
    fn overflow(&mut self, e: usize, cq: Cq) -> Verdict {
        let position = self.connections.iter().position(|c| c.halves[e].own_cq == Some(cq));
        let Some(c) = position else { return Err(Disagreement("the shared CQ has overflowed".to_owned())) };
        let Connection { plan, model, .. } = &mut self.connections[c];
        let capacity = plan.own_cq.unwrap_or(0);
        let shared = if plan.srq { SHARED as usize } else { 0 };
        let outstanding = model.requests(e).outstanding() + model.receives(e) + shared;
        ensure!(outstanding > capacity as usize, "QP {c}.{e}: {outstanding} outstanding overflow the CQ");
        // Errors in it already have this as a reason.
        model.kill();
        let mut count = 0;
        while let Some(wc) = self.ends[e].context.poll_cq(cq)? {
            self.complete(e, &wc)?;
            count += 1;
        }
        let half = &mut self.connections[c].halves[e];
        ensure!(count == capacity || half.reset, "QP {c}.{e}: {count} in a CQ full with {capacity}");
        half.overflowed = true;
        self.discard(c, e);
        self.tally.overflows += 1;
        self.start_dying(c);
        Ok(())
    }

    /// The work of an end has no outcome any more.
    pub(crate) fn discard(&mut self, c: usize, e: usize) {
        let Connection { model, plan, .. } = &mut self.connections[c];
        model.discard(e);
        if let Some(shared) = self.ends[e].shared.as_mut().filter(|_| plan.srq) {
            shared.model.discard();
        }
    }

    /// Takes completions, unless the application sleeps.
    pub(crate) fn collect(&mut self, e: usize) -> Verdict<bool> {
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
        // Completions from before, once more after arming.
        self.take_events()?;
        self.collect(e)?;
        self.ends[e].asleep = Some(notify);
        Ok(())
    }

    /// The application polls, although no event has arrived: there must be no completion of the kind that it waits for.
    pub(crate) fn wake(&mut self, e: usize) -> Verdict {
        self.take_events()?;
        let Some(notify) = self.ends[e].asleep.take() else { return Ok(()) };
        while let Some(wc) = self.ends[e].context.poll_cq(self.ends[e].cq)? {
            let solicited = self.complete(e, &wc)?;
            ensure!(notify == Notify::Solicited && !solicited, "no event told of {wc:?}");
        }
        Ok(())
    }

    /// Returns whether it was solicited, or an error.
    fn complete(&mut self, e: usize, wc: &WorkCompletion) -> Verdict<bool> {
        let position = self.connections.iter().position(|c| c.halves[e].qp == wc.qp);
        let Some(c) = position else { return Err(Disagreement(format!("of no QP: {wc:?}"))) };
        let is_receive = matches!(wc.opcode, WcOpcode::Recv | WcOpcode::RecvRdmaWithImm);
        let solicited = match is_receive {
            true => self.complete_receive(c, e, wc),
            false => self.complete_send(c, e, wc).map(|()| false),
        };
        let failed = wc.status != WcStatus::Success;
        if failed {
            self.tally.count_status(wc.status);
            self.start_dying(c);
        }
        Ok(solicited.map_err(|d| d.at(c, e))? || failed)
    }

    fn complete_send(&mut self, c: usize, e: usize, wc: &WorkCompletion) -> Verdict {
        let World { ends, connections, tally, .. } = self;
        let is_reliable = connections[c].is_reliable();
        let Connection { model, halves, .. } = &mut connections[c];
        let landing = view(&ends[e].context, halves[e].landing)?;
        for request in model.complete(e, completion(wc, None), &landing)? {
            halves[e].landings[1] += u64::from(request.action.lands());
            tally.count_request(&request, is_reliable);
        }
        Ok(())
    }

    /// Returns whether the message was certainly solicited.
    fn complete_receive(&mut self, c: usize, e: usize, wc: &WorkCompletion) -> Verdict<bool> {
        let World { ends, connections, tally, .. } = self;
        let Connection { model, halves, plan, .. } = &mut connections[c];
        let (half, end) = (&halves[e], &mut ends[e]);
        let End { context, shared, peer, .. } = &mut *end;
        let mut completion = completion(wc, revoked(context, half, wc)?);
        let (mr, place) = match shared {
            Some(shared) if plan.srq => {
                shared.model.complete(wc.wr_id)?;
                (shared.memory, wc.wr_id)
            }
            _ => (half.receives, wc.wr_id % plan.size.slots()),
        };
        let (longest, length) = (plan.size.longest() as usize, plan.size.receive() as usize);
        let start = place as usize * length;
        let receives = view(context, mr)?;
        let mut buffer = &receives[start..start + length];
        let is_datagram = plan.service == Service::Ud && wc.status == WcStatus::Success;
        ensure!(wc.grh == is_datagram, "{wc:?}");
        if is_datagram {
            let (area, rest) = buffer.split_at(GRH as usize);
            let area = area.first_chunk().ok_or_else(|| Disagreement("short".to_owned()))?;
            let back = context.address_from_wc(wc, area)?;
            ensure!(back.gid == *peer, "a datagram from {back:?}");
            completion.byte_len = wc.byte_len.saturating_sub(GRH);
            buffer = rest;
        }
        let memory = if half.is_withdrawn() { None } else { Some(view(context, half.target)?) };
        let buffer = &buffer[..longest.min(buffer.len())];
        let received = model.complete_receive(e, completion, buffer, memory.as_deref())?;
        drop((receives, memory));
        if wc.opcode == WcOpcode::Recv {
            let failed = wc.status != WcStatus::Success;
            let used = if failed { length } else { wc.byte_len as usize };
            end.poison(mr, start, used)?;
        }
        if let Some(request) = received {
            tally.count_received(&request, plan.service);
        }
        // For equal unreliable messages, the model does not know which one this was.
        Ok(plan.service == Service::Rc && received.is_some_and(|request| request.solicited))
    }

    /// Runs until everything has ended.
    fn close(&mut self) -> Verdict {
        self.closing = true;
        let (mut quiet, mut since) = (0, self.now);
        loop {
            for e in [0, 1] {
                self.wake(e)?;
            }
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    self.post_all_receives(c, e)?;
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
                    if *phase == Phase::Up && model.requests(e).ends_in_silence() {
                        self.post_last(c, e)?;
                    }
                }
            }
            (quiet, since) = if progress { (0, self.now) } else { (quiet + 1, since) };
            let has_device = self.connections.iter().any(|connection| connection.plan.has_device());
            let patience = if has_device { PATIENCE_WITH_DEVICES } else { PATIENCE };
            let patient = quiet < PATIENCE_TURNS && self.now < since + patience;
            ensure!(patient, "stuck from {since:?} to {:?}\n{}", self.now, self.describe());
        }
        for (c, connection) in self.connections.iter().enumerate() {
            for e in [0, 1].into_iter().filter(|_| connection.phase == Phase::Up) {
                let memory = view(&self.ends[1 - e].context, connection.halves[1 - e].target)?;
                connection.model.settled(e, &memory).map_err(|d| d.at(c, e))?;
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

    /// Advances time until no copies are outstanding: flushed work requests wait for them.
    pub(crate) fn let_copies_end(&mut self) -> Verdict {
        let end = self.now + COPIES_END;
        while self.now < end {
            let mut frames = 0;
            for end in &mut self.ends {
                frames += end.context.poll(self.now)?;
            }
            self.check_responses()?;
            self.take_events()?;
            for e in [0, 1] {
                self.collect(e)?;
            }
            // Not too long, because on a link with losses an RNR NAK may cost others a retry.
            for c in 0..self.connections.len() {
                for e in [0, 1] {
                    self.post_all_receives(c, e)?;
                }
            }
            // Outstanding work continues meanwhile, as in other turns: no time passes while there are frames.
            if frames > 0 {
                continue;
            }
            let timeouts = self.ends.iter().filter_map(|end| end.context.next_timeout());
            let next = timeouts.chain(self.network.next_arrival()).min().unwrap_or(end);
            self.now = next.clamp(Nanos(self.now.0 + 1), self.now + Duration::from_millis(1));
        }
        Ok(())
    }

    /// No references are left, and the context has as many free objects as when it was new.
    fn tear_down(&mut self) -> Verdict {
        self.let_copies_end()?;
        let World { ends, connections, now, .. } = self;
        for (e, end) in ends.iter_mut().enumerate() {
            let mut in_hand = 0;
            for Connection { halves, .. } in connections.iter().filter(|c| c.plan.srq) {
                in_hand += end.context.query_qp(halves[e].qp)?.outstanding_receives;
            }
            if let Some(SharedQueue { srq, model, .. }) = &end.shared {
                model.check_lost(end.context.query_srq(*srq)?.posted, in_hand)?;
            }
            for Connection { halves, .. } in &*connections {
                end.context.destroy_qp(halves[e].qp)?;
                halves[e].own_cq.map(|cq| end.context.destroy_cq(cq)).transpose()?;
                end.context.dealloc_mw(halves[e].window.mw)?;
            }
            end.context.poll(*now)?;
            ensure!(end.context.next_timeout().is_none(), "a timer of nobody, at end {e}");
            end.context.destroy_ah(end.ah)?;
            let mut regions = vec![end.noise, end.device_noise];
            if let Some(SharedQueue { srq, memory, .. }) = end.shared.take() {
                end.context.destroy_srq(srq)?;
                regions.push(memory);
            }
            for Connection { halves, .. } in &*connections {
                let half = &halves[e];
                regions.extend(half.keys.iter().chain(&half.own_keys).map(|key| key.0));
                regions.extend([half.receives, half.landing, half.target]);
            }
            for mr in regions {
                drop(end.context.deregister(mr)?);
            }
            end.fill(connections)?;
        }
        Ok(())
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
            Operation::ArmSrq { end, limit } => self.arm_srq((*end).into(), (*limit).into()),
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

    fn arm_srq(&mut self, e: usize, limit: u32) -> Verdict {
        self.take_events()?;
        let End { context, shared, .. } = &mut self.ends[e];
        if let Some(SharedQueue { srq, model, .. }) = shared {
            context.arm_srq(*srq, limit)?;
            model.arm(limit);
        }
        self.take_events()
    }

    fn resolve(&self, at: At) -> (usize, usize) {
        (usize::from(at.connection) % self.connections.len(), usize::from(at.end))
    }
}

impl End {
    fn new(port: Box<dyn PacketDriver>, setup: &Setup, n: u8) -> Verdict<End> {
        let count = setup.connections.len() as u32;
        let own_cqs = setup.connections.iter().filter(|plan| plan.own_cq.is_some()).count() as u32;
        let users: Vec<&Plan> = setup.connections.iter().filter(|plan| plan.srq).collect();
        // Exactly as many objects as are used at once: a leak is detected soon.
        let config = Config::default()
            .seed([n + 1; 32])
            .window(setup.windows[usize::from(n)])
            .reorder_packets(setup.reorder_packets[usize::from(n)])
            .max_pds(1)
            .max_qps(count)
            .max_cqs(1 + own_cqs)
            .max_srqs(1)
            .max_mws(count)
            .max_ahs(1)
            .staging_chunk(setup.staging.0)
            .staging_chunks(setup.staging.1)
            .max_mrs(Self::regions(&setup.connections));
        let mut context = Context::open(port, &config)?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(4096)?;
        let mut source = memory(noise().len())?;
        source.write(0, noise())?;
        let latest = Duration::from_micros(setup.copies_late_us);
        let device = Strict::default().seed(setup.seed ^ u64::from(n)).latest(latest).open()?;
        let noise = context.register(pd, source, Access::NONE)?;
        let mut source = device.allocate(self::noise().len())?;
        source.write(0, self::noise())?;
        let device_noise = context.register(pd, source, Access::NONE)?;
        let peer = Gid::from(setup.address(1 - n));
        let ah = context.create_ah(pd, &AddressVector::new(peer, 0))?;
        let mut shared = None;
        if !users.is_empty() {
            let srq = context.create_srq(&SrqConfig::new(pd).max_wr(SHARED as u32))?;
            let mut places = memory(SHARED as usize * SHARED_SIZE.receive() as usize)?;
            places.bytes_mut()?.fill(POISON);
            let memory = context.register(pd, places, access())?;
            // Completions of several CQs have no order, nor have those that wait for copies of a GPU.
            let ordered = users.iter().all(|plan| plan.own_cq.is_none() && !plan.has_device());
            let overtaking = if ordered { users.len() } else { SHARED as usize };
            shared = Some(SharedQueue { srq, memory, model: SharedReceives::new(overtaking) });
        }
        Ok(End { context, device, pd, cq, noise, device_noise, shared, ah, peer, asleep: None })
    }

    /// The region of the data to send.
    pub(crate) fn noise(&self, plan: &Plan, e: usize) -> Mr {
        if plan.on_device[e] { self.device_noise } else { self.noise }
    }

    /// Registers memory, of this end's GPU or of the host.
    pub(crate) fn register(&mut self, length: usize, on_device: bool) -> Verdict<Mr> {
        let memory = if on_device { self.device.allocate(length)? } else { memory(length)? };
        Ok(self.context.register(self.pd, memory, access_to(on_device))?)
    }

    /// Fills a part of a region with bytes that no message has.
    pub(crate) fn poison(&mut self, mr: Mr, start: usize, length: usize) -> Verdict {
        match self.context.bytes_mut(mr) {
            Ok(bytes) => bytes[start..start + length].fill(POISON),
            Err(_) => self.context.write(mr, start as u64, &vec![POISON; length])?,
        }
        Ok(())
    }

    /// The number of regions that are registered at once.
    fn regions(plans: &[Plan]) -> u32 {
        let shared = plans.iter().any(|plan| plan.srq);
        // One may be leaving while its replacement exists.
        let leaving = plans.iter().filter(|plan| plan.has_device()).count() as u32;
        2 + u32::from(shared) + plans.len() as u32 * (3 + 2 * KEYS as u32) + leaving
    }

    /// Uses all objects that the context has.
    fn fill(&mut self, connections: &[Connection]) -> Verdict {
        let plans: Vec<_> = connections.iter().map(|c| c.plan.clone()).collect();
        for _ in 0..Self::regions(&plans) {
            self.context.register(self.pd, memory(8)?, Access::NONE)?;
        }
        self.context.create_srq(&SrqConfig::new(self.pd).max_wr(1).max_sge(1))?;
        for plan in &plans {
            self.context.create_qp(&QpConfig::rc(self.pd, self.cq))?;
            self.context.alloc_mw(self.pd)?;
            plan.own_cq.map(|_| self.context.create_cq(1)).transpose()?;
        }
        Ok(())
    }
}

impl Setup {
    fn address(&self, n: u8) -> std::net::IpAddr {
        if self.ipv6 { [0xfd00, 0, 0, 0, 0, 0, 0, u16::from(n) + 1].into() } else { [10, 0, 0, n + 1].into() }
    }
}

impl Link {
    fn config(&self) -> LinkConfig {
        let rate = |thousandths: u16| f64::from(thousandths) / 1000.0;
        LinkConfig::default()
            .loss(rate(self.loss))
            .duplicate(rate(self.duplicate))
            .reorder(rate(self.reorder))
            .corrupt(rate(self.corrupt))
            .reorder_by(self.reorder_by)
            .delay(Duration::from_nanos(self.delay_ns))
            .jitter(Duration::from_nanos(self.jitter_ns))
            .rate((self.gigabits > 0).then_some(self.gigabits * 1_000_000_000))
    }
}

/// The key of this end that the message has revoked.
fn revoked(context: &Context, half: &Half, wc: &WorkCompletion) -> Verdict<Option<usize>> {
    let Some(rkey) = wc.invalidated else { return Ok(None) };
    for (i, (mr, _)) in half.keys.iter().enumerate() {
        if context.remote(*mr)?.rkey == rkey {
            return Ok(Some(i));
        }
    }
    let of_window = half.window.reach.is_some_and(|reach| reach.rkey == rkey);
    ensure!(of_window, "a key of nobody: {wc:?}");
    Ok(Some(KEYS))
}

fn completion(wc: &WorkCompletion, invalidated: Option<usize>) -> Completion {
    let WorkCompletion { wr_id, status, opcode, byte_len, immediate, .. } = *wc;
    Completion { number: wr_id, status, opcode, byte_len, immediate, invalidated }
}
