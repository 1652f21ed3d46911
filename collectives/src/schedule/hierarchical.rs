//! Algorithms for ranks that share hosts: first inside the hosts, then between them.

use super::{Blocks, Builder, Finish, Place, Team, direct, ring, tree};

/// The hosts of the ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Hosts {
    /// The ranks of each host, ascending; hosts by their first rank.
    ranks: Vec<Vec<u32>>,
    /// For each position on a host, the ranks with that position; empty unless all hosts have the same number of ranks.
    columns: Vec<Vec<u32>>,
}

/// A rank's position among the hosts.
struct Seat<'a> {
    /// The ranks of its host.
    host: Team<'a>,
    /// The ranks with the same position on the other hosts.
    column: Team<'a>,
}

impl Hosts {
    /// From a value of each rank that only the ranks of the same host share.
    pub(crate) fn new<T: PartialEq>(hosts: &[T]) -> Hosts {
        let mut ranks: Vec<Vec<u32>> = Vec::new();
        for (rank, host) in hosts.iter().enumerate() {
            match ranks.iter_mut().find(|others| hosts[others[0] as usize] == *host) {
                Some(others) => others.push(rank as u32),
                None => ranks.push(vec![rank as u32]),
            }
        }
        let each = ranks.first().map_or(0, Vec::len);
        let is_even = ranks.iter().all(|host| host.len() == each);
        let column = |place: usize| ranks.iter().map(|host| host[place]).collect();
        let columns = if is_even { (0..each).map(column).collect() } else { Vec::new() };
        Hosts { ranks, columns }
    }

    /// The number of hosts.
    pub(crate) fn count(&self) -> usize {
        self.ranks.len()
    }

    /// The number of ranks per host, if it is the same for all.
    pub(crate) fn each(&self) -> Option<usize> {
        (!self.columns.is_empty()).then_some(self.columns.len())
    }

    /// Why the algorithms of this file can't be used, if they can't.
    pub(crate) fn problem(&self) -> Option<&'static str> {
        match (self.each(), self.count()) {
            (_, 1) => Some("all ranks are on one host"),
            (Some(1), _) => Some("each host has one rank"),
            (None, _) => Some("hosts have different numbers of ranks"),
            _ => None,
        }
    }

    /// The ranks with the same position on the previous and the next host. There must be no [problem](Hosts::problem).
    pub(crate) fn beside(&self, rank: usize) -> [u32; 2] {
        let (before, behind) = ring::neighbours(self.seat(rank).column);
        [before, behind]
    }

    fn seat(&self, rank: usize) -> Seat<'_> {
        let rank = rank as u32;
        let place = |ranks: &Vec<u32>| ranks.iter().position(|other| *other == rank);
        let find = |teams: &'_ [Vec<u32>]| teams.iter().position(|ranks| place(ranks).is_some()).unwrap_or(0);
        let team = |ranks| Team::Some { index: place(ranks).unwrap_or(0), ranks };
        Seat { host: team(&self.ranks[find(&self.ranks)]), column: team(&self.columns[find(&self.columns)]) }
    }
}

/// Reduce-scatter inside each host, all-reduce of each part between the hosts, all-gather inside.
pub(crate) fn all_reduce(
    b: &mut Builder<'_>,
    hosts: &Hosts,
    rank: usize,
    source: Place,
    len: usize,
    finish: Finish,
) {
    let Seat { host, column } = hosts.seat(rank);
    let blocks = Blocks::Cut { start: 0, len, parts: host.size() };
    let own = blocks.block(host.index());
    direct::reduce_scatter_to(b, host, source, blocks, own.start, Finish::No);
    ring::all_reduce(b, column, Place::Output, own.start, own.len(), finish);
    direct::gather_blocks(b, host, Place::Output, own.start, blocks);
}

/// The blocks of the same position on all hosts along a ring, then inside each host.
pub(crate) fn all_gather(b: &mut Builder<'_>, hosts: &Hosts, rank: usize, source: Place, blocks: Blocks<'_>) {
    let Seat { host, column } = hosts.seat(rank);
    let own = blocks.block(rank);
    b.copy(Place::Output.at(own.start), source.at(0), own.len());
    let (left, right) = ring::neighbours(column);
    let size = column.size();
    for step in 0..size - 1 {
        let block = |place: usize| blocks.block(column.rank(place % size) as usize);
        ring::pass_on(b, right, Place::Output, block(column.index() + size - step));
        ring::take(b, left, block(column.index() + 2 * size - step - 1));
    }
    for place in 0..size {
        let block = |member: usize| blocks.block(hosts.columns[member][place] as usize);
        for distance in 1..host.size() {
            let to = (host.index() + distance) % host.size();
            let from = (host.index() + host.size() - distance) % host.size();
            ring::pass_on(b, host.rank(to), Place::Output, block(host.index()));
            ring::take(b, host.rank(from), block(from));
        }
    }
}

/// To the ranks with the root's position on all hosts, then inside each host.
pub(crate) fn broadcast(
    b: &mut Builder<'_>,
    hosts: &Hosts,
    rank: usize,
    root: usize,
    source: Place,
    len: usize,
) {
    let (own, from) = (hosts.seat(rank), hosts.seat(root));
    let first = from.host.index();
    if own.host.index() == first {
        let column = rotated(own.column, from.column.index());
        tree::broadcast(b, column.team(), source, len);
    }
    let host = rotated(own.host, first);
    direct::broadcast(b, host.team(), Place::Output, len);
}

/// A team that starts with another member.
struct Rotated {
    index: usize,
    ranks: Vec<u32>,
}

impl Rotated {
    fn team(&self) -> Team<'_> {
        Team::Some { index: self.index, ranks: &self.ranks }
    }
}

fn rotated(team: Team<'_>, first: usize) -> Rotated {
    let size = team.size();
    let ranks = (0..size).map(|index| team.rank((index + first) % size)).collect();
    Rotated { index: (team.index() + size - first) % size, ranks }
}
