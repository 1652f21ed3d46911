//! Repeated packets, counted as retransmissions of their sender or as copies made by the network.

use crate::wild::{Frames, reth, transport};
use crate::{Scratch, fixtures, replay, text};

const SEQUENCE_ERROR: u8 = 0x60;

/// The packets of a conversation, from the BTH on; the flag marks those of the responder.
type Talk = Vec<(bool, Vec<u8>)>;

/// A packet of a WRITE of 4 KiB, with a path MTU of 1024.
fn write(psn: u32) -> (bool, Vec<u8>) {
    let kib = [psn as u8; 1024];
    let (opcode, front) = match psn % 4 {
        0 => (0x06, reth(0x1000, 7, 4096)),
        3 => (0x08, vec![]),
        _ => (0x07, vec![]),
    };
    let ack_req = u32::from(psn % 4 == 3) << 31;
    (false, transport(opcode, 0x22, ack_req | psn, &[&front[..], &kib].concat()))
}

fn answer(psn: u32, syndrome: u8, msn: u8) -> (bool, Vec<u8>) {
    (true, transport(0x11, 0x11, psn, &[syndrome, 0, 0, msn]))
}

/// A conversation with these identifications, by packet number.
fn frames(talk: Talk, identification: impl Fn(usize) -> u16) -> Frames {
    let headers = Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file");
    let mut frames = headers.talk(talk);
    frames.identify(identification);
    frames
}

/// The report of a capture in which no rule is broken.
fn report(purpose: &str, frames: &Frames) -> String {
    let directory = Scratch::new(purpose);
    let file = directory.0.join("recovery.pcap");
    frames.write(&file);
    let output = replay(&file, &[]);
    let said = text(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    said
}

/// Linux gives packets of UDP sockets the identification 0, or 0, 1, 2 and so on in each burst: a retransmission is
/// bit-identical.
#[test]
fn repeats_of_a_sender_that_does_not_number_are_no_copies() {
    let talk = || -> Talk {
        let all = (100..116).map(write);
        all.clone().chain([answer(100, SEQUENCE_ERROR, 0)]).chain(all).chain([answer(115, 0x1f, 4)]).collect()
    };
    for (what, burst) in [("single packets", 1), ("bursts of 4", 4), ("a burst of 16", 16)] {
        // The NAK is in the middle.
        let said = report("repeats", &frames(talk(), |number| ((number - number / 17) % burst) as u16));
        assert!(said.contains("32 requests, 0 responses, 16 repeated\n"), "{what}:\n{said}");
    }
    // With a counter, the second ones were never sent by the host.
    let copied = (100..116).map(write).chain((100..116).map(write));
    let copied = copied.chain([answer(115, 0x1f, 4)]).collect();
    let said = report("repeats", &frames(copied, |number| 500 + number as u16 % 16));
    assert!(said.contains("16 requests, 0 responses, 16 copies by the network\n"), "{said}");
}

/// If a packet is repeated directly after itself, the origin of the second one is unknown.
#[test]
fn indistinguishable_repeats_are_reported() {
    let talk = vec![write(100), write(101), write(101), write(102), write(103), answer(103, 0x1f, 1)];
    let said = report("twins", &frames(talk, |_| 0));
    assert!(
        said.contains("5 requests, 0 responses, 1 repeated, 1 of these may be copies by the network\n"),
        "{said}"
    );
}

/// The restart is the first retransmitted request after a NAK. Packets in flight, possibly of an earlier restart, do
/// not count, nor do packets that were lost before the recording point.
#[test]
fn a_restart_is_distinguished_from_packets_in_flight() {
    let nak = |psn| answer(psn, SEQUENCE_ERROR, 0);
    let some = |psns: std::ops::Range<u32>| psns.map(write);
    let ack = || [answer(111, 0x1f, 3)];
    // 10 us between packets.
    let cases: [(&str, Talk, [&str; 2]); 3] = [
        (
            "lost behind the recorder",
            some(100..106)
                .chain([nak(102)])
                .chain(some(106..108))
                .chain(some(102..112))
                .chain(ack())
                .collect(),
            ["1 of 1 times", "1 times, least 30.0 us"],
        ),
        (
            "lost before it",
            some(100..102)
                .chain(some(103..106))
                .chain([nak(102)])
                .chain(some(106..108))
                .chain(some(102..112))
                .chain(ack())
                .collect(),
            ["1 of 1 times", "1 times, least 30.0 us"],
        ),
        (
            "another NAK while it repeats",
            some(100..108)
                .chain([nak(102)])
                .chain(some(102..104))
                .chain([nak(103)])
                .chain(some(104..108))
                .chain(some(103..112))
                .chain(ack())
                .collect(),
            ["2 of 2 times", "2 times, least 10.0 us, p50 50.0"],
        ),
    ];
    for (what, talk, measured) in cases {
        for counts in [true, false] {
            let said = report(
                "restart",
                &frames(talk.clone(), |number| if counts { 500 + number as u16 } else { 0 }),
            );
            let [times, reaction] = measured;
            assert!(said.contains(&format!("go-back-N: {times} from the PSN of the NAK")), "{what}:\n{said}");
            assert!(said.contains(&format!("from NAK to repeat: {reaction}")), "{what}:\n{said}");
        }
    }
    // From PSN 104 on: the identifications show whether 102 and 103 were sent before.
    let late = || -> Talk {
        some(100..108).chain([nak(102)]).chain(some(104..108)).chain(some(102..112)).chain(ack()).collect()
    };
    let known =
        ["0 of 1 times from the PSN of the NAK", "1 times from a PSN that may not have been recorded"];
    for (what, lost, counts, measured) in [
        ("they did not", 0, true, known[0]),
        ("they may have", 2, true, known[1]),
        ("nobody knows", 0, false, known[1]),
    ] {
        let identification = |number: usize| match counts {
            true => 500 + number as u16 + if number > 8 { lost } else { 0 },
            false => 0,
        };
        let said = report("restart", &frames(late(), identification));
        assert!(said.contains(&format!("go-back-N: {measured}\n")), "{what}:\n{said}");
    }
}

/// A repeated response has the current MSN, which counts messages that are only partly known.
#[test]
fn an_answer_that_comes_again_counts_what_was_not_recorded() {
    let capture = fixtures().join("impaired/loss_verbs_8_behind.pcap");
    // The first packet of a SEND is missing, and an earlier READ is answered again, with MSN 6.
    let frames = Frames::read(&capture).expect("a pcap file").without(95);
    report("again", &frames);
}

/// A resumed READ in a capture that begins after its first request: the capture has responses to the first request, and
/// then those to the rest.
#[test]
fn a_read_from_before_the_capture_is_answered_in_its_own_shape() {
    let read = |psn: u32, va: u64| (false, transport(0x0c, 0x22, 1 << 31 | psn, &reth(va, 7, 4096)));
    let responses = |psns: std::ops::Range<u32>, opcodes: [u8; 4]| -> Talk {
        let response = |(psn, opcode): (u32, u8)| {
            let aeth: &[u8] = if opcode == 0x0e { &[] } else { &[0x1f, 0, 0, 30] };
            (true, transport(opcode, 0x11, psn, &[aeth, &[psn as u8; 1024]].concat()))
        };
        psns.zip(opcodes).map(response).collect()
    };
    let (whole, rest) = ([0x0d, 0x0e, 0x0e, 0x0f], [0x0e, 0x0e, 0x0e, 0x0f]);
    let talk = [read(104, 0x2000), read(108, 0x3000)]
        .into_iter()
        .chain(responses(104..108, rest))
        .chain(responses(104..108, whole))
        .chain(responses(108..112, whole))
        .collect();
    let said = report("before", &frames(talk, |_| 0));
    assert!(!said.contains("LocQpOpErr") && said.contains("1 posted, 1 compared"), "{said}");
}
