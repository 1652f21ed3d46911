//! The connection manager: how exchanges end, which listener a request is for, and that a connection keeps its path.

use std::time::Duration;

use ferroce::wire::cm::{Apr, CmBody, CmMessage, Drep, Dreq, Rej, RejectReason, Req, SERVICE_ID_TCP, Stage};
use ferroce::wire::{MAD_LEN, Opcode};
use ferroce::{
    CmEvent, ConnectionParameters, Counter, Gid, ListenConfig, PathMtu, PortSpace, Psn, QpState, Qpn,
    WcStatus,
};

use crate::g_exchange::*;
use crate::packet::{Script, ack, packet};
use crate::peer::{PEER_QPN, Peer};

#[test]
fn case_140_an_alternate_path_is_not_loaded() {
    let (mut peer, id, rep) = accepted();
    let (ours, qpn) = (rep.local_comm_id(), peer.qpn);
    let before = peer.query();
    // Nothing is kept of a LAP: one that is repeated is answered again.
    for _ in 0..2 {
        peer.inject(lap(PEER_ID, ours, qpn));
        let (transaction, apr) = take!(&mut peer, Apr);
        assert_eq!((transaction, apr.local_comm_id(), apr.remote_comm_id()), (TRANSACTION, ours, PEER_ID));
        assert_eq!(apr.status(), 2, "alternate paths are not supported");
    }
    // Of another exchange, or of none. This end sends no LAP, so an APR answers nothing.
    let loaded = mad(CmBody::Apr(&Apr::new(PEER_ID, ours, 0)));
    for message in [lap(PEER_ID ^ 1, ours, qpn), lap(PEER_ID, ours ^ 1, qpn), loaded] {
        peer.expect_refused(message, Counter::CmRxUnknown);
    }
    // The right ids, from another address.
    let home = peer.address;
    peer.address.source = Gid::from("192.0.2.77".parse::<std::net::IpAddr>().unwrap());
    peer.expect_refused(lap(PEER_ID, ours, qpn), Counter::CmRxUnknown);
    peer.address = home;
    // The connection is as it was, and goes on.
    expect_no_cm_event(&mut peer);
    assert_eq!(peer.query(), before);
    peer.post_send(1, b"on the same path");
    peer.expect(Opcode::RC_SEND_ONLY, PEER_RQ);
    peer.inject(ack(PEER_RQ, 1));
    peer.expect_wc(1, WcStatus::Success);
    peer.context.disconnect(id).unwrap();
    peer.poll();
    take!(&mut peer, Dreq);
}

/// The peer's LAP, byte by byte as in docs/protocol.md §2. It begins with both ids, as a DREP does. The alternate path
/// is one that could be loaded: from the peer's second address to the engine.
fn lap(theirs: u32, ours: u32, qpn: Qpn) -> Script {
    const BODY: usize = 24;
    const PATH: usize = BODY + 20;
    let mut bytes = [0; MAD_LEN];
    CmMessage { transaction_id: TRANSACTION, body: CmBody::Drep(&Drep::new(theirs, ours)) }.emit(&mut bytes);
    bytes[16..18].copy_from_slice(&0x19_u16.to_be_bytes());
    bytes[BODY + 12..BODY + 15].copy_from_slice(&qpn.value().to_be_bytes()[1..]);
    bytes[BODY + 15] = 20 << 3;
    for (at, address) in [(PATH + 4, [192, 0, 2, 7]), (PATH + 20, [192, 0, 2, 2])] {
        bytes[at..at + 16].copy_from_slice(&Gid::from_ipv4(address.into()).0);
    }
    to_gsi(&bytes)
}

/// The ACK timeout of a REQ may be anything up to 2.4 hours.
#[test]
fn timewait_ends_in_seconds() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let mut asked = req(&peer);
    asked.primary_path.set_ack_timeout(31);
    peer.inject(mad(CmBody::Req(&asked)));
    let id = request(&mut peer).id;
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let (_, rep) = take!(&mut peer, Rep);
    let dreq = Dreq::new(PEER_ID, rep.local_comm_id(), peer.qpn);
    peer.inject_all([mad(CmBody::Rtu(&rtu(&rep))), mad(CmBody::Dreq(&dreq))]);
    take!(&mut peer, Drep);
    match peer.context.next_cm_event() {
        Some(CmEvent::Established { id: named, .. }) => assert_eq!(named, id),
        other => panic!("{other:?}"),
    }
    expect(&mut peer, CmEvent::Disconnected { id });
    peer.advance(Duration::from_millis(2200));
    expect(&mut peer, CmEvent::TimewaitExit { id });
    // A peer that has not received the DREP gets it again.
    peer.inject(mad(CmBody::Dreq(&dreq)));
    take!(&mut peer, Drep);
}

/// A requester that gives up before it knows the local ID uses its own.
#[test]
fn a_request_can_be_withdrawn() {
    let give_up = mad(CmBody::Rej(&Rej::new(PEER_ID, 0, Stage::Other, RejectReason::TIMEOUT)));
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    peer.inject_all([mad(CmBody::Req(&req(&peer))), give_up.clone()]);
    expect_no_cm_event(&mut peer);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let id = request(&mut peer).id;
    peer.inject(give_up.clone());
    expect_rejected(&mut peer, id, RejectReason::TIMEOUT);
    assert!(peer.context.accept(id, peer.qp, &ConnectionParameters::default()).is_err());
    let (id, _) = accept(&mut peer);
    peer.inject(give_up);
    expect_rejected(&mut peer, id, RejectReason::TIMEOUT);
    peer.expect_state(QpState::Error);
}

/// A request is kept as long as its sender waits, and longer when it is asked to wait.
#[test]
fn a_request_is_kept_as_long_as_its_peer_waits() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let mut asked = req(&peer);
    asked.set_local_cm_timeout(4);
    asked.set_remote_cm_timeout(14);
    asked.set_max_cm_retries(3);
    // 4 times 67 ms.
    peer.inject(mad(CmBody::Req(&asked)));
    let id = request(&mut peer).id;
    peer.advance(Duration::from_millis(200));
    peer.inject(mad(CmBody::Req(&asked)));
    take!(&mut peer, Mra);
    peer.advance(Duration::from_secs(8));
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    peer.poll();
    take!(&mut peer, Rep);
}

/// A restarted peer reuses its queue pair numbers.
#[test]
fn a_dead_connection_is_replaced() {
    let (mut peer, id, _) = accepted();
    let mut anew = Req::new(
        9,
        SERVICE_ID_TCP + u64::from(PORT),
        PEER_QPN,
        Psn::new(1),
        PathMtu::Mtu512,
        req(&peer).primary_path,
    );
    anew.private_data = req(&peer).private_data;
    peer.modify(ferroce::Transition::Error);
    peer.inject(mad(CmBody::Req(&anew)));
    let kinds: Vec<&str> =
        peer.take_packets().iter().map(|got| CmMessage::parse(&got.payload).unwrap().body.name()).collect();
    assert_eq!(kinds, ["DREQ", "REJ"]);
    peer.advance(Duration::from_secs(60));
    peer.take_packets();
    expect(&mut peer, CmEvent::Disconnected { id });
    expect(&mut peer, CmEvent::TimewaitExit { id });
    peer.inject(mad(CmBody::Req(&anew)));
    assert_ne!(request(&mut peer).id, id);
}

/// An unspecified address is not answered, and requests from it are invalid.
#[test]
fn requests_from_no_host() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    for source in ["239.1.1.1", "255.255.255.255", "0.0.0.0"] {
        peer.address.source = Gid::from(source.parse::<std::net::IpAddr>().unwrap());
        let asked = mad(CmBody::Req(&req(&peer)));
        peer.expect_refused(asked, Counter::RxWrongAddress);
    }
    expect_no_cm_event(&mut peer);
}

#[test]
fn requests_reach_their_listener() {
    let mut peer = engine();
    let any = listen(&mut peer, PortSpace::Tcp);
    let config = ListenConfig::default().backlog(1).per_source(1);
    let again = |peer: &mut Peer, address: &str| {
        peer.context.listen(PortSpace::Tcp, address.parse().unwrap(), &config)
    };
    assert!(again(&mut peer, "[::]:7471").is_err(), "the same as 0.0.0.0");
    let own = again(&mut peer, "[::ffff:192.0.2.2]:7471").unwrap();
    assert!(again(&mut peer, "192.0.2.2:7471").is_err());
    assert!(again(&mut peer, "192.0.2.3:7471").unwrap_err().to_string().contains("an address of 'script0'"));
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let came = request(&mut peer);
    assert_eq!(came.listener, own);
    // Its backlog is full.
    let path = req(&peer).primary_path;
    let mut more =
        Req::new(9, SERVICE_ID_TCP + u64::from(PORT), Qpn::new(0x99), Psn::new(1), PathMtu::Mtu512, path);
    more.private_data = req(&peer).private_data;
    peer.inject(mad(CmBody::Req(&more)));
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::NO_RESOURCES);
    // The pending requests end with the listener.
    peer.context.unlisten(own).unwrap();
    peer.poll();
    assert_eq!(take!(&mut peer, Rej).1.reason(), RejectReason::CONSUMER);
    peer.inject(mad(CmBody::Req(&more)));
    assert_eq!(request(&mut peer).listener, any);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    peer.context.unlisten(any).unwrap();
    assert!(peer.context.unlisten(any).is_err());
    let event = peer.context.next_cm_event();
    assert_eq!(event, None, "a request that is taken back");
    peer.poll();
    assert_eq!(peer.take_packets().len(), 2);
}

/// A peer that is notified of the end before its ACK considers delivered messages lost.
#[test]
fn acks_are_sent_before_the_end() {
    let (mut peer, _, rep) = accepted();
    peer.post_recv(1, 8);
    let first = rep.starting_psn().value();
    peer.arrive([packet(Opcode::RC_SEND_ONLY, first).payload(b"bye").ack_req()]);
    assert_eq!(peer.context.poll(peer.now).unwrap(), 1);
    peer.expect_wc(1, WcStatus::Success);
    let frames = peer.end();
    let opcodes: Vec<Opcode> = frames.iter().map(|got| got.opcode).collect();
    assert_eq!(opcodes, [Opcode::RC_ACKNOWLEDGE, Opcode::UD_SEND_ONLY]);
}
