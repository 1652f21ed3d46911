//! The IPv4 identification of a packet, which the ICRC covers. A UDP socket neither chooses nor reports it.
//!
//! A CRC is linear: if two packets of one length differ in some bits, their ICRCs differ by the remainder of these bits
//! alone, regardless of the other bits. The identification has sixteen bits, followed by `n` bits, so a difference `d`
//! there is the difference d·xⁿ modulo the CRC's polynomial. Conversely, a difference of ICRCs times x⁻ⁿ is a
//! difference in the identification if, and only if, it has at most sixteen bits.

use crate::ICRC_LEN;

/// The offset of the identification in an IPv4 header.
const AT: usize = 4;
/// The length of the IPv4 header.
const HEADER: usize = 20;

/// Changes the identification of finished packets, and finds the one of a received packet.
///
/// Caches values for recent lengths, so packets of repeated lengths cost a few XORs.
#[derive(Clone, Debug)]
pub struct Identifications {
    lengths: [Length; LENGTHS],
}

/// The number of cached lengths: those of full packets, of the first and the last packet of a message, and of
/// acknowledgements.
const LENGTHS: usize = 16;

#[derive(Clone, Copy, Debug)]
struct Length {
    /// The length of the packet; 0 if unused.
    len: usize,
    /// The difference in the ICRC for each bit of the identification, beginning with the first byte's lowest bit.
    bits: [u32; 16],
    /// x⁻ⁿ.
    back: u32,
}

impl Default for Identifications {
    fn default() -> Identifications {
        Identifications { lengths: [Length { len: 0, bits: [0; 16], back: 0 }; LENGTHS] }
    }
}

impl Identifications {
    /// Sets the identification of a finished RoCEv2 packet, which starts with its IPv4 header and ends with its ICRC.
    /// Other packets are not changed.
    pub fn renumber(&mut self, packet: &mut [u8], identification: u16) {
        let len = packet.len();
        if len < HEADER + ICRC_LEN || packet[0] != 0x45 {
            return;
        }
        let new = identification.to_be_bytes();
        let old = [packet[AT], packet[AT + 1]];
        let mut changed = u16::from_le_bytes(old) ^ u16::from_le_bytes(new);
        if changed == 0 {
            return;
        }
        let bits = &self.length(len).bits;
        let mut difference = 0;
        while changed != 0 {
            difference ^= bits[changed.trailing_zeros() as usize];
            changed &= changed - 1;
        }
        packet[AT..AT + 2].copy_from_slice(&new);
        let sum = u16::from_be_bytes([packet[10], packet[11]]);
        let sum = checksum(sum, u16::from_be_bytes(old), identification);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        if let Some(icrc) = packet.last_chunk_mut::<ICRC_LEN>() {
            *icrc = (u32::from_le_bytes(*icrc) ^ difference).to_le_bytes();
        }
    }

    /// The identification with which an IPv4 packet's ICRC would be right, if there is one.
    ///
    /// `len` is the length from the IPv4 header to the end of the ICRC, `identification` is the value in the header,
    /// and `difference` is the XOR of the packet's ICRC and the one computed from its bytes. For one of 65536
    /// differences with other causes there is a solution too: accepting the packet is a check of 16 bits, not 32.
    pub fn solve(&mut self, len: usize, identification: u16, difference: u32) -> Option<u16> {
        if len < HEADER + ICRC_LEN {
            return None;
        }
        let changed = multiply(difference, self.length(len).back);
        // The coefficients of x¹⁵ to x⁰ are in the upper half.
        let changed = (changed & 0xffff == 0).then_some((changed >> 16) as u16)?;
        Some(identification ^ changed.swap_bytes())
    }

    fn length(&mut self, len: usize) -> &Length {
        // The lengths of packets are multiples of four.
        let length = &mut self.lengths[len / 4 % LENGTHS];
        if length.len != len {
            let behind = bits_behind(len - ICRC_LEN);
            let shift = power(behind);
            let bits = std::array::from_fn(|bit| multiply(polynomial(1 << bit), shift));
            *length = Length { len, bits, back: power(ORDER - behind) };
        }
        length
    }
}

/// The number of bits from the end of the identification to the end of the CRC's division.
fn bits_behind(covered_len: usize) -> u32 {
    (8 * (covered_len - AT - 2) + 32) as u32
}

// Polynomials over GF(2) below are in the CRC's bit order: the highest bit is the coefficient of x⁰, the lowest that of
// x³¹.

/// CRC-32 (IEEE 802.3), without x³².
const POLYNOMIAL: u32 = 0xedb8_8320;
/// The least n above 0 with xⁿ = 1. The polynomial is primitive.
const ORDER: u32 = u32::MAX;

/// Two bytes, in the order of the wire, as a polynomial: bits are transmitted lowest first.
fn polynomial(bytes: u16) -> u32 {
    u32::from(bytes) << 16
}

fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut b) = (0, b);
    for power in (0..32).rev() {
        product ^= b & (a >> power & 1).wrapping_neg();
        b = times_x(b);
    }
    product
}

const fn times_x(a: u32) -> u32 {
    a >> 1 ^ POLYNOMIAL & (a & 1).wrapping_neg()
}

/// xⁿ.
fn power(n: u32) -> u32 {
    let (mut result, mut square, mut n) = (1 << 31, 1 << 30, n);
    while n != 0 {
        if n & 1 == 1 {
            result = multiply(result, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    result
}

/// The IPv4 checksum after one word has changed (RFC 1624).
fn checksum(sum: u16, old: u16, new: u16) -> u16 {
    let sum = u32::from(!sum) + u32::from(!old) + u32::from(new);
    let sum = (sum & 0xffff) + (sum >> 16);
    !(((sum & 0xffff) + (sum >> 16)) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_wrap_at_the_order() {
        assert_eq!(power(0), 1 << 31);
        assert_eq!(power(ORDER), 1 << 31);
        assert_eq!(multiply(power(12345), power(ORDER - 12345)), 1 << 31);
        assert_eq!(multiply(0x1234_5678, 1 << 31), 0x1234_5678);
    }
}
