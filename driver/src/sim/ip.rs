/// The version of an IP packet.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Version {
    V4,
    V6,
}

/// The offset of the IP packet in an Ethernet frame, untagged or with one 802.1Q tag; `None` without a complete fixed IP
/// header.
pub(super) fn locate(frame: &[u8]) -> Option<(Version, usize)> {
    let ether_type = |at: usize| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
    let mut at = 12;
    if ether_type(at) == Some(VLAN) {
        at += 4;
    }
    let (version, header) = match ether_type(at)? {
        IPV4 => (Version::V4, 20),
        IPV6 => (Version::V6, 40),
        _ => return None,
    };
    (frame.len() >= at + 2 + header).then_some((version, at + 2))
}

const VLAN: u16 = 0x8100;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
