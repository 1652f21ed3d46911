//! Selective repeat, with a peer that has negotiated it: not part of the standard, so without case numbers.

use std::time::Duration;

use ferroce::WcStatus::{self, Success};
use ferroce::wire::Opcode;
use ferroce::{Counter, Event, QpState, RKey, Transition};

use crate::packet::{Got, NAK_ACCESS, NAK_RNR, Script, ack, packet, payload, sack};
use crate::peer::{Peer, RQ, SQ, Setup, pattern};

/// The ACK timeout 4.096 µs · 2^14.
pub(crate) const TTR: Duration = Duration::from_nanos(4096 << 14);

pub(crate) fn setup() -> Setup {
    Setup { selective_repeat: true, ..Setup::default() }
}

pub(crate) fn agreed() -> Peer {
    Peer::with(setup())
}

pub(crate) fn send(psn: u32, byte: u8) -> Script {
    packet(Opcode::RC_SEND_ONLY, psn).payload(&[byte])
}

pub(crate) fn psns(packets: &[Got]) -> Vec<u32> {
    packets.iter().map(|packet| packet.psn()).collect()
}

#[track_caller]
pub(crate) fn expect_all(peer: &mut Peer, ids: std::ops::Range<u64>, status: WcStatus) {
    for id in ids {
        peer.expect_wc(id, status);
    }
}

// Negotiation.

#[test]
fn it_is_not_used_without_negotiation() {
    let mut peer = Peer::new();
    assert!(!peer.query().selective_repeat);
    peer.post_write(1, b"one");
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    // Dropped like an unknown opcode.
    peer.expect_dropped(peer.frame(&sack(SQ, 0, &[SQ + 1])), Counter::RxUnknownOpcode);
    peer.expect_dropped(peer.frame(&sack(SQ + 1, 1, &[])), Counter::RxUnknownOpcode);
    // And early requests are answered as always.
    peer.inject(send(RQ + 1, 1).ack_req());
    peer.expect_nak(crate::packet::NAK_SEQUENCE, RQ, 0);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
}

#[test]
fn negotiation_is_reported_and_ends_with_the_connection() {
    let mut peer = agreed();
    assert!(peer.query().selective_repeat);
    peer.modify(Transition::Reset);
    assert!(!peer.query().selective_repeat);
    peer.take_to(&Setup::default());
    peer.expect_dropped(peer.frame(&sack(SQ, 0, &[])), Counter::RxUnknownOpcode);
}

// The responder.

#[test]
fn early_requests_are_held_reported_and_executed_in_order() {
    let mut peer = agreed();
    for id in 0..6 {
        peer.post_recv(id, 8);
    }
    peer.inject(send(RQ + 1, 1));
    peer.expect_sack(RQ, 0, &[RQ + 1]);
    peer.inject(send(RQ + 2, 2));
    peer.expect_nothing();
    peer.inject(send(RQ + 3, 3).ack_req());
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2, RQ + 3]);
    peer.inject(send(RQ + 5, 5));
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2, RQ + 3, RQ + 5]);
    peer.expect_no_wc();
    assert_eq!(peer.query().rq_psn.value(), RQ);

    peer.inject(send(RQ, 0).ack_req());
    peer.expect_sack(RQ + 4, 4, &[RQ + 5]);
    for id in 0..4 {
        peer.expect_wc(id, Success);
    }
    peer.expect_no_wc();
    peer.inject(send(RQ + 4, 4).ack_req());
    peer.expect_ack(RQ + 5, 6);
    peer.expect_wc(4, Success);
    peer.expect_wc(5, Success);
    peer.expect_counted(Counter::OutOfSequence, 4);
}

#[test]
fn a_burst_after_a_gap_gets_one_answer() {
    let mut peer = agreed();
    for id in 0..=20 {
        peer.post_recv(id, 8);
    }
    peer.inject_all((1..=20).map(|i| send(RQ + i, 0).ack_req()));
    peer.expect_sack(RQ, 0, &(RQ + 1..=RQ + 20).collect::<Vec<u32>>());
    peer.inject(send(RQ, 0).ack_req());
    peer.expect_ack(RQ + 20, 21);
    for id in 0..=20 {
        peer.expect_wc(id, Success);
    }
}

#[test]
fn psns_wrap_while_requests_are_held() {
    let mut peer = Peer::with(Setup { rq_psn: 0xff_fffe, ..setup() });
    for id in 0..5 {
        peer.post_recv(id, 8);
    }
    peer.inject_all([send(0xff_ffff, 1), send(0, 2), send(2, 4)]);
    let got = *peer.expect(Opcode::SELECTIVE_ACKNOWLEDGE, 0xff_fffe).sack().unwrap();
    let named = [0xff_ffff, 0, 1, 2].map(|psn| got.holds(ferroce::Psn::new(psn)));
    assert_eq!(named, [true, true, false, true]);
    peer.inject(send(0xff_fffe, 0).ack_req());
    peer.expect_sack(1, 3, &[2]);
    peer.inject(send(1, 3).ack_req());
    peer.expect_ack(2, 5);
    for id in 0..5 {
        peer.expect_wc(id, Success);
    }
}

#[test]
fn nothing_is_executed_early_nor_twice() {
    let mut peer = agreed();
    let mr = peer.memory(&[0; 16]);
    let remote = peer.remote(mr);
    let write = |psn, offset, byte| {
        let request = packet(Opcode::RC_WRITE_ONLY, psn).reth(remote.addr + offset, remote.rkey, 8);
        request.payload(&[byte; 8]).ack_req()
    };
    peer.inject_all([write(RQ + 1, 0, 1), write(RQ + 1, 0, 9)]);
    peer.expect_sack(RQ, 0, &[RQ + 1]);
    assert_eq!(peer.bytes(mr), [0; 16]);
    peer.inject(write(RQ, 0, 0xee));
    peer.expect_ack(RQ + 1, 2);
    assert_eq!(peer.bytes(mr)[..8], [1; 8], "in the order of the PSNs, and the first that came");
    // Duplicates of both are answered and not executed.
    peer.bytes_mut(mr)[..8].fill(7);
    peer.inject_all([write(RQ, 0, 2), write(RQ + 1, 0, 3)]);
    peer.expect_ack(RQ + 1, 2);
    assert_eq!(peer.bytes(mr)[..8], [7; 8]);
}

#[test]
fn reads_and_atomics_wait_for_their_turn() {
    let mut peer = agreed();
    let mr = peer.memory(&5u64.to_ne_bytes().repeat(100));
    let remote = peer.remote(mr);
    let add = packet(Opcode::RC_FETCH_ADD, RQ + 1).atomic_eth(remote.addr, remote.rkey, 2, 0);
    let read = packet(Opcode::RC_READ_REQUEST, RQ + 2).reth(remote.addr, remote.rkey, 512);
    peer.inject_all([read, add.clone(), add]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    let write = packet(Opcode::RC_WRITE_ONLY, RQ).reth(remote.addr, remote.rkey, 8);
    peer.inject(write.payload(&40u64.to_ne_bytes()));
    assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 1).original(), Some(40));
    let first = peer.expect(Opcode::RC_READ_RESPONSE_FIRST, RQ + 2);
    assert_eq!(first.payload[..8], 42u64.to_ne_bytes());
    peer.expect(Opcode::RC_READ_RESPONSE_LAST, RQ + 3);
    assert_eq!(peer.query().rq_psn.value(), RQ + 4);
}

/// A peer may lose any part of a READ, and request several before the first has been sent.
#[test]
fn parts_of_a_read_are_repeated_in_addition_to_what_is_owed() {
    let mut peer = agreed();
    let data = pattern(256 * 8);
    let mr = peer.memory(&data);
    let remote = peer.remote(mr);
    let read = |psn, offset: u64, length| {
        packet(Opcode::RC_READ_REQUEST, psn).reth(remote.addr + offset, remote.rkey, length)
    };
    peer.take_at_most(4);
    peer.inject(read(RQ, 0, 256 * 6));
    assert_eq!(psns(&peer.take_packets()), [RQ, RQ + 1, RQ + 2, RQ + 3]);
    peer.arrive([read(RQ + 1, 256, 256), read(RQ + 2, 512, 512), read(RQ + 6, 256 * 6, 512)]);
    peer.take_at_most(usize::MAX);
    let packets = peer.take_packets();
    assert_eq!(psns(&packets), [4, 5, 1, 2, 3, 6, 7].map(|i| RQ + i), "in the order asked for");
    assert_eq!(packets[2].opcode, Opcode::RC_READ_RESPONSE_ONLY);
    assert_eq!(payload(&packets[2..5]), data[256..1024]);
    assert_eq!(payload(&packets[5..]), data[1536..]);
}

#[test]
fn a_receiver_that_is_not_ready_keeps_held_requests() {
    let mut peer = agreed();
    peer.inject(send(RQ + 1, 1));
    peer.expect_sack(RQ, 0, &[RQ + 1]);
    peer.inject(send(RQ, 0));
    peer.expect_nak(NAK_RNR | 12, RQ, 0);
    peer.post_recv(1, 8);
    // The next finds none in its turn: it is no longer held, and must be retransmitted.
    peer.inject(send(RQ, 0).ack_req());
    peer.expect_nak(NAK_RNR | 12, RQ + 1, 1);
    peer.expect_wc(1, Success);
    peer.post_recv(2, 8);
    peer.inject(send(RQ + 2, 2).ack_req());
    peer.expect_sack(RQ + 1, 1, &[RQ + 2]);
    peer.post_recv(3, 8);
    peer.inject(send(RQ + 1, 1));
    peer.expect_ack(RQ + 2, 3);
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn a_refused_held_request_ends_the_connection_in_order() {
    let mut peer = agreed();
    let mr = peer.memory(&[0; 8]);
    let remote = peer.remote(mr);
    let write =
        |psn, rkey| packet(Opcode::RC_WRITE_ONLY, psn).reth(remote.addr, rkey, 8).payload(&[1; 8]).ack_req();
    peer.inject_all([write(RQ + 1, RKey::new(!remote.rkey.value())), write(RQ + 2, remote.rkey)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    peer.expect_state(QpState::Rts);
    peer.post_recv(1, 8);
    peer.inject(send(RQ, 0));
    peer.expect_wc(1, Success);
    peer.expect_nak(NAK_ACCESS, RQ + 1, 1);
    peer.expect_event(Event::QpAccessErr(peer.qp));
    peer.expect_state(QpState::Error);
    assert_eq!(peer.bytes(mr), [0; 8], "what was held behind it is forgotten");
}

#[test]
fn room_is_bounded_and_released() {
    let two = Setup { reorder_packets: 2, ..setup() };
    let mut peer = Peer::with(two);
    for _ in 0..3 {
        peer.inject_all([send(RQ + 1, 1), send(RQ + 2, 2), send(RQ + 3, 3)]);
        peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
        peer.expect_counted(Counter::RxReorderFull, 1);
        peer.modify(Transition::Reset);
        peer.take_to(&two);
        peer.inject_all([send(RQ + 1, 1), send(RQ + 2, 2)]);
        peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
        peer.modify(Transition::Error);
        peer.modify(Transition::Reset);
        peer.take_to(&two);
    }
    // A failed queue pair frees its room for others.
    let mut peer = Peer::with(two);
    let other = peer.another_qp(&two);
    let other = peer.context.query_qp(other).unwrap().qpn;
    peer.inject_all([send(RQ + 1, 1), send(RQ + 2, 2)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    peer.modify(Transition::Error);
    peer.inject_all([send(RQ + 1, 1).dest_qpn(other), send(RQ + 2, 2).dest_qpn(other)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    // Without any room the gap is still reported.
    let mut peer = Peer::with(Setup { reorder_packets: 0, ..setup() });
    peer.inject(send(RQ + 1, 1));
    peer.expect_sack(RQ, 0, &[]);
    peer.post_recv(1, 8);
    peer.inject(send(RQ, 0).ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
}

#[test]
fn requests_too_far_ahead_are_not_held() {
    let mut peer = agreed();
    peer.inject(send(RQ + 1024, 0));
    peer.expect_sack(RQ, 0, &[]);
    peer.inject(send(RQ + 1023, 0));
    peer.expect_sack(RQ, 0, &[RQ + 1023]);
    peer.expect_counted(Counter::RxReorderFull, 1);
}

/// No requester numbers its requests so; its result must not be that of another request.
#[test]
fn a_request_inside_a_read_is_dropped() {
    let mut peer = agreed();
    let mr = peer.memory(&[0; 1024]);
    let remote = peer.remote(mr);
    peer.post_recv(1, 8);
    peer.inject_all([send(RQ + 1, 1), send(RQ + 4, 4)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 4]);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(remote.addr, remote.rkey, 1024));
    assert_eq!(peer.take_packets().len(), 4);
    let wc = peer.expect_wc(1, Success);
    assert_eq!(wc.byte_len, 1);
    peer.expect_no_wc();
    // 1024 PSNs later the place is free again.
    assert_eq!(peer.query().rq_psn.value(), RQ + 5);
    peer.inject(send(RQ + 1 + 1024, 0));
    peer.expect_sack(RQ + 5, 2, &[RQ + 1 + 1024]);
}

// The requester.
