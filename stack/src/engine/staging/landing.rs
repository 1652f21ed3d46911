//! Bytes that were received for memory of a device: copied to it in batches, and what must wait until they are there.

use std::collections::VecDeque;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::{GpuError, MAX_PIECES, Ticket};
use ferroce_driver::{Held, Nanos, Piece};
use ferroce_wire::Psn;

use super::{Purpose, StagingPool, Target};
use crate::engine::mr::MemoryRegions;
use crate::engine::shared::Shared;
use crate::verbs::{Cq, Qp, WcStatus, WorkCompletion};

/// What one queue pair has received for memory of devices, in order.
pub(crate) struct Landing {
    purpose: Purpose,
    /// Oldest first. Those that are not copied yet are the last.
    batches: VecDeque<LandingBatch>,
    /// Chunks for what READs have asked for, and the parts that have, in order: the PSN behind each, and its chunks.
    reserved: Vec<u16>,
    parts: VecDeque<(Psn, usize)>,
    /// Completions behind a batch, in order.
    completions: VecDeque<CompletionBehind>,
    /// The peer has asked for an acknowledgement that is not due before the bytes are there.
    pub(crate) asked: bool,
    /// What was acknowledged last while something was not there.
    pub(crate) acknowledged: Psn,
}

/// Bytes in one chunk that are copied at once.
struct LandingBatch {
    number: u64,
    chunk: u16,
    copier: u8,
    filled: usize,
    state: BatchState,
    /// The packet that its first bytes came with, and the messages complete before.
    first: (Psn, u32),
    /// The poll in which its last bytes came.
    poll: u64,
    /// Something waits for it.
    is_wanted: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchState {
    /// It takes more bytes.
    Open,
    /// It is to be copied.
    Closed,
    /// It is being copied.
    Copying(Ticket),
    Ended,
    Failed,
}

/// A completion that waits for a batch and those before it.
struct CompletionBehind {
    number: u64,
    cq: Cq,
    completion: WorkCompletion,
    solicited: bool,
}

/// There is no chunk for what has come.
#[derive(Debug)]
pub(crate) struct NoRoom;

/// Where bytes go: a region of a device, what copies for it, and the offset there.
#[derive(Clone, Copy)]
pub(crate) struct DevicePlace {
    pub(crate) region: u32,
    pub(crate) copier: u8,
    pub(crate) offset: u64,
}

impl Landing {
    /// With room for what a queue of `depth` requests can bring.
    pub(crate) fn new(purpose: Purpose, pool: &StagingPool, depth: u32) -> Landing {
        let reads = if purpose == Purpose::Responses { pool.limit() } else { 0 };
        Landing {
            purpose,
            batches: VecDeque::with_capacity(pool.limit()),
            reserved: Vec::with_capacity(reads),
            parts: VecDeque::with_capacity(reads),
            completions: VecDeque::with_capacity(depth as usize),
            asked: false,
            acknowledged: Psn::default(),
        }
    }

    /// Whether everything that has come is there.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// The first packet whose bytes may not be there, and the messages complete before it.
    pub(crate) fn invisible(&self) -> Option<(Psn, u32)> {
        self.batches.front().map(|batch| batch.first)
    }

    /// Whether something that was executed before `psn` is not visible; then it is wanted.
    pub(crate) fn hides(&mut self, psn: Psn) -> bool {
        let hides = self.invisible().is_some_and(|(invisible, _)| psn.distance(invisible) > 0);
        if hides {
            self.want();
        }
        hides
    }

    /// Takes bytes that came with the packet `first`.
    pub(crate) fn take(
        &mut self,
        shared: &mut Shared,
        qp: Qp,
        place: DevicePlace,
        data: &[u8],
        first: (Psn, u32),
    ) -> Result<(), NoRoom> {
        let Shared { staging, mrs, poll, now, .. } = shared;
        let Some(held) = mrs.hold(place.region, place.offset, data.len()) else { return Ok(()) };
        let fits = |batch: &LandingBatch| batch.has_room(staging, &place, data.len());
        if !self.batches.back().is_some_and(fits) {
            // Taken before anything changes.
            let chunk = match self.reserved.pop() {
                Some(chunk) => {
                    let promised = self.parts.iter_mut().find(|(_, chunks)| *chunks > 0);
                    promised.into_iter().for_each(|(_, chunks)| *chunks -= 1);
                    chunk
                }
                None => staging.take(*now, qp, self.purpose).ok_or(NoRoom)?,
            };
            match self.batches.back_mut() {
                Some(last) if last.state == BatchState::Open => last.state = BatchState::Closed,
                Some(_) => {}
                None => self.acknowledged = first.0,
            }
            let number = staging.number();
            self.batches.push_back(LandingBatch {
                number,
                chunk,
                copier: place.copier,
                filled: 0,
                state: BatchState::Open,
                first,
                poll: *poll,
                is_wanted: false,
            });
            staging.note_open(qp);
        }
        if let Some(batch) = self.batches.back_mut() {
            staging.write(batch.chunk, batch.filled, data);
            batch.filled += data.len();
            batch.poll = *poll;
            staging.push_target(batch.chunk, &place, data.len(), held);
        }
        Ok(())
    }

    /// Room for the responses to a READ, of which `packets` from `psn` on are to be asked for: so many of them may be. `None` if
    /// there is none; then the queue pair waits for it.
    pub(crate) fn reserve(
        &mut self,
        pool: &mut StagingPool,
        now: Nanos,
        qp: Qp,
        (psn, packets, shift): (Psn, u32, u32),
    ) -> Option<u32> {
        // What is asked for again is promised anew, and ends where it ended before: the peer knows these READs.
        let known = self.parts.iter().position(|(end, _)| end.distance(psn) > 0);
        let (index, packets) = match known {
            Some(index) => {
                self.parts.range_mut(index..).for_each(|(_, chunks)| *chunks = 0);
                (index, packets.min(self.parts[index].0.distance(psn) as u32))
            }
            None => (self.parts.len(), packets),
        };
        let promised = self.promised();
        let in_chunk = (pool.chunk_bytes() >> shift) as u32;
        let wanted = (packets.div_ceil(in_chunk) as usize).min(pool.share());
        if self.reserved.len() <= promised {
            self.reserved.push(pool.take(now, qp, Purpose::Awaited)?);
        }
        while self.reserved.len() < promised + wanted
            && let Some(chunk) = pool.take_spare(now, qp, Purpose::Awaited)
        {
            self.reserved.push(chunk);
        }
        let chunks = (self.reserved.len() - promised).min(wanted);
        let count = packets.min(chunks as u32 * in_chunk);
        match self.parts.get_mut(index) {
            Some(part) => part.1 = chunks,
            None => self.parts.push_back((psn + count, chunks)),
        }
        Some(count)
    }

    /// Chunks for what has not come of the parts.
    fn promised(&self) -> usize {
        self.parts.iter().map(|(_, chunks)| chunks).sum()
    }

    /// Everything before `una` has come: what was reserved for it and is not needed is given back.
    pub(crate) fn settle(&mut self, pool: &mut StagingPool, una: Psn) {
        while self.parts.front().is_some_and(|(end, _)| end.distance(una) <= 0) {
            self.parts.pop_front();
        }
        while self.reserved.len() > self.promised()
            && let Some(chunk) = self.reserved.pop()
        {
            pool.release(chunk);
        }
    }

    /// Nothing that READs have asked for will come any more.
    fn give_up_parts(&mut self, pool: &mut StagingPool) {
        self.parts.clear();
        self.reserved.drain(..).for_each(|chunk| pool.release(chunk));
    }

    /// A completion waits for all that has come; `Err` if there is nothing to wait for.
    pub(crate) fn defer(&mut self, cq: Cq, completion: WorkCompletion, solicited: bool) -> Result<(), ()> {
        let last = self.batches.back_mut().ok_or(())?;
        last.is_wanted = true;
        self.completions.push_back(CompletionBehind { number: last.number, cq, completion, solicited });
        Ok(())
    }

    /// A message has ended, or an answer waits: what has come is wanted now.
    pub(crate) fn want(&mut self) {
        if let Some(last) = self.batches.back_mut() {
            last.is_wanted = true;
        }
    }

    /// Starts the copies that are due at the end of a poll: of what is full, or wanted, or has grown no more. Returns whether
    /// some are left for another poll.
    pub(crate) fn start_copies(&mut self, shared: &mut Shared, qp: Qp) -> bool {
        let Shared { staging, mrs, now, poll, .. } = shared;
        for index in 0..self.batches.len() {
            let batch = &self.batches[index];
            match batch.state {
                BatchState::Open if !batch.is_wanted && batch.poll == *poll => return true,
                BatchState::Open | BatchState::Closed => {}
                _ => continue,
            }
            let after = self
                .batches
                .range(..index)
                .filter(|earlier| earlier.overlaps(staging, batch))
                .filter_map(LandingBatch::ticket)
                .max();
            let pieces: ArrayVec<Piece<'_>, MAX_PIECES> = staging
                .targets(batch.chunk)
                .iter()
                .filter_map(|target| mrs.device_piece(target.region, target.offset, target.len))
                .collect();
            let (place, owner) = ((batch.chunk, batch.number), (qp, self.purpose));
            let copy =
                staging.scatter(*now, (batch.copier, &pieces), place, owner, after.unwrap_or(Ticket::NONE));
            let batch = &mut self.batches[index];
            match copy {
                Ok(ticket) => batch.state = BatchState::Copying(ticket),
                Err(GpuError::Full { .. }) => return true,
                Err(error) => {
                    tracing::warn!("{error}");
                    batch.state = BatchState::Failed;
                }
            }
        }
        false
    }

    /// A copy has ended.
    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        if let Some(batch) = self.batches.iter_mut().find(|batch| batch.number == number) {
            batch.state = if succeeded { BatchState::Ended } else { BatchState::Failed };
        }
    }

    /// Takes out the oldest batch that is there. `None` if there is none.
    pub(crate) fn pop_ended(&mut self, pool: &mut StagingPool) -> Option<()> {
        let batch = self.batches.front().filter(|batch| batch.state == BatchState::Ended)?;
        pool.release(batch.chunk);
        self.batches.pop_front().map(drop)
    }

    /// Whether the oldest batch can't be copied.
    pub(crate) fn has_failed(&self) -> bool {
        self.batches.front().is_some_and(|batch| batch.state == BatchState::Failed)
    }

    /// Takes out the next completion that waits for nothing any more.
    pub(crate) fn pop_completion(&mut self) -> Option<(Cq, WorkCompletion, bool)> {
        let oldest = self.batches.front().map_or(u64::MAX, |batch| batch.number);
        self.completions.front().filter(|behind| behind.number < oldest)?;
        let CompletionBehind { cq, completion, solicited, .. } = self.completions.pop_front()?;
        Some((cq, completion, solicited))
    }

    /// What is not being copied never will be. What waits for that, or for what has failed, ends in error: the first with
    /// `status`, the others flushed. Returns whether there was one.
    pub(crate) fn give_up(&mut self, pool: &mut StagingPool, status: WcStatus) -> bool {
        self.give_up_parts(pool);
        let is_lost = |batch: &LandingBatch| {
            matches!(batch.state, BatchState::Open | BatchState::Closed | BatchState::Failed)
        };
        let Some(first) = self.batches.iter().find(|batch| is_lost(batch)).map(|batch| batch.number) else {
            return false;
        };
        let mut status = Some(status);
        for behind in self.completions.iter_mut().filter(|behind| behind.number >= first) {
            if behind.completion.status == WcStatus::Success {
                behind.completion.status = status.take().unwrap_or(WcStatus::WrFlushErr);
            }
        }
        self.batches.retain(|batch| {
            if is_lost(batch) {
                pool.release(batch.chunk);
            }
            !is_lost(batch)
        });
        self.asked = false;
        status.is_none()
    }

    /// The queue pair is reset: what is being copied ends without it.
    pub(crate) fn reset(&mut self, pool: &mut StagingPool) {
        self.give_up_parts(pool);
        self.batches.drain(..).for_each(|batch| pool.release(batch.chunk));
        self.completions.clear();
        self.asked = false;
    }
}

impl LandingBatch {
    fn has_room(&self, pool: &StagingPool, place: &DevicePlace, len: usize) -> bool {
        let targets = pool.targets(self.chunk);
        let has_place = !targets.is_full() || targets.last().is_some_and(|last| last.ends_at(place));
        self.state == BatchState::Open
            && self.copier == place.copier
            && has_place
            && pool.chunk_bytes() - self.filled >= len
            && !targets.iter().any(|target| target.overlaps(place.region, place.offset, len))
    }

    /// Whether both write somewhere.
    fn overlaps(&self, pool: &StagingPool, other: &LandingBatch) -> bool {
        let others = pool.targets(other.chunk);
        let meets = |target: &Target| others.iter().any(|o| target.overlaps(o.region, o.offset, o.len));
        self.copier == other.copier && pool.targets(self.chunk).iter().any(meets)
    }

    fn ticket(&self) -> Option<Ticket> {
        if let BatchState::Copying(ticket) = self.state { Some(ticket) } else { None }
    }
}

impl MemoryRegions {
    /// A share in the memory of a device at these bytes.
    fn hold(&self, region: u32, offset: u64, len: usize) -> Option<Held> {
        Some(self.device_piece(region, offset, len)?.hold())
    }
}
