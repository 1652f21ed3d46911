/// Makes the IP packet of an Ethernet `frame` Congestion Experienced (RFC 3168 section 5) and says
/// whether it did: the packet is IPv4 or IPv6, ECN-capable, and not marked already.
pub(super) fn mark(frame: &mut [u8]) -> bool {
    let ether_type =
        |at: usize, frame: &[u8]| Some(u16::from_be_bytes([*frame.get(at)?, *frame.get(at + 1)?]));
    let mut at = 12;
    if ether_type(at, frame) == Some(VLAN) {
        at += 4;
    }
    let kind = ether_type(at, frame);
    let packet = frame.get_mut(at + 2..).unwrap_or_default();
    match kind {
        Some(IPV4) if packet.len() >= 20 => mark_ipv4(packet),
        Some(IPV6) if packet.len() >= 40 => mark_ipv6(packet),
        _ => false,
    }
}

const VLAN: u16 = 0x8100;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const NOT_ECT: u8 = 0b00;
const CE: u8 = 0b11;

fn mark_ipv4(packet: &mut [u8]) -> bool {
    let tos = packet[1];
    if matches!(tos & CE, NOT_ECT | CE) {
        return false;
    }
    packet[1] = tos | CE;
    // RFC 1624 equation 3; the version and length byte above the TOS stays and cancels out.
    let checksum = u16::from_be_bytes([packet[10], packet[11]]);
    let sum = u32::from(!checksum) + u32::from(!u16::from(tos)) + u32::from(packet[1]);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    true
}

/// The traffic class lies across the first two bytes, its ECN bits in the second one's upper half.
fn mark_ipv6(packet: &mut [u8]) -> bool {
    if matches!((packet[1] >> 4) & CE, NOT_ECT | CE) {
        return false;
    }
    packet[1] |= CE << 4;
    true
}
