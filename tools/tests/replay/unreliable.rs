//! Datagrams and UC messages, which are neither retransmitted nor reordered by the receiver: effects of the network on
//! them are violations of neither end.

use crate::wild::{Frames, transport};
use crate::{Scratch, fixtures, replay, text};

const UD_SEND_ONLY: u8 = 0x64;
const UC_SEND_ONLY: u8 = 0x24;
/// First, Middle, Middle, Last.
const UC_SEND: [u8; 4] = [0x20, 0x21, 0x21, 0x22];

const FOUR_COPIES: &str = ", 4 copies by the network";

/// The payload of the message with this number.
fn body(number: u32) -> Vec<u8> {
    (0..1024).map(|at| (at + 7 * number) as u8).collect()
}

fn datagram(psn: u32, number: u32) -> Vec<u8> {
    transport(UD_SEND_ONLY, 0x22, psn, &[&[0x11; 4][..], &[0, 0, 0, 0x11], &body(number)].concat())
}

/// Forty datagrams.
fn datagrams() -> Vec<Vec<u8>> {
    (0..40).map(|number| datagram((0xff_fff0 + number) & 0xff_ffff, number)).collect()
}

/// Ten messages of four packets, and ten of one.
fn messages() -> Vec<Vec<u8>> {
    let long =
        (0..40).map(|number| transport(UC_SEND[number as usize % 4], 0x22, 500 + number, &body(number)));
    let short = (40..50).map(|number| transport(UC_SEND_ONLY, 0x22, 500 + number, &body(number)));
    long.chain(short).collect()
}

/// Duplicates each packet of these numbers, `later` packets later.
fn copied(mut packets: Vec<Vec<u8>>, numbers: &[usize], later: usize) -> Vec<Vec<u8>> {
    for number in numbers.iter().rev() {
        let copy = packets[*number].clone();
        packets.insert(number + 1 + later, copy);
    }
    packets
}

/// Delays each packet of these numbers by `later` packets.
fn late(mut packets: Vec<Vec<u8>>, numbers: &[usize], later: usize) -> Vec<Vec<u8>> {
    for number in numbers.iter().rev() {
        let packet = packets.remove(*number);
        packets.insert(number + later, packet);
    }
    packets
}

fn said(purpose: &str, packets: Vec<Vec<u8>>) -> (Option<i32>, String) {
    let directory = Scratch::new(purpose);
    let file = directory.0.join("capture.pcap");
    let headers = Frames::read(&fixtures().join("rc_write.pcap")).expect("a pcap file");
    headers.talk(packets.into_iter().map(|packet| (false, packet))).write(&file);
    let output = replay(&file, &[]);
    (output.status.code(), text(&output))
}

#[test]
fn datagrams_come_twice_and_late_by_nobodys_fault() {
    let numbers = [3, 9, 10, 20];
    for (what, packets, copies) in [
        ("as sent", datagrams(), ""),
        ("copies", copied(datagrams(), &numbers, 0), FOUR_COPIES),
        ("late copies", copied(datagrams(), &numbers, 3), FOUR_COPIES),
        ("late", late(datagrams(), &numbers, 2), ""),
    ] {
        let (status, said) = said("datagrams", packets);
        assert_eq!(status, Some(0), "{what}:\n{said}");
        let counted = format!("10.77.0.11 as recorded: conforms; 40 requests, 0 responses{copies}\n");
        assert!(said.contains(&counted), "{what}:\n{said}");
        assert!(said.contains("40 posted, 0 compared"), "{what}:\n{said}");
        assert!(said.contains("0 posted, 40 compared in memory (40960 bytes)"), "{what}:\n{said}");
    }
}

/// Receivers ignore the PSN of a datagram: a sender may leave it constant.
#[test]
fn datagrams_of_one_psn_are_as_many() {
    let (status, said) = said("one-psn", (0..20).map(|number| datagram(7, number % 15)).collect());
    assert_eq!(status, Some(0), "{said}");
    assert!(said.contains("10.77.0.11 as recorded: conforms; 20 requests, 0 responses\n"), "{said}");
    assert!(said.contains("20 posted") && said.contains("20 compared in memory (20480 bytes)"), "{said}");
}

/// A UC receiver drops a message with missing PSNs, and accepts any packet that begins a message.
#[test]
fn duplicate_and_late_uc_messages_are_no_violation() {
    for (what, packets, copies, long, short) in [
        ("as sent", messages(), "", 10, 10),
        // The copies of a First and of an Only begin a message again.
        ("copies", copied(messages(), &[1, 8, 17, 44], 0), FOUR_COPIES, 8, 11),
        ("late copies", copied(messages(), &[2, 14, 18, 44], 3), FOUR_COPIES, 7, 11),
        ("late", late(messages(), &[1, 9, 17, 44], 1), "", 7, 10),
    ] {
        let (status, said) = said("uc", packets);
        assert_eq!(status, Some(0), "{what}:\n{said}");
        let counted = format!("10.77.0.11 as recorded: conforms; 50 requests, 0 responses{copies}\n");
        assert!(said.contains(&counted), "{what}:\n{said}");
        let taken = format!("{} compared in memory ({} bytes)", long + short, 4096 * long + 1024 * short);
        assert!(said.contains(&taken), "{what}, {taken}:\n{said}");
    }
}
