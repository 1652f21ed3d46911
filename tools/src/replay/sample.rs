//! The parts of a RoCE packet that a rate needs, complete or truncated.

use ferroce::wire::{Bth, Deth, Opcode, Service};
use ferroce::{Gid, Nanos, Qpn};
use zerocopy::FromBytes;

use crate::dissect::layers::{Layers, Transport};

/// The parts of a packet that a rate needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    pub(super) at: Nanos,
    pub(super) source: Gid,
    pub(super) destination: Gid,
    /// The UDP source port.
    pub(super) port: Option<u16>,
    /// The source queue pair. Only datagrams name it.
    pub(super) from: Option<Qpn>,
    pub(super) to: Qpn,
    pub(super) opcode: Opcode,
    /// The length of its Ethernet frame by the length fields, without FCS, as the engine's pacer counts.
    pub(super) bytes: u32,
    /// Congestion Experienced.
    pub(super) is_marked: bool,
}

/// An Ethernet header, and a VLAN tag.
const ETHERNET: usize = 14;
const TAG: usize = 4;

impl Sample {
    /// `None` if the capture does not have its BTH, or the opcode is not a standard one.
    pub(super) fn of(at: Nanos, layers: &Layers<'_>, transport: &Transport) -> Option<Sample> {
        let (bth, rest) = Bth::read_from_prefix(layers.network.get(transport.bth_start..)?).ok()?;
        let opcode = Opcode::from_byte(bth.opcode_byte())?;
        let from = match opcode.service() {
            Service::Ud => Some(Deth::read_from_prefix(rest).ok()?.0.source_qpn()),
            _ => None,
        };
        // Tags of a tunnel were not added by its sender.
        let tags = if layers.tunnels.is_empty() { layers.vlans.len() } else { 0 };
        Some(Sample {
            at,
            source: transport.network.source,
            destination: transport.network.destination,
            port: transport.network.source_port,
            from,
            to: bth.dest_qpn(),
            opcode,
            bytes: (ETHERNET + TAG * tags + transport.network_end) as u32,
            is_marked: transport.network.traffic_class & 3 == 3,
        })
    }

    pub(super) fn is_cnp(&self) -> bool {
        self.opcode == Opcode::CNP
    }

    /// Whether it counts towards the rate of its sender: acknowledgements and CNPs do not.
    pub(super) fn is_data(&self) -> bool {
        !self.is_cnp() && !self.opcode.is_acknowledgement()
    }
}
