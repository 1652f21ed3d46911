//! One packet, and its text line.

use std::fmt;

use ferroce_driver::pcap;
use ferroce_wire::{
    Aeth, Bth, Extensions, MacAddr, Nak, Network, NetworkHeader, Opcode, PKEY_DEFAULT, Selectivity, Syndrome,
    VlanTag, credits,
};
use serde::Serialize;

use super::cm::CmFields;
use super::layers::{Layers, Transport};
use crate::diagnosis::Cause;

/// Whether the ICRC is right.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum IcrcVerdict {
    Ok,
    Bad,
    /// The capture does not have all bytes of the packet.
    Truncated,
    /// The lengths in the packet contradict each other, so the position of the ICRC is unknown.
    Unchecked,
}

/// The known parts of a packet that may be truncated: the available parts of an
/// [`OwnedPacket`](ferroce_wire::OwnedPacket).
pub(super) struct Record {
    /// Number in the file, from 1.
    pub(super) frame: u64,
    /// Nanoseconds since 1970.
    pub(super) timestamp: u64,
    since_start: u64,
    pub(super) captured_len: usize,
    pub(super) original_len: u32,
    /// Source and destination of the innermost Ethernet header.
    pub(super) ethernet: Option<(MacAddr, MacAddr)>,
    /// Outermost first.
    pub(super) vlans: Vec<VlanTag>,
    /// The tunnels around the packet, outermost first.
    pub(super) tunnels: Vec<&'static str>,
    pub(super) network: Network,
    pub(super) udp_checksum: Option<u16>,
    /// Its opcode may be unknown.
    pub(super) bth: Option<Bth>,
    pub(super) extensions: Extensions,
    pub(super) payload_len: Option<usize>,
    pub(super) cm: Option<CmFields>,
    pub(super) icrc: IcrcVerdict,
    /// As a number; on the wire, the least significant byte is first.
    pub(super) icrc_found: Option<u32>,
    /// Only if it differs.
    pub(super) icrc_expected: Option<u32>,
    pub(super) cause: Option<&'static str>,
    pub(super) cause_text: Option<String>,
    /// The previous packet of the same flow, reported as corrupted, has this cause, too.
    pub(super) previous_cause: Option<&'static str>,
    /// Whether the PSN is credible although the ICRC is wrong.
    pub(super) systematic: bool,
    /// Whether an unknown opcode is its only fault.
    pub(super) unknown_opcode: bool,
    /// Whether it has IPv4 options, which RoCE does not use: the coverage of its ICRC is unknown.
    pub(super) has_options: bool,
    /// Whether it is the beginning of several packets in one truncated frame.
    pub(super) is_joined: bool,
    /// The reason that the packet is malformed.
    pub(super) error: Option<String>,
}

impl Record {
    /// A packet whose contents after the UDP header are not known yet.
    pub(super) fn new(
        frame: u64,
        start: u64,
        captured: &pcap::Record<'_>,
        layers: &Layers<'_>,
        transport: &Transport,
    ) -> Record {
        Record {
            frame,
            timestamp: captured.timestamp,
            since_start: captured.timestamp.saturating_sub(start),
            captured_len: captured.captured.len(),
            original_len: captured.original_len,
            ethernet: layers.ethernet,
            vlans: layers.vlans.clone(),
            tunnels: layers.tunnels.clone(),
            network: transport.network,
            udp_checksum: transport.udp_checksum,
            bth: None,
            extensions: Extensions::default(),
            payload_len: None,
            cm: None,
            icrc: IcrcVerdict::Unchecked,
            icrc_found: None,
            icrc_expected: None,
            cause: None,
            cause_text: None,
            previous_cause: None,
            systematic: false,
            unknown_opcode: false,
            has_options: false,
            is_joined: false,
            error: None,
        }
    }

    /// Whether it contradicts itself or the standard, regardless of its ICRC.
    pub(super) fn is_malformed(&self) -> bool {
        self.error.is_some() && !self.unknown_opcode && !self.has_options
    }

    /// Sets the cause of the wrong ICRC.
    pub(super) fn set_cause(&mut self, cause: &Cause) {
        self.cause = Some(cause.slug());
        self.cause_text = Some(cause.to_string());
        self.systematic = cause.is_systematic();
    }
}

/// `ACK`, `RNR_NAK`, the name of a NAK, or `RESERVED`.
pub(super) fn name(aeth: &Aeth) -> &'static str {
    match aeth.syndrome() {
        Some(Syndrome::Ack { .. }) => "ACK",
        Some(Syndrome::RnrNak(_)) => "RNR_NAK",
        Some(Syndrome::Nak(Nak::PsnSequenceError)) => "NAK_PSN_SEQUENCE_ERROR",
        Some(Syndrome::Nak(Nak::InvalidRequest)) => "NAK_INVALID_REQUEST",
        Some(Syndrome::Nak(Nak::RemoteAccessError)) => "NAK_REMOTE_ACCESS_ERROR",
        Some(Syndrome::Nak(Nak::RemoteOperationalError)) => "NAK_REMOTE_OPERATIONAL_ERROR",
        Some(Syndrome::Nak(Nak::InvalidRdRequest)) => "NAK_INVALID_RD_REQUEST",
        None => "RESERVED",
    }
}

/// Receive work requests granted; `None` if unlimited or no ACK.
pub(super) fn granted(aeth: &Aeth) -> Option<u32> {
    match aeth.syndrome()? {
        Syndrome::Ack { credit_code } => credits(credit_code),
        _ => None,
    }
}

/// The wait that an RNR NAK requests, in microseconds.
pub(super) fn rnr_timer_us(aeth: &Aeth) -> Option<u64> {
    match aeth.syndrome()? {
        Syndrome::RnrNak(timer) => Some(timer.duration().as_micros() as u64),
        _ => None,
    }
}

/// `ipv4`, `ipv6` (both RoCEv2) or `grh` (RoCE v1).
pub(super) fn protocol(header: NetworkHeader) -> &'static str {
    match header {
        NetworkHeader::Ipv4 => "ipv4",
        NetworkHeader::Ipv6 => "ipv6",
        NetworkHeader::Grh => "grh",
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.since_start / 1_000_000_000, self.since_start % 1_000_000_000);
        write!(f, "{:>6} {seconds:>3}.{nanos:09} ", self.frame)?;
        if let Some((source, destination)) = &self.ethernet {
            write!(f, "{source} > {destination} ")?;
        }
        for vlan in &self.vlans {
            write!(f, "vlan {} pcp {} ", vlan.id, vlan.priority)?;
        }
        for name in &self.tunnels {
            write!(f, "in {name} ")?;
        }
        f.write_str("| ")?;
        write_network(f, &self.network)?;
        if let Some(bth) = &self.bth {
            f.write_str(" | ")?;
            write_bth(f, bth)?;
        }
        write_extensions(f, &self.extensions)?;
        if let Some(cm) = &self.cm {
            write!(f, " | {cm}")?;
        }
        if let Some(len) = self.payload_len {
            write!(f, " | payload {len}")?;
        }
        f.write_str(" | ICRC ")?;
        f.write_str(match self.icrc {
            IcrcVerdict::Ok => "ok",
            IcrcVerdict::Bad => "BAD",
            IcrcVerdict::Truncated => "truncated",
            IcrcVerdict::Unchecked => "unchecked",
        })?;
        if let (Some(found), Some(expected)) = (self.icrc_found, self.icrc_expected) {
            write!(f, " {found:#010x}, must be {expected:#010x}")?;
        }
        if let Some(cause) = &self.cause_text {
            write!(f, ": {cause}")?;
        }
        if self.is_joined {
            f.write_str(" | the first of several packets")?;
        }
        match &self.error {
            Some(error) => write!(f, " | {error}"),
            None => Ok(()),
        }
    }
}

fn write_network(f: &mut fmt::Formatter<'_>, network: &Network) -> fmt::Result {
    let (source, destination) = (network.source.to_ip(), network.destination.to_ip());
    let (dscp, ecn) = (network.traffic_class >> 2, network.traffic_class & 3);
    write!(f, "{} {source} > {destination} dscp {dscp}", protocol(network.header))?;
    f.write_str(["", " ect1", " ect0", " CE"][usize::from(ecn)])?;
    write!(f, " ttl {}", network.hop_limit)?;
    match network.header {
        NetworkHeader::Ipv4 => write!(f, " id {:#06x}", network.identification)?,
        NetworkHeader::Ipv6 | NetworkHeader::Grh => write!(f, " label {:#x}", network.flow_label)?,
    }
    match network.source_port {
        Some(port) => write!(f, " | udp {port} > 4791"),
        None => Ok(()),
    }
}

fn write_bth(f: &mut fmt::Formatter<'_>, bth: &Bth) -> fmt::Result {
    match Opcode::from_byte(bth.opcode_byte()) {
        Some(opcode) => write!(f, "{opcode}")?,
        None => write!(f, "opcode {:#04x}", bth.opcode_byte())?,
    }
    write!(f, " qp {:#08x} psn {:#08x}", bth.dest_qpn().value(), bth.psn().value())?;
    flag(f, bth.ack_req(), "ack_req")?;
    flag(f, bth.solicited(), "se")?;
    flag(f, bth.mig_req(), "mig_req")?;
    flag(f, bth.fecn(), "fecn")?;
    flag(f, bth.becn(), "becn")?;
    if bth.transport_version() != 0 {
        write!(f, " tver {}", bth.transport_version())?;
    }
    if bth.pkey() != PKEY_DEFAULT {
        write!(f, " pkey {}", bth.pkey())?;
    }
    write!(f, " pad {}", bth.pad())
}

fn write_extensions(f: &mut fmt::Formatter<'_>, extensions: &Extensions) -> fmt::Result {
    if let Some(deth) = &extensions.deth {
        write!(f, " | DETH qkey {:#010x} source qp {:#08x}", deth.qkey(), deth.source_qpn().value())?;
    }
    if let Some(feth) = &extensions.feth {
        write!(f, " | FETH {}", feth.selectivity().map_or("reserved", selectivity))?;
        flag(f, feth.flush_type().global_visibility, "global-visibility")?;
        flag(f, feth.flush_type().persistence, "persistence")?;
    }
    if let Some(reth) = &extensions.reth {
        write!(f, " | RETH va {:#x} rkey {} length {}", reth.va(), reth.rkey(), reth.length())?;
    }
    if let Some(atomic) = &extensions.atomic_eth {
        write!(f, " | AtomicETH va {:#x} rkey {} ", atomic.va(), atomic.rkey())?;
        write!(f, "swap/add {:#x} compare {:#x}", atomic.swap_or_add(), atomic.compare())?;
    }
    if let Some(aeth) = &extensions.aeth {
        write!(f, " | AETH {} syndrome {:#04x}", name(aeth), aeth.syndrome_byte())?;
        if let Some(credits) = granted(aeth) {
            write!(f, " credits {credits}")?;
        }
        if let Some(timer) = rnr_timer_us(aeth) {
            write!(f, " timer {timer} µs")?;
        }
        write!(f, " msn {}", aeth.msn())?;
    }
    if let Some(ack) = &extensions.atomic_ack_eth {
        write!(f, " | AtomicAckETH {:#x}", ack.original())?;
    }
    if let Some(immdt) = &extensions.immdt {
        write!(f, " | ImmDt {:#010x}", immdt.value())?;
    }
    if let Some(ieth) = &extensions.ieth {
        write!(f, " | IETH rkey {}", ieth.rkey())?;
    }
    Ok(())
}

/// The name of a FLUSH's scope.
pub(super) fn selectivity(of: Selectivity) -> &'static str {
    match of {
        Selectivity::Range => "range",
        Selectivity::MemoryRegion => "memory_region",
    }
}

fn flag(f: &mut fmt::Formatter<'_>, on: bool, name: &str) -> fmt::Result {
    if on { write!(f, " {name}") } else { Ok(()) }
}
