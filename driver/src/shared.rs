//! A ring of slots in memory that two processes share. No wire is involved, so it is the upper limit for the transfer
//! between two cores. The benchmarks measure drivers against it.
//!
//! The two ends need not trust each other. The memory is a sealed file without a name, whose descriptor is passed to
//! the other process, and slots are accessed by copies only. Sizes are checked once, when a ring is opened, and kept.
//! An index of the other end is read once for each decision, and refused if it is invalid.

mod memory;
#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use memory::{Ring, TAKEN};

/// The end that fills slots.
#[derive(Debug)]
pub struct Producer {
    ring: Ring,
    /// Slots published so far, and released by the consumer at the last check.
    tail: u64,
    head: u64,
}

/// The end that empties slots.
#[derive(Debug)]
pub struct Consumer {
    ring: Ring,
    head: u64,
    tail: u64,
}

impl Producer {
    /// Creates a ring of `slots` (a power of two up to 2²⁰) of `length` bytes (1 to 2²⁰), at most 1 GiB in total.
    ///
    /// # Errors
    /// [`RingError::Size`] for invalid sizes, [`RingError::Os`].
    pub fn create(slots: usize, length: usize) -> Result<Producer, RingError> {
        Ok(Producer { ring: Ring::create(slots as u64, length as u64)?, tail: 0, head: 0 })
    }

    /// Sends the ring's memory to the process at the other end of `stream`, which receives it with [`Consumer::receive`].
    ///
    /// # Errors
    /// [`RingError::Os`].
    pub fn send(&self, stream: &UnixStream) -> Result<(), RingError> {
        memory::send(stream, self.as_fd())
    }

    /// The number of free slots. The result of the last check is returned if it is at least `wanted`. Waiting for many
    /// at once disturbs the consumer less.
    ///
    /// # Errors
    /// [`RingError::Corrupt`] if the consumer has released slots that were never published.
    pub fn free(&mut self, wanted: usize) -> Result<usize, RingError> {
        let slots = self.ring.slots();
        if slots - self.tail.wrapping_sub(self.head) < wanted as u64 {
            let head = self.ring.head().load(Ordering::Acquire);
            // Ahead of the published slots, or behind those released before.
            if self.tail.wrapping_sub(head) > self.tail.wrapping_sub(self.head) {
                return Err(RingError::Corrupt {
                    index: "head",
                    value: head,
                    least: self.head,
                    most: self.tail,
                });
            }
            self.head = head;
        }
        Ok((slots - self.tail.wrapping_sub(self.head)) as usize)
    }

    /// Lets `fill` write up to `most` free slots and publishes them together. Returns their number.
    ///
    /// # Errors
    /// As [`free`](Producer::free).
    pub fn push(&mut self, most: usize, mut fill: impl FnMut(VacantSlot<'_>)) -> Result<usize, RingError> {
        let free = self.free(most)?.min(most) as u64;
        for n in 0..free {
            fill(VacantSlot { ring: &self.ring, index: self.tail.wrapping_add(n) });
        }
        if free > 0 {
            self.tail = self.tail.wrapping_add(free);
            self.ring.tail().store(self.tail, Ordering::Release);
        }
        Ok(free as usize)
    }
}

/// The memory, to pass it by other means than [`Producer::send`], such as inheritance.
impl AsFd for Producer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.file()
    }
}

impl Consumer {
    /// Takes the other end of the ring in this memory. There is one consumer.
    ///
    /// # Errors
    /// [`RingError::Unsealed`] for a file that could be truncated, [`RingError::NotTmpfs`] for huge pages,
    /// [`RingError::NotARing`] for memory with other contents, [`RingError::Taken`] for a ring that already has a consumer,
    /// [`RingError::Os`].
    pub fn open(memory: OwnedFd) -> Result<Consumer, RingError> {
        let ring = Ring::open(memory)?;
        if ring.state().fetch_or(TAKEN, Ordering::AcqRel) & TAKEN != 0 {
            return Err(RingError::Taken);
        }
        Ok(Consumer { ring, head: 0, tail: 0 })
    }

    /// Takes the other end of the ring that the process at the other end of `stream` sends with
    /// [`Producer::send`]. Waits for it, within the stream's timeout.
    ///
    /// # Errors
    /// As [`open`](Consumer::open).
    pub fn receive(stream: &UnixStream) -> Result<Consumer, RingError> {
        Consumer::open(memory::receive(stream)?)
    }

    /// The number of full slots; as [`Producer::free`].
    ///
    /// # Errors
    /// [`RingError::Corrupt`] if the producer has published more slots than exist, or fewer than before.
    pub fn full(&mut self, wanted: usize) -> Result<usize, RingError> {
        if self.tail.wrapping_sub(self.head) < wanted as u64 {
            let tail = self.ring.tail().load(Ordering::Acquire);
            let most = self.head.wrapping_add(self.ring.slots());
            if most.wrapping_sub(tail) > most.wrapping_sub(self.tail) {
                return Err(RingError::Corrupt { index: "tail", value: tail, least: self.tail, most });
            }
            self.tail = tail;
        }
        Ok(self.tail.wrapping_sub(self.head) as usize)
    }

    /// Lets `empty` read up to `most` full slots and releases them together. Returns their number.
    ///
    /// # Errors
    /// As [`full`](Consumer::full).
    pub fn pop(&mut self, most: usize, mut empty: impl FnMut(FullSlot<'_>)) -> Result<usize, RingError> {
        let full = self.full(most)?.min(most) as u64;
        for n in 0..full {
            empty(FullSlot { ring: &self.ring, index: self.head.wrapping_add(n) });
        }
        if full > 0 {
            self.head = self.head.wrapping_add(full);
            self.ring.head().store(self.head, Ordering::Release);
        }
        Ok(full as usize)
    }
}

/// A slot that the producer may fill.
#[derive(Debug)]
pub struct VacantSlot<'a> {
    ring: &'a Ring,
    index: u64,
}

impl VacantSlot<'_> {
    /// Copies `from` to the bytes at `offset`.
    ///
    /// # Panics
    /// If the range is not inside the slot.
    pub fn write(&mut self, offset: usize, from: &[u8]) {
        self.ring.copy_in(self.index, offset, from);
    }
}

/// A slot that the producer has filled.
#[derive(Debug)]
pub struct FullSlot<'a> {
    ring: &'a Ring,
    index: u64,
}

impl FullSlot<'_> {
    /// Copies the bytes at `offset` to `to`. A hostile producer may change them meanwhile and afterwards: check the
    /// copy.
    ///
    /// # Panics
    /// If the range is not inside the slot.
    pub fn read(&self, offset: usize, to: &mut [u8]) {
        self.ring.copy_out(self.index, offset, to);
    }
}

/// Why a ring was not created or opened, or can't be used any more.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The size is invalid.
    #[error(
        "{slots} slots of {length} bytes: the slots are a power of two up to 2^20, a slot 1 to 2^20 bytes, \
         all together up to 2^30"
    )]
    Size {
        /// The number of slots.
        slots: u64,
        /// The bytes of a slot.
        length: u64,
    },
    /// The file's size could change while it is mapped.
    #[error("the memory is not sealed ({found}); a ring's has F_SEAL_SHRINK and F_SEAL_GROW")]
    Unsealed {
        /// Its seals, or the error of reading them.
        found: String,
    },
    /// The file is of another kind, whose pages can be removed while it is mapped, such as huge pages.
    #[error(
        "the memory is of a file system of type {kind:#x}; a ring's is of tmpfs, as memfd_create makes it"
    )]
    NotTmpfs {
        /// The file system's number (statfs).
        kind: u64,
    },
    /// The memory has other contents.
    #[error("no ring of slots: {0}")]
    NotARing(String),
    /// The ring already has a consumer.
    #[error("the ring has its consumer")]
    Taken,
    /// The other end has written an invalid index. Nothing was read or published.
    #[error("the other end's {index} is {value}; {least} to {most} can be")]
    Corrupt {
        /// The index.
        index: &'static str,
        /// Its value.
        value: u64,
        /// The lowest valid value, modulo 2^64.
        least: u64,
        /// The highest valid value.
        most: u64,
    },
    /// The kernel's error.
    #[error("{what}: {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}
