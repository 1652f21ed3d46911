//! Every packet that rdma_rxe was recorded sending parses, and is emitted again bit for bit.
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

/// The address that emits the headers in front of a parsed frame again.
fn address_of(frame: &[u8], packet: &Packet<'_>) -> PathAddress {
    let link = packet.link.unwrap();
    let network_start = if link.vlan.is_some() { 18 } else { 14 };
    let identification = match packet.network.header {
        NetworkHeader::Ipv4 => [frame[network_start + 4], frame[network_start + 5]],
        _ => [0, 0],
    };
    PathAddress {
        source_mac: link.source,
        destination_mac: link.destination,
        vlan: link.vlan,
        source: packet.network.source,
        destination: packet.network.destination,
        encapsulation: match packet.network.source_port {
            Some(source_port) => Encapsulation::RoceV2 { source_port },
            None => Encapsulation::RoceV1,
        },
        traffic_class: packet.network.traffic_class,
        flow_label: packet.network.flow_label,
        hop_limit: packet.network.hop_limit,
        identification: u16::from_be_bytes(identification),
    }
}
