/// A running hash: FNV-1a's step on words, with a shift so that high bits reach low ones.
pub(super) struct Trace(u64);

impl Default for Trace {
    fn default() -> Trace {
        Trace(0xcbf2_9ce4_8422_2325)
    }
}

impl Trace {
    pub(super) fn value(&self) -> u64 {
        self.0
    }

    pub(super) fn words(&mut self, words: &[u64]) {
        for word in words {
            self.0 = (self.0 ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.0 ^= self.0 >> 29;
        }
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) {
        self.words(&[bytes.len() as u64]);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.words(&[u64::from_le_bytes(*word)]);
        }
        for byte in rest {
            self.words(&[u64::from(*byte)]);
        }
    }
}
