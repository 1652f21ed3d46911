//! Section F: the notification point, which tells the senders of marked packets.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::wire::{NetworkHeader, Opcode, Psn, Qpn};
use ferroce::{
    AddressVector, CnpScope, Config, CongestionNotification, Counter, Gid, GidEntry, QpState, QpType,
    Transition,
};

use crate::packet::{BTH, Got, IP, Script, packet, read_response};
use crate::peer::{PEER_QPN, Peer, REMOTE, RQ, SQ, Setup, pattern};

/// The flow that is marked.
const CE: u8 = 3;

fn notifying(config: Config) -> Config {
    config.notification(CongestionNotification::default())
}

/// A peer of an engine with a notification point, whose packets a switch marks.
fn marked(setup: Setup) -> Peer {
    let mut peer = Peer::with(Setup { config: notifying, ..setup });
    peer.address.traffic_class = 0x68 | CE;
    peer
}

fn send(psn: u32) -> Script {
    packet(Opcode::RC_SEND_ONLY, psn).payload(b"12345678")
}

/// The opcodes of what was sent.
fn opcodes(sent: &[Got]) -> Vec<Opcode> {
    sent.iter().map(|sent| sent.opcode).collect()
}

/// As TV3 of docs/protocol.md §3, which a ConnectX-4 Lx has sent.
#[track_caller]
fn assert_shaped_as_tv3(cnp: &Got) {
    assert_eq!(cnp.opcode, Opcode::CNP);
    assert_eq!((cnp.bth.dest_qpn(), cnp.psn(), cnp.payload.as_slice()), (PEER_QPN, 0, &[0; 16][..]));
    assert!(cnp.bth.becn() && !cnp.bth.fecn() && !cnp.bth.ack_req());
    if cnp.network.header == NetworkHeader::Ipv4 && cnp.frame[IP] == 0x45 {
        // Type of service and total length; opcode to P_Key, BECN; what follows the PSN's reserved byte.
        assert_eq!(cnp.frame[IP..IP + 4], [0x45, 0xc2, 0, 60]);
        assert_eq!(cnp.frame[BTH..BTH + 5], [0x81, 0x00, 0xff, 0xff, 0x40]);
        assert_eq!(cnp.frame[BTH + 8..BTH + 28], [0; 20]);
        assert_eq!(cnp.frame.len(), BTH + 32);
    }
}

#[test]
fn case_101_a_marked_packet_makes_a_cnp() {
    let mut peer = marked(Setup::default());
    peer.post_recv(1, 64);
    peer.inject(send(RQ).ack_req());
    peer.expect_wc(1, Success);
    let sent = peer.take_packets();
    assert_eq!(opcodes(&sent), [Opcode::CNP, Opcode::RC_ACKNOWLEDGE]);
    assert_shaped_as_tv3(&sent[0]);
    let back = (sent[0].network.destination, sent[0].network.source);
    assert_eq!(back, (peer.address.source, peer.address.destination));
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
    peer.expect_counted(Counter::NpCnpSent, 1);
    // What is not marked makes none.
    for class in [0, 1, 2] {
        peer.advance(Duration::from_millis(1));
        peer.address.traffic_class = 0x68 | class;
        peer.post_recv(2, 64);
        peer.inject(send(RQ + 1 + u32::from(class)));
        peer.expect_wc(2, Success);
        assert!(!opcodes(&peer.take_packets()).contains(&Opcode::CNP));
    }
}

#[test]
fn case_102_one_cnp_in_each_interval() {
    let mut peer = marked(Setup::default());
    let mut cnps = 0;
    for n in 0..1000 {
        peer.post_recv(1, 64);
        peer.inject(send(RQ + n));
        peer.expect_wc(1, Success);
        cnps += opcodes(&peer.take_packets()).iter().filter(|opcode| **opcode == Opcode::CNP).count();
        peer.advance(Duration::from_micros(1));
    }
    assert!((20..=21).contains(&cnps), "{cnps} CNPs");
    peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1000);
    peer.expect_counted(Counter::NpCnpSent, cnps as u64);
}

#[test]
fn case_103_a_broken_packet_and_a_cnp_make_none() {
    let mut peer = marked(Setup::default());
    let mut frame = peer.frame(&send(RQ));
    let last = frame.len() - 1;
    frame[last] ^= 1;
    peer.expect_dropped(frame, Counter::RxIcrcEncapsulated);
    let cnp = packet(Opcode::CNP, 0).payload(&[0; 16]);
    peer.inject(cnp);
    peer.expect_nothing();
    peer.expect_counted(Counter::RpCnpIgnored, 1);
    // Nor does one for another queue pair, from another address, of another service, or of another partition.
    peer.inject(send(RQ).dest_qpn(Qpn::new(0x31_3131)));
    peer.inject(send(RQ).pkey(0x1234));
    let _ = peer.context.next_event();
    peer.inject(packet(Opcode::UC_SEND_ONLY, RQ).payload(b"12345678"));
    peer.address.source = Gid::from_ipv4([192, 0, 2, 77].into());
    peer.inject(send(RQ));
    peer.expect_nothing();
    peer.expect_counted(Counter::NpCnpSent, 0);
}

#[test]
fn case_105_a_cnp_for_nobody_or_from_elsewhere_changes_nothing() {
    let config = |config: Config| {
        let control = ferroce::CongestionControl::Dcqcn(ferroce::Dcqcn::PAPER);
        config.congestion(control).line_rate(10_000_000_000)
    };
    let mut peer = Peer::with(Setup { config, ..Setup::default() });
    let cnp = packet(Opcode::CNP, 0).payload(&[0; 16]);
    let frame = peer.frame(&cnp.clone().dest_qpn(Qpn::new(0x31_3131)));
    peer.expect_dropped(frame, Counter::RxUnknownQp);
    let own = peer.address.source;
    peer.address.source = Gid::from_ipv4([192, 0, 2, 77].into());
    let frame = peer.frame(&cnp);
    peer.expect_dropped(frame, Counter::RxWrongAddress);
    peer.address.source = own;
    let mut frame = peer.frame(&cnp);
    let last = frame.len() - 1;
    frame[last] ^= 1;
    peer.expect_dropped(frame, Counter::RxIcrcEncapsulated);
    peer.inject(cnp);
    assert_eq!(peer.query().reaction.unwrap().rate, 5_000_000_000);
}

/// Off by default, and the reaction's control does not switch it on.
#[test]
fn without_a_notification_point_there_are_no_cnps() {
    let reacting = |config: Config| {
        let control = ferroce::CongestionControl::Dcqcn(ferroce::Dcqcn::PAPER);
        config.congestion(control).line_rate(10_000_000_000)
    };
    for config in [|config| config, reacting as fn(Config) -> Config] {
        let mut peer = Peer::with(Setup { config, ..Setup::default() });
        peer.address.traffic_class = CE;
        peer.post_recv(1, 64);
        peer.inject(send(RQ));
        peer.expect_wc(1, Success);
        peer.expect_nothing();
        peer.expect_counted(Counter::NpEcnMarkedRocePackets, 1);
    }
}

/// Of READ responses the requester is the notification point; acknowledgements make none.
#[test]
fn responses_to_reads_make_cnps_and_acknowledgements_none() {
    let mut peer = marked(Setup::default());
    peer.post_read(1, 8);
    assert_eq!(opcodes(&peer.take_packets()), [Opcode::RC_READ_REQUEST]);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &pattern(8)));
    peer.expect_wc(1, Success);
    let sent = peer.take_packets();
    assert_eq!(opcodes(&sent), [Opcode::CNP]);
    assert_shaped_as_tv3(&sent[0]);
    peer.advance(Duration::from_millis(1));
    peer.post_write(2, b"12345678");
    peer.take_packets();
    peer.inject(crate::packet::ack(SQ + 1, 2));
    peer.expect_wc(2, Success);
    peer.expect_nothing();
}

/// UC, UD and RC, over IPv4 and IPv6.
#[test]
fn every_service_has_them() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for ipv6 in [false, true] {
            let mut peer = marked(Setup { ipv6, ..Setup::of(qp_type) });
            let script = match qp_type {
                QpType::Rc => send(RQ),
                QpType::Uc => packet(Opcode::UC_SEND_ONLY, RQ).payload(b"12345678"),
                QpType::Ud => {
                    packet(Opcode::UD_SEND_ONLY, 0).deth(crate::peer::QKEY, PEER_QPN).payload(b"12345678")
                }
            };
            peer.post_recv(1, 64);
            peer.inject(script);
            peer.expect_wc(1, Success);
            let sent = peer.take_packets();
            assert_eq!(opcodes(&sent), [Opcode::CNP], "{qp_type:?}, IPv6 {ipv6}");
            assert_shaped_as_tv3(&sent[0]);
            assert_eq!(sent[0].network.destination, peer.address.source);
            assert_eq!(sent[0].network.traffic_class, 0xc2);
        }
    }
}

/// In a VLAN they have a priority of their own.
#[test]
fn in_a_vlan_they_have_their_priority() {
    let setup = Setup { state: QpState::Reset, ..Setup::default() };
    let mut peer = marked(setup);
    let gid = Gid::from_ipv4([192, 0, 2, 50].into());
    peer.address.destination = gid;
    let sgid_index = peer.context.add_gid(GidEntry::new(gid).vlan(100)).unwrap();
    for transition in peer.transitions(&Setup::default()) {
        peer.modify(match transition {
            Transition::ReadyToReceive(mut receive) => {
                let mac = receive.address.mac;
                receive.address =
                    AddressVector::new(receive.address.gid, sgid_index).service_level(3).mac(mac);
                Transition::ReadyToReceive(receive)
            }
            other => other,
        });
    }
    peer.post_recv(1, 64);
    peer.inject(send(RQ).ack_req());
    peer.expect_wc(1, Success);
    let sent = peer.take_packets();
    assert_eq!(opcodes(&sent), [Opcode::CNP, Opcode::RC_ACKNOWLEDGE]);
    let tags: Vec<_> = sent.iter().map(|sent| [sent.frame[14], sent.frame[15]]).collect();
    assert_eq!(tags, [[6 << 5, 100], [3 << 5, 100]]);
}

/// However many sends wait.
#[test]
fn they_go_ahead_of_data() {
    let mut peer = marked(Setup::default());
    peer.post_recv(1, 64);
    for id in 0..20 {
        peer.post_write(id, &pattern(600));
    }
    peer.arrive([send(RQ)]);
    let sent = peer.take_packets();
    peer.expect_wc(1, Success);
    assert_eq!((sent[0].opcode, sent.len()), (Opcode::CNP, 61));
}

#[test]
fn the_interval_scope_and_class_are_those_of_the_settings() {
    let config = |config: Config| {
        let settings = CongestionNotification::default().min_time_between_cnps(Duration::from_micros(10));
        config.notification(settings.scope(CnpScope::Port).cnp_dscp(10))
    };
    let mut peer = Peer::with(Setup { config, ..Setup::default() });
    peer.address.traffic_class = CE;
    let mut times = Vec::new();
    for n in 0..40 {
        peer.post_recv(1, 64);
        peer.inject(send(RQ + n));
        peer.expect_wc(1, Success);
        for sent in peer.take_packets() {
            assert_eq!(sent.network.traffic_class, 10 << 2 | 2);
            times.push(n);
        }
        peer.advance(Duration::from_micros(1));
    }
    assert_eq!(times, [0, 10, 20, 30]);
    let refused = |notification: CongestionNotification| {
        let (port, _) = ferroce::driver::loopback::pair(&[], &[]);
        let config = Config::default().notification(notification);
        ferroce::Context::open(Box::new(port), &config).map(drop).unwrap_err().to_string()
    };
    assert_eq!(refused(CongestionNotification::default().cnp_dscp(64)), "cnp_dscp = 64: 0 to 63");
    assert_eq!(refused(CongestionNotification::default().cnp_802p_prio(8)), "cnp_802p_prio = 8: 0 to 7");
}

/// A CNP is not acknowledged, and takes no PSN of the queue pair.
#[test]
fn they_take_no_psn() {
    let mut peer = marked(Setup::default());
    peer.post_recv(1, 64);
    peer.inject(send(RQ));
    peer.expect_wc(1, Success);
    assert_eq!(opcodes(&peer.take_packets()), [Opcode::CNP]);
    let psn = Psn::new(SQ);
    assert_eq!(peer.query().sq_psn, psn);
    peer.post(2, ferroce::SendOp::Write(REMOTE), &[]);
    assert_eq!(peer.take_packets()[0].psn(), SQ);
}
