//! An invalid value: its place, the value, and the valid values.

use std::fmt;

use crate::failure::legible;

/// The place, the value, and the valid values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wrong {
    /// Its place in a description, such as `switches.kmin` or `traffic.0.to`.
    pub(crate) place: String,
    pub(crate) value: String,
    pub(crate) right: String,
}

impl Wrong {
    pub(super) fn new(place: impl Into<String>, value: impl fmt::Display, right: impl Into<String>) -> Wrong {
        Wrong { place: place.into(), value: value.to_string(), right: right.into() }
    }

    /// The last part of its place.
    pub(super) fn key(&self) -> &str {
        self.place.rsplit('.').next().unwrap_or_default()
    }
}

impl fmt::Display for Wrong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}: must be {}", self.place, legible(&self.value), self.right)
    }
}
