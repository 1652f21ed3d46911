use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A random stream: the same seed gives the same draws.
pub(super) struct Random(ChaCha8Rng);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Draws nothing if the probability is 0.
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        const UNIT: f64 = 1.0 / (1u64 << 53) as f64;
        probability > 0.0 && ((self.0.next_u64() >> 11) as f64 * UNIT) < probability
    }

    /// Uniformly from 0 to `limit` - 1.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(limit)) >> 64) as u64
    }
}
