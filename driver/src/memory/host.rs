//! Host memory of our own.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// An anonymous mapping, unmapped on drop.
#[derive(Debug)]
pub(crate) struct AnonymousMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are reached through `&self` (reads) and `&mut self` (writes), or by `Memory` from its address.
unsafe impl Send for AnonymousMapping {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMapping {}

impl AnonymousMapping {
    /// `len` bytes of zeros, page-aligned and prefaulted.
    pub(crate) fn zeroed(len: usize) -> io::Result<AnonymousMapping> {
        // SAFETY: an anonymous private mapping at an address of the kernel's choice touches no
        // existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len.max(1),
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
            Some(base) => Ok(AnonymousMapping { base, len }),
            None => Err(io::Error::other("mmap returned address 0")),
        }
    }

    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

impl Deref for AnonymousMapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes for the life of `self`; a `Memory` never derefs its mapping.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for AnonymousMapping {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the borrow unique.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Drop for AnonymousMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `zeroed`, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len.max(1)) };
    }
}
