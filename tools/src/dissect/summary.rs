//! What is said about a whole capture, and about each flow and queue pair in it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use ferroce_wire::{Gid, Opcode, Operation, Packet, PayloadRule, Position, Service};
use serde::Serialize;

use super::psn::{PsnTracker, SeenMtus, Span};
use super::record::{IcrcVerdict, Record, name};
use super::unopened::{Name, Unopened};

/// Counts over a capture. Field names are stable: scripts read them.
#[derive(Default, Serialize)]
pub(super) struct Summary {
    /// All frames, RoCE or not.
    pub(super) frames: u64,
    pub(super) roce_packets: u64,
    pub(super) icrc_ok: u64,
    pub(super) icrc_bad: u64,
    pub(super) icrc_truncated: u64,
    pub(super) icrc_unchecked: u64,
    /// Packets with an opcode that the standard does not have, and a right ICRC: a manufacturer's.
    unknown_opcodes: u64,
    /// Other packets with an `error`, whatever their ICRC.
    malformed: u64,
    /// Frames without a RoCE packet that is known, by what they are.
    #[serde(skip_serializing_if = "Unopened::is_empty")]
    unopened: Unopened,
    /// Why an ICRC was not checked.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    unchecked: BTreeMap<String, u64>,
    /// Of bad ICRCs, by name.
    causes: BTreeMap<&'static str, u64>,
    flows: Vec<FlowSummary>,
    #[serde(skip)]
    by_key: HashMap<FlowKey, usize>,
    /// By the two hosts, smaller address first.
    #[serde(skip)]
    mtus: HashMap<(Gid, Gid), SeenMtus>,
}

type FlowKey = (Gid, Gid, u32, Option<u32>);

/// Packets from one address to one queue pair of another; with datagrams, also from one queue pair.
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
    /// By kind, RNR NAKs too.
    naks: BTreeMap<&'static str, u64>,
    requests: PsnTracker,
    read_responses: PsnTracker,
}

impl Summary {
    /// Counts a RoCE packet by its verdict.
    pub(super) fn count(&mut self, record: &Record) {
        self.roce_packets += 1;
        self.unknown_opcodes += u64::from(record.unknown_opcode);
        self.malformed += u64::from(record.error.is_some() && !record.unknown_opcode && !record.has_options);
        if let (IcrcVerdict::Unchecked, Some(reason)) = (record.icrc, &record.error) {
            *self.unchecked.entry(reason.clone()).or_default() += 1;
        }
        *match record.icrc {
            IcrcVerdict::Ok => &mut self.icrc_ok,
            IcrcVerdict::Bad => &mut self.icrc_bad,
            IcrcVerdict::Truncated => &mut self.icrc_truncated,
            IcrcVerdict::Unchecked => &mut self.icrc_unchecked,
        } += 1;
        if let Some(cause) = record.cause {
            *self.causes.entry(cause).or_default() += 1;
        }
    }

    /// Counts a frame that was not looked into.
    pub(super) fn count_unopened(&mut self, name: Name) {
        self.unopened.count(name);
    }

    /// A packet held to be corrupted turned out to have this cause.
    pub(super) fn reassign(&mut self, cause: &'static str) {
        if let Some(count) = self.causes.get_mut("corrupted") {
            *count -= 1;
            if *count == 0 {
                self.causes.remove("corrupted");
            }
        }
        *self.causes.entry(cause).or_default() += 1;
    }

    /// Counts a packet with an opcode that the standard does not have in its flow. Whatever it is, it has a PSN.
    pub(super) fn count_unknown(&mut self, record: &Record) {
        let Some(bth) = &record.bth else { return };
        let (source, destination) = (record.network.source, record.network.destination);
        let flow = self.flow((source, destination, bth.dest_qpn().value(), None));
        flow.packets += 1;
        *flow.opcodes.entry("UNKNOWN").or_default() += 1;
        flow.requests.observe(bth.psn(), Span::ONE, true);
    }

    fn flow(&mut self, key: FlowKey) -> &mut FlowSummary {
        let flows = &mut self.flows;
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
        &mut self.flows[index]
    }

    /// Counts a packet in its flow. `extensions`: the capture has all its extension headers.
    pub(super) fn count_flow(&mut self, record: &Record, packet: &Packet<'_>, extensions: bool) {
        let network = &packet.network();
        let deth = packet.deth().filter(|_| extensions);
        let source_qp = deth.map(|deth| deth.source_qpn().value());
        let key = (network.source, network.destination, packet.bth.dest_qpn().value(), source_qp);
        let flow = self.flow(key);
        flow.packets += 1;
        flow.payload_bytes += packet.payload.len() as u64;
        flow.icrc_bad += u64::from(record.icrc == IcrcVerdict::Bad);
        flow.congestion_experienced += u64::from(packet.congestion_experienced());
        *flow.opcodes.entry(packet.opcode.name()).or_default() += 1;
        if let Some(name) = record.extensions.aeth.as_ref().map(name).filter(|name| name.contains("NAK")) {
            *flow.naks.entry(name).or_default() += 1;
        }
        if record.icrc == IcrcVerdict::Bad && !record.systematic {
            return;
        }
        let (a, b) = (network.source, network.destination);
        let mtus = self.mtus.entry(if a.0 <= b.0 { (a, b) } else { (b, a) }).or_default();
        if packet.opcode.payload() == PayloadRule::Full {
            mtus.learn(packet.payload.len());
        }
        let mtus = *mtus;
        self.flow(key).follow(packet, mtus, extensions);
    }
}

impl FlowSummary {
    fn follow(&mut self, packet: &Packet<'_>, mtus: SeenMtus, extensions: bool) {
        let (opcode, psn) = (packet.opcode, packet.bth.psn());
        if opcode.operation() == Operation::ReadResponse {
            let begins = matches!(opcode.position(), Position::First | Position::Only);
            self.read_responses.observe(psn, Span::ONE, begins);
        } else if opcode.is_request() {
            let reth = packet.reth().filter(|_| extensions && opcode == Opcode::RC_READ_REQUEST);
            let span = reth.map_or(Span::ONE, |reth| Span::of_read(reth.length(), mtus));
            // A datagram queue pair numbers its packets for all its peers together.
            self.requests.observe(psn, span, opcode.service() == Service::Ud);
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
        for (cause, count) in &self.causes {
            writeln!(f, "  bad ICRC: {cause} x{count}")?;
        }
        for (reason, count) in &self.unchecked {
            writeln!(f, "  unchecked: {reason} x{count}")?;
        }
        for (name, count) in self.unopened.most() {
            writeln!(f, "  not opened: {name} x{count}")?;
        }
        self.flows.iter().try_for_each(|flow| write!(f, "{flow}"))
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
                write!(f, "  {name}: psn {first:#08x} to {last:#08x}, {} gaps", tracker.gaps)?;
                write!(f, " ({} missing, {} late)", tracker.missing, tracker.late)?;
                writeln!(f, ", {} duplicates", tracker.duplicates)?;
            }
        }
        Ok(())
    }
}
