//! Services between two contexts: what is on the wire, and what arrives.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

#[path = "conformance/packet.rs"]
#[allow(dead_code, reason = "these tests use less of it than the conformance cases")]
mod packet;
#[expect(unreachable_pub, reason = "a module shared by test programs")]
#[allow(dead_code, reason = "these tests use less of it than others")]
mod pair;
#[path = "conformance/peer.rs"]
#[allow(dead_code, reason = "these tests use less of it than the conformance cases")]
mod peer;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ferroce::driver::sim::{LinkConfig, NetworkConfig, SimNetwork, Verdict};
use ferroce::wire::{NetworkHeader, Opcode, Packet, VlanTag, source_port};
use ferroce::*;
use packet::packet;
use pair::{End, Pair, QKEY};
use peer::{PEER_QPN, Peer, RQ, SQ, Setup, pattern};

const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];
/// Bytes in front of a received datagram.
const GRH: u32 = 40;

/// A pair whose frames are kept.
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

    /// Takes what has been sent since the last time.
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

/// Every operation of every service, over everything that RoCE travels in.
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
                way: |way| AddressVector { service_level: 5, ..way },
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
                assert_eq!(packet.network.header, header);
                let tag = vlan.map(|id| VlanTag { id, priority: 5 });
                assert_eq!(packet.link.unwrap().vlan, tag, "{qp_type:?}, IPv6 {ipv6}, v1 {roce_v1}");
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

/// DSCP, ECN, hop limit and flow label of a way are those of its packets, of both directions of a
/// reliable connection, and the flow label makes the source port.
#[test]
fn marks_of_the_address_are_on_the_wire() {
    for qp_type in TYPES {
        for (ipv6, flow_label) in [(false, 0), (true, 0), (true, 0xabcde), (false, 0x54321)] {
            let way: fn(AddressVector) -> AddressVector = match flow_label {
                0 => |way| AddressVector { traffic_class: 0xba, hop_limit: 9, ..way },
                0xabcde => |way| AddressVector {
                    traffic_class: 0x1c << 2 | 1,
                    hop_limit: 255,
                    flow_label: 0xabcde,
                    ..way
                },
                _ => |way| AddressVector { traffic_class: 2, flow_label: 0x54321, ..way },
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
                let network = Packet::parse(frame).unwrap().network;
                assert_eq!(network.traffic_class, sample.traffic_class);
                assert_eq!(network.hop_limit, sample.hop_limit);
                assert_eq!(network.flow_label, if ipv6 { flow_label } else { 0 });
                assert_eq!(network.source_port, Some(source_port(flow_label, own, other)));
                assert_eq!(Packet::parse(frame).unwrap().bth.dest_qpn(), other);
            }
        }
    }
}

/// The address handle of one datagram says nothing about the next.
#[test]
fn each_datagram_has_its_own_way() {
    let setup = pair::Setup { qp_type: QpType::Ud, ..pair::Setup::default() };
    let mut wire = Wire::new(setup);
    let [a, b] = &mut wire.pair.ends;
    let gid = b.context.port().gids[0].gid;
    for n in 0..4u8 {
        let way = AddressVector { traffic_class: n << 2, hop_limit: 10 + n, ..AddressVector::new(gid, 0) };
        let ah = a.context.create_ah(a.pd, &way).unwrap();
        let to = Destination { ah, qpn: Qpn::new(0x500 + u32::from(n)), qkey: 0x100 + u32::from(n) };
        a.post_send(n.into(), SendOp::SendTo(to), 0, 8);
    }
    wire.run();
    for (n, frame) in wire.take().iter().enumerate() {
        wire.expect_wc(0, n as u64);
        let packet = Packet::parse(frame).unwrap();
        let deth = packet.deth().unwrap();
        assert_eq!((packet.network.traffic_class, packet.network.hop_limit), ((n as u8) << 2, 10 + n as u8));
        assert_eq!((packet.bth.dest_qpn().value(), deth.qkey()), (0x500 + n as u32, 0x100 + n as u32));
        let (own, other) = (wire.pair.ends[0].qpns()[0], packet.bth.dest_qpn());
        assert_eq!(packet.network.source_port, Some(source_port(0, own, other)));
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

/// VLANs: what `add_gid` refuses, and packets of another VLAN than the address's.
#[test]
fn vlans() {
    let mut wire = Wire::new(pair::Setup { vlan: Some(100), ..pair::Setup::default() });
    let context = &mut wire.pair.ends[0].context;
    let gid = context.port().gids[0].gid;
    let before = context.port().gids.clone();
    let entry = GidEntry { gid, roce_v1: false, vlan: Some(100) };
    for bad in [
        GidEntry { vlan: Some(0), ..entry },
        GidEntry { vlan: Some(4095), ..entry },
        GidEntry { vlan: Some(4096 + 100), ..entry },
        GidEntry { roce_v1: true, ..entry },
        GidEntry { gid: Gid::from_ipv4([239, 1, 1, 1].into()), ..entry },
        entry,
        GidEntry { vlan: None, ..entry },
    ] {
        assert!(matches!(context.add_gid(bad), Err(Error::Invalid { .. })), "{bad:?}");
    }
    assert_eq!(context.port().gids, before);
    assert_eq!(context.add_gid(GidEntry { vlan: Some(4094), ..entry }).unwrap(), 2);
    assert_eq!(context.add_gid(GidEntry { vlan: Some(1), ..entry }).unwrap(), 3);
    drop(wire);

    // Each priority, as the way has it.
    for priority in 0..8u8 {
        const WAYS: [fn(AddressVector) -> AddressVector; 8] = [
            |way| AddressVector { service_level: 0, ..way },
            |way| AddressVector { service_level: 1, ..way },
            |way| AddressVector { service_level: 2, ..way },
            |way| AddressVector { service_level: 3, ..way },
            |way| AddressVector { service_level: 4, ..way },
            |way| AddressVector { service_level: 5, ..way },
            |way| AddressVector { service_level: 6, ..way },
            |way| AddressVector { service_level: 7, ..way },
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

/// A packet with the tag of another VLAN than its address's is dropped. A tag that a switch has put
/// on or a network card taken off does not matter.
#[test]
fn packets_of_another_vlan_are_dropped() {
    for qp_type in TYPES {
        for (own, tag, is_taken) in [
            (Some(100), Some(100), true),
            (Some(100), Some(101), false),
            (Some(100), None, true),
            (None, Some(101), true),
        ] {
            let mut peer = Peer::with(Setup { state: QpState::Reset, ..Setup::of(qp_type) });
            // An address that the port has in this VLAN alone.
            let gid = Gid::from_ipv4([192, 0, 2, 50].into());
            peer.address.destination = gid;
            let entry = GidEntry { gid, roce_v1: false, vlan: own };
            let sgid_index = peer.context.add_gid(entry).unwrap();
            for transition in peer.transitions(&Setup::of(qp_type)) {
                let from = |address| AddressVector { sgid_index, ..address };
                peer.modify(match transition {
                    Transition::ReadyToReceive(receive) => {
                        let address = from(receive.address);
                        Transition::ReadyToReceive(ReadyToReceive { address, ..receive })
                    }
                    Transition::ReadyToReceiveUnreliable(path) => {
                        let address = from(path.address);
                        Transition::ReadyToReceiveUnreliable(UnreliablePath { address, ..path })
                    }
                    other => other,
                });
            }
            peer.post_recv(1, 64);
            peer.address.vlan = tag.map(|id| VlanTag { id, priority: 0 });
            let script = match qp_type {
                QpType::Rc => packet(Opcode::RC_SEND_ONLY, RQ),
                QpType::Uc => packet(Opcode::UC_SEND_ONLY, RQ),
                QpType::Ud => packet(Opcode::UD_SEND_ONLY, RQ).deth(peer::QKEY, PEER_QPN),
            };
            if is_taken {
                peer.inject(script);
                peer.expect_wc(1, WcStatus::Success);
            } else {
                let frame = peer.frame(&script);
                peer.expect_dropped(frame, Counter::RxWrongAddress);
            }
        }
    }
}

/// The longest datagram is what fits the interface, header and all: RoCE v1 has a GRH whatever its
/// addresses.
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
            SimNetwork::with_config(1, LinkConfig::default(), NetworkConfig { mtu, frames: 8 }).unwrap();
        let address = if ipv6 { "fd77::1".parse().unwrap() } else { [10, 0, 0, 1].into() };
        let port = Box::new(network.port(&[address]));
        let mut context = Context::open(port, &Config { roce_v1, ..Config::default() }).unwrap();
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
        let way =
            AddressVector { mac: Some(MacAddr::default()), ..AddressVector::new(address.into(), sgid_index) };
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

/// A datagram is answered by what its receiver finds before it: from the address that it came to,
/// or, if that was a group, from one of the sender's kind; under the same protocol.
#[test]
fn answers_to_datagrams() {
    for (ipv6, roce_v1) in [(false, false), (true, false), (false, true), (true, true)] {
        for to_group in [false, true] {
            let way: fn(AddressVector) -> AddressVector = |way| AddressVector {
                traffic_class: 0xba,
                flow_label: if way.gid.is_ipv6() { 0xabcde } else { 0 },
                ..way
            };
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
            let qpn = wire.expect_wc(1, 1).src_qpn;

            let [a, b] = &mut wire.pair.ends;
            let grh: [u8; 40] = b.context.bytes(b.mr).unwrap()[..40].try_into().unwrap();
            let back = b.context.address_from_grh(&grh).unwrap();
            let own = a.context.port().gids[index(a)].gid;
            assert_eq!(back, AddressVector { mac: back.mac, ..way(AddressVector::new(own, index(b))) });
            let ah = b.context.create_ah(b.pd, &back).unwrap();
            b.post_send(4, SendOp::SendTo(Destination { ah, qpn, qkey: QKEY }), 128, 8);
            wire.take();
            wire.run();
            wire.expect_wc(1, 4);
            assert_eq!(wire.expect_wc(0, 2).src_qpn, wire.pair.ends[1].qpns()[0]);
            let frames = wire.take();
            let network = Packet::parse(&frames[0]).unwrap().network;
            assert_eq!((network.traffic_class, network.header == NetworkHeader::Grh), (0xba, roce_v1));

            // What no datagram to this port begins with.
            let context = &wire.pair.ends[0].context;
            assert!(context.address_from_grh(&[0; 40]).is_err());
            assert!(context.address_from_grh(&[0x60; 40]).is_err());
            let is_own = context.address_from_grh(&grh);
            assert_eq!(is_own.is_ok(), to_group, "to another port: {is_own:?}");
            let mut dirty = grh;
            dirty[if ipv6 { 6 } else { 0 }] = 1;
            assert!(wire.pair.ends[1].context.address_from_grh(&dirty).is_err());
        }
    }
}

/// A send that fails before it leaves stops the send queue of an unreliable queue pair, and nothing
/// else: later sends are flushed, receiving goes on, and the application may resume.
#[test]
fn send_queue_error_and_resume() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        for destroyed in [false, true] {
            if destroyed && qp_type == QpType::Uc {
                continue;
            }
            let mut peer = Peer::with(Setup::of(qp_type));
            let (op, opcode) = match qp_type {
                QpType::Ud => (SendOp::SendTo(peer.destination()), Opcode::UD_SEND_ONLY),
                _ => (SendOp::Send, Opcode::UC_SEND_ONLY),
            };
            let mr = peer.memory(b"datagram");
            let sges = [peer::sge(mr, 8)];
            peer.take_at_most(1);
            peer.post(1, op, &sges);
            let status = if destroyed {
                peer.post_recv(10, 64);
                let SendOp::SendTo(to) = op else { unreachable!() };
                // One has left; the others have not when the way is destroyed.
                peer.expect(opcode, SQ);
                peer.expect_wc(1, WcStatus::Success);
                peer.post(2, op, &sges);
                peer.post(3, op, &sges);
                peer.context.destroy_ah(to.ah).unwrap();
                assert!(peer.context.destroy_ah(to.ah).is_err());
                WcStatus::LocQpOpErr
            } else {
                peer.post_recv(10, 64);
                let elsewhere = peer.context.alloc_pd().unwrap();
                let memory = Memory::zeroed(8).unwrap();
                let foreign = peer.context.register(elsewhere, memory, Access::NONE).unwrap();
                peer.expect(opcode, SQ);
                peer.expect_wc(1, WcStatus::Success);
                peer.post(2, op, &[peer::sge(foreign, 8)]);
                peer.post(3, op, &sges);
                WcStatus::LocProtErr
            };
            peer.take_at_most(usize::MAX);
            peer.expect_wc(2, status);
            peer.expect_wc(3, WcStatus::WrFlushErr);
            peer.expect_nothing();
            peer.expect_state(QpState::Sqe);
            peer.post_flagged(4, op, Data::Sges(&sges), SendFlags::default());
            peer.expect_wc(4, WcStatus::WrFlushErr);

            let script = match qp_type {
                QpType::Ud => packet(opcode, 0).deth(peer::QKEY, PEER_QPN),
                _ => packet(opcode, RQ),
            };
            peer.inject(script);
            peer.expect_wc(10, WcStatus::Success);
            assert_eq!(peer.query().outstanding_sends, 0);

            peer.modify(Transition::Resume);
            let op = if qp_type == QpType::Ud { SendOp::SendTo(peer.destination()) } else { op };
            peer.post(5, op, &sges);
            assert_eq!(peer.expect(opcode, SQ + 1).payload, b"datagram");
            peer.expect_wc(5, WcStatus::Success);
            peer.expect_no_event();
        }
    }
    // A way of another protection domain is none.
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let elsewhere = peer.context.alloc_pd().unwrap();
    let ah = peer.context.create_ah(elsewhere, &peer.way_to(peer.address.source)).unwrap();
    let to = Destination { ah, qpn: PEER_QPN, qkey: peer::QKEY };
    peer.post(1, SendOp::SendTo(to), &[]);
    peer.expect_wc(1, WcStatus::LocQpOpErr);
    peer.expect_state(QpState::Sqe);
    peer.expect_nothing();
}

/// A flush that finds no room in the CQ ends the queue pair, in SQE as anywhere.
#[test]
fn a_flush_in_sqe_that_overflows_the_cq() {
    let mut peer = Peer::with(Setup { cq_capacity: 1, ..Setup::of(QpType::Uc) });
    let elsewhere = peer.context.alloc_pd().unwrap();
    let memory = Memory::zeroed(8).unwrap();
    let foreign = peer.context.register(elsewhere, memory, Access::NONE).unwrap();
    peer.post(1, SendOp::Send, &[peer::sge(foreign, 8)]);
    peer.poll();
    peer.expect_state(QpState::Sqe);
    peer.post(2, SendOp::Send, &[]);
    peer.expect_state(QpState::Error);
    peer.expect_event(Event::CqErr(peer.cq));
    peer.expect_wc(1, WcStatus::LocProtErr);
}

/// Only progress fills the retry counters up again, not a change of other attributes.
#[test]
fn an_update_does_not_grant_new_retries() {
    let mut peer = Peer::with(Setup { retry_count: 1, timeout: 14, ..Setup::default() });
    let timeout = Duration::from_nanos(4096 << 14) * 5 / 4;
    peer.post_write(1, b"lost");
    assert_eq!(peer.take_packets().len(), 1);
    let mut sent = 0;
    for _ in 0..5 {
        peer.modify(Transition::Update(QpUpdate { access: Some(Access::NONE), ..QpUpdate::default() }));
        peer.advance(timeout);
        sent += peer.take_packets().len();
        if peer.query().state == QpState::Error {
            break;
        }
    }
    assert_eq!(sent, 1, "one retry");
    peer.expect_wc(1, WcStatus::RetryExcErr);
}

/// Every three UC packets in a row, with and without a loss among them, against what §6 says of
/// messages: First or Only begins one, Middle or Last continues one of its kind or is dropped.
#[test]
fn unreliable_packets_in_every_order() {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Send,
        Write,
    }
    let opcodes: Vec<Opcode> = (0x20..=0x2b).map(|byte| Opcode::from_byte(byte).unwrap()).collect();
    let mut delivered = 0;
    for sequence in 0..12 * 12 * 12 {
        let sequence = [sequence / 144, sequence / 12 % 12, sequence % 12].map(|i| opcodes[i]);
        for lost in [None, Some(1), Some(2)] {
            let mut peer = Peer::with(Setup::of(QpType::Uc));
            for wr_id in 0..3 {
                peer.post_recv(wr_id, 1024);
            }
            let target = peer.memory(&[0; 1024]);
            let rkey = peer.remote(target).rkey;
            let (mut under_way, mut received, mut wanted) = (None, 0u32, Vec::new());
            for (i, opcode) in sequence.into_iter().enumerate() {
                if lost == Some(i) {
                    under_way = None;
                }
                let psn = RQ + i as u32 + u32::from(lost.is_some_and(|lost| lost <= i));
                let (kind, begins, ends) = match opcode.byte() - 0x20 {
                    0 => (Kind::Send, true, false),
                    1 => (Kind::Send, false, false),
                    2 | 3 => (Kind::Send, false, true),
                    4 | 5 => (Kind::Send, true, true),
                    6 => (Kind::Write, true, false),
                    7 => (Kind::Write, false, false),
                    8 | 9 => (Kind::Write, false, true),
                    _ => (Kind::Write, true, true),
                };
                let immediate = [3, 5, 9, 0xb].contains(&(opcode.byte() - 0x20));
                let length = if ends { 8 } else { 256 };
                let mut script = packet(opcode, psn).payload(&vec![7; length as usize]);
                if kind == Kind::Write && begins {
                    // A WRITE says at its start how long it is, and the model need not know it.
                    let rest = sequence[i + 1..].iter().take_while(|next| next.byte() == 0x27).count() as u32;
                    let total = if ends { 8 } else { 256 * (rest + 1) + 8 };
                    script = script.reth(0, rkey, total);
                }
                if immediate {
                    script = script.imm(i as u32);
                }
                peer.inject(script);
                if begins {
                    (under_way, received) = (Some(kind), 0);
                } else if under_way != Some(kind) {
                    under_way = None;
                }
                if under_way.is_some() {
                    received += length;
                    if ends {
                        under_way = None;
                        if kind == Kind::Send || immediate {
                            wanted.push((received, immediate.then_some(i as u32)));
                        }
                    }
                }
            }
            peer.expect_nothing();
            peer.expect_no_event();
            peer.expect_state(QpState::Rts);
            for (wr_id, (byte_len, immediate)) in (0..).zip(wanted) {
                let wc = peer.expect_wc(wr_id, WcStatus::Success);
                assert_eq!((wc.byte_len, wc.immediate), (byte_len, immediate), "{sequence:?} lost {lost:?}");
                delivered += 1;
            }
            peer.expect_no_wc();
        }
    }
    assert!(delivered > 3000, "{delivered}");
}

/// What a UC queue pair sends: consecutive PSNs, no AckReq, and it is done when it has left.
#[test]
fn unreliable_sends_complete_when_they_have_left() {
    use Opcode as O;
    let mut peer = Peer::with(Setup { sq_psn: 0xff_fffe, ..Setup::of(QpType::Uc) });
    let data = pattern(3 * 256 + 1);
    let mr = peer.memory(&data);
    let sges = [peer::sge(mr, data.len())];
    let sends = [O::UC_SEND_FIRST, O::UC_SEND_MIDDLE, O::UC_SEND_MIDDLE];
    let writes = [O::UC_WRITE_FIRST, O::UC_WRITE_MIDDLE, O::UC_WRITE_MIDDLE];
    let messages = [
        (SendOp::Send, sends, O::UC_SEND_LAST),
        (SendOp::SendWithImm(5), sends, O::UC_SEND_LAST_WITH_IMMEDIATE),
        (SendOp::Write(peer::REMOTE), writes, O::UC_WRITE_LAST),
        (SendOp::WriteWithImm(peer::REMOTE, 5), writes, O::UC_WRITE_LAST_WITH_IMMEDIATE),
    ];
    let mut psn = 0xff_fffe;
    for (wr_id, (op, opcodes, last)) in (0..).zip(messages) {
        peer.post(wr_id, op, &sges);
        let mut sent = Vec::new();
        for opcode in opcodes.into_iter().chain([last]) {
            let got = peer.expect(opcode, psn);
            assert!(!got.ack_req);
            assert_eq!(got.immediate.is_some(), opcode.has(wire::Extension::ImmDt));
            assert_eq!(got.reth.map(|reth| reth.length()), (opcode == O::UC_WRITE_FIRST).then_some(769));
            sent.push(got);
            psn += 1;
        }
        assert_eq!(packet::payload(&sent), data);
        assert_eq!(peer.expect_wc(wr_id, WcStatus::Success).byte_len, 769);
    }
    // No timer runs, and no answer is waited for.
    assert_eq!(peer.context.next_timeout(), None);
    // An acknowledgement is none of its packets.
    let frame = peer.frame(&packet::ack(SQ, 1));
    peer.expect_dropped(frame, Counter::RxWrongService);

    // Draining finishes the message that is under way, and starts none.
    peer.take_at_most(2);
    peer.post(7, SendOp::Send, &sges);
    peer.post(8, SendOp::Send, &sges);
    assert_eq!(peer.take_packets().len(), 2);
    peer.modify(Transition::Drain);
    assert!(peer.query().sq_draining);
    peer.expect_no_event();
    peer.take_at_most(usize::MAX);
    assert_eq!(peer.take_packets().len(), 2);
    peer.expect_wc(7, WcStatus::Success);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.expect_nothing();
    peer.modify(Transition::Resume);
    assert_eq!(peer.take_packets().len(), 4);
    peer.expect_wc(8, WcStatus::Success);

    // Datagrams have no beginning to be finished.
    let mut peer = Peer::with(Setup { sq_psn: 0xff_ffff, ..Setup::of(QpType::Ud) });
    let to = peer.destination();
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.post(1, SendOp::SendTo(to), &[]);
    peer.post(2, SendOp::SendTo(to), &[]);
    peer.expect_nothing();
    peer.modify(Transition::Resume);
    peer.expect(O::UD_SEND_ONLY, 0xff_ffff);
    peer.expect(O::UD_SEND_ONLY, 0);
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_wc(2, WcStatus::Success);
    assert_eq!(peer.query().sq_psn.value(), 1);
}

/// A UC receiver's PSN wraps within a message.
#[test]
fn unreliable_psns_wrap() {
    let mut peer = Peer::with(Setup { rq_psn: 0xff_fffe, ..Setup::of(QpType::Uc) });
    let data = pattern(3 * 256);
    for round in 0..2 {
        let mr = peer.post_recv(1, 1024);
        let first = if round == 0 { 0xff_fffe } else { 1 };
        peer.inject(packet(Opcode::UC_SEND_FIRST, first).payload(&data[..256]));
        peer.inject(packet(Opcode::UC_SEND_MIDDLE, (first + 1) & 0xff_ffff).payload(&data[256..512]));
        peer.inject(packet(Opcode::UC_SEND_LAST, (first + 2) & 0xff_ffff).payload(&data[512..]));
        assert_eq!(peer.expect_wc(1, WcStatus::Success).byte_len, 768);
        assert_eq!(peer.bytes(mr)[..768], data);
    }
    peer.expect_counted(Counter::OutOfSequence, 0);
}

/// The driver joins a group when its first queue pair does and leaves it when its last does; what it
/// refuses changes nothing.
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

/// A port that does not always join and leave groups.
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

impl<D: PacketDriver> PacketDriver for Stubborn<D> {
    fn capabilities(&self) -> &driver::Capabilities {
        self.port.capabilities()
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FnMut(&[u8])) -> Result<usize, driver::Error> {
        self.port.rx_burst(now, sink)
    }

    fn tx_burst(
        &mut self,
        now: Nanos,
        source: &mut dyn FnMut(&mut [u8]) -> Option<usize>,
    ) -> Result<usize, driver::Error> {
        self.port.tx_burst(now, source)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), driver::Error> {
        self.port.wait(timeout)
    }

    fn resolve(&mut self, peer: std::net::IpAddr) -> Result<[u8; 6], driver::Error> {
        self.port.resolve(peer)
    }

    fn join(&mut self, group: std::net::IpAddr) -> Result<(), driver::Error> {
        self.call("join", group)
    }

    fn leave(&mut self, group: std::net::IpAddr) -> Result<(), driver::Error> {
        self.call("leave", group)
    }

    fn stats(&self) -> driver::Stats {
        self.port.stats()
    }
}

/// What is in use is not taken away, and what is used up is said to be.
#[test]
fn objects_in_use_and_used_up() {
    let (port, _) = driver::loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let config = Config { max_ahs: 2, max_srqs: 1, max_mcast_attachments: 2, ..Config::default() };
    let mut context = Context::open(Box::new(port), &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let way =
        AddressVector { mac: Some(MacAddr::default()), ..AddressVector::new(context.port().gids[0].gid, 0) };
    let ahs = [(); 2].map(|()| context.create_ah(pd, &way).unwrap());
    let full = context.create_ah(pd, &way);
    assert!(matches!(full, Err(Error::Exhausted { setting: "max_ahs", limit: 2, .. })), "{full:?}");
    let busy = |context: &mut Context| matches!(context.dealloc_pd(pd), Err(Error::Busy { kind: "PD", .. }));
    assert!(busy(&mut context));
    for ah in ahs {
        context.destroy_ah(ah).unwrap();
    }
    let srq_config = SrqConfig { pd, max_wr: 4, max_sge: 1 };
    for bad in [
        SrqConfig { max_wr: 0, ..srq_config },
        SrqConfig { max_wr: 65537, ..srq_config },
        SrqConfig { max_sge: 0, ..srq_config },
        SrqConfig { max_sge: 33, ..srq_config },
    ] {
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
    assert_eq!(query, SrqAttributes { depth: 4, posted: 4, limit: 0 });
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
