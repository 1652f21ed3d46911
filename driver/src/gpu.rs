//! Memory of GPUs, and what moves it.
//!
//! The CPU can't reach such memory: bytes are copied by the device itself, between its memory and [`Staging`], host memory that
//! packets are sent from and received into. A copy is submitted to a [`Queue`] and ends later.
//!
//! | device | what it is |
//! |---|---|
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
//! let (staging, mut queue) = (Staging::new(4096)?, device.queue()?);
//! let ticket = queue.gather(Nanos(0), &[memory.piece(0, 5).unwrap()], &staging, 0)?;
//! while queue.done(Nanos(1_000_000_000))? < ticket {}
//! let mut bytes = [0; 5];
//! staging.read(0, &mut bytes);
//! assert_eq!(&bytes, b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod error;
mod staging;
pub mod strict;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::Nanos;
use crate::memory::{Held, Memory, Piece};

pub use error::GpuError;
pub use staging::Staging;

/// The most pieces of one copy.
pub const MAX_PIECES: usize = 16;

/// A GPU. Threads and contexts share one.
pub trait Device: fmt::Debug + Send + Sync {
    /// As it is named: `opencl:0`.
    fn name(&self) -> &str;

    /// Allocates `len` bytes of its memory, zeroed.
    ///
    /// # Errors
    /// [`GpuError::Call`], mostly because there is no more memory.
    fn allocate(&self, len: usize) -> Result<Memory, GpuError>;

    /// Opens a queue of copies. One that is dropped first ends what was submitted to it.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    fn queue(&self) -> Result<Box<dyn Queue>, GpuError>;
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

    /// For a queue of the device, which must know what it copies.
    fn as_any(&self) -> &dyn Any;
}

/// Copies of one device between its memory and [`Staging`], with their ends.
///
/// Copies may land in any order. What they name stays until they have ended: a queue keeps a share in the memory
/// ([`Memory::is_pinned`]) and in the staging.
pub trait Queue: Send {
    /// Copies pieces of the device's memory, one after the other, to the staging from byte `at` on.
    ///
    /// # Errors
    /// [`GpuError::Full`]: nothing was submitted, and there will be room when older copies have ended;
    /// [`GpuError::Call`] if the device refuses.
    ///
    /// # Panics
    /// If the staging is too short, there are more than [`MAX_PIECES`], or a piece is another device's.
    fn gather(&mut self, now: Nanos, from: &[Piece<'_>], to: &Staging, at: usize)
    -> Result<Ticket, GpuError>;

    /// Copies the staging from byte `at` on to pieces of the device's memory, one after the other, but not before all copies up
    /// to `after` have ended.
    ///
    /// # Errors
    /// As [`gather`](Queue::gather).
    ///
    /// # Panics
    /// As [`gather`](Queue::gather).
    fn scatter(
        &mut self,
        now: Nanos,
        from: &Staging,
        at: usize,
        to: &[Piece<'_>],
        after: Ticket,
    ) -> Result<Ticket, GpuError>;

    /// Everything up to the ticket that this returns has ended, and what was told before to have failed has failed. Never
    /// blocks.
    ///
    /// # Errors
    /// [`CopyFailed`]: the copy with this ticket has failed, and all before it have ended. Asked again, the queue goes on behind
    /// it. Of a device that is gone each copy fails.
    fn done(&mut self, now: Nanos) -> Result<Ticket, CopyFailed>;

    /// When [`done`](Queue::done) is to be asked again, if anything has not ended; `now` where the device does not tell.
    fn next_deadline(&self, now: Nanos) -> Option<Nanos>;
}

/// A copy, by its number in its queue: later ones have greater numbers, from 1 on.
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

/// A copy that has failed.
#[derive(Debug, thiserror::Error)]
#[error("copy {} has failed: {source}", ticket.0)]
#[non_exhaustive]
pub struct CopyFailed {
    /// Which.
    pub ticket: Ticket,
    /// Why.
    pub source: GpuError,
}

impl CopyFailed {
    /// The copy with this ticket, and why.
    pub fn new(ticket: Ticket, source: GpuError) -> CopyFailed {
        CopyFailed { ticket, source }
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
}
