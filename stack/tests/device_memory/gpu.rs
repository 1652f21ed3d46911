//! Two handles of a GPU, over each driver that needs no RNIC.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use ferroce::driver::loopback;
use ferroce::driver::udp::{Udp, UdpConfig};
use ferroce::*;
use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::random::Random;

const BYTES: usize = 1 << 20;

/// Below, at and above a packet and a chunk.
const SIZES: [usize; 8] = [1, 8, 1024, 1025, 65_535, 65_536, 70_001, 600_000];

/// A context with a device, whose memory it has registered.
struct End {
    context: Context,
    pd: Pd,
    cq: Cq,
    mr: Mr,
    remote: RemoteMemory,
}

impl End {
    fn new(port: Box<dyn PacketDriver>) -> Option<End> {
        // Each end has its own device handle, as on two hosts.
        let memory = gpu::first()?.allocate(BYTES).unwrap();
        let mut context = Context::open(port, &Config::default()).unwrap();
        let (pd, cq) = (context.alloc_pd().unwrap(), context.create_cq(256).unwrap());
        let mr = context.register(pd, memory, super::world::rights()).unwrap();
        let remote = context.remote(mr).unwrap();
        Some(End { context, pd, cq, mr, remote })
    }

    /// The index of its IPv4 address in the GID table.
    fn row(&self) -> usize {
        self.context.port().gids.iter().position(|entry| !entry.gid.is_ipv6()).unwrap()
    }

    fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.context.read(self.mr, offset, &mut bytes).unwrap();
        bytes
    }
}

struct Ends {
    ends: [End; 2],
    clock: Clock,
}

impl Ends {
    fn new(ports: [Box<dyn PacketDriver>; 2]) -> Option<Ends> {
        let [near, far] = ports;
        Some(Ends { ends: [End::new(near)?, End::new(far)?], clock: Clock::start() })
    }

    fn post(&mut self, qp: Qp, op: SendOp, (offset, len): (u64, usize)) {
        let near = &mut self.ends[0];
        let sges = [Sge { mr: near.mr, offset, length: len as u32 }];
        let wr = SendWorkRequest { wr_id: 1, op, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
        near.context.post_send(qp, &wr).unwrap();
    }

    fn post_recv(&mut self, qp: Qp, (offset, len): (u64, usize)) {
        let far = &mut self.ends[1];
        let sges = [Sge { mr: far.mr, offset, length: len as u32 }];
        far.context.post_recv(qp, &ReceiveWorkRequest { wr_id: 2, sges: &sges }).unwrap();
    }

    /// The next completion of an end, which is a success.
    fn success(&mut self, end: usize) -> WorkCompletion {
        let limit = Instant::now() + Duration::from_secs(20);
        loop {
            for end in &mut self.ends {
                end.context.poll(self.clock.now()).unwrap();
            }
            let cq = self.ends[end].cq;
            if let Some(completion) = self.ends[end].context.poll_cq(cq).unwrap() {
                assert_eq!(completion.status, WcStatus::Success, "{completion:?}");
                return completion;
            }
            assert!(Instant::now() < limit, "no completion at end {end}");
        }
    }

    fn connect(&mut self, make: fn(Pd, Cq) -> QpConfig) -> [Qp; 2] {
        let made = self.ends.each_mut().map(|end| {
            let qp = end.context.create_qp(&make(end.pd, end.cq)).unwrap();
            let row = end.row();
            (qp, end.context.endpoint(qp, row).unwrap())
        });
        for (end, (own, other)) in self.ends.iter_mut().zip([(0, 1), (1, 0)]) {
            end.context.handshake(made[own].0, &made[own].1, &made[other].1).unwrap();
        }
        made.map(|(qp, _)| qp)
    }

    /// Messages between devices by SENDs, each compared when it has completed.
    fn send(&mut self, qps: [Qp; 2], op: SendOp, sizes: &[usize], grh: usize, random: &mut Random) {
        for (n, len) in sizes.iter().copied().enumerate() {
            let source = self.fill(0, random);
            self.post_recv(qps[1], (5, grh + len));
            self.post(qps[0], op, (n as u64, len));
            let received = self.success(1);
            assert_eq!(received.byte_len as usize, grh + len);
            assert!(self.ends[1].read(5 + grh as u64, len) == source[n..n + len], "SEND of {len} bytes");
            self.success(0);
        }
    }

    fn fill(&mut self, end: usize, random: &mut Random) -> Vec<u8> {
        let bytes: Vec<u8> = (0..BYTES).map(|_| random.below(256) as u8).collect();
        let End { context, mr, .. } = &mut self.ends[end];
        context.write(*mr, 0, &bytes).unwrap();
        bytes
    }

    /// Each verb, in messages of all sizes.
    fn exchange(mut self) {
        let random = &mut Random::from_env("FERROCE_DEVICE_SEED");
        let qps = self.connect(QpConfig::rc);
        for (n, len) in SIZES.into_iter().enumerate() {
            let source = self.fill(0, random);
            let to = self.ends[1].remote.at(n as u64);
            self.post(qps[0], SendOp::Write(to), (3, len));
            self.success(0);
            assert!(self.ends[1].read(n as u64, len) == source[3..3 + len], "WRITE of {len} bytes");
            let source = self.fill(1, random);
            self.post(qps[0], SendOp::Read(to), (9, len));
            self.success(0);
            assert!(self.ends[0].read(9, len) == source[n..n + len], "READ of {len} bytes");
        }
        self.send(qps, SendOp::Send, &SIZES, 0, random);
        let unreliable = self.connect(QpConfig::uc);
        self.send(unreliable, SendOp::Send, &SIZES[..4], 0, random);

        let qkey = 0x1234;
        let mut datagrams = self.ends.each_mut().map(|end| {
            let qp = end.context.create_qp(&QpConfig::ud(end.pd, end.cq)).unwrap();
            let transitions = [
                Transition::InitDatagram { qkey },
                Transition::ReadyToReceiveDatagrams,
                Transition::ReadyToSendUnreliable { sq_psn: Psn::new(5) },
            ];
            for transition in transitions {
                end.context.modify_qp(qp, transition).unwrap();
            }
            qp
        });
        let gid = self.ends[1].context.port().gids[self.ends[1].row()].gid;
        let qpn = self.ends[1].context.query_qp(datagrams[1]).unwrap().qpn;
        let near = &mut self.ends[0];
        let ah = near.context.create_ah(near.pd, &AddressVector::new(gid, near.row())).unwrap();
        let to = SendOp::SendTo(Destination { ah, qpn, qkey });
        self.send(datagrams, to, &SIZES[..3], 40, random);

        // No references are left.
        datagrams.iter_mut().zip(&mut self.ends).for_each(|(qp, end)| end.context.destroy_qp(*qp).unwrap());
        for (n, end) in self.ends.iter_mut().enumerate() {
            end.context.destroy_qp(qps[n]).unwrap();
            end.context.destroy_qp(unreliable[n]).unwrap();
            end.context.poll(self.clock.now()).unwrap();
            end.context.deregister(end.mr).unwrap();
        }
    }
}

#[test]
fn over_loopback() {
    let (near, far) = loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    let ports: [Box<dyn PacketDriver>; 2] = [Box::new(near), Box::new(far)];
    if let Some(ends) = Ends::new(ports) {
        ends.exchange();
    }
}

#[test]
fn over_udp_sockets() {
    let ports = [1, 2].map(|last| {
        let address = Ipv4Addr::new(127, 81, 0, last);
        Box::new(Udp::open(&UdpConfig::new(address.into())).unwrap()) as Box<dyn PacketDriver>
    });
    if let Some(ends) = Ends::new(ports) {
        ends.exchange();
    }
}

#[cfg(feature = "af_xdp")]
#[test]
fn over_af_xdp() {
    use ferroce::driver::af_xdp::{AfXdp, AfXdpConfig};
    use ferroce_driver_test_support::namespaces::{Namespaces, VETH};

    let Some(namespaces) = Namespaces::new(4200) else { return };
    let open = || Box::new(AfXdp::open(&AfXdpConfig::new(VETH)).unwrap()) as Box<dyn PacketDriver>;
    if let Some(ends) = Ends::new([namespaces.in_a(open), namespaces.in_b(open)]) {
        ends.exchange();
    }
}
