use std::fmt;

/// Errors of GPUs.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GpuError {
    /// The queue has no room now.
    #[error(
        "{copies} copies or reductions are outstanding, the capacity of the queue: try again when some have ended"
    )]
    Full {
        /// The size of the queue.
        copies: usize,
    },
    /// A call of the device's library failed.
    #[error("{device}: {call}: {reason}")]
    Call {
        /// The device.
        device: String,
        /// The function.
        call: &'static str,
        /// Its result, and the remedy if there is one.
        reason: String,
    },
    /// The device does not support this.
    #[error("{device}: {what}: {reason}")]
    Unsupported {
        /// The device.
        device: String,
        /// The requested operation.
        what: String,
        /// What is missing, and the remedy if there is one.
        reason: String,
    },
    /// Elements of a reduction are not aligned to their size.
    #[error(
        "{device}: elements of {size} bytes begin at byte {offset} of its memory: must be a multiple of {size}"
    )]
    Unaligned {
        /// The device.
        device: String,
        /// Bytes of an element.
        size: usize,
        /// The offset of a misaligned one.
        offset: u64,
    },
    /// There is no such device.
    #[error("{device}: {reason}")]
    NoDevice {
        /// The requested name.
        device: String,
        /// The existing devices, and what is missing.
        reason: String,
    },
    /// Host memory could not be allocated.
    #[error("{bytes} bytes of host memory for copies of a GPU: {reason}")]
    Staging {
        /// The number of bytes.
        bytes: usize,
        /// The kernel's error.
        reason: String,
    },
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for GpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
