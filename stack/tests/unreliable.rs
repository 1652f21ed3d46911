//! UC, UD and the effect of updates, with the scripted peer: beyond the conformance cases.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::num::NonZeroU16;
use std::time::Duration;

use ferroce::wire::{Opcode, Packet, VlanTag};
use ferroce::*;
use ferroce_test_support::packet::{self, packet};
use ferroce_test_support::peer::{self, PEER_QPN, Peer, RQ, SQ, Setup, pattern};

const TYPES: [QpType; 3] = [QpType::Rc, QpType::Uc, QpType::Ud];

/// A packet with the tag of another VLAN than its address's is dropped. A tag that a switch has added or a network card
/// removed does not matter.
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
            // An address that the port has only in this VLAN.
            let gid = Gid::from_ipv4([192, 0, 2, 50].into());
            peer.address.destination = gid;
            let entry = GidEntry::new(gid).vlan(own);
            let sgid_index = peer.context.add_gid(entry).unwrap();
            for transition in peer.transitions(&Setup::of(qp_type)) {
                let from = |address: AddressVector| AddressVector::new(address.gid, sgid_index);
                peer.modify(match transition {
                    Transition::ReadyToReceive(mut receive) => {
                        receive.address = from(receive.address);
                        Transition::ReadyToReceive(receive)
                    }
                    Transition::ReadyToReceiveUnreliable(mut path) => {
                        path.address = from(path.address);
                        Transition::ReadyToReceiveUnreliable(path)
                    }
                    other => other,
                });
            }
            peer.post_recv(1, 64);
            peer.address.vlan = tag.map(|id| VlanTag { id, priority: 0 });
            let script = message(qp_type, RQ);
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

/// A datagram to an address of several VLANs is answered on the VLAN by which it arrived; without a VLAN, without a tag.
#[test]
fn a_datagram_is_answered_on_its_vlan() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let gid = peer.address.destination;
    let rows = [100, 200].map(|vlan| peer.context.add_gid(GidEntry::new(gid).vlan(vlan)).unwrap());
    // A tag with VLAN 0 only has a priority.
    for (tag, row) in [(Some(200), rows[1]), (Some(100), rows[0]), (Some(0), 0), (None, 0)] {
        let mr = peer.post_recv(1, 64);
        peer.address.vlan = tag.map(|id| VlanTag { id, priority: 3 });
        peer.inject(message(QpType::Ud, RQ));
        let wc = peer.expect_wc(1, WcStatus::Success);
        assert_eq!(wc.vlan.map(NonZeroU16::get), tag.filter(|id| *id != 0));
        let mut header = [0; 40];
        peer.context.read(mr, 0, &mut header).unwrap();
        let back = peer.context.address_from_wc(&wc, &header).unwrap();
        assert_eq!(back.sgid_index, row, "{tag:?}");
    }
}

/// A send that fails before it is sent stops only the send queue of an unreliable queue pair: later sends are flushed,
/// receiving continues, and the application may resume.
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
                // One was sent; the others were not when the address handle is destroyed.
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

            peer.inject(message(qp_type, RQ));
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
    // An address handle of another protection domain is invalid.
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let elsewhere = peer.context.alloc_pd().unwrap();
    let ah = peer.context.create_ah(elsewhere, &peer.way_to(peer.address.source)).unwrap();
    let to = Destination { ah, qpn: PEER_QPN, qkey: peer::QKEY };
    peer.post(1, SendOp::SendTo(to), &[]);
    peer.expect_wc(1, WcStatus::LocQpOpErr);
    peer.expect_state(QpState::Sqe);
    peer.expect_nothing();
}

/// A flush that finds no room in the CQ fails the queue pair, in SQE as in any state.
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
    peer.expect_event(Event::QpFatal(peer.qp));
    peer.expect_wc(1, WcStatus::LocProtErr);
}

/// A receive whose memory may not be written is a local error: it fails, and the queue pair with it.
#[test]
fn a_receive_that_may_not_be_written() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut peer = Peer::with(Setup::of(qp_type));
        let mr = peer.memory_with(&[0xee; 64], Access::NONE);
        let wr = ReceiveWorkRequest { wr_id: 1, sges: &[peer::sge(mr, 64)] };
        peer.context.post_recv(peer.qp, &wr).unwrap();
        peer.post_recv(2, 64);
        peer.inject(message(qp_type, RQ).payload(b"hello"));
        peer.expect_wc(1, WcStatus::LocProtErr);
        peer.expect_wc(2, WcStatus::WrFlushErr);
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr), [0xee; 64]);
        peer.expect_nothing();
    }
}

/// The pad must fill the last word: here it is one byte, after six of payload.
#[test]
fn an_invalid_pad() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut peer = Peer::with(Setup::of(qp_type));
        peer.post_recv(1, 64);
        let mut frame = peer.frame(&message(qp_type, RQ).payload(b"sixsix"));
        frame.remove(frame.len() - 5);
        frame[packet::IP + 3] -= 1;
        frame[packet::UDP + 5] -= 1;
        frame[packet::BTH + 1] ^= 0x30;
        packet::reseal(&mut frame);
        peer.inject_frame(frame);
        peer.expect_counted(Counter::RxInvalidRequest, 1);
        peer.expect_no_wc();
        peer.inject(message(qp_type, RQ + 1).payload(b"sixsix"));
        peer.expect_wc(1, WcStatus::Success);
    }
}

/// A completion queue that overflows fails the queue pair whose completion was lost, and no other member of the same group.
#[test]
fn an_overflow_ends_one_member_of_a_group() {
    let setup = Setup { cq_capacity: 1, ..Setup::of(QpType::Ud) };
    let mut peer = Peer::with(setup);
    let roomy = peer.context.create_cq(8).unwrap();
    let first = peer.qp;
    let config = QpConfig::ud(peer.pd, peer.cq).recv_cq(roomy);
    let second = peer.context.create_qp(&config).unwrap();
    for transition in peer.transitions(&setup) {
        peer.context.modify_qp(second, transition).unwrap();
    }
    let group = Gid::from_ipv4([239, 0, 0, 7].into());
    let mr = peer.memory(&[0; 64]);
    for qp in [first, second] {
        peer.context.attach_mcast(qp, group).unwrap();
        for wr_id in 0..2 {
            let wr = ReceiveWorkRequest { wr_id, sges: &[peer::sge(mr, 64)] };
            peer.context.post_recv(qp, &wr).unwrap();
        }
    }
    peer.address.destination = group;
    let to_group = message(QpType::Ud, 0).dest_qpn(Qpn::MULTICAST);
    peer.inject_all([to_group.clone(), to_group]);
    peer.expect_event(Event::CqErr(peer.cq));
    peer.expect_event(Event::QpFatal(peer.qp));
    peer.expect_state(QpState::Error);
    assert_eq!(peer.context.query_qp(second).unwrap().state, QpState::Rts);
    peer.expect_wc(0, WcStatus::Success);
    for _ in 0..2 {
        assert_eq!(peer.context.poll_cq(roomy).unwrap().unwrap().qp, second);
    }
}

/// The solicited event flag, on datagrams.
#[test]
fn solicited_datagrams() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let to = peer.destination();
    for solicited in [false, true] {
        for op in [SendOp::SendTo(to), SendOp::SendToWithImm(to, 7)] {
            let flags = SendFlags::default().solicited(solicited);
            peer.post_flagged(1, op, Data::Inline(b"hello"), flags);
            let got = peer.take_packets().remove(0);
            assert_eq!(got.bth.solicited(), solicited);
            assert_eq!(got.immediate().is_some(), matches!(op, SendOp::SendToWithImm(..)));
        }
    }
}

/// An update in SQD changes not only the query: the path, the timers, the retries, the remembered responses.
#[test]
fn updates_take_effect() {
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut peer = Peer::with(Setup::of(qp_type));
        let other = Gid::from_ipv4([192, 0, 2, 9].into());
        let address = peer.way_to(other).traffic_class(0x20);
        peer.modify(Transition::Drain);
        peer.expect_event(Event::SqDrained(peer.qp));
        peer.modify(Transition::Update(QpUpdate::default().address(address)));
        peer.modify(Transition::Resume);
        peer.post_flagged(1, SendOp::Send, Data::Inline(b"hello"), SendFlags::default());
        let got = peer.take_packets().remove(0);
        let network = Packet::parse(&got.frame).unwrap().network();
        assert_eq!((got.psn(), network.destination, network.traffic_class), (SQ, other, 0x20));
        // Nothing is accepted from the peer's old address.
        peer.post_recv(2, 8);
        let old = peer.frame(&message(qp_type, RQ));
        peer.expect_dropped(old, Counter::RxWrongAddress);
        peer.address.source = other;
        peer.inject(message(qp_type, RQ));
        peer.expect_wc(2, WcStatus::Success);
    }

    let none = QpUpdate::default();
    let mut peer = Peer::with(Setup { max_dest_rd_atomic: 1, max_rd_atomic: 1, ..Setup::default() });
    peer.modify(Transition::Update(none.min_rnr_timer(RnrTimer::new(5))));
    peer.inject(message(QpType::Rc, RQ));
    peer.expect_nak(packet::NAK_RNR | 5, RQ, 0);
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.modify(Transition::Update(
        none.timeout(10).retry_count(2).rnr_retry(0).max_rd_atomic(2).max_dest_rd_atomic(2),
    ));
    peer.modify(Transition::Resume);
    // Two READs at once, in each direction.
    let mr = peer.memory(&pattern(64));
    let rkey = peer.remote(mr).rkey;
    let read = |psn| packet(Opcode::RC_READ_REQUEST, psn).reth(0, rkey, 64);
    peer.inject_all([read(RQ), read(RQ + 1)]);
    peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ);
    peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ + 1);
    for wr_id in 1..=3 {
        peer.post_read(wr_id, 8);
    }
    assert_eq!(peer.take_packets().len(), 2);
    // Two retries, 4 to 17 ms apart.
    let ttr = Duration::from_nanos(4096 << 10);
    peer.advance(20 * ttr);
    let resent = peer.take_packets();
    assert_eq!(resent.len(), 2 * 2);
    assert!((ttr..=4 * ttr).contains(&resent[2].at.since(resent[0].at)));
    peer.expect_wc(1, WcStatus::RetryExcErr);
    for wr_id in 2..=3 {
        peer.expect_wc(wr_id, WcStatus::WrFlushErr);
    }

    // An RNR NAK fails it if no retry is allowed.
    let mut peer = Peer::new();
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.modify(Transition::Update(none.rnr_retry(0)));
    peer.modify(Transition::Resume);
    peer.post_send(1, b"hello");
    peer.take_packets();
    peer.inject(packet::nak(packet::NAK_RNR | 1, SQ, 0));
    peer.expect_wc(1, WcStatus::RnrRetryExcErr);

    // Withdrawn rights are gone, and the Q_Key is the new one.
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut peer = Peer::with(Setup::of(qp_type));
        let mr = peer.memory(&[0; 8]);
        let rkey = peer.remote(mr).rkey;
        peer.modify(Transition::Update(none.access(Access::REMOTE_READ)));
        let opcode = if qp_type == QpType::Rc { Opcode::RC_WRITE_ONLY } else { Opcode::UC_WRITE_ONLY };
        peer.inject(packet(opcode, RQ).reth(0, rkey, 4).payload(&[1; 4]));
        assert_eq!(peer.bytes(mr), [0; 8]);
        if qp_type == QpType::Rc {
            peer.expect_nak(packet::NAK_INVALID, RQ, 0);
            peer.expect_event(Event::QpReqErr(peer.qp));
        }
    }
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    peer.post_recv(1, 64);
    peer.modify(Transition::Update(none.qkey(5)));
    let old = peer.frame(&message(QpType::Ud, 0));
    peer.expect_dropped(old, Counter::RxQkeyMismatch);
    peer.inject(packet(Opcode::UD_SEND_ONLY, 0).deth(5, PEER_QPN));
    peer.expect_wc(1, WcStatus::Success);
}

/// The first mismatch with the peer's configuration that a packet shows is kept until the queue pair is reset.
#[test]
fn mismatches_are_kept_for_the_application() {
    let mismatch = |peer: &Peer| peer.context.mismatches().map(|(_, mismatch)| mismatch).collect::<Vec<_>>();
    for qp_type in TYPES {
        let mut peer = Peer::with(Setup::of(qp_type));
        peer.post_recv(1, 1000);
        peer.inject(message(qp_type, RQ));
        assert_eq!(mismatch(&peer), [], "{qp_type:?}");
        for other in TYPES.into_iter().filter(|other| *other != qp_type) {
            peer.inject(message(other, RQ + 1));
        }
        let first = TYPES.into_iter().find(|other| *other != qp_type).unwrap();
        let opcode = match first {
            QpType::Rc => Opcode::RC_SEND_ONLY,
            _ => Opcode::UC_SEND_ONLY,
        };
        assert_eq!(mismatch(&peer), [Mismatch::Service { packet: opcode, qp_type }], "{qp_type:?}");
        peer.modify(Transition::Reset);
        assert_eq!(mismatch(&peer), [], "{qp_type:?}");
        peer.end();
    }
    let path_mtu = PathMtu::Mtu256;
    for (qp_type, opcode, payload) in [
        (QpType::Rc, Opcode::RC_SEND_FIRST, 128),
        (QpType::Rc, Opcode::RC_SEND_ONLY, 512),
        (QpType::Uc, Opcode::UC_SEND_FIRST, 512),
    ] {
        let mut peer = Peer::with(Setup { mtu: path_mtu, ..Setup::of(qp_type) });
        peer.post_recv(1, 1000);
        peer.inject(packet(opcode, RQ).payload(&pattern(payload)));
        let expected = Mismatch::PathMtu { packet: opcode, payload: payload as u32, path_mtu };
        assert_eq!(mismatch(&peer), [expected], "{opcode}");
        let text = expected.to_string();
        assert!(text.contains(opcode.name()) && text.contains("256"), "{text}");
        // Other effects are tested elsewhere.
        peer.end();
    }
    // A response whose length does not match the packets of the request.
    let mut peer = Peer::with(Setup { mtu: path_mtu, ..Setup::default() });
    peer.post_read(1, 512);
    peer.take_packets();
    peer.inject(packet::read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &pattern(128)));
    let packet = Opcode::RC_READ_RESPONSE_FIRST;
    assert_eq!(mismatch(&peer), [Mismatch::PathMtu { packet, payload: 128, path_mtu }]);
    peer.end();

    let mut peer = Peer::with(Setup { access: Access::NONE, ..Setup::default() });
    peer.inject(packet::packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, RKey::new(1), 4).payload(b"data"));
    assert_eq!(mismatch(&peer), [Mismatch::Access { packet: Opcode::RC_WRITE_ONLY }]);
    peer.end();
}

fn message(qp_type: QpType, psn: u32) -> packet::Script {
    match qp_type {
        QpType::Rc => packet(Opcode::RC_SEND_ONLY, psn),
        QpType::Uc => packet(Opcode::UC_SEND_ONLY, psn),
        QpType::Ud => packet(Opcode::UD_SEND_ONLY, psn).deth(peer::QKEY, PEER_QPN),
    }
}

/// Only progress resets the retry counters, not a change of other attributes.
#[test]
fn an_update_does_not_grant_new_retries() {
    let mut peer = Peer::with(Setup { retry_count: 1, timeout: 14, ..Setup::default() });
    let timeout = Duration::from_nanos(4096 << 14) * 5 / 4;
    peer.post_write(1, b"lost");
    assert_eq!(peer.take_packets().len(), 1);
    let mut sent = 0;
    for _ in 0..5 {
        peer.modify(Transition::Update(QpUpdate::default().access(Access::NONE)));
        peer.advance(timeout);
        sent += peer.take_packets().len();
        if peer.query().state == QpState::Error {
            break;
        }
    }
    assert_eq!(sent, 1, "one retry");
    peer.expect_wc(1, WcStatus::RetryExcErr);
}

/// Every three consecutive UC packets, with and without a loss among them, compared with the rules of §6 for messages:
/// First or Only starts one, Middle or Last continues one of its kind or is dropped.
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
                    // A WRITE announces its length, which the model need not know.
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

/// The packets of a UC queue pair: consecutive PSNs, no AckReq, and complete when they were sent.
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
            assert!(!got.bth.ack_req());
            assert_eq!(got.immediate().is_some(), opcode.has(wire::Extension::ImmDt));
            assert_eq!(
                got.extensions.reth.map(|reth| reth.length()),
                (opcode == O::UC_WRITE_FIRST).then_some(769)
            );
            sent.push(got);
            psn += 1;
        }
        assert_eq!(packet::payload(&sent), data);
        assert_eq!(peer.expect_wc(wr_id, WcStatus::Success).byte_len, 769);
    }
    // No timer runs, and no answer is awaited.
    assert_eq!(peer.context.next_timeout(), None);
    // An acknowledgement is not one of its packets.
    let frame = peer.frame(&packet::ack(SQ, 1));
    peer.expect_dropped(frame, Counter::RxWrongService);

    // Draining completes the current message, and starts none.
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

    // Datagrams have no partly sent messages.
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
