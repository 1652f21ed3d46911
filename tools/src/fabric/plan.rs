//! The plan of one run: hosts, switches and links, and what is sent, as pure data.

use std::time::Duration;

use ferroce::{Config, CongestionControl, CongestionNotification, Nanos, PathMtu};
use ferroce_driver::sim::fabric::{Built, FabricConfig, Part, Topology};

use crate::failure::Failure;

/// Of virtual time, when a run begins: contexts do not like to be told of zero.
pub(super) const BEGIN: Nanos = Nanos(1_000_000);

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

impl Plan {
    /// The fabric.
    pub(super) fn build(&self) -> Result<Built, Failure> {
        let mut topology = self.topology.clone();
        let frame = u64::from(self.transport.path_mtu.bytes()) + 100;
        for cable in &topology.links {
            for end in cable.ends {
                let (Part::Host(host), Some(rate)) = (end, cable.link.rate) else { continue };
                // Enough for the time between two polls, twice.
                let bits = self.transport.poll_interval.as_nanos() as u64 * (rate / 1_000_000_000).max(1);
                if let Some(host) = topology.hosts.get_mut(host) {
                    host.tx_frames = (2 * bits / 8 / frame + 1).clamp(4, 256) as u32;
                }
            }
        }
        Ok(topology.build(self.seed, self.fabric)?)
    }

    /// Parts of it go down, and come up, when their time has come.
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

    /// The context of a host.
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
