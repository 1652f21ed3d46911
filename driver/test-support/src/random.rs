//! Numbers that a test draws, and draws again by its seed.

use std::time::{SystemTime, UNIX_EPOCH};

/// A source of numbers, the same for the same seed: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    /// The numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random { seed, state: seed }
    }

    /// Those of the seed that an environment variable has, or of any other; prints which, for the replay.
    ///
    /// # Panics
    /// When the variable has something else than a number.
    pub fn from_env(variable: &str) -> Random {
        let given = std::env::var(variable).ok();
        let given = given.map(|seed| seed.parse().unwrap_or_else(|_| panic!("{variable}={seed}: a number")));
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let seed = given.unwrap_or_else(|| since.map_or(1, |since| since.as_nanos() as u64));
        println!("{variable}={seed}");
        Random::new(seed)
    }

    /// What gives the same numbers again.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Any number.
    pub fn any(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// From 0 to before `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.any() % limit
    }

    /// Once in `count` times.
    pub fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    /// Fills `bytes`.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.any().to_le_bytes()[..chunk.len()]);
        }
    }
}
