//! Memory that can be registered with a protection domain.

use std::fmt;
use std::io;
use std::ptr::NonNull;

/// A block of host memory with a stable address, owned by whoever holds the value.
///
/// Registration takes it and deregistration gives it back, so safe code can never race with a
/// remote write. [`Memory::zeroed`] is page-aligned and prefaulted: the first touch of a page costs
/// microseconds, which must not happen in the poll loop.
pub struct Memory {
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// An anonymous mapping of this many bytes, unmapped on drop.
    Mapping(usize),
    /// Somebody else's; the constructor's contract says that it outlives this value.
    Foreign,
}

// SAFETY: the block is reached only through `&self` (reads) and `&mut self` (writes), and no
// pointer to it leaves this type, so it moves between and is shared by threads as a `Box<[u8]>` is.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

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
            Some(base) => Ok(Memory { base, len, owner: Owner::Mapping(mapped) }),
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
        Memory { base, len, owner: Owner::Foreign }
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

impl Drop for Memory {
    fn drop(&mut self) {
        if let Owner::Mapping(len) = self.owner {
            // SAFETY: `base` and `len` are those of the mapping made in `zeroed`, unmapped once.
            unsafe { libc::munmap(self.base.as_ptr().cast(), len) };
        }
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
    fn foreign_memory_is_not_freed() {
        let mut buffer = vec![1u8, 2, 3];
        // SAFETY: `buffer` outlives the value and is not touched while it lives.
        let mut m = unsafe { Memory::from_raw(NonNull::new(buffer.as_mut_ptr()).unwrap(), 3) };
        m[0] = 9;
        drop(m);
        assert_eq!(buffer, [9, 2, 3]);
    }
}
