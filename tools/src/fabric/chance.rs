//! The random choices of the traffic: determined by the seed, and the same on any machine.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// A stream of random numbers.
pub(super) struct Chance(ChaCha8Rng);

impl Chance {
    /// A stream that is independent of those of other places and hosts.
    pub(super) fn new(seed: u64, place: usize, host: usize) -> Chance {
        let mut key = [0; 32];
        for (part, number) in key.chunks_exact_mut(8).zip([seed, place as u64, host as u64]) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        Chance(ChaCha8Rng::from_seed(key))
    }

    /// Uniform from 0 to `limit` - 1.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// Uniform in [0, 1).
    pub(super) fn unit(&mut self) -> f64 {
        (self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential with a mean of 1, by comparisons alone (von Neumann, 1951): logarithms differ between machines.
    pub(super) fn exponential(&mut self) -> f64 {
        let mut whole = 0.0;
        loop {
            let first = self.unit();
            let (mut last, mut falls) = (first, 1);
            loop {
                let next = self.unit();
                if next >= last {
                    break;
                }
                last = next;
                falls += 1;
            }
            if falls % 2 == 1 {
                return whole + first;
            }
            whole += 1.0;
        }
    }

    /// A permutation without fixed points (Sattolo): the target of each of `count` elements.
    pub(super) fn cycle(&mut self, count: usize) -> Vec<usize> {
        let mut places: Vec<usize> = (0..count).collect();
        for last in (1..count).rev() {
            places.swap(last, self.below(last as u64) as usize);
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_their_distributions() {
        let mut chance = Chance::new(1, 2, 3);
        let draws: Vec<f64> = (0..100_000).map(|_| chance.exponential()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let square = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        // Standard errors are 0.003 and 0.014.
        assert!((mean - 1.0).abs() < 0.015 && (square - 2.0).abs() < 0.07, "{mean} {square}");
        let over = draws.iter().filter(|x| **x > 2.0).count() as f64 / draws.len() as f64;
        assert!((over - (-2.0_f64).exp()).abs() < 0.006, "{over}");
    }

    #[test]
    fn a_cycle_moves_everything() {
        for count in 2..40 {
            let places = Chance::new(7, count, 0).cycle(count);
            assert!(places.iter().enumerate().all(|(from, to)| from != *to));
            let mut sorted = places.clone();
            sorted.sort_unstable();
            assert!(sorted.into_iter().eq(0..count));
        }
        assert_ne!(Chance::new(1, 0, 0).cycle(30), Chance::new(2, 0, 0).cycle(30));
    }
}
