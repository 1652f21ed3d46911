//! Selective repeat: what an end retransmits, and when.

use std::time::Duration;

use ferroce::WcStatus::{self, RetryExcErr, Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{Counter, Data, SendFlags, SendOp, Transition};

use crate::packet::{
    Got, NAK_ACCESS, NAK_RNR, NAK_SEQUENCE, ack, atomic_ack, nak, packet, payload, read_response, sack,
};
use crate::peer::{Peer, REMOTE, SQ, Setup, pattern};
use crate::selective::*;

fn with_writes(setup: Setup, count: u32) -> Peer {
    let mut peer = Peer::with(setup);
    for id in 0..count {
        peer.post_write(id.into(), &[id as u8; 8]);
    }
    assert_eq!(psns(&peer.take_packets()), (SQ..SQ + count).collect::<Vec<u32>>());
    peer
}

#[test]
fn only_missing_packets_are_retransmitted_once_each() {
    let mut peer = with_writes(setup(), 6);
    peer.inject(sack(SQ + 1, 1, &[SQ + 3, SQ + 5]));
    peer.expect_wc(0, Success);
    let resent = peer.take_packets();
    assert_eq!(psns(&resent), [SQ + 1, SQ + 2, SQ + 4]);
    assert!(resent.iter().all(|packet| packet.bth.ack_req()));
    assert_eq!(payload(&resent[..1]), [1; 8]);
    // The same again, and a late report, have no effect.
    peer.inject_all([sack(SQ + 1, 1, &[SQ + 3, SQ + 5]), sack(SQ + 1, 1, &[SQ + 3])]);
    peer.expect_nothing();
    // The second retransmission has arrived, so the first is lost; the third is unknown.
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
fn packets_sent_after_all_held_ones_may_be_in_flight() {
    let mut peer = with_writes(setup(), 4);
    peer.inject(sack(SQ, 0, &[SQ + 1]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 0..4, Success);

    // If none is reported as held, the missing one is lost: the packet that revealed it found no room.
    let mut peer = with_writes(setup(), 4);
    peer.inject(ack(SQ, 1));
    peer.inject_all([sack(SQ + 1, 1, &[]), sack(SQ + 1, 1, &[])]);
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    // The retransmission is the newest of all, and it has arrived: the others have not.
    peer.inject(ack(SQ + 1, 2));
    assert_eq!(psns(&peer.take_packets()), [SQ + 2, SQ + 3]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 0..4, Success);
}

/// The first one was late, not lost, and its retransmission is still in flight: that is no evidence about others.
#[test]
fn a_too_early_arrival_is_not_the_retransmission() {
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
fn a_timeout_does_not_retransmit_held_packets() {
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
    // The first is lost repeatedly, and each time something newer arrives.
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
    // A timeout is different.
    for _ in 0..2 {
        peer.advance(TTR + Duration::from_millis(1));
        assert_eq!(psns(&peer.take_packets()), [SQ]);
    }
    peer.advance(TTR + Duration::from_millis(1));
    peer.expect_wc(0, RetryExcErr);
    expect_all(&mut peer, 1..22, WrFlushErr);
}

#[test]
fn a_held_request_without_a_receive_is_retransmitted() {
    const WAIT: Duration = Duration::from_micros(1280);
    let mut peer = with_writes(setup(), 4);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 2]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    // The first was executed, and the second found no receive in its turn.
    peer.inject_all([nak(NAK_RNR | 14, SQ + 1, 1), sack(SQ + 1, 1, &[SQ + 2, SQ + 3])]);
    peer.expect_wc(0, Success);
    peer.advance(WAIT - Duration::from_micros(10));
    peer.expect_nothing();
    // A late report from when it still held the second changes nothing.
    peer.inject(sack(SQ, 0, &[SQ + 1]));
    peer.advance(Duration::from_micros(20));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.inject(ack(SQ + 3, 4));
    expect_all(&mut peer, 1..4, Success);
}

/// The READ before it was executed, but its response is lost: the refusal counts nevertheless.
#[test]
fn a_refused_held_request_is_retransmitted_before_an_earlier_read_completes() {
    for syndrome in [NAK_RNR | 1, NAK_SEQUENCE] {
        // Without an ACK timer.
        let mut peer = Peer::with(Setup { timeout: 0, ..setup() });
        peer.post_write(1, b"one");
        peer.post_read(2, 8);
        peer.post_write(3, b"three");
        assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 2]);
        peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 2]));
        assert_eq!(psns(&peer.take_packets()), [SQ]);
        peer.inject(nak(syndrome, SQ + 2, 2));
        peer.expect_wc(1, Success);
        peer.advance(Duration::from_millis(1));
        assert_eq!(psns(&peer.take_packets()), [SQ + 1, SQ + 2]);
        // It has been executed now: a late report of before changes nothing.
        peer.inject_all([ack(SQ + 2, 3), nak(syndrome, SQ + 2, 2)]);
        peer.advance(Duration::from_millis(1));
        assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 1, &[1; 8]));
        peer.expect_wc(2, Success);
        peer.expect_wc(3, Success);
    }
}

/// The response to an earlier READ arrives meanwhile, and does not mean that the receiver is ready.
#[test]
fn the_rnr_wait_is_not_ended_by_the_response_to_an_earlier_read() {
    const WAIT: Duration = Duration::from_micros(1280);
    let mut peer = agreed();
    peer.post_read(1, 8);
    peer.post_write(2, b"two");
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
    peer.inject(nak(NAK_RNR | 14, SQ + 1, 1));
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &[1; 8]));
    peer.expect_wc(1, Success);
    peer.advance(WAIT - Duration::from_micros(10));
    peer.expect_nothing();
    peer.advance(Duration::from_micros(20));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(2, Success);
}

#[test]
fn the_missing_part_of_a_read_is_requested_again() {
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
        let reth = again.extensions.reth.unwrap();
        let offset = u64::from(psn - SQ) * 256;
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr + offset, REMOTE.rkey, length));
    }
    peer.expect_nothing();
    peer.expect_no_wc();
    // Data that is there already is not accepted again.
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 3, &[0xee; 256]));
    peer.expect_counted(Counter::StaleResponse, 1);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 4, piece(4)));
    peer.expect_no_wc();
    // The second request was answered, so part of the first is lost once more.
    let again = peer.expect(Opcode::RC_READ_REQUEST, SQ + 1);
    assert_eq!(again.extensions.reth.unwrap().length(), 512);
    peer.inject_all([
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, piece(1)),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, piece(2)),
    ]);
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), data);
}

#[test]
fn a_read_held_at_the_responder_is_not_requested_again() {
    let mut peer = agreed();
    peer.post_write(1, b"one");
    let mr = peer.post_read(2, 512);
    peer.post_write(3, b"three");
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 3]);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 3]));
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(sack(SQ, 0, &[SQ + 1, SQ + 3]));
    peer.expect_nothing();
    // Its response is lost, as later evidence shows; no part of it has arrived, so all of it is requested.
    peer.inject(ack(SQ + 3, 3));
    peer.expect_wc(1, Success);
    assert_eq!(peer.expect(Opcode::RC_READ_REQUEST, SQ + 1).extensions.reth.unwrap().length(), 512);
    peer.inject_all([
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, &[1; 256]),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, &[2; 256]),
    ]);
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
    assert_eq!(peer.bytes(mr), [[1; 256], [2; 256]].concat());
}

/// A part of it would be a separate READ there.
#[test]
fn a_read_whose_request_is_missing_is_requested_completely() {
    let mut peer = agreed();
    peer.post_read(1, 1024);
    assert_eq!(psns(&peer.take_packets()), [SQ]);
    peer.inject(sack(SQ, 0, &[]));
    assert_eq!(peer.expect(Opcode::RC_READ_REQUEST, SQ).extensions.reth.unwrap().length(), 1024);
    peer.modify(Transition::Reset);
}

#[test]
fn a_refusal_does_not_affect_an_earlier_read() {
    let mut peer = agreed();
    peer.post_read(1, 8);
    peer.post_write(2, b"two");
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
    peer.inject(nak(NAK_ACCESS, SQ + 1, 1));
    peer.expect_no_wc();
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &[1; 8]));
    peer.expect_wc(1, Success);
    // The response arrived after it, so the WRITE is considered lost.
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 1);
    peer.inject(nak(NAK_ACCESS, SQ + 1, 1));
    peer.expect_wc(2, WcStatus::RemAccessErr);
}

#[test]
fn a_full_window_does_not_request_an_ack_for_every_packet() {
    let mut peer = agreed();
    for id in 0..3 {
        peer.post_write(id, &[0; 8]);
    }
    peer.post_write(3, &pattern(700 * 256));
    let packets = peer.take_packets();
    assert_eq!(packets.len(), 448);
    assert!(packets[447].bth.ack_req() && !packets[446].bth.ack_req());
    // Held packets leave the window.
    peer.inject(sack(SQ + 10, 3, &[SQ + 11, SQ + 12]));
    expect_all(&mut peer, 0..3, Success);
    let more = peer.take_packets();
    assert_eq!(psns(&more), [&[SQ + 10][..], &(SQ + 448..SQ + 460).collect::<Vec<u32>>()].concat());
    assert_eq!(more[1..].iter().filter(|packet| packet.bth.ack_req()).count(), 1, "only the sixteenth");
    peer.modify(Transition::Reset);
}

#[test]
fn a_long_read_is_requested_in_parts() {
    let mut peer = Peer::with(Setup { max_rd_atomic: 2, ..setup() });
    let data = pattern(300 * 256);
    let mr = peer.post_read(1, data.len());
    let part = |got: Got| {
        (
            got.psn() - SQ,
            got.extensions.reth.unwrap().va() - REMOTE.addr,
            got.extensions.reth.unwrap().length(),
        )
    };
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
fn responses_to_atomics_are_accepted_out_of_order() {
    let mut peer = agreed();
    let mr = peer.memory(&[0; 24]);
    for id in 0..3 {
        let sges = [ferroce::Sge { mr, offset: 8 * id, length: 8 }];
        let op = SendOp::FetchAdd { remote: REMOTE, add: 1 };
        peer.post_flagged(id, op, Data::Sges(&sges), SendFlags::SIGNALED);
    }
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 2]);
    peer.inject_all([atomic_ack(SQ + 1, 11), atomic_ack(SQ + 1, 99)]);
    assert!(peer.expect(Opcode::RC_FETCH_ADD, SQ).bth.ack_req());
    peer.expect_no_wc();
    peer.inject(atomic_ack(SQ, 10));
    peer.expect_wc(0, Success);
    peer.expect_wc(1, Success);
    // The retransmission was sent after the third.
    peer.expect(Opcode::RC_FETCH_ADD, SQ + 2);
    peer.inject(atomic_ack(SQ + 2, 12));
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), [10u64, 11, 12].map(u64::to_ne_bytes).concat());
}

#[test]
fn an_invalid_acknowledge_changes_nothing() {
    let mut peer = with_writes(setup(), 3);
    let short = packet(Opcode::SELECTIVE_ACKNOWLEDGE, SQ + 1).aeth(0x1f, 1).payload(&[0xff; 124]);
    peer.expect_dropped(peer.frame(&short), Counter::RxLengthErrors);
    for psn in [SQ - 1, SQ + 3, SQ + (1 << 22)] {
        peer.expect_dropped(peer.frame(&sack(psn, 1, &[])), Counter::StaleResponse);
    }
    // Reports beyond the packets sent are clipped.
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
