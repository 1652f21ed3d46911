//! Every operation, in place or not, of all lengths at which the behaviour changes, compared with plain loops.

#![allow(dead_code, reason = "each test program uses some of it")]

use ferroce_collectives::{
    Algorithm, Buffer, Collectives, Communicator, DataType, Kind, Operation, Options, Reduction,
};

use crate::group::options;

pub(crate) const CHUNK: usize = 4096;
const EAGER: usize = 512;
/// Guard bytes around inputs and outputs, which must not change.
pub(crate) const GUARD: usize = 24;
const TYPES: [DataType; 3] = [DataType::I32, DataType::U8, DataType::F64];
const REDUCTIONS: [fn(u32) -> Reduction; 6] = [
    |_| Reduction::Sum,
    |_| Reduction::Average,
    |rank| Reduction::PreMulSum(f64::from(rank + 1)),
    |_| Reduction::Product,
    |_| Reduction::Min,
    |_| Reduction::Max,
];

pub(crate) fn small() -> Options {
    options().chunk_bytes(CHUNK as u32).eager_bytes(EAGER as u32)
}

/// Lengths in elements.
pub(crate) fn counts(data_type: DataType) -> Vec<usize> {
    let (chunk, eager) = (CHUNK / data_type.size(), EAGER / data_type.size());
    vec![0, 1, 3, eager - 1, eager, eager + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5]
}

/// An operation of all ranks.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    size: usize,
    data_type: DataType,
    /// An index into [`REDUCTIONS`].
    reduction: usize,
    /// The number of elements, in total or in each block.
    count: usize,
    differ: bool,
    root: usize,
    in_place: bool,
    number: usize,
}

impl Case {
    /// The number of elements of rank `rank`'s block; in an all-to-all, of the block from `from` to it.
    fn block(&self, from: usize, rank: usize) -> usize {
        let n = self.count;
        match (self.differ, self.kind) {
            (false, _) => n,
            (true, Kind::AllToAll) => [n, 0, n / 2 + 1, 1, n + 3][(from + 2 * rank) % 5],
            (true, _) => [n, 0, n / 2 + 1, 1, n + 3][rank % 5],
        }
    }

    fn blocks(&self, from: usize) -> Vec<usize> {
        (0..self.size).map(|rank| self.block(from, rank)).collect()
    }

    /// The elements of a rank's input.
    fn input(&self, rank: usize) -> Vec<i64> {
        let all: usize = self.blocks(rank).iter().sum();
        let length = match self.kind {
            Kind::ReduceScatter | Kind::AllToAll => all,
            Kind::Scatter => {
                if rank == self.root {
                    all
                } else {
                    0
                }
            }
            Kind::Broadcast => {
                if rank == self.root {
                    self.count
                } else {
                    0
                }
            }
            Kind::AllGather | Kind::Gather => self.block(rank, rank),
            Kind::Barrier => 0,
            _ => self.count,
        };
        let value = |i: usize| {
            let mixed =
                ((i + self.number * 7919) as u64 ^ (rank as u64) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let random = (mixed >> 20) as i64;
            match self.data_type {
                DataType::U8 => random % 41,
                DataType::I32 => random % 80_000_001 - 40_000_000,
                // Products are exact, and none is zero, which would have a sign.
                _ => random % 600 * 2 - 599,
            }
        };
        (0..length).map(value).collect()
    }

    fn encode(&self, value: i64) -> Vec<u8> {
        match self.data_type {
            DataType::U8 => vec![value as u8],
            DataType::I32 => (value as i32).to_ne_bytes().to_vec(),
            _ => (value as f64).to_ne_bytes().to_vec(),
        }
    }

    /// The result for one element of each rank.
    fn reduce(&self, values: impl Iterator<Item = i64>) -> Vec<u8> {
        let of_ranks: Vec<i64> = values.collect();
        let sum: i64 = of_ranks.iter().sum();
        let made = match REDUCTIONS[self.reduction](0) {
            Reduction::Sum => sum,
            Reduction::Average if self.data_type == DataType::F64 => {
                return (sum as f64 / self.size as f64).to_ne_bytes().to_vec();
            }
            Reduction::Average => sum / self.size as i64,
            Reduction::Product => of_ranks.iter().fold(1_i64, |product, value| product.wrapping_mul(*value)),
            Reduction::Min => *of_ranks.iter().min().unwrap(),
            Reduction::Max => *of_ranks.iter().max().unwrap(),
            _ => of_ranks.iter().zip(1..).map(|(value, factor)| value * factor).sum(),
        };
        self.encode(made)
    }

    /// The bytes of a rank's output.
    fn output(&self, rank: usize) -> Vec<u8> {
        let inputs: Vec<Vec<i64>> = (0..self.size).map(|rank| self.input(rank)).collect();
        let encoded = |values: &[i64]| -> Vec<u8> { values.iter().flat_map(|v| self.encode(*v)).collect() };
        let reduced = |range: std::ops::Range<usize>| -> Vec<u8> {
            range.flat_map(|i| self.reduce(inputs.iter().map(|input| input[i]))).collect()
        };
        let before = |from: usize, rank: usize| -> usize { self.blocks(from)[..rank].iter().sum() };
        let block = |from: usize, rank: usize| {
            let start = before(from, rank);
            encoded(&inputs[from][start..start + self.block(from, rank)])
        };
        match self.kind {
            Kind::AllReduce => reduced(0..self.count),
            Kind::Reduce if rank == self.root => reduced(0..self.count),
            Kind::ReduceScatter => {
                let start = before(0, rank);
                reduced(start..start + self.block(0, rank))
            }
            Kind::AllGather => inputs.iter().flat_map(|input| encoded(input)).collect(),
            Kind::Gather if rank == self.root => inputs.iter().flat_map(|input| encoded(input)).collect(),
            Kind::Broadcast => encoded(&inputs[self.root]),
            Kind::AllToAll => (0..self.size).flat_map(|from| block(from, rank)).collect(),
            Kind::Scatter => block(self.root, rank),
            _ => Vec::new(),
        }
    }

    /// Executes it and checks all bytes.
    fn check(&self, ranks: &mut Collectives, all: Communicator, buffer: Buffer, algorithm: &str) {
        let rank = all.rank() as usize;
        let element = self.data_type.size();
        let input: Vec<u8> = self.input(rank).iter().flat_map(|value| self.encode(*value)).collect();
        let output = self.output(rank);
        let before = self.blocks(rank)[..rank].iter().sum::<usize>() * element;
        let (from, to) = match self.kind {
            _ if !self.in_place => (GUARD, GUARD + input.len() + GUARD),
            Kind::AllGather | Kind::Gather => (GUARD + before, GUARD),
            Kind::ReduceScatter | Kind::Scatter => (GUARD, GUARD + before),
            _ => (GUARD, GUARD),
        };
        let mut image = vec![0xa5; (from + input.len()).max(to + output.len()) + GUARD];
        image[from..from + input.len()].copy_from_slice(&input);
        ranks.write(buffer, 0, &image).unwrap();
        image[to..to + output.len()].copy_from_slice(&output);
        let operation = self.operation(rank, buffer.at(from as u64), buffer.at(to as u64));
        let what = format!("rank {rank}, {algorithm}, {self:?}");
        ranks.run(all, &operation).unwrap_or_else(|error| panic!("{what}: {error}"));
        let mut got = vec![0; image.len()];
        ranks.read(buffer, 0, &mut got).unwrap();
        if let Some(at) = (0..image.len()).find(|at| got[*at] != image[*at]) {
            panic!("{what}: byte {at}: {} and not {}; input at {from}, output at {to}", got[at], image[at]);
        }
    }

    fn operation(
        &self,
        rank: usize,
        from: ferroce_collectives::At,
        to: ferroce_collectives::At,
    ) -> Operation {
        let (count, data_type, root) = (self.count, self.data_type, self.root as u32);
        let reduction = REDUCTIONS[self.reduction](rank as u32);
        let blocks = self.blocks(rank);
        match (self.kind, self.differ) {
            (Kind::AllReduce, _) => Operation::all_reduce(from, to, count, data_type, reduction),
            (Kind::Reduce, _) => Operation::reduce(from, to, count, data_type, reduction, root),
            (Kind::Broadcast, _) => Operation::broadcast(from, to, count, data_type, root),
            (Kind::ReduceScatter, false) => Operation::reduce_scatter(from, to, count, data_type, reduction),
            (Kind::ReduceScatter, true) => {
                Operation::reduce_scatter_v(from, to, &blocks, data_type, reduction)
            }
            (Kind::AllGather, false) => Operation::all_gather(from, to, count, data_type),
            (Kind::AllGather, true) => Operation::all_gather_v(from, to, &blocks, data_type),
            (Kind::AllToAll, false) => Operation::all_to_all(from, to, count, data_type),
            (Kind::AllToAll, true) => {
                let received: Vec<usize> = (0..self.size).map(|other| self.block(other, rank)).collect();
                Operation::all_to_all_v(from, to, &blocks, &received, data_type)
            }
            (Kind::Gather, false) => Operation::gather(from, to, count, data_type, root),
            (Kind::Gather, true) => Operation::gather_v(from, to, &blocks, data_type, root),
            (Kind::Scatter, false) => Operation::scatter(from, to, count, data_type, root),
            (Kind::Scatter, true) => Operation::scatter_v(from, to, &blocks, data_type, root),
            _ => Operation::barrier(),
        }
    }
}

fn differs(kind: Kind) -> bool {
    use Kind as K;
    matches!(kind, K::ReduceScatter | K::AllGather | K::AllToAll | K::Gather | K::Scatter)
}

/// All operations of all ranks with one algorithm, or with the communicator's choice.
pub(crate) fn check_all(
    ranks: &mut Collectives,
    all: Communicator,
    buffer: Buffer,
    algorithm: Option<Algorithm>,
    mut number: usize,
) {
    let name = algorithm.map_or("the communicator's choice".to_owned(), |algorithm| algorithm.to_string());
    for kind in Kind::ALL {
        if kind.is_of_two() || algorithm.is_some_and(|algorithm| !algorithm.applies_to(kind)) {
            continue;
        }
        for (nth, index) in (0..counts(DataType::U8).len()).enumerate() {
            for (differ, in_place) in [(false, false), (false, true), (true, false), (true, true)] {
                if differ && !differs(kind) || in_place && matches!(kind, Kind::AllToAll | Kind::Barrier) {
                    continue;
                }
                number += 1;
                let size = all.size() as usize;
                let data_type = TYPES[(number + nth) % 3];
                let case = Case {
                    kind,
                    size,
                    data_type,
                    reduction: (number / 3 + nth) % REDUCTIONS.len(),
                    count: counts(data_type)[index],
                    differ,
                    root: number % size,
                    in_place,
                    number,
                };
                case.check(ranks, all, buffer, &name);
            }
        }
    }
}

/// Bytes of a buffer for [`check_all`].
pub(crate) fn room() -> usize {
    2 * 6 * (3 * CHUNK + 64) + 3 * GUARD
}
