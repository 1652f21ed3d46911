//! Two flows of WRITEs from a port on one side of the guest to a port on the other.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use ferroce::{
    Access, AddressVector, Config, Context, Counter, Cq, Data, DeviceSpec, Endpoint, Memory, Mr,
    PacketDriver, PathMtu, Pd, Poller, Qp, QpConfig, QpType, ReadyToReceive, ReadyToSend, RemoteAddress,
    SendFlags, SendOp, SendWorkRequest, Sge, Transition, WcStatus,
};

use crate::guest::{FAR, Guest, OURS};

pub(crate) const FLOWS: usize = 2;
pub(crate) const PATH_MTU: PathMtu = PathMtu::Mtu4096;
pub(crate) const MESSAGE: u32 = 1 << 16;
/// Outstanding messages of a queue pair, each from its own place to the same place at the receiver.
pub(crate) const OUTSTANDING: u32 = 16;
/// 0.5 s: the slowest answer of an emulated guest on a busy machine, behind a full queue, does not cause a timeout.
pub(crate) const ACK_TIMEOUT: u8 = 17;
/// WRITEs of one packet that measure the round-trip time.
const PROBES: usize = 51;
const PROBE: u32 = 64;
/// The wait for the remaining acknowledgements after the measured time.
const PATIENCE: Duration = Duration::from_secs(20);
/// The wait for the last CNP, which may arrive after the last acknowledgement.
const LINGER: Duration = Duration::from_millis(100);

/// The results of the flows.
pub(crate) struct Flows {
    /// The median, before the flows begin.
    pub(crate) round_trip: Duration,
    /// Mb/s of acknowledged payload.
    pub(crate) goodputs: [f64; FLOWS],
    /// Frames in flight in that time, mean and maximum. Without loss that is about the queue of the bottleneck; lost
    /// frames remain in it.
    pub(crate) under_way: [f64; 2],
    /// Mb/s that congestion control allowed at the end of the measured time.
    pub(crate) allowed: [Option<f64>; FLOWS],
    /// At the receiver.
    pub(crate) marked: u64,
    pub(crate) cnps_sent: u64,
    /// At the sender.
    pub(crate) cnps_handled: u64,
    pub(crate) cnps_ignored: u64,
    pub(crate) retransmitted: u64,
    pub(crate) timeouts: u64,
}

impl Flows {
    /// Runs the flows, and measures for `time` after `start_up`. All data must arrive as sent.
    pub(crate) fn run(guest: &Guest, config: &Config, start_up: Duration, time: Duration) -> Flows {
        let mut sender = End::open(guest.inside(|| open("af_xdp:fe0")), OURS[0], config);
        let mut receiver = End::open(guest.inside_far(|| open("af_xdp:far0")), FAR, config);
        for flow in 0..FLOWS {
            let (here, there) = (sender.endpoint(flow), receiver.endpoint(flow));
            sender.connect(flow, &here, &there);
            receiver.connect(flow, &there, &here);
        }
        sender.fill();
        let remote = receiver.context.remote(receiver.mr).expect("a region");
        let remote = RemoteAddress { addr: remote.addr, rkey: remote.rkey };
        let (over, received) = (AtomicBool::new(false), AtomicU64::new(0));
        let mut sending = Sending {
            end: &mut sender,
            poller: Poller::new(),
            remote,
            flows: [Flow::default(); FLOWS],
            received: &received,
            under_way: UnderWay::default(),
        };
        let measured = thread::scope(|scope| {
            scope.spawn(|| {
                let mut poller = Poller::new();
                while !over.load(Ordering::Relaxed) {
                    poller.poll(&mut receiver.context).expect("the port is there");
                    received.store(receiver.count(Counter::RcvdPkts), Ordering::Relaxed);
                }
            });
            // The receiver's thread must end in any case.
            let outcome = catch_unwind(AssertUnwindSafe(|| sending.run(start_up, time)));
            over.store(true, Ordering::Relaxed);
            outcome.unwrap_or_else(|panic| resume_unwind(panic))
        });
        assert!(sender.bytes() == receiver.bytes(), "the receiver has something else than was sent");
        let megabits =
            |messages: u32| f64::from(messages) * f64::from(8 * MESSAGE) / 1e6 / time.as_secs_f64();
        Flows {
            round_trip: measured.round_trip,
            goodputs: measured.acknowledged.map(megabits),
            under_way: measured.under_way,
            allowed: measured.allowed,
            marked: receiver.count(Counter::NpEcnMarkedRocePackets),
            cnps_sent: receiver.count(Counter::NpCnpSent),
            cnps_handled: sender.count(Counter::RpCnpHandled),
            cnps_ignored: sender.count(Counter::RpCnpIgnored),
            retransmitted: sender.count(Counter::RetransmittedPkts),
            timeouts: sender.count(Counter::LocalAckTimeoutErr),
        }
    }
}

fn open(device: &str) -> Box<dyn PacketDriver> {
    let spec: DeviceSpec = device.parse().expect("a device");
    let opened = spec.open().unwrap_or_else(|error| panic!("{device}: {error}"));
    opened.into_driver().expect("a packet driver")
}

/// The flows at the sender.
struct Sending<'a> {
    end: &'a mut End,
    poller: Poller,
    remote: RemoteAddress,
    flows: [Flow; FLOWS],
    /// Packets that the receiver has counted.
    received: &'a AtomicU64,
    under_way: UnderWay,
}

/// The sender's measurements: round-trip time, acknowledged messages of each flow in the measured time, frames in
/// flight, and the allowed rates at its end.
struct Measured {
    round_trip: Duration,
    acknowledged: [u32; FLOWS],
    under_way: [f64; 2],
    allowed: [Option<f64>; FLOWS],
}

/// Packets in flight, over time.
#[derive(Clone, Copy, Default)]
struct UnderWay {
    now: f64,
    most: f64,
    /// Multiplied by seconds.
    sum: f64,
    seen: Option<Instant>,
}

impl UnderWay {
    fn see(&mut self, packets: u64) {
        let now = Instant::now();
        self.sum += self.seen.map_or(0.0, |seen| (now - seen).as_secs_f64() * self.now);
        (self.now, self.most, self.seen) = (packets as f64, self.most.max(packets as f64), Some(now));
    }
}

/// Messages of one flow.
#[derive(Clone, Copy, Default)]
struct Flow {
    posted: u32,
    acknowledged: u32,
}

impl Sending<'_> {
    fn run(&mut self, start_up: Duration, time: Duration) -> Measured {
        let round_trip = self.round_trip();
        self.keep_sending(start_up);
        let before = self.flows;
        self.under_way = UnderWay::default();
        self.keep_sending(time);
        let UnderWay { most, sum, .. } = self.under_way;
        let measured = Measured {
            round_trip,
            acknowledged: std::array::from_fn(|flow| {
                self.flows[flow].acknowledged - before[flow].acknowledged
            }),
            under_way: [sum / time.as_secs_f64(), most],
            allowed: self.end.qps.map(|qp| self.end.allowed(qp)),
        };
        let start = Instant::now();
        while self.flows.iter().any(|flow| flow.acknowledged < flow.posted) {
            let left = self.flows.map(|flow| flow.posted - flow.acknowledged);
            assert!(start.elapsed() < PATIENCE, "{left:?} messages are not acknowledged within {PATIENCE:?}");
            self.turn();
        }
        let start = Instant::now();
        while start.elapsed() < LINGER {
            self.turn();
        }
        measured
    }

    fn round_trip(&mut self) -> Duration {
        let mut times: Vec<Duration> = (0..PROBES)
            .map(|_| {
                let (start, before) = (Instant::now(), self.flows[0].acknowledged);
                self.post(0, PROBE);
                while self.flows[0].acknowledged == before {
                    assert!(start.elapsed() < PATIENCE, "no answer through the guest within {PATIENCE:?}");
                    self.turn();
                }
                start.elapsed()
            })
            .collect();
        times.sort();
        times[PROBES / 2]
    }

    fn keep_sending(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            for flow in 0..FLOWS {
                while self.flows[flow].posted - self.flows[flow].acknowledged < OUTSTANDING {
                    self.post(flow, MESSAGE);
                }
            }
            self.turn();
        }
    }

    fn post(&mut self, flow: usize, length: u32) {
        let place = flow as u32 * OUTSTANDING + self.flows[flow].posted % OUTSTANDING;
        let offset = u64::from(place) * u64::from(MESSAGE);
        let remote = RemoteAddress { addr: self.remote.addr + offset, ..self.remote };
        let data = [Sge { mr: self.end.mr, offset, length }];
        let (data, flags) = (Data::Sges(&data), SendFlags::SIGNALED);
        let wr = SendWorkRequest { wr_id: flow as u64, op: SendOp::Write(remote), data, flags };
        self.end.context.post_send(self.end.qps[flow], &wr).expect("the send queue has room");
        self.flows[flow].posted += 1;
    }

    fn turn(&mut self) {
        self.poller.poll(&mut self.end.context).expect("the port is there");
        let sent = self.end.count(Counter::SentPkts);
        self.under_way.see(sent.saturating_sub(self.received.load(Ordering::Relaxed)));
        while let Some(wc) = self.end.context.poll_cq(self.end.cq).expect("a CQ") {
            assert_eq!(wc.status, WcStatus::Success, "flow {}", wc.wr_id);
            self.flows[wc.wr_id as usize].acknowledged += 1;
        }
    }
}

/// A context on a port, with a queue pair for each flow and memory for the outstanding messages.
struct End {
    context: Context,
    cq: Cq,
    qps: [Qp; FLOWS],
    mr: Mr,
    sgid_index: usize,
}

impl End {
    fn open(driver: Box<dyn PacketDriver>, address: &str, config: &Config) -> End {
        let mut context = Context::open(driver, config).expect("a context");
        let gid = address.parse::<std::net::IpAddr>().expect("an address").into();
        let sgid_index = context.port().gid_index(gid).expect("the port has its address");
        let pd: Pd = context.alloc_pd().expect("a PD");
        let cq = context.create_cq(2 * FLOWS as u32 * OUTSTANDING).expect("a CQ");
        let qps = [(); FLOWS]
            .map(|()| context.create_qp(&QpConfig::new(QpType::Rc, pd, cq)).expect("a queue pair"));
        let memory = Memory::zeroed(FLOWS * (OUTSTANDING * MESSAGE) as usize).expect("memory");
        let mr = context.register(pd, memory, Access::LOCAL_WRITE | Access::REMOTE_WRITE).expect("a region");
        End { context, cq, qps, mr, sgid_index }
    }

    fn endpoint(&mut self, flow: usize) -> Endpoint {
        self.context.endpoint(self.qps[flow], self.sgid_index).expect("an endpoint")
    }

    fn connect(&mut self, flow: usize, here: &Endpoint, there: &Endpoint) {
        let address = AddressVector::new(there.gid, self.sgid_index);
        let receive = ReadyToReceive::new(address, there.qpn, there.psn).path_mtu(PATH_MTU);
        let send = ReadyToSend::new(here.psn).timeout(ACK_TIMEOUT);
        let moves = [
            Transition::Init { access: Access::REMOTE_WRITE },
            Transition::ReadyToReceive(receive),
            Transition::ReadyToSend(send),
        ];
        for transition in moves {
            self.context.modify_qp(self.qps[flow], transition).expect("a lawful move");
        }
    }

    /// Gives each place different contents.
    fn fill(&mut self) {
        for (at, byte) in self.context.bytes_mut(self.mr).expect("a region").iter_mut().enumerate() {
            *byte = (at % 251) as u8 ^ (at / MESSAGE as usize) as u8;
        }
    }

    fn bytes(&self) -> &[u8] {
        self.context.bytes(self.mr).expect("a region")
    }

    fn allowed(&self, qp: Qp) -> Option<f64> {
        let attributes = self.context.query_qp(qp).expect("a queue pair");
        attributes.reaction.map(|reaction| reaction.rate as f64 / 1e6)
    }

    fn count(&self, counter: Counter) -> u64 {
        self.context.counters().value(counter)
    }
}
