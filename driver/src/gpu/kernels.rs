//! The kernel of `reduce.c` for a computation and its arguments, for both libraries.

use std::ffi::CString;

use super::MAX_SOURCES;
use crate::reduction::{Computation, DataType, ReduceOp};

/// A kernel of `reduce.c`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Kernel {
    pub(super) data_type: DataType,
    what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum What {
    OfTwo(ReduceOp),
    OfMany(ReduceOp),
    Scaled,
}

impl Kernel {
    /// The kernel of a computation of `sources` sources. `None` for a copy.
    pub(super) fn of(computation: Computation, sources: usize) -> Option<Kernel> {
        let (data_type, what) = match computation {
            _ if computation.is_copy(sources) => return None,
            Computation::Reduce(of) if sources == 2 && of.divide_by.is_none() => {
                (of.data_type, What::OfTwo(of.op))
            }
            Computation::Reduce(of) => (of.data_type, What::OfMany(of.op)),
            Computation::Scale { data_type, .. } => (data_type, What::Scaled),
        };
        Some(Kernel { data_type, what })
    }

    /// All kernels of `reduce.c`.
    pub(super) fn all() -> impl Iterator<Item = Kernel> {
        DataType::ALL.iter().flat_map(|data_type| {
            let of_ops = ReduceOp::ALL.into_iter().flat_map(|op| [What::OfTwo(op), What::OfMany(op)]);
            of_ops.chain([What::Scaled]).map(|what| Kernel { data_type: *data_type, what })
        })
    }

    /// Its name.
    pub(super) fn name(self) -> CString {
        let Kernel { data_type, what } = self;
        let name = match what {
            What::OfTwo(op) => format!("{op}_{data_type}"),
            What::OfMany(op) => format!("{op}_{data_type}_of_many"),
            What::Scaled => format!("scaled_{data_type}"),
        };
        CString::new(name).unwrap_or_default()
    }

    /// The number of sources in its declaration. Those beyond the computation's own are not read.
    pub(super) fn sources(self) -> usize {
        match self.what {
            What::OfTwo(_) => 2,
            What::OfMany(_) => MAX_SOURCES,
            What::Scaled => 1,
        }
    }

    /// The arguments after the sources, which have `count` elements each: numbers of 64 bits.
    pub(super) fn numbers(self, computation: Computation, sources: usize, count: u64) -> [Option<u64>; 3] {
        match (self.what, computation) {
            (What::OfMany(_), Computation::Reduce(of)) => {
                [Some(count), Some(sources as u64), Some(of.divide_by.unwrap_or(0).into())]
            }
            (_, Computation::Scale { data_type, factor }) => {
                [Some(count), Some(bits_of(data_type, factor)), None]
            }
            _ => [Some(count), None, None],
        }
    }
}

/// The bits of a factor of that type, or of f32 if the kernel computes in f32; the lower bits first.
fn bits_of(data_type: DataType, factor: f64) -> u64 {
    match data_type {
        DataType::F64 => factor.to_bits(),
        DataType::I8 => factor as i8 as u64,
        DataType::U8 => factor as u8 as u64,
        DataType::I16 => factor as i16 as u64,
        DataType::U16 => factor as u16 as u64,
        DataType::I32 => factor as i32 as u64,
        DataType::U32 => factor as u32 as u64,
        DataType::I64 => factor as i64 as u64,
        DataType::U64 => factor as u64,
        DataType::F32 | DataType::F16 | DataType::Bf16 | DataType::F8E4M3 | DataType::F8E5M2 => {
            (factor as f32).to_bits().into()
        }
    }
}
