//! Every packet that rdma_rxe was recorded sending parses, and is emitted again bit for bit.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod common;

use common::{address_of, frames};
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

fn put_extensions(builder: &mut FrameBuilder<'_>, packet: &Packet<'_>) {
    for extension in packet.opcode.extensions() {
        match extension {
            Extension::Deth => builder.put(packet.deth().unwrap()),
            Extension::Reth => builder.put(packet.reth().unwrap()),
            Extension::AtomicEth => builder.put(packet.atomic_eth().unwrap()),
            Extension::Aeth => builder.put(packet.aeth().unwrap()),
            Extension::AtomicAckEth => builder.put(packet.atomic_ack_eth().unwrap()),
            Extension::ImmDt => builder.put(packet.immdt().unwrap()),
            Extension::Ieth => builder.put(packet.ieth().unwrap()),
            Extension::Feth => builder.put(packet.feth().unwrap()),
        }
    }
}

#[test]
fn recorded_packets_parse_and_are_emitted_again() {
    let mut packets = 0;
    for name in captures() {
        for (number, frame) in frames(&name).iter().enumerate() {
            let at = format!("{name} frame {}", number + 1);
            let packet = Packet::parse(frame).unwrap_or_else(|error| panic!("{at}: {error}"));
            let path = PathHeader::new(&address_of(frame, &packet));
            let mut buffer = [0xaa; 9000];
            let mut builder =
                FrameBuilder::start(&mut buffer, &path, *packet.bth, packet.payload.len()).unwrap();
            put_extensions(&mut builder, &packet);
            builder.payload().copy_from_slice(packet.payload);
            let length = builder.finish();
            assert_eq!(buffer[..length], frame[..], "{at}");
            packets += 1;
        }
    }
    // As many as the captures hold by another dissector, so that none is left out unnoticed.
    assert_eq!(packets, 765);
}
