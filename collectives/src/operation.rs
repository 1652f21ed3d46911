//! Operations, as data.

use std::fmt;
use std::str::FromStr;

use ferroce::driver::reduction::{self, DataType, ReduceOp, check_factor};

use crate::{Buffer, Error};

/// The kind of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// All-reduce: the elements of all ranks, reduced, at all ranks.
    AllReduce = 1,
    /// Reduce-scatter: the elements of all ranks, reduced; one block at each rank.
    ReduceScatter = 2,
    /// All-gather: the blocks of all ranks at all ranks.
    AllGather = 3,
    /// Broadcast: the elements of the root at all ranks.
    Broadcast = 4,
    /// Reduce: the elements of all ranks, reduced, at the root.
    Reduce = 5,
    /// All-to-all: a block from each rank at each rank.
    AllToAll = 6,
    /// Gather: the blocks of all ranks at the root.
    Gather = 7,
    /// Scatter: a block of the root at each rank.
    Scatter = 8,
    /// Send: elements of this rank to a peer.
    Send = 9,
    /// Receive: elements of a peer.
    Receive = 10,
    /// Barrier: no rank ends before all have begun.
    Barrier = 11,
}

impl Kind {
    /// All of them.
    pub const ALL: [Kind; 11] = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
        Kind::Send,
        Kind::Receive,
        Kind::Barrier,
    ];

    /// Whether it reduces elements.
    pub fn reduces(self) -> bool {
        matches!(self, Kind::AllReduce | Kind::ReduceScatter | Kind::Reduce)
    }

    /// Whether it has a root.
    pub fn has_root(self) -> bool {
        matches!(self, Kind::Broadcast | Kind::Reduce | Kind::Gather | Kind::Scatter)
    }

    /// Whether only two ranks take part.
    pub fn is_of_two(self) -> bool {
        matches!(self, Kind::Send | Kind::Receive)
    }

    /// The kind with this number.
    pub(crate) fn from_number(number: u8) -> Option<Kind> {
        Kind::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::AllReduce => "all_reduce",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllGather => "all_gather",
            Kind::Broadcast => "broadcast",
            Kind::Reduce => "reduce",
            Kind::AllToAll => "all_to_all",
            Kind::Gather => "gather",
            Kind::Scatter => "scatter",
            Kind::Send => "send",
            Kind::Receive => "receive",
            Kind::Barrier => "barrier",
        })
    }
}

impl FromStr for Kind {
    type Err = Error;

    fn from_str(name: &str) -> Result<Kind, Error> {
        let found = Kind::ALL.into_iter().find(|kind| kind.to_string() == name);
        found.ok_or_else(|| {
            let names: Vec<String> = Kind::ALL.iter().map(Kind::to_string).collect();
            Error::invalid("operation", name, names.join(", "))
        })
    }
}

/// How elements of several ranks are reduced.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Reduction {
    /// Their sum.
    Sum,
    /// Their product.
    Product,
    /// The minimum; NaN if any element is NaN.
    Min,
    /// The maximum; NaN if any element is NaN.
    Max,
    /// Their sum, divided by the number of ranks. An integer's is rounded towards zero.
    Average,
    /// The sum of each rank's elements times its factor. The factors of ranks may differ. Those of integers are integers.
    PreMulSum(f64),
}

impl Reduction {
    /// The reduction of two elements.
    pub(crate) fn op(self) -> ReduceOp {
        match self {
            Reduction::Sum | Reduction::Average | Reduction::PreMulSum(_) => ReduceOp::Sum,
            Reduction::Product => ReduceOp::Product,
            Reduction::Min => ReduceOp::Min,
            Reduction::Max => ReduceOp::Max,
        }
    }

    /// The number, the same at all ranks; 0 is for none.
    pub(crate) fn number(self) -> u8 {
        match self {
            Reduction::Sum => 1,
            Reduction::Product => 2,
            Reduction::Min => 3,
            Reduction::Max => 4,
            Reduction::Average => 5,
            Reduction::PreMulSum(_) => 6,
        }
    }

    /// The name for a [number](Reduction::number).
    pub(crate) fn name(number: u8) -> &'static str {
        ["none", "sum", "prod", "min", "max", "avg", "premulsum"]
            .get(usize::from(number))
            .unwrap_or(&"unknown")
    }
}

/// The names of nccl-tests: `sum`, `prod`, `min`, `max`, `avg`, `premulsum`.
impl fmt::Display for Reduction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Reduction::name(self.number()))
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Reduction {
        match op {
            ReduceOp::Product => Reduction::Product,
            ReduceOp::Min => Reduction::Min,
            ReduceOp::Max => Reduction::Max,
            _ => Reduction::Sum,
        }
    }
}

/// Part of a registered buffer: from `offset` bytes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a buffer, and where in it")]
pub struct At {
    /// The buffer.
    pub buffer: Buffer,
    /// Its first byte.
    pub offset: u64,
}

impl From<Buffer> for At {
    fn from(buffer: Buffer) -> At {
        At { buffer, offset: 0 }
    }
}

impl Buffer {
    /// The part from `offset` bytes on.
    pub fn at(self, offset: u64) -> At {
        At { buffer: self, offset }
    }
}

/// One operation, as one rank calls it. All ranks of a communicator call the same operations, in the same order, with the same
/// counts, types and roots.
///
/// Counts are of elements. An operation is in place if input and output are the same memory: for `all_gather` and `gather` the
/// input is the rank's own block of the output, for `reduce_scatter` and `scatter` the output is the rank's own block of the
/// input, for the others both begin at the same byte. `all_to_all` can't be in place. Otherwise input and output don't
/// overlap.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
pub struct Operation {
    pub(crate) kind: Kind,
    pub(crate) input: Option<At>,
    pub(crate) output: Option<At>,
    /// The number of elements, or of elements per block.
    pub(crate) count: usize,
    /// The elements of each block, if they differ: sent and received.
    pub(crate) sent: Option<Vec<usize>>,
    pub(crate) received: Option<Vec<usize>>,
    pub(crate) data_type: DataType,
    pub(crate) reduction: Option<Reduction>,
    /// The root, or the peer.
    pub(crate) root: u32,
}

impl Operation {
    fn new(kind: Kind, count: usize, data_type: DataType) -> Operation {
        let (input, output, sent, received, reduction) = Default::default();
        Operation { kind, input, output, count, sent, received, data_type, reduction, root: 0 }
    }

    fn between(self, input: impl Into<At>, output: impl Into<At>) -> Operation {
        Operation { input: Some(input.into()), output: Some(output.into()), ..self }
    }

    /// `count` elements of all ranks, reduced, in the output of all.
    pub fn all_reduce(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        reduction: impl Into<Reduction>,
    ) -> Operation {
        let reduction = Some(reduction.into());
        Operation { reduction, ..Operation::new(Kind::AllReduce, count, data_type) }.between(input, output)
    }

    /// The input has a block of `count` elements for each rank; the output gets this rank's block, reduced.
    pub fn reduce_scatter(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        reduction: impl Into<Reduction>,
    ) -> Operation {
        let reduction = Some(reduction.into());
        Operation { reduction, ..Operation::new(Kind::ReduceScatter, count, data_type) }
            .between(input, output)
    }

    /// As [`reduce_scatter`](Operation::reduce_scatter), with `counts[i]` elements for rank `i`.
    pub fn reduce_scatter_v(
        input: impl Into<At>,
        output: impl Into<At>,
        counts: &[usize],
        data_type: DataType,
        reduction: impl Into<Reduction>,
    ) -> Operation {
        let blocks = Some(counts.to_vec());
        let operation = Operation::reduce_scatter(input, output, 0, data_type, reduction);
        Operation { sent: blocks, ..operation }
    }

    /// `count` elements of each rank, in the order of ranks, in the output of all.
    pub fn all_gather(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
    ) -> Operation {
        Operation::new(Kind::AllGather, count, data_type).between(input, output)
    }

    /// As [`all_gather`](Operation::all_gather), with `counts[i]` elements of rank `i`.
    pub fn all_gather_v(
        input: impl Into<At>,
        output: impl Into<At>,
        counts: &[usize],
        data_type: DataType,
    ) -> Operation {
        let received = Some(counts.to_vec());
        Operation { received, ..Operation::new(Kind::AllGather, 0, data_type) }.between(input, output)
    }

    /// `count` elements of the root's input, in the output of all.
    pub fn broadcast(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        root: u32,
    ) -> Operation {
        Operation { root, ..Operation::new(Kind::Broadcast, count, data_type) }.between(input, output)
    }

    /// `count` elements of all ranks, reduced, in the output of the root.
    pub fn reduce(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        reduction: impl Into<Reduction>,
        root: u32,
    ) -> Operation {
        let reduction = Some(reduction.into());
        Operation { reduction, root, ..Operation::new(Kind::Reduce, count, data_type) }.between(input, output)
    }

    /// The input has a block of `count` elements for each rank; the output gets one block from each rank.
    pub fn all_to_all(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
    ) -> Operation {
        Operation::new(Kind::AllToAll, count, data_type).between(input, output)
    }

    /// As [`all_to_all`](Operation::all_to_all), with `sent[i]` elements to rank `i` and `received[i]` elements from it.
    pub fn all_to_all_v(
        input: impl Into<At>,
        output: impl Into<At>,
        sent: &[usize],
        received: &[usize],
        data_type: DataType,
    ) -> Operation {
        let (sent, received) = (Some(sent.to_vec()), Some(received.to_vec()));
        Operation { sent, received, ..Operation::new(Kind::AllToAll, 0, data_type) }.between(input, output)
    }

    /// `count` elements of each rank, in the order of ranks, in the output of the root.
    pub fn gather(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        root: u32,
    ) -> Operation {
        Operation { root, ..Operation::new(Kind::Gather, count, data_type) }.between(input, output)
    }

    /// As [`gather`](Operation::gather), with `counts[i]` elements of rank `i`. All ranks know all counts.
    pub fn gather_v(
        input: impl Into<At>,
        output: impl Into<At>,
        counts: &[usize],
        data_type: DataType,
        root: u32,
    ) -> Operation {
        let received = Some(counts.to_vec());
        Operation { root, received, ..Operation::new(Kind::Gather, 0, data_type) }.between(input, output)
    }

    /// The root's input has a block of `count` elements for each rank; each rank's output gets its block.
    pub fn scatter(
        input: impl Into<At>,
        output: impl Into<At>,
        count: usize,
        data_type: DataType,
        root: u32,
    ) -> Operation {
        Operation { root, ..Operation::new(Kind::Scatter, count, data_type) }.between(input, output)
    }

    /// As [`scatter`](Operation::scatter), with `counts[i]` elements for rank `i`. All ranks know all counts.
    pub fn scatter_v(
        input: impl Into<At>,
        output: impl Into<At>,
        counts: &[usize],
        data_type: DataType,
        root: u32,
    ) -> Operation {
        let sent = Some(counts.to_vec());
        Operation { root, sent, ..Operation::new(Kind::Scatter, 0, data_type) }.between(input, output)
    }

    /// `count` elements to rank `peer`, which calls [`receive`](Operation::receive).
    pub fn send(input: impl Into<At>, count: usize, data_type: DataType, peer: u32) -> Operation {
        let input = Some(input.into());
        Operation { input, root: peer, ..Operation::new(Kind::Send, count, data_type) }
    }

    /// `count` elements of rank `peer`, which calls [`send`](Operation::send).
    pub fn receive(output: impl Into<At>, count: usize, data_type: DataType, peer: u32) -> Operation {
        let output = Some(output.into());
        Operation { output, root: peer, ..Operation::new(Kind::Receive, count, data_type) }
    }

    /// A barrier: completes when every rank has started it.
    pub fn barrier() -> Operation {
        Operation::new(Kind::Barrier, 0, DataType::U8)
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The lengths of input and output in elements, at rank `rank` of `size`.
    ///
    /// # Errors
    /// [`Error::Invalid`] for invalid counts, roots and peers.
    pub(crate) fn lengths(&self, rank: usize, size: usize) -> Result<(usize, usize), Error> {
        let Operation { kind, count, root, .. } = *self;
        if (kind.has_root() || kind.is_of_two()) && root as usize >= size {
            let what = if kind.is_of_two() { "peer" } else { "root" };
            return Err(Error::invalid(
                what,
                root,
                format!("a rank below {size}, the size of the communicator"),
            ));
        }
        if kind.is_of_two() && root as usize == rank {
            return Err(Error::invalid("peer", root, "another rank than this one"));
        }
        for (what, counts) in
            [("counts that are sent", &self.sent), ("counts that are received", &self.received)]
        {
            if let Some(counts) = counts
                && counts.len() != size
            {
                return Err(Error::invalid(
                    what,
                    format!("{} counts", counts.len()),
                    format!("{size}, one for each rank"),
                ));
            }
        }
        if let Some(Reduction::PreMulSum(factor)) = self.reduction
            && let Err(reduction::Error::Factor { range, data_type, .. }) =
                check_factor(self.data_type, factor)
        {
            let [least, most] = [range.start(), range.end()];
            let expected = format!("an integer from {least} to {most}, for elements of type {data_type}");
            return Err(Error::invalid("factor", factor, expected));
        }
        let too_many = || Error::invalid("count", count, "elements of less than 2^63 bytes in all");
        let all = |counts: &Option<Vec<usize>>| match counts {
            Some(counts) => {
                counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count)).ok_or_else(too_many)
            }
            None => count.checked_mul(size).ok_or_else(too_many),
        };
        let one = |counts: &Option<Vec<usize>>| counts.as_ref().map_or(count, |counts| counts[rank]);
        let is_root = rank == root as usize;
        let if_root = |length: usize| if is_root { length } else { 0 };
        let (input, output) = match kind {
            Kind::AllReduce => (count, count),
            Kind::ReduceScatter => (all(&self.sent)?, one(&self.sent)),
            Kind::AllGather => (one(&self.received), all(&self.received)?),
            Kind::Broadcast => (if_root(count), count),
            Kind::Reduce => (count, if_root(count)),
            Kind::AllToAll => (all(&self.sent)?, all(&self.received)?),
            Kind::Gather => (one(&self.received), if_root(all(&self.received)?)),
            Kind::Scatter => (if_root(all(&self.sent)?), one(&self.sent)),
            Kind::Send => (count, 0),
            Kind::Receive => (0, count),
            Kind::Barrier => (0, 0),
        };
        let fits =
            |length: usize| length.checked_mul(self.data_type.size()).is_some_and(|bytes| bytes < 1 << 62);
        if fits(input) && fits(output) { Ok((input, output)) } else { Err(too_many()) }
    }

    /// The offset in bytes of the output from the input, at a rank whose input and output share memory.
    ///
    /// # Errors
    /// [`Error::Invalid`] if they overlap in a manner that the operation does not allow.
    pub(crate) fn in_place(&self, rank: usize, (input, output): (usize, usize)) -> Result<bool, Error> {
        let (Some(from), Some(to)) = (self.input, self.output) else { return Ok(false) };
        let bytes = self.data_type.size() as u64;
        let (input, output) = (input as u64 * bytes, output as u64 * bytes);
        if from.buffer != to.buffer || from.offset >= to.offset + output || to.offset >= from.offset + input {
            return Ok(false);
        }
        let before = |counts: &Option<Vec<usize>>| {
            let elements = match counts {
                Some(counts) => counts[..rank].iter().sum(),
                None => self.count * rank,
            };
            elements as u64 * bytes
        };
        let (from_due, to_due) = match self.kind {
            Kind::AllGather | Kind::Gather => (to.offset + before(&self.received), to.offset),
            Kind::ReduceScatter | Kind::Scatter => (from.offset, from.offset + before(&self.sent)),
            _ => (from.offset, from.offset),
        };
        if self.kind == Kind::AllToAll || (from.offset, to.offset) != (from_due, to_due) {
            let value = format!("at byte {} of the buffer, the input at byte {}", to.offset, from.offset);
            let expected = match self.kind {
                Kind::AllToAll => "memory other than the input: all_to_all can't be in place".to_owned(),
                _ => format!(
                    "no overlap, or in place: the output at byte {to_due}, the input at byte {from_due}"
                ),
            };
            return Err(Error::invalid("output", value, expected));
        }
        Ok(true)
    }
}
