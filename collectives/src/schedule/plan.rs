//! The schedule of an operation by an algorithm.

use std::fmt;
use std::str::FromStr;

use super::hierarchical::{self, Hosts};
use super::{Blocks, Builder, Finish, Operand, Place, Schedule, Team, chunks, direct, halving, ring, tree};
use crate::Error;
use crate::operation::Kind;
use crate::schedule::builder::Shared;

/// How ranks carry out an operation together. [`manual`](crate::manual) says what each is good for, and in which order it reduces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Algorithm {
    /// Whoever needs elements gets them from whoever has them.
    Direct = 1,
    /// Direct, in two steps: reduce-scatter, then all-gather.
    TwoStep = 2,
    /// Along a ring.
    Ring = 3,
    /// Recursive halving and doubling.
    Halving = 4,
    /// Two binary trees, each for half of the chunks.
    Tree = 5,
    /// Inside each host, then between hosts.
    Hierarchical = 6,
    /// On memory that all ranks have mapped, for ranks of one host: without packets.
    Mapped = 7,
}

impl Algorithm {
    /// All of them.
    pub const ALL: [Algorithm; 7] = [
        Algorithm::Direct,
        Algorithm::TwoStep,
        Algorithm::Ring,
        Algorithm::Halving,
        Algorithm::Tree,
        Algorithm::Hierarchical,
        Algorithm::Mapped,
    ];

    pub(crate) fn from_number(number: u32) -> Option<Algorithm> {
        Algorithm::ALL.into_iter().find(|algorithm| *algorithm as u32 == number)
    }

    /// Whether it can carry out such operations.
    pub fn applies_to(self, kind: Kind) -> bool {
        use Algorithm as A;
        if self == A::Mapped {
            return !kind.is_of_two();
        }
        match kind {
            Kind::AllReduce => true,
            Kind::ReduceScatter => matches!(self, A::Direct | A::Ring | A::Halving),
            Kind::AllGather => matches!(self, A::Direct | A::Ring | A::Halving | A::Hierarchical),
            Kind::Broadcast => matches!(self, A::Direct | A::Ring | A::Tree | A::Hierarchical),
            Kind::Reduce => matches!(self, A::Direct | A::Ring | A::Tree),
            Kind::AllToAll | Kind::Gather | Kind::Scatter | Kind::Send | Kind::Receive | Kind::Barrier => {
                self == A::Direct
            }
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Algorithm::Direct => "direct",
            Algorithm::TwoStep => "two_step",
            Algorithm::Ring => "ring",
            Algorithm::Halving => "halving",
            Algorithm::Tree => "tree",
            Algorithm::Hierarchical => "hierarchical",
            Algorithm::Mapped => "mapped",
        })
    }
}

impl FromStr for Algorithm {
    type Err = Error;

    fn from_str(name: &str) -> Result<Algorithm, Error> {
        let found = Algorithm::ALL.into_iter().find(|algorithm| algorithm.to_string() == name);
        found.ok_or_else(|| {
            let names: Vec<String> = Algorithm::ALL.iter().map(Algorithm::to_string).collect();
            Error::invalid("algorithm", name, names.join(", "))
        })
    }
}

/// The parameters of an operation that determine its schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) kind: Kind,
    /// The number of elements, in total or in each block of equal length.
    pub(crate) count: usize,
    /// The ends of the blocks, if their lengths differ: those that this rank sends and those that it receives.
    pub(crate) sent: Option<&'a [usize]>,
    pub(crate) received: Option<&'a [usize]>,
    /// The root, or the peer of a send or receive.
    pub(crate) root: usize,
    /// This rank's elements are multiplied by its factor first.
    pub(crate) is_scaled: bool,
    /// The result is an average.
    pub(crate) is_average: bool,
    /// Input and output share memory.
    pub(crate) in_place: bool,
}

/// The lengths of messages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// The most elements of a message.
    pub(crate) chunk: usize,
    /// Messages of more elements are written to their destination.
    pub(crate) lands_above: usize,
    /// Chunks that pass all steps of a ring together, one window after the other; for host memory all chunks.
    pub(crate) window: usize,
}

/// Rank `rank` of `size`, on `hosts`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat<'a> {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) hosts: &'a Hosts,
}

/// This rank's part. The algorithm [applies](Algorithm::applies_to), and has a schedule.
pub(crate) fn plan(task: &Task<'_>, algorithm: Algorithm, seat: Seat<'_>, shape: Shape) -> Schedule {
    let mut schedule = Schedule::default();
    let (sent, received) = (blocks(task.count, task.sent), blocks(task.count, task.received));
    let shared = task.shared(seat.rank, sent, received);
    let mut b = Builder::new(&mut schedule, shape, shared);
    write(&mut b, task, algorithm, seat, (sent, received));
    schedule
}

fn write(
    b: &mut Builder<'_>,
    task: &Task<'_>,
    algorithm: Algorithm,
    Seat { rank, size, hosts }: Seat<'_>,
    (sent, received): (Blocks<'_>, Blocks<'_>),
) {
    let Task { kind, count, root, .. } = *task;
    let finish = if task.is_average { Finish::Whole } else { Finish::No };
    let source = if task.is_scaled { scale(b, task, rank, size, sent) } else { Place::Input };
    if size == 1 {
        return alone(b, task, source, finish, sent, received);
    }
    let team = Team::all(rank, size);
    // The root is member 0.
    let from_root = Team::All { rank, size, first: root };
    match (kind, algorithm) {
        (Kind::AllReduce, Algorithm::Direct) => direct::all_reduce(b, team, source, count, finish),
        (Kind::AllReduce, Algorithm::TwoStep) => {
            direct::all_reduce_in_two_steps(b, team, source, 0, count, finish);
        }
        (Kind::AllReduce, Algorithm::Ring) => ring::all_reduce(b, team, source, 0, count, finish),
        (Kind::AllReduce, Algorithm::Halving) => halving::all_reduce(b, team, source, 0, count, finish),
        (Kind::AllReduce, Algorithm::Tree) => tree::all_reduce(b, team, source, count, finish),
        (Kind::AllReduce, Algorithm::Hierarchical | Algorithm::Mapped) => {
            hierarchical::all_reduce(b, hosts, rank, source, count, finish);
        }
        (Kind::ReduceScatter, Algorithm::Ring) => ring::reduce_scatter(b, team, source, sent, finish),
        (Kind::ReduceScatter, Algorithm::Halving) => halving::reduce_scatter(b, team, source, sent, finish),
        (Kind::ReduceScatter, _) => direct::reduce_scatter(b, team, source, sent, finish),
        (Kind::AllGather, Algorithm::Ring) => ring::all_gather(b, team, source, received),
        (Kind::AllGather, Algorithm::Halving) => halving::all_gather(b, team, source, received),
        (Kind::AllGather, Algorithm::Hierarchical) => {
            hierarchical::all_gather(b, hosts, rank, source, received)
        }
        (Kind::AllGather, _) => direct::all_gather(b, team, source, received),
        (Kind::Broadcast, Algorithm::Ring) => ring::broadcast(b, from_root, source, count),
        (Kind::Broadcast, Algorithm::Tree) => tree::broadcast(b, from_root, source, count),
        (Kind::Broadcast, Algorithm::Hierarchical) => {
            hierarchical::broadcast(b, hosts, rank, root, source, count)
        }
        (Kind::Broadcast, _) => direct::broadcast(b, from_root, source, count),
        (Kind::Reduce, Algorithm::Ring) => ring::reduce(b, from_root, source, count, finish),
        (Kind::Reduce, Algorithm::Tree) => tree::reduce(b, from_root, source, count, finish),
        (Kind::Reduce, _) => direct::reduce(b, team, root, source, count, finish),
        (Kind::AllToAll, _) => direct::all_to_all(b, team, sent, received),
        (Kind::Gather, _) => direct::gather(b, team, root, received),
        (Kind::Scatter, _) => direct::scatter(b, team, root, sent),
        (Kind::Send, _) => direct::send_block(b, root as u32, 0..count),
        (Kind::Receive, _) => direct::receive_block(b, root as u32, 0..count),
        (Kind::Barrier, _) => direct::barrier(b, team),
    }
}

fn blocks(len: usize, ends: Option<&[usize]>) -> Blocks<'_> {
    ends.map_or(Blocks::Equal { len }, Blocks::Ends)
}

impl Task<'_> {
    /// The starts of input and output in the memory that they share.
    fn shared(&self, rank: usize, sent: Blocks<'_>, received: Blocks<'_>) -> Option<Shared> {
        let own = |blocks: Blocks<'_>| blocks.block(rank).start;
        self.in_place.then(|| match self.kind {
            Kind::AllGather | Kind::Gather if self.kind == Kind::AllGather || rank == self.root => {
                Shared { input: own(received), output: 0 }
            }
            Kind::ReduceScatter => Shared { input: 0, output: own(sent) },
            Kind::Scatter if rank == self.root => Shared { input: 0, output: own(sent) },
            _ => Shared::default(),
        })
    }
}

/// Multiplies this rank's operands of a reduction, into the output if it has room for them.
fn scale(b: &mut Builder<'_>, task: &Task<'_>, rank: usize, size: usize, sent: Blocks<'_>) -> Place {
    let (len, has_room) = match task.kind {
        Kind::AllReduce => (task.count, true),
        Kind::ReduceScatter => (sent.blocks(0..size).len(), false),
        _ => (task.count, rank == task.root),
    };
    let to = if has_room { Place::Output.at(0) } else { b.scratch(len) };
    for part in chunks(0..len, b.chunk) {
        let operand = [Operand::Own(Place::Input.at(part.start))];
        b.combine(to.place.at(to.at + part.start), part.len(), &operand, Finish::Scale);
    }
    to.place
}

/// For a single rank an operation is a copy.
fn alone(
    b: &mut Builder<'_>,
    task: &Task<'_>,
    source: Place,
    finish: Finish,
    sent: Blocks<'_>,
    received: Blocks<'_>,
) {
    let len = match task.kind {
        Kind::Barrier | Kind::Send | Kind::Receive => 0,
        Kind::AllGather | Kind::Gather => received.block(0).len(),
        Kind::ReduceScatter | Kind::AllToAll | Kind::Scatter => sent.block(0).len(),
        Kind::AllReduce | Kind::Broadcast | Kind::Reduce => task.count,
    };
    if finish == Finish::No {
        return b.copy(Place::Output.at(0), source.at(0), len);
    }
    for part in chunks(0..len, b.chunk) {
        let operand = [Operand::Own(source.at(part.start))];
        b.combine(Place::Output.at(part.start), part.len(), &operand, finish);
    }
}
