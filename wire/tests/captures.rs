//! Every recorded packet of rdma_rxe is parsed, and is emitted again bit for bit.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use common::frames;
use ferroce_wire::*;

fn captures() -> Vec<String> {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures");
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".pcap"))
        .collect();
    names.sort();
    names
}

#[test]
fn recorded_packets_parse_and_are_emitted_again() {
    let mut packets = 0;
    for name in captures() {
        for (number, frame) in frames(&name).iter().enumerate() {
            let at = format!("{name} frame {}", number + 1);
            let packet = Packet::parse(frame).unwrap_or_else(|error| panic!("{at}: {error}"));
            assert_eq!(OwnedPacket::from(&packet).emit(), *frame, "{at}");
            packets += 1;
        }
    }
    // The number that another dissector finds in the captures, so that none is skipped unnoticed.
    assert_eq!(packets, 765);
}
