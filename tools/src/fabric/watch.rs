//! What is looked at while a run goes on: goodput, rates and queues, sample by sample.

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
}

struct WatchedFlow {
    /// Its sender: host and end there.
    sender: (usize, usize),
    /// Bytes at the last sample, and at the end of the warm-up.
    done: u64,
    at_start: u64,
    goodputs: Vec<f64>,
    rates: Vec<f64>,
}

struct WatchedQueue {
    port: PortId,
    at_start: QueueCounters,
    wire_bytes_at_start: u64,
    lengths: Vec<u64>,
}

impl Watch {
    /// `ends` has, for each flow, its ends at its two hosts.
    pub(super) fn new(plan: &Plan, built: &Built, ends: &[[usize; 2]]) -> Watch {
        let flows = plan.flows.iter().zip(ends).map(|(flow, [from, _])| {
            let sender = (flow.from, *from);
            WatchedFlow { sender, done: 0, at_start: 0, goodputs: Vec::new(), rates: Vec::new() }
        });
        let flows = flows.collect();
        let fabric = &built.fabric;
        let of_switches = fabric.ports().filter(|port| matches!(fabric.owner(*port).0, Node::Switch(_)));
        let watched = |port| WatchedQueue {
            port,
            at_start: QueueCounters::default(),
            wire_bytes_at_start: 0,
            lengths: Vec::new(),
        };
        let queues = of_switches.map(watched).collect();
        // Hosts and switches have the same map unless a plan says otherwise; then the first switch counts.
        let classes = plan.topology.switches.first().map(|switch| switch.classes).unwrap_or_default();
        let class = classes.class(plan.transport.dscp);
        Watch { warm_up: plan.warm_up, interval: plan.sample, class, times: Vec::new(), flows, queues }
    }

    pub(super) fn sample(&mut self, fabric: &Fabric, hosts: &[Host], now: Duration) {
        let interval = now - self.times.last().copied().unwrap_or_default();
        let ends_warm_up = self.times.last().is_none_or(|last| *last < self.warm_up) && now >= self.warm_up;
        self.times.push(now);
        for flow in &mut self.flows {
            let (host, end) = flow.sender;
            let done = hosts[host].ends[end].done;
            flow.goodputs.push(8.0 * (done - flow.done) as f64 / interval.as_secs_f64());
            flow.rates.push(hosts[host].rate(end).unwrap_or(0) as f64);
            flow.done = done;
            if ends_warm_up && !self.warm_up.is_zero() {
                flow.at_start = done;
            }
        }
        for queue in &mut self.queues {
            queue.lengths.push(fabric.queue_bytes(queue.port, self.class));
            if ends_warm_up && !self.warm_up.is_zero() {
                queue.at_start = fabric.queue_counters(queue.port, self.class);
                queue.wire_bytes_at_start = fabric.port_counters(queue.port).wire_bytes;
            }
        }
    }

    /// Until the last sample.
    pub(super) fn duration(&self) -> Duration {
        self.times.last().copied().unwrap_or(self.interval)
    }

    pub(super) fn times(&mut self) -> Vec<Duration> {
        std::mem::take(&mut self.times)
    }

    /// Bytes of a flow that were acknowledged since the warm-up.
    pub(super) fn bytes(&self, flow: usize) -> u64 {
        self.flows[flow].done - self.flows[flow].at_start
    }

    /// Goodput and rates of a flow, in bit/s.
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
            let wire_bytes = fabric.port_counters(queue.port).wire_bytes - queue.wire_bytes_at_start;
            let could = fabric.line_rate(queue.port) as f64 * measured.as_secs_f64();
            Some(QueueOutcome {
                name: name(fabric, queue.port),
                used: 8.0 * wire_bytes as f64 / could,
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
            let is_switch = |port| matches!(fabric.owner(port).0, Node::Switch(_));
            (counters.pauses > 0).then(|| LinkPauses {
                name,
                is_between_switches: is_switch(port) && is_switch(fabric.peer(port)),
                pauses: counters.pauses,
                paused: counters.paused(),
            })
        };
        let mut pauses: Vec<LinkPauses> = fabric.ports().filter_map(pauses).collect();
        let key = |link: &LinkPauses| Reverse((link.is_between_switches, link.paused));
        pauses.sort_by(|a, b| key(a).cmp(&key(b)).then_with(|| a.name.cmp(&b.name)));
        pauses
    }
}

/// A port, and what is at the other end of its link.
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
