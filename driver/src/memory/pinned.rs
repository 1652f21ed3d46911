//! Memory that a port sends from where it is.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Span};

/// Part of a [`Memory`](super::Memory) that a port sends from where it is. The memory is not given back by a context
/// while one is left.
///
/// Only the address can be had: the owner may write these bytes while the device reads them, which
/// then sends old or new ones, as any RNIC does.
pub struct Pinned {
    base: NonNull<u8>,
    len: usize,
    _handle: Arc<Handle>,
}

// SAFETY: an address, and a share in what keeps it valid, which is `Send` and `Sync` in every kind of memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// `handle` keeps the bytes valid.
    pub(super) fn new(base: NonNull<u8>, len: usize, handle: Arc<Handle>) -> Pinned {
        Pinned { base, len, _handle: handle }
    }

    /// The first byte; readable while the value lives.
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// The bytes, to copy from.
    pub fn span(&self) -> Span<'_> {
        // SAFETY: `_handle` keeps the bytes valid while the value lives.
        unsafe { Span::new(self.base, self.len) }
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "a payload is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pinned({} bytes)", self.len)
    }
}
