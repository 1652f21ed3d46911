//! Reductions: `target[i] = target[i] ⊕ source[i]`, over bytes in the byte order of the machine.
//!
//! [`reduce`] is the processor's, and says what the bits are: a GPU's ([`gpu::Reducer`](crate::gpu::Reducer)) has the same.
//!
//! ```
//! use ferroce_driver::reduction::{DataType, ReduceOp, reduce};
//!
//! let mut target = 3_i32.to_ne_bytes();
//! reduce(DataType::I32, ReduceOp::Product, &mut target, &(-5_i32).to_ne_bytes());
//! assert_eq!(i32::from_ne_bytes(target), -15);
//! ```

use std::fmt;

use half::{bf16, f16};

/// The type of the elements, in the byte order of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum DataType {
    /// IEEE 754 binary32.
    F32 = 1,
    /// Two's complement, 32 bits. Sums and products wrap.
    I32 = 2,
    /// IEEE 754 binary64.
    F64 = 3,
    /// Two's complement, 64 bits. Sums and products wrap.
    I64 = 4,
    /// IEEE 754 binary16. Computed with as f32, and rounded to the nearest, ties to even.
    F16 = 5,
    /// bfloat16: the upper half of an f32. Computed with as f32, and rounded to the nearest, ties to even.
    Bf16 = 6,
}

impl DataType {
    /// All of them.
    pub const ALL: [DataType; 6] =
        [DataType::F32, DataType::I32, DataType::F64, DataType::I64, DataType::F16, DataType::Bf16];

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            DataType::F16 | DataType::Bf16 => 2,
            DataType::F32 | DataType::I32 => 4,
            DataType::F64 | DataType::I64 => 8,
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DataType::F32 => "f32",
            DataType::I32 => "i32",
            DataType::F64 => "f64",
            DataType::I64 => "i64",
            DataType::F16 => "f16",
            DataType::Bf16 => "bf16",
        })
    }
}

/// What is made of two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum.
    Sum = 1,
    /// Their product.
    Product = 2,
    /// The source if it is less than the target, or is not a number; else the target.
    Min = 3,
    /// The source if it is greater than the target, or is not a number; else the target.
    Max = 4,
}

impl ReduceOp {
    /// All of them.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Product => "product",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
        })
    }
}

/// Reduces `source` into `target`, which are equally long and hold whole elements: what an all-reduce does with a chunk.
///
/// Floating-point sums and products are those of IEEE 754, rounded to the nearest. Where one is not a number, its sign and payload
/// are anybody's choice. [`Min`](ReduceOp::Min) and [`Max`](ReduceOp::Max) give one of the two elements as it is, a NaN if one is.
///
/// No alignment is asked for: memory that somebody else allocated may start anywhere, and on the
/// machines of interest unaligned vector loads cost nothing.
pub fn reduce(data_type: DataType, op: ReduceOp, target: &mut [u8], source: &[u8]) {
    debug_assert_eq!(target.len(), source.len());
    match data_type {
        DataType::F32 => by_type(op, target, source, f32::from_ne_bytes, f32::to_ne_bytes),
        DataType::F64 => by_type(op, target, source, f64::from_ne_bytes, f64::to_ne_bytes),
        DataType::I32 => by_type(op, target, source, i32::from_ne_bytes, i32::to_ne_bytes),
        DataType::I64 => by_type(op, target, source, i64::from_ne_bytes, i64::to_ne_bytes),
        DataType::F16 => by_type(op, target, source, f16::from_ne_bytes, f16::to_ne_bytes),
        DataType::Bf16 => by_type(op, target, source, bf16::from_ne_bytes, bf16::to_ne_bytes),
    }
}

/// What reductions need of an element.
trait Element: Copy + PartialOrd {
    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;

    /// As `fmin` is not: a NaN stays one, and the bits are those of one of both.
    fn lesser(self, other: Self) -> Self {
        if other < self || is_unordered(other) { other } else { self }
    }

    fn greater(self, other: Self) -> Self {
        if other > self || is_unordered(other) { other } else { self }
    }
}

fn is_unordered<T: PartialOrd>(value: T) -> bool {
    value.partial_cmp(&value).is_none()
}

macro_rules! elements {
    ($($type:ty: $plus:expr, $times:expr;)*) => {$(
        impl Element for $type {
            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                $plus(self, other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                $times(self, other)
            }
        }
    )*};
}

elements! {
    f32: |a, b| a + b, |a, b| a * b;
    f64: |a, b| a + b, |a, b| a * b;
    i32: i32::wrapping_add, i32::wrapping_mul;
    i64: i64::wrapping_add, i64::wrapping_mul;
    f16: |a: f16, b: f16| f16::from_f32(a.to_f32() + b.to_f32()), |a: f16, b: f16| f16::from_f32(a.to_f32() * b.to_f32());
    bf16: |a: bf16, b: bf16| bf16::from_f32(a.to_f32() + b.to_f32()), |a: bf16, b: bf16| bf16::from_f32(a.to_f32() * b.to_f32());
}

#[inline(always)]
fn by_type<const N: usize, T: Element>(
    op: ReduceOp,
    target: &mut [u8],
    source: &[u8],
    from: impl Fn([u8; N]) -> T,
    to: impl Fn(T) -> [u8; N],
) {
    match op {
        ReduceOp::Sum => combine(target, source, |a, b| to(from(a).plus(from(b)))),
        ReduceOp::Product => combine(target, source, |a, b| to(from(a).times(from(b)))),
        ReduceOp::Min => combine(target, source, |a, b| to(from(a).lesser(from(b)))),
        ReduceOp::Max => combine(target, source, |a, b| to(from(a).greater(from(b)))),
    }
}

#[inline(always)]
fn combine<const N: usize>(target: &mut [u8], source: &[u8], op: impl Fn([u8; N], [u8; N]) -> [u8; N]) {
    let (target, _) = target.as_chunks_mut::<N>();
    let (source, _) = source.as_chunks::<N>();
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

    /// One pair, of any type.
    fn one<const N: usize>(data_type: DataType, op: ReduceOp, a: [u8; N], b: [u8; N]) -> [u8; N] {
        assert_eq!(data_type.size(), N);
        let mut target = a;
        reduce(data_type, op, &mut target, &b);
        target
    }

    #[test]
    fn each_operation_of_each_type() {
        use {DataType as T, ReduceOp as Op};
        let i64s = |op, a: i64, b: i64| i64::from_ne_bytes(one(T::I64, op, a.to_ne_bytes(), b.to_ne_bytes()));
        assert_eq!(
            [Op::Sum, Op::Product, Op::Min, Op::Max].map(|op| i64s(op, i64::MAX, 2)),
            [i64::MIN + 1, -2, 2, i64::MAX]
        );
        let i32s = |op, a: i32, b: i32| i32::from_ne_bytes(one(T::I32, op, a.to_ne_bytes(), b.to_ne_bytes()));
        assert_eq!(ReduceOp::ALL.map(|op| i32s(op, i32::MIN, 3)), [i32::MIN + 3, i32::MIN, i32::MIN, 3]);
        let f64s = |op, a: f64, b: f64| f64::from_ne_bytes(one(T::F64, op, a.to_ne_bytes(), b.to_ne_bytes()));
        assert_eq!(ReduceOp::ALL.map(|op| f64s(op, 1.5, -4.0)), [-2.5, -6.0, -4.0, 1.5]);
        let f16s = |op, a: f32, b: f32| {
            let [a, b] = [a, b].map(|value| f16::from_f32(value).to_ne_bytes());
            f16::from_ne_bytes(one(T::F16, op, a, b)).to_f32()
        };
        // 2048 + 1 is a tie, and even is below; 65504 is the largest.
        assert_eq!(ReduceOp::ALL.map(|op| f16s(op, 2048.0, 1.0)), [2048.0, 2048.0, 1.0, 2048.0]);
        assert_eq!([f16s(Op::Sum, 2048.0, 3.0), f16s(Op::Sum, 65504.0, 65504.0)], [2052.0, f32::INFINITY]);
        let bf16s = |op, a: f32, b: f32| {
            let [a, b] = [a, b].map(|value| bf16::from_f32(value).to_ne_bytes());
            bf16::from_ne_bytes(one(T::Bf16, op, a, b)).to_f32()
        };
        assert_eq!(ReduceOp::ALL.map(|op| bf16s(op, 256.0, 3.0)), [260.0, 768.0, 3.0, 256.0]);
    }

    #[test]
    fn the_lesser_of_a_number_and_none_is_none() {
        let nan = f32::from_bits(0x7fc0_1234);
        for op in [ReduceOp::Min, ReduceOp::Max] {
            for (a, b) in [(nan, 1.0), (1.0, nan)] {
                let got = one(DataType::F32, op, a.to_ne_bytes(), b.to_ne_bytes());
                assert_eq!(got, nan.to_ne_bytes());
            }
            // Neither zero is less.
            assert_eq!(
                one(DataType::F32, op, (-0.0_f32).to_ne_bytes(), 0.0_f32.to_ne_bytes()),
                (-0.0_f32).to_ne_bytes()
            );
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
