//! A fabric of switches in virtual time: queues, shared buffers, ECN, PFC, ECMP, failures.
//!
//! Each host has one link, to a switch or to another host. A switch stores a frame, chooses its path by a hash of the
//! 5-tuple, and sends it from a queue of its class when the port's scheduler selects it; the switch's memory is shared
//! ([`BufferConfig`]), it marks ([`EcnConfig`]) and pauses ([`PfcConfig`]). A host is one port with a driver
//! ([`HostPort`]): the engine above runs as on a real network.
//!
//! There is no background activity. [`Fabric::advance`] executes all events until a time; so does a burst of a port, until
//! its `now`. The same seed and the same calls in the same order give the same run, bit for bit, on any machine; compare
//! two by [`Fabric::trace_hash`]. Hosts that send nothing do not affect the others.
//!
//! ```
//! use std::time::Duration;
//! use ferroce_driver::sim::LinkConfig;
//! use ferroce_driver::sim::fabric::{Fabric, FabricConfig, HostConfig, SwitchConfig};
//! use ferroce_driver::{Nanos, PacketDriver};
//!
//! let fabric = Fabric::new(1, FabricConfig::default())?;
//! let switch = fabric.add_switch(SwitchConfig::default())?;
//! let link = LinkConfig::default().rate(100_000_000_000).delay(Duration::from_micros(1));
//! let a = fabric.add_host(HostConfig::default(), &[[10, 0, 0, 1].into()])?;
//! let b = fabric.add_host(HostConfig::default(), &[[10, 0, 0, 2].into()])?;
//! for host in [a, b] {
//!     fabric.link(host, switch, &link)?;
//! }
//! let (mut from, mut to) = (fabric.open(a)?, fabric.open(b)?);
//! let ferroce_driver::NextHop::Found(mac) = from.resolve([10, 0, 0, 2].into())? else { panic!() };
//! let mut frame = vec![0; 60];
//! frame[..6].copy_from_slice(&mac);
//! let mut frames = [frame].into_iter();
//! from.tx_burst(Nanos(0), &mut |buffer: &mut [u8]| {
//!     let frame = frames.next()?;
//!     buffer[..frame.len()].copy_from_slice(&frame);
//!     Some(frame.len())
//! })?;
//! // Two links of 1 µs, and twice 84 bytes at 100 Gb/s.
//! let mut arrived = 0;
//! to.rx_burst(Nanos(2013), &mut |_: &[u8]| arrived += 1)?;
//! assert_eq!(arrived, 0);
//! to.rx_burst(Nanos(2014), &mut |_: &[u8]| arrived += 1)?;
//! assert_eq!(arrived, 1);
//! # Ok::<(), ferroce_driver::Error>(())
//! ```

mod buffer;
mod config;
mod contents;
mod counters;
mod event;
mod frame;
mod host_port;
mod pfc;
mod port;
#[cfg(test)]
mod properties;
mod routes;
mod scheduler;
mod simulation;
mod tap;
#[cfg(test)]
mod tests;
mod topology;

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};

#[cfg(doc)]
use super::EcnConfig;
use super::{LinkConfig, invalid};
use crate::loopback::lock;
use crate::{Error, Nanos};
pub use config::{
    BufferConfig, CLASSES, ClassMap, FabricConfig, HostConfig, Marking, PfcConfig, Scheduling, SwitchConfig,
    Threshold,
};
pub use counters::{FabricCounters, PortCounters, QueueCounters};
use event::Picos;
pub use host_port::HostPort;
use port::Owner;
use simulation::{Change, Simulation};
pub use tap::Tap;
pub use topology::{Built, Cable, Part, Topology, address};

/// A host of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostId(u32);

/// A switch of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SwitchId(u32);

/// A link of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(u32);

/// A port of a host or a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PortId(u32);

/// The end of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A host.
    Host(HostId),
    /// A switch.
    Switch(SwitchId),
}

macro_rules! number {
    ($($id:ident)*) => { $(impl $id {
        /// Its number, in the order of creation, from 0.
        pub fn number(self) -> usize {
            self.0 as usize
        }
    })* };
}
number!(HostId SwitchId LinkId PortId);

impl From<HostId> for Node {
    fn from(host: HostId) -> Node {
        Node::Host(host)
    }
}

impl From<SwitchId> for Node {
    fn from(switch: SwitchId) -> Node {
        Node::Switch(switch)
    }
}

/// The fabric. Clones are handles to the same one. Methods panic for an ID of another fabric.
#[derive(Clone)]
pub struct Fabric {
    simulation: Arc<Mutex<Simulation>>,
}

impl fmt::Debug for Fabric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let simulation = lock(&self.simulation);
        f.debug_struct("Fabric")
            .field("hosts", &simulation.hosts.len())
            .field("switches", &simulation.switches.len())
            .field("links", &simulation.links.len())
            .finish_non_exhaustive()
    }
}

/// The most hosts, switches and links, each.
const MOST: usize = 1 << 20;

impl Fabric {
    /// An empty fabric. `seed` determines all random choices: marks, paths, impairments of links.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `config`.
    pub fn new(seed: u64, config: FabricConfig) -> Result<Fabric, Error> {
        config.check()?;
        Ok(Fabric { simulation: Arc::new(Mutex::new(Simulation::new(seed, config))) })
    }

    /// Adds a host that owns `addresses`. If two hosts own the same address, the older one is used.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `config`.
    pub fn add_host(&self, config: HostConfig, addresses: &[IpAddr]) -> Result<HostId, Error> {
        config.check()?;
        let mut simulation = lock(&self.simulation);
        check_count("hosts", simulation.hosts.len())?;
        Ok(HostId(simulation.add_host(config, addresses.to_vec())))
    }

    /// Adds a switch.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `config`.
    pub fn add_switch(&self, config: SwitchConfig) -> Result<SwitchId, Error> {
        config.check()?;
        let mut simulation = lock(&self.simulation);
        check_count("switches", simulation.switches.len())?;
        Ok(SwitchId(simulation.add_switch(config)))
    }

    /// Connects two nodes by a link, with a new port at each. A host has one port.
    ///
    /// The frames of either direction are sent at the link's rate, and then pass its impairments; queue limits and marking
    /// are the switches'.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `link`, the rate if it is missing, or a host that already has a link.
    pub fn link(&self, a: impl Into<Node>, b: impl Into<Node>, link: &LinkConfig) -> Result<LinkId, Error> {
        link.check()?;
        let Some(rate) = link.rate else { return Err(invalid("rate", "none", "bits per second")) };
        if let Some(limit) = link.queue_limit {
            return Err(invalid("queue_limit", limit, "none: the memory of a switch is its BufferConfig"));
        }
        if let Some(ecn) = link.ecn {
            let ecn = format!("{ecn:?}");
            return Err(invalid("ecn", ecn, "none: marking is in the SwitchConfig"));
        }
        let mut simulation = lock(&self.simulation);
        check_count("links", simulation.links.len())?;
        let ends = [a.into(), b.into()].map(|node| match node {
            Node::Host(host) => Owner::Host(host.0),
            Node::Switch(switch) => Owner::Switch(switch.0),
        });
        for end in ends {
            if let Owner::Host(host) = end
                && (simulation.hosts[host as usize].port.is_some() || ends[0] == ends[1])
            {
                return Err(invalid("host", host, "a host without a link: it has one port"));
            }
        }
        Ok(LinkId(simulation.add_link(link.clone(), rate, ends)))
    }

    /// Opens the driver of a host.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a host that has no link, or whose driver is already open.
    pub fn open(&self, host: HostId) -> Result<HostPort, Error> {
        HostPort::open(self.simulation.clone(), host.0)
    }

    /// Executes all events until `now`.
    pub fn advance(&self, now: Nanos) {
        lock(&self.simulation).advance(Picos::at(now));
    }

    /// Executes events until `limit`, or until a host has work: frames to receive, or room to send after there was none.
    /// Appends these hosts to `woken`, and returns the time reached.
    pub fn advance_until_woken(&self, limit: Nanos, woken: &mut Vec<HostId>) -> Nanos {
        let mut simulation = lock(&self.simulation);
        simulation.advance_until_woken(Picos::at(limit));
        simulation.take_woken(|host| woken.push(HostId(host)));
        simulation.now.nanos()
    }

    /// The time of the next event, if there is one.
    pub fn next_event(&self) -> Option<Nanos> {
        lock(&self.simulation).next_event().map(Picos::nanos)
    }

    /// Takes a link down or up at `time`. Frames on it and frames queued for it are lost.
    pub fn set_link(&self, link: LinkId, is_up: bool, time: Nanos) {
        let change = Change::Link { link: link.0, is_up };
        lock(&self.simulation).plan_change(Picos::at(time), change);
    }

    /// Takes a switch down or up at `time`, with all its links.
    pub fn set_switch(&self, switch: SwitchId, is_up: bool, time: Nanos) {
        let change = Change::Switch { switch: switch.0, is_up };
        lock(&self.simulation).plan_change(Picos::at(time), change);
    }

    /// The ports at the two ends of a link, in the order passed to [`link`](Fabric::link).
    pub fn ends(&self, link: LinkId) -> [PortId; 2] {
        lock(&self.simulation).links[link.number()].ends.map(PortId)
    }

    /// The port of a host, if it has a link.
    pub fn port_of(&self, host: HostId) -> Option<PortId> {
        lock(&self.simulation).hosts[host.number()].port.map(PortId)
    }

    /// The port at the other end of a port's link.
    pub fn peer(&self, port: PortId) -> PortId {
        PortId(lock(&self.simulation).ports[port.number()].of.peer)
    }

    /// The owner of a port, and the port's number there.
    pub fn owner(&self, port: PortId) -> (Node, usize) {
        let of = lock(&self.simulation).ports[port.number()].of;
        let node = match of.owner {
            Owner::Host(host) => HostId(host).into(),
            Owner::Switch(switch) => SwitchId(switch).into(),
        };
        (node, of.number as usize)
    }

    /// All ports.
    pub fn ports(&self) -> impl Iterator<Item = PortId> + use<> {
        (0..lock(&self.simulation).ports.len() as u32).map(PortId)
    }

    /// Bytes of a class, 0 to 7, queued at a port, without the frame in transmission.
    pub fn queue_bytes(&self, port: PortId, class: u8) -> u64 {
        lock(&self.simulation).ports[port.number()].bytes(class & 7)
    }

    /// The counters of a class, 0 to 7, at a port.
    pub fn queue_counters(&self, port: PortId, class: u8) -> QueueCounters {
        let simulation = lock(&self.simulation);
        simulation.ports[port.number()].counters(simulation.now, class & 7)
    }

    /// The counters of a port.
    pub fn port_counters(&self, port: PortId) -> PortCounters {
        lock(&self.simulation).ports[port.number()].counters
    }

    /// Used bytes of a switch's pool.
    pub fn pool_used(&self, switch: SwitchId) -> u64 {
        lock(&self.simulation).switches[switch.number()].buffer.used()
    }

    /// Used and available bytes of headroom of a class, 0 to 7, at a port of a switch; zeros for a host.
    pub fn headroom(&self, port: PortId, class: u8) -> (u64, u64) {
        let simulation = lock(&self.simulation);
        let of = simulation.ports[port.number()].of;
        match of.owner {
            Owner::Host(_) => (0, 0),
            Owner::Switch(switch) => {
                simulation.switches[switch as usize].buffer.headroom(of.number, class & 7)
            }
        }
    }

    /// Passes each frame at a port to `tap` from now on: when its first bit leaves, or when its last bit has arrived. The
    /// tap must not use the fabric itself.
    pub fn tap(&self, port: PortId, tap: Tap) {
        lock(&self.simulation).taps.add(port.0, tap);
    }

    /// The counters of all frames.
    pub fn counters(&self) -> FabricCounters {
        lock(&self.simulation).counters()
    }

    /// A hash over each frame that was sent (time, host, contents), each of its arrivals, and each loss, in order.
    pub fn trace_hash(&self) -> u64 {
        lock(&self.simulation).trace_hash()
    }

    /// The number of events scheduled so far.
    pub fn events(&self) -> u64 {
        lock(&self.simulation).events()
    }
}

fn check_count(parameter: &'static str, count: usize) -> Result<(), Error> {
    if count < MOST { Ok(()) } else { Err(invalid(parameter, count + 1, "at most 2^20")) }
}
