use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Psn;

/// The part of a selective acknowledgement after its AETH, 128 bytes: the requests that were received after the missing
/// one.
///
/// It is specific to ferroce, between two ends that have negotiated selective repeat; it is never sent to other peers.
/// The PSN in its BTH is the oldest missing one, and all requests before it were executed. Bit `n` represents the one
/// PSN, of the [`SPAN`](Sack::SPAN) PSNs from there on, that equals `n` modulo `SPAN`: byte `n / 8`, bit `n % 8`. So
/// neither end shifts bits when the oldest PSN advances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sack {
    words: [U64; Sack::SPAN as usize / 64],
}

impl Sack {
    /// Bytes on the wire.
    pub const LEN: usize = Sack::SPAN as usize / 8;
    /// The number of PSNs that the bits represent; a power of two.
    pub const SPAN: u32 = 1024;

    /// Makes it from the bits, 64 in a word, the lowest PSN in the lowest bit.
    pub fn new(bits: &[u64; Sack::SPAN as usize / 64]) -> Sack {
        Sack { words: bits.map(U64::new) }
    }

    /// The bits, as passed to [`new`](Sack::new).
    pub fn bits(&self) -> [u64; Sack::SPAN as usize / 64] {
        self.words.map(U64::get)
    }

    /// The payload of the packet.
    pub fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// Whether the request with this PSN was received, if it is one of the `SPAN`.
    pub fn holds(&self, psn: Psn) -> bool {
        let bit = psn.value() % Sack::SPAN;
        self.words[bit as usize / 64].get() >> (bit % 64) & 1 == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_land_where_the_psn_says() {
        let mut bits = [0; 16];
        bits[0] = 1 << 9;
        bits[15] = 1 << 63;
        let sack = Sack::new(&bits);
        let mut expected = [0; Sack::LEN];
        (expected[1], expected[127]) = (2, 0x80);
        assert_eq!(sack.as_bytes(), expected);
        assert_eq!(sack.bits(), bits);
        assert!(
            sack.holds(Psn::new(9)) && sack.holds(Psn::new(0x400 + 9)) && sack.holds(Psn::new(0xff_ffff))
        );
        assert!(!sack.holds(Psn::new(8)) && !sack.holds(Psn::new(0)));
    }
}
