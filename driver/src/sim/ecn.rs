use super::EcnConfig;
use super::ip::{self, Version};

impl EcnConfig {
    /// The marking probability of a frame with this many bytes queued.
    pub(super) fn probability(&self, waiting: u64) -> f64 {
        if waiting <= self.kmin_bytes {
            0.0
        } else if waiting > self.kmax_bytes {
            1.0
        } else {
            self.pmax * (waiting - self.kmin_bytes) as f64 / (self.kmax_bytes - self.kmin_bytes) as f64
        }
    }
}

/// Marks the IP packet of an Ethernet `frame` Congestion Experienced (RFC 3168 section 5) and returns whether it did: the
/// packet must be IPv4 or IPv6, ECN-capable, and not marked already.
pub(super) fn mark(frame: &mut [u8]) -> bool {
    match ip::locate(frame) {
        Some((Version::V4, at)) => mark_ipv4(&mut frame[at..]),
        Some((Version::V6, at)) => mark_ipv6(&mut frame[at..]),
        None => false,
    }
}

const NOT_ECT: u8 = 0b00;
const CE: u8 = 0b11;

fn mark_ipv4(packet: &mut [u8]) -> bool {
    let tos = packet[1];
    if matches!(tos & CE, NOT_ECT | CE) {
        return false;
    }
    packet[1] = tos | CE;
    // RFC 1624 equation 3; the version and length byte before the TOS is unchanged and cancels out.
    let checksum = u16::from_be_bytes([packet[10], packet[11]]);
    let sum = u32::from(!checksum) + u32::from(!u16::from(tos)) + u32::from(packet[1]);
    let sum = (sum & 0xffff) + (sum >> 16);
    let sum = (sum & 0xffff) + (sum >> 16);
    packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
    true
}

/// The traffic class spans the first two bytes; its ECN bits are in the second one's upper half.
fn mark_ipv6(packet: &mut [u8]) -> bool {
    if matches!((packet[1] >> 4) & CE, NOT_ECT | CE) {
        return false;
    }
    packet[1] |= CE << 4;
    true
}
