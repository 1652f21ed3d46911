//! Cases 133 to 136: no stale byte, no changing list, all message numbers, and every work request completes.

use std::collections::HashSet;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use ferroce::WcStatus::{self, LocProtErr, RetryExcErr, Success, WrFlushErr};
use ferroce::driver::{self, FilteredSource, FrameSource, Sent, Wrapper, loopback};
use ferroce::wire::{Encapsulation, Feth, Opcode, Selectivity};
use ferroce::{
    Access, Data, Error, Event, GidEntry, Mr, Nanos, PacketDriver, QpState, QpType, RKey, ReceiveWorkRequest,
    SendFlags, SendOp, Sge, Transition,
};

use crate::i_security::*;
use crate::packet::{
    BTH, Got, NAK_ACCESS, NAK_INVALID, NAK_OPERATIONAL, NAK_RNR, NAK_SEQUENCE, ack, nak, packet, payload,
    read_response,
};
use crate::pairs::{Pairs, QPS, ports};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

/// Every kind of packet that the engine sends, from buffers and memory with other contents.
fn emissions(frames: u8, memory: u8) -> Vec<Got> {
    let mut sent = Vec::new();
    // Messages are at byte 100 of regions whose other bytes must not matter.
    let region = |peer: &mut Peer, length: usize| -> (Mr, Sge) {
        let mut bytes = vec![memory; 100 + length + 100];
        bytes[100..100 + length].copy_from_slice(&pattern(length));
        let mr = peer.memory(&bytes);
        (mr, Sge { mr, offset: 100, length: length as u32 })
    };
    let lengths = [0, 1, 2, 3, 5, 255, 256, 257, 600, 767];
    let set_up = |setup: Setup| {
        let mut peer = Peer::with(setup);
        peer.poison(frames);
        peer
    };
    let connected = |way: usize| {
        let mut peer =
            set_up(Setup { state: QpState::Init, roce_v1: true, ipv6: way == 1, ..Setup::default() });
        let gid = peer.address.destination;
        let index = match way {
            0 | 1 => peer.context.port().gid_index(gid).unwrap(),
            2 => {
                let gids = &peer.context.port().gids;
                gids.iter().position(|entry| entry.roce_v1 && entry.gid == gid).unwrap()
            }
            _ => peer.context.add_gid(GidEntry::new(gid).vlan(5)).unwrap(),
        };
        if way == 2 {
            peer.address.encapsulation = Encapsulation::RoceV1;
        }
        connect_from(&mut peer, index);
        peer
    };
    for way in 0..4 {
        let mut peer = connected(way);
        for (i, length) in lengths.into_iter().enumerate() {
            let data = [region(&mut peer, length).1];
            let i = i as u64;
            peer.post(i, SendOp::Send, &data);
            peer.post(i, SendOp::SendWithImm(1), &data);
            peer.post(i, SendOp::SendWithInvalidate(RKey::new(2)), &data);
            peer.post(i, SendOp::Write(REMOTE), &data);
            peer.post(i, SendOp::WriteWithImm(REMOTE, 3), &data);
        }
        peer.post_flagged(90, SendOp::Send, Data::Inline(b"inline"), SendFlags::SIGNALED);
        let data = [region(&mut peer, 8).1];
        peer.post(91, SendOp::Read(REMOTE), &data);
        peer.post(92, SendOp::CompareSwap { remote: REMOTE, compare: 1, swap: 2 }, &data);
        peer.post(93, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &data);
        peer.post(94, SendOp::AtomicWrite(REMOTE), &data);
        let (selectivity, kind) = (Selectivity::Range, VISIBLE);
        peer.post(95, SendOp::Flush { remote: REMOTE, length: 8, selectivity, kind }, &[]);
        sent.extend(peer.take_packets());

        let mut psn = RQ;
        for length in lengths {
            let (mr, _) = region(&mut peer, length);
            let key = peer.remote(mr).rkey;
            peer.inject(packet(Opcode::RC_READ_REQUEST, psn).reth(100, key, length as u32));
            let packets = peer.take_packets();
            assert_eq!(payload(&packets), pattern(length));
            psn += packets.len() as u32;
            sent.extend(packets);
        }
        let (mr, _) = region(&mut peer, 60);
        let key = peer.remote(mr).rkey;
        peer.inject_all([
            packet(Opcode::RC_FETCH_ADD, psn).atomic_eth(104, key, 1, 0),
            packet(Opcode::RC_COMPARE_SWAP, psn + 1).atomic_eth(104, key, 1, 0),
            packet(Opcode::RC_FLUSH, psn + 2).feth(Feth::new(Selectivity::Range, VISIBLE)).reth(100, key, 8),
            packet(Opcode::RC_ATOMIC_WRITE, psn + 3).reth(104, key, 8).payload(&[1; 8]),
            packet(Opcode::RC_WRITE_ONLY, psn + 4).reth(100, key, 3).payload(&[1; 3]).ack_req(),
        ]);
        peer.inject(packet(Opcode::RC_SEND_ONLY, psn + 6));
        peer.inject(packet(Opcode::RC_SEND_ONLY, psn + 5));
        peer.inject(packet(Opcode::RC_READ_REQUEST, psn + 5).reth(0, RKey::new(!key.value()), 8));
        sent.extend(peer.take_packets());
        // The end, caused by the invalid key.
        peer.expect_event(Event::QpAccessErr(peer.qp));
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    }
    let mut peer = set_up(Setup::default());
    peer.inject(packet(Opcode::RC_SEND_MIDDLE, RQ).payload(&[0; 256]));
    peer.expect_event(Event::QpReqErr(peer.qp));
    sent.extend(peer.take_packets());
    let mut peer = set_up(Setup::default());
    let unwritable = peer.memory_with(&[memory; 8], Access::NONE);
    peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 1, sges: &[sge(unwritable, 8)] }).unwrap();
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&[0; 8]));
    peer.expect_wc(1, LocProtErr);
    sent.extend(peer.take_packets());

    let mut peer = set_up(Setup { selective_repeat: true, ..Setup::default() });
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ + 1).payload(&[0; 8]));
    sent.extend(peer.take_packets());

    let mut peer = set_up(Setup { qp_type: QpType::Uc, cq_capacity: 1024, ..Setup::default() });
    for (i, length) in lengths.into_iter().enumerate() {
        let data = [region(&mut peer, length).1];
        let writes = [SendOp::Write(REMOTE), SendOp::WriteWithImm(REMOTE, 3)];
        for op in [SendOp::Send, SendOp::SendWithImm(1)].into_iter().chain(writes) {
            peer.post(i as u64, op, &data);
        }
    }
    sent.extend(peer.take_packets());
    while peer.context.poll_cq(peer.cq).unwrap().is_some() {}

    for ipv6 in [false, true] {
        let mut peer = set_up(Setup { qp_type: QpType::Ud, ipv6, ..Setup::default() });
        let to = peer.destination();
        for (i, length) in lengths.into_iter().enumerate() {
            let data = [region(&mut peer, length).1];
            peer.post(i as u64, SendOp::SendTo(to), &data);
            peer.post(i as u64, SendOp::SendToWithImm(to, 1), &data);
        }
        sent.extend(peer.take_packets());
        while peer.context.poll_cq(peer.cq).unwrap().is_some() {}
    }
    sent
}

#[test]
fn case_133_no_stale_byte_leaves() {
    let sent = emissions(0xa5, 0x11);
    let again = emissions(0x5a, 0x77);
    assert_eq!(sent.len(), again.len());
    for (one, other) in sent.iter().zip(&again) {
        assert_eq!(one.frame, other.frame, "a byte of {one} is not the packet's own");
    }
    for got in &sent {
        let end = got.frame.len() - 4;
        assert!(got.frame[end - got.bth.pad()..end].iter().all(|byte| *byte == 0), "pad of {got}");
    }
    // All kinds except congestion notifications.
    let kinds: HashSet<Opcode> = sent.iter().map(|got| got.opcode).collect();
    let missing: Vec<Opcode> = opcodes().filter(|o| *o != Opcode::CNP && !kinds.contains(o)).collect();
    assert!(missing.is_empty(), "never sent: {missing:?}");
    assert!((0..4).all(|pad| sent.iter().any(|got| got.bth.pad() == pad)));
    let syndromes: HashSet<u8> =
        sent.iter().filter_map(|got| got.extensions.aeth).map(|aeth| aeth.syndrome_byte()).collect();
    let all = [0x1f, NAK_SEQUENCE, NAK_INVALID, NAK_ACCESS, NAK_OPERATIONAL, NAK_RNR | 12];
    assert_eq!(syndromes, HashSet::from(all));

    // The application sees its own bytes after the message, and zeros before an IPv4 header.
    let mut peer = Peer::with(Setup { qp_type: QpType::Ud, ..Setup::default() });
    let mr = peer.post_recv(1, 64);
    peer.bytes_mut(mr).fill(0x5a);
    peer.inject(packet(Opcode::UD_SEND_ONLY, 0).deth(QKEY, PEER_QPN).payload(b"hello"));
    assert_eq!(peer.expect_wc(1, Success).byte_len, 45);
    assert_eq!((&peer.bytes(mr)[..20], &peer.bytes(mr)[40..45]), (&[0; 20][..], &b"hello"[..]));
    assert_eq!(peer.bytes(mr)[45..], [0x5a; 19]);
    let mut peer = Peer::new();
    let mr = peer.memory(&[0x5a; 64]);
    peer.post(1, SendOp::Read(REMOTE), &[Sge { mr, offset: 8, length: 5 }]);
    peer.expect(Opcode::RC_READ_REQUEST, SQ);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ, b"hello"));
    peer.expect_wc(1, Success);
    let expected = [&[0x5a; 8][..], b"hello", &[0x5a; 51]].concat();
    assert_eq!(peer.bytes(mr), expected);
}

/// The rings shared by an application and the engine hold copies, made when a request is posted: no later change of a list,
/// inline bytes or memory corrupts a packet. (Frames are borrowed from the driver only for one call: no safe driver can
/// change one during processing.)
#[test]
fn case_134_posted_lists_change_under_the_engine() {
    let mut peer = Peer::new();
    let (mr, other) = (peer.memory(&pattern(600)), peer.memory(&[0xee; 600]));
    let mut sges = [sge(mr, 300), Sge { mr, offset: 300, length: 300 }];
    let mut inline = *b"inline";
    peer.post(1, SendOp::Send, &sges);
    black_box(&mut sges).fill(Sge { mr: other, offset: u64::MAX, length: u32::MAX });
    peer.post_flagged(2, SendOp::Send, Data::Inline(&inline), SendFlags::SIGNALED);
    black_box(&mut inline).fill(0xee);
    let target = peer.memory(&[0; 8]);
    let mut receive = [sge(target, 8)];
    peer.context.post_recv(peer.qp, &ReceiveWorkRequest { wr_id: 3, sges: &receive }).unwrap();
    black_box(&mut receive)[0] = sge(other, 1);
    // If memory changes between the packets of a message, or before a retransmission, only their payload changes.
    let mut sent = Vec::new();
    for round in 0..40u8 {
        peer.take_at_most(0);
        if round % 10 == 9 {
            peer.inject(nak(NAK_SEQUENCE, SQ + u32::from(round) / 20, 0));
        }
        peer.bytes_mut(mr).fill(round);
        peer.take_at_most(1);
        for got in peer.take_packets() {
            match got.psn() - SQ {
                0..=2 => assert!(got.payload.iter().all(|byte| *byte == round), "{got}"),
                _ => assert_eq!(got.payload, b"inline"),
            }
            sent.push((got.psn() - SQ, got.payload.len()));
        }
    }
    let lengths = [(0, 256), (1, 256), (2, 88), (3, 6)];
    assert!(sent.len() > 10 && sent.iter().all(|packet| lengths.contains(packet)), "{sent:?}");
    peer.take_at_most(usize::MAX);
    peer.take_packets();
    peer.inject(ack(SQ + 3, 2));
    peer.expect_wc(1, Success);
    peer.expect_wc(2, Success);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(&[7; 8]).ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(3, Success);
    assert_eq!((peer.bytes(target), peer.bytes(other)), (&[7; 8][..], &[0xee; 600][..]));
}

/// A port that loses one in this many frames that it sends, and reads the MSN of the others.
struct Losing {
    port: loopback::Loopback,
    one_of: u64,
    seen: Arc<Seen>,
}

/// Records of the ports about the packets sent.
#[derive(Default)]
struct Seen {
    frames: AtomicU64,
    lost: AtomicU64,
    last_msn: AtomicU32,
}

impl Wrapper for Losing {
    type Inner = loopback::Loopback;

    fn inner(&self) -> &loopback::Loopback {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut loopback::Loopback {
        &mut self.port
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, driver::Error> {
        let Losing { port, one_of, seen } = self;
        let passes = |frame: Sent<'_>| {
            let head = frame.head();
            if head[BTH] == Opcode::RC_ACKNOWLEDGE.byte() {
                let msn = [0, head[BTH + 13], head[BTH + 14], head[BTH + 15]];
                seen.last_msn.store(u32::from_be_bytes(msn), Relaxed);
            }
            let lost = (seen.frames.fetch_add(1, Relaxed) + 1) % *one_of == 0;
            seen.lost.fetch_add(u64::from(lost), Relaxed);
            !lost
        };
        port.tx_burst(now, &mut FilteredSource::new(source, passes))
    }
}

/// More than 2²⁴ messages over one connection that loses packets: PSNs and MSNs wrap. The model is arithmetic: each message
/// has one PSN, and is counted once.
#[test]
fn case_135_psn_and_msn_go_round() {
    const MESSAGES: u64 = (1 << 24) + 5000;
    let seen = Arc::new(Seen::default());
    let losing =
        |port| -> Box<dyn PacketDriver> { Box::new(Losing { port, one_of: 4999, seen: seen.clone() }) };
    let (a, b) = ports();
    let mut pairs = Pairs::over([losing(a), losing(b)]);
    let start = pairs.responder.query_qp(pairs.responder_qps[0]).unwrap().rq_psn;
    let remote = pairs.remote(0);
    let (mut posted, mut completed) = (0u64, 0);
    while completed < MESSAGES {
        while posted < MESSAGES && posted - completed < 120 {
            // One in 64 returns the number of messages executed before.
            if posted % 64 == 63 {
                pairs.post(0, posted, SendOp::FetchAdd { remote, add: 1 }, posted / 64 % 16);
            } else {
                pairs.post_nothing(0, posted, posted % 8 == 0 || posted == MESSAGES - 1);
            }
            posted += 1;
        }
        for (_, wr_id) in pairs.poll() {
            assert!(wr_id >= completed, "{wr_id} is complete before {completed}");
            if wr_id % 64 == 63 {
                let count = wr_id / 64;
                assert_eq!(pairs.result(0, count % 16), count, "an atomic was lost or done twice");
            }
            completed = wr_id + 1;
        }
        pairs.skip_idle_time();
    }
    let at_end = (u64::from(start.value()) + MESSAGES) as u32 & 0xff_ffff;
    assert_eq!(pairs.requester.query_qp(pairs.qps[0]).unwrap().sq_psn.value(), at_end);
    assert_eq!(pairs.responder.query_qp(pairs.responder_qps[0]).unwrap().rq_psn.value(), at_end);
    assert_eq!(seen.last_msn.load(Relaxed), MESSAGES as u32 & 0xff_ffff);
    assert_eq!(pairs.word(0), MESSAGES / 64);
    assert!(seen.lost.load(Relaxed) > 1000);
}

#[test]
fn case_136_every_work_request_ends_once() {
    // The peer dies within its response to a READ.
    let mut peer = Peer::with(Setup { retry_count: 2, timeout: 8, ..Setup::default() });
    for wr_id in [10, 11] {
        peer.post_recv(wr_id, 8);
    }
    peer.post_write(1, b"done");
    let read = peer.post_read(2, 600);
    peer.post_send(3, b"behind it");
    assert_eq!(peer.take_packets().len(), 3);
    peer.inject(read_response(Opcode::RC_READ_RESPONSE_FIRST, SQ + 1, &[0xee; 256]));
    peer.expect_wc(1, Success);
    peer.advance(Duration::from_secs(1));
    peer.expect_wc(2, RetryExcErr);
    for wr_id in [3, 10, 11] {
        peer.expect_wc(wr_id, WrFlushErr);
    }
    peer.expect_no_wc();
    assert_eq!(peer.take_packets().len(), 2 * 2, "READ and SEND, twice again");
    drop(peer.context.deregister(read).unwrap());

    // It dies during its READ from here: this must not keep memory or the queue pair.
    let mut peer = Peer::new();
    let mr = peer.memory(&pattern(2048));
    let key = peer.remote(mr).rkey;
    peer.take_at_most(3);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, key, 2048));
    assert_eq!(peer.take_packets().len(), 3);
    peer.context.destroy_qp(peer.qp).unwrap();
    drop(peer.context.deregister(mr).unwrap());
    peer.take_at_most(usize::MAX);
    peer.expect_nothing();

    // Queue pairs that end during traffic, in every possible way.
    for round in 0..60u64 {
        let mut pairs = Pairs::new();
        let mut open: HashSet<(usize, u64)> = HashSet::new();
        let remote = pairs.remote(0);
        for wr_id in 0..12 {
            for q in 0..QPS {
                let op = match (wr_id + q as u64) % 3 {
                    0 => SendOp::FetchAdd { remote, add: 1 },
                    1 => SendOp::Read(remote),
                    _ => SendOp::Write(remote),
                };
                pairs.post(q, wr_id, op, wr_id);
                open.insert((q, wr_id));
            }
        }
        let end = |open: &mut HashSet<(usize, u64)>, ended: Vec<(usize, u64, WcStatus)>| {
            for (q, wr_id, _) in &ended {
                assert!(open.remove(&(*q, *wr_id)), "{wr_id} of queue pair {q} ended twice");
            }
            ended
        };
        for _ in 0..round % 6 {
            end(&mut open, pairs.poll_any());
        }
        // Objects in use stay.
        assert!(matches!(pairs.requester.destroy_cq(pairs.cq), Err(Error::Busy { kind: "CQ", .. })));
        assert_eq!(pairs.requester.deregister(pairs.results).is_err(), !open.is_empty());
        if open.is_empty() {
            continue;
        }
        pairs.requester.destroy_qp(pairs.qps[0]).unwrap();
        pairs.requester.modify_qp(pairs.qps[1], Transition::Reset).unwrap();
        open.retain(|(q, _)| *q > 1);
        pairs.requester.modify_qp(pairs.qps[2], Transition::Error).unwrap();
        pairs.responder.destroy_qp(pairs.responder_qps[3]).unwrap();
        pairs.responder.modify_qp(pairs.responder_qps[4], Transition::Error).unwrap();
        let words = if round % 2 == 0 { pairs.responder.deregister(pairs.words).ok() } else { None };
        while pairs.skip_idle_time() {
            let ended = pairs.poll_any();
            for (q, wr_id, status) in end(&mut open, ended) {
                let lawful = q > 4 && words.is_none();
                assert!(status == Success || !lawful, "{wr_id} of queue pair {q}: {status:?}");
            }
        }
        assert!(open.is_empty(), "never ended: {open:?}");
        // No references are left.
        for qp in &pairs.qps[1..] {
            pairs.requester.destroy_qp(*qp).unwrap();
        }
        drop(pairs.requester.deregister(pairs.results).unwrap());
        pairs.requester.destroy_cq(pairs.cq).unwrap();
    }
}
