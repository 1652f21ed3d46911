//! Memory of GPUs, and what moves it.
//!
//! The CPU can't reach such memory: bytes are copied by the device itself, between its memory and [`Staging`], host memory that
//! packets are sent from and received into. A copy is submitted to a [`Queue`] and ends later.
//!
//! | device | what it is |
//! |---|---|
//! | `opencl` | any GPU by OpenCL, or the CPU by PoCL; feature `opencl` |
//! | `cuda` | a GPU of NVIDIA by CUDA, whose memory has addresses and dma-bufs; feature `cuda` |
//! | [`strict`] | for tests: memory that faults when the CPU touches it, copies that land late, out of order, or fail |
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

/// The most pieces of one copy: those of a work request, and one more where a datagram begins within one.
pub const MAX_PIECES: usize = 33;

/// Copies or reductions of one queue that are under way at once.
pub const QUEUE_DEPTH: usize = 64;

/// The most sources of one reduction by a device.
pub const MAX_SOURCES: usize = 8;

/// A GPU. Threads and contexts share one.
pub trait Device: fmt::Debug + Send + Sync {
    /// As it is named: `opencl:0`.
    fn name(&self) -> &str;

    /// Allocates `len` bytes of its memory, zeroed.
    ///
    /// # Errors
    /// [`GpuError::Call`], mostly because there is no more memory.
    fn allocate(&self, len: usize) -> Result<Memory, GpuError>;

    /// Opens a queue of copies between its memory and this staging, which it pins where that makes copies faster.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn queue(&self, staging: &Staging) -> Result<Box<dyn Queue>, GpuError>;

    /// Opens a queue of reductions, and of copies within its memory. The first one builds what the device computes with, which may take
    /// seconds; no reduction waits for that.
    ///
    /// # Errors
    /// [`GpuError::Call`]; [`GpuError::Unsupported`] if it computes nothing.
    fn reducer(&self) -> Result<Box<dyn Reducer>, GpuError>;
}

/// A piece of a device's memory as it was allocated or imported, which is what a [`Memory`] of the kind
/// [`Device`](crate::MemoryKind::Device) keeps.
pub trait Block: Any + fmt::Debug + Send + Sync {
    /// Whose it is.
    fn device(&self) -> &Arc<dyn Device>;

    /// Copies bytes from `offset` on to `to`, and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError>;

    /// Copies `from` to the bytes from `offset` on, and waits for it.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError>;

    /// All of it as a dma-buf, by which a network card reaches it.
    ///
    /// # Errors
    /// [`GpuError::Unsupported`] where the device or its driver has none, with what is missing; [`GpuError::Call`].
    fn export(&self) -> Result<DmaBuf, GpuError>;

    /// For a queue of the device, which must know what it copies.
    fn as_any(&self) -> &dyn Any;
}

/// Memory of a device as the kernel shares it between drivers.
#[derive(Debug)]
pub struct DmaBuf {
    /// The buffer.
    pub fd: OwnedFd,
    /// Where the memory begins in it.
    pub offset: u64,
}

/// What was submitted, and what of it has ended.
pub trait Tickets: Send {
    /// Everything up to the ticket that this returns has ended, and what was told before to have failed has failed. What has ended lets
    /// go of its share in the memory, which may be written and read from then on.
    ///
    /// It waits for no copy that is under way, but in two cases. The last share in memory frees it, and a library may take its time for
    /// that (`cuMemFree` waits for the device). A device that can't say whether something has ended is waited for, with all that was
    /// submitted: memory must not be let go of before.
    ///
    /// # Errors
    /// [`Failed`]: what has this ticket has failed, and all before it have ended. Asked again, the queue goes on behind it. Of a
    /// device that is gone everything fails.
    fn done(&mut self, now: Nanos) -> Result<Ticket, Failed>;

    /// When [`done`](Tickets::done) is to be asked again, if anything has not ended; `now` where the device does not tell.
    fn next_deadline(&self, now: Nanos) -> Option<Nanos>;
}

/// Copies of one device between its memory and [`Staging`], with their ends. One that is dropped first ends what was submitted, however
/// long that takes.
///
/// Copies may land in any order. What they name stays until they have ended: a queue keeps a share in the memory
/// ([`Memory::is_pinned`]) and in the staging.
pub trait Queue: Tickets {
    /// Copies pieces of the device's memory, one after the other, to the staging from byte `at` on.
    ///
    /// # Errors
    /// [`GpuError::Full`]: nothing was submitted, and there will be room when older copies have ended;
    /// [`GpuError::Call`] if the device refuses.
    ///
    /// # Panics
    /// If the staging is too short, there are more than [`MAX_PIECES`], or a piece is another device's.
    fn gather(&mut self, now: Nanos, from: &[Piece<'_>], at: usize) -> Result<Ticket, GpuError>;

    /// Copies the staging from byte `at` on to pieces of the device's memory, one after the other, but not before all copies up
    /// to `after` have ended.
    ///
    /// # Errors
    /// As [`gather`](Queue::gather).
    ///
    /// # Panics
    /// As [`gather`](Queue::gather).
    fn scatter(&mut self, now: Nanos, at: usize, to: &[Piece<'_>], after: Ticket)
    -> Result<Ticket, GpuError>;
}

/// Reductions by a device, of its memory and into it, with their ends. They are carried out in the order in which they are submitted,
/// each behind the one before. One that is dropped first ends what was submitted, however long that takes.
pub trait Reducer: Tickets {
    /// Computes a target of sources, with the same bits as the processor ([`Reduction::apply`](crate::reduction::Reduction::apply),
    /// [`scale`](crate::reduction::scale)), but for those of NaNs that it leaves to anybody. The target may be the same memory as any
    /// of the sources. A reduction of one source that is not divided is a copy, of whatever bytes.
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
    /// [`GpuError::Full`], as [`Queue::gather`]; [`GpuError::Unsupported`] for what the device does not compute: f64 without double
    /// precision, quotients that it does not round as the processor, more than [`MAX_SOURCES`]; [`GpuError::Unaligned`];
    /// [`GpuError::Call`].
    ///
    /// Pieces that overlap, and are not the same, have any result, or the device refuses them.
    ///
    /// # Panics
    /// If there are no sources, the pieces are not equally long or hold no whole elements, or one is another device's.
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
    /// Before all of a queue.
    pub const NONE: Ticket = Ticket(0);

    /// The one behind it.
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
    /// Which.
    pub ticket: Ticket,
    /// Why.
    pub source: GpuError,
}

impl Failed {
    /// What has this ticket, and why.
    pub fn new(ticket: Ticket, source: GpuError) -> Failed {
        Failed { ticket, source }
    }
}

/// A piece of a device's memory that a copy works on, and what keeps it.
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

    /// The block of it, in a queue of this device, whose blocks are all of that type.
    ///
    /// # Panics
    /// If it is another device's.
    fn block<B: Block>(&self, device: &dyn Device) -> &B {
        let block = self.held.block();
        let is_own = std::ptr::addr_eq(Arc::as_ptr(block.device()), device);
        match block.as_any().downcast_ref::<B>().filter(|_| is_own) {
            Some(block) => block,
            None => panic!(
                "a piece of memory of another device, or of another handle of it, in a queue of {}",
                device.name()
            ),
        }
    }
}

/// A share in a device of its own, for whoever it hands memory and queues to.
fn share<D>(this: &Weak<D>) -> Arc<D> {
    // Whoever calls has it by an `Arc`, for there is no other way to make one.
    this.upgrade().unwrap_or_else(|| unreachable!("a device is called by a reference of an Arc"))
}

/// Which devices of a library there are, for whoever named another.
#[cfg(any(feature = "opencl", feature = "cuda"))]
fn choices(library: &str, count: usize) -> String {
    match count {
        1 => format!("there is {library}:0 only"),
        _ => format!("there are {library}:0 to {library}:{}", count - 1),
    }
}

/// What every reducer refuses: too many sources, and elements that are not aligned.
///
/// # Panics
/// If there are no sources, or the pieces are not equally long or hold no whole elements.
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
