//! A set of nearby PSNs.

use ferroce_wire::{Psn, Sack};

const WORDS: usize = SPAN as usize / 64;

/// PSNs of one set are less than this apart.
pub(crate) const SPAN: u32 = Sack::SPAN;

/// A subset of `SPAN` consecutive PSNs; each is the bit with its number modulo `SPAN`.
#[derive(Clone, Copy, Default)]
pub(crate) struct PsnSet {
    words: [u64; WORDS],
    len: u32,
}

/// The PSNs from `start` to before `end`, at most `SPAN` of them, as a mask for each word concerned, in order.
fn masks(start: Psn, end: Psn) -> impl Iterator<Item = (usize, Psn, u64)> {
    let mut next = start;
    let mut left = end.distance(start).clamp(0, SPAN as i32) as u32;
    std::iter::from_fn(move || {
        if left == 0 {
            return None;
        }
        let (word, bit) = place(next);
        let count = left.min(64 - bit);
        let base = next - bit;
        next += count;
        left -= count;
        Some((word, base, (u64::MAX >> (64 - count)) << bit))
    })
}

fn place(psn: Psn) -> (usize, u32) {
    let bit = psn.value() % SPAN;
    (bit as usize / 64, bit % 64)
}

impl PsnSet {
    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    pub(crate) fn contains(&self, psn: Psn) -> bool {
        let (word, bit) = place(psn);
        self.words[word] >> bit & 1 == 1
    }

    /// Returns whether it was added, because it was not in the set.
    pub(crate) fn insert(&mut self, psn: Psn) -> bool {
        let (word, bit) = place(psn);
        let is_new = self.words[word] >> bit & 1 == 0;
        self.words[word] |= 1 << bit;
        self.len += u32::from(is_new);
        is_new
    }

    /// Returns whether it was in the set.
    pub(crate) fn remove(&mut self, psn: Psn) -> bool {
        let (word, bit) = place(psn);
        let was = self.words[word] >> bit & 1 == 1;
        self.words[word] &= !(1 << bit);
        self.len -= u32::from(was);
        was
    }

    /// Adds all of `start` to `end` that are not in `other`.
    pub(crate) fn insert_range_without(&mut self, start: Psn, end: Psn, other: &PsnSet) {
        for (word, _, mask) in masks(start, end) {
            let new = mask & !other.words[word] & !self.words[word];
            self.words[word] |= new;
            self.len += new.count_ones();
        }
    }

    /// Those that are not in `other`.
    pub(crate) fn without(&self, other: &PsnSet) -> PsnSet {
        let mut words = self.words;
        words.iter_mut().zip(&other.words).for_each(|(word, other)| *word &= !other);
        PsnSet::from_bits(words)
    }

    pub(crate) fn remove_range(&mut self, start: Psn, end: Psn) {
        for (word, _, mask) in masks(start, end) {
            self.len -= (self.words[word] & mask).count_ones();
            self.words[word] &= !mask;
        }
    }

    /// The first of `start` to `end` in the set.
    pub(crate) fn first(&self, start: Psn, end: Psn) -> Option<Psn> {
        find(start, end, |word| self.words[word])
    }

    /// The first of `start` to `end` not in the set.
    pub(crate) fn first_missing(&self, start: Psn, end: Psn) -> Option<Psn> {
        find(start, end, |word| !self.words[word])
    }

    pub(crate) fn bits(&self) -> &[u64; WORDS] {
        &self.words
    }

    pub(crate) fn from_bits(words: [u64; WORDS]) -> PsnSet {
        PsnSet { words, len: words.iter().map(|word| word.count_ones()).sum() }
    }
}

fn find(start: Psn, end: Psn, bits: impl Fn(usize) -> u64) -> Option<Psn> {
    masks(start, end).find_map(|(word, base, mask)| {
        let found = bits(word) & mask;
        (found != 0).then(|| base + found.trailing_zeros())
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a plain set of distances from a base, anywhere on the circle.
        #[test]
        fn agrees_with_a_plain_set(
            base in any::<u32>(),
            single in prop::collection::vec((0..SPAN, any::<bool>()), 0..60),
            range in (0..=SPAN, 0..=SPAN, any::<bool>()),
            asked in (0..=SPAN, 0..=SPAN),
        ) {
            let base = Psn::new(base);
            let (mut set, mut model, mut other) = (PsnSet::default(), BTreeSet::new(), PsnSet::default());
            for (at, put) in single {
                if put {
                    prop_assert_eq!(set.insert(base + at), model.insert(at));
                } else {
                    prop_assert_eq!(set.remove(base + at), model.remove(&at));
                    other.insert(base + at);
                }
            }
            let (start, end, put) = range;
            for at in start..end {
                if put {
                    if !other.contains(base + at) {
                        model.insert(at);
                    }
                } else {
                    model.remove(&at);
                }
            }
            if put {
                set.insert_range_without(base + start, base + end, &other);
            } else {
                set.remove_range(base + start, base + end);
            }
            prop_assert_eq!(set.len() as usize, model.len());
            prop_assert!((0..SPAN).all(|at| set.contains(base + at) == model.contains(&at)));
            prop_assert_eq!(PsnSet::from_bits(*set.bits()).len(), set.len());
            let (start, end) = (base + asked.0, base + asked.1);
            let first = (asked.0..asked.1).find(|at| model.contains(at)).map(|at| base + at);
            let missing = (asked.0..asked.1).find(|at| !model.contains(at)).map(|at| base + at);
            prop_assert_eq!((set.first(start, end), set.first_missing(start, end)), (first, missing));
        }
    }
}
