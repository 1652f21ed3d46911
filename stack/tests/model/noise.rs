//! The bytes that all messages are cut from.

use std::sync::OnceLock;

/// Bytes of the noise that all messages are cut from.
pub(crate) const NOISE: usize = 3 << 20;

/// Bytes that differ nearly everywhere from themselves at another place. All data comes from here,
/// so that a message is named by two numbers.
pub(crate) fn noise() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state.to_le_bytes()
        };
        (0..NOISE / 8).flat_map(|_| next()).collect()
    })
}

/// A piece of the noise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Window {
    pub(crate) start: usize,
    pub(crate) length: u32,
}

impl Window {
    pub(crate) fn bytes(self) -> &'static [u8] {
        &noise()[self.start..self.start + self.length as usize]
    }
}
