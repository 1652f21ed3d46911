//! UDP sockets: a port that needs no privilege at all.
//!
//! They are for containers, CI and laptops, without CAP_NET_RAW. One socket is one address on port 4791.
//!
//! The kernel writes and reads the IP and UDP headers, so frames start at the IP header ([`Layer::Ip`]). The ICRC
//! covers these headers. So all packets are sent from port 4791, and the engine is configured for this (`SocketTerms`).
//! The driver strips the headers that the engine has written: only the bytes after the UDP header are passed to the
//! socket. It prepends headers to each received datagram, made from what the kernel reports of it. TOS and TTL are
//! passed as ancillary data in both directions; the ICRC does not cover them.
//!
//! # The IPv4 identification
//!
//! The ICRC also covers the IPv4 identification. Linux sends 0 from a socket that is not connected, and sets DF. The
//! segments of one send (UDP GSO) have 0, 1, 2, … on the wire, no matter where the send is cut into segments: this was
//! observed with AF_PACKET in `driver/tests/udp`. So the driver has a packet renumbered when it is appended to a send
//! (`FrameSource::renumber`). This takes a few XORs, because the CRC is linear (`wire/src/identification.rs`).
//!
//! The kernel does not report the identification to the receiver. The driver guesses it: the position of a segment in a
//! datagram that the kernel has aggregated (UDP GRO). If the ICRC is then wrong, the engine computes the identification
//! that would make it right. This is one multiplication of polynomials, and it finds an identification for one of 65536
//! damaged packets. An identification below 64 (a segment), or up to 64 after the last one found (a peer that counts,
//! as rdma_rxe does), is counted as `rx_icrc_identification_likely`; this is a check of 25 bits. Any other is counted
//! as `rx_icrc_identification_solved`, a check of 16 bits. The kernel also checks the UDP checksum.

mod config;
mod control;
mod header;
mod neighbours;
mod receive;
mod refusal;
mod socket;
mod steering;
#[cfg(test)]
mod tests;
mod transmit;

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Waker;
use std::time::Duration;

use tracing::{info, warn};

use crate::kept::COPIES_MAX;
use crate::netlink::Netlink;
use crate::shm::links::Counts;
use crate::shm::meeting::refuse;
use crate::shm::route::Neighbour;
use crate::slots::{self, PACKET, SLOTS, Slot, owner};
use crate::waker::Doorbell;
use crate::{
    Armed, Capabilities, Error, FilteredSink, FrameSink, FrameSource, Icrc, Layer, Nanos, NextHop,
    PacketDriver, Refusal, RxFrame, SharedMemory, SocketTerms, Stats,
};
use config::LocalAddress;
pub use config::UdpConfig;
#[cfg(feature = "af_xdp")]
pub(crate) use config::is_link_local;
use neighbours::{Neighbours, Others};
use receive::{Receiver, place};
#[cfg(feature = "af_xdp")]
pub(crate) use socket::reserve;
pub(crate) use socket::set_option;
use steering::Sockets;
use transmit::{Told, Transmitter};

/// The base of the names of an address's slots.
pub(crate) fn name_of(address: IpAddr) -> String {
    format!("udp/{address}")
}

/// The slots of an address of this host that processes of this user have, each with the process's number.
///
/// # Errors
/// If it is not an address of this host, or if the user's processes can't be found.
pub fn sharers(address: IpAddr) -> Result<Vec<(usize, u32)>, Error> {
    let place = LocalAddress::find(address)?;
    let name = name_of(address) + &place.scope_name();
    slots::members(&name)
        .map_err(|source| os_error("looking for processes that share an address", &place, source))
}

/// Joins the processes that share an address, for a port that receives its packets elsewhere: packets from the kernel
/// are mail. Returns the slot, and the addresses of this host.
#[cfg(feature = "af_xdp")]
pub(crate) fn join_aside(address: IpAddr) -> Result<(Slot, Vec<IpAddr>), Error> {
    let place = LocalAddress::find(address)?;
    let sockets = Sockets::new(UdpConfig::new(address), place.clone());
    let sockets = sockets.map_err(|source| os_error("setting up the UDP socket", &place, source))?;
    let name = name_of(address) + &place.scope_name();
    let slot = Slot::join(&name, format!("{address}{}", place.scope_name()), 1, sockets.aside())?.remove(0);
    Ok((slot, place.all))
}

/// RoCEv2's UDP port, the source and destination of all packets.
const PORT: u16 = 4791;
/// TOS and TTL of packets that do not set others.
const DEFAULT_TOS: u8 = 0;
const DEFAULT_HOP_LIMIT: u8 = 64;
/// The longest packet of a queue pair, as the loopback interface would allow 64 KiB.
const MTU_MAX: u32 = 9216;

/// A UDP socket on port 4791 of one address, which contexts of up to 64 processes of one user may share.
///
/// Each has a slot. The first has slot 0 and all even queue pair numbers, the others have odd ones. By these the kernel
/// delivers each packet to its process, without a privilege or a daemon. The address has one QP1: a packet to it is for
/// the process that allocated the communication id in it, or that [listens](PacketDriver::listen) for the service.
/// While there are several processes, a thread of the process with the lowest slot reads QP1; when that process ends,
/// the next one takes over. Every process has a thread that sleeps until another process joins or leaves. A forked
/// child keeps its parent's slot taken, although nothing serves it, until the child ends or executes another program.
/// The kernel refuses processes of other users ([`Error::PortInUse`]).
///
/// Processes of one user on this host's addresses exchange packets through shared memory, without the kernel
/// ([`UdpConfig::shared_memory`]). The first frame to such a process requests this; frames after it wait for the answer
/// for at most 20 ms.
///
/// Sharing disables aggregation on an interface where the kernel aggregates packets (`ethtool -k`,
/// generic-receive-offload), as long as there is more than one process.
#[derive(Debug)]
pub struct Udp {
    capabilities: Capabilities,
    socket: Arc<OwnedFd>,
    /// Sends the MADs of all processes. A packet to a host that does not answer ARP or ND stays in the kernel for
    /// seconds and occupies the send buffer of its socket. Any peer can request connections in the names of such hosts,
    /// and the answers must not block queue pairs.
    for_mads: Arc<OwnedFd>,
    slot: Slot,
    /// Processes of this host that are reached through shared memory.
    neighbours: Option<Neighbours>,
    /// ICMP reports that have not been fetched yet.
    refusals: VecDeque<Refusal>,
    /// Connected to one peer after another, to query the kernel's route to it.
    probe: UdpSocket,
    address: IpAddr,
    interface: u32,
    receiver: Receiver,
    transmitter: Transmitter,
    doorbell: Doorbell,
    /// The joined groups, each with a socket of its own.
    groups: Vec<(IpAddr, OwnedFd)>,
    /// Whether packets have just been received or sent, so more may be ready to be sent before the next receive.
    send_first: bool,
    /// Bursts since the last receive call.
    unlooked: u8,
    told: Told,
    stats: Stats,
    /// Packets that the socket had dropped before: it may have belonged to another process.
    lost_before: u64,
}

impl Udp {
    /// Opens the address, or joins the processes that have it. Needs no privilege.
    ///
    /// # Errors
    /// [`Error::PortInUse`] if the address is in use by another user, by a program other than ferroce, or by a process
    /// that does not [share](UdpConfig::sharing); [`Error::Sharing`] if all 64 slots have processes or no process
    /// answers; [`Error::Invalid`] for an address that is not the host's own; [`Error::InterfaceDown`],
    /// [`Error::Permission`] (for busy polling), [`Error::Os`].
    pub fn open(config: &UdpConfig) -> Result<Udp, Error> {
        Ok(Udp::open_slots(config, 1)?.remove(0))
    }

    /// Opens the address `count` times, each for a context of its own, like `count` calls of [`open`](Udp::open), but
    /// with one thread and one set of descriptors.
    ///
    /// # Errors
    /// As [`open`](Udp::open); [`Error::Invalid`] for a count that is not 1 to 64.
    pub fn open_group(config: &UdpConfig, count: usize) -> Result<Vec<Udp>, Error> {
        if !(1..=SLOTS).contains(&count) {
            return Err(Error::Invalid {
                parameter: "count",
                value: count.to_string(),
                expected: format!("1 to {SLOTS} sockets on one address"),
            });
        }
        Udp::open_slots(config, count)
    }

    fn open_slots(config: &UdpConfig, count: usize) -> Result<Vec<Udp>, Error> {
        let place = LocalAddress::find(config.address)?;
        let scope = place.scope_name();
        let mut name = name_of(config.address) + &scope;
        if !config.sharing {
            // A name that no process looks for.
            static UNSHARED: AtomicU32 = AtomicU32::new(0);
            let number = UNSHARED.fetch_add(1, Ordering::Relaxed);
            name = format!("{name}/{}.{number}", std::process::id());
        }
        let sockets = Sockets::new(*config, place.clone())
            .map_err(|source| os_error("setting up the UDP socket", &place, source))?;
        let slots = Slot::join(&name, format!("{}{scope}", config.address), count, sockets)?;
        slots.into_iter().map(|slot| Udp::on(slot, config, &place)).collect()
    }

    fn on(slot: Slot, config: &UdpConfig, place: &LocalAddress) -> Result<Udp, Error> {
        let os = |source| os_error("setting up the UDP socket", place, source);
        let LocalAddress { interface, address, scope, all } = place;
        let number = slot.number();
        let parts = slot.group().parts();
        let (socket, for_mads) = match (parts.descriptors.get(number), parts.common.first()) {
            (Some(socket), Some(for_mads)) => (socket.clone(), for_mads.clone()),
            _ => return Err(os(io::Error::other("the group lacks a socket"))),
        };
        drop(parts);
        let mtu = interface.mtu.min(MTU_MAX);
        let segmentation = config.segmentation && socket::can_segment(socket.as_fd());
        let receive_buffer = socket::receive_buffer(socket.as_fd()).map_err(os)?;
        let description =
            describe(config, (segmentation, socket::aggregates(socket.as_fd())), receive_buffer, &slot);
        info!(interface = interface.name, "udp: {address}, {description}");
        if receive_buffer < ENOUGH_BUFFER {
            warn!(
                "the receive buffer has {} KiB, which allows few outstanding packets; `sysctl -w \
                 net.core.rmem_max={ENOUGH_BUFFER}` gives more",
                receive_buffer >> 10
            );
        }
        let lost_before = socket::dropped(socket.as_fd()).unwrap_or(0);
        let doorbell = Doorbell::new().map_err(os)?;
        slot.wake(doorbell.waker());
        let has_neighbours = config.shared_memory != SharedMemory::Off && config.sharing && *scope == 0;
        let icrc = config.shared_memory == SharedMemory::On;
        let neighbours = has_neighbours.then(|| Neighbours::new(*address, number, icrc, all.clone()));
        Ok(Udp {
            capabilities: Capabilities::new("udp", &interface.name, interface.mac, mtu)
                .description(description)
                .layer(Layer::Ip(SocketTerms::new(PORT, receive_buffer)))
                .qpns(owner::qpns(number))
                .comm_ids(owner::comm_ids(number))
                .addresses(vec![*address])
                .max_frame(mtu as usize),
            probe: socket::probe(*address, *scope).map_err(os)?,
            address: *address,
            interface: interface.index,
            receiver: Receiver::new().map_err(os)?,
            transmitter: Transmitter::new(*address, interface.index, mtu as usize, segmentation)
                .map_err(os)?,
            doorbell,
            socket,
            for_mads,
            neighbours: neighbours.transpose().map_err(os)?,
            slot,
            refusals: VecDeque::with_capacity(Refusal::KEPT_MAX),
            groups: Vec::new(),
            send_first: false,
            unlooked: 0,
            told: Told::default(),
            stats: Stats::default(),
            lost_before,
        })
    }

    /// The longest wait from now on.
    fn before_wait(&mut self) -> Duration {
        self.send_first = false;
        let by_memory = match &self.neighbours {
            // A burst receives only part of the mail, and the notification was for all of it.
            _ if self.slot.has_mail() => Duration::ZERO,
            Some(neighbours) if !neighbours.links.rest() => Duration::ZERO,
            Some(neighbours) => neighbours.links.longest_wait(),
            None => Duration::MAX,
        };
        // Packets that the kernel did not take must be offered again; there is no notification.
        if self.transmitter.is_pending() { TX_RETRY.min(by_memory) } else { by_memory }
    }

    /// Sends pending packets. Returns whether all of them were sent or dropped.
    fn flush(&mut self, now: Nanos) -> bool {
        let Udp { transmitter, socket, for_mads, slot, refusals, stats, told, capabilities, .. } = self;
        let segmentation = transmitter.segmentation;
        let hear = |socket: BorrowedFd<'_>| keep_refusals(socket, slot, refusals);
        let flushed = transmitter.flush(socket.as_fd(), for_mads.as_fd(), hear, stats, |refused| {
            told.tell(refused, &capabilities.interface, now);
        });
        if segmentation && !self.transmitter.segmentation {
            info!(
                "no segmentation: '{}' computes no checksums, which this kernel needs",
                self.capabilities.interface
            );
        }
        flushed
    }
}

impl PacketDriver for Udp {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// After a burst with packets, one burst makes no receive call: the poll loop then sends the packets that they have
    /// caused without waiting for a system call. After a send, one burst makes none either: pending packets, such as an
    /// ACK, are then sent before a response can arrive.
    fn rx_burst(&mut self, _now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        let by_memory =
            self.neighbours.as_mut().map_or(0, |neighbours| neighbours.links.receive(&self.slot, sink));
        let has_fresh = self.neighbours.as_ref().is_some_and(|neighbours| neighbours.links.has_fresh());
        if std::mem::take(&mut self.send_first) && self.unlooked < UNLOOKED_MAX && !has_fresh {
            self.unlooked += 1;
            return Ok(by_memory);
        }
        self.unlooked = 0;
        let is_shared = self.slot.group().is_shared();
        let Udp { receiver, socket, groups, slot, refusals, doorbell, stats, address, neighbours, .. } = self;
        doorbell.polled(waited_for(socket, groups, neighbours));
        let sockets = groups.iter().map(|(group, socket)| (*group, socket.as_fd()));
        let mut received = 0;
        for (to, socket) in [(*address, socket.as_fd())].into_iter().chain(sockets) {
            for _ in 0..TRIES_MAX {
                let taken = if is_shared {
                    let (mut frames, mut bytes) = (0, 0);
                    let is_own = |frame: &[u8]| {
                        let is_others = hand_on(slot, frame, header::len(to));
                        if is_others {
                            (frames, bytes) = (frames + 1, bytes + frame.len() as u64);
                        }
                        !is_others
                    };
                    let taken = receiver.receive(socket, to, &mut FilteredSink::new(sink, is_own), stats);
                    stats.handed_on += frames;
                    stats.rx_frames -= frames;
                    stats.rx_bytes -= bytes;
                    taken
                } else {
                    receiver.receive(socket, to, sink, stats)
                };
                match taken {
                    Ok(count) => received += count,
                    Err(error) if error.raw_os_error() == Some(libc::EBADF) => {
                        let interface = self.capabilities.interface.clone();
                        return Err(Error::Os {
                            what: "receiving from the UDP socket",
                            interface,
                            source: error,
                        });
                    }
                    // Reports of ICMP messages are returned before packets.
                    Err(error) if error.raw_os_error() != Some(libc::EAGAIN) => {
                        keep_refusals(socket, slot, refusals);
                        continue;
                    }
                    Err(_) => {}
                }
                break;
            }
        }
        if let (true, Some(neighbours)) = (has_fresh, &mut *neighbours) {
            neighbours.looked(received);
        }
        if slot.has_mail() {
            for mail in std::iter::from_fn(|| slot.take_mail()).take(MAIL_MAX) {
                match (mail.kind, &mut *neighbours) {
                    (PACKET, _) => {
                        received += 1;
                        stats.rx_frames += 1;
                        stats.rx_bytes += mail.bytes.len() as u64;
                        let frame = RxFrame::new(&mail.bytes, &mut receiver.copies);
                        sink.take(frame.with_icrc(Icrc::Guessed));
                    }
                    (steering::REFUSED, _) => {
                        Refusal::from_bytes(&mail.bytes).into_iter().for_each(|word| keep(refusals, word));
                    }
                    (_, Some(neighbours)) => neighbours.links.take_mail(slot, *address, mail),
                    (_, None) => refuse(Neighbour { address: *address, slot: slot.number() }, mail),
                }
            }
        }
        self.send_first = received > 0;
        Ok(received + by_memory)
    }

    fn keeps(&self) -> usize {
        COPIES_MAX
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        let (mut taken, mut by_memory) = (0, 0);
        let mut more = true;
        while self.flush(now) && more {
            let Udp { neighbours, transmitter, slot, stats, .. } = self;
            let (count, full) = match neighbours.as_mut().filter(|neighbours| neighbours.links.is_used()) {
                Some(neighbours) => {
                    let links = &mut neighbours.links;
                    let mut others = Others { links, slot, source, sent: 0 };
                    let filled = transmitter.fill(&mut others, stats);
                    by_memory += others.sent;
                    links.end_burst();
                    filled
                }
                None => transmitter.fill(source, stats),
            };
            (taken, more) = (taken + count, full);
            if count == 0 {
                break;
            }
        }
        self.send_first |= taken > 0;
        Ok(taken + by_memory)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let longest = self.before_wait();
        let Udp { doorbell, socket, groups, neighbours, .. } = self;
        let waited = doorbell.wait_with(waited_for(socket, groups, neighbours), timeout.min(longest));
        neighbours.iter().for_each(|neighbours| neighbours.links.rise());
        waited.map_err(|source| waiting_failed(&self.capabilities, source))
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        let longest = self.before_wait();
        let armed = self.doorbell.arm(waited_for(&self.socket, &self.groups, &self.neighbours));
        armed.map_err(|source| waiting_failed(&self.capabilities, source))?;
        Ok(Armed { fd: Some(self.doorbell.as_fd()), longest })
    }

    fn disarm(&mut self) {
        self.neighbours.iter().for_each(|neighbours| neighbours.links.rise());
        self.doorbell.disarm();
    }

    fn waker(&self) -> Option<Waker> {
        Some(self.doorbell.waker())
    }

    /// The kernel finds the hardware address, so the result is zeros. This only checks whether there is a route.
    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        let interface = &self.capabilities.interface;
        let to = socket::address(peer, PORT, self.interface);
        self.probe.connect(to).map_err(|source| match source.raw_os_error() {
            Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EINVAL | libc::EACCES) => {
                Error::NoRoute { peer, interface: interface.clone() }
            }
            _ => Error::Os { what: "looking up the route to a peer", interface: interface.clone(), source },
        })?;
        if let Some(mtu) = socket::path_mtu(&self.probe).filter(|mtu| *mtu < self.capabilities.mtu) {
            warn!(
                "the path to {peer} allows packets of {mtu} bytes, '{interface}' of {}",
                self.capabilities.mtu
            );
        }
        if let Some(neighbours) = &mut self.neighbours {
            neighbours.resolved(peer);
        }
        Ok(NextHop::Found([0; 6]))
    }

    fn next_refusal(&mut self) -> Option<Refusal> {
        self.refusals.pop_front()
    }

    fn join(&mut self, group: IpAddr) -> Result<(), Error> {
        let interface = || self.capabilities.interface.clone();
        if self.groups.len() == GROUPS_MAX {
            return Err(Error::Invalid {
                parameter: "multicast group",
                value: group.to_string(),
                expected: format!("at most {GROUPS_MAX} groups on a UDP socket"),
            });
        }
        let joined = socket::of_group(group, self.interface)
            .and_then(|socket| self.doorbell.widen(socket.as_fd()).map(|()| socket));
        let socket = joined.map_err(|source| Error::Os {
            what: "joining a multicast group",
            interface: interface(),
            source,
        })?;
        self.groups.push((group, socket));
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) -> Result<(), Error> {
        self.groups.retain(|(joined, _)| *joined != group);
        Ok(())
    }

    fn listen(&mut self, service: u64) -> Result<(), Error> {
        self.slot.listen(service)
    }

    fn unlisten(&mut self, service: u64) {
        self.slot.unlisten(service);
    }

    fn line_rate(&self) -> Option<u64> {
        Netlink::open().ok()?.interface(&self.capabilities.interface).ok()?.speed
    }

    fn stats(&self) -> Stats {
        // Packets that the kernel dropped for lack of room; 0 if it can't report them.
        let lost = socket::dropped(self.socket.as_fd()).unwrap_or(0).saturating_sub(self.lost_before);
        let counts = self.neighbours.as_ref().map_or(Counts::default(), |neighbours| neighbours.links.counts);
        Stats {
            rx_frames: self.stats.rx_frames + counts.rx_frames,
            rx_bytes: self.stats.rx_bytes + counts.rx_bytes,
            tx_frames: self.stats.tx_frames + counts.tx_frames,
            tx_bytes: self.stats.tx_bytes + counts.tx_bytes,
            tx_dropped: self.stats.tx_dropped + counts.tx_dropped,
            tx_by_memory: counts.tx_frames,
            rx_by_memory: counts.rx_frames,
            without_icrc: counts.without_icrc,
            bad_descriptors: counts.corrupt,
            rx_dropped: self.stats.rx_dropped + lost + self.slot.lost() + counts.rx_dropped,
            ..self.stats
        }
    }
}

/// Consecutive bursts without a receive call.
const UNLOOKED_MAX: u8 = 2;
/// The delay after which packets that the socket had no room for are offered again.
const TX_RETRY: Duration = Duration::from_micros(200);
/// The most multicast groups. Each costs a system call in each burst.
const GROUPS_MAX: usize = 16;
/// How often a call is repeated because of ICMP reports about earlier packets. The number is limited because any host
/// can send more of them meanwhile.
const TRIES_MAX: u32 = 8;
/// Enough for the default window of packets of the largest size.
const ENOUGH_BUFFER: usize = 4 << 20;

/// Moves the kernel's ICMP reports to `refusals` while there is room; those of other processes are forwarded. Returns
/// whether there were ICMP messages.
fn keep_refusals(socket: BorrowedFd<'_>, slot: &Slot, refusals: &mut VecDeque<Refusal>) -> bool {
    steering::hand_on_refusals(socket, (slot.group(), slot.number()), |_, refusal| keep(refusals, refusal))
}

fn keep(refusals: &mut VecDeque<Refusal>, refusal: Refusal) {
    if refusals.len() < Refusal::KEPT_MAX {
        refusals.push_back(refusal);
    }
}

/// Forwards a packet if it is another process's. A packet for a slot without a process stays here: its queue pair does
/// not exist.
fn hand_on(slot: &Slot, packet: &[u8], header: usize) -> bool {
    let Some(datagram) = packet.get(header..) else { return false };
    let Some(qpn) = owner::qpn_of(datagram) else { return false };
    if qpn == owner::QP1 {
        // It was received before the other processes joined.
        return !owner::post_mad(slot.group(), slot.number(), datagram, packet);
    }
    let owner = owner::slot_of(qpn);
    let is_others = owner != slot.number() && slot.group().alive() >> owner & 1 == 1 && qpn != MULTICAST;
    is_others && {
        slot.group().post_or_count((slot.number(), owner), PACKET, packet);
        true
    }
}

/// The queue pair of packets to multicast groups. Each member receives its own copy.
const MULTICAST: u32 = 0x00ff_ffff;
/// The most mail received in a burst.
const MAIL_MAX: usize = 64;

fn describe(
    config: &UdpConfig,
    (segmentation, aggregates): (bool, bool),
    receive_buffer: usize,
    slot: &Slot,
) -> String {
    let segmentation = match (segmentation, config.segmentation) {
        (true, _) => "segmentation",
        (false, true) => "no segmentation (the kernel is older than 4.18)",
        (false, false) => "no segmentation",
    };
    let aggregation = if aggregates { "aggregation" } else { "no aggregation" };
    let busy = config.busy_poll.map_or(String::new(), |time| format!(", busy polling {time:?}"));
    let alive = slot.group().alive();
    let others = match alive.count_ones() {
        0 | 1 => String::new(),
        contexts => format!(" ({contexts} contexts when it was opened)"),
    };
    let share = format!(", slot {} of the address{others}", slot.number());
    let buffer = receive_buffer >> 10;
    format!("UDP socket, {segmentation}, {aggregation}, receive buffer {buffer} KiB{busy}{share}")
}

/// The descriptors on which packets arrive.
fn waited_for<'a>(
    socket: &'a Arc<OwnedFd>,
    groups: &'a [(IpAddr, OwnedFd)],
    neighbours: &'a Option<Neighbours>,
) -> impl Iterator<Item = BorrowedFd<'a>> + use<'a> {
    let bell = neighbours.iter().map(|neighbours| neighbours.links.bell());
    std::iter::once(socket.as_fd()).chain(groups.iter().map(|(_, socket)| socket.as_fd())).chain(bell)
}

fn waiting_failed(capabilities: &Capabilities, source: io::Error) -> Error {
    Error::Os { what: "waiting for the UDP socket", interface: capabilities.interface.clone(), source }
}

fn os_error(what: &'static str, place: &LocalAddress, source: io::Error) -> Error {
    Error::Os { what, interface: place.interface.name.clone(), source }
}
