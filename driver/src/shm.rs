//! Shared memory between processes of one user on this host: no wire, no kernel.
//!
//! [`Shm`] joins a switch by its name. A process takes a slot of the switch, as on an address that processes share, and
//! sends to each other process through a ring in memory that both have mapped. A frame is written into the ring, its
//! payload directly from registered memory. The receiver copies the frame before it parses it, so the ring may contain
//! anything at any time: the processes need not trust each other. A process with nothing to do sleeps and is woken by
//! its bell. The bell is a socket, because a context may also wait for other descriptors, and a futex has none.
//!
//! - `ring.rs`: one ring
//! - `links.rs`: all rings of a context
//! - `route.rs`: the ring for each neighbour
//! - `meeting.rs`: how two contexts set up a ring
//! - `bell.rs`: waking a sleeping context
//!
//! `udp/neighbours.rs` uses them instead of the UDP socket, `af_xdp/sharing.rs` for an AF_XDP port.
//! docs/decisions/12-neighbours.md has the reasons.

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod attack;
mod bell;
pub(crate) mod links;
pub(crate) mod meeting;
pub(crate) mod ring;
pub(crate) mod route;
#[cfg(test)]
mod tests;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsFd;
use std::task::Waker;
use std::time::Duration;

use tracing::info;

use crate::kept::{COPIES_MAX, Copies};
use crate::slots::{Mailboxes, PACKET, Slot, owner};
use crate::waker::Doorbell;
use crate::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Layer, Nanos, NextHop, PacketDriver, ROCE_PORT,
    RxFrame, SocketTerms, Stats,
};
use links::Links;
use route::Neighbour;

/// The address of every switch. Processes differ in their queue pair numbers.
const ADDRESS: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
/// Enough for a path MTU of 4096.
const MTU: u32 = 4200;
/// The most frames of a burst sent as mail.
const POSTS_MAX: usize = 64;
/// The most mail received in a burst.
const MAIL_MAX: usize = 64;
/// The longest name of a switch. Short enough for the path of a socket.
const NAME_MAX: usize = 56;

/// Whether shared memory is used between processes of this host, instead of the kernel's UDP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum SharedMemory {
    /// If both ends enable it.
    #[default]
    On,
    /// If both ends enable it. Frames have no ICRC if both ends choose this, because no wire can corrupt them.
    WithoutIcrc,
    /// No: the kernel's UDP is used.
    Off,
}

/// The switch to join.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct ShmConfig {
    /// 1 to 56 letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Whether frames have an ICRC. They have none if both ends turn it off.
    pub icrc: bool,
}

impl ShmConfig {
    /// The switch of this name, with an ICRC.
    pub fn new(name: impl Into<String>) -> ShmConfig {
        ShmConfig { name: name.into(), icrc: true }
    }

    /// Whether frames have an ICRC; on by default.
    pub fn icrc(self, icrc: bool) -> Self {
        ShmConfig { icrc, ..self }
    }
}

/// A port of a switch in shared memory.
#[derive(Debug)]
pub struct Shm {
    capabilities: Capabilities,
    slot: Slot,
    links: Links,
    doorbell: Doorbell,
    copies: Copies,
    stats: Stats,
}

impl Shm {
    /// Joins the switch of this name, which exists as long as a process has joined it. Needs no privilege.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an invalid name, [`Error::Sharing`], [`Error::Os`].
    pub fn open(config: &ShmConfig) -> Result<Shm, Error> {
        let name = &config.name;
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > NAME_MAX || !name.chars().all(is_plain) {
            return Err(Error::Invalid {
                parameter: "name of shared memory",
                value: format!("'{}'", name.escape_debug()),
                expected: format!("1 to {NAME_MAX} letters, digits, '-', '_' and '.'"),
            });
        }
        let os = |source| Error::Os { what: "joining shared memory", interface: name.clone(), source };
        let in_names = format!("shm/{name}");
        let slot = Slot::join(&in_names, format!("shm:{name}"), 1, Mailboxes)?.remove(0);
        let doorbell = Doorbell::new().map_err(os)?;
        slot.wake(doorbell.waker());
        let number = slot.number();
        let description = format!("shared memory '{name}', slot {number}");
        info!("shm: {description}, address {ADDRESS}");
        let own = Neighbour { address: ADDRESS, slot: number };
        let mut links = Links::new(own, config.icrc, move |_| in_names.clone()).map_err(os)?;
        links.add_address(ADDRESS);
        Ok(Shm {
            capabilities: Capabilities::new("shm", name, [0; 6], MTU)
                .description(description)
                .layer(Layer::Ip(SocketTerms::new(ROCE_PORT, RECEIVE_BUFFER)))
                .qpns(owner::qpns(number))
                .comm_ids(owner::comm_ids(number))
                .addresses(vec![ADDRESS])
                .max_frame(MTU as usize),
            slot,
            links,
            doorbell,
            copies: Copies::default(),
            stats: Stats::default(),
        })
    }

    /// Sends a frame for which there is no ring: the first frames to a process, and those to QP1.
    #[cold]
    fn post(slot: &Slot, stats: &mut Stats, frame: &[u8]) {
        const HEADERS: usize = 28;
        stats.tx_frames += 1;
        stats.tx_bytes += frame.len() as u64;
        let Some(datagram) = frame.get(HEADERS..) else { return stats.tx_dropped += 1 };
        match owner::qpn_of(datagram) {
            Some(owner::QP1) => {
                let own = slot.number();
                if owner::post_mad(slot.group(), own, datagram, frame) {
                    slot.group().post_or_count((own, own), PACKET, frame);
                }
            }
            Some(qpn) if slot.group().post(owner::slot_of(qpn), PACKET, frame, &[]) => {}
            _ => stats.tx_dropped += 1,
        }
    }

    /// Whether the port may sleep. A burst receives only part of the mail, but the bell was rung for all of it.
    fn may_rest(&self) -> bool {
        self.links.rest() && !self.slot.has_mail()
    }

    fn os_error(&self, source: io::Error) -> Error {
        Error::Os {
            what: "waiting for shared memory",
            interface: self.capabilities.interface.clone(),
            source,
        }
    }
}

/// The terms of a socket that never loses packets.
const RECEIVE_BUFFER: usize = 8 << 20;

impl PacketDriver for Shm {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn rx_burst(&mut self, _: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.doorbell.polled(std::iter::once(self.links.bell()));
        let mut received = self.links.receive(&self.slot, sink);
        if self.slot.has_mail() {
            for mail in std::iter::from_fn(|| self.slot.take_mail()).take(MAIL_MAX) {
                if mail.kind == PACKET {
                    received += 1;
                    self.stats.rx_frames += 1;
                    self.stats.rx_bytes += mail.bytes.len() as u64;
                    sink.take(RxFrame::new(&mail.bytes, &mut self.copies));
                } else {
                    self.links.take_mail(&self.slot, ADDRESS, mail);
                }
            }
        }
        // Mail is in order, and an offer is mail, so no older frame is pending.
        if self.links.has_fresh() {
            self.links.caught_up();
        }
        Ok(received)
    }

    fn keeps(&self) -> usize {
        COPIES_MAX
    }

    fn tx_burst(&mut self, _: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let Shm { links, slot, stats, .. } = self;
        let (mut sent, mut posted) = (0, 0);
        while posted < POSTS_MAX
            && let Some(frame) = links.send(slot, source, &mut sent)
        {
            Shm::post(slot, stats, frame);
            posted += 1;
        }
        links.end_burst();
        Ok(sent + posted)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.may_rest() {
            let longest = timeout.min(self.links.longest_wait());
            let waited = self.doorbell.wait_with(std::iter::once(self.links.bell()), longest);
            waited.map_err(|source| self.os_error(source))?;
        }
        self.links.rise();
        Ok(())
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let longest = if self.may_rest() { self.links.longest_wait() } else { Duration::ZERO };
        let armed = self.doorbell.arm(std::iter::once(self.links.bell()));
        armed.map_err(|source| self.os_error(source))?;
        Ok(Armed { fd: Some(self.doorbell.as_fd()), longest })
    }

    fn disarm(&mut self) {
        self.links.rise();
        self.doorbell.disarm();
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.doorbell.waker())
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        if peer == ADDRESS {
            return Ok(NextHop::Found([0; 6]));
        }
        Err(Error::NoRoute { peer, interface: self.capabilities.interface.clone() })
    }

    fn listen(&mut self, service: u64) -> Result<(), Error> {
        self.slot.listen(service)
    }

    fn unlisten(&mut self, service: u64) {
        self.slot.unlisten(service);
    }

    fn stats(&self) -> Stats {
        let counts = self.links.counts;
        Stats {
            rx_frames: self.stats.rx_frames + counts.rx_frames,
            rx_bytes: self.stats.rx_bytes + counts.rx_bytes,
            rx_dropped: self.slot.lost() + counts.rx_dropped,
            tx_frames: self.stats.tx_frames + counts.tx_frames,
            tx_bytes: self.stats.tx_bytes + counts.tx_bytes,
            tx_dropped: self.stats.tx_dropped + counts.tx_dropped,
            tx_by_memory: counts.tx_frames,
            rx_by_memory: counts.rx_frames,
            without_icrc: counts.without_icrc,
            bad_descriptors: counts.corrupt,
            ..self.stats
        }
    }
}
