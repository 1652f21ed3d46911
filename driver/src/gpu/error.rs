use std::fmt;

/// What a GPU refuses.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The queue has no room now.
    #[error(
        "{copies} copies or reductions are under way, which is all that the queue holds: try again when some have ended"
    )]
    Full {
        /// How many there are.
        copies: usize,
    },
    /// A call of the device's library has failed.
    #[error("{device}: {call}: {reason}")]
    Call {
        /// The device.
        device: String,
        /// The function.
        call: &'static str,
        /// What it returned, and the remedy if there is one.
        reason: String,
    },
    /// The device does not do that.
    #[error("{device}: {what}: {reason}")]
    Unsupported {
        /// The device.
        device: String,
        /// What was asked for.
        what: String,
        /// What is missing, and the remedy if there is one.
        reason: String,
    },
    /// Elements of a reduction don't begin at a multiple of their size.
    #[error(
        "{device}: elements of {size} bytes begin at byte {offset} of its memory: a multiple of {size} is needed"
    )]
    Unaligned {
        /// The device.
        device: String,
        /// Bytes of an element.
        size: usize,
        /// Where they begin.
        offset: u64,
    },
    /// There is no such device.
    #[error("{device}: {reason}")]
    NoDevice {
        /// As it was named.
        device: String,
        /// What there is, and what is missing.
        reason: String,
    },
    /// Host memory could not be had.
    #[error("{bytes} bytes of host memory for copies of a GPU: {reason}")]
    Staging {
        /// How many.
        bytes: usize,
        /// What the kernel says.
        reason: String,
    },
}

/// As it reads: `main() -> Result` prints it so.
impl fmt::Debug for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
