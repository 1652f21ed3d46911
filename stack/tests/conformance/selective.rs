//! Selective repeat, with a peer that has agreed on it: not the standard's, so without numbers.

use std::time::Duration;

use ferroce::WcStatus::{self, RetryExcErr, Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{Counter, Data, Event, QpState, RKey, SendFlags, SendOp, Transition};

use crate::packet::{
    Got, NAK_ACCESS, NAK_RNR, Script, ack, atomic_ack, nak, packet, payload, read_response, sack,
};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern};

/// The ACK timeout 4.096 µs · 2^14.
const TTR: Duration = Duration::from_nanos(4096 << 14);

fn setup() -> Setup {
    Setup { selective_repeat: true, ..Setup::default() }
}

fn agreed() -> Peer {
    Peer::with(setup())
}

fn send(psn: u32, byte: u8) -> Script {
    packet(Opcode::RC_SEND_ONLY, psn).payload(&[byte])
}

fn psns(packets: &[Got]) -> Vec<u32> {
    packets.iter().map(|packet| packet.psn).collect()
}

#[track_caller]
fn expect_all(peer: &mut Peer, ids: std::ops::Range<u64>, status: WcStatus) {
    for id in ids {
        peer.expect_wc(id, status);
    }
}

// What was agreed, and with whom.

#[test]
fn nobody_speaks_of_it_who_has_not_agreed() {
    let mut peer = Peer::new();
    assert!(!peer.query().selective_repeat);
    peer.post_write(1, b"one");
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    // Dropped, as an opcode that does not exist is.
    peer.expect_dropped(peer.frame(&sack(SQ, 0, &[SQ + 1])), Counter::RxUnknownOpcode);
    peer.expect_dropped(peer.frame(&sack(SQ + 1, 1, &[])), Counter::RxUnknownOpcode);
    // And what comes early is answered as ever.
    peer.inject(send(RQ + 1, 1).ack_req());
    peer.expect_nak(crate::packet::NAK_SEQUENCE, RQ, 0);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
}

#[test]
fn what_was_agreed_is_told_and_ends_with_the_connection() {
    let mut peer = agreed();
    assert!(peer.query().selective_repeat);
    peer.modify(Transition::Reset);
    assert!(!peer.query().selective_repeat);
    peer.take_to(&Setup::default());
    peer.expect_dropped(peer.frame(&sack(SQ, 0, &[])), Counter::RxUnknownOpcode);
}

// The responder.

#[test]
fn early_requests_are_held_and_named_and_executed_in_order() {
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
fn a_burst_behind_a_gap_is_one_answer() {
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
    let got = peer.expect(Opcode::SELECTIVE_ACKNOWLEDGE, 0xff_fffe).sack.unwrap();
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
fn nothing_is_touched_before_its_turn_nor_twice() {
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
    assert_eq!(peer.expect(Opcode::RC_ATOMIC_ACKNOWLEDGE, RQ + 1).original, Some(40));
    let first = peer.expect(Opcode::RC_READ_RESPONSE_FIRST, RQ + 2);
    assert_eq!(first.payload[..8], 42u64.to_ne_bytes());
    peer.expect(Opcode::RC_READ_RESPONSE_LAST, RQ + 3);
    assert_eq!(peer.query().rq_psn.value(), RQ + 4);
}

/// A peer may lose any part of a READ, and ask for several before the first has been sent.
#[test]
fn parts_of_a_read_are_sent_again_beside_what_is_owed() {
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
fn a_receiver_that_is_not_ready_keeps_what_is_held() {
    let mut peer = agreed();
    peer.inject(send(RQ + 1, 1));
    peer.expect_sack(RQ, 0, &[RQ + 1]);
    peer.inject(send(RQ, 0));
    peer.expect_nak(NAK_RNR | 12, RQ, 0);
    peer.post_recv(1, 8);
    // The next has none in its turn: it is not held any more, and must come again.
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
fn a_held_request_that_is_refused_ends_the_connection_in_its_turn() {
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
fn room_is_bounded_and_comes_back() {
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
    // A queue pair that fails leaves its room to others.
    let mut peer = Peer::with(two);
    let other = peer.another_qp(&two);
    let other = peer.context.query_qp(other).unwrap().qpn;
    peer.inject_all([send(RQ + 1, 1), send(RQ + 2, 2)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    peer.modify(Transition::Error);
    peer.inject_all([send(RQ + 1, 1).dest_qpn(other), send(RQ + 2, 2).dest_qpn(other)]);
    peer.expect_sack(RQ, 0, &[RQ + 1, RQ + 2]);
    // Without any room there is still a word about the gap.
    let mut peer = Peer::with(Setup { reorder_packets: 0, ..setup() });
    peer.inject(send(RQ + 1, 1));
    peer.expect_sack(RQ, 0, &[]);
    peer.post_recv(1, 8);
    peer.inject(send(RQ, 0).ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
}

#[test]
fn what_is_too_far_ahead_is_not_held() {
    let mut peer = agreed();
    peer.inject(send(RQ + 1024, 0));
    peer.expect_sack(RQ, 0, &[]);
    peer.inject(send(RQ + 1023, 0));
    peer.expect_sack(RQ, 0, &[RQ + 1023]);
    peer.expect_counted(Counter::RxReorderFull, 1);
}

/// No requester numbers its requests so; what it gets must not be somebody else's.
#[test]
fn a_request_inside_a_read_is_forgotten() {
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
    // 1024 further on the place is free again.
    assert_eq!(peer.query().rq_psn.value(), RQ + 5);
    peer.inject(send(RQ + 1 + 1024, 0));
    peer.expect_sack(RQ + 5, 2, &[RQ + 1 + 1024]);
}

// The requester.

fn with_writes(setup: Setup, count: u32) -> Peer {
    let mut peer = Peer::with(setup);
    for id in 0..count {
        peer.post_write(id.into(), &[id as u8; 8]);
    }
    assert_eq!(psns(&peer.take_packets()), (SQ..SQ + count).collect::<Vec<u32>>());
    peer
}

#[test]
fn only_what_is_missing_is_sent_again_and_each_hole_once() {
    let mut peer = with_writes(setup(), 6);
    peer.inject(sack(SQ + 1, 1, &[SQ + 3, SQ + 5]));
    peer.expect_wc(0, Success);
    let resent = peer.take_packets();
    assert_eq!(psns(&resent), [SQ + 1, SQ + 2, SQ + 4]);
    assert!(resent.iter().all(|packet| packet.ack_req));
    assert_eq!(payload(&resent[..1]), [1; 8]);
    // The same again, and a word that was late, say nothing new.
    peer.inject_all([sack(SQ + 1, 1, &[SQ + 3, SQ + 5]), sack(SQ + 1, 1, &[SQ + 3])]);
    peer.expect_nothing();
    // The second resend has arrived, so the first is lost; of the third nothing is known.
    peer.inject(sack(SQ + 1, 1, &[SQ + 2, SQ + 3, SQ + 5]));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.expect_no_wc();
    // The fourth has arrived, so the third is lost: everything else was held before.
    peer.inject(sack(SQ + 4, 4, &[SQ + 5]));
    for id in 1..4 {
        peer.expect_wc(id, Success);
    }
    assert_eq!(psns(&peer.take_packets()), [SQ + 4]);
    peer.inject(ack(SQ + 5, 6));
    peer.expect_wc(4, Success);
    peer.expect_wc(5, Success);
    peer.expect_counted(Counter::RetransmittedPkts, 5);
    peer.expect_counted(Counter::RcvdSelectiveAck, 5);
}

#[test]
fn what_was_sent_after_all_that_is_held_may_be_under_way() {
    let mut peer = with_writes(setup(), 4);
    peer.inject(sack(SQ, 0, &[SQ + 1]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 0..4, Success);

    // If nothing is named, the missing one is: whatever gave it away found no room.
    let mut peer = with_writes(setup(), 4);
    peer.inject(ack(SQ, 1));
    peer.inject_all([sack(SQ + 1, 1, &[]), sack(SQ + 1, 1, &[])]);
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    // The resend is the newest of all, and it has arrived: the others have not.
    peer.inject(ack(SQ + 1, 2));
    assert_eq!(psns(&peer.take_packets()), [SQ + 2, SQ + 3]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 0..4, Success);
}

/// The first one was late, not lost, and its resend still under way: that is no news of others.
#[test]
fn what_arrives_too_soon_is_not_the_resend() {
    let mut peer = with_writes(setup(), 1);
    peer.advance(Duration::from_micros(10));
    peer.inject(ack(SQ, 1));
    peer.expect_wc(0, Success);
    for id in 1..5 {
        peer.post_write(id, &[id as u8; 8]);
    }
    assert_eq!(peer.take_packets().len(), 4);
    peer.advance(Duration::from_micros(10));
    peer.inject(sack(SQ + 1, 1, &[SQ + 2]));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.advance(Duration::from_micros(2));
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
    peer.expect_nothing();
    peer.inject(ack(SQ + 4, 5));
    peer.expect_wc(3, Success);
    peer.expect_wc(4, Success);
}

#[test]
fn a_timeout_leaves_out_what_is_held() {
    let mut peer = with_writes(setup(), 5);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 3]));
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 2]);
    peer.advance(TTR + Duration::from_millis(1));
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 2, SQ + 4]);
    peer.expect_counted(Counter::LocalAckTimeoutErr, 1);
    peer.inject(ack(SQ + 4, 5));
    expect_all(&mut peer, 0..5, Success);
}

#[test]
fn retries_count_timeouts_and_not_losses() {
    let mut peer = with_writes(Setup { retry_count: 2, ..setup() }, 2);
    // The first is lost again and again, and each time something newer arrives.
    let mut held = vec![SQ + 1];
    for i in 0..20 {
        peer.inject(sack(SQ, 0, &held));
        assert_eq!(psns(&peer.take_packets()), [SQ]);
        peer.post_write((2 + i).into(), &[0; 8]);
        assert_eq!(psns(&peer.take_packets()), [SQ + 2 + i]);
        held.push(SQ + 2 + i);
    }
    peer.inject(sack(SQ, 0, &held));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    // Silence is another matter.
    for _ in 0..2 {
        peer.advance(TTR + Duration::from_millis(1));
        assert_eq!(psns(&peer.take_packets()), [SQ]);
    }
    peer.advance(TTR + Duration::from_millis(1));
    peer.expect_wc(0, RetryExcErr);
    expect_all(&mut peer, 1..22, WrFlushErr);
}

#[test]
fn a_receiver_that_is_not_ready_is_asked_again_for_one_it_held() {
    const WAIT: Duration = Duration::from_micros(1280);
    let mut peer = with_writes(setup(), 4);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 2]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    // The first was executed, and the second had no receive in its turn.
    peer.inject_all([nak(NAK_RNR | 14, SQ + 1, 1), sack(SQ + 1, 1, &[SQ + 2, SQ + 3])]);
    peer.expect_wc(0, Success);
    peer.advance(WAIT - Duration::from_micros(10));
    peer.expect_nothing();
    // What it says late of the time when it still held the second changes nothing.
    peer.inject(sack(SQ, 0, &[SQ + 1]));
    peer.advance(Duration::from_micros(20));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 1..4, Success);
}

#[test]
fn of_a_read_the_missing_part_is_asked_for_again() {
    let mut peer = agreed();
    let data = pattern(6 * 256);
    let piece = |i: u32| &data[i as usize * 256..][..256];
    let mr = peer.post_read(1, data.len());
    peer.post_write(2, b"two");
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 6);
    let middle = |i| read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + i, piece(i));
    peer.inject_all([
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, piece(0)),
        middle(3),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 5, piece(5)),
        ack(SQ + 6, 2),
    ]);
    for (psn, length) in [(SQ + 1, 512), (SQ + 4, 256)] {
        let again = peer.expect(Opcode::RC_READ_REQUEST, psn);
        let reth = again.reth.unwrap();
        let offset = u64::from(psn - SQ) * 256;
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr + offset, REMOTE.rkey, length));
    }
    peer.expect_nothing();
    peer.expect_no_wc();
    // Data that is there already is not taken again.
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 3, &[0xee; 256]));
    peer.expect_counted(Counter::StaleResponse, 1);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 4, piece(4)));
    peer.expect_no_wc();
    // The second request was answered, so of the first a piece is lost once more.
    let again = peer.expect(Opcode::RC_READ_REQUEST, SQ + 1);
    assert_eq!(again.reth.unwrap().length(), 512);
    peer.inject_all([
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, piece(1)),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, piece(2)),
    ]);
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), data);
}

#[test]
fn a_read_that_waits_at_the_responder_is_not_asked_for_again() {
    let mut peer = agreed();
    peer.post_write(1, b"one");
    let mr = peer.post_read(2, 512);
    peer.post_write(3, b"three");
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 3]);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 3]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 3]));
    peer.expect_nothing();
    // Its answer is lost, and what follows gives that away; no piece of it came, so all of it.
    peer.inject(ack(SQ + 3, 3));
    peer.expect_wc(1, Success);
    assert_eq!(peer.expect(Opcode::RC_READ_REQUEST, SQ + 1).reth.unwrap().length(), 512);
    peer.inject_all([
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, &[1; 256]),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, &[2; 256]),
    ]);
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
    assert_eq!(peer.bytes(mr), [[1; 256], [2; 256]].concat());
}

/// A piece of it would be a READ of its own there.
#[test]
fn a_read_whose_request_is_missing_is_asked_for_whole() {
    let mut peer = agreed();
    peer.post_read(1, 1024);
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(sack(SQ, 0, &[]));
    assert_eq!(peer.expect(Opcode::RC_READ_REQUEST, SQ).reth.unwrap().length(), 1024);
    peer.modify(Transition::Reset);
}

#[test]
fn a_refusal_does_not_hit_the_read_before_it() {
    let mut peer = agreed();
    peer.post_read(1, 8);
    peer.post_write(2, b"two");
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
    peer.inject(nak(NAK_ACCESS, SQ + 1, 1));
    peer.expect_no_wc();
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &[1; 8]));
    peer.expect_wc(1, Success);
    // The answer came after it, so the WRITE counts as lost.
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 1);
    peer.inject(nak(NAK_ACCESS, SQ + 1, 1));
    peer.expect_wc(2, WcStatus::RemAccessErr);
}

#[test]
fn a_full_window_asks_and_not_for_every_packet_that_it_lets_out() {
    let mut peer = agreed();
    for id in 0..3 {
        peer.post_write(id, &[0; 8]);
    }
    peer.post_write(3, &pattern(700 * 256));
    let packets = peer.take_packets();
    assert_eq!(packets.len(), 448);
    assert!(packets[447].ack_req && !packets[446].ack_req);
    // What is held is out of it.
    peer.inject(sack(SQ + 10, 3, &[SQ + 11, SQ + 12]));
    expect_all(&mut peer, 0..3, Success);
    let more = peer.take_packets();
    assert_eq!(psns(&more), [&[SQ + 10][..], &(SQ + 448..SQ + 460).collect::<Vec<u32>>()].concat());
    assert_eq!(more[1..].iter().filter(|packet| packet.ack_req).count(), 1, "only the sixteenth");
    peer.modify(Transition::Reset);
}

#[test]
fn a_long_read_is_asked_for_in_parts() {
    let mut peer = Peer::with(Setup { max_rd_atomic: 2, ..setup() });
    let data = pattern(300 * 256);
    let mr = peer.post_read(1, data.len());
    let part = |got: Got| (got.psn - SQ, got.reth.unwrap().va() - REMOTE.addr, got.reth.unwrap().length());
    let mut parts: Vec<_> = peer.take_packets().into_iter().map(part).collect();
    assert_eq!(parts, [(0, 0, 112 * 256), (112, 112 * 256, 112 * 256)], "no more READs than allowed");
    for i in 0..300u32 {
        let opcode = match i {
            0 | 112 | 224 => Opcode::RC_READ_RESPONSE_FIRST,
            111 | 223 | 299 => Opcode::RC_READ_RESPONSE_LAST,
            _ => Opcode::RC_READ_RESPONSE_MIDDLE,
        };
        peer.inject(read_response(opcode, SQ + i, &data[i as usize * 256..][..256]));
        parts.extend(peer.take_packets().into_iter().map(part));
    }
    assert_eq!(parts[2..], [(224, 224 * 256, 76 * 256)]);
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr), data);
}

#[test]
fn answers_of_atomics_are_taken_out_of_turn() {
    let mut peer = agreed();
    let mr = peer.memory(&[0; 24]);
    for id in 0..3 {
        let sges = [ferroce::Sge { mr, offset: 8 * id, length: 8 }];
        let op = SendOp::FetchAdd { remote: REMOTE, add: 1 };
        peer.post_flagged(id, op, Data::Sges(&sges), SendFlags::SIGNALED);
    }
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 2]);
    peer.inject_all([atomic_ack(SQ + 1, 11), atomic_ack(SQ + 1, 99)]);
    assert!(peer.expect(Opcode::RC_FETCH_ADD, SQ).ack_req);
    peer.expect_no_wc();
    peer.inject(atomic_ack(SQ, 10));
    peer.expect_wc(0, Success);
    peer.expect_wc(1, Success);
    // The resend was sent after the third.
    peer.expect(Opcode::RC_FETCH_ADD, SQ + 2);
    peer.inject(atomic_ack(SQ + 2, 12));
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), [10u64, 11, 12].map(u64::to_ne_bytes).concat());
}

#[test]
fn a_broken_word_changes_nothing() {
    let mut peer = with_writes(setup(), 3);
    let short = packet(Opcode::SELECTIVE_ACKNOWLEDGE, SQ + 1).aeth(0x1f, 1).payload(&[0xff; 124]);
    peer.expect_dropped(peer.frame(&short), Counter::RxLengthErrors);
    for psn in [SQ - 1, SQ + 3, SQ + (1 << 22)] {
        peer.expect_dropped(peer.frame(&sack(psn, 1, &[])), Counter::StaleResponse);
    }
    // Named beyond what was sent: what was sent is looked at, and no more.
    let everything: Vec<u32> = (SQ..SQ + 1024).collect();
    peer.inject(sack(SQ, 0, &everything));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.post_write(3, b"four");
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 3);
    peer.advance(TTR + Duration::from_millis(1));
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 3]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 0..4, Success);
}
