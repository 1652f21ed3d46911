//! Operations of ranks of one host on memory that all of them have mapped (`driver::segment`): without packets, each
//! element is read and written once.
//!
//! Each rank publishes on a board (`mapped/board.rs`) that it has started and where its elements are, waits until all have,
//! does its part, publishes that it has ended, and waits until all have. If there are few elements, they are published with
//! the operation, and no rank waits for the end. If the others can't map a rank's memory, it copies the elements to memory
//! that they can map.
//!
//! In longer reductions each rank reduces one block of the elements, in the order of the ranks, and the others copy the
//! block when all ranks have reduced theirs. So a rank writes only to its own memory: a rank that is considered lost and
//! continues later can't cause damage. Data that was read is used only if no rank had failed or left before.

mod board;
mod host;

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use ferroce::driver::reduction::Reduction as Arithmetic;
use ferroce::driver::segment::Ticket;
use ferroce::{Access, Context, Mr, Nanos, Pd, Poller, Sge};

use crate::channel::message::{Call, Header, Purpose};
use crate::compute::Computer;
use crate::error::Cause;
use crate::execution::{Places, Trouble, What};
use crate::flight::{LATE, Log};
use crate::memory::{deregister, register};
use crate::operation::{Kind, Reduction};
use crate::schedule::Blocks;
use board::{Board, INLINE, Shown, Slot};
pub(crate) use host::Host;
use host::Unreachable;

/// The operations of one communicator on mapped memory.
pub(crate) struct Mapped {
    /// The number of operations so far.
    number: u64,
    /// Outstanding operations: the first is being executed.
    queue: VecDeque<Work>,
    desk: Desk,
}

/// Resources that consecutive operations reuse.
struct Desk {
    ranks: Vec<Rank>,
    rank: usize,
    /// This rank's slot on its board.
    slot: Slot,
    communicator: u64,
    /// For the current operation, the places of the elements of each rank, and the blocks that they reduce.
    inputs: Vec<Option<Spot>>,
    blocks: Vec<Option<Spot>>,
    /// The operands of a reduction.
    sources: Vec<Sge>,
    /// Memory for elements that others can't map, of this rank's input and block.
    rooms: [Option<(Mr, usize)>; 2],
}

/// The position of the first byte.
type Spot = (Mr, u64);

/// A rank, and its process's board.
struct Rank {
    ticket: Ticket,
    board: Arc<Board>,
    /// The local region of the board.
    mr: Mr,
    slot: Option<Slot>,
    /// The segments of its last elements, valid while the process has retired no further segments.
    known: [Option<Known>; 2],
    retired: u64,
}

/// A mapped segment of another process.
#[derive(Clone, Copy)]
struct Known {
    nonce: u64,
    length: u64,
    mr: Mr,
}

/// The parameters of an operation.
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) call: Call,
    pub(crate) places: Places,
    pub(crate) what: What,
    pub(crate) root: usize,
    /// Numbers of elements of input and output at this rank.
    pub(crate) lengths: (usize, usize),
    /// The number of elements, in total or in each block.
    pub(crate) count: usize,
    /// The ends of the blocks, if their lengths differ.
    pub(crate) ends: Option<Vec<usize>>,
}

/// An outstanding operation.
struct Work {
    job: Job,
    number: u64,
    phase: Phase,
    header: Header,
    /// The elements are published with the operation: the same at all ranks.
    is_inline: bool,
    /// The number of ranks seen, or whose elements were copied; and the number of copied elements of the current rank.
    seen: usize,
    done: usize,
    /// Its number in the flight recorder, and when it started.
    record: u64,
    began: Nanos,
    /// The rank that was waited for last before all had started, and for how long, unless all that follows is short.
    last: Option<u32>,
    waited: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Begin,
    /// Waits until the others start.
    Gather,
    /// Reduces or copies elements.
    Compute,
    /// Waits until the others have reduced their blocks.
    Meet,
    /// Copies blocks.
    Spread,
    /// Waits until the others end.
    End,
}

/// Resources of the process for operations.
pub(crate) struct Bench<'a> {
    pub(crate) context: &'a mut Context,
    pub(crate) pd: Pd,
    pub(crate) host: &'a mut Host,
    pub(crate) computer: &'a mut Computer,
    /// Ranks whose processes sleep and must be woken.
    pub(crate) wake: &'a mut Vec<u32>,
    pub(crate) log: &'a Log,
    pub(crate) clock: &'a mut Poller,
    /// Bytes that may still be computed.
    pub(crate) budget: usize,
    /// Reads of other ranks' boards before packets are polled again.
    pub(crate) looks: u32,
}

impl Mapped {
    /// On boards that the process has [opened](Host::open). `None` if its board has no free slot.
    pub(crate) fn new(host: &Host, communicator: u64, rank: usize, boards: Vec<Ticket>) -> Option<Mapped> {
        let rank_of = |ticket: Ticket| {
            let (board, mr) = host.get(ticket.nonce)?;
            Some(Rank { ticket, board: board.clone(), mr, slot: None, known: [None; 2], retired: 0 })
        };
        let mut ranks = boards.into_iter().map(rank_of).collect::<Option<Vec<Rank>>>()?;
        let size = ranks.len();
        let slot = ranks[rank].board.take(communicator)?;
        ranks[rank].slot = Some(slot);
        let desk = Desk {
            ranks,
            rank,
            slot,
            communicator,
            inputs: vec![None; size],
            blocks: vec![None; size],
            sources: Vec::new(),
            rooms: [None; 2],
        };
        Some(Mapped { number: 0, queue: VecDeque::new(), desk })
    }

    /// Frees its resources, including memory that other ranks may have mapped.
    pub(crate) fn free(
        self,
        host: &mut Host,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        let Desk { ranks, rank, slot, rooms, .. } = self.desk;
        ranks[rank].board.free(slot);
        drop(ranks);
        for (mr, _) in rooms.into_iter().flatten() {
            host.forget(mr);
            deregister(context, &mut now, mr)?;
        }
        host.prune(context, &mut now)
    }

    /// The boards of some of its ranks.
    pub(crate) fn boards(&self, ranks: &[u32]) -> Vec<Ticket> {
        ranks.iter().map(|rank| self.desk.ranks[*rank as usize].ticket).collect()
    }

    /// Starts an operation, and advances it as far as possible if no other one is outstanding. Returns whether it has
    /// ended.
    pub(crate) fn start(&mut self, job: Job, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        self.number += 1;
        let header = Header::new(&job.call, Purpose::Call, 0);
        let is_inline = job.is_inline(self.desk.ranks.len());
        let (number, phase) = (self.number, Phase::Begin);
        let mut work = Work {
            job,
            number,
            phase,
            header,
            is_inline,
            seen: 0,
            done: 0,
            record: 0,
            began: Nanos::ZERO,
            last: None,
            waited: None,
        };
        // Long parts are executed by the polls of the waiting program.
        while self.queue.is_empty() {
            match self.desk.step(&mut work, bench)? {
                Step::Ended => {
                    work.log_end(bench);
                    return Ok(true);
                }
                Step::Moved if work.is_inline || work.phase == Phase::Gather => {}
                Step::Moved | Step::Waits => break,
            }
        }
        self.queue.push_back(work);
        Ok(false)
    }

    /// Whether an operation can continue without events, or waits only for the boards of others.
    pub(crate) fn is_working(&self) -> bool {
        self.queue
            .front()
            .is_some_and(|work| matches!(work.phase, Phase::Begin | Phase::Compute | Phase::Spread))
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// The number of the oldest operation in the flight recorder, if it has started.
    pub(crate) fn record(&self) -> Option<u64> {
        self.queue.front().filter(|work| work.phase != Phase::Begin).map(|work| work.record)
    }

    /// A rank for which the oldest operation waits.
    pub(crate) fn waits_for(&self) -> Option<u32> {
        let work = self.queue.front()?;
        let others = (work.seen..self.desk.ranks.len()).filter(|rank| *rank != self.desk.rank);
        others.map(|rank| rank as u32).next()
    }

    /// Drops outstanding operations, and publishes the failure: the communicator has failed.
    pub(crate) fn fail(&mut self) {
        self.desk.ranks[self.desk.rank].board.fail(self.desk.slot);
        self.queue.clear();
    }

    /// Advances operations. Passes the ended ones to `ended`; returns whether there was any progress.
    pub(crate) fn advance(
        &mut self,
        bench: &mut Bench<'_>,
        mut ended: impl FnMut(u64),
    ) -> Result<bool, Trouble> {
        let mut moved = false;
        while let Some(work) = self.queue.front_mut() {
            match self.desk.step(work, bench)? {
                Step::Ended => {
                    work.log_end(bench);
                    ended(work.job.id);
                    self.queue.pop_front();
                    moved = true;
                }
                Step::Moved => {
                    moved = true;
                    if bench.budget == 0 {
                        break;
                    }
                }
                Step::Waits => break,
            }
        }
        Ok(moved)
    }
}

impl Desk {
    fn step(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<Step, Trouble> {
        match work.phase {
            Phase::Begin => {
                self.begin(work, bench)?;
                // Recorded after the data that the others wait for was published.
                work.log_begin(bench);
                work.phase = Phase::Gather;
                Ok(Step::Moved)
            }
            Phase::Gather => {
                let before = work.seen;
                for _ in 0..bench.looks.max(1) {
                    while work.seen < self.ranks.len() && self.has_joined(work.seen, work, bench)? {
                        work.seen += 1;
                    }
                    if work.seen == self.ranks.len() {
                        (work.phase, work.seen) = (Phase::Compute, 0);
                        if work.last.is_some() && !work.is_inline {
                            work.waited = Some(bench.clock.now().since(work.began));
                        }
                        return Ok(Step::Moved);
                    }
                    std::hint::spin_loop();
                }
                work.last = Some(work.seen as u32);
                Ok(if work.seen > before { Step::Moved } else { Step::Waits })
            }
            Phase::Compute => {
                if !self.compute(work, bench)? {
                    return Ok(Step::Moved);
                }
                if !self.is_intact(work) {
                    return Ok(Step::Waits);
                }
                if work.is_inline {
                    return Ok(Step::Ended);
                }
                if work.job.has_blocks() {
                    self.ranks[self.rank].board.reduce(self.slot, work.number);
                    (work.phase, work.seen) = (Phase::Meet, 0);
                    self.wake(bench);
                    return Ok(Step::Moved);
                }
                self.end(work, bench);
                Ok(Step::Moved)
            }
            Phase::Meet => {
                if !self.all(work, bench.looks, Board::has_reduced) {
                    return Ok(Step::Waits);
                }
                (work.phase, work.seen, work.done) = (Phase::Spread, 0, 0);
                Ok(Step::Moved)
            }
            Phase::Spread => {
                if !self.copy(work, bench)? {
                    return Ok(Step::Moved);
                }
                if !self.is_intact(work) {
                    return Ok(Step::Waits);
                }
                self.end(work, bench);
                Ok(Step::Moved)
            }
            Phase::End => match self.all(work, bench.looks, Board::has_ended) {
                true => Ok(Step::Ended),
                false => Ok(Step::Waits),
            },
        }
    }

    /// This rank needs nothing more of the others.
    fn end(&mut self, work: &mut Work, bench: &mut Bench<'_>) {
        (work.phase, work.seen) = (Phase::End, 0);
        self.ranks[self.rank].board.end(self.slot, work.number);
        self.wake(bench);
    }

    /// Whether all ranks have reached this state.
    fn all(&self, work: &mut Work, looks: u32, has: fn(&Board, Slot, u64) -> bool) -> bool {
        for _ in 0..looks.max(1) {
            while let Some(rank) = self.ranks.get(work.seen)
                && rank.slot.is_some_and(|slot| has(&rank.board, slot, work.number))
            {
                work.seen += 1;
            }
            if work.seen == self.ranks.len() {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Whether all that the ranks have published is still valid. If not, a rank has failed or left, and reports it by
    /// packets.
    fn is_intact(&self, work: &Work) -> bool {
        let mut ranks = self.ranks.iter();
        ranks.all(|rank| rank.slot.is_some_and(|slot| rank.board.is_intact(slot, work.number)))
    }

    /// Publishes that this rank has started, and where its elements are.
    fn begin(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<(), Trouble> {
        self.inputs.fill(None);
        self.blocks.fill(None);
        let Job { places, lengths, what, .. } = &work.job;
        let (places, bytes) = (*places, work.job.bytes(lengths.0));
        let factor = match what.reduction {
            Some(Reduction::PreMulSum(factor)) => Some(factor),
            _ => None,
        };
        let mut shown = [Shown::default(); 2];
        if work.is_inline {
            let own = (self.ranks[self.rank].mr, self.slot.elements(work.number));
            self.inputs[self.rank] = Some(own);
            if let (Some(from), true) = (places.input, bytes > 0) {
                self.move_in(bench, work, own, from, bytes, factor)?;
            }
        } else {
            if let (Some(from), true) = (places.input, bytes > 0) {
                let seen = bench.host.show(from).filter(|_| factor.is_none());
                let spot = if seen.is_some() { from } else { (self.room(0, bytes, bench)?, 0) };
                if seen.is_none() {
                    self.move_in(bench, work, spot, from, bytes, factor)?;
                }
                shown[0] = seen.or_else(|| bench.host.show(spot)).unwrap_or_default();
                self.inputs[self.rank] = Some(spot);
            }
            let block = work.job.block(self.rank, self.ranks.len());
            if work.job.has_blocks() && !block.is_empty() {
                let at = work.job.bytes(block.start) as u64;
                let output = places.output.filter(|_| work.job.is_result_at(self.rank));
                let own = output.map(|(mr, offset)| (mr, offset + at));
                let seen = own.and_then(|own| bench.host.show(own));
                let spot = match own.filter(|_| seen.is_some()) {
                    Some(own) => own,
                    None => (self.room(1, work.job.bytes(block.len()), bench)?, 0),
                };
                shown[1] = seen.or_else(|| bench.host.show(spot)).unwrap_or_default();
                self.blocks[self.rank] = Some(spot);
            }
        }
        let shown = (!work.is_inline).then_some(&shown);
        self.ranks[self.rank].board.begin(self.slot, work.number, &work.header, shown);
        self.wake(bench);
        Ok(())
    }

    /// Copies this rank's elements to memory that others can read, multiplied by its factor if it has one.
    fn move_in(
        &self,
        bench: &mut Bench<'_>,
        work: &Work,
        to: Spot,
        from: Spot,
        bytes: usize,
        factor: Option<f64>,
    ) -> Result<(), Trouble> {
        let Bench { context, computer, .. } = bench;
        match factor {
            None => computer.copy_all(context, to, from, bytes)?,
            Some(factor) => {
                for (to, from) in parts(to, bytes).zip(parts(from, bytes)) {
                    computer.scale(context, work.job.what.data_type, to, from, factor)?;
                }
            }
        }
        Ok(())
    }

    /// Memory for `bytes` that others can map.
    fn room(&mut self, which: usize, bytes: usize, bench: &mut Bench<'_>) -> Result<Mr, Trouble> {
        if let Some((mr, length)) = self.rooms[which]
            && length >= bytes
        {
            return Ok(mr);
        }
        if let Some((mr, _)) = self.rooms[which].take() {
            bench.host.forget(mr);
            // No copies of this rank use it: this communicator has no other outstanding operation.
            bench.context.deregister(mr)?;
        }
        let length = bytes.next_power_of_two().max(1 << 16);
        let (segment, memory) = Host::allocate(length)?;
        let mr = register(bench.context, bench.pd, memory, Access::LOCAL_WRITE)?;
        bench.host.keep(mr, segment);
        self.rooms[which] = Some((mr, length));
        Ok(mr)
    }

    /// Whether a rank has started the operation too; records the places of its elements.
    fn has_joined(&mut self, number: usize, work: &Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        if number == self.rank {
            return Ok(true);
        }
        let rank = &mut self.ranks[number];
        if rank.slot.is_none() {
            rank.slot = rank.board.find(self.communicator);
        }
        let Some(slot) = rank.slot.filter(|slot| rank.board.has_begun(*slot, work.number)) else {
            return Ok(false);
        };
        let peer = number as u32;
        let header = rank.board.header(slot, work.number);
        if header != work.header {
            let problem =
                |what| Cause::Protocol { peer, problem: format!("an operation whose {what} is unknown") };
            let (call, _) = header.parse().map_err(|what| Trouble::Cause(problem(what)))?;
            let (ours, theirs) = (work.job.call.to_string(), call.to_string());
            return Err(Trouble::Cause(Cause::Mismatch { peer, ours, theirs }));
        }
        if work.is_inline {
            self.inputs[number] = Some((rank.mr, slot.elements(work.number)));
            return Ok(true);
        }
        let shown = rank.board.places(slot, work.number);
        let retired = rank.board.retired();
        if retired != rank.retired {
            bench.host.give_up(bench.context, rank.ticket.nonce)?;
            (rank.retired, rank.known) = (retired, [None; 2]);
        }
        let size = self.inputs.len();
        let block = if work.job.has_blocks() { work.job.block(number, size).len() } else { 0 };
        let lengths = [work.job.input_of(number, size), block];
        for (which, (shown, length)) in shown.iter().zip(lengths).enumerate() {
            let bytes = work.job.bytes(length) as u64;
            if shown.nonce == 0 || bytes == 0 {
                continue;
            }
            let cause = match rank.spot(which, shown, bytes, bench) {
                Ok(spot) => {
                    let places = if which == 0 { &mut self.inputs } else { &mut self.blocks };
                    places[number] = Some(spot);
                    continue;
                }
                // It is detected like ranks that publish nothing.
                Err(Unreachable::Gone) => return Ok(false),
                Err(Unreachable::Nonsense(problem)) => Cause::Protocol { peer, problem },
                Err(Unreachable::Here(problem)) => {
                    Cause::Local { problem: format!("rank {peer}: {problem}") }
                }
            };
            return Err(Trouble::Cause(cause));
        }
        Ok(true)
    }

    /// Executes a part of this rank's work. Returns whether all of it is done.
    fn compute(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        if work.job.call.kind.reduces() { self.reduce(work, bench) } else { self.copy(work, bench) }
    }

    fn reduce(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        let (size, rank) = (self.ranks.len(), self.rank);
        let Job { call, count, root, what, places, .. } = &work.job;
        let element = what.data_type.size();
        // If each rank has all elements, each computes its own output.
        let is_everything = work.is_inline && call.kind != Kind::ReduceScatter;
        if is_everything && call.kind == Kind::Reduce && rank != *root {
            return Ok(true);
        }
        let block = if is_everything { 0..*count } else { work.job.block(rank, size) };
        let target = if work.job.has_blocks() && !is_everything { self.blocks[rank] } else { places.output };
        let at = block.start + work.done;
        let length = (block.end - at).min(PIECE / element);
        if length > 0 {
            let sge = |spot: Option<Spot>, at: usize| {
                let (mr, offset) = spot?;
                let offset = offset + (at * element) as u64;
                Some(Sge { mr, offset, length: (length * element) as u32 })
            };
            self.sources.clear();
            self.sources.extend(self.inputs.iter().filter_map(|input| sge(*input, at)));
            let target = sge(target, work.done).filter(|_| self.sources.len() == size);
            let target = target.ok_or_else(no_elements)?;
            let arithmetic = Arithmetic::new(what.data_type, what.reduction.unwrap_or(Reduction::Sum).op());
            let is_average = what.reduction == Some(Reduction::Average);
            let arithmetic = arithmetic.divide_by(is_average.then_some(size as u32));
            bench.computer.reduce(bench.context, arithmetic, target, &self.sources)?;
            work.done += length;
            bench.budget = bench.budget.saturating_sub(length * element * size);
        }
        Ok(block.start + work.done >= block.end)
    }

    /// Copies one rank's elements after the other's, from the position of the last turn on.
    fn copy(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        let element = work.job.what.data_type.size();
        let mut copied = false;
        while work.seen < self.ranks.len() {
            let taken = match work.phase {
                Phase::Spread => work.job.reduced_by(work.seen, self.rank, self.ranks.len()),
                _ => work.job.taken_of(work.seen, self.rank),
            };
            let Some((at, to)) = taken else {
                work.seen += 1;
                continue;
            };
            let length = to.len() - work.done;
            if length == 0 {
                (work.seen, work.done) = (work.seen + 1, 0);
                continue;
            }
            if copied && bench.budget == 0 {
                return Ok(false);
            }
            let bytes = (length * element).min(PIECE);
            let spot = |spot: Option<Spot>, at: usize| {
                spot.map(|(mr, offset)| (mr, offset + (at * element) as u64)).ok_or_else(no_elements)
            };
            let from = if work.phase == Phase::Spread { &self.blocks } else { &self.inputs };
            let from = spot(from[work.seen], at + work.done)?;
            let to = spot(work.job.places.output, to.start + work.done)?;
            if from != to {
                bench.computer.copy_all(bench.context, to, from, bytes)?;
            }
            work.done += bytes / element;
            bench.budget = bench.budget.saturating_sub(bytes);
            copied = true;
        }
        Ok(true)
    }

    /// Lists the sleeping processes to wake, because something was published.
    fn wake(&self, bench: &mut Bench<'_>) {
        // A process that is not seen to sleep will see what was published.
        fence(Ordering::SeqCst);
        for (number, rank) in (0..).zip(&self.ranks) {
            if number != self.rank as u32 && rank.board.is_to_be_woken() {
                bench.wake.push(number);
            }
        }
    }
}

impl Rank {
    /// The local place of elements that it has published.
    fn spot(
        &mut self,
        which: usize,
        shown: &Shown,
        bytes: u64,
        bench: &mut Bench<'_>,
    ) -> Result<Spot, Unreachable> {
        let Shown { nonce, length, offset, .. } = *shown;
        if offset.checked_add(bytes).is_none_or(|end| end > length) {
            let problem = format!("{bytes} bytes from byte {offset} on of a segment of {length}");
            return Err(Unreachable::Nonsense(problem));
        }
        if let Some(known) = self.known[which].filter(|known| (known.nonce, known.length) == (nonce, length))
        {
            return Ok((known.mr, offset));
        }
        let mr = bench.host.map(bench.context, bench.pd, &self.ticket, shown)?;
        self.known[which] = Some(Known { nonce, length, mr });
        Ok((mr, offset))
    }
}

impl Work {
    fn log_begin(&mut self, bench: &mut Bench<'_>) {
        let Job { call, lengths, .. } = &self.job;
        let bytes = self.job.bytes(lengths.0.max(lengths.1)) as u64;
        self.began = bench.clock.now();
        self.record = bench.log.called(call, bytes, 1, true);
        bench.log.began(self.record, self.began);
    }

    fn log_end(&self, bench: &mut Bench<'_>) {
        let now = bench.clock.now();
        let waited = self.waited.unwrap_or_else(|| now.since(self.began));
        let last = self.last.map(|last| (last, waited));
        if let Some((last, waited)) = last {
            bench.log.waited(self.record, last, waited);
        }
        bench.log.ended(self.record, now, last.filter(|(_, waited)| *waited > LATE));
    }
}

enum Step {
    Moved,
    Waits,
    Ended,
}

/// Bytes that are computed between two checks.
const PIECE: usize = 256 << 10;

impl Job {
    fn bytes(&self, length: usize) -> usize {
        length * self.what.data_type.size()
    }

    fn blocks(&self) -> Blocks<'_> {
        self.ends.as_deref().map_or(Blocks::Equal { len: self.count }, Blocks::Ends)
    }

    /// Whether the elements are few enough to be published with the operation: the same at all ranks.
    fn is_inline(&self, ranks: usize) -> bool {
        let each = self.ends.as_ref().map_or(self.count, |ends| ends.last().copied().unwrap_or(0));
        let length = match self.call.kind {
            Kind::ReduceScatter | Kind::AllToAll | Kind::Scatter if self.ends.is_none() => {
                each.saturating_mul(ranks)
            }
            _ => each,
        };
        self.bytes(length) <= INLINE
    }

    /// Whether blocks are reduced that others need: all of them, or the root.
    fn has_blocks(&self) -> bool {
        matches!(self.call.kind, Kind::AllReduce | Kind::Reduce)
    }

    /// The elements that a rank reduces.
    fn block(&self, rank: usize, size: usize) -> Range<usize> {
        match self.call.kind {
            Kind::ReduceScatter => self.blocks().block(rank),
            _ => Blocks::Cut { start: 0, len: self.count, parts: size }.block(rank),
        }
    }

    /// The number of elements of a rank's input.
    fn input_of(&self, rank: usize, size: usize) -> usize {
        let blocks = self.blocks();
        let all = || blocks.blocks(0..size).len();
        match self.call.kind {
            Kind::AllReduce | Kind::Reduce => self.count,
            Kind::ReduceScatter => all(),
            Kind::AllGather | Kind::Gather => blocks.block(rank).len(),
            Kind::Broadcast if rank == self.root => self.count,
            Kind::Scatter if rank == self.root => all(),
            Kind::AllToAll => self.count * size,
            _ => 0,
        }
    }

    /// The part of the block reduced by another rank that this rank takes: its first element, and its place in the output.
    fn reduced_by(&self, from: usize, rank: usize, size: usize) -> Option<(usize, Range<usize>)> {
        self.is_result_at(rank).then(|| (0, self.block(from, size)))
    }

    /// Whether a rank gets the result. Other ranks have no output.
    fn is_result_at(&self, rank: usize) -> bool {
        self.call.kind == Kind::AllReduce || rank == self.root
    }

    /// The elements of another rank that this rank takes: the first one, and their place in the output.
    fn taken_of(&self, from: usize, rank: usize) -> Option<(usize, Range<usize>)> {
        let Job { call, count, root, .. } = self;
        match call.kind {
            Kind::AllGather => Some((0, self.blocks().block(from))),
            Kind::Gather if rank == *root => Some((0, self.blocks().block(from))),
            Kind::Broadcast if from == *root => Some((0, 0..*count)),
            Kind::Scatter if from == *root => {
                let block = self.blocks().block(rank);
                Some((block.start, 0..block.len()))
            }
            Kind::AllToAll => Some((rank * count, self.blocks().block(from))),
            _ => None,
        }
    }
}

/// Parts of `bytes` bytes, each with a length that a request may have.
fn parts((mr, offset): Spot, bytes: usize) -> impl Iterator<Item = Sge> {
    let part = move |start: usize| Sge {
        mr,
        offset: offset + start as u64,
        length: (bytes - start).min(PIECE) as u32,
    };
    (0..bytes).step_by(PIECE).map(part)
}

fn no_elements() -> Trouble {
    Trouble::Cause(Cause::Local { problem: "elements of a rank are nowhere".to_owned() })
}
