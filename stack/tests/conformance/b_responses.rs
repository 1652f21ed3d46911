//! Cases 031 to 040: a requester and responses.

use ferroce::WcStatus::{LocLenErr, LocQpOpErr, Success, WrFlushErr};
use ferroce::wire::Opcode;
use ferroce::{Counter, Data, Error, Event, PathMtu, QpState, SendFlags, SendOp, Transition, WcOpcode};

use crate::b_requester::*;
use crate::packet::{Script, ack, atomic_ack, packet, payload, read_response};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, pattern, sge};

#[test]
fn case_031_read_middle_lost() {
    let data = pattern(5 * 256 - 7);
    let piece = |n: usize| &data[n * 256..data.len().min(n * 256 + 256)];
    // A responder may answer the rest with First ... Last, or, as rxe, with Middle ... Last.
    for resumed in [Opcode::RC_READ_RESPONSE_FIRST, Opcode::RC_READ_RESPONSE_MIDDLE] {
        let mut peer = Peer::new();
        let mr = peer.post_read(1, data.len());
        peer.expect(Opcode::RC_READ_REQUEST, SQ);
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, piece(0)));
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 1, piece(1)));
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 3, piece(3)));
        let reth = peer.expect(Opcode::RC_READ_REQUEST, SQ + 2).extensions.reth.unwrap();
        assert_eq!((reth.va(), reth.rkey()), (REMOTE.addr + 512, REMOTE.rkey));
        assert_eq!(reth.length() as usize, data.len() - 512);
        // The rest of the first response arrives late and is ignored.
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 4, piece(4)));
        peer.expect_nothing();
        peer.expect_no_wc();
        assert!(peer.bytes(mr)[512..].iter().all(|b| *b == 0), "data out of order was placed");

        peer.inject(read_response(resumed, SQ + 2, piece(2)));
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 3, piece(3)));
        peer.expect_no_wc();
        peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 4, piece(4)));
        assert_eq!(peer.expect_wc(1, Success).byte_len as usize, data.len());
        assert_eq!(peer.bytes(mr), data);
        peer.expect_counted(Counter::ImpliedNakSeqErr, 1);
    }
}

#[test]
fn case_032_duplicate_read_response() {
    let mut peer = Peer::new();
    let data = pattern(3 * 256);
    let forged = vec![0xee; 256];
    let mr = peer.post_read(1, 3 * 256);
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &data[..256]));
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 1, &data[256..512]));
    for duplicate in [
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &forged),
        read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ + 1, &forged),
    ] {
        peer.expect_dropped(peer.frame(&duplicate), Counter::StaleResponse);
    }
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, &data[512..]));
    peer.expect_wc(1, Success);
    assert_eq!(peer.bytes(mr), data);
    // After the completion the memory belongs to the application.
    peer.bytes_mut(mr).fill(1);
    let duplicate = read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 2, &forged);
    peer.expect_dropped(peer.frame(&duplicate), Counter::StaleResponse);
    assert_eq!(peer.bytes(mr), [1; 3 * 256]);
}

#[test]
fn case_033_read_response_of_wrong_length() {
    use Opcode as O;
    // The length of the READ, the valid packets before the invalid one, the invalid one.
    let cases = [
        (300, 1, (O::RC_READ_RESPONSE_LAST, 43)),
        (300, 1, (O::RC_READ_RESPONSE_LAST, 45)),
        (300, 1, (O::RC_READ_RESPONSE_LAST, 256)),
        (300, 1, (O::RC_READ_RESPONSE_LAST, 0)),
        (300, 0, (O::RC_READ_RESPONSE_FIRST, 255)),
        (300, 0, (O::RC_READ_RESPONSE_FIRST, 300)),
        (600, 1, (O::RC_READ_RESPONSE_MIDDLE, 88)),
        (4, 0, (O::RC_READ_RESPONSE_ONLY, 3)),
        (4, 0, (O::RC_READ_RESPONSE_ONLY, 5)),
        (4, 0, (O::RC_READ_RESPONSE_ONLY, 0)),
        (0, 0, (O::RC_READ_RESPONSE_ONLY, 1)),
    ];
    for (requested, before, (opcode, length)) in cases {
        let mut peer = Peer::new();
        peer.post_read(1, requested);
        peer.post_send(2, b"behind");
        assert_eq!(peer.take_packets().len(), 2);
        if before == 1 {
            peer.inject(read_response(O::RC_READ_RESPONSE_FIRST, SQ, &pattern(256)));
        }
        peer.inject(read_response(opcode, SQ + before, &pattern(length)));
        peer.expect_wc(1, LocLenErr);
        peer.expect_wc(2, WrFlushErr);
        peer.expect_state(QpState::Error);
    }
    // A response that ends before or after the request does has an invalid opcode.
    for (before, opcode, length) in [(0, O::RC_READ_RESPONSE_ONLY, 256), (1, O::RC_READ_RESPONSE_MIDDLE, 256)]
    {
        let mut peer = Peer::new();
        peer.post_read(1, 300);
        peer.expect(O::RC_READ_REQUEST, SQ);
        if before == 1 {
            peer.inject(read_response(O::RC_READ_RESPONSE_FIRST, SQ, &pattern(256)));
        }
        peer.inject(read_response(opcode, SQ + before, &pattern(length)));
        peer.expect_wc(1, LocQpOpErr);
        peer.expect_state(QpState::Error);
    }
}

#[test]
fn case_034_response_of_another_kind() {
    let write = |peer: &mut Peer| {
        let mr = peer.memory(&pattern(256));
        peer.post(1, SendOp::Write(REMOTE), &[sge(mr, 256)]);
        mr
    };
    let read = |peer: &mut Peer| peer.post_read(1, 256);
    let atomic = |peer: &mut Peer| {
        let mr = peer.memory(&[0; 256]);
        peer.post(1, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &[sge(mr, 8)]);
        mr
    };
    type Posting<'a> = &'a dyn Fn(&mut Peer) -> ferroce::Mr;
    let wrong = vec![0xee; 256];
    let cases: [(Posting<'_>, Script); 7] = [
        (&write, read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &wrong)),
        (&write, read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &wrong)),
        (&write, read_response(Opcode::RC_READ_RESPONSE_MIDDLE, SQ, &wrong)),
        (&write, read_response(Opcode::RC_READ_RESPONSE_LAST, SQ, &wrong)),
        (&write, atomic_ack(SQ, 0xeeee)),
        (&read, atomic_ack(SQ, 0xeeee)),
        (&atomic, read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, &wrong[..8])),
    ];
    for (post, response) in cases {
        let mut peer = Peer::new();
        let mr = post(&mut peer);
        assert_eq!(peer.take_packets().len(), 1);
        let before = peer.bytes(mr).to_vec();
        peer.inject(response);
        peer.expect_wc(1, LocQpOpErr);
        peer.expect_state(QpState::Error);
        assert_eq!(peer.bytes(mr), before, "memory was written");
    }
}

#[test]
fn case_035_atomic_acknowledge() {
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 16]);
    let result = ferroce::Sge { mr, offset: 8, length: 8 };
    peer.post(1, SendOp::FetchAdd { remote: REMOTE, add: 0x0102_0304 }, &[result]);
    let request = peer.expect(Opcode::RC_FETCH_ADD, SQ);
    let header = request.extensions.atomic_eth.unwrap();
    assert_eq!((header.va(), header.rkey(), header.swap_or_add()), (REMOTE.addr, REMOTE.rkey, 0x0102_0304));
    peer.inject(atomic_ack(SQ, 0x1122_3344_5566_7788));
    let wc = peer.expect_wc(1, Success);
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::FetchAdd, 8));
    assert_eq!(peer.bytes(mr)[8..], 0x1122_3344_5566_7788u64.to_ne_bytes());
    assert_eq!(peer.bytes(mr)[..8], [0; 8]);

    let op = SendOp::CompareSwap { remote: REMOTE, compare: 0xc0, swap: 0x5a };
    peer.post(2, op, &[result]);
    let request = peer.expect(Opcode::RC_COMPARE_SWAP, SQ + 1);
    let header = request.extensions.atomic_eth.unwrap();
    assert_eq!((header.va(), header.swap_or_add(), header.compare()), (REMOTE.addr, 0x5a, 0xc0));
    peer.inject(atomic_ack(SQ + 1, 0xc0));
    let wc = peer.expect_wc(2, Success);
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::CompSwap, 8));
    assert_eq!(peer.bytes(mr)[8..], 0xc0u64.to_ne_bytes());
}

#[test]
fn case_036_max_rd_atomic() {
    let mut peer = Peer::with(Setup { max_rd_atomic: 1, ..Setup::default() });
    peer.post_read(1, 300);
    peer.post_read(2, 4);
    peer.post_send(3, b"behind");
    let result = peer.memory(&[0; 8]);
    peer.post(4, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &[sge(result, 8)]);
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.expect_nothing();
    // Half of a response frees nothing; nor does time.
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ, &pattern(256)));
    peer.advance(TIMEOUT / 2);
    peer.expect_nothing();
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 1, &pattern(44)));
    peer.expect_wc(1, Success);
    peer.expect(Opcode::RC_READ_REQUEST, SQ + 2);
    peer.expect(Opcode::RC_SEND_ONLY, SQ + 3);
    peer.expect_nothing();
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 2, b"data"));
    peer.expect_wc(2, Success);
    peer.expect(Opcode::RC_FETCH_ADD, SQ + 4);
    peer.inject(atomic_ack(SQ + 4, 0));
    peer.expect_wc(3, Success);
    peer.expect_wc(4, Success);
}

#[test]
fn case_037_fence_and_local_invalidate() {
    let fenced = SendFlags::SIGNALED.fence(true);
    let fetch_add = SendOp::FetchAdd { remote: REMOTE, add: 1 };
    for (flags, atomic) in [(fenced, false), (fenced, true), (SendFlags::SIGNALED, false)] {
        let mut peer = Peer::new();
        peer.post_send(1, b"no reason to wait");
        let result = peer.memory(&[0; 8]);
        peer.post(2, if atomic { fetch_add } else { SendOp::Read(REMOTE) }, &[sge(result, 8)]);
        peer.post_flagged(3, SendOp::Send, Data::Inline(b"after"), flags);
        peer.expect(Opcode::RC_SEND_ONLY, SQ);
        peer.expect(if atomic { Opcode::RC_FETCH_ADD } else { Opcode::RC_READ_REQUEST }, SQ + 1);
        if flags.fence {
            peer.inject(ack(SQ, 1));
            peer.expect_wc(1, Success);
            peer.expect_nothing();
        } else {
            peer.expect(Opcode::RC_SEND_ONLY, SQ + 2);
        }
        peer.inject(match atomic {
            true => atomic_ack(SQ + 1, 7),
            false => read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 1, &[0; 8]),
        });
        if flags.fence {
            peer.expect(Opcode::RC_SEND_ONLY, SQ + 2);
        } else {
            peer.expect_wc(1, Success);
        }
        peer.expect_wc(2, Success);
        peer.inject(ack(SQ + 2, 3));
        peer.expect_wc(3, Success);
    }

    // LOCAL_INV waits for all earlier work requests, SENDs too, and later ones wait for it.
    let mut peer = Peer::new();
    let mr = peer.memory(&[0; 8]);
    let remote = peer.remote(mr);
    peer.post_send(1, b"first");
    peer.post_read(2, 8);
    peer.post(3, SendOp::LocalInvalidate(remote.rkey), &[]);
    peer.post_send(4, b"behind");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.expect(Opcode::RC_READ_REQUEST, SQ + 1);
    peer.expect_nothing();
    peer.inject(ack(SQ, 1));
    peer.expect_wc(1, Success);
    peer.expect_no_wc();
    // Until then the key is valid.
    let write = |psn| packet(Opcode::RC_WRITE_ONLY, psn).ack_req().reth(0, remote.rkey, 8).payload(&[9; 8]);
    peer.inject(write(RQ));
    peer.expect_ack(RQ, 1);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 1, &[0; 8]));
    peer.expect_wc(2, Success);
    assert_eq!(peer.expect_wc(3, Success).opcode, WcOpcode::LocalInv);
    peer.expect(Opcode::RC_SEND_ONLY, SQ + 2);
    peer.inject(ack(SQ + 2, 3));
    peer.expect_wc(4, Success);
    peer.inject(write(RQ + 1));
    peer.expect_nak(0x62, RQ + 1, 1);
    peer.expect_event(Event::QpAccessErr(peer.qp));
    peer.expect_state(QpState::Error);
}

#[test]
fn case_038_inline_data_is_the_posted_data() {
    let mut peer = Peer::new();
    let mut buffer = *b"as posted";
    let write = SendOp::Write(REMOTE);
    peer.post_flagged(1, write, Data::Inline(&buffer), SendFlags::SIGNALED);
    peer.post_flagged(2, SendOp::Send, Data::Inline(&buffer), SendFlags::SIGNALED);
    buffer.fill(b'x');
    assert_eq!(peer.expect(Opcode::RC_WRITE_ONLY, SQ).payload, b"as posted");
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 1).payload, b"as posted");
    // Neither later inline work requests nor a retransmission change it.
    peer.post_flagged(3, SendOp::Send, Data::Inline(&buffer), SendFlags::SIGNALED);
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 2).payload, b"xxxxxxxxx");
    peer.advance(TIMEOUT + MS);
    assert_eq!(peer.expect(Opcode::RC_WRITE_ONLY, SQ).payload, b"as posted");
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 1).payload, b"as posted");
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 2).payload, b"xxxxxxxxx");
    peer.inject(ack(SQ + 2, 3));
    for wr_id in [1, 2, 3] {
        assert_eq!(peer.expect_wc(wr_id, Success).byte_len, 9);
    }
}

#[test]
fn case_039_ack_req_in_a_long_message() {
    for mtu in [PathMtu::Mtu256, PathMtu::Mtu1024, PathMtu::Mtu4096] {
        let mut peer = Peer::with(Setup { mtu, ..Setup::default() });
        let data = pattern(1 << 20);
        peer.post_write(1, &data);
        let total = (1 << 20) / mtu.bytes();
        let (mut next, mut unasked) = (0, 0);
        let mut written = Vec::new();
        // Requested ACKs are sent, so that the window moves.
        while next < total {
            let packets = peer.take_packets();
            assert!(!packets.is_empty(), "stalled after {next} of {total} packets");
            let mut asked = None;
            for packet in &packets {
                assert_eq!(packet.psn(), SQ + next);
                next += 1;
                unasked = if packet.bth.ack_req() { 0 } else { unasked + 1 };
                assert!(unasked < 16, "16 packets without AckReq up to {packet}");
                asked = if packet.bth.ack_req() { Some(packet.psn()) } else { asked };
            }
            written.extend(payload(&packets));
            peer.inject(ack(asked.unwrap(), u32::from(next == total)));
        }
        assert!(written == data, "the data of the message");
        peer.expect_wc(1, Success);
    }
}

#[test]
fn case_040_send_queue_drained() {
    let mut peer = Peer::new();
    // More packets than a window: the message is still incomplete.
    let data = pattern(700 * 256);
    peer.post_write(1, &data);
    peer.post_send(2, b"not started");
    let begun = peer.take_packets().len() as u32;
    assert!(begun < 700, "the whole message left at once");
    peer.modify(Transition::Drain);
    peer.post_send(3, b"posted while draining");
    peer.expect_no_event();
    peer.expect_state(QpState::Sqd);
    // It must not resume before it is drained.
    assert!(matches!(peer.context.modify_qp(peer.qp, Transition::Resume), Err(Error::State { .. })));

    peer.inject(ack(SQ + begun - 1, 0));
    let rest = peer.take_packets();
    assert_eq!(rest.len() as u32, 700 - begun, "the message finishes, and nothing else starts");
    assert_eq!(rest.last().map(|p| p.opcode), Some(Opcode::RC_WRITE_LAST));
    peer.expect_no_event();
    peer.inject(ack(SQ + 699, 1));
    peer.expect_wc(1, Success);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.expect_no_event();
    peer.advance(10 * TIMEOUT);
    peer.expect_nothing();
    peer.expect_no_event();
    // Its responder continues meanwhile.
    peer.inject(packet(Opcode::RC_WRITE_ONLY, RQ).ack_req());
    peer.expect_ack(RQ, 1);

    peer.modify(Transition::Resume);
    peer.expect_state(QpState::Rts);
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 700).payload, b"not started");
    assert_eq!(peer.expect(Opcode::RC_SEND_ONLY, SQ + 701).payload, b"posted while draining");
    peer.inject(ack(SQ + 701, 3));
    peer.expect_wc(2, Success);
    peer.expect_wc(3, Success);

    // With nothing outstanding it is drained immediately; and again a second time.
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
    peer.modify(Transition::Resume);
    peer.modify(Transition::Drain);
    peer.expect_event(Event::SqDrained(peer.qp));
}

/// The responses to a READ of `data`, or of its rest, at a path MTU of 256.
pub(crate) fn responses(first_psn: u32, packets: usize, data: &[u8]) -> Vec<Script> {
    let pieces = data.chunks(256).enumerate();
    let response = |(n, piece): (usize, &[u8])| {
        let opcode = match (n == 0, n + 1 == packets) {
            (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
            (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
            (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
            (false, true) => Opcode::RC_READ_RESPONSE_LAST,
        };
        read_response(opcode, first_psn.wrapping_add(n as u32) & 0xff_ffff, piece)
    };
    pieces.map(response).collect()
}
