//! Section I: security (docs/protocol.md §9). What is not a case is in `stack/tests/security`.

use std::collections::{HashMap, HashSet};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use ferroce::WcStatus::{self, LocProtErr, RetryExcErr, Success, WrFlushErr};
use ferroce::driver::{self, FilteredSource, FrameSource, Sent, Wrapper, loopback};
use ferroce::wire::{
    Encapsulation, Extension, Feth, FlushType, Opcode, PayloadRule, Selectivity, Service, VlanTag,
};
use ferroce::{
    Access, Config, Context, Counter, Data, Error, Event, GidEntry, Memory, Mr, Nanos, PacketDriver,
    QpConfig, QpState, QpType, RKey, ReceiveWorkRequest, SendFlags, SendOp, Sge, Transition,
};

use crate::fuzz::Fuzz;
use crate::packet::{
    BTH, Got, NAK_ACCESS, NAK_INVALID, NAK_OPERATIONAL, NAK_RNR, NAK_SEQUENCE, Script, ack, atomic_ack, nak,
    packet, payload, read_response,
};
use crate::pairs::{Pairs, QPS, ports};
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

#[test]
fn case_129_keys_and_queue_pair_numbers_are_random() {
    let (port, _) = ports();
    let config = Config { seed: Some([7; 32]), ..Config::default() };
    let mut context = Context::open(Box::new(port), &config).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(1).unwrap();

    let mut memory = Some(Memory::zeroed(1).unwrap());
    let keys = (0..1_000_000).map(|_| {
        let mr = context.register(pd, memory.take().unwrap(), Access::NONE).unwrap();
        let key = context.remote(mr).unwrap().rkey.value();
        memory = Some(context.deregister(mr).unwrap());
        key
    });
    let keys: Vec<u32> = keys.collect();
    expect_random(&keys, 32);
    let small = QpConfig { max_send_wr: 1, max_recv_wr: 1, max_inline_data: 0, ..QpConfig::rc(pd, cq) };
    let numbers = (0..200_000).map(|_| {
        let qp = context.create_qp(&small).unwrap();
        let qpn = context.query_qp(qp).unwrap().qpn;
        context.destroy_qp(qp).unwrap();
        assert!(qpn.is_ordinary());
        qpn.value()
    });
    let numbers: Vec<u32> = numbers.collect();
    expect_random(&numbers, 24);

    // Without a seed each context has its own numbers.
    let own = || {
        let (port, _) = ports();
        let mut context = Context::open(Box::new(port), &Config::default()).unwrap();
        let pd = context.alloc_pd().unwrap();
        let mr = context.register(pd, Memory::zeroed(1).unwrap(), Access::NONE).unwrap();
        context.remote(mr).unwrap().rkey
    };
    assert_ne!((own(), own()), (own(), own()));
}

/// Every bit and every byte uniform, no value depending on the one before, and none coming back
/// before 4096 others were given up. (Five standard deviations each; the seed is fixed.)
fn expect_random(values: &[u32], bits: u32) {
    let n = values.len() as f64;
    let is_half = |count: usize, what: &str| {
        assert!((count as f64 - n / 2.0).abs() < 5.0 * (n / 4.0).sqrt(), "{what}: {count} of {n}");
    };
    for bit in 0..bits {
        is_half(values.iter().filter(|v| *v >> bit & 1 == 1).count(), &format!("bit {bit}"));
        let flips = values.windows(2).filter(|w| (w[0] ^ w[1]) >> bit & 1 == 1).count();
        is_half(flips, &format!("flips of bit {bit}"));
    }
    for shift in (0..bits).step_by(8) {
        let mut counts = [0u32; 256];
        values.iter().for_each(|v| counts[(v >> shift & 0xff) as usize] += 1);
        let mean = n / 256.0;
        let chi_square: f64 = counts.iter().map(|c| (f64::from(*c) - mean).powi(2) / mean).sum();
        assert!(chi_square < 255.0 + 5.0 * 510f64.sqrt(), "byte at {shift}: chi-square {chi_square}");
    }
    let middle = f64::from(u32::MAX >> (32 - bits)) / 2.0;
    let centred: Vec<f64> = values.iter().map(|v| f64::from(*v) - middle).collect();
    let variance: f64 = centred.iter().map(|v| v * v).sum();
    let correlation = centred.windows(2).map(|w| w[0] * w[1]).sum::<f64>() / variance;
    assert!(correlation.abs() < 5.0 / n.sqrt(), "serial correlation {correlation}");
    let mut last_seen = HashMap::new();
    for (at, value) in values.iter().enumerate() {
        if let Some(before) = last_seen.insert(value, at) {
            assert!(at - before > 4096, "{value:#x} came back after {} others", at - before);
        }
    }
}

/// What FLUSHes ask for here.
const VISIBLE: FlushType = FlushType { global_visibility: true, persistence: false };

/// A packet of this kind in which nothing is wrong, with as much payload as it may have.
fn well_formed(opcode: Opcode, psn: u32, key: RKey) -> Script {
    let length = match opcode.payload() {
        PayloadRule::Full => 256,
        PayloadRule::Exactly(n) => n.into(),
        PayloadRule::Some | PayloadRule::Any => 8,
    };
    let mut script = packet(opcode, psn).payload(&vec![0xee; length]);
    for extension in opcode.extensions() {
        script = match extension {
            Extension::Deth => script.deth(QKEY, PEER_QPN),
            Extension::Reth => script.reth(0, key, 8),
            Extension::AtomicEth => script.atomic_eth(0, key, 1, 0),
            Extension::Aeth => script.aeth(0x1f, 1),
            Extension::AtomicAckEth => script.original(0xeeee),
            Extension::ImmDt => script.imm(0xeeee),
            Extension::Ieth => script.ieth(key),
            Extension::Feth => script.feth(Feth::new(Selectivity::Range, VISIBLE)),
        };
    }
    if opcode.is_request() { script.ack_req() } else { script }
}

fn opcodes() -> impl Iterator<Item = Opcode> + Clone {
    (0..=255).filter_map(Opcode::from_byte)
}

/// Connects the queue pair, which is in INIT, from another row of the GID table.
fn connect_from(peer: &mut Peer, sgid_index: usize) {
    let [_, mut receive, send] = peer.transitions(&Setup::default());
    if let Transition::ReadyToReceive(attributes) = &mut receive {
        attributes.address.sgid_index = sgid_index;
    }
    peer.modify(receive);
    peer.modify(send);
}

#[test]
fn case_130_spoofed_packets_change_nothing() {
    for (qp_type, ipv6) in [(QpType::Rc, false), (QpType::Rc, true), (QpType::Uc, false)] {
        let mut peer = Peer::with(Setup { qp_type, ipv6, roce_v1: true, ..Setup::default() });
        let target = peer.memory(&pattern(64));
        let key = peer.remote(target).rkey;
        let received = peer.post_recv(1, 512);
        let mut results = Vec::new();
        if qp_type == QpType::Rc {
            // One request of each kind that a response could be forged for.
            peer.post_send(2, b"outstanding");
            results.push(peer.post_read(3, 256));
            let word = peer.memory(&[0; 8]);
            peer.post(4, SendOp::FetchAdd { remote: REMOTE, add: 1 }, &[sge(word, 8)]);
            results.push(word);
            assert_eq!(peer.take_packets().len(), 3);
        }
        let right = peer.address;
        let elsewhere = Peer::with(Setup { ipv6: !ipv6, ..Setup::default() }).address;
        let mut other_source = right;
        other_source.source.0[15] ^= 1;
        let mut other_destination = right;
        other_destination.destination.0[15] ^= 1;
        let mut reflected = right;
        (reflected.source, reflected.destination) = (right.destination, right.source);
        let mut v1 = right;
        v1.encapsulation = Encapsulation::RoceV1;
        let mut family = right;
        (family.source, family.destination) = (elsewhere.source, elsewhere.destination);
        for address in [other_source, other_destination, reflected, v1, family] {
            peer.address = address;
            for opcode in opcodes() {
                let expected = if opcode.is_request() { RQ } else { SQ };
                for psn in [expected, expected + 1, expected + 2, expected.wrapping_sub(1)] {
                    peer.expect_dropped(peer.frame(&well_formed(opcode, psn, key)), Counter::RxWrongAddress);
                }
            }
        }
        assert_eq!(peer.bytes(target), pattern(64));
        assert_eq!(peer.bytes(received), [0; 512]);
        assert!(results.iter().all(|mr| peer.bytes(*mr).iter().all(|byte| *byte == 0)));
        // The lawful peer goes on as if nothing had been.
        peer.address = right;
        if qp_type == QpType::Rc {
            peer.inject(ack(SQ, 1));
            peer.expect_wc(2, Success);
            peer.inject(read_response(Opcode::RC_READ_RESPONSE_ONLY, SQ + 1, &[7; 256]));
            peer.expect_wc(3, Success);
            peer.inject(atomic_ack(SQ + 2, 5));
            peer.expect_wc(4, Success);
            peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"lawful").ack_req());
            peer.expect_ack(RQ, 1);
        } else {
            peer.inject(packet(Opcode::UC_SEND_ONLY, RQ).payload(b"lawful"));
        }
        assert_eq!(peer.expect_wc(1, Success).byte_len, 6);
    }

    // Datagrams may come from anywhere; what guards them is the Q_Key.
    let mut peer = Peer::with(Setup { qp_type: QpType::Ud, ..Setup::default() });
    let received = peer.post_recv(1, 512);
    let key = RKey::new(1);
    for opcode in opcodes() {
        let frame = peer.frame(&well_formed(opcode, 0, key));
        match opcode.service() {
            Service::Ud => {
                for qkey in [QKEY + 1, 0, QKEY | 1 << 31] {
                    let forged = packet(opcode, 0).deth(qkey, PEER_QPN).payload(&[0xee; 8]);
                    peer.expect_dropped(peer.frame(&forged), Counter::RxQkeyMismatch);
                }
                let right = peer.address;
                peer.address.destination.0[15] ^= 1;
                peer.expect_dropped(peer.frame(&well_formed(opcode, 0, key)), Counter::RxWrongAddress);
                peer.address = right;
            }
            Service::Cnp => peer.expect_dropped(frame, Counter::RpCnpIgnored),
            // Unknown to whoever has not agreed on it.
            _ if opcode == Opcode::SELECTIVE_ACKNOWLEDGE => {
                peer.expect_dropped(frame, Counter::RxUnknownOpcode);
            }
            Service::Rc | Service::Uc => peer.expect_dropped(frame, Counter::RxWrongService),
        }
    }
    assert_eq!(peer.bytes(received), [0; 512]);

    // A queue pair of one VLAN hears no other.
    let mut peer = Peer::with(Setup { state: QpState::Init, ..Setup::default() });
    let entry = GidEntry { gid: peer.address.destination, roce_v1: false, vlan: Some(5) };
    let index = peer.context.add_gid(entry).unwrap();
    connect_from(&mut peer, index);
    for opcode in opcodes() {
        peer.address.vlan = Some(VlanTag { id: 6, priority: 0 });
        let psn = if opcode.is_request() { RQ } else { SQ };
        peer.expect_dropped(peer.frame(&well_formed(opcode, psn, key)), Counter::RxWrongAddress);
    }
    peer.address.vlan = Some(VlanTag { id: 5, priority: 0 });
    peer.post_recv(1, 8);
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"lawful").ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, Success);
}

#[test]
fn case_131_random_packets() {
    let seed = std::env::var("FERROCE_SEED").map_or(7, |seed| seed.parse().unwrap());
    println!("replay: FERROCE_SEED={seed} cargo test -p ferroce --test conformance case_131 -- --nocapture");
    use Counter as C;
    // That so many packets do nothing bad says something only if they get so far.
    let everywhere = [C::RxIcrcEncapsulated, C::RxLengthErrors, C::RxUnknownOpcode, C::RxWrongService];
    let rc = [
        C::DuplicateRequest,
        C::OutOfSequence,
        C::PacketSeqErr,
        C::ImpliedNakSeqErr,
        C::LocalAckTimeoutErr,
        C::RnrNakRetryErr,
        C::SendRnrErr,
        C::StaleResponse,
        C::IgnoredSyndrome,
        C::RespInvalidRequest,
        C::RespRemoteAccessErrors,
        C::ReqRemoteInvalidRequest,
        C::ReqRemoteAccessErrors,
        C::ReqRemoteOperationalErrors,
        C::RxForgottenDuplicate,
        C::RxWrongState,
    ];
    let uc = [C::OutOfSequence, C::RxIncomplete, C::OutOfBuffer, C::RxInvalidRequest, C::RxAccessErrors];
    let ud = [C::RxQkeyMismatch, C::RxTooLong, C::OutOfBuffer];
    for (qp_type, reached) in [(QpType::Rc, &rc[..]), (QpType::Uc, &uc), (QpType::Ud, &ud)] {
        let counters = Fuzz::new(qp_type, seed).run(100_000);
        for counter in everywhere.iter().chain(reached) {
            assert!(counters.value(*counter) > 10, "{qp_type:?}: {}\n{counters}", counter.name());
        }
    }
}

#[test]
fn case_132_every_known_bug_has_a_test() {
    let known = [
        "CVE-2016-8636",
        "ml 2026-05",
        "7244491dab34",
        "ml 2026-04 |",
        "ml 2026 (ATOMIC WRITE)",
        "CVE-2024-40992",
        "CVE-2024-38544",
        "CVE-2026-74378",
        "CVE-2026-64582",
        "CVE-2026-45852",
        "CVE-2025-38024",
        "CVE-2026-45910",
        "CVE-2025-40061",
        "CVE-2024-57795",
        "CVE-2022-50885",
        "CVE-2022-50671",
        "ml 2026-07",
        "CVE-2026-64102",
        "CVE-2026-23242",
        "CVE-2022-50666",
        "CVE-2026-74345",
        "CVE-2026-68417",
        "CVE-2026-45856",
        "CVE-2026-23243",
        "CVE-2024-42145",
        "CVE-2026-68425",
        "CVE-2022-48925",
    ];
    let (table, tests) = (include_str!("../security/security.md"), include_str!("../security/bugs.rs"));
    for id in known {
        let rows: Vec<&str> =
            table.lines().filter(|line| line.starts_with("| ") && line.contains(id)).collect();
        assert!(!rows.is_empty(), "{id} has no row in security.md");
        for row in rows {
            let test = row.trim_end_matches("` |").rsplit('`').next().unwrap();
            assert!(tests.contains(&format!("#[test]\nfn {test}() {{")), "{id}: no test {test} in bugs.rs");
            if let Some(cve) = id.strip_prefix("CVE-") {
                assert!(test.contains(&format!("cve_{}", cve.replace('-', "_"))), "{id}: {test}");
            }
        }
    }
}

/// Every kind of packet that the engine sends, from buffers and memory full of other things.
fn emissions(frames: u8, memory: u8) -> Vec<Got> {
    let mut sent = Vec::new();
    // Messages lie at byte 100 of regions whose other bytes are nobody's business.
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
            _ => peer.context.add_gid(GidEntry { gid, roce_v1: false, vlan: Some(5) }).unwrap(),
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
        // The end of it all, by the key that was wrong.
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
        assert!(got.frame[end - got.pad..end].iter().all(|byte| *byte == 0), "pad of {got}");
    }
    // All that there is, but for congestion notifications, which are to come.
    let kinds: HashSet<Opcode> = sent.iter().map(|got| got.opcode).collect();
    let missing: Vec<Opcode> = opcodes().filter(|o| *o != Opcode::CNP && !kinds.contains(o)).collect();
    assert!(missing.is_empty(), "never sent: {missing:?}");
    assert!((0..4).all(|pad| sent.iter().any(|got| got.pad == pad)));
    let syndromes: HashSet<u8> =
        sent.iter().filter_map(|got| got.aeth).map(|aeth| aeth.syndrome_byte()).collect();
    let all = [0x1f, NAK_SEQUENCE, NAK_INVALID, NAK_ACCESS, NAK_OPERATIONAL, NAK_RNR | 12];
    assert_eq!(syndromes, HashSet::from(all));

    // What the application finds: its own bytes behind the message, zeros before an IPv4 header.
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

/// The rings that an application and the engine share hold copies, made when a request is posted: no
/// list, inline byte or memory that changes afterwards breaks a packet. (Frames are borrowed from the
/// driver for one call, alone: no safe driver can change one under the engine.)
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
    // Memory that changes between the packets of a message, and before they are sent again, changes
    // what they carry and nothing else.
    let mut sent = Vec::new();
    for round in 0..40u8 {
        peer.take_at_most(0);
        if round % 10 == 9 {
            peer.inject(nak(NAK_SEQUENCE, SQ + u32::from(round) / 20, 0));
        }
        peer.bytes_mut(mr).fill(round);
        peer.take_at_most(1);
        for got in peer.take_packets() {
            match got.psn - SQ {
                0..=2 => assert!(got.payload.iter().all(|byte| *byte == round), "{got}"),
                _ => assert_eq!(got.payload, b"inline"),
            }
            sent.push((got.psn - SQ, got.payload.len()));
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

/// A port that loses one of so many frames that it sends, and reads the MSN of the others.
struct Losing {
    port: loopback::Loopback,
    one_of: u64,
    seen: Arc<Seen>,
}

/// What ports have seen of the packets that they sent.
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

/// More than 2²⁴ messages over one connection that loses packets: PSNs and MSN go all the way round.
/// The model is arithmetic: each message has one PSN, and was counted once.
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
            // One of 64 tells what it has found, and so how many of them were executed before.
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
    // The peer dies in the middle of its answer to a READ.
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

    // It dies while it reads from here: nothing of that keeps memory or queue pair.
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

    // Queue pairs that end in the middle of traffic, by every way there is.
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
        // What is in use stays.
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
        // Nothing holds anything any more.
        for qp in &pairs.qps[1..] {
            pairs.requester.destroy_qp(*qp).unwrap();
        }
        drop(pairs.requester.deregister(pairs.results).unwrap());
        pairs.requester.destroy_cq(pairs.cq).unwrap();
    }
}
