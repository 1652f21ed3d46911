//! What is said about one packet, as a line of text or a JSON object.

use std::fmt;
use std::net::IpAddr;

use ferroce_driver::pcap;
use ferroce_wire::{Bth, Extension, Nak, NetworkHeader, Opcode, Packet, Selectivity, Syndrome, credits};
use serde::{Serialize, Serializer};
use zerocopy::FromBytes;

use super::cm::CmFields;
use super::layers::{Layers, Transport};
use crate::diagnosis::Cause;

/// Whether the ICRC is right.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Verdict {
    Ok,
    Bad,
    /// The capture did not keep all bytes of the packet.
    Truncated,
    /// The lengths in the packet contradict each other, so nobody knows where it is.
    Unchecked,
}

/// All that is known of a packet. Field names are stable: scripts read them.
#[derive(Serialize)]
pub(super) struct Record {
    /// Number in the file, from 1.
    pub(super) frame: u64,
    /// Nanoseconds since 1970.
    timestamp: u64,
    #[serde(skip)]
    since_start: u64,
    captured_len: usize,
    original_len: u32,
    #[serde(flatten)]
    link: LinkFields,
    #[serde(flatten)]
    network: NetworkFields,
    #[serde(flatten)]
    pub(super) bth: Option<BthFields>,
    #[serde(flatten)]
    deth: Option<DethFields>,
    #[serde(flatten)]
    feth: Option<FethFields>,
    #[serde(flatten)]
    reth: Option<RethFields>,
    #[serde(flatten)]
    atomic_eth: Option<AtomicEthFields>,
    #[serde(flatten)]
    pub(super) aeth: Option<AethFields>,
    #[serde(skip_serializing_if = "Option::is_none")]
    atomic_original: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    immediate: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    invalidate_rkey: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) payload_len: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cm: Option<CmFields>,
    pub(super) icrc: Verdict,
    /// As a number of which the packet carries the least significant byte first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) icrc_found: Option<u32>,
    /// Only where it differs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) icrc_expected: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cause: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause_text: Option<String>,
    /// Whether the PSN can be believed although the ICRC is wrong.
    #[serde(skip)]
    pub(super) systematic: bool,
    /// Whether all that is wrong with it is an opcode that the standard does not have.
    #[serde(skip)]
    pub(super) unknown_opcode: bool,
    /// Whether it has IPv4 options, with which nobody sends RoCE: what its ICRC would cover is not known.
    #[serde(skip)]
    pub(super) has_options: bool,
    /// Why a packet is malformed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) error: Option<String>,
}

#[derive(Serialize)]
struct LinkFields {
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    eth_source: Option<ferroce_wire::MacAddr>,
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    eth_destination: Option<ferroce_wire::MacAddr>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    vlans: Vec<VlanFields>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tunnels: Vec<&'static str>,
}

#[derive(Serialize)]
struct VlanFields {
    id: u16,
    priority: u8,
}

#[derive(Serialize)]
pub(super) struct NetworkFields {
    /// `ipv4`, `ipv6` (both RoCEv2) or `grh` (RoCE v1).
    network: &'static str,
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    dscp: u8,
    pub(super) ecn: u8,
    hop_limit: u8,
    #[serde(skip_serializing_if = "Option::is_none")]
    flow_label: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    identification: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_port: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    udp_checksum: Option<u16>,
}

#[derive(Serialize)]
pub(super) struct BthFields {
    /// Absent if there is no such opcode.
    #[serde(skip_serializing_if = "Option::is_none", rename = "opcode")]
    name: Option<&'static str>,
    pub(super) opcode_byte: u8,
    solicited: bool,
    mig_req: bool,
    pad: usize,
    transport_version: u8,
    pkey: u16,
    fecn: bool,
    becn: bool,
    pub(super) dest_qp: u32,
    ack_req: bool,
    pub(super) psn: u32,
}

#[derive(Serialize)]
pub(super) struct DethFields {
    qkey: u32,
    source_qp: u32,
}

#[derive(Serialize)]
struct RethFields {
    va: u64,
    rkey: u32,
    dma_length: u32,
}

#[derive(Serialize)]
struct AtomicEthFields {
    va: u64,
    rkey: u32,
    swap_or_add: u64,
    compare: u64,
}

#[derive(Serialize)]
pub(super) struct AethFields {
    /// `ACK`, `RNR_NAK`, the name of a NAK, or `RESERVED`.
    pub(super) aeth: &'static str,
    syndrome: u8,
    msn: u32,
    /// Receive work requests granted; absent if unlimited or no ACK.
    #[serde(skip_serializing_if = "Option::is_none")]
    credits: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rnr_timer_us: Option<u64>,
}

#[derive(Serialize)]
struct FethFields {
    flush_selectivity: Option<&'static str>,
    flush_global_visibility: bool,
    flush_persistence: bool,
}

impl Record {
    /// A packet of which nothing behind the UDP header is known yet.
    pub(super) fn new(
        frame: u64,
        start: u64,
        captured: &pcap::Record<'_>,
        layers: &Layers<'_>,
        transport: &Transport,
    ) -> Record {
        let vlan = |tag: &ferroce_wire::VlanTag| VlanFields { id: tag.id, priority: tag.priority };
        Record {
            frame,
            timestamp: captured.timestamp,
            since_start: captured.timestamp.saturating_sub(start),
            captured_len: captured.captured.len(),
            original_len: captured.original_len,
            link: LinkFields {
                eth_source: layers.ethernet.map(|(source, _)| source),
                eth_destination: layers.ethernet.map(|(_, destination)| destination),
                vlans: layers.vlans.iter().map(vlan).collect(),
                tunnels: layers.tunnels.clone(),
            },
            network: NetworkFields {
                network: match transport.header {
                    NetworkHeader::Ipv4 => "ipv4",
                    NetworkHeader::Ipv6 => "ipv6",
                    NetworkHeader::Grh => "grh",
                },
                source: transport.source.to_ip(),
                destination: transport.destination.to_ip(),
                dscp: transport.traffic_class >> 2,
                ecn: transport.traffic_class & 3,
                hop_limit: transport.hop_limit,
                flow_label: transport.flow_label,
                identification: transport.identification,
                source_port: transport.source_port,
                udp_checksum: transport.udp_checksum,
            },
            bth: None,
            deth: None,
            feth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_original: None,
            immediate: None,
            invalidate_rkey: None,
            payload_len: None,
            cm: None,
            icrc: Verdict::Unchecked,
            icrc_found: None,
            icrc_expected: None,
            cause: None,
            cause_text: None,
            systematic: false,
            unknown_opcode: false,
            has_options: false,
            error: None,
        }
    }

    /// Fills in the BTH from its bytes.
    pub(super) fn set_bth(&mut self, bytes: &[u8]) {
        let Ok(bth) = Bth::ref_from_bytes(bytes) else { return };
        self.bth = Some(BthFields {
            name: Opcode::from_byte(bth.opcode_byte()).map(Opcode::name),
            opcode_byte: bth.opcode_byte(),
            solicited: bth.solicited(),
            mig_req: bth.mig_req(),
            pad: bth.pad(),
            transport_version: bth.transport_version(),
            pkey: bth.pkey().0,
            fecn: bth.fecn(),
            becn: bth.becn(),
            dest_qp: bth.dest_qpn().value(),
            ack_req: bth.ack_req(),
            psn: bth.psn().value(),
        });
    }

    /// Fills in one extension header.
    pub(super) fn set_extension(&mut self, extension: Extension, packet: &Packet<'_>) {
        match extension {
            Extension::Deth => {
                self.deth = packet
                    .deth()
                    .map(|deth| DethFields { qkey: deth.qkey(), source_qp: deth.source_qpn().value() });
            }
            Extension::Reth => {
                self.reth = packet.reth().map(|reth| RethFields {
                    va: reth.va(),
                    rkey: reth.rkey().value(),
                    dma_length: reth.length(),
                });
            }
            Extension::AtomicEth => {
                self.atomic_eth = packet.atomic_eth().map(|atomic| AtomicEthFields {
                    va: atomic.va(),
                    rkey: atomic.rkey().value(),
                    swap_or_add: atomic.swap_or_add(),
                    compare: atomic.compare(),
                });
            }
            Extension::Aeth => self.aeth = packet.aeth().map(AethFields::new),
            Extension::AtomicAckEth => {
                self.atomic_original = packet.atomic_ack_eth().map(|ack| ack.original());
            }
            Extension::ImmDt => self.immediate = packet.immdt().map(|immediate| immediate.value()),
            Extension::Ieth => self.invalidate_rkey = packet.ieth().map(|ieth| ieth.rkey().value()),
            Extension::Feth => {
                self.feth = packet.feth().map(|feth| FethFields {
                    flush_selectivity: feth.selectivity().map(|selectivity| match selectivity {
                        Selectivity::Range => "range",
                        Selectivity::MemoryRegion => "memory_region",
                    }),
                    flush_global_visibility: feth.flush_type().global_visibility,
                    flush_persistence: feth.flush_type().persistence,
                });
            }
        }
    }

    /// Why the ICRC is wrong.
    pub(super) fn set_cause(&mut self, cause: &Cause) {
        self.cause = Some(cause.slug());
        self.cause_text = Some(cause.to_string());
        self.systematic = cause.is_systematic();
    }

    /// From where to where.
    pub(super) fn network(&self) -> &NetworkFields {
        &self.network
    }
}

impl AethFields {
    fn new(aeth: &ferroce_wire::Aeth) -> AethFields {
        let syndrome = aeth.syndrome();
        AethFields {
            aeth: match syndrome {
                Some(Syndrome::Ack { .. }) => "ACK",
                Some(Syndrome::RnrNak(_)) => "RNR_NAK",
                Some(Syndrome::Nak(Nak::PsnSequenceError)) => "NAK_PSN_SEQUENCE_ERROR",
                Some(Syndrome::Nak(Nak::InvalidRequest)) => "NAK_INVALID_REQUEST",
                Some(Syndrome::Nak(Nak::RemoteAccessError)) => "NAK_REMOTE_ACCESS_ERROR",
                Some(Syndrome::Nak(Nak::RemoteOperationalError)) => "NAK_REMOTE_OPERATIONAL_ERROR",
                Some(Syndrome::Nak(Nak::InvalidRdRequest)) => "NAK_INVALID_RD_REQUEST",
                None => "RESERVED",
            },
            syndrome: aeth.syndrome_byte(),
            msn: aeth.msn(),
            credits: match syndrome {
                Some(Syndrome::Ack { credit_code }) => credits(credit_code),
                _ => None,
            },
            rnr_timer_us: match syndrome {
                Some(Syndrome::RnrNak(timer)) => Some(timer.duration().as_micros() as u64),
                _ => None,
            },
        }
    }
}

fn as_text<T: fmt::Display, S: Serializer>(value: &Option<T>, serializer: S) -> Result<S::Ok, S::Error> {
    match value {
        Some(value) => serializer.collect_str(value),
        None => serializer.serialize_none(),
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (seconds, nanos) = (self.since_start / 1_000_000_000, self.since_start % 1_000_000_000);
        write!(f, "{:>6} {seconds:>3}.{nanos:09} ", self.frame)?;
        if let (Some(source), Some(destination)) = (&self.link.eth_source, &self.link.eth_destination) {
            write!(f, "{source} > {destination} ")?;
        }
        for vlan in &self.link.vlans {
            write!(f, "vlan {} pcp {} ", vlan.id, vlan.priority)?;
        }
        for name in &self.link.tunnels {
            write!(f, "in {name} ")?;
        }
        write!(f, "| {}", self.network)?;
        if let Some(bth) = &self.bth {
            write!(f, " | {bth}")?;
        }
        if let Some(deth) = &self.deth {
            write!(f, " | DETH qkey {:#010x} source qp {:#08x}", deth.qkey, deth.source_qp)?;
        }
        if let Some(feth) = &self.feth {
            write!(f, " | FETH {}", feth.flush_selectivity.unwrap_or("reserved"))?;
            flag(f, feth.flush_global_visibility, "global-visibility")?;
            flag(f, feth.flush_persistence, "persistence")?;
        }
        if let Some(reth) = &self.reth {
            write!(f, " | RETH va {:#x} rkey {:#010x} length {}", reth.va, reth.rkey, reth.dma_length)?;
        }
        if let Some(atomic) = &self.atomic_eth {
            write!(f, " | AtomicETH va {:#x} rkey {:#010x} ", atomic.va, atomic.rkey)?;
            write!(f, "swap/add {:#x} compare {:#x}", atomic.swap_or_add, atomic.compare)?;
        }
        if let Some(aeth) = &self.aeth {
            write!(f, " | AETH {} syndrome {:#04x}", aeth.aeth, aeth.syndrome)?;
            if let Some(credits) = aeth.credits {
                write!(f, " credits {credits}")?;
            }
            if let Some(timer) = aeth.rnr_timer_us {
                write!(f, " timer {timer} µs")?;
            }
            write!(f, " msn {}", aeth.msn)?;
        }
        if let Some(original) = self.atomic_original {
            write!(f, " | AtomicAckETH {original:#x}")?;
        }
        if let Some(immediate) = self.immediate {
            write!(f, " | ImmDt {immediate:#010x}")?;
        }
        if let Some(rkey) = self.invalidate_rkey {
            write!(f, " | IETH rkey {rkey:#010x}")?;
        }
        if let Some(cm) = &self.cm {
            write!(f, " | {cm}")?;
        }
        if let Some(len) = self.payload_len {
            write!(f, " | payload {len}")?;
        }
        f.write_str(" | ICRC ")?;
        f.write_str(match self.icrc {
            Verdict::Ok => "ok",
            Verdict::Bad => "BAD",
            Verdict::Truncated => "truncated",
            Verdict::Unchecked => "unchecked",
        })?;
        if let (Some(found), Some(expected)) = (self.icrc_found, self.icrc_expected) {
            write!(f, " {found:#010x}, must be {expected:#010x}")?;
        }
        if let Some(cause) = &self.cause_text {
            write!(f, ": {cause}")?;
        }
        match &self.error {
            Some(error) => write!(f, " | {error}"),
            None => Ok(()),
        }
    }
}

fn flag(f: &mut fmt::Formatter<'_>, on: bool, name: &str) -> fmt::Result {
    if on { write!(f, " {name}") } else { Ok(()) }
}

impl fmt::Display for NetworkFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} > {} dscp {}", self.network, self.source, self.destination, self.dscp)?;
        f.write_str(["", " ect1", " ect0", " CE"][usize::from(self.ecn & 3)])?;
        write!(f, " ttl {}", self.hop_limit)?;
        if let Some(label) = self.flow_label {
            write!(f, " label {label:#x}")?;
        }
        if let Some(identification) = self.identification {
            write!(f, " id {identification:#06x}")?;
        }
        match self.source_port {
            Some(port) => write!(f, " | udp {port} > 4791"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for BthFields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name {
            Some(name) => write!(f, "{name}")?,
            None => write!(f, "opcode {:#04x}", self.opcode_byte)?,
        }
        write!(f, " qp {:#08x} psn {:#08x}", self.dest_qp, self.psn)?;
        flag(f, self.ack_req, "ack_req")?;
        flag(f, self.solicited, "se")?;
        flag(f, self.mig_req, "mig_req")?;
        flag(f, self.fecn, "fecn")?;
        flag(f, self.becn, "becn")?;
        if self.transport_version != 0 {
            write!(f, " tver {}", self.transport_version)?;
        }
        if self.pkey != 0xffff {
            write!(f, " pkey {:#06x}", self.pkey)?;
        }
        write!(f, " pad {}", self.pad)
    }
}
