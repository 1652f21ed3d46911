//! Bugs of other stacks: their equivalents here must not occur.

use std::time::Duration;

use ferroce::driver::loopback;
use ferroce::wire::{Feth, FlushType, Opcode, Selectivity};
use ferroce::{
    Access, Config, Context, Counter, Data, Error, Event, Memory, QpConfig, QpState, QpType,
    ReceiveWorkRequest, SendFlags, SendOp, SendWorkRequest, Sge, SrqConfig, Transition, WcStatus,
};

use crate::packet::{NAK_ACCESS, NAK_INVALID, NAK_RNR, Script, ack, nak, packet, payload, read_response};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, all_access, pattern, sge};

/// The request accesses memory outside the region: NAK 0x62, the end, and unchanged memory.
#[track_caller]
fn expect_out_of_bounds(iova: u64, length: usize, request: impl Fn(ferroce::RKey) -> Script) {
    let mut peer = Peer::new();
    let memory = Memory::copy_of(&pattern(length)).unwrap();
    let mr = peer.context.register_at(peer.pd, memory, all_access(), iova).unwrap();
    peer.inject(request(peer.remote(mr).rkey));
    peer.expect_nak(NAK_ACCESS, RQ, 0);
    peer.expect_event(Event::QpAccessErr(peer.qp));
    peer.expect_state(QpState::Error);
    assert_eq!(peer.bytes(mr), pattern(length));
}

#[test]
fn cve_2016_8636_range_check_overflow() {
    const TOP: u64 = u64::MAX - 63;
    // Regions of 64 bytes at `iova`, and ranges whose end passes 2^64 or whose start is below it.
    let ranges = [
        (0, u64::MAX, 1),
        (0, u64::MAX - 7, 16),
        (0, u64::MAX - 15, 200),
        (0x1000, 0xff8, 16),
        (0x1000, 0xfff, 1),
        (0x1000, 0u64.wrapping_sub(0x1000), 64),
        (TOP, u64::MAX - 7, 16),
        (TOP, u64::MAX, 2),
        (TOP, 0, 1),
        (TOP, TOP - 1, 64),
    ];
    for (iova, va, length) in ranges {
        let bytes = vec![0xee; length as usize];
        expect_out_of_bounds(iova, 64, |key| packet(Opcode::RC_READ_REQUEST, RQ).reth(va, key, length));
        expect_out_of_bounds(iova, 64, |key| {
            packet(Opcode::RC_WRITE_ONLY, RQ).reth(va, key, length).payload(&bytes)
        });
        expect_out_of_bounds(iova, 64, |key| packet(Opcode::RC_READ_REQUEST, RQ).reth(va, key, 1 << 31));
        expect_out_of_bounds(iova, 64, |key| {
            packet(Opcode::RC_WRITE_FIRST, RQ).reth(va, key, 1 << 31).payload(&[0xee; 256])
        });
    }
    for (iova, va) in [(0, u64::MAX - 7), (0x1000, 0xff8), (0x1000, 0x1040), (TOP, 0), (TOP, TOP - 8)] {
        for opcode in [Opcode::RC_FETCH_ADD, Opcode::RC_COMPARE_SWAP] {
            expect_out_of_bounds(iova, 64, |key| packet(opcode, RQ).atomic_eth(va, key, 1, 0));
        }
        expect_out_of_bounds(iova, 64, |key| {
            packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(va, key, 8).payload(&[0xee; 8])
        });
    }
}

#[test]
fn ml_2026_05_iova_length_wrap_in_mr_and_duplicate_read() {
    let mut peer = Peer::new();
    // A region may end at the last address, and not after it.
    let register = |peer: &mut Peer, iova| {
        let memory = Memory::copy_of(&pattern(1024)).unwrap();
        peer.context.register_at(peer.pd, memory, all_access(), iova)
    };
    let last = u64::MAX - 1023;
    for iova in [last + 1, last + 512, u64::MAX] {
        let refused = register(&mut peer, iova).unwrap_err();
        assert!(matches!(refused.source, Error::Invalid { attribute: "iova", .. }));
        assert_eq!(refused.memory.bytes().unwrap(), pattern(1024), "the memory comes back");
    }
    let mr = register(&mut peer, last).unwrap();
    let key = peer.remote(mr).rkey;
    let read = |psn, va: u64, length| packet(Opcode::RC_READ_REQUEST, psn).reth(va, key, length);
    peer.inject(read(RQ, last, 1024));
    assert_eq!(payload(&peer.take_packets()), pattern(1024));
    // Duplicates whose range wraps, by their own length or by that of the remembered READ.
    for (psn, va, length) in [
        (RQ + 3, last + 768, 257),
        (RQ + 3, last + 768, 1 << 31),
        (RQ + 3, last + 768, u32::MAX),
        (RQ + 1, last + 256, 1024),
        (RQ + 3, last.wrapping_add(1024), 256),
        (RQ, 0, 1024),
        (RQ + 1, last - 1, 768),
    ] {
        peer.inject(read(psn, va, length));
        peer.expect_nothing();
        peer.expect_counted(Counter::RxForgottenDuplicate, 1);
    }
    peer.inject(read(RQ + 3, last + 768, 256));
    assert_eq!(payload(&peer.take_packets()), pattern(1024)[768..]);
    // FLUSH of a range.
    let visible = FlushType { global_visibility: true, persistence: false };
    let flush = |va, key, length| {
        packet(Opcode::RC_FLUSH, RQ).feth(Feth::new(Selectivity::Range, visible)).reth(va, key, length)
    };
    for (va, length) in [(u64::MAX, 2), (last + 1, 1024), (0, 1), (last, 1 << 31)] {
        expect_out_of_bounds(last, 1024, |key| flush(va, key, length));
    }
}

#[test]
fn ml_2026_05_iova_length_wrap_in_memory_window() {
    const IOVA: u64 = u64::MAX - 1023;
    // The last 512 bytes of a region that ends at the last address.
    let windowed = || {
        let mut peer = Peer::new();
        let memory = Memory::copy_of(&pattern(1024)).unwrap();
        let access = Access::LOCAL_WRITE | Access::MW_BIND;
        let mr = peer.context.register_at(peer.pd, memory, access, IOVA).unwrap();
        let mw = peer.context.alloc_mw(peer.pd).unwrap();
        (peer, mr, mw)
    };
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    for (offset, length) in
        [(u64::MAX, 1), (u64::MAX, u64::MAX), (512, 513), (512, u64::MAX), (1024, 1), (0, 1025)]
    {
        let (mut peer, mr, mw) = windowed();
        peer.post(1, SendOp::BindMw { mw, mr, offset, length, access }, &[]);
        peer.expect_wc(1, WcStatus::MwBindErr);
        assert_eq!(peer.context.remote_window(mw).unwrap(), None);
    }
    let start = IOVA + 512;
    let ranges = [
        (start, 513),
        (start, 1 << 31),
        (u64::MAX, 2),
        (start + 256, 257),
        (0, 1),
        (start - 1, 2),
        (IOVA, 8),
    ];
    for (va, length) in ranges {
        for write in [false, true] {
            let (mut peer, mr, mw) = windowed();
            peer.post(1, SendOp::BindMw { mw, mr, offset: 512, length: 512, access }, &[]);
            peer.expect_wc(1, WcStatus::Success);
            let key = peer.context.remote_window(mw).unwrap().unwrap().rkey;
            // Its whole range can be read.
            peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(start, key, 512));
            assert_eq!(payload(&peer.take_packets()), pattern(1024)[512..]);
            peer.inject(match write {
                false => packet(Opcode::RC_READ_REQUEST, RQ + 2).reth(va, key, length),
                true if length <= 256 => packet(Opcode::RC_WRITE_ONLY, RQ + 2)
                    .reth(va, key, length)
                    .payload(&vec![0xee; length as usize]),
                true => packet(Opcode::RC_WRITE_FIRST, RQ + 2).reth(va, key, length).payload(&[0xee; 256]),
            });
            peer.expect_nak(NAK_ACCESS, RQ + 2, 1);
            peer.expect_event(Event::QpAccessErr(peer.qp));
            assert_eq!(peer.bytes(mr), pattern(1024));
        }
    }
}

#[test]
fn ml_2026_04_7244491dab34_payload_size_underflow() {
    let mut peer = Peer::new();
    for opcode in (0..=255).filter_map(Opcode::from_byte) {
        let headers = 12 + opcode.extensions_len();
        for pad in 0..4 {
            // All lengths without pad or ICRC, down to nothing after the headers.
            for length in headers..headers + pad + 4 {
                let frame = peer.raw(opcode.byte(), (pad as u8) << 4, peer.qpn, length);
                peer.expect_dropped(frame, Counter::RxLengthErrors);
            }
        }
    }
    // The pad is within the packet, but longer than the payload requires.
    let mr = peer.post_recv(1, 64);
    peer.inject_frame({
        let mut frame = peer.frame(&packet(Opcode::RC_SEND_ONLY, RQ));
        let icrc = frame.split_off(frame.len() - 4);
        frame.extend([0; 3].iter().chain(&icrc));
        frame[crate::packet::BTH + 1] |= 3 << 4;
        for at in [crate::packet::IP + 3, crate::packet::UDP + 5] {
            frame[at] += 3;
        }
        crate::packet::reseal(&mut frame);
        frame
    });
    peer.expect_nak(NAK_INVALID, RQ, 0);
    peer.expect_wc(1, WcStatus::RemInvReqErr);
    assert_eq!(peer.bytes(mr), [0; 64]);
}

#[test]
fn ml_2026_04_unknown_opcode_header_length() {
    let mut peer = Peer::new();
    let mut unknown = 0;
    for byte in (0..=255).filter(|byte| Opcode::from_byte(*byte).is_none()) {
        unknown += 1;
        for length in [16, 17, 28, 60, 1036] {
            let frame = peer.raw(byte, 0, peer.qpn, length);
            peer.expect_dropped(frame, Counter::RxUnknownOpcode);
        }
    }
    assert_eq!(unknown, 256 - 41);
    // The engine continues.
    peer.post_recv(1, 8);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, WcStatus::Success);
}

#[test]
fn ml_2026_atomic_write_payload_not_8() {
    let lengths = (0..=32).chain([255, 256]).filter(|length| *length != 8);
    let of_other_length = lengths.clone().map(|length| (length, length));
    let contradicting = lengths.clone().map(|length| (8, length)).chain(lengths.map(|length| (length, 8)));
    for (stated, sent) in of_other_length.chain(contradicting) {
        let mut peer = Peer::new();
        let mr = peer.memory(&pattern(64));
        let key = peer.remote(mr).rkey;
        let bytes = vec![0xee; sent as usize];
        peer.inject(packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(24, key, stated).payload(&bytes));
        peer.expect_nak(NAK_INVALID, RQ, 0);
        peer.expect_event(Event::QpReqErr(peer.qp));
        assert_eq!(peer.bytes(mr), pattern(64), "{stated} stated, {sent} sent");
    }
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(64));
    let key = peer.remote(mr).rkey;
    peer.inject(packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(24, key, 8).payload(&[0xee; 8]));
    assert_eq!(peer.expect(Opcode::RC_READ_RESPONSE_ONLY, RQ).payload, []);
    let expected = [&pattern(64)[..24], &[0xee; 8], &pattern(64)[32..]].concat();
    assert_eq!(peer.bytes(mr), expected);
}

#[test]
fn cve_2024_40992_ud_oversize_packet_leaves_the_qp_alone() {
    let mut peer = Peer::with(Setup { qp_type: QpType::Ud, ..Setup::default() });
    let mr = peer.post_recv(1, 40 + 16);
    let datagram = |length| packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN).payload(&pattern(length));
    for length in [17, 255, 256, 257, 4096, 4097, 8900] {
        peer.expect_dropped(peer.frame(&datagram(length)), Counter::RxTooLong);
    }
    peer.expect_state(QpState::Rts);
    assert_eq!(peer.bytes(mr), [0; 56]);
    peer.inject(datagram(16));
    assert_eq!(peer.expect_wc(1, WcStatus::Success).byte_len, 56);
    assert_eq!(peer.bytes(mr)[40..], pattern(16));
}

#[test]
fn cve_2024_38544_queue_pair_destroyed_under_queued_packets() {
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(1024));
    let key = peer.remote(mr).rkey;
    // An unread completion, outstanding sends, a half-sent READ response, and acknowledgements that were not received yet.
    peer.post_send(0, b"");
    peer.expect(Opcode::RC_SEND_ONLY, SQ);
    peer.inject(ack(SQ, 1));
    peer.post_send(1, &pattern(600));
    let read = peer.post_read(2, 300);
    assert_eq!(peer.take_packets().len(), 4);
    peer.take_at_most(2);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, key, 1024));
    assert_eq!(peer.take_packets().len(), 2);
    peer.arrive([
        ack(SQ + 3, 2),
        read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 4, &[0xee; 256]),
        read_response(Opcode::RC_READ_RESPONSE_LAST, SQ + 5, &[0xee; 44]),
        packet(Opcode::RC_WRITE_ONLY, RQ + 4).reth(0, key, 4).payload(&[0xee; 4]).ack_req(),
    ]);
    peer.context.destroy_qp(peer.qp).unwrap();
    // The next queue pair has its slot; it must not inherit anything.
    let other = peer.another_qp(&Setup::default());
    let fresh = peer.context.query_qp(other).unwrap();
    assert_ne!(fresh.qpn, peer.qpn);
    peer.take_at_most(usize::MAX);
    peer.advance(Duration::from_secs(10));
    peer.expect_nothing();
    peer.expect_no_wc();
    peer.expect_counted(Counter::RxUnknownQp, 4);
    assert_eq!(peer.context.query_qp(other).unwrap(), fresh);
    assert_eq!((peer.bytes(mr), peer.bytes(read)), (&pattern(1024)[..], &[0; 300][..]));
    assert!(matches!(peer.context.query_qp(peer.qp), Err(Error::InvalidHandle { kind: "QP", .. })));
    // It holds no memory.
    for mr in [mr, read] {
        drop(peer.context.deregister(mr).unwrap());
    }
    // Nor does its turn to send remain: a third queue pair has as many turns as the next one.
    peer.context.destroy_qp(other).unwrap();
    let doomed = peer.another_qp(&Setup::default());
    peer.take_at_most(0);
    let write = |peer: &mut Peer, qp| {
        let (op, data, flags) = (SendOp::Write(REMOTE), Data::Sges(&[]), SendFlags::default());
        peer.context.post_send(qp, &SendWorkRequest { wr_id: 0, op, data, flags }).unwrap();
    };
    write(&mut peer, doomed);
    peer.context.destroy_qp(doomed).unwrap();
    let pair = [1 << 20, 1 << 21].map(|sq_psn| peer.another_qp(&Setup { sq_psn, ..Setup::default() }));
    for _ in 0..100 {
        pair.iter().for_each(|qp| write(&mut peer, *qp));
    }
    peer.take_at_most(usize::MAX);
    let sent = peer.take_packets();
    assert_eq!(sent[..64].iter().filter(|got| got.psn() < 1 << 21).count(), 32);
}

#[test]
fn cve_2026_74378_srq_num_sge_is_taken_once() {
    let mut peer = Peer::with(Setup { srq: Some(4), ..Setup::default() });
    let srq = peer.srq.unwrap();
    let (mr, other) = (peer.memory(&[0; 64]), peer.memory(&[0; 64]));
    let mut sges = vec![sge(mr, 8)];
    peer.context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: 1, sges: &sges }).unwrap();
    // Later changes of the caller's list have no effect.
    sges[0] = Sge { mr: other, offset: u64::MAX, length: u32::MAX };
    sges.resize(200, sges[0]);
    for pieces in [5, 6, 32, 200] {
        let refused =
            peer.context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: 2, sges: &sges[..pieces] });
        assert!(matches!(refused, Err(Error::Invalid { attribute: "sges", .. })), "{refused:?}");
    }
    drop(sges);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&[0xee; 8]).ack_req());
    peer.expect_ack(RQ, 1);
    assert_eq!(peer.expect_wc(1, WcStatus::Success).byte_len, 8);
    assert_eq!(peer.bytes(mr)[..9], [0xee, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee, 0xee, 0]);
    assert_eq!(peer.bytes(other), [0; 64]);
    // The most pieces allowed in a queue pair created for fewer.
    let sges: Vec<Sge> = (0..4).map(|i| Sge { mr, offset: 8 + i * 2, length: 2 }).collect();
    peer.context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id: 3, sges: &sges }).unwrap();
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 1).payload(&[0xdd; 8]).ack_req());
    peer.expect_ack(RQ + 1, 2);
    peer.expect_wc(3, WcStatus::Success);
    assert_eq!(peer.bytes(mr)[8..17], [0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0xdd, 0]);
}

#[test]
fn cve_2026_64582_memory_used_after_it_was_given_back() {
    let mut peer = Peer::with(Setup { drop_access_errors: true, ..Setup::default() });
    let mr = peer.memory(&pattern(64));
    let old = peer.remote(mr).rkey;
    let memory = peer.context.deregister(mr).unwrap();
    // The slot is reused; neither the handle nor the key gives access to the new region.
    let successor = peer.memory(&[7; 64]);
    assert_ne!(peer.remote(successor).rkey, old);
    let write = packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, old, 8).payload(&[0xee; 8]);
    let read = packet(Opcode::RC_READ_REQUEST, RQ).reth(0, old, 8);
    let add = packet(Opcode::RC_FETCH_ADD, RQ).atomic_eth(0, old, 1, 0);
    for request in [write, read, add] {
        peer.expect_dropped(peer.frame(&request), Counter::RxAccessErrors);
    }
    let stale = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::InvalidHandle { kind: "MR", .. })), "{result:?}");
    };
    stale(peer.context.bytes(mr).map(drop));
    stale(peer.context.bytes_mut(mr).map(drop));
    stale(peer.context.remote(mr).map(drop));
    stale(peer.context.deregister(mr).map(drop));
    let sges = [sge(mr, 8)];
    let flags = SendFlags::SIGNALED;
    let send = SendWorkRequest { wr_id: 1, op: SendOp::Send, data: Data::Sges(&sges), flags };
    stale(peer.context.post_send(peer.qp, &send));
    stale(peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 1, sges: &sges }));
    assert_eq!((peer.bytes(successor), memory.bytes().unwrap()), (&[7; 64][..], &pattern(64)[..]));
}

#[test]
fn cve_2026_45852_cve_2025_38024_srq_freed_once() {
    let config = Config::default().max_srqs(1);
    let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
    let mut context = Context::open(Box::new(port), &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16).unwrap();
    let config = SrqConfig::new(pd).max_wr(4).max_sge(1);
    // A failed creation leaks nothing.
    for bad in [config.max_wr(0), config.max_sge(33)] {
        assert!(matches!(context.create_srq(&bad), Err(Error::Invalid { .. })));
    }
    let srq = context.create_srq(&config).unwrap();
    assert!(matches!(context.create_srq(&config), Err(Error::Exhausted { kind: "SRQ", .. })));
    let mr = context.register(pd, Memory::zeroed(64).unwrap(), Access::LOCAL_WRITE).unwrap();
    for wr_id in 0..4 {
        context.post_srq_recv(srq, &ReceiveWorkRequest { wr_id, sges: &[sge(mr, 64)] }).unwrap();
    }
    let qp = context.create_qp(&QpConfig::rc(pd, cq).srq(srq)).unwrap();
    assert!(matches!(context.destroy_srq(srq), Err(Error::Busy { kind: "SRQ", .. })));
    assert!(matches!(context.deregister(mr), Err(Error::Busy { kind: "MR", .. })));
    context.destroy_qp(qp).unwrap();
    context.destroy_srq(srq).unwrap();
    // A second time is refused, and the next SRQ in its slot is another one.
    assert!(matches!(context.destroy_srq(srq), Err(Error::InvalidHandle { kind: "SRQ", .. })));
    let next = context.create_srq(&config).unwrap();
    assert!(matches!(context.destroy_srq(srq), Err(Error::InvalidHandle { kind: "SRQ", .. })));
    assert_eq!(context.query_srq(next).unwrap().posted, 0);
    // Each receive released its memory once.
    drop(context.deregister(mr).unwrap());
    context.destroy_srq(next).unwrap();
    context.destroy_cq(cq).unwrap();
    context.dealloc_pd(pd).unwrap();
}

#[test]
fn cve_2026_45910_cve_2025_40061_timer_of_a_destroyed_qp() {
    for waits_for_receiver in [false, true] {
        let mut peer = Peer::new();
        peer.post_send(1, b"hello");
        peer.expect(Opcode::RC_SEND_ONLY, SQ);
        if waits_for_receiver {
            peer.inject(nak(NAK_RNR | 20, SQ, 0));
        }
        assert!(peer.context.next_timeout().is_some());
        peer.context.destroy_qp(peer.qp).unwrap();
        assert_eq!(peer.context.next_timeout(), None);
        let other = peer.another_qp(&Setup::default());
        let fresh = peer.context.query_qp(other).unwrap();
        peer.advance(Duration::from_secs(60));
        peer.expect_nothing();
        assert_eq!(peer.context.query_qp(other).unwrap(), fresh);
        for counter in [Counter::LocalAckTimeoutErr, Counter::RetransmittedPkts] {
            peer.expect_counted(counter, 0);
        }
    }
    // The same for ERR and RESET, where the queue pair survives.
    for transition in [Transition::Error, Transition::Reset] {
        let mut peer = Peer::new();
        peer.post_send(1, b"hello");
        peer.expect(Opcode::RC_SEND_ONLY, SQ);
        peer.modify(transition);
        peer.advance(Duration::from_secs(60));
        peer.expect_nothing();
        peer.expect_counted(Counter::LocalAckTimeoutErr, 0);
        if matches!(transition, Transition::Error) {
            peer.expect_wc(1, WcStatus::WrFlushErr);
        }
    }
}
