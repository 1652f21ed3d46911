//! The messages and reductions of each rank in an operation: pure arithmetic, without IO and without time.
//!
//! A [`Schedule`] is one rank's part: a list of [`Step`]s over the operation's input, its output, and scratch memory. Steps
//! that send to one peer, and steps that receive from one peer, are executed in list order; any other step starts when the
//! steps that must precede it are done. The lists of two ranks match: the messages that one sends to the other are those
//! that the other receives, in number, order, length and kind.
//!
//! A receiving step has two forms. Data to reduce, and short data, arrives in memory of the channel and is an operand of a
//! [`Step::Combine`]. Long data that is only moved is written to its destination by the sender ([`Step::Land`]).
//!
//! Each algorithm has a file of its own. It lists steps in the order of a sequential program; [`Builder`]
//! (`schedule/builder.rs`) derives the necessary order from the elements that the steps read and write. `plan.rs` has the names of
//! the algorithms and the operations of each, and calls them. `tests.rs` executes every such pair on the ranks of
//! `simulation.rs`, `collectives/tests/products.rs` with real ranks.

mod builder;
mod direct;
mod halving;
mod hierarchical;
mod plan;
mod ring;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

use builder::Builder;
pub(crate) use hierarchical::Hosts;
pub use plan::Algorithm;
pub(crate) use plan::{Seat, Shape, Task, plan};
pub(crate) use tree::position as position_in_tree;

/// A memory of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Place {
    /// The caller's input.
    Input,
    /// The caller's output.
    Output,
    /// Scratch memory of the operation, for partial results.
    Scratch,
}

/// Elements of a place, from `at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Spot {
    pub(crate) place: Place,
    pub(crate) at: usize,
}

impl Place {
    /// The elements from `at` on.
    pub(crate) fn at(self, at: usize) -> Spot {
        Spot { place: self, at }
    }
}

/// An operand of a [`Step::Combine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Operand {
    /// Elements of this rank.
    Own(Spot),
    /// The next message from this rank.
    Arrival(u32),
}

/// One step of a rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Sends `len` elements to a peer as one message. Done when they may be changed.
    Send {
        peer: u32,
        from: Spot,
        len: usize,
        /// The element of the peer's output where they are written, relative to the peer's [base](Schedule::base); `None`
        /// if they arrive in its channel.
        lands: Option<usize>,
    },
    /// The peer writes its next message to the output. Done when it has arrived.
    Land { peer: u32, at: usize, len: usize },
    /// `to = operand ⊕ operand ⊕ …`, from left to right; a copy if there is one operand.
    Combine {
        to: Spot,
        len: usize,
        /// A range of [`Schedule::operands`].
        operands: Range<u32>,
        /// The operation in addition to the reduction.
        finish: Finish,
    },
}

/// The operation of a [`Step::Combine`] in addition to the reduction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Finish {
    /// Nothing: a partial result, or a copy.
    No,
    /// The result is complete: an average is divided by the number of ranks.
    Whole,
    /// The only operand is multiplied by this rank's factor.
    Scale,
}

/// One rank's part in an operation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Schedule {
    pub(crate) steps: Vec<Step>,
    operands: Vec<Operand>,
    /// For each step, its part of `after`.
    bounds: Vec<Range<u32>>,
    after: Vec<u32>,
    /// The bases of peers whose elements are not counted from the first one.
    bases: Vec<(u32, usize)>,
    /// Elements of scratch memory.
    pub(crate) scratch: usize,
}

impl Schedule {
    /// The operands of a step.
    pub(crate) fn operands(&self, range: &Range<u32>) -> &[Operand] {
        &self.operands[range.start as usize..range.end as usize]
    }

    /// The steps that must be done before a step starts.
    pub(crate) fn after(&self, step: usize) -> &[u32] {
        let range = &self.bounds[step];
        &self.after[range.start as usize..range.end as usize]
    }

    /// The element of the output from which a peer's landing elements are counted.
    pub(crate) fn base(&self, peer: u32) -> usize {
        self.bases.iter().find(|(of, _)| *of == peer).map_or(0, |(_, at)| *at)
    }
}

/// The ranks that execute (a part of) an algorithm, in its order, and this rank's position among them.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Team<'a> {
    /// All ranks `0..size`; this one is `rank`, and positions are counted from `first` on.
    All { rank: usize, size: usize, first: usize },
    /// These ranks; this one has the position `index`.
    Some { index: usize, ranks: &'a [u32] },
}

impl Team<'_> {
    /// All ranks of a communicator.
    pub(crate) fn all(rank: usize, size: usize) -> Team<'static> {
        Team::All { rank, size, first: 0 }
    }

    /// The number of ranks.
    pub(crate) fn size(&self) -> usize {
        match self {
            Team::All { size, .. } => *size,
            Team::Some { ranks, .. } => ranks.len(),
        }
    }

    /// This rank's position.
    pub(crate) fn index(&self) -> usize {
        match *self {
            Team::All { rank, size, first } => (rank + size - first) % size,
            Team::Some { index, .. } => index,
        }
    }

    /// The rank at a position.
    pub(crate) fn rank(&self, index: usize) -> u32 {
        match *self {
            Team::All { size, first, .. } => ((index + first) % size) as u32,
            Team::Some { ranks, .. } => ranks[index],
        }
    }
}

/// How elements are divided into blocks, one for each member of a team.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Blocks<'a> {
    /// `range` divided into `parts` blocks whose lengths differ by at most one element, the longer ones first.
    Cut { start: usize, len: usize, parts: usize },
    /// Blocks of `len` elements, one after the other.
    Equal { len: usize },
    /// Consecutive blocks, given by their ends, that of block 0 first.
    Ends(&'a [usize]),
}

impl Blocks<'_> {
    /// The elements of a block; none for a block after the last one.
    pub(crate) fn block(&self, index: usize) -> Range<usize> {
        match *self {
            Blocks::Cut { start, len, parts } => {
                let (short, longer) = (len / parts, len % parts);
                let from = |index: usize| start + index * short + index.min(longer);
                from(index)..from(index + 1)
            }
            Blocks::Equal { len } => index * len..(index + 1) * len,
            Blocks::Ends(ends) => {
                let start = index.checked_sub(1).map_or(0, |before| ends[before]);
                start..ends[index]
            }
        }
    }

    /// The elements of blocks `blocks`.
    pub(crate) fn blocks(&self, blocks: Range<usize>) -> Range<usize> {
        if blocks.is_empty() {
            return 0..0;
        }
        self.block(blocks.start).start..self.block(blocks.end - 1).end
    }
}

/// The parts of `range`, `chunk` elements each except the last.
pub(crate) fn chunks(range: Range<usize>, chunk: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range.step_by(chunk).map(move |start| start..end.min(start.saturating_add(chunk)))
}
