//! The memory of a ring: creating, checking, mapping and passing it.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::{MaybeUninit, offset_of};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::RingError;
use crate::sealed::{SealedError, SealedMemory};

pub(super) const READY: u64 = 0x52_49_4e_47;
pub(super) const TAKEN: u64 = 1 << 31;
/// Bytes of the header. The slots begin at the next page.
pub(super) const HEADER: usize = 4096;
const LARGEST: u64 = 1 << 20;
/// The limit for the whole memory, which may be accounted to the process that opens the ring.
const LARGEST_WHOLE: usize = 1 << 30;

/// The header of the memory. The indices are in separate cache lines, two lines apart because the prefetcher fetches
/// pairs.
#[repr(C)]
pub(super) struct Header {
    pub(super) state: u64,
    pub(super) slots: u64,
    pub(super) length: u64,
    pub(super) tail: Line,
    pub(super) head: Line,
}

#[repr(C, align(128))]
pub(super) struct Line(u64);

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

    /// The distance between slots: a whole number of cache lines.
    fn stride(self) -> usize {
        (self.length as usize).next_multiple_of(64)
    }

    fn bytes(self) -> usize {
        HEADER + self.slots as usize * self.stride()
    }
}

/// Header and slots. Another process has mapped them too, and may write any part at any time.
#[derive(Debug)]
pub(super) struct Ring {
    memory: SealedMemory,
    /// The descriptor by which it is passed.
    file: OwnedFd,
    /// Checked when the ring was opened, and never read again.
    geometry: Geometry,
}

impl Ring {
    pub(super) fn create(slots: u64, length: u64) -> Result<Ring, RingError> {
        let geometry = Geometry::new(slots, length)?;
        let (memory, file) = SealedMemory::create("ferroce-ring", geometry.bytes())?;
        let ring = Ring { memory, file, geometry };
        ring.memory.word(offset_of!(Header, slots)).store(geometry.slots, Ordering::Relaxed);
        ring.memory.word(offset_of!(Header, length)).store(geometry.length, Ordering::Relaxed);
        ring.state().store(READY, Ordering::Release);
        Ok(ring)
    }

    pub(super) fn open(file: OwnedFd) -> Result<Ring, RingError> {
        let memory = SealedMemory::open(&file, HEADER..=HEADER + LARGEST_WHOLE)?;
        let state = memory.word(offset_of!(Header, state)).load(Ordering::Acquire);
        if state & !TAKEN != READY {
            return Err(RingError::NotARing(format!("its first word is {state:#x}, not {READY:#x}")));
        }
        let slots = memory.word(offset_of!(Header, slots)).load(Ordering::Relaxed);
        let length = memory.word(offset_of!(Header, length)).load(Ordering::Relaxed);
        let geometry =
            Geometry::new(slots, length).map_err(|error| RingError::NotARing(error.to_string()))?;
        if geometry.bytes() != memory.len() {
            let (needed, bytes) = (geometry.bytes(), memory.len());
            let reason = format!("{slots} slots of {length} bytes take {needed} bytes, and it has {bytes}");
            return Err(RingError::NotARing(reason));
        }
        Ok(Ring { memory, file, geometry })
    }

    pub(super) fn file(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }

    pub(super) fn state(&self) -> &AtomicU64 {
        self.memory.word(offset_of!(Header, state))
    }

    /// The number of slots released so far.
    #[inline]
    pub(super) fn head(&self) -> &AtomicU64 {
        self.memory.word(offset_of!(Header, head))
    }

    /// The number of slots published so far.
    #[inline]
    pub(super) fn tail(&self) -> &AtomicU64 {
        self.memory.word(offset_of!(Header, tail))
    }

    pub(super) fn slots(&self) -> u64 {
        self.geometry.slots
    }

    /// Copies into the slot with the running number `index`.
    pub(super) fn copy_in(&self, index: u64, offset: usize, from: &[u8]) {
        self.memory.copy_in(self.place(index, offset, from.len()), from);
    }

    /// Copies out of the slot with the running number `index`.
    pub(super) fn copy_out(&self, index: u64, offset: usize, to: &mut [u8]) {
        self.memory.copy_out(self.place(index, offset, to.len()), to);
    }

    /// The position of these bytes of the slot.
    fn place(&self, index: u64, offset: usize, count: usize) -> usize {
        let Geometry { slots, length } = self.geometry;
        let fits = offset.checked_add(count).is_some_and(|end| end as u64 <= length);
        assert!(fits, "{count} bytes from {offset} on of a slot of {length}");
        HEADER + (index & (slots - 1)) as usize * self.geometry.stride() + offset
    }
}

impl From<SealedError> for RingError {
    fn from(error: SealedError) -> RingError {
        match error {
            SealedError::Unsealed { found } => RingError::Unsealed { found },
            SealedError::NotTmpfs { kind } => RingError::NotTmpfs { kind },
            SealedError::Length { length, lengths } => {
                let (least, most) = lengths.into_inner();
                RingError::NotARing(format!("{length} bytes, where a ring has {least} to {most}"))
            }
            SealedError::Os { what, source } => RingError::Os { what, source },
        }
    }
}

/// Sent along with a descriptor: a stream delivers none without data.
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

/// An argument for `map_err`.
fn os<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> RingError {
    move |source| RingError::Os { what, source: source.into() }
}
