//! Limits of the standard.

/// Bytes of the longest message: 2³¹, as in the standard.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The most READs and atomics that a queue pair has outstanding, in each direction.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

/// Completions of the largest completion queue.
pub(crate) const MAX_CQE: u32 = 1 << 22;
