//! Host memory allocated by ferroce.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// An anonymous mapping. It is unmapped when it is dropped.
#[derive(Debug)]
pub(crate) struct AnonymousMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes are accessed through `&self` (reads) and `&mut self` (writes), or by `Memory` through its address.
unsafe impl Send for AnonymousMapping {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMapping {}

impl AnonymousMapping {
    /// `len` bytes of zeros, page-aligned and prefaulted.
    pub(crate) fn zeroed(len: usize) -> io::Result<AnonymousMapping> {
        // SAFETY: an anonymous private mapping at an address chosen by the kernel does not affect existing memory.
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

/// Addresses of this process that stay reserved until this is dropped: every access faults.
#[derive(Debug)]
pub(crate) struct EmptyRange {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: no memory is accessed through it.
unsafe impl Send for EmptyRange {}
// SAFETY: as above.
unsafe impl Sync for EmptyRange {}

impl EmptyRange {
    /// `len` addresses, from the start of a page on.
    pub(crate) fn new(len: usize) -> io::Result<EmptyRange> {
        let len = len.max(1);
        // SAFETY: a new mapping at an address chosen by the kernel does not affect existing memory.
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
        // SAFETY: the mapping of `new`, unmapped once. It never contained anything.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

impl Deref for AnonymousMapping {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, valid as long as `self`. A `Memory` never dereferences its mapping.
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
        // SAFETY: the mapping of `zeroed`, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len.max(1)) };
    }
}
