//! Section H, first part: go-back-N as seen by a switch between two RNICs (after Lumina's checks), in virtual time.

use std::sync::atomic::Ordering;
use std::time::Duration;

use ferroce::WcStatus::Success;
use ferroce::wire::{Opcode, Operation};
use ferroce::{Nanos, PathMtu, RemoteAddress, SendOp};
use ferroce_driver_test_support::random::Random;

use crate::packet::NAK_SEQUENCE;
use crate::pair::{Pair, Setup};
use crate::peer::pattern;
use crate::switch::{Log, REQUESTER, RESPONDER, Seen, distance, link, remote, run, take_completions};

/// Go-back-N of a responder.
#[test]
fn case_120_gbn_check() {
    const DELAY: Duration = Duration::from_micros(3);
    let setup = Setup { path_mtu: PathMtu::Mtu256, ..Setup::default() };
    let mut pair = Pair::new(1, link(DELAY), setup);
    let mut dice = Random::new(120);
    let log = Log::of(&pair, move |_, _| dice.below(50) == 0);
    // No more in flight than the port delivers in one poll.
    run(&mut pair, 6000, |[a, b], n| {
        let to = remote(b);
        let length = 1 + (n * 379 % 2048) as u32;
        match n % 3 {
            0 => {
                b.post_recv(n, 0, 4096);
                a.post_send(n, SendOp::Send, 0, length);
            }
            _ => a.post_send(n, SendOp::Write(to), 0, length),
        }
    });

    // In the order of the responder's view: arrivals at a time are before departures at the same time.
    let mut seen = log.take();
    let time = |seen: &Seen| match seen.from {
        REQUESTER => (seen.got.at + DELAY, 0),
        _ => (seen.got.at, 1),
    };
    seen.sort_by_key(time);
    let mut expected = setup.start_psn[REQUESTER].value();
    let (mut gap, mut nak_in_flight, mut last_ack) = (false, false, None);
    let (mut naks, mut acks) = (0, 0);
    for Seen { from, lost, got } in &seen {
        if *from == REQUESTER {
            if *lost {
                continue;
            }
            match distance(got.psn(), expected) {
                0 => {
                    expected = (expected + 1) & 0xff_ffff;
                    (gap, nak_in_flight) = (false, false);
                }
                ahead if ahead > 0 => gap = true,
                _ => {}
            }
            continue;
        }
        let acknowledged = match got.extensions.aeth.unwrap().syndrome_byte() {
            NAK_SEQUENCE => {
                naks += 1;
                assert!(gap, "nothing is missing: {got}");
                assert!(!nak_in_flight, "asked for already: {got}");
                assert_eq!(got.psn(), expected, "the first lost PSN");
                nak_in_flight = true;
                (got.psn().wrapping_sub(1)) & 0xff_ffff
            }
            _ => {
                acks += 1;
                assert_eq!(got.psn(), expected.wrapping_sub(1) & 0xff_ffff, "the last executed: {got}");
                got.psn()
            }
        };
        let regressed = last_ack.is_some_and(|last| distance(acknowledged, last) < 0);
        assert!(!regressed, "{last_ack:x?}, then {got}");
        last_ack = Some(acknowledged);
    }
    println!("case 120: {acks} ACKs and {naks} NAKs of {} packets", seen.len());
    assert!(naks > 200 && acks > 500, "{naks} NAKs, {acks} ACKs");
}

/// A READ whose response loses packets: it is requested again from the first missing one, and answered from there.
#[test]
fn case_121_read_gbn_check() {
    const DELAY: Duration = Duration::from_micros(3);
    let setup = Setup { path_mtu: PathMtu::Mtu256, ..Setup::default() };
    let mut pair = Pair::new(1, link(DELAY), setup);
    let data = pattern(10_000);
    let responder = &mut pair.ends[RESPONDER];
    responder.context.bytes_mut(responder.mr).unwrap()[..10_000].copy_from_slice(&data);
    let mut dice = Random::new(121);
    let log = Log::of(&pair, move |_, _| dice.below(40) == 0);
    let (mut resumed, mut lost) = (0, 0);
    for n in 0..300 {
        let length = 2000 + (n * 37 % 8000) as u32;
        let [a, b] = &mut pair.ends;
        a.context.bytes_mut(a.mr).unwrap().fill(0);
        let from = remote(b);
        a.post_send(n, SendOp::Read(from), 0, length);
        let mut completed = 0;
        while completed == 0 {
            assert!(pair.step(), "stuck in READ {n}");
            completed = take_completions(&mut pair.ends[REQUESTER]);
        }
        while pair.step() {}
        let a = &pair.ends[REQUESTER];
        assert_eq!(a.context.bytes(a.mr).unwrap()[..length as usize], data[..length as usize]);

        let mut seen = log.take();
        // In the order of the requester's view.
        seen.sort_by_key(|seen| match seen.from {
            RESPONDER => (seen.got.at + DELAY, 0),
            _ => (seen.got.at, 1),
        });
        let first = seen[0].got.psn();
        let mut missing = first;
        for Seen { from, lost: is_lost, got } in &seen {
            lost += u32::from(*is_lost);
            if *from == RESPONDER {
                if !is_lost && got.psn() == missing {
                    missing = (missing + 1) & 0xff_ffff;
                }
                continue;
            }
            assert_eq!((got.opcode, got.psn()), (Opcode::RC_READ_REQUEST, missing), "the first missing PSN");
            let skipped = distance(missing, first) as u32 * 256;
            let reth = got.extensions.reth.unwrap();
            assert_eq!((reth.va(), reth.length()), (from_address(from_of(&pair), skipped), length - skipped));
            resumed += u32::from(skipped > 0);
        }
        // In the order of the responder's view: after a request the response starts at its PSN, with First or Only, and
        // continues without a gap.
        seen.sort_by_key(|seen| match seen.from {
            REQUESTER => (seen.got.at + DELAY, 0),
            _ => (seen.got.at, 1),
        });
        let mut next = None;
        for Seen { from, lost, got } in &seen {
            if *from == REQUESTER {
                next = if *lost { next } else { Some((got.psn(), true)) };
                continue;
            }
            let (psn, begins) = next.unwrap();
            assert_eq!(got.psn(), psn, "{got}");
            let is_first =
                [Opcode::RC_READ_RESPONSE_FIRST, Opcode::RC_READ_RESPONSE_ONLY].contains(&got.opcode);
            assert_eq!(is_first, begins, "{got}");
            next = Some(((psn + 1) & 0xff_ffff, false));
        }
    }
    println!("case 121: {lost} packets lost, {resumed} READs resumed");
    assert!(resumed > 100, "{resumed}");

    fn from_of(pair: &Pair) -> RemoteAddress {
        remote(&pair.ends[RESPONDER])
    }

    fn from_address(from: RemoteAddress, skipped: u32) -> u64 {
        from.addr + u64::from(skipped)
    }
}

/// The time from the packet that reveals a gap to the NAK, and from the NAK to the first retransmitted packet. Both ends
/// are polled at random, 0.1 to 2 µs apart, and each answers in the poll that finds the cause: no latency exceeds the time
/// between two polls.
#[test]
fn case_122_nak_latencies() {
    const DELAY: Duration = Duration::from_nanos(5_300);
    const LONGEST_PAUSE: u64 = 2000;
    const MESSAGES: u64 = 100_000;
    let mut pair = Pair::new(1, link(DELAY), Setup::default());
    // One packet in thirty is lost, at its first transmission.
    let mut newest = None;
    let mut dice = Random::new(122);
    let log = Log::of(&pair, move |from, got| {
        let is_new = from == REQUESTER && newest.is_none_or(|newest| distance(got.psn(), newest) > 0);
        if is_new {
            newest = Some(got.psn());
        }
        is_new && dice.below(30) == 0
    });
    let to = remote(&pair.ends[RESPONDER]);
    let mut dice = Random::new(1220);
    let mut due = [pair.now, pair.now];
    let (mut posted, mut completed) = (0, 0);
    while completed < MESSAGES {
        let end = usize::from(due[1] < due[0]);
        let now = due[end];
        let requester = &mut pair.ends[REQUESTER];
        while posted < MESSAGES && posted < completed + 8 {
            requester.post_send(posted, SendOp::Write(to), 0, 8);
            posted += 1;
        }
        pair.clock.store(now.0, Ordering::Relaxed);
        pair.ends[end].context.poll(now).unwrap();
        completed += take_completions(&mut pair.ends[REQUESTER]);
        due[end] = now + Duration::from_nanos(100 + dice.below(LONGEST_PAUSE - 99));
        assert!(now.0 < 1 << 40, "{completed} completed");
    }

    /// A loss, when the responder detected it, and when the requester received its NAK.
    struct Loss {
        psn: u32,
        shows: Option<Nanos>,
        nak: Option<Nanos>,
    }
    let (mut losses, mut generation, mut reaction) = (0, Vec::new(), Vec::new());
    let (mut missing, mut oldest) = (Vec::new(), None::<Loss>);
    for Seen { from, lost, got } in log.take() {
        if lost {
            losses += 1;
            // A later one is detected only after the earlier one was repaired.
            if missing.is_empty() {
                oldest = Some(Loss { psn: got.psn(), shows: None, nak: None });
            }
            missing.push(got.psn());
            continue;
        }
        missing.retain(|psn| from == RESPONDER || *psn != got.psn());
        let Some(loss) = &mut oldest else { continue };
        if from == RESPONDER {
            if got.psn() == loss.psn && got.extensions.aeth.unwrap().syndrome_byte() == NAK_SEQUENCE {
                assert!(loss.nak.is_none(), "a second NAK");
                generation.push(got.at.since(loss.shows.unwrap()).as_nanos() as u64);
                loss.nak = Some(got.at + DELAY);
            }
        } else if got.psn() == loss.psn {
            let nak = loss.nak.unwrap();
            assert!(got.at >= nak, "sent again before the NAK came");
            reaction.push(got.at.since(nak).as_nanos() as u64);
            oldest = None;
        } else if loss.shows.is_none() && distance(got.psn(), loss.psn) > 0 {
            loss.shows = Some(got.at + DELAY);
        }
    }
    println!("case 122: {losses} losses, {} of them measured", reaction.len());
    assert!(reaction.len() > 2000, "{}", reaction.len());
    for (name, mut latencies) in [("NAK generation", generation), ("reaction to a NAK", reaction)] {
        latencies.sort_unstable();
        let at = |percent: usize| latencies[(latencies.len() - 1) * percent / 100];
        println!("case 122: {name}: p50 {} ns, p99 {} ns, at most {} ns", at(50), at(99), at(100));
        assert!(at(99) <= LONGEST_PAUSE && at(100) <= LONGEST_PAUSE, "{name}");
        assert!(at(50) > 0, "{name}: polls that come just in time measure nothing");
    }
}

/// Each kind of loss in a message of eight packets, and the loss of retransmissions.
#[test]
fn case_123_single_losses() {
    // Which packets of the message are lost, and how often.
    let losses: [(&str, &[(u32, u32)]); 9] = [
        ("first", &[(0, 1)]),
        ("middle", &[(3, 1)]),
        ("last", &[(7, 1)]),
        ("two in a row", &[(3, 1), (4, 1)]),
        ("the resend itself", &[(3, 2)]),
        ("the resend of the resend", &[(3, 3)]),
        ("the resend of the last", &[(7, 2)]),
        ("first and last", &[(0, 1), (7, 1)]),
        ("all of them", &[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1)]),
    ];
    let data = pattern(8 * 256);
    for operation in [Operation::Send, Operation::Write, Operation::ReadRequest] {
        for (name, losses) in losses {
            let setup = Setup { path_mtu: PathMtu::Mtu256, ..Setup::default() };
            let mut pair = Pair::new(1, link(Duration::from_micros(3)), setup);
            let first = setup.start_psn[REQUESTER].value();
            let carries = if operation == Operation::ReadRequest { RESPONDER } else { REQUESTER };
            let mut left = losses.to_vec();
            let log = Log::of(&pair, move |from, got| {
                let place = (got.psn() - first) & 0xff_ffff;
                let loss = left.iter_mut().find(|(lost, times)| *lost == place && *times > 0);
                match loss {
                    Some((_, times)) if from == carries && !got.payload.is_empty() => {
                        *times -= 1;
                        true
                    }
                    _ => false,
                }
            });
            let [a, b] = &mut pair.ends;
            let to = remote(b);
            let source = if carries == REQUESTER { &mut *a } else { &mut *b };
            source.context.bytes_mut(source.mr).unwrap()[..data.len()].copy_from_slice(&data);
            match operation {
                Operation::Send => {
                    b.post_recv(9, 0, 4096);
                    a.post_send(1, SendOp::Send, 0, data.len() as u32);
                }
                Operation::Write => a.post_send(1, SendOp::Write(to), 0, data.len() as u32),
                _ => a.post_send(1, SendOp::Read(to), 0, data.len() as u32),
            }
            // And one after it.
            a.post_send(2, SendOp::Write(RemoteAddress { addr: to.addr + 65536, ..to }), 0, 8);
            while pair.step() {}
            let what = format!("{operation:?}, {name}");
            let end = &mut pair.ends[REQUESTER];
            for wr_id in [1, 2] {
                let wc = end.context.poll_cq(end.cq).unwrap();
                assert_eq!(wc.map(|wc| (wc.wr_id, wc.status)), Some((wr_id, Success)), "{what}");
            }
            assert_eq!(end.context.poll_cq(end.cq).unwrap(), None, "{what}");
            let received = take_completions(&mut pair.ends[RESPONDER]);
            assert_eq!(received, u64::from(operation == Operation::Send), "{what}");
            let target = &pair.ends[1 - carries];
            assert_eq!(target.context.bytes(target.mr).unwrap()[..data.len()], data, "{what}");
            let wanted: u32 = losses.iter().map(|(_, times)| times).sum();
            let lost = log.take().iter().filter(|seen| seen.lost).count();
            assert_eq!(lost as u32, wanted, "{what}: packets lost");
        }
    }
}
