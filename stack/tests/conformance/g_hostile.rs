//! G. The connection manager with peers that forge their address, and peers that delay others.

use std::net::IpAddr;
use std::time::Duration;

use ferroce::wire::cm::{CmBody, Mra, Stage};
use ferroce::wire::{Opcode, VlanTag};
use ferroce::{
    CmId, ConnectionParameters, Counter, Gid, GidEntry, MacAddr, PortSpace, QpState, QpType, WcStatus,
};

use crate::g_exchange::*;
use crate::peer::{Peer, QKEY, Setup};

const STRANGER: MacAddr = MacAddr([2, 0, 0, 0, 0, 0x77]);

/// From now on the peer is a host that can't be resolved.
fn as_stranger(peer: &mut Peer) {
    peer.address.source = Gid::from("192.0.2.77".parse::<IpAddr>().unwrap());
    peer.address.source_mac = STRANGER;
}

/// The destinations of the engine's frames.
fn destinations(peer: &mut Peer) -> Vec<MacAddr> {
    let packets = peer.take_packets();
    packets.iter().map(|got| MacAddr(*got.frame.first_chunk().unwrap())).collect()
}

/// After one REQ with the source address of a host that does not exist, `accept` used to resolve its hardware address: for
/// seconds the context did nothing else.
#[test]
fn a_request_is_answered_to_its_source() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    as_stranger(&mut peer);
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let id = request(&mut peer).id;
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    assert_eq!(peer.resolved(), 0, "the port was asked for a way because of a packet");
    peer.poll();
    let rep = peer.expect(Opcode::UD_SEND_ONLY, 0);
    assert_eq!(rep.frame[..6], STRANGER.0);
    // So do the connection's packets.
    assert_eq!(peer.query().address.unwrap().mac, Some(STRANGER));
}

/// The same for datagrams: neither the answer to a search nor that to a datagram causes a resolution.
#[test]
fn a_datagram_is_answered_to_its_source() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    listen(&mut peer, PortSpace::Udp);
    as_stranger(&mut peer);
    peer.inject(mad(CmBody::SidrReq(&sidr_req(&peer))));
    let (id, qp) = (request(&mut peer).id, peer.qp);
    peer.context.accept_datagrams(id, qp, &[]).unwrap();
    assert_eq!(destinations(&mut peer), [STRANGER]);

    let mr = peer.post_recv(1, 48);
    let hello = crate::packet::packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, crate::peer::PEER_QPN);
    peer.inject(hello.payload(b"datagram"));
    let wc = peer.expect_wc(1, WcStatus::Success);
    let back = peer.context.address_from_wc(&wc, peer.bytes(mr).first_chunk().unwrap()).unwrap();
    assert_eq!((back.gid, back.mac), (peer.address.source, Some(STRANGER)));
    peer.context.create_ah(peer.pd, &back).unwrap();
    assert_eq!(peer.resolved(), 0, "the port was asked for a way because of a packet");
}

/// No answer can be sent to a group or an unspecified address, and only the port itself has its address.
#[test]
fn requests_from_invalid_stations() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    for mac in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1], [0; 6]] {
        peer.address.source_mac = MacAddr(mac);
        peer.expect_refused(mad(CmBody::Req(&req(&peer))), Counter::RxWrongAddress);
    }
    peer.address.source_mac = STRANGER;
    peer.address.source = peer.address.destination;
    peer.expect_refused(mad(CmBody::Req(&req(&peer))), Counter::RxWrongAddress);
    expect_no_cm_event(&mut peer);
    // A port that receives its own frames.
    peer.address.source_mac = peer.address.destination_mac;
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let came = request(&mut peer);
    assert_eq!(came.peer.ip(), came.local.ip());
}

/// An answer to a datagram from an invalid station used to resolve the path, for the time of an ARP timeout.
#[test]
fn datagrams_from_invalid_stations() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let (qp, home) = (peer.qp, peer.address.destination);
    let group = Gid::from_ipv4([239, 1, 1, 1].into());
    peer.context.attach_mcast(qp, group).unwrap();
    let hello = crate::packet::packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, crate::peer::PEER_QPN);
    let hello = hello.payload(b"datagram");
    let to_group = hello.clone().dest_qpn(ferroce::Qpn::MULTICAST);
    peer.post_recv(1, 48);
    as_stranger(&mut peer);
    for (to, packet) in [(home, hello.clone()), (group, to_group)] {
        peer.address.destination = to;
        for mac in [[0xff; 6], [1, 0, 0x5e, 0, 0, 1], [0x33, 0x33, 0, 0, 0, 1], [0; 6]] {
            peer.address.source_mac = MacAddr(mac);
            peer.expect_refused(packet.clone(), Counter::RxWrongAddress);
        }
    }
    // Only the port itself has its address.
    (peer.address.destination, peer.address.source) = (home, home);
    peer.address.source_mac = STRANGER;
    peer.expect_refused(hello.clone(), Counter::RxWrongAddress);
    as_stranger(&mut peer);
    peer.inject(hello);
    assert_eq!(peer.expect_wc(1, WcStatus::Success).source_mac, Some(STRANGER));
}

/// An address of several VLANs is answered on the VLAN of the request.
#[test]
fn a_request_is_answered_on_its_vlan() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let gid = peer.address.destination;
    for vlan in [100, 200] {
        peer.context.add_gid(GidEntry::new(gid).vlan(vlan)).unwrap();
    }
    peer.address.vlan = Some(VlanTag { id: 200, priority: 0 });
    peer.inject(mad(CmBody::Req(&req(&peer))));
    let id = request(&mut peer).id;
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let rep = peer.expect(Opcode::UD_SEND_ONLY, 0);
    assert_eq!(rep.frame[12..16], [0x81, 0, 0, 200]);
}

/// The peer sends MRAs of 2.4 hours, for two minutes and no longer.
#[track_caller]
fn put_off(peer: &mut Peer, id: CmId, mra: Mra) {
    let second = Duration::from_secs(1);
    for _ in 0..118 {
        peer.inject(mad(CmBody::Mra(&mra)));
        peer.advance(second);
        assert_eq!(peer.context.next_cm_event(), None, "the peer has asked for more time");
    }
    peer.take_packets();
    for _ in 0..3 {
        peer.inject(mad(CmBody::Mra(&mra)));
        peer.advance(second);
    }
    assert_eq!(take!(peer, Rej).1.reason(), ferroce::wire::cm::RejectReason::TIMEOUT);
    expect_silence(peer, id);
    // The exchange has ended, and the MRA's ID no longer exists.
    peer.expect_refused(mad(CmBody::Mra(&mra)), Counter::CmRxUnknown);
    assert_eq!(peer.context.next_timeout(), None);
}

/// `service_timeout` 31 is 2.4 hours; a peer that sent it repeatedly used to delay `connect` as long as it liked.
#[test]
fn a_peer_can_not_delay_connect_forever() {
    let (mut peer, id, sent) = connecting(&ConnectionParameters::default());
    put_off(&mut peer, id, Mra::new(PEER_ID, sent.local_comm_id(), Stage::Req, 31));
    peer.expect_state(QpState::Init);
}

/// The same for a listener's half-open connections, with only one MRA.
#[test]
fn a_peer_can_not_delay_an_acceptance_forever() {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let (id, rep) = accept(&mut peer);
    put_off(&mut peer, id, Mra::new(PEER_ID, rep.local_comm_id(), Stage::Rep, 31));
    peer.expect_state(QpState::Error);

    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let (id, rep) = accept(&mut peer);
    peer.inject(mad(CmBody::Mra(&Mra::new(PEER_ID, rep.local_comm_id(), Stage::Rep, 31))));
    peer.advance(Duration::from_secs(119));
    peer.expect_nothing();
    peer.advance(Duration::from_secs(2));
    take!(&mut peer, Rej);
    expect_silence(&mut peer, id);
    peer.expect_state(QpState::Error);
}

/// A time chosen by the application is not shortened by a peer that requests more.
#[test]
fn a_peer_can_not_shorten_the_applications_timeout() {
    // 16 messages, 17 s apart.
    let parameters = ConnectionParameters::default().cm_timeout(22);
    let (mut peer, id, sent) = connecting(&parameters);
    for _ in 0..270 {
        peer.inject(mad(CmBody::Mra(&Mra::new(PEER_ID, sent.local_comm_id(), Stage::Req, 31))));
        peer.advance(Duration::from_secs(1));
        expect_no_cm_event(&mut peer);
    }
    peer.advance(Duration::from_secs(6));
    peer.take_packets();
    expect_silence(&mut peer, id);
}

/// With a silent peer, an ACK timeout of 0 used to keep a work request of the accepting end forever, and one of 31 for 20
/// hours.
#[test]
fn a_peer_can_not_set_an_extreme_ack_timeout() {
    for timeout in [0, 31] {
        let mut peer = engine();
        listen(&mut peer, PortSpace::Tcp);
        let mut asked = req(&peer);
        asked.primary_path.set_ack_timeout(timeout);
        peer.inject(mad(CmBody::Req(&asked)));
        let id = request(&mut peer).id;
        peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
        peer.poll();
        let (_, rep) = take!(&mut peer, Rep);
        peer.inject(mad(CmBody::Rtu(&rtu(&rep))));
        expect_established(&mut peer, id);
        peer.post_send(1, b"is anybody there?");
        for _ in 0..120 {
            peer.advance(Duration::from_secs(1));
        }
        peer.take_packets();
        peer.expect_wc(1, WcStatus::RetryExcErr);
    }
}
