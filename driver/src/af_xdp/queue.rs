//! One queue of an interface: its socket with its rings, and its receive chunks.
//!
//! A burst of several frames is prefetched and announced before the first frame is passed to the sink. Another core has
//! written the frames, and 64 cache misses at once take as long as one.
//!
//! A poll that finds nothing to do makes no system call, unless the device needs one (busy polling, or a driver that
//! sleeps until it is woken). It reads no cache line that the kernel writes, except that of the receive ring and, with
//! frames in flight, that of the completion ring.
//!
//! Transmit slots are reclaimed before each batch of 32 descriptors, the number that the kernel takes in one call. The
//! slot used last is reused first, so a long burst stays in the cache.
//!
//! The kernel's ring entries are checked before the memory they refer to is accessed. A completion must name a chunk
//! that is in flight. A received descriptor must name a chunk that the kernel has, and must lie inside it. Any other
//! descriptor is ignored and counted as `bad_descriptors`. A frame that is incomplete for this reason is also counted
//! as `rx_dropped`.
//!
//! On a veth the kernel uses 95 % of the sender's time (64-byte frames, copy mode), the whole driver 1.3 % and the
//! rings of xsk-rs 0.1 % (`perf record` of `driver/examples/af_xdp_raw.rs`). Replacing the rings of xsk-rs would gain
//! nothing.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use xsk_rs::umem::Umem;
use xsk_rs::umem::frame::FrameDesc;
use xsk_rs::{CompQueue, FillQueue, RxQueue, TxQueue};

use super::assembly::Assembly;
use super::frames::{Frames, TxSlots};
use super::layout::{Layout, MAX_CHUNKS_PER_SLOT};
use super::returns::Returns;
use super::rx_chunks::{Received, RxChunks};
use super::socket::Bound;
use super::{BURST, TX_BATCH};
use crate::{FrameSink, RxFrame, Stats};

/// An AF_XDP socket with its rings and its receive chunks in the shared UMEM.
#[derive(Debug)]
pub(super) struct Queue {
    /// The queue's number on the interface.
    pub(super) number: u32,
    rx: RxQueue,
    fill: FillQueue,
    tx: TxQueue,
    completion: CompQueue,
    rx_chunks: RxChunks,
    returns: Returns,
    tx_ring: u32,
    /// Descriptors to be put into the transmit ring.
    batch: Box<[FrameDesc]>,
    batched: usize,
    /// Descriptors given to the kernel and not yet completed.
    in_flight: usize,
    /// Whether the kernel may have left descriptors in the transmit ring.
    unsent: bool,
    /// A frame in several descriptors, as far as it has been received.
    assembly: Assembly,
    busy_poll: bool,
    /// Frames passed to the sink.
    pub(super) received: u64,
}

impl Queue {
    /// Makes a queue of a bound socket, and gives `chunks` to the kernel to receive into.
    pub(super) fn new(
        number: u32,
        bound: Bound,
        layout: &Layout,
        chunks: &[FrameDesc],
        umem: Umem,
        busy_poll: bool,
    ) -> Queue {
        let Bound { tx, rx, mut fill, completion, .. } = bound;
        // SAFETY: the chunks are in this UMEM, disjoint from the transmit chunks and from those of other queues, and
        // unused. The fill ring has room for all of them.
        let filled = unsafe { fill.produce(chunks) };
        debug_assert_eq!(filled, chunks.len());
        let chunk_size = layout.umem.frame_size().get() as usize;
        Queue {
            number,
            rx,
            fill,
            tx,
            completion,
            rx_chunks: RxChunks::new(chunks, chunk_size),
            returns: Returns::new(chunks.len(), umem),
            tx_ring: layout.tx_ring,
            // The last frame of a batch may have more than one descriptor.
            batch: vec![FrameDesc::default(); TX_BATCH + MAX_CHUNKS_PER_SLOT].into(),
            batched: 0,
            in_flight: 0,
            unsent: false,
            assembly: Assembly::new(layout.max_frame, chunk_size),
            busy_poll,
            received: 0,
        }
    }

    /// The socket.
    pub(super) fn socket(&self) -> BorrowedFd<'_> {
        // SAFETY: the socket is open as long as its receive ring exists.
        unsafe { BorrowedFd::borrow_raw(self.rx.fd().as_raw_fd()) }
    }

    /// Passes received frames to `sink`, from at most as many descriptors as `burst` holds. Returns the number of
    /// descriptors.
    pub(super) fn receive(
        &mut self,
        frames: &mut Frames,
        burst: &mut [FrameDesc],
        mac: [u8; 6],
        stats: &mut Stats,
        sink: &mut dyn FrameSink,
    ) -> io::Result<usize> {
        self.collect_kept();
        // SAFETY: the receive ring belongs to the UMEM of `frames`.
        let n = unsafe { self.rx.consume(burst) };
        if n == 0 {
            self.drive()?;
            return Ok(0);
        }
        let burst = &mut burst[..n];
        let (mut ours, usable) = self.take(burst);
        stats.bad_descriptors += n as u64 - u64::from(usable.count_ones());
        if n > 1 && usable == u64::MAX >> (BURST - n) {
            self.announce(frames, burst, sink);
        }
        for (i, descriptor) in burst.iter().enumerate() {
            if usable >> i & 1 == 0 {
                self.assembly.skip(descriptor);
                continue;
            }
            let alone = !self.assembly.under_way() && !descriptor.has_more_frames();
            // SAFETY: the kernel had this chunk and has handed it over. It gets it back below, or after the frame's
            // holder has given it back.
            let frame = unsafe { self.assembly.add(frames, descriptor) };
            let Some(frame) = frame else { continue };
            // A veth (or an interface in promiscuous mode) also delivers frames to other hardware addresses.
            if frame.get(..6).is_some_and(|to| to[0] & 1 == 1 || to == mac) {
                self.received += 1;
                stats.rx_frames += 1;
                stats.rx_bytes += frame.len() as u64;
                let chunk = alone.then(|| self.rx_chunks.number(descriptor.addr()));
                let mut keeper = self.returns.keeper(chunk);
                sink.take(RxFrame::new(frame, &mut keeper));
                ours ^= u64::from(keeper.lent) << i;
            }
        }
        // SAFETY: the kernel has none of this burst's chunks yet.
        unsafe { self.assembly.let_go(frames) };
        self.refill(burst, ours);
        if self.fill.needs_wakeup() {
            self.drive()?;
        }
        Ok(n)
    }

    /// How many frames may be kept at once.
    pub(super) fn keeps(&self) -> usize {
        self.returns.limit()
    }

    /// Gives the kernel the chunks of kept frames that have been dropped.
    fn collect_kept(&mut self) {
        let Queue { returns, rx_chunks, fill, .. } = self;
        returns.collect(|chunk| {
            let descriptor = rx_chunks.give_back_kept(chunk);
            // SAFETY: the chunk was received from this queue's receive ring, and its holder has given it back. There is
            // room, as in `refill`.
            let refilled = unsafe { fill.produce_one(&descriptor) };
            debug_assert_eq!(refilled, 1);
        });
    }

    /// Takes the chunks of the descriptors back from the kernel. Returns two bit masks: the descriptors whose chunk the
    /// kernel had, and those of them that are usable.
    fn take(&mut self, burst: &[FrameDesc]) -> (u64, u64) {
        let (mut ours, mut usable) = (0, 0);
        for (i, descriptor) in burst.iter().enumerate() {
            let received = self.rx_chunks.take(descriptor.addr(), descriptor.lengths().data());
            ours |= u64::from(received != Received::Foreign) << i;
            usable |= u64::from(received == Received::Piece) << i;
        }
        (ours, usable)
    }

    /// Announces the frames to the sink. They were written by another core: prefetching the headers of all of them at
    /// once takes as long as fetching one.
    fn announce(&self, frames: &Frames, received: &[FrameDesc], sink: &mut dyn FrameSink) {
        let mut first = !self.assembly.under_way();
        let starts = received.iter().filter(move |d| std::mem::replace(&mut first, !d.has_more_frames()));
        for descriptor in starts.clone() {
            frames.prefetch(descriptor.addr());
        }
        for descriptor in starts {
            // SAFETY: the kernel has handed over this chunk, and has not got it back.
            sink.announce(unsafe { frames.bytes(descriptor.addr(), descriptor.lengths().data()) });
        }
    }

    /// Gives the kernel the chunks of the descriptors whose bit is set in `ours`.
    fn refill(&mut self, burst: &mut [FrameDesc], ours: u64) {
        let mut kept = 0;
        for i in (0..burst.len()).filter(|i| ours >> i & 1 == 1) {
            self.rx_chunks.give_back(burst[i].addr());
            burst[kept] = burst[i];
            kept += 1;
        }
        // SAFETY: these chunks were received from this queue's receive ring, each once, and are no longer used. The
        // fill ring has two entries for each receive chunk, so there is room.
        let refilled = unsafe { self.fill.produce(&burst[..kept]) };
        debug_assert_eq!(refilled, kept);
    }

    /// Makes the kernel look for frames if it does not do so by itself: if the driver sleeps until woken, or is polled
    /// instead of interrupting.
    fn drive(&self) -> io::Result<()> {
        if !self.busy_poll && !self.fill.needs_wakeup() {
            return Ok(());
        }
        let fd = self.rx.fd().as_raw_fd();
        // SAFETY: no memory is passed. A receive of zero bytes only drives the device.
        if unsafe { libc::recv(fd, std::ptr::null_mut(), 0, libc::MSG_DONTWAIT) } < 0 {
            let error = io::Error::last_os_error();
            let passing = [libc::EAGAIN, libc::EBUSY, libc::ENOBUFS, libc::ENETDOWN, libc::EINTR];
            if !error.raw_os_error().is_some_and(|code| passing.contains(&code)) {
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds the frame of `len` bytes in a free slot to the next batch. Returns the number of its descriptors.
    pub(super) fn load(
        &mut self,
        slots: &mut TxSlots,
        slot: usize,
        len: usize,
        frames: &mut Frames,
    ) -> usize {
        let count = slots.fill(slot, len, frames, &mut self.batch[self.batched..]);
        self.batched += count;
        count
    }

    /// Puts the batch into the transmit ring, and wakes the kernel as long as it takes frames from the ring, 32 in each
    /// call. Frames that it does not take (no buffer space) wait for the next call.
    pub(super) fn send(&mut self) -> io::Result<()> {
        if self.batched > 0 {
            // SAFETY: the descriptors are of slots of this UMEM that were free and are now marked as in flight. The
            // ring has an entry for each transmit chunk, so there is room.
            let produced = unsafe { self.tx.produce(&self.batch[..self.batched]) };
            debug_assert_eq!(produced, self.batched);
            self.in_flight += self.batched;
            self.batched = 0;
            self.unsent = true;
        }
        if !self.unsent {
            return Ok(());
        }
        let mut waiting = self.tx_ring - self.tx.nb_free_exact();
        while waiting > 0 && self.tx.needs_wakeup() {
            self.tx.wakeup()?;
            let left = self.tx_ring - self.tx.nb_free_exact();
            if left == waiting {
                break;
            }
            waiting = left;
        }
        self.unsent = waiting > 0;
        Ok(())
    }

    /// Takes back the slots of transmitted frames.
    pub(super) fn reclaim(&mut self, slots: &mut TxSlots, burst: &mut [FrameDesc], stats: &mut Stats) {
        while self.in_flight > 0 {
            // SAFETY: the completion ring belongs to the UMEM of the slots.
            let n = unsafe { self.completion.consume(burst) };
            for descriptor in &burst[..n] {
                let done = slots.complete(descriptor.addr());
                self.in_flight -= usize::from(done).min(self.in_flight);
                stats.bad_descriptors += u64::from(!done);
            }
            if n < burst.len() {
                break;
            }
        }
    }

    /// Whether frames have arrived.
    pub(super) fn has_arrivals(&mut self) -> bool {
        self.rx.nb_avail(1) > 0
    }

    /// Whether the kernel left frames in the transmit ring, which must be offered again.
    pub(super) fn has_unsent(&mut self) -> bool {
        self.tx.nb_free_exact() < self.tx_ring
    }

    /// Adds the queue's losses.
    pub(super) fn add_losses(&self, stats: &mut Stats) {
        // `rx_dropped` includes frames without a buffer, which are also in the count of empty fill rings.
        if let Ok(kernel) = self.rx.fd().xdp_statistics() {
            stats.rx_dropped += self.assembly.dropped() + kernel.rx_dropped() + kernel.rx_ring_full();
            stats.tx_dropped += kernel.tx_invalid_descs();
        }
    }
}
