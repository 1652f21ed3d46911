//! Reductions: `target[i] = source0[i] ⊕ source1[i] ⊕ …`, over bytes in the byte order of the machine.
//!
//! A [`Reduction`] works on [`Span`]s, because other processes may map the memory and write it at any time. The result may be
//! stored in several targets, and a target may be one of the sources:
//!
//! ```
//! use ferroce_driver::memory::SpanMut;
//! use ferroce_driver::reduction::{DataType, ReduceOp, Reduction};
//!
//! let mut own = [1.0_f32, 2.0].map(f32::to_ne_bytes);
//! let theirs = [3.0_f32, 4.0].map(f32::to_ne_bytes);
//! let own: SpanMut = own.as_flattened_mut().into();
//! let mean = Reduction::new(DataType::F32, ReduceOp::Sum).divide_by(2);
//! mean.apply(&[own], &[own.as_span(), theirs.as_flattened().into()]);
//!
//! let mut means = [0; 8];
//! own.as_span().copy_to(&mut means);
//! assert_eq!(means, *[2.0_f32, 3.0].map(f32::to_ne_bytes).as_flattened());
//! ```
//!
//! [`reduce`] does the same for two slices. A GPU ([`gpu::Reducer`](crate::gpu::Reducer)) computes the same bits. [`scale`]
//! multiplies by a factor.
//!
//! # Arithmetic
//!
//! | type | sum, product | divided by n |
//! |---|---|---|
//! | signed integers | wrap | rounded towards zero |
//! | unsigned integers | wrap | rounded down |
//! | f32, f64 | IEEE 754, rounded to the nearest at each step | by n in the same type |
//! | f16, bf16, f8e4m3, f8e5m2 | in f32 over all sources of the call; the result is rounded once | in f32, before that |
//!
//! Rounding is to nearest, ties to even. Overflow becomes infinity, in f8e4m3 a NaN. If a sum, a product or a quotient is a NaN,
//! its sign and payload are undefined.
//!
//! [`Min`](ReduceOp::Min) and [`Max`](ReduceOp::Max) return one of the elements unchanged, a NaN if there is one; but a NaN of a
//! small float may be made quiet. Of zeros with different signs, which are equal, it is the first.
//!
//! The bits depend neither on which source a target is, nor on the number of targets, the position of an element, or the
//! processor.

#[cfg(target_arch = "x86_64")]
mod avx2;
mod data_type;
mod element;
mod error;
mod kernel;
mod parts;
mod processor;
mod small_float;

use std::ops::RangeInclusive;

use crate::memory::{Span, SpanMut};
use kernel::Job;
use processor::Processor;

pub use data_type::{DataType, ReduceOp};
pub use error::Error;
pub use parts::{Computable, Computation, Part};

/// The most sources, and the most targets, of a [`Reduction`].
pub const MAX_SPANS: usize = 64;

/// A reduction of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
#[non_exhaustive]
pub struct Reduction {
    /// The type of all elements.
    pub data_type: DataType,
    /// The operation on two elements.
    pub op: ReduceOp,
    /// The divisor of the result, if any.
    pub divide_by: Option<u32>,
}

impl Reduction {
    /// The operation without a division.
    pub const fn new(data_type: DataType, op: ReduceOp) -> Reduction {
        Reduction { data_type, op, divide_by: None }
    }

    /// Divides the result of all sources by a number of at least 1. By default there is no division.
    pub fn divide_by(mut self, divide_by: impl Into<Option<u32>>) -> Reduction {
        self.divide_by = divide_by.into();
        self
    }

    /// Reduces all sources, in their order from left to right, and stores the result in each target.
    ///
    /// A target may be the same memory as any of the sources. If it overlaps with one that is not the same, or a source is
    /// written meanwhile, elements there are undefined. No alignment is required.
    ///
    /// # Panics
    /// If there is no source or no target, or more than [`MAX_SPANS`]; if they differ in length, or do not hold whole elements;
    /// if it divides by 0.
    pub fn apply(self, targets: &[SpanMut<'_>], sources: &[Span<'_>]) {
        let job = Job::new(targets, sources, self.divide_by);
        assert!(
            targets.len() <= MAX_SPANS && sources.len() <= MAX_SPANS,
            "{} sources and {} targets of a reduction, of which there are {MAX_SPANS} at most",
            sources.len(),
            targets.len()
        );
        check_len(self.data_type, sources[0].len());
        assert_ne!(self.divide_by, Some(0), "a reduction divides by a number from 1 on");
        match (sources, self.divide_by) {
            ([source], None) => targets.iter().for_each(|target| target.copy_from(*source)),
            _ => Processor::get().reduce(self.data_type, self.op, job),
        }
    }
}

/// Reduces `source` into `target`, as an all-reduce does with a chunk. As [`Reduction::apply`].
///
/// # Panics
/// If they differ in length, or do not hold whole elements.
pub fn reduce(data_type: DataType, op: ReduceOp, target: &mut [u8], source: &[u8]) {
    let target = SpanMut::from(target);
    Reduction::new(data_type, op).apply(&[target], &[target.as_span(), source.into()]);
}

/// `target[i] = source[i] * factor`. The target may be the same memory as the source.
///
/// Floats are multiplied by the nearest f32 of the factor, and in f32; f64 in f64. The product is rounded once to the type. An
/// integer's product wraps; a factor that [`check_factor`] refuses is rounded towards zero, and clamped to the range of the type.
///
/// # Panics
/// If they differ in length, or do not hold whole elements.
pub fn scale(data_type: DataType, target: SpanMut<'_>, source: Span<'_>, factor: f64) {
    assert_eq!(target.len(), source.len(), "spans that are not equally long");
    check_len(data_type, target.len());
    Processor::get().scale(data_type, target, source, factor);
}

/// Whether elements can be multiplied by this factor: floats by any, integers by those of their type.
///
/// # Errors
/// [`Error::Factor`].
pub fn check_factor(data_type: DataType, factor: f64) -> Result<(), Error> {
    let Some(range) = integers(data_type) else { return Ok(()) };
    // Exact: an integral f64 outside i128 is far out of range.
    if factor.fract() == 0.0 && range.contains(&(factor as i128)) {
        return Ok(());
    }
    Err(Error::Factor { factor, data_type, range })
}

/// The level of the processor's instructions that reductions use: `avx2`, `portable`.
pub fn processor() -> &'static str {
    Processor::get().name()
}

/// The range of a type of integers.
fn integers(data_type: DataType) -> Option<RangeInclusive<i128>> {
    let bits = 8 * data_type.size() as u32;
    match data_type {
        DataType::I8 | DataType::I16 | DataType::I32 | DataType::I64 => {
            Some(-(1 << (bits - 1))..=(1 << (bits - 1)) - 1)
        }
        DataType::U8 | DataType::U16 | DataType::U32 | DataType::U64 => Some(0..=(1 << bits) - 1),
        DataType::F16
        | DataType::Bf16
        | DataType::F8E4M3
        | DataType::F8E5M2
        | DataType::F32
        | DataType::F64 => None,
    }
}

fn check_len(data_type: DataType, len: usize) {
    assert!(len.is_multiple_of(data_type.size()), "{len} bytes hold no whole elements of type {data_type}");
}

#[cfg(test)]
mod tests;
