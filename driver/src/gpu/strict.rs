//! A strict device for tests.
//!
//! Its memory is mapped twice: any access by the application's addresses faults, and the device copies through other
//! addresses. Copies land late, out of order, or not at all, as determined by a seed and by the time that is passed in: a
//! run replays bit for bit.

mod reducer;
mod udmabuf;

use std::any::Any;
use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use arrayvec::ArrayVec;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rustix::fs::{MemfdFlags, memfd_create};

use super::{
    Block, Device, DmaBuf, Failed, GpuError, MAX_PIECES, QUEUE_DEPTH, Queue, Reducer, Span, Staging, Ticket,
    Tickets, share,
};
use crate::Nanos;
use crate::memory::{Memory, Piece};

/// The behaviour of a strict device. By default it copies immediately and never fails.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct Strict {
    /// The seed of all random choices.
    pub seed: u64,
    /// The longest time from submission until a copy lands.
    pub latest: Duration,
    /// One in this many copies fails; none if it is 0.
    pub fails_one_in: u32,
    /// The most outstanding copies or reductions of a queue.
    pub depth: usize,
    /// Bytes per second that a queue copies in each direction, one copy after the other; `None` for no limit.
    pub copied_per_second: Option<u64>,
    /// Bytes per second of reductions.
    pub reduced_per_second: Option<u64>,
}

impl Default for Strict {
    fn default() -> Strict {
        Strict {
            seed: 0,
            latest: Duration::ZERO,
            fails_one_in: 0,
            depth: QUEUE_DEPTH,
            copied_per_second: None,
            reduced_per_second: None,
        }
    }
}

impl Strict {
    /// The seed of all random choices; 0 by default.
    pub fn seed(self, seed: u64) -> Self {
        Strict { seed, ..self }
    }

    /// The longest time from submission until a copy lands; zero by default.
    pub fn latest(self, latest: Duration) -> Self {
        Strict { latest, ..self }
    }

    /// One in this many copies fails; none (0) by default.
    pub fn fails_one_in(self, fails_one_in: u32) -> Self {
        Strict { fails_one_in, ..self }
    }

    /// The most outstanding copies of a queue; 64 by default.
    pub fn depth(self, depth: usize) -> Self {
        Strict { depth, ..self }
    }

    /// Bytes per second that a queue copies in each direction, and bytes per second of reductions; no limit by default.
    pub fn speed(self, copied_per_second: u64, reduced_per_second: u64) -> Self {
        let [copied_per_second, reduced_per_second] = [copied_per_second, reduced_per_second].map(Some);
        Strict { copied_per_second, reduced_per_second, ..self }
    }

    /// The duration for this many bytes.
    fn takes(&self, per_second: Option<u64>, bytes: usize) -> Duration {
        let nanos = |rate: u64| (bytes as u128 * 1_000_000_000 / u128::from(rate.max(1))) as u64;
        Duration::from_nanos(per_second.map_or(0, nanos))
    }

    /// Opens the device.
    ///
    /// # Errors
    /// None yet; opening other devices may fail.
    pub fn open(self) -> Result<Arc<StrictDevice>, GpuError> {
        Ok(Arc::new_cyclic(|this| StrictDevice {
            this: this.clone(),
            name: format!("strict:{}", self.seed),
            settings: self,
            queues: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            failing: AtomicU8::new(0),
            hanging: AtomicU8::new(0),
            copied: AtomicU64::new(0),
            copies: AtomicU64::new(0),
            reductions: AtomicU64::new(0),
        }))
    }
}

/// A kind of work submitted to a strict device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "all that a device does late")]
pub enum Submission {
    /// A copy from its memory to the host's.
    Gather,
    /// A copy from the host's memory to its own.
    Scatter,
    /// A computation in its memory.
    Computation,
}

/// A device for tests.
#[derive(Debug)]
pub struct StrictDevice {
    this: Weak<StrictDevice>,
    name: String,
    settings: Strict,
    /// The number of queues created; each has its own random stream.
    queues: AtomicU64,
    is_lost: AtomicBool,
    /// The kinds of work whose next submission fails, one bit each.
    failing: AtomicU8,
    /// The kinds of work whose next submission never ends, one bit each.
    hanging: AtomicU8,
    /// Bytes that queues have copied, and the number of copies.
    copied: AtomicU64,
    copies: AtomicU64,
    reductions: AtomicU64,
}

impl StrictDevice {
    /// From now on every copy fails, including outstanding ones.
    pub fn lose(&self) {
        self.is_lost.store(true, Ordering::Relaxed);
    }

    /// The next submission of this kind fails, independent of the seed.
    pub fn fail_next(&self, what: Submission) {
        self.failing.fetch_or(1 << what as u8, Ordering::Relaxed);
    }

    /// The next submission of this kind never ends.
    pub fn hang_next(&self, what: Submission) {
        self.hanging.fetch_or(1 << what as u8, Ordering::Relaxed);
    }

    /// The number of copies submitted to its queues, and their bytes.
    pub fn copies(&self) -> (u64, u64) {
        (self.copies.load(Ordering::Relaxed), self.copied.load(Ordering::Relaxed))
    }

    /// The number of reductions submitted, including copies within its memory.
    pub fn reductions(&self) -> u64 {
        self.reductions.load(Ordering::Relaxed)
    }

    fn this(&self) -> Arc<StrictDevice> {
        share(&self.this)
    }

    fn refused(&self, call: &'static str, reason: impl ToString) -> GpuError {
        GpuError::Call { device: self.name.clone(), call, reason: reason.to_string() }
    }

    /// Checks for room in a queue with this many outstanding.
    fn check_room(&self, under_way: usize) -> Result<(), GpuError> {
        if under_way >= self.settings.depth {
            return Err(GpuError::Full { copies: under_way });
        }
        Ok(())
    }

    /// The device's address of `len` bytes of a piece, from `skip` on.
    ///
    /// # Panics
    /// If it is of another device.
    fn place(&self, span: &Span, skip: usize, len: usize) -> NonNull<u8> {
        span.block::<StrictBlock>(self).mapped.place(span.offset + skip as u64, len)
    }

    /// The outcome of a queue's next submission: when it ends, and whether it fails.
    fn draw(&self, chance: &mut ChaCha8Rng, now: Nanos, what: Submission) -> (Nanos, bool) {
        let Strict { latest, fails_one_in, .. } = self.settings;
        let late = (u128::from(chance.next_u64()) * latest.as_nanos()) >> 64;
        let fails = fails_one_in > 0 && chance.next_u32().is_multiple_of(fails_one_in);
        // Set by `fail_next` or `hang_next`.
        let is_said =
            |of: &AtomicU8| of.fetch_and(!(1 << what as u8), Ordering::Relaxed) & 1 << what as u8 != 0;
        let due = if is_said(&self.hanging) { Nanos::NEVER } else { Nanos(now.0 + late as u64) };
        (due, is_said(&self.failing) || fails)
    }

    fn chance(&self) -> ChaCha8Rng {
        let number = self.queues.fetch_add(1, Ordering::Relaxed);
        ChaCha8Rng::seed_from_u64(self.settings.seed.wrapping_add(number << 32))
    }

    /// The error of a failed ticket; all fail on a lost device.
    fn failed(&self, ticket: Ticket) -> Failed {
        let is_lost = self.is_lost.load(Ordering::Relaxed);
        let reason = if is_lost { "the device is lost" } else { "as the seed says" };
        Failed::new(ticket, self.refused("copy", reason))
    }

    fn check_lost(&self, call: &'static str) -> Result<(), GpuError> {
        if self.is_lost.load(Ordering::Relaxed) {
            Err(self.refused(call, "the device is lost"))
        } else {
            Ok(())
        }
    }
}

impl Device for StrictDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn allocate(&self, len: usize) -> Result<Memory, GpuError> {
        self.check_lost("allocate")?;
        let mapped = TwoMappings::new(len).map_err(|error| self.refused("mmap", error))?;
        let address = mapped.forbidden;
        let device: Arc<dyn Device> = self.this();
        Ok(Memory::of_device(Arc::new(StrictBlock { device, strict: self.this(), mapped }), address, len))
    }

    fn queue(&self, staging: &Staging) -> Result<Box<dyn Queue>, GpuError> {
        self.check_lost("queue")?;
        Ok(Box::new(StrictQueue {
            device: self.this(),
            staging: staging.clone(),
            chance: self.chance(),
            copies: VecDeque::with_capacity(self.settings.depth),
            free: [Nanos::ZERO; 2],
            last: Ticket::NONE,
        }))
    }

    fn reducer(&self) -> Result<Box<dyn Reducer>, GpuError> {
        self.check_lost("reducer")?;
        Ok(Box::new(reducer::StrictReducer::new(self.this())))
    }
}

/// The same bytes at two addresses.
#[derive(Debug)]
struct TwoMappings {
    /// The application's mapping: any access faults.
    forbidden: NonNull<u8>,
    /// The device's mapping.
    open: NonNull<u8>,
    len: usize,
    file: File,
}

// SAFETY: the bytes are only accessed by copies through raw pointers; no references to them exist.
unsafe impl Send for TwoMappings {}
// SAFETY: as above.
unsafe impl Sync for TwoMappings {}

impl TwoMappings {
    fn new(len: usize) -> io::Result<TwoMappings> {
        let file =
            File::from(memfd_create("ferroce-strict", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
        file.set_len(len.max(1) as u64)?;
        let forbidden = map(&file, len, libc::PROT_NONE, 0)?;
        match map(&file, len, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_POPULATE) {
            Ok(open) => Ok(TwoMappings { forbidden, open, len, file }),
            Err(error) => {
                unmap(forbidden, len);
                Err(error)
            }
        }
    }

    /// The device's address of these bytes.
    ///
    /// # Panics
    /// If there are fewer.
    fn place(&self, offset: u64, len: usize) -> NonNull<u8> {
        let inside = offset.checked_add(len as u64).is_some_and(|end| end <= self.len as u64);
        assert!(inside, "{len} bytes from {offset} on, of memory of {} bytes", self.len);
        // SAFETY: inside the mapping or at its end, as just checked.
        unsafe { self.open.add(offset as usize) }
    }
}

impl Drop for TwoMappings {
    fn drop(&mut self) {
        unmap(self.forbidden, self.len);
        unmap(self.open, self.len);
    }
}

fn map(file: &File, len: usize, protection: i32, flags: i32) -> io::Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let base = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            len.max(1),
            protection,
            libc::MAP_SHARED | flags,
            file.as_raw_fd(),
            0,
        )
    };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned address 0"))
}

fn unmap(base: NonNull<u8>, len: usize) {
    // SAFETY: a mapping of `map`, of that length, which is not used any more; unmapped once.
    unsafe { libc::munmap(base.as_ptr().cast(), len.max(1)) };
}

#[derive(Debug)]
struct StrictBlock {
    device: Arc<dyn Device>,
    strict: Arc<StrictDevice>,
    mapped: TwoMappings,
}

impl Block for StrictBlock {
    fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError> {
        self.strict.check_lost("read")?;
        // SAFETY: `to.len()` initialised bytes, and a unique borrow that does not overlap them.
        unsafe {
            self.mapped
                .place(offset, to.len())
                .copy_to_nonoverlapping(NonNull::from(&mut *to).cast(), to.len())
        };
        Ok(())
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError> {
        self.strict.check_lost("write")?;
        // SAFETY: `from.len()` bytes of a mapping to which no references exist.
        unsafe {
            self.mapped
                .place(offset, from.len())
                .copy_from_nonoverlapping(NonNull::from(from).cast(), from.len())
        };
        Ok(())
    }

    /// With the kernel's /dev/udmabuf, which makes a dma-buf of pages.
    fn export(&self) -> Result<DmaBuf, GpuError> {
        self.strict.check_lost("export")?;
        let fd = udmabuf::of(&self.mapped.file, self.mapped.len).map_err(|reason| GpuError::Unsupported {
            device: self.strict.name.clone(),
            what: "a dma-buf of its memory".to_owned(),
            reason,
        })?;
        Ok(DmaBuf { fd, offset: 0 })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct StrictQueue {
    device: Arc<StrictDevice>,
    staging: Staging,
    chance: ChaCha8Rng,
    /// Copies not yet reported as ended, in ticket order.
    copies: VecDeque<Submitted>,
    /// When all submitted copies will have ended, for each direction.
    free: [Nanos; 2],
    last: Ticket,
}

struct Submitted {
    ticket: Ticket,
    /// When it lands.
    due: Nanos,
    has_landed: bool,
    fails: bool,
    direction: Submission,
    at: usize,
    spans: ArrayVec<Span, MAX_PIECES>,
}

impl StrictQueue {
    fn submit(
        &mut self,
        now: Nanos,
        pieces: &[Piece<'_>],
        (direction, at): (Submission, usize),
        after: Ticket,
    ) -> Result<Ticket, GpuError> {
        self.device.check_lost("copy")?;
        self.device.check_room(self.copies.len())?;
        let spans: ArrayVec<Span, MAX_PIECES> = pieces.iter().map(Span::of).collect();
        let bytes: usize = spans.iter().map(|span| span.len).sum();
        // Errors are found here and not when the copy lands.
        self.staging.place(at, bytes);
        for span in &spans {
            self.device.place(span, 0, span.len);
        }
        let free = &mut self.free[direction as usize];
        *free = now.max(*free) + self.device.settings.takes(self.device.settings.copied_per_second, bytes);
        let (due, fails) = self.device.draw(&mut self.chance, *free, direction);
        let before = self.copies.iter().filter(|copy| copy.ticket <= after).map(|copy| copy.due).max();
        let due = due.max(before.unwrap_or(Nanos::ZERO));
        self.last = self.last.next();
        self.device.copies.fetch_add(1, Ordering::Relaxed);
        self.device.copied.fetch_add(bytes as u64, Ordering::Relaxed);
        let copy = Submitted { ticket: self.last, due, has_landed: false, fails, direction, at, spans };
        self.copies.push_back(copy);
        Ok(self.last)
    }

    /// Lands all copies due by `now`, in the order of their times.
    fn land(&mut self, now: Nanos) {
        let StrictQueue { device, staging, copies, .. } = self;
        let is_next = |copy: &&mut Submitted| !copy.has_landed && copy.due <= now;
        while let Some(copy) = copies.iter_mut().filter(is_next).min_by_key(|copy| (copy.due, copy.ticket)) {
            copy.has_landed = true;
            copy.fails |= device.is_lost.load(Ordering::Relaxed);
            if !copy.fails {
                copy.carry_out(device, staging);
            }
        }
    }
}

impl Submitted {
    fn carry_out(&self, device: &StrictDevice, staging: &Staging) {
        let mut at = self.at;
        for span in &self.spans {
            let own = device.place(span, 0, span.len);
            let staged = staging.place(at, span.len);
            let (from, to) = match self.direction {
                Submission::Gather => (own, staged),
                _ => (staged, own),
            };
            // SAFETY: `span.len` bytes at both addresses, which are in two mappings; no references to them exist.
            unsafe { from.copy_to_nonoverlapping(to, span.len) };
            at += span.len;
        }
    }
}

impl Queue for StrictQueue {
    fn gather(&mut self, now: Nanos, from: &[Piece<'_>], at: usize) -> Result<Ticket, GpuError> {
        self.submit(now, from, (Submission::Gather, at), Ticket::NONE)
    }

    fn scatter(
        &mut self,
        now: Nanos,
        at: usize,
        to: &[Piece<'_>],
        after: Ticket,
    ) -> Result<Ticket, GpuError> {
        self.submit(now, to, (Submission::Scatter, at), after)
    }
}

impl Tickets for StrictQueue {
    fn done(&mut self, now: Nanos) -> Result<Ticket, Failed> {
        let is_lost = self.device.is_lost.load(Ordering::Relaxed);
        self.land(if is_lost { Nanos::NEVER } else { now });
        while let Some(copy) = self.copies.front()
            && copy.has_landed
        {
            let (ticket, fails) = (copy.ticket, copy.fails);
            self.copies.pop_front();
            if fails {
                return Err(self.device.failed(ticket));
            }
        }
        Ok(self.copies.front().map_or(self.last, |copy| Ticket(copy.ticket.0 - 1)))
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        if self.device.is_lost.load(Ordering::Relaxed) && !self.copies.is_empty() {
            return Some(now);
        }
        // The oldest delays the report of all others.
        self.copies.front().map(|copy| copy.due)
    }
}

impl Drop for StrictQueue {
    fn drop(&mut self) {
        self.land(Nanos::NEVER);
    }
}

#[cfg(test)]
mod tests;
