//! The invariant CRC that ends every RoCE packet (protocol.md §3).
//!
//! A CRC-32 (IEEE 802.3) over 8 bytes of ones, the network header, UDP and BTH with the fields
//! that a router may change set to ones, and everything after them up to and with the pad.

use crc32fast::Hasher;

use crate::{Bth, NetworkHeader};

/// Bytes of the longest masked prefix: ones, IPv6 or GRH, UDP, BTH.
const MASKED_MAX: usize = 8 + 40 + 8 + Bth::LEN;

/// The ICRC of a packet.
///
/// `packet` starts at the network header and ends before the ICRC; `network` says which header
/// that is and so where UDP and BTH lie. `None` if the packet is too short to hold its headers.
pub fn compute(network: NetworkHeader, packet: &[u8]) -> Option<u32> {
    let network_len = network.len();
    let udp_len = if network.has_udp() { 8 } else { 0 };
    let headers_len = network_len + udp_len + Bth::LEN;
    let (headers, rest) = packet.split_at_checked(headers_len)?;

    let mut masked = [0xff; MASKED_MAX];
    let (pseudo, _) = masked.split_at_mut(8 + headers_len);
    let pseudo = &mut pseudo[8..];
    pseudo.copy_from_slice(headers);
    match network {
        NetworkHeader::Ipv4 => {
            pseudo[1] = 0xff; // TOS
            pseudo[8] = 0xff; // TTL
            pseudo[10..12].fill(0xff); // header checksum
        }
        NetworkHeader::Ipv6 | NetworkHeader::Grh => {
            pseudo[0] |= 0x0f; // traffic class, flow label
            pseudo[1..4].fill(0xff);
            pseudo[7] = 0xff; // hop limit
        }
    }
    if network.has_udp() {
        pseudo[network_len + 6..network_len + 8].fill(0xff); // checksum
    }
    pseudo[network_len + udp_len + 4] = 0xff; // FECN, BECN, reserved

    let mut hasher = Hasher::new();
    hasher.update(&masked[..8 + headers_len]);
    hasher.update(rest);
    Some(hasher.finalize())
}
