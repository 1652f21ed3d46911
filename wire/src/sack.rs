use zerocopy::byteorder::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Psn;

/// What a selective acknowledge carries after its AETH, 128 bytes: which requests are held behind
/// the one that is missing.
///
/// ferroce's own, between two ends that have agreed on selective repeat; no other peer is ever sent
/// one. The PSN of its BTH is the oldest that is missing, and everything before it was executed. A
/// bit stands for the one PSN of the [`SPAN`](Sack::SPAN) from there on that is its number modulo
/// `SPAN`: byte `n / 8`, bit `n % 8`. So neither end shifts anything when the oldest one moves on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sack {
    words: [U64; Sack::SPAN as usize / 64],
}

impl Sack {
    /// Bytes on the wire.
    pub const LEN: usize = Sack::SPAN as usize / 8;
    /// PSNs that the bits can tell apart; a power of two.
    pub const SPAN: u32 = 1024;

    /// From the bits, 64 to a word, the lowest PSN in the lowest bit.
    pub fn new(bits: &[u64; Sack::SPAN as usize / 64]) -> Sack {
        Sack { words: bits.map(U64::new) }
    }

    /// The bits, as they were given to [`new`](Sack::new).
    pub fn bits(&self) -> [u64; Sack::SPAN as usize / 64] {
        self.words.map(U64::get)
    }

    /// The payload of the packet.
    pub fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// Whether the request with this PSN is held, if it is one of the `SPAN`.
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
