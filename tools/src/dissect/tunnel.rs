//! Packets in tunnels: which tunnels are decoded, and which are only named.

use super::layers::{IPV4, IPV6};
use super::unopened::Name;

/// The contents of a packet that is not RoCE.
pub(super) enum Inside<'a> {
    /// A frame, and its tunnel.
    Ethernet(&'static str, &'a [u8]),
    /// A packet, with its tunnel and EtherType.
    Network(&'static str, u16, &'a [u8]),
    /// Contents that are not decoded.
    Closed(Name),
}

const MPLS: [u16; 2] = [0x8847, 0x8848];
/// The type of an Ethernet frame in GRE and Geneve.
const BRIDGED: u16 = 0x6558;
/// The most MPLS labels.
const LABELS: usize = 16;

const UDP: u8 = 17;
/// The assigned port, and Linux' default port.
const VXLAN_PORTS: [u16; 2] = [4789, 8472];
const GENEVE_PORT: u16 = 6081;
/// UDP ports of encapsulations that are not decoded.
const NAMES: [(u16, &str); 7] = [
    (1701, "L2TP"),
    (2152, "GTP-U"),
    (4500, "IPsec NAT-T"),
    (5555, "FOU"),
    (6080, "GUE"),
    (6635, "MPLS-in-UDP"),
    (51820, "WireGuard"),
];

/// The contents of a packet with this EtherType; `None` if it is truncated before that is visible.
pub(super) fn inside(ethertype: u16, packet: &[u8]) -> Option<Inside<'_>> {
    match ethertype {
        IPV4 => {
            let ip = packet.first_chunk::<20>()?;
            let (header, fragment) =
                (usize::from(ip[0] & 0x0f) * 4, u16::from_be_bytes([ip[6], ip[7]]) & 0x1fff);
            if fragment != 0 {
                return closed("IPv4 fragments");
            }
            in_ip(ip[9], packet.get(header.max(20)..)?)
        }
        IPV6 => {
            let (next, payload) = (packet.first_chunk::<40>()?[6], &packet[40..]);
            // Reports of multicast listeners have options in front; no RoCE packet has.
            let is_options = [0, 43, 60].contains(&next) && payload.first() == Some(&58);
            if is_options { closed("ICMPv6") } else { in_ip(next, payload) }
        }
        _ if MPLS.contains(&ethertype) => in_mpls(packet),
        0x0806 => closed("ARP"),
        0x88cc => closed("LLDP"),
        0x88e5 => closed("MACsec"),
        0x88e7 => closed("802.1ah"),
        0x8864 => closed("PPPoE"),
        0x894f => closed("NSH"),
        ..=1500 => closed("802.3"),
        other => closed(format!("EtherType {other:#06x}")),
    }
}

fn closed<'a>(name: impl Into<Name>) -> Option<Inside<'a>> {
    Some(Inside::Closed(name.into()))
}

fn in_ip(protocol: u8, payload: &[u8]) -> Option<Inside<'_>> {
    match protocol {
        UDP => in_udp(payload),
        4 => Some(Inside::Network("IP in IP", IPV4, payload)),
        41 => Some(Inside::Network("IP in IP", IPV6, payload)),
        47 => in_gre(payload),
        0 | 43 | 44 | 60 => closed("IPv6 extension headers"),
        1 => closed("ICMP"),
        6 => closed("TCP"),
        50 | 51 => closed("IPsec"),
        58 => closed("ICMPv6"),
        97 => closed("EtherIP"),
        115 => closed("L2TP"),
        other => closed(format!("IP protocol {other}")),
    }
}

fn in_udp(datagram: &[u8]) -> Option<Inside<'_>> {
    let port = u16::from_be_bytes([*datagram.get(2)?, *datagram.get(3)?]);
    let payload = datagram.get(8..)?;
    match port {
        // The flag marks a network identifier, and so a frame.
        port if VXLAN_PORTS.contains(&port) => match payload.first()? & 0x08 {
            0 => closed("VXLAN without a network identifier"),
            _ => Some(Inside::Ethernet("VXLAN", payload.get(8..)?)),
        },
        4790 => closed("VXLAN-GPE"),
        GENEVE_PORT => {
            let options = usize::from(payload.first()? & 0x3f) * 4;
            let kind = u16::from_be_bytes([*payload.get(2)?, *payload.get(3)?]);
            of_kind("Geneve", kind, payload.get(8 + options..)?)
        }
        port => match NAMES.iter().find(|(known, _)| *known == port) {
            Some((_, name)) => closed(format!("UDP port {port} ({name})")),
            None => closed(format!("UDP port {port}")),
        },
    }
}

fn in_gre(packet: &[u8]) -> Option<Inside<'_>> {
    let [flags, version, kind @ ..] = *packet.first_chunk::<4>()?;
    if version & 7 != 0 {
        return closed("GRE of another version");
    }
    let has = |bit: u8| usize::from(flags & bit != 0);
    let payload = packet.get(4 + 4 * (has(0x80) + has(0x20) + has(0x10))..)?;
    match u16::from_be_bytes(kind) {
        // With sequence numbers, ERSPAN has its own header.
        0x88be => Some(Inside::Ethernet("ERSPAN", payload.get(8 * has(0x10)..)?)),
        0x22eb => closed("ERSPAN III"),
        kind => of_kind("GRE", kind, payload),
    }
}

fn of_kind<'a>(name: &'static str, kind: u16, payload: &'a [u8]) -> Option<Inside<'a>> {
    match kind {
        BRIDGED => Some(Inside::Ethernet(name, payload)),
        IPV4 | IPV6 => Some(Inside::Network(name, kind, payload)),
        _ if MPLS.contains(&kind) => Some(Inside::Network(name, kind, payload)),
        _ => closed(name),
    }
}

/// Labels do not identify the contents: an IP packet, or a frame, with or without a control word before it.
fn in_mpls(packet: &[u8]) -> Option<Inside<'_>> {
    let (labels, _) = packet.as_chunks::<4>();
    let last = labels.iter().take(LABELS).position(|label| label[2] & 1 != 0);
    let Some(last) = last else { return closed("MPLS") };
    let payload = &packet[4 * (last + 1)..];
    let fits = |length: usize| length <= payload.len() + MOST_CUT;
    match payload.first()? >> 4 {
        4 if is_ipv4(payload)
            && fits(usize::from(u16::from_be_bytes([*payload.get(2)?, *payload.get(3)?]))) =>
        {
            Some(Inside::Network("MPLS", IPV4, payload))
        }
        6 if is_ipv6(payload) => Some(Inside::Network("MPLS", IPV6, payload)),
        0 if payload.get(..4)?[0] == 0 && is_frame(&payload[4..]) => {
            Some(Inside::Ethernet("MPLS", &payload[4..]))
        }
        _ if is_frame(payload) => Some(Inside::Ethernet("MPLS", payload)),
        _ => closed("MPLS"),
    }
}

/// Whether the checksum of an IPv4 header is valid; for a MAC address that would be a coincidence.
fn is_ipv4(packet: &[u8]) -> bool {
    let header = packet.first().and_then(|first| packet.get(..usize::from(first & 0x0f) * 4));
    let Some((words, _)) = header.map(<[u8]>::as_chunks::<2>).filter(|(words, _)| words.len() >= 10) else {
        return false;
    };
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    (sum & 0xffff) + (sum >> 16) == 0xffff
}

/// Whether the length of an IPv6 header is valid; if the bytes could also be a frame, it must be exact.
fn is_ipv6(packet: &[u8]) -> bool {
    let Some([high, low]) = packet.get(4..6) else { return false };
    let length = 40 + usize::from(u16::from_be_bytes([*high, *low]));
    length == packet.len() || length <= packet.len() + MOST_CUT && !is_frame(packet)
}

/// The most truncated bytes of a packet that is accepted.
const MOST_CUT: usize = 9216;

/// Whether a known EtherType is at the position that a frame has it.
fn is_frame(bytes: &[u8]) -> bool {
    let kind = bytes.get(12..14).map(|kind| u16::from_be_bytes([kind[0], kind[1]]));
    kind.is_some_and(|kind| {
        [IPV4, IPV6, 0x8915, 0x8100, 0x88a8, 0x9100, 0x8847, 0x8848, 0x0806].contains(&kind)
    })
}
