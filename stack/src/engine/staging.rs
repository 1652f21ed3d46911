//! Staging of GPU memory for packets: chunks of host memory, and the outstanding copies.
//!
//! A device copies between its memory and a chunk; packets are written from chunks and received into them. Data to send is
//! in a [`Stream`](stream::Stream), received data in a [`Landing`](landing::Landing) of the queue pair.

pub(crate) mod answers;
mod copier;
pub(crate) mod landing;
mod line;
pub(crate) mod receives;
pub(crate) mod sends;
pub(crate) mod stream;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::{Device, GpuError, MAX_PIECES, Staging, Ticket};
use ferroce_driver::{Held, Memory, Nanos, Piece, Span};

use crate::engine::mr::MemoryRegions;
use crate::verbs::{Config, Qp};
use copier::{Copier, CopyUnderWay, Lane};
use landing::LandingPlace;
use line::Lines;

/// The purpose of a chunk. Chunks of sends, and those reserved for responses, are for local requests: they are held until
/// the peer has acknowledged or answered, for which the peer may need chunks too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Sends,
    Answers,
    /// A peer's requests.
    Requests,
    /// Responses to READs without reserved chunks.
    Responses,
    /// Reserved for responses.
    Awaited,
}

impl Purpose {
    /// The action of a queue pair with the bytes, for the log.
    pub(crate) fn does(self) -> &'static str {
        match self {
            Purpose::Sends => "sends",
            Purpose::Answers => "sends for a READ of its peer",
            Purpose::Requests => "receives",
            Purpose::Responses | Purpose::Awaited => "has READ",
        }
    }

    fn line(self) -> Line {
        match self {
            Purpose::Answers | Purpose::Requests | Purpose::Responses => Line::Bounded,
            Purpose::Sends => Line::Sends,
            Purpose::Awaited => Line::Awaited,
        }
    }
}

/// Purposes whose requests for chunks are in the same queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Line {
    /// Purposes that end without the peer.
    Bounded,
    Sends,
    Awaited,
}

impl Line {
    const COUNT: usize = 3;
}

/// A copy that has ended.
pub(crate) struct EndedCopy {
    pub(crate) qp: Qp,
    pub(crate) purpose: Purpose,
    /// The number assigned by its owner.
    pub(crate) number: u64,
    /// Why it has failed, if it has.
    pub(crate) failure: Option<GpuError>,
}

/// The chunks of a context, and the queues of the devices whose memory is registered with it.
pub(crate) struct StagingPool {
    chunk: usize,
    limit: u16,
    /// Allocated when device memory is first registered.
    memory: Option<Staging>,
    chunks: Box<[Chunk]>,
    /// The destinations of the received bytes of each chunk.
    targets: Box<[Targets]>,
    free: Vec<u16>,
    /// The number of held chunks, by queue.
    held: [u16; Line::COUNT],
    copiers: Vec<Copier>,
    /// Queue pairs that found too few chunks.
    pub(crate) waiting: Lines,
    /// Queue pairs with chunks for a request that their peers must retransmit, and since when, in this order.
    promised: VecDeque<(Qp, Nanos)>,
    /// Queue pairs with received bytes that are not being copied yet, and whether some must be copied before a copy ends.
    open: Vec<Qp>,
    soon: bool,
    /// The number of the last copy.
    last: u64,
    started: Started,
}

/// The number and bytes of copies started; and how many have failed, or could not start.
#[derive(Clone, Copy, Default)]
pub(crate) struct Started {
    pub(crate) gathers: u64,
    pub(crate) scatters: u64,
    pub(crate) bytes: u64,
    pub(crate) failed: u64,
}

impl Started {
    /// A copy could not start.
    fn refused(&mut self, error: &GpuError) {
        // It is tried again.
        self.failed += u64::from(!matches!(error, GpuError::Full { .. }));
    }
}

#[derive(Clone, Copy)]
struct Chunk {
    /// The owner and the purpose; `None` if it was abandoned.
    held: Option<(Qp, Purpose)>,
    copies: u32,
    /// When it was allocated, or its last copy has ended.
    since: Nanos,
}

/// Pieces of a device's memory, in the order of the bytes.
pub(crate) type Targets = ArrayVec<Target, MAX_PIECES>;

/// The destination of bytes.
pub(crate) struct Target {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    /// Keeps the region until then.
    _held: Held,
}

impl Target {
    /// Whether `place` continues it.
    pub(crate) fn ends_at(&self, place: &LandingPlace) -> bool {
        self.region == place.region && self.offset + self.len as u64 == place.offset
    }

    pub(crate) fn overlaps(&self, region: u32, offset: u64, len: usize) -> bool {
        self.region == region && self.offset < offset + len as u64 && offset < self.offset + self.len as u64
    }
}

/// How long chunks are held for a packet that a peer must retransmit: longer than the delay of an RNR NAK and of copies by
/// the peer, and shorter than others' retransmissions without success.
const PROMISE: Duration = Duration::from_millis(50);

/// How long chunks for responses are held while none arrives and others wait for chunks.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long gathered bytes are held without an acknowledgement while others wait for chunks.
const IDLE: Duration = Duration::from_millis(20);

/// The same while the peer of a waiting queue pair waits to retransmit.
const SHORT: Duration = Duration::from_micros(200);

/// When to check again whether received bytes must be copied, if nothing else happens.
const SOON: Duration = Duration::from_micros(1);

/// The most devices whose memory a context may have.
const COPIERS_MAX: usize = 64;

impl StagingPool {
    pub(crate) fn new(config: &Config) -> StagingPool {
        StagingPool {
            chunk: config.staging_chunk as usize,
            limit: config.staging_chunks,
            memory: None,
            chunks: Box::default(),
            targets: Box::default(),
            free: Vec::new(),
            held: Default::default(),
            copiers: Vec::new(),
            waiting: Lines::new(),
            promised: VecDeque::new(),
            open: Vec::new(),
            soon: false,
            last: 0,
            started: Started::default(),
        }
    }

    /// Whether device memory was ever registered.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        !self.copiers.is_empty()
    }

    /// The copier for this memory's device, among those of the existing regions; `None` for host memory. There are at most
    /// `max_qps` queue pairs.
    pub(crate) fn copier_of(
        &mut self,
        memory: &Memory,
        mrs: &MemoryRegions,
        max_qps: usize,
    ) -> Result<Option<u8>, GpuError> {
        let Some(device) = memory.device() else { return Ok(None) };
        let known = self.copiers.iter().position(|copier| Arc::ptr_eq(&copier.device, device));
        let index = match known {
            Some(index) => index,
            None => {
                let is_unused =
                    |(index, copier): (usize, &Copier)| copier.is_idle() && !mrs.uses_copier(index as u8);
                let unused = self.copiers.iter().enumerate().position(is_unused);
                let index = unused.unwrap_or(self.copiers.len());
                let copier = self.open_copier(device, index, max_qps)?;
                match self.copiers.get_mut(index) {
                    Some(unused) => *unused = copier,
                    None => self.copiers.push(copier),
                }
                index
            }
        };
        Ok(Some(index as u8))
    }

    fn open_copier(
        &mut self,
        device: &Arc<dyn Device>,
        index: usize,
        max_qps: usize,
    ) -> Result<Copier, GpuError> {
        let refused =
            |reason: String| GpuError::Call { device: device.name().to_owned(), call: "register", reason };
        if index == COPIERS_MAX {
            return Err(refused(format!("this context has memory of {COPIERS_MAX} devices already")));
        }
        // One packet may bring bytes for each device and for the host, and half of the chunks are for local requests.
        let needed = 2 * (index + 2);
        if needed > self.limit.into() {
            let limit = self.limit;
            return Err(refused(format!(
                "{limit} chunks of staging are too few for memory of one more device: raise staging_chunks to {needed}"
            )));
        }
        if self.memory.is_none() {
            // Devices may pin it page by page.
            self.memory = Some(Staging::new(self.chunk * usize::from(self.limit))?);
            self.chunks = vec![Chunk { held: None, copies: 0, since: Nanos::ZERO }; self.limit.into()].into();
            self.targets = (0..self.limit).map(|_| Targets::new()).collect();
            self.free = (0..self.limit).rev().collect();
            self.waiting.reserve(max_qps);
            self.open.reserve(max_qps);
            self.promised.reserve(max_qps);
        }
        let Some(memory) = &self.memory else { unreachable!("it was just allocated") };
        Copier::open(device, memory, max_qps)
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.chunk
    }

    /// The number of chunks.
    pub(crate) fn limit(&self) -> usize {
        self.limit.into()
    }

    /// The destinations of a chunk's bytes.
    pub(crate) fn targets(&self, chunk: u16) -> &Targets {
        &self.targets[usize::from(chunk)]
    }

    /// Adds the destination of the next bytes of a chunk.
    pub(crate) fn push_target(&mut self, chunk: u16, place: &LandingPlace, len: usize, held: Held) {
        let targets = &mut self.targets[usize::from(chunk)];
        match targets.last_mut() {
            Some(last) if last.ends_at(place) => last.len += len,
            _ => targets.push(Target { region: place.region, offset: place.offset, len, _held: held }),
        }
    }

    /// The most chunks of one queue pair for its sends, or for its responses.
    pub(crate) fn share(&self) -> usize {
        usize::from(self.limit / 4).max(2)
    }

    /// A new number for a copy.
    pub(crate) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Allocates a chunk. `None` if there is none, or if others wait for chunks: then `qp` is queued.
    pub(crate) fn take(&mut self, now: Nanos, qp: Qp, purpose: Purpose) -> Option<u16> {
        self.has(qp, purpose, 1).then(|| self.pop(now, qp, purpose))?
    }

    /// Allocates this many chunks at once, or none as [`take`](StagingPool::take).
    pub(crate) fn take_all(
        &mut self,
        now: Nanos,
        (qp, purpose): (Qp, Purpose),
        chunks: usize,
        into: &mut Vec<u16>,
    ) -> bool {
        let has_all = self.has(qp, purpose, chunks);
        if has_all {
            self.pop_all(now, (qp, purpose), chunks, into);
        }
        has_all
    }

    /// Whether this many chunks can be allocated; otherwise `qp` is queued.
    fn has(&mut self, qp: Qp, purpose: Purpose, chunks: usize) -> bool {
        let most = self.most(purpose);
        self.waiting.has_turn(qp, purpose, chunks, most)
    }

    fn pop(&mut self, now: Nanos, qp: Qp, purpose: Purpose) -> Option<u16> {
        let chunk = self.free.pop()?;
        self.held[purpose.line() as usize] += 1;
        self.chunks[usize::from(chunk)] = Chunk { held: Some((qp, purpose)), copies: 0, since: now };
        Some(chunk)
    }

    /// Allocates this many chunks at once, if no queue pair waits for them, or none.
    pub(crate) fn take_spare(
        &mut self,
        now: Nanos,
        (qp, purpose): (Qp, Purpose),
        chunks: usize,
        into: &mut Vec<u16>,
    ) -> bool {
        let has_all = self.waiting.is_empty(purpose) && self.most(purpose) >= chunks;
        if has_all {
            self.pop_all(now, (qp, purpose), chunks, into);
        }
        has_all
    }

    fn pop_all(&mut self, now: Nanos, (qp, purpose): (Qp, Purpose), chunks: usize, into: &mut Vec<u16>) {
        into.extend((0..chunks).filter_map(|_| self.pop(now, qp, purpose)));
    }

    /// The remaining chunks for a purpose. Half are for purposes that end without the peer, and half for local requests,
    /// which wait for their peers; sends leave some to responses.
    fn most(&self, purpose: Purpose) -> usize {
        let [bounded, sends, awaited] = self.held;
        let half = self.limit / 2;
        let own = half.saturating_sub(sends + awaited);
        let reads = self.left_for_reads();
        let kept = if self.waiting.is_empty(Purpose::Awaited) { 0 } else { reads };
        let most = match purpose.line() {
            Line::Bounded => (self.limit - half).saturating_sub(bounded),
            Line::Sends => own.saturating_sub(kept),
            Line::Awaited => own.min(reads),
        };
        self.free.len().min(most.into())
    }

    /// A quarter is reserved for READs, or as much as one packet may need, and they get no more.
    fn left_for_reads(&self) -> u16 {
        let kept = (self.limit / 4).max(self.copiers.len() as u16);
        kept.saturating_sub(self.held[Line::Awaited as usize])
    }

    /// The next queue pair that found the queue of a device full, if there is room now.
    pub(crate) fn next_behind_copies(&mut self) -> Option<Qp> {
        self.copiers.iter_mut().find_map(|copier| copier.gathers.next_behind())
    }

    /// Releases a chunk. It is free when its copies have ended.
    pub(crate) fn release(&mut self, chunk: u16) {
        let Chunk { held, copies, .. } = &mut self.chunks[usize::from(chunk)];
        self.targets[usize::from(chunk)].clear();
        if let Some((_, purpose)) = held.take() {
            self.held[purpose.line() as usize] -= 1;
            if *copies == 0 {
                self.free.push(chunk);
            }
        }
    }

    /// Removes a queue pair that no longer waits for chunks or has bytes to copy.
    pub(crate) fn forget(&mut self, qp: Qp) {
        self.waiting.leave_all(qp);
        self.end_promise(qp);
        self.copiers.iter_mut().for_each(|copier| copier.gathers.behind.retain(|behind| behind.qp != qp));
        self.close(qp);
    }

    /// The queue pair that has held chunks longest for local requests without a copy, and for which purpose, if others wait
    /// for chunks. For responses the limit is longer, because they must be requested again.
    pub(crate) fn idlest(&self, now: Nanos) -> Option<(Qp, Purpose)> {
        let mut own = self.waiting.first().filter(|first| first.purpose.line() != Line::Bounded);
        let in_vain = own.find(|first| self.most(first.purpose) < first.chunks)?;
        let is_idle = |chunk: &Chunk, purpose| {
            let patience = match purpose {
                Purpose::Awaited => PATIENCE,
                _ if in_vain.is_awaited => SHORT,
                _ => IDLE,
            };
            chunk.copies == 0 && now.since(chunk.since) >= patience
        };
        let held = || self.chunks.iter().filter_map(|chunk| Some((chunk, chunk.held?)));
        // If READs have their maximum, taking chunks from sends does not help.
        let is_of_use = |line| match line {
            Line::Bounded => false,
            Line::Sends => {
                in_vain.purpose != Purpose::Awaited || usize::from(self.left_for_reads()) >= in_vain.chunks
            }
            Line::Awaited => true,
        };
        let idle = held().filter(|(chunk, (qp, purpose))| {
            is_of_use(purpose.line()) && !in_vain.is(*qp, *purpose) && is_idle(chunk, *purpose)
        });
        let (_, idlest) = idle.min_by_key(|(chunk, _)| chunk.since)?;
        // A queue pair that makes progress has no chunks that are old for long.
        let all_idle = held().all(|(chunk, owner)| owner != idlest || is_idle(chunk, idlest.1));
        all_idle.then_some(idlest)
    }

    /// A queue pair that was offered chunks in the last poll, and allocated none, needs none.
    pub(crate) fn end_offers(&mut self) {
        self.waiting.end_offers();
        self.copiers.iter_mut().for_each(|copier| copier.gathers.behind.retain(|behind| !behind.is_told));
    }

    /// The next queue pair for which there are chunks. It must be notified.
    pub(crate) fn next_offer(&mut self) -> Option<Qp> {
        let most = [Purpose::Requests, Purpose::Sends, Purpose::Awaited].map(|purpose| self.most(purpose));
        self.waiting.next_offer(most)
    }

    /// Whether a queue pair was offered chunks, or must be.
    fn has_offers(&self) -> bool {
        self.waiting.first().any(|first| first.is_offered || first.chunks <= self.most(first.purpose))
    }

    /// Records that `qp` has chunks for a request that its peer must retransmit.
    pub(crate) fn promise(&mut self, now: Nanos, qp: Qp) {
        self.end_promise(qp);
        self.promised.push_back((qp, now));
    }

    /// It has arrived.
    pub(crate) fn end_promise(&mut self, qp: Qp) {
        self.promised.retain(|(promised, _)| *promised != qp);
    }

    /// A queue pair whose peer has not retransmitted for long.
    pub(crate) fn next_in_vain(&mut self, now: Nanos) -> Option<Qp> {
        self.promised.front().filter(|(_, since)| now.since(*since) >= PROMISE)?;
        self.promised.pop_front().map(|(qp, _)| qp)
    }

    /// Records that `qp` has bytes to copy; `soon` if they must be copied before another copy ends.
    pub(crate) fn note_open(&mut self, qp: Qp, soon: bool) {
        self.soon |= soon;
        if !self.open.contains(&qp) {
            self.open.push(qp);
        }
    }

    /// One of the queue pairs with bytes to copy.
    pub(crate) fn open_at(&self, place: usize) -> Option<Qp> {
        self.open.get(place).copied()
    }

    /// Whether some must be copied before another copy ends.
    pub(crate) fn set_soon(&mut self, soon: bool) {
        self.soon = soon;
    }

    /// It has no more bytes to copy.
    pub(crate) fn close(&mut self, qp: Qp) {
        self.open.retain(|open| *open != qp);
    }

    /// The bytes of a chunk.
    pub(crate) fn span(&self, chunk: u16, at: usize, len: usize) -> Span<'_> {
        match &self.memory {
            Some(memory) => memory.span(usize::from(chunk) * self.chunk + at, len),
            None => (&[][..]).into(),
        }
    }

    /// Writes into a chunk.
    pub(crate) fn write(&self, chunk: u16, at: usize, from: &[u8]) {
        if let Some(memory) = &self.memory {
            memory.write(usize::from(chunk) * self.chunk + at, from);
        }
    }

    /// Copies host memory into a chunk.
    pub(crate) fn copy(&self, chunk: u16, at: usize, from: Span<'_>) {
        if let Some(memory) = &self.memory {
            memory.copy(usize::from(chunk) * self.chunk + at, from);
        }
    }

    /// Starts a copy of pieces of device memory to a chunk, from byte `at` on.
    pub(crate) fn gather(
        &mut self,
        now: Nanos,
        (copier, pieces): (u8, &[Piece<'_>]),
        (chunk, at): (u16, usize),
        (qp, purpose): (Qp, Purpose),
    ) -> Result<u64, GpuError> {
        let number = self.number();
        let start = usize::from(chunk) * self.chunk + at;
        let Some(copier) = self.copiers.get_mut(usize::from(copier)) else {
            unreachable!("a region of a device has its copier")
        };
        let ticket = copier
            .gathers
            .start_gather(now, qp, pieces, start)
            .inspect_err(|error| self.started.refused(error))?;
        let flights = &mut copier.gathers.flights;
        self.started.gathers += 1;
        self.started.bytes += bytes_of(pieces);
        flights.push_back(CopyUnderWay { ticket, qp, purpose, number, chunk });
        self.chunks[usize::from(chunk)].copies += 1;
        Ok(number)
    }

    /// Starts a copy of a chunk's first bytes to pieces of device memory, after the copy with the ticket `after` has ended.
    pub(crate) fn scatter(
        &mut self,
        now: Nanos,
        (copier, pieces): (u8, &[Piece<'_>]),
        (chunk, number): (u16, u64),
        (qp, purpose): (Qp, Purpose),
        after: Ticket,
    ) -> Result<Ticket, GpuError> {
        let start = usize::from(chunk) * self.chunk;
        let Some(copier) = self.copiers.get_mut(usize::from(copier)) else {
            unreachable!("a region of a device has its copier")
        };
        let Lane { queue, flights, abandoned, .. } = &mut copier.scatters;
        let ticket = queue
            .scatter(now, start, pieces, after.max(*abandoned))
            .inspect_err(|error| self.started.refused(error))?;
        self.started.scatters += 1;
        self.started.bytes += bytes_of(pieces);
        flights.push_back(CopyUnderWay { ticket, qp, purpose, number, chunk });
        self.chunks[usize::from(chunk)].copies += 1;
        Ok(ticket)
    }

    /// This copy to a device, which continues, is no longer waited for.
    pub(crate) fn abandon(&mut self, copier: u8, ticket: Ticket) {
        if let Some(Copier { scatters, .. }) = self.copiers.get_mut(usize::from(copier)) {
            scatters.abandoned = scatters.abandoned.max(ticket);
        }
    }

    /// Copies the first bytes of a chunk to host memory.
    pub(crate) fn carry_out(&self, chunk: u16, mrs: &mut MemoryRegions) {
        let mut bytes = [0; 1024];
        let mut at = 0;
        for target in self.targets(chunk) {
            for done in (0..target.len).step_by(bytes.len()) {
                let part = &mut bytes[..(target.len - done).min(1024)];
                self.span(chunk, at + done, part.len()).copy_to(part);
                mrs.write_at(target.region, target.offset + done as u64, part);
            }
            at += target.len;
        }
    }

    /// The copies started so far.
    pub(crate) fn started(&self) -> Started {
        self.started
    }

    /// The next copy that has ended by `now`.
    pub(crate) fn next_ended(&mut self, now: Nanos) -> Option<EndedCopy> {
        let StagingPool { copiers, chunks, free, started, .. } = self;
        let lanes = copiers.iter_mut().flat_map(|copier| [&mut copier.gathers, &mut copier.scatters]);
        let (flight, failure) =
            lanes.filter(|lane| !lane.flights.is_empty()).find_map(|lane| lane.next_ended(now))?;
        started.failed += u64::from(failure.is_some());
        let chunk = &mut chunks[usize::from(flight.chunk)];
        chunk.copies -= 1;
        chunk.since = now;
        if chunk.copies == 0 && chunk.held.is_none() {
            free.push(flight.chunk);
        }
        let CopyUnderWay { qp, purpose, number, .. } = flight;
        Some(EndedCopy { qp, purpose, number, failure })
    }

    /// When a copy may end.
    pub(crate) fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        let lanes = self.copiers.iter().flat_map(|copier| [&copier.gathers, &copier.scatters]);
        let copies =
            lanes.filter(|lane| !lane.flights.is_empty()).filter_map(|lane| lane.queue.next_deadline(now));
        let is_awaited = self.waiting.first().any(|first| first.is_awaited);
        let patience = if is_awaited { SHORT } else { IDLE };
        let waits = self.waiting.first().next().is_some();
        let open = (self.soon || self.has_offers()).then_some(now + SOON);
        let promised = self.promised.front().map(|(_, since)| *since + PROMISE);
        copies.chain(open).chain(promised).chain(waits.then_some(now + patience)).min()
    }
}

fn bytes_of(pieces: &[Piece<'_>]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}
