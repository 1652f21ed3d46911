use std::num::NonZeroU16;

use ferroce_wire::{Ecn, Gid, MacAddr, Network, NetworkHeader, PathHeader, Qpn, source_port};

use crate::engine::scheduler::Ticket;
use crate::verbs::{AddressVector, Error, Pd, Port, Unreachable, best_in_vlan};

/// The state of a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hop {
    /// Its hardware address.
    Found(MacAddr),
    /// It is being resolved.
    Sought(Ticket),
    /// The resolution failed.
    Missing,
}

impl Hop {
    /// The ticket of the resolution, if it is in progress.
    pub(crate) fn ticket(self) -> Option<Ticket> {
        match self {
            Hop::Sought(ticket) => Some(ticket),
            Hop::Found(_) | Hop::Missing => None,
        }
    }
}

/// The path of datagrams to one port: the fields that a work request need not repeat.
#[derive(Clone, Copy)]
pub(crate) struct AddressHandle {
    pub(crate) pd: Pd,
    /// The destination.
    pub(crate) gid: Gid,
    pub(crate) hop: Hop,
    header: PathHeader,
    flow_label: u32,
    /// The socket's port, if there is one; otherwise each pair of queue pairs has its own.
    source_port: Option<u16>,
    /// Bytes of the longest datagram.
    pub(crate) max_payload: u32,
}

impl AddressHandle {
    pub(crate) fn new(
        pd: Pd,
        address: &AddressVector,
        (header, hop): (PathHeader, Hop),
        source_port: Option<u16>,
        max_payload: u32,
    ) -> AddressHandle {
        let AddressVector { gid, flow_label, .. } = *address;
        AddressHandle { pd, gid, hop, header, flow_label, source_port, max_payload }
    }

    /// The resolution of the next hop has ended.
    pub(crate) fn take_next_hop(&mut self, found: Result<MacAddr, Unreachable>) {
        self.hop = found.map_or(Hop::Missing, Hop::Found);
        if let Ok(mac) = found {
            self.header.set_destination_mac(mac);
        }
    }

    /// The headers of a packet between these queue pairs.
    pub(crate) fn header(&self, local: Qpn, remote: Qpn) -> PathHeader {
        let mut header = self.header;
        let port = self.source_port.unwrap_or_else(|| source_port(self.flow_label, local, remote));
        header.set_source_port(port);
        header
    }
}

/// The path back to the source of a datagram, from the first 40 bytes of its receive.
pub(crate) fn reverse(
    port: &Port,
    area: &[u8; 40],
    vlan: Option<NonZeroU16>,
) -> Result<AddressVector, Error> {
    let Some(network) = Network::of_grh_area(area) else {
        let start = format_args!("{:02x?}...", &area[..4]);
        return Err(Error::invalid("grh", start, "40 bytes from the start of a UD receive"));
    };
    let roce_v1 = network.header == NetworkHeader::Grh;
    // A datagram to a group is answered from an address of the same kind as the sender's.
    let own = best_in_vlan(vlan.map(NonZeroU16::get), |is_on| match network.destination.is_multicast() {
        true => port.index_of_kind(network.source, |entry| entry.roce_v1 == roce_v1 && is_on(entry.vlan)),
        false => port.gids.iter().position(|entry| {
            entry.gid == network.destination && entry.roce_v1 == roce_v1 && is_on(entry.vlan)
        }),
    });
    let Some(sgid_index) = own else {
        let expected = format!("to a GID of '{}'", port.interface);
        return Err(Error::invalid("grh", network.destination, expected));
    };
    let Network { flow_label, .. } = network;
    // The ECN bits belong to the received packet.
    let traffic_class = network.traffic_class & !Ecn::MASK;
    Ok(AddressVector { traffic_class, flow_label, ..AddressVector::new(network.source, sgid_index) })
}
