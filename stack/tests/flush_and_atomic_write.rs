//! FLUSH and ATOMIC WRITE (IBA 1.5): requests, responses, losses, duplicates and refusals.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::time::Duration;

use ferroce::WcStatus::{
    LocLenErr, LocProtErr, LocQpOpErr, RemAccessErr, RemInvReqErr, RetryExcErr, Success, WrFlushErr,
};
use ferroce::wire::{Feth, Opcode};
use ferroce::*;
use ferroce_test_support::packet::{
    NAK_ACCESS, NAK_INVALID, Script, ack, atomic_ack, nak, packet, read_response,
};
use ferroce_test_support::peer::{Peer, REMOTE, RQ, SQ, Setup, sge};

/// The timeout of the default setup: 4.096 µs · 2¹⁴.
const TIMEOUT: Duration = Duration::from_nanos(4096 << 14);
const VISIBLE: FlushType = FlushType { global_visibility: true, persistence: false };
const PERSISTENT: FlushType = FlushType { global_visibility: false, persistence: true };

fn flush_range(length: u32) -> SendOp {
    SendOp::Flush { remote: REMOTE, length, selectivity: Selectivity::Range, kind: VISIBLE }
}

/// Posts either with its data: none, or 8 bytes.
fn post(peer: &mut Peer, wr_id: u64, op: SendOp) {
    let data: &[u8] = if matches!(op, SendOp::Flush { .. }) { &[] } else { b"8 bytes!" };
    let sges = [sge(peer.memory_with(data, Access::NONE), 8)];
    peer.post(wr_id, op, &sges[..data.len() / 8]);
}

fn opcode(op: SendOp) -> Opcode {
    if matches!(op, SendOp::Flush { .. }) { Opcode::RC_FLUSH } else { Opcode::RC_ATOMIC_WRITE }
}

/// The response to either.
fn done(psn: u32) -> Script {
    read_response(Opcode::RC_READ_RESPONSE_ONLY, psn, &[])
}

fn ops() -> [SendOp; 2] {
    [flush_range(100), SendOp::AtomicWrite(REMOTE)]
}

#[test]
fn a_flush_is_one_packet_with_feth_and_reth() {
    let mut peer = Peer::new();
    let both = FlushType { global_visibility: true, persistence: true };
    let cases = [
        (Selectivity::Range, VISIBLE, 1 << 31),
        (Selectivity::Range, PERSISTENT, 0),
        (Selectivity::MemoryRegion, both, 0),
    ];
    for (i, (selectivity, kind, length)) in (0..).zip(cases) {
        let op = SendOp::Flush { remote: REMOTE, length, selectivity, kind };
        // SE has no meaning here.
        let flags = SendFlags::SIGNALED.solicited(true);
        peer.post_flagged(u64::from(i), op, Data::Sges(&[]), flags);
        let got = peer.expect(Opcode::RC_FLUSH, SQ + i);
        let reth = got.extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr, REMOTE.rkey, length));
        assert_eq!(got.extensions.feth, Some(Feth::new(selectivity, kind)));
        assert!(got.bth.ack_req() && !got.bth.solicited() && got.payload.is_empty());
        peer.inject(done(SQ + i));
        assert_eq!(peer.expect_wc(u64::from(i), Success).opcode, WcOpcode::Flush);
    }
}

#[test]
fn an_atomic_write_is_8_bytes_in_one_packet() {
    let mut peer = Peer::new();
    let local = peer.memory_with(b"8 bytes!", Access::NONE);
    let halves = [Sge { mr: local, offset: 0, length: 3 }, Sge { mr: local, offset: 3, length: 5 }];
    let sources = [Data::Inline(b"8 bytes!"), Data::Sges(&halves)];
    for (i, data) in (0..).zip(sources) {
        peer.post_flagged(u64::from(i), SendOp::AtomicWrite(REMOTE), data, SendFlags::SIGNALED);
        let got = peer.expect(Opcode::RC_ATOMIC_WRITE, SQ + i);
        let reth = got.extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.rkey(), reth.length()), (REMOTE.addr, REMOTE.rkey, 8));
        assert!(got.bth.ack_req() && !got.bth.solicited() && got.payload == b"8 bytes!");
        peer.inject(done(SQ + i));
        let wc = peer.expect_wc(u64::from(i), Success);
        assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::AtomicWrite, 8));
    }
}

/// They count as READs and atomics, in both directions.
#[test]
fn they_count_against_max_rd_atomic() {
    for op in ops() {
        let mut peer = Peer::with(Setup { max_rd_atomic: 1, ..Setup::default() });
        post(&mut peer, 1, op);
        peer.post_read(2, 4);
        post(&mut peer, 3, op);
        peer.expect(opcode(op), SQ);
        peer.expect_nothing();
        peer.inject(done(SQ));
        peer.expect_wc(1, Success);
        peer.expect(Opcode::RC_READ_REQUEST, SQ + 1);
        peer.expect_nothing();
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 1, b"data"));
        peer.expect_wc(2, Success);
        peer.expect(opcode(op), SQ + 2);
        peer.inject(done(SQ + 2));
        peer.expect_wc(3, Success);
    }
}

#[test]
fn without_read_resources_they_are_not_posted() {
    let mut peer = Peer::with(Setup { max_rd_atomic: 0, ..Setup::default() });
    let (data, flags) = (Data::Sges(&[]), SendFlags::SIGNALED);
    let wr = SendWorkRequest { wr_id: 1, op: flush_range(1), data, flags };
    let refused = peer.context.post_send(peer.qp, &wr).unwrap_err();
    assert!(matches!(refused, Error::Invalid { attribute: "max_rd_atomic", .. }), "{refused}");
}

/// A fenced request waits for them; others follow immediately.
#[test]
fn a_fence_waits_for_them() {
    for op in ops() {
        for fence in [false, true] {
            let mut peer = Peer::new();
            post(&mut peer, 1, op);
            let flags = SendFlags::SIGNALED.fence(fence);
            peer.post_flagged(2, SendOp::Send, Data::Inline(b"behind"), flags);
            peer.expect(opcode(op), SQ);
            if fence {
                peer.expect_nothing();
                peer.inject(done(SQ));
                peer.expect(Opcode::RC_SEND_ONLY, SQ + 1);
            } else {
                peer.expect(Opcode::RC_SEND_ONLY, SQ + 1);
                peer.inject(done(SQ));
            }
            peer.expect_wc(1, Success);
            peer.inject(ack(SQ + 1, 2));
            peer.expect_wc(2, Success);
        }
    }
}

/// The response acknowledges earlier requests.
#[test]
fn a_response_completes_earlier_writes_first() {
    for op in ops() {
        let mut peer = Peer::new();
        peer.post_write(1, b"written");
        post(&mut peer, 2, op);
        assert_eq!(peer.take_packets().len(), 2);
        peer.inject(done(SQ + 1));
        peer.expect_wc(1, Success);
        peer.expect_wc(2, Success);
    }
}

#[test]
fn a_lost_request_or_response_is_retransmitted() {
    for op in ops() {
        let mut peer = Peer::new();
        post(&mut peer, 1, op);
        let first = peer.expect(opcode(op), SQ);
        peer.advance(4 * TIMEOUT);
        let again = peer.take_packets();
        assert!(!again.is_empty() && again.iter().all(|again| again.frame == first.frame));
        peer.inject(done(SQ));
        peer.expect_wc(1, Success);
        // A second response is ignored.
        peer.inject(done(SQ));
        peer.expect_counted(Counter::StaleResponse, 1);

        let mut peer = Peer::with(Setup { retry_count: 1, ..Setup::default() });
        post(&mut peer, 1, op);
        peer.post_send(2, b"behind");
        peer.advance(20 * TIMEOUT);
        assert_eq!(peer.take_packets().len(), 4);
        peer.expect_wc(1, RetryExcErr);
        peer.expect_wc(2, WrFlushErr);
    }
}

/// An ACK of a later request shows that the response was lost, and so does an ACK in its place: neither completes anything.
#[test]
fn an_acknowledge_is_not_a_response() {
    for op in ops() {
        for psn in [SQ, SQ + 1] {
            let mut peer = Peer::new();
            post(&mut peer, 1, op);
            peer.post_send(2, b"behind");
            assert_eq!(peer.take_packets().len(), 2);
            peer.inject(ack(psn, 2));
            peer.expect_counted(Counter::ImpliedNakSeqErr, 1);
            peer.expect_no_wc();
            peer.expect(opcode(op), SQ);
            peer.expect(Opcode::RC_SEND_ONLY, SQ + 1);
            peer.inject_all([done(SQ), ack(SQ + 1, 2)]);
            peer.expect_wc(1, Success);
            peer.expect_wc(2, Success);
        }
    }
}

#[test]
fn an_invalid_response_fails_the_queue_pair() {
    let data = |opcode, length: usize| read_response(opcode, SQ, &vec![7; length]);
    let answers = [
        (data(Opcode::RC_READ_RESPONSE_ONLY, 8), LocLenErr),
        (data(Opcode::RC_READ_RESPONSE_FIRST, 256), LocQpOpErr),
        (data(Opcode::RC_READ_RESPONSE_MIDDLE, 256), LocQpOpErr),
        (data(Opcode::RC_READ_RESPONSE_LAST, 8), LocQpOpErr),
        (atomic_ack(SQ, 7), LocQpOpErr),
        (nak(NAK_INVALID, SQ, 0), RemInvReqErr),
        (nak(NAK_ACCESS, SQ, 0), RemAccessErr),
    ];
    for op in ops() {
        for (answer, status) in &answers {
            let mut peer = Peer::new();
            post(&mut peer, 1, op);
            peer.post_send(2, b"behind");
            peer.take_packets();
            peer.inject(answer.clone());
            peer.expect_wc(1, *status);
            peer.expect_wc(2, WrFlushErr);
            peer.expect_state(QpState::Error);
        }
    }
}

#[test]
fn invalid_requests_are_not_posted() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 16]);
    let qp = peer.qp;
    let mut refusal = |op, data: Data<'_>| {
        let wr = SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED };
        match peer.context.post_send(qp, &wr).unwrap_err() {
            Error::Invalid { attribute, .. } => attribute,
            other => panic!("{other:?}"),
        }
    };
    let none = Data::Sges(&[]);
    let nowhere = FlushType::default();
    let flush =
        |length, kind| SendOp::Flush { remote: REMOTE, length, selectivity: Selectivity::Range, kind };
    assert_eq!(refusal(flush(1, nowhere), none), "flush type");
    assert_eq!(refusal(flush((1 << 31) + 1, VISIBLE), none), "flush length");
    assert_eq!(refusal(flush(8, VISIBLE), Data::Sges(&[sge(mr, 8)])), "length");
    assert_eq!(refusal(flush(8, VISIBLE), Data::Inline(&[0; 8])), "data");
    for length in [0, 4, 7, 9, 16] {
        assert_eq!(refusal(SendOp::AtomicWrite(REMOTE), Data::Sges(&[sge(mr, length)])), "length");
        assert_eq!(refusal(SendOp::AtomicWrite(REMOTE), Data::Inline(&vec![0; length])), "length");
    }
}

/// An ATOMIC WRITE reads local memory, and needs no right to write it; but the queue pair must be allowed to read the
/// memory.
#[test]
fn the_source_of_an_atomic_write_is_checked() {
    let mut peer = Peer::new();
    let pd = peer.context.alloc_pd().unwrap();
    let foreign = peer.context.register(pd, Memory::zeroed(8).unwrap(), Access::LOCAL_WRITE).unwrap();
    peer.post(1, SendOp::AtomicWrite(REMOTE), &[sge(foreign, 8)]);
    peer.expect_wc(1, LocProtErr);
}

/// The responder does not execute a duplicate: later writes of the application are kept, and the response is repeated.
#[test]
fn duplicates_are_answered_and_not_executed() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 64]);
    let rkey = peer.remote(mr).rkey;
    let write = packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(8, rkey, 8).payload(b"8 bytes!");
    let flush =
        packet(Opcode::RC_FLUSH, RQ + 1).feth(Feth::new(Selectivity::Range, VISIBLE)).reth(0, rkey, 64);
    peer.inject_all([write.clone(), flush.clone()]);
    for i in 0..2 {
        let got = peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ + i);
        assert_eq!((got.extensions.aeth.unwrap().msn(), got.payload.len()), (i + 1, 0));
    }
    assert_eq!(&peer.bytes(mr)[8..16], b"8 bytes!");
    peer.bytes_mut(mr)[8..16].fill(1);
    for _ in 0..3 {
        peer.inject_all([write.clone(), flush.clone()]);
        for i in 0..2 {
            let got = peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ + i);
            assert_eq!((got.extensions.aeth.unwrap().msn(), got.payload.len()), (i + 1, 0));
        }
        assert_eq!(peer.bytes(mr)[8..16], [1; 8]);
    }
    assert_eq!(peer.query().rq_psn, Psn::new(RQ + 2));
}

/// A disabled operation does not exist: it can't be posted, and is refused like any unknown request. The other one is
/// unaffected.
#[test]
fn a_device_without_them_refuses_them() {
    for (flush, atomic_write) in [(true, true), (false, true), (true, false), (false, false)] {
        for op in ops() {
            let mut peer = Peer::with(Setup { flush, atomic_write, ..Setup::default() });
            let device = peer.context.query_device();
            assert_eq!((device.flush_global, device.atomic_write), (flush, atomic_write));
            assert!(!device.flush_persistent);
            let there = if opcode(op) == Opcode::RC_FLUSH { flush } else { atomic_write };
            let mr = peer.memory(&[0; 8]);
            let rkey = peer.remote(mr).rkey;
            let request = match op {
                SendOp::Flush { .. } => {
                    packet(Opcode::RC_FLUSH, RQ).feth(Feth::new(Selectivity::Range, VISIBLE)).reth(0, rkey, 8)
                }
                _ => packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(0, rkey, 8).payload(b"8 bytes!"),
            };
            let data = if opcode(op) == Opcode::RC_FLUSH { &b""[..] } else { b"8 bytes!" };
            let local = [sge(mr, data.len())];
            let data = Data::Sges(&local[..data.len() / 8]);
            let wr = SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED };
            let posted = peer.context.post_send(peer.qp, &wr);
            if there {
                posted.unwrap();
                peer.expect(opcode(op), SQ);
                peer.inject(done(SQ));
                peer.expect_wc(1, Success);
                peer.inject(request);
                peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ);
            } else {
                assert!(matches!(posted, Err(Error::Unsupported(_))), "{posted:?}");
                peer.inject(request);
                peer.expect_nak(NAK_INVALID, RQ, 0);
                peer.expect_event(Event::QpReqErr(peer.qp));
                assert_eq!(peer.bytes(mr), [0; 8]);
            }
        }
    }
}
