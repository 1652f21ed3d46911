//! Recursive halving and doubling: in each step the members of a group exchange with those of its other half, and groups
//! are half as large in the next step. Fewest bytes, and about log₂ n steps, for any number of ranks.
//!
//! In a group with an odd number of members the lower half is larger by one. Member `j` of the upper half exchanges with
//! member `j` of the lower half; the odd member sends its elements for the upper half to the last member there, which then
//! exchanges with two.

use std::ops::Range;

use super::{Blocks, Builder, Finish, Operand, Place, Spot, Team, chunks};

/// The exchange of a member in a step of the halving; the doubling does the reverse.
struct Level {
    /// The half of this member, and the other one.
    own: Range<usize>,
    other: Range<usize>,
    /// The member that gets the elements of the other half.
    to: usize,
    /// The members that send elements of this half.
    from: Range<usize>,
}

/// The levels of a member, the largest group first.
fn levels(size: usize, index: usize) -> Vec<Level> {
    let mut levels = Vec::new();
    let mut group = 0..size;
    while group.len() > 1 {
        let middle = group.start + group.len().div_ceil(2);
        let (lower, upper) = (group.start..middle, middle..group.end);
        let level = if lower.contains(&index) {
            let place = index - lower.start;
            let to = upper.start + place.min(upper.len() - 1);
            let twin = upper.start + place;
            let from = if twin < upper.end { twin..twin + 1 } else { 0..0 };
            Level { own: lower, other: upper, to, from }
        } else {
            let place = index - upper.start;
            let twin = lower.start + place;
            // The last one also receives from the odd member.
            let from = if place + 1 == upper.len() { twin..lower.end } else { twin..twin + 1 };
            Level { own: upper, other: lower, to: twin, from }
        };
        group = level.own.clone();
        levels.push(level);
    }
    levels
}

/// Member `i` gets block `i` of `source`, reduced, in `result`. Partial results are in `partial`: elements of the output or
/// the scratch memory with the layout of all blocks in `source`.
///
/// In each step the member's own elements are reduced between those of members before it and those of members after it.
fn reduce_scatter_steps(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    partial: impl Fn(usize) -> Spot,
    result: impl Fn(usize) -> Spot,
    finish: Finish,
) {
    let index = team.index();
    let levels = levels(team.size(), index);
    // The member's own elements are those of the source until it has received some.
    let mut has_partial = false;
    for (depth, level) in levels.iter().enumerate() {
        let own = |at: usize| if has_partial { partial(at) } else { source.at(at) };
        for part in chunks(blocks.blocks(level.other.clone()), b.chunk) {
            b.send(team.rank(level.to), own(part.start), part.len());
        }
        if level.from.is_empty() {
            continue;
        }
        // In the last level, of two members, both receive.
        let is_last = depth + 1 == levels.len();
        for part in chunks(blocks.blocks(level.own.clone()), b.chunk) {
            let operands = in_order(team, level, Operand::Own(own(part.start)));
            let to = if is_last { result(part.start) } else { partial(part.start) };
            b.combine(to, part.len(), &operands, if is_last { finish } else { Finish::No });
        }
        has_partial = true;
    }
}

/// The member's own elements, between those received from members before and after it.
fn in_order(team: Team<'_>, level: &Level, own: Operand) -> Vec<Operand> {
    let arrival = |member: usize| Operand::Arrival(team.rank(member));
    let (before, behind): (Vec<usize>, Vec<usize>) =
        level.from.clone().partition(|member| *member < team.index());
    before.into_iter().map(arrival).chain([own]).chain(behind.into_iter().map(arrival)).collect()
}

/// Member `i` has block `i` at `own`; afterwards all members have all blocks in the output.
fn all_gather_steps(b: &mut Builder<'_>, team: Team<'_>, blocks: Blocks<'_>, own: impl Fn(usize) -> Spot) {
    let levels = levels(team.size(), team.index());
    for level in levels.iter().rev() {
        let is_own = level.own.len() == 1;
        for part in chunks(blocks.blocks(level.own.clone()), b.chunk) {
            let from = if is_own { own(part.start) } else { Place::Output.at(part.start) };
            for member in level.from.clone() {
                b.send_to(team.rank(member), from, part.len(), part.start);
            }
        }
        for part in chunks(blocks.blocks(level.other.clone()), b.chunk) {
            b.receive(team.rank(level.to), part.start, part.len());
        }
    }
}

/// The elements `start..start + len` of `source`, reduced, in the output of all members.
pub(crate) fn all_reduce(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    start: usize,
    len: usize,
    finish: Finish,
) {
    let blocks = Blocks::Cut { start, len, parts: team.size() };
    let there = |at| Place::Output.at(at);
    reduce_scatter_steps(b, team, source, blocks, there, there, finish);
    all_gather_steps(b, team, blocks, there);
}

/// Block `i` of `source`, reduced, at the start of the output of member `i`.
pub(crate) fn reduce_scatter(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    finish: Finish,
) {
    // The largest partial result is that of the first half.
    let first =
        levels(team.size(), team.index()).first().map_or(0..0, |level| blocks.blocks(level.own.clone()));
    let room = b.scratch(first.len());
    let own = blocks.block(team.index());
    let partial = |at: usize| room.place.at(room.at + at - first.start);
    let result = |at: usize| Place::Output.at(at - own.start);
    reduce_scatter_steps(b, team, source, blocks, partial, result, finish);
}

/// Block `i` is the input of member `i`; all members get all blocks in the output.
pub(crate) fn all_gather(b: &mut Builder<'_>, team: Team<'_>, source: Place, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    b.copy(Place::Output.at(own.start), source.at(0), own.len());
    all_gather_steps(b, team, blocks, |at| source.at(at - own.start));
}
