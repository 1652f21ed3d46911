//! Section E, first part: unreliable connections, datagrams, multicast, shared receive queues.

use ferroce::WcStatus::{LocLenErr, RemInvReqErr, Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{
    Access, Counter, Destination, Error, Event, Gid, MacAddr, PKey, QpConfig, QpState, QpType, Qpn, RKey,
    ReceiveWorkRequest, SendFlags, SendOp, SrqConfig, Transition,
};

use crate::packet::{IP, NAK_INVALID, NAK_RNR, Script, packet};
use crate::peer::{PEER_QPN, Peer, QKEY, RQ, SQ, Setup, pattern, sge};

/// Bytes before a received datagram.
const GRH: usize = 40;

#[test]
fn case_089_uc_message_with_a_loss() {
    use Opcode as O;
    let data = pattern(3 * 256 + 1);
    let part = |i: usize| &data[i * 256..data.len().min((i + 1) * 256)];
    let send = [O::UC_SEND_FIRST, O::UC_SEND_MIDDLE, O::UC_SEND_MIDDLE, O::UC_SEND_LAST];
    let write = [O::UC_WRITE_FIRST, O::UC_WRITE_MIDDLE, O::UC_WRITE_MIDDLE, O::UC_WRITE_LAST_WITH_IMMEDIATE];
    for lost in 0..4 {
        for opcodes in [send, write] {
            let mut peer = Peer::with(Setup::of(QpType::Uc));
            let receive = peer.post_recv(1, 1024);
            let target = peer.memory(&[0xee; 1024]);
            let rkey = peer.remote(target).rkey;
            let mut message = vec![packet(opcodes[0], RQ).payload(part(0))];
            if opcodes == write {
                message[0] = message[0].clone().reth(0, rkey, data.len() as u32);
            }
            message.extend((1..4).map(|i| packet(opcodes[i], RQ + i as u32).payload(part(i))));
            message.remove(lost);
            peer.inject_all(message);
            peer.expect_no_wc();
            peer.expect_nothing();

            // The next message uses the receive, from its start.
            peer.inject(packet(O::UC_SEND_ONLY, RQ + 4).payload(b"next"));
            assert_eq!(peer.expect_wc(1, Success).byte_len, 4);
            assert_eq!(&peer.bytes(receive)[..4], b"next");
            peer.expect_counted(Counter::OutOfSequence, 1);
            peer.expect_counted(Counter::RxIncomplete, 3 - lost as u64);
            assert_eq!(peer.query().rq_psn.value(), RQ + 5);
            peer.expect_state(QpState::Rts);

            // Bytes written by a WRITE stay; after the loss nothing is written.
            let written = if opcodes == write { lost * 256 } else { 0 };
            assert_eq!(peer.bytes(target)[..written], data[..written]);
            assert!(peer.bytes(target)[written..].iter().all(|byte| *byte == 0xee));
        }
    }

    // A message interrupted by another one, without a loss: the same.
    let mut peer = Peer::with(Setup::of(QpType::Uc));
    let receive = peer.post_recv(1, 1024);
    peer.inject(packet(O::UC_SEND_FIRST, RQ).payload(part(0)));
    peer.inject(packet(O::UC_SEND_FIRST, RQ + 1).payload(part(1)));
    peer.inject(packet(O::UC_SEND_LAST_WITH_IMMEDIATE, RQ + 2).imm(7).payload(part(3)));
    let wc = peer.expect_wc(1, Success);
    assert_eq!((wc.byte_len, wc.immediate), (257, Some(7)));
    assert_eq!(peer.bytes(receive)[..257], [part(1), part(3)].concat());
    peer.expect_counted(Counter::OutOfSequence, 0);
}

#[test]
fn case_090_uc_requests_that_cannot_be_executed() {
    use Opcode as O;
    let mut peer = Peer::with(Setup::of(QpType::Uc));
    let mr = peer.memory(&[0xee; 64]);
    let read_only = peer.memory_with(&[0xee; 64], Access::REMOTE_READ);
    let (rkey, read_only) = (peer.remote(mr).rkey, peer.remote(read_only).rkey);
    let mut psn = RQ;
    let mut drop = |peer: &mut Peer, script: Script, reason| {
        peer.expect_refused(script.psn(psn), reason);
        psn += 1;
        assert_eq!(peer.query().rq_psn.value(), psn);
    };
    let write = |key: RKey, va, length, payload: &[u8]| {
        packet(O::UC_WRITE_ONLY, 0).reth(va, key, length).payload(payload)
    };
    let send = |payload: &[u8]| packet(O::UC_SEND_ONLY, 0).payload(payload);
    let with_imm = |key| packet(O::UC_WRITE_ONLY_WITH_IMMEDIATE, 0).reth(0, key, 4).imm(1).payload(&[1; 4]);

    drop(&mut peer, send(b"hello"), Counter::OutOfBuffer);
    drop(&mut peer, with_imm(rkey), Counter::OutOfBuffer);
    peer.post_recv(1, 8);
    drop(&mut peer, write(RKey::new(!rkey.value()), 0, 4, &[1; 4]), Counter::RxAccessErrors);
    drop(&mut peer, write(read_only, 0, 4, &[1; 4]), Counter::RxAccessErrors);
    drop(&mut peer, write(rkey, 61, 4, &[1; 4]), Counter::RxAccessErrors);
    drop(&mut peer, write(rkey, u64::MAX - 1, 4, &[1; 4]), Counter::RxAccessErrors);
    drop(&mut peer, with_imm(RKey::new(!rkey.value())), Counter::RxAccessErrors);
    drop(&mut peer, write(rkey, 0, 5, &[1; 4]), Counter::RxInvalidRequest);
    drop(&mut peer, write(rkey, 0, (1 << 31) + 1, &[1; 4]), Counter::RxInvalidRequest);
    drop(&mut peer, send(&[1; 9]), Counter::RxTooLong);
    drop(&mut peer, send(&[1; 257]), Counter::RxInvalidRequest);
    drop(&mut peer, packet(O::UC_SEND_FIRST, 0).payload(&[1; 255]), Counter::RxInvalidRequest);
    // The rest of a message whose first packet was refused.
    drop(&mut peer, packet(O::UC_SEND_LAST, 0).payload(&[1; 4]), Counter::RxIncomplete);
    assert_eq!(peer.bytes(mr), [0xee; 64]);

    // A zero length is not checked.
    peer.inject(write(RKey::new(!rkey.value()), 0, 0, b"").psn(psn));
    peer.inject(send(b"good").psn(psn + 1));
    peer.expect_wc(1, Success);
    peer.inject(write(rkey, 0, 4, &[1; 4]).psn(psn + 2));
    assert_eq!(peer.bytes(mr)[..5], [1, 1, 1, 1, 0xee]);
    peer.expect_state(QpState::Rts);

    // A message that becomes invalid: the rest of it is dropped as well.
    let mut peer = Peer::with(Setup::of(QpType::Uc));
    let receive = peer.post_recv(1, 300);
    let mr = peer.memory(&[0xee; 1024]);
    let rkey = peer.remote(mr).rkey;
    let full = [1; 256];
    let write_first = packet(O::UC_WRITE_FIRST, 0).reth(0, rkey, 600);
    let messages = [
        (packet(O::UC_SEND_FIRST, 0), packet(O::UC_SEND_MIDDLE, 0).payload(&[2; 255]), O::UC_SEND_LAST),
        (packet(O::UC_SEND_FIRST, 0), packet(O::UC_SEND_MIDDLE, 0).payload(&[2; 256]), O::UC_SEND_LAST),
        (write_first.clone(), packet(O::UC_WRITE_MIDDLE, 0).payload(&[2; 257]), O::UC_WRITE_LAST),
        (write_first, packet(O::UC_WRITE_LAST, 0).payload(&[2; 2]), O::UC_WRITE_LAST),
    ];
    let reasons =
        [Counter::RxInvalidRequest, Counter::RxTooLong, Counter::RxInvalidRequest, Counter::RxInvalidRequest];
    let mut psn = RQ;
    for ((first, wrong, last), reason) in messages.into_iter().zip(reasons) {
        peer.inject(first.psn(psn).payload(&full));
        peer.expect_refused(wrong.psn(psn + 1), reason);
        peer.expect_refused(packet(last, psn + 2).payload(&[3; 88]), Counter::RxIncomplete);
        psn += 3;
    }
    assert_eq!(peer.bytes(mr)[..257], [&full[..], &[0xee]].concat());
    peer.inject(send(b"good").psn(psn));
    assert_eq!(peer.expect_wc(1, Success).byte_len, 4);
    assert_eq!(&peer.bytes(receive)[..5], b"good\x01");

    // A queue pair that permits no WRITE.
    let mut peer = Peer::with(Setup { access: Access::LOCAL_WRITE, ..Setup::of(QpType::Uc) });
    let mr = peer.memory(&[0xee; 64]);
    let rkey = peer.remote(mr).rkey;
    peer.expect_refused(write(rkey, 0, 4, &[1; 4]).psn(RQ), Counter::RxInvalidRequest);
    assert_eq!(peer.bytes(mr), [0xee; 64]);
}

#[test]
fn case_091_ud_receive_starts_with_the_network_header() {
    for ipv6 in [false, true] {
        let mut peer = Peer::with(Setup { ipv6, ..Setup::of(QpType::Ud) });
        peer.address.traffic_class = 0xb9;
        peer.address.hop_limit = 7;
        peer.address.flow_label = if ipv6 { 0x12345 } else { 0 };
        let datagrams = [
            (datagram(RQ, b"hello"), None),
            (
                packet(Opcode::UD_SEND_ONLY_WITH_IMMEDIATE, 7).deth(QKEY, PEER_QPN).imm(9).payload(b"hello"),
                Some(9),
            ),
        ];
        for (script, immediate) in datagrams {
            let mr = peer.post_recv(1, GRH + 8);
            peer.bytes_mut(mr).fill(0xee);
            let frame = peer.frame(&script);
            peer.inject(script);
            let wc = peer.expect_wc(1, Success);
            assert_eq!((wc.byte_len, wc.grh, wc.immediate), (45, true, immediate));
            assert_eq!((wc.qp, wc.src_qpn), (peer.qp, PEER_QPN));
            let bytes = peer.bytes(mr);
            if ipv6 {
                assert_eq!(bytes[..GRH], frame[IP..IP + GRH]);
            } else {
                assert_eq!(bytes[..20], [0; 20]);
                assert_eq!(bytes[20..GRH], frame[IP..IP + 20]);
            }
            assert_eq!(&bytes[GRH..], b"hello\xee\xee\xee", "the pad is not delivered");
        }
        // An empty datagram is valid too.
        peer.post_recv(2, GRH);
        peer.inject(datagram(0, b""));
        assert_eq!(peer.expect_wc(2, Success).byte_len, 40);
        peer.expect_nothing();
    }
}

#[test]
fn case_092_ud_datagrams_that_cannot_be_received() {
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let frame = |peer: &Peer, script: Script| peer.frame(&script);
    let good = frame(&peer, datagram(0, b"hello"));
    peer.expect_dropped(good.clone(), Counter::OutOfBuffer);
    let mr = peer.post_recv(1, GRH + 5);
    for qkey in [QKEY + 1, 0, QKEY | 1 << 31, 0x8001_0000] {
        let other = packet(Opcode::UD_SEND_ONLY, 0).deth(qkey, PEER_QPN).payload(b"hello");
        let other = frame(&peer, other);
        peer.expect_dropped(other, Counter::RxQkeyMismatch);
    }
    for length in [6, 4096] {
        let long = frame(&peer, datagram(0, &pattern(length)));
        peer.expect_dropped(long, Counter::RxTooLong);
    }
    // To an address that is not this port's, with everything else valid.
    let own = peer.address.destination;
    peer.address.destination = Gid::from_ipv4([192, 0, 2, 99].into());
    let stray = frame(&peer, datagram(0, b"hello"));
    peer.expect_dropped(stray, Counter::RxWrongAddress);
    peer.address.destination = own;
    assert_eq!(peer.bytes(mr), [0; GRH + 5], "nothing of them was written");

    // Any sender is accepted, and PSNs are ignored.
    for (psn, source) in [(7, Qpn::new(5)), (7, PEER_QPN), (3, PEER_QPN)] {
        peer.inject(packet(Opcode::UD_SEND_ONLY, psn).deth(QKEY, source).payload(b"hello"));
        assert_eq!(peer.expect_wc(1, Success).src_qpn, source);
        peer.post_recv(1, GRH + 5);
    }
    // A receive without room for the header.
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    peer.post_recv(1, GRH - 1);
    let empty = frame(&peer, datagram(0, b""));
    peer.expect_dropped(empty, Counter::RxTooLong);
    peer.expect_state(QpState::Rts);
}

#[test]
fn case_093_ud_send_longer_than_a_packet() {
    for ipv6 in [false, true] {
        // An interface of 9000 bytes: the path MTU is 4096.
        let mut peer = Peer::with(Setup { ipv6, ..Setup::of(QpType::Ud) });
        let to = peer.destination();
        let data = pattern(8192);
        let mr = peer.memory(&data);
        let send = |peer: &mut Peer, wr_id, length| peer.post(wr_id, SendOp::SendTo(to), &[sge(mr, length)]);
        send(&mut peer, 1, 4097);
        send(&mut peer, 2, 8192);
        send(&mut peer, 3, 4096);
        for wr_id in 1..=3 {
            assert_eq!(peer.expect_wc(wr_id, Success).wr_id, wr_id);
        }
        let got = peer.expect(Opcode::UD_SEND_ONLY, SQ);
        assert_eq!(got.payload, data[..4096], "the PSNs of the others were not taken");
        assert_eq!(got.extensions.deth.map(|deth| (deth.qkey(), deth.source_qpn())), Some((QKEY, peer.qpn)));
        assert!(!got.bth.ack_req());
        peer.expect_nothing();
        peer.expect_counted(Counter::TxTooLong, 2);

        // An unsignaled one.
        let data = ferroce::Data::Sges(&[sge(mr, 4097)]);
        peer.post_flagged(4, SendOp::SendToWithImm(to, 5), data, SendFlags::default());
        peer.expect_no_wc();
        peer.expect_nothing();
        assert_eq!((peer.query().outstanding_sends, peer.query().state), (0, QpState::Rts));
    }
}

#[test]
fn case_097_shared_receive_queue() {
    let rc = Setup { srq: Some(8), ..Setup::default() };
    srq_limit(rc);
    srq_last_wqe(rc);
    srq_of_several_queue_pairs(rc);
    srq_empty(rc);
}

fn srq_limit(setup: Setup) {
    let mut peer = Peer::with(setup);
    let srq = peer.srq.unwrap();
    let mut psn = RQ;
    let mut take = |peer: &mut Peer| {
        peer.inject(packet(Opcode::RC_SEND_ONLY, psn).ack_req().payload(b"hello"));
        peer.expect_ack(psn, psn - RQ + 1);
        peer.expect_wc(u64::from(psn - RQ), Success);
        psn += 1;
    };
    let posted = |peer: &Peer| peer.context.query_srq(srq).unwrap().posted;
    for wr_id in 0..6 {
        peer.post_recv(wr_id, 8);
    }
    peer.context.arm_srq(srq, 4).unwrap();
    take(&mut peer);
    take(&mut peer);
    assert_eq!(posted(&peer), 4);
    peer.expect_no_event();
    take(&mut peer);
    peer.expect_event(Event::SrqLimitReached(srq));
    assert_eq!(peer.context.query_srq(srq).unwrap().limit, 0);
    // Once: below the limit, and again after arming.
    take(&mut peer);
    peer.post_recv(6, 8);
    peer.post_recv(7, 8);
    assert_eq!(posted(&peer), 4);
    take(&mut peer);
    peer.expect_no_event();

    // Armed again; 0 disarms it.
    peer.context.arm_srq(srq, 3).unwrap();
    take(&mut peer);
    peer.expect_event(Event::SrqLimitReached(srq));
    peer.context.arm_srq(srq, 2).unwrap();
    peer.context.arm_srq(srq, 0).unwrap();
    take(&mut peer);
    assert_eq!(posted(&peer), 1);
    peer.expect_no_event();

    // Already below.
    peer.context.arm_srq(srq, 1).unwrap();
    peer.expect_no_event();
    peer.context.arm_srq(srq, 2).unwrap();
    peer.expect_event(Event::SrqLimitReached(srq));
    peer.expect_no_event();
    let refused = peer.context.arm_srq(srq, 9);
    assert!(matches!(refused, Err(Error::Invalid { attribute: "SRQ limit", .. })));
    take(&mut peer);
    peer.context.arm_srq(srq, 1).unwrap();
    peer.expect_event(Event::SrqLimitReached(srq));
}

fn srq_last_wqe(setup: Setup) {
    // By the application, idle and with a current receive; and by a bad request.
    for in_hand in [false, true] {
        let mut peer = Peer::with(setup);
        let srq = peer.srq.unwrap();
        for wr_id in 1..=3 {
            peer.post_recv(wr_id, 512);
        }
        peer.post_send(10, b"out");
        peer.expect(Opcode::RC_SEND_ONLY, SQ);
        if in_hand {
            peer.inject(packet(Opcode::RC_SEND_FIRST, RQ).payload(&pattern(256)));
            assert_eq!(peer.query().outstanding_receives, 1);
        }
        peer.modify(Transition::Error);
        peer.expect_wc(10, WrFlushErr);
        if in_hand {
            peer.expect_wc(1, WrFlushErr);
        }
        peer.expect_no_wc();
        peer.expect_event(Event::QpLastWqeReached(peer.qp));
        let left = if in_hand { 2 } else { 3 };
        assert_eq!(peer.context.query_srq(srq).unwrap().posted, left, "the SRQ is not flushed");
        // It is in ERR already.
        peer.modify(Transition::Error);
        peer.expect_no_event();
    }
    let mut peer = Peer::with(setup);
    peer.post_recv(1, 512);
    peer.post_recv(2, 512);
    peer.inject(packet(Opcode::RC_SEND_FIRST, RQ).payload(&pattern(256)));
    peer.inject(packet(Opcode::RC_WRITE_MIDDLE, RQ + 1).payload(&pattern(256)));
    peer.expect_nak(NAK_INVALID, RQ + 1, 0);
    peer.expect_wc(1, RemInvReqErr);
    peer.expect_event(Event::QpLastWqeReached(peer.qp));
    assert_eq!(peer.context.query_srq(peer.srq.unwrap()).unwrap().posted, 1);

    // Without an SRQ there is no such event.
    let mut peer = Peer::new();
    peer.modify(Transition::Error);
    peer.expect_no_event();
}

fn srq_of_several_queue_pairs(setup: Setup) {
    let mut peer = Peer::with(setup);
    let srq = peer.srq.unwrap();
    let others = [peer.another_qp(&setup), peer.another_qp(&setup)];
    let qps = [peer.qp, others[0], others[1]];
    let qpns = qps.map(|qp| peer.context.query_qp(qp).unwrap().qpn);
    let memory: Vec<_> = (0..4).map(|wr_id| peer.post_recv(wr_id, 512)).collect();
    // Each takes the oldest when its message begins, and keeps it while others are taken.
    let first = |i: usize| packet(Opcode::RC_SEND_FIRST, RQ).dest_qpn(qpns[i]).payload(&[i as u8; 256]);
    let last =
        |i: usize| packet(Opcode::RC_SEND_LAST, RQ + 1).dest_qpn(qpns[i]).payload(&[i as u8; 3]).ack_req();
    for i in 0..3 {
        peer.inject(first(i));
    }
    assert_eq!(peer.context.query_srq(srq).unwrap().posted, 1);
    for i in [2, 0, 1] {
        peer.inject(last(i));
        peer.expect_ack(RQ + 1, 1);
        let wc = peer.expect_wc(i as u64, Success);
        assert_eq!((wc.qp, wc.qpn, wc.byte_len), (qps[i], qpns[i], 259));
        assert_eq!(peer.bytes(memory[i])[..259], [i as u8; 259]);
    }
    // One fails because of its own receive; the others continue.
    let refused = packet(Opcode::RC_SEND_ONLY, RQ + 2).dest_qpn(qpns[1]).payload(&[1; 256]);
    peer.context.destroy_qp(qps[2]).unwrap();
    peer.post_recv(4, 8);
    peer.inject(refused);
    peer.expect_wc(3, Success);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 3).dest_qpn(qpns[1]).payload(&[1; 9]));
    peer.expect_nak(NAK_INVALID, RQ + 3, 2);
    peer.expect_wc(4, LocLenErr);
    peer.expect_event(Event::QpLastWqeReached(qps[1]));
    peer.post_recv(5, 8);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 2).payload(b"on").ack_req());
    peer.expect_ack(RQ + 2, 2);
    assert_eq!(peer.expect_wc(5, Success).qp, qps[0]);

    // It can be destroyed when no queue pair uses it, with its posted receives.
    let refused = peer.context.destroy_srq(srq);
    assert!(matches!(refused, Err(Error::Busy { kind: "SRQ", .. })));
    let last = peer.post_recv(6, 8);
    peer.context.arm_srq(srq, 8).unwrap();
    for qp in &qps[..2] {
        peer.context.destroy_qp(*qp).unwrap();
    }
    assert!(peer.context.deregister(last).is_err(), "a posted receive names it");
    peer.context.destroy_srq(srq).unwrap();
    assert!(peer.context.deregister(last).is_ok());
    assert!(peer.context.query_srq(srq).is_err() && peer.context.next_event().is_none());
}

fn srq_empty(setup: Setup) {
    let mut peer = Peer::with(setup);
    let send = packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req();
    peer.inject(send.clone());
    peer.expect_nak(NAK_RNR | 12, RQ, 0);
    peer.post_recv(1, 8);
    peer.inject(send);
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);

    // A datagram is dropped; a receive that is too short for it stays for the next.
    let mut peer = Peer::with(Setup { srq: Some(8), ..Setup::of(QpType::Ud) });
    let srq = peer.srq.unwrap();
    let frame = peer.frame(&datagram(0, b"hello"));
    peer.expect_dropped(frame, Counter::OutOfBuffer);
    peer.post_recv(1, GRH + 5);
    peer.post_recv(2, GRH + 5);
    peer.context.arm_srq(srq, 2).unwrap();
    peer.inject(datagram(0, b"longer"));
    peer.expect_counted(Counter::RxTooLong, 1);
    peer.expect_event(Event::SrqLimitReached(srq));
    peer.inject(datagram(0, b"hello"));
    assert_eq!(peer.expect_wc(1, Success).byte_len, 45);
    peer.modify(Transition::Error);
    peer.expect_event(Event::QpLastWqeReached(peer.qp));
    assert_eq!(peer.context.query_srq(srq).unwrap().posted, 1);

    // An SRQ is not for UC, and a queue pair with an SRQ has no receives of its own.
    let config = SrqConfig::new(peer.pd).max_wr(1).max_sge(1);
    let srq = peer.context.create_srq(&config).unwrap();
    let uc = QpConfig::uc(peer.pd, peer.cq).srq(srq);
    assert!(matches!(peer.context.create_qp(&uc), Err(Error::Invalid { attribute: "srq", .. })));
    let refused = peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] });
    assert!(matches!(refused, Err(Error::Invalid { attribute: "qp", .. })));
}

#[test]
fn case_100_multicast() {
    let v4 = |last| Gid::from_ipv4([239, 1, 2, last].into());
    let v6 =
        |last| Gid::from(std::net::IpAddr::from([0xff0e, 0, 0, 0, 0, 0, 0x102, 0x300 + u16::from(last)]));
    for ipv6 in [false, true] {
        let group = |last| if ipv6 { v6(last) } else { v4(last) };
        let mac = |last| match ipv6 {
            true => MacAddr([0x33, 0x33, 1, 2, 3, last]),
            false => MacAddr([1, 0, 0x5e, 1, 2, last]),
        };
        let setup = Setup { ipv6, ..Setup::of(QpType::Ud) };
        let mut peer = Peer::with(setup);
        let mut qps = vec![peer.qp];
        qps.extend((0..4).map(|_| peer.another_qp(&setup)));
        peer.address.destination_mac = mac(1);
        peer.address.destination = group(1);
        let to_group = datagram(0, b"hello").dest_qpn(Qpn::MULTICAST);
        let frame = peer.frame(&to_group);
        let own = peer.frame(&datagram(0, b"hello"));
        peer.expect_dropped(frame.clone(), Counter::RxUnknownQp);
        // To a group, but with the number of one queue pair.
        peer.expect_dropped(own, Counter::RxWrongAddress);

        // All except the last join the group, the last another one.
        for qp in &qps[..4] {
            peer.context.attach_mcast(*qp, group(1)).unwrap();
            peer.context.attach_mcast(*qp, group(1)).unwrap();
        }
        peer.context.attach_mcast(qps[4], group(2)).unwrap();
        let post = |peer: &mut Peer, n: usize| {
            let mr = peer.memory(&[0xee; GRH + 8]);
            let wr = ReceiveWorkRequest { wr_id: n as u64, sges: &[sge(mr, GRH + 8)] };
            peer.context.post_recv(qps[n], &wr).unwrap();
            mr
        };
        // Each gets its own copy, header included; one has no receive, which does not affect the others.
        let memory: Vec<_> = [0, 1, 3, 4].into_iter().map(|n| post(&mut peer, n)).collect();
        peer.inject_frame(frame.clone());
        for (i, n) in [0, 1, 3].into_iter().enumerate() {
            let wc = peer.expect_wc(n as u64, Success);
            assert_eq!((wc.qp, wc.byte_len, wc.grh, wc.src_qpn), (qps[n], 45, true, PEER_QPN));
            let header = if ipv6 { 40 } else { 20 };
            let bytes = peer.bytes(memory[i]);
            assert!(bytes[..GRH - header].iter().all(|byte| *byte == 0));
            assert_eq!(bytes[GRH - header..GRH], frame[IP..IP + header]);
            assert_eq!(&bytes[GRH..], b"hello\xee\xee\xee");
        }
        peer.expect_no_wc();
        peer.expect_counted(Counter::OutOfBuffer, 1);
        assert_eq!(peer.bytes(memory[3]), [0xee; GRH + 8]);

        // Packets that a queue pair would refuse are refused from a group too.
        let wrong_key = packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY + 1, PEER_QPN).dest_qpn(Qpn::MULTICAST);
        peer.inject(wrong_key);
        peer.expect_counted(Counter::RxQkeyMismatch, 4);
        let reliable = packet(Opcode::RC_SEND_ONLY, RQ).dest_qpn(Qpn::MULTICAST);
        let reliable = peer.frame(&reliable);
        peer.expect_dropped(reliable, Counter::RxWrongService);
        let pkey = peer.frame(&to_group.clone().pkey(0x1234));
        peer.expect_foreign(pkey, None, PKey(0x1234));

        // After leaving, nothing is received; when all have left, the group is unknown.
        for qp in &qps[..3] {
            peer.context.detach_mcast(*qp, group(1)).unwrap();
        }
        let refused = peer.context.detach_mcast(qps[0], group(1));
        assert!(matches!(refused, Err(Error::Invalid { attribute: "group", .. })));
        post(&mut peer, 0);
        post(&mut peer, 3);
        peer.inject_frame(frame.clone());
        peer.expect_wc(3, Success);
        peer.expect_no_wc();
        let refused = peer.context.destroy_qp(qps[3]);
        assert!(matches!(refused, Err(Error::Busy { kind: "QP", .. })));
        peer.context.detach_mcast(qps[3], group(1)).unwrap();
        peer.context.destroy_qp(qps[3]).unwrap();
        peer.expect_dropped(frame, Counter::RxUnknownQp);
        peer.address.destination = group(2);
        peer.inject(to_group);
        peer.expect_wc(4, Success);

        // Sending: the hardware address is the group's, without a resolution.
        let way = peer.way_to(group(1)).mac(None);
        let ah = peer.context.create_ah(peer.pd, &way).unwrap();
        let mr = peer.memory(b"to all");
        peer.post(9, SendOp::SendTo(Destination { ah, qpn: Qpn::MULTICAST, qkey: QKEY }), &[sge(mr, 6)]);
        let got = peer.expect(Opcode::UD_SEND_ONLY, SQ);
        assert_eq!((got.bth.dest_qpn(), &got.payload[..]), (Qpn::MULTICAST, &b"to all"[..]));
        assert_eq!(got.frame[..6], mac(1).0);
        let destination = if ipv6 { IP + 24..IP + 40 } else { IP + 16..IP + 20 };
        assert_eq!(got.frame[destination.clone()], group(1).0[16 - destination.len()..]);
        peer.expect_wc(9, Success);
    }
    // Only datagrams, and only groups.
    let mut peer = Peer::new();
    let refused = peer.context.attach_mcast(peer.qp, v4(1));
    assert!(matches!(refused, Err(Error::Invalid { attribute: "qp", .. })));
    let mut peer = Peer::with(Setup::of(QpType::Ud));
    let refused = peer.context.attach_mcast(peer.qp, Gid::from_ipv4([10, 0, 0, 1].into()));
    assert!(matches!(refused, Err(Error::Invalid { attribute: "group", .. })));
    let way = peer.way_to(v6(1));
    let refused = peer.context.create_ah(peer.pd, &way);
    assert!(matches!(refused, Err(Error::AddressFamily { .. })));
}

/// A datagram from the peer.
fn datagram(psn: u32, payload: &[u8]) -> Script {
    packet(Opcode::UD_SEND_ONLY, psn).deth(QKEY, PEER_QPN).payload(payload)
}
