//! The bytes of which all messages are parts.

use std::sync::OnceLock;

use ferroce_driver_test_support::random::Random;

/// Bytes of the noise.
pub(crate) const NOISE: usize = 3 << 20;

/// Bytes that differ nearly everywhere from themselves at another offset. All data is from here, so a message is given by
/// two numbers.
pub(crate) fn noise() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut bytes = vec![0; NOISE];
        Random::new(1).fill(&mut bytes);
        bytes
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
