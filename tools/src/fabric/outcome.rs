//! The outcome of a run.

use std::time::Duration;

use ferroce_driver::sim::fabric::FabricCounters;

/// The results of a run. Rates are in bit/s of payload, queues in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Wall-clock times of setting up the hosts and of the run; the numbers of fabric events and of host polls.
    pub(crate) set_up: Duration,
    pub(crate) wall: Duration,
    pub(crate) events: u64,
    pub(crate) polls: u64,
    pub(crate) trace_hash: u64,
    /// The virtual time at the end, and the measured part of it.
    pub(crate) duration: Duration,
    pub(crate) measured: Duration,
    pub(crate) flows: Vec<FlowOutcome>,
    /// In the order of the plan.
    pub(crate) messages: Vec<MessageOutcome>,
    /// The switch ports that have sent packets in the class of the data.
    pub(crate) queues: Vec<QueueOutcome>,
    /// The links that were paused: links between switches first, and within each kind the longest total pause first.
    pub(crate) pauses: Vec<LinkPauses>,
    pub(crate) fabric: FabricCounters,
    pub(crate) hosts: HostCounters,
    /// The sample times of all series.
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

    /// Flows to which nothing arrived in the last tenth of the run, and in the last ten samples at least.
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

    /// The longest queues first, without those that never reached 1 % of the longest.
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
    /// Bytes that have arrived in order: of endless flows in the measured time, of messages in the whole run.
    pub(crate) bytes: u64,
    /// The time in which they are counted. For messages it is from the first post to the last completion, or to the end
    /// if one was not completed; zero if none was posted.
    pub(crate) time: Duration,
    /// The longest time with data to send and no arrival, with the resolution of the samples; and the same at the end
    /// of the run.
    pub(crate) still: Duration,
    pub(crate) still_at_end: Duration,
    /// Goodput of each sample, limited to the rate of the receiver's link.
    pub(crate) goodputs: Vec<f64>,
    /// The rate that congestion control allowed at each sample; empty if it is off.
    pub(crate) rates: Vec<f64>,
    /// The reason that its queue pair failed, if it failed.
    pub(crate) failure: Option<String>,
}

impl FlowOutcome {
    /// In bit/s; `None` if it never sent.
    pub(crate) fn goodput(&self) -> Option<f64> {
        (!self.time.is_zero()).then(|| 8.0 * self.bytes as f64 / self.time.as_secs_f64())
    }
}

/// Of one message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MessageOutcome {
    pub(crate) flow: usize,
    pub(crate) bytes: u64,
    /// The times of its post and of its sender's completion; `None` if not reached before the end.
    pub(crate) posted: Option<Duration>,
    pub(crate) completed: Option<Duration>,
    /// The time that it would take alone in the fabric.
    pub(crate) alone: Duration,
}

impl MessageOutcome {
    /// The flow completion time.
    pub(crate) fn time(&self) -> Option<Duration> {
        Some(self.completed? - self.posted?)
    }
}

/// The queue of the data's class at one switch port.
#[derive(Clone, Debug)]
pub(crate) struct QueueOutcome {
    /// Such as `switch0:3 to host2`.
    pub(crate) name: String,
    /// The used fraction of the port's rate in the measured time.
    pub(crate) used: f64,
    pub(crate) mean: f64,
    /// Over the measured samples.
    pub(crate) p99: u64,
    /// Over the whole run.
    pub(crate) max: u64,
    pub(crate) marked: u64,
    pub(crate) dropped: u64,
    /// The length at each sample.
    pub(crate) lengths: Vec<u64>,
}

/// Pauses of a port, from the beginning of the run.
#[derive(Clone, Debug)]
pub(crate) struct LinkPauses {
    /// Such as `host2 to switch0:3`: the second port has paused the first.
    pub(crate) name: String,
    pub(crate) is_between_switches: bool,
    pub(crate) pauses: u64,
    pub(crate) paused: Duration,
}

/// Sums over all hosts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostCounters {
    pub(crate) marked: u64,
    pub(crate) cnps_sent: u64,
    pub(crate) cnps_handled: u64,
    pub(crate) retransmitted: u64,
    pub(crate) timeouts: u64,
}
