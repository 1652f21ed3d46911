//! The time of a message that is alone in the fabric.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use ferroce_driver::sim::fabric::Part;

use super::plan::{Flow, Plan};

/// Ethernet, IPv4, UDP, BTH and ICRC.
const HEADERS: u64 = 14 + 20 + 8 + 12 + 4;

/// The shortest paths between the hosts of flows.
pub(super) struct Ways {
    path_mtu: u64,
    overhead: u64,
    ways: HashMap<(usize, usize), Way>,
}

#[derive(Clone, Copy)]
struct Way {
    /// The sum over all links.
    delay: Duration,
    /// The rate of the slowest link, in bit/s.
    rate: u64,
    /// The sum of the bit times of all links, in seconds.
    bit: f64,
}

impl Ways {
    pub(super) fn of(plan: &Plan) -> Ways {
        let mut neighbours: HashMap<Part, Vec<(Part, Duration, u64)>> = HashMap::new();
        for cable in &plan.topology.links {
            let [a, b] = cable.ends;
            let rate = cable.link.rate.unwrap_or(u64::MAX);
            neighbours.entry(a).or_default().push((b, cable.link.delay, rate));
            neighbours.entry(b).or_default().push((a, cable.link.delay, rate));
        }
        // Of parallel links, the fastest counts.
        neighbours.values_mut().for_each(|links| links.sort_by_key(|(_, _, rate)| Reverse(*rate)));
        let mut ways = HashMap::new();
        let mut sources: Vec<usize> = plan.flows.iter().map(|flow| flow.from).collect();
        sources.sort_unstable();
        sources.dedup();
        for source in sources {
            let mut reached = HashMap::new();
            let mut queue = VecDeque::new();
            let start = Way { delay: Duration::ZERO, rate: u64::MAX, bit: 0.0 };
            reached.insert(Part::Host(source), start);
            queue.push_back(Part::Host(source));
            while let Some(part) = queue.pop_front() {
                let way = reached[&part];
                for (next, delay, rate) in neighbours.get(&part).into_iter().flatten() {
                    if !reached.contains_key(next) {
                        let bit = way.bit + 1.0 / *rate as f64;
                        let way = Way { delay: way.delay + *delay, rate: way.rate.min(*rate), bit };
                        reached.insert(*next, way);
                        queue.push_back(*next);
                    }
                }
            }
            for flow in plan.flows.iter().filter(|flow| flow.from == source) {
                ways.extend(reached.get(&Part::Host(flow.to)).map(|way| ((flow.from, flow.to), *way)));
            }
        }
        let path_mtu = plan.transport.path_mtu.bytes().into();
        Ways { path_mtu, overhead: plan.fabric.overhead.into(), ways }
    }

    /// The time from the first byte to the acknowledgement of the last one: all packets over the slowest link, the last
    /// one (the shortest) over the other links, and the acknowledgement back.
    pub(super) fn alone(&self, flow: &Flow, bytes: u64) -> Duration {
        let Some(Way { delay, rate, bit }) = self.ways.get(&(flow.from, flow.to)).copied() else {
            return Duration::ZERO;
        };
        let around = HEADERS + self.overhead;
        let last = (bytes - 1) % self.path_mtu + 1 + around;
        let all = bytes + bytes.div_ceil(self.path_mtu) * around;
        let slowest = 1.0 / rate as f64;
        let bits = |bytes: u64| 8.0 * bytes as f64;
        let time = bits(all) * slowest + bits(last) * (bit - slowest) + bits(4 + around) * bit;
        2 * delay + Duration::from_secs_f64(time.max(0.0))
    }
}
