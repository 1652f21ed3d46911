//! Sharing between an AF_XDP port and other processes of this host: of its addresses with UDP sockets, and of rings in
//! memory with neighbours.
//!
//! The port has slot 0 of each of its addresses ([`slots`](crate::slots)). The XDP program passes packets for other
//! slots, which have odd queue pair numbers, to the kernel. It redirects packets to QP1 to the port, which forwards
//! those for other processes. Packets for slot 0 and for QP1 that the kernel receives are from this host; the thread of
//! the slots receives and forwards them. A frame to an address of this host is never sent through the interface, but
//! through a ring in memory or as mail.

use std::io;
use std::net::IpAddr;
use std::os::fd::BorrowedFd;
use std::task::Waker;
use std::time::Duration;

use super::os_error;
use crate::holder::{is_kernels, sockets_on};
use crate::kept::Copies;
use crate::netlink::Interface;
use crate::shm::links::{Counts, Links};
use crate::shm::meeting::refuse;
use crate::shm::ring::FRAME_MAX;
use crate::shm::route::{Neighbour, behind_ethernet, destination, is_local, source};
use crate::slots::{self, PACKET, SLOTS, Slot, owner};
use crate::{
    ETHERNET_HEADER, Error, FilteredSink, FrameSink, FrameSource, Icrc, RxFrame, SharedMemory, Stats, udp,
};

/// The slot that has all even queue pair numbers.
pub(super) const SLOT: usize = 0;
/// The most frames sent as mail, and the most mail received, in a burst.
const MAIL_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct Sharing {
    /// The addresses that are shared. The first slot sends the messages to neighbours.
    slots: Vec<(IpAddr, Slot)>,
    links: Option<Links>,
    /// Whether frames are sent to addresses of this host.
    is_used: bool,
    /// Addresses of this host.
    local: Vec<IpAddr>,
    frame: Frame,
    counts: Mail,
}

/// Counters of frames sent and received as mail.
#[derive(Clone, Copy, Debug, Default)]
struct Mail {
    rx_frames: u64,
    rx_bytes: u64,
    tx_frames: u64,
    tx_bytes: u64,
    rx_dropped: u64,
    tx_dropped: u64,
    /// Frames received from the interface and forwarded, and their bytes.
    handed_on: u64,
    handed_on_bytes: u64,
}

impl Sharing {
    /// Takes slot 0 of each address of the interface. If rdma_rxe has the port of all addresses, nothing can be shared.
    ///
    /// # Errors
    /// [`Error::PortInUse`] if slot 0 or the port is in use; [`Error::Sharing`].
    pub(super) fn join(interface: &Interface, memory: SharedMemory) -> Result<Option<Box<Sharing>>, Error> {
        let mut slots = Vec::new();
        let mut local = Vec::new();
        let mut addresses = interface.gid_order();
        // Link-local addresses last, because several hosts may have the same one.
        addresses.sort_by_key(|address| udp::is_link_local(*address));
        for address in addresses {
            if sockets_on(address, interface)?.iter().any(is_kernels) {
                continue;
            }
            let (slot, all) = udp::join_aside(address)?;
            slots.push((address, slot));
            local = all;
        }
        if slots.is_empty() {
            return Ok(None);
        }
        let own: Vec<IpAddr> =
            slots.iter().map(|(own, _)| *own).filter(|own| !udp::is_link_local(*own)).collect();
        let links = Sharing::links(&own, &local, memory)
            .map_err(|source| os_error("setting up shared memory", &interface.name, source))?;
        let (frame, counts) = (Frame::to(interface.mac), Mail::default());
        Ok(Some(Box::new(Sharing { slots, links, is_used: false, local, frame, counts })))
    }

    /// The links to neighbours, if shared memory is used. Neighbours find the port by the first of its addresses.
    fn links(own: &[IpAddr], local: &[IpAddr], memory: SharedMemory) -> io::Result<Option<Links>> {
        let Some((first, others)) = own.split_first().filter(|_| memory != SharedMemory::Off) else {
            return Ok(None);
        };
        let first = Neighbour { address: *first, slot: SLOT };
        let mut links = Links::new(first, memory == SharedMemory::On, udp::name_of)?.of_ethernet();
        others.iter().for_each(|address| links.add_own(*address));
        local.iter().for_each(|address| links.add_local(*address));
        Ok(Some(links))
    }

    /// Whether the port shares the address.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.slots.iter().any(|(own, _)| *own == address)
    }

    /// Wakes the port with `waker` when mail arrives.
    pub(super) fn wake(&self, waker: &Waker) {
        self.slots.iter().for_each(|(_, slot)| slot.wake(waker.clone()));
    }

    /// The descriptor that frames in memory make readable while the port waits.
    pub(super) fn bell(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.links.iter().map(Links::bell)
    }

    /// The longest wait from now on.
    pub(super) fn before_wait(&self) -> Duration {
        match &self.links {
            _ if self.slots.iter().any(|(_, slot)| slot.has_mail()) => Duration::ZERO,
            Some(links) if !links.rest() => Duration::ZERO,
            Some(links) => links.longest_wait(),
            None => Duration::MAX,
        }
    }

    pub(super) fn rise(&self) {
        self.links.iter().for_each(Links::rise);
    }

    /// Whether frames to this address stay on this host, if it still has the address.
    pub(super) fn is_here(&self, peer: IpAddr) -> bool {
        self.has(peer) || self.links.is_some() && is_local(peer, &self.local)
    }

    /// Frames to the address stay on this host from now on: the port's own hardware address is their next hop.
    pub(super) fn add_address(&mut self, peer: IpAddr) {
        self.is_used = true;
        self.links.iter_mut().for_each(|links| links.add_address(peer));
    }

    /// Passes frames from neighbours to `sink`. Returns their number.
    pub(super) fn receive(&mut self, sink: &mut dyn FrameSink) -> usize {
        let Sharing { slots, links, frame, is_used, local, counts, .. } = self;
        let Some((_, speaker)) = slots.first() else { return 0 };
        let mut sink = Framing { sink, frame };
        let mut taken = links.as_mut().map_or(0, |links| links.receive(speaker, &mut sink));
        for (address, slot) in slots.iter().filter(|(_, slot)| slot.has_mail()) {
            for mail in std::iter::from_fn(|| slot.take_mail()).take(MAIL_MAX) {
                match (mail.kind, &mut *links) {
                    // Not from this host, so the next hop of an answer is unknown: a packet that the program passed to
                    // the kernel, such as a fragment.
                    (PACKET, _) if !source(&mail.bytes).is_some_and(|source| is_local(source, local)) => {
                        counts.rx_dropped += 1;
                    }
                    (PACKET, _) => {
                        taken += 1;
                        // Answers will be sent to this host.
                        *is_used = true;
                        counts.rx_frames += 1;
                        counts.rx_bytes += mail.bytes.len() as u64;
                        sink.take(RxFrame::borrowed(&mail.bytes).with_icrc(Icrc::Guessed));
                    }
                    (_, Some(links)) => links.take_mail(speaker, *address, mail),
                    (_, None) => refuse(Neighbour { address: *address, slot: SLOT }, mail),
                }
            }
        }
        if let Some(links) = links.as_mut().filter(|links| links.has_fresh()) {
            links.caught_up();
        }
        taken
    }

    /// A filter for frames from the interface: it forwards packets to QP1 of an address with several processes.
    pub(super) fn filter<'a>(
        &'a mut self,
        sink: &'a mut dyn FrameSink,
    ) -> FilteredSink<'a, impl FnMut(&[u8]) -> bool> {
        let Sharing { slots, counts, .. } = self;
        FilteredSink::new(sink, |frame| {
            let packet = behind_ethernet(frame);
            let Some((to, owner::QP1)) = destination(packet) else { return true };
            let group = slots.iter().find(|(own, _)| *own == to).map(|(_, slot)| slot.group());
            let Some(group) = group.filter(|group| group.is_shared()) else { return true };
            let Some(datagram) = owner::datagram_of(packet) else { return true };
            let is_own = owner::post_mad(group, SLOT, datagram, packet);
            if !is_own {
                counts.handed_on += 1;
                counts.handed_on_bytes += frame.len() as u64;
            }
            is_own
        })
    }

    /// Whether any address has several processes.
    pub(super) fn is_shared(&self) -> bool {
        self.slots.iter().any(|(_, slot)| slot.group().is_shared())
    }

    /// Whether frames may stay on this host.
    pub(super) fn is_used(&self) -> bool {
        self.is_used || self.links.as_ref().is_some_and(Links::is_used)
    }

    /// The frames of a source that leave through the interface. The others are sent during iteration.
    pub(super) fn outward<'a>(&'a mut self, source: &'a mut dyn FrameSource) -> Outward<'a> {
        Outward { sharing: self, source, by_memory: 0, posted: 0 }
    }

    /// Sends a packet to an address of this host without a ring: the first packets to a context, and those to QP1.
    #[cold]
    fn post(slots: &[(IpAddr, Slot)], counts: &mut Mail, packet: &[u8]) {
        let is_sent = match destination(packet) {
            Some((to, qpn)) => match slots.iter().find(|(own, _)| *own == to) {
                Some((_, slot)) => {
                    if let Some(datagram) = owner::datagram_of(packet) {
                        owner::post(slot.group(), SLOT, datagram, packet);
                    }
                    true
                }
                None => say(to, qpn, packet),
            },
            None => false,
        };
        if is_sent {
            counts.tx_frames += 1;
            counts.tx_bytes += packet.len() as u64;
        } else {
            counts.tx_dropped += 1;
        }
    }

    /// Requests for the service are received by this port, on all its addresses.
    ///
    /// # Errors
    /// [`Error::ServiceInUse`], [`Error::Sharing`].
    pub(super) fn listen(&self, service: u64) -> Result<(), Error> {
        for (at, (_, slot)) in self.slots.iter().enumerate() {
            if let Err(error) = slot.listen(service) {
                self.slots[..at].iter().for_each(|(_, slot)| slot.unlisten(service));
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) fn unlisten(&self, service: u64) {
        self.slots.iter().for_each(|(_, slot)| slot.unlisten(service));
    }

    pub(super) fn add_to(&self, stats: &mut Stats) {
        let mail = self.counts;
        let memory = self.links.as_ref().map_or(Counts::default(), |links| links.counts);
        let lost: u64 = self.slots.iter().map(|(_, slot)| slot.lost()).sum();
        stats.rx_frames += mail.rx_frames + memory.rx_frames;
        stats.rx_frames -= mail.handed_on;
        stats.rx_bytes += mail.rx_bytes + memory.rx_bytes;
        stats.rx_bytes -= mail.handed_on_bytes;
        stats.rx_dropped += lost + mail.rx_dropped + memory.rx_dropped;
        stats.tx_frames += mail.tx_frames + memory.tx_frames;
        stats.tx_bytes += mail.tx_bytes + memory.tx_bytes;
        stats.tx_dropped += mail.tx_dropped + memory.tx_dropped;
        stats.handed_on += mail.handed_on;
        stats.tx_by_memory += memory.tx_frames;
        stats.rx_by_memory += memory.rx_frames;
        stats.without_icrc += memory.without_icrc;
        stats.bad_descriptors += memory.corrupt;
    }
}

/// Sends a packet to a process on an address of this host that the port does not have. Returns whether a process
/// received it.
fn say(to: IpAddr, qpn: u32, packet: &[u8]) -> bool {
    // Every process with a slot knows the owner of packets to QP1.
    let slots = if qpn == owner::QP1 { 0..SLOTS } else { owner::slot_of(qpn)..owner::slot_of(qpn) + 1 };
    let connected = slots::connect(&udp::name_of(to), slots).ok().flatten();
    connected.is_some_and(|connection| slots::say(&connection, PACKET, packet, &[]).is_ok())
}

/// See [`Sharing::outward`].
pub(super) struct Outward<'a> {
    sharing: &'a mut Sharing,
    source: &'a mut dyn FrameSource,
    by_memory: usize,
    posted: usize,
}

impl Outward<'_> {
    /// Wakes the receivers of frames. Returns the number of frames that stayed on this host.
    pub(super) fn end(self) -> usize {
        self.sharing.links.iter_mut().for_each(Links::end_burst);
        self.by_memory + self.posted
    }
}

impl FrameSource for Outward<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let Sharing { slots, links, frame: own, counts, .. } = &mut *self.sharing;
        let (_, speaker) = slots.first()?;
        while self.posted < MAIL_MAX {
            let len = match links {
                Some(links) => {
                    let frame = links.send(speaker, self.source, &mut self.by_memory)?;
                    buffer.get_mut(..frame.len())?.copy_from_slice(frame);
                    frame.len()
                }
                None => self.source.write(buffer)?,
            };
            let frame = buffer.get(..len)?;
            if !frame.starts_with(own.mac()) {
                return Some(len);
            }
            self.posted += 1;
            Sharing::post(slots, counts, behind_ethernet(frame));
        }
        None
    }
}

/// A frame with an Ethernet header added, for sinks that expect a frame of this port.
#[derive(Debug)]
struct Frame {
    bytes: Box<[u8; ETHERNET_HEADER + FRAME_MAX]>,
    copies: Copies,
}

impl Frame {
    fn mac(&self) -> &[u8] {
        &self.bytes[..6]
    }

    fn to(mac: [u8; 6]) -> Frame {
        let mut bytes = Box::new([0; ETHERNET_HEADER + FRAME_MAX]);
        bytes[..6].copy_from_slice(&mac);
        // Answers stay on this host.
        bytes[6..12].copy_from_slice(&mac);
        Frame { bytes, copies: Copies::default() }
    }
}

/// Adds the header to packets from neighbours, which have none.
struct Framing<'a> {
    sink: &'a mut dyn FrameSink,
    frame: &'a mut Frame,
}

impl FrameSink for Framing<'_> {
    fn take(&mut self, packet: RxFrame<'_>) {
        let Frame { bytes, copies } = &mut *self.frame;
        let is_v4 = packet.bytes().first().is_some_and(|first| first >> 4 == 4);
        let (header, to) = bytes.split_at_mut(ETHERNET_HEADER);
        header[12..].copy_from_slice(if is_v4 { &[0x08, 0] } else { &[0x86, 0xdd] });
        let Some(to) = to.get_mut(..packet.bytes().len()) else { return };
        to.copy_from_slice(packet.bytes());
        let frame = RxFrame::new(&bytes[..ETHERNET_HEADER + packet.bytes().len()], copies);
        self.sink.take(frame.with_icrc(packet.icrc()));
    }
}
