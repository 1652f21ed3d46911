//! G. The connection manager: its messages over QP1.

use std::time::Duration;

use ferroce::wire::cm::{
    CmBody, CmMessage, Drep, Dreq, IpCm, Mra, PathRecord, Rej, RejectReason, Rep, Req, SERVICE_ID_TCP,
    SERVICE_ID_UDP, SidrRep, SidrReq, Stage,
};
use ferroce::wire::{MAD_LEN, Opcode, PKEY_DEFAULT};
use ferroce::{
    CmEvent, ConnectionParameters, Counter, Event, Gid, ListenConfig, PathMtu, PortSpace, Psn, QpState,
    QpType, Qpn, WcStatus,
};

use crate::g_exchange::*;
use crate::packet::{Script, ack, packet};
use crate::peer::{PEER_QPN, Peer, QKEY, Setup, pattern};

/// The queue pairs get the parameters that both ends requested (with a real peer: `tools/tests/rxe`).
#[test]
fn both_ends_get_the_negotiated_parameters() {
    let parameters = ConnectionParameters::default().timeout(15).rnr_retry(3).retry_count(5);
    let (mut peer, id, sent) = connecting(&parameters);
    assert_eq!(sent.service_id(), SERVICE_ID_TCP + u64::from(PORT));
    assert_eq!((sent.qpn(), sent.path_mtu()), (peer.qpn, Some(PathMtu::Mtu4096)));
    assert_eq!((sent.responder_resources(), sent.initiator_depth()), (16, 16));
    assert_eq!((sent.retry_count(), sent.rnr_retry_count()), (5, 3));
    assert_eq!((sent.remote_cm_timeout(), sent.local_cm_timeout(), sent.max_cm_retries()), (20, 20, 15));
    let path = sent.primary_path;
    assert_eq!((path.local_gid(), path.remote_gid()), (peer.address.destination, peer.address.source));
    assert_eq!((path.ack_timeout(), path.hop_limit()), (15, 64));
    let named = IpCm::parse(&sent.private_data).unwrap();
    assert_eq!((named.source, named.destination), (path.local_gid().to_ip(), path.remote_gid().to_ip()));
    peer.inject(mad(CmBody::Rep(&rep(&sent))));
    take!(&mut peer, Rtu);
    expect_established(&mut peer, id);
    let query = peer.query();
    assert_eq!((query.dest_qpn, query.path_mtu), (Some(PEER_QPN), Some(PathMtu::Mtu4096)));
    assert_eq!((query.rq_psn, query.sq_psn), (sent.starting_psn(), Psn::new(PEER_SQ)));
    let send = query.send.unwrap();
    assert_eq!((send.timeout, send.retry_count, send.rnr_retry), (15, 5, 4));
    assert_eq!((send.max_rd_atomic, query.max_dest_rd_atomic), (2, 3));

    let (peer, _, rep) = accepted();
    assert_eq!(rep.qpn(), peer.qpn);
    assert_eq!((rep.responder_resources(), rep.initiator_depth(), rep.rnr_retry_count()), (4, 8, 7));
    let query = peer.query();
    assert_eq!((query.dest_qpn, query.path_mtu), (Some(PEER_QPN), Some(PathMtu::Mtu512)));
    assert_eq!((query.rq_psn, query.sq_psn), (rep.starting_psn(), Psn::new(PEER_RQ)));
    let send = query.send.unwrap();
    assert_eq!((send.timeout, send.retry_count, send.rnr_retry), (14, 6, 5));
    assert_eq!((send.max_rd_atomic, query.max_dest_rd_atomic), (8, 4));
}

/// The requester's traffic class applies to both ends, unless the other accepts with its own; ECN belongs to congestion
/// control.
#[test]
fn a_connection_has_the_traffic_class_of_its_request() {
    let class = |peer: &Peer| peer.query().address.unwrap().traffic_class;
    let (mut peer, id, sent) = connecting(&ConnectionParameters::default().traffic_class(0x68));
    assert_eq!(sent.primary_path.traffic_class(), 0x68);
    peer.inject(mad(CmBody::Rep(&rep(&sent))));
    take!(&mut peer, Rtu);
    expect_established(&mut peer, id);
    assert_eq!(class(&peer), 0x68);

    for (own, expected) in [(None, 0x68), (Some(0x20), 0x20), (Some(0), 0)] {
        let mut peer = engine();
        listen(&mut peer, PortSpace::Tcp);
        let mut asked = req(&peer);
        asked.primary_path.set_traffic_class(0x6b);
        peer.inject(mad(CmBody::Req(&asked)));
        let id = request(&mut peer).id;
        let parameters = ConnectionParameters::default().traffic_class(own);
        peer.context.accept(id, peer.qp, &parameters).unwrap();
        let (_, rep) = take!(&mut peer, Rep);
        peer.inject(mad(CmBody::Rtu(&rtu(&rep))));
        expect_established(&mut peer, id);
        assert_eq!(class(&peer), expected);
    }

    let mut peer = engine();
    let (qp, to) = (peer.qp, service(&peer));
    let refused =
        peer.context.connect(qp, to, &ConnectionParameters::default().traffic_class(0x6a)).unwrap_err();
    let expected =
        "traffic_class = 0x6a: DSCP in the upper six bits and 0 below: congestion control sets ECN";
    assert_eq!(refused.to_string(), expected);
}

#[test]
fn case_110_messages_again() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let asked = mad(CmBody::Req(&req(&peer)));
    peer.inject(asked.clone());
    let id = request(&mut peer).id;
    // The application delays its answer, and the peer is notified.
    peer.inject(asked.clone());
    let (_, mra) = take!(&mut peer, Mra);
    assert_eq!((mra.remote_comm_id(), mra.stage()), (PEER_ID, Some(Stage::Req)));
    expect_no_cm_event(&mut peer);
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let first = take_mad(&mut peer);
    peer.inject(asked);
    assert_eq!(take_mad(&mut peer), first, "the same REP");
    let CmBody::Rep(answer) = CmMessage::parse(&first).unwrap().body else { panic!("no REP") };
    peer.inject_all([mad(CmBody::Rtu(&rtu(answer))), mad(CmBody::Rtu(&rtu(answer)))]);
    expect_established(&mut peer, id);
    expect_no_cm_event(&mut peer);
    peer.expect_counted(Counter::CmRxDuplicates, 3);

    let (mut peer, id, sent) = connecting(&ConnectionParameters::default());
    peer.inject(mad(CmBody::Rep(&rep(&sent))));
    let first = take_mad(&mut peer);
    expect_established(&mut peer, id);
    peer.inject(mad(CmBody::Rep(&rep(&sent))));
    assert_eq!(take_mad(&mut peer), first, "the same RTU");
    expect_no_cm_event(&mut peer);
}

#[test]
fn case_111_nobody_listens_or_the_queue_pair_is_taken() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let mut asked = req(&peer);
    for service_id in [SERVICE_ID_TCP + 1, SERVICE_ID_UDP + u64::from(PORT), u64::from(PORT), 0] {
        let path = asked.primary_path;
        let private_data = asked.private_data;
        asked = Req::new(PEER_ID, service_id, PEER_QPN, Psn::new(1), PathMtu::Mtu512, path);
        asked.private_data = private_data;
        peer.inject(mad(CmBody::Req(&asked)));
        let (transaction, rej) = take!(&mut peer, Rej);
        assert_eq!(
            (transaction, rej.remote_comm_id(), rej.stage()),
            (TRANSACTION, PEER_ID, Some(Stage::Req))
        );
        assert_eq!(rej.reason(), RejectReason::INVALID_SERVICE_ID);
    }
    expect_no_cm_event(&mut peer);

    let (mut peer, ..) = accepted();
    let path = req(&peer).primary_path;
    let mut again =
        Req::new(PEER_ID + 1, SERVICE_ID_TCP + u64::from(PORT), PEER_QPN, Psn::new(1), PathMtu::Mtu512, path);
    again.private_data = req(&peer).private_data;
    peer.inject(mad(CmBody::Req(&again)));
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::STALE_CONNECTION);
    peer.expect_state(QpState::Rts);
    peer.expect_counted(Counter::CmTxRejects, 1);
}

#[test]
fn case_112_silent_peer() {
    let parameters = ConnectionParameters::default().cm_timeout(10).cm_retries(3);
    // 4.096 µs · 2^10, and a tick of the timers.
    let time = Duration::from_nanos((4096 << 10) + 2048);
    let (mut peer, id, _) = connecting(&parameters);
    for _ in 0..3 {
        peer.expect_nothing();
        peer.advance(time);
        take!(&mut peer, Req);
    }
    peer.advance(time);
    let (_, rej) = take!(&mut peer, Rej);
    assert_eq!(rej.reason(), RejectReason::TIMEOUT);
    expect_silence(&mut peer, id);
    peer.expect_state(QpState::Init);
    peer.expect_counted(Counter::CmTxRetries, 3);
    // A peer that reports that it needs longer gets longer.
    let (to, qp) = (service(&peer), peer.qp);
    let id = peer.context.connect(qp, to, &parameters).unwrap();
    peer.poll();
    let (_, sent) = take!(&mut peer, Req);
    peer.inject(mad(CmBody::Mra(&Mra::new(PEER_ID, sent.local_comm_id(), Stage::Req, 14))));
    // 4.096 µs · 2^14 and the previous time.
    peer.advance(16 * time);
    peer.expect_nothing();
    peer.advance(time);
    take!(&mut peer, Req);
    peer.context.disconnect(id).unwrap();
    peer.poll();
    take!(&mut peer, Rej);
    // Nothing is left: there is room for far more attempts than possible connections.
    let brief = parameters.cm_retries(0);
    for _ in 0..300 {
        let id = peer.context.connect(qp, to, &brief).unwrap();
        peer.advance(time);
        expect_silence(&mut peer, id);
        assert_eq!(peer.take_packets().len(), 2, "REQ and REJ");
    }
    assert_eq!(peer.context.next_timeout(), None);

    // An accepted peer that never confirms.
    listen(&mut peer, PortSpace::Tcp);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let id = request(&mut peer).id;
    peer.context.accept(id, qp, &parameters).unwrap();
    peer.poll();
    take!(&mut peer, Rep);
    for _ in 0..3 {
        peer.advance(time);
        take!(&mut peer, Rep);
    }
    peer.advance(time);
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::TIMEOUT);
    expect_silence(&mut peer, id);
    peer.expect_state(QpState::Error);

    // An application that does not answer.
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    peer.advance(Duration::from_secs(121));
    expect_no_cm_event(&mut peer);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let id = request(&mut peer).id;
    peer.advance(Duration::from_secs(121));
    expect_silence(&mut peer, id);
    assert!(peer.context.accept(id, peer.qp, &parameters).is_err());
}

#[test]
fn case_113_data_before_rtu() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    peer.post_recv(1, 8);
    let (id, rep) = accept(&mut peer);
    peer.expect_state(QpState::Rtr);
    let first = rep.starting_psn().value();
    peer.inject(packet(Opcode::RC_SEND_ONLY, first).payload(b"early").ack_req());
    peer.expect_ack(first, 1);
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_event(Event::CommEst(peer.qp));
    expect_established(&mut peer, id);
    peer.inject(mad(CmBody::Rtu(&rtu(&rep))));
    expect_no_cm_event(&mut peer);
    peer.post_send(2, b"answer");
    peer.expect(Opcode::RC_SEND_ONLY, PEER_RQ);
    peer.inject(ack(PEER_RQ, 1));
    peer.expect_wc(2, WcStatus::Success);
}

#[test]
fn case_114_disconnect() {
    let (mut peer, id, rep) = accepted();
    peer.post_recv(1, 8);
    let dreq = Dreq::new(PEER_ID, rep.local_comm_id(), peer.qpn);
    peer.inject(mad(CmBody::Dreq(&dreq)));
    let (transaction, drep) = take!(&mut peer, Drep);
    assert_eq!((transaction, drep.remote_comm_id()), (TRANSACTION, PEER_ID));
    expect(&mut peer, CmEvent::Disconnected { id });
    peer.expect_state(QpState::Error);
    peer.expect_wc(1, WcStatus::WrFlushErr);
    // Until late packets are gone the DREP can be repeated, and the IDs and numbers of neither end can be reused.
    peer.inject(mad(CmBody::Dreq(&dreq)));
    take!(&mut peer, Drep);
    let path = req(&peer).primary_path;
    let mut anew =
        Req::new(9, SERVICE_ID_TCP + u64::from(PORT), PEER_QPN, Psn::new(1), PathMtu::Mtu512, path);
    anew.private_data = req(&peer).private_data;
    peer.inject(mad(CmBody::Req(&anew)));
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::STALE_CONNECTION);
    // Twice the ACK timeout of the REQ, 67 ms.
    peer.advance(Duration::from_millis(136));
    expect(&mut peer, CmEvent::TimewaitExit { id });
    peer.inject(mad(CmBody::Req(&anew)));
    assert_ne!(request(&mut peer).id, id);

    // From this end.
    let (mut peer, id, rep) = accepted();
    peer.context.disconnect(id).unwrap();
    peer.expect_state(QpState::Error);
    peer.poll();
    let (_, dreq) = take!(&mut peer, Dreq);
    let named = (dreq.local_comm_id(), dreq.remote_comm_id(), dreq.remote_qpn());
    assert_eq!(named, (rep.local_comm_id(), PEER_ID, PEER_QPN));
    peer.inject(mad(CmBody::Drep(&Drep::new(PEER_ID, rep.local_comm_id()))));
    expect(&mut peer, CmEvent::Disconnected { id });

    // By its queue pair.
    let (mut peer, ..) = accepted();
    let qp = peer.qp;
    peer.context.destroy_qp(qp).unwrap();
    peer.poll();
    take!(&mut peer, Dreq);
}

#[test]
fn case_115_messages_of_others() {
    let (mut peer, _, rep) = accepted();
    let (ours, qpn) = (rep.local_comm_id(), peer.qpn);
    let strangers = [
        mad(CmBody::Dreq(&Dreq::new(PEER_ID ^ 1, ours, qpn))),
        mad(CmBody::Dreq(&Dreq::new(PEER_ID, ours, PEER_QPN))),
        mad(CmBody::Drep(&Drep::new(PEER_ID, ours))),
        mad(CmBody::Rej(&Rej::new(PEER_ID ^ 1, ours, Stage::Rep, RejectReason::CONSUMER))),
        mad(CmBody::Rej(&Rej::new(PEER_ID, ours, Stage::Other, RejectReason::TIMEOUT))),
    ];
    for message in strangers {
        peer.expect_refused(message, Counter::CmRxUnknown);
    }
    // A connection that has ended and was removed has ended for its peer too.
    peer.inject(mad(CmBody::Dreq(&Dreq::new(PEER_ID, ours ^ 1, qpn))));
    let (_, drep) = take!(&mut peer, Drep);
    assert_eq!((drep.local_comm_id(), drep.remote_comm_id()), (ours ^ 1, PEER_ID));
    // The correct IDs, from another address.
    let home = peer.address;
    peer.address.source = Gid::from("192.0.2.77".parse::<std::net::IpAddr>().unwrap());
    for message in [
        mad(CmBody::Dreq(&Dreq::new(PEER_ID, ours, qpn))),
        mad(CmBody::Rej(&Rej::new(PEER_ID, ours, Stage::Other, RejectReason::TIMEOUT))),
    ] {
        peer.expect_refused(message, Counter::CmRxUnknown);
    }
    peer.address = home;
    peer.expect_state(QpState::Rts);
    expect_no_cm_event(&mut peer);

    // A pending request can be rejected by its peer only.
    let (mut peer, id, sent) = connecting(&ConnectionParameters::default());
    let rej = Rej::new(0, sent.local_comm_id(), Stage::Req, RejectReason::CONSUMER);
    let home = peer.address;
    peer.address.source = Gid::from("192.0.2.77".parse::<std::net::IpAddr>().unwrap());
    peer.expect_refused(mad(CmBody::Rej(&rej)), Counter::CmRxUnknown);
    peer.address = home;
    peer.inject(mad(CmBody::Rej(&rej)));
    expect_rejected(&mut peer, id, RejectReason::CONSUMER);
    peer.expect_state(QpState::Init);
}

#[test]
fn case_116_addresses_that_are_none() {
    type Change = fn(&mut Req);
    let changes: [(Change, RejectReason); 7] = [
        (|req| req.private_data[0] = 1, RejectReason::CONSUMER),
        (|req| req.private_data[1] = 5 << 4, RejectReason::CONSUMER),
        (|req| req.private_data[1] = 6 << 4, RejectReason::INVALID_GID),
        (|req| req.private_data[19] ^= 1, RejectReason::INVALID_GID),
        (|req| req.private_data[35] ^= 1, RejectReason::INVALID_GID),
        (
            |req| req.primary_path = PathRecord::new(Gid([1; 16]), req.primary_path.remote_gid()),
            RejectReason::INVALID_GID,
        ),
        (
            |req| req.primary_path = PathRecord::new(req.primary_path.local_gid(), Gid([1; 16])),
            RejectReason::INVALID_GID,
        ),
    ];
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    for (change, reason) in changes {
        let mut asked = req(&peer);
        change(&mut asked);
        peer.inject(mad(CmBody::Req(&asked)));
        assert_eq!(take!(&mut peer, Rej).1.reason(), reason);
    }
    // More than the interface supports: the answer has the supported value.
    let mut small = Peer::with(Setup { state: QpState::Init, ..Setup::default() });
    listen(&mut small, PortSpace::Tcp);
    let mut asked = req(&small);
    asked.set_transport(ferroce::wire::cm::TransportType::Uc);
    small.inject(mad(CmBody::Req(&asked)));
    assert_eq!(request(&mut small).qp_type, QpType::Uc);
    expect_no_cm_event(&mut peer);
}

#[test]
fn case_117_private_data_and_services() {
    let hello = pattern(56);
    let parameters = ConnectionParameters::default().private_data(&hello);
    let (mut peer, id, sent) = connecting(&parameters);
    assert_eq!(sent.private_data[IpCm::LEN..], hello[..]);
    let mut accepted = rep(&sent);
    accepted.private_data.copy_from_slice(&pattern(196));
    peer.inject(mad(CmBody::Rep(&accepted)));
    take!(&mut peer, Rtu);
    match peer.context.next_cm_event() {
        Some(CmEvent::Established { id: named, private_data }) => {
            assert_eq!((named, &private_data[..]), (id, &pattern(196)[..]));
        }
        other => panic!("{other:?}"),
    }
    let long = pattern(57);
    let parameters = ConnectionParameters::default().private_data(&long);
    let to = service(&peer);
    let refused = peer.context.connect(peer.qp, to, &parameters).unwrap_err().to_string();
    assert_eq!(refused, "private_data = 57 bytes: at most 56 bytes");

    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let mut asked = req(&peer);
    asked.private_data[IpCm::LEN..].copy_from_slice(&hello);
    peer.inject(mad(CmBody::Req(&asked)));
    let came = request(&mut peer);
    assert_eq!(came.private_data[..], hello[..]);
    assert_eq!((came.peer.port(), came.local.port(), came.path_mtu), (5000, PORT, PathMtu::Mtu512));
    let answer = pattern(148);
    peer.context.reject(came.id, &answer).unwrap();
    peer.poll();
    let (_, rej) = take!(&mut peer, Rej);
    assert_eq!((rej.reason(), &rej.private_data[..]), (RejectReason::CONSUMER, &answer[..]));

    // A datagram service here.
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    listen(&mut peer, PortSpace::Udp);
    let service_id = SERVICE_ID_UDP + u64::from(PORT);
    let mut seek = SidrReq::new(PEER_ID, service_id, PKEY_DEFAULT);
    seek.private_data[..IpCm::LEN].copy_from_slice(&addresses(&peer));
    seek.private_data[IpCm::LEN..].copy_from_slice(&pattern(180));
    peer.inject(mad(CmBody::SidrReq(&seek)));
    let came = request(&mut peer);
    assert_eq!((came.qp_type, &came.private_data[..]), (QpType::Ud, &pattern(180)[..]));
    let (qp, qpn) = (peer.qp, peer.qpn);
    peer.context.accept_datagrams(came.id, qp, &pattern(136)).unwrap();
    peer.poll();
    let first = take_mad(&mut peer);
    let CmBody::SidrRep(found) = CmMessage::parse(&first).unwrap().body else { panic!("no SIDR_REP") };
    assert_eq!((found.status(), found.qpn(), found.qkey()), (0, qpn, QKEY));
    assert_eq!((found.request_id(), found.service_id()), (PEER_ID, service_id));
    assert_eq!(found.private_data[..], pattern(136)[..]);
    // A requester that has not received the answer sends it again.
    peer.inject(mad(CmBody::SidrReq(&seek)));
    let again = request(&mut peer);
    assert_ne!(again.id, came.id);
    peer.context.reject(again.id, &[]).unwrap();
    peer.poll();
    assert_eq!(take!(&mut peer, SidrRep).1.status(), 2);
    let nobody = SidrReq::new(PEER_ID + 1, service_id + 1, PKEY_DEFAULT);
    peer.inject(mad(CmBody::SidrReq(&nobody)));
    assert_eq!(take!(&mut peer, SidrRep).1.status(), 1);

    // One at the peer's.
    let to = service(&peer);
    let id = peer.context.resolve(to, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let (_, seek) = take!(&mut peer, SidrReq);
    assert_eq!(seek.service_id(), service_id);
    let mut found = SidrRep::found(seek.request_id(), service_id, PEER_QPN, 0x0123_4567);
    found.private_data.copy_from_slice(&pattern(136));
    peer.inject(mad(CmBody::SidrRep(&found)));
    match peer.context.next_cm_event() {
        Some(CmEvent::Resolved { id: named, address, qpn, qkey, private_data }) => {
            assert_eq!((named, qpn, qkey), (id, PEER_QPN, 0x0123_4567));
            assert_eq!((address.gid, &private_data[..]), (peer.address.source, &pattern(136)[..]));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn case_118_payloads_that_are_no_mad() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let mut good = [0; MAD_LEN];
    CmMessage { transaction_id: 1, body: CmBody::Req(&req(&peer)) }.emit(&mut good);
    for length in [0, 24, 252, 255] {
        peer.expect_refused(to_gsi(&good[..length]), Counter::RxMadErrors);
    }
    peer.expect_refused(to_gsi(&[&good[..], &[0; 4]].concat()), Counter::RxMadErrors);
    // Base version, class, class version, method, attribute.
    for (at, value) in [(0, 2), (1, 0x03), (2, 1), (3, 0x81), (17, 0x0f), (17, 0x1b)] {
        let mut bad = good;
        bad[at] = value;
        peer.expect_refused(to_gsi(&bad), Counter::RxMadErrors);
    }
    let from = |qkey, qpn| packet(Opcode::UD_SEND_ONLY, 0).dest_qpn(Qpn::GSI).deth(qkey, qpn).payload(&good);
    peer.expect_refused(from(QKEY, Qpn::GSI), Counter::RxQkeyMismatch);
    peer.expect_refused(from(QKEY_GSI, PEER_QPN), Counter::RxInvalidRequest);
    let other = packet(Opcode::RC_SEND_ONLY, 0).dest_qpn(Qpn::GSI).payload(&good);
    peer.expect_refused(other, Counter::RxWrongService);
    expect_no_cm_event(&mut peer);
}

#[test]
fn case_119_flood_of_requests() {
    let (mut peer, id, rep) = accepted();
    let mut asked = req(&peer);
    let mut random = 0x9e37_79b9_u32;
    for _ in 0..100_000 / 50 {
        let burst: Vec<Script> = (0..50)
            .map(|_| {
                random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let private_data = asked.private_data;
                let path = asked.primary_path;
                let service_id = SERVICE_ID_TCP + u64::from(PORT);
                let qpn = Qpn::new(random | 2);
                asked = Req::new(random, service_id, qpn, Psn::new(1), PathMtu::Mtu512, path);
                asked.set_local_cm_timeout(20);
                asked.private_data = private_data;
                mad(CmBody::Req(&asked))
            })
            .collect();
        peer.inject_all(burst);
        peer.take_packets();
    }
    let waiting = std::iter::from_fn(|| peer.context.next_cm_event()).count();
    assert_eq!(waiting, ListenConfig::default().per_source as usize);
    let rejects = peer.context.counters().value(Counter::CmTxRejects);
    println!("case 119: 100000 requests, {waiting} of them wait, {rejects} were refused");
    // The existing connection continues.
    peer.post_recv(1, 8);
    let first = rep.starting_psn().value();
    peer.inject(packet(Opcode::RC_SEND_ONLY, first).payload(b"alive").ack_req());
    peer.expect_ack(first, 1);
    peer.expect_wc(1, WcStatus::Success);
    peer.context.disconnect(id).unwrap();
    peer.poll();
    take!(&mut peer, Dreq);
}

/// UC has no RNR and no READs; its queue pairs can be connected too.
#[test]
fn unreliable_connections() {
    let mut peer = engine_of(QpType::Uc);
    let to = service(&peer);
    let id = peer.context.connect(peer.qp, to, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let (_, sent) = take!(&mut peer, Req);
    assert_eq!(sent.transport(), Some(ferroce::wire::cm::TransportType::Uc));
    peer.inject(mad(CmBody::Rep(&rep(&sent))));
    take!(&mut peer, Rtu);
    expect_established(&mut peer, id);
    assert_eq!((peer.query().dest_qpn, peer.query().sq_psn), (Some(PEER_QPN), Psn::new(PEER_SQ)));
}

/// The queue pair of an ended connection belongs to the application, and soon to a new connection.
#[test]
fn an_old_connection_does_not_end_the_next_one() {
    let (mut peer, old, rep) = accepted();
    peer.context.disconnect(old).unwrap();
    peer.poll();
    take!(&mut peer, Dreq);
    peer.modify(ferroce::Transition::Reset);
    peer.modify(ferroce::Transition::Init { access: ferroce::Access::NONE });
    let to = service(&peer);
    let id = peer.context.connect(peer.qp, to, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let (_, sent) = take!(&mut peer, Req);
    let other = Qpn::new(0x78);
    peer.inject(mad(CmBody::Rep(&Rep::new(PEER_ID + 1, sent.local_comm_id(), other, Psn::new(PEER_SQ)))));
    take!(&mut peer, Rtu);
    expect_established(&mut peer, id);
    // The old one's peer ends it too.
    let qpn = peer.qpn;
    peer.inject(mad(CmBody::Dreq(&Dreq::new(PEER_ID, rep.local_comm_id(), qpn))));
    take!(&mut peer, Drep);
    expect(&mut peer, CmEvent::Disconnected { id: old });
    peer.expect_state(QpState::Rts);
    let qp = peer.qp;
    peer.context.destroy_qp(qp).unwrap();
    peer.poll();
    assert_eq!(take!(&mut peer, Dreq).1.remote_qpn(), other);
}

#[test]
fn a_queue_pair_has_one_connection() {
    let (mut peer, id, sent) = connecting(&ConnectionParameters::default());
    let to = service(&peer);
    let refused = peer.context.connect(peer.qp, to, &ConnectionParameters::default());
    assert!(matches!(refused, Err(ferroce::Error::Busy { kind: "QP", .. })), "{refused:?}");
    // Without its queue pair the attempt has ended.
    let qp = peer.qp;
    peer.context.destroy_qp(qp).unwrap();
    peer.poll();
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::TIMEOUT);
    peer.context.poll(peer.now).unwrap();
    assert!(peer.context.disconnect(id).is_err());
    let answer = rep(&sent);
    let before = peer.context.counters().value(Counter::CmRxUnknown);
    peer.arrive([mad(CmBody::Rep(&answer))]);
    peer.poll();
    assert_eq!(peer.context.counters().value(Counter::CmRxUnknown), before + 1);
    expect_no_cm_event(&mut peer);
}

/// Answered searches used to occupy the room of connections for 17 s each.
#[test]
fn answered_searches_are_removed() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    listen(&mut peer, PortSpace::Udp);
    let qp = peer.qp;
    for n in 0..300 {
        let mut seek = SidrReq::new(PEER_ID + n, SERVICE_ID_UDP + u64::from(PORT), PKEY_DEFAULT);
        seek.private_data[..IpCm::LEN].copy_from_slice(&addresses(&peer));
        peer.inject(mad(CmBody::SidrReq(&seek)));
        let id = request(&mut peer).id;
        peer.context.accept_datagrams(id, qp, &[]).unwrap();
        peer.poll();
        take!(&mut peer, SidrRep);
    }
}
