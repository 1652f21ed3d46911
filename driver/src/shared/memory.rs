//! The memory of a ring: how it is made, checked, mapped and handed over.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstatfs, memfd_create};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::RingError;

pub(super) const READY: u32 = 0x52_49_4e_47;
pub(super) const TAKEN: u32 = 1 << 31;
/// Of the memory; slots begin at a page.
pub(super) const HEADER: usize = 4096;
const LARGEST: u64 = 1 << 20;
/// All of it: whoever opens a ring may have to pay for the memory.
const LARGEST_WHOLE: usize = 1 << 30;
/// A mapping of a file with these is as long as it was for ever.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

/// At the start of the memory. The indices are in cache lines of their own, two apart: the prefetcher
/// fetches pairs.
#[repr(C)]
pub(super) struct Header {
    pub(super) state: AtomicU32,
    pub(super) slots: AtomicU64,
    pub(super) length: AtomicU64,
    pub(super) tail: Line,
    pub(super) head: Line,
}

#[repr(C, align(128))]
pub(super) struct Line(pub(super) AtomicU64);

const _: () = assert!(size_of::<Header>() <= HEADER);

#[derive(Clone, Copy, Debug)]
struct Geometry {
    slots: u64,
    length: u64,
}

impl Geometry {
    fn new(slots: u64, length: u64) -> Result<Geometry, RingError> {
        let geometry = Geometry { slots, length };
        let fits = slots.is_power_of_two() && slots <= LARGEST && (1..=LARGEST).contains(&length);
        if fits && geometry.bytes() <= HEADER + LARGEST_WHOLE {
            return Ok(geometry);
        }
        Err(RingError::Size { slots, length })
    }

    /// From slot to slot: whole cache lines.
    fn stride(self) -> usize {
        (self.length as usize).next_multiple_of(64)
    }

    fn bytes(self) -> usize {
        HEADER + self.slots as usize * self.stride()
    }
}

/// Header and slots. Another process has them too, and may write any of it at any time.
#[derive(Debug)]
pub(super) struct Ring {
    mapping: FileMapping,
    file: File,
    /// As it was checked when the ring was opened; never read again.
    geometry: Geometry,
}

impl Ring {
    pub(super) fn create(slots: u64, length: u64) -> Result<Ring, RingError> {
        let geometry = Geometry::new(slots, length)?;
        let made = memfd_create("ferroce-ring", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
        let file = File::from(made.map_err(os("making memory to share"))?);
        file.set_len(geometry.bytes() as u64).map_err(os("making memory to share"))?;
        fcntl_add_seals(&file, SEALS | SealFlags::SEAL).map_err(os("sealing memory to share"))?;
        // The pages are made now rather than while slots are filled.
        let mapping = FileMapping::new(&file, geometry.bytes(), libc::MAP_POPULATE)?;
        let ring = Ring { mapping, file, geometry };
        let header = ring.header();
        header.slots.store(geometry.slots, Ordering::Relaxed);
        header.length.store(geometry.length, Ordering::Relaxed);
        header.state.store(READY, Ordering::Release);
        Ok(ring)
    }

    pub(super) fn open(memory: OwnedFd) -> Result<Ring, RingError> {
        match fcntl_get_seals(&memory) {
            Ok(seals) if seals.contains(SEALS) => {}
            Ok(seals) => return Err(RingError::Unsealed { found: format!("{seals:?}") }),
            Err(error) => return Err(RingError::Unsealed { found: io::Error::from(error).to_string() }),
        }
        let kind = fstatfs(&memory).map_err(os("looking at shared memory"))?.f_type;
        if kind != libc::TMPFS_MAGIC {
            return Err(RingError::NotTmpfs { kind: kind as u64 });
        }
        let file = File::from(memory);
        // From here on it does not change.
        let bytes = file.metadata().map_err(os("looking at shared memory"))?.len();
        let most = (HEADER + LARGEST_WHOLE) as u64;
        if !(HEADER as u64..=most).contains(&bytes) {
            return Err(RingError::NotARing(format!("{bytes} bytes, where a ring has {HEADER} to {most}")));
        }
        let geometry = Ring::look(&FileMapping::new(&file, HEADER, 0)?, bytes)?;
        // Pages that the sender has left out are made one by one, as they are needed.
        Ok(Ring { mapping: FileMapping::new(&file, geometry.bytes(), 0)?, file, geometry })
    }

    /// What the header of a file of this length says of the ring there.
    fn look(header: &FileMapping, bytes: u64) -> Result<Geometry, RingError> {
        let header = header.header();
        let state = header.state.load(Ordering::Acquire);
        if state & !TAKEN != READY {
            return Err(RingError::NotARing(format!("its first word is {state:#x}, not {READY:#x}")));
        }
        let (slots, length) = (header.slots.load(Ordering::Relaxed), header.length.load(Ordering::Relaxed));
        let geometry =
            Geometry::new(slots, length).map_err(|error| RingError::NotARing(error.to_string()))?;
        if geometry.bytes() as u64 != bytes {
            let needed = geometry.bytes();
            let reason = format!("{slots} slots of {length} bytes take {needed} bytes, and it has {bytes}");
            return Err(RingError::NotARing(reason));
        }
        Ok(geometry)
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn header(&self) -> &Header {
        self.mapping.header()
    }

    pub(super) fn slots(&self) -> u64 {
        self.geometry.slots
    }

    /// Copies into the slot whose turn is `index`.
    pub(super) fn copy_in(&self, index: u64, offset: usize, from: &[u8]) {
        let to = self.bytes(index, offset, from.len());
        // SAFETY: as many bytes of the mapping as `from` has; they are no memory of Rust's, so nothing
        // overlaps. That another process may write them meanwhile spoils their value, which nobody here
        // relies on.
        unsafe { to.copy_from_nonoverlapping(NonNull::from(from).cast(), from.len()) };
    }

    /// Copies out of the slot whose turn is `index`.
    pub(super) fn copy_out(&self, index: u64, offset: usize, to: &mut [u8]) {
        let from = self.bytes(index, offset, to.len());
        // SAFETY: as in `copy_in`; any bytes will do in `to`.
        unsafe { from.copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len()) };
    }

    /// Where these bytes of the slot are.
    fn bytes(&self, index: u64, offset: usize, count: usize) -> NonNull<u8> {
        let Geometry { slots, length } = self.geometry;
        let fits = offset.checked_add(count).is_some_and(|end| end as u64 <= length);
        assert!(fits, "{count} bytes from {offset} on of a slot of {length}");
        let place = HEADER + (index & (slots - 1)) as usize * self.geometry.stride() + offset;
        // SAFETY: in one of the slots, all of which are in the mapping.
        unsafe { self.mapping.base.add(place) }
    }
}

#[derive(Debug)]
struct FileMapping {
    base: NonNull<u8>,
    length: usize,
}

// SAFETY: the mapping belongs to the value, and is reached by atomics and copies alone.
unsafe impl Send for FileMapping {}

impl FileMapping {
    /// `file` is sealed, and has `length` bytes or more; `length` is [`HEADER`] at least.
    fn new(file: &File, length: usize, flags: i32) -> Result<FileMapping, RingError> {
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
        let failed = |source| RingError::Os { what: "mapping shared memory", source };
        if base == libc::MAP_FAILED {
            return Err(failed(io::Error::last_os_error()));
        }
        match NonNull::new(base.cast()) {
            Some(base) => Ok(FileMapping { base, length }),
            None => Err(failed(io::Error::other("mmap returned address 0"))),
        }
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a page for the header, aligned as a page is; all its fields
        // are atomics, for which any bytes will do.
        unsafe { self.base.cast().as_ref() }
    }
}

impl Drop for FileMapping {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.length) };
    }
}

/// One byte goes along: a stream delivers no descriptor without.
const BYTE: [u8; 1] = *b"R";

pub(super) fn send(stream: &UnixStream, memory: BorrowedFd<'_>) -> Result<(), RingError> {
    let memory = [memory];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&memory));
    sendmsg(stream, &[IoSlice::new(&BYTE)], &mut control, SendFlags::NOSIGNAL)
        .map_err(os("sending a descriptor"))?;
    Ok(())
}

pub(super) fn receive(stream: &UnixStream) -> Result<OwnedFd, RingError> {
    const WHAT: &str = "receiving a descriptor";
    let none =
        |reason| RingError::Os { what: WHAT, source: io::Error::new(io::ErrorKind::InvalidData, reason) };
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let message = recvmsg(stream, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(os(WHAT))?;
    if message.flags.contains(ReturnFlags::CTRUNC) {
        return Err(none("more than one came"));
    }
    let rights = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
        _ => None,
    });
    rights.ok_or_else(|| none(if message.bytes == 0 { "the other end is gone" } else { "none came" }))
}

/// What `map_err` takes.
fn os<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> RingError {
    move |source| RingError::Os { what, source: source.into() }
}
