//! The order of ranks, and the trees over it, by the rule of `schedule/tree.rs`.

use ferroce::driver::topology::{Distance, Topology};

use super::{Rank, remoteness};
use crate::schedule::position_in_tree;

/// The most ranks for which all orders are compared: 12² × 2¹² steps.
const MAX_EXACT: usize = 12;

/// The ring of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ring {
    /// From rank 0 to rank 1, and so on; the last one is back to rank 0. Empty for fewer than two ranks.
    pub hops: Vec<Distance>,
    /// Hops between sockets.
    pub crossings: usize,
    /// Whether no order is better.
    pub is_exact: bool,
    /// The reason for this order.
    pub reason: String,
}

/// One of the two trees of [`Algorithm::Tree`](crate::Algorithm::Tree).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Tree {
    /// The parent of each rank; `None` of rank 0, the root.
    pub parents: Vec<Option<usize>>,
    /// Hops from the farthest rank to the root.
    pub depth: usize,
    /// Hops between sockets.
    pub crossings: usize,
    /// The reason for these parents.
    pub reason: String,
}

impl Ring {
    pub(super) fn new(host: &Topology, ranks: &[Rank], is_exact: bool) -> Ring {
        let next = |at: usize| ranks.get((at + 1) % ranks.len());
        let hops: Vec<Distance> = match ranks.len() {
            0 | 1 => Vec::new(),
            _ => ranks.iter().enumerate().filter_map(|(at, rank)| Some(hop(host, rank, next(at)?))).collect(),
        };
        let crossings = crossings(&hops);
        let how = match is_exact {
            true => "no other order has fewer, and no order with as many is shorter",
            false => {
                "each rank is followed by the nearest remaining one, because there are too many ranks to compare all \
                 orders"
            }
        };
        let reason = match hops.len() {
            0 => "less than two ranks".to_owned(),
            count => format!("{crossings} of {count} hops cross sockets; {how}"),
        };
        Ring { hops, crossings, is_exact, reason }
    }
}

impl Tree {
    pub(super) fn new(host: &Topology, ranks: &[Rank], tree: usize) -> Tree {
        let count = ranks.len();
        let parents: Vec<Option<usize>> =
            (0..count).map(|rank| position_in_tree(count, rank, tree).parent).collect();
        let hops: Vec<Distance> = ranks
            .iter()
            .zip(&parents)
            .filter_map(|(rank, parent)| Some(hop(host, rank, ranks.get((*parent)?)?)))
            .collect();
        let depth = (0..count).map(|rank| depth(&parents, rank)).max().unwrap_or(0);
        let crossings = crossings(&hops);
        let reason = match tree {
            _ if count < 2 => "less than two ranks".to_owned(),
            0 => format!(
                "a binary tree in the order of the ranks, {depth} deep; {crossings} of {} hops cross sockets",
                hops.len()
            ),
            _ => format!(
                "the same tree shifted by one rank, or mirrored, so that the leaves of one are inner nodes of the \
                 other as far as possible: each carries half; {crossings} of {} hops cross sockets",
                hops.len()
            ),
        };
        Tree { parents, depth, crossings, reason }
    }
}

fn depth(parents: &[Option<usize>], rank: usize) -> usize {
    std::iter::successors(Some(rank), |rank| parents.get(*rank).copied().flatten())
        .take(parents.len())
        .count()
        - 1
}

fn hop(host: &Topology, a: &Rank, b: &Rank) -> Distance {
    match (a.place(host), b.place(host)) {
        (Some(a), Some(b)) => host.distance(a, b),
        _ => Distance::Unknown,
    }
}

fn crossings(hops: &[Distance]) -> usize {
    hops.iter().filter(|hop| **hop == Distance::Sys).count()
}

/// The order of ranks along the best ring from rank 0 on, and whether there is none better. Of equal ones it is the
/// lexicographically first.
pub(super) fn order(host: &Topology, ranks: &[Rank]) -> (Vec<usize>, bool) {
    let costs: Vec<Vec<u64>> =
        ranks.iter().map(|a| ranks.iter().map(|b| cost(host, a, b)).collect()).collect();
    match ranks.len() {
        0..=MAX_EXACT => (exact(&costs), true),
        _ => (greedy(&costs), false),
    }
}

/// One more hop between sockets costs more than all other hops together: there are at most [`MAX_RANKS`](super::MAX_RANKS).
fn cost(host: &Topology, a: &Rank, b: &Rank) -> u64 {
    let (Some(a), Some(b)) = (a.place(host), b.place(host)) else { return 100 };
    let (distance, between) = remoteness(host, a, b);
    let between = u64::from(between.min(255));
    match distance {
        Distance::Pix => 1,
        Distance::Pxb => 2,
        Distance::Phb => 3,
        // 10 is a node to itself.
        Distance::Node => 4 + between.saturating_sub(10),
        Distance::Unknown => 300,
        Distance::Sys => (1 << 24) + between,
    }
}

/// By Held and Karp: the cost of the rest of the ring from each rank, for each set of visited ranks.
fn exact(costs: &[Vec<u64>]) -> Vec<usize> {
    let count = costs.len();
    if count < 2 {
        return (0..count).collect();
    }
    let whole = (1_usize << count) - 1;
    let mut rest = vec![u64::MAX; (whole + 1) * count];
    let further = |rest: &[u64], visited: usize, at: usize, next: usize| {
        costs[at][next].saturating_add(rest[(visited | 1 << next) * count + next])
    };
    for visited in (0..=whole).rev().filter(|visited| visited & 1 == 1) {
        for at in (0..count).filter(|at| visited >> at & 1 == 1) {
            let best = match visited == whole {
                true => Some(costs[at][0]),
                false => (0..count)
                    .filter(|next| visited >> next & 1 == 0)
                    .map(|next| further(&rest, visited, at, next))
                    .min(),
            };
            rest[visited * count + at] = best.unwrap_or(u64::MAX);
        }
    }
    let mut order = vec![0];
    let (mut visited, mut at) = (1, 0);
    while visited != whole {
        let left = (0..count).filter(|next| visited >> next & 1 == 0);
        let Some(next) = left.min_by_key(|next| further(&rest, visited, at, *next)) else { break };
        order.push(next);
        (visited, at) = (visited | 1 << next, next);
    }
    order
}

fn greedy(costs: &[Vec<u64>]) -> Vec<usize> {
    let mut left: Vec<usize> = (1..costs.len()).collect();
    let mut order = vec![0];
    while let Some(last) = order.last().copied() {
        let Some(nearest) = (0..left.len()).min_by_key(|at| costs[last][left[*at]]) else { break };
        order.push(left.remove(nearest));
    }
    order
}

#[cfg(test)]
mod tests {
    use ferroce_driver_test_support::random::Random;

    use super::*;

    fn length(costs: &[Vec<u64>], order: &[usize]) -> u64 {
        (0..order.len()).map(|at| costs[order[at]][order[(at + 1) % order.len()]]).sum()
    }

    fn random(random: &mut Random, count: usize) -> Vec<Vec<u64>> {
        let mut costs = vec![vec![0; count]; count];
        for (a, b) in (0..count).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let cost = 1 + random.below(50);
            (costs[a][b], costs[b][a]) = (cost, cost);
        }
        costs
    }

    /// Compares with all orders, one by one.
    #[test]
    fn no_order_is_better_than_the_exact_one() {
        fn best(costs: &[Vec<u64>], order: &mut Vec<usize>) -> u64 {
            if order.len() == costs.len() {
                return length(costs, order);
            }
            let mut least = u64::MAX;
            for next in 1..costs.len() {
                if !order.contains(&next) {
                    order.push(next);
                    least = least.min(best(costs, order));
                    order.pop();
                }
            }
            least
        }
        let mut seed = Random::from_env("FERROCE_RING_SEED");
        for count in [2, 3, 4, 5, 6, 7] {
            for _ in 0..20 {
                let costs = random(&mut seed, count);
                let found = length(&costs, &exact(&costs));
                assert_eq!(found, best(&costs, &mut vec![0]), "FERROCE_RING_SEED={}: {costs:?}", seed.seed());
            }
        }
    }

    #[test]
    fn each_rank_is_in_an_order_once() {
        let mut seed = Random::from_env("FERROCE_RING_SEED");
        for count in [1, 2, 12, 13, 40] {
            let costs = random(&mut seed, count);
            for mut order in [greedy(&costs), exact(&costs[..count.min(MAX_EXACT)])] {
                order.sort_unstable();
                let all: Vec<usize> = (0..order.len()).collect();
                assert_eq!(order, all, "FERROCE_RING_SEED={}", seed.seed());
            }
        }
    }
}
