//! Builds a [`Schedule`], and determines which steps must precede which.

use std::ops::Range;

use super::{Finish, Operand, Place, Schedule, Shape, Spot, Step};

/// Adds the steps of one rank in the order of a sequential program.
///
/// A step follows the last writes of the elements that it reads, and the last reads and writes of those that it writes.
/// (Writes by a peer can't be delayed in this way: an algorithm lets elements land only if the peer has them because this
/// rank has sent the previous contents.)
pub(crate) struct Builder<'a> {
    schedule: &'a mut Schedule,
    /// The most elements of a message.
    pub(crate) chunk: usize,
    /// Messages of more elements are written to their destination (they land).
    lands_above: usize,
    /// Chunks of a window.
    pub(crate) window: usize,
    /// The positions of input and output, in one space of elements, if they share memory.
    shared: Option<Shared>,
    cells: [Cells; 3],
    found: Vec<u32>,
}

/// The first elements of input and output, counted from the first of both.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shared {
    pub(crate) input: usize,
    pub(crate) output: usize,
}

/// The last reads and writes of a memory, in cells of `grain` elements.
#[derive(Default)]
struct Cells {
    heads: Vec<u32>,
    entries: Vec<Entry>,
}

struct Entry {
    step: u32,
    range: Range<usize>,
    writes: bool,
    next: u32,
}

const NONE: u32 = u32::MAX;

/// Elements, and their memory.
type Touched = (usize, Range<usize>);

impl<'a> Builder<'a> {
    /// Builds `schedule`, which is empty. `shared` is set if input and output share memory.
    pub(crate) fn new(schedule: &'a mut Schedule, shape: Shape, shared: Option<Shared>) -> Builder<'a> {
        let Shape { chunk, lands_above, window } = shape;
        debug_assert!(chunk > 0 && schedule.steps.is_empty());
        Builder { schedule, chunk, lands_above, window, shared, cells: Default::default(), found: Vec::new() }
    }

    /// Whether these are the same elements.
    pub(crate) fn is_same(&self, a: Spot, b: Spot) -> bool {
        self.place(a) == self.place(b)
    }

    /// Allocates `len` elements of scratch memory.
    pub(crate) fn scratch(&mut self, len: usize) -> Spot {
        let at = self.schedule.scratch;
        self.schedule.scratch += len;
        Place::Scratch.at(at)
    }

    /// Sends elements that the peer combines.
    pub(crate) fn send(&mut self, peer: u32, from: Spot, len: usize) -> u32 {
        self.reads(from, len);
        self.push(Step::Send { peer, from, len, lands: None })
    }

    /// The elements that this peer writes are counted from this element of the output; from the first one by default.
    pub(crate) fn lands_from(&mut self, peer: u32, at: usize) {
        self.schedule.bases.push((peer, at));
    }

    /// Sends elements to the peer's output, from `at` on.
    pub(crate) fn send_to(&mut self, peer: u32, from: Spot, len: usize, at: usize) -> u32 {
        let lands = Some(at).filter(|_| len > self.lands_above);
        self.reads(from, len);
        self.push(Step::Send { peer, from, len, lands })
    }

    /// Receives the elements of a peer's [`send_to`](Builder::send_to).
    pub(crate) fn receive(&mut self, peer: u32, at: usize, len: usize) -> u32 {
        if len > self.lands_above {
            self.writes(Place::Output.at(at), len);
            self.push(Step::Land { peer, at, len })
        } else {
            self.combine(Place::Output.at(at), len, &[Operand::Arrival(peer)], Finish::No)
        }
    }

    /// Reduces the operands into `to`, from left to right.
    pub(crate) fn combine(&mut self, to: Spot, len: usize, operands: &[Operand], finish: Finish) -> u32 {
        for operand in operands {
            if let Operand::Own(spot) = operand {
                self.reads(*spot, len);
            }
        }
        self.writes(to, len);
        let start = self.schedule.operands.len() as u32;
        self.schedule.operands.extend_from_slice(operands);
        let operands = start..self.schedule.operands.len() as u32;
        self.push(Step::Combine { to, len, operands, finish })
    }

    /// Copies elements, unless source and target are the same.
    pub(crate) fn copy(&mut self, to: Spot, from: Spot, range: usize) {
        if self.is_same(to, from) {
            return;
        }
        for part in super::chunks(0..range, self.chunk) {
            let (to, from) = (to.place.at(to.at + part.start), from.place.at(from.at + part.start));
            self.combine(to, part.len(), &[Operand::Own(from)], Finish::No);
        }
    }

    /// The next step also follows this one.
    pub(crate) fn after(&mut self, step: u32) {
        self.found.push(step);
    }

    /// Adds a step without its dependencies.
    fn push(&mut self, step: Step) -> u32 {
        let index = self.schedule.steps.len() as u32;
        let (reads, writes) = self.touched(&step);
        for (place, range) in reads {
            self.note(place, range, index, false);
        }
        if let Some((place, range)) = writes {
            self.note(place, range, index, true);
        }
        self.found.sort_unstable();
        self.found.dedup();
        let start = self.schedule.after.len() as u32;
        self.schedule.after.append(&mut self.found);
        self.schedule.bounds.push(start..self.schedule.after.len() as u32);
        self.schedule.steps.push(step);
        index
    }

    /// The elements that a step reads and writes.
    fn touched(&self, step: &Step) -> (Vec<Touched>, Option<Touched>) {
        let at = |spot: Spot, len: usize| {
            let (place, at) = self.place(spot);
            (place, at..at + len)
        };
        match step {
            Step::Send { from, len, .. } => (vec![at(*from, *len)], None),
            Step::Land { at: to, len, .. } => (Vec::new(), Some(at(Place::Output.at(*to), *len))),
            Step::Combine { to, len, operands, .. } => {
                let own = self.schedule.operands(operands).iter().filter_map(|operand| match operand {
                    Operand::Own(spot) => Some(at(*spot, *len)),
                    Operand::Arrival(_) => None,
                });
                (own.collect(), Some(at(*to, *len)))
            }
        }
    }

    /// The memory of a spot, and the position in it: input and output are one memory if they share it.
    fn place(&self, spot: Spot) -> (usize, usize) {
        match (spot.place, self.shared) {
            (Place::Scratch, _) => (2, spot.at),
            (Place::Input, Some(shared)) => (0, shared.input + spot.at),
            (Place::Output, Some(shared)) => (0, shared.output + spot.at),
            (Place::Input, None) => (0, spot.at),
            (Place::Output, None) => (1, spot.at),
        }
    }

    fn reads(&mut self, spot: Spot, len: usize) {
        self.conflicts(spot, len, |entry| entry.writes);
    }

    fn writes(&mut self, spot: Spot, len: usize) {
        self.conflicts(spot, len, |_| true);
    }

    fn conflicts(&mut self, spot: Spot, len: usize, matters: impl Fn(&Entry) -> bool) {
        let (place, at) = self.place(spot);
        let range = at..at + len;
        let cells = &self.cells[place];
        for cell in cells_of(&range, self.chunk) {
            let mut next = cells.heads.get(cell).copied().unwrap_or(NONE);
            while let Some(entry) = cells.entries.get(next as usize) {
                if overlap(&entry.range, &range) && matters(entry) {
                    self.found.push(entry.step);
                }
                next = entry.next;
            }
        }
    }

    /// Records the accesses of a step. Earlier reads and writes of the elements are irrelevant to steps that follow a
    /// write.
    fn note(&mut self, place: usize, range: Range<usize>, step: u32, writes: bool) {
        let chunk = self.chunk;
        let cells = &mut self.cells[place];
        for cell in cells_of(&range, chunk) {
            if cells.heads.len() <= cell {
                cells.heads.resize(cell + 1, NONE);
            }
            if writes {
                let bounds = cell * chunk..(cell + 1).saturating_mul(chunk);
                cells.forget(cell, &clip(&range, &bounds), &bounds);
            }
            let next = cells.heads[cell];
            cells.heads[cell] = cells.entries.len() as u32;
            cells.entries.push(Entry { step, range: range.clone(), writes, next });
        }
    }
}

impl Cells {
    /// Removes the entries of a cell that `range` covers, as far as they are in the cell.
    fn forget(&mut self, cell: usize, range: &Range<usize>, bounds: &Range<usize>) {
        let mut kept = NONE;
        let mut next = self.heads[cell];
        while next != NONE {
            let entry = &mut self.entries[next as usize];
            let behind = entry.next;
            let there = clip(&entry.range, bounds);
            if there.start < range.start || there.end > range.end {
                entry.next = kept;
                kept = next;
            }
            next = behind;
        }
        self.heads[cell] = kept;
    }
}

fn cells_of(range: &Range<usize>, grain: usize) -> Range<usize> {
    if range.is_empty() { 0..0 } else { range.start / grain..(range.end - 1) / grain + 1 }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

fn clip(range: &Range<usize>, bounds: &Range<usize>) -> Range<usize> {
    range.start.max(bounds.start)..range.end.min(bounds.end)
}
