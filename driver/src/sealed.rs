//! Memory that processes share: a memfd, passed on as a descriptor. It holds the table of services (`slots/table.rs`), the
//! rings of frames (`shm/ring.rs`), segments (`segment.rs`) and the benchmarks' ring (`shared.rs`).
//!
//! The processes need not trust each other. The file's size is sealed, so no access ends with SIGBUS. Only files on tmpfs
//! are accepted: a hole that another process punches there reads as zeros, but in a file of huge pages it causes SIGBUS.
//! The memory is only accessed by atomics and raw copies: there are no references to plain bytes that another process may
//! write at any time.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use crate::memory::SpanMut;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, memfd_create};
use rustix::process::{Resource, getrlimit};

/// The seals that keep the length of a mapping constant.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Memory that other processes may read and write at any time.
#[derive(Debug)]
pub(crate) struct SealedMemory {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the value owns the mapping, which is only accessed by atomics and copies.
unsafe impl Send for SealedMemory {}
// SAFETY: as above; copies may race with each other, which affects only values that are not relied on.
unsafe impl Sync for SealedMemory {}

/// The file size limit of this process. A write beyond it kills the process with SIGXFSZ.
pub(crate) fn file_size_max() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

impl SealedMemory {
    /// Creates zeroed memory of `length` bytes, and returns it with the descriptor for other processes. All pages are
    /// allocated now.
    pub(crate) fn create(name: &str, length: usize) -> Result<(SealedMemory, OwnedFd), SealedError> {
        SealedMemory::make(name, length, libc::MAP_POPULATE)
    }

    /// As [`create`](SealedMemory::create), but pages are allocated on first access.
    pub(crate) fn create_sparse(name: &str, length: usize) -> Result<(SealedMemory, OwnedFd), SealedError> {
        SealedMemory::make(name, length, 0)
    }

    fn make(name: &str, length: usize, flags: i32) -> Result<(SealedMemory, OwnedFd), SealedError> {
        if length as u64 > file_size_max() {
            let reason = format!("{length} bytes are more than a file may have here (`ulimit -f`)");
            let source = io::Error::new(io::ErrorKind::FileTooLarge, reason);
            return Err(SealedError::Os { what: "making memory to share", source });
        }
        let made = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = File::from(made.map_err(os("making memory to share"))?);
        file.set_len(length as u64).map_err(os("making memory to share"))?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL).map_err(os("sealing memory to share"))?;
        Ok((SealedMemory::map(file.as_fd(), length, flags)?, file.into()))
    }

    /// Opens another process's memory if its length is in `lengths`. Pages that its creator did not allocate are allocated
    /// on first access.
    pub(crate) fn open(file: &OwnedFd, lengths: RangeInclusive<usize>) -> Result<SealedMemory, SealedError> {
        match fcntl_get_seals(file) {
            Ok(seals) if seals.contains(SEALS) => {}
            Ok(seals) => return Err(SealedError::Unsealed { found: format!("{seals:?}") }),
            Err(error) => return Err(SealedError::Unsealed { found: io::Error::from(error).to_string() }),
        }
        let kind = fstatfs(file).map_err(os("looking at shared memory"))?.f_type;
        if kind != libc::TMPFS_MAGIC {
            return Err(SealedError::NotTmpfs { kind: kind as u64 });
        }
        // From here on the length does not change.
        let length = fstat(file).map_err(os("looking at shared memory"))?.st_size;
        match usize::try_from(length) {
            Ok(length) if lengths.contains(&length) => SealedMemory::map(file.as_fd(), length, 0),
            _ => Err(SealedError::Length { length: length as u64, lengths }),
        }
    }

    /// `file` is sealed, and has `length` bytes.
    fn map(file: BorrowedFd<'_>, length: usize, flags: i32) -> Result<SealedMemory, SealedError> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | flags,
                file.as_raw_fd(),
                0,
            )
        };
        let failed = |source| SealedError::Os { what: "mapping shared memory", source };
        if base == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(SealedMemory { base, length }),
            None => Err(failed(io::Error::other("mmap returned address 0"))),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// The eight bytes at `offset`, a multiple of 8.
    ///
    /// # Panics
    /// If they are not inside the memory, or not aligned.
    #[inline]
    pub(crate) fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset < self.length && self.length - offset >= 8,
            "no word at {offset}"
        );
        // SAFETY: aligned, because the mapping starts at a page; inside the mapping, which lives as long as `self`; any
        // bytes are a valid value.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Copies `from` to the bytes at `offset`.
    ///
    /// # Panics
    /// If they are not inside the memory.
    #[inline]
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
        let to = self.bytes(offset, from.len());
        // SAFETY: `from.len()` bytes of the mapping, which no Rust reference covers, so they don't overlap `from`. Another
        // process may write them meanwhile, which affects only values that are not relied on.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
    }

    /// The `count` bytes at `offset`, as a destination of copies.
    ///
    /// # Panics
    /// If they are not inside the memory.
    #[inline]
    pub(crate) fn span_mut(&self, offset: usize, count: usize) -> SpanMut<'_> {
        // SAFETY: `count` bytes of the mapping, which lives as long as `self`; there is no reference to them.
        unsafe { SpanMut::new(self.bytes(offset, count), count) }
    }

    /// Copies the bytes at `offset` to `to`. Other processes may change them at any time, so checks must use the copy.
    ///
    /// # Panics
    /// If they are not inside the memory.
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.bytes(offset, to.len());
        // SAFETY: as in `copy_in`; any bytes are valid in `to`.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len()) };
    }

    /// Prefetches `count` bytes from `offset` on, clipped to the memory.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize, count: usize) {
        for at in (offset..self.length.min(offset + count)).step_by(64) {
            // SAFETY: inside the mapping.
            prefetch_bytes(unsafe { self.base.add(at) }.as_ptr());
        }
    }

    /// The address of `count` bytes.
    ///
    /// # Panics
    /// If they are not inside the memory.
    pub(crate) fn start(&self, offset: usize, count: usize) -> NonNull<u8> {
        self.bytes(offset, count)
    }

    #[inline]
    fn bytes(&self, offset: usize, count: usize) -> NonNull<u8> {
        let fits = offset.checked_add(count).is_some_and(|end| end <= self.length);
        assert!(fits, "{count} bytes from {offset} on of memory of {}", self.length);
        // SAFETY: inside the mapping, or at its end.
        unsafe { self.base.add(offset) }
    }
}

/// Into the second-level cache: the data would displace too much of the first level.
#[inline(always)]
fn prefetch_bytes(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch does not access memory, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

impl Drop for SealedMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, which is unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Why memory could not be created or opened.
#[derive(Debug)]
pub(crate) enum SealedError {
    /// The file's size could change while it is mapped.
    Unsealed { found: String },
    /// The file is not on tmpfs, and its pages can be removed while it is mapped, as with huge pages.
    NotTmpfs { kind: u64 },
    /// Its length is not in the expected range.
    Length { length: u64, lengths: RangeInclusive<usize> },
    /// The kernel's error.
    Os { what: &'static str, source: io::Error },
}

impl std::fmt::Display for SealedError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SealedError::Unsealed { found } => write!(f, "memory whose size may change (seals: {found})"),
            SealedError::NotTmpfs { kind } => {
                write!(f, "memory of the file system {kind:#x}, must be tmpfs")
            }
            SealedError::Length { length, lengths } => {
                write!(f, "memory of {length} bytes: must be {} to {}", lengths.start(), lengths.end())
            }
            SealedError::Os { what, source } => write!(f, "{what}: {source}"),
        }
    }
}

/// An argument for `map_err`.
fn os<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> SealedError {
    move |source| SealedError::Os { what, source: source.into() }
}
