//! Paths through the fabric: all shortest ones over links and switches that are up.

use std::collections::VecDeque;
use std::ops::Range;

use crate::prefetch;

/// For each pair of switches: the ports on shortest paths.
#[derive(Default)]
pub(super) struct Routes {
    switches: usize,
    /// Lists of ports, without duplicates: most switches are reached by the same ports as others.
    ports: Vec<u32>,
    ways: Vec<Range<u32>>,
}

impl Routes {
    /// `neighbours` lists, for each switch that is up, its neighbour switches that are up, with its port to each.
    pub(super) fn new(neighbours: &[Vec<(u32, u32)>]) -> Routes {
        let switches = neighbours.len();
        let mut routes = Routes { switches, ports: Vec::new(), ways: vec![0..0; switches * switches] };
        let mut distance = vec![u32::MAX; switches];
        let mut reached = VecDeque::new();
        // The lists of each switch.
        let mut lists: Vec<Vec<Range<u32>>> = vec![Vec::new(); switches];
        let mut list: Vec<u32> = Vec::new();
        for target in 0..switches {
            distance.fill(u32::MAX);
            distance[target] = 0;
            reached.push_back(target);
            while let Some(at) = reached.pop_front() {
                for (next, _) in &neighbours[at] {
                    let next = *next as usize;
                    if distance[next] == u32::MAX {
                        distance[next] = distance[at] + 1;
                        reached.push_back(next);
                    }
                }
            }
            for (at, neighbours) in neighbours.iter().enumerate() {
                let nearer = |next: u32| distance[next as usize].checked_add(1) == Some(distance[at]);
                list.clear();
                list.extend(neighbours.iter().filter(|(next, _)| nearer(*next)).map(|(_, port)| *port));
                let known = lists[at].iter().find(|known| routes.list(known) == list).cloned();
                routes.ways[at * switches + target] = known.unwrap_or_else(|| {
                    let start = routes.ports.len() as u32;
                    routes.ports.extend(&list);
                    let new = start..routes.ports.len() as u32;
                    lists[at].push(new.clone());
                    new
                });
            }
        }
        routes
    }

    /// Prefetches the data of [`ports`](Routes::ports).
    #[inline]
    pub(super) fn prefetch(&self, from: u32, to: u32) {
        if let Some(way) = self.ways.get(from as usize * self.switches + to as usize) {
            prefetch(way);
        }
    }

    /// The ports of switch `from` on shortest paths to switch `to`.
    pub(super) fn ports(&self, from: u32, to: u32) -> &[u32] {
        let way = self.ways.get(from as usize * self.switches + to as usize);
        way.map_or(&[], |way| self.list(way))
    }

    fn list(&self, Range { start, end }: &Range<u32>) -> &[u32] {
        &self.ports[*start as usize..*end as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routes_are_all_shortest_paths() {
        // 0 and 1 are leaves, 2 and 3 spines; 4 is connected to 3; 5 is isolated.
        let edges = [(0, 2), (0, 3), (1, 2), (1, 3), (3, 4)];
        let mut neighbours = vec![Vec::new(); 6];
        for (number, (a, b)) in (0..).zip(edges) {
            neighbours[a].push((b as u32, 10 * number));
            neighbours[b].push((a as u32, 10 * number + 1));
        }
        let routes = Routes::new(&neighbours);
        assert_eq!(routes.ports(0, 1), [0, 10]);
        assert_eq!(routes.ports(2, 1), [21]);
        assert_eq!(routes.ports(0, 4), [10]);
        assert_eq!(routes.ports(2, 4), [1, 21]);
        assert!(routes.ports(0, 5).is_empty() && routes.ports(0, 0).is_empty());
    }
}
