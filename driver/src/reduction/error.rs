use std::fmt;
use std::ops::RangeInclusive;

use super::DataType;

/// Why a reduction is not possible.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no [`DataType`] of this name.
    #[error("data type {text:?}: valid are {}", valid.join(", "))]
    DataType {
        /// The given name.
        text: String,
        /// The valid names.
        valid: Vec<&'static str>,
    },
    /// There is no [`ReduceOp`](super::ReduceOp) of this name.
    #[error("operation {text:?}: valid are {}", valid.join(", "))]
    Op {
        /// The given name.
        text: String,
        /// The valid names.
        valid: Vec<&'static str>,
    },
    /// Integers can't be multiplied by this factor.
    #[error(
        "factor {factor} for elements of type {data_type}: an integer from {} to {} is needed",
        range.start(),
        range.end()
    )]
    Factor {
        /// The factor.
        factor: f64,
        /// The type of the elements.
        data_type: DataType,
        /// The valid factors.
        range: RangeInclusive<i128>,
    },
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
