//! Section B: PSNs, acknowledgement and completion of the requester.

use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::wire::Opcode;
use ferroce::{Counter, Data, Error, RKey, SendFlags, SendOp, SendWorkRequest, WcOpcode};

use crate::b_responses::responses;
use crate::packet::{Script, ack, atomic_ack, packet, payload, read_response};
use crate::peer::{Peer, REMOTE, SQ, Setup, pattern, sge};

/// 4.096 µs · 2¹⁴, the ACK timeout of the default setup.
pub(crate) const TIMEOUT: Duration = Duration::from_nanos(4096 << 14);
pub(crate) const MS: Duration = Duration::from_millis(1);

#[test]
fn case_019_send_is_segmented() {
    let mut peer = Peer::new();
    let data = pattern(3 * 256 + 1);
    peer.post_send(1, &data);
    let packets = [
        peer.expect(Opcode::RC_SEND_FIRST, SQ),
        peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 1),
        peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 2),
        peer.expect(Opcode::RC_SEND_LAST, SQ + 3),
    ];
    peer.expect_nothing();
    assert_eq!(packets.each_ref().map(|p| p.payload.len()), [256, 256, 256, 1]);
    assert_eq!(packets.each_ref().map(|p| p.bth.pad()), [0, 0, 0, 3]);
    assert_eq!(payload(&packets), data);
    assert!(packets[3].bth.ack_req(), "AckReq on the last packet");
    peer.inject(ack(SQ + 3, 1));
    assert_eq!(peer.expect_wc(1, Success).opcode, WcOpcode::Send);

    // The last packet carries the fields of the whole message: immediate, key, solicited event.
    let mr = peer.memory(&data);
    let solicited = SendFlags::SIGNALED.solicited(true);
    let ops = [SendOp::SendWithImm(0xabcd), SendOp::SendWithInvalidate(RKey::new(0x1234))];
    for (wr_id, op) in (2..).zip(ops) {
        peer.post_flagged(wr_id, op, Data::Sges(&[sge(mr, 300)]), solicited);
    }
    let first = peer.expect(Opcode::RC_SEND_FIRST, SQ + 4);
    assert!(!first.bth.solicited());
    let last = peer.expect(Opcode::RC_SEND_LAST_WITH_IMMEDIATE, SQ + 5);
    assert_eq!((last.bth.solicited(), last.bth.ack_req(), last.immediate()), (true, true, Some(0xabcd)));
    peer.expect(Opcode::RC_SEND_FIRST, SQ + 6);
    let last = peer.expect(Opcode::RC_SEND_LAST_WITH_INVALIDATE, SQ + 7);
    assert_eq!(
        (last.bth.solicited(), last.bth.ack_req(), last.invalidated()),
        (true, true, Some(RKey::new(0x1234)))
    );
    assert_eq!(last.payload, data[256..300]);
    peer.inject(ack(SQ + 7, 3));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn case_020_messages_of_length_zero() {
    let mut peer = Peer::new();
    peer.post(1, SendOp::Send, &[]);
    peer.post(2, SendOp::Write(REMOTE), &[]);
    peer.post(3, SendOp::Read(REMOTE), &[]);
    peer.post_send(4, b"next");
    let send = peer.expect(Opcode::RC_SEND_ONLY, SQ);
    let write = peer.expect(Opcode::RC_WRITE_ONLY, SQ + 1);
    let read = peer.expect(Opcode::RC_READ_REQUEST, SQ + 2);
    peer.expect(Opcode::RC_SEND_ONLY, SQ + 3);
    peer.expect_nothing();
    assert!(send.bth.ack_req() && write.bth.ack_req());
    for packet in [&send, &write, &read] {
        assert_eq!((packet.payload.len(), packet.bth.pad()), (0, 0), "{packet}");
    }
    for request in [write, read] {
        let reth = request.extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr, REMOTE.rkey, 0));
    }
    peer.inject(ack(SQ + 1, 2));
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 2, &[]));
    for wr_id in [1, 2, 3] {
        assert_eq!(peer.expect_wc(wr_id, Success).byte_len, 0);
    }
    peer.inject(ack(SQ + 3, 4));
    peer.expect_wc(4, Success);
}

#[test]
fn case_021_read_takes_the_psns_of_its_response() {
    let mut peer = Peer::new();
    let mr = peer.post_read(1, 5 * 256);
    peer.post_send(2, b"next");
    let request = peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.expect(Opcode::RC_SEND_ONLY, SQ + 5);
    peer.expect_nothing();
    let reth = request.extensions.reth.unwrap();
    assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr, REMOTE.rkey, 5 * 256));

    let data = pattern(5 * 256);
    peer.inject_all(responses(SQ, 5, &data));
    assert_eq!(peer.expect_wc(1, Success).byte_len, 5 * 256);
    assert_eq!(peer.bytes(mr), data);
    peer.inject(ack(SQ + 5, 2));
    peer.expect_wc(2, Success);
}

#[test]
fn case_022_psns_wrap() {
    let mut peer = Peer::with(Setup { sq_psn: 0xff_fffe, ..Setup::default() });
    peer.post_send(1, &pattern(4 * 256));
    peer.expect(Opcode::RC_SEND_FIRST, 0xff_fffe);
    peer.expect(Opcode::RC_SEND_MIDDLE, 0xff_ffff);
    peer.expect(Opcode::RC_SEND_MIDDLE, 0);
    peer.expect(Opcode::RC_SEND_LAST, 1);
    peer.expect_nothing();
    peer.inject(ack(0xff_ffff, 0));
    peer.expect_no_wc();
    peer.inject(ack(1, 1));
    peer.expect_wc(1, Success);
    peer.post_send(2, b"next");
    peer.expect(Opcode::RC_SEND_ONLY, 2);
    peer.inject(ack(2, 2));
    peer.expect_wc(2, Success);

    // A READ across the wrap, with a loss exactly there.
    let mut peer = Peer::with(Setup { sq_psn: 0xff_fffe, ..Setup::default() });
    let data = pattern(4 * 256);
    let mr = peer.post_read(1, 4 * 256);
    peer.expect(Opcode::RC_READ_REQUEST, 0xff_fffe);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, 0xff_fffe, &data[..256]));
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, 0, &data[512..768]));
    peer.expect(Opcode::RC_READ_REQUEST, 0xff_ffff);
    peer.inject_all(responses(0xff_ffff, 3, &data[256..]));
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr), data);
}

#[test]
fn case_023_one_ack_for_three_writes() {
    let mut peer = Peer::new();
    for wr_id in 1..=3 {
        peer.post_write(wr_id, &pattern(300));
    }
    for first in [SQ, SQ + 2, SQ + 4] {
        let reth = peer.expect(Opcode::RC_WRITE_FIRST, first).extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr, REMOTE.rkey, 300));
        assert!(peer.expect(Opcode::RC_WRITE_LAST, first + 1).bth.ack_req());
    }
    peer.expect_no_wc();
    peer.inject(ack(SQ + 5, 3));
    for wr_id in 1..=3 {
        let wc = peer.expect_wc(wr_id, Success);
        assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RdmaWrite, 300));
    }
}

#[test]
fn case_024_ack_in_the_middle_of_a_message() {
    let mut peer = Peer::new();
    peer.post_send(1, &pattern(4 * 256));
    peer.take_packets();
    peer.advance(50 * MS);
    let progress = peer.now;
    peer.inject(ack(SQ + 1, 0));
    peer.expect_no_wc();
    // The old deadline passes; the one counted from the ACK does not.
    peer.advance(TIMEOUT - MS);
    peer.expect_nothing();
    peer.advance(3 * TIMEOUT);
    let resent = peer.expect(Opcode::RC_SEND_MIDDLE, SQ + 2);
    let waited = resent.at.since(progress);
    assert!((TIMEOUT..=4 * TIMEOUT).contains(&waited), "resent after {waited:?}");
    peer.expect(Opcode::RC_SEND_LAST, SQ + 3);
    peer.take_packets();
    peer.inject(ack(SQ + 3, 1));
    peer.expect_wc(1, Success);

    // Each packet of a READ response is progress, too.
    let data = pattern(3 * 256);
    peer.post_read(2, data.len());
    peer.expect(Opcode::RC_READ_REQUEST, SQ + 4);
    for response in responses(SQ + 4, 3, &data) {
        peer.advance(TIMEOUT - MS);
        peer.expect_nothing();
        peer.inject(response);
    }
    peer.expect_wc(2, Success);
}

#[test]
fn case_025_acks_out_of_the_window() {
    let mut peer = Peer::new();
    let stale = |peer: &mut Peer, psn: u32| {
        for syndrome in [0x1f, 0x00] {
            let frame = peer.frame(&packet(Opcode::RC_ACKNOWLEDGE, psn & 0xff_ffff).aeth(syndrome, 9));
            peer.expect_dropped(frame, Counter::StaleResponse);
        }
    };
    // Nothing is outstanding.
    for psn in [SQ - 1, SQ, SQ + 1] {
        stale(&mut peer, psn);
    }
    peer.post_send(1, &pattern(4 * 256));
    assert_eq!(peer.take_packets().len(), 4);
    for psn in [SQ + 4, SQ + 5, SQ + 0x7f_ffff, SQ + 0x80_0000, SQ - 1, SQ - 0x7f] {
        stale(&mut peer, psn);
    }
    peer.inject(ack(SQ + 2, 0));
    peer.expect_no_wc();
    for psn in [SQ + 2, SQ + 1, SQ, SQ + 4] {
        stale(&mut peer, psn);
    }
    // They were not progress either: the timer continues from the last valid one.
    let progress = peer.now;
    peer.advance(TIMEOUT / 2);
    stale(&mut peer, SQ + 2);
    peer.advance(4 * TIMEOUT - TIMEOUT / 2);
    let resent = peer.expect(Opcode::RC_SEND_LAST, SQ + 3);
    assert!(resent.at.since(progress) <= TIMEOUT + MS, "resent after {:?}", resent.at.since(progress));
    peer.take_packets();
    peer.inject(ack(SQ + 3, 1));
    peer.expect_wc(1, Success);
}

#[test]
fn case_026_credit_zero_never_stalls() {
    let mut peer = Peer::new();
    peer.post_send(1, &pattern(3 * 256));
    assert_eq!(peer.take_packets().len(), 3);
    let no_credit = |psn, msn| packet(Opcode::RC_ACKNOWLEDGE, psn).aeth(0x00, msn);
    peer.inject(no_credit(SQ, 0));
    peer.post_send(2, b"second");
    peer.expect(Opcode::RC_SEND_ONLY, SQ + 3);
    peer.inject(no_credit(SQ + 2, 1));
    peer.expect_wc(1, Success);
    for n in 0..20 {
        peer.post_send(3 + n, b"more");
        peer.expect(Opcode::RC_SEND_ONLY, SQ + 4 + n as u32);
    }
    peer.inject(no_credit(SQ + 23, 22));
    for wr_id in 2..23 {
        peer.expect_wc(wr_id, Success);
    }
}

#[test]
fn case_027_completion_is_by_psn_not_by_msn() {
    let mut peer = Peer::new();
    for wr_id in 1..=3 {
        peer.post_send(wr_id, b"hello");
    }
    assert_eq!(peer.take_packets().len(), 3);
    peer.inject(ack(SQ, 3));
    peer.expect_wc(1, Success);
    peer.expect_no_wc();
    // An old MSN is no reason to wait.
    peer.inject(ack(SQ + 2, 1));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);
}

#[test]
fn case_028_unsignaled_work_requests() {
    let mut peer = Peer::with(Setup { max_send_wr: 4, ..Setup::default() });
    let unsignaled = SendFlags::default();
    for round in 0..3 {
        for n in 0..4u64 {
            let flags = if n == 3 { SendFlags::SIGNALED } else { unsignaled };
            peer.post_flagged(n, SendOp::Send, Data::Inline(b"hello"), flags);
        }
        let full =
            SendWorkRequest { wr_id: 9, op: SendOp::Send, data: Data::Inline(b"x"), flags: unsignaled };
        assert!(matches!(peer.context.post_send(peer.qp, &full), Err(Error::QueueFull { depth: 4, .. })));
        assert_eq!(peer.take_packets().len(), 4);
        peer.inject(ack(SQ + 4 * round + 3, 4 * (round + 1)));
        peer.expect_wc(3, Success);
        peer.expect_no_wc();
        assert_eq!(peer.query().outstanding_sends, 0);
    }
}

#[test]
fn case_029_read_response_acknowledges_earlier_writes() {
    let mut peer = Peer::new();
    peer.post_write(1, &pattern(300));
    peer.post_send(2, b"hello");
    let mr = peer.post_read(3, 256);
    assert_eq!(peer.take_packets().len(), 4);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 3, &pattern(256)));
    for wr_id in [1, 2, 3] {
        peer.expect_wc(wr_id, Success);
    }
    assert_eq!(peer.bytes(mr), pattern(256));

    // An Atomic Acknowledge does the same.
    peer.post_write(4, b"hello");
    let mr = peer.memory(&[0; 8]);
    peer.post(5, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &[sge(mr, 8)]);
    assert_eq!(peer.take_packets().len(), 2);
    peer.inject(atomic_ack(SQ + 5, 41));
    peer.expect_wc(4, Success);
    peer.expect_wc(5, Success);
}

#[test]
fn case_030_ack_behind_a_read_without_data() {
    let mut peer = Peer::new();
    let data = pattern(2 * 256);
    let mr = peer.post_read(1, 2 * 256);
    peer.post_write(2, b"hello");
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.expect(Opcode::RC_WRITE_ONLY, SQ + 2);
    peer.inject(ack(SQ + 2, 2));
    let reissued = peer.expect(Opcode::RC_READ_REQUEST, SQ);
    let reth = reissued.extensions.reth.unwrap();
    assert_eq!((reth.va(), reth.length()), (REMOTE.addr, 2 * 256));
    peer.expect_no_wc();
    // During go-back it may retransmit the WRITE or not.
    assert!(peer.take_packets().iter().all(|p| (p.opcode, p.psn()) == (Opcode::RC_WRITE_ONLY, SQ + 2)));
    peer.expect_counted(Counter::ImpliedNakSeqErr, 1);
    // Once is enough.
    peer.inject(ack(SQ + 2, 2));
    peer.expect_nothing();
    peer.inject_all(responses(SQ, 2, &data));
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr), data);
    peer.expect_no_wc();
    peer.inject(ack(SQ + 2, 2));
    peer.expect_wc(2, Success);

    // The same when half of the data has arrived, and with a NAK or a later response as evidence.
    let witnesses: [fn(u32) -> Script; 3] = [
        |psn| ack(psn, 2),
        |psn| packet(Opcode::RC_ACKNOWLEDGE, psn).aeth(0x60, 2),
        |psn| read_response(Opcode::RC_READ_RESPONSE_ONLY, psn, b"late"),
    ];
    for (n, witness) in witnesses.into_iter().enumerate() {
        let mut peer = Peer::new();
        let mr = peer.post_read(1, 2 * 256);
        match n {
            2 => drop(peer.post_read(2, 4)),
            _ => peer.post_write(2, b"hello"),
        }
        assert_eq!(peer.take_packets().len(), 2);
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &data[..256]));
        peer.inject(witness(SQ + 2));
        let reth = peer.expect(Opcode::RC_READ_REQUEST, SQ + 1).extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.length()), (REMOTE.addr + 256, 256));
        peer.expect_no_wc();
        peer.take_packets();
        peer.inject_all(responses(SQ + 1, 1, &data[256..]));
        peer.expect_wc(1, Success);
        assert_eq!(peer.bytes(mr), data);
        peer.inject(if n == 2 { witness(SQ + 2) } else { ack(SQ + 2, 2) });
        peer.expect_wc(2, Success);
    }
}
