//! Operations of ranks of one host on memory that all of them have mapped: without packets, each element read and written once.
//!
//! Each rank shows that it has begun and where its elements are, waits until all have, does its part, shows that it has ended
//! and waits until all have. Reductions are of a block of the elements by each rank, in the order of the ranks, stored in the
//! outputs of all. Elements that are few are shown with the operation: nobody waits for the end then. A rank whose memory the others
//! can't map copies it to memory that they can.

mod board;
mod host;

use std::collections::VecDeque;
use std::sync::atomic::{Ordering, fence};

use ferroce::driver::reduction::Reduction as Arithmetic;
use ferroce::driver::segment::Ticket;
use ferroce::{Access, Context, Mr, Nanos, Pd, Sge};

use crate::channel::message::{Call, Header, Purpose};
use crate::compute::{Computer, Operands};
use crate::error::Cause;
use crate::execution::{Places, Trouble, What};
use crate::memory::{deregister, register};
use crate::operation::{Kind, Reduction};
use crate::schedule::Blocks;
use board::{Board, INLINE, Shown};
pub(crate) use host::Host;

/// The operations of one communicator on mapped memory.
pub(crate) struct Mapped {
    /// Of each rank, its process's board.
    boards: Vec<Ticket>,
    slots: Vec<Option<usize>>,
    rank: usize,
    communicator: u64,
    /// Operations so far.
    number: u64,
    queue: VecDeque<Work>,
    /// Memory for what others can't map, of this rank's input and output.
    rooms: [Option<(Mr, usize)>; 2],
}

/// What an operation is.
pub(crate) struct Job {
    pub(crate) id: u64,
    pub(crate) call: Call,
    pub(crate) places: Places,
    pub(crate) what: What,
    pub(crate) root: usize,
    /// Elements of input and output at this rank.
    pub(crate) lengths: (usize, usize),
    /// Elements, or those of each block.
    pub(crate) count: usize,
    /// Where blocks end, if they differ.
    pub(crate) ends: Option<Vec<usize>>,
}

/// An operation under way.
struct Work {
    job: Job,
    number: u64,
    phase: Phase,
    /// Where the elements of each rank are: input and output.
    inputs: Vec<Option<(Mr, u64)>>,
    outputs: Vec<Option<(Mr, u64)>>,
    /// The output in memory that others can map, if it is not there.
    moved_output: Option<(Mr, u64)>,
    /// Ranks that were seen, elements that are done.
    seen: usize,
    done: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Begin,
    Gather,
    Compute,
    End,
}

/// What operations need of the process.
pub(crate) struct Bench<'a> {
    pub(crate) context: &'a mut Context,
    pub(crate) pd: Pd,
    pub(crate) host: &'a mut Host,
    pub(crate) computer: &'a mut Computer,
    /// Ranks whose processes sleep and have to be woken.
    pub(crate) wake: &'a mut Vec<u32>,
    /// Bytes that may still be computed.
    pub(crate) budget: usize,
}

/// Looks at other ranks' boards before packets are looked after again: they are there in less than a microsecond, or late.
const LOOKS: usize = 64;

impl Mapped {
    /// `None` if this process shows as many communicators as it can.
    pub(crate) fn new(host: &Host, communicator: u64, rank: usize, boards: Vec<Ticket>) -> Option<Mapped> {
        let (own, _) = host.get(boards[rank].nonce)?;
        let slot = own.take(communicator)?;
        let mut slots = vec![None; boards.len()];
        slots[rank] = Some(slot);
        Some(Mapped {
            boards,
            slots,
            rank,
            communicator,
            number: 0,
            queue: VecDeque::new(),
            rooms: [None; 2],
        })
    }

    /// What was taken for it is free again; also what other ranks may have mapped.
    pub(crate) fn free(
        self,
        host: &mut Host,
        context: &mut Context,
        mut now: impl FnMut() -> Nanos,
    ) -> Result<(), crate::Error> {
        if let (Some((own, _)), Some(slot)) = (host.get(self.boards[self.rank].nonce), self.slots[self.rank])
        {
            own.free(slot);
        }
        for (mr, _) in self.rooms.into_iter().flatten() {
            host.forget(mr);
            deregister(context, &mut now, mr)?;
        }
        Ok(())
    }

    /// The boards of some of its ranks.
    pub(crate) fn boards(&self, ranks: &[u32]) -> Vec<Ticket> {
        ranks.iter().map(|rank| self.boards[*rank as usize]).collect()
    }

    pub(crate) fn start(&mut self, job: Job) {
        self.number += 1;
        let size = self.boards.len();
        let (inputs, outputs) = (vec![None; size], vec![None; size]);
        let (number, phase) = (self.number, Phase::Begin);
        self.queue.push_back(Work {
            job,
            number,
            phase,
            inputs,
            outputs,
            moved_output: None,
            seen: 0,
            done: 0,
        });
    }

    /// Whether an operation goes on without anything from outside, or only with what others show.
    pub(crate) fn is_working(&self) -> bool {
        self.queue.front().is_some_and(|work| work.phase == Phase::Compute || work.phase == Phase::Begin)
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// The ranks that the oldest operation waits for.
    pub(crate) fn waits_for(&self) -> Vec<u32> {
        let Some(work) = self.queue.front() else { return Vec::new() };
        (work.seen as u32..self.boards.len() as u32)
            .filter(|rank| *rank as usize != self.rank)
            .take(1)
            .collect()
    }

    /// Forgets what is under way: it has failed.
    pub(crate) fn drop_all(&mut self) {
        self.queue.clear();
    }

    /// Goes on. The operations that have ended go to `ended`; whether anything has moved.
    pub(crate) fn advance(
        &mut self,
        bench: &mut Bench<'_>,
        mut ended: impl FnMut(u64),
    ) -> Result<bool, Trouble> {
        let mut moved = false;
        let mut looks = 0;
        while let Some(mut work) = self.queue.pop_front() {
            let went = self.step(&mut work, bench);
            match went {
                Ok(Step::Ended) => {
                    ended(work.job.id);
                    (moved, looks) = (true, 0);
                }
                Ok(Step::Moved) if bench.budget > 0 => {
                    self.queue.push_front(work);
                    (moved, looks) = (true, 0);
                }
                Ok(Step::Moved) => {
                    self.queue.push_front(work);
                    return Ok(true);
                }
                Ok(Step::Waits) => {
                    self.queue.push_front(work);
                    looks += 1;
                    if looks > LOOKS {
                        break;
                    }
                    std::hint::spin_loop();
                }
                Err(trouble) => return Err(trouble),
            }
        }
        Ok(moved)
    }

    fn step(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<Step, Trouble> {
        match work.phase {
            Phase::Begin => {
                self.begin(work, bench)?;
                work.phase = Phase::Gather;
                Ok(Step::Moved)
            }
            Phase::Gather => {
                let before = work.seen;
                while work.seen < self.boards.len() {
                    if !self.has_joined(work.seen, work, bench)? {
                        return Ok(if work.seen > before { Step::Moved } else { Step::Waits });
                    }
                    work.seen += 1;
                }
                (work.phase, work.seen) = (Phase::Compute, 0);
                Ok(Step::Moved)
            }
            Phase::Compute => {
                if !self.compute(work, bench)? {
                    return Ok(Step::Moved);
                }
                if work.is_inline() {
                    return Ok(Step::Ended);
                }
                work.phase = Phase::End;
                if let (Some((own, _)), Some(slot)) =
                    (bench.host.get(self.boards[self.rank].nonce), self.slots[self.rank])
                {
                    own.end(slot, work.number);
                }
                self.wake(bench);
                Ok(Step::Moved)
            }
            Phase::End => {
                while work.seen < self.boards.len() {
                    let there = bench.host.get(self.boards[work.seen].nonce).zip(self.slots[work.seen]);
                    if !there.is_some_and(|((board, _), slot)| board.has_ended(slot, work.number)) {
                        return Ok(Step::Waits);
                    }
                    work.seen += 1;
                }
                if let (Some(from), Some(to)) = (work.moved_output, work.job.places.output) {
                    let bytes = work.bytes(work.job.lengths.1);
                    bench.computer.copy_all(bench.context, to, from, bytes)?;
                }
                Ok(Step::Ended)
            }
        }
    }

    /// Shows that this rank has begun, and where its elements are.
    fn begin(&mut self, work: &mut Work, bench: &mut Bench<'_>) -> Result<(), Trouble> {
        let Job { places, lengths, .. } = &work.job;
        let (places, bytes) = (*places, work.bytes(lengths.0));
        let slot = self.slots[self.rank].unwrap_or(0);
        let board = bench.host.get(self.boards[self.rank].nonce).map(|(_, mr)| *mr);
        let mut shown = [Shown::default(); 2];
        let scaling = work.job.what.reduction.and_then(|reduction| match reduction {
            Reduction::PreMulSum(factor) => Some(factor),
            _ => None,
        });
        if work.is_inline() {
            if let (Some(from), Some(board), true) = (places.input, board, bytes > 0) {
                let to = (board, Board::elements(slot, work.number));
                self.move_in(bench, work, to, from, bytes, scaling)?;
            }
        } else {
            shown[0] = match bench.host.show(places.input).filter(|_| scaling.is_none()) {
                Some(shown) => shown,
                None if bytes > 0 => {
                    let room = self.room(0, bytes, bench)?;
                    if let Some(from) = places.input {
                        self.move_in(bench, work, (room, 0), from, bytes, scaling)?;
                    }
                    bench.host.show(Some((room, 0))).unwrap_or_default()
                }
                None => Shown::default(),
            };
            let out = work.bytes(work.job.lengths.1);
            let is_written_by_others = matches!(work.job.call.kind, Kind::AllReduce | Kind::Reduce);
            if is_written_by_others && out > 0 {
                shown[1] = match bench.host.show(places.output) {
                    Some(shown) => shown,
                    None => {
                        let room = self.room(1, out, bench)?;
                        work.moved_output = Some((room, 0));
                        bench.host.show(Some((room, 0))).unwrap_or_default()
                    }
                };
            }
        }
        let header = Header::new(&work.job.call, Purpose::Call, 0);
        if let Some((own, _)) = bench.host.get(self.boards[self.rank].nonce) {
            own.begin(slot, work.number, &header, &shown);
        }
        self.wake(bench);
        Ok(())
    }

    /// Copies this rank's elements to where others see them, multiplied by its factor if it has one.
    fn move_in(
        &self,
        bench: &mut Bench<'_>,
        work: &Work,
        to: (Mr, u64),
        from: (Mr, u64),
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

    /// Memory for so many bytes that others can map.
    fn room(&mut self, which: usize, bytes: usize, bench: &mut Bench<'_>) -> Result<Mr, Trouble> {
        if let Some((mr, length)) = self.rooms[which]
            && length >= bytes
        {
            return Ok(mr);
        }
        if let Some((mr, _)) = self.rooms[which].take() {
            bench.host.forget(mr);
            // Nobody here copies to or from it: nothing else is under way on this communicator.
            bench.context.deregister(mr)?;
        }
        let length = bytes.next_power_of_two().max(1 << 16);
        let (segment, memory) = Host::allocate(length)?;
        let mr = register(bench.context, bench.pd, memory, Access::LOCAL_WRITE)?;
        bench.host.keep(mr, segment);
        self.rooms[which] = Some((mr, length));
        Ok(mr)
    }

    /// Whether a rank has begun the operation too; notes where its elements are.
    fn has_joined(&mut self, rank: usize, work: &mut Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        let ticket = self.boards[rank];
        let Some((board, mr)) = bench.host.get(ticket.nonce) else { return Ok(false) };
        let mr = *mr;
        if self.slots[rank].is_none() {
            self.slots[rank] = board.find(self.communicator);
        }
        let Some(slot) = self.slots[rank] else { return Ok(false) };
        if !board.has_begun(slot, work.number) {
            return Ok(false);
        }
        let (header, shown) = board.read(slot, work.number);
        let peer = rank as u32;
        let broken = |problem: String| Trouble::Cause(Cause::Protocol { peer, problem });
        let (call, _) =
            header.parse().map_err(|what| broken(format!("an operation whose {what} is unknown")))?;
        if call != work.job.call {
            let (ours, theirs) = (work.job.call.to_string(), call.to_string());
            return Err(Trouble::Cause(Cause::Mismatch { peer, ours, theirs }));
        }
        if work.is_inline() {
            work.inputs[rank] = Some((mr, Board::elements(slot, work.number)));
            return Ok(true);
        }
        bench.host.give_up(bench.context, ticket.nonce)?;
        let lengths = work.lengths_of(rank, self.boards.len());
        let is_own = rank == self.rank;
        for (which, (shown, length)) in shown.iter().zip([lengths.0, lengths.1]).enumerate() {
            let bytes = work.bytes(length) as u64;
            if shown.nonce == 0 || bytes == 0 {
                continue;
            }
            let own = bench.host.segments.iter().find(|(_, segment)| segment.ticket().nonce == shown.nonce);
            let place = match own.filter(|_| is_own) {
                Some((mr, _)) => (*mr, shown.offset),
                None => bench.host.map(bench.context, bench.pd, &ticket, shown, bytes).map_err(broken)?,
            };
            let places = if which == 0 { &mut work.inputs } else { &mut work.outputs };
            places[rank] = Some(place);
        }
        Ok(true)
    }

    /// Does a piece of this rank's part. Whether all of it is done.
    fn compute(&self, work: &mut Work, bench: &mut Bench<'_>) -> Result<bool, Trouble> {
        let (size, rank) = (self.boards.len(), self.rank);
        let Job { call, count, root, what, .. } = &work.job;
        let (count, root, what) = (*count, *root, *what);
        let element = what.data_type.size();
        let blocks = work.job.ends.as_deref().map_or(Blocks::Equal { len: count }, Blocks::Ends);
        let own_output = work.job.places.output;
        let elements = |spot: Option<(Mr, u64)>, at: usize| {
            spot.map(|(mr, offset)| (mr, offset + (at * element) as u64))
        };
        let copies: Vec<Copy> = match call.kind {
            Kind::AllReduce | Kind::Reduce | Kind::ReduceScatter => {
                let is_everything = work.is_inline() && call.kind != Kind::ReduceScatter;
                let block = match call.kind {
                    _ if is_everything => 0..count,
                    Kind::ReduceScatter => blocks.block(rank),
                    _ => Blocks::Cut { start: 0, len: count, parts: size }.block(rank),
                };
                if is_everything && call.kind == Kind::Reduce && rank != root {
                    return Ok(true);
                }
                let at = block.start + work.done;
                let length = (block.end - at).min(PIECE / element);
                if length > 0 {
                    let bytes = (length * element) as u32;
                    let sge = |spot: Option<(Mr, u64)>, at: usize| {
                        elements(spot, at).map(|(mr, offset)| Sge { mr, offset, length: bytes })
                    };
                    let sources: Option<Operands> = work.inputs.iter().map(|input| sge(*input, at)).collect();
                    let targets: Option<Operands> = match call.kind {
                        _ if is_everything => [sge(own_output, at)].into_iter().collect(),
                        Kind::ReduceScatter => [sge(own_output, work.done)].into_iter().collect(),
                        Kind::AllReduce => work.outputs.iter().map(|output| sge(*output, at)).collect(),
                        _ => [sge(work.outputs[root], at)].into_iter().collect(),
                    };
                    let (Some(sources), Some(targets)) = (sources, targets) else {
                        return Err(no_elements());
                    };
                    let arithmetic =
                        Arithmetic::new(what.data_type, what.reduction.unwrap_or(Reduction::Sum).op());
                    let is_average = what.reduction == Some(Reduction::Average);
                    let arithmetic = if is_average { arithmetic.divide_by(size as u32) } else { arithmetic };
                    bench.computer.reduce_to(bench.context, arithmetic, &targets, &sources)?;
                    work.done += length;
                    bench.budget = bench.budget.saturating_sub(length * element * size);
                }
                return Ok(block.start + work.done >= block.end);
            }
            Kind::AllGather => {
                (0..size).map(|from| Copy::new(work.inputs[from], 0, blocks.block(from))).collect()
            }
            Kind::Gather if rank == root => {
                (0..size).map(|from| Copy::new(work.inputs[from], 0, blocks.block(from))).collect()
            }
            Kind::Broadcast => vec![Copy::new(work.inputs[root], 0, 0..count)],
            Kind::Scatter => {
                let block = blocks.block(rank);
                vec![Copy::new(work.inputs[root], block.start, 0..block.len())]
            }
            Kind::AllToAll => {
                let own = rank * count;
                (0..size).map(|from| Copy::new(work.inputs[from], own, blocks.block(from))).collect()
            }
            _ => Vec::new(),
        };
        // Copies, one after the other, from where the last turn has stopped.
        let mut before = 0;
        for Copy { from, at, to } in copies {
            let length = to.len();
            if work.done < before + length {
                let skipped = work.done - before;
                let bytes = ((length - skipped) * element).min(PIECE);
                let (from, to) = (elements(from, at + skipped), elements(own_output, to.start + skipped));
                let (Some(from), Some(to)) = (from, to) else { return Err(no_elements()) };
                if from != to {
                    bench.computer.copy_all(bench.context, to, from, bytes)?;
                }
                work.done += bytes / element;
                bench.budget = bench.budget.saturating_sub(bytes);
                return Ok(false);
            }
            before += length;
        }
        Ok(true)
    }

    /// Processes that sleep are to be told that something was shown.
    fn wake(&self, bench: &mut Bench<'_>) {
        // What was shown is seen by whoever is not seen to sleep.
        fence(Ordering::SeqCst);
        for (rank, ticket) in (0..).zip(&self.boards) {
            if rank != self.rank as u32
                && bench.host.get(ticket.nonce).is_some_and(|(board, _)| board.is_to_be_woken())
            {
                bench.wake.push(rank);
            }
        }
    }
}

enum Step {
    Moved,
    Waits,
    Ended,
}

/// Elements that become part of this rank's output.
struct Copy {
    from: Option<(Mr, u64)>,
    at: usize,
    to: std::ops::Range<usize>,
}

impl Copy {
    fn new(from: Option<(Mr, u64)>, at: usize, to: std::ops::Range<usize>) -> Copy {
        Copy { from, at, to }
    }
}

/// Bytes that are computed in one go.
const PIECE: usize = 256 << 10;

impl Work {
    fn bytes(&self, length: usize) -> usize {
        length * self.job.what.data_type.size()
    }

    /// Whether the elements are shown with the operation: the same at all ranks.
    fn is_inline(&self) -> bool {
        let Job { call, count, ends, .. } = &self.job;
        let each = ends.as_ref().map_or(*count, |ends| ends.last().copied().unwrap_or(0));
        let ranks = self.inputs.len();
        let length = match call.kind {
            Kind::ReduceScatter | Kind::AllToAll | Kind::Scatter if ends.is_none() => {
                each.saturating_mul(ranks)
            }
            _ => each,
        };
        self.bytes(length) <= INLINE
    }

    /// Elements of the input and output of a rank.
    fn lengths_of(&self, rank: usize, size: usize) -> (usize, usize) {
        let Job { call, count, root, ends, .. } = &self.job;
        let blocks = ends.as_deref().map_or(Blocks::Equal { len: *count }, Blocks::Ends);
        let (block, all) = (blocks.block(rank).len(), blocks.blocks(0..size).len());
        let if_root = |length: usize| if rank == *root { length } else { 0 };
        match call.kind {
            Kind::AllReduce => (*count, *count),
            Kind::Reduce => (*count, if_root(*count)),
            Kind::ReduceScatter => (all, block),
            Kind::AllGather => (block, all),
            Kind::Gather => (block, if_root(all)),
            Kind::Broadcast => (if_root(*count), *count),
            Kind::Scatter => (if_root(all), block),
            Kind::AllToAll => (count * size, count * size),
            _ => (0, 0),
        }
    }
}

/// The parts of so many bytes, each of which has a length that a request can have.
fn parts((mr, offset): (Mr, u64), bytes: usize) -> impl Iterator<Item = Sge> {
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
