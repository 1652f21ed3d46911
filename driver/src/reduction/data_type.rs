//! The types and operations of reductions, and their names.

use std::fmt;
use std::str::FromStr;

use super::Error;

/// The type of the elements, in the byte order of the machine.
///
/// | text | type |
/// |---|---|
/// | `i8` `i16` `i32` `i64`, or `int8` `int32` `int64` | two's complement |
/// | `u8` `u16` `u32` `u64`, or `uint8` `uint32` `uint64` | unsigned |
/// | `f16` or `half`, `f32` or `float`, `f64` or `double` | IEEE 754 |
/// | `bf16` or `bfloat16` | the upper half of an f32 |
/// | `f8e4m3` or `fp8_e4m3`, `f8e5m2` or `fp8_e5m2` | the 8-bit formats of the Open Compute Project |
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
    /// IEEE 754 binary16. Computed in f32, and rounded to nearest, ties to even.
    F16 = 5,
    /// bfloat16: the upper half of an f32. Computed in f32, and rounded to nearest, ties to even.
    Bf16 = 6,
    /// Two's complement, 8 bits. Sums and products wrap.
    I8 = 7,
    /// Unsigned, 8 bits. Sums and products wrap.
    U8 = 8,
    /// Two's complement, 16 bits. Sums and products wrap.
    I16 = 9,
    /// Unsigned, 16 bits. Sums and products wrap.
    U16 = 10,
    /// Unsigned, 32 bits. Sums and products wrap.
    U32 = 11,
    /// Unsigned, 64 bits. Sums and products wrap.
    U64 = 12,
    /// E4M3 of the Open Compute Project (`float8_e4m3fn` of PyTorch and ml_dtypes): 4 bits of exponent, 3 of mantissa, at
    /// most 448, no infinity, and one NaN of each sign (0x7f, 0xff). Computed in f32, and rounded to nearest, ties to even.
    /// A rounded result above 448 becomes a NaN, as in PyTorch and in ml_dtypes: it does not saturate.
    F8E4M3 = 13,
    /// E5M2 of the Open Compute Project (`float8_e5m2` of PyTorch and ml_dtypes): the upper half of an f16, at most 57344,
    /// with infinities and NaNs. Computed in f32, and rounded to nearest, ties to even. Overflow becomes infinity.
    F8E5M2 = 14,
}

impl DataType {
    /// All types.
    pub const ALL: [DataType; 14] = [
        DataType::F32,
        DataType::I32,
        DataType::F64,
        DataType::I64,
        DataType::F16,
        DataType::Bf16,
        DataType::I8,
        DataType::U8,
        DataType::I16,
        DataType::U16,
        DataType::U32,
        DataType::U64,
        DataType::F8E4M3,
        DataType::F8E5M2,
    ];

    /// Bytes of an element.
    pub const fn size(self) -> usize {
        match self {
            DataType::I8 | DataType::U8 | DataType::F8E4M3 | DataType::F8E5M2 => 1,
            DataType::I16 | DataType::U16 | DataType::F16 | DataType::Bf16 => 2,
            DataType::F32 | DataType::I32 | DataType::U32 => 4,
            DataType::F64 | DataType::I64 | DataType::U64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        use DataType as T;
        matches!(self, T::F32 | T::F64 | T::F16 | T::Bf16 | T::F8E4M3 | T::F8E5M2)
    }

    /// The names used here, then those of nccl-tests.
    const fn names(self) -> &'static [&'static str] {
        match self {
            DataType::F32 => &["f32", "float"],
            DataType::I32 => &["i32", "int32"],
            DataType::F64 => &["f64", "double"],
            DataType::I64 => &["i64", "int64"],
            DataType::F16 => &["f16", "half"],
            DataType::Bf16 => &["bf16", "bfloat16"],
            DataType::I8 => &["i8", "int8"],
            DataType::U8 => &["u8", "uint8"],
            DataType::I16 => &["i16"],
            DataType::U16 => &["u16"],
            DataType::U32 => &["u32", "uint32"],
            DataType::U64 => &["u64", "uint64"],
            DataType::F8E4M3 => &["f8e4m3", "fp8_e4m3"],
            DataType::F8E5M2 => &["f8e5m2", "fp8_e5m2"],
        }
    }
}

impl fmt::Display for DataType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names()[0])
    }
}

impl FromStr for DataType {
    type Err = Error;

    fn from_str(text: &str) -> Result<DataType, Error> {
        let found = DataType::ALL.into_iter().find(|data_type| data_type.names().contains(&text));
        found.ok_or_else(|| Error::DataType {
            text: text.to_owned(),
            valid: DataType::ALL.iter().flat_map(|data_type| data_type.names()).copied().collect(),
        })
    }
}

/// The operation on two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Their sum.
    Sum = 1,
    /// Their product.
    Product = 2,
    /// The later one if it is less than the earlier one, or is not a number; else the earlier one.
    Min = 3,
    /// The later one if it is greater than the earlier one, or is not a number; else the earlier one.
    Max = 4,
}

impl ReduceOp {
    /// All operations.
    pub const ALL: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::Product, ReduceOp::Min, ReduceOp::Max];

    /// The names used here, then those of nccl-tests.
    const fn names(self) -> &'static [&'static str] {
        match self {
            ReduceOp::Sum => &["sum"],
            ReduceOp::Product => &["product", "prod"],
            ReduceOp::Min => &["min"],
            ReduceOp::Max => &["max"],
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.names()[0])
    }
}

impl FromStr for ReduceOp {
    type Err = Error;

    fn from_str(text: &str) -> Result<ReduceOp, Error> {
        let found = ReduceOp::ALL.into_iter().find(|op| op.names().contains(&text));
        found.ok_or_else(|| Error::Op {
            text: text.to_owned(),
            valid: ReduceOp::ALL.iter().flat_map(|op| op.names()).copied().collect(),
        })
    }
}
