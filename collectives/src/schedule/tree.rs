//! Two binary trees over all members except the root, each for half of the chunks. A leaf of one tree is not a leaf of
//! the other, so each member sends about as much as it receives. About 2 log₂ n steps, and all the bytes: for medium
//! lengths.

use std::ops::Range;

use super::{Builder, Finish, Operand, Place, Team, chunks};

/// The position of a member in a tree. Members count from 0, the root; the trees consist of members 1 to `size − 1`, in
/// order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) parent: Option<usize>,
    /// The children before and after it in the order of the members.
    pub(crate) children: [Option<usize>; 2],
}

/// The position of `member` in tree 0 or 1.
pub(crate) fn position(size: usize, member: usize, tree: usize) -> Position {
    let others = size - 1;
    // In the first tree each member has its own place; in the second, places are shifted so that odd ones, which are
    // leaves, become even.
    let place = |member: usize| match tree {
        0 => member,
        _ if others.is_multiple_of(2) => others + 1 - member,
        _ => member % others + 1,
    };
    let member_at = |place: usize| match tree {
        0 => place,
        _ if others.is_multiple_of(2) => others + 1 - place,
        _ => (place + others - 2) % others + 1,
    };
    if member == 0 {
        let top = (others != 0).then(|| member_at(top(others)));
        return Position { parent: None, children: [None, top] };
    }
    let own = place(member);
    let bit = own & own.wrapping_neg();
    let parent = if own == top(others) {
        0
    } else {
        let above = (own ^ bit) | (bit << 1);
        member_at(if above > others { own ^ bit } else { above })
    };
    let before = (bit > 1).then(|| member_at(own - bit / 2));
    let behind = {
        let mut half = bit / 2;
        while half > 0 && own + half > others {
            half /= 2;
        }
        (half > 0).then(|| member_at(own + half))
    };
    Position { parent: Some(parent), children: [before, behind] }
}

/// The top of an in-order tree of places 1 to `others`.
fn top(others: usize) -> usize {
    1 << others.ilog2()
}

fn trees(team: Team<'_>) -> [Position; 2] {
    [0, 1].map(|tree| position(team.size(), team.index(), tree))
}

/// The elements of all members, reduced, in the output of member 0. Each member adds its own elements between those of the
/// child before it and those of the child after it; the root's own are first.
pub(crate) fn reduce(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize, finish: Finish) {
    let room = |b: &mut Builder<'_>, position: &Position| {
        let is_inner = position.parent.is_some() && position.children != [None, None];
        is_inner.then(|| [b.scratch(b.chunk.min(len)), b.scratch(b.chunk.min(len))])
    };
    let trees = trees(team);
    let rooms = [room(b, &trees[0]), room(b, &trees[1])];
    for (nth, part) in chunks(0..len, b.chunk).enumerate() {
        let (tree, turn) = (nth % 2, nth / 2);
        let own = source.at(part.start);
        let from = match rooms[tree] {
            Some(rooms) => {
                let to = rooms[turn % 2];
                combine(b, team, &trees[tree], source, to, &part, Finish::No);
                to
            }
            None => own,
        };
        match trees[tree].parent {
            Some(parent) => {
                b.send(team.rank(parent), from, part.len());
            }
            None => combine(b, team, &trees[tree], source, Place::Output.at(part.start), &part, finish),
        }
    }
}

/// As [`reduce`], then from member 0 to the output of all.
pub(crate) fn all_reduce(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize, finish: Finish) {
    let trees = trees(team);
    let all: Vec<Range<usize>> = chunks(0..len, b.chunk).collect();
    for (nth, part) in all.iter().enumerate() {
        let position = &trees[nth % 2];
        let to = Place::Output.at(part.start);
        let is_leaf = position.children == [None, None];
        if !is_leaf {
            let whole = if position.parent.is_none() { finish } else { Finish::No };
            combine(b, team, position, source, to, part, whole);
        }
        if let Some(parent) = position.parent {
            let from = if is_leaf { source.at(part.start) } else { to };
            b.send(team.rank(parent), from, part.len());
        }
    }
    for (nth, part) in all.iter().enumerate() {
        pass_down(b, team, &trees[nth % 2], Place::Output, part);
    }
}

/// Elements of `source` at member 0, in the output of all members.
pub(crate) fn broadcast(b: &mut Builder<'_>, team: Team<'_>, source: Place, len: usize) {
    let trees = trees(team);
    if team.index() == 0 {
        b.copy(Place::Output.at(0), source.at(0), len);
    }
    for (nth, part) in chunks(0..len, b.chunk).enumerate() {
        pass_down(b, team, &trees[nth % 2], source, &part);
    }
}

fn combine(
    b: &mut Builder<'_>,
    team: Team<'_>,
    position: &Position,
    source: Place,
    to: super::Spot,
    part: &Range<usize>,
    finish: Finish,
) {
    let [before, behind] =
        position.children.map(|child| child.map(|child| Operand::Arrival(team.rank(child))));
    let own = Some(Operand::Own(source.at(part.start)));
    let operands: Vec<Operand> = [before, own, behind].into_iter().flatten().collect();
    b.combine(to, part.len(), &operands, finish);
}

fn pass_down(b: &mut Builder<'_>, team: Team<'_>, position: &Position, source: Place, part: &Range<usize>) {
    let from = match position.parent {
        Some(parent) => {
            b.receive(team.rank(parent), part.start, part.len());
            Place::Output
        }
        None => source,
    };
    for child in position.children.into_iter().flatten() {
        b.send_to(team.rank(child), from.at(part.start), part.len(), part.start);
    }
}
