//! The ring: each rank sends only to the next one. Fewest bytes, most steps: for long operations.

use std::ops::Range;

use super::{Blocks, Builder, Finish, Operand, Place, Spot, Team, chunks};

/// A reduce-scatter of the blocks of `source`, each in the order of the ring, so that member `i` gets block `i + last` in
/// `place(block)`.
///
/// Block `b` is `((x[b − last + 1] + x[b − last + 2]) + …) + x[b − last]`, indices modulo the size. `place` returns the
/// place of a block's partial result in a step.
struct ReduceScatter<'a, P> {
    team: Team<'a>,
    source: Place,
    blocks: Blocks<'a>,
    last: usize,
    place: P,
    finish: Finish,
}

impl<P: Fn(usize, usize) -> Spot> ReduceScatter<'_, P> {
    /// One of `size - 1` steps, for these chunks of each block.
    fn step(&self, b: &mut Builder<'_>, step: usize, numbers: Range<usize>) {
        let (size, index) = (self.team.size(), self.team.index());
        let (left, right) = neighbours(self.team);
        // Block `index + last` is the last one.
        let sent = (index + self.last + 2 * size - 1 - step) % size;
        let received = (sent + size - 1) % size;
        for (nth, part) in some(b, self.blocks.block(sent), &numbers) {
            let from = match step {
                0 => self.source.at(part.start),
                _ => shifted((self.place)(sent, step - 1), nth * b.chunk),
            };
            b.send(right, from, part.len());
        }
        let whole = step == size - 2;
        for (nth, part) in some(b, self.blocks.block(received), &numbers) {
            let operands = [Operand::Arrival(left), Operand::Own(self.source.at(part.start))];
            let to = shifted((self.place)(received, step), nth * b.chunk);
            b.combine(to, part.len(), &operands, if whole { self.finish } else { Finish::No });
        }
    }
}

/// One of `size - 1` steps of an all-gather, for these chunks of each block. Member `i` has block `i + first` in
/// `own(block)`; afterwards all members have all blocks in the output, each at its position.
fn all_gather_step(
    b: &mut Builder<'_>,
    team: Team<'_>,
    blocks: Blocks<'_>,
    first: usize,
    own: impl Fn(usize) -> Spot,
    (step, numbers): (usize, Range<usize>),
) {
    let (size, index) = (team.size(), team.index());
    let (left, right) = neighbours(team);
    let sent = (index + first + size - step) % size;
    let received = (sent + size - 1) % size;
    for (_, part) in some(b, blocks.block(sent), &numbers) {
        let from = match step {
            0 => own(part.start),
            _ => Place::Output.at(part.start),
        };
        b.send_to(right, from, part.len(), part.start);
    }
    for (_, part) in some(b, blocks.block(received), &numbers) {
        b.receive(left, part.start, part.len());
    }
}

/// The chunks of a block with these numbers.
fn some(
    b: &Builder<'_>,
    block: Range<usize>,
    numbers: &Range<usize>,
) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
    chunks(block, b.chunk).enumerate().skip(numbers.start).take(numbers.len())
}

/// All chunks.
const ALL: Range<usize> = 0..usize::MAX;

/// The elements `start..start + len` of `source`, reduced, in the output of all members. Segment `s` is reduced from left
/// to right from member `s` on.
///
/// Step by step, or in windows of chunks, each window one step behind the previous one: complete results are distributed
/// while other chunks are reduced.
pub(crate) fn all_reduce(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    start: usize,
    len: usize,
    finish: Finish,
) {
    let blocks = Blocks::Cut { start, len, parts: team.size() };
    let place = |block: usize, _: usize| Place::Output.at(blocks.block(block).start);
    let reduce_scatter = ReduceScatter { team, source, blocks, last: 1, place, finish };
    let half = team.size() - 1;
    // No block is longer than block 0.
    let windows = blocks.block(0).len().div_ceil(b.chunk).div_ceil(b.window);
    for turn in 0..windows + 2 * half {
        for step in 0..2 * half {
            let Some(window) = turn.checked_sub(step).filter(|window| *window < windows) else { continue };
            let first = window * b.window;
            let numbers = first..first.saturating_add(b.window);
            match step.checked_sub(half) {
                None => reduce_scatter.step(b, step, numbers),
                Some(step) => {
                    all_gather_step(b, team, blocks, 1, |at| Place::Output.at(at), (step, numbers));
                }
            }
        }
    }
}

/// Block `i` of `source`, reduced, at the start of the output of member `i`. It is reduced from left to right from member
/// `i + 1` on.
pub(crate) fn reduce_scatter(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    finish: Finish,
) {
    let size = team.size();
    let longest = (0..size).map(|block| blocks.block(block).len()).max().unwrap_or(0);
    let rooms = [b.scratch(longest), b.scratch(if size > 3 { longest } else { 0 })];
    let place = |_, step: usize| if step == size - 2 { Place::Output.at(0) } else { rooms[step % 2] };
    let reduce_scatter = ReduceScatter { team, source, blocks, last: 0, place, finish };
    (0..size - 1).for_each(|step| reduce_scatter.step(b, step, ALL));
}

/// Block `i` is the input of member `i`; all members get all blocks in the output.
pub(crate) fn all_gather(b: &mut Builder<'_>, team: Team<'_>, source: Place, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    b.copy(Place::Output.at(own.start), source.at(0), own.len());
    for step in 0..team.size() - 1 {
        all_gather_step(b, team, blocks, 0, |at| source.at(at - own.start), (step, ALL));
    }
}

/// Elements of `source` at member 0, along the ring to all members.
pub(crate) fn broadcast(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize) {
    let (size, index) = (team.size(), team.index());
    if index == 0 {
        b.copy(Place::Output.at(0), source.at(0), len);
    }
    for part in chunks(0..len, b.chunk) {
        if index > 0 {
            b.receive(team.rank(index - 1), part.start, part.len());
        }
        if index + 1 < size {
            let from = if index == 0 { source.at(part.start) } else { Place::Output.at(part.start) };
            b.send_to(team.rank(index + 1), from, part.len(), part.start);
        }
    }
}

/// The elements of all members, reduced along the ring from member 1 to member 0: `((x[1] + x[2]) + …) + x[0]`.
pub(crate) fn reduce(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize, finish: Finish) {
    let index = team.index();
    let (left, right) = neighbours(team);
    let rooms = if index > 1 {
        [b.scratch(b.chunk.min(len)), b.scratch(b.chunk.min(len))]
    } else {
        [Place::Scratch.at(0); 2]
    };
    for (nth, part) in chunks(0..len, b.chunk).enumerate() {
        let own = source.at(part.start);
        match index {
            0 => {
                let operands = [Operand::Arrival(left), Operand::Own(own)];
                b.combine(Place::Output.at(part.start), part.len(), &operands, finish);
            }
            1 => {
                b.send(right, own, part.len());
            }
            _ => {
                let room = rooms[nth % 2];
                b.combine(room, part.len(), &[Operand::Arrival(left), Operand::Own(own)], Finish::No);
                b.send(right, room, part.len());
            }
        }
    }
}

/// The members before and after this one.
pub(super) fn neighbours(team: Team<'_>) -> (u32, u32) {
    let (size, index) = (team.size(), team.index());
    (team.rank((index + size - 1) % size), team.rank((index + 1) % size))
}

/// Sends elements to the same position in the peer's output.
pub(super) fn pass_on(b: &mut Builder<'_>, peer: u32, from: Place, block: Range<usize>) {
    for part in chunks(block, b.chunk) {
        b.send_to(peer, from.at(part.start), part.len(), part.start);
    }
}

/// Receives a peer's [`pass_on`].
pub(super) fn take(b: &mut Builder<'_>, peer: u32, block: Range<usize>) {
    for part in chunks(block, b.chunk) {
        b.receive(peer, part.start, part.len());
    }
}

fn shifted(spot: Spot, by: usize) -> Spot {
    spot.place.at(spot.at + by)
}
