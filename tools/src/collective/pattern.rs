//! The operation that the ranks carry out: the rank and position that each element of an output comes from.

use std::fmt;

use ferroce_collectives::{At, Buffer, DataType, Kind, Operation, Reduction};

use super::Args;

/// An operation, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(super) enum Pattern {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
    Reduce,
    AllToAll,
    Gather,
    Scatter,
    SendReceive,
    Barrier,
}

/// The source of `len` elements of an output: the input's elements from `at` on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) source: Source,
    pub(super) at: usize,
    pub(super) len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// The input of one rank.
    Rank(u32),
    /// The reduction of the inputs of all ranks.
    Reduced,
}

/// One size of the sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// Elements of the operation, or of each block.
    pub(super) count: usize,
    /// Bytes of all elements.
    pub(super) bytes: usize,
}

/// The number of this rank, and of how many.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) rank: u32,
    pub(super) size: u32,
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Pattern::SendReceive => f.write_str("send_receive"),
            _ => self.kinds()[0].fmt(f),
        }
    }
}

impl Pattern {
    /// The operations that the pattern consists of.
    pub(super) fn kinds(self) -> &'static [Kind] {
        match self {
            Pattern::AllReduce => &[Kind::AllReduce],
            Pattern::ReduceScatter => &[Kind::ReduceScatter],
            Pattern::AllGather => &[Kind::AllGather],
            Pattern::Broadcast => &[Kind::Broadcast],
            Pattern::Reduce => &[Kind::Reduce],
            Pattern::AllToAll => &[Kind::AllToAll],
            Pattern::Gather => &[Kind::Gather],
            Pattern::Scatter => &[Kind::Scatter],
            Pattern::SendReceive => &[Kind::Send, Kind::Receive],
            Pattern::Barrier => &[Kind::Barrier],
        }
    }

    pub(super) fn has_root(self) -> bool {
        self.kinds().iter().any(|kind| kind.has_root())
    }

    pub(super) fn reduces(self) -> bool {
        self.kinds().iter().any(|kind| kind.reduces())
    }

    pub(super) fn can_be_in_place(self) -> bool {
        !matches!(self, Pattern::AllToAll | Pattern::SendReceive | Pattern::Barrier)
    }

    /// Whether there is a block for each rank.
    fn has_blocks(self) -> bool {
        matches!(
            self,
            Pattern::ReduceScatter
                | Pattern::AllGather
                | Pattern::AllToAll
                | Pattern::Gather
                | Pattern::Scatter
        )
    }

    /// The factor from algbw to busbw (the bandwidth used of the busiest link), as in nccl-tests.
    pub(super) fn bus_factor(self, ranks: u32) -> f64 {
        let ranks = f64::from(ranks);
        match self {
            Pattern::AllReduce => 2.0 * (ranks - 1.0) / ranks,
            _ if self.has_blocks() => (ranks - 1.0) / ranks,
            _ => 1.0,
        }
    }

    /// All sizes, without duplicates. Each has at least one element.
    pub(super) fn sizes(self, args: &Args, ranks: u32) -> Vec<Size> {
        if self == Pattern::Barrier {
            return vec![Size { count: 0, bytes: 0 }];
        }
        let blocks = if self.has_blocks() { ranks as usize } else { 1 };
        let element = args.data_type.size();
        let bytes = std::iter::successors(Some(args.min.0), |bytes| bytes.checked_mul(args.factor));
        let counts = bytes.take_while(|bytes| *bytes <= args.max.0);
        let mut counts: Vec<usize> = counts.map(|bytes| (bytes as usize / element / blocks).max(1)).collect();
        counts.dedup();
        counts.into_iter().map(|count| Size { count, bytes: count * element * blocks }).collect()
    }

    /// The number of elements in this rank's input.
    pub(super) fn input(self, args: &Args, place: Place, count: usize) -> usize {
        match self {
            Pattern::ReduceScatter | Pattern::AllToAll => count * place.size as usize,
            Pattern::Scatter if place.rank == args.root => count * place.size as usize,
            Pattern::Broadcast | Pattern::Scatter if place.rank != args.root => 0,
            Pattern::Barrier => 0,
            _ => count,
        }
    }

    /// The expected output of this rank.
    pub(super) fn output(self, args: &Args, place: Place, count: usize) -> Vec<Part> {
        let Place { rank, size } = place;
        let own = rank as usize * count;
        let part = |source, at| Part { source, at, len: count };
        let is_root = rank == args.root;
        match self {
            Pattern::AllReduce => vec![part(Source::Reduced, 0)],
            Pattern::ReduceScatter => vec![part(Source::Reduced, own)],
            Pattern::AllGather => (0..size).map(|from| part(Source::Rank(from), 0)).collect(),
            Pattern::Broadcast => vec![part(Source::Rank(args.root), 0)],
            Pattern::Reduce if is_root => vec![part(Source::Reduced, 0)],
            Pattern::AllToAll => (0..size).map(|from| part(Source::Rank(from), own)).collect(),
            Pattern::Gather if is_root => (0..size).map(|from| part(Source::Rank(from), 0)).collect(),
            Pattern::Scatter => vec![part(Source::Rank(args.root), own)],
            Pattern::SendReceive => vec![part(Source::Rank((rank + size - 1) % size), 0)],
            Pattern::Reduce | Pattern::Gather | Pattern::Barrier => Vec::new(),
        }
    }

    /// The first elements of input and output in one buffer, for an in-place operation.
    fn shared(self, place: Place, count: usize) -> (usize, usize) {
        let own = place.rank as usize * count;
        match self {
            Pattern::AllGather | Pattern::Gather => (own, 0),
            Pattern::ReduceScatter | Pattern::Scatter => (0, own),
            _ => (0, 0),
        }
    }

    /// The start of input and output.
    pub(super) fn places(
        self,
        buffers: [Buffer; 2],
        place: Place,
        count: usize,
        element: usize,
        in_place: bool,
    ) -> [At; 2] {
        if !in_place {
            return buffers.map(At::from);
        }
        let (input, output) = self.shared(place, count);
        [input, output].map(|at| buffers[1].at((at * element) as u64))
    }

    /// The operations that a rank calls.
    pub(super) fn operations(
        self,
        args: &Args,
        place: Place,
        count: usize,
        [input, output]: [At; 2],
    ) -> Vec<Operation> {
        let Args { data_type, root, .. } = *args;
        let reduction = reduction_of(args.reduction, place.rank);
        vec![match self {
            Pattern::AllReduce => Operation::all_reduce(input, output, count, data_type, reduction),
            Pattern::ReduceScatter => Operation::reduce_scatter(input, output, count, data_type, reduction),
            Pattern::AllGather => Operation::all_gather(input, output, count, data_type),
            Pattern::Broadcast => Operation::broadcast(input, output, count, data_type, root),
            Pattern::Reduce => Operation::reduce(input, output, count, data_type, reduction, root),
            Pattern::AllToAll => Operation::all_to_all(input, output, count, data_type),
            Pattern::Gather => Operation::gather(input, output, count, data_type, root),
            Pattern::Scatter => Operation::scatter(input, output, count, data_type, root),
            Pattern::Barrier => Operation::barrier(),
            Pattern::SendReceive => return around(place, count, data_type, input, output),
        }]
    }
}

/// Sends to the next rank and receives from the previous one.
fn around(place: Place, count: usize, data_type: DataType, input: At, output: At) -> Vec<Operation> {
    let Place { rank, size } = place;
    let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
    vec![Operation::send(input, count, data_type, next), Operation::receive(output, count, data_type, before)]
}

/// The reduction that a rank passes: with PreMulSum, each rank has its own factor.
pub(super) fn reduction_of(reduction: Reduction, rank: u32) -> Reduction {
    match reduction {
        Reduction::PreMulSum(_) => Reduction::PreMulSum(factor(rank) as f64),
        other => other,
    }
}

/// The factor that a rank's elements are multiplied by.
pub(super) fn factor(rank: u32) -> i128 {
    1 + i128::from(rank % 2)
}
