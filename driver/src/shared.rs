//! A ring of slots in memory that two processes share: no wire at all, so the ceiling of what two
//! cores can hand each other. The benchmarks measure drivers against it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// The end that fills slots. The file that the ring lives in goes with it.
#[derive(Debug)]
pub struct Producer {
    ring: Ring,
    path: PathBuf,
    /// Slots published so far, and released by the consumer when last looked at.
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
    /// Makes a ring of `slots` (a power of two up to 2²⁰) of `length` bytes (1 to 2²⁰) in a new
    /// file that only this user may open; one in `/dev/shm` stays in memory.
    ///
    /// # Errors
    /// What the kernel says, `AlreadyExists` among it; `InvalidInput` for sizes that are none.
    pub fn create(path: impl Into<PathBuf>, slots: usize, length: usize) -> io::Result<Producer> {
        let path = path.into();
        let geometry = Geometry::new(slots as u64, length as u64)?;
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let made = file.set_len(geometry.bytes() as u64).and_then(|()| Ring::map(&file, geometry));
        let ring = match made {
            Ok(ring) => ring,
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                return Err(error);
            }
        };
        let header = ring.header();
        header.slots.store(geometry.slots, Ordering::Relaxed);
        header.length.store(geometry.length, Ordering::Relaxed);
        header.state.store(READY, Ordering::Release);
        Ok(Producer { ring, path, tail: 0, head: 0 })
    }

    /// How many slots are free: what was so when last looked at, if those are as many as `wanted`. Whoever
    /// waits for many at once disturbs the consumer less.
    pub fn free(&mut self, wanted: usize) -> usize {
        let slots = self.ring.geometry.slots;
        if slots.saturating_sub(self.tail.wrapping_sub(self.head)) < wanted as u64 {
            self.head = self.ring.header().head.0.load(Ordering::Acquire);
        }
        slots.saturating_sub(self.tail.wrapping_sub(self.head)) as usize
    }

    /// Lets `fill` write up to `most` free slots and publishes them together. Returns how many.
    pub fn push(&mut self, most: usize, mut fill: impl FnMut(&mut [u8])) -> usize {
        let free = self.free(most).min(most) as u64;
        for n in 0..free {
            let slot = self.ring.slot(self.tail.wrapping_add(n));
            // SAFETY: the slot is inside the mapping. The consumer has released it (Acquire above)
            // and does not touch it before `tail` says that it is full; there is one producer, which
            // made the file, and it is borrowed mutably.
            fill(unsafe {
                std::slice::from_raw_parts_mut(slot.as_ptr(), self.ring.geometry.length as usize)
            });
        }
        if free > 0 {
            self.tail = self.tail.wrapping_add(free);
            self.ring.header().tail.0.store(self.tail, Ordering::Release);
        }
        free as usize
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Consumer {
    /// Takes the other end of a ring that a [`Producer`] has made. There is one consumer.
    ///
    /// # Errors
    /// What the kernel says; `InvalidData` for a file that is no such ring, `ResourceBusy` for one
    /// that has its consumer.
    pub fn open(path: impl AsRef<Path>) -> io::Result<Consumer> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let length = file.metadata()?.len();
        let not_a_ring = || io::Error::new(io::ErrorKind::InvalidData, "not a ring of slots");
        // The header alone first: it tells how much there is behind it.
        if length < HEADER as u64 {
            return Err(not_a_ring());
        }
        let peek = Ring::map(&file, Geometry { slots: 0, length: 0 })?;
        let header = peek.header();
        if header.state.load(Ordering::Acquire) & READY == 0 {
            return Err(not_a_ring());
        }
        let (slots, each) = (header.slots.load(Ordering::Relaxed), header.length.load(Ordering::Relaxed));
        let geometry = Geometry::new(slots, each)?;
        if geometry.bytes() as u64 != length {
            return Err(not_a_ring());
        }
        if header.state.fetch_or(TAKEN, Ordering::AcqRel) & TAKEN != 0 {
            return Err(io::Error::new(io::ErrorKind::ResourceBusy, "the ring has its consumer"));
        }
        let ring = Ring::map(&file, geometry)?;
        Ok(Consumer { ring, head: 0, tail: 0 })
    }

    /// How many slots are full; as [`Producer::free`].
    pub fn full(&mut self, wanted: usize) -> usize {
        if self.tail.wrapping_sub(self.head) < wanted as u64 {
            self.tail = self.ring.header().tail.0.load(Ordering::Acquire);
        }
        // A producer that lies hands out slots that are not full; there are no more than all of them.
        self.tail.wrapping_sub(self.head).min(self.ring.geometry.slots) as usize
    }

    /// Lets `empty` read up to `most` full slots and releases them together. Returns how many.
    pub fn pop(&mut self, most: usize, mut empty: impl FnMut(&[u8])) -> usize {
        let full = self.full(most).min(most) as u64;
        for n in 0..full {
            let slot = self.ring.slot(self.head.wrapping_add(n));
            // SAFETY: the slot is inside the mapping. The producer has published it (Acquire above)
            // and does not touch it before `head` says that it is free; there is one consumer.
            empty(unsafe { std::slice::from_raw_parts(slot.as_ptr(), self.ring.geometry.length as usize) });
        }
        if full > 0 {
            self.head = self.head.wrapping_add(full);
            self.ring.header().head.0.store(self.head, Ordering::Release);
        }
        full as usize
    }
}

const READY: u32 = 0x52_49_4e_47;
const TAKEN: u32 = 1 << 31;
/// Of the file; slots begin at a page.
const HEADER: usize = 4096;
const LARGEST: u64 = 1 << 20;

/// At the start of the file. The indices are in cache lines of their own, two apart: the
/// prefetcher fetches pairs.
#[repr(C)]
struct Header {
    state: AtomicU32,
    slots: AtomicU64,
    length: AtomicU64,
    tail: Line,
    head: Line,
}

#[repr(C, align(128))]
struct Line(AtomicU64);

const _: () = assert!(size_of::<Header>() <= HEADER);

#[derive(Clone, Copy, Debug)]
struct Geometry {
    slots: u64,
    length: u64,
}

impl Geometry {
    fn new(slots: u64, length: u64) -> io::Result<Geometry> {
        if slots.is_power_of_two() && slots <= LARGEST && (1..=LARGEST).contains(&length) {
            return Ok(Geometry { slots, length });
        }
        let reason =
            format!("{slots} slots of {length} bytes: a power of two up to 2^20, and 1 to 2^20 bytes");
        Err(io::Error::new(io::ErrorKind::InvalidInput, reason))
    }

    /// From slot to slot: whole cache lines.
    fn stride(self) -> usize {
        (self.length as usize).next_multiple_of(64)
    }

    fn bytes(self) -> usize {
        HEADER + self.slots as usize * self.stride()
    }
}

/// A mapping of header and slots.
#[derive(Debug)]
struct Ring {
    base: NonNull<u8>,
    /// As it was checked when the file was opened; never read again.
    geometry: Geometry,
}

// SAFETY: the mapping belongs to the value; what others do with it goes through the atomic indices.
unsafe impl Send for Ring {}

impl Ring {
    /// `file` is at least as long as `geometry` says.
    fn map(file: &File, geometry: Geometry) -> io::Result<Ring> {
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                geometry.bytes(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))?;
        Ok(Ring { base, geometry })
    }

    fn header(&self) -> &Header {
        // SAFETY: the mapping begins with a page for the header, aligned as a page is; all its fields
        // are atomics, for which any bytes will do.
        unsafe { self.base.cast().as_ref() }
    }

    fn slot(&self, index: u64) -> NonNull<u8> {
        let Geometry { slots, .. } = self.geometry;
        let place = (index & (slots - 1)) as usize * self.geometry.stride();
        // SAFETY: `place` is that of one of the slots, all of which are in the mapping.
        unsafe { self.base.add(HEADER + place) }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: base and length are those of the mapping, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.geometry.bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("ferroce-shared-{}-{name}", std::process::id()))
    }

    #[test]
    fn what_goes_in_comes_out_in_order() {
        let path = path("order");
        let mut producer = Producer::create(&path, 8, 100).unwrap();
        let mut consumer = Consumer::open(&path).unwrap();
        let sender = std::thread::spawn(move || {
            let mut sent = 0u8;
            while sent < 250 {
                producer.push(3, |slot| {
                    slot.fill(sent);
                    sent += 1;
                });
                std::thread::yield_now();
            }
            producer
        });
        let mut seen = 0u8;
        while seen < 250 {
            consumer.pop(5, |slot| {
                assert_eq!(slot, [seen; 100]);
                seen += 1;
            });
        }
        drop(sender.join().unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn a_full_ring_takes_nothing_and_an_empty_one_gives_nothing() {
        let path = path("full");
        let mut producer = Producer::create(&path, 4, 1).unwrap();
        let mut consumer = Consumer::open(&path).unwrap();
        assert_eq!(consumer.pop(9, |_| ()), 0);
        assert_eq!((producer.push(9, |_| ()), producer.push(1, |_| ())), (4, 0));
        assert_eq!((consumer.pop(3, |_| ()), producer.push(9, |_| ())), (3, 3));
    }

    #[test]
    fn refuses_second_consumers_other_files_and_sizes_that_are_none() {
        let path = path("refusals");
        let producer = Producer::create(&path, 4, 64).unwrap();
        assert_eq!(Producer::create(&path, 4, 64).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        let _first = Consumer::open(&path).unwrap();
        assert_eq!(Consumer::open(&path).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(producer);
        for (slots, length) in [(3, 64), (0, 64), (4, 0), (1 << 21, 1), (4, 1 << 21)] {
            let refused = Producer::create(&path, slots, length).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput);
        }
        for bytes in [10, 5000] {
            std::fs::write(&path, vec![0; bytes]).unwrap();
            assert_eq!(Consumer::open(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        }
        std::fs::remove_file(&path).unwrap();
    }
}
