//! Possible attacks (docs/protocol.md §9), beyond the conformance cases.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ferroce::wire::{Opcode, Operation, Service};
use ferroce::{Access, Counter, Event, Gid, Memory, QpState, RKey, RnrTimer, SendOp, WcStatus};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use crate::packet::{NAK_ACCESS, NAK_RNR, NAK_SEQUENCE, Script, ack, nak, packet, payload};
use crate::peer::{Peer, REMOTE, RQ, SQ, Setup, all_access, pattern, sge};

/// An invalid key, from the peer's address and from another, with the standard behaviour and with wrong keys dropped.
#[test]
fn bad_key_ends_the_connection_only_from_its_peer_and_only_by_the_standard() {
    let bad = RKey::new(0xbad_0000);
    let requests = [
        packet(Opcode::RC_READ_REQUEST, RQ).reth(0, bad, 8),
        packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, bad, 8).payload(&[0xee; 8]),
        packet(Opcode::RC_FETCH_ADD, RQ).atomic_eth(0, bad, 1, 0),
        packet(Opcode::RC_ATOMIC_WRITE, RQ).reth(0, bad, 8).payload(&[0xee; 8]),
        packet(Opcode::RC_SEND_ONLY_WITH_INVALIDATE, RQ).ieth(bad).payload(&[0xee; 8]),
    ];
    for drop_access_errors in [false, true] {
        for request in &requests {
            let mut peer = Peer::with(Setup { drop_access_errors, ..Setup::default() });
            peer.post_recv(1, 8);
            let right = peer.address;
            peer.address.source = Gid::from_ipv4([192, 0, 2, 99].into());
            peer.expect_dropped(peer.frame(request), Counter::RxWrongAddress);
            peer.address = right;
            if drop_access_errors {
                peer.expect_dropped(peer.frame(request), Counter::RxAccessErrors);
                peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"lawful").ack_req());
                peer.expect_ack(RQ, 1);
                assert_eq!(peer.expect_wc(1, WcStatus::Success).byte_len, 6);
                continue;
            }
            peer.inject(request.clone());
            peer.expect_nak(NAK_ACCESS, RQ, 0);
            peer.expect_state(QpState::Error);
            peer.expect_counted(Counter::RespRemoteAccessErrors, 1);
            match peer.context.poll_cq(peer.cq).unwrap().unwrap().status {
                // The SEND used its receive, which reports it.
                WcStatus::RemInvReqErr => peer.expect_no_event(),
                status => {
                    assert_eq!(status, WcStatus::WrFlushErr);
                    peer.expect_event(Event::QpAccessErr(peer.qp));
                }
            }
        }
    }
}

/// A dropped request changes nothing, including what is owed to the peer: here a NAK.
#[test]
fn dropped_bad_key_does_not_take_back_a_nak() {
    let mut peer = Peer::with(Setup { drop_access_errors: true, ..Setup::default() });
    let forged = packet(Opcode::RC_READ_REQUEST, RQ).reth(0, RKey::new(0xbad_0000), 8);
    let early = packet(Opcode::RC_SEND_ONLY, RQ + 1).ack_req();
    peer.inject_all([early.clone(), forged.clone()]);
    peer.expect_nak(NAK_SEQUENCE, RQ, 0);
    // Nor does it make the engine repeat it.
    for _ in 0..10 {
        peer.inject_all([forged.clone(), early.clone()]);
    }
    peer.expect_nothing();
    peer.expect_counted(Counter::RxAccessErrors, 11);
}

/// A peer that repeats the expected packet while there is no receive gets a few RNR NAKs, not one for each; a valid peer
/// gets all that it could receive.
#[test]
fn rnr_naks_are_limited_to_what_a_lawful_peer_can_hear() {
    let half = RnrTimer::new(14).unwrap().duration() / 2;
    let mut peer = Peer::with(Setup { min_rnr_timer: 14, ..Setup::default() });
    let first = packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req();
    let second = packet(Opcode::RC_SEND_ONLY, RQ + 1).payload(b"again").ack_req();
    let flood = |peer: &mut Peer, packet: &Script, psn| {
        for _ in 0..1000 {
            peer.inject(packet.clone());
        }
        // A packet is sent at most eight times without an answer: retry_count is 7.
        (0..8).for_each(|_| peer.expect_nak(NAK_RNR | 14, psn, psn - RQ));
        peer.expect_nothing();
        peer.expect_counted(Counter::NakSuppressed, 992);
        peer.expect_counted(Counter::SendRnrErr, 8);
    };
    flood(&mut peer, &first, RQ);
    // Nothing else is sent instead.
    peer.inject(second.clone());
    peer.expect_nothing();
    peer.advance(half - Duration::from_nanos(1));
    peer.inject(first.clone());
    peer.expect_nothing();
    peer.expect_counted(Counter::NakSuppressed, 1);
    // A peer that has received one retransmits after the whole timer, or not much earlier.
    peer.advance(Duration::from_nanos(1));
    flood(&mut peer, &first, RQ);
    // However many arrive at once, one NAK answers them.
    peer.advance(half);
    peer.inject_all(std::iter::repeat_n(first.clone(), 1000));
    peer.expect_nak(NAK_RNR | 14, RQ, 0);
    peer.expect_nothing();
    peer.expect_counted(Counter::SendRnrErr, 1);
    peer.expect_counted(Counter::NakSuppressed, 0);
    // A packet that finds its receive is accepted immediately, and the limit is reset for the next.
    peer.post_recv(1, 8);
    peer.inject(first);
    peer.expect_ack(RQ, 1);
    peer.expect_wc(1, WcStatus::Success);
    flood(&mut peer, &second, RQ + 1);
}

/// Any range, compared with the same sum in 128 bits.
#[test]
fn bounds_agree_with_wide_arithmetic() {
    let near = |centre: u64| (0..200u64).prop_map(move |by| centre.wrapping_add(by).wrapping_sub(100));
    let address = prop_oneof![near(0), near(u64::MAX), near(1 << 63), near(0x1000), any::<u64>()];
    let length = prop_oneof![6 => 0..100u32, 1 => (1u32 << 31) - 100..=1 << 31, 1 => 0..=1u32 << 31];
    let size = 1..200usize;
    // The same cases each time.
    let config = Config { cases: 2000, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let reached = AtomicUsize::new(0);
    // The range, from the start of the region or anywhere.
    let range = (prop::bool::weighted(0.8), 0..220u64, address.clone());
    let property = |(iova, (near, by, anywhere), length, size): (u64, (bool, u64, u64), u32, usize)| {
        let mut peer = Peer::with(Setup { drop_access_errors: true, ..Setup::default() });
        let memory = Memory::copy_of(&pattern(size)).unwrap();
        let fits = u128::from(iova) + size as u128 <= 1 << 64;
        let mr = match peer.context.register_at(peer.pd, memory, all_access(), iova) {
            Ok(mr) => mr,
            Err(_) => {
                prop_assert!(!fits);
                return Ok(());
            }
        };
        prop_assert!(fits);
        let va = if near { iova.wrapping_add(by).wrapping_sub(10) } else { anywhere };
        let start = u128::from(va);
        let inside = start >= u128::from(iova)
            && start + u128::from(length) <= u128::from(iova) + size as u128
            || length == 0;
        let key = peer.remote(mr).rkey;
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(va, key, length));
        let answer = peer.take_packets();
        prop_assert_eq!(!answer.is_empty(), inside);
        peer.expect_counted(Counter::RxAccessErrors, u64::from(!inside));
        if inside && length > 0 {
            reached.fetch_add(1, Ordering::Relaxed);
            let offset = (va - iova) as usize;
            prop_assert_eq!(payload(&answer), &pattern(size)[offset..offset + length as usize]);
        }
        let length = length.min(256);
        let inside = start >= u128::from(iova)
            && start + u128::from(length) <= u128::from(iova) + size as u128
            || length == 0;
        let psn = peer.query().rq_psn.value();
        let bytes = vec![0xee; length as usize];
        peer.inject(packet(Opcode::RC_WRITE_ONLY, psn).reth(va, key, length).payload(&bytes).ack_req());
        prop_assert_eq!(peer.take_packets().len(), usize::from(inside));
        let mut expected = pattern(size);
        if inside && length > 0 {
            let offset = (va - iova) as usize;
            expected[offset..offset + bytes.len()].copy_from_slice(&bytes);
        }
        prop_assert_eq!(peer.bytes(mr), expected);
        Ok(())
    };
    runner.run(&(address, range, length, size), property).unwrap();
    let reached = reached.into_inner();
    assert!(reached > 200, "only {reached} ranges were inside their region");
}

/// Every length, opcode and pad, with a correct ICRC: each frame is dropped or processed for one reason, which depends only
/// on the lengths.
#[test]
fn every_length_opcode_and_pad_has_one_fate() {
    let mut peer = Peer::new();
    let before = peer.query();
    for byte in 0..=255u8 {
        for (pad, length) in (0..4u8).flat_map(|pad| (0..=200).map(move |length| (pad, length))) {
            // Its PSN is old, so that no request is executed.
            let frame = peer.raw(byte, pad << 4, peer.qpn, length);
            let fate = match Opcode::from_byte(byte) {
                _ if length < 16 => Counter::RxLengthErrors,
                None => Counter::RxUnknownOpcode,
                Some(opcode) if length < 16 + opcode.extensions_len() + usize::from(pad) => {
                    Counter::RxLengthErrors
                }
                Some(Opcode::CNP) => Counter::RpCnpIgnored,
                // It was not negotiated.
                Some(Opcode::SELECTIVE_ACKNOWLEDGE) => Counter::RxUnknownOpcode,
                Some(opcode) if opcode.service() != Service::Rc => Counter::RxWrongService,
                Some(opcode) if !opcode.is_request() => Counter::StaleResponse,
                Some(_) => Counter::DuplicateRequest,
            };
            let counted = peer.context.counters().value(fate);
            peer.inject_frame(frame);
            let counts = peer.context.counters().value(fate) - counted;
            assert_eq!(counts, 1, "{}: opcode {byte:#04x}, pad {pad}, length {length}", fate.name());
        }
    }
    assert_eq!(peer.query(), before);
    let drops: u64 = [
        Counter::RxLengthErrors,
        Counter::RxUnknownOpcode,
        Counter::RpCnpIgnored,
        Counter::RxWrongService,
        Counter::StaleResponse,
        Counter::DuplicateRequest,
    ]
    .into_iter()
    .map(|counter| peer.context.counters().value(counter))
    .sum();
    assert_eq!(drops, 256 * 4 * 201, "no frame counts twice");
}

/// Memory of a work request is not returned before the work request is done, and the rest of a READ response is not sent
/// after deregistration. (A context has one owner, and a region is borrowed through it, so no second thread can race with
/// this: that does not compile.)
#[test]
fn memory_is_given_back_when_nobody_uses_it() {
    let mut peer = Peer::new();
    let (sent, received) = (peer.memory(&pattern(600)), peer.post_recv(2, 8));
    peer.post(1, SendOp::Write(REMOTE), &[sge(sent, 600)]);
    assert_eq!(peer.take_packets().len(), 3);
    for mr in [sent, received] {
        assert!(matches!(peer.context.deregister(mr), Err(ferroce::Error::Busy { kind: "MR", .. })));
    }
    // A retransmitted WRITE reads it again.
    peer.inject(nak(NAK_SEQUENCE, SQ + 1, 0));
    assert_eq!(payload(&peer.take_packets()), pattern(600)[256..]);
    peer.inject(ack(SQ + 2, 1));
    peer.expect_wc(1, WcStatus::Success);
    drop(peer.context.deregister(sent).unwrap());
    peer.inject(packet(Opcode::RC_SEND_ONLY, RQ).payload(b"hello").ack_req());
    peer.expect_ack(RQ, 1);
    peer.expect_wc(2, WcStatus::Success);
    drop(peer.context.deregister(received).unwrap());

    let mr = peer.memory(&pattern(1024));
    let key = peer.remote(mr).rkey;
    peer.take_at_most(2);
    peer.inject(packet(Opcode::RC_READ_REQUEST, RQ + 1).reth(0, key, 1024));
    assert_eq!(payload(&peer.take_packets()), pattern(1024)[..512]);
    let mut memory = peer.context.deregister(mr).unwrap();
    memory.bytes_mut().unwrap().fill(0xee);
    peer.take_at_most(usize::MAX);
    peer.expect_nak(NAK_ACCESS, RQ + 3, 2);
    peer.expect_event(Event::QpAccessErr(peer.qp));
    peer.expect_nothing();
}

/// The rights of the queue pair and of the memory are both needed.
#[test]
fn a_right_needs_the_queue_pair_and_the_memory() {
    let rights = [
        (Access::REMOTE_WRITE, Operation::Write),
        (Access::REMOTE_READ, Operation::ReadRequest),
        (Access::REMOTE_ATOMIC, Operation::FetchAdd),
    ];
    for (right, operation) in rights {
        for (of_qp, of_memory, own_pd) in
            [(true, true, true), (false, true, true), (true, false, true), (true, true, false)]
        {
            let all = Access::LOCAL_WRITE | right;
            let access = if of_qp { all } else { Access::LOCAL_WRITE };
            let mut peer = Peer::with(Setup { access, ..Setup::default() });
            let pd = if own_pd { peer.pd } else { peer.context.alloc_pd().unwrap() };
            let access = if of_memory { all } else { Access::LOCAL_WRITE };
            let mr = peer.context.register(pd, Memory::zeroed(8).unwrap(), access).unwrap();
            let key = peer.remote(mr).rkey;
            peer.inject(match operation {
                Operation::Write => {
                    packet(Opcode::RC_WRITE_ONLY, RQ).reth(0, key, 8).payload(&[1; 8]).ack_req()
                }
                Operation::ReadRequest => packet(Opcode::RC_READ_REQUEST, RQ).reth(0, key, 8),
                _ => packet(Opcode::RC_FETCH_ADD, RQ).atomic_eth(0, key, 1, 0),
            });
            let allowed = of_qp && of_memory && own_pd;
            assert_eq!(peer.take_packets().len(), 1);
            peer.expect_state(if allowed { QpState::Rts } else { QpState::Error });
            if !allowed {
                let qp = peer.qp;
                peer.expect_event(if of_qp { Event::QpAccessErr(qp) } else { Event::QpReqErr(qp) });
                assert_eq!(peer.bytes(mr), [0; 8]);
            }
        }
    }
}

/// Counts what is logged.
struct Logged(&'static AtomicUsize);

impl tracing::Subscriber for Logged {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        self.0.fetch_add(1, Ordering::Relaxed);
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

/// No packet writes to the log, so none can fill it: events are counted.
#[test]
fn packets_are_not_logged() {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    tracing::subscriber::with_default(Logged(&COUNT), || {
        let mut peer = Peer::new();
        for byte in 0..=255 {
            for length in [0, 15, 16, 60, 200] {
                peer.inject_frame(peer.raw(byte, 0, peer.qpn, length));
            }
        }
        peer.take_packets();
        peer.inject(packet(Opcode::RC_READ_REQUEST, RQ).reth(0, RKey::new(0xbad_0000), 8));
        peer.expect_nak(NAK_ACCESS, RQ, 0);
        peer.expect_event(Event::QpAccessErr(peer.qp));
    });
    assert_eq!(COUNT.load(Ordering::Relaxed), 0);
}
