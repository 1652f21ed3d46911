//! Section D, last part: receives, regions, completion queues and other resources of the responder; atomics, and the
//! opcodes of responses.

use std::time::Duration;

use ferroce::WcStatus::{LocLenErr, LocProtErr, RemInvReqErr, Success, WrFlushErr};
use ferroce::wire::{Opcode, Syndrome};
use ferroce::{
    Access, Counter, Event, Memory, QpState, RKey, ReceiveWorkRequest, SendOp, Sge, Transition, WcOpcode,
};

use crate::packet::{NAK_ACCESS, NAK_INVALID, NAK_OPERATIONAL, NAK_RNR, Script, packet, payload};
use crate::pairs::{Pairs, QPS};
use crate::peer::{Peer, RQ, SQ, Setup, all_access, pattern};

#[test]
fn case_076_atomics_of_many_queue_pairs() {
    const ADDS: u64 = 100_000;
    const DEPTH: u64 = 16;
    let mut pairs = Pairs::new();
    let add = SendOp::FetchAdd { remote: pairs.remote(0), add: 1 };
    let mut seen = vec![false; QPS * ADDS as usize];
    let (mut posted, mut done, mut turns) = ([0; QPS], [0; QPS], 0);
    while done != [ADDS; QPS] {
        turns += 1;
        assert!(turns < 1_000_000, "no end: {done:?}");
        for i in 0..QPS {
            // Each time another one is first.
            let q = (i + turns) % QPS;
            while posted[q] < ADDS && posted[q] < done[q] + DEPTH {
                pairs.post(q, posted[q], add, posted[q] % DEPTH);
                posted[q] += 1;
            }
        }
        for (q, wr_id) in pairs.poll() {
            assert_eq!(wr_id, done[q], "in order");
            done[q] += 1;
            let original = pairs.result(q, wr_id % DEPTH);
            assert!(!std::mem::replace(&mut seen[original as usize], true), "{original} was seen twice");
        }
    }
    assert_eq!(pairs.word(0), QPS as u64 * ADDS);
    assert!(seen.iter().all(|seen| *seen));

    let mut current = 0;
    for round in 1..=100 {
        let mine = |q: usize| round * QPS as u64 + q as u64;
        for i in 0..QPS {
            let q = (i + round as usize) % QPS;
            let swap = SendOp::CompareSwap { remote: pairs.remote(8), compare: current, swap: mine(q) };
            pairs.post(q, round, swap, 0);
        }
        let mut completed = 0;
        while completed < QPS {
            turns += 1;
            assert!(turns < 2_000_000, "no end in round {round}");
            completed += pairs.poll().len();
        }
        let winners: Vec<usize> = (0..QPS).filter(|q| pairs.result(*q, 0) == current).collect();
        let [winner] = winners[..] else { panic!("round {round}: winners {winners:?}") };
        current = mine(winner);
        assert_eq!(pairs.word(8), current);
        assert!((0..QPS).all(|q| q == winner || pairs.result(q, 0) == current));
    }
}

#[test]
fn case_077_no_receive() {
    let timer = 19;
    let messages = [
        vec![packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req()],
        vec![
            packet(Opcode::RC_SEND_FIRST, RQ).payload(&pattern(256)),
            packet(Opcode::RC_SEND_LAST, RQ + 1).payload(b"end").ack_req(),
        ],
    ];
    for (message, bytes) in messages.into_iter().zip([5, 259]) {
        let mut peer = Peer::with(Setup { min_rnr_timer: timer, ..Setup::default() });
        let last = RQ + message.len() as u32 - 1;
        let next = packet(Opcode::RC_SEND_ONLY, last + 1).ack_req();
        for _ in 0..3 {
            // Later packets are dropped silently: the first packet was requested already.
            peer.inject_all(message.clone());
            peer.inject(next.clone());
            peer.expect_nak(NAK_RNR | timer, RQ, 0);
            peer.expect_nothing();
            assert_eq!(peer.query().rq_psn.value(), RQ);
            peer.expect_state(QpState::Rts);
        }
        peer.expect_counted(Counter::SendRnrErr, 3);
        peer.post_recv(1, 512);
        peer.post_recv(2, 512);
        // Once is enough.
        for _ in 0..2 {
            peer.inject_all(message.clone());
            peer.expect_ack(last, 1);
        }
        assert_eq!(peer.expect_wc(1, Success).byte_len, bytes);
        peer.expect_no_wc();
        peer.inject(next);
        peer.expect_ack(last + 1, 2);
        assert_eq!(peer.expect_wc(2, Success).byte_len, 0);
    }
}

#[test]
fn case_078_no_receive_for_an_immediate() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 1024]);
    let rkey = peer.remote(mr).rkey;
    let data = pattern(600);
    let message = [
        packet(Opcode::RC_WRITE_FIRST, RQ).reth(0, rkey, 600).payload(&data[..256]),
        packet(Opcode::RC_WRITE_MIDDLE, RQ + 1).payload(&data[256..512]),
        packet(Opcode::RC_WRITE_LAST_WITH_IMMEDIATE, RQ + 2).imm(42).payload(&data[512..]).ack_req(),
    ];
    peer.inject_all(message.clone());
    peer.expect_nak(NAK_RNR | 12, RQ + 2, 0);
    peer.expect_no_wc();
    let resend = message[2].clone();
    peer.inject(resend.clone());
    peer.expect_nak(NAK_RNR | 12, RQ + 2, 0);
    let untouched = peer.post_recv(1, 8);
    peer.post_recv(2, 0);
    peer.inject(resend);
    peer.expect_ack(RQ + 2, 1);
    let wc = peer.expect_wc(1, Success);
    assert_eq!((wc.opcode, wc.byte_len, wc.immediate), (WcOpcode::RecvRdmaWithImm, 600, Some(42)));
    assert_eq!(peer.bytes(mr)[..600], data);
    assert_eq!(peer.bytes(untouched), [0; 8], "the data is not for the receive");
    peer.inject_all(message);
    peer.expect_ack(RQ + 2, 1);
    peer.expect_no_wc();

    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 8]);
    let rkey = peer.remote(mr).rkey;
    let only =
        packet(Opcode::RC_WRITE_ONLY_WITH_IMMEDIATE, RQ).reth(0, rkey, 8).imm(1).payload(&[7; 8]).ack_req();
    peer.inject(only.clone());
    peer.expect_nak(NAK_RNR | 12, RQ, 0);
    peer.post_recv(1, 0);
    peer.inject(only);
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.expect_wc(1, Success).byte_len, 8);
    assert_eq!(peer.bytes(mr), [7; 8]);
}

#[test]
fn case_079_message_longer_than_the_receive() {
    let (only, first, last) = (Opcode::RC_SEND_ONLY, Opcode::RC_SEND_FIRST, Opcode::RC_SEND_LAST);
    let data = pattern(256);
    // The receive, the packets, which of them is too much, and the bytes that may have been written.
    let cases: [(usize, Vec<Script>, u32, usize); 4] = [
        (64, vec![packet(only, RQ).payload(&data[..65])], 0, 0),
        (0, vec![packet(only, RQ).payload(&data[..1])], 0, 0),
        (255, vec![packet(first, RQ).payload(&data)], 0, 0),
        (300, vec![packet(first, RQ).payload(&data), packet(last, RQ + 1).payload(&data[..45])], 1, 256),
    ];
    for (length, packets, wrong, written) in cases {
        let mut peer = Peer::new();
        // The region is longer than the receive.
        let mr = peer.memory(&[0; 1024]);
        receive(&mut peer, 11, Sge { mr, offset: 0, length: length as u32 });
        peer.post_recv(12, 1024);
        peer.post_send(1, b"under way");
        peer.expect(only, SQ);
        peer.inject_all(packets);
        peer.expect_nak(NAK_INVALID, RQ + wrong, 0);
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr)[written..], [0; 1024][written..]);
        let mut ends: Vec<_> = std::iter::from_fn(|| peer.context.poll_cq(peer.cq).unwrap())
            .map(|wc| (wc.wr_id, wc.status))
            .collect();
        ends.sort_by_key(|(id, _)| *id < 10);
        assert_eq!(ends, [(11, LocLenErr), (12, WrFlushErr), (1, WrFlushErr)]);
    }
}

#[test]
fn case_080_receive_that_may_not_be_written() {
    for fault in ["read only", "in another PD", "over the end"] {
        let mut peer = Peer::new();
        let (pd, access) = match fault {
            "read only" => (peer.pd, Access::REMOTE_READ),
            "in another PD" => (peer.context.alloc_pd().unwrap(), all_access()),
            _ => (peer.pd, all_access()),
        };
        let mr = peer.context.register(pd, Memory::zeroed(64).unwrap(), access).unwrap();
        let length = if fault == "over the end" { 65 } else { 64 };
        receive(&mut peer, 1, Sge { mr, offset: 0, length });
        peer.post_recv(2, 64);
        peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req());
        assert_eq!(peer.bytes(mr), [0; 64], "{fault}");
        peer.expect_nak(NAK_OPERATIONAL, RQ, 0);
        peer.expect_state(QpState::Error);
        peer.expect_wc(1, LocProtErr);
        peer.expect_wc(2, WrFlushErr);
    }
}

#[test]
fn case_081_send_with_invalidate() {
    for long in [false, true] {
        let mut peer = Peer::new();
        let mr = peer.memory(&pattern(300));
        let rkey = peer.remote(mr).rkey;
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 300));
        assert_eq!(payload(&peer.take_packets()), pattern(300));
        peer.post_recv(1, 512);
        let psn = RQ + 2;
        let send = match long {
            false => {
                vec![packet(Opcode::RC_SEND_ONLY_WITH_INVALIDATE, psn).ieth(rkey).payload(b"bye").ack_req()]
            }
            true => vec![
                packet(Opcode::RC_SEND_FIRST, psn).payload(&pattern(256)),
                packet(Opcode::RC_SEND_LAST_WITH_INVALIDATE, psn + 1).ieth(rkey).payload(b"bye").ack_req(),
            ],
        };
        let next = psn + send.len() as u32;
        peer.inject_all(send);
        let wc = peer.expect_wc(1, Success);
        assert_eq!((wc.opcode, wc.invalidated), (WcOpcode::Recv, Some(rkey)));
        peer.expect_ack(next - 1, 2);
        // Not even for a READ that was permitted before.
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 300));
        peer.expect_nothing();
        peer.inject(packet(Opcode::RC_WRITE_ONLY, next).reth(0, rkey, 1).payload(&[0xee]));
        peer.expect_nak(NAK_ACCESS, next, 2);
        peer.expect_event(Event::QpAccessErr(peer.qp));
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr), pattern(300));
    }
    // A key that does not exist, is revoked, or may not be revoked by a peer.
    for fault in ["bogus", "revoked", "not for peers", "in another PD"] {
        let mut peer = Peer::new();
        let access = if fault == "not for peers" { Access::REMOTE_READ } else { all_access() };
        let pd = if fault == "in another PD" { peer.context.alloc_pd().unwrap() } else { peer.pd };
        let mr = peer.context.register(pd, Memory::zeroed(8).unwrap(), access).unwrap();
        let rkey = if fault == "bogus" { RKey::new(0xdead_beef) } else { peer.remote(mr).rkey };
        let times = if fault == "revoked" { 2 } else { 1 };
        let invalidate = |psn| packet(Opcode::RC_SEND_ONLY_WITH_INVALIDATE, psn).ieth(rkey);
        for i in 1..times {
            peer.post_recv(0, 8);
            peer.inject(invalidate(RQ + i - 1));
            peer.expect_wc(0, Success);
        }
        peer.post_recv(1, 8);
        peer.inject(invalidate(RQ + times - 1));
        peer.expect_nak(NAK_ACCESS, RQ + times - 1, times - 1);
        peer.expect_wc(1, RemInvReqErr);
        peer.expect_state(QpState::Error);
    }
}

#[test]
fn case_082_bad_key_without_a_receive_in_hand() {
    let bogus = RKey::new(0xdead_beef);
    let requests = [
        packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, bogus, 4).payload(&[1; 4]),
        packet(Opcode::RC_READ_REQUEST, RQ).reth(0, bogus, 4),
        packet(Opcode::RC_FETCH_ADD, RQ).atomic_eth(0, bogus, 1, 0),
    ];
    for request in requests {
        let mut peer = Peer::new();
        peer.post_recv(1, 8);
        peer.inject_all([request.clone(), request]);
        peer.expect_nak(NAK_ACCESS, RQ, 0);
        peer.expect_nothing();
        peer.expect_state(QpState::Error);
        peer.expect_event(Event::QpAccessErr(peer.qp));
        peer.expect_no_event();
        // It was not for this one.
        peer.expect_wc(1, WrFlushErr);
    }
}

#[test]
fn case_083_region_gone_in_the_middle_of_a_read() {
    for reused in [false, true] {
        let mut peer = Peer::new();
        let data = pattern(5 * 256);
        let mr = peer.memory(&data);
        let rkey = peer.remote(mr).rkey;
        peer.take_at_most(2);
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, rkey, 5 * 256));
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ + 5).reth(0, rkey, 8));
        assert_eq!(payload(&peer.take_packets()), data[..512]);
        drop(peer.context.deregister(mr).unwrap());
        if reused {
            peer.memory(&[0x5e; 5 * 256]);
        }
        peer.take_at_most(usize::MAX);
        peer.expect_nak(NAK_ACCESS, RQ + 2, 2);
        peer.expect_nothing();
        peer.expect_state(QpState::Error);
        peer.expect_event(Event::QpAccessErr(peer.qp));
        peer.expect_no_event();
    }
}

#[test]
fn case_084_completion_queue_full() {
    let mut peer = Peer::with(Setup { cq_capacity: 2, ..Setup::default() });
    for id in 1..=5 {
        peer.post_recv(id, 8);
    }
    for (i, text) in [b"one", b"two", b"tri"].into_iter().enumerate() {
        peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + i as u32).payload(text).ack_req());
        if i < 2 {
            peer.expect_ack(RQ + i as u32, i as u32 + 1);
        }
    }
    peer.expect_nothing();
    peer.expect_event(Event::CqErr(peer.cq));
    peer.expect_event(Event::QpFatal(peer.qp));
    peer.expect_no_event();
    peer.expect_state(QpState::Error);
    for id in 1..=2 {
        assert_eq!(peer.expect_wc(id, Success).byte_len, 3);
    }
    // Lost packets do not arrive later, and neither does anything else.
    peer.post_recv(6, 8);
    peer.expect_no_wc();
    peer.expect_no_event();
}

#[test]
fn case_085_ack_without_further_traffic() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 1024]);
    let rkey = peer.remote(mr).rkey;
    peer.post_recv(1, 512);
    peer.post_recv(2, 512);
    let data = pattern(256);
    // Packets without a request for an ACK are acknowledged with the next one that has it.
    let stream = [
        (packet(Opcode::RC_SEND_ONLY, RQ), Some(1)),
        (packet(Opcode::RC_WRITE_FIRST, RQ + 1).reth(0, rkey, 300).payload(&data), Some(1)),
        (packet(Opcode::RC_WRITE_LAST, RQ + 2).payload(&data[..44]), Some(2)),
        (packet(Opcode::RC_SEND_FIRST, RQ + 3).payload(&data), None),
        (packet(Opcode::RC_SEND_LAST, RQ + 4).payload(&data[..1]), Some(3)),
    ];
    for (i, (packet, msn)) in stream.into_iter().enumerate() {
        let Some(msn) = msn else {
            peer.inject(packet);
            continue;
        };
        peer.inject(packet.ack_req());
        // No time has passed, and nothing else has arrived.
        peer.expect_ack(RQ + i as u32, msn);
        peer.advance(Duration::from_secs(1));
        peer.expect_nothing();
    }
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
}

#[test]
fn case_086_atomic_write() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0xee; 32]);
    let rkey = peer.remote(mr).rkey;
    let request = packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(8, rkey, 8).payload(&[1, 2, 3, 4, 5, 6, 7, 8]);
    for _ in 0..2 {
        peer.inject(request.clone());
        let answer = peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ);
        assert_eq!(answer.payload, []);
        assert_eq!(
            answer.extensions.aeth.map(|aeth| (aeth.syndrome(), aeth.msn())),
            Some((Some(Syndrome::ACK), 1))
        );
        let expected = [[0xee; 8], [1, 2, 3, 4, 5, 6, 7, 8], [0xee; 8], [0xee; 8]];
        assert_eq!(peer.bytes(mr), expected.concat());
    }
    // The duplicate was only answered: local changes are kept.
    peer.bytes_mut(mr).fill(0xdd);
    peer.inject(request);
    peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ);
    assert_eq!(peer.bytes(mr), [0xdd; 32]);

    // The payload, the announced length, the address.
    let wrong = [
        (0, 8, 0),
        (4, 8, 0),
        (16, 8, 0),
        (0, 0, 0),
        (4, 4, 0),
        (16, 16, 0),
        (8, 0, 0),
        (8, 4, 0),
        (8, 16, 0),
        (8, 8, 4),
    ];
    for (length, announced, va) in wrong {
        let mut peer = Peer::new();
        let mr = peer.memory(&[0xee; 32]);
        let rkey = peer.remote(mr).rkey;
        peer.inject(packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(va, rkey, announced).payload(&vec![1; length]));
        peer.expect_nak(NAK_INVALID, RQ, 0);
        peer.expect_event(Event::QpReqErr(peer.qp));
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr), [0xee; 32], "{length} bytes, announced {announced}, at {va}");
    }
}

#[test]
fn case_087_shapes_of_read_responses() {
    let mut peer = Peer::new();
    let data = pattern(1024);
    let mr = peer.memory(&data);
    let rkey = peer.remote(mr).rkey;
    let mut psn = RQ;
    for length in 0..=3 * 256 + 1usize {
        let (va, msn) = (length % 200, length as u32 + 1);
        peer.inject(packet(Opcode::RC_READ_REQUEST, psn).reth(va as u64, rkey, length as u32));
        let packets = length.div_ceil(256).max(1);
        for i in 0..packets {
            let opcode = match (i == 0, i + 1 == packets) {
                (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
                (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
                (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
                (false, true) => Opcode::RC_READ_RESPONSE_LAST,
            };
            let got = peer.expect(opcode, psn + i as u32);
            let end = length.min((i + 1) * 256);
            assert_eq!(got.payload, data[va + i * 256..va + end], "packet {i} of {length} bytes");
            let aeth = got.extensions.aeth.map(|aeth| (aeth.syndrome_byte(), aeth.msn()));
            let due = (opcode != Opcode::RC_READ_RESPONSE_MIDDLE).then_some((0x1f, msn));
            assert_eq!(aeth, due, "packet {i} of {length} bytes");
            assert!(!got.bth.ack_req() && !got.bth.solicited());
        }
        peer.expect_nothing();
        psn += packets as u32;
    }
}

#[test]
fn case_088_packets_racing_the_error_state() {
    const SENDS: [usize; 3] = [0, 2, 5];
    const ADDS: [usize; 2] = [1, 4];
    const WRITE: usize = 3;
    // The application gives up after this many packets. Further ones are at the port already, or arrive later.
    for executed in 0..=6 {
        for waiting in [true, false] {
            let mut peer = Peer::new();
            let mr = peer.memory(&[0; 16]);
            let rkey = peer.remote(mr).rkey;
            for id in 0..5 {
                peer.post_recv(id, 8);
            }
            let stream: Vec<Script> = (0..6)
                .map(|i| match RQ + i as u32 {
                    psn if SENDS.contains(&i) => packet(Opcode::RC_SEND_ONLY, psn).payload(b"x").ack_req(),
                    psn if ADDS.contains(&i) => packet(Opcode::RC_FETCH_ADD, psn).atomic_eth(0, rkey, 1, 0),
                    psn => packet(Opcode::RC_WRITE_ONLY, psn).reth(8, rkey, 1).payload(b"x").ack_req(),
                })
                .collect();
            for packet in &stream[..executed] {
                peer.inject(packet.clone());
            }
            assert_eq!(peer.take_packets().len(), executed);
            if waiting {
                peer.arrive(stream[executed..].to_vec());
            }
            peer.modify(Transition::Error);
            peer.poll();
            peer.inject_all(stream.clone());
            peer.inject_all(stream);
            peer.expect_nothing();
            let received = SENDS.iter().filter(|i| **i < executed).count() as u64;
            for id in 0..5 {
                peer.expect_wc(id, if id < received { Success } else { WrFlushErr });
            }
            let added = ADDS.iter().filter(|i| **i < executed).count() as u64;
            assert_eq!(peer.bytes(mr)[..8], added.to_ne_bytes());
            assert_eq!(peer.bytes(mr)[8], if WRITE < executed { b'x' } else { 0 });
        }
    }

    // The peer's own packet ends it, between others in the same burst.
    let mut peer = Peer::new();
    for id in 0..4 {
        peer.post_recv(id, 8);
    }
    let send = |psn| packet(Opcode::RC_SEND_ONLY, psn).payload(b"x").ack_req();
    peer.inject_all([
        send(RQ),
        packet(Opcode::RC_SEND_LAST, RQ + 1).payload(b"x"),
        send(RQ + 1),
        send(RQ + 2),
    ]);
    peer.expect_nak(NAK_INVALID, RQ + 1, 1);
    peer.expect_event(Event::QpReqErr(peer.qp));
    peer.expect_wc(0, Success);
    for id in 1..4 {
        peer.expect_wc(id, WrFlushErr);
    }
}

/// Posts a receive with this SGE.
fn receive(peer: &mut Peer, wr_id: u64, sge: Sge) {
    peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id, sges: &[sge] }).unwrap();
}
