//! Messages that request no ACK of their own.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::wire::Opcode;
use ferroce::*;
use ferroce_test_support::packet::{NAK_SEQUENCE, ack, nak};
use ferroce_test_support::peer::{Peer, SQ, Setup, pattern, sge};

const LAZY: SendFlags = SendFlags::SIGNALED.signaled(false).lazy_ack(true);
/// The ACK timeout of [`Setup`]: 4.096 µs · 2^14.
const TIMEOUT: Duration = Duration::from_nanos(4096 << 14);

fn post(peer: &mut Peer, wr_id: u64, flags: SendFlags) {
    peer.post_flagged(wr_id, SendOp::Send, Data::Inline(b"hello"), flags);
}

#[track_caller]
fn expect(peer: &mut Peer, psn: u32, asks: bool) {
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, psn).bth.ack_req(), asks, "AckReq of PSN {psn}");
}

/// A later message that requests an ACK completes those before it, and its timeout counts from it.
#[test]
fn a_later_message_requests_the_ack_of_lazy_ones() {
    let mut peer = Peer::new();
    post(&mut peer, 0, LAZY);
    expect(&mut peer, SQ, false);
    peer.advance(TIMEOUT / 8);
    post(&mut peer, 1, LAZY.signaled(true));
    expect(&mut peer, SQ + 1, false);
    post(&mut peer, 2, SendFlags::SIGNALED);
    expect(&mut peer, SQ + 2, true);
    peer.advance(TIMEOUT / 2);
    peer.expect_nothing();
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(1, WcStatus::Success);
    peer.expect_wc(2, WcStatus::Success);
    peer.advance(2 * TIMEOUT);
    peer.expect_nothing();
}

/// If none follows, the last is sent once more and requests an ACK; that is neither a timeout nor a retransmission. If its
/// answer is lost too, all is retransmitted as usual.
#[test]
fn the_last_lazy_message_requests_an_ack_if_nothing_follows() {
    let mut peer = Peer::with(Setup { retry_count: 1, ..Setup::default() });
    for i in 0..3 {
        post(&mut peer, i.into(), LAZY.signaled(true));
        expect(&mut peer, SQ + i, false);
    }
    peer.advance(TIMEOUT / 4 - Duration::from_micros(10));
    peer.expect_nothing();
    peer.advance(Duration::from_micros(20));
    expect(&mut peer, SQ + 2, true);
    peer.expect_nothing();
    peer.expect_counted(Counter::LocalAckTimeoutErr, 0);
    peer.expect_counted(Counter::RetransmittedPkts, 0);
    // Later messages request an ACK, or not, as before.
    post(&mut peer, 3, LAZY.signaled(true));
    expect(&mut peer, SQ + 3, false);
    peer.advance(TIMEOUT);
    for i in 0..4 {
        expect(&mut peer, SQ + i, true);
    }
    peer.expect_counted(Counter::LocalAckTimeoutErr, 1);
    peer.inject(ack(SQ + 3, 4));
    (0..4).for_each(|i| _ = peer.expect_wc(i, WcStatus::Success));
    peer.advance(2 * TIMEOUT);
    peer.expect_nothing();
    // The destination has as much room as before: a packet sent twice is in flight once.
    post(&mut peer, 4, LAZY);
    expect(&mut peer, SQ + 4, false);
}

/// In a message of several packets only each sixteenth requests an ACK; its last one requests one late, which is no retry.
#[test]
fn a_long_message_requests_an_ack_late_with_its_last_packet() {
    use Opcode as O;
    for packets in [3, 17] {
        let mut peer = Peer::with(Setup { retry_count: 0, ..Setup::default() });
        let mtu = peer.query().path_mtu.unwrap().bytes() as usize;
        let bytes = pattern(mtu * (packets as usize - 1) + 1);
        let mr = peer.memory(&bytes);
        peer.post_flagged(0, SendOp::Send, Data::Sges(&[sge(mr, bytes.len())]), LAZY.signaled(true));
        for (i, got) in (0..).zip(peer.take_packets()) {
            assert_eq!((got.psn(), got.bth.ack_req()), (SQ + i, i == 15), "packet {i} of {packets}");
        }
        if packets == 17 {
            peer.inject(ack(SQ + 15, 0));
        }
        peer.advance(TIMEOUT / 4 + Duration::from_micros(10));
        assert!(peer.expect(O::RC_SEND_LAST, SQ + packets - 1).bth.ack_req());
        peer.expect_counted(Counter::LocalAckTimeoutErr, 0);
        // The answer has the whole time.
        peer.advance(TIMEOUT - Duration::from_micros(10));
        peer.expect_nothing();
        peer.inject(ack(SQ + packets - 1, 1));
        peer.expect_wc(0, WcStatus::Success);
    }
}

/// One of 16 consecutive packets requests an ACK.
#[test]
fn every_sixteenth_message_requests_an_ack() {
    let mut peer = Peer::new();
    for i in 0..40 {
        post(&mut peer, i.into(), LAZY);
        expect(&mut peer, SQ + i, i == 15 || i == 31);
        if i == 31 {
            peer.inject(ack(SQ + 31, 32));
        }
    }
    peer.inject(ack(SQ + 39, 40));
}

/// A message posted when the time has come requests one, and nothing is sent twice.
#[test]
fn a_message_posted_late_requests_an_ack() {
    let mut peer = Peer::new();
    post(&mut peer, 0, LAZY.signaled(true));
    expect(&mut peer, SQ, false);
    peer.now = peer.now + TIMEOUT / 2;
    post(&mut peer, 1, LAZY.signaled(true));
    expect(&mut peer, SQ + 1, true);
    peer.expect_nothing();
    post(&mut peer, 2, LAZY);
    expect(&mut peer, SQ + 2, false);
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(0, WcStatus::Success);
    peer.expect_wc(1, WcStatus::Success);
}

/// A port that accepts no frames delays the packet that requests an ACK: a missing answer means nothing then, for messages
/// that have arrived.
#[test]
fn a_blocked_port_does_not_prevent_a_late_request() {
    let mut peer = Peer::with(Setup { retry_count: 0, ..Setup::default() });
    post(&mut peer, 0, LAZY.signaled(true));
    expect(&mut peer, SQ, false);
    peer.take_at_most(0);
    for _ in 0..40 {
        peer.advance(TIMEOUT / 4);
    }
    peer.take_at_most(usize::MAX);
    expect(&mut peer, SQ, true);
    peer.advance(TIMEOUT - Duration::from_micros(10));
    peer.expect_nothing();
    peer.expect_counted(Counter::LocalAckTimeoutErr, 0);
    peer.expect_counted(Counter::RetransmittedPkts, 0);
    peer.inject(ack(SQ, 1));
    peer.expect_wc(0, WcStatus::Success);
}

/// Idle queue pairs leave the window of their destination to others.
#[test]
fn idle_queue_pairs_hold_little_of_the_window() {
    let setup = Setup::default();
    let mut peer = Peer::with(Setup::default());
    let mut unasked = 0;
    for _ in 0..40 {
        let qp = peer.another_qp(&setup);
        for wr_id in 0..14 {
            let (op, data) = (SendOp::Send, Data::Inline(b"hello"));
            peer.context.post_send(qp, &SendWorkRequest { wr_id, op, data, flags: LAZY }).unwrap();
        }
        unasked += peer.take_packets().iter().filter(|packet| !packet.bth.ack_req()).count();
    }
    assert!((32..=64).contains(&unasked), "{unasked} packets of a window of 512 have asked for no ACK");
    peer.end();
}

/// A longer message that has started when the time has come will request one itself: that is no timeout.
#[test]
fn an_unfinished_longer_message_requests_an_ack_itself() {
    let mut peer = Peer::with(Setup { retry_count: 0, ..Setup::default() });
    post(&mut peer, 0, LAZY.signaled(true));
    expect(&mut peer, SQ, false);
    peer.advance(TIMEOUT / 8);
    let mtu = peer.query().path_mtu.unwrap().bytes() as usize;
    let bytes = pattern(4 * mtu);
    let mr = peer.memory(&bytes);
    peer.post(1, SendOp::Send, &[sge(mr, bytes.len())]);
    peer.take_at_most(2);
    peer.poll();
    peer.take_at_most(0);
    peer.advance(TIMEOUT / 4);
    peer.take_at_most(usize::MAX);
    let packets = peer.take_packets();
    let asking: Vec<(u32, bool)> = packets.iter().map(|got| (got.psn(), got.bth.ack_req())).collect();
    assert_eq!(asking, [(SQ + 1, false), (SQ + 2, false), (SQ + 3, false), (SQ + 4, true)]);
    peer.expect_counted(Counter::LocalAckTimeoutErr, 0);
    peer.inject(ack(SQ + 4, 2));
    peer.expect_wc(0, WcStatus::Success);
    peer.expect_wc(1, WcStatus::Success);
}

/// A peer that is gone is given up a quarter of a timeout later than with a message that requests an ACK.
#[test]
fn lazy_messages_without_an_answer_time_out() {
    let mut peer = Peer::with(Setup { retry_count: 1, ..Setup::default() });
    post(&mut peer, 0, LAZY);
    expect(&mut peer, SQ, false);
    for waits in [TIMEOUT / 4, TIMEOUT] {
        peer.advance(waits + Duration::from_micros(10));
        expect(&mut peer, SQ, true);
    }
    peer.advance(TIMEOUT + Duration::from_micros(10));
    peer.expect_wc(0, WcStatus::RetryExcErr);
}

/// A loss is detected by the next message.
#[test]
fn lost_lazy_messages_are_retransmitted() {
    let mut peer = Peer::new();
    for i in 0..2 {
        post(&mut peer, i.into(), LAZY.signaled(true));
        expect(&mut peer, SQ + i, false);
    }
    peer.inject(nak(NAK_SEQUENCE, SQ, 0));
    expect(&mut peer, SQ, true);
    expect(&mut peer, SQ + 1, true);
    peer.inject(ack(SQ + 1, 2));
    peer.expect_wc(0, WcStatus::Success);
    peer.expect_wc(1, WcStatus::Success);
}

/// Without a timer no later packet would request an ACK.
#[test]
fn without_a_timeout_all_messages_request_an_ack() {
    let mut peer = Peer::with(Setup { timeout: 0, ..Setup::default() });
    post(&mut peer, 0, LAZY);
    expect(&mut peer, SQ, true);
    peer.inject(ack(SQ, 1));
}

/// A full send queue of them has requested an ACK, and has room again.
#[test]
fn a_queue_of_lazy_messages_drains() {
    let mut peer = Peer::new();
    let mut posted = 0;
    loop {
        let request = SendWorkRequest {
            wr_id: posted.into(),
            op: SendOp::Send,
            data: Data::Inline(b"hello"),
            flags: LAZY,
        };
        match peer.context.post_send(peer.qp, &request) {
            Ok(()) => posted += 1,
            Err(Error::QueueFull { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let packets = peer.take_packets();
    assert_eq!(packets.len(), posted as usize);
    assert!(posted >= 16 && packets.iter().any(|packet| packet.bth.ack_req()));
    peer.inject(ack(SQ + posted - 1, posted));
    post(&mut peer, 0, LAZY);
    expect(&mut peer, SQ + posted, false);
}
