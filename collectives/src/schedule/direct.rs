//! Direct exchange: a rank that has elements sends them to each rank that needs them. Fewest steps: for short operations,
//! and for those in which each pair of ranks exchanges different elements.

use std::ops::Range;

use super::{Blocks, Builder, Finish, Operand, Place, Team, chunks};

/// Each member sends all its elements to all others, and each reduces all, in the order of the members.
pub(crate) fn all_reduce(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize, finish: Finish) {
    for part in chunks(0..len, b.chunk) {
        for peer in others(team) {
            b.send(peer, source.at(part.start), part.len());
        }
        let operands = in_order(team, Operand::Own(source.at(part.start)));
        b.combine(Place::Output.at(part.start), part.len(), &operands, finish);
    }
}

/// Reduce-scatter, then all-gather, both direct. An element is reduced in the order of the members.
pub(crate) fn all_reduce_in_two_steps(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    start: usize,
    len: usize,
    finish: Finish,
) {
    let blocks = Blocks::Cut { start, len, parts: team.size() };
    let own = blocks.block(team.index());
    reduce_scatter_to(b, team, source, blocks, own.start, finish);
    gather_blocks(b, team, Place::Output, own.start, blocks);
}

/// Block `i` of `source`, reduced in the order of the members, at the start of the output of member `i`.
pub(crate) fn reduce_scatter(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    finish: Finish,
) {
    reduce_scatter_to(b, team, source, blocks, 0, finish);
}

/// As [`reduce_scatter`], with the result at `at` in the output.
pub(super) fn reduce_scatter_to(
    b: &mut Builder<'_>,
    team: Team<'_>,
    source: Place,
    blocks: Blocks<'_>,
    at: usize,
    finish: Finish,
) {
    let own = blocks.block(team.index());
    for (place, peer) in other_places(team) {
        for part in chunks(blocks.block(place), b.chunk) {
            b.send(peer, source.at(part.start), part.len());
        }
    }
    for part in chunks(own.clone(), b.chunk) {
        let operands = in_order(team, Operand::Own(source.at(part.start)));
        b.combine(Place::Output.at(at + part.start - own.start), part.len(), &operands, finish);
    }
}

/// Block `i` is the input of member `i`; all members get all blocks in the output.
pub(crate) fn all_gather(b: &mut Builder<'_>, team: Team<'_>, source: Place, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    b.copy(Place::Output.at(own.start), source.at(0), own.len());
    gather_blocks(b, team, source, 0, blocks);
}

/// This member's block is at `at` of `from`; all members get all blocks in the output.
pub(super) fn gather_blocks(b: &mut Builder<'_>, team: Team<'_>, from: Place, at: usize, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    // The first chunk to all, then the second: no member waits for the last byte of another one's message.
    for part in chunks(own.clone(), b.chunk) {
        for peer in others(team) {
            b.send_to(peer, from.at(at + part.start - own.start), part.len(), part.start);
        }
    }
    for (place, peer) in other_places(team) {
        for part in chunks(blocks.block(place), b.chunk) {
            b.receive(peer, part.start, part.len());
        }
    }
}

/// Block `j` of member `i`'s input becomes block `i` of member `j`'s output.
pub(crate) fn all_to_all(b: &mut Builder<'_>, team: Team<'_>, sent: Blocks<'_>, received: Blocks<'_>) {
    let (size, index) = (team.size(), team.index());
    let (from, to) = (sent.block(index), received.block(index));
    b.copy(Place::Output.at(to.start), Place::Input.at(from.start), from.len());
    for distance in 1..size {
        let (to, from) = ((index + distance) % size, (index + size - distance) % size);
        send_block(b, team.rank(to), sent.block(to));
        receive_block(b, team.rank(from), received.block(from));
    }
}

/// Member 0 sends all elements to each.
pub(crate) fn broadcast(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize) {
    if team.index() == 0 {
        b.copy(Place::Output.at(0), source.at(0), len);
    }
    for part in chunks(0..len, b.chunk) {
        if team.index() > 0 {
            b.receive(team.rank(0), part.start, part.len());
            continue;
        }
        for peer in others(team) {
            b.send_to(peer, source.at(part.start), part.len(), part.start);
        }
    }
}

/// All members send to member `root`, which reduces in the order of the members.
pub(crate) fn reduce(
    b: &mut Builder<'_>,
    team: Team<'_>,
    root: usize,
    source: Place,
    len: usize,
    finish: Finish,
) {
    for part in chunks(0..len, b.chunk) {
        if team.index() != root {
            b.send(team.rank(root), source.at(part.start), part.len());
            continue;
        }
        let operands = in_order(team, Operand::Own(source.at(part.start)));
        b.combine(Place::Output.at(part.start), part.len(), &operands, finish);
    }
}

/// The input of member `i` becomes block `i` of the output of member `root`.
pub(crate) fn gather(b: &mut Builder<'_>, team: Team<'_>, root: usize, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    if team.index() != root {
        return send_block(b, team.rank(root), 0..own.len());
    }
    b.copy(Place::Output.at(own.start), Place::Input.at(0), own.len());
    for (place, peer) in other_places(team) {
        receive_block(b, peer, blocks.block(place));
    }
}

/// Block `i` of the input of member `root` becomes the output of member `i`.
pub(crate) fn scatter(b: &mut Builder<'_>, team: Team<'_>, root: usize, blocks: Blocks<'_>) {
    let own = blocks.block(team.index());
    if team.index() != root {
        return receive_block(b, team.rank(root), 0..own.len());
    }
    b.copy(Place::Output.at(0), Place::Input.at(own.start), own.len());
    for (place, peer) in other_places(team) {
        send_block(b, peer, blocks.block(place));
    }
}

/// Sends a block of this rank's input to a peer, which calls [`receive_block`]; only the peer knows the destination.
pub(crate) fn send_block(b: &mut Builder<'_>, peer: u32, block: Range<usize>) {
    for part in chunks(block.clone(), b.chunk) {
        b.send_to(peer, Place::Input.at(part.start), part.len(), part.start - block.start);
    }
}

/// Receives a peer's [`send_block`] as this block of the output.
pub(crate) fn receive_block(b: &mut Builder<'_>, peer: u32, block: Range<usize>) {
    b.lands_from(peer, block.start);
    for part in chunks(block, b.chunk) {
        b.receive(peer, part.start, part.len());
    }
}

/// A barrier: no member ends before all have started. In step `k` each member learns of those up to 2ᵏ⁺¹ before it.
pub(crate) fn barrier(b: &mut Builder<'_>, team: Team<'_>) {
    let (size, index) = (team.size(), team.index());
    let (mut distance, mut heard) = (1, Vec::new());
    while distance < size {
        // Depends on all messages received so far: an earlier one may be late.
        heard.iter().for_each(|step| b.after(*step));
        b.send(team.rank((index + distance) % size), Place::Input.at(0), 0);
        let from = team.rank((index + size - distance) % size);
        heard.push(b.combine(Place::Output.at(0), 0, &[Operand::Arrival(from)], Finish::No));
        distance *= 2;
    }
}

/// The other members, starting after this one, so that not all start with the same one.
fn other_places(team: Team<'_>) -> impl Iterator<Item = (usize, u32)> {
    let (size, index) = (team.size(), team.index());
    (1..size).map(move |distance| (index + distance) % size).map(move |place| (place, team.rank(place)))
}

fn others(team: Team<'_>) -> impl Iterator<Item = u32> {
    other_places(team).map(|(_, rank)| rank)
}

/// One operand of each member.
fn in_order(team: Team<'_>, own: Operand) -> Vec<Operand> {
    let operand = |place| if place == team.index() { own } else { Operand::Arrival(team.rank(place)) };
    (0..team.size()).map(operand).collect()
}
