//! The outcome of a run.

use std::time::Duration;

use ferroce_driver::sim::fabric::FabricCounters;

/// All that is reported of a run. Rates are in bit/s of payload, queues in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// How long it took here to set up the hosts, and to carry out the run; events of the fabric, and polls of hosts.
    pub(crate) set_up: Duration,
    pub(crate) wall: Duration,
    pub(crate) events: u64,
    pub(crate) polls: u64,
    pub(crate) trace_hash: u64,
    /// The virtual time at its end, and what of it was measured.
    pub(crate) duration: Duration,
    pub(crate) measured: Duration,
    pub(crate) flows: Vec<FlowOutcome>,
    /// In the order of the plan.
    pub(crate) messages: Vec<MessageOutcome>,
    /// The ports of switches that have sent something in the class of the data.
    pub(crate) queues: Vec<QueueOutcome>,
    /// The links that were paused: those between switches first, and of each kind what was paused for the longest time.
    pub(crate) pauses: Vec<LinkPauses>,
    pub(crate) fabric: FabricCounters,
    pub(crate) hosts: HostCounters,
    /// The times of the samples of all series.
    pub(crate) times: Vec<Duration>,
}

impl Outcome {
    pub(crate) fn forget_series(&mut self) {
        self.times = Vec::new();
        for flow in &mut self.flows {
            (flow.goodputs, flow.rates) = (Vec::new(), Vec::new());
        }
        self.queues.iter_mut().for_each(|queue| queue.lengths = Vec::new());
    }

    pub(crate) fn forget_details(&mut self) {
        (self.flows, self.messages) = (Vec::new(), Vec::new());
        (self.queues, self.pauses) = (Vec::new(), Vec::new());
    }

    /// Flows to which nothing has come at the end for a tenth of the run, and for ten samples at least.
    pub(crate) fn still_flows(&self) -> Vec<&FlowOutcome> {
        let from = self.times.len().saturating_sub(11);
        let samples =
            self.times.get(from).map_or(self.duration, |first| self.duration.saturating_sub(*first));
        let least = samples.max(self.duration / 10);
        self.flows
            .iter()
            .filter(|flow| flow.still_at_end >= least && flow.still_at_end > Duration::ZERO)
            .collect()
    }

    /// The queues that were longest, but for those that never had 1 % of the longest one.
    pub(crate) fn longest_queues(&self) -> Vec<&QueueOutcome> {
        let longest = self.queues.iter().map(|queue| queue.max).max().unwrap_or(0);
        let mut queues: Vec<_> = self.queues.iter().filter(|queue| queue.max * 100 > longest).collect();
        queues.sort_by(|a, b| b.max.cmp(&a.max).then_with(|| a.name.cmp(&b.name)));
        queues
    }
}

/// Of one flow.
#[derive(Clone, Debug)]
pub(crate) struct FlowOutcome {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// Bytes that have arrived in order: of what is endless in the time that was measured, of messages in the whole run.
    pub(crate) bytes: u64,
    /// The time that they are counted in. Of messages it is from the first post to the last completion, or to the end if one
    /// was not completed; nothing if none was posted.
    pub(crate) time: Duration,
    /// The longest time in which it had something to send and nothing arrived, as exact as samples are apart, and how long
    /// that is so at the end.
    pub(crate) still: Duration,
    pub(crate) still_at_end: Duration,
    /// Goodput in each sample, never above the rate of the receiver's link.
    pub(crate) goodputs: Vec<f64>,
    /// The rate that congestion control allowed, at each sample; empty if it is off.
    pub(crate) rates: Vec<f64>,
    /// Why its queue pair has failed, if it has.
    pub(crate) failure: Option<String>,
}

impl FlowOutcome {
    /// In bit/s, if it has sent at all.
    pub(crate) fn goodput(&self) -> Option<f64> {
        (!self.time.is_zero()).then(|| 8.0 * self.bytes as f64 / self.time.as_secs_f64())
    }
}

/// Of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageOutcome {
    pub(crate) flow: usize,
    pub(crate) bytes: u64,
    /// When it was posted, and when its sender had the completion; `None` if that was not before the end.
    pub(crate) posted: Option<Duration>,
    pub(crate) completed: Option<Duration>,
    /// How long it would take if nothing else was sent.
    pub(crate) alone: Duration,
}

impl MessageOutcome {
    /// The flow completion time.
    pub(crate) fn time(&self) -> Option<Duration> {
        Some(self.completed? - self.posted?)
    }
}

/// Of the data's class at one port of a switch.
#[derive(Clone, Debug)]
pub(crate) struct QueueOutcome {
    /// Such as `switch0:3 to host2`.
    pub(crate) name: String,
    /// The part of its rate that the port has used in the time that was measured.
    pub(crate) used: f64,
    pub(crate) mean: f64,
    /// Of the samples that were measured.
    pub(crate) p99: u64,
    /// Of all the time.
    pub(crate) max: u64,
    pub(crate) marked: u64,
    pub(crate) dropped: u64,
    /// The length at each sample.
    pub(crate) lengths: Vec<u64>,
}

/// Of the port that was paused, from the beginning of the run.
#[derive(Clone, Debug)]
pub(crate) struct LinkPauses {
    /// Such as `host2 to switch0:3`, of which the second has paused the first.
    pub(crate) name: String,
    pub(crate) is_between_switches: bool,
    pub(crate) pauses: u64,
    pub(crate) paused: Duration,
}

/// Of all hosts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostCounters {
    pub(crate) marked: u64,
    pub(crate) cnps_sent: u64,
    pub(crate) cnps_handled: u64,
    pub(crate) retransmitted: u64,
    pub(crate) timeouts: u64,
}
