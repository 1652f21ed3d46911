//! Payloads that are sent from where they are registered.

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{Handle, Memory, MemoryKind, Span};

/// Bytes of owned memory that a port may send from where they are. The memory can't be written while one is left.
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
    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "a payload is never empty")]
    pub fn len(self) -> usize {
        self.span.len()
    }

    /// The bytes, to copy from.
    pub fn span(self) -> Span<'a> {
        self.span
    }

    /// Holds the bytes for longer: they stay valid until the value is dropped, whatever becomes of the memory.
    pub fn pin(self) -> Pinned {
        Pinned { base: self.span.base(), len: self.span.len(), _handle: Arc::clone(self.handle) }
    }
}

impl Memory {
    /// Bytes `offset..offset + len` for a port that sends them from where they are. `None` outside the block, and for
    /// memory that others may write: the port could send other bytes than those that the ICRC is of.
    pub fn payload(&self, offset: u64, len: usize) -> Option<Payload<'_>> {
        if self.kind() != MemoryKind::Owned {
            return None;
        }
        Some(Payload { span: self.span(offset, len)?, handle: &self.block })
    }

    /// Whether a port still sends from it.
    pub fn is_pinned(&mut self) -> bool {
        Arc::get_mut(&mut self.block).is_none()
    }
}

/// Part of a [`Memory`] that a port sends from where it is. The memory is not given back by a context while one is
/// left.
///
/// Only the address can be had, for a device: the owner may write these bytes while the device reads them, which
/// then sends old or new ones, as any RNIC does.
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

// SAFETY: an address, and a share in what keeps it valid, which is `Send` and `Sync` in every kind of memory.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The first byte; readable while the value lives.
    pub fn address(&self) -> NonNull<u8> {
        self.base
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
