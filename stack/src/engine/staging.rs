//! Memory of GPUs on its way to packets and from them: chunks of host memory, and the copies under way.
//!
//! A device copies between its memory and a chunk; packets are written from chunks and received into them. What is sent is in a
//! [`Stream`](stream::Stream), what is received in a [`Landing`](landing::Landing) of the queue pair.

pub(crate) mod answers;
pub(crate) mod landing;
pub(crate) mod receives;
pub(crate) mod sends;
pub(crate) mod stream;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use arrayvec::ArrayVec;
use ferroce_driver::gpu::{Device, GpuError, MAX_PIECES, QUEUE_DEPTH, Queue, Staging, Ticket};
use ferroce_driver::{Held, Memory, Nanos, Piece, Span};

use crate::engine::mr::MemoryRegions;
use crate::verbs::{Config, Qp};
use landing::LandingPlace;

/// What a chunk is for. Those of sends, and those that wait for responses, are this end's own: they stay until the peer has
/// acknowledged or answered, for which it may need others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    Sends,
    Answers,
    /// Of a peer's requests.
    Requests,
    /// Of the responses to READs.
    Responses,
    /// Of those that have not come yet.
    Awaited,
}

impl Purpose {
    fn is_own(self) -> bool {
        matches!(self, Purpose::Sends | Purpose::Awaited)
    }
}

/// A copy that has ended.
pub(crate) struct EndedCopy {
    pub(crate) qp: Qp,
    pub(crate) purpose: Purpose,
    /// As its owner numbers it.
    pub(crate) number: u64,
    pub(crate) succeeded: bool,
}

/// The chunks of a context, and the queues of the devices whose memory is registered with it.
pub(crate) struct StagingPool {
    chunk: usize,
    limit: u16,
    /// Since memory of a device was first registered.
    memory: Option<Staging>,
    chunks: Box<[Chunk]>,
    /// Where the bytes of each chunk are to go that were received into it.
    targets: Box<[Targets]>,
    free: Vec<u16>,
    /// Chunks that are held for this end's own requests.
    own: u16,
    copiers: Vec<Copier>,
    /// Queue pairs that found no chunk, in this order; those with requests of their own are the second.
    waiting: [VecDeque<InLine>; 2],
    /// Queue pairs that have a chunk for what their peers are to send again, in the order in which they got it.
    promised: VecDeque<InLine>,
    /// Queue pairs with bytes that were received and are not being copied yet.
    open: Vec<Qp>,
    /// The number of the last copy.
    last: u64,
    started: Started,
}

/// How many copies were started, and of how many bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct Started {
    pub(crate) gathers: u64,
    pub(crate) scatters: u64,
    pub(crate) bytes: u64,
}

#[derive(Clone, Copy)]
struct Chunk {
    /// Who has it, and for what; nobody if it was given up.
    held: Option<(Qp, Purpose)>,
    copies: u32,
    /// When it was taken, or its last copy has ended.
    since: Nanos,
}

/// Pieces of a device's memory, in the order of the bytes.
pub(crate) type Targets = ArrayVec<Target, MAX_PIECES>;

/// Where bytes are to go.
pub(crate) struct Target {
    pub(crate) region: u32,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    /// The region stays until then.
    _held: Held,
}

impl Target {
    /// Whether what goes there goes behind it.
    pub(crate) fn ends_at(&self, place: &LandingPlace) -> bool {
        self.region == place.region && self.offset + self.len as u64 == place.offset
    }

    pub(crate) fn overlaps(&self, region: u32, offset: u64, len: usize) -> bool {
        self.region == region && self.offset < offset + len as u64 && offset < self.offset + self.len as u64
    }
}

/// A queue pair that found no chunk, and when it last looked for one; or one that was given one, and when.
#[derive(Clone, Copy)]
struct InLine {
    qp: Qp,
    since: Nanos,
}

/// How long a place is kept for a queue pair whose peer does not come back: longer than it is told to wait, and shorter than
/// others repeat themselves in vain.
const PATIENCE: Duration = Duration::from_millis(100);

/// How long bytes that were gathered are kept while others wait for the room.
const IDLE: Duration = Duration::from_micros(200);

/// When it is looked again whether bytes that were received are to be copied, if nothing else happens.
const SOON: Duration = Duration::from_micros(1);

/// The queues of one device: gathers don't wait for scatters.
struct Copier {
    device: Arc<dyn Device>,
    gathers: Lane,
    scatters: Lane,
}

struct Lane {
    queue: Box<dyn Queue>,
    /// Copies up to it may be of a queue pair that is gone: what lands where they do comes after them.
    abandoned: Ticket,
    /// Those that are not known to have ended, by their tickets.
    flights: VecDeque<CopyUnderWay>,
    /// All up to it have ended, and one behind it has failed.
    ended: Ticket,
    failed: Option<Ticket>,
}

struct CopyUnderWay {
    ticket: Ticket,
    qp: Qp,
    purpose: Purpose,
    number: u64,
    chunk: u16,
}

/// Devices whose memory a context may have.
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
            own: 0,
            copiers: Vec::new(),
            waiting: Default::default(),
            promised: VecDeque::new(),
            open: Vec::new(),
            last: 0,
            started: Started::default(),
        }
    }

    /// Whether memory of a device was ever registered.
    #[inline]
    pub(crate) fn is_used(&self) -> bool {
        !self.copiers.is_empty()
    }

    /// What copies for the device of this memory; `None` for memory of the host. Queue pairs are `max_qps` at most.
    pub(crate) fn copier_of(&mut self, memory: &Memory, max_qps: usize) -> Result<Option<u8>, GpuError> {
        let Some(device) = memory.device() else { return Ok(None) };
        let index = match self.copiers.iter().position(|copier| Arc::ptr_eq(&copier.device, device)) {
            Some(index) => index,
            None => self.open_copier(device, max_qps)?,
        };
        Ok(Some(index as u8))
    }

    fn open_copier(&mut self, device: &Arc<dyn Device>, max_qps: usize) -> Result<usize, GpuError> {
        let refused =
            |reason: String| GpuError::Call { device: device.name().to_owned(), call: "register", reason };
        if self.copiers.len() == COPIERS_MAX {
            return Err(refused(format!("this context has memory of {COPIERS_MAX} devices already")));
        }
        if self.memory.is_none() {
            // Devices may pin it page by page.
            self.memory = Some(Staging::new(self.chunk * usize::from(self.limit))?);
            self.chunks = vec![Chunk { held: None, copies: 0, since: Nanos::ZERO }; self.limit.into()].into();
            self.targets = (0..self.limit).map(|_| Targets::new()).collect();
            self.free = (0..self.limit).rev().collect();
            self.waiting.iter_mut().for_each(|line| line.reserve(max_qps));
            self.open.reserve(max_qps);
            self.promised.reserve(max_qps);
        }
        let Some(memory) = &self.memory else { unreachable!("it was just allocated") };
        let lane = || -> Result<Lane, GpuError> {
            let flights = VecDeque::with_capacity(QUEUE_DEPTH);
            Ok(Lane {
                queue: device.queue(memory)?,
                abandoned: Ticket::NONE,
                flights,
                ended: Ticket::NONE,
                failed: None,
            })
        };
        let copier = Copier { device: Arc::clone(device), gathers: lane()?, scatters: lane()? };
        self.copiers.push(copier);
        Ok(self.copiers.len() - 1)
    }

    /// Bytes of a chunk.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.chunk
    }

    /// How many chunks there are.
    pub(crate) fn limit(&self) -> usize {
        self.limit.into()
    }

    /// Where the bytes of a chunk are to go.
    pub(crate) fn targets(&self, chunk: u16) -> &Targets {
        &self.targets[usize::from(chunk)]
    }

    /// Notes that the next bytes of a chunk are to go there.
    pub(crate) fn push_target(&mut self, chunk: u16, place: &LandingPlace, len: usize, held: Held) {
        let targets = &mut self.targets[usize::from(chunk)];
        match targets.last_mut() {
            Some(last) if last.ends_at(place) => last.len += len,
            _ => targets.push(Target { region: place.region, offset: place.offset, len, _held: held }),
        }
    }

    /// Chunks that one queue pair may have for its sends, or for its answers.
    pub(crate) fn share(&self) -> usize {
        usize::from(self.limit / 4).max(2)
    }

    /// A number for a copy.
    pub(crate) fn number(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    /// Takes a chunk. `None` if there is none, or if others wait for those that there are: then `qp` waits behind them.
    pub(crate) fn take(&mut self, now: Nanos, qp: Qp, purpose: Purpose) -> Option<u16> {
        let is_own = purpose.is_own();
        let most = self.most(purpose);
        let line = &mut self.waiting[usize::from(is_own)];
        let ahead = line.iter().position(|waiting| waiting.qp == qp);
        if ahead.unwrap_or(line.len()) < most
            && let Some(chunk) = self.free.pop()
        {
            if let Some(place) = ahead {
                line.remove(place);
            }
            self.own += u16::from(is_own);
            self.chunks[usize::from(chunk)] = Chunk { held: Some((qp, purpose)), copies: 0, since: now };
            return Some(chunk);
        }
        self.wait(now, qp, purpose);
        None
    }

    /// Takes one more chunk, if nobody waits for it.
    pub(crate) fn take_spare(&mut self, now: Nanos, qp: Qp, purpose: Purpose) -> Option<u16> {
        let is_spare = self.waiting[usize::from(purpose.is_own())].is_empty() && self.most(purpose) > 0;
        if is_spare { self.take(now, qp, purpose) } else { None }
    }

    /// Chunks that are left for a purpose. What peers ask for must find room while this end's own requests wait for them.
    fn most(&self, purpose: Purpose) -> usize {
        let free = self.free.len();
        if purpose.is_own() { free.min(usize::from((self.limit / 2).saturating_sub(self.own))) } else { free }
    }

    /// Lets `qp` wait for a chunk, or for the end of copies.
    pub(crate) fn wait(&mut self, now: Nanos, qp: Qp, purpose: Purpose) {
        let line = &mut self.waiting[usize::from(purpose.is_own())];
        match line.iter_mut().find(|waiting| waiting.qp == qp) {
            Some(waiting) => waiting.since = now,
            None => line.push_back(InLine { qp, since: now }),
        }
    }

    /// Gives a chunk back. It is free when its copies have ended.
    pub(crate) fn release(&mut self, chunk: u16) {
        let Chunk { held, copies, .. } = &mut self.chunks[usize::from(chunk)];
        self.targets[usize::from(chunk)].clear();
        if let Some((_, purpose)) = held.take() {
            self.own -= u16::from(purpose.is_own());
            if *copies == 0 {
                self.free.push(chunk);
            }
        }
    }

    /// A queue pair waits for no chunk any more, nor has it bytes to be copied.
    pub(crate) fn forget(&mut self, qp: Qp) {
        self.stop_waiting(qp);
        self.promised.retain(|promised| promised.qp != qp);
        self.close(qp);
    }

    /// A queue pair waits for no chunk any more.
    pub(crate) fn stop_waiting(&mut self, qp: Qp) {
        self.waiting.iter_mut().for_each(|line| line.retain(|waiting| waiting.qp != qp));
    }

    /// The queue pair whose sends have held their chunks longest without a copy, if others wait for one in vain.
    pub(crate) fn idlest_sender(&self, now: Nanos) -> Option<Qp> {
        let [_, senders] = &self.waiting;
        let first = senders.front()?;
        if self.most(Purpose::Sends) > 0 {
            return None;
        }
        let is_idle = |chunk: &Chunk| chunk.copies == 0 && now.since(chunk.since) >= IDLE;
        let all_idle = |owner| self.chunks.iter().filter(|chunk| chunk.held == owner).all(is_idle);
        let sends = self.chunks.iter().filter_map(|chunk| Some((chunk, chunk.held?)));
        sends
            .filter(|(chunk, (qp, purpose))| {
                *purpose == Purpose::Sends && *qp != first.qp && is_idle(chunk) && all_idle(chunk.held)
            })
            .min_by_key(|(chunk, _)| chunk.since)
            .map(|(_, (qp, _))| qp)
    }

    /// One of the queue pairs that wait to send, if there are chunks for so many.
    pub(crate) fn waiting_at(&self, place: usize) -> Option<Qp> {
        let free = self.free.len();
        let chained = self.waiting.iter().flat_map(|line| line.iter().take(free));
        chained.map(|waiting| waiting.qp).nth(place)
    }

    /// Whether `qp` waits for a chunk to send from.
    pub(crate) fn waits_to_send(&self, qp: Qp) -> bool {
        self.waiting[1].iter().any(|waiting| waiting.qp == qp)
    }

    /// Whether `qp` waits for a chunk.
    pub(crate) fn waits(&self, qp: Qp) -> bool {
        self.waiting.iter().flatten().any(|waiting| waiting.qp == qp)
    }

    /// Notes that `qp` has a chunk for what its peer is to send again.
    pub(crate) fn promise(&mut self, now: Nanos, qp: Qp) {
        self.promised.retain(|promised| promised.qp != qp);
        self.promised.push_back(InLine { qp, since: now });
    }

    /// A queue pair whose peer has not come for long.
    pub(crate) fn next_in_vain(&mut self, now: Nanos) -> Option<Qp> {
        self.promised.front().filter(|promised| now.since(promised.since) >= PATIENCE)?;
        self.promised.pop_front().map(|promised| promised.qp)
    }

    /// Notes that `qp` has bytes that are to be copied.
    pub(crate) fn note_open(&mut self, qp: Qp) {
        if !self.open.contains(&qp) {
            self.open.push(qp);
        }
    }

    /// One of the queue pairs with bytes that are to be copied.
    pub(crate) fn open_at(&self, place: usize) -> Option<Qp> {
        self.open.get(place).copied()
    }

    /// It has none any more.
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

    /// Copies memory of the host into a chunk.
    pub(crate) fn copy(&self, chunk: u16, at: usize, from: Span<'_>) {
        if let Some(memory) = &self.memory {
            memory.copy(usize::from(chunk) * self.chunk + at, from);
        }
    }

    /// Starts a copy of pieces of a device's memory to a chunk, from byte `at` of it on.
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
        let Lane { queue, flights, .. } = &mut copier.gathers;
        let ticket = queue.gather(now, pieces, start)?;
        self.started.gathers += 1;
        self.started.bytes += bytes_of(pieces);
        flights.push_back(CopyUnderWay { ticket, qp, purpose, number, chunk });
        self.chunks[usize::from(chunk)].copies += 1;
        Ok(number)
    }

    /// Starts a copy of a chunk's first bytes to pieces of a device's memory, not before that with the ticket `after` has ended.
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
        let ticket = queue.scatter(now, start, pieces, after.max(*abandoned))?;
        self.started.scatters += 1;
        self.started.bytes += bytes_of(pieces);
        flights.push_back(CopyUnderWay { ticket, qp, purpose, number, chunk });
        self.chunks[usize::from(chunk)].copies += 1;
        Ok(ticket)
    }

    /// Nobody waits any more for this copy to a device, which goes on.
    pub(crate) fn abandon(&mut self, copier: u8, ticket: Ticket) {
        if let Some(Copier { scatters, .. }) = self.copiers.get_mut(usize::from(copier)) {
            scatters.abandoned = scatters.abandoned.max(ticket);
        }
    }

    /// The first bytes of a chunk, so many of them, to memory of the host.
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

    /// The copies that were started, ever.
    pub(crate) fn started(&self) -> Started {
        self.started
    }

    /// The next copy that has ended by `now`.
    pub(crate) fn next_ended(&mut self, now: Nanos) -> Option<EndedCopy> {
        let StagingPool { copiers, chunks, free, .. } = self;
        let lanes = copiers.iter_mut().flat_map(|copier| [&mut copier.gathers, &mut copier.scatters]);
        let (flight, succeeded) =
            lanes.filter(|lane| !lane.flights.is_empty()).find_map(|lane| lane.next_ended(now))?;
        let chunk = &mut chunks[usize::from(flight.chunk)];
        chunk.copies -= 1;
        chunk.since = now;
        if chunk.copies == 0 && chunk.held.is_none() {
            free.push(flight.chunk);
        }
        let CopyUnderWay { qp, purpose, number, .. } = flight;
        Some(EndedCopy { qp, purpose, number, succeeded })
    }

    /// When a copy may end.
    pub(crate) fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        let lanes = self.copiers.iter().flat_map(|copier| [&copier.gathers, &copier.scatters]);
        let copies =
            lanes.filter(|lane| !lane.flights.is_empty()).filter_map(|lane| lane.queue.next_deadline(now));
        let waits = self.waiting.iter().any(|line| !line.is_empty());
        let open = (!self.open.is_empty()).then_some(now + SOON);
        let promised = self.promised.front().map(|promised| promised.since + PATIENCE);
        copies.chain(open).chain(promised).chain(waits.then_some(now + IDLE)).min()
    }

    /// Whoever has not come for long lets go of its place, and is to look for another if it needs one still.
    pub(crate) fn next_absent(&mut self, now: Nanos) -> Option<Qp> {
        self.waiting.iter_mut().find_map(|line| {
            let index = line.iter().position(|waiting| now.since(waiting.since) >= PATIENCE)?;
            line.remove(index).map(|absent| absent.qp)
        })
    }
}

fn bytes_of(pieces: &[Piece<'_>]) -> u64 {
    pieces.iter().map(|piece| piece.len() as u64).sum()
}

impl Lane {
    /// The oldest copy, if it has ended by `now`, and whether it has succeeded.
    fn next_ended(&mut self, now: Nanos) -> Option<(CopyUnderWay, bool)> {
        let oldest = self.flights.front()?.ticket;
        if self.ended < oldest && self.failed.is_none() {
            match self.queue.done(now) {
                Ok(done) => self.ended = done,
                Err(failed) => {
                    tracing::warn!("{failed}");
                    // All before it have ended well.
                    self.ended = Ticket(failed.ticket.0 - 1);
                    self.failed = Some(failed.ticket);
                }
            }
        }
        // One before it was never told to have been submitted.
        let has_failed = self.failed.take_if(|failed| *failed <= oldest) == Some(oldest);
        if !has_failed && self.ended < oldest {
            return None;
        }
        Some((self.flights.pop_front()?, !has_failed))
    }
}
