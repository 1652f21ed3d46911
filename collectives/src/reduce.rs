//! Reductions: `target[i] = target[i] ⊕ source[i]`, over bytes in the byte order of the machine.

use std::fmt;

/// The type of the elements. Both take 4 bytes, in the byte order of the machine; elements travel as
/// they lie in memory, so the rendezvous refuses ranks of another byte order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DataType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// Two's complement, 32 bits. Sums wrap.
    I32 = 2,
}

impl DataType {
    /// Bytes of an element.
    pub const fn size(self) -> usize {
        4
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataType::F32 => "f32",
            DataType::I32 => "i32",
        })
    }
}

/// What is made of the elements of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum.
    Sum = 1,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ReduceOp::Sum => f.write_str("sum"),
        }
    }
}

/// Reduces `source` into `target`, which are equally long and hold whole elements: what an all-reduce does with a chunk.
///
/// No alignment is asked for: memory that somebody else allocated may start anywhere, and on the
/// machines of interest unaligned vector loads cost nothing.
pub fn reduce(data_type: DataType, op: ReduceOp, target: &mut [u8], source: &[u8]) {
    debug_assert_eq!(target.len(), source.len());
    match (data_type, op) {
        (DataType::F32, ReduceOp::Sum) => {
            combine(target, source, |a, b| (f32::from_ne_bytes(a) + f32::from_ne_bytes(b)).to_ne_bytes())
        }
        (DataType::I32, ReduceOp::Sum) => combine(target, source, |a, b| {
            i32::from_ne_bytes(a).wrapping_add(i32::from_ne_bytes(b)).to_ne_bytes()
        }),
    }
}

#[inline(always)]
fn combine(target: &mut [u8], source: &[u8], op: impl Fn([u8; 4], [u8; 4]) -> [u8; 4]) {
    let (target, _) = target.as_chunks_mut::<4>();
    let (source, _) = source.as_chunks::<4>();
    for (target, source) in target.iter_mut().zip(source) {
        *target = op(*target, *source);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes<const N: usize, T>(values: &[T], to: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(to).collect()
    }

    proptest! {
        #[test]
        fn i32_sums_wrap(pairs in prop::collection::vec(any::<(i32, i32)>(), 0..300), skew in 0usize..4) {
            let (a, b): (Vec<i32>, Vec<i32>) = pairs.into_iter().unzip();
            // `skew` bytes in front: neither operand is aligned.
            let mut target = [vec![0; skew], bytes(&a, |v| v.to_ne_bytes())].concat();
            let source = [vec![0; skew + 1], bytes(&b, |v| v.to_ne_bytes())].concat();
            reduce(DataType::I32, ReduceOp::Sum, &mut target[skew..], &source[skew + 1..]);
            let sums: Vec<i32> = a.iter().zip(&b).map(|(a, b)| a.wrapping_add(*b)).collect();
            prop_assert_eq!(&target[skew..], bytes(&sums, |v| v.to_ne_bytes()));
        }

        #[test]
        fn f32_sums_are_those_of_ieee(pairs in prop::collection::vec(any::<(f32, f32)>(), 0..300)) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let mut target = bytes(&a, |v| v.to_ne_bytes());
            reduce(DataType::F32, ReduceOp::Sum, &mut target, &bytes(&b, |v| v.to_ne_bytes()));
            for ((a, b), got) in a.iter().zip(&b).zip(target.as_chunks::<4>().0) {
                prop_assert_eq!((a + b).to_bits(), f32::from_ne_bytes(*got).to_bits());
            }
        }
    }

    #[test]
    fn nothing_outside_is_touched() {
        let mut target = [0x7f; 12];
        reduce(DataType::I32, ReduceOp::Sum, &mut target[4..8], &[1, 0, 0, 0]);
        assert_eq!(target[..4], [0x7f; 4]);
        assert_eq!(target[8..], [0x7f; 4]);
        assert_ne!(target[4..8], [0x7f; 4]);
    }
}
