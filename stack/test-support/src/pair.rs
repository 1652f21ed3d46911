//! Two connected contexts on a simulated link, driven in virtual time.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork, SimPort};
use ferroce::*;

use crate::peer::all_access;

/// One end: a context with one PD, one CQ, one region of memory, and queue pairs to the other end.
pub struct End {
    /// The context, on one port of the network.
    pub context: Context,
    /// The protection domain of everything here.
    pub pd: Pd,
    /// The completion queue of all work.
    pub cq: Cq,
    /// The first of `qps`.
    pub qp: Qp,
    /// Each is connected to the one at the same index of the other end.
    pub qps: Vec<Qp>,
    /// The memory, registered with every right.
    pub mr: Mr,
    /// The queue for receives, with [`Setup::srq`].
    pub srq: Option<Srq>,
    /// UD: the other end's first queue pair.
    pub destination: Option<Destination>,
}

/// How the two are connected.
#[derive(Clone, Copy)]
pub struct Setup {
    /// The service.
    pub qp_type: QpType,
    /// Queue pairs between the two.
    pub qps: usize,
    /// Receives come from an SRQ.
    pub srq: bool,
    /// IPv6 addresses, or IPv4 otherwise.
    pub ipv6: bool,
    /// RoCE v1, or RoCEv2 otherwise.
    pub roce_v1: bool,
    /// The VLAN of the address vectors.
    pub vlan: Option<u16>,
    /// Changes to the address vectors.
    pub way: fn(AddressVector) -> AddressVector,
    /// The path MTU of the connections.
    pub path_mtu: PathMtu,
    /// Bytes of memory at either end.
    pub memory: usize,
    /// The first PSN that each end sends.
    pub start_psn: [Psn; 2],
    /// ACK timeout, 4.096 µs · 2^timeout.
    pub timeout: u8,
    /// Retransmissions before a connection ends.
    pub retry_count: u8,
    /// The same after RNR NAKs; 7 is unlimited.
    pub rnr_retry: u8,
    /// Outstanding READs and atomics, in each direction.
    pub max_rd_atomic: u8,
    /// Whether both ends have negotiated selective repeat.
    pub selective_repeat: bool,
    /// The most frames of a port in flight.
    pub frames: usize,
    /// Changes to the configurations.
    pub config: fn(Config) -> Config,
    /// The wrapper of a port.
    pub port: fn(SimPort) -> Box<dyn PacketDriver>,
}

impl Default for Setup {
    fn default() -> Setup {
        Setup {
            qp_type: QpType::Rc,
            qps: 1,
            srq: false,
            ipv6: false,
            roce_v1: false,
            vlan: None,
            way: |way| way,
            path_mtu: PathMtu::Mtu1024,
            memory: 1 << 20,
            // Both wrap early.
            start_psn: [Psn::new(0xff_ff00), Psn::new(0xff_fff0)],
            timeout: 8, // 1 ms
            retry_count: 7,
            rnr_retry: 7,
            max_rd_atomic: 16,
            selective_repeat: false,
            frames: 4096,
            config: |config| config,
            port: |port| Box::new(port),
        }
    }
}

/// Both ends and the network between them.
pub struct Pair {
    /// The two ends, equal except for their addresses and first PSNs.
    pub ends: [End; 2],
    /// The network between them.
    pub network: SimNetwork,
    /// The virtual time.
    pub now: Nanos,
    /// The time of the current step, for filters of the network.
    pub clock: Arc<AtomicU64>,
    /// The last step found nothing to do.
    idle: bool,
}

/// The Q_Key of all UD queue pairs.
pub const QKEY: u32 = 0x1234_5678;

impl Pair {
    /// Two ends, connected and in RTS; the same seed gives the same run.
    pub fn new(seed: u64, link: LinkConfig, setup: Setup) -> Pair {
        let config = NetworkConfig::default().mtu(4200).frames(setup.frames);
        let network = SimNetwork::with_config(seed, link, config).unwrap();
        let mut ends = [1, 2].map(|n| End::new(&network, n, &setup));
        let qpns = [0, 1].map(|i| ends[i].qpns());
        let indices = [0, 1].map(|i| ends[i].sgid_index(&setup));
        let gids = [0, 1].map(|i| ends[i].context.port().gids[indices[i]].gid);
        for (i, end) in ends.iter_mut().enumerate() {
            let way = (setup.way)(AddressVector::new(gids[1 - i], indices[i]));
            end.connect(&setup, way, &qpns[1 - i], [setup.start_psn[1 - i], setup.start_psn[i]]);
        }
        Pair { ends, network, now: Nanos(1_000_000), clock: Arc::default(), idle: false }
    }

    /// Polls both ends; when nothing moves, jumps to the next event. `false` when there was none for two steps: the first
    /// may have ended in completions.
    pub fn step(&mut self) -> bool {
        let now = self.now;
        self.clock.store(now.0, Ordering::Relaxed);
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

impl End {
    fn new(network: &SimNetwork, n: u8, setup: &Setup) -> End {
        let address = match setup.ipv6 {
            true => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, n.into()).into(),
            false => IpAddr::from([10, 0, 0, n]),
        };
        let port = network.port(&[address]);
        let max_qps = Config::default().max_qps.max(2 * setup.qps as u32);
        let config = Config::default().seed([n; 32]).roce_v1(setup.roce_v1).max_qps(max_qps);
        let mut context = Context::open((setup.port)(port), &(setup.config)(config)).unwrap();
        if let Some(vlan) = setup.vlan {
            let entry = GidEntry::new(address.into()).roce_v1(setup.roce_v1).vlan(vlan);
            context.add_gid(entry).unwrap();
        }
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(4096).unwrap();
        let srq_config = SrqConfig::new(pd).max_wr(256).max_sge(1);
        let srq = setup.srq.then(|| context.create_srq(&srq_config).unwrap());
        let config = QpConfig::new(setup.qp_type, pd, cq).srq(srq).max_send_wr(64).max_recv_wr(256);
        let qps: Vec<Qp> = (0..setup.qps).map(|_| context.create_qp(&config).unwrap()).collect();
        let mr = context.register(pd, Memory::zeroed(setup.memory).unwrap(), all_access()).unwrap();
        End { context, pd, cq, qp: qps[0], qps, mr, srq, destination: None }
    }

    /// The numbers of its queue pairs.
    pub fn qpns(&self) -> Vec<Qpn> {
        self.qps.iter().map(|qp| self.context.query_qp(*qp).unwrap().qpn).collect()
    }

    /// The GID index of the source of packets.
    fn sgid_index(&self, setup: &Setup) -> usize {
        let gids = &self.context.port().gids;
        gids.iter().position(|gid| (gid.roce_v1, gid.vlan) == (setup.roce_v1, setup.vlan)).unwrap()
    }

    fn connect(&mut self, setup: &Setup, address: AddressVector, peers: &[Qpn], psns: [Psn; 2]) {
        let [rq_psn, sq_psn] = psns;
        for (qp, dest_qpn) in self.qps.iter().zip(peers) {
            let path = UnreliablePath::new(address, *dest_qpn, rq_psn).path_mtu(setup.path_mtu);
            let receive = ReadyToReceive::new(address, *dest_qpn, rq_psn)
                .path_mtu(setup.path_mtu)
                .max_dest_rd_atomic(setup.max_rd_atomic)
                .min_rnr_timer(RnrTimer::new(1).unwrap())
                .selective_repeat(setup.selective_repeat);
            let send = ReadyToSend::new(sq_psn)
                .timeout(setup.timeout)
                .retry_count(setup.retry_count)
                .rnr_retry(setup.rnr_retry)
                .max_rd_atomic(setup.max_rd_atomic);
            let transitions = match setup.qp_type {
                QpType::Rc => [
                    Transition::Init { access: all_access() },
                    Transition::ReadyToReceive(receive),
                    Transition::ReadyToSend(send),
                ],
                QpType::Uc => [
                    Transition::Init { access: all_access() },
                    Transition::ReadyToReceiveUnreliable(path),
                    Transition::ReadyToSendUnreliable { sq_psn },
                ],
                QpType::Ud => [
                    Transition::InitDatagram { qkey: QKEY },
                    Transition::ReadyToReceiveDatagrams,
                    Transition::ReadyToSendUnreliable { sq_psn },
                ],
            };
            for transition in transitions {
                self.context.modify_qp(*qp, transition).unwrap();
            }
        }
        if setup.qp_type == QpType::Ud {
            let ah = self.context.create_ah(self.pd, &address).unwrap();
            self.destination = Some(Destination { ah, qpn: peers[0], qkey: QKEY });
        }
    }

    /// Posts a receive of the first `length` bytes of memory after `offset`; to the SRQ if there is one.
    pub fn post_recv(&mut self, wr_id: u64, offset: u64, length: u32) {
        let sges = [Sge { mr: self.mr, offset, length }];
        let wr = ReceiveWorkRequest { wr_id, sges: &sges };
        match self.srq {
            Some(srq) => self.context.post_srq_recv(srq, &wr).unwrap(),
            None => self.context.post_recv(self.qp, &wr).unwrap(),
        }
    }

    /// Posts a signaled send of a piece of memory.
    pub fn post_send(&mut self, wr_id: u64, op: SendOp, offset: u64, length: u32) {
        let sges = [Sge { mr: self.mr, offset, length }];
        let wr = SendWorkRequest { wr_id, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        self.context.post_send(self.qp, &wr).unwrap();
    }

    /// SEND, or SEND to the other end's queue pair.
    pub fn send_op(&self) -> SendOp {
        self.destination.map_or(SendOp::Send, SendOp::SendTo)
    }
}
