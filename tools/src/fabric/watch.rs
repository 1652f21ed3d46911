//! The samples of a run: goodput, rates and queues.

use std::cmp::Reverse;
use std::time::Duration;

use ferroce_driver::sim::fabric::{Built, Fabric, Node, PortId, QueueCounters};

use super::host::Host;
use super::outcome::{LinkPauses, QueueOutcome};
use super::plan::Plan;

pub(super) struct Watch {
    warm_up: Duration,
    interval: Duration,
    /// The class of the data.
    class: u8,
    times: Vec<Duration>,
    flows: Vec<WatchedFlow>,
    queues: Vec<WatchedQueue>,
    /// Rates of the hosts' links, in bit/s.
    host_rates: Vec<f64>,
}

struct WatchedFlow {
    /// Sender and receiver: host, and queue pair of the host.
    ends: [(usize, usize); 2],
    /// Bytes that had arrived in order at the last sample, and at the end of the warm-up.
    arrived: u64,
    at_start: u64,
    /// The time with data to send and no arrival: until the last sample, and the maximum.
    still: Duration,
    stillest: Duration,
    goodputs: Vec<f64>,
    rates: Vec<f64>,
}

struct WatchedQueue {
    port: PortId,
    /// In bit/s.
    rate: u64,
    at_start: QueueCounters,
    /// Bytes that the port had sent at the end of the warm-up.
    sent_at_start: u64,
    lengths: Vec<u64>,
}

impl Watch {
    /// `ends`: for each flow, its queue pairs at the two hosts.
    pub(super) fn new(plan: &Plan, built: &Built, ends: &[[usize; 2]]) -> Watch {
        let flows = plan.flows.iter().zip(ends).map(|(flow, [from, to])| {
            let ends = [(flow.from, *from), (flow.to, *to)];
            WatchedFlow {
                ends,
                arrived: 0,
                at_start: 0,
                still: Duration::ZERO,
                stillest: Duration::ZERO,
                goodputs: Vec::new(),
                rates: Vec::new(),
            }
        });
        let flows = flows.collect();
        let fabric = &built.fabric;
        let mut host_rates = vec![0.0; built.hosts.len()];
        let mut queues = Vec::new();
        for (link, cable) in built.links.iter().zip(&plan.topology.links) {
            let rate = cable.link.rate.unwrap_or(u64::MAX);
            for port in fabric.ends(*link) {
                match fabric.owner(port).0 {
                    Node::Host(host) => host_rates[host.number()] = rate as f64,
                    Node::Switch(_) => queues.push(WatchedQueue {
                        port,
                        rate,
                        at_start: QueueCounters::default(),
                        sent_at_start: 0,
                        lengths: Vec::new(),
                    }),
                }
            }
        }
        // All hosts and switches have the same map, unless the plan differs; then the first switch counts.
        let classes = plan.topology.switches.first().map(|switch| switch.classes).unwrap_or_default();
        let class = classes.class(plan.transport.dscp);
        let (warm_up, interval) = (plan.warm_up, plan.sample);
        Watch { warm_up, interval, class, times: Vec::new(), flows, queues, host_rates }
    }

    pub(super) fn sample(&mut self, fabric: &Fabric, hosts: &[Host], now: Duration) {
        let interval = now - self.times.last().copied().unwrap_or_default();
        let ends_warm_up = self.times.last().is_none_or(|last| *last < self.warm_up) && now >= self.warm_up;
        self.times.push(now);
        for flow in &mut self.flows {
            let [(from, end), (to, there)] = flow.ends;
            let arrived = hosts[to].expected(there).map_or(0, |psn| hosts[from].payload_before(end, psn));
            let before = flow.arrived;
            flow.arrived = arrived.max(before);
            let is_still = flow.arrived == before && hosts[from].is_busy(end);
            flow.still = if is_still { flow.still + interval } else { Duration::ZERO };
            flow.stillest = flow.stillest.max(flow.still);
            flow.goodputs.push(8.0 * (flow.arrived - before) as f64 / interval.as_secs_f64());
            flow.rates.push(hosts[from].rate(end).unwrap_or(0) as f64);
            if ends_warm_up && !self.warm_up.is_zero() {
                flow.at_start = flow.arrived;
            }
        }
        for queue in &mut self.queues {
            queue.lengths.push(fabric.queue_bytes(queue.port, self.class));
            if ends_warm_up && !self.warm_up.is_zero() {
                queue.at_start = fabric.queue_counters(queue.port, self.class);
                queue.sent_at_start = fabric.port_counters(queue.port).wire_bytes;
            }
        }
    }

    /// Moves goodput above the rate of a receiver's link to earlier samples. It is counted late: a retransmitted packet
    /// puts packets of earlier samples in order at once, and a host polls with a delay.
    pub(super) fn settle(&mut self) {
        let mut earlier = vec![0.0; self.flows.len()];
        for sample in (0..self.times.len()).rev() {
            let before = sample.checked_sub(1).map_or(Duration::ZERO, |before| self.times[before]);
            let seconds = (self.times[sample] - before).as_secs_f64();
            let mut sums = vec![0.0; self.host_rates.len()];
            for (flow, earlier) in self.flows.iter_mut().zip(&earlier) {
                flow.goodputs[sample] += earlier / seconds;
                sums[flow.ends[1].0] += flow.goodputs[sample];
            }
            for (flow, earlier) in self.flows.iter_mut().zip(&mut earlier) {
                let host = flow.ends[1].0;
                let rate = flow.goodputs[sample] * (self.host_rates[host] / sums[host]).min(1.0);
                // The sum is 0 if nothing arrived.
                let rate = if rate.is_nan() { 0.0 } else { rate };
                *earlier = (flow.goodputs[sample] - rate) * seconds;
                flow.goodputs[sample] = rate;
            }
        }
    }

    /// The time of the last sample.
    pub(super) fn duration(&self) -> Duration {
        self.times.last().copied().unwrap_or(self.interval)
    }

    pub(super) fn times(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.times)
    }

    /// Bytes of a flow that have arrived since the warm-up.
    pub(super) fn bytes(&self, flow: usize) -> u64 {
        self.flows[flow].arrived - self.flows[flow].at_start
    }

    /// Bytes of a flow that have arrived.
    pub(super) fn all_bytes(&self, flow: usize) -> u64 {
        self.flows[flow].arrived
    }

    /// The longest time without an arrival of a flow, and the time since the last arrival.
    pub(super) fn still(&self, flow: usize) -> (Duration, Duration) {
        (self.flows[flow].stillest, self.flows[flow].still)
    }

    /// Takes the goodput and rates of a flow, in bit/s.
    pub(super) fn take_series(&mut self, flow: usize) -> (Vec<f64>, Vec<f64>) {
        let flow = &mut self.flows[flow];
        (std::mem::take(&mut flow.goodputs), std::mem::take(&mut flow.rates))
    }

    pub(super) fn queues(&mut self, built: &Built) -> Vec<QueueOutcome> {
        let fabric = &built.fabric;
        let measured = self.duration().saturating_sub(self.warm_up);
        let first = self.times.iter().position(|time| *time > self.warm_up).unwrap_or(self.times.len());
        let class = self.class;
        let outcome = |queue: &mut WatchedQueue| {
            let counters = fabric.queue_counters(queue.port, class);
            if counters.sent == 0 && counters.dropped == 0 {
                return None;
            }
            let lengths = std::mem::take(&mut queue.lengths);
            let mut sorted = lengths.get(first..).unwrap_or_default().to_vec();
            sorted.sort_unstable();
            let p99 = sorted.get((sorted.len() * 99).div_ceil(100).saturating_sub(1)).copied().unwrap_or(0);
            let sent = fabric.port_counters(queue.port).wire_bytes - queue.sent_at_start;
            Some(QueueOutcome {
                name: name(fabric, queue.port),
                used: 8.0 * sent as f64 / (queue.rate as f64 * measured.as_secs_f64()),
                mean: counters.mean_bytes(&queue.at_start, measured),
                p99,
                max: counters.max_bytes,
                marked: counters.marked,
                dropped: counters.dropped,
                lengths,
            })
        };
        self.queues.iter_mut().filter_map(outcome).collect()
    }

    pub(super) fn pauses(&self, built: &Built) -> Vec<LinkPauses> {
        let fabric = &built.fabric;
        let pauses = |port: PortId| {
            let counters = fabric.queue_counters(port, self.class);
            let name = name(fabric, port);
            let is_of_switch = |port: PortId| matches!(fabric.owner(port).0, Node::Switch(_));
            (counters.pauses > 0).then(|| LinkPauses {
                name,
                is_between_switches: is_of_switch(port) && is_of_switch(fabric.peer(port)),
                pauses: counters.pauses,
                paused: counters.paused(),
            })
        };
        let mut pauses: Vec<LinkPauses> = fabric.ports().filter_map(pauses).collect();
        let place = |link: &LinkPauses| (Reverse((link.is_between_switches, link.paused)), link.name.clone());
        pauses.sort_by_cached_key(place);
        pauses
    }
}

/// The name of a port and of the other end of its link.
pub(super) fn name(fabric: &Fabric, port: PortId) -> String {
    format!("{} to {}", port_name(fabric, port), port_name(fabric, fabric.peer(port)))
}

/// Such as `host2` or `switch0:3`.
pub(super) fn port_name(fabric: &Fabric, port: PortId) -> String {
    match fabric.owner(port) {
        (Node::Host(host), _) => format!("host{}", host.number()),
        (Node::Switch(switch), number) => format!("switch{}:{number}", switch.number()),
    }
}
