use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::event::Picos;
use super::simulation::Simulation;
use crate::kept::{COPIES_MAX, Copies};
use crate::loopback::{FRAME_OVERHEAD, find_address, lock, port_mac};
use crate::sim::{BURST, invalid};
use crate::{
    Capabilities, ETHERNET_HEADER, Error, FrameSink, FrameSource, Nanos, NextHop, PacketDriver, RxFrame,
    Stats,
};

/// The port of a host of a [`Fabric`](super::Fabric).
///
/// It accepts frames to send while fewer than [`tx_frames`](super::HostConfig::tx_frames) are queued, of all classes
/// together: as with one ring of descriptors, frames of a paused class delay the others. A PFC frame passed to it pauses
/// the other end of its link. A frame without a destination host, such as a multicast, is lost. A frame with a length from
/// `source` shorter than an Ethernet header or longer than [`Capabilities::max_frame`] is not sent and counts as
/// [`Stats::tx_dropped`].
pub struct HostPort {
    capabilities: Capabilities,
    host: u32,
    line_rate: u64,
    simulation: Arc<Mutex<Simulation>>,
    copies: Copies,
    stats: Stats,
}

impl fmt::Debug for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPort").field("capabilities", &self.capabilities).finish_non_exhaustive()
    }
}

impl HostPort {
    pub(super) fn open(simulation: Arc<Mutex<Simulation>>, host: u32) -> Result<HostPort, Error> {
        let mut state = lock(&simulation);
        let mtu = state.config.mtu;
        let Some(port) = state.hosts[host as usize].port else {
            return Err(invalid("host", host, "a host with a link"));
        };
        if state.hosts[host as usize].is_open {
            return Err(invalid("host", host, "a host that nobody drives yet"));
        }
        let line_rate = state.ports[port as usize].link.rate;
        let addresses = state.hosts[host as usize].addresses.clone();
        state.set_open(host, true);
        drop(state);
        let capabilities = Capabilities::new("sim", format!("host{host}"), port_mac(host as usize), mtu)
            .description("a host of a fabric in virtual time")
            .addresses(addresses)
            .max_frame(mtu as usize + FRAME_OVERHEAD);
        Ok(HostPort {
            capabilities,
            host,
            line_rate,
            simulation,
            copies: Copies::default(),
            stats: Stats::default(),
        })
    }
}

impl PacketDriver for HostPort {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn line_rate(&self) -> Option<u64> {
        Some(self.line_rate)
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let mut simulation = lock(&self.simulation);
        simulation.advance(Picos::at(now));
        let mut buffer = simulation.buffers.take();
        let mut count = 0;
        while count < BURST {
            let Some(number) = simulation.hosts[self.host as usize].received.pop_front() else { break };
            let len = simulation.frames.read(number, &mut buffer);
            simulation.frames.give_back(number);
            // The lock is not held while `sink` runs, because it may use the fabric.
            drop(simulation);
            sink.take(RxFrame::new(&buffer[..len], &mut self.copies));
            self.stats.rx_bytes += len as u64;
            count += 1;
            simulation = lock(&self.simulation);
        }
        simulation.buffers.give_back(buffer);
        if !simulation.hosts[self.host as usize].received.is_empty() {
            simulation.wake(self.host);
        }
        self.stats.rx_frames += count as u64;
        Ok(count)
    }

    fn keeps(&self) -> usize {
        COPIES_MAX
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let mut sent = 0;
        let mut simulation = lock(&self.simulation);
        simulation.advance(Picos::at(now));
        let mut buffer = simulation.buffers.take();
        loop {
            let host = &mut simulation.hosts[self.host as usize];
            if host.waiting >= host.config.tx_frames {
                host.wants_room = true;
                break;
            }
            // The lock is not held while `source` runs, because it may use the fabric.
            drop(simulation);
            let len = source.write(&mut buffer);
            simulation = lock(&self.simulation);
            match len {
                None => break,
                Some(len) if !(ETHERNET_HEADER..=self.capabilities.max_frame).contains(&len) => {
                    self.stats.tx_dropped += 1;
                }
                Some(len) => {
                    sent += 1;
                    self.stats.tx_bytes += len as u64;
                    simulation.send(self.host, &buffer[..len]);
                }
            }
        }
        simulation.buffers.give_back(buffer);
        self.stats.tx_frames += sent as u64;
        Ok(sent)
    }

    /// Returns immediately: in virtual time there is nothing to wait for.
    fn wait(&mut self, _timeout: Duration) -> Result<(), Error> {
        Ok(())
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        let simulation = lock(&self.simulation);
        find_address(simulation.hosts.iter().map(|host| &host.addresses[..]), peer)
            .map(NextHop::Found)
            .ok_or_else(|| Error::NoRoute { peer, interface: self.capabilities.interface.clone() })
    }

    /// All VLANs lead to the same ports.
    fn resolve_in_vlan(&mut self, _: u16, peer: IpAddr) -> Result<NextHop, Error> {
        self.resolve(peer)
    }

    fn stats(&self) -> Stats {
        let rx_dropped = lock(&self.simulation).hosts[self.host as usize].rx_dropped;
        Stats { rx_dropped, ..self.stats }
    }
}

impl Drop for HostPort {
    fn drop(&mut self) {
        lock(&self.simulation).set_open(self.host, false);
    }
}
