//! What the tests over captures share.

use std::path::Path;

use ferroce_wire::{Encapsulation, NetworkHeader, Packet, PathAddress};

/// The frames of a capture in pcap-fixtures: pcap, little-endian.
#[allow(dead_code, reason = "not every test program reads captures")]
pub(crate) fn frames(name: &str) -> Vec<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcap-fixtures").join(name);
    let file = std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(file[..4], [0xd4, 0xc3, 0xb2, 0xa1], "{name} is a little-endian pcap");
    let mut rest = &file[24..];
    let mut frames = Vec::new();
    while let Some((header, after)) = rest.split_at_checked(16) {
        let length = u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize;
        frames.push(after[..length].to_vec());
        rest = &after[length..];
    }
    assert!(rest.is_empty() && !frames.is_empty(), "{name} ends in the middle of a record or has none");
    frames
}

/// The address that emits the headers in front of a parsed frame again.
#[allow(dead_code, reason = "not every test program emits")]
pub(crate) fn address_of(frame: &[u8], packet: &Packet<'_>) -> PathAddress {
    let link = packet.link().unwrap();
    let network_start = if link.vlan.is_some() { 18 } else { 14 };
    let identification = match packet.header {
        NetworkHeader::Ipv4 => [frame[network_start + 4], frame[network_start + 5]],
        _ => [0, 0],
    };
    PathAddress {
        source_mac: link.source,
        destination_mac: link.destination,
        vlan: link.vlan,
        source: packet.network().source,
        destination: packet.network().destination,
        encapsulation: match packet.network().source_port {
            Some(source_port) => Encapsulation::RoceV2 { source_port },
            None => Encapsulation::RoceV1,
        },
        traffic_class: packet.network().traffic_class,
        flow_label: packet.network().flow_label,
        hop_limit: packet.network().hop_limit,
        identification: u16::from_be_bytes(identification),
    }
}
