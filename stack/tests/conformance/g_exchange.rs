//! The messages of the connection manager, with the peer's written by the test: shared code of its cases.

use std::net::SocketAddr;

use ferroce::wire::cm::{
    CmBody, CmMessage, IpCm, PathRecord, RejectReason, Rep, Req, Rtu, SERVICE_ID_TCP, SERVICE_ID_UDP, SidrReq,
};
use ferroce::wire::{MAD_LEN, Opcode, PKEY_DEFAULT};
use ferroce::{
    CmEvent, CmId, ConnectionParameters, ConnectionRequest, ListenConfig, Listener, PathMtu, PortSpace, Psn,
    QpState, QpType, Qpn, Unreachable,
};

use crate::packet::{Script, packet};
use crate::peer::{PEER_QPN, Peer, Setup};

/// The port of the engine's service, and that of the peer's.
pub(crate) const PORT: u16 = 7471;
/// The peer's ID of its connection.
pub(crate) const PEER_ID: u32 = 0x5151_0001;
/// Of the peer's requests.
pub(crate) const TRANSACTION: u64 = 0x77;
/// The Q_Key of QP1's datagrams.
pub(crate) const QKEY_GSI: u32 = 0x8001_0000;
/// The first PSNs that the peer and the scripts request.
pub(crate) const PEER_RQ: u32 = 0x1234;
pub(crate) const PEER_SQ: u32 = 0x9876;

pub(crate) fn engine() -> Peer {
    Peer::with(Setup { state: QpState::Init, ..Setup::default() })
}

pub(crate) fn engine_of(qp_type: QpType) -> Peer {
    Peer::with(Setup { state: QpState::Init, ..Setup::of(qp_type) })
}

pub(crate) fn listen(peer: &mut Peer, space: PortSpace) -> Listener {
    let any = SocketAddr::from(([0, 0, 0, 0], PORT));
    peer.context.listen(space, any, &ListenConfig::default()).unwrap()
}

pub(crate) fn service(peer: &Peer) -> SocketAddr {
    SocketAddr::new(peer.address.source.to_ip(), PORT)
}

/// A MAD from the peer.
pub(crate) fn mad(body: CmBody<'_>) -> Script {
    let mut bytes = [0; MAD_LEN];
    CmMessage { transaction_id: TRANSACTION, body }.emit(&mut bytes);
    to_gsi(&bytes)
}

pub(crate) fn to_gsi(bytes: &[u8]) -> Script {
    packet(Opcode::UD_SEND_ONLY, 0).dest_qpn(Qpn::GSI).deth(QKEY_GSI, Qpn::GSI).payload(bytes)
}

/// The one MAD that the engine sent.
#[track_caller]
pub(crate) fn take_mad(peer: &mut Peer) -> [u8; MAD_LEN] {
    let got = peer.take_packets();
    let [got] = &got[..] else { panic!("{} packets and not one MAD", got.len()) };
    let deth = got.extensions.deth.unwrap();
    assert_eq!((got.opcode, got.bth.dest_qpn()), (Opcode::UD_SEND_ONLY, Qpn::GSI));
    assert_eq!((deth.qkey(), deth.source_qpn()), (QKEY_GSI, Qpn::GSI));
    got.payload.as_slice().try_into().unwrap()
}

/// Takes the one MAD that the engine sent; it must be of this kind.
macro_rules! take {
    ($peer:expr, $kind:ident) => {{
        let bytes = $crate::g_exchange::take_mad($peer);
        let message = ferroce::wire::cm::CmMessage::parse(&bytes).unwrap();
        match message.body {
            ferroce::wire::cm::CmBody::$kind(body) => (message.transaction_id, *body),
            other => panic!("{} in place of {}", other.name(), stringify!($kind)),
        }
    }};
}
pub(crate) use take;

pub(crate) fn addresses(peer: &Peer) -> [u8; IpCm::LEN] {
    let (source, destination) = (peer.address.source.to_ip(), peer.address.destination.to_ip());
    IpCm { source, source_port: 5000, destination }.to_bytes().unwrap()
}

/// The peer's request for a connection.
pub(crate) fn req(peer: &Peer) -> Req {
    let mut path = PathRecord::new(peer.address.source, peer.address.destination);
    path.set_ack_timeout(14);
    path.set_hop_limit(64);
    let service_id = SERVICE_ID_TCP + u64::from(PORT);
    let mut req = Req::new(PEER_ID, service_id, PEER_QPN, Psn::new(PEER_RQ), PathMtu::Mtu512, path);
    req.set_responder_resources(8);
    req.set_initiator_depth(4);
    req.set_retry_count(6);
    req.set_rnr_retry_count(5);
    req.set_remote_cm_timeout(20);
    req.set_local_cm_timeout(20);
    req.set_max_cm_retries(15);
    req.private_data[..IpCm::LEN].copy_from_slice(&addresses(peer));
    req
}

/// The peer's acceptance of the engine's request.
pub(crate) fn rep(req: &Req) -> Rep {
    let mut rep = Rep::new(PEER_ID, req.local_comm_id(), PEER_QPN, Psn::new(PEER_SQ));
    rep.set_responder_resources(2);
    rep.set_initiator_depth(3);
    rep.set_rnr_retry_count(4);
    rep
}

#[track_caller]
pub(crate) fn request(peer: &mut Peer) -> ConnectionRequest {
    match peer.context.next_cm_event() {
        Some(CmEvent::ConnectionRequest(request)) => request,
        other => panic!("no request: {other:?}"),
    }
}

#[track_caller]
pub(crate) fn expect(peer: &mut Peer, event: CmEvent) {
    assert_eq!(peer.context.next_cm_event(), Some(event));
}

/// No answer to `id`, and no error.
#[track_caller]
pub(crate) fn expect_silence(peer: &mut Peer, id: CmId) {
    let reason = Unreachable::Silent { peer: peer.address.source.to_ip().to_canonical() };
    expect(peer, CmEvent::Unreachable { id, reason });
}

#[track_caller]
pub(crate) fn expect_no_cm_event(peer: &mut Peer) {
    assert_eq!(peer.context.next_cm_event(), None);
}

#[track_caller]
pub(crate) fn expect_established(peer: &mut Peer, expected: CmId) {
    match peer.context.next_cm_event() {
        Some(CmEvent::Established { id, .. }) => assert_eq!(id, expected),
        other => panic!("not established: {other:?}"),
    }
    peer.expect_state(QpState::Rts);
}

#[track_caller]
pub(crate) fn expect_rejected(peer: &mut Peer, expected: CmId, why: RejectReason) {
    match peer.context.next_cm_event() {
        Some(CmEvent::Rejected { id, reason, .. }) => assert_eq!((id, reason), (expected, why)),
        other => panic!("not rejected: {other:?}"),
    }
}

/// The peer connects to the engine.
pub(crate) fn accept(peer: &mut Peer) -> (CmId, Rep) {
    peer.inject(mad(CmBody::Req(&req(peer))));
    let id = request(peer).id;
    peer.context.accept(id, peer.qp, &ConnectionParameters::default()).unwrap();
    peer.poll();
    let (transaction, rep) = take!(peer, Rep);
    assert_eq!((transaction, rep.remote_comm_id()), (TRANSACTION, PEER_ID));
    (id, rep)
}

pub(crate) fn rtu(rep: &Rep) -> Rtu {
    Rtu::new(PEER_ID, rep.local_comm_id())
}

/// A connection that the peer requested.
pub(crate) fn accepted() -> (Peer, CmId, Rep) {
    let mut peer = engine();
    listen(&mut peer, PortSpace::Tcp);
    let (id, rep) = accept(&mut peer);
    peer.inject(mad(CmBody::Rtu(&rtu(&rep))));
    expect_established(&mut peer, id);
    (peer, id, rep)
}

/// A connection that the engine requests, up to its request.
pub(crate) fn connecting(parameters: &ConnectionParameters<'_>) -> (Peer, CmId, Req) {
    let mut peer = engine();
    let to = service(&peer);
    let id = peer.context.connect(peer.qp, to, parameters).unwrap();
    peer.poll();
    let (_, req) = take!(&mut peer, Req);
    (peer, id, req)
}

/// The peer's search for a datagram service.
pub(crate) fn sidr_req(peer: &Peer) -> SidrReq {
    let mut seek = SidrReq::new(PEER_ID, SERVICE_ID_UDP + u64::from(PORT), PKEY_DEFAULT);
    seek.private_data[..IpCm::LEN].copy_from_slice(&addresses(peer));
    seek
}
