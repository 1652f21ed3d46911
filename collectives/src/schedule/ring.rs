//! The ring: each rank sends to the next one alone. Least bytes, most steps: for long operations.

use std::ops::Range;

use super::{Blocks, Builder, Finish, Operand, Place, Spot, Team, chunks};

/// Reduces the blocks of `source`, each in the order of the ring, so that member `i` ends with block `i + last` in `to(block)`.
///
/// Block `b` is `((x[b − last + 1] + x[b − last + 2]) + …) + x[b − last]`, indices modulo the size. `partial` says where a partial
/// result of a block goes in a step.
fn reduce_scatter_steps(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    last: usize,
    place: impl Fn(usize, usize) -> Spot,
    finish: Finish,
) {
    let (size, index) = (team.size(), team.index());
    let (left, right) = neighbours(team);
    for step in 0..size - 1 {
        // Block `index + last` comes last.
        let sent = (index + last + 2 * size - 1 - step) % size;
        let received = (sent + size - 1) % size;
        for (nth, part) in chunks(blocks.block(sent), b.chunk).enumerate() {
            let from = match step {
                0 => source.at(part.start),
                _ => shifted(place(sent, step - 1), nth * b.chunk),
            };
            b.send(right, from, part.len());
        }
        let whole = step == size - 2;
        for (nth, part) in chunks(blocks.block(received), b.chunk).enumerate() {
            let operands = [Operand::Arrival(left), Operand::Own(source.at(part.start))];
            let to = shifted(place(received, step), nth * b.chunk);
            b.combine(to, part.len(), &operands, if whole { finish } else { Finish::No });
        }
    }
}

/// Member `i` has block `i + first` in `from(block)`; all have all in the output after it, each block where it is.
fn all_gather_steps(
    b: &mut Builder<'_>,
    team: Team<'_>,
    blocks: Blocks<'_>,
    first: usize,
    own: impl Fn(usize) -> Spot,
) {
    let (size, index) = (team.size(), team.index());
    let (left, right) = neighbours(team);
    for step in 0..size - 1 {
        let sent = (index + first + size - step) % size;
        let received = (sent + size - 1) % size;
        for part in chunks(blocks.block(sent), b.chunk) {
            let from = match step {
                0 => own(part.start),
                _ => Place::Output.at(part.start),
            };
            b.send_to(right, from, part.len(), part.start);
        }
        take(b, left, blocks.block(received));
    }
}

/// The elements `start..start + len` of `source`, reduced, in the output of all. Segment `s` is reduced from left to right from
/// member `s` on.
pub(crate) fn all_reduce(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    start: usize,
    len: usize,
    finish: Finish,
) {
    let blocks = Blocks::Cut { start, len, parts: team.size() };
    let place = |block: usize, _| Place::Output.at(blocks.block(block).start);
    reduce_scatter_steps(b, team, source, blocks, 1, place, finish);
    all_gather_steps(b, team, blocks, 1, |at| Place::Output.at(at));
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
    reduce_scatter_steps(b, team, source, blocks, 0, place, finish);
}

/// Block `i` is the input of member `i`; all have all blocks in the output.
pub(crate) fn all_gather(b: &mut Builder<'_>, team: Team<'_>, source: Place, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    b.copy(Place::Output.at(own.start), source.at(0), own.len());
    all_gather_steps(b, team, blocks, 0, |at| source.at(at - own.start));
}

/// Elements of `source` at member 0, along the ring to all.
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

/// Elements of all, reduced along the ring from member 1 to member 0: `((x[1] + x[2]) + …) + x[0]`.
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

/// The members before and behind this one.
pub(super) fn neighbours(team: Team<'_>) -> (u32, u32) {
    let (size, index) = (team.size(), team.index());
    (team.rank((index + size - 1) % size), team.rank((index + 1) % size))
}

/// Sends elements to the same place of the peer's output.
pub(super) fn pass_on(b: &mut Builder<'_>, peer: u32, from: Place, block: Range<usize>) {
    for part in chunks(block, b.chunk) {
        b.send_to(peer, from.at(part.start), part.len(), part.start);
    }
}

/// What a peer passes on.
pub(super) fn take(b: &mut Builder<'_>, peer: u32, block: Range<usize>) {
    for part in chunks(block, b.chunk) {
        b.receive(peer, part.start, part.len());
    }
}

fn shifted(spot: Spot, by: usize) -> Spot {
    spot.place.at(spot.at + by)
}
