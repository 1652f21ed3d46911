//! GPU memory, and copies to and from it.
//!
//! The CPU can't access such memory: the device itself copies bytes between its memory and [`Staging`], host memory for packets.
//! A copy is submitted to a [`Queue`] and completes later.
//!
//! | device | description |
//! |---|---|
//! | `opencl` | any GPU with OpenCL, or the CPU with PoCL; feature `opencl` |
//! | `cuda` | an NVIDIA GPU with CUDA, whose memory has addresses and dma-bufs; feature `cuda` |
//! | [`strict`] | for tests: memory that faults when the CPU accesses it, copies that complete late, out of order, or fail |
//!
//! ```
//! use ferroce_driver::gpu::{Device, Staging, strict::Strict};
//! use ferroce_driver::Nanos;
//!
//! let device = Strict::default().open()?;
//! let mut memory = device.allocate(4096)?;
//! memory.write(0, b"hello")?; // by a copy of the device, which this waits for
//!
//! let staging = Staging::new(4096)?;
//! let mut queue = device.queue(&staging)?;
//! let ticket = queue.gather(Nanos(0), &[memory.piece(0, 5).unwrap()], 0)?;
//! while queue.done(Nanos(1_000_000_000))? < ticket {}
//! let mut bytes = [0; 5];
//! staging.read(0, &mut bytes);
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
#[cfg(any(feature = "opencl", feature = "cuda"))]
mod kernels;
#[cfg(feature = "opencl")]
pub mod opencl;
mod spec;
mod staging;
pub mod strict;

use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crate::Nanos;
use crate::memory::{Held, Memory, Piece};
use crate::reduction::Computation;

pub use error::GpuError;
pub use spec::{FoundGpu, GpuSpec};
pub use staging::Staging;

/// The most pieces of one copy: those of a work request, and one more if a datagram begins inside one.
pub const MAX_PIECES: usize = 33;

/// The most outstanding copies or reductions of one queue.
pub const QUEUE_DEPTH: usize = 64;

/// The most sources of one reduction by a device.
pub const MAX_SOURCES: usize = 8;

/// A GPU. Threads and contexts may share it.
pub trait Device: fmt::Debug + Send + Sync {
    /// Its name, such as `opencl:0`.
    fn name(&self) -> &str;

    /// Allocates `len` bytes of its memory, zeroed.
    ///
    /// # Errors
    /// [`GpuError::Call`], mostly because there is no more memory.
    fn allocate(&self, len: usize) -> Result<Memory, GpuError>;

    /// Opens a queue of copies between its memory and this staging, which it pins if that makes copies faster.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn queue(&self, staging: &Staging) -> Result<Box<dyn Queue>, GpuError>;

    /// Opens a queue of reductions, and of copies within its memory. The first call compiles the kernels, which may take seconds,
    /// so that no reduction waits for that.
    ///
    /// # Errors
    /// [`GpuError::Call`]; [`GpuError::Unsupported`] if it does not support reductions.
    fn reducer(&self) -> Result<Box<dyn Reducer>, GpuError>;
}

/// An allocated or imported block of device memory, the owner in a [`Memory`] of the kind [`Device`](crate::MemoryKind::Device).
pub trait Block: Any + fmt::Debug + Send + Sync {
    /// Its device.
    fn device(&self) -> &Arc<dyn Device>;

    /// Copies bytes from `offset` on to `to`, and waits until the copy is complete.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError>;

    /// Copies `from` to the bytes from `offset` on, and waits until the copy is complete.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError>;

    /// The whole block as a dma-buf, with which a network card accesses it.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] if the device or its driver does not support it, with what is missing; [`GpuError::Call`].
    fn export(&self) -> Result<DmaBuf, GpuError>;

    /// For a queue of the device, which needs the concrete type.
    fn as_any(&self) -> &dyn Any;
}

/// Device memory that the kernel shares between drivers.
#[derive(Debug)]
pub struct DmaBuf {
    /// The buffer.
    pub fd: OwnedFd,
    /// The offset of the memory in it.
    pub offset: u64,
}

/// Submitted and completed work of a queue.
pub trait Tickets: Send {
    /// Returns the ticket up to which all work has completed, except for failures reported before. Completed work releases its
    /// reference to the memory, which may be written and read from then on.
    ///
    /// It does not wait for outstanding copies, except in two cases. Dropping the last reference to memory frees it, which may
    /// block in a library (`cuMemFree` waits for the device). If a device can't report completions, it waits for all submitted
    /// work: the memory must not be released before.
    ///
    /// # Errors
    /// [`Failed`]: the work with this ticket has failed, and all before it has completed. The next call continues after it. If
    /// the device is gone, all work fails.
    fn done(&mut self, now: Nanos) -> Result<Ticket, Failed>;

    /// When to call [`done`](Tickets::done) again, if work is outstanding; `now` if the device can't predict it.
    fn next_deadline(&self, now: Nanos) -> Option<Nanos>;
}

/// A queue of copies of one device between its memory and [`Staging`]. Dropping it waits until all submitted work has ended,
/// however long that takes.
///
/// Copies may complete in any order. The queue keeps references to the memory ([`Memory::is_pinned`]) and to the staging until
/// they have ended.
pub trait Queue: Tickets {
    /// Copies pieces of the device's memory, one after the other, to the staging from byte `at` on.
    ///
    /// # Errors
    /// [`GpuError::Full`]: nothing was submitted; there is room again when older copies have completed; [`GpuError::Call`] if the
    /// device refuses.
    ///
    /// # Panics
    /// If the staging is too short, there are more than [`MAX_PIECES`], or a piece is of another device.
    fn gather(&mut self, now: Nanos, from: &[Piece<'_>], at: usize) -> Result<Ticket, GpuError>;

    /// Copies the staging from byte `at` on to pieces of the device's memory, one after the other, after all copies up to `after`
    /// have completed.
    ///
    /// # Errors
    /// As [`gather`](Queue::gather).
    ///
    /// # Panics
    /// As [`gather`](Queue::gather).
    fn scatter(&mut self, now: Nanos, at: usize, to: &[Piece<'_>], after: Ticket)
    -> Result<Ticket, GpuError>;
}

/// A queue of reductions by a device, from and to its memory. They are executed in the order of submission, one after the other.
/// Dropping it waits until all submitted work has ended, however long that takes.
pub trait Reducer: Tickets {
    /// Computes a target from sources, with the same bits as the CPU ([`Reduction::apply`](crate::reduction::Reduction::apply),
    /// [`scale`](crate::reduction::scale)), except for the bits of NaNs that these leave undefined. The target may be the same
    /// memory as any of the sources. A reduction of one source without a division is a copy of any bytes.
    ///
    /// ```
    /// use ferroce_driver::gpu::{Device, strict::Strict};
    /// use ferroce_driver::reduction::{Computation, DataType, ReduceOp, Reduction};
    /// use ferroce_driver::Nanos;
    ///
    /// let device = Strict::default().open()?;
    /// let mut memory = device.allocate(4)?;
    /// memory.write(0, &[1, 2, 30, 40])?;
    /// let sum = Computation::Reduce(Reduction::new(DataType::U8, ReduceOp::Sum));
    /// let mut reducer = device.reducer()?;
    /// let [a, b] = [memory.piece(0, 2)?, memory.piece(2, 2)?];
    /// let ticket = reducer.compute(Nanos(0), sum, a, &[a, b])?;
    /// while reducer.done(Nanos(0))? < ticket {}
    /// let mut sums = [0; 2];
    /// memory.read(0, &mut sums)?;
    /// assert_eq!(sums, [31, 42]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`GpuError::Full`], as [`Queue::gather`]; [`GpuError::Unsupported`] for what the device does not compute: f64 without
    /// double precision, quotients that it does not round as the CPU does, more than [`MAX_SOURCES`]; [`GpuError::Unaligned`];
    /// [`GpuError::Call`].
    ///
    /// Pieces that overlap, and are not the same, have an undefined result, or the device refuses them.
    ///
    /// # Panics
    /// If there are no sources, the pieces differ in length or do not hold whole elements, or one is of another device.
    fn compute(
        &mut self,
        now: Nanos,
        computation: Computation,
        target: Piece<'_>,
        sources: &[Piece<'_>],
    ) -> Result<Ticket, GpuError>;
}

/// A copy or a reduction, by its number in its queue: later ones have greater numbers, from 1 on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

impl Ticket {
    /// The ticket before all of a queue.
    pub const NONE: Ticket = Ticket(0);

    /// The next ticket.
    #[must_use]
    pub fn next(self) -> Ticket {
        Ticket(self.0 + 1)
    }
}

/// A copy or a reduction that has failed.
#[derive(Debug, thiserror::Error)]
#[error("ticket {} has failed: {source}", ticket.0)]
#[non_exhaustive]
pub struct Failed {
    /// Its ticket.
    pub ticket: Ticket,
    /// The error.
    pub source: GpuError,
}

impl Failed {
    /// The failure of a ticket, with the reason.
    pub fn new(ticket: Ticket, source: GpuError) -> Failed {
        Failed { ticket, source }
    }
}

/// A piece of device memory in a copy, and a reference that keeps it.
#[derive(Debug)]
struct Span {
    held: Held,
    offset: u64,
    len: usize,
}

impl Span {
    fn of(piece: &Piece<'_>) -> Span {
        Span { held: piece.hold(), offset: piece.offset(), len: piece.len() }
    }

    /// Its block, in a queue of this device, whose blocks are all of that type.
    ///
    /// # Panics
    /// If it is of another device.
    fn block<B: Block>(&self, device: &dyn Device) -> &B {
        let block = self.held.block();
        let is_own = std::ptr::addr_eq(Arc::as_ptr(block.device()), device);
        match block.as_any().downcast_ref::<B>().filter(|_| is_own) {
            Some(block) => block,
            None => panic!(
                "memory of another device, or of another handle of it, in a queue of {}",
                device.name()
            ),
        }
    }
}

/// A device's reference to itself, for its memory and queues.
fn share<D>(this: &Weak<D>) -> Arc<D> {
    // Callers always have it in an `Arc`, because there is no other constructor.
    this.upgrade().unwrap_or_else(|| unreachable!("a device is called by a reference of an Arc"))
}

/// The devices of a library, for an error about a missing one.
#[cfg(any(feature = "opencl", feature = "cuda"))]
fn choices(library: &str, count: usize) -> String {
    match count {
        1 => format!("there is {library}:0 only"),
        _ => format!("there are {library}:0 to {library}:{}", count - 1),
    }
}

/// Checks for all reducers: too many sources, and misaligned elements.
///
/// # Panics
/// If there are no sources, or the pieces differ in length or do not hold whole elements.
fn check_sources(
    device: &str,
    computation: Computation,
    target: &Piece<'_>,
    sources: &[Piece<'_>],
) -> Result<(), GpuError> {
    let len = target.len();
    assert!(
        !sources.is_empty() && sources.iter().all(|source| source.len() == len),
        "a reduction of no pieces, or of some that are not as long as the target, {len} bytes"
    );
    if sources.len() > MAX_SOURCES {
        return Err(GpuError::Unsupported {
            device: device.to_owned(),
            what: format!("a reduction of {} sources", sources.len()),
            reason: format!("a device takes {MAX_SOURCES} at once"),
        });
    }
    if computation.is_copy(sources.len()) {
        return Ok(());
    }
    let size = computation.data_type().size();
    assert!(len.is_multiple_of(size), "{len} bytes hold no whole elements of {size} bytes");
    let offsets = sources.iter().chain([target]).map(Piece::offset);
    match offsets.into_iter().find(|offset| !offset.is_multiple_of(size as u64)) {
        None => Ok(()),
        Some(offset) => Err(GpuError::Unaligned { device: device.to_owned(), size, offset }),
    }
}

#[cfg(test)]
mod tests;
