//! The report on a whole capture, and on each of its flows and queue pairs.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use ferroce_wire::{Bth, Gid, Opcode, Operation, PayloadRule, Position, Psn, Service};
use serde::Serialize;

use super::psn::{PsnTracker, SeenMtus, Span};
use super::record::{IcrcVerdict, Record, name};
use super::segments::{JOINED, SHORTEST};
use super::unopened::{Name, Unopened};

/// Counters of a capture. Field names are stable, since scripts read them.
#[derive(Default, Serialize)]
pub(super) struct Summary {
    /// All frames, RoCE or not.
    pub(super) frames: u64,
    pub(super) roce_packets: u64,
    /// Frames that contain several packets, which are split here.
    #[serde(skip_serializing_if = "is_zero")]
    pub(super) joined_frames: u64,
    /// Truncated frames that contain several packets. Each counts as one packet, whose payload includes the headers and
    /// payload of all.
    #[serde(skip_serializing_if = "is_zero")]
    joined_frames_cut: u64,
    pub(super) icrc_ok: u64,
    pub(super) icrc_bad: u64,
    pub(super) icrc_truncated: u64,
    pub(super) icrc_unchecked: u64,
    /// Packets with an unknown opcode and a valid ICRC: a manufacturer opcode.
    unknown_opcodes: u64,
    /// Other packets with an `error`, regardless of their ICRC.
    malformed: u64,
    /// Frames without a known RoCE packet, by kind.
    #[serde(skip_serializing_if = "Unopened::is_empty")]
    unopened: Unopened,
    /// The reasons that ICRCs were not checked.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    unchecked: BTreeMap<String, u64>,
    /// Of bad ICRCs, by name.
    causes: BTreeMap<&'static str, u64>,
    flows: Vec<FlowSummary>,
    /// Packets of flows beyond the limit.
    #[serde(skip_serializing_if = "is_zero")]
    unlisted_packets: u64,
    #[serde(skip)]
    by_key: HashMap<FlowKey, usize>,
    /// The first flow of each datagram queue pair that sends.
    #[serde(skip)]
    by_sender: HashMap<(Gid, u32), usize>,
    /// By the two hosts, smaller address first.
    #[serde(skip)]
    mtus: HashMap<(Gid, Gid), SeenMtus>,
}

fn is_zero(count: &u64) -> bool {
    *count == 0
}

type FlowKey = (Gid, Gid, u32, Option<u32>);

/// Packets from one address to one queue pair of another; datagrams also by source queue pair.
#[derive(Default, Serialize)]
struct FlowSummary {
    source: String,
    destination: String,
    dest_qp: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    source_qp: Option<u32>,
    packets: u64,
    payload_bytes: u64,
    icrc_bad: u64,
    congestion_experienced: u64,
    opcodes: BTreeMap<&'static str, u64>,
    /// By kind, including RNR NAKs.
    naks: BTreeMap<&'static str, u64>,
    requests: PsnTracker,
    read_responses: PsnTracker,
    /// The reason that the PSNs of datagrams do not show gaps and duplicates.
    #[serde(skip_serializing_if = "Option::is_none")]
    untold: Option<&'static str>,
    /// The newest datagram: its PSN and its ICRC.
    #[serde(skip)]
    newest: Option<(Psn, Option<u32>)>,
    /// Whether it has frames with an unknown number of packets.
    #[serde(skip)]
    has_joined: bool,
    /// Whether the last request, and the last READ response, may be in such a frame.
    #[serde(skip)]
    is_behind_joined: [bool; 2],
    /// Whether a packet of it has a valid ICRC, or a wrong one with a systematic cause.
    #[serde(skip)]
    is_credible: bool,
}

/// The PSNs of a datagram queue pair count its packets to all peers.
const SHARED: &str = "its queue pair numbers datagrams to others with these";
const UNNUMBERED: &str = "different datagrams have the same PSN";

/// The most flows that are listed: a small compressed file can have any number.
const MAX_FLOWS: usize = 1 << 16;
/// The most reasons that are counted separately.
const MAX_REASONS: usize = 1 << 10;

impl Summary {
    /// Counts a RoCE packet.
    pub(super) fn count(&mut self, record: &Record) {
        self.roce_packets += 1;
        self.unknown_opcodes += u64::from(record.unknown_opcode);
        self.malformed += u64::from(record.is_malformed());
        self.joined_frames_cut += u64::from(record.is_joined);
        if let (IcrcVerdict::Unchecked, Some(reason)) = (record.icrc, &record.error) {
            let is_listed = self.unchecked.len() < MAX_REASONS || self.unchecked.contains_key(reason);
            let reason = if is_listed { reason.as_str() } else { "other reasons" };
            *self.unchecked.entry(reason.to_owned()).or_default() += 1;
        }
        *match record.icrc {
            IcrcVerdict::Ok => &mut self.icrc_ok,
            IcrcVerdict::Bad => &mut self.icrc_bad,
            IcrcVerdict::Truncated => &mut self.icrc_truncated,
            IcrcVerdict::Unchecked => &mut self.icrc_unchecked,
        } += 1;
        if let Some(cause) = record.previous_cause {
            self.reassign(cause);
        }
        if let Some(cause) = record.cause {
            *self.causes.entry(cause).or_default() += 1;
        }
        self.count_in_flow(record);
    }

    /// Counts a frame that was not decoded.
    pub(super) fn count_unopened(&mut self, name: Name) {
        self.unopened.count(name);
    }

    /// Changes the cause of a packet that was counted as corrupted.
    fn reassign(&mut self, cause: &'static str) {
        // With --qp, the packet may not have been counted.
        let Some(count) = self.causes.get_mut("corrupted") else { return };
        *count -= 1;
        if *count == 0 {
            self.causes.remove("corrupted");
        }
        *self.causes.entry(cause).or_default() += 1;
    }

    fn flow(&mut self, key: FlowKey) -> Option<usize> {
        let flows = &mut self.flows;
        if flows.len() >= MAX_FLOWS && !self.by_key.contains_key(&key) {
            return None;
        }
        let index = *self.by_key.entry(key).or_insert_with(|| {
            flows.push(FlowSummary {
                source: key.0.to_ip().to_string(),
                destination: key.1.to_ip().to_string(),
                dest_qp: key.2,
                source_qp: key.3,
                ..FlowSummary::default()
            });
            flows.len() - 1
        });
        if let Some(source_qp) = key.3 {
            let first = *self.by_sender.entry((key.0, source_qp)).or_insert(index);
            if first != index {
                flows[first].untold = Some(SHARED);
                flows[index].untold = Some(SHARED);
            }
        }
        Some(index)
    }

    fn count_in_flow(&mut self, record: &Record) {
        let Some(bth) = &record.bth else { return };
        let (source, destination) = (record.network.source, record.network.destination);
        let source_qp = record.extensions.deth.map(|deth| deth.source_qpn().value());
        let key = (source, destination, bth.dest_qpn().value(), source_qp);
        let hosts = if source.0 <= destination.0 { (source, destination) } else { (destination, source) };
        let opcode = Opcode::from_byte(bth.opcode_byte());
        let (Some(opcode), Some(payload_len)) = (opcode, record.payload_len) else {
            // A packet with an unknown opcode still has a PSN.
            if record.unknown_opcode {
                match self.flow(key) {
                    Some(flow) => self.flows[flow].count_unknown(bth),
                    None => self.unlisted_packets += 1,
                }
            }
            return;
        };
        let is_credible = record.icrc != IcrcVerdict::Bad || record.systematic;
        let Some(flow) = self.flow(key) else {
            self.unlisted_packets += 1;
            return;
        };
        self.flows[flow].count(record, opcode, payload_len);
        if is_credible {
            let mtus = self.mtus.entry(hosts).or_default();
            if opcode.payload() == PayloadRule::Full {
                mtus.learn(payload_len);
            }
            self.flows[flow].follow(record, opcode, bth.psn(), *mtus);
        }
    }
}

impl FlowSummary {
    /// Counts a packet with an unknown opcode.
    fn count_unknown(&mut self, bth: &Bth) {
        self.packets += 1;
        self.is_credible = true;
        *self.opcodes.entry("UNKNOWN").or_default() += 1;
        self.requests.observe(bth.psn(), Span::ONE, true);
    }

    fn count(&mut self, record: &Record, opcode: Opcode, payload_len: usize) {
        self.packets += 1;
        self.payload_bytes += payload_len as u64;
        self.icrc_bad += u64::from(record.icrc == IcrcVerdict::Bad);
        self.congestion_experienced += u64::from(record.network.traffic_class & 3 == 3);
        *self.opcodes.entry(opcode.name()).or_default() += 1;
        if let Some(name) = record.extensions.aeth.as_ref().map(name).filter(|name| name.contains("NAK")) {
            *self.naks.entry(name).or_default() += 1;
        }
    }

    /// Whether the flow may exist only because a packet was damaged or is not RoCE.
    fn is_stray(&self) -> bool {
        self.packets == 1 && !self.is_credible
    }

    /// Takes a packet's PSN.
    fn follow(&mut self, record: &Record, opcode: Opcode, psn: Psn, mtus: SeenMtus) {
        self.is_credible = true;
        self.has_joined |= record.is_joined;
        // A packet that must be full, and has a valid length, is a single one.
        let is_open = record.icrc == IcrcVerdict::Truncated && opcode.payload() != PayloadRule::Full;
        let may_be_joined = self.has_joined && is_open && record.payload_len >= Some(SHORTEST);
        let [behind_requests, behind_responses] = self.is_behind_joined;
        if opcode.operation() == Operation::ReadResponse {
            let begins = matches!(opcode.position(), Position::First | Position::Only);
            self.read_responses.observe(psn, Span::ONE, begins || behind_responses);
            self.is_behind_joined[1] = may_be_joined;
        } else if opcode.is_request() {
            if opcode.service() == Service::Ud {
                let newest = self.newest.replace((psn, record.icrc_found));
                if newest.is_some_and(|(before, icrc)| before == psn && icrc != record.icrc_found) {
                    self.untold = Some(UNNUMBERED);
                }
            }
            let reth = record.extensions.reth.filter(|_| opcode == Opcode::RC_READ_REQUEST);
            let span = reth.map_or(Span::ONE, |reth| Span::of_read(reth.length(), mtus));
            self.requests.observe(psn, span, behind_requests);
            self.is_behind_joined[0] = may_be_joined;
        }
        if record.is_joined {
            // The rest of the frame may contain any kind.
            self.is_behind_joined = [true; 2];
        }
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f)?;
        write!(f, "{} frames, {} RoCE packets: ICRC {} ok", self.frames, self.roce_packets, self.icrc_ok)?;
        write!(f, ", {} bad, {} truncated", self.icrc_bad, self.icrc_truncated)?;
        write!(f, ", {} unchecked; {} malformed", self.icrc_unchecked, self.malformed)?;
        if self.unknown_opcodes > 0 {
            write!(f, ", {} with opcodes that the standard does not have", self.unknown_opcodes)?;
        }
        writeln!(f)?;
        if self.joined_frames > 0 {
            writeln!(f, "  {} frames with several packets each ({JOINED})", self.joined_frames)?;
        }
        if self.joined_frames_cut > 0 {
            writeln!(
                f,
                "  {} frames with several packets each, cut by the recorder: each counts as one packet. Gaps behind them, and \
                 behind cut packets of the same flows that may be such, are not seen (record whole frames, or without \
                 segmentation offload)",
                self.joined_frames_cut
            )?;
        }
        for (cause, count) in &self.causes {
            writeln!(f, "  bad ICRC: {cause} x{count}")?;
        }
        for (reason, count) in &self.unchecked {
            writeln!(f, "  unchecked: {reason} x{count}")?;
        }
        for (name, count) in self.unopened.most() {
            writeln!(f, "  not opened: {name} x{count}")?;
        }
        let (strays, flows): (Vec<_>, Vec<_>) = self.flows.iter().partition(|flow| flow.is_stray());
        flows.iter().try_for_each(|flow| write!(f, "{flow}"))?;
        if !strays.is_empty() {
            let count = strays.len();
            writeln!(
                f,
                "{count} packets with a wrong ICRC, each the only one to its queue pair: damaged, or not RoCE"
            )?;
        }
        match self.unlisted_packets {
            0 => Ok(()),
            packets => writeln!(f, "{packets} packets of more flows; {MAX_FLOWS} are listed"),
        }
    }
}

impl fmt::Display for FlowSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} > {} qp {:#08x}", self.source, self.destination, self.dest_qp)?;
        if let Some(qp) = self.source_qp {
            write!(f, " from qp {qp:#08x}")?;
        }
        write!(f, ": {} packets, {} payload bytes", self.packets, self.payload_bytes)?;
        for (count, what) in [(self.icrc_bad, "bad ICRC"), (self.congestion_experienced, "CE")] {
            if count > 0 {
                write!(f, ", {count} {what}")?;
            }
        }
        writeln!(f)?;
        let list = |counts: &BTreeMap<&'static str, u64>| {
            counts.iter().map(|(name, count)| format!("{name} x{count}")).collect::<Vec<_>>().join(", ")
        };
        writeln!(f, "  {}", list(&self.opcodes))?;
        if !self.naks.is_empty() {
            writeln!(f, "  NAKs: {}", list(&self.naks))?;
        }
        for (name, tracker) in [("requests", &self.requests), ("read responses", &self.read_responses)] {
            if let Some((first, last)) = tracker.range() {
                write!(f, "  {name}: psn {first:#08x} to {last:#08x}, ")?;
                if let Some(reason) = self.untold {
                    writeln!(f, "which tell nothing of gaps and duplicates: {reason}")?;
                    continue;
                }
                write!(f, "{} gaps ({} missing, {} late)", tracker.gaps, tracker.missing, tracker.late)?;
                write!(f, ", {} duplicates", tracker.duplicates)?;
                if self.source_qp.is_some() && tracker.missing > 0 {
                    write!(f, "; datagrams to others may have the PSNs that are missing")?;
                }
                writeln!(f)?;
            }
        }
        Ok(())
    }
}
