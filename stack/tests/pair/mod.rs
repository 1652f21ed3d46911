//! Two connected contexts on a simulated link, driven in virtual time.

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork};
use ferroce::*;

/// One end: a context with one PD, one CQ, one QP and one region of memory.
pub struct End {
    pub context: Context,
    pub pd: Pd,
    pub cq: Cq,
    pub qp: Qp,
    pub mr: Mr,
}

/// How the two are connected.
#[derive(Clone, Copy)]
pub struct Setup {
    pub path_mtu: PathMtu,
    pub memory: usize,
    pub start_psn: [Psn; 2],
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub max_rd_atomic: u8,
    pub traffic_class: u8,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            path_mtu: PathMtu::Mtu1024,
            memory: 1 << 20,
            // Both wrap early.
            start_psn: [Psn::new(0xff_ff00), Psn::new(0xff_fff0)],
            timeout: 8, // 1 ms
            retry_count: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
            traffic_class: 0,
        }
    }
}

/// Both ends and the network between them.
pub struct Pair {
    pub ends: [End; 2],
    pub network: SimNetwork,
    pub now: Nanos,
    /// The last step found nothing to come.
    idle: bool,
}

const ALL: [Access; 6] = [
    Access::LOCAL_WRITE,
    Access::REMOTE_WRITE,
    Access::REMOTE_READ,
    Access::REMOTE_ATOMIC,
    Access::FLUSH_GLOBAL,
    Access::MW_BIND,
];

impl Pair {
    pub fn new(seed: u64, link: LinkConfig, setup: Setup) -> Pair {
        let network = SimNetwork::with_config(seed, link, NetworkConfig { mtu: 4200, frames: 4096 }).unwrap();
        let access = ALL.into_iter().fold(Access::NONE, |a, b| a | b);
        let mut ends = [1u8, 2].map(|n| {
            let port = network.port(&[[10, 0, 0, n].into()]);
            let config = Config { seed: Some([n; 32]), ..Config::default() };
            let mut context = Context::open(Box::new(port), &config).unwrap();
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(4096).unwrap();
            let config = QpConfig { max_send_wr: 64, max_recv_wr: 256, ..QpConfig::rc(pd, cq) };
            let qp = context.create_qp(&config).unwrap();
            let mr = context.register(pd, Memory::zeroed(setup.memory).unwrap(), access).unwrap();
            End { context, pd, cq, qp, mr }
        });
        let qpns = [0, 1].map(|i| ends[i].context.query_qp(ends[i].qp).unwrap().qpn);
        let gids = [0, 1].map(|i: usize| ends[i].context.port().gids[0].gid);
        for (i, end) in ends.iter_mut().enumerate() {
            let peer = 1 - i;
            let receive = ReadyToReceive {
                address: AddressVector {
                    traffic_class: setup.traffic_class,
                    ..AddressVector::new(gids[peer], 0)
                },
                path_mtu: setup.path_mtu,
                dest_qpn: qpns[peer],
                rq_psn: setup.start_psn[peer],
                max_dest_rd_atomic: setup.max_rd_atomic,
                min_rnr_timer: RnrTimer::new(1).unwrap(),
            };
            let send = ReadyToSend {
                sq_psn: setup.start_psn[i],
                timeout: setup.timeout,
                retry_count: setup.retry_count,
                rnr_retry: setup.rnr_retry,
                max_rd_atomic: setup.max_rd_atomic,
            };
            end.context.modify_qp(end.qp, Transition::Init { access }).unwrap();
            end.context.modify_qp(end.qp, Transition::ReadyToReceive(receive)).unwrap();
            end.context.modify_qp(end.qp, Transition::ReadyToSend(send)).unwrap();
        }
        Pair { ends, network, now: Nanos(1_000_000), idle: false }
    }

    /// Polls both ends; when nothing moves, jumps to the next thing that will. `false` when there
    /// has been none for two steps: the first may have ended in completions.
    pub fn step(&mut self) -> bool {
        let now = self.now;
        let frames: usize = self.ends.iter_mut().map(|end| end.context.poll(now).unwrap()).sum();
        if frames > 0 {
            return true;
        }
        let timeouts = self.ends.iter().filter_map(|end| end.context.next_timeout());
        let next = timeouts.chain(self.network.next_arrival()).min();
        let was_idle = std::mem::replace(&mut self.idle, next.is_none());
        if let Some(next) = next {
            self.now = next.max(Nanos(now.0 + 1));
        }
        next.is_some() || !was_idle
    }
}
