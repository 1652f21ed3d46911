//! The connection manager's messages: recorded ones of the kernel, round trips, and refusals.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use common::frames;
use ferroce_wire::cm::*;
use ferroce_wire::*;
use zerocopy::FromBytes;

/// The MAD of a frame in a capture (frames are counted from 1, as in Wireshark).
fn mad(capture: &str, number: usize) -> [u8; MAD_LEN] {
    let frames = frames(capture);
    let packet = Packet::parse(&frames[number - 1]).unwrap();
    assert_eq!((packet.opcode, packet.bth.dest_qpn()), (Opcode::UD_SEND_ONLY, Qpn::GSI));
    assert_eq!(packet.deth().unwrap().qkey(), GSI_QKEY);
    packet.payload.try_into().unwrap()
}

#[test]
fn recorded_messages_are_emitted_again() {
    let mut names = Vec::new();
    for capture in ["rping.pcap", "rping_ipv6.pcap", "ucmatose.pcap", "udaddy.pcap", "cm_reject.pcap"] {
        for frame in frames(capture) {
            let packet = Packet::parse(&frame).unwrap();
            if packet.bth.dest_qpn() != Qpn::GSI {
                continue;
            }
            let message = CmMessage::parse(packet.payload).unwrap();
            names.push(message.body.name());
            let mut again = [0xaa; MAD_LEN];
            message.emit(&mut again);
            assert_eq!(again[..], *packet.payload, "{capture} {}", message.body.name());
        }
    }
    let connection = ["REQ", "REP", "RTU", "DREQ", "DREP"];
    let want = [&connection[..], &connection, &connection, &["SIDR_REQ", "SIDR_REP"], &["REQ", "REJ"]];
    assert_eq!(names, want.concat());
}

/// The values chosen by `rping` of rdma-core 44 and the kernel's rdma_cm.
#[test]
fn recorded_req() {
    let mad = mad("rping.pcap", 1);
    let CmBody::Req(req) = CmMessage::parse(&mad).unwrap().body else { panic!("no REQ") };
    assert_eq!(req.service_id(), SERVICE_ID_TCP + 7174);
    assert_eq!((req.transport(), req.path_mtu()), (Some(TransportType::Rc), Some(PathMtu::Mtu1024)));
    assert_eq!((req.pkey(), req.retry_count(), req.rnr_retry_count()), (PKEY_DEFAULT, 7, 7));
    assert_eq!(req.max_cm_retries(), 15);
    assert_eq!((req.remote_cm_timeout(), req.local_cm_timeout()), (20, 20));
    assert_eq!((req.responder_resources(), req.initiator_depth()), (1, 1));
    assert!(!req.srq() && !req.end_to_end_flow_control());
    let path = &req.primary_path;
    assert_eq!(path.local_gid(), Gid::from_ipv4([10, 77, 0, 11].into()));
    assert_eq!(path.remote_gid(), Gid::from_ipv4([10, 77, 0, 12].into()));
    assert_eq!((path.local_lid(), path.remote_lid()), (0xffff, 0xffff));
    let ip = IpCm::parse(&req.private_data).unwrap();
    assert_eq!((ip.source, ip.destination), ([10, 77, 0, 11].into(), [10, 77, 0, 12].into()));
    assert_eq!(ip.to_bytes().unwrap(), req.private_data[..IpCm::LEN]);
}

#[test]
fn recorded_rep_answers_the_req() {
    let (first, second) = (mad("rping_ipv6.pcap", 1), mad("rping_ipv6.pcap", 2));
    let (first, second) = (CmMessage::parse(&first).unwrap(), CmMessage::parse(&second).unwrap());
    let (CmBody::Req(req), CmBody::Rep(rep)) = (first.body, second.body) else { panic!("no REQ and REP") };
    assert_eq!(first.transaction_id, second.transaction_id);
    assert_eq!(rep.remote_comm_id(), req.local_comm_id());
    assert_eq!((rep.responder_resources(), rep.initiator_depth(), rep.rnr_retry_count()), (1, 1, 7));
    let ip = IpCm::parse(&req.private_data).unwrap();
    assert_eq!(
        (ip.source, ip.destination),
        (req.primary_path.local_gid().to_ip(), "fd77::12".parse().unwrap())
    );
    assert_eq!(ip.to_bytes().unwrap(), req.private_data[..IpCm::LEN]);

    // The data that follows is exchanged between the two named queue pairs, and each side sends from the PSN that the
    // other one has requested.
    let frames = frames("rping_ipv6.pcap");
    let data = |to: Qpn| {
        let first = frames
            .iter()
            .map(|frame| Packet::parse(frame).unwrap())
            .find(|packet| packet.bth.dest_qpn() == to && packet.opcode.is_request());
        first.map(|packet| packet.bth.psn())
    };
    assert_eq!(data(rep.qpn()), Some(rep.starting_psn()));
    assert_eq!(data(req.qpn()), Some(req.starting_psn()));
}

#[test]
fn recorded_rej_and_sidr() {
    let rejection = mad("cm_reject.pcap", 2);
    let CmBody::Rej(rej) = CmMessage::parse(&rejection).unwrap().body else { panic!("no REJ") };
    assert_eq!((rej.stage(), rej.reason()), (Some(Stage::Req), RejectReason::INVALID_SERVICE_ID));
    assert_eq!(rej.reason().to_string(), "invalid service id");

    let (request, reply) = (mad("udaddy.pcap", 1), mad("udaddy.pcap", 2));
    let (request, reply) = (CmMessage::parse(&request).unwrap().body, CmMessage::parse(&reply).unwrap().body);
    let (CmBody::SidrReq(request), CmBody::SidrRep(reply)) = (request, reply) else { panic!("no SIDR") };
    assert_eq!((reply.request_id(), reply.service_id()), (request.request_id(), request.service_id()));
    assert_eq!(request.service_id(), SERVICE_ID_UDP + 7174);
    assert_eq!((reply.status(), reply.qkey()), (0, 0x0123_4567));
    assert!(reply.qpn().is_ordinary());
    assert_eq!(
        IpCm::parse(&request.private_data).unwrap().destination,
        std::net::IpAddr::from([10, 77, 0, 12])
    );
}

#[test]
fn setters_reach_their_own_bits_only() {
    let path = PathRecord::new(Gid([1; 16]), Gid([2; 16]));
    let zero = Req::new(0, 0, Qpn::default(), Psn::default(), PathMtu::Mtu256, path);
    let mut req = Req::new(1, 2, Qpn::new(3), Psn::new(4), PathMtu::Mtu4096, path);
    req.set_ca_guid(5);
    req.set_qkey(6);
    req.set_responder_resources(7);
    req.set_initiator_depth(8);
    req.set_remote_cm_timeout(0xff);
    req.set_transport(TransportType::Uc);
    req.set_end_to_end_flow_control(true);
    req.set_local_cm_timeout(18);
    req.set_retry_count(6);
    req.set_rnr_retry_count(5);
    req.set_max_cm_retries(15);
    req.set_srq(true);
    req.set_pkey(PKey(9));
    assert_eq!((req.local_comm_id(), req.service_id(), req.qpn().value()), (1, 2, 3));
    assert_eq!((req.starting_psn().value(), req.ca_guid(), req.qkey()), (4, 5, 6));
    assert_eq!((req.responder_resources(), req.initiator_depth()), (7, 8));
    assert_eq!((req.remote_cm_timeout(), req.transport()), (31, Some(TransportType::Uc)));
    assert!(req.end_to_end_flow_control() && req.srq());
    assert_eq!((req.local_cm_timeout(), req.retry_count(), req.rnr_retry_count()), (18, 6, 5));
    assert_eq!((req.max_cm_retries(), req.pkey(), req.path_mtu()), (15, PKey(9), Some(PathMtu::Mtu4096)));
    req.set_end_to_end_flow_control(false);
    req.set_srq(false);
    assert!(!req.end_to_end_flow_control() && !req.srq());
    assert_eq!((req.remote_cm_timeout(), req.max_cm_retries()), (31, 15));
    assert_eq!(zero.primary_path, path);

    let mut path = path;
    path.set_flow_label(0xabcde);
    path.set_rate(0x3f);
    path.set_flow_label(0x12345);
    path.set_traffic_class(1);
    path.set_hop_limit(2);
    path.set_service_level(15);
    path.set_subnet_local(true);
    path.set_ack_timeout(19);
    assert_eq!((path.flow_label(), path.rate(), path.traffic_class()), (0x12345, 0x3f, 1));
    assert_eq!((path.hop_limit(), path.service_level(), path.ack_timeout()), (2, 15, 19));
    assert!(path.subnet_local());
    assert_eq!((path.local_gid(), path.remote_gid()), (Gid([1; 16]), Gid([2; 16])));

    let mut rep = Rep::new(1, 2, Qpn::new(3), Psn::new(4));
    rep.set_target_ack_delay(31);
    rep.set_failover(1);
    rep.set_end_to_end_flow_control(true);
    rep.set_rnr_retry_count(7);
    rep.set_srq(true);
    rep.set_qkey(5);
    rep.set_ca_guid(6);
    assert_eq!((rep.target_ack_delay(), rep.failover(), rep.rnr_retry_count()), (31, 1, 7));
    assert!(rep.end_to_end_flow_control() && rep.srq());
    assert_eq!((rep.qkey(), rep.ca_guid(), rep.qpn().value(), rep.starting_psn().value()), (5, 6, 3, 4));
}

/// All eleven messages with every byte of the body set, so that no field is omitted.
#[test]
fn every_message_round_trips() {
    let body: Vec<u8> = (0..232u32).map(|i| (i * 7 + 1) as u8).collect();
    macro_rules! body {
        ($kind:ident) => {
            CmBody::$kind($kind::ref_from_bytes(&body).unwrap())
        };
    }
    let bodies = [
        body!(Req),
        body!(Mra),
        body!(Rej),
        body!(Rep),
        body!(Rtu),
        body!(Dreq),
        body!(Drep),
        body!(SidrReq),
        body!(SidrRep),
        body!(Lap),
        body!(Apr),
    ];
    for (i, body) in bodies.into_iter().enumerate() {
        let message = CmMessage { transaction_id: 0x0123_4567_89ab_cdef, body };
        let mut mad = [0; MAD_LEN];
        message.emit(&mut mad);
        assert_eq!(
            mad[..24],
            [
                1,
                7,
                2,
                3,
                0,
                0,
                0,
                0,
                1,
                0x23,
                0x45,
                0x67,
                0x89,
                0xab,
                0xcd,
                0xef,
                0,
                0x10 + i as u8,
                0,
                0,
                0,
                0,
                0,
                0
            ]
        );
        assert_eq!(CmMessage::parse(&mad), Ok(message));
    }
}

#[test]
fn small_messages_hold_what_they_were_given() {
    let mra = Mra::new(1, 2, Stage::Other, 20);
    assert_eq!((mra.local_comm_id(), mra.remote_comm_id()), (1, 2));
    assert_eq!((mra.stage(), mra.service_timeout()), (Some(Stage::Other), 20));
    let mut rej = Rej::new(1, 2, Stage::Rep, RejectReason::INVALID_MTU);
    assert!(rej.set_info(&[3]) && !rej.set_info(&[0; 73]));
    assert_eq!((rej.stage(), rej.reason(), rej.info()), (Some(Stage::Rep), RejectReason(26), &[3][..]));
    assert_eq!(RejectReason(99).to_string(), "reason 99");
    let dreq = Dreq::new(1, 2, Qpn::new(3));
    assert_eq!((dreq.local_comm_id(), dreq.remote_comm_id(), dreq.remote_qpn().value()), (1, 2, 3));
    let apr = Apr::new(1, 2, Apr::UNSUPPORTED);
    assert_eq!((apr.local_comm_id(), apr.remote_comm_id(), apr.status()), (1, 2, 2));
    let refused = SidrRep::refused(1, 2, 3);
    assert_eq!((refused.request_id(), refused.service_id(), refused.status()), (1, 2, 3));
    assert!(refused.info().is_empty());
}

#[test]
fn case_118_what_is_no_cm_mad_is_refused() {
    let good = mad("rping.pcap", 1);
    let edit = |at: usize, value: u8| {
        let mut mad = good;
        mad[at] = value;
        CmMessage::parse(&mad).unwrap_err()
    };
    for length in [0, 23, 24, 255] {
        assert_eq!(CmMessage::parse(&good[..length]), Err(MadError::Length(length)));
    }
    assert_eq!(CmMessage::parse(&[&good[..], &[0]].concat()), Err(MadError::Length(257)));
    assert_eq!(edit(0, 2), MadError::BaseVersion(2));
    assert_eq!(edit(1, 0x81), MadError::Class(0x81));
    assert_eq!(edit(2, 1), MadError::ClassVersion(1));
    assert_eq!(edit(3, 0x83), MadError::Method(0x83));
    assert_eq!(edit(17, 0x0f), MadError::Attribute(0x0f));
    assert_eq!(edit(17, 0x1b), MadError::Attribute(0x1b));
    assert_eq!(edit(16, 1), MadError::Attribute(0x0110));
}

#[test]
fn case_116_private_data_that_is_no_ip_cm_header() {
    let ip = IpCm { source: [10, 0, 0, 1].into(), source_port: 0xabcd, destination: [10, 0, 0, 2].into() };
    let good = ip.to_bytes().unwrap();
    assert_eq!(IpCm::parse(&good), Ok(ip));
    let mut bad = good;
    bad[0] = 1;
    assert_eq!(IpCm::parse(&bad), Err(IpCmError::Version(1)));
    bad = good;
    bad[1] = 0x50;
    assert_eq!(IpCm::parse(&bad), Err(IpCmError::IpVersion(5)));
    assert_eq!(IpCm::parse(&good[..35]), Err(IpCmError::Length(35)));
    let mixed = IpCm { destination: "fd77::1".parse().unwrap(), ..ip };
    assert!(matches!(mixed.to_bytes(), Err(IpCmError::Mixed(..))));
}
