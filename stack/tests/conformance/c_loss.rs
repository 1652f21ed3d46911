//! Section C: the requester under loss.

use std::time::Duration;

use ferroce::WcStatus::{
    self, RemAccessErr, RemInvReqErr, RemOpErr, RetryExcErr, RnrRetryExcErr, Success, WrFlushErr,
};
use ferroce::wire::Opcode;
use ferroce::{Counter, QpState, SendOp};

use crate::packet::{
    Got, NAK_ACCESS, NAK_INVALID, NAK_OPERATIONAL, NAK_RNR, NAK_SEQUENCE, ack, atomic_ack, nak, packet,
    payload, read_response,
};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern, sge};

/// RNR NAK with timer code 14.
const RNR_1280_US: u8 = NAK_RNR | 14;
const WAIT_1280_US: Duration = Duration::from_micros(1280);

/// The ACK timeout 4.096 µs · 2^14.
const TTR: Duration = Duration::from_nanos(4096 << 14);

#[test]
fn case_041_last_ack_lost() {
    let mut peer = Peer::new();
    for id in 1..=3 {
        peer.post_write(id, &[id as u8; 8]);
    }
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1, SQ + 2]);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);

    let (_, resent) = wait_for_resend(&mut peer);
    assert_eq!(psns(&resent), [SQ + 2]);
    assert_eq!(resent[0].payload, [3; 8]);
    peer.inject_all([ack(SQ + 2, 3), ack(SQ + 2, 3)]);
    peer.expect_wc(3, Success);
    peer.expect_no_wc();

    // Within a message: acknowledged packets are not retransmitted.
    let data = pattern(4 * 256);
    peer.post_write(4, &data);
    assert_eq!(peer.take_packets().len(), 4);
    peer.inject(ack(SQ + 4, 3));
    let (_, resent) = wait_for_resend(&mut peer);
    assert_eq!(psns(&resent), [SQ + 5, SQ + 6]);
    assert_eq!(payload(&resent), data[512..]);
    peer.inject(ack(SQ + 6, 4));
    peer.expect_wc(4, Success);
}

#[test]
fn case_042_sequence_nak() {
    let mut peer = Peer::new();
    let data = pattern(3 * 256);
    peer.post_send(1, b"one");
    peer.post_send(2, &data);
    peer.post_send(3, b"three");
    assert_eq!(peer.take_packets().len(), 5);

    peer.inject(nak(NAK_SEQUENCE, SQ + 2, 1));
    peer.expect_wc(1, Success);
    peer.expect_no_wc();
    let middle = peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 2);
    let last = peer.expect(Opcode::RC_SEND_LAST, SQ + 3);
    assert_eq!(payload(&[middle, last]), data[256..]);
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 4).payload, b"three");
    peer.expect_nothing();
    peer.inject(ack(SQ + 4, 3));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn case_043_same_nak_during_the_replay() {
    let mut peer = Peer::new();
    peer.post_write(1, &pattern(6 * 256));
    assert_eq!(peer.take_packets().len(), 6);

    peer.take_at_most(2);
    peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1, SQ + 2]);
    peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
    peer.take_at_most(usize::MAX);
    assert_eq!(psns(&peer.take_packets()), [SQ + 3, SQ + 4, SQ + 5], "the replay goes on");
    // All of the replay is in flight now, and the NAK may still be from before it.
    peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
    peer.expect_nothing();
    peer.expect_counted(Counter::PacketSeqErr, 1);

    // Another PSN means another loss.
    peer.inject(nak(NAK_SEQUENCE, SQ + 3, 0));
    assert_eq!(psns(&peer.take_packets()), [SQ + 3, SQ + 4, SQ + 5]);
    peer.inject(ack(SQ + 5, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_044_nak_outside_the_window() {
    let mut peer = Peer::new();
    peer.post_write(1, b"one");
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    let before = peer.query();
    for syndrome in [NAK_SEQUENCE, NAK_INVALID, NAK_ACCESS, NAK_OPERATIONAL, RNR_1280_US] {
        for psn in [SQ, SQ - 1, SQ + 2, SQ + 3, SQ + 1 + (1 << 22), SQ + 1 + (1 << 23)] {
            peer.inject(nak(syndrome, psn, 2));
            peer.expect_nothing();
            peer.expect_no_wc();
            assert_eq!(peer.query(), before, "after NAK {syndrome:#x} at {psn:#x}");
        }
    }
    // No RNR wait was started either.
    peer.post_write(3, b"three");
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 2);
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn case_045_ack_timeout() {
    // After an ACK.
    let mut peer = Peer::new();
    peer.post_write(1, b"one");
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.advance(Duration::from_millis(50));
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    let (waited, resent) = wait_for_resend(&mut peer);
    assert!((TTR..=4 * TTR).contains(&waited), "resent {waited:?} after the last progress");
    assert_eq!(psns(&resent), [SQ + 1]);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(2, Success);

    // After part of a READ.
    let mut peer = Peer::new();
    let (data, mr) = (pattern(3 * 256), peer.post_read(1, 3 * 256));
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    for (opcode, psn) in [(Opcode::RC_READ_RESPONSE_FIRST, 0), (Opcode::RC_READ_RESPONSE_MIDDLE, 1)] {
        peer.advance(Duration::from_millis(60));
        peer.inject(read_response(opcode, SQ + psn as u32, &data[psn * 256..][..256]));
        peer.expect_nothing();
    }
    let (waited, resent) = wait_for_resend(&mut peer);
    assert!((TTR..=4 * TTR).contains(&waited), "resent {waited:?} after the last progress");
    assert_eq!(psns(&resent), [SQ + 2]);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 2, &data[512..]));
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr), data);

    // 0 disables it.
    let mut peer = Peer::with(Setup { timeout: 0, ..Setup::default() });
    peer.post_write(1, b"one");
    peer.expect(Opcode::RC_WRITE_ONLY, SQ);
    peer.advance(Duration::from_secs(24 * 3600));
    peer.expect_nothing();
    peer.expect_no_wc();
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_046_silent_peer() {
    let mut peer = Peer::with(Setup { retry_count: 3, ..Setup::default() });
    for id in [11, 12] {
        peer.post_recv(id, 8);
    }
    peer.post_send(1, &pattern(512));
    peer.post_write(2, b"two");
    peer.post_read(3, 8);
    let all = [SQ, SQ + 1, SQ + 2, SQ + 3];
    let mut sent = peer.take_packets();
    assert_eq!(psns(&sent), all);
    for resend in 1..=3 {
        let (_, resent) = wait_for_resend(&mut peer);
        let waited = resent[0].at.since(sent[0].at);
        assert!((TTR..=4 * TTR).contains(&waited), "resend {resend} after {waited:?}");
        assert_eq!(psns(&resent), all, "resend {resend}");
        peer.expect_no_wc();
        sent = resent;
    }
    peer.advance(TTR - Duration::from_millis(2));
    peer.expect_no_wc();
    peer.advance(4 * TTR);
    peer.expect_nothing();
    peer.expect_state(QpState::Error);
    let (sends, receives) = completions(&mut peer);
    assert_eq!(sends, [(1, RetryExcErr), (2, WrFlushErr), (3, WrFlushErr)]);
    assert_eq!(receives, [(11, WrFlushErr), (12, WrFlushErr)]);
    peer.advance(Duration::from_secs(60));
}

#[test]
fn case_047_seven_retries_and_no_more() {
    let mut peer = Peer::with(Setup { retry_count: 7, ..Setup::default() });
    peer.post_write(1, b"one");
    peer.expect(Opcode::RC_WRITE_ONLY, SQ);
    peer.advance(100 * TTR);
    assert_eq!(psns(&peer.take_packets()), [SQ; 7]);
    peer.expect_wc(1, RetryExcErr);
    peer.expect_state(QpState::Error);

    // One retry for each packet of a message is enough if each is finally delivered.
    let mut peer = Peer::with(Setup { retry_count: 1, ..Setup::default() });
    peer.post_write(1, &pattern(5 * 256));
    assert_eq!(peer.take_packets().len(), 5);
    for psn in SQ..SQ + 5 {
        let (_, resent) = wait_for_resend(&mut peer);
        assert_eq!(psns(&resent), (psn..SQ + 5).collect::<Vec<_>>());
        peer.inject(ack(psn, 0));
    }
    peer.expect_wc(1, Success);

    // Losses of every kind count together.
    let mut peer = Peer::with(Setup { retry_count: 3, ..Setup::default() });
    peer.post_read(1, 8);
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(nak(NAK_SEQUENCE, SQ, 0));
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
    let (_, resent) = wait_for_resend(&mut peer);
    assert_eq!(psns(&resent), [SQ, SQ + 1]);
    peer.inject(ack(SQ + 1, 2));
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1], "the READ's data is missing");
    peer.inject(nak(NAK_SEQUENCE, SQ, 0));
    peer.expect_nothing();
    peer.expect_wc(1, RetryExcErr);
    peer.expect_wc(2, WrFlushErr);
}

#[test]
fn case_048_receiver_not_ready() {
    let mut peer = Peer::new();
    for (id, text) in [(1, b"one"), (2, b"two"), (3, b"tri")] {
        peer.post_send(id, text);
    }
    assert_eq!(peer.take_packets().len(), 3);
    peer.inject(nak(RNR_1280_US, SQ + 1, 1));
    peer.expect_wc(1, Success);
    let start = peer.now;
    peer.advance(WAIT_1280_US - Duration::from_nanos(1));
    peer.expect_nothing();
    peer.advance(Duration::from_millis(1));
    let resent = peer.take_packets();
    assert_eq!(psns(&resent), [SQ + 1, SQ + 2]);
    assert_eq!(payload(&resent), b"twotri");
    assert!(resent[0].at.since(start) >= WAIT_1280_US);
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn case_049_nothing_cuts_the_rnr_wait_short() {
    // An ACK timer of 262 µs, and no retry: it would end the connection.
    let mut peer = Peer::with(Setup { timeout: 6, retry_count: 0, ..Setup::default() });
    peer.post_send(1, b"one");
    peer.post_send(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(nak(RNR_1280_US, SQ, 0));
    let start = peer.now;
    // rxe's NAK for the packet after it.
    peer.inject(nak(NAK_SEQUENCE, SQ, 0));
    peer.expect_nothing();
    peer.advance(WAIT_1280_US / 2);
    peer.inject(nak(NAK_SEQUENCE, SQ, 0));
    // An earlier ACK, and a new message.
    peer.inject(ack(SQ - 1, 0));
    peer.post_send(3, b"three");
    peer.advance(WAIT_1280_US / 2 - Duration::from_nanos(1));
    peer.expect_nothing();
    peer.expect_no_wc();
    peer.advance(Duration::from_micros(50));
    let resent = peer.take_packets();
    assert_eq!(psns(&resent), [SQ, SQ + 1, SQ + 2]);
    assert!(resent[0].at.since(start) >= WAIT_1280_US);
    peer.inject(ack(SQ + 2, 3));
    for id in 1..=3 {
        peer.expect_wc(id, Success);
    }
}

/// A repeated RNR NAK counts again: the longer wait applies, and a NAK during the wait uses no retry.
#[test]
fn a_second_rnr_nak_prolongs_the_wait() {
    const HALF: Duration = Duration::from_micros(640);
    const RNR_10_US: u8 = NAK_RNR | 1;
    // One retry, which the first NAK uses: counting the second would end the connection.
    let mut peer = Peer::with(Setup { rnr_retry: 1, ..Setup::default() });
    peer.post_send(1, b"one");
    peer.post_send(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(nak(RNR_1280_US, SQ, 0));
    peer.advance(HALF);
    let last = peer.now;
    peer.inject(nak(RNR_1280_US, SQ, 0));
    // A NAK with less time than is left does not shorten the wait.
    peer.inject(nak(RNR_10_US, SQ, 0));
    peer.advance(WAIT_1280_US - Duration::from_nanos(1));
    peer.expect_nothing();
    peer.expect_no_wc();
    peer.advance(Duration::from_micros(50));
    let resent = peer.take_packets();
    assert_eq!(psns(&resent), [SQ, SQ + 1]);
    assert!(resent[0].at.since(last) >= WAIT_1280_US);

    // A NAK of a later PSN acknowledges the ones before it and ends that wait: its own begins.
    peer.inject(nak(RNR_1280_US, SQ, 0));
    peer.expect_wc(1, RnrRetryExcErr);
    peer.expect_wc(2, WrFlushErr);
    let mut peer = Peer::with(Setup { rnr_retry: 1, ..Setup::default() });
    peer.post_send(1, b"one");
    peer.post_send(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(nak(RNR_1280_US, SQ, 0));
    peer.inject(nak(RNR_10_US, SQ + 1, 1));
    peer.expect_wc(1, Success);
    peer.advance(HALF);
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(2, Success);
}

/// NAKs during the wait do not prolong it beyond the longest wait: a later one is a retry like any other. Otherwise a peer
/// could delay a sender forever.
#[test]
fn rnr_naks_do_not_delay_a_sender_forever() {
    const RNR_655_MS: u8 = NAK_RNR;
    let half = Duration::from_millis(500);
    for rnr_retry in [1, 3] {
        let mut peer = Peer::with(Setup { rnr_retry, ..Setup::default() });
        peer.post_send(1, b"one");
        peer.post_send(2, b"two");
        assert_eq!(peer.take_packets().len(), 2);
        // Every second one arrives when the previous wait has lasted for a second.
        for _ in 0..2 * rnr_retry {
            peer.inject(nak(RNR_655_MS, SQ, 0));
            peer.expect_nothing();
            peer.expect_no_wc();
            peer.advance(half);
        }
        peer.inject(nak(RNR_655_MS, SQ, 0));
        peer.expect_wc(1, RnrRetryExcErr);
        peer.expect_wc(2, WrFlushErr);
        peer.expect_counted(Counter::RnrNakRetryErr, u64::from(rnr_retry) + 1);
    }
    // With unlimited retries it waits, and sends when the last wait has ended.
    let mut peer = Peer::with(Setup { rnr_retry: 7, ..Setup::default() });
    peer.post_send(1, b"one");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    for _ in 0..20 {
        peer.inject(nak(RNR_655_MS, SQ, 0));
        peer.advance(half);
        peer.expect_nothing();
    }
    peer.advance(Duration::from_millis(156));
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_050_rnr_retries() {
    for rnr_retry in [0, 2] {
        let mut peer = Peer::with(Setup { rnr_retry, ..Setup::default() });
        peer.post_send(1, b"one");
        peer.post_send(2, b"two");
        assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
        for _ in 0..rnr_retry {
            peer.inject(nak(RNR_1280_US, SQ, 0));
            peer.expect_no_wc();
            peer.advance(2 * WAIT_1280_US);
            assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
        }
        peer.inject(nak(RNR_1280_US, SQ, 0));
        peer.expect_wc(1, RnrRetryExcErr);
        peer.expect_wc(2, WrFlushErr);
        peer.expect_state(QpState::Error);
        peer.advance(Duration::from_secs(1));
    }

    let mut peer = Peer::with(Setup { rnr_retry: 7, ..Setup::default() });
    peer.post_send(1, b"one");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    for _ in 0..200 {
        peer.inject(nak(RNR_1280_US, SQ, 0));
        peer.advance(2 * WAIT_1280_US);
        peer.expect(Opcode::RC_SEND_ONLY, SQ);
    }
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_051_reserved_syndromes() {
    let mut peer = Peer::new();
    peer.post_write(1, b"one");
    peer.post_write(2, b"two");
    assert_eq!(peer.take_packets().len(), 2);
    for syndrome in (0x40..=0x5f).chain(0x65..=0x7f) {
        peer.inject(nak(syndrome, SQ + 1, 0));
        peer.expect_nothing();
        peer.expect_no_wc();
        peer.expect_counted(Counter::IgnoredSyndrome, 1);
        peer.expect_state(QpState::Rts);
    }
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
}

#[test]
fn case_052_fatal_naks() {
    let kinds = [(NAK_INVALID, RemInvReqErr), (NAK_ACCESS, RemAccessErr), (NAK_OPERATIONAL, RemOpErr)];
    for (syndrome, status) in kinds {
        let mut peer = Peer::new();
        for id in [11, 12] {
            peer.post_recv(id, 8);
        }
        peer.post_send(1, b"one");
        peer.post_write(2, &pattern(3 * 256));
        peer.post_send(3, b"three");
        peer.post_read(4, 8);
        assert_eq!(peer.take_packets().len(), 6);
        // Within the second message.
        peer.inject(nak(syndrome, SQ + 2, 1));
        peer.expect_state(QpState::Error);
        let (sends, receives) = completions(&mut peer);
        assert_eq!(sends, [(1, Success), (2, status), (3, WrFlushErr), (4, WrFlushErr)]);
        assert_eq!(receives, [(11, WrFlushErr), (12, WrFlushErr)]);
        peer.advance(Duration::from_secs(60));
        peer.expect_nothing();
    }
}

#[test]
fn case_053_nak_as_atomic_acknowledge() {
    let negative = |syndrome, psn| packet(Opcode::RC_ATOMIC_ACKNOWLEDGE, psn).aeth(syndrome, 0).original(99);

    let mut peer = Peer::new();
    let mr = peer.memory(&[7; 8]);
    peer.post_send(1, b"one");
    peer.post(2, SendOp::FetchAdd { remote: REMOTE, add: 5 }, &[sge(mr, 8)]);
    assert_eq!(psns(&peer.take_packets()), [SQ, SQ + 1]);
    peer.inject(negative(NAK_SEQUENCE, SQ + 1));
    peer.expect_wc(1, Success);
    peer.expect(Opcode::RC_FETCH_ADD, SQ + 1);
    peer.inject(negative(RNR_1280_US, SQ + 1));
    peer.advance(WAIT_1280_US - Duration::from_nanos(1));
    peer.expect_nothing();
    peer.advance(WAIT_1280_US);
    peer.expect(Opcode::RC_FETCH_ADD, SQ + 1);
    peer.expect_no_wc();
    assert_eq!(peer.bytes(mr), [7; 8], "a NAK brings no value");
    peer.inject(atomic_ack(SQ + 1, 41));
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), 41u64.to_ne_bytes());

    let kinds = [(NAK_INVALID, RemInvReqErr), (NAK_ACCESS, RemAccessErr), (NAK_OPERATIONAL, RemOpErr)];
    for (syndrome, status) in kinds {
        let mut peer = Peer::new();
        let mr = peer.memory(&[7; 8]);
        peer.post(1, SendOp::FetchAdd { remote: REMOTE, add: 5 }, &[sge(mr, 8)]);
        peer.expect(Opcode::RC_FETCH_ADD, SQ);
        peer.inject(negative(syndrome, SQ));
        peer.expect_wc(1, status);
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr), [7; 8]);
    }
}

#[test]
fn case_054_replay_skips_what_is_acknowledged() {
    let mut peer = Peer::new();
    peer.post_write(1, &pattern(3 * 256));
    peer.post_write(2, &pattern(4 * 256));
    assert_eq!(peer.take_packets().len(), 7);
    // In the middle of the replay: past the end of one message into the next.
    peer.take_at_most(1);
    peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
    assert_eq!(psns(&peer.take_packets()), [SQ + 1]);
    peer.inject(ack(SQ + 4, 1));
    peer.take_at_most(usize::MAX);
    assert_eq!(psns(&peer.take_packets()), [SQ + 5, SQ + 6]);
    peer.expect_wc(1, Success);
    // Before the replay has started.
    peer.inject_all([nak(NAK_SEQUENCE, SQ + 5, 1), ack(SQ + 5, 1)]);
    assert_eq!(psns(&peer.take_packets()), [SQ + 6]);
    // After all of it.
    peer.inject_all([nak(NAK_SEQUENCE, SQ + 6, 1), ack(SQ + 6, 2)]);
    peer.expect_nothing();
    peer.expect_wc(2, Success);
    peer.advance(10 * TTR);
}

#[test]
fn case_055_bad_icrc_is_a_loss() {
    let corrupt = |mut frame: Vec<u8>| {
        let middle = frame.len() - 6;
        frame[middle] ^= 1;
        frame
    };

    // An ACK.
    let mut peer = Peer::new();
    peer.post_write(1, b"one");
    peer.expect(Opcode::RC_WRITE_ONLY, SQ);
    let frame = peer.frame(&ack(SQ, 1));
    peer.expect_dropped(corrupt(frame), Counter::RxIcrcEncapsulated);
    let (_, resent) = wait_for_resend(&mut peer);
    assert_eq!(psns(&resent), [SQ]);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);

    // Part of a READ's data.
    let (data, mr) = (pattern(3 * 256), peer.post_read(2, 3 * 256));
    peer.expect(Opcode::RC_READ_REQUEST, SQ + 1);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, &data[..256]));
    let frame = peer.frame(&read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 2, &data[256..512]));
    peer.expect_dropped(corrupt(frame), Counter::RxIcrcEncapsulated);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 3, &data[512..]));
    peer.expect(Opcode::RC_READ_REQUEST, SQ + 2);
    assert_eq!(peer.bytes(mr)[256..], [0; 512], "nothing of the corrupt packet, nothing out of order");
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 2, &data[256..512]));
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 3, &data[512..]));
    peer.expect_wc(2, Success);
    assert_eq!(peer.bytes(mr), data);

    // Data of a SEND.
    let mr = peer.post_recv(3, 8);
    let frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ).payload(b"good").ack_req());
    peer.expect_dropped(corrupt(frame), Counter::RxIcrcEncapsulated);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 1).payload(b"next").ack_req());
    peer.expect_nak(NAK_SEQUENCE, RQ, 0);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"good").ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(3, Success);
    assert_eq!(peer.bytes(mr), *b"good\0\0\0\0");
}

fn psns(packets: &[Got]) -> Vec<u32> {
    packets.iter().map(|packet| packet.psn()).collect()
}

/// Advances time until the engine sends something. Returns the duration, and the packets.
#[track_caller]
fn wait_for_resend(peer: &mut Peer) -> (Duration, Vec<Got>) {
    let start = peer.now;
    while peer.now.since(start) <= 5 * TTR {
        peer.advance(Duration::from_millis(1));
        let packets = peer.take_packets();
        if let Some(first) = packets.first() {
            return (first.at.since(start), packets);
        }
    }
    panic!("nothing is resent");
}

/// All completions: those of sends (numbers below 10 in these cases) and of receives.
fn completions(peer: &mut Peer) -> (Vec<Completed>, Vec<Completed>) {
    let all = std::iter::from_fn(|| peer.context.poll_cq(peer.cq).unwrap());
    all.map(|wc| (wc.wr_id, wc.status)).partition(|(wr_id, _)| *wr_id < 10)
}

/// `wr_id`, and the status.
type Completed = (u64, WcStatus);
