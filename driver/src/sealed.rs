//! Memory that processes share: a file without a name (memfd), passed on as a descriptor. It is the memory of the table
//! of services (`slots/table.rs`), of the rings of frames (`shm/ring.rs`), of segments (`segment.rs`) and of the
//! benchmarks' ring (`shared.rs`).
//!
//! The processes need not trust each other. The file is sealed against a change of its size, so no access ends with
//! SIGBUS. It is on tmpfs only: there a hole that another process punches reads as zeros, while in a file of huge pages
//! it is a SIGBUS. The memory is accessed by atomics and raw copies only: there is never a reference to plain bytes
//! that another process may write at any time.

use std::fs::File;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use crate::memory::SpanMut;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, fstatfs, memfd_create};
use rustix::process::{Resource, getrlimit};

/// A mapping of a file with these is as long as it was for ever.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// Memory that other processes may read and write at any time.
#[derive(Debug)]
pub(crate) struct SealedMemory {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the value, and is reached by atomics and copies alone.
unsafe impl Send for SealedMemory {}
// SAFETY: as above; copies may race with each other, which spoils values that nobody relies on.
unsafe impl Sync for SealedMemory {}

/// Bytes that a file of this process may have. Whoever writes more is killed without a word (SIGXFSZ).
pub(crate) fn file_size_max() -> u64 {
    getrlimit(Resource::Fsize).current.unwrap_or(u64::MAX)
}

impl SealedMemory {
    /// New memory of `length` bytes, all zeros, and what other processes open it by. Its pages are made now rather than when
    /// they are first used.
    pub(crate) fn create(name: &str, length: usize) -> Result<(SealedMemory, OwnedFd), SealedError> {
        SealedMemory::make(name, length, libc::MAP_POPULATE)
    }

    /// The same, with pages that are made when they are first used.
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

    /// Memory that another process has made, if it is of a length in `lengths`. Pages that its maker has left out are made one
    /// by one, as they are needed.
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
        // From here on it does not change.
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
        // SAFETY: aligned, for the mapping begins at a page; inside the mapping, which lives as long as `self`; any bytes are a
        // valid value.
        unsafe { self.base.add(offset).cast().as_ref() }
    }

    /// Copies `from` to the bytes at `offset`.
    ///
    /// # Panics
    /// If that is not inside the memory.
    #[inline]
    pub(crate) fn copy_in(&self, offset: usize, from: &[u8]) {
        let to = self.bytes(offset, from.len());
        // SAFETY: as many bytes of the mapping as `from` has; they are no memory of Rust's, so nothing
        // overlaps. That another process may write them meanwhile spoils their value, which nobody here
        // relies on.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
    }

    /// The `count` bytes at `offset`, to copy to.
    ///
    /// # Panics
    /// If they are not inside the memory.
    #[inline]
    pub(crate) fn span_mut(&self, offset: usize, count: usize) -> SpanMut<'_> {
        // SAFETY: so many bytes of the mapping, which lives as long as `self`; there is no reference to them.
        unsafe { SpanMut::new(self.bytes(offset, count), count) }
    }

    /// Copies the bytes at `offset` to `to`. Others may change them meanwhile and afterwards: what is to be checked is the
    /// copy.
    ///
    /// # Panics
    /// If they are not inside the memory.
    #[inline]
    pub(crate) fn copy_out(&self, offset: usize, to: &mut [u8]) {
        let from = self.bytes(offset, to.len());
        // SAFETY: as in `copy_in`; any bytes will do in `to`.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len()) };
    }

    /// Has the processor fetch `count` bytes from `offset` on, as far as they are there.
    #[inline]
    pub(crate) fn prefetch(&self, offset: usize, count: usize) {
        for at in (offset..self.length.min(offset + count)).step_by(64) {
            // SAFETY: inside the mapping.
            prefetch_bytes(unsafe { self.base.add(at) }.as_ptr());
        }
    }

    /// The first of `count` bytes.
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

/// Into the second-level cache: what is fetched is more than the first level has room for beside the rest.
#[inline(always)]
fn prefetch_bytes(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch touches nothing, whatever the address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T1 }>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

impl Drop for SealedMemory {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// Why memory was not made or opened.
#[derive(Debug)]
pub(crate) enum SealedError {
    /// The file's size could change while it is mapped.
    Unsealed { found: String },
    /// The file is of another kind, out of which pages can be taken while it is mapped: huge pages can.
    NotTmpfs { kind: u64 },
    /// It is not as long as what is looked for.
    Length { length: u64, lengths: RangeInclusive<usize> },
    /// What the kernel says.
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

/// What `map_err` takes.
fn os<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> SealedError {
    move |source| SealedError::Os { what, source: source.into() }
}
