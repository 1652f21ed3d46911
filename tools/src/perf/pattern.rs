//! Bytes that both ends compute independently, so that each received byte can be compared.

/// The end that a message comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Client,
    Server,
}

/// The contents of a message; every message differs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pattern {
    seed: u64,
}

/// A byte that differs from the expected one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) at: usize,
    pub(super) found: u8,
    pub(super) expected: u8,
}

impl Pattern {
    pub(super) fn new(origin: Origin, lap: u64, qp: usize, message: u64) -> Pattern {
        let origin = if origin == Origin::Client { 0 } else { 1 };
        let seed = [origin, lap, qp as u64, message].into_iter().fold(0, |seed, part| mix(seed ^ part));
        Pattern { seed }
    }

    pub(super) fn fill(self, bytes: &mut [u8]) {
        for (index, chunk) in bytes.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(index)[..chunk.len()]);
        }
    }

    pub(super) fn verify(self, bytes: &[u8]) -> Result<(), Mismatch> {
        for (index, chunk) in bytes.chunks(8).enumerate() {
            let word = self.word(index);
            if chunk != &word[..chunk.len()] {
                let differs = |i: &usize| chunk[*i] != word[*i];
                let i = (0..chunk.len()).find(differs).unwrap_or(0);
                return Err(Mismatch { at: index * 8 + i, found: chunk[i], expected: word[i] });
            }
        }
        Ok(())
    }

    fn word(self, index: usize) -> [u8; 8] {
        mix(self.seed.wrapping_add(index as u64)).to_le_bytes()
    }
}

/// A step of SplitMix64.
fn mix(value: u64) -> u64 {
    let z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_counts() {
        let pattern = Pattern::new(Origin::Client, 3, 1, 17);
        let mut bytes = [0; 29];
        pattern.fill(&mut bytes);
        assert_eq!(pattern.verify(&bytes), Ok(()));
        for at in 0..bytes.len() {
            let expected = bytes[at];
            bytes[at] ^= 0x10;
            assert_eq!(pattern.verify(&bytes), Err(Mismatch { at, found: bytes[at], expected }));
            bytes[at] = expected;
        }
    }

    #[test]
    fn messages_differ_by_each_coordinate() {
        let one = |origin, lap, qp, message| {
            let mut bytes = [0; 8];
            Pattern::new(origin, lap, qp, message).fill(&mut bytes);
            bytes
        };
        let all = [
            one(Origin::Client, 0, 0, 0),
            one(Origin::Server, 0, 0, 0),
            one(Origin::Client, 1, 0, 0),
            one(Origin::Client, 0, 1, 0),
            one(Origin::Client, 0, 0, 1),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|b| a != b), "{i}");
        }
    }
}
