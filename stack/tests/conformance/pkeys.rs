//! P_Keys beyond case 13: several per port, by queue pair and in the connection manager.

use ferroce::wire::Opcode;
use ferroce::wire::cm::{CmBody, RejectReason, SidrRep};
use ferroce::{
    CmEvent, ConnectionParameters, Counter, Error, Event, Gid, ListenConfig, PKEY_DEFAULT, PKey, PkeyTable,
    PortSpace, QpState, QpType, QpUpdate, Qpn, SendOp, Transition, WcStatus,
};

use crate::g_exchange::*;
use crate::packet::{Script, ack, nak, packet};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup};

/// A partition, with its full and its limited P_Key, and another one.
const FULL: PKey = PKey(0x8001);
const LIMITED: PKey = PKey(0x0001);
const OTHER: PKey = PKey(0x8002);

/// A queue pair in RTS with `pkey`; the table has the default P_Key too.
fn under(pkey: PKey, setup: Setup) -> Peer {
    let mut peer = Peer::with(Setup { state: QpState::Init, ..setup });
    let index = peer.context.add_pkey(pkey).unwrap();
    peer.modify(Transition::Update(QpUpdate::default().pkey_index(index)));
    let [_, receive, send] = peer.transitions(&setup);
    peer.modify(receive);
    peer.modify(send);
    assert_eq!((peer.query().pkey_index, peer.query().pkey), (index, pkey));
    peer
}

/// Which members of the partition can communicate: at least one of the two is a full member.
const MATRIX: [(PKey, [(PKey, bool); 6]); 2] = [
    (
        FULL,
        [
            (FULL, true),
            (LIMITED, true),
            (OTHER, false),
            (PKEY_DEFAULT, false),
            (PKey(0x7fff), false),
            (PKey(0), false),
        ],
    ),
    (
        LIMITED,
        [
            (FULL, true),
            (LIMITED, false),
            (OTHER, false),
            (PKEY_DEFAULT, false),
            (PKey(0x7fff), false),
            (PKey(0), false),
        ],
    ),
];

#[test]
fn each_queue_pair_receives_from_its_partition() {
    for (own, others) in MATRIX {
        let mut peer = under(own, Setup::default());
        let mut psn = RQ;
        for (pkey, is_heard) in others {
            let send = packet(Opcode::RC_SEND_ONLY, psn).ack_req().pkey(pkey.0).payload(b"hello");
            if !is_heard {
                let frame = peer.frame(&send);
                peer.expect_foreign(frame, Some(peer.qp), pkey);
                continue;
            }
            peer.post_recv(1, 8);
            peer.inject(send);
            psn += 1;
            // Its answers are in its own partition.
            let got = peer.expect(Opcode::RC_ACKNOWLEDGE, psn - 1);
            assert_eq!(got.bth.pkey(), own, "the answer to {pkey}");
            peer.expect_wc(1, WcStatus::Success);
        }
        // So are requests, and their responses.
        peer.post_write(2, b"bytes");
        assert_eq!(peer.expect(Opcode::RC_WRITE_ONLY, SQ).bth.pkey(), own);
        let foreign = peer.frame(&ack(SQ, 1).pkey(OTHER.0));
        peer.expect_foreign(foreign, Some(peer.qp), OTHER);
        peer.inject(ack(SQ, 1).pkey(FULL.0));
        peer.expect_wc(2, WcStatus::Success);
    }
}

/// No packet of a queue pair has another key, whatever its kind.
#[test]
fn all_packets_of_a_queue_pair_have_its_key() {
    let mut peer = under(FULL, Setup::default());
    let mr = peer.memory(&[7; 4096]);
    let rkey = peer.remote(mr).rkey;
    let script = [
        packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 600),
        packet(Opcode::RC_FETCH_ADD, RQ + 3).atomic_eth(8, rkey, 1, 0),
        packet(Opcode::RC_ATOMIC_WRITE, RQ + 4).reth(0, rkey, 8).payload(&[1; 8]),
        packet(Opcode::RC_WRITE_ONLY, RQ + 9).reth(0, rkey, 0).ack_req(),
    ];
    peer.inject_all(script.map(|packet| packet.pkey(FULL.0)));
    peer.post_read(1, 600);
    peer.post_write(2, &[1; 600]);
    peer.post(3, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &[crate::peer::sge(mr, 8)]);
    let sent = peer.take_packets();
    let kinds: std::collections::BTreeSet<&str> = sent.iter().map(|got| got.opcode.name()).collect();
    assert!(kinds.len() >= 9, "{kinds:?}");
    for got in &sent {
        assert_eq!(got.bth.pkey(), FULL, "{got}");
    }
    peer.inject(nak(crate::packet::NAK_SEQUENCE, SQ, 0).pkey(FULL.0));
    assert!(peer.take_packets().iter().all(|got| got.bth.pkey() == FULL));
    peer.modify(Transition::Reset);
    assert_eq!((peer.query().pkey_index, peer.query().state), (0, QpState::Reset));

    let mut peer = under(FULL, Setup { selective_repeat: true, ..Setup::default() });
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 1).pkey(FULL.0));
    assert_eq!(peer.expect(Opcode::SELECTIVE_ACKNOWLEDGE, RQ).bth.pkey(), FULL);
}

#[test]
fn unreliable_services_have_partitions_too() {
    let send = |opcode, pkey: PKey| packet(opcode, RQ).pkey(pkey.0).payload(b"hello");
    for (own, others) in MATRIX {
        for (pkey, is_heard) in others {
            let mut peer = under(own, Setup::of(QpType::Uc));
            let mut datagrams = under(own, Setup::of(QpType::Ud));
            let datagram = send(Opcode::UD_SEND_ONLY, pkey).deth(QKEY, PEER_QPN);
            for (peer, packet) in [(&mut peer, send(Opcode::UC_SEND_ONLY, pkey)), (&mut datagrams, datagram)]
            {
                if is_heard {
                    peer.post_recv(1, 48);
                    peer.inject(packet);
                    peer.expect_wc(1, WcStatus::Success);
                } else {
                    let frame = peer.frame(&packet);
                    peer.expect_foreign(frame, Some(peer.qp), pkey);
                }
            }
        }
        let mut peer = under(own, Setup::of(QpType::Ud));
        let (to, mr) = (peer.destination(), peer.memory(b"bytes"));
        peer.post(1, SendOp::SendTo(to), &[crate::peer::sge(mr, 5)]);
        assert_eq!(peer.expect(Opcode::UD_SEND_ONLY, SQ).bth.pkey(), own);
        peer.expect_wc(1, WcStatus::Success);
    }
}

/// A group's packet is delivered only to its members of that partition.
#[test]
fn a_group_is_per_partition() {
    let mut peer = under(FULL, Setup::of(QpType::Ud));
    let group = Gid::from_ipv4([239, 1, 1, 1].into());
    let default = peer.another_qp(&Setup::of(QpType::Ud));
    for qp in [peer.qp, default] {
        peer.context.attach_mcast(qp, group).unwrap();
    }
    let memory = peer.memory(&[0; 64]);
    let sges = [crate::peer::sge(memory, 48)];
    let receive = |peer: &mut Peer, qp, wr_id| {
        peer.context.post_recv(qp, &ferroce::ReceiveWorkRequest { wr_id, sges: &sges }).unwrap();
    };
    let (own, home) = (peer.qp, peer.address.destination);
    receive(&mut peer, own, 1);
    receive(&mut peer, default, 2);
    peer.address.destination = group;
    let to_group =
        packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN).dest_qpn(Qpn::MULTICAST).payload(b"all");
    peer.inject(to_group.clone().pkey(LIMITED.0));
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_no_wc();
    peer.inject(to_group.clone());
    peer.expect_wc(2, WcStatus::Success);
    let foreign = peer.frame(&to_group.pkey(OTHER.0));
    peer.expect_foreign(foreign, None, OTHER);
    peer.address.destination = home;
}

/// For any number of packets, one event is pending; the counter counts all.
#[test]
fn one_violation_is_pending_at_a_time() {
    let mut peer = Peer::new();
    let foreign = |pkey: PKey| packet(Opcode::RC_SEND_ONLY, RQ).pkey(pkey.0);
    let source = peer.address.source;
    for _ in 0..3 {
        peer.inject(foreign(FULL));
        for _ in 0..1000 {
            peer.inject(foreign(OTHER));
        }
        peer.expect_event(Event::PkeyViolation { qp: Some(peer.qp), pkey: FULL, source });
        peer.expect_no_event();
        peer.expect_counted(Counter::RxPkeyMismatch, 1001);
        peer.expect_counted(Counter::EventPkeyViolation, 1);
    }
}

#[test]
fn the_table() {
    let mut peer = Peer::with(Setup { state: QpState::Reset, ..Setup::default() });
    let context = &mut peer.context;
    assert_eq!(context.port().pkeys.iter().collect::<Vec<_>>(), [(0, PKEY_DEFAULT)]);
    assert_eq!(context.query_device().max_pkeys, PkeyTable::MAX);
    assert_eq!(context.add_pkey(FULL).unwrap(), 1);
    // Full and limited membership of one partition are two keys.
    assert_eq!(context.add_pkey(LIMITED).unwrap(), 2);
    for bad in [PKey(0), PKey(0x8000), FULL, PKEY_DEFAULT] {
        let refused = context.add_pkey(bad);
        assert!(matches!(refused, Err(Error::Invalid { attribute: "pkey", .. })), "{refused:?}");
    }
    let refused = context.remove_pkey(3).unwrap_err().to_string();
    assert_eq!(
        refused,
        "pkey_index = 3: an index in the P_Key table of 'script0' (0: 0xffff, 1: 0x8001, 2: 0x0001)"
    );
    // A removed key frees its place, and the others keep theirs.
    context.remove_pkey(1).unwrap();
    assert!(context.remove_pkey(1).is_err());
    assert_eq!(context.port().pkeys.get(1), None);
    assert_eq!((context.port().pkeys.index_of(LIMITED), context.add_pkey(OTHER).unwrap()), (Some(2), 1));
    for n in 3..PkeyTable::MAX {
        assert_eq!(context.add_pkey(PKey(0x8100 + n as u16)).unwrap(), n);
    }
    let full = context.add_pkey(PKey(0x9999)).map_err(|error| error.to_string());
    assert_eq!(full, Err("pkey = 0x9999: at most 128 of them; remove an unused one".to_owned()));

    // The default key can be removed as well, and errors name it.
    context.remove_pkey(0).unwrap();
    let refused = peer.context.modify_qp(peer.qp, Transition::Init { access: ferroce::Access::NONE });
    assert!(matches!(refused, Err(Error::Invalid { attribute: "pkey_index", .. })), "{refused:?}");
    assert_eq!(peer.query().state, QpState::Reset);
    assert_eq!(peer.context.add_pkey(PKEY_DEFAULT).unwrap(), 0);
}

/// A key in use can't be removed.
#[test]
fn a_key_in_use_stays() {
    let busy = |peer: &mut Peer, index, users: &str| match peer.context.remove_pkey(index) {
        Err(Error::Busy { kind: "P_Key", users: named, .. }) => assert_eq!(named, users),
        other => panic!("{other:?}"),
    };
    let mut peer = under(FULL, Setup::default());
    busy(&mut peer, 1, "1 queue pairs, 0 connections and listeners");
    peer.context.remove_pkey(0).unwrap();
    peer.modify(Transition::Error);
    busy(&mut peer, 1, "1 queue pairs, 0 connections and listeners");
    peer.modify(Transition::Reset);
    peer.context.remove_pkey(1).unwrap();

    let mut peer = engine();
    let index = peer.context.add_pkey(FULL).unwrap();
    let listener = listen_in(&mut peer, PortSpace::Tcp, Some(index));
    busy(&mut peer, index, "0 queue pairs, 1 connections and listeners");
    peer.context.unlisten(listener).unwrap();
    let to = service(&peer);
    let parameters = ConnectionParameters::default().pkey_index(index);
    let id = peer.context.connect(peer.qp, to, &parameters).unwrap();
    busy(&mut peer, index, "0 queue pairs, 1 connections and listeners");
    peer.context.disconnect(id).unwrap();
    peer.context.remove_pkey(index).unwrap();
    peer.take_packets();
    let nowhere = ListenConfig::default().pkey_index(index);
    let refused = peer.context.listen(PortSpace::Tcp, to, &nowhere);
    assert!(matches!(refused, Err(Error::Invalid { .. })), "{refused:?}");
}

fn listen_in(peer: &mut Peer, space: PortSpace, pkey_index: Option<usize>) -> ferroce::Listener {
    let any = std::net::SocketAddr::from(([0, 0, 0, 0], PORT));
    peer.context.listen(space, any, &ListenConfig::default().pkey_index(pkey_index)).unwrap()
}

/// SQD → SQD, which e_states.rs tests for all attributes: later packets are in the new partition.
#[test]
fn a_drained_queue_pair_changes_its_partition() {
    let mut peer = Peer::new();
    let index = peer.context.add_pkey(FULL).unwrap();
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
    let update = |index| Transition::Update(QpUpdate::default().pkey_index(index));
    assert!(peer.context.modify_qp(peer.qp, update(9)).is_err());
    assert_eq!(peer.query().pkey, PKEY_DEFAULT);
    peer.modify(update(index));
    peer.modify(Transition::Resume);
    peer.post_write(1, b"bytes");
    assert_eq!(peer.expect(Opcode::RC_WRITE_ONLY, SQ).bth.pkey(), FULL);
    peer.inject(ack(SQ, 1).pkey(LIMITED.0));
    peer.expect_wc(1, WcStatus::Success);
}

/// The P_Key of a MAD of the engine, and the one in its REQ.
fn asked(peer: &mut Peer) -> (PKey, ferroce::wire::cm::Req) {
    let got = peer.expect(Opcode::UD_SEND_ONLY, 0);
    let message = ferroce::wire::cm::CmMessage::parse(&got.payload).unwrap();
    let CmBody::Req(req) = message.body else { panic!("{} is no REQ", message.body.name()) };
    (got.bth.pkey(), *req)
}

#[test]
fn connections_are_requested_in_a_partition() {
    for (by_parameter, pkey) in [(true, FULL), (true, LIMITED), (false, FULL)] {
        let mut peer = engine();
        let index = peer.context.add_pkey(pkey).unwrap();
        let named = by_parameter.then_some(index);
        if !by_parameter {
            peer.modify(Transition::Update(QpUpdate::default().pkey_index(index)));
        }
        let to = service(&peer);
        let parameters = ConnectionParameters::default().pkey_index(named);
        let id = peer.context.connect(peer.qp, to, &parameters).unwrap();
        let (mad_pkey, sent) = asked(&mut peer);
        assert_eq!((mad_pkey, sent.pkey()), (pkey, pkey));
        peer.inject(mad(CmBody::Rep(&rep(&sent))).pkey(FULL.0));
        let rtu = peer.expect(Opcode::UD_SEND_ONLY, 1);
        assert_eq!(rtu.bth.pkey(), pkey);
        expect_established(&mut peer, id);
        assert_eq!((peer.query().pkey_index, peer.query().pkey), (index, pkey));
    }
    // All others expect the default key.
    let (_, _, sent) = connecting(&ConnectionParameters::default());
    assert_eq!(sent.pkey(), PKEY_DEFAULT);
    let mut peer = engine();
    let to = service(&peer);
    let nowhere = ConnectionParameters::default().pkey_index(1);
    let refused = peer.context.connect(peer.qp, to, &nowhere);
    assert!(matches!(refused, Err(Error::Invalid { attribute: "pkey_index", .. })), "{refused:?}");
}

/// The request of `crate::g_exchange`, for a partition, in a packet of another one or the same.
fn req_in(peer: &Peer, packet: PKey, pkey: PKey) -> Script {
    let mut asked = req(peer);
    asked.set_pkey(pkey);
    mad(CmBody::Req(&asked)).pkey(packet.0)
}

#[test]
fn connections_are_accepted_in_the_requested_partition() {
    for (own, asked) in [(FULL, FULL), (FULL, LIMITED), (LIMITED, FULL)] {
        let mut peer = engine();
        listen(&mut peer, PortSpace::Tcp);
        let index = peer.context.add_pkey(own).unwrap();
        peer.inject(req_in(&peer, PKEY_DEFAULT, asked));
        let came = request(&mut peer);
        assert_eq!(came.pkey_index, index);
        let other = ConnectionParameters::default().pkey_index(0);
        let refused = peer.context.accept(came.id, peer.qp, &other);
        assert!(matches!(refused, Err(Error::Invalid { attribute: "pkey_index", .. })), "{refused:?}");
        peer.context.accept(came.id, peer.qp, &ConnectionParameters::default()).unwrap();
        assert_eq!(peer.query().pkey, own);
        assert_eq!(peer.expect(Opcode::UD_SEND_ONLY, 0).bth.pkey(), own);
    }
}

/// A partition that is not this port's: a REQ in its packets is dropped, a REQ that only contains it is rejected.
#[test]
fn requests_for_other_partitions() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    peer.context.add_pkey(LIMITED).unwrap();
    let source = peer.address.source;
    for pkey in [OTHER, LIMITED] {
        let frame = peer.frame(&req_in(&peer, pkey, pkey));
        peer.expect_foreign(frame, None, pkey);
        peer.inject(req_in(&peer, PKEY_DEFAULT, pkey));
        let (_, rej) = take!(&mut peer, Rej);
        assert_eq!(rej.reason(), RejectReason::INVALID_GID);
        peer.expect_event(Event::PkeyViolation { qp: None, pkey, source });
        expect_no_cm_event(&mut peer);
    }
    // A listener of one partition does not accept another.
    let mut peer = engine();
    let index = peer.context.add_pkey(FULL).unwrap();
    listen_in(&mut peer, PortSpace::Tcp, Some(index));
    peer.inject(req_in(&peer, PKEY_DEFAULT, PKEY_DEFAULT));
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::INVALID_SERVICE_ID);
    peer.inject(req_in(&peer, FULL, FULL));
    assert_eq!(request(&mut peer).pkey_index, index);
}

/// A listener with the limited key receives from full members, whatever other keys the port has.
#[test]
fn a_limited_listener_beside_the_full_key() {
    let limited_listener = |space, setup: &Setup| {
        let mut peer = Peer::with(*setup);
        peer.context.add_pkey(FULL).unwrap();
        let limited = peer.context.add_pkey(LIMITED).unwrap();
        listen_in(&mut peer, space, Some(limited));
        (peer, limited)
    };
    let setup = Setup { state: QpState::Init, ..Setup::default() };
    let (mut peer, limited) = limited_listener(PortSpace::Tcp, &setup);
    peer.inject(req_in(&peer, FULL, FULL));
    let came = request(&mut peer);
    assert_eq!(came.pkey_index, limited);
    peer.context.accept(came.id, peer.qp, &ConnectionParameters::default()).unwrap();
    assert_eq!((peer.query().pkey_index, peer.query().pkey), (limited, LIMITED));
    assert_eq!(peer.expect(Opcode::UD_SEND_ONLY, 0).bth.pkey(), LIMITED);
    // Limited members can't communicate, although the port's full key would accept this one.
    let (mut peer, _) = limited_listener(PortSpace::Tcp, &setup);
    peer.inject(req_in(&peer, FULL, LIMITED));
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::INVALID_SERVICE_ID);

    let (mut peer, limited) = limited_listener(PortSpace::Udp, &Setup::of(QpType::Ud));
    peer.inject(seek(&peer, FULL));
    assert_eq!(request(&mut peer).pkey_index, limited);
    let (mut peer, _) = limited_listener(PortSpace::Udp, &Setup::of(QpType::Ud));
    peer.inject(seek(&peer, LIMITED));
    assert_eq!(take!(&mut peer, SidrRep).1.status(), 1);
}

/// The condition is that the queue pair can receive from the requester, with any of the port's keys.
#[test]
fn a_datagram_service_under_a_limited_key() {
    for (seeker, is_heard) in [(FULL, true), (LIMITED, false)] {
        let mut peer = under(LIMITED, Setup::of(QpType::Ud));
        let full = peer.context.add_pkey(FULL).unwrap();
        listen(&mut peer, PortSpace::Udp);
        peer.inject(seek(&peer, seeker));
        let came = request(&mut peer);
        assert_eq!(came.pkey_index, full);
        let accepted = peer.context.accept_datagrams(came.id, peer.qp, &[]);
        assert_eq!(accepted.is_ok(), is_heard, "{seeker}: {accepted:?}");
        assert_eq!(peer.take_packets().len(), usize::from(is_heard));
    }
}

/// RESET clears all earlier attributes, including the key and its index.
#[test]
fn reset_clears_the_partition() {
    let mut peer = under(FULL, Setup::default());
    peer.modify(Transition::Reset);
    assert_eq!((peer.query().pkey_index, peer.query().pkey), (0, PKEY_DEFAULT));
}

/// The search of `crate::g_exchange`, for a partition.
fn seek(peer: &Peer, pkey: PKey) -> Script {
    let mut seek = ferroce::wire::cm::SidrReq::new(PEER_ID, sidr_req(peer).service_id(), pkey);
    seek.private_data = sidr_req(peer).private_data;
    mad(CmBody::SidrReq(&seek))
}

#[test]
fn datagram_services_have_partitions() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    listen(&mut peer, PortSpace::Udp);
    peer.inject(seek(&peer, FULL));
    assert_eq!(take!(&mut peer, SidrRep).1.status(), 1);
    peer.expect_event(Event::PkeyViolation { qp: None, pkey: FULL, source: peer.address.source });
    let index = peer.context.add_pkey(FULL).unwrap();
    peer.inject(seek(&peer, FULL));
    let id = request(&mut peer).id;
    // The queue pair of the default partition could not communicate.
    let default = peer.qp;
    let refused = peer.context.accept_datagrams(id, default, &[]);
    assert!(matches!(refused, Err(Error::Invalid { attribute: "pkey", .. })), "{refused:?}");
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(default));
    peer.modify(Transition::Update(QpUpdate::default().pkey_index(index)));
    peer.context.accept_datagrams(id, default, &[]).unwrap();
    assert_eq!(peer.expect(Opcode::UD_SEND_ONLY, 1).bth.pkey(), FULL);

    // And searching in one.
    let to = service(&peer);
    let parameters = ConnectionParameters::default().pkey_index(index);
    let id = peer.context.resolve(to, &parameters).unwrap();
    let got = peer.expect(Opcode::UD_SEND_ONLY, 2);
    let message = ferroce::wire::cm::CmMessage::parse(&got.payload).unwrap();
    let CmBody::SidrReq(sent) = message.body else { panic!("no SIDR_REQ") };
    assert_eq!((got.bth.pkey(), sent.pkey()), (FULL, FULL));
    let found = SidrRep::found(sent.request_id(), sent.service_id(), PEER_QPN, QKEY);
    peer.inject(mad(CmBody::SidrRep(&found)).pkey(LIMITED.0));
    let event = peer.context.next_cm_event();
    assert!(matches!(event, Some(CmEvent::Resolved { id: named, .. }) if named == id), "{event:?}");
}
