//! The plan of one run: hosts, switches, links and traffic, as pure data.

use std::time::Duration;

use ferroce::{Config, CongestionControl, CongestionNotification, Nanos, PathMtu};
use ferroce_driver::sim::fabric::{Built, FabricConfig, Part, Topology};

use crate::failure::Failure;

/// The virtual time at which a run begins: contexts must not see time zero.
pub(super) const BEGIN: Nanos = Nanos(1_000_000);

/// All inputs of a run: the same plan gives the same run, bit for bit.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) fabric: FabricConfig,
    pub(crate) topology: Topology,
    pub(crate) flows: Vec<Flow>,
    /// The messages of all flows. Those of one flow are sent in this order.
    pub(crate) messages: Vec<Message>,
    pub(crate) failures: Vec<Outage>,
    pub(crate) transport: Transport,
    /// The length of the run.
    pub(crate) duration: Duration,
    /// The time before this is excluded from rates and from the means and percentiles of queues.
    pub(crate) warm_up: Duration,
    /// The sampling interval of rates and queues.
    pub(crate) sample: Duration,
}

impl Plan {
    /// The fabric.
    pub(super) fn build(&self) -> Result<Built, Failure> {
        let mut topology = self.topology.clone();
        let frame = u64::from(self.transport.path_mtu.bytes()) + 100;
        for cable in &topology.links {
            for end in cable.ends {
                let (Part::Host(host), Some(rate)) = (end, cable.link.rate) else { continue };
                // Twice the frames that can be sent between two polls.
                let bits = self.transport.poll_interval.as_nanos() as u64 * (rate / 1_000_000_000).max(1);
                if let Some(host) = topology.hosts.get_mut(host) {
                    host.tx_frames = (2 * bits / 8 / frame + 1).clamp(4, 256) as u32;
                }
            }
        }
        Ok(topology.build(self.seed, self.fabric)?)
    }

    /// Schedules the outages.
    pub(super) fn fail(&self, built: &Built) {
        for outage in &self.failures {
            let changes = [(Some(outage.from), false), (outage.until, true)];
            for (time, is_up) in changes.into_iter().filter_map(|(time, is_up)| Some((BEGIN + time?, is_up)))
            {
                match outage.of {
                    Failing::Link(link) => built.fabric.set_link(built.links[link], is_up, time),
                    Failing::Switch(switch) => built.fabric.set_switch(built.switches[switch], is_up, time),
                }
            }
        }
    }

    /// The configuration of a host's context.
    pub(super) fn config(&self, host: usize) -> Config {
        let Transport { control, cnp_interval, selective_repeat, window, .. } = self.transport;
        let mut secret = [0; 32];
        secret[..8].copy_from_slice(&self.seed.to_le_bytes());
        secret[8..16].copy_from_slice(&(host as u64).to_le_bytes());
        let is_on = control != CongestionControl::Off;
        let notification = CongestionNotification::default().min_time_between_cnps(cnp_interval);
        Config::default()
            .seed(secret)
            .window(window)
            .reorder_packets(if selective_repeat { 1024 } else { 0 })
            .congestion(control)
            .notification(is_on.then_some(notification))
    }
}

/// An outage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Outage {
    pub(crate) of: Failing,
    pub(crate) from: Duration,
    /// `None`: to the end of the run.
    pub(crate) until: Option<Duration>,
}

/// A part of the topology, by its index there.
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
    /// The time in which it sends endlessly, in addition to its messages.
    pub(crate) endless: Option<(Duration, Duration)>,
}

/// An RDMA WRITE with immediate data, in pieces if it is long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    /// The index of the flow in the plan.
    pub(crate) flow: usize,
    /// At least 1.
    pub(crate) bytes: u64,
    /// It is posted at this time, or when all messages of `after` have arrived, whichever is later.
    pub(crate) start: Duration,
    /// Indices of messages in the plan.
    pub(crate) after: Vec<usize>,
}

/// The transport of the hosts.
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
    /// The least time between two polls of a host.
    pub(crate) poll_interval: Duration,
}
