//! Every operation, in place and not, by every algorithm, of all lengths at which something changes, against plain loops.

#![allow(clippy::unwrap_used, reason = "a test that fails here has failed")]

mod group;

use ferroce_collectives::{
    Algorithm, Buffer, Collectives, Communicator, DataType, Kind, Operation, Options, Reduction, SharedMemory,
};
use group::{LIMIT, join_again, options, run};

const CHUNK: usize = 4096;
const EAGER: usize = 512;
/// What is around inputs and outputs, and nobody may write.
const GUARD: usize = 24;
const TYPES: [DataType; 3] = [DataType::I32, DataType::U8, DataType::F64];
const REDUCTIONS: [fn(u32) -> Reduction; 6] = [
    |_| Reduction::Sum,
    |_| Reduction::Average,
    |rank| Reduction::PreMulSum(f64::from(rank + 1)),
    |_| Reduction::Product,
    |_| Reduction::Min,
    |_| Reduction::Max,
];

fn small() -> Options {
    options().chunk_bytes(CHUNK as u32).eager_bytes(EAGER as u32)
}

/// Lengths in elements.
fn counts(data_type: DataType) -> Vec<usize> {
    let (chunk, eager) = (CHUNK / data_type.size(), EAGER / data_type.size());
    vec![0, 1, 3, eager - 1, eager, eager + 1, chunk - 1, chunk, chunk + 1, 3 * chunk + 5]
}

/// One operation of all ranks.
#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    size: usize,
    data_type: DataType,
    /// Which of [`REDUCTIONS`].
    reduction: usize,
    /// The elements, or those of each block.
    count: usize,
    differ: bool,
    root: usize,
    in_place: bool,
    number: usize,
}

impl Case {
    /// Elements of a block: of rank `rank`'s; in an all-to-all, of what rank `from` has for it.
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
                // Products are exact, and none is a zero, which would have a sign.
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

    /// What becomes of one element of each rank.
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

    /// Carries it out and checks all bytes.
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

/// All operations of all ranks by one algorithm, or by the communicator's choice.
fn check_all(
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

fn every_operation(size: u32) {
    run(size, small(), None, LIMIT, move |mut ranks, all| {
        let length = 2 * 6 * (3 * CHUNK + 64) + 3 * GUARD;
        let (buffer, private) = (ranks.allocate(length).unwrap(), ranks.allocate_private(length).unwrap());
        check_all(&mut ranks, all, buffer, None, 0);
        for (nth, algorithm) in Algorithm::ALL.into_iter().enumerate() {
            // Ranks 0 and 1 on one host, 2 and 3 on the next, 4 alone.
            let host = u128::from(all.rank() / 2) + 1;
            let by_it = match algorithm {
                // On one host, and known to be without being asked.
                Algorithm::Mapped => small().shared_memory(SharedMemory::Required),
                _ => small().host(host).shared_memory(SharedMemory::Off),
            };
            let by_it = join_again(&mut ranks, all, &by_it.algorithm(algorithm), false);
            if algorithm == Algorithm::Hierarchical && ![1, 4].contains(&size) {
                let why = if size == 2 { "all ranks are on one host" } else { "different numbers of ranks" };
                let refused = by_it.unwrap_err().to_string();
                assert!(refused.contains("algorithm = hierarchical: ") && refused.contains(why), "{refused}");
                continue;
            }
            let by_it = by_it.unwrap();
            // Memory that others can map, and memory that they can't.
            let buffer = if all.rank() % 2 == 0 { buffer } else { private };
            check_all(&mut ranks, by_it, buffer, Some(algorithm), nth * 1000);
            ranks.leave(by_it).unwrap();
        }
        ranks.finish().unwrap();
    });
}

#[test]
fn every_operation_of_one_rank() {
    every_operation(1);
}

#[test]
fn every_operation_of_two_ranks() {
    every_operation(2);
}

#[test]
fn every_operation_of_three_ranks() {
    every_operation(3);
}

#[test]
fn every_operation_of_four_ranks() {
    every_operation(4);
}

#[test]
fn every_operation_of_five_ranks() {
    every_operation(5);
}

/// Each rank sends to all others and receives from all, as one request.
#[test]
fn messages_both_ways_in_one_request() {
    for size in [2, 3] {
        run(size, small(), None, LIMIT, move |mut ranks, all| {
            let rank = all.rank();
            let longest = 3 * CHUNK + 5;
            let room = longest.next_multiple_of(8) as u64;
            let [from, to] = [(); 2].map(|()| ranks.allocate(room as usize * size as usize).unwrap());
            let value =
                |from: u32, to: u32, call: usize, i: usize| (i * 3 + call) as u8 ^ (from * 16 + to) as u8;
            for (call, count) in counts(DataType::U8).into_iter().enumerate() {
                let mut operations = Vec::new();
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let at = u64::from(peer) * room;
                    let bytes: Vec<u8> = (0..count).map(|i| value(rank, peer, call, i)).collect();
                    ranks.write(from, at, &bytes).unwrap();
                    operations.push(Operation::receive(to.at(at), count, DataType::U8, peer));
                    operations.push(Operation::send(from.at(at), count, DataType::U8, peer));
                }
                if rank % 2 == 1 {
                    operations.reverse();
                }
                let request = ranks.start_all(all, &operations).unwrap();
                ranks.wait(request).unwrap();
                for peer in (0..size).filter(|peer| *peer != rank) {
                    let mut got = vec![0; count];
                    ranks.read(to, u64::from(peer) * room, &mut got).unwrap();
                    let expected: Vec<u8> = (0..count).map(|i| value(peer, rank, call, i)).collect();
                    assert!(got == expected, "rank {rank} of {size}, from {peer}, {count} bytes");
                }
            }
            ranks.finish().unwrap();
        });
    }
}

/// A message of one rank to the next, among operations of all.
#[test]
fn a_chain_of_messages_among_operations_of_all() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let rank = all.rank();
        let buffer = ranks.allocate(CHUNK * 8).unwrap();
        for call in 0..20_usize {
            let count = [1, 600, 2000][call % 3];
            if rank > 0 {
                ranks.run(all, &Operation::receive(buffer, count, DataType::I32, rank - 1)).unwrap();
            } else {
                ranks.write(buffer, 0, &(call as i32).to_ne_bytes().repeat(count)).unwrap();
            }
            if rank < 2 {
                ranks.run(all, &Operation::send(buffer, count, DataType::I32, rank + 1)).unwrap();
            }
            ranks
                .run(all, &Operation::all_reduce(buffer, buffer, count, DataType::I32, Reduction::Sum))
                .unwrap();
            let mut got = vec![0; count * 4];
            ranks.read(buffer, 0, &mut got).unwrap();
            assert_eq!(got, (3 * call as i32).to_ne_bytes().repeat(count), "rank {rank}, call {call}");
        }
        ranks.finish().unwrap();
    });
}

/// Requests end in any order, and each with its own result.
#[test]
fn several_requests_are_under_way() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let count = 3 * CHUNK / 4 + 5;
        let buffers: Vec<Buffer> = (0..12).map(|_| ranks.allocate(count * 4).unwrap()).collect();
        for round in 0..5_i32 {
            let mut requests = Vec::new();
            for (nth, buffer) in buffers.iter().enumerate() {
                let count = if nth % 2 == 0 { count } else { 7 };
                let value = (round + nth as i32) * 10 + all.rank() as i32;
                ranks.write(*buffer, 0, &value.to_ne_bytes().repeat(count)).unwrap();
                let operation = match nth % 3 {
                    0 => Operation::all_reduce(*buffer, *buffer, count, DataType::I32, Reduction::Sum),
                    1 => Operation::broadcast(*buffer, *buffer, count, DataType::I32, 1),
                    _ => Operation::reduce(*buffer, *buffer, count, DataType::I32, Reduction::Max, 2),
                };
                requests.push(ranks.start(all, &operation).unwrap());
            }
            let barrier = ranks.start(all, &Operation::barrier()).unwrap();
            // Each rank asks in another order.
            requests.rotate_left(4 * all.rank() as usize);
            while !ranks.test(requests[0]).unwrap() {}
            assert!(ranks.test(requests[0]).is_err(), "a request that has ended");
            requests.into_iter().skip(1).rev().for_each(|request| ranks.wait(request).unwrap());
            ranks.wait(barrier).unwrap();
            for (nth, buffer) in buffers.iter().enumerate() {
                let count = if nth % 2 == 0 { count } else { 7 };
                let start = (round + nth as i32) * 10;
                let due = match nth % 3 {
                    0 => 3 * start + 3,
                    1 => start + 1,
                    _ => start + all.rank() as i32,
                };
                let mut got = vec![0; count * 4];
                ranks.read(*buffer, 0, &mut got).unwrap();
                assert!(got == due.to_ne_bytes().repeat(count), "rank {}, request {nth}", all.rank());
            }
        }
        ranks.finish().unwrap();
    });
}

/// Each with an order of ranks of its own, and operations of both under way.
#[test]
fn two_communicators_on_one_context() {
    run(3, small(), None, LIMIT, |mut ranks, all| {
        let reversed = join_again(&mut ranks, all, &small(), true).unwrap();
        assert_eq!((reversed.rank(), reversed.size()), (2 - all.rank(), 3));
        let count = CHUNK / 4 + 1;
        let [a, b] = [(); 2].map(|()| ranks.allocate(3 * count * 4).unwrap());
        for round in 0..10 {
            for (communicator, buffer) in [(all, a), (reversed, b)] {
                let own = (communicator.rank() as i32 + round).to_ne_bytes().repeat(count);
                ranks.write(buffer, u64::from(communicator.rank()) * 4 * count as u64, &own).unwrap();
            }
            let gather = |communicator: Communicator, buffer: Buffer| {
                let own = buffer.at(u64::from(communicator.rank()) * 4 * count as u64);
                (communicator, Operation::all_gather(own, buffer, count, DataType::I32))
            };
            let mut calls = [gather(all, a), gather(reversed, b)];
            // No order of calls is agreed upon between communicators.
            calls.rotate_left((all.rank() as usize + round as usize) % 2);
            let requests = calls.map(|(communicator, call)| ranks.start(communicator, &call).unwrap());
            requests.into_iter().rev().for_each(|request| ranks.wait(request).unwrap());
            for buffer in [a, b] {
                let mut got = vec![0; 3 * count * 4];
                ranks.read(buffer, 0, &mut got).unwrap();
                let due: Vec<u8> =
                    (0..3).flat_map(|r: i32| (r + round).to_ne_bytes().repeat(count)).collect();
                assert!(got == due, "rank {}, round {round}", all.rank());
            }
        }
        ranks.leave(all).unwrap();
        ranks.run(reversed, &Operation::barrier()).unwrap();
        assert!(ranks.run(all, &Operation::barrier()).is_err(), "a communicator that was left");
        ranks.finish().unwrap();
    });
}
