//! One run: what there is, what is sent, and how.

use std::time::Duration;

use ferroce::{CongestionControl, PathMtu};
use ferroce_driver::sim::fabric::{FabricConfig, Topology};

/// All that decides what comes of a run: the same plan gives the same run, bit for bit.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) fabric: FabricConfig,
    pub(crate) topology: Topology,
    pub(crate) flows: Vec<Flow>,
    /// What the flows send. Those of one flow are sent one after the other, in this order.
    pub(crate) messages: Vec<Message>,
    pub(crate) failures: Vec<Outage>,
    pub(crate) transport: Transport,
    /// How long it lasts.
    pub(crate) duration: Duration,
    /// What happens before this is left out of rates and of the means and percentiles of queues.
    pub(crate) warm_up: Duration,
    /// How often rates and queues are looked at.
    pub(crate) sample: Duration,
}

/// Something is down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outage {
    pub(crate) of: Failing,
    pub(crate) from: Duration,
    /// To the end if there is none.
    pub(crate) until: Option<Duration>,
}

/// A part of the topology, by its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failing {
    Link(usize),
    Switch(usize),
}

/// One RC queue pair at each of two hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) from: usize,
    pub(crate) to: usize,
    /// When it sends without end, beside its messages: from this time until the other.
    pub(crate) endless: Option<(Duration, Duration)>,
}

/// A WRITE with immediate data, in pieces if it is long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// The flow, by its place in the plan.
    pub(crate) flow: usize,
    /// At least 1.
    pub(crate) bytes: u64,
    /// It is posted at this time, or when all messages have arrived that it comes after, whichever is later.
    pub(crate) start: Duration,
    /// Places of messages in the plan.
    pub(crate) after: Vec<usize>,
}

/// How the hosts send.
#[derive(Clone, Debug)]
pub(crate) struct Transport {
    pub(crate) control: CongestionControl,
    /// The least time between two CNPs of a queue pair.
    pub(crate) cnp_interval: Duration,
    /// Selective repeat, or go-back-N.
    pub(crate) selective_repeat: bool,
    pub(crate) path_mtu: PathMtu,
    pub(crate) dscp: u8,
    /// Packets that a queue pair may have unacknowledged.
    pub(crate) window: u32,
    /// ACK timeout: 4.096 µs · 2^timeout.
    pub(crate) timeout: u8,
    /// How long after a poll the host polls again at the earliest.
    pub(crate) poll_interval: Duration,
}
