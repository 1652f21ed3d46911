//! Section I: security (docs/protocol.md §9). Tests without a case number are in `stack/tests/security`.

use std::collections::HashMap;

use ferroce::WcStatus::Success;
use ferroce::wire::{
    Encapsulation, Extension, Feth, FlushType, Opcode, PayloadRule, Selectivity, Service, VlanTag,
};
use ferroce::{
    Access, Config, Context, Counter, GidEntry, Memory, QpConfig, QpState, QpType, RKey, SendOp, Transition,
};

use crate::fuzz::Fuzz;
use crate::packet::{Script, ack, atomic_ack, packet, read_response};
use crate::pairs::ports;
use crate::peer::{PEER_QPN, Peer, QKEY, REMOTE, RQ, SQ, Setup, pattern, sge};

#[test]
fn case_129_keys_and_queue_pair_numbers_are_random() {
    let (port, _) = ports();
    let config = Config::default().seed([7; 32]);
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
    let small = QpConfig::rc(pd, cq).max_send_wr(1).max_recv_wr(1).max_inline_data(0);
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

/// Every bit and every byte is uniform, no value depends on the previous one, and none is reused before 4096 others were
/// retired. (Five standard deviations each; the seed is fixed.)
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

/// The parameters of FLUSHes here.
pub(crate) const VISIBLE: FlushType = FlushType { global_visibility: true, persistence: false };

/// A valid packet of this kind, with the longest payload.
pub(crate) fn well_formed(opcode: Opcode, psn: u32, key: RKey) -> Script {
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

pub(crate) fn opcodes() -> impl Iterator<Item = Opcode> + Clone {
    (0..=255).filter_map(Opcode::from_byte)
}

/// Connects the queue pair, which is in INIT, from another GID table entry.
pub(crate) fn connect_from(peer: &mut Peer, sgid_index: usize) {
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
            // One request of each kind for which a response could be forged.
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
        // The real peer continues as if nothing had happened.
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

    // Datagrams may have any source; the Q_Key protects.
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
            // Unknown without negotiation.
            _ if opcode == Opcode::SELECTIVE_ACKNOWLEDGE => {
                peer.expect_dropped(frame, Counter::RxUnknownOpcode);
            }
            Service::Rc | Service::Uc => peer.expect_dropped(frame, Counter::RxWrongService),
        }
    }
    assert_eq!(peer.bytes(received), [0; 512]);

    // A queue pair of one VLAN receives from no other.
    let mut peer = Peer::with(Setup { state: QpState::Init, ..Setup::default() });
    let entry = GidEntry::new(peer.address.destination).vlan(5);
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
    // This many harmless packets mean something only if they are processed far.
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
    let table = include_str!("../security/security.md");
    let tests = concat!(include_str!("../security/bugs.rs"), include_str!("../security/bugs_of_state.rs"));
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
