//! Reductions, in the order in which they were submitted.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arrayvec::ArrayVec;
use rand_chacha::ChaCha8Rng;

use super::{StrictDevice, Submission};
use crate::Nanos;
use crate::gpu::{Failed, GpuError, MAX_SOURCES, Reducer, Span, Ticket, Tickets, check_sources};
use crate::memory::{self, Piece};
use crate::reduction::{Computation, scale};

pub(super) struct StrictReducer {
    device: Arc<StrictDevice>,
    chance: ChaCha8Rng,
    /// Reductions that have not ended.
    reductions: VecDeque<Reduction>,
    /// When all submitted reductions will have ended.
    free: Nanos,
    last: Ticket,
}

impl StrictReducer {
    pub(super) fn new(device: Arc<StrictDevice>) -> StrictReducer {
        let reductions = VecDeque::with_capacity(device.settings.depth);
        StrictReducer { chance: device.chance(), device, reductions, free: Nanos::ZERO, last: Ticket::NONE }
    }
}

struct Reduction {
    ticket: Ticket,
    due: Nanos,
    fails: bool,
    computation: Computation,
    target: Span,
    sources: ArrayVec<Span, MAX_SOURCES>,
}

impl Reducer for StrictReducer {
    fn compute(
        &mut self,
        now: Nanos,
        computation: Computation,
        target: Piece<'_>,
        sources: &[Piece<'_>],
    ) -> Result<Ticket, GpuError> {
        self.device.check_lost("compute")?;
        self.device.check_room(self.reductions.len())?;
        check_sources(&self.device.name, computation, &target, sources)?;
        let target = Span::of(&target);
        let sources: ArrayVec<Span, MAX_SOURCES> = sources.iter().map(Span::of).collect();
        for span in sources.iter().chain([&target]) {
            self.device.place(span, 0, span.len);
        }
        let takes = self.device.settings.takes(self.device.settings.reduced_per_second, target.len);
        self.free = now.max(self.free) + takes;
        let (due, fails) = self.device.draw(&mut self.chance, self.free, Submission::Computation);
        // Each ends after the one before.
        let due = self.reductions.back().map_or(due, |before| before.due.max(due));
        self.last = self.last.next();
        self.reductions.push_back(Reduction { ticket: self.last, due, fails, computation, target, sources });
        self.device.reductions.fetch_add(1, Ordering::Relaxed);
        Ok(self.last)
    }
}

impl Tickets for StrictReducer {
    fn done(&mut self, now: Nanos) -> Result<Ticket, Failed> {
        let is_lost = self.device.is_lost.load(Ordering::Relaxed);
        while self.reductions.front().is_some_and(|first| is_lost || first.due <= now)
            && let Some(first) = self.reductions.pop_front()
        {
            if is_lost || first.fails {
                return Err(self.device.failed(first.ticket));
            }
            first.carry_out(&self.device);
        }
        Ok(self.reductions.front().map_or(self.last, |first| Ticket(first.ticket.0 - 1)))
    }

    fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        let is_lost = self.device.is_lost.load(Ordering::Relaxed);
        self.reductions.front().map(|first| if is_lost { now } else { first.due })
    }
}

impl Reduction {
    /// Computes in blocks, which are copied first: the target may be a source.
    fn carry_out(&self, device: &StrictDevice) {
        let (mut blocks, mut result) = ([[0; BLOCK]; MAX_SOURCES], [0; BLOCK]);
        for done in (0..self.target.len).step_by(BLOCK) {
            let len = (self.target.len - done).min(BLOCK);
            for (source, block) in self.sources.iter().zip(&mut blocks) {
                let from = device.place(source, done, len);
                // SAFETY: equally many bytes at both addresses; there are no references to the device's memory, and the
                // block is local.
                unsafe { from.copy_to_nonoverlapping(NonNull::from(block).cast(), len) };
            }
            let sources: ArrayVec<memory::Span<'_>, MAX_SOURCES> =
                blocks[..self.sources.len()].iter().map(|block| block[..len].into()).collect();
            let target = memory::SpanMut::from(&mut result[..len]);
            match self.computation {
                Computation::Reduce(reduction) => reduction.apply(&[target], &sources),
                Computation::Scale { data_type, factor } => scale(data_type, target, sources[0], factor),
            }
            let to = device.place(&self.target, done, len);
            // SAFETY: as above.
            unsafe { to.copy_from_nonoverlapping(NonNull::from(&mut result).cast(), len) };
        }
    }
}

/// Whole elements.
const BLOCK: usize = 512;

impl Drop for StrictReducer {
    fn drop(&mut self) {
        for reduction in self.reductions.drain(..).filter(|reduction| !reduction.fails) {
            reduction.carry_out(&self.device);
        }
    }
}
