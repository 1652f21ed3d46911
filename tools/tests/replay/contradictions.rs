//! A responder that contradicts itself, in a capture that has each request once and in order.

use crate::wild::{Frames, reth, transport};
use crate::{Scratch, fixtures, replay, text};

const ACK: u8 = 0x1f;
const SEQUENCE_ERROR: u8 = 0x60;
const REMOTE_ACCESS: u8 = 0x62;
const RNR: u8 = 0x2e;

type Talk = Vec<(bool, Vec<u8>)>;

fn writes(psns: std::ops::Range<u32>) -> Talk {
    let write = |psn: u32| transport(0x0a, 0x22, 1 << 31 | psn, &[reth(0x1000, 7, 8), vec![5; 8]].concat());
    psns.map(|psn| (false, write(psn))).collect()
}

fn answer(psn: u32, syndrome: u8, msn: u8) -> Talk {
    vec![(true, transport(0x11, 0x11, psn, &[syndrome, 0, 0, msn]))]
}

fn replayed(purpose: &str, talk: Talk) -> (Option<i32>, String) {
    let headers = Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file");
    let directory = Scratch::new(purpose);
    let file = directory.0.join("contradictions.pcap");
    headers.talk(talk).write(&file);
    let output = replay(&file, &[]);
    (output.status.code(), text(&output))
}

/// Each case has a contradiction, the rule that it breaks unless packets were in flight when the capture began, and a
/// lawful variant. A NAK other than sequence error or RNR is final, whatever was in flight.
#[test]
fn contradictions_are_found() {
    // From the middle of a connection, as its MSNs show, unless they begin with 1.
    let cases: [(&str, Talk, &str, Talk); 5] = [
        (
            "an MSN that goes back",
            [writes(100..110), answer(101, ACK, 52), answer(105, ACK, 62), answer(107, ACK, 58)].concat(),
            "lawful msn",
            [writes(100..110), answer(101, ACK, 52), answer(105, ACK, 62), answer(102, ACK, 58)].concat(),
        ),
        (
            "a NAK for what is still to be sent",
            [writes(100..110), answer(200, SEQUENCE_ERROR, 9), writes(110..114), answer(113, ACK, 14)]
                .concat(),
            "lawful nak-psn",
            [writes(100..110), answer(112, SEQUENCE_ERROR, 9), writes(110..114), answer(109, ACK, 14)]
                .concat(),
        ),
        (
            "a NAK, and nothing comes again",
            [writes(100..110), answer(104, SEQUENCE_ERROR, 4), writes(110..112), answer(111, ACK, 12)]
                .concat(),
            "lawful nak-psn",
            [writes(100..110), answer(104, SEQUENCE_ERROR, 4), writes(104..112), answer(111, ACK, 12)]
                .concat(),
        ),
        (
            "an RNR NAK, and nothing comes again",
            [writes(100..110), answer(104, RNR, 4), writes(110..112), answer(111, ACK, 12)].concat(),
            "lawful nak-psn",
            [writes(100..110), answer(104, RNR, 4), answer(103, ACK, 4)].concat(),
        ),
        (
            "a refusal, and on as before",
            [writes(100..110), answer(104, REMOTE_ACCESS, 4), answer(109, ACK, 10)].concat(),
            "VIOLATION ack-psn",
            [writes(100..110), answer(104, REMOTE_ACCESS, 4), answer(103, ACK, 4)].concat(),
        ),
    ];
    for (what, broken, rule, lawful) in cases {
        let (status, said) = replayed("contradictions", broken);
        assert!(said.contains(rule), "{what}, {rule}:\n{said}");
        assert_eq!(status, Some(i32::from(rule.starts_with("VIOLATION"))), "{what}:\n{said}");
        let (_, said) = replayed("contradictions", lawful);
        assert!(
            !said.contains("can account for it") && !said.contains("as recorded: VIOLATES"),
            "{what}:\n{said}"
        );
    }
}

/// After a whole window, no packet from before the capture is in flight.
#[test]
fn contradictions_after_a_window_are_violations() {
    let end = 66_000;
    let (status, said) = replayed(
        "far",
        [writes(0..end), answer(end - 5, SEQUENCE_ERROR, 4), writes(end..end + 4), answer(end + 3, ACK, 12)]
            .concat(),
    );
    assert_eq!(status, Some(1), "{said}");
    assert!(said.contains("VIOLATION nak-psn") && !said.contains("can account for it"), "{said}");
}

/// A NAK, like an ACK, names a PSN that was sent: no window is this large.
#[test]
fn a_nak_for_what_was_never_sent_is_found() {
    for (syndrome, rule) in [(SEQUENCE_ERROR, "nak-psn"), (RNR, "nak-psn"), (ACK, "ack-psn")] {
        let (status, said) = replayed(
            "never",
            [writes(100..104), answer(103, ACK, 4), answer(0x10_0000, syndrome, 4)].concat(),
        );
        assert_eq!(status, Some(1), "{syndrome:#x}:\n{said}");
        assert!(said.contains(&format!("VIOLATION {rule}")), "{syndrome:#x}:\n{said}");
    }
}

/// Address and key are checked with each packet: the engine refuses the first one, which counts as the same refusal.
#[test]
fn a_message_may_be_refused_at_any_packet() {
    let kib = [7; 1024];
    let first = transport(0x06, 0x22, 100, &[&reth(0x1000, 7, 2048)[..], &kib].concat());
    let last = transport(0x08, 0x22, 1 << 31 | 101, &kib);
    let talk = [vec![(false, first), (false, last)], answer(101, REMOTE_ACCESS, 0)].concat();
    let (status, said) = replayed("refusal", talk);
    assert_eq!(status, Some(0), "{said}");
    assert!(
        said.contains("lawful refusal at frame 3: NAK remote access error for PSN 0x000065, here for"),
        "{said}"
    );
}
