//! Memory that can be registered with a protection domain.
//!
//! | made by | kind | who may write it while a context holds it | slices |
//! |---|---|---|---|
//! | [`Memory::zeroed`], [`Memory::copy_of`] | [`Owned`](MemoryKind::Owned) | only that context | yes |
//! | [`Memory::shared`] | [`Shared`](MemoryKind::Shared) | every context and thread with a handle of it | no |
//! | [`Memory::from_raw`] | [`Foreign`](MemoryKind::Foreign) | anything that has the pointer | no |
//! | [`gpu::Device::allocate`] | [`Device`](MemoryKind::Device) | the GPU, by copies | no |
//!
//! The kind never changes. Copies ([`read`](Memory::read), [`write`](Memory::write)) and words ([`load_u64`](Memory::load_u64),
//! [`store_u64`](Memory::store_u64)) work on every kind.

mod device;
mod host;
mod payload;
mod span;

use std::any::Any;
use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::gpu::{self, GpuError};

pub use device::{Held, Piece};
pub(crate) use host::{AnonymousMapping, EmptyRange};
pub use payload::{Payload, Pinned};
pub(crate) use span::copy_in;
pub use span::{Span, SpanMut};

/// A block of memory with a stable address, to register with a context, which returns it at deregistration.
///
/// ```
/// use ferroce_driver::Memory;
///
/// let mut memory = Memory::zeroed(4096)?;
/// memory.write(0, b"hello")?;
/// assert_eq!(&memory.bytes()?[..5], b"hello");
///
/// let table = Memory::shared(4096)?;
/// let mut here = table.share()?; // another handle, for another context or thread
/// here.store_u64(8, 7)?;
/// assert_eq!(table.load_u64(8)?, 7);
/// assert!(table.bytes().is_err()); // somebody may write it
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    /// The number of bytes that the CPU may access: all, or none of device memory.
    reach: usize,
    /// Owned by this value; only pinned parts share it.
    block: Arc<Handle>,
}

/// The owner of the bytes, which keeps them in place.
#[derive(Debug)]
struct Handle {
    kind: MemoryKind,
    block: Block,
}

#[derive(Clone, Debug)]
enum Block {
    Host { _mapping: Arc<AnonymousMapping> },
    Foreign { _owner: Arc<dyn Any + Send + Sync> },
    Device(Arc<dyn gpu::Block>),
}

/// The possible users of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// One holder: a thread, or the context with which it is registered.
    Owned,
    /// All holders of its handles, at the same time.
    Shared,
    /// Anything that has the pointer.
    Foreign,
    /// A GPU. The CPU does not access it.
    Device,
}

/// The reason why an access to memory failed.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A slice requires that there are no concurrent writes.
    #[error(
        "{kind} memory has no slices, because {}", match kind {
            MemoryKind::Device => "the CPU can't reach it: use read and write",
            _ => "other processes may write it at any time: use read and write, load_u64 and store_u64, or atomics",
        }
    )]
    NoSlices {
        /// The memory's kind.
        kind: MemoryKind,
    },
    /// The memory is registered with a card.
    #[error(
        "memory that is registered with an RNIC has no slices, because the card may write it at any time: use read and \
         write, load_u64 and store_u64"
    )]
    Card,
    /// Owned memory has one holder, which may borrow slices of it.
    #[error("owned memory has one holder: make memory for several with Memory::shared")]
    NotShared,
    /// Outside the block.
    #[error("{len} bytes from offset {offset} on, of memory of {length} bytes")]
    Range {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: usize,
        /// The length of the block.
        length: usize,
    },
    /// The device could not copy.
    #[error(transparent)]
    Gpu(Box<GpuError>),
    /// An atomic operation on device memory.
    #[error("memory of a device has no atomics: load and store its words")]
    NoAtomics,
    /// Host memory instead of device memory.
    #[error("memory of the host is no device's: allocate it with gpu::Device::allocate")]
    NotADevices,
    /// A word of memory with several users is misaligned.
    #[error("offset {offset}: its address must be a multiple of 8")]
    Alignment {
        /// The offset.
        offset: u64,
    },
}

/// Like [`Display`](fmt::Display), because `main() -> Result` prints errors with this.
impl fmt::Debug for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

// SAFETY: `&self` reads, and writes only shared memory, by atomics; `&mut self` writes. Bytes of owned memory are
// accessed only through this value, and slices borrow it. Bytes of shared and foreign memory are accessed only by
// copies through raw pointers and by atomics. So it may be moved between threads and shared by them like a `Box<[u8]>`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes of zeros, owned, page-aligned and prefaulted: the first access to a page takes microseconds, which must not
    /// happen in the poll loop.
    ///
    /// # Errors
    /// The error of `mmap`, usually `ENOMEM`.
    pub fn zeroed(len: usize) -> io::Result<Memory> {
        Memory::mapped(len, MemoryKind::Owned)
    }

    /// A copy of `bytes`, owned.
    ///
    /// # Errors
    /// As [`Memory::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Memory> {
        let memory = Memory::zeroed(bytes.len())?;
        // SAFETY: the mapping has as many bytes, and is not used elsewhere yet.
        unsafe { copy_in(memory.base, bytes) };
        Ok(memory)
    }

    /// As [`Memory::zeroed`], for several contexts and threads at once: [`share`](Memory::share) returns further handles.
    ///
    /// # Errors
    /// As [`Memory::zeroed`].
    pub fn shared(len: usize) -> io::Result<Memory> {
        Memory::mapped(len, MemoryKind::Shared)
    }

    /// Foreign memory: a shared mapping, a buffer of a C library or of an unmodified program. `owner` is dropped together with
    /// the last of this value and its shares.
    ///
    /// # Safety
    /// The `len` bytes at `base` must be initialised and valid for reads and writes until `owner` is dropped. Others
    /// may read and write them at any time, by atomics or like a device; a program that polls on them keeps this
    /// contract. There must be no Rust references to them except to atomics.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize, owner: impl Any + Send + Sync) -> Memory {
        let block = Block::Foreign { _owner: Arc::new(owner) };
        Memory { base, len, reach: len, block: Arc::new(Handle { kind: MemoryKind::Foreign, block }) }
    }

    fn mapped(len: usize, kind: MemoryKind) -> io::Result<Memory> {
        let mapping = AnonymousMapping::zeroed(len)?;
        let base = mapping.base();
        let block = Block::Host { _mapping: Arc::new(mapping) };
        Ok(Memory { base, len, reach: len, block: Arc::new(Handle { kind, block }) })
    }

    /// Another handle for the same bytes.
    ///
    /// # Errors
    /// [`MemoryError::NotShared`] for owned memory.
    pub fn share(&self) -> Result<Memory, MemoryError> {
        if self.kind() == MemoryKind::Owned {
            return Err(MemoryError::NotShared);
        }
        let handle = Handle { kind: self.block.kind, block: self.block.block.clone() };
        Ok(Memory { base: self.base, len: self.len, reach: self.reach, block: Arc::new(handle) })
    }

    /// Its kind.
    pub fn kind(&self) -> MemoryKind {
        self.block.kind
    }

    /// The number of bytes.
    #[inline(always)]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte. Code that reads or writes through it must obey the rules of the memory's
    /// [kind](MemoryKind).
    pub fn address(&self) -> NonNull<u8> {
        self.base
    }

    /// All bytes.
    ///
    /// # Errors
    /// [`MemoryError::NoSlices`], except for owned memory.
    pub fn bytes(&self) -> Result<&[u8], MemoryError> {
        self.check_slices()?;
        // SAFETY: `len` initialised bytes that are valid as long as `self` (the mapping). The memory is owned, so
        // writes need `&mut self`.
        Ok(unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) })
    }

    /// All bytes, mutable.
    ///
    /// # Errors
    /// As [`bytes`](Memory::bytes).
    pub fn bytes_mut(&mut self) -> Result<&mut [u8], MemoryError> {
        self.check_slices()?;
        // SAFETY: as in `bytes`; `&mut self` makes the borrow unique.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) })
    }

    fn check_slices(&self) -> Result<(), MemoryError> {
        match self.kind() {
            MemoryKind::Owned => Ok(()),
            kind => Err(MemoryError::NoSlices { kind }),
        }
    }

    /// Copies the bytes at `offset` to `to`. With concurrent writes, some are old and some are new.
    ///
    /// # Errors
    /// [`MemoryError::Range`].
    pub fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), MemoryError> {
        match self.span(offset, to.len()) {
            Some(span) => span.copy_to(to),
            None => self.read_by_device(offset, to)?,
        }
        Ok(())
    }

    /// Copies `from` to the bytes at `offset`. The last bytes are stored last, with release: a reader that waits for
    /// them with an acquire load sees all bytes.
    ///
    /// # Errors
    /// [`MemoryError::Range`].
    #[inline]
    pub fn write(&mut self, offset: u64, from: &[u8]) -> Result<(), MemoryError> {
        if self.write_by_cpu(offset, from) { Ok(()) } else { self.write_by_device(offset, from) }
    }

    /// As [`write`](Memory::write), if the CPU can access all of these bytes. Returns whether it can.
    #[inline(always)]
    pub fn write_by_cpu(&mut self, offset: u64, from: &[u8]) -> bool {
        let Some(to) = self.place(offset, from.len()) else { return false };
        // SAFETY: `to` has this many bytes in the block. If the memory is owned, `&mut self` excludes other accesses.
        // Otherwise there are no references to it except to atomics.
        unsafe { copy_in(to, from) };
        true
    }

    /// The word at `offset`, in native byte order, with acquire.
    ///
    /// # Errors
    /// [`MemoryError::Range`]; [`MemoryError::Alignment`], except for owned memory.
    pub fn load_u64(&self, offset: u64) -> Result<u64, MemoryError> {
        match self.word(offset) {
            Ok(word) => Ok(word.load(Ordering::Acquire)),
            Err(error) => self.plain_word(offset, error),
        }
    }

    /// Stores the word at `offset`, in native byte order, with release.
    ///
    /// # Errors
    /// As [`load_u64`](Memory::load_u64).
    pub fn store_u64(&mut self, offset: u64, value: u64) -> Result<(), MemoryError> {
        match self.word(offset) {
            Ok(word) => word.store(value, Ordering::Release),
            Err(error) => self.store_plainly(offset, error, value)?,
        }
        Ok(())
    }

    /// Stores `new` at `offset` if the value there is `expected`; returns the previous value.
    ///
    /// # Errors
    /// As [`load_u64`](Memory::load_u64); [`MemoryError::NoAtomics`] for device memory.
    pub fn compare_swap(&mut self, offset: u64, expected: u64, new: u64) -> Result<u64, MemoryError> {
        match self
            .word(offset)
            .map(|w| w.compare_exchange(expected, new, Ordering::AcqRel, Ordering::Acquire))
        {
            Ok(Ok(found) | Err(found)) => Ok(found),
            Err(error) => {
                self.change_plainly(offset, error, |found| if found == expected { new } else { found })
            }
        }
    }

    /// Adds to the word at `offset`, with wrapping; returns the previous value.
    ///
    /// # Errors
    /// As [`compare_swap`](Memory::compare_swap).
    pub fn fetch_add(&mut self, offset: u64, value: u64) -> Result<u64, MemoryError> {
        match self.word(offset) {
            Ok(word) => Ok(word.fetch_add(value, Ordering::AcqRel)),
            Err(error) => self.change_plainly(offset, error, |found| found.wrapping_add(value)),
        }
    }

    /// In owned memory a word may be misaligned, because there is no concurrent access. In device memory it is copied.
    #[cold]
    fn plain_word(&self, offset: u64, error: MemoryError) -> Result<u64, MemoryError> {
        self.check_plain(error)?;
        let mut bytes = [0; 8];
        self.read(offset, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    #[cold]
    fn store_plainly(&mut self, offset: u64, error: MemoryError, value: u64) -> Result<(), MemoryError> {
        self.check_plain(error)?;
        self.write(offset, &value.to_ne_bytes())
    }

    #[cold]
    fn change_plainly(
        &mut self,
        offset: u64,
        error: MemoryError,
        change: impl FnOnce(u64) -> u64,
    ) -> Result<u64, MemoryError> {
        if error == MemoryError::NoAtomics {
            return Err(error);
        }
        let found = self.plain_word(offset, error)?;
        self.write(offset, &change(found).to_ne_bytes())?;
        Ok(found)
    }

    /// Checks that a word which can't be accessed by atomics may be copied.
    fn check_plain(&self, error: MemoryError) -> Result<(), MemoryError> {
        match (&error, self.kind()) {
            (MemoryError::Alignment { .. }, MemoryKind::Owned) | (MemoryError::NoAtomics, _) => Ok(()),
            _ => Err(error),
        }
    }

    /// The words of the block as atomics: for a table that peers READ while the application writes it.
    ///
    /// # Errors
    /// [`MemoryError::NotShared`] for owned memory, whose bytes may be borrowed as slices; [`MemoryError::NoAtomics`] for device
    /// memory; [`MemoryError::Alignment`] for foreign memory that does not begin at a multiple of 8.
    pub fn atomics(&self) -> Result<&[AtomicU64], MemoryError> {
        match self.kind() {
            MemoryKind::Owned => return Err(MemoryError::NotShared),
            MemoryKind::Device => return Err(MemoryError::NoAtomics),
            MemoryKind::Shared | MemoryKind::Foreign => {}
        }
        if !self.is_aligned(0) {
            return Err(MemoryError::Alignment { offset: 0 });
        }
        // SAFETY: this many initialised words, aligned as checked, are valid as long as `self`. The memory is not
        // owned, so there are no references to it except to atomics.
        Ok(unsafe { std::slice::from_raw_parts(self.base.as_ptr().cast(), self.len / 8) })
    }

    /// Bytes to copy from; `None` outside the block.
    #[inline(always)]
    pub fn span(&self, offset: u64, len: usize) -> Option<Span<'_>> {
        let base = self.place(offset, len)?;
        // SAFETY: bytes of the block, which exists as long as `self`. If it is owned, they are not written while `self`
        // is borrowed.
        Some(unsafe { Span::new(base, len) })
    }

    /// Whether the address of a byte is a multiple of 8.
    pub fn is_aligned(&self, offset: u64) -> bool {
        (self.base.as_ptr() as u64).wrapping_add(offset).is_multiple_of(8)
    }

    /// The address of these bytes.
    #[inline(always)]
    fn place(&self, offset: u64, len: usize) -> Option<NonNull<u8>> {
        let offset = usize::try_from(offset).ok()?;
        if offset > self.reach || len > self.reach - offset {
            return None;
        }
        // SAFETY: inside the block or at its end, as checked.
        Some(unsafe { self.base.add(offset) })
    }

    /// The first of these bytes of host memory.
    pub(crate) fn start(&self, offset: u64, len: usize) -> Result<NonNull<u8>, MemoryError> {
        self.place(offset, len).ok_or_else(|| self.range(offset, len))
    }

    fn word(&self, offset: u64) -> Result<&AtomicU64, MemoryError> {
        let place = self.place(offset, 8).ok_or_else(|| self.no_word(offset))?;
        if !self.is_aligned(offset) {
            return Err(MemoryError::Alignment { offset });
        }
        // SAFETY: eight initialised bytes, aligned, valid as long as `self`. In owned memory the word is written only
        // through `&mut self`. To other memory there are no references except to atomics.
        Ok(unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) })
    }

    #[cold]
    fn no_word(&self, offset: u64) -> MemoryError {
        if self.piece(offset, 8).is_ok() { MemoryError::NoAtomics } else { self.range(offset, 8) }
    }

    #[cold]
    fn range(&self, offset: u64, len: usize) -> MemoryError {
        MemoryError::Range { offset, len, length: self.len }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes, {})", self.len, self.kind())
    }
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryKind::Owned => "owned",
            MemoryKind::Shared => "shared",
            MemoryKind::Foreign => "foreign",
            MemoryKind::Device => "device",
        })
    }
}

#[cfg(test)]
mod tests;
