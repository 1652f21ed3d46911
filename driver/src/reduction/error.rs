use std::fmt;
use std::ops::RangeInclusive;

use super::DataType;

/// What was asked of a reduction and can't be.
#[derive(Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No [`DataType`] is called so.
    #[error("data type {text:?}: valid are {}", valid.join(", "))]
    DataType {
        /// What was said.
        text: String,
        /// What would have been right.
        valid: Vec<&'static str>,
    },
    /// No [`ReduceOp`](super::ReduceOp) is called so.
    #[error("operation {text:?}: valid are {}", valid.join(", "))]
    Op {
        /// What was said.
        text: String,
        /// What would have been right.
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
        /// Of the elements.
        data_type: DataType,
        /// What would have been right.
        range: RangeInclusive<i128>,
    },
}

/// As it reads: `main() -> Result` prints it so.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
