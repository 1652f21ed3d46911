//! The next poll of each host.

use std::time::Duration;

use ferroce::Nanos;

/// One time for each host, in a tree in one array. Each node is the earlier of its two children. A heap would fill with
/// stale entries, since each poll postpones or advances times.
pub(super) struct Wakes {
    /// The root is 1, the children of node n are 2n and 2n + 1, and the second half are the hosts.
    nodes: Vec<Nanos>,
    /// The least time between two polls of a host.
    interval: Duration,
    /// The last poll of each host.
    polled: Vec<Option<Nanos>>,
}

impl Wakes {
    /// For `hosts` hosts, without any scheduled poll.
    pub(super) fn new(hosts: usize, interval: Duration) -> Wakes {
        let nodes = vec![Nanos::NEVER; 2 * hosts.next_power_of_two()];
        Wakes { nodes, interval, polled: vec![None; hosts] }
    }

    /// Schedules a poll of a host at `time`, or later if the interval requires it.
    pub(super) fn wake(&mut self, host: usize, time: Nanos) {
        let earliest = self.polled[host].map_or(Nanos::ZERO, |polled| polled + self.interval);
        let time = time.max(earliest);
        if time < self.of(host) {
            self.set(host, time);
        }
    }

    /// Records a poll of a host.
    pub(super) fn polled(&mut self, host: usize, now: Nanos) {
        self.polled[host] = Some(now);
    }

    /// The time of the earliest poll; [`Nanos::NEVER`] if none is scheduled.
    pub(super) fn next(&self) -> Nanos {
        self.nodes[1]
    }

    /// The time of a host's poll.
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

    /// Takes a host whose poll is due, lowest number first. Its next poll is not scheduled.
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

    /// Compares with a list.
    #[test]
    fn hosts_are_polled_when_due() {
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
