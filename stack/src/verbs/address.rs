use std::net::IpAddr;

use ferroce_driver::{Capabilities, Layer, SocketTerms};
use ferroce_wire::{
    Encapsulation, Gid, MacAddr, NetworkHeader, Packet, PathAddress, PathHeader, PathMtu, Qpn, VlanTag,
    source_port,
};

use crate::verbs::{Error, PkeyTable};

/// A row of the GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct GidEntry {
    /// The address.
    pub gid: Gid,
    /// RoCE v1 rather than v2.
    pub roce_v1: bool,
    /// Its VLAN: packets from this address carry an 802.1Q tag.
    pub vlan: Option<u16>,
}

impl GidEntry {
    /// A RoCE v2 address without a VLAN.
    pub fn new(gid: Gid) -> GidEntry {
        GidEntry { gid, roce_v1: false, vlan: None }
    }

    /// RoCE v1 rather than v2.
    pub fn roce_v1(self, roce_v1: bool) -> Self {
        GidEntry { roce_v1, ..self }
    }

    /// Its VLAN, 1 to 4094.
    pub fn vlan(self, vlan: impl Into<Option<u16>>) -> Self {
        GidEntry { vlan: vlan.into(), ..self }
    }
}

/// The port of a context: one interface of one driver.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Port {
    /// Its hardware address.
    pub mac: MacAddr,
    /// The interface's name.
    pub interface: String,
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// The GID table: the driver's addresses in their order (RoCE v2), then, if RoCE v1 is on, the same addresses as v1, then
    /// those of [`Context::add_gid`](crate::Context::add_gid).
    pub gids: Vec<GidEntry>,
    /// The P_Key table: the default one, then those of [`Context::add_pkey`](crate::Context::add_pkey).
    pub pkeys: PkeyTable,
    /// The terms of its socket, if the port is a socket: packets start at the IP header there.
    pub(crate) socket: Option<SocketTerms>,
    /// `(rest, divisor)`: which of the numbers shared by the contexts on its address are its own.
    pub(crate) qpns: (u32, u32),
    pub(crate) comm_ids: (u32, u32),
}

impl Port {
    pub(crate) fn new(capabilities: &Capabilities, roce_v1: bool) -> Port {
        let entries = |roce_v1| {
            let gids = capabilities.addresses.iter().map(|address| Gid::from(*address));
            gids.map(move |gid| GidEntry::new(gid).roce_v1(roce_v1))
        };
        let mut gids: Vec<GidEntry> = entries(false).collect();
        if roce_v1 {
            gids.extend(entries(true));
        }
        let Capabilities { mac, interface, mtu, .. } = capabilities;
        let socket = match capabilities.layer {
            Layer::Ip(terms) => Some(terms),
            Layer::Ethernet => None,
        };
        Port {
            mac: MacAddr(*mac),
            interface: interface.clone(),
            mtu: *mtu,
            gids,
            pkeys: PkeyTable::new(),
            socket,
            qpns: capabilities.qpns,
            comm_ids: capabilities.comm_ids,
        }
    }

    /// The headers of a path, from the layer at which frames start.
    pub(crate) fn header(&self, path: &PathAddress) -> PathHeader {
        let header = PathHeader::new(path);
        if self.socket.is_some() { header.without_link() } else { header }
    }

    /// The index of a RoCE v2 GID.
    pub fn gid_index(&self, gid: Gid) -> Option<usize> {
        self.gids.iter().position(|e| e.gid == gid && !e.roce_v1)
    }

    /// The index of the first RoCE v2 GID of the same kind as `peer`: IPv4, link-local or other IPv6. If the port has no IPv6
    /// address of that kind, it is one of the other kind.
    pub fn gid_index_for(&self, peer: Gid) -> Option<usize> {
        self.index_of_kind(peer, |entry| !entry.roce_v1)
    }

    /// The index of the GID to use for a peer.
    pub(crate) fn source_for(&self, peer: IpAddr) -> Result<usize, Error> {
        let gid = Gid::from(peer.to_canonical());
        if gid.is_multicast() || peer.is_unspecified() {
            return Err(Error::invalid("address", peer, "the address of one peer"));
        }
        self.gid_index_for(gid).ok_or_else(|| {
            let kind = if gid.is_ipv6() { "IPv6" } else { "IPv4" };
            let expected =
                format!("a peer of the IP version of '{}', which has no {kind} address", self.interface);
            Error::invalid("address", peer, expected)
        })
    }

    /// The valid indices of the GID table, for an error.
    pub(crate) fn gid_indices(&self) -> String {
        match self.gids.len() {
            0 => format!("the port needs a GID, but '{}' has no IP address", self.interface),
            len => format!("below {len}, the size of the GID table of '{}'", self.interface),
        }
    }

    /// As [`gid_index_for`](Port::gid_index_for), among these rows.
    pub(crate) fn index_of_kind(&self, peer: Gid, is_one: impl Fn(&GidEntry) -> bool) -> Option<usize> {
        let kind = |gid: Gid| (gid.is_ipv6(), gid.is_link_local());
        let fits = |of: &GidEntry| of.gid.is_ipv6() == peer.is_ipv6() && is_one(of);
        let fitting = || self.gids.iter().enumerate().filter(|(_, entry)| fits(entry));
        let best = fitting().find(|(_, entry)| kind(entry.gid) == kind(peer)).or_else(|| fitting().next());
        best.map(|(index, _)| index)
    }

    /// Whether a packet is for one of the port's own addresses.
    pub(crate) fn is_destination(&self, packet: &Packet<'_>) -> bool {
        let roce_v1 = packet.header == NetworkHeader::Grh;
        let destination = packet.network().destination;
        self.gids.iter().any(|entry| {
            entry.gid == destination && entry.roce_v1 == roce_v1 && may_be_on(packet, entry.vlan)
        })
    }

    /// The hardware address for responses to a packet: its source address. A port without a link layer has none and needs none.
    /// `None` if no response is possible: the address is not a unicast address, or the packet falsely carries this port's own
    /// address.
    pub(crate) fn way_back(&self, packet: &Packet<'_>) -> Option<MacAddr> {
        if self.socket.is_some() {
            return Some(MacAddr::default());
        }
        let mac = packet.source_mac()?;
        let source = packet.network().source;
        let is_own = || self.gids.iter().any(|entry| entry.gid == source);
        (mac == self.mac || mac.is_station() && !is_own()).then_some(mac)
    }

    /// The index of the RoCE v2 GID that a packet was sent to; if several VLANs have that GID, the one of the packet's VLAN.
    pub(crate) fn index_of_destination(&self, packet: &Packet<'_>) -> Option<usize> {
        let (destination, vlan) = (packet.network().destination, packet.vlan());
        best_in_vlan(vlan, |is_on| {
            self.gids.iter().position(|e| e.gid == destination && !e.roce_v1 && is_on(e.vlan))
        })
    }

    /// The largest path MTU over IPv6 (`true`) or IPv4.
    pub fn path_mtu(&self, ipv6: bool) -> Option<PathMtu> {
        PathMtu::largest_for(self.mtu, ipv6)
    }
}

/// Whether a frame may belong to this VLAN. Network cards may remove tags and switches may add them, so only two different VLANs
/// are a contradiction.
#[inline]
pub(crate) fn may_be_on(packet: &Packet<'_>, vlan: Option<u16>) -> bool {
    vlan.zip(packet.vlan()).is_none_or(|(vlan, tag)| tag == vlan)
}

/// The row for a frame with this tag: of its VLAN, or else a row that [may be on it](may_be_on).
pub(crate) fn best_in_vlan(
    tag: Option<u16>,
    find: impl Fn(&dyn Fn(Option<u16>) -> bool) -> Option<usize>,
) -> Option<usize> {
    find(&|own| own == tag).or_else(|| find(&|own| own.zip(tag).is_none_or(|(own, tag)| own == tag)))
}

/// The path to a peer.
///
/// ```
/// # use std::net::IpAddr;
/// # use ferroce::*;
/// let peer = Gid::from(IpAddr::from([192, 0, 2, 7]));
/// // From the GID at index 1 of the own table, with DSCP 26.
/// let way = AddressVector::new(peer, 1).traffic_class(26 << 2);
/// assert_eq!((way.hop_limit, way.mac), (64, None));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct AddressVector {
    /// The peer.
    pub gid: Gid,
    /// The index of the source GID.
    pub sgid_index: usize,
    /// The hardware address of the next hop, if known; otherwise the driver asks the kernel.
    pub mac: Option<MacAddr>,
    /// DSCP and ECN.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits; determines the UDP source port if it is not 0.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// 0 to 7: the priority code point of the 802.1Q tag, if the source GID has a VLAN.
    pub service_level: u8,
}

impl AddressVector {
    /// To `gid` from the GID at `sgid_index`, with a hop limit of 64 and everything else 0.
    pub fn new(gid: Gid, sgid_index: usize) -> AddressVector {
        AddressVector {
            gid,
            sgid_index,
            mac: None,
            traffic_class: 0,
            flow_label: 0,
            hop_limit: 64,
            service_level: 0,
        }
    }

    /// The hardware address of the next hop; resolved by default.
    pub fn mac(self, mac: impl Into<Option<MacAddr>>) -> Self {
        AddressVector { mac: mac.into(), ..self }
    }

    /// DSCP and ECN, the whole byte; 0 by default.
    pub fn traffic_class(self, traffic_class: u8) -> Self {
        AddressVector { traffic_class, ..self }
    }

    /// IPv6 flow label, 20 bits; 0 by default.
    pub fn flow_label(self, flow_label: u32) -> Self {
        AddressVector { flow_label, ..self }
    }

    /// TTL or hop limit, 1 to 255; 64 by default.
    pub fn hop_limit(self, hop_limit: u8) -> Self {
        AddressVector { hop_limit, ..self }
    }

    /// 802.1Q priority, 0 to 7; 0 by default.
    pub fn service_level(self, service_level: u8) -> Self {
        AddressVector { service_level, ..self }
    }

    /// The addresses of packets on this path, between these queue pairs; the hardware address may still be missing.
    pub(crate) fn path(&self, port: &Port, local: Qpn, remote: Qpn) -> Result<PathAddress, Error> {
        let Some(source) = port.gids.get(self.sgid_index) else {
            return Err(Error::invalid("sgid_index", self.sgid_index, port.gid_indices()));
        };
        if !source.roce_v1 && source.gid.is_ipv6() != self.gid.is_ipv6() {
            let (destination, index, source_gid) = (self.gid, self.sgid_index, source.gid);
            return Err(Error::AddressFamily { destination, index, source_gid, gids: port.gids.clone() });
        }
        if self.hop_limit == 0 {
            return Err(Error::invalid("hop_limit", 0, "1 to 255"));
        }
        if self.flow_label > 0x000f_ffff {
            return Err(Error::invalid("flow_label", self.flow_label, "20 bits, at most 0xfffff"));
        }
        if self.service_level > 7 {
            return Err(Error::invalid("service_level", self.service_level, "0 to 7, as an 802.1Q priority"));
        }
        let encapsulation = if source.roce_v1 {
            Encapsulation::RoceV1
        } else {
            let of_flow = || source_port(self.flow_label, local, remote);
            Encapsulation::RoceV2 { source_port: port.socket.map_or_else(of_flow, |terms| terms.source_port) }
        };
        Ok(PathAddress {
            source_mac: port.mac,
            destination_mac: self.mac.or(self.gid.multicast_mac()).unwrap_or_default(),
            vlan: source.vlan.map(|id| VlanTag { id, priority: self.service_level }),
            source: source.gid,
            destination: self.gid,
            encapsulation,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: self.hop_limit,
            identification: 0,
        })
    }
}
