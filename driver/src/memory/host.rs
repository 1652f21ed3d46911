//! Host memory allocated by ferroce.

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

/// Addresses of this process that stay unmapped until this is dropped: any access faults.
#[derive(Debug)]
pub(crate) struct EmptyRange {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: nothing is reached by it.
unsafe impl Send for EmptyRange {}
// SAFETY: as above.
unsafe impl Sync for EmptyRange {}

impl EmptyRange {
    /// `len` addresses, from the start of a page on.
    pub(crate) fn new(len: usize) -> io::Result<EmptyRange> {
        let len = len.max(1);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(EmptyRange { base, len }),
            None => Err(io::Error::other("mmap returned address 0")),
        }
    }

    /// The first address, which must not be accessed.
    #[cfg(feature = "opencl")]
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The first address, as a number.
    pub(crate) fn first(&self) -> u64 {
        self.base.as_ptr().addr() as u64
    }
}

impl Drop for EmptyRange {
    fn drop(&mut self) {
        // SAFETY: the mapping made in `new`, unmapped once; nothing was ever in it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
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
