//! Every algorithm for 1 to 64 ranks: each element arrives at its destination, with each contribution once, in the same
//! order on all ranks, for any interleaving.

mod numbers;

use proptest::prelude::*;

use super::simulation::{Elements, Rank, run, run_without};
use super::*;
use crate::operation::Kind;

/// The composition of an element, in the order of reduction.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Symbol {
    Garbage,
    Of(u32, usize),
    /// Multiplied by the rank's factor.
    Scaled(Box<Symbol>),
    Sum(Vec<Symbol>),
    Divided(Box<Symbol>),
}

struct Symbols;

impl Elements for Symbols {
    type Element = Symbol;

    fn reduce(&self, operands: &[Symbol], finish: Finish, rank: usize) -> Symbol {
        let sum = match operands {
            [one] => one.clone(),
            several => Symbol::Sum(several.to_vec()),
        };
        match finish {
            Finish::No => sum,
            Finish::Whole => Symbol::Divided(Box::new(sum)),
            Finish::Scale => {
                assert!(
                    matches!(sum, Symbol::Of(of, _) if of as usize == rank),
                    "{sum:?} scaled by rank {rank}"
                );
                Symbol::Scaled(Box::new(sum))
            }
        }
    }
}

impl Symbol {
    /// The ranks whose element `index` is included, in order.
    fn ranks(&self, index: usize, is_scaled: bool) -> Vec<u32> {
        match self {
            Symbol::Of(rank, at) if !is_scaled && *at == index => vec![*rank],
            Symbol::Scaled(of) if is_scaled => of.ranks(index, false),
            Symbol::Sum(parts) => parts.iter().flat_map(|part| part.ranks(index, is_scaled)).collect(),
            other => panic!("{other:?} where element {index} was due"),
        }
    }
}

#[derive(Clone, Debug)]
struct Case {
    kind: Kind,
    algorithm: Algorithm,
    size: usize,
    /// The number of elements, in total or in each block.
    counts: Vec<usize>,
    differ: bool,
    root: usize,
    chunk: usize,
    lands_above: usize,
    is_average: bool,
    is_scaled: bool,
    in_place: bool,
    hosts: usize,
}

fn ends(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    counts
        .scan(0, |end, count| {
            *end += count;
            Some(*end)
        })
        .collect()
}

impl Case {
    fn count(&self) -> usize {
        self.counts[0]
    }

    /// The number of elements of the block from `from` to `to`.
    fn block(&self, from: usize, to: usize) -> usize {
        match self.kind {
            _ if !self.differ => self.count(),
            Kind::AllToAll => self.counts[(from * 3 + to) % self.size],
            Kind::AllGather | Kind::Gather => self.counts[from],
            _ => self.counts[to],
        }
    }

    fn hosts(&self) -> Hosts {
        let hosts: Vec<usize> = (0..self.size).map(|rank| rank % self.hosts).collect();
        Hosts::new(&hosts)
    }

    fn sent(&self, rank: usize) -> Vec<usize> {
        ends((0..self.size).map(|to| self.block(rank, to)))
    }

    fn received(&self, rank: usize) -> Vec<usize> {
        ends((0..self.size).map(|from| self.block(from, rank)))
    }

    /// The numbers of elements of a rank's input and output.
    fn lengths(&self, rank: usize) -> (usize, usize) {
        let (sent, received) = (self.sent(rank)[self.size - 1], self.received(rank)[self.size - 1]);
        let is_root = rank == self.root;
        let if_root = |len: usize| if is_root { len } else { 0 };
        match self.kind {
            Kind::AllReduce => (self.count(), self.count()),
            Kind::ReduceScatter => (sent, self.block(0, rank)),
            Kind::AllGather => (self.block(rank, 0), received),
            Kind::Broadcast => (if_root(self.count()), self.count()),
            Kind::Reduce => (self.count(), if_root(self.count())),
            Kind::AllToAll => (sent, received),
            Kind::Gather => (self.block(rank, 0), if_root(received)),
            Kind::Scatter => (if_root(sent), self.block(0, rank)),
            Kind::Send | Kind::Receive | Kind::Barrier => (0, 0),
        }
    }

    fn rank(&self, rank: usize) -> Rank<Symbol> {
        self.rank_of(rank, |at| Symbol::Of(rank as u32, at), Symbol::Garbage)
    }

    /// A rank with these elements, and `garbage` in memory without contents.
    fn rank_of<T: Clone>(&self, rank: usize, element: impl Fn(usize) -> T, garbage: T) -> Rank<T> {
        let (sent, received) = (self.sent(rank), self.received(rank));
        let own = match self.kind {
            Kind::Scatter => self.block(0, rank),
            Kind::Gather => self.block(rank, 0),
            _ => self.count(),
        };
        let differ = self.differ && (rank == self.root || !matches!(self.kind, Kind::Gather | Kind::Scatter));
        let task = Task {
            kind: self.kind,
            count: if differ { usize::MAX } else { own },
            sent: differ.then_some(&sent),
            received: differ.then_some(&received),
            root: self.root,
            is_scaled: self.is_scaled,
            is_average: self.is_average,
            in_place: self.in_place,
        };
        let task = match self.kind {
            Kind::AllReduce | Kind::Broadcast | Kind::Reduce => {
                Task { count: self.count(), sent: None, received: None, ..task }
            }
            _ => task,
        };
        let hosts = self.hosts();
        let seat = Seat { rank, size: self.size, hosts: &hosts };
        let window = [usize::MAX, 1, 2][self.count() % 3];
        let shape = Shape { chunk: self.chunk, lands_above: self.lands_above, window };
        let schedule = plan(&task, self.algorithm, seat, shape);
        let (input, output) = self.lengths(rank);
        let elements = |len: usize| (0..len).map(&element).collect::<Vec<T>>();
        if !self.in_place {
            return Rank::new(elements(input), vec![garbage.clone(); output], None, schedule, &garbage);
        }
        // As documented for callers: the shorter one is inside the longer one.
        let before = |ends: &[usize]| rank.checked_sub(1).map_or(0, |before| ends[before]);
        let shared = match self.kind {
            Kind::AllGather => (before(&received), 0),
            Kind::Gather if rank == self.root => (before(&received), 0),
            Kind::ReduceScatter => (0, before(&sent)),
            Kind::Scatter if rank == self.root => (0, before(&sent)),
            _ => (0, 0),
        };
        let mut memory = vec![garbage.clone(); input.max(output) + shared.0.max(shared.1)];
        memory[shared.0..shared.0 + input].clone_from_slice(&elements(input));
        Rank::new(memory, Vec::new(), Some(shared), schedule, &garbage)
    }

    fn check(&self, ranks: &mut [Rank<Symbol>]) {
        let mut firsts: Vec<Option<Symbol>> = Vec::new();
        for (number, rank) in ranks.iter_mut().enumerate() {
            let (_, len) = self.lengths(number);
            let start = |ends: &[usize]| number.checked_sub(1).map_or(0, |before| ends[before]);
            for (at, got) in rank.result(len).into_iter().enumerate() {
                if self.kind.reduces() {
                    let index =
                        if self.kind == Kind::ReduceScatter { start(&self.sent(number)) + at } else { at };
                    if firsts.len() <= index {
                        firsts.resize(index + 1, None);
                    }
                    let first = firsts[index].get_or_insert_with(|| got.clone());
                    assert_eq!(*first, got, "element {index} is not the same on all ranks");
                    let sum = match got {
                        Symbol::Divided(sum) if self.is_average => *sum,
                        sum => {
                            assert!(!self.is_average, "not divided: {sum:?}");
                            sum
                        }
                    };
                    let mut found = sum.ranks(index, self.is_scaled);
                    found.sort_unstable();
                    assert!(
                        found.iter().copied().eq(0..self.size as u32),
                        "element {index}: of ranks {found:?}"
                    );
                    continue;
                }
                let due = match self.kind {
                    Kind::Broadcast => Symbol::Of(self.root as u32, at),
                    Kind::Scatter => Symbol::Of(self.root as u32, start(&self.sent(self.root)) + at),
                    _ => {
                        let received = self.received(number);
                        let from = received.partition_point(|end| *end <= at);
                        let in_block = at - from.checked_sub(1).map_or(0, |before| received[before]);
                        let first = if self.kind == Kind::AllToAll { start(&self.sent(from)) } else { 0 };
                        Symbol::Of(from as u32, first + in_block)
                    }
                };
                assert_eq!(got, due, "rank {number}, element {at}");
            }
        }
    }

    fn run(&self, slots: usize, eager_up_to: usize, mut pick: impl FnMut(usize) -> usize) {
        let mut ranks: Vec<_> = (0..self.size).map(|rank| self.rank(rank)).collect();
        run(&Symbols, &mut ranks, slots, eager_up_to, &mut pick);
        self.check(&mut ranks);
    }

    /// Whether there is such an operation.
    fn makes_sense(&self) -> bool {
        let hierarchical =
            self.algorithm != Algorithm::Hierarchical || self.size == 1 || self.hosts().problem().is_none();
        let in_place = !self.in_place || self.kind != Kind::AllToAll;
        let differ = !self.differ
            || matches!(
                self.kind,
                Kind::ReduceScatter | Kind::AllGather | Kind::AllToAll | Kind::Gather | Kind::Scatter
            );
        let reduces = self.kind.reduces() || !(self.is_average || self.is_scaled);
        self.algorithm != Algorithm::Mapped
            && self.algorithm.applies_to(self.kind)
            && hierarchical
            && in_place
            && differ
            && reduces
    }
}

fn cases(sizes: std::ops::RangeInclusive<usize>, longest: usize) -> impl Strategy<Value = Case> {
    let kinds = [
        Kind::AllReduce,
        Kind::ReduceScatter,
        Kind::AllGather,
        Kind::Broadcast,
        Kind::Reduce,
        Kind::AllToAll,
        Kind::Gather,
        Kind::Scatter,
    ];
    (sizes, prop::sample::select(kinds.to_vec()), prop::sample::select(Algorithm::ALL.to_vec()))
        .prop_flat_map(move |(size, kind, algorithm)| {
            let numbers = (
                prop::collection::vec(0..=longest, size),
                0..size,
                1..=longest.max(1),
                0..=longest,
                1..=size.min(4),
            );
            (Just((size, kind, algorithm)), numbers, prop::array::uniform4(any::<bool>()))
        })
        .prop_map(|((size, kind, algorithm), (counts, root, chunk, lands_above, hosts), flags)| {
            let [differ, is_average, is_scaled, in_place] = flags;
            Case {
                kind,
                algorithm,
                size,
                counts,
                differ,
                root,
                chunk,
                lands_above,
                is_average,
                is_scaled,
                in_place,
                hosts,
            }
        })
        .prop_filter("no such operation", Case::makes_sense)
}

proptest! {
    #![proptest_config(ProptestConfig { max_global_rejects: 1_000_000, ..ProptestConfig::default() })]

    #[test]
    fn every_element_arrives_at_its_destination(
        case in cases(1..=9, 30),
        slots in 1usize..5,
        eager in 0usize..30,
        picks in prop::collection::vec(any::<prop::sample::Index>(), 64),
    ) {
        let mut pick = picks.iter().cycle();
        case.run(slots, eager, |of| pick.next().map_or(0, |index| index.index(of)));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_global_rejects: 1_000_000, ..ProptestConfig::default() })]

    #[test]
    fn every_element_arrives_at_its_destination_for_many_ranks(
        case in cases(10..=64, 70),
        slots in 1usize..5,
        eager in 0usize..70,
        picks in prop::collection::vec(any::<prop::sample::Index>(), 64),
    ) {
        prop_assume!(case.kind != Kind::AllToAll || case.size < 20);
        let case = Case { chunk: case.chunk.max(case.count() / 4).max(1), ..case };
        let mut pick = picks.iter().cycle();
        case.run(slots, eager, |of| pick.next().map_or(0, |index| index.index(of)));
    }
}

/// All operations with all algorithms, in place or not, for few ranks.
#[test]
fn all_combinations_for_one_to_nine_ranks() {
    let mut runs = 0;
    for size in 1..=9 {
        for kind in Kind::ALL {
            for algorithm in Algorithm::ALL {
                for flags in 0..16 {
                    let [in_place, differ, is_average, is_scaled] = [1, 2, 4, 8].map(|bit| flags & bit != 0);
                    let case = Case {
                        kind,
                        algorithm,
                        size,
                        counts: (0..size).map(|i| (i * 7 + 13) % 17).collect(),
                        differ,
                        root: size / 2,
                        chunk: 3,
                        lands_above: 1,
                        is_average,
                        is_scaled,
                        in_place,
                        hosts: if size % 3 == 0 { 3 } else { 2.min(size) },
                    };
                    if case.makes_sense() && !matches!(kind, Kind::Send | Kind::Receive) {
                        case.run(2, 1, |of| of - 1);
                        case.run(3, 0, |_| 0);
                        runs += 2;
                    }
                }
            }
        }
    }
    println!("{runs} runs");
    assert!(runs > 1000);
}

/// No rank passes a barrier that another rank has not reached.
#[test]
fn a_barrier_waits_for_every_rank() {
    for size in (2..=17).chain([31, 32, 33, 64]) {
        for late in 0..size {
            let case = Case {
                kind: Kind::Barrier,
                algorithm: Algorithm::Direct,
                size,
                counts: vec![0],
                differ: false,
                root: 0,
                chunk: 1,
                lands_above: 1,
                is_average: false,
                is_scaled: false,
                in_place: false,
                hosts: 1,
            };
            let mut ranks: Vec<_> = (0..size).map(|rank| case.rank(rank)).collect();
            let ended = run_without(&Symbols, &mut ranks, 4, late);
            assert!(ended.is_empty(), "{ended:?} of {size} have ended without rank {late}");
        }
    }
}

#[test]
fn a_leaf_of_one_tree_is_not_a_leaf_of_the_other() {
    for size in 2..=130 {
        for tree in [0, 1] {
            let mut reached = vec![false; size];
            let mut queue = vec![0];
            while let Some(member) = queue.pop() {
                assert!(!std::mem::replace(&mut reached[member], true), "{size} ranks: twice in tree {tree}");
                for child in tree::position(size, member, tree).children.into_iter().flatten() {
                    assert_eq!(
                        tree::position(size, child, tree).parent,
                        Some(member),
                        "{size} ranks, tree {tree}"
                    );
                    queue.push(child);
                }
            }
            assert!(reached.into_iter().all(|reached| reached), "{size} ranks: not all in tree {tree}");
        }
        let both = (1..size).filter(|member| {
            [0, 1].iter().all(|tree| tree::position(size, *member, *tree).children == [None, None])
        });
        assert!(both.count() <= 1, "{size} ranks: leaves of both trees");
    }
}
