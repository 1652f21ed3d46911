//! The kernels for this processor, by type and operation.

use std::sync::OnceLock;

#[cfg(target_arch = "x86_64")]
use super::avx2;
use super::element::{Bf16, Element, Max, Min, Op, Portable, Product, Sum};
use super::kernel::{self, Job};
use super::small_float::{E4M3, E5M2, F16};
use super::{DataType, ReduceOp};
use crate::memory::{Span, SpanMut};

/// A level of reductions that this processor supports. All levels give the same results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Processor(Level);

/// For levels that need more than the base architecture, a value exists only if [`Level::is_supported`] returned true: only
/// [`Processor::all`] creates values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Level {
    /// The fastest first.
    const ALL: &[Level] = &[
        #[cfg(target_arch = "x86_64")]
        Level::Avx2,
        Level::Portable,
    ];

    fn is_supported(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => avx2::is_supported(),
            Level::Portable => true,
        }
    }
}

/// Calls a function with the Rust type of a [`DataType`].
macro_rules! for_type {
    ($data_type:expr, $call:ident($($argument:expr),*)) => {
        match $data_type {
            DataType::F32 => $call::<f32>($($argument),*),
            DataType::F64 => $call::<f64>($($argument),*),
            DataType::F16 => $call::<F16>($($argument),*),
            DataType::Bf16 => $call::<Bf16>($($argument),*),
            DataType::F8E4M3 => $call::<E4M3>($($argument),*),
            DataType::F8E5M2 => $call::<E5M2>($($argument),*),
            DataType::I8 => $call::<i8>($($argument),*),
            DataType::U8 => $call::<u8>($($argument),*),
            DataType::I16 => $call::<i16>($($argument),*),
            DataType::U16 => $call::<u16>($($argument),*),
            DataType::I32 => $call::<i32>($($argument),*),
            DataType::U32 => $call::<u32>($($argument),*),
            DataType::I64 => $call::<i64>($($argument),*),
            DataType::U64 => $call::<u64>($($argument),*),
        }
    };
}

impl Processor {
    /// The fastest level that this processor supports. Only the first call queries the processor.
    #[inline]
    pub(super) fn get() -> Processor {
        static FASTEST: OnceLock<Processor> = OnceLock::new();
        *FASTEST.get_or_init(|| Processor::all().next().unwrap_or(Processor(Level::Portable)))
    }

    /// All levels that this processor supports, the fastest first, the portable one last.
    pub(super) fn all() -> impl Iterator<Item = Processor> {
        Level::ALL.iter().copied().filter(|level| level.is_supported()).map(Processor)
    }

    /// Its name for users.
    pub(super) fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => "avx2",
            Level::Portable => "portable",
        }
    }

    pub(super) fn reduce(self, data_type: DataType, op: ReduceOp, job: Job<'_>) {
        for_type!(data_type, reduce(self.0, op, job));
    }

    /// `target[i] = source[i] * factor`, for spans of equal length.
    pub(super) fn scale(self, data_type: DataType, target: SpanMut<'_>, source: Span<'_>, factor: f64) {
        for_type!(data_type, scale(self.0, target, source, factor));
    }
}

fn reduce<E: Element>(level: Level, op: ReduceOp, job: Job<'_>) {
    match op {
        ReduceOp::Sum => reduce_by::<E, Sum>(level, job),
        ReduceOp::Product => reduce_by::<E, Product>(level, job),
        ReduceOp::Min => reduce_by::<E, Min>(level, job),
        ReduceOp::Max => reduce_by::<E, Max>(level, job),
    }
}

fn reduce_by<E: Element, O: Op>(level: Level, job: Job<'_>) {
    match level {
        // SAFETY: a value of this level exists only on a processor with these features.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::reduce::<E, O>(job) },
        Level::Portable => kernel::reduce::<E, O, Portable>(job),
    }
}

fn scale<E: Element>(level: Level, target: SpanMut<'_>, source: Span<'_>, factor: f64) {
    match level {
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => unsafe { avx2::scale::<E>(target, source, factor) },
        Level::Portable => kernel::scale::<E, Portable>(target, source, factor),
    }
}
