//! ECN bits, and the senders and receivers of CNPs.

use ferroce::wire::Opcode;
use ferroce::{Config, CongestionNotification, Counter, Dcqcn, Gid, QpState, QpType, SendOp, Transition};
use ferroce_test_support::packet::{IP, packet};
use ferroce_test_support::peer::{PEER_QPN, Peer, QKEY, RQ, Setup, sge};

use crate::{GIGABIT, cnp, reaction, with};

fn notifying(config: Config) -> Config {
    config.notification(CongestionNotification::default())
}

fn paper(config: Config) -> Config {
    with(config, Dcqcn::PAPER, 10 * GIGABIT)
}

fn ecn(frame: &[u8]) -> u8 {
    frame[IP + 1] & 3
}

/// The answer to a marked datagram is not marked.
#[test]
fn an_answer_to_a_marked_datagram_is_not_marked() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    peer.address.traffic_class = 0x68 | 3;
    let mr = peer.post_recv(1, 128);
    peer.inject(packet(Opcode::UD_SEND_ONLY, 1).deth(QKEY, PEER_QPN).payload(b"12345678"));
    let wc = peer.expect_wc(1, ferroce::WcStatus::Success);
    let mut area = [0; 40];
    area.copy_from_slice(&peer.bytes(mr)[..40]);
    let (pd, data) = (peer.pd, peer.memory(&[1; 64]));
    let mut way = peer.context.address_from_wc(&wc, &area).unwrap();
    way.mac = Some(ferroce_test_support::cable::PEER_MAC);
    println!("traffic class of the way back {:#04x}", way.traffic_class);
    let ah = peer.context.create_ah(pd, &way).unwrap();
    let to = ferroce::Destination { ah, qpn: PEER_QPN, qkey: QKEY };
    peer.post(2, SendOp::SendTo(to), &[sge(data, 64)]);
    let sent = peer.take_packets();
    peer.expect_wc(2, ferroce::WcStatus::Success);
    assert_eq!(sent[0].network.traffic_class >> 2, 0x68 >> 2);
    assert_ne!(ecn(&sent[0].frame), 3, "the answer left with Congestion Experienced");
}

/// §7: dropped packets raise no CNP.
#[test]
fn a_dropped_datagram_makes_no_cnp() {
    let mut peer = Peer::with(Setup { config: notifying, ..Setup::of(QpType::Ud) });
    peer.address.traffic_class = 3;
    // Another Q_Key: it is not for this queue pair. The CNP would slow down the sender named in the DETH.
    peer.inject(packet(Opcode::UD_SEND_ONLY, 1).deth(QKEY + 1, PEER_QPN).payload(b"12345678"));
    peer.expect_counted(Counter::RxQkeyMismatch, 1);
    let sent = peer.take_packets();
    assert!(sent.is_empty(), "{} for a datagram that was dropped for its Q_Key", sent[0]);
}

#[test]
fn a_request_to_a_queue_pair_in_error_makes_no_cnp() {
    let mut peer = Peer::with(Setup { config: notifying, ..Setup::default() });
    peer.modify(Transition::Error);
    peer.address.traffic_class = 3;
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"12345678"));
    peer.expect_state(QpState::Error);
    let sent = peer.take_packets();
    assert!(sent.is_empty(), "{} for a request that was dropped", sent[0]);
}

/// A request far from the expected PSN is dropped or NAKed; so is one with an invalid header.
#[test]
fn an_invalid_request_makes_no_cnp() {
    let mut peer = Peer::with(Setup { config: notifying, ..Setup::default() });
    peer.address.traffic_class = 3;
    // A Middle without a First.
    peer.inject(packet(Opcode::RC_SEND_MIDDLE, RQ).payload(&[0; 256]));
    let sent = peer.take_packets();
    while peer.context.next_event().is_some() {}
    let cnps = sent.iter().filter(|got| got.opcode == Opcode::CNP).count();
    println!("{:?}", sent.iter().map(|got| got.opcode).collect::<Vec<_>>());
    assert_eq!(cnps, 0, "a packet that has not passed all checks");
}

/// Case 105: from a wrong address a CNP changes nothing. For a UD queue pair any destination's address is valid.
#[test]
fn a_stranger_does_not_slow_datagrams_down() {
    let mut peer = Peer::with(Setup { config: paper, ..Setup::of(QpType::Ud) });
    peer.address.source = Gid::from_ipv4([192, 0, 2, 66].into());
    for _ in 0..20 {
        peer.inject(cnp());
    }
    let rate = reaction(&peer).rate;
    assert_eq!(rate, 10 * GIGABIT, "a stranger that was never sent anything has set the rate");
}

/// In all states it is counted or dropped, and has no other effect.
#[test]
fn a_cnp_is_harmless_in_every_state() {
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        for state in [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts] {
            let mut peer = Peer::with(Setup { config: paper, state, ..Setup::of(qp_type) });
            for _ in 0..10 {
                peer.inject(cnp());
            }
            peer.expect_nothing();
            peer.expect_no_event();
            println!(
                "{qp_type:?} {state:?}: handled {}, rate {}",
                peer.context.counters().value(Counter::RpCnpHandled),
                reaction(&peer).rate
            );
            if state == QpState::Rts {
                peer.modify(Transition::Error);
                peer.inject(cnp());
                println!(
                    "{qp_type:?} Error: handled {}",
                    peer.context.counters().value(Counter::RpCnpHandled)
                );
                peer.modify(Transition::Reset);
                peer.inject(cnp());
                let rate = reaction(&peer).rate;
                println!(
                    "{qp_type:?} Reset again: handled {}, rate {rate}",
                    peer.context.counters().value(Counter::RpCnpHandled)
                );
                assert_eq!(rate, 10 * GIGABIT, "{qp_type:?}: what is reset is as new");
            }
            if matches!(state, QpState::Reset | QpState::Init) {
                assert_eq!(reaction(&peer).rate, 10 * GIGABIT, "{qp_type:?} {state:?} obeyed a CNP");
            }
        }
    }
}
