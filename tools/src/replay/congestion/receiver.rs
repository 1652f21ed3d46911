//! The notification point: the marked packets that a host received, and the CNPs that it sent.

use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;
use std::time::Duration;

use ferroce::{Gid, Nanos, Qpn};
use serde::Serialize;

use super::super::sample::Sample;
use super::micros;

/// A host that received marked packets or sent CNPs.
#[derive(Serialize)]
pub(super) struct Receiver {
    address: String,
    marked: u64,
    cnps: u64,
    queue_pairs_told: usize,
    /// The least time between two CNPs, in µs: to one queue pair, to one host, and to any.
    least_us_to_queue_pair: Option<f64>,
    least_us_to_host: Option<f64>,
    least_us: Option<f64>,
}

/// The least time between two events of a kind.
struct Least<K> {
    last: HashMap<K, Nanos>,
    least: Option<Duration>,
}

impl<K: Hash + Eq> Least<K> {
    fn new() -> Least<K> {
        Least { last: HashMap::new(), least: None }
    }

    fn note(&mut self, of: K, at: Nanos) {
        if let Some(before) = self.last.insert(of, at) {
            let gap = at.since(before);
            self.least = Some(self.least.map_or(gap, |least| least.min(gap)));
        }
    }

    fn us(&self) -> Option<f64> {
        self.least.map(|least| least.as_nanos() as f64 / 1e3)
    }
}

impl Receiver {
    pub(super) const GROUPS: &str = "                       queue pairs | least us between two CNPs to a";
    pub(super) const HEADER: &str = "    marked  CNPs sent         told | queue pair       host     anyone";

    /// The receivers in a capture, the one with the most CNPs first, at most `most`.
    pub(super) fn all(samples: &[Sample], most: usize) -> Vec<Receiver> {
        struct Seen {
            marked: u64,
            cnps: u64,
            queue_pair: Least<(Gid, Qpn)>,
            host: Least<Gid>,
            anyone: Least<()>,
        }
        let mut hosts: Vec<(Gid, Seen)> = Vec::new();
        let mut places: HashMap<Gid, usize> = HashMap::new();
        for sample in samples {
            let host = match (sample.is_cnp(), sample.is_marked) {
                (true, _) => sample.source,
                (false, true) => sample.destination,
                (false, false) => continue,
            };
            if hosts.len() == most && !places.contains_key(&host) {
                continue;
            }
            let place = *places.entry(host).or_insert_with(|| {
                let (queue_pair, peer, anyone) = (Least::new(), Least::new(), Least::new());
                hosts.push((host, Seen { marked: 0, cnps: 0, queue_pair, host: peer, anyone }));
                hosts.len() - 1
            });
            let seen = &mut hosts[place].1;
            if sample.is_cnp() {
                seen.cnps += 1;
                seen.queue_pair.note((sample.destination, sample.to), sample.at);
                seen.host.note(sample.destination, sample.at);
                seen.anyone.note((), sample.at);
            } else {
                seen.marked += 1;
            }
        }
        hosts.sort_by_key(|(_, seen)| std::cmp::Reverse((seen.cnps, seen.marked)));
        let receivers = hosts.into_iter().map(|(host, seen)| Receiver {
            address: host.to_ip().to_string(),
            marked: seen.marked,
            cnps: seen.cnps,
            queue_pairs_told: seen.queue_pair.last.len(),
            least_us_to_queue_pair: seen.queue_pair.us(),
            least_us_to_host: seen.host.us(),
            least_us: seen.anyone.us(),
        });
        receivers.collect()
    }

    pub(super) fn name(&self) -> String {
        self.address.clone()
    }
}

impl fmt::Display for Receiver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>10} {:>10} {:>12} | {:>10} {:>10} {:>10}",
            self.marked,
            self.cnps,
            self.queue_pairs_told,
            micros(self.least_us_to_queue_pair),
            micros(self.least_us_to_host),
            micros(self.least_us)
        )
    }
}
