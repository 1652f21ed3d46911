use ferroce_wire::{Network, NetworkHeader, PathHeader, Qpn, source_port};

use crate::verbs::{AddressVector, Error, Pd, Port};

/// The way of datagrams to one port: all that a work request need not say each time.
#[derive(Clone, Copy)]
pub(crate) struct AddressHandle {
    pub(crate) pd: Pd,
    header: PathHeader,
    flow_label: u32,
    /// The socket's, where there is one; otherwise each pair of queue pairs has its own.
    source_port: Option<u16>,
    /// Bytes of the longest datagram.
    pub(crate) max_payload: u32,
}

impl AddressHandle {
    pub(crate) fn new(
        pd: Pd,
        header: PathHeader,
        flow_label: u32,
        source_port: Option<u16>,
        max_payload: u32,
    ) -> AddressHandle {
        AddressHandle { pd, header, flow_label, source_port, max_payload }
    }

    /// The headers of a packet between these queue pairs.
    pub(crate) fn header(&self, local: Qpn, remote: Qpn) -> PathHeader {
        let mut header = self.header;
        let port = self.source_port.unwrap_or_else(|| source_port(self.flow_label, local, remote));
        header.set_source_port(port);
        header
    }
}

/// The way back to where a datagram came from, by the first 40 bytes of its receive.
pub(crate) fn reverse(port: &Port, area: &[u8; 40]) -> Result<AddressVector, Error> {
    let Some(network) = Network::of_grh_area(area) else {
        let start = format_args!("{:02x?}...", &area[..4]);
        return Err(Error::invalid("grh", start, "40 bytes from the start of a UD receive"));
    };
    let roce_v1 = network.header == NetworkHeader::Grh;
    // A datagram to a group is answered from an address of the same kind as the sender's.
    let own = match network.destination.is_multicast() {
        true => port.index_of_kind(network.source, roce_v1),
        false => port.gids.iter().position(|e| e.gid == network.destination && e.roce_v1 == roce_v1),
    };
    let Some(sgid_index) = own else {
        let expected = format!("to a GID of '{}'", port.interface);
        return Err(Error::invalid("grh", network.destination, expected));
    };
    let Network { traffic_class, flow_label, .. } = network;
    Ok(AddressVector { traffic_class, flow_label, ..AddressVector::new(network.source, sgid_index) })
}
