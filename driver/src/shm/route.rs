//! The ring for each context, and the source and destination of a packet.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use arrayvec::ArrayVec;

use crate::slots::{SLOTS, owner};
use crate::{ETHERNET_HEADER, VLAN_TAG};

/// A context of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Neighbour {
    pub(crate) address: IpAddr,
    pub(crate) slot: usize,
}

/// The state of the path to a neighbour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Unknown,
    /// A ring was offered.
    Offered,
    /// Through this ring.
    Ring(usize),
    /// There is no ring; one is offered again at this time.
    None(Instant),
}

/// The paths to all contexts of this host.
#[derive(Debug, Default)]
pub(super) struct Routes(Vec<(IpAddr, [Route; SLOTS])>);

impl Routes {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds an address that may have contexts.
    pub(super) fn add(&mut self, address: IpAddr) {
        if !self.0.iter().any(|(known, _)| *known == address) {
            self.0.push((address, [Route::Unknown; SLOTS]));
        }
    }

    /// The neighbour in a slot of the address with these bytes, and the path to it.
    #[inline]
    pub(super) fn find(&self, address: &[u8], slot: usize) -> Option<(Neighbour, Route)> {
        let address = address_of(address)?;
        let (_, slots) = self.0.iter().find(|(known, _)| *known == address)?;
        Some((Neighbour { address, slot }, slots[slot]))
    }

    /// Does nothing if the address is unknown.
    pub(super) fn set(&mut self, to: Neighbour, route: Route) {
        if let Some((_, slots)) = self.0.iter_mut().find(|(address, _)| *address == to.address) {
            slots[to.slot] = route;
        }
    }
}

pub(crate) fn is_local(address: IpAddr, local: &[IpAddr]) -> bool {
    local.contains(&address) || address.is_ipv4() && address.is_loopback()
}

fn address_of(bytes: &[u8]) -> Option<IpAddr> {
    match bytes.len() {
        4 => bytes.first_chunk::<4>().map(|bytes| Ipv4Addr::from(*bytes).into()),
        _ => bytes.first_chunk::<16>().map(|bytes| Ipv6Addr::from(*bytes).into()),
    }
}

/// Source and destination of an IP packet, which are adjacent.
#[inline]
fn ends_of(packet: &[u8]) -> Option<&[u8]> {
    if packet.first()? >> 4 == 4 { packet.get(12..20) } else { packet.get(8..40) }
}

/// The IP packet of an Ethernet frame, with or without an 802.1Q tag; empty for other frames.
pub(crate) fn behind_ethernet(frame: &[u8]) -> &[u8] {
    let tag = if frame.get(12..14) == Some(&[0x81, 0]) { VLAN_TAG } else { 0 };
    match frame.split_at_checked(ETHERNET_HEADER + tag) {
        Some((header, packet)) if header.ends_with(&[0x08, 0]) || header.ends_with(&[0x86, 0xdd]) => packet,
        _ => &[],
    }
}

/// The destination in the head of an IP packet, and the slot that owns its connection. So messages about a connection
/// use the same path as its packets, and do not overtake them.
#[inline]
pub(super) fn destination_of(head: &[u8]) -> Option<(&[u8], usize)> {
    let ends = ends_of(head)?;
    Some((&ends[ends.len() / 2..], owner::party(owner::datagram_of(head)?)?))
}

/// The source of an IP packet.
#[cfg(feature = "af_xdp")]
pub(crate) fn source(packet: &[u8]) -> Option<IpAddr> {
    let ends = ends_of(packet)?;
    address_of(&ends[..ends.len() / 2])
}

/// The destination of an IP packet, and its queue pair.
#[cfg(feature = "af_xdp")]
pub(crate) fn destination(packet: &[u8]) -> Option<(IpAddr, u32)> {
    let ends = ends_of(packet)?;
    Some((address_of(&ends[ends.len() / 2..])?, owner::qpn_of(owner::datagram_of(packet)?)?))
}

/// The check of a packet's source and destination.
pub(super) enum Ends {
    /// The same as in the last packet of the ring.
    Known,
    /// From another address of this host, to one of `own`.
    New(IpAddr),
    /// Any other: a process must not send for another host.
    Wrong,
}

/// `last` contains source and destination of the last valid packet of the ring.
#[inline]
pub(super) fn ends(packet: &[u8], last: &mut ArrayVec<u8, 32>, own: &[IpAddr], local: &[IpAddr]) -> Ends {
    let Some(ends) = ends_of(packet) else { return Ends::Wrong };
    if last[..] == *ends {
        return Ends::Known;
    }
    let (source, destination) = ends.split_at(ends.len() / 2);
    match (address_of(source), address_of(destination)) {
        (Some(source), Some(destination)) if own.contains(&destination) && is_local(source, local) => {
            *last = ends.iter().copied().collect();
            Ends::New(source)
        }
        _ => Ends::Wrong,
    }
}
