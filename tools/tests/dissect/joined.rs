//! Frames that were captured before segmentation (UDP segmentation offload).

use std::process::Command;

use ferroce::wire::{Aeth, Bth, Opcode, OwnedPacket, PathAddress, Reth, Syndrome};
use ferroce::{Psn, Qpn, RKey};
use serde_json::Value;

use super::{ETHERNET, TempFile, ferroce, json, path};

/// Packets as a kernel sends them after segmenting one datagram: identifications 0, 1, 2, …
fn packets(addresses: [&str; 2], lengths: &[usize]) -> Vec<Vec<u8>> {
    let packet = |(index, length): (usize, &usize)| {
        let path = path(addresses, index as u16);
        let opcode = if *length < 1024 { Opcode::RC_WRITE_LAST } else { Opcode::RC_WRITE_MIDDLE };
        let mut packet = OwnedPacket::new(&path, opcode, Qpn::new(0x12), Psn::new(7 + index as u32));
        packet.set_payload((0..*length).map(|at| (at * 7 + index) as u8).collect());
        packet.emit()
    };
    lengths.iter().enumerate().map(packet).collect()
}

/// One frame that contains these packets.
fn joined(packets: &[Vec<u8>]) -> Vec<u8> {
    let is_ipv4 = packets[0][12..14] == [8, 0];
    let bth = 14 + if is_ipv4 { 20 } else { 40 } + 8;
    let mut frame = packets[0].clone();
    for packet in &packets[1..] {
        frame.extend(&packet[bth..]);
    }
    let mut put =
        |at: usize, length: usize| frame[at..at + 2].copy_from_slice(&(length as u16).to_be_bytes());
    let length = packets.iter().map(|packet| packet.len() - bth).sum::<usize>() + 8;
    put(bth - 4, length);
    if is_ipv4 {
        put(16, length + 20)
    } else {
        put(18, length)
    }
    frame
}

/// The fields of each packet except those of its frame.
fn told(mut packets: Vec<Value>) -> Vec<Value> {
    for packet in &mut packets {
        let packet = packet.as_object_mut().unwrap();
        for of_the_frame in ["frame", "timestamp", "captured_len", "original_len", "udp_checksum"] {
            packet.remove(of_the_frame);
        }
    }
    packets
}

#[test]
fn a_frame_with_several_packets_is_cut_apart() {
    let lengths: [&[usize]; 4] =
        [&[1024, 1024, 1024, 1024, 20], &[1024, 1024], &[8; 40], &[1024, 1024, 1024, 0]];
    for addresses in [["10.0.0.1", "10.0.0.2"], ["fd00::1", "fd00::2"]] {
        for lengths in lengths {
            let packets = packets(addresses, lengths);
            let apart = TempFile::pcap(ETHERNET, &packets);
            // A single packet comes before and after it.
            let together =
                TempFile::pcap(ETHERNET, &[packets[0].clone(), joined(&packets), packets[0].clone()]);
            let (expected, summary, status) = json(&apart.0);
            assert_eq!((expected.len(), status), (lengths.len(), 0));
            assert_eq!(summary.get("joined_frames"), None);
            let (mut found, summary, status) = json(&together.0);
            assert_eq!(status, 0, "{summary}");
            assert_eq!((&summary["frames"], &summary["joined_frames"]), (&3.into(), &1.into()));
            let numbers: Vec<u64> = found.iter().map(|packet| packet["frame"].as_u64().unwrap()).collect();
            assert_eq!((numbers[0], numbers[1], numbers[lengths.len() + 1]), (1, 2, 3));
            (_, _) = (found.pop(), found.remove(0));
            assert_eq!(told(found), told(expected));
            let text = String::from_utf8(ferroce(&[], &together.0).stdout).unwrap();
            assert!(text.contains("1 frames with several packets each"), "{text}");
        }
    }
}

#[test]
fn one_damaged_packet_in_a_frame_is_the_only_bad_one() {
    let mut packets = packets(["10.0.0.1", "10.0.0.2"], &[1024, 1024, 1024, 1024]);
    packets[2][300] ^= 1;
    let file = TempFile::pcap(ETHERNET, &[joined(&packets)]);
    let (found, summary, status) = json(&file.0);
    assert_eq!((status, &summary["icrc_bad"], &summary["icrc_ok"]), (1, &1.into(), &3.into()));
    assert_eq!(found[2]["icrc"], "bad");
    // A truncated frame can't be recognized.
    let cut = TempFile::cut(ETHERNET, &[joined(&packets)], 3000);
    let (found, summary, _) = json(&cut.0);
    assert_eq!((found.len(), &summary["icrc_truncated"]), (1, &1.into()));
}

/// In truncated frames the start of the second packet is unknown: they are not malformed packets, and no gap follows
/// them. A gap after a complete frame is reported as usual.
#[test]
fn truncated_frames_are_reported_without_gaps() {
    let all = packets(["10.0.0.1", "10.0.0.2"], &[1024; 12]);
    let frames = [joined(&all[..4]), joined(&all[4..8]), all[8].clone(), all[11].clone()];
    let file = TempFile::cut(ETHERNET, &frames, 96);
    let (found, summary, status) = json(&file.0);
    assert_eq!((found.len(), status), (4, 0), "{summary}");
    let counts = ["joined_frames_cut", "icrc_truncated", "malformed"].map(|name| summary[name].clone());
    assert_eq!(counts, [2, 4, 0].map(Value::from), "{summary}");
    let several: Vec<_> = found.iter().map(|packet| packet["first_of_several"] == true).collect();
    assert_eq!(several, [true, true, false, false]);
    let requests = &summary["flows"][0]["requests"];
    assert_eq!((&requests["gaps"], &requests["missing"]), (&1.into(), &2.into()), "{summary}");
}

/// A frame that looks like a packet at every position takes little time, and remains one packet.
#[test]
fn apparent_packets_are_one_damaged_packet() {
    let mut frame = joined(&packets(["10.0.0.1", "10.0.0.2"], &[1024; 60]));
    for at in 54..frame.len() {
        frame[at] = [0x04, 0x00, 0xff, 0xff][(at - 42) % 4];
    }
    frame[42..46].copy_from_slice(&[0x04, 0x00, 0xff, 0xff]);
    let file = TempFile::pcap(ETHERNET, &vec![frame; 20]);
    let (found, summary, status) = json(&file.0);
    assert_eq!((found.len(), status, &summary["icrc_bad"]), (20, 1, &20.into()));
}

/// A WRITE whose packets except the first are in one frame, and its acknowledge: `replay` finds all packets.
#[test]
fn a_replay_judges_the_packets_of_a_frame() {
    let packets = packets(["10.0.0.1", "10.0.0.2"], &[1024, 1024, 1024, 20]);
    let mut first = OwnedPacket::parse(&packets[0]).unwrap();
    first.opcode = Opcode::RC_WRITE_FIRST;
    first.bth = Bth::new(first.opcode, Qpn::new(0x12), Psn::new(6));
    first.extensions.reth = Some(Reth::new(0x10_0000, RKey::new(0x77), 4 * 1024 + 20));
    let path = first.path();
    let mut ack = OwnedPacket::new(
        &PathAddress { source: path.destination, destination: path.source, ..path },
        Opcode::RC_ACKNOWLEDGE,
        Qpn::new(0x34),
        Psn::new(10),
    );
    ack.extensions.aeth = Some(Aeth::new(Syndrome::Ack { credit_code: 31 }, 1));
    let replay = |joined: Vec<u8>| {
        let file = TempFile::pcap(ETHERNET, &[first.emit(), joined, ack.emit()]);
        let mut command = Command::new(env!("CARGO_BIN_EXE_ferroce"));
        let output = command.args(["replay", "--json"]).arg(&file.0).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((&report["frames"], &report["joined_frames"]), (&3.into(), &1.into()), "{report}");
        (output.status.code(), report)
    };
    let (status, report) = replay(joined(&packets));
    assert_eq!((status, &report["packets"], &report["judged"]), (Some(0), &6.into(), &6.into()), "{report}");
    // The acknowledged packet is missing.
    let (status, report) = replay(joined(&packets[..3]));
    assert_eq!((status, &report["packets"], &report["judged"]), (Some(0), &5.into(), &4.into()), "{report}");
}

/// The longest IPv6 datagram, in which another packet seems to follow at a position beyond IPv4's greatest length.
#[test]
fn the_longest_datagram_is_one_damaged_packet() {
    let mut frame = packets(["fd00::1", "fd00::2"], &[1024])[0].clone();
    let bth = 14 + 40 + 8;
    frame.resize(bth + 65_524, 0);
    for at in [18, bth - 4] {
        frame[at..at + 2].copy_from_slice(&65_532u16.to_be_bytes());
    }
    frame[bth + 65_488..][..4].copy_from_slice(&[0x04, 0x00, 0xff, 0xff]);
    let file = TempFile::pcap(ETHERNET, &[frame]);
    let (found, summary, status) = json(&file.0);
    assert_eq!((found.len(), status, &summary["icrc_bad"]), (1, 1, &1.into()), "{summary}");
}
