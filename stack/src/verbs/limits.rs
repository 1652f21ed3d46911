//! What the standard bounds.

/// Bytes of the longest message: 2³¹, as the standard has it.
pub(crate) const MAX_MESSAGE: u32 = 1 << 31;

/// The most READs and atomics that a queue pair has outstanding, each way.
pub(crate) const MAX_RD_ATOMIC: u8 = 128;

/// Completions of the largest completion queue.
pub(crate) const MAX_CQE: u32 = 1 << 22;
