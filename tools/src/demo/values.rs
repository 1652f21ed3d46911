//! The contents of the tensors, and the check of the result.
//!
//! The values are integers that depend on (round, rank, tensor, index) only. They are small enough that any sum over
//! the ranks is exact in f32, in any order. The reference is summed in 64-bit integers without any communication, and
//! the result must be equal to it bit for bit.

use serde::{Deserialize, Serialize};

use super::shapes::{ELEMENT, Tensor};

/// The most ranks for which sums are exact: 64 × 2¹⁷ is below 2²⁴, up to which f32 represents every integer.
pub(super) const MAX_RANKS: u32 = 64;

/// The values of one tensor in one round at one rank.
#[derive(Clone, Copy)]
struct Values {
    key: u64,
}

impl Values {
    fn new(round: u32, rank: u32, tensor: usize) -> Values {
        let key = mix(mix(u64::from(round) << 32 | u64::from(rank)) ^ tensor as u64);
        Values { key }
    }

    /// The value of an element, from −2¹⁷ to 2¹⁷ − 1.
    fn at(self, index: usize) -> i32 {
        (mix(self.key.wrapping_add(index as u64)) as i64 >> (64 - 18)) as i32
    }
}

/// Writes a rank's values to a piece of its tensor whose first element has the index `first`.
pub(super) fn fill(bytes: &mut [u8], first: usize, round: u32, rank: u32, tensor: usize) {
    let values = Values::new(round, rank, tensor);
    for (index, element) in (first..).zip(bytes.chunks_exact_mut(ELEMENT)) {
        element.copy_from_slice(&(values.at(index) as f32).to_ne_bytes());
    }
}

/// Changes the sign of an element of a piece, to inject a fault.
pub(super) fn negate(bytes: &mut [u8], index: usize) {
    if let Some(element) = bytes.chunks_exact_mut(ELEMENT).nth(index) {
        let value = -value_of(element);
        element.copy_from_slice(&value.to_ne_bytes());
    }
}

/// The first element of a tensor that differs from the sum over the ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Wrong {
    /// The tensor's name.
    pub(super) tensor: String,
    /// The element's index in the tensor.
    pub(super) index: usize,
    /// The sum over the ranks.
    pub(super) expected: f32,
    /// The bits of the all-reduce's result, since it may be NaN.
    pub(super) got_bits: u32,
    /// The number of wrong elements of the tensor.
    pub(super) count: usize,
}

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Wrong { tensor, index, expected, got_bits, count } = self;
        let got = f32::from_bits(*got_bits);
        write!(
            f,
            "{tensor}[{index}] is {got:?} ({got_bits:#010x}), not {expected:?}; {count} elements of the tensor are wrong"
        )
    }
}

impl Wrong {
    /// Merges the wrong elements of a later piece of the tensor.
    pub(super) fn add(found: &mut Option<Wrong>, later: Wrong) {
        match found {
            Some(found) => found.count += later.count,
            None => *found = Some(later),
        }
    }
}

/// Compares each element of a piece of an all-reduced tensor with the reference, bit for bit. The piece's first element
/// has the index `first`.
pub(super) fn check(
    bytes: &[u8],
    first: usize,
    round: u32,
    ranks: u32,
    number: usize,
    tensor: &Tensor,
) -> Result<(), Wrong> {
    let all: Vec<Values> = (0..ranks).map(|rank| Values::new(round, rank, number)).collect();
    let mut wrong: Option<Wrong> = None;
    for (index, element) in (first..).zip(bytes.chunks_exact(ELEMENT)) {
        let sum: i64 = all.iter().map(|values| i64::from(values.at(index))).sum();
        let expected = sum as f32;
        let got_bits = value_of(element).to_bits();
        if got_bits != expected.to_bits() {
            let this = Wrong { tensor: tensor.name.clone(), index, expected, got_bits, count: 0 };
            wrong.get_or_insert(this).count += 1;
        }
    }
    wrong.map_or(Ok(()), Err)
}

fn value_of(element: &[u8]) -> f32 {
    f32::from_ne_bytes([element[0], element[1], element[2], element[3]])
}

/// The finaliser of SplitMix64: every output bit depends on every input bit.
fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(len: usize) -> Tensor {
        Tensor { name: "t".into(), shape: vec![len] }
    }

    /// Sums the filled buffers of all ranks in f32, as an all-reduce would, starting at rank `start`.
    fn reduced(len: usize, round: u32, ranks: u32, number: usize, start: u32) -> Vec<u8> {
        let mut sum = vec![0f32; len];
        for rank in (start..ranks).chain(0..start) {
            let mut bytes = vec![0; len * ELEMENT];
            // In two pieces, as a rank fills it.
            let (start, end) = bytes.split_at_mut(len / 3 * ELEMENT);
            fill(start, 0, round, rank, number);
            fill(end, len / 3, round, rank, number);
            for (sum, element) in sum.iter_mut().zip(bytes.chunks_exact(ELEMENT)) {
                *sum += f32::from_ne_bytes(element.try_into().unwrap());
            }
        }
        sum.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    #[test]
    fn the_sum_over_the_ranks_is_exact_in_any_order() {
        for (ranks, start) in [(1, 0), (2, 1), (4, 0), (4, 3), (MAX_RANKS, 17)] {
            let bytes = reduced(1000, 2, ranks, 5, start);
            assert_eq!(check(&bytes, 0, 2, ranks, 5, &tensor(1000)), Ok(()), "{ranks} ranks from {start}");
        }
    }

    #[test]
    fn values_use_their_range_and_stay_in_it() {
        let values = Values::new(0, 0, 0);
        let all: Vec<i32> = (0..100_000).map(|i| values.at(i)).collect();
        let (min, max) = (*all.iter().min().unwrap(), *all.iter().max().unwrap());
        assert!(min >= -(1 << 17) && max < 1 << 17, "{min} to {max}");
        assert!(min < -(1 << 16) && max > 1 << 16, "{min} to {max}");
    }

    /// A flipped bit, a value of another round, rank or tensor, and −0.0 are detected.
    #[test]
    fn a_wrong_element_is_named() {
        let good = reduced(100, 1, 4, 7, 0);
        let mut bytes = good.clone();
        bytes[40 * ELEMENT] ^= 1;
        bytes[90 * ELEMENT] ^= 1;
        let wrong = check(&bytes, 0, 1, 4, 7, &tensor(100)).unwrap_err();
        assert_eq!((wrong.index, wrong.count, wrong.tensor.as_str()), (40, 2, "t"));
        assert_eq!(wrong.got_bits, wrong.expected.to_bits() ^ 1);
        assert!(wrong.to_string().starts_with("t[40] is "), "{wrong}");
        // The same piece by piece.
        let (start, end) = bytes.split_at(50 * ELEMENT);
        let mut found = None;
        for (first, piece) in [(0, start), (50, end)] {
            Wrong::add(&mut found, check(piece, first, 1, 4, 7, &tensor(100)).unwrap_err());
        }
        assert_eq!(found, Some(wrong));
        for (round, ranks, number) in [(2, 4, 7), (1, 3, 7), (1, 4, 8)] {
            let wrong = check(&good, 0, round, ranks, number, &tensor(100)).unwrap_err();
            assert!(wrong.count > 90, "{round} {ranks} {number}: {wrong}");
        }
        let zero = (0..).find(|number| reduced(1, 0, 2, *number, 0) == 0f32.to_ne_bytes()).unwrap();
        let negative = (-0f32).to_ne_bytes();
        assert!(check(&negative, 0, 0, 2, zero, &tensor(1)).is_err());
    }
}
