//! Random numbers that identify objects on the wire: queue pair numbers and remote keys.
//!
//! A peer must not be able to guess numbers from those that it knows, so they are random; a retired number stays unused for
//! as long as possible, so that a late packet does not reach a later object (docs/protocol.md §9).

use std::collections::VecDeque;

use rand_chacha::ChaCha20Rng;
use rand_chacha::rand_core::RngCore;

/// Keys per bucket.
const BUCKET: usize = 8;

/// The contents of empty places of buckets. It is never drawn: its own bucket already contains it, or is full.
const VACANT: u32 = 0;

#[derive(Clone, Copy)]
struct Bucket<V> {
    keys: [u32; BUCKET],
    /// `None` for a retired key.
    values: [Option<V>; BUCKET],
}

/// A map from keys to small values. The bucket depends on all bits of a key, because a context may use only keys that are
/// equal in some bits. A lookup examines the whole bucket, found or not, so that its time reveals nothing about existing
/// keys. A key whose bucket is full is not drawn; at most half of the places are taken, so most buckets are not full. The
/// table grows with its keys: most contexts have few.
pub(crate) struct KeyTable<V> {
    buckets: Box<[Bucket<V>]>,
    /// Keys in the table, live and retired.
    taken: usize,
    /// The oldest first.
    retired: VecDeque<u32>,
    /// The number of retired keys that are remembered.
    quarantine: usize,
    key_mask: u32,
    /// The bits of a hash from this one on are the number of the bucket.
    hash_shift: u32,
}

/// Buckets of an empty table.
const FIRST_BUCKETS: usize = 64;

/// The number of retired keys remembered in addition to `capacity` live ones.
const fn quarantine(capacity: u32) -> u32 {
    if capacity > 4096 { capacity } else { 4096 }
}

/// The number of usable keys needed so that drawing one takes few attempts.
pub(crate) const fn keys_needed(capacity: u32) -> u64 {
    2 * (capacity as u64 + quarantine(capacity) as u64)
}

impl<V: Copy> KeyTable<V> {
    /// For at most `capacity` live keys of `bits` bits.
    pub(crate) fn new(capacity: u32, bits: u32) -> KeyTable<V> {
        let quarantine = quarantine(capacity) as usize;
        KeyTable {
            buckets: vacant(FIRST_BUCKETS),
            taken: 0,
            retired: VecDeque::with_capacity(quarantine + 1),
            quarantine,
            key_mask: u32::MAX >> (32 - bits),
            hash_shift: u32::BITS - FIRST_BUCKETS.ilog2(),
        }
    }

    /// The same with all memory allocated, for keys drawn during packet processing.
    pub(crate) fn at_full_size(mut self, capacity: u32) -> KeyTable<V> {
        while (self.buckets.len() * BUCKET) < 2 * (capacity as usize + self.quarantine + 1) {
            self.grow();
        }
        self
    }

    /// Draws a key for `value` that `usable` accepts and that is neither live nor recently retired.
    pub(crate) fn insert(
        &mut self,
        rng: &mut ChaCha20Rng,
        value: V,
        mut usable: impl FnMut(u32) -> bool,
    ) -> u32 {
        if 2 * (self.taken + 1) > self.buckets.len() * BUCKET {
            self.grow();
        }
        loop {
            let key = rng.next_u32() & self.key_mask;
            if !usable(key) || self.place(key, key).is_some() {
                continue;
            }
            if let Some(place) = self.place(key, VACANT) {
                let index = self.index(key);
                self.buckets[index].keys[place] = key;
                self.buckets[index].values[place] = Some(value);
                self.taken += 1;
                return key;
            }
        }
    }

    /// Doubles the number of buckets. One more bit of the hash distributes the keys of a bucket to two, so there is room
    /// for all.
    fn grow(&mut self) {
        let more = vacant(2 * self.buckets.len());
        let old = std::mem::replace(&mut self.buckets, more);
        self.hash_shift -= 1;
        for Bucket { keys, values } in old {
            for (key, value) in keys.into_iter().zip(values).filter(|(key, _)| *key != VACANT) {
                let index = self.index(key);
                if let Some(place) = self.place(key, VACANT) {
                    self.buckets[index].keys[place] = key;
                    self.buckets[index].values[place] = value;
                }
            }
        }
    }

    pub(crate) fn get(&self, key: u32) -> Option<V> {
        let place = self.place(key, key)?;
        self.buckets[self.index(key)].values[place]
    }

    /// Retires a live key; it is not drawn again before `quarantine` others have been retired.
    pub(crate) fn retire(&mut self, key: u32) {
        let Some(place) = self.place(key, key) else { return };
        let index = self.index(key);
        if self.buckets[index].values[place].take().is_none() {
            return;
        }
        self.retired.push_back(key);
        if self.retired.len() > self.quarantine
            && let Some(oldest) = self.retired.pop_front()
            && let Some(place) = self.place(oldest, oldest)
        {
            let index = self.index(oldest);
            self.buckets[index].keys[place] = VACANT;
            self.taken -= 1;
        }
    }

    fn index(&self, key: u32) -> usize {
        // Multiplying by the golden ratio distributes evenly the keys of a context of a group, which are every n-th number.
        (key.wrapping_mul(0x9e37_79b1) >> self.hash_shift) as usize
    }

    /// The position of `wanted` in the bucket of `key`. It does not exit early.
    fn place(&self, key: u32, wanted: u32) -> Option<usize> {
        let keys = &self.buckets[self.index(key)].keys;
        // All comparisons at once, as vector instructions.
        let found: [u32; BUCKET] = std::array::from_fn(|place| u32::from(keys[place] == wanted) << place);
        let found = found.iter().fold(0, |all, one| all | one);
        (found != 0).then(|| found.trailing_zeros() as usize & (BUCKET - 1))
    }
}

fn vacant<V: Copy>(buckets: usize) -> Box<[Bucket<V>]> {
    vec![Bucket { keys: [VACANT; BUCKET], values: [None; BUCKET] }; buckets].into_boxed_slice()
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

    /// At each size, live and retired keys are still found after growing.
    #[test]
    fn a_table_grows_with_its_keys() {
        let mut rng = ChaCha20Rng::seed_from_u64(5);
        let mut table = KeyTable::new(1 << 15, 24);
        let mut keys = Vec::new();
        let mut sizes = vec![table.buckets.len()];
        for i in 0..1 << 15 {
            let key = table.insert(&mut rng, i, |_| true);
            if i % 3 == 0 {
                table.retire(key);
            }
            keys.push(key);
            if sizes.last() != Some(&table.buckets.len()) {
                sizes.push(table.buckets.len());
                for (key, i) in keys.iter().zip(0..) {
                    assert_eq!(table.get(*key), (i % 3 != 0).then_some(i));
                    assert!(table.place(*key, *key).is_some(), "{key:#x} is remembered");
                }
            }
        }
        assert_eq!(sizes, [64, 128, 256, 512, 1024, 2048, 4096, 8192]);
        // No more keys than can be taken.
        for i in 0..1 << 17 {
            let key = table.insert(&mut rng, i, |_| true);
            table.retire(key);
        }
        assert_eq!(table.buckets.len(), 16384);
        let mut table = KeyTable::new(64, 32).at_full_size(64);
        let size = table.buckets.len();
        for i in 0..10_000 {
            let key = table.insert(&mut rng, i, |_| true);
            if i >= 63 {
                table.retire(key);
            }
        }
        assert_eq!(table.buckets.len(), size, "it has grown");
    }

    /// One of 256 contexts that share an address draws only every 512th number.
    #[test]
    fn keys_may_have_equal_low_bits() {
        let mut rng = ChaCha20Rng::seed_from_u64(4);
        for (rest, divisor) in [(0, 2), (3, 16), (511, 512)] {
            let mut table = KeyTable::new(256, 24);
            let mut live = VecDeque::new();
            for i in 0..20_000u32 {
                // 512 failed attempts in a row are no accident if at least half of the places are free.
                let mut attempts = 0;
                let usable = |key: u32| {
                    attempts += u32::from(key % divisor == rest);
                    assert!(attempts < 512, "no place for another key of {rest} by {divisor} after {i}");
                    key % divisor == rest
                };
                live.push_back(table.insert(&mut rng, i, usable));
                if live.len() == 256 {
                    table.retire(live.pop_front().unwrap());
                }
            }
        }
    }

    /// With the most live and retired keys, existing keys are found and others are not.
    #[test]
    fn a_full_table_finds_all_its_keys() {
        let mut rng = ChaCha20Rng::seed_from_u64(3);
        let capacity = 8192;
        let mut table = KeyTable::new(capacity, 24);
        let mut draw = |table: &mut KeyTable<u32>| -> Vec<u32> {
            (0..capacity).map(|i| table.insert(&mut rng, i, |_| true)).collect()
        };
        let retired = draw(&mut table);
        retired.iter().for_each(|key| table.retire(*key));
        let live = draw(&mut table);
        let mut all: Vec<u32> = retired.iter().chain(&live).copied().collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 2 * capacity as usize);
        assert!(live.iter().zip(0..).all(|(key, i)| table.get(*key) == Some(i)));
        assert!(retired.iter().all(|key| table.get(*key).is_none()));
        // Neither the value of empty places nor other keys are found.
        assert_eq!((all.binary_search(&VACANT).is_err(), table.get(VACANT)), (true, None));
        let mut strangers = (0..=u32::MAX).step_by(4099).filter(|key| all.binary_search(key).is_err());
        assert!(strangers.all(|key| table.get(key).is_none()));
        // Retiring a key twice counts once.
        retired.iter().for_each(|key| table.retire(*key));
        assert_eq!(table.retired.len(), capacity as usize);
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
