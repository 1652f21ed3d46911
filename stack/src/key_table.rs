//! Random numbers that name objects on the wire: queue pair numbers and remote keys.
//!
//! A peer that guesses must not learn anything from the numbers it knows, so they are drawn at
//! random; a number that was given up stays unused for as long as possible, so that a late packet
//! does not reach a successor (protocol.md §9).

use std::collections::VecDeque;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore;

#[derive(Clone, Copy)]
enum Entry<V> {
    Empty,
    Live { key: u32, value: V },
    Retired { key: u32 },
}

impl<V> Entry<V> {
    fn key(&self) -> Option<u32> {
        match self {
            Entry::Empty => None,
            Entry::Live { key, .. } | Entry::Retired { key } => Some(*key),
        }
    }
}

/// Keys to small values, in an open-addressed table at most half full. The keys are uniform, so
/// they are their own hash, and a miss costs the same whatever the key.
pub(crate) struct KeyTable<V> {
    entries: Box<[Entry<V>]>,
    /// Oldest first.
    retired: VecDeque<u32>,
    /// How many retired keys are remembered.
    quarantine: usize,
    key_mask: u32,
}

impl<V: Copy> KeyTable<V> {
    /// For at most `capacity` live keys of `bits` bits.
    pub(crate) fn new(capacity: u32, bits: u32) -> KeyTable<V> {
        let quarantine = (capacity as usize).max(4096);
        let size = (2 * (capacity as usize + quarantine)).next_power_of_two();
        KeyTable {
            entries: vec![Entry::Empty; size].into_boxed_slice(),
            retired: VecDeque::with_capacity(quarantine + 1),
            quarantine,
            key_mask: u32::MAX >> (32 - bits),
        }
    }

    /// Draws a key for `value` that `usable` accepts and that is neither live nor recently retired.
    pub(crate) fn insert(&mut self, rng: &mut ChaCha20Rng, value: V, usable: impl Fn(u32) -> bool) -> u32 {
        loop {
            let key = rng.next_u32() & self.key_mask;
            let slot = self.find(key);
            if usable(key) && matches!(self.entries[slot], Entry::Empty) {
                self.entries[slot] = Entry::Live { key, value };
                return key;
            }
        }
    }

    pub(crate) fn get(&self, key: u32) -> Option<V> {
        match self.entries[self.find(key)] {
            Entry::Live { value, .. } => Some(value),
            _ => None,
        }
    }

    /// Gives up a live key; it is not drawn again before `quarantine` others have been given up.
    pub(crate) fn retire(&mut self, key: u32) {
        let slot = self.find(key);
        if let Entry::Live { .. } = self.entries[slot] {
            self.entries[slot] = Entry::Retired { key };
            self.retired.push_back(key);
            if self.retired.len() > self.quarantine
                && let Some(oldest) = self.retired.pop_front()
            {
                self.forget(oldest);
            }
        }
    }

    /// The slot of `key`, or the empty one where it would go.
    fn find(&self, key: u32) -> usize {
        let mask = self.entries.len() - 1;
        let mut slot = key as usize & mask;
        while self.entries[slot].key().is_some_and(|k| k != key) {
            slot = (slot + 1) & mask;
        }
        slot
    }

    /// Empties the slot of `key` and moves later entries of its run up, so that no search ends
    /// early.
    fn forget(&mut self, key: u32) {
        let mask = self.entries.len() - 1;
        let mut hole = self.find(key);
        let mut slot = hole;
        loop {
            slot = (slot + 1) & mask;
            let Some(moving) = self.entries[slot].key() else { break };
            let home = moving as usize & mask;
            // It may move only if its home is not between the hole and its place.
            if slot.wrapping_sub(home) & mask >= slot.wrapping_sub(hole) & mask {
                self.entries[hole] = self.entries[slot];
                hole = slot;
            }
        }
        self.entries[hole] = Entry::Empty;
    }
}

#[cfg(test)]
mod tests {
    use rand_chacha::rand_core::SeedableRng;

    use super::*;

    #[test]
    fn keys_are_found_retired_and_not_reused_early() {
        let mut rng = ChaCha20Rng::seed_from_u64(1);
        let mut table = KeyTable::new(64, 14);
        let mut live = VecDeque::new();
        let mut given_up = VecDeque::new();
        for i in 0..20_000u32 {
            let key = table.insert(&mut rng, i, |k| k > 1);
            assert!(!given_up.contains(&key), "{key:#x} came back early");
            live.push_back((key, i));
            if live.len() > 64 {
                let (old, _) = live.pop_front().unwrap();
                table.retire(old);
                assert_eq!(table.get(old), None);
                given_up.push_back(old);
                if given_up.len() > 4096 {
                    given_up.pop_front();
                }
            }
            assert!(live.iter().all(|(k, v)| table.get(*k) == Some(*v)));
        }
    }

    #[test]
    fn keys_are_uniform_and_uncorrelated() {
        let mut rng = ChaCha20Rng::seed_from_u64(2);
        let mut table = KeyTable::new(1 << 17, 32);
        let keys: Vec<u32> = (0..1 << 17).map(|i| table.insert(&mut rng, i, |_| true)).collect();
        let n = keys.len() as f64;
        for bit in 0..32 {
            let ones = keys.iter().filter(|k| *k >> bit & 1 == 1).count() as f64;
            assert!((ones - n / 2.0).abs() < 5.0 * (n / 4.0).sqrt(), "bit {bit}: {ones}");
            let flips = keys.windows(2).filter(|w| (w[0] ^ w[1]) >> bit & 1 == 1).count() as f64;
            assert!((flips - n / 2.0).abs() < 5.0 * (n / 4.0).sqrt(), "bit {bit}: {flips} flips");
        }
    }
}
