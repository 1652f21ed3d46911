//! Services between two contexts: their packets, and the received data.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::sync::{Arc, Mutex};

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork, Verdict};
use ferroce::wire::{NetworkHeader, Packet, VlanTag, source_port};
use ferroce::*;
use ferroce_test_support::pair::{self, End, Pair, QKEY};
use ferroce_test_support::peer::pattern;

const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];
/// Bytes before a received datagram.
const GRH: u32 = 40;

/// A pair whose frames are recorded.
struct Wire {
    pair: Pair,
    frames: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Wire {
    fn new(setup: pair::Setup) -> Wire {
        let pair = Pair::new(1, LinkConfig::default(), setup);
        let frames = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&frames);
        pair.network.set_filter(Box::new(move |frame| {
            kept.lock().unwrap().push(frame.to_vec());
            Verdict::Pass
        }));
        Wire { pair, frames }
    }

    fn run(&mut self) {
        while self.pair.step() {}
    }

    /// Takes the frames sent since the last call.
    fn take(&self) -> Vec<Vec<u8>> {
        std::mem::take(&mut *self.frames.lock().unwrap())
    }

    #[track_caller]
    fn expect_wc(&mut self, end: usize, wr_id: u64) -> WorkCompletion {
        let End { context, cq, .. } = &mut self.pair.ends[end];
        match context.poll_cq(*cq).unwrap() {
            Some(wc) if (wc.wr_id, wc.status) == (wr_id, WcStatus::Success) => wc,
            other => panic!("expected completion of {wr_id} at end {end}: {other:?}\n{}", context.counters()),
        }
    }

    fn expect_no_wc(&mut self) {
        for End { context, cq, .. } in &mut self.pair.ends {
            assert_eq!(context.poll_cq(*cq).unwrap(), None);
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.expect_no_wc();
        }
    }
}

/// Every operation of every service, over every encapsulation of RoCE.
#[test]
fn all_services_over_all_encapsulations() {
    for qp_type in TYPES {
        for (ipv6, roce_v1, vlan) in [
            (false, false, None),
            (true, false, None),
            (false, true, None),
            (true, true, None),
            (false, false, Some(100)),
            (true, false, Some(4094)),
            (false, true, Some(1)),
        ] {
            let setup = pair::Setup {
                qp_type,
                ipv6,
                roce_v1,
                vlan,
                way: |way| way.service_level(5),
                ..pair::Setup::default()
            };
            let mut wire = Wire::new(setup);
            every_operation(&mut wire, qp_type);
            let header = match (roce_v1, ipv6) {
                (true, _) => NetworkHeader::Grh,
                (false, true) => NetworkHeader::Ipv6,
                (false, false) => NetworkHeader::Ipv4,
            };
            let frames = wire.take();
            assert!(frames.len() > 3);
            for frame in frames {
                let packet = Packet::parse(&frame).unwrap();
                assert_eq!(packet.header, header);
                let tag = vlan.map(|id| VlanTag { id, priority: 5 });
                assert_eq!(packet.link().unwrap().vlan, tag, "{qp_type:?}, IPv6 {ipv6}, v1 {roce_v1}");
            }
        }
    }
}

fn every_operation(wire: &mut Wire, qp_type: QpType) {
    let data = pattern(5000);
    let [a, b] = &mut wire.pair.ends;
    a.context.bytes_mut(a.mr).unwrap()[..5000].copy_from_slice(&data);
    let remote = b.context.remote(b.mr).unwrap();
    let remote = RemoteAddress { addr: remote.addr + 65536, rkey: remote.rkey };
    let (skip, lengths) = match qp_type {
        QpType::Ud => (GRH, [0, 1, 1024, 4096]),
        _ => (0, [0, 1, 1024, 5000]),
    };
    let with_imm = a.destination.map_or(SendOp::SendWithImm(7), |to| SendOp::SendToWithImm(to, 7));
    for (op, immediate) in [(a.send_op(), None), (with_imm, Some(7))] {
        for length in lengths {
            let [a, b] = &mut wire.pair.ends;
            b.post_recv(1, 0, skip + length);
            a.post_send(2, op, 0, length);
            wire.run();
            wire.expect_wc(0, 2);
            let wc = wire.expect_wc(1, 1);
            assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::Recv, skip + length));
            assert_eq!((wc.grh, wc.immediate), (skip > 0, immediate));
            let sender = wire.pair.ends[0].qpns()[0];
            assert_eq!(wc.src_qpn, sender);
            let b = &wire.pair.ends[1];
            let received = &b.context.bytes(b.mr).unwrap()[skip as usize..][..length as usize];
            assert_eq!(received, &data[..length as usize]);
        }
    }
    if qp_type == QpType::Ud {
        return;
    }
    for (op, immediate) in [(SendOp::Write(remote), None), (SendOp::WriteWithImm(remote, 9), Some(9))] {
        for length in lengths {
            let [a, b] = &mut wire.pair.ends;
            b.context.bytes_mut(b.mr).unwrap()[65536..70536].fill(0);
            if immediate.is_some() {
                b.post_recv(1, 0, 0);
            }
            a.post_send(2, op, 0, length);
            wire.run();
            wire.expect_wc(0, 2);
            if immediate.is_some() {
                let wc = wire.expect_wc(1, 1);
                assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RecvRdmaWithImm, length));
                assert_eq!(wc.immediate, immediate);
            }
            let b = &wire.pair.ends[1];
            let written = &b.context.bytes(b.mr).unwrap()[65536..][..5000];
            assert_eq!(written[..length as usize], data[..length as usize]);
            assert!(written[length as usize..].iter().all(|byte| *byte == 0));
        }
    }
    if qp_type == QpType::Uc {
        return;
    }
    let [a, b] = &mut wire.pair.ends;
    b.context.bytes_mut(b.mr).unwrap()[65536..65544].copy_from_slice(&41u64.to_ne_bytes());
    a.post_send(1, SendOp::FetchAdd { remote, add: 1 }, 8192, 8);
    a.post_send(2, SendOp::CompareSwap { remote, compare: 42, swap: 7 }, 8200, 8);
    a.post_send(3, SendOp::Read(remote), 16384, 5000);
    wire.run();
    for wr_id in 1..=3 {
        wire.expect_wc(0, wr_id);
    }
    let [a, b] = &wire.pair.ends;
    let bytes = a.context.bytes(a.mr).unwrap();
    assert_eq!(bytes[8192..8208], [41u64.to_ne_bytes(), 42u64.to_ne_bytes()].concat());
    assert_eq!(bytes[16384..21384], b.context.bytes(b.mr).unwrap()[65536..70536]);
    assert_eq!(bytes[16384..16392], 7u64.to_ne_bytes());
}

/// DSCP, ECN, hop limit and flow label of a path are those of its packets, in both directions of a reliable connection, and
/// the flow label determines the source port.
#[test]
fn address_attributes_are_on_the_wire() {
    for qp_type in TYPES {
        for (ipv6, flow_label) in [(false, 0), (true, 0), (true, 0xabcde), (false, 0x54321)] {
            let way: fn(AddressVector) -> AddressVector = match flow_label {
                0 => |way| way.traffic_class(0xba).hop_limit(9),
                0xabcde => |way| way.traffic_class(0x1c << 2 | 1).hop_limit(255).flow_label(0xabcde),
                _ => |way| way.traffic_class(2).flow_label(0x54321),
            };
            let mut wire = Wire::new(pair::Setup { qp_type, ipv6, way, ..pair::Setup::default() });
            let sample = way(AddressVector::new(Gid::default(), 0));
            let [a, b] = &mut wire.pair.ends;
            let qpns = [a.qpns()[0], b.qpns()[0]];
            b.post_recv(1, 0, 256);
            let op = a.send_op();
            a.post_send(2, op, 0, 64);
            wire.run();
            wire.expect_wc(0, 2);
            wire.expect_wc(1, 1);
            let frames = wire.take();
            assert_eq!(frames.len(), if qp_type == QpType::Rc { 2 } else { 1 });
            for (frame, [own, other]) in frames.iter().zip([qpns, [qpns[1], qpns[0]]]) {
                let network = Packet::parse(frame).unwrap().network();
                assert_eq!(network.traffic_class, sample.traffic_class);
                assert_eq!(network.hop_limit, sample.hop_limit);
                assert_eq!(network.flow_label, if ipv6 { flow_label } else { 0 });
                assert_eq!(network.source_port, Some(source_port(flow_label, own, other)));
                assert_eq!(Packet::parse(frame).unwrap().bth.dest_qpn(), other);
            }
        }
    }
}

/// The address handle of one datagram does not affect the next.
#[test]
fn each_datagram_has_its_own_path() {
    let setup = pair::Setup { qp_type: QpType::Ud, ..pair::Setup::default() };
    let mut wire = Wire::new(setup);
    let [a, b] = &mut wire.pair.ends;
    let gid = b.context.port().gids[0].gid;
    for n in 0..4u8 {
        let way = AddressVector::new(gid, 0).traffic_class(n << 2).hop_limit(10 + n);
        let ah = a.context.create_ah(a.pd, &way).unwrap();
        let to = Destination { ah, qpn: Qpn::new(0x500 + u32::from(n)), qkey: 0x100 + u32::from(n) };
        a.post_send(n.into(), SendOp::SendTo(to), 0, 8);
    }
    wire.run();
    for (n, frame) in wire.take().iter().enumerate() {
        wire.expect_wc(0, n as u64);
        let packet = Packet::parse(frame).unwrap();
        let deth = packet.deth().unwrap();
        assert_eq!(
            (packet.network().traffic_class, packet.network().hop_limit),
            ((n as u8) << 2, 10 + n as u8)
        );
        assert_eq!((packet.bth.dest_qpn().value(), deth.qkey()), (0x500 + n as u32, 0x100 + n as u32));
        let (own, other) = (wire.pair.ends[0].qpns()[0], packet.bth.dest_qpn());
        assert_eq!(packet.network().source_port, Some(source_port(0, own, other)));
    }
}

/// A privileged Q_Key in a work request stands for the queue pair's own.
#[test]
fn qkeys_with_the_highest_bit() {
    let mut wire = Wire::new(pair::Setup { qp_type: QpType::Ud, ..pair::Setup::default() });
    let [a, b] = &mut wire.pair.ends;
    let to = a.destination.unwrap();
    for qkey in [1 << 31, 0x8001_0000, u32::MAX] {
        let to = Destination { qkey, ..to };
        a.post_send(1, SendOp::SendTo(to), 0, 8);
    }
    a.post_send(2, SendOp::SendTo(Destination { qkey: 0x7fff_ffff, ..to }), 0, 8);
    b.post_recv(1, 0, 64);
    b.post_recv(2, 0, 64);
    b.post_recv(3, 0, 64);
    wire.run();
    let qkeys: Vec<u32> =
        wire.take().iter().map(|frame| Packet::parse(frame).unwrap().deth().unwrap().qkey()).collect();
    assert_eq!(qkeys, [QKEY, QKEY, QKEY, 0x7fff_ffff]);
    for wr_id in [1, 1, 1, 2] {
        wire.expect_wc(0, wr_id);
    }
    for wr_id in 1..=3 {
        wire.expect_wc(1, wr_id);
    }
    assert_eq!(wire.pair.ends[1].context.counters().value(Counter::RxQkeyMismatch), 1);
}

/// VLANs: refusals of `add_gid`, and packets of another VLAN than the address's.
#[test]
fn vlans() {
    let mut wire = Wire::new(pair::Setup { vlan: Some(100), ..pair::Setup::default() });
    let context = &mut wire.pair.ends[0].context;
    let gid = context.port().gids[0].gid;
    let before = context.port().gids.clone();
    let entry = GidEntry::new(gid).vlan(100);
    for bad in [
        entry.vlan(0),
        entry.vlan(4095),
        entry.vlan(4096 + 100),
        entry.roce_v1(true),
        GidEntry::new(Gid::from_ipv4([239, 1, 1, 1].into())).vlan(100),
        entry,
        entry.vlan(None),
    ] {
        assert!(matches!(context.add_gid(bad), Err(Error::Invalid { .. })), "{bad:?}");
    }
    assert_eq!(context.port().gids, before);
    assert_eq!(context.add_gid(entry.vlan(4094)).unwrap(), 2);
    assert_eq!(context.add_gid(entry.vlan(1)).unwrap(), 3);
    drop(wire);

    // Each priority, from the path.
    for priority in 0..8u8 {
        const WAYS: [fn(AddressVector) -> AddressVector; 8] = [
            |way| way.service_level(0),
            |way| way.service_level(1),
            |way| way.service_level(2),
            |way| way.service_level(3),
            |way| way.service_level(4),
            |way| way.service_level(5),
            |way| way.service_level(6),
            |way| way.service_level(7),
        ];
        let way = WAYS[usize::from(priority)];
        let mut wire = Wire::new(pair::Setup { vlan: Some(100), way, ..pair::Setup::default() });
        let [a, b] = &mut wire.pair.ends;
        b.post_recv(1, 0, 8);
        a.post_send(2, SendOp::Send, 0, 8);
        wire.run();
        wire.expect_wc(0, 2);
        wire.expect_wc(1, 1);
        let frames = wire.take();
        assert_eq!(frames.len(), 2, "the ACK is tagged as well");
        for frame in frames {
            assert_eq!(frame[12..16], [0x81, 0x00, priority << 5, 100]);
        }
    }
}

/// The longest datagram is the longest that fits the interface, header included: RoCE v1 has a GRH whatever its addresses.
#[test]
fn longest_datagrams() {
    let between = PathMtu::Mtu4096.required_l3_mtu(false);
    for (mtu, ipv6, roce_v1, longest) in [
        (between, false, false, 4096),
        (between, true, false, 2048),
        (between, false, true, 2048),
        (between - 1, false, false, 2048),
        (between + 20, true, false, 4096),
        (between + 20, false, true, 4096),
        (1500, false, false, 1024),
    ] {
        let network =
            SimNetwork::with_config(1, LinkConfig::default(), NetworkConfig::default().mtu(mtu).frames(8))
                .unwrap();
        let address = if ipv6 { "fd77::1".parse().unwrap() } else { [10, 0, 0, 1].into() };
        let port = Box::new(network.port(&[address]));
        let mut context = Context::open(port, &Config::default().roce_v1(roce_v1)).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(16).unwrap();
        let qp = context.create_qp(&QpConfig::ud(pd, cq)).unwrap();
        for transition in [
            Transition::InitDatagram { qkey: QKEY },
            Transition::ReadyToReceiveDatagrams,
            Transition::ReadyToSendUnreliable { sq_psn: Psn::new(0) },
        ] {
            context.modify_qp(qp, transition).unwrap();
        }
        let sgid_index = context.port().gids.iter().position(|gid| gid.roce_v1 == roce_v1).unwrap();
        let way = AddressVector::new(address.into(), sgid_index).mac(MacAddr::default());
        let ah = context.create_ah(pd, &way).unwrap();
        let to = Destination { ah, qpn: Qpn::new(9), qkey: QKEY };
        let mr = context.register(pd, Memory::zeroed(8192).unwrap(), Access::NONE).unwrap();
        for length in [longest, longest + 1] {
            let sges = [Sge { mr, offset: 0, length }];
            let data = Data::Sges(&sges);
            let wr = SendWorkRequest { wr_id: 1, op: SendOp::SendTo(to), data, flags: SendFlags::SIGNALED };
            context.post_send(qp, &wr).unwrap();
        }
        context.poll(Nanos(1)).unwrap();
        let statuses: Vec<_> =
            std::iter::from_fn(|| context.poll_cq(cq).unwrap()).map(|wc| wc.status).collect();
        assert_eq!(statuses, [WcStatus::Success; 2]);
        let counted =
            [Counter::SentPkts, Counter::TxTooLong].map(|counter| context.counters().value(counter));
        assert_eq!(counted, [1, 1], "MTU {mtu}, IPv6 {ipv6}, v1 {roce_v1}");
        assert_eq!(context.driver_stats().tx_dropped, 0);
    }
}

/// A datagram is answered with the data before it in the receive: from the address to which it was sent, or, if that was a
/// group, from one of the sender's kind; with the same protocol.
#[test]
fn answers_to_datagrams() {
    for (ipv6, roce_v1) in [(false, false), (true, false), (false, true), (true, true)] {
        for to_group in [false, true] {
            let way: fn(AddressVector) -> AddressVector =
                |way| way.traffic_class(0xba).flow_label(if way.gid.is_ipv6() { 0xabcde } else { 0 });
            let setup = pair::Setup { qp_type: QpType::Ud, ipv6, roce_v1, way, ..pair::Setup::default() };
            let mut wire = Wire::new(setup);
            let [a, b] = &mut wire.pair.ends;
            let group = match ipv6 {
                true => Gid::from(std::net::IpAddr::from([0xff0e, 0, 0, 0, 0, 0, 0, 7])),
                false => Gid::from_ipv4([239, 0, 0, 7].into()),
            };
            let index =
                |end: &End| end.context.port().gids.iter().position(|gid| gid.roce_v1 == roce_v1).unwrap();
            let mut to = a.destination.unwrap();
            if to_group {
                b.context.attach_mcast(b.qp, group).unwrap();
                let way = way(AddressVector::new(group, index(a)));
                to = Destination { ah: a.context.create_ah(a.pd, &way).unwrap(), qpn: Qpn::MULTICAST, ..to };
            }
            b.post_recv(1, 0, 64);
            a.post_recv(2, 0, 64);
            a.post_send(3, SendOp::SendTo(to), 64, 8);
            wire.run();
            wire.expect_wc(0, 3);
            let wc = wire.expect_wc(1, 1);

            let [a, b] = &mut wire.pair.ends;
            let grh: [u8; 40] = b.context.bytes(b.mr).unwrap()[..40].try_into().unwrap();
            let back = b.context.address_from_wc(&wc, &grh).unwrap();
            let own = a.context.port().gids[index(a)].gid;
            // To its source, so that nothing is resolved, without its ECN bits.
            let mac = Some(a.context.port().mac);
            assert_eq!(back, way(AddressVector::new(own, index(b))).traffic_class(0xb8).mac(mac));
            let ah = b.context.create_ah(b.pd, &back).unwrap();
            b.post_send(4, SendOp::SendTo(Destination { ah, qpn: wc.src_qpn, qkey: QKEY }), 128, 8);
            wire.take();
            wire.run();
            wire.expect_wc(1, 4);
            assert_eq!(wire.expect_wc(0, 2).src_qpn, wire.pair.ends[1].qpns()[0]);
            let frames = wire.take();
            let network = Packet::parse(&frames[0]).unwrap().network();
            assert_eq!((network.traffic_class, network.header == NetworkHeader::Grh), (0xb8, roce_v1));

            // Headers with which no datagram to this port starts.
            let context = &wire.pair.ends[0].context;
            assert!(context.address_from_wc(&wc, &[0; 40]).is_err());
            assert!(context.address_from_wc(&wc, &[0x60; 40]).is_err());
            let is_own = context.address_from_wc(&wc, &grh);
            assert_eq!(is_own.is_ok(), to_group, "to another port: {is_own:?}");
            let mut dirty = grh;
            dirty[if ipv6 { 6 } else { 0 }] = 1;
            assert!(wire.pair.ends[1].context.address_from_wc(&wc, &dirty).is_err());
        }
    }
}

/// The driver joins a group when its first queue pair does and leaves it when its last does; a refusal of the driver
/// changes nothing.
#[test]
fn the_driver_joins_groups() {
    let group = Gid::from_ipv4([239, 0, 0, 7].into());
    let calls = Arc::new(Mutex::new(Calls::default()));
    let (port, _) = driver::loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let port = Stubborn { port, calls: Arc::clone(&calls) };
    let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let [a, b] = [(); 2].map(|()| context.create_qp(&QpConfig::ud(pd, cq)).unwrap());
    calls.lock().unwrap().refuses = true;
    assert!(matches!(context.attach_mcast(a, group), Err(Error::Driver(_))));
    assert!(matches!(context.detach_mcast(a, group), Err(Error::Invalid { .. })), "it is not attached");
    calls.lock().unwrap().refuses = false;
    context.attach_mcast(a, group).unwrap();
    context.attach_mcast(b, group).unwrap();
    context.detach_mcast(a, group).unwrap();
    assert_eq!(calls.lock().unwrap().made, [("join", group.to_ip())]);
    calls.lock().unwrap().refuses = true;
    assert!(matches!(context.detach_mcast(b, group), Err(Error::Driver(_))));
    assert!(matches!(context.destroy_qp(b), Err(Error::Busy { .. })), "it is still attached");
    calls.lock().unwrap().refuses = false;
    context.detach_mcast(b, group).unwrap();
    context.destroy_qp(b).unwrap();
    assert_eq!(calls.lock().unwrap().made, [("join", group.to_ip()), ("leave", group.to_ip())]);
}

#[derive(Default)]
struct Calls {
    made: Vec<(&'static str, std::net::IpAddr)>,
    refuses: bool,
}

/// A port that sometimes fails to join and leave groups.
struct Stubborn<D> {
    port: D,
    calls: Arc<Mutex<Calls>>,
}

impl<D> Stubborn<D> {
    fn call(&self, name: &'static str, group: std::net::IpAddr) -> Result<(), driver::Error> {
        let mut calls = self.calls.lock().unwrap();
        if calls.refuses {
            let (parameter, value) = ("group", group.to_string());
            return Err(driver::Error::Invalid { parameter, value, expected: "another day".into() });
        }
        calls.made.push((name, group));
        Ok(())
    }
}

impl<D: PacketDriver> driver::Wrapper for Stubborn<D> {
    type Inner = D;

    fn inner(&self) -> &D {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut D {
        &mut self.port
    }

    fn join(&mut self, group: std::net::IpAddr) -> Result<(), driver::Error> {
        self.call("join", group)
    }

    fn leave(&mut self, group: std::net::IpAddr) -> Result<(), driver::Error> {
        self.call("leave", group)
    }
}

/// Objects in use can't be destroyed, and exhaustion is reported.
#[test]
fn objects_in_use_and_exhausted() {
    let (port, _) = driver::loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let config = Config::default().max_ahs(2).max_srqs(1).max_mcast_attachments(2);
    let mut context = Context::open(Box::new(port), &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let way = AddressVector::new(context.port().gids[0].gid, 0).mac(MacAddr::default());
    let ahs = [(); 2].map(|()| context.create_ah(pd, &way).unwrap());
    let full = context.create_ah(pd, &way);
    assert!(matches!(full, Err(Error::Exhausted { setting: "max_ahs", limit: 2, .. })), "{full:?}");
    let busy = |context: &mut Context| matches!(context.dealloc_pd(pd), Err(Error::Busy { kind: "PD", .. }));
    assert!(busy(&mut context));
    for ah in ahs {
        context.destroy_ah(ah).unwrap();
    }
    let srq_config = SrqConfig::new(pd).max_wr(4).max_sge(1);
    for bad in [srq_config.max_wr(0), srq_config.max_wr(65537), srq_config.max_sge(0), srq_config.max_sge(33)]
    {
        assert!(matches!(context.create_srq(&bad), Err(Error::Invalid { .. })), "{bad:?}");
    }
    let srq = context.create_srq(&srq_config).unwrap();
    let full = context.create_srq(&srq_config);
    assert!(matches!(full, Err(Error::Exhausted { setting: "max_srqs", .. })), "{full:?}");
    let empty = ReceiveWorkRequest { wr_id: 1, sges: &[] };
    for _ in 0..4 {
        context.post_srq_recv(srq, &empty).unwrap();
    }
    assert!(matches!(context.post_srq_recv(srq, &empty), Err(Error::QueueFull { .. })));
    let query = context.query_srq(srq).unwrap();
    assert_eq!((query.depth, query.posted, query.limit), (4, 4, 0));
    assert!(busy(&mut context));
    context.destroy_srq(srq).unwrap();
    let qp = context.create_qp(&QpConfig::ud(pd, cq)).unwrap();
    assert!(busy(&mut context));
    let group = |n| Gid::from_ipv4([239, 0, 0, n].into());
    context.attach_mcast(qp, group(1)).unwrap();
    context.attach_mcast(qp, group(2)).unwrap();
    context.attach_mcast(qp, group(2)).unwrap();
    let full = context.attach_mcast(qp, group(3));
    assert!(matches!(full, Err(Error::Exhausted { setting: "max_mcast_attachments", .. })), "{full:?}");
    context.detach_mcast(qp, group(1)).unwrap();
    context.detach_mcast(qp, group(2)).unwrap();
    context.destroy_qp(qp).unwrap();
    context.dealloc_pd(pd).unwrap();
}
