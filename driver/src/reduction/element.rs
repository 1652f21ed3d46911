//! Elements in memory, the numbers used to compute with them, and the operations on two numbers.

use super::small_float::{E4M3, E5M2, F16, narrow, narrow_bf16, widen, widen_bf16};

/// Elements per block: a loop over this many compiles to vector code without a remainder.
pub(super) const LANES: usize = 32;

/// A block of values.
pub(super) type Block<T> = [T; LANES];

/// The conversion of blocks of small floats to f32 and back, for processors with special instructions. The converted block
/// may have another order than memory.
pub(super) trait Level {
    fn widen_f16(codes: &Block<u16>) -> Block<f32>;
    fn narrow_f16(values: &Block<f32>) -> Block<u16>;
    fn widen_bf16(codes: &Block<u16>) -> Block<f32>;
    fn narrow_bf16(values: &Block<f32>) -> Block<u16>;
    fn widen_e4m3(codes: &Block<u8>) -> Block<f32>;
    fn narrow_e4m3(values: &Block<f32>) -> Block<u8>;
    fn widen_e5m2(codes: &Block<u8>) -> Block<f32>;
    fn narrow_e5m2(values: &Block<f32>) -> Block<u8>;
}

/// For every processor.
pub(super) struct Portable;

impl Level for Portable {
    #[inline(always)]
    fn widen_f16(codes: &Block<u16>) -> Block<f32> {
        map(codes, |code| widen::<F16>(u32::from(code)))
    }

    #[inline(always)]
    fn narrow_f16(values: &Block<f32>) -> Block<u16> {
        map(values, |value| narrow::<F16>(value) as u16)
    }

    #[inline(always)]
    fn widen_bf16(codes: &Block<u16>) -> Block<f32> {
        map(codes, widen_bf16)
    }

    #[inline(always)]
    fn narrow_bf16(values: &Block<f32>) -> Block<u16> {
        map(values, narrow_bf16)
    }

    #[inline(always)]
    fn widen_e4m3(codes: &Block<u8>) -> Block<f32> {
        map(codes, |code| widen::<E4M3>(u32::from(code)))
    }

    #[inline(always)]
    fn narrow_e4m3(values: &Block<f32>) -> Block<u8> {
        map(values, |value| narrow::<E4M3>(value) as u8)
    }

    #[inline(always)]
    fn widen_e5m2(codes: &Block<u8>) -> Block<f32> {
        map(codes, |code| widen::<E5M2>(u32::from(code)))
    }

    #[inline(always)]
    fn narrow_e5m2(values: &Block<f32>) -> Block<u8> {
        map(values, |value| narrow::<E5M2>(value) as u8)
    }
}

/// Applies `to` to each element.
#[inline(always)]
pub(super) fn map<A: Copy, B: Copy + Default>(block: &Block<A>, to: impl Fn(A) -> B) -> Block<B> {
    let mut result = [B::default(); LANES];
    for (result, &value) in result.iter_mut().zip(block) {
        *result = to(value);
    }
    result
}

/// A number to compute with.
pub(super) trait Number: Copy + Default + PartialOrd {
    /// A factor, or a divisor, in the form that the computation needs.
    type By: Copy;

    fn plus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
    fn divisor(by: u32) -> Self::By;
    fn divided(self, by: Self::By) -> Self;
    /// The nearest such number.
    fn factor(factor: f64) -> Self;
}

macro_rules! floats {
    ($($number:ty)*) => {$(
        impl Number for $number {
            type By = $number;

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self + other
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self * other
            }

            #[inline(always)]
            fn divisor(by: u32) -> Self {
                by as $number
            }

            #[inline(always)]
            fn divided(self, by: Self) -> Self {
                self / by
            }

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as $number
            }
        }
    )*};
}

floats! { f32 f64 }

macro_rules! integers {
    ($($number:ty: $by:ty, $divisor:expr;)*) => {$(
        impl Number for $number {
            type By = $by;

            #[inline(always)]
            fn plus(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn times(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn divisor(by: u32) -> $by {
                $divisor(by)
            }

            #[inline(always)]
            fn divided(self, by: $by) -> Self {
                (self as $by / by) as $number
            }

            #[inline(always)]
            fn factor(factor: f64) -> Self {
                factor as $number
            }
        }
    )*};
}

// Processors can divide vectors of floats, but not of integers. A quotient that is not whole is at least 1 / `by` away from
// a whole number; the rounding error is less than that if the dividend is at most 2^16 in an f32, or 2^32 in an f64. If
// `by` is 2^16 or more, all quotients of 16-bit integers are 0.
integers! {
    i8: f32, |by: u32| by.min(1 << 16) as f32;
    u8: f32, |by: u32| by.min(1 << 16) as f32;
    i16: f32, |by: u32| by.min(1 << 16) as f32;
    u16: f32, |by: u32| by.min(1 << 16) as f32;
    i32: f64, f64::from;
    u32: f64, f64::from;
    i64: i64, i64::from;
    u64: u64, u64::from;
}

/// An operation on two numbers; the first is the earlier one.
pub(super) trait Op {
    fn join<N: Number>(earlier: N, later: N) -> N;
}

pub(super) struct Sum;

impl Op for Sum {
    #[inline(always)]
    fn join<N: Number>(earlier: N, later: N) -> N {
        earlier.plus(later)
    }
}

pub(super) struct Product;

impl Op for Product {
    #[inline(always)]
    fn join<N: Number>(earlier: N, later: N) -> N {
        earlier.times(later)
    }
}

/// Unlike `fmin`, it returns a NaN if there is one, and the bits are those of one of the operands.
pub(super) struct Min;

impl Op for Min {
    #[inline(always)]
    fn join<N: Number>(earlier: N, later: N) -> N {
        if later < earlier || is_unordered(later) { later } else { earlier }
    }
}

/// As [`Min`].
pub(super) struct Max;

impl Op for Max {
    #[inline(always)]
    fn join<N: Number>(earlier: N, later: N) -> N {
        if later > earlier || is_unordered(later) { later } else { earlier }
    }
}

#[inline(always)]
fn is_unordered<N: Number>(value: N) -> bool {
    value.partial_cmp(&value).is_none()
}

/// The form in memory.
///
/// # Safety
/// It has no padding, and any bits are valid.
pub(super) unsafe trait Raw: Copy + Default {}

/// An element type.
pub(super) trait Element {
    /// The form in memory.
    type Raw: Raw;
    /// The number to compute with.
    type Number: Number;

    fn widen<L: Level>(raw: &Block<Self::Raw>) -> Block<Self::Number>;
    fn narrow<L: Level>(numbers: &Block<Self::Number>) -> Block<Self::Raw>;
}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: a primitive number.
        unsafe impl Raw for $number {}

        impl Element for $number {
            type Raw = $number;
            type Number = $number;

            #[inline(always)]
            fn widen<L: Level>(raw: &Block<$number>) -> Block<$number> {
                *raw
            }

            #[inline(always)]
            fn narrow<L: Level>(numbers: &Block<$number>) -> Block<$number> {
                *numbers
            }
        }
    )*};
}

numbers! { f32 f64 i8 u8 i16 u16 i32 u32 i64 u64 }

macro_rules! small_floats {
    ($($element:ty: $raw:ty, $widen:expr, $narrow:expr;)*) => {$(
        impl Element for $element {
            type Raw = $raw;
            type Number = f32;

            #[inline(always)]
            fn widen<L: Level>(raw: &Block<$raw>) -> Block<f32> {
                $widen(raw)
            }

            #[inline(always)]
            fn narrow<L: Level>(numbers: &Block<f32>) -> Block<$raw> {
                $narrow(numbers)
            }
        }
    )*};
}

pub(super) struct Bf16;

small_floats! {
    F16: u16, L::widen_f16, L::narrow_f16;
    Bf16: u16, L::widen_bf16, L::narrow_bf16;
    E4M3: u8, L::widen_e4m3, L::narrow_e4m3;
    E5M2: u8, L::widen_e5m2, L::narrow_e5m2;
}
