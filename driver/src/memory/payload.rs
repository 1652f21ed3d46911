//! Payloads sent from registered memory without a copy.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Memory, MemoryKind, Span};

/// Bytes of owned memory that a port may send without a copy. The memory can't be written while a payload exists.
///
/// ```compile_fail,E0502
/// # use ferroce_driver::Memory;
/// let mut memory = Memory::zeroed(64).unwrap();
/// let payload = memory.payload(0, 64).unwrap();
/// payload.span().copy_to(memory.bytes_mut().unwrap());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    span: Span<'a>,
    handle: &'a Arc<Handle>,
}

impl<'a> Payload<'a> {
    /// The number of bytes.
    #[expect(clippy::len_without_is_empty, reason = "a payload is never empty")]
    pub fn len(self) -> usize {
        self.span.len()
    }

    /// The bytes, to copy from.
    pub fn span(self) -> Span<'a> {
        self.span
    }

    /// Pins the bytes: they stay valid until the value is dropped, even if the memory is dropped.
    pub fn pin(self) -> Pinned {
        Pinned { base: self.span.base(), len: self.span.len(), _handle: Arc::clone(self.handle) }
    }
}

impl Memory {
    /// Bytes `offset..offset + len` for a port that sends them without a copy. `None` outside the block, and for memory
    /// that others may write: the port could send bytes other than those covered by the ICRC.
    pub fn payload(&self, offset: u64, len: usize) -> Option<Payload<'_>> {
        if self.kind() != MemoryKind::Owned {
            return None;
        }
        Some(Payload { span: self.span(offset, len)?, handle: &self.block })
    }

    /// Whether a port still sends from it, or a [`Held`](super::Held) exists.
    pub fn is_pinned(&mut self) -> bool {
        Arc::get_mut(&mut self.block).is_none()
    }
}

/// Part of a [`Memory`] that a port sends without a copy. A context does not return the memory while one exists.
///
/// Only the address is available, for a device. The owner may write these bytes while the device reads them; it then
/// sends old or new ones, like any RNIC.
///
/// ```compile_fail,E0599
/// # use ferroce_driver::Memory;
/// let mut memory = Memory::zeroed(64).unwrap();
/// let pinned = memory.payload(0, 64).unwrap().pin();
/// pinned.span().copy_to(memory.bytes_mut().unwrap());
/// ```
pub struct Pinned {
    base: NonNull<u8>,
    len: usize,
    _handle: Arc<Handle>,
}

// SAFETY: an address, with a reference to its owner, which is `Send` and `Sync` for every kind of memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The first byte, readable as long as the value exists.
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// The number of bytes.
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
