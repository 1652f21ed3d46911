//! Received bytes for device memory: copied to it in batches, and the completions and acknowledgements that wait for them.

use std::collections::VecDeque;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::{GpuError, MAX_PIECES, Ticket};
use ferroce_driver::{Nanos, Piece};
use ferroce_wire::Psn;

use super::{Purpose, StagingPool, Target};
use crate::engine::shared::Shared;
use crate::verbs::{Cq, MAX_RD_ATOMIC, Qp, WcStatus, WorkCompletion};

/// The received bytes of one queue pair for device memory, in order.
pub(crate) struct Landing {
    purpose: Purpose,
    /// The oldest first. Those that are not being copied yet are the last.
    batches: VecDeque<LandingBatch>,
    /// A request found too few chunks, and is queued for them.
    waits: bool,
    /// Chunks for requested READs, or for a request that found none and will be retransmitted.
    reserved: Vec<u16>,
    /// The requested parts of READs, in order: the PSN after each, and its chunks.
    parts: VecDeque<(Psn, usize)>,
    /// Completions that wait for a batch, in order.
    completions: VecDeque<CompletionBehind>,
    /// The peer has requested an acknowledgement that is not due before the bytes are there.
    pub(crate) asked: bool,
    /// The last PSN acknowledged while some bytes were not there.
    pub(crate) acknowledged: Psn,
}

/// Bytes in one chunk that are copied at once.
struct LandingBatch {
    number: u64,
    chunk: u16,
    /// `None` for host memory, which is written after all earlier bytes.
    copier: Option<u8>,
    filled: usize,
    state: BatchState,
    /// The packet of its first bytes, and the messages complete before.
    first: (Psn, u32),
    /// The poll in which its last bytes arrived.
    poll: u64,
    /// Another action waits for it.
    is_wanted: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BatchState {
    /// It accepts more bytes.
    Open,
    /// It must be copied.
    Closed,
    /// It is being copied.
    Copying(Ticket),
    Ended,
    Failed,
}

/// The batch that holds bytes of a packet, by its place; and its contents then.
struct Joined {
    copier: Option<u8>,
    batch: usize,
    filled: usize,
    targets: usize,
}

/// A completion that waits for a batch and those before it.
struct CompletionBehind {
    number: u64,
    cq: Cq,
    completion: WorkCompletion,
    solicited: bool,
    /// It is delivered even if it is successful.
    is_told: bool,
}

/// Received bytes that are not being copied yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum CopiesLeft {
    None,
    /// They are copied when a copy has ended, or more has arrived.
    Later,
    /// They are copied in one of the next polls.
    Soon,
}

/// There are fewer chunks than needed for the received bytes.
#[derive(Debug)]
pub(crate) struct NoRoom(pub(crate) usize);

/// The destination of bytes: a region, its copier for device memory, and the offset.
#[derive(Clone, Copy)]
pub(crate) struct LandingPlace {
    pub(crate) region: u32,
    pub(crate) copier: Option<u8>,
    pub(crate) offset: u64,
}

impl Landing {
    /// With room for what a queue of `depth` requests can bring.
    pub(crate) fn new(purpose: Purpose, pool: &StagingPool, depth: u32) -> Landing {
        // Parts without chunks stay until they are complete.
        let reads = if purpose == Purpose::Responses { pool.limit() + usize::from(MAX_RD_ATOMIC) } else { 0 };
        Landing {
            purpose,
            waits: false,
            batches: VecDeque::with_capacity(pool.limit()),
            reserved: Vec::with_capacity(pool.limit()),
            parts: VecDeque::with_capacity(reads),
            completions: VecDeque::with_capacity(depth as usize),
            asked: false,
            acknowledged: Psn::default(),
        }
    }

    /// Whether all received bytes are there.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.batches.is_empty()
    }

    /// The first packet whose bytes may not be there, and the messages complete before it.
    pub(crate) fn invisible(&self) -> Option<(Psn, u32)> {
        self.batches.front().map(|batch| batch.first)
    }

    /// Whether a request executed before `psn` is not visible; then it is wanted.
    pub(crate) fn hides(&mut self, psn: Psn) -> bool {
        let hides = self.invisible().is_some_and(|(invisible, _)| psn.distance(invisible) > 0);
        if hides {
            self.want();
        }
        hides
    }

    /// Accepts all bytes of the packet `first` for these places, or none of them.
    pub(crate) fn take(
        &mut self,
        shared: &mut Shared,
        qp: Qp,
        parts: &[(LandingPlace, &[u8])],
        first: (Psn, u32),
    ) -> Result<(), NoRoom> {
        let Shared { staging, mrs, poll, now, .. } = shared;
        let batches = self.plan(staging, parts);
        let behind = batches.iter().max().map_or(0, |last| last + 1);
        self.make_room(staging, (*now, qp), behind.saturating_sub(self.batches.len()), parts)?;
        if std::mem::take(&mut self.waits) {
            staging.waiting.leave(qp, self.purpose);
            staging.end_promise(qp);
        }
        for (&(place, data), index) in parts.iter().zip(batches) {
            if index == self.batches.len() && !self.begin(staging, place, (first, *poll)) {
                continue;
            }
            let Some((batch, held)) = self.batches.get_mut(index).zip(mrs.hold(place.region)) else {
                continue;
            };
            staging.write(batch.chunk, batch.filled, data);
            batch.filled += data.len();
            batch.poll = *poll;
            staging.push_target(batch.chunk, &place, data.len(), held);
            staging.note_open(qp, true);
        }
        Ok(())
    }

    /// The batches for the bytes of a packet, by place: new batches come after the existing ones. The bytes of one packet
    /// may be written in any order.
    fn plan(&self, pool: &StagingPool, parts: &[(LandingPlace, &[u8])]) -> ArrayVec<usize, MAX_PIECES> {
        let mut plan = ArrayVec::new();
        let mut joined = ArrayVec::<Joined, MAX_PIECES>::new();
        let mut behind = self.batches.len();
        for (place, data) in parts {
            let len = data.len();
            if let Some(of) = joined.iter_mut().find(|of| of.copier == place.copier) {
                let earlier = self.batches.get(of.batch);
                let overlaps = earlier.is_some_and(|batch| batch.writes(pool, place, len));
                // Bytes that continue the end of the batch need no further target, and were counted.
                if of.targets >= MAX_PIECES || of.filled + len > pool.chunk_bytes() || overlaps {
                    (of.batch, of.filled, of.targets) = (behind, 0, 0);
                    behind += 1;
                }
                (of.filled, of.targets) = (of.filled + len, of.targets + 1);
                plan.push(of.batch);
                continue;
            }
            let newest =
                self.newest_for(*place).filter(|index| self.batches[*index].has_room(pool, place, len));
            let (filled, targets) = newest.map_or((0, 0), |index| {
                let batch = &self.batches[index];
                (batch.filled, pool.targets(batch.chunk).len())
            });
            let index = newest.unwrap_or(behind);
            behind = behind.max(index + 1);
            joined.push(Joined {
                copier: place.copier,
                batch: index,
                filled: filled + len,
                targets: targets + 1,
            });
            plan.push(index);
        }
        plan
    }

    /// A batch for bytes with this destination, in a reserved chunk.
    fn begin(
        &mut self,
        pool: &mut StagingPool,
        place: LandingPlace,
        (first, poll): ((Psn, u32), u64),
    ) -> bool {
        let Some(chunk) = self.reserved.pop() else { return false };
        let promised = self.parts.iter_mut().find(|(_, chunks)| *chunks > 0);
        promised.into_iter().for_each(|(_, chunks)| *chunks -= 1);
        if self.batches.is_empty() {
            self.acknowledged = first.0;
        }
        if let Some(full) = self.newest_for(place).and_then(|index| self.batches.get_mut(index))
            && full.state == BatchState::Open
        {
            full.state = BatchState::Closed;
        }
        self.batches.push_back(LandingBatch {
            number: pool.number(),
            chunk,
            copier: place.copier,
            filled: 0,
            state: BatchState::Open,
            first,
            poll,
            is_wanted: false,
        });
        true
    }

    /// Reserves chunks for these bytes.
    fn make_room(
        &mut self,
        pool: &mut StagingPool,
        (now, qp): (Nanos, Qp),
        chunks: usize,
        parts: &[(LandingPlace, &[u8])],
    ) -> Result<(), NoRoom> {
        let lacking = chunks.saturating_sub(self.reserved.len());
        if lacking == 0 {
            return Ok(());
        }
        let (owner, reserved) = ((qp, self.purpose), &mut self.reserved);
        let has_all = match self.purpose {
            // The chunks reserved for the parts are used up, or were given up: there may be others, but no READ waits for
            // them.
            Purpose::Responses => pool.take_spare(now, owner, lacking, reserved),
            _ => pool.take_all(now, owner, lacking, reserved),
        };
        if has_all {
            self.count_in(lacking);
            return Ok(());
        }
        if self.purpose == Purpose::Responses {
            self.yield_parts(pool);
            return Err(NoRoom(chunks));
        }
        self.waits = true;
        // When it is retransmitted, the batch that it would have joined may be full. A waiting queue pair keeps none, or
        // all might wait for each other.
        let is_first = |(index, (place, _)): &(usize, &(LandingPlace, &[u8]))| {
            parts[..*index].iter().all(|(earlier, _)| earlier.copier != place.copier)
        };
        let chunks = parts.iter().enumerate().filter(is_first).count();
        self.give_up_parts(pool);
        pool.waiting.wait(qp, self.purpose, chunks);
        Err(NoRoom(chunks))
    }

    /// Keeps chunks for a request that found too few, and that will be retransmitted. Returns whether there are enough.
    pub(crate) fn keep(&mut self, pool: &mut StagingPool, now: Nanos, qp: Qp, chunks: usize) -> bool {
        pool.take_all(now, (qp, self.purpose), chunks, &mut self.reserved)
    }

    /// This many more chunks are used for the data of the parts.
    fn count_in(&mut self, chunks: usize) {
        if let Some((_, promised)) = self.parts.front_mut() {
            *promised += chunks;
        }
    }

    /// The newest batch for the same device; bytes for host memory are written after all others.
    fn newest_for(&self, place: LandingPlace) -> Option<usize> {
        match place.copier {
            None => self.batches.len().checked_sub(1),
            copier => self.batches.iter().rposition(|batch| batch.copier == copier),
        }
    }

    /// Chunks for the responses to a READ into memory of this many `devices`, of which `packets` from `psn` on are to be
    /// requested: returns how many may be. `None` if there are no chunks; then the queue pair waits for them.
    pub(crate) fn reserve(
        &mut self,
        pool: &mut StagingPool,
        now: Nanos,
        (qp, devices): (Qp, usize),
        (psn, packets, shift): (Psn, u32, u32),
    ) -> Option<u32> {
        // A repeated request is reserved anew, and ends where it ended before: the peer knows these READs.
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
        // One packet may be for each of the devices; all but one chunk may be short.
        let short = devices.saturating_sub(1);
        let wanted = (packets.div_ceil(in_chunk) as usize + short).min(pool.share().max(devices));
        let lacking = (promised + devices).saturating_sub(self.reserved.len());
        if lacking > 0 && !pool.take_all(now, (qp, Purpose::Awaited), lacking, &mut self.reserved) {
            // Received data waits no longer, and frees chunks.
            self.want();
            pool.note_open(qp, true);
            return None;
        }
        while self.reserved.len() < promised + wanted
            && pool.take_spare(now, (qp, Purpose::Awaited), 1, &mut self.reserved)
        {}
        let chunks = (self.reserved.len() - promised).min(wanted);
        let count = packets.min((chunks - short) as u32 * in_chunk);
        match self.parts.get_mut(index) {
            Some((end, promised)) if end.distance(psn) as u32 == count => *promised = chunks,
            // The peer may know the READ as requested before, or as now: no repeated request ends in between.
            _ => self.parts.insert(index, (psn + count, chunks)),
        }
        Some(count)
    }

    /// Chunks for data of the parts that has not arrived.
    fn promised(&self) -> usize {
        self.parts.iter().map(|(_, chunks)| chunks).sum()
    }

    /// Everything before `una` has arrived: reserved chunks that are not needed are released.
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

    /// Releases the chunks of requested READs: if their data then finds none, it is requested again. Returns whether there
    /// were any.
    pub(crate) fn yield_parts(&mut self, pool: &mut StagingPool) -> bool {
        // Received data of them waits no longer.
        self.want();
        let held_any = !self.reserved.is_empty();
        // The parts stay: the peer knows these READs.
        self.parts.iter_mut().for_each(|(_, chunks)| *chunks = 0);
        self.reserved.drain(..).for_each(|chunk| pool.release(chunk));
        held_any
    }

    /// No more data of requested READs will arrive.
    pub(crate) fn give_up_parts(&mut self, pool: &mut StagingPool) {
        self.parts.clear();
        self.reserved.drain(..).for_each(|chunk| pool.release(chunk));
    }

    /// Makes a completion wait for all received bytes; it is delivered then if it `is_told` or has failed. Returns whether
    /// there is anything to wait for.
    pub(crate) fn defer(
        &mut self,
        cq: Cq,
        completion: WorkCompletion,
        (solicited, is_told): (bool, bool),
    ) -> bool {
        let Some(number) = self.batches.back().map(|last| last.number) else { return false };
        self.want();
        self.completions.push_back(CompletionBehind { number, cq, completion, solicited, is_told });
        true
    }

    /// Whether completions wait.
    pub(crate) fn keeps_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// A message has ended, or a response waits: the received bytes are wanted now.
    pub(crate) fn want(&mut self) {
        for batch in self.batches.iter_mut().rev().take_while(|batch| !batch.is_wanted) {
            batch.is_wanted = true;
        }
    }

    /// Starts the copies due at the end of a poll: of batches that are full, or wanted, or have stopped growing, unless the
    /// next bytes have no other chunk.
    pub(crate) fn start_copies(&mut self, shared: &mut Shared, qp: Qp) -> CopiesLeft {
        let Shared { staging, mrs, now, poll, .. } = shared;
        let mut left = CopiesLeft::None;
        for index in 0..self.batches.len() {
            let batch = &self.batches[index];
            // Host memory is written in its turn.
            let Some(copier) = batch.copier else { continue };
            match batch.state {
                BatchState::Open if !batch.is_wanted && batch.poll == *poll => return CopiesLeft::Soon,
                BatchState::Open if !batch.is_wanted && self.fills_up() => {
                    left = CopiesLeft::Later;
                    continue;
                }
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
            let copy = staging.scatter(*now, (copier, &pieces), place, owner, after.unwrap_or(Ticket::NONE));
            let batch = &mut self.batches[index];
            match copy {
                Ok(ticket) => batch.state = BatchState::Copying(ticket),
                Err(GpuError::Full { .. }) => return CopiesLeft::Later,
                Err(error) => {
                    tracing::error!("a copy to a device can't begin: {error}");
                    batch.state = BatchState::Failed;
                }
            }
        }
        left
    }

    /// Whether responses to requested READs should use partly filled chunks.
    fn fills_up(&self) -> bool {
        self.reserved.is_empty() && !self.parts.is_empty()
    }

    /// A copy has ended.
    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        if let Some(batch) = self.batches.iter_mut().find(|batch| batch.number == number) {
            batch.state = if succeeded { BatchState::Ended } else { BatchState::Failed };
        }
    }

    /// Removes the oldest batch that is there. `None` if there is none.
    pub(crate) fn pop_ended(&mut self, Shared { staging: pool, mrs, .. }: &mut Shared) -> Option<()> {
        if let Some(batch) = self.batches.front_mut().filter(|batch| batch.copier.is_none()) {
            pool.carry_out(batch.chunk, mrs);
            batch.state = BatchState::Ended;
        }
        let batch = self.batches.front().filter(|batch| batch.state == BatchState::Ended)?;
        pool.release(batch.chunk);
        self.batches.pop_front().map(drop)
    }

    /// Whether the oldest batch can't be copied.
    pub(crate) fn has_failed(&self) -> bool {
        self.batches.front().is_some_and(|batch| batch.state == BatchState::Failed)
    }

    /// Removes the next completion that need not wait any more.
    pub(crate) fn pop_completion(&mut self) -> Option<(Cq, WorkCompletion, bool)> {
        let oldest = self.batches.front().map_or(u64::MAX, |batch| batch.number);
        loop {
            self.completions.front().filter(|behind| behind.number < oldest)?;
            let CompletionBehind { cq, completion, solicited, is_told, .. } = self.completions.pop_front()?;
            if is_told || completion.status != WcStatus::Success {
                return Some((cq, completion, solicited));
            }
        }
    }

    /// Bytes that are not being copied never will be. Completions that wait for them, or for a failed copy, end in error:
    /// the first with `status`, the others flushed. Returns whether there was one.
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
            let told = &mut behind.completion.status;
            match status.take() {
                Some(status) if *told == WcStatus::Success => *told = status,
                // It has its own error, and is the first.
                Some(_) => {}
                None => *told = WcStatus::WrFlushErr,
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

    /// The queue pair is reset: outstanding copies end without it.
    pub(crate) fn reset(&mut self, pool: &mut StagingPool) {
        self.give_up_parts(pool);
        for batch in self.batches.drain(..) {
            if let (Some(copier), Some(ticket)) = (batch.copier, batch.ticket()) {
                pool.abandon(copier, ticket);
            }
            pool.release(batch.chunk);
        }
        self.completions.clear();
        self.asked = false;
    }
}

impl LandingBatch {
    fn has_room(&self, pool: &StagingPool, place: &LandingPlace, len: usize) -> bool {
        let targets = pool.targets(self.chunk);
        let has_place = !targets.is_full() || targets.last().is_some_and(|last| last.ends_at(place));
        self.state == BatchState::Open
            && self.copier == place.copier
            && has_place
            && pool.chunk_bytes() - self.filled >= len
            && !self.writes(pool, place, len)
    }

    /// Whether it writes some of these bytes.
    fn writes(&self, pool: &StagingPool, place: &LandingPlace, len: usize) -> bool {
        pool.targets(self.chunk).iter().any(|target| target.overlaps(place.region, place.offset, len))
    }

    /// Whether both write some of the same bytes.
    fn overlaps(&self, pool: &StagingPool, other: &LandingBatch) -> bool {
        let others = pool.targets(other.chunk);
        let meets = |target: &Target| others.iter().any(|o| target.overlaps(o.region, o.offset, o.len));
        self.copier == other.copier && pool.targets(self.chunk).iter().any(meets)
    }

    fn ticket(&self) -> Option<Ticket> {
        if let BatchState::Copying(ticket) = self.state { Some(ticket) } else { None }
    }
}
