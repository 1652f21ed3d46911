//! Frame memory (the UMEM) and the transmit slots in it.
//!
//! A transmit slot is one to three neighbouring chunks of the UMEM. A frame is written contiguously, and only the bytes after the
//! first 3840 are moved, for a second descriptor.

use std::fmt;
use std::num::NonZeroU32;
use std::ptr::NonNull;

use xsk_rs::config::UmemConfig;
use xsk_rs::umem::frame::FrameDesc;
use xsk_rs::umem::{Umem, UmemCreateError};

/// The UMEM as one block of bytes.
///
/// xsk-rs returns one chunk at a time. A transmit slot of several chunks needs them as one buffer, because the length
/// of a frame is known only when it has been written.
#[derive(Debug)]
pub(super) struct Frames {
    base: NonNull<u8>,
    len: usize,
    /// Owns the mapping. All its pages exist from the start: xsk-rs maps with `MAP_POPULATE`, and registration pins
    /// them.
    pub(super) umem: Umem,
    /// The page size of the mapping.
    pub(super) pages: Pages,
}

/// The pages of a UMEM.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Pages {
    /// Huge pages of this size.
    Huge(usize),
    /// Ordinary pages, with the reason.
    Ordinary(String),
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pages::Huge(size) => write!(f, "huge pages of {} MiB", size >> 20),
            Pages::Ordinary(why) => write!(f, "ordinary pages ({why})"),
        }
    }
}

// SAFETY: `base` points into the mapping that `umem` owns and moves with it.
unsafe impl Send for Frames {}

impl Frames {
    /// Registers `count` chunks and lists them in the order of their addresses. Uses huge pages if enough are free.
    pub(super) fn new(
        config: UmemConfig,
        count: NonZeroU32,
    ) -> Result<(Frames, Vec<FrameDesc>), UmemCreateError> {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        let len = count.get() as usize * config.frame_size().get() as usize;
        let why = match HugePages::read(&meminfo).for_mapping(len) {
            Ok((size, mapped)) => {
                // Only whole huge pages can be unmapped. Chunks beyond `count` stay unused.
                let whole = u32::try_from(mapped / config.frame_size().get() as usize).ok();
                match Umem::new(config, whole.and_then(NonZeroU32::new).unwrap_or(count), true) {
                    Ok((umem, mut chunks)) => {
                        chunks.truncate(count.get() as usize);
                        return Ok(Self::of(umem, chunks, len, Pages::Huge(size)));
                    }
                    Err(error) => format!("huge pages refused: {}", super::os_cause(&error)),
                }
            }
            Err(why) => why,
        };
        let (umem, chunks) = Umem::new(config, count, false)?;
        Ok(Self::of(umem, chunks, len, Pages::Ordinary(why)))
    }

    fn of(umem: Umem, chunks: Vec<FrameDesc>, len: usize, pages: Pages) -> (Frames, Vec<FrameDesc>) {
        // SAFETY: the chunk is new, and the kernel does not have it yet.
        let first = unsafe { umem.data(&chunks[0]) }.contents().as_ptr().addr() - chunks[0].addr();
        // libxdp got the mapping's address through FFI, which exposes its provenance.
        let base = std::ptr::with_exposed_provenance_mut(first);
        let base = NonNull::new(base).expect("a mapping is not at address 0");
        (Frames { base, len, umem, pages }, chunks)
    }

    /// Prefetches the first two cache lines at an address, which contain a frame's headers.
    pub(super) fn prefetch(&self, address: usize) {
        assert!(address < self.len, "descriptor outside the UMEM");
        #[cfg(target_arch = "x86_64")]
        for line in [0, 64] {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            // SAFETY: a prefetch accesses no memory, so any address is allowed.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.base.as_ptr().wrapping_add(address + line).cast()) };
        }
    }

    /// The bytes of a received descriptor.
    ///
    /// # Safety
    /// The kernel must have handed over the chunks of these bytes, and must not have got them back.
    pub(super) unsafe fn bytes(&self, address: usize, len: usize) -> &[u8] {
        assert!(address.checked_add(len).is_some_and(|end| end <= self.len), "descriptor outside the UMEM");
        // SAFETY: in bounds, and mapped as long as `umem` exists. The caller guarantees that nothing writes them
        // meanwhile.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(address), len) }
    }

    /// As [`Frames::bytes`], mutable.
    ///
    /// # Safety
    /// As [`Frames::bytes`].
    pub(super) unsafe fn bytes_mut(&mut self, address: usize, len: usize) -> &mut [u8] {
        assert!(address.checked_add(len).is_some_and(|end| end <= self.len), "descriptor outside the UMEM");
        // SAFETY: as in `bytes`; `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr().add(address), len) }
    }
}

/// The transmit side's chunks: slots of one or more neighbouring chunks, one slot for each frame.
#[derive(Debug)]
pub(super) struct TxSlots {
    chunks: Box<[FrameDesc]>,
    chunks_per_slot: usize,
    chunk_size: usize,
    /// Data bytes of a chunk, after the headroom that the kernel keeps for XDP.
    chunk_data: usize,
    /// Free slots. The slot used last is on top, because its memory is still in the cache.
    free: Vec<usize>,
    /// The chunks of each slot that the kernel has, as a bit mask.
    in_flight: Box<[u8]>,
}

/// XDP_PKT_CONTD: the frame continues in the next descriptor.
pub(super) const CONTINUED: u32 = 1;

impl TxSlots {
    /// Makes slots of `chunks`, the first chunks of the UMEM.
    pub(super) fn new(chunks: &[FrameDesc], chunks_per_slot: usize, config: UmemConfig) -> TxSlots {
        let slots = chunks.len() / chunks_per_slot;
        TxSlots {
            chunks: chunks.into(),
            chunks_per_slot,
            chunk_size: config.frame_size().get() as usize,
            chunk_data: config.mtu() as usize,
            free: (0..slots).rev().collect(),
            in_flight: vec![0; slots].into(),
        }
    }

    /// A free slot, which stays free until [`TxSlots::fill`].
    pub(super) fn peek(&self) -> Option<usize> {
        self.free.last().copied()
    }

    /// The buffer of a free slot: `len` contiguous bytes.
    pub(super) fn buffer<'a>(&self, slot: usize, frames: &'a mut Frames, len: usize) -> &'a mut [u8] {
        debug_assert_eq!(self.in_flight[slot], 0);
        let start = self.chunks[slot * self.chunks_per_slot].addr();
        // SAFETY: the slot is free, so the kernel has none of its chunks.
        unsafe { frames.bytes_mut(start, len) }
    }

    /// Makes the descriptors for a frame of `len` bytes at the start of the buffer of the slot that `peek` returned,
    /// and returns their number. From now on the slot is in flight.
    pub(super) fn fill(
        &mut self,
        slot: usize,
        len: usize,
        frames: &mut Frames,
        descriptors: &mut [FrameDesc],
    ) -> usize {
        let first = slot * self.chunks_per_slot;
        let count = len.div_ceil(self.chunk_data);
        // The data of each later chunk begins after that chunk's headroom. The last piece is moved first, because all
        // pieces move towards the end.
        let start = self.chunks[first].addr();
        for piece in (1..count).rev() {
            let from = piece * self.chunk_data;
            let to = piece * self.chunk_size;
            let piece_len = self.chunk_data.min(len - from);
            // SAFETY: the kernel does not have the slot's chunks yet.
            unsafe { frames.bytes_mut(start, to + piece_len) }.copy_within(from..from + piece_len, to);
        }
        for (piece, out) in descriptors[..count].iter_mut().enumerate() {
            *out = self.chunks[first + piece];
            let piece_len = self.chunk_data.min(len - piece * self.chunk_data);
            // SAFETY: as above. Only the descriptor's length is set here.
            unsafe { frames.umem.data_mut(out) }.cursor().set_pos(piece_len);
            out.set_options(if piece + 1 < count { CONTINUED } else { 0 });
        }
        self.free.pop();
        self.in_flight[slot] = (1 << count) - 1;
        count
    }

    /// Takes back the chunk at this address, which the kernel has completed. Returns whether the kernel had it. If not,
    /// nothing changes, because a slot freed twice would be used for two frames at once.
    #[must_use]
    pub(super) fn complete(&mut self, address: usize) -> bool {
        let number = address / self.chunk_size;
        if self.chunks.get(number).is_none_or(|chunk| chunk.addr() != address) {
            return false;
        }
        let (slot, bit) = (number / self.chunks_per_slot, 1 << (number % self.chunks_per_slot));
        // The last chunks may not fill a slot.
        let Some(in_flight) = self.in_flight.get_mut(slot).filter(|in_flight| **in_flight & bit != 0) else {
            return false;
        };
        *in_flight ^= bit;
        if *in_flight == 0 {
            self.free.push(slot);
        }
        true
    }
}

/// The huge pages that the system has reserved.
#[derive(Clone, Copy, Debug, Default)]
struct HugePages {
    size: usize,
    free: usize,
}

impl HugePages {
    fn read(meminfo: &str) -> HugePages {
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            line.split_whitespace().next()?.parse::<usize>().ok()
        };
        let free = field("HugePages_Free").unwrap_or(0);
        HugePages {
            size: field("Hugepagesize").unwrap_or(0) * 1024,
            free: free.saturating_sub(field("HugePages_Rsvd").unwrap_or(0)),
        }
    }

    /// The page size and the length of a mapping of whole pages for `len` bytes; or the reason why huge pages are not
    /// used.
    fn for_mapping(self, len: usize) -> Result<(usize, usize), String> {
        let HugePages { size, free } = self;
        if size == 0 {
            return Err("the kernel has no huge pages".to_owned());
        }
        let needed = len.div_ceil(size);
        if needed * size > 2 * len {
            return Err(format!("a huge page has {} MiB, far more than needed", size >> 20));
        }
        if free < needed {
            return Err(format!("{needed} huge pages needed, {free} free: vm.nr_hugepages"));
        }
        Ok((size, needed * size))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_used_if_enough_are_free() {
        let meminfo = |free: usize, kib: usize| {
            format!(
                "MemTotal: 1 kB\nHugePages_Total: 99\nHugePages_Free:  {free}\nHugePages_Rsvd:  2\n\
                 HugePages_Surp: 0\nHugepagesize:  {kib} kB\n"
            )
        };
        let chosen = |meminfo: &str, len| HugePages::read(meminfo).for_mapping(len);
        const MIB: usize = 1 << 20;
        assert_eq!(chosen(&meminfo(20, 2048), 36 * MIB), Ok((2 * MIB, 36 * MIB)));
        assert_eq!(chosen(&meminfo(20, 2048), 35 * MIB + 1), Ok((2 * MIB, 36 * MIB)));
        for (meminfo, len, why) in [
            (meminfo(19, 2048), 36 * MIB, "18 huge pages needed, 17 free: vm.nr_hugepages"),
            (meminfo(20, 1 << 20), 36 * MIB, "a huge page has 1024 MiB, far more than needed"),
            (meminfo(20, 2048), MIB - 1, "a huge page has 2 MiB, far more than needed"),
            ("MemTotal: 1 kB\n".to_owned(), MIB, "the kernel has no huge pages"),
            (String::new(), MIB, "the kernel has no huge pages"),
        ] {
            assert_eq!(chosen(&meminfo, len), Err(why.to_owned()));
        }
    }

    /// Six chunks of 4096 bytes with a transmit slot of three.
    fn slot_of_three() -> Option<(Frames, TxSlots, Vec<FrameDesc>)> {
        let config = UmemConfig::builder().build().unwrap();
        let (frames, chunks) = match Frames::new(config, NonZeroU32::new(6).unwrap()) {
            Ok(made) => made,
            Err(e) => {
                println!("skipped: no AF_XDP here ({e})");
                return None;
            }
        };
        let slots = TxSlots::new(&chunks, 3, config);
        Some((frames, slots, chunks))
    }

    #[test]
    fn a_frame_is_split_over_the_chunks_of_its_slot() {
        let Some((mut frames, mut slots, _)) = slot_of_three() else { return };
        let data = slots.chunk_data;
        for len in [1, 64, data - 1, data, data + 1, 2 * data, 2 * data + 1, 3 * data] {
            let slot = slots.peek().unwrap();
            let pattern: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            slots.buffer(slot, &mut frames, len).copy_from_slice(&pattern);
            let mut out = [FrameDesc::default(); 3];
            let n = slots.fill(slot, len, &mut frames, &mut out);
            assert_eq!(n, len.div_ceil(data));
            assert_ne!(slots.peek(), Some(slot));
            let mut seen = Vec::new();
            for (i, d) in out[..n].iter().enumerate() {
                assert_eq!(d.has_more_frames(), i + 1 < n);
                assert_eq!(d.addr() % 4096, 256);
                // SAFETY: the kernel has none of the chunks.
                seen.extend_from_slice(unsafe { frames.bytes(d.addr(), d.lengths().data()) });
            }
            assert!(seen == pattern, "frame of {len} bytes");
            for d in &out[..n] {
                assert!(slots.free.len() < slots.in_flight.len());
                assert!(slots.complete(d.addr()));
            }
            assert_eq!(slots.peek(), Some(slot));
            assert_eq!(slots.free.len(), slots.in_flight.len());
        }
    }

    #[test]
    fn an_unexpected_completion_changes_nothing() {
        let Some((mut frames, mut slots, chunks)) = slot_of_three() else { return };
        let (first, second) = (chunks[0].addr(), chunks[3].addr());
        // Not in flight, outside the slots, not the beginning of a chunk's data, outside the UMEM.
        let strange = [first, second, 6 * 4096 + 256, 6 * 4096, 0, 255, 257, 4096, 1 << 40, usize::MAX];
        for address in strange {
            assert!(!slots.complete(address), "{address:#x}");
        }
        let slot = slots.peek().unwrap();
        assert_eq!(slot, 0);
        let mut out = [FrameDesc::default(); 3];
        let length = slots.chunk_data + 1;
        slots.buffer(slot, &mut frames, length).fill(1);
        assert_eq!(slots.fill(slot, length, &mut frames, &mut out), 2);
        for _ in 0..3 {
            // The third chunk contains nothing of this frame.
            for address in [second, chunks[2].addr(), first + 1, first - 256, first + 4095, usize::MAX] {
                assert!(!slots.complete(address), "{address:#x}");
            }
            assert_eq!(slots.peek(), Some(1));
        }
        assert!(slots.complete(out[1].addr()));
        assert!(!slots.complete(out[1].addr()), "twice");
        assert!(slots.free.len() < slots.in_flight.len());
        assert!(slots.complete(out[0].addr()));
        assert!(!slots.complete(out[0].addr()), "twice");
        // Each slot is free once.
        assert_eq!(slots.free, [1, 0]);
        assert_eq!(slots.free.len(), slots.in_flight.len());
    }
}
