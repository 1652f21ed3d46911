//! Simulated captures: two ends over a network that impairs frames.

use std::path::Path;
use std::time::Duration;

use ferroce::driver::pcap::Recorder;
use ferroce::driver::sim::{LinkConfig, SimNetwork};
use ferroce::*;
use ferroce_driver_test_support::random::Random;

/// The first PSNs of both ends by the number of the queue pair.
pub(crate) type Psns = fn(u32) -> [u32; 2];

/// The connection of two ends.
#[derive(Clone)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) link: LinkConfig,
    pub(crate) qps: u32,
    pub(crate) psns: Psns,
    /// The ACK timeout, 4.096 µs · 2^N.
    pub(crate) timeout: u8,
    pub(crate) path_mtu: PathMtu,
    /// The configuration of each end.
    pub(crate) configs: [Config; 2],
    pub(crate) traffic_class: u8,
    /// The end whose port is recorded.
    pub(crate) recorded: usize,
}

impl Default for Setup {
    fn default() -> Setup {
        let link = LinkConfig::default().delay(Duration::from_micros(5));
        Setup {
            seed: 1,
            link,
            qps: 1,
            psns: |_| [0xff_fff0, 0x100],
            timeout: 10,
            path_mtu: PathMtu::Mtu1024,
            configs: [Config::default(), Config::default()],
            traffic_class: 0,
            recorded: 0,
        }
    }
}

/// Both ends; the frames at one end's port are recorded.
pub(crate) struct World {
    ends: [End; 2],
    network: SimNetwork,
    now: Nanos,
    path_mtu: PathMtu,
    traffic_class: u8,
    /// The states of the first end's queue pairs when the last frame passed its port.
    pub(crate) reactions: Vec<Option<ReactionState>>,
}

struct End {
    context: Context,
    cq: Cq,
    mr: Mr,
    qps: Vec<Qp>,
    /// Outstanding work requests of each.
    outstanding: Vec<usize>,
    gid: Gid,
}

/// The work requests that can be posted.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Work {
    Write,
    Send,
    Read,
    FetchAdd,
    CompareSwap,
}

impl Work {
    pub(crate) const ALL: [Work; 5] =
        [Work::Write, Work::Send, Work::Read, Work::FetchAdd, Work::CompareSwap];
}

/// Bytes of memory for each queue pair: for received data, sent data, and requested data.
const ROOM: u64 = 3 * PART;
const PART: u64 = 8192;
/// A work request that is not counted as outstanding.
const UNCOUNTED: u64 = u64::MAX;
const EVERYTHING: [Access; 4] =
    [Access::LOCAL_WRITE, Access::REMOTE_WRITE, Access::REMOTE_READ, Access::REMOTE_ATOMIC];

impl World {
    pub(crate) fn new(setup: &Setup, file: &Path) -> World {
        let network = SimNetwork::new(setup.seed, setup.link.clone()).expect("a network");
        let port = |last: u8| network.port(&[[10, 9, 0, last].into()]);
        let ends = [0, 1].map(|end| {
            let port = port(end as u8 + 1);
            let port: Box<dyn PacketDriver> = match setup.recorded == end {
                true => Box::new(Recorder::create(port, file).expect("a capture")),
                false => Box::new(port),
            };
            End::new(port, end, setup)
        });
        let (path_mtu, traffic_class) = (setup.path_mtu, setup.traffic_class);
        let mut world =
            World { ends, network, now: Nanos(1_000_000), path_mtu, traffic_class, reactions: Vec::new() };
        for qp in 0..setup.qps as usize {
            world.connect(qp, (setup.psns)(qp as u32), setup.timeout);
        }
        world
    }

    /// Takes both queue pairs with this number from RESET to RTS.
    pub(crate) fn connect(&mut self, qp: usize, psns: [u32; 2], timeout: u8) {
        let peers = [0, 1].map(|end| (self.ends[end].gid, self.ends[end].qpn(qp)));
        for (index, end) in self.ends.iter_mut().enumerate() {
            let (gid, qpn) = peers[1 - index];
            let address = AddressVector::new(gid, 0).traffic_class(self.traffic_class);
            let receive = ReadyToReceive::new(address, qpn, Psn::new(psns[1 - index]))
                .path_mtu(self.path_mtu)
                .min_rnr_timer(RnrTimer::new(10).expect("a timer"));
            let send = ReadyToSend::new(Psn::new(psns[index])).timeout(timeout);
            for step in [
                Transition::Init { access: all_access() },
                Transition::ReadyToReceive(receive),
                Transition::ReadyToSend(send),
            ] {
                end.context.modify_qp(end.qps[qp], step).expect("a connected queue pair");
            }
        }
    }

    /// The numbers of connected queue pairs, as a report shows them.
    pub(crate) fn pairs(&self) -> Vec<[String; 2]> {
        let name = |end: usize, qp: usize| self.ends[end].qpn(qp).to_string();
        (0..self.ends[0].qps.len()).map(|qp| [name(0, qp), name(1, qp)]).collect()
    }

    /// Takes both queue pairs with this number back to RESET.
    pub(crate) fn reset(&mut self, qp: usize) {
        for end in &mut self.ends {
            end.context.modify_qp(end.qps[qp], Transition::Reset).expect("RESET");
        }
    }

    /// Posts a work request at an end; `false` if there is no room for it.
    pub(crate) fn post(&mut self, end: usize, qp: usize, work: Work, length: u32) -> bool {
        let there = &self.ends[1 - end];
        let RemoteMemory { addr, rkey, .. } = there.context.remote(there.mr).expect("memory");
        let here = &mut self.ends[end];
        let offset = qp as u64 * ROOM;
        let remote = RemoteAddress { addr: addr + offset, rkey };
        let (op, length) = match work {
            Work::Write => (SendOp::Write(remote), length),
            Work::Send => (SendOp::Send, length),
            Work::Read => (SendOp::Read(remote), length),
            Work::FetchAdd => (SendOp::FetchAdd { remote, add: 3 }, 8),
            Work::CompareSwap => (SendOp::CompareSwap { remote, compare: 0, swap: 7 }, 8),
        };
        let part = if matches!(work, Work::Write | Work::Send) { PART } else { 2 * PART };
        let sges = [Sge { mr: here.mr, offset: offset + part, length }];
        let (data, flags) = (Data::Sges(&sges), SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: qp as u64, op, data, flags };
        match here.context.post_send(here.qps[qp], &wr) {
            Ok(()) => {
                here.outstanding[qp] += 1;
                true
            }
            Err(Error::QueueFull { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    }

    /// Posts a READ with an invalid key.
    pub(crate) fn post_refused_read(&mut self, qp: usize, length: u32) {
        let end = &mut self.ends[0];
        let remote = RemoteAddress { addr: 0x1000, rkey: RKey::new(0xbad) };
        let sges = [Sge { mr: end.mr, offset: 0, length }];
        let op = SendOp::Read(remote);
        let wr =
            SendWorkRequest { wr_id: UNCOUNTED, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        end.context.post_send(end.qps[qp], &wr).expect("a READ");
    }

    /// Outstanding work requests of the first end's queue pair.
    pub(crate) fn outstanding(&self, qp: usize) -> usize {
        self.ends[0].outstanding[qp]
    }

    /// Counters of the first end.
    pub(crate) fn counters<const N: usize>(&self, counters: [Counter; N]) -> [u64; N] {
        counters.map(|counter| self.ends[0].context.counters().value(counter))
    }

    /// Posts a receive WR at an end.
    pub(crate) fn post_receive(&mut self, end: usize, qp: usize) {
        let end = &mut self.ends[end];
        let sges = [Sge { mr: end.mr, offset: qp as u64 * ROOM, length: PART as u32 }];
        match end.context.post_recv(end.qps[qp], &ReceiveWorkRequest { wr_id: UNCOUNTED, sges: &sges }) {
            Ok(()) | Err(Error::QueueFull { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }

    /// Random work requests of both ends on all queue pairs, with receive WRs, some of them late.
    pub(crate) fn traffic(&mut self, random: &mut Random, rounds: usize, kinds: &[Work]) {
        for _ in 0..rounds {
            for qp in 0..self.ends[0].qps.len() {
                let end = usize::from(random.below(4) == 0);
                let work = kinds[random.below(kinds.len() as u64) as usize];
                let length = [0, 1, 700, 1024, 1025, 3000, 5000][random.below(7) as usize];
                let posted = self.post(end, qp, work, length);
                if posted && matches!(work, Work::Send) {
                    if random.below(4) == 0 {
                        self.run(random.below(60) as usize);
                    }
                    self.post_receive(1 - end, qp);
                }
            }
            self.run(random.below(40) as usize);
        }
        self.run(usize::MAX);
    }

    /// Polls both ends `steps` times, or until nothing more arrives.
    pub(crate) fn run(&mut self, steps: usize) {
        let mut silent = 0;
        for _ in 0..steps {
            let (mut moved, now) = (0, self.now);
            for (index, end) in self.ends.iter_mut().enumerate() {
                let passed = end.context.poll(now).expect("a poll");
                if index == 0 && passed > 0 {
                    let reaction = |qp: &Qp| end.context.query_qp(*qp).expect("a queue pair").reaction;
                    self.reactions = end.qps.iter().map(reaction).collect();
                }
                moved += passed;
                while let Some(completion) = end.context.poll_cq(end.cq).expect("a completion queue") {
                    let outstanding = end.outstanding.get_mut(completion.wr_id as usize);
                    outstanding.into_iter().for_each(|number| *number = number.saturating_sub(1));
                }
                while end.context.next_event().is_some() {}
            }
            if moved > 0 {
                silent = 0;
                continue;
            }
            let timers = self.ends.iter().filter_map(|end| end.context.next_timeout());
            match timers.chain(self.network.next_arrival()).min() {
                Some(next) => self.now = next.max(Nanos(now.0 + 1)),
                None if silent == 2 => return,
                None => silent += 1,
            }
        }
    }
}

impl End {
    fn new(port: Box<dyn PacketDriver>, end: usize, setup: &Setup) -> End {
        let config = setup.configs[end].clone().seed([end as u8 + 1; 32]);
        let mut context = Context::open(port, &config).expect("a context");
        let pd = context.alloc_pd().expect("a PD");
        let cq = context.create_cq(4096).expect("a CQ");
        let memory = Memory::zeroed((ROOM * u64::from(setup.qps)) as usize).expect("memory");
        let mr = context.register(pd, memory, all_access()).expect("a region");
        let numbers = 0..ROOM as u32 * setup.qps / 4;
        let pattern = numbers.flat_map(|n| n.wrapping_mul(0x9e37_79b1).to_le_bytes()).collect::<Vec<u8>>();
        context.bytes_mut(mr).expect("owned memory").copy_from_slice(&pattern);
        let qps = (0..setup.qps).map(|_| context.create_qp(&QpConfig::rc(pd, cq)).expect("a queue pair"));
        let qps = qps.collect();
        let gid = context.port().gids[0].gid;
        End { context, cq, mr, qps, outstanding: vec![0; setup.qps as usize], gid }
    }

    fn qpn(&self, qp: usize) -> Qpn {
        self.context.query_qp(self.qps[qp]).expect("a queue pair").qpn
    }
}

fn all_access() -> Access {
    EVERYTHING.into_iter().fold(Access::NONE, |all, one| all | one)
}
