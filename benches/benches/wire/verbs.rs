//! ferroce: the verbs on a context at each end, driven by a spinning loop.

use std::time::{Duration, Instant};

use ferroce::*;
use hdrhistogram::Histogram;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::case::{Case, Op, RoundTrip, Seen};
use crate::end::{Outcome, Stage, Watch};
use crate::memory::{fill, verify};
use crate::raw::Meter;

/// Outstanding messages of all queue pairs together, unless there are more queue pairs.
const OUTSTANDING: u32 = 512;
/// The limit in bytes: few large messages fill any window.
const OUTSTANDING_BYTES: u32 = 2 << 20;
/// The least depth of each of several queue pairs, for small messages and for large ones.
const LEAST_DEPTH: u32 = 4;
const LEAST_DEPTH_LARGE: u32 = 1;
/// Outstanding READs of a queue pair.
const READS: u8 = 16;
/// Messages posted between two polls.
const BURST: usize = 32;

/// The number of WRITEs to the blocked other end, and the idle time before each.
const WAKES: u64 = 10;
const BETWEEN_WAKES: Duration = Duration::from_millis(5);

struct End {
    context: Context,
    poller: Poller,
    pd: Pd,
}

pub(crate) fn run(stage: &mut Stage<'_>) -> Outcome<String> {
    let driver = stage.open_device()?;
    let description = driver.capabilities().description.clone();
    let qps = stage.job.cases.iter().map(|case| shape(*case).qps).max().unwrap_or(1);
    let mut context = Context::open(driver, &Config::default().max_qps(qps))?;
    let pd = context.alloc_pd()?;
    let mut end = End { context, poller: Poller::spinning(), pd };
    for (n, case) in stage.job.cases.iter().enumerate().filter(|(_, case)| **case != Case::Idle) {
        let shape = shape(*case);
        let mut run = Run::open(&mut end, stage, shape, n as u64)?;
        let result = stage.record(|stage| match (case, stage.starts()) {
            (Case::Rate { .. }, true) => run.request(stage),
            (Case::Rate { .. }, false) => run.respond(stage),
            (_, true) => run.ping(stage),
            (_, false) => run.pong(stage),
        });
        result.and_then(|()| run.close(stage)).map_err(|error| format!("{case}: {error}"))?;
    }
    // The last one, since the runner takes the context.
    if stage.job.cases.last() == Some(&Case::Idle) {
        idle(end, stage)?;
    } else {
        // No port is closed while the other end polls: closing a memif removes its memory.
        stage.peer.meet()?;
        drop(end);
    }
    Ok(description)
}

/// A runner at the other end that blocks whenever it is idle.
fn idle(mut end: End, stage: &mut Stage<'_>) -> Outcome<()> {
    let mut run = Run::open(&mut end, stage, shape(Case::Idle), 0)?;
    if stage.starts() {
        return stage.record(|stage| run.wake(stage));
    }
    let runner = Runner::start(end.context, &RunnerConfig::default().idle(Idle::Block).core(stage.job.core))?;
    stage.record(|stage| {
        stage.peer.meet()?;
        let (start, before) = (Instant::now(), process_time());
        std::thread::sleep(stage.time());
        let idle = (process_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
        stage.peer.hear::<()>()?;
        Ok(Seen { handled: WAKES, idle: Some(idle), ..Seen::default() })
    })?;
    runner.stop().error.map_or(Ok(()), |error| Err(error.into()))
}

/// The messages of a case.
#[derive(Clone, Copy)]
struct Shape {
    op: Op,
    size: u32,
    qps: u32,
    /// Outstanding messages of each queue pair.
    depth: u32,
    /// Memory slots of each queue pair, used in turn.
    slots: u64,
    /// Whether both ends write, from the first slot to the second.
    round_trip: bool,
}

fn shape(case: Case) -> Shape {
    let Case::Rate { op, size, qps } = case else {
        let size = case.payload() as u32;
        return Shape { op: Op::Write, size, qps: 1, depth: 128, slots: 2, round_trip: true };
    };
    let least = if size <= 4096 { LEAST_DEPTH } else { LEAST_DEPTH_LARGE };
    let depth = (OUTSTANDING.min(OUTSTANDING_BYTES / size) / qps).max(least);
    let share = Stage::footprint(size as usize) as u64 / u64::from(qps);
    Shape { op, size, qps, depth, slots: (share / u64::from(size)).max(1), round_trip: false }
}

/// A queue pair and its progress.
#[derive(Clone, Copy)]
struct Lane {
    qp: Qp,
    posted: u64,
    done: u64,
    /// The slot of the next message.
    slot: u64,
}

/// Queue pairs and memory of one case.
struct Run<'a> {
    end: &'a mut End,
    shape: Shape,
    cq: Cq,
    mr: Mr,
    lanes: Vec<Lane>,
    remote: RemoteAddress,
    seed: u64,
}

/// The data that the other end needs.
#[derive(Serialize, Deserialize)]
struct Offer {
    gid: [u8; 16],
    mac: [u8; 6],
    qpns: Vec<u32>,
    psn: u32,
    addr: u64,
    rkey: u32,
}

impl Run<'_> {
    fn open<'a>(end: &'a mut End, stage: &mut Stage<'_>, shape: Shape, seed: u64) -> Outcome<Run<'a>> {
        let End { context, pd, .. } = &mut *end;
        let cq = context.create_cq(2 * shape.qps * shape.depth.next_power_of_two())?;
        let bytes = u64::from(shape.size) * shape.slots * u64::from(shape.qps);
        let mut memory = Memory::zeroed(bytes as usize)?;
        let is_source = stage.starts() != (shape.op == Op::Read);
        if is_source {
            fill(memory.bytes_mut()?, seed);
        }
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let mr = context.register(*pd, memory, access)?;
        let config = QpConfig::rc(*pd, cq)
            .max_send_wr(shape.depth)
            .max_recv_wr(shape.depth)
            .max_send_sge(1)
            .max_recv_sge(1);
        let qps = (0..shape.qps).map(|_| context.create_qp(&config)).collect::<Result<Vec<_>, _>>()?;
        let qpns = qps.iter().map(|qp| context.query_qp(*qp).map(|qp| qp.qpn.value()));
        let qpns = qpns.collect::<Result<_, _>>()?;
        let sgid_index = context.port().gids.iter().position(|entry| !entry.gid.is_ipv6());
        let sgid_index = sgid_index.ok_or("the port has no IPv4 address")?;
        let RemoteMemory { addr, rkey, .. } = context.remote(mr)?;
        let offer = Offer {
            gid: context.port().gids[sgid_index].gid.0,
            mac: context.capabilities().mac,
            qpns,
            psn: context.random_psn().value(),
            addr,
            rkey: rkey.value(),
        };
        let theirs: Offer = stage.peer.exchange(&offer)?;
        let path_mtu = PathMtu::ALL.into_iter().find(|mtu| mtu.bytes() == stage.job.path_mtu);
        let path_mtu = path_mtu.ok_or("no such path MTU")?;
        // With the MAC address, so that the kernel is not queried for each of a thousand.
        let mut address = AddressVector::new(Gid(theirs.gid), sgid_index);
        address.mac = Some(MacAddr(theirs.mac));
        for (qp, qpn) in qps.iter().zip(theirs.qpns) {
            let receive = ReadyToReceive::new(address, Qpn::new(qpn), Psn::new(theirs.psn))
                .path_mtu(path_mtu)
                .max_dest_rd_atomic(READS);
            let send = ReadyToSend::new(Psn::new(offer.psn)).max_rd_atomic(READS);
            context.modify_qp(*qp, Transition::Init { access })?;
            context.modify_qp(*qp, Transition::ReadyToReceive(receive))?;
            context.modify_qp(*qp, Transition::ReadyToSend(send))?;
        }
        let remote = RemoteAddress { addr: theirs.addr, rkey: RKey::new(theirs.rkey) };
        let lanes = qps.into_iter().map(|qp| Lane { qp, posted: 0, done: 0, slot: 0 }).collect();
        Ok(Run { end, shape, cq, mr, lanes, remote, seed })
    }

    /// Checks the received data, and destroys everything.
    fn close(self, stage: &mut Stage<'_>) -> Outcome<()> {
        let Run { end, shape, cq, mr, lanes, seed, .. } = self;
        let is_sink = stage.starts() == (shape.op == Op::Read) && !shape.round_trip;
        // The posting end knows the number of messages.
        let posted: Vec<u64> = lanes.iter().map(|lane| lane.posted).collect();
        let theirs: Vec<u64> = stage.peer.exchange(&posted)?;
        for lane in &lanes {
            end.context.destroy_qp(lane.qp)?;
        }
        let memory = end.context.deregister(mr)?;
        end.context.destroy_cq(cq)?;
        if is_sink {
            let counts = if stage.starts() { posted } else { theirs };
            for (lane, count) in counts.iter().enumerate() {
                let from = lane as u64 * shape.slots * u64::from(shape.size);
                let length = shape.slots.min(*count) * u64::from(shape.size);
                verify(memory.bytes()?, seed, from as usize..(from + length) as usize)?;
            }
        }
        Ok(())
    }

    fn offset(&self, lane: usize) -> u64 {
        (lane as u64 * self.shape.slots + self.lanes[lane].slot) * u64::from(self.shape.size)
    }

    /// Posts the next message of a lane.
    fn post(&mut self, lane: usize, signaled: bool) -> Result<(), Error> {
        let Shape { op, size, slots, .. } = self.shape;
        let offset = self.offset(lane);
        let remote = RemoteAddress { addr: self.remote.addr + offset, ..self.remote };
        let op = match op {
            Op::Write => SendOp::Write(remote),
            Op::Read => SendOp::Read(remote),
            Op::Send => SendOp::Send,
        };
        let Lane { qp, posted, slot, .. } = &mut self.lanes[lane];
        *posted += 1;
        *slot = if *slot + 1 == slots { 0 } else { *slot + 1 };
        let wr = SendWorkRequest {
            wr_id: (lane as u64) << 40 | *posted,
            op,
            data: Data::Sges(&[Sge { mr: self.mr, offset, length: size }]),
            flags: SendFlags::default().signaled(signaled),
        };
        self.end.context.post_send(*qp, &wr)
    }

    /// Posts a receive WR for the next slot of a lane.
    fn post_receive(&mut self, lane: usize) -> Result<(), Error> {
        let Shape { size, slots, .. } = self.shape;
        let offset = self.offset(lane);
        let Lane { qp, slot, .. } = &mut self.lanes[lane];
        *slot = if *slot + 1 == slots { 0 } else { *slot + 1 };
        let sges = [Sge { mr: self.mr, offset, length: size }];
        self.end.context.post_recv(*qp, &ReceiveWorkRequest { wr_id: lane as u64, sges: &sges })
    }

    fn completion(&mut self) -> Outcome<Option<u64>> {
        match self.end.context.poll_cq(self.cq)? {
            Some(wc) if wc.status == WcStatus::Success => Ok(Some(wc.wr_id)),
            Some(wc) => Err(format!("a work request ended as {:?}", wc.status).into()),
            None => Ok(None),
        }
    }

    fn poll(&mut self) -> Result<usize, Error> {
        self.end.poller.poll(&mut self.end.context)
    }

    /// The posting end: posts round robin, for the time of the case.
    fn request(&mut self, stage: &mut Stage<'_>) -> Outcome<Seen> {
        stage.peer.meet()?;
        let depth = u64::from(self.shape.depth);
        // One completion for many messages, as in optimized applications.
        let signal = (depth / 2).clamp(1, 32);
        let enough = 4 * depth * self.lanes.len() as u64;
        let (mut posted, mut done, mut lane) = (0u64, 0u64, 0);
        let (start, time) = (Instant::now(), stage.warm_up() + stage.time());
        let (mut meter, mut watch, mut late) = (Meter::new(stage.warm_up()), Watch::new(), false);
        while !late || done < posted {
            let mut full = 0;
            for _ in 0..BURST {
                let Lane { posted: sent, done, .. } = self.lanes[lane];
                // After the time is over, only the rest up to a signaled message.
                if sent - done < depth && (!late || sent % signal != 0) {
                    self.post(lane, (sent + 1) % signal == 0)?;
                    posted += 1;
                } else {
                    full += 1;
                }
                lane = if lane + 1 == self.lanes.len() { 0 } else { lane + 1 };
                if full == self.lanes.len() {
                    break;
                }
            }
            self.poll()?;
            let before = done;
            while let Some(wr_id) = self.completion()? {
                let (lane, number) = ((wr_id >> 40) as usize, wr_id & ((1 << 40) - 1));
                done += number - self.lanes[lane].done;
                self.lanes[lane].done = number;
            }
            if done > before {
                if !late {
                    meter.count(done);
                }
                // Not before all outstanding messages have completed a few times.
                let elapsed = start.elapsed();
                late = elapsed > time && (meter.counted() >= enough || elapsed > 8 * time);
            } else if watch.due() {
                watch.check()?;
            }
        }
        stage.peer.tell(&())?;
        let (messages, nanos) = meter.result();
        Ok(Seen { messages, nanos, handled: done, ..Seen::default() })
    }

    /// The other end, which is written to, read from, or receives.
    fn respond(&mut self, stage: &mut Stage<'_>) -> Outcome<Seen> {
        let receives = self.shape.op == Op::Send;
        if receives {
            for _ in 0..self.shape.depth {
                (0..self.lanes.len()).try_for_each(|lane| self.post_receive(lane))?;
            }
        }
        stage.peer.meet()?;
        let (mut watch, mut handled) = (Watch::new(), 0);
        loop {
            self.poll()?;
            if receives {
                while let Some(lane) = self.completion()? {
                    self.post_receive(lane as usize)?;
                    handled += 1;
                }
            }
            if watch.due() {
                if stage.peer.heard::<()>()?.is_some() {
                    return Ok(Seen { handled, ..Seen::default() });
                }
                watch.check()?;
            }
        }
    }

    /// Writes a number and waits for its return, visible in memory: ib_write_lat reports half of that time as latency.
    fn ping(&mut self, stage: &mut Stage<'_>) -> Outcome<Seen> {
        stage.peer.meet()?;
        let mut times = Histogram::<u64>::new(3)?;
        let (start, warm_up) = (Instant::now(), stage.warm_up());
        let (mut count, mut elapsed, mut watch) = (0u64, Duration::ZERO, Watch::new());
        while elapsed < warm_up + stage.time() || times.len() < RoundTrip::LEAST {
            count += 1;
            let sent = Instant::now();
            self.exchange(count)?;
            while !self.has_come(count)? {
                self.poll()?;
                if watch.due() {
                    watch.check()?;
                }
            }
            let took = sent.elapsed();
            elapsed = start.elapsed();
            if elapsed > warm_up {
                times.record(took.as_nanos() as u64)?;
            }
            self.reap()?;
        }
        stage.peer.tell(&())?;
        Ok(Seen { handled: count, round_trip: Some(RoundTrip::of(&times)), ..Seen::default() })
    }

    fn pong(&mut self, stage: &mut Stage<'_>) -> Outcome<Seen> {
        stage.peer.meet()?;
        let (mut count, mut watch) = (0u64, Watch::new());
        loop {
            self.poll()?;
            if self.has_come(count + 1)? {
                count += 1;
                self.exchange(count)?;
                self.poll()?;
                self.reap()?;
            } else if watch.due() {
                if stage.peer.heard::<()>()?.is_some() {
                    return Ok(Seen { handled: count, ..Seen::default() });
                }
                watch.check()?;
            }
        }
    }

    /// Lets the other end be idle for a time, and before each WRITE.
    fn wake(&mut self, stage: &mut Stage<'_>) -> Outcome<Seen> {
        stage.peer.meet()?;
        std::thread::sleep(stage.time());
        let mut times = Histogram::<u64>::new(3)?;
        for number in 0..WAKES {
            std::thread::sleep(BETWEEN_WAKES);
            let sent = Instant::now();
            // A multiple of 32 is signaled.
            self.exchange(32 * number)?;
            let watch = Watch::new();
            while self.completion()?.is_none() {
                self.poll()?;
                watch.check()?;
            }
            times.record(sent.elapsed().as_nanos() as u64)?;
        }
        stage.peer.tell(&())?;
        Ok(Seen { handled: WAKES, round_trip: Some(RoundTrip::of(&times)), ..Seen::default() })
    }

    /// Writes `number` into the last bytes of the message for the other end, and posts it.
    fn exchange(&mut self, number: u64) -> Outcome<()> {
        let size = self.shape.size as usize;
        let stamp = number.to_ne_bytes();
        self.end.context.bytes_mut(self.mr)?[size - stamp.len()..size].copy_from_slice(&stamp);
        let remote = RemoteAddress { addr: self.remote.addr + size as u64, ..self.remote };
        let data = [Sge { mr: self.mr, offset: 0, length: self.shape.size }];
        let flags = SendFlags::default().signaled(number.is_multiple_of(32));
        let wr = SendWorkRequest { wr_id: 0, op: SendOp::Write(remote), data: Data::Sges(&data), flags };
        Ok(self.end.context.post_send(self.lanes[0].qp, &wr)?)
    }

    /// Whether the other end's message with this number is in memory.
    fn has_come(&self, number: u64) -> Result<bool, Error> {
        let bytes = self.end.context.bytes(self.mr)?;
        let stamp = &bytes[2 * self.shape.size as usize - 8..];
        // A fixed size, so that this is one comparison.
        Ok(stamp.first_chunk::<8>().is_some_and(|stamp| u64::from_ne_bytes(*stamp) == number))
    }

    /// Polls completions, so that the queues do not fill up.
    fn reap(&mut self) -> Outcome<()> {
        while self.completion()?.is_some() {}
        Ok(())
    }
}

/// CPU time of all threads of this process.
fn process_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}
