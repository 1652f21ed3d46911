//! What is sent again, and what it is counted as: a repeat of its sender, or a copy of the network.

use crate::wild::{Frames, reth, transport};
use crate::{Scratch, fixtures, replay, text};

const SEQUENCE_ERROR: u8 = 0x60;

/// A packet of a WRITE of 4 KiB, under a path MTU of 1024.
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

/// A conversation with these identifications by the number of the packet.
fn frames(talk: Vec<(bool, Vec<u8>)>, identification: impl Fn(usize) -> u16) -> Frames {
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

/// Linux gives packets of UDP sockets the identification 0, or 0, 1, 2 and so on in each burst: a repeat is the same to
/// the last bit.
#[test]
fn repeats_of_a_sender_that_does_not_number_are_no_copies() {
    let talk = || -> Vec<(bool, Vec<u8>)> {
        let all = (100..116).map(write);
        all.clone().chain([answer(100, SEQUENCE_ERROR, 0)]).chain(all).chain([answer(115, 0x1f, 4)]).collect()
    };
    for (what, burst) in [("single packets", 1), ("bursts of 4", 4), ("a burst of 16", 16)] {
        // The NAK is in the middle.
        let said = report("repeats", &frames(talk(), |number| ((number - number / 17) % burst) as u16));
        assert!(said.contains("32 requests, 0 responses, 16 repeated\n"), "{what}:\n{said}");
    }
    // A counter tells: the second ones of its packets were never sent.
    let copied = (100..116).map(write).chain((100..116).map(write));
    let copied = copied.chain([answer(115, 0x1f, 4)]).collect();
    let said = report("repeats", &frames(copied, |number| 500 + number as u16 % 16));
    assert!(said.contains("16 requests, 0 responses, 16 copies by the network\n"), "{said}");
}

/// Where a packet comes again right behind itself nobody can tell who made the second one.
#[test]
fn what_can_not_be_told_apart_is_said() {
    let talk = vec![write(100), write(101), write(101), write(102), write(103), answer(103, 0x1f, 1)];
    let said = report("twins", &frames(talk, |_| 0));
    assert!(
        said.contains("5 requests, 0 responses, 1 repeated, 1 of these may be copies by the network\n"),
        "{said}"
    );
}
