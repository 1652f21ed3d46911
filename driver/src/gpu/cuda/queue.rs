//! Copies between a device's memory and staging.

use std::ffi::c_void;
use std::sync::Arc;

use arrayvec::ArrayVec;
use cudarc::driver::sys::CUdeviceptr;

use super::Cuda;
use super::buffer::Buffer;
use super::context::{Current, Stream};
use super::pinned::PinnedStaging;
use super::under_way::UnderWay;
use crate::Nanos;
use crate::gpu::{Failed, GpuError, MAX_PIECES, Queue, Span, Staging, Ticket, Tickets};
use crate::memory::Piece;

pub(super) struct CopyQueue {
    /// Dropped first: its copies have ended by then.
    copies: UnderWay,
    staging: PinnedStaging,
    /// Each direction is in order; both directions run concurrently.
    gathers: Stream,
    scatters: Stream,
    cuda: Arc<Cuda>,
}

impl CopyQueue {
    pub(super) fn new(cuda: Arc<Cuda>, staging: &Staging) -> Result<CopyQueue, GpuError> {
        Ok(CopyQueue {
            copies: UnderWay::new(&cuda)?,
            gathers: Stream::new(&cuda.context)?,
            scatters: Stream::new(&cuda.context)?,
            staging: PinnedStaging::new(&cuda.context, staging)?,
            cuda,
        })
    }

    /// The copies, one per piece.
    ///
    /// # Panics
    /// If the staging is too short, there are too many pieces, or one is of another device.
    fn transfers(&self, spans: &[Span], at: usize) -> ArrayVec<Transfer, MAX_PIECES> {
        let mut at = at;
        let transfers = spans.iter().map(|span| {
            let staged = self.staging.place(at, span.len);
            at += span.len;
            Transfer {
                pointer: span.block::<Buffer>(&*self.cuda).pointer() + span.offset,
                staged,
                len: span.len,
            }
        });
        transfers.filter(|transfer| transfer.len > 0).collect()
    }
}

#[derive(Clone, Copy)]
struct Transfer {
    pointer: CUdeviceptr,
    staged: *mut c_void,
    len: usize,
}

impl Queue for CopyQueue {
    fn gather(&mut self, _now: Nanos, from: &[Piece<'_>], at: usize) -> Result<Ticket, GpuError> {
        let spans: ArrayVec<Span, MAX_PIECES> = from.iter().map(Span::of).collect();
        let transfers = self.transfers(&spans, at);
        let CopyQueue { copies, gathers, cuda, .. } = self;
        copies.check_room()?;
        let current = cuda.context.enter()?;
        let result = transfers.into_iter().try_for_each(|Transfer { pointer, staged, len }| {
            // SAFETY: equally long ranges of allocated memory and of staging, to which no references exist. Both are kept
            // until the copy has ended.
            current.call("cuMemcpyDtoHAsync", |cuda| unsafe {
                (cuda.copy_to_host)(staged, pointer, len, gathers.raw())
            })
        });
        copies.submitted((&current, gathers), true, result, spans)
    }

    fn scatter(
        &mut self,
        _now: Nanos,
        at: usize,
        to: &[Piece<'_>],
        after: Ticket,
    ) -> Result<Ticket, GpuError> {
        let spans: ArrayVec<Span, MAX_PIECES> = to.iter().map(Span::of).collect();
        let transfers = self.transfers(&spans, at);
        let CopyQueue { copies, scatters, cuda, .. } = self;
        copies.check_room()?;
        let current = cuda.context.enter()?;
        wait_for_gathers(&current, copies, scatters, after)?;
        let result = transfers.into_iter().try_for_each(|Transfer { pointer, staged, len }| {
            // SAFETY: as in `gather`.
            current.call("cuMemcpyHtoDAsync", |cuda| unsafe {
                (cuda.copy_to_device)(pointer, staged, len, scatters.raw())
            })
        });
        copies.submitted((&current, scatters), false, result, spans)
    }
}

/// Makes scatters wait for the gathers up to `after`. Scatters wait for one another anyway.
fn wait_for_gathers(
    current: &Current<'_>,
    copies: &UnderWay,
    scatters: &Stream,
    after: Ticket,
) -> Result<(), GpuError> {
    match copies.newest(|copy| copy.is_gather && copy.ticket <= after) {
        None => Ok(()),
        // SAFETY: a stream and an event of this context; the event may be recorded again after the call.
        Some(copy) => current.call("cuStreamWaitEvent", |cuda| unsafe {
            (cuda.wait_in_stream)(scatters.raw(), copy.event.raw(), 0)
        }),
    }
}

impl Tickets for CopyQueue {
    fn done(&mut self, _now: Nanos) -> Result<Ticket, Failed> {
        self.copies.done(&self.cuda, &[&self.gathers, &self.scatters])
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        (!self.copies.is_empty()).then_some(now)
    }
}

impl Drop for CopyQueue {
    fn drop(&mut self) {
        self.gathers.end_at_last();
        self.scatters.end_at_last();
    }
}
