//! When each host is polled next.

use std::time::Duration;

use ferroce::Nanos;

/// One time for each host. A tree of which each node has the earlier of the two times below it, in one piece of memory:
/// times are put off and brought forward with each poll, and a heap would fill with those that no longer hold.
pub(super) struct Wakes {
    /// The root is 1, below node n are 2n and 2n + 1, and the second half are the hosts.
    nodes: Vec<Nanos>,
    /// How long after a poll a host is polled again at the earliest.
    interval: Duration,
    /// When each host was polled.
    polled: Vec<Option<Nanos>>,
}

impl Wakes {
    /// For so many hosts, none of which is to be polled.
    pub(super) fn new(hosts: usize, interval: Duration) -> Wakes {
        let nodes = vec![Nanos::NEVER; 2 * hosts.next_power_of_two()];
        Wakes { nodes, interval, polled: vec![None; hosts] }
    }

    /// A host is to be polled, not before it may.
    pub(super) fn wake(&mut self, host: usize, time: Nanos) {
        let earliest = self.polled[host].map_or(Nanos::ZERO, |polled| polled + self.interval);
        let time = time.max(earliest);
        if time < self.of(host) {
            self.set(host, time);
        }
    }

    /// A host is polled.
    pub(super) fn polled(&mut self, host: usize, now: Nanos) {
        self.polled[host] = Some(now);
    }

    /// When the first of them is to be polled; [`Nanos::NEVER`] if none is.
    pub(super) fn next(&self) -> Nanos {
        self.nodes[1]
    }

    /// When a host is to be polled.
    fn of(&self, host: usize) -> Nanos {
        self.nodes[self.leaf(host)]
    }

    fn set(&mut self, host: usize, time: Nanos) {
        let mut node = self.leaf(host);
        self.nodes[node] = time;
        while node > 1 {
            node /= 2;
            let earlier = self.nodes[2 * node].min(self.nodes[2 * node + 1]);
            if self.nodes[node] == earlier {
                return;
            }
            self.nodes[node] = earlier;
        }
    }

    /// Takes a host whose time has come, the one with the lowest number first. It is not to be polled then until told.
    pub(super) fn pop(&mut self, now: Nanos) -> Option<usize> {
        if self.next() > now || self.next() == Nanos::NEVER {
            return None;
        }
        let mut node = 1;
        while node < self.nodes.len() / 2 {
            node = 2 * node + usize::from(self.nodes[2 * node] > now);
        }
        let host = node - self.nodes.len() / 2;
        self.set(host, Nanos::NEVER);
        Some(host)
    }

    fn leaf(&self, host: usize) -> usize {
        self.nodes.len() / 2 + host
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::chance::Chance;

    /// Against a list.
    #[test]
    fn hosts_come_when_their_time_has_come() {
        let mut chance = Chance::new(1, 0, 0);
        for hosts in [1, 2, 3, 16, 17] {
            let mut wakes = Wakes::new(hosts, Duration::ZERO);
            let mut expected = vec![Nanos::NEVER; hosts];
            for now in 0..2000 {
                for _ in 0..2 {
                    let host = chance.below(hosts as u64) as usize;
                    let time = Nanos(now + chance.below(20));
                    wakes.set(host, time);
                    expected[host] = time;
                    assert_eq!(wakes.of(host), time);
                }
                assert_eq!(Some(wakes.next()), expected.iter().copied().min());
                let taken: Vec<_> = std::iter::from_fn(|| wakes.pop(Nanos(now))).collect();
                let due: Vec<_> = (0..hosts).filter(|host| expected[*host] <= Nanos(now)).collect();
                assert_eq!(taken, due);
                due.into_iter().for_each(|host| expected[host] = Nanos::NEVER);
            }
            assert_eq!(Wakes::new(hosts, Duration::ZERO).pop(Nanos::NEVER), None);
        }
    }
}
