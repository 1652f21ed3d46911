//! Memory that can be registered with a protection domain.

use std::fmt;
use std::io;
use std::ptr::NonNull;
use std::sync::Arc;

/// A block of host memory with a stable address, owned by whoever holds the value.
///
/// Registration takes it and deregistration gives it back, so safe code can never race with a
/// remote write. [`Memory::zeroed`] is page-aligned and prefaulted: the first touch of a page costs
/// microseconds, which must not happen in the poll loop.
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    /// `None` for somebody else's memory; the constructor's contract says that it outlives this value.
    mapping: Option<Arc<Mapping>>,
}

/// An anonymous mapping, unmapped on drop.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the block is reached only through `&self` (reads) and `&mut self` (writes), and no
// pointer to it leaves this type but in a `Pinned`, so it moves between and is shared by threads as
// a `Box<[u8]>` is.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}
// SAFETY: nothing but the unmapping at the end uses it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Memory {
    /// `len` bytes of zeros, page-aligned and prefaulted.
    ///
    /// # Errors
    /// What `mmap` says, mostly `ENOMEM`.
    pub fn zeroed(len: usize) -> io::Result<Memory> {
        let mapped = len.max(1);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no
        // existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_POPULATE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(base.cast()) {
            Some(base) => {
                let mapping = Some(Arc::new(Mapping { base, len: mapped }));
                Ok(Memory { base, len, mapping })
            }
            None => Err(io::Error::other("mmap returned address 0")),
        }
    }

    /// A copy of `bytes`.
    ///
    /// # Errors
    /// As [`Memory::zeroed`].
    pub fn copy_of(bytes: &[u8]) -> io::Result<Memory> {
        let mut memory = Memory::zeroed(bytes.len())?;
        memory.copy_from_slice(bytes);
        Ok(memory)
    }

    /// Memory that belongs to somebody else: a shared mapping, a buffer of a C library.
    ///
    /// # Safety
    /// `base` must be valid for reads and writes of `len` bytes until the value is dropped, and
    /// nobody else may write those bytes, or read them while they are registered with remote
    /// write access, in that time.
    pub unsafe fn from_raw(base: NonNull<u8>, len: usize) -> Memory {
        Memory { base, len, mapping: None }
    }

    /// Holds bytes `offset..offset + len` for a port that sends them from where they are: they stay
    /// mapped until the value is dropped, whatever becomes of the memory. `None` outside the block
    /// and for somebody else's memory, whose life is not ours to prolong.
    pub fn pin(&self, offset: usize, len: usize) -> Option<Pinned> {
        let mapping = self.mapping.clone()?;
        self.get(offset..offset.checked_add(len)?)?;
        // SAFETY: `offset` is inside the block, as was just seen.
        let base = unsafe { self.base.add(offset) };
        Some(Pinned { base, len, _mapping: mapping })
    }
}

impl std::ops::Deref for Memory {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `base` is valid for `len` initialised bytes for the life of `self` (mapping, or
        // the contract of `from_raw`), and writes need `&mut self`.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl std::ops::DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base` and `len` are those of the mapping made in `zeroed`, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Part of a [`Memory`] that a port sends from where it is.
///
/// Only the address can be had: the owner may write these bytes while the device reads them, which
/// then sends old or new ones, as any RNIC does.
pub struct Pinned {
    base: NonNull<u8>,
    len: usize,
    _mapping: Arc<Mapping>,
}

// SAFETY: an address, and a share in the mapping that keeps it valid.
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

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_is_zero_aligned_and_writable() {
        let mut m = Memory::zeroed(5000).unwrap();
        assert_eq!(m.len(), 5000);
        assert!(m.iter().all(|b| *b == 0));
        assert_eq!(m.as_ptr() as usize % 4096, 0);
        m[4999] = 7;
        assert_eq!(m[4999], 7);
        assert!(Memory::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn what_is_pinned_outlives_its_memory() {
        let mut m = Memory::zeroed(100).unwrap();
        m[9] = 7;
        let pinned = m.pin(9, 91).unwrap();
        assert!(m.pin(9, 92).is_none() && m.pin(usize::MAX, 2).is_none());
        drop(m);
        // SAFETY: the pin keeps the mapping.
        assert_eq!((unsafe { pinned.address().read() }, pinned.len()), (7, 91));
    }

    #[test]
    fn foreign_memory_is_not_freed() {
        let mut buffer = vec![1u8, 2, 3];
        // SAFETY: `buffer` outlives the value and is not touched while it lives.
        let mut m = unsafe { Memory::from_raw(NonNull::new(buffer.as_mut_ptr()).unwrap(), 3) };
        m[0] = 9;
        assert!(m.pin(0, 1).is_none());
        drop(m);
        assert_eq!(buffer, [9, 2, 3]);
    }
}
