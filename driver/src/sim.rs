//! A simulated network in virtual time: loss, duplication, reorder, corruption, delay, rate, ECN.
//!
//! Ports are connected to an ideal switch, and each direction between two of them is a separate link with the impairments of
//! [`LinkConfig`]. There is no background activity: a frame enters the network at the `now` of `tx_burst` and is received by the
//! first `rx_burst` whose `now` is at or after its arrival. A test jumps from event to event with [`SimNetwork::next_arrival`].
//!
//! The same seed and the same calls in the same order give the same run, bit for bit; compare two
//! by [`SimNetwork::trace_hash`].

mod ecn;
pub mod fabric;
mod impairment;
mod ip;
mod network;
mod random;
mod trace;

use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::kept::{COPIES_MAX, Copies};
use crate::loopback::{FRAME_OVERHEAD, check_mtu, find_address, lock, port_mac};
use crate::{
    Capabilities, ETHERNET_HEADER, Error, FrameSink, FrameSource, Nanos, NextHop, PacketDriver, RxFrame,
    Stats,
};
use network::{Network, SimFrame};

/// The impairments of a link in one direction. The default is an ideal link.
///
/// A frame passes, in this order: the queue limit, ECN marking, serialisation at `rate`, loss,
/// duplication, corruption, delay and jitter, reorder. Each probability is drawn for each frame (the
/// last three for each copy) independently.
#[derive(Clone, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct LinkConfig {
    /// Probability that a frame is lost. 1.0 is a cut cable.
    pub loss: f64,
    /// Probability that a frame arrives twice.
    pub duplicate: f64,
    /// Probability that one random bit of a frame is flipped.
    pub corrupt: f64,
    /// Probability that a frame is held back.
    pub reorder: f64,
    /// The most later frames that overtake one that is held back: 1 to 64. The number is drawn uniformly from 1 to this. Jitter
    /// does not reorder frames.
    pub reorder_by: usize,
    /// The longest time that a frame is held back if too few later ones overtake it.
    pub reorder_hold: Duration,
    /// Propagation delay.
    pub delay: Duration,
    /// Additional delay, drawn uniformly from zero to this. It never changes the order of frames.
    pub jitter: Duration,
    /// Bits per second. A frame takes its own bytes and [`WIRE_OVERHEAD`]; `None` takes no time.
    pub rate: Option<u64>,
    /// The most bytes queued for the link, [`WIRE_OVERHEAD`] included (of the frame in transmission the remaining bytes count); a
    /// frame that would exceed them is dropped. Needs `rate`.
    pub queue_limit: Option<u64>,
    /// ECN marking by the bytes queued for the link. Needs `rate`.
    pub ecn: Option<EcnConfig>,
}

impl Default for LinkConfig {
    fn default() -> LinkConfig {
        LinkConfig {
            loss: 0.0,
            duplicate: 0.0,
            corrupt: 0.0,
            reorder: 0.0,
            reorder_by: 3,
            reorder_hold: Duration::from_micros(100),
            delay: Duration::ZERO,
            jitter: Duration::ZERO,
            rate: None,
            queue_limit: None,
            ecn: None,
        }
    }
}

impl LinkConfig {
    /// Probability that a frame is lost, 0 to 1; 0 by default.
    pub fn loss(self, loss: f64) -> Self {
        LinkConfig { loss, ..self }
    }

    /// Probability that a frame arrives twice, 0 to 1; 0 by default.
    pub fn duplicate(self, duplicate: f64) -> Self {
        LinkConfig { duplicate, ..self }
    }

    /// Probability that one random bit of a frame is flipped, 0 to 1; 0 by default.
    pub fn corrupt(self, corrupt: f64) -> Self {
        LinkConfig { corrupt, ..self }
    }

    /// Probability that a frame is held back, 0 to 1; 0 by default.
    pub fn reorder(self, reorder: f64) -> Self {
        LinkConfig { reorder, ..self }
    }

    /// The most later frames that overtake it, 1 to 64; 3 by default.
    pub fn reorder_by(self, reorder_by: usize) -> Self {
        LinkConfig { reorder_by, ..self }
    }

    /// The longest time that a frame is held back; 100 µs by default.
    pub fn reorder_hold(self, reorder_hold: Duration) -> Self {
        LinkConfig { reorder_hold, ..self }
    }

    /// Propagation delay; none by default.
    pub fn delay(self, delay: Duration) -> Self {
        LinkConfig { delay, ..self }
    }

    /// Additional delay, drawn uniformly from zero to this; none by default.
    pub fn jitter(self, jitter: Duration) -> Self {
        LinkConfig { jitter, ..self }
    }

    /// Bits per second; by default a frame takes no time.
    pub fn rate(self, rate: impl Into<Option<u64>>) -> Self {
        LinkConfig { rate: rate.into(), ..self }
    }

    /// The most bytes queued for the link; no limit by default.
    pub fn queue_limit(self, queue_limit: impl Into<Option<u64>>) -> Self {
        LinkConfig { queue_limit: queue_limit.into(), ..self }
    }

    /// ECN marking by the bytes queued; none by default.
    pub fn ecn(self, ecn: impl Into<Option<EcnConfig>>) -> Self {
        LinkConfig { ecn: ecn.into(), ..self }
    }
}

/// The bytes of a frame on an Ethernet link in addition to its own: preamble and start delimiter 8, FCS 4, inter-packet gap 12.
pub const WIRE_OVERHEAD: u64 = 24;

/// RED-like marking as DCQCN's switches do it (Zhu et al., SIGCOMM 2015, section 3.1): never with at most `kmin_bytes` queued,
/// always above `kmax_bytes`, between them with a probability that rises linearly from 0 to `pmax`.
///
/// An ECN-capable IPv4 or IPv6 packet, untagged or with one 802.1Q tag, is marked Congestion Experienced; others are unchanged.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use]
#[non_exhaustive]
pub struct EcnConfig {
    /// Bytes up to which nothing is marked.
    pub kmin_bytes: u64,
    /// Bytes above which everything is marked.
    pub kmax_bytes: u64,
    /// Probability just below `kmax_bytes`.
    pub pmax: f64,
}

impl EcnConfig {
    /// Marks nothing up to `kmin_bytes`, everything above `kmax_bytes`, and just below that with probability `pmax`.
    pub fn new(kmin_bytes: u64, kmax_bytes: u64, pmax: f64) -> EcnConfig {
        EcnConfig { kmin_bytes, kmax_bytes, pmax }
    }
}

/// The most frames of a port. All are allocated at the beginning.
const FRAMES_MAX: usize = 1 << 16;

/// Sizes of a [`SimNetwork`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct NetworkConfig {
    /// Largest IP packet in bytes, 68 to 65535.
    pub mtu: u32,
    /// The most frames of a port in the network, 1 to 65536. With this many in flight, `tx_burst` takes no more until some have
    /// been received or dropped.
    pub frames: usize,
}

impl Default for NetworkConfig {
    /// An MTU of 4200, enough for a path MTU of 4096, and 4096 frames per port.
    fn default() -> NetworkConfig {
        NetworkConfig { mtu: 4200, frames: 4096 }
    }
}

impl NetworkConfig {
    /// Largest IP packet in bytes, 68 to 65535; 4200 by default.
    pub fn mtu(self, mtu: u32) -> Self {
        NetworkConfig { mtu, ..self }
    }

    /// The most frames of a port in the network, 1 to 65536; 4096 by default.
    pub fn frames(self, frames: usize) -> Self {
        NetworkConfig { frames, ..self }
    }
}

/// The action of a [`Filter`] for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verdict {
    /// Nothing.
    Pass,
    /// Lose it.
    Drop,
    /// Deliver it twice.
    Duplicate,
    /// Deliver it later by this time; later frames overtake it.
    Delay(Duration),
    /// Flip one random bit.
    Corrupt,
}

/// Sees each frame that is sent and returns the action for it.
pub type Filter = Box<dyn FnMut(&[u8]) -> Verdict + Send>;

/// Counts of actions on frames, by filter or at random. A flooded frame counts once per link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counters {
    /// Frames that entered a link.
    pub offered: u64,
    /// Frames lost.
    pub lost: u64,
    /// Frames delivered twice.
    pub duplicated: u64,
    /// Frames held back or delayed by a filter.
    pub reordered: u64,
    /// Frames with a bit flipped.
    pub corrupted: u64,
    /// Frames dropped because of [`LinkConfig::queue_limit`].
    pub queue_dropped: u64,
    /// Frames marked as Congestion Experienced.
    pub marked: u64,
}

/// The network: creates ports, changes links, and reports counters. Clones are handles to the same network.
#[derive(Clone)]
pub struct SimNetwork {
    network: Arc<Mutex<Network>>,
    config: NetworkConfig,
}

impl fmt::Debug for SimNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimNetwork").field("config", &self.config).finish_non_exhaustive()
    }
}

impl SimNetwork {
    /// A network without ports, with the default sizes.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `link`.
    pub fn new(seed: u64, link: LinkConfig) -> Result<SimNetwork, Error> {
        SimNetwork::with_config(seed, link, NetworkConfig::default())
    }

    /// A network without ports.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field of `link` or `config`.
    pub fn with_config(seed: u64, link: LinkConfig, config: NetworkConfig) -> Result<SimNetwork, Error> {
        link.check()?;
        check_mtu(config.mtu)?;
        if !(1..=FRAMES_MAX).contains(&config.frames) {
            return Err(invalid("frames", config.frames, &format!("1 to {FRAMES_MAX} frames")));
        }
        Ok(SimNetwork { network: Arc::new(Mutex::new(Network::new(seed, link))), config })
    }

    /// Plugs in a new port that owns `addresses` (its GID table, in that order). Its hardware address is locally administered and
    /// derived from the port's number. If two ports own the same IP address, [`PacketDriver::resolve`] finds the older one.
    pub fn port(&self, addresses: &[IpAddr]) -> SimPort {
        let NetworkConfig { mtu, frames } = self.config;
        let max_frame = mtu as usize + FRAME_OVERHEAD;
        let number = lock(&self.network).add_port(addresses, frames, max_frame);
        SimPort {
            capabilities: Capabilities::new("sim", format!("sim{number}"), port_mac(number), mtu)
                .description("simulated link in virtual time")
                .addresses(addresses.to_vec())
                .max_frame(max_frame),
            number,
            network: self.network.clone(),
            received: Vec::with_capacity(BURST),
            copies: Copies::default(),
            stats: Stats::default(),
        }
    }

    /// When the next frame can be received at any port, if one is in flight.
    pub fn next_arrival(&self) -> Option<Nanos> {
        lock(&self.network).next_arrival()
    }

    /// Changes all links. Frames in flight keep their time of arrival.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the invalid field; nothing is changed then.
    pub fn set_config(&self, link: LinkConfig) -> Result<(), Error> {
        link.check()?;
        lock(&self.network).link = link;
        Ok(())
    }

    /// Calls `filter` for each frame that is sent, before random impairments: a script can drop the n-th frame. It replaces the
    /// previous filter, and must not use the network itself.
    pub fn set_filter(&self, filter: Filter) {
        lock(&self.network).filter = filter;
    }

    /// A hash over each frame offered (time, port, bytes) and each of its fates, in order.
    pub fn trace_hash(&self) -> u64 {
        lock(&self.network).trace.value()
    }

    /// The counters so far.
    pub fn counters(&self) -> Counters {
        lock(&self.network).counters
    }
}

/// A port of a [`SimNetwork`].
///
/// The port receives frames to its own hardware address, over a link like any other. A frame with a length from `source` shorter
/// than an Ethernet header or longer than [`Capabilities::max_frame`] is not sent and counts as [`Stats::tx_dropped`].
/// Impairments are counted in [`Counters`], not in [`Stats`].
pub struct SimPort {
    capabilities: Capabilities,
    number: usize,
    network: Arc<Mutex<Network>>,
    received: Vec<SimFrame>,
    copies: Copies,
    stats: Stats,
}

impl fmt::Debug for SimPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimPort").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}

impl PacketDriver for SimPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        lock(&self.network).receive(self.number, now, &mut self.received, BURST);
        let count = self.received.len();
        for frame in &self.received {
            sink.take(RxFrame::new(frame.contents(), &mut self.copies));
            self.stats.rx_bytes += frame.len as u64;
        }
        self.stats.rx_frames += count as u64;
        lock(&self.network).recycle(&mut self.received);
        Ok(count)
    }

    fn keeps(&self) -> usize {
        COPIES_MAX
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let mut sent = 0;
        // The lock is not held while `source` runs, which may look at the network.
        loop {
            let Some(mut frame) = lock(&self.network).spare_frame(self.number) else { break };
            let len = source.write(&mut frame.bytes);
            let mut network = lock(&self.network);
            match len {
                None => {
                    network.give_back(frame);
                    break;
                }
                Some(len) if !(ETHERNET_HEADER..=self.capabilities.max_frame).contains(&len) => {
                    self.stats.tx_dropped += 1;
                    network.give_back(frame);
                }
                Some(len) => {
                    frame.len = len;
                    sent += 1;
                    self.stats.tx_bytes += len as u64;
                    network.send(now, frame);
                }
            }
        }
        self.stats.tx_frames += sent as u64;
        Ok(sent)
    }

    /// Returns immediately: in virtual time there is nothing to wait for.
    fn wait(&mut self, _timeout: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        find_address(lock(&self.network).addresses(), peer)
            .map(NextHop::Found)
            .ok_or_else(|| Error::NoRoute { peer, interface: self.capabilities.interface.clone() })
    }

    /// All VLANs lead to the same ports.
    fn resolve_in_vlan(&mut self, _: u16, peer: IpAddr) -> Result<NextHop, Error> {
        self.resolve(peer)
    }

    fn line_rate(&self) -> Option<u64> {
        lock(&self.network).rate()
    }

    fn stats(&self) -> Stats {
        self.stats
    }
}

impl Drop for SimPort {
    fn drop(&mut self) {
        let mut network = lock(&self.network);
        network.recycle(&mut self.received);
        network.remove_port(self.number);
    }
}

/// The most frames of one `rx_burst`.
const BURST: usize = 64;
/// The most frames that may overtake one, and the most that a link holds back at a time.
const REORDER_LIMIT: usize = 64;

impl LinkConfig {
    fn check(&self) -> Result<(), Error> {
        for (name, value) in [
            ("loss", self.loss),
            ("duplicate", self.duplicate),
            ("corrupt", self.corrupt),
            ("reorder", self.reorder),
        ] {
            if !(0.0..=1.0).contains(&value) {
                return Err(invalid(name, value, "a probability, 0 to 1"));
            }
        }
        if !(1..=REORDER_LIMIT).contains(&self.reorder_by) {
            return Err(invalid("reorder_by", self.reorder_by, "1 to 64 frames"));
        }
        if self.rate == Some(0) {
            return Err(invalid("rate", 0, "at least 1 bit per second (a cut link is loss = 1)"));
        }
        let needs_rate = "a rate too: without one no queue builds up";
        if let (None, Some(limit)) = (self.rate, self.queue_limit) {
            return Err(invalid("queue_limit", limit, needs_rate));
        }
        let Some(ecn) = self.ecn else { return Ok(()) };
        if self.rate.is_none() {
            return Err(invalid("ecn", format!("{ecn:?}"), needs_rate));
        }
        ecn.check()
    }
}

impl EcnConfig {
    fn check(&self) -> Result<(), Error> {
        if !(0.0..=1.0).contains(&self.pmax) {
            return Err(invalid("ecn.pmax", self.pmax, "a probability, 0 to 1"));
        }
        if self.kmin_bytes > self.kmax_bytes {
            return Err(invalid("ecn.kmin_bytes", self.kmin_bytes, "at most ecn.kmax_bytes"));
        }
        Ok(())
    }
}

fn invalid(parameter: &'static str, value: impl fmt::Display, expected: &str) -> Error {
    Error::Invalid { parameter, value: value.to_string(), expected: expected.into() }
}

#[cfg(test)]
mod tests;
