//! The invariant CRC at the end of every RoCE packet (docs/protocol.md §3).
//!
//! A CRC-32 (IEEE 802.3) over 8 bytes of ones, over the network header, UDP and BTH with the fields that a router may
//! change set to ones, and over all bytes after them including the pad.

use crate::{Bth, NetworkHeader};

/// The length of a mask, which contains every header up to the BTH.
pub const MASK_LEN: usize = 64;

/// An implementation of CRC-32 (IEEE 802.3). `register` is the shift register: all ones at the start, not inverted at
/// the end.
pub trait Crc32: Copy {
    /// The register after `data`.
    fn update(self, register: u32, data: &[u8]) -> u32;

    /// As [`update`](Crc32::update), with the beginning of `data` ORed with `mask`.
    fn update_masked(self, register: u32, mask: &[u8; MASK_LEN], data: &[u8]) -> u32;

    /// As [`update`](Crc32::update) over `from`, which is copied to `to` at the same time. Both have the same length.
    fn copy(self, register: u32, from: &[u8], to: &mut [u8]) -> u32;
}

/// CRC-32 by crc32fast, for every CPU.
#[derive(Clone, Copy, Debug, Default)]
pub struct Portable;

impl Crc32 for Portable {
    fn update(self, register: u32, data: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(!register);
        hasher.update(data);
        !hasher.finalize()
    }

    fn update_masked(self, register: u32, mask: &[u8; MASK_LEN], data: &[u8]) -> u32 {
        let mut head = *mask;
        let (first, rest) = data.split_at(data.len().min(MASK_LEN));
        head.iter_mut().zip(first).for_each(|(mask, byte)| *mask |= byte);
        self.update(self.update(register, &head[..first.len()]), rest)
    }

    fn copy(self, register: u32, from: &[u8], to: &mut [u8]) -> u32 {
        to.copy_from_slice(from);
        self.update(register, to)
    }
}

/// The ICRC of a packet.
///
/// `packet` starts at the network header and ends before the ICRC; `network` is the kind of that header, which
/// determines the positions of UDP and BTH. `None` if the packet is too short for its headers.
pub fn compute(network: NetworkHeader, packet: &[u8]) -> Option<u32> {
    (packet.len() >= network.bth_start() + Bth::LEN).then(|| !register(network, packet, Portable))
}

/// The register after `packet`, which starts at the network header and includes its BTH. The remaining bytes are added
/// with [`Crc32::update`], and the inverse of the last register is the ICRC.
pub fn register(network: NetworkHeader, packet: &[u8], crc: impl Crc32) -> u32 {
    let mask = match network {
        NetworkHeader::Ipv4 => &IPV4_MASK,
        NetworkHeader::Ipv6 => &IPV6_MASK,
        NetworkHeader::Grh => &GRH_MASK,
    };
    crc.update_masked(BEHIND_ONES, mask, packet)
}

const IPV4_MASK: [u8; MASK_LEN] = {
    let mut mask = [0; MASK_LEN];
    mask[1] = 0xff; // TOS
    mask[8] = 0xff; // TTL
    mask[10] = 0xff; // header checksum
    mask[11] = 0xff;
    mask[20 + 6] = 0xff; // UDP checksum
    mask[20 + 7] = 0xff;
    mask[28 + 4] = 0xff; // FECN, BECN, reserved
    mask
};

const GRH_MASK: [u8; MASK_LEN] = {
    let mut mask = [0; MASK_LEN];
    mask[0] = 0x0f; // traffic class, flow label
    mask[1] = 0xff;
    mask[2] = 0xff;
    mask[3] = 0xff;
    mask[7] = 0xff; // hop limit
    mask[40 + 4] = 0xff; // FECN, BECN, reserved
    mask
};

const IPV6_MASK: [u8; MASK_LEN] = {
    let mut mask = GRH_MASK;
    mask[40 + 4] = 0;
    mask[40 + 6] = 0xff; // UDP checksum
    mask[40 + 7] = 0xff;
    mask[48 + 4] = 0xff; // FECN, BECN, reserved
    mask
};

/// The register after the 8 bytes of ones.
const BEHIND_ONES: u32 = {
    let mut register = u32::MAX;
    let mut bit = 0;
    while bit < 64 {
        register = register >> 1 ^ if (register ^ 1) & 1 == 1 { 0xedb8_8320 } else { 0 };
        bit += 1;
    }
    register
};
