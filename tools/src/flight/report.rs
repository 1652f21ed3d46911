//! The report as JSON.

use ferroce_collectives::flight::{Finding, OperationRecord, PeerRecord};
use serde::Serialize;

use super::merged::{Merged, Rank, Together};
use crate::quantity::nanos;

/// A communicator. Times are in nanoseconds: points in time since the Unix epoch, and durations.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    communicator: String,
    size: u32,
    missing: &'a [u32],
    findings: Vec<Found>,
    ranks: Vec<Part<'a>>,
    operations: Vec<Operation<'a>>,
}

#[derive(Serialize)]
struct Found {
    /// The finding's name in the library.
    finding: &'static str,
    rank: Option<u32>,
    text: String,
}

#[derive(Serialize)]
struct Part<'a> {
    rank: u32,
    process: u32,
    /// Of a running process.
    command: Option<&'a str>,
    /// The file that it was read from, or `None` for a process.
    file: Option<String>,
    host: &'a str,
    device: &'a str,
    calls: u64,
    polled_ns: u64,
    taken_ns: u64,
    failure: Option<&'a str>,
    has_left: bool,
    operations: u64,
    peers: Vec<Peer>,
}

#[derive(Serialize)]
struct Peer {
    rank: u32,
    qp: u32,
    sent_bytes: u64,
    received_bytes: u64,
    chunk_bytes: u64,
    sending_ns: u64,
    quickest_bytes_per_second: u64,
    waited_ns: u64,
    late: u64,
    late_ns: u64,
    late_at_most_ns: u64,
}

#[derive(Serialize)]
struct Operation<'a> {
    call: Option<u32>,
    operation: &'a str,
    bytes: u64,
    algorithm: String,
    ranks: Vec<AtRank<'a>>,
}

#[derive(Serialize)]
struct AtRank<'a> {
    rank: u32,
    number: u64,
    by_memory: bool,
    began_ns: Option<u64>,
    first_ns: Option<u64>,
    last_ns: Option<u64>,
    ended_ns: Option<u64>,
    steps: u32,
    steps_done: u32,
    last_to_begin: Option<u32>,
    last_to_begin_later_ns: Option<u64>,
    waited_ns: u64,
    waits_for: &'a [u32],
}

impl<'a> Report<'a> {
    pub(super) fn new(merged: &Merged<'a>) -> Report<'a> {
        let Merged { diagnosis, ranks, operations } = merged;
        Report {
            communicator: format!("{:016x}", diagnosis.communicator),
            size: diagnosis.size,
            missing: &diagnosis.missing,
            findings: diagnosis.findings.iter().map(Found::new).collect(),
            ranks: ranks.iter().map(|(rank, part)| Part::new(*rank, part)).collect(),
            operations: operations.iter().filter_map(Operation::new).collect(),
        }
    }
}

impl Found {
    fn new(found: &Finding) -> Found {
        let (finding, rank) = match found {
            Finding::Failed { rank, .. } => ("failed", Some(*rank)),
            Finding::Hangs { rank, .. } => ("hangs", Some(*rank)),
            Finding::Deadlock { .. } => ("deadlock", None),
            Finding::Late { rank, .. } => ("late", Some(*rank)),
            Finding::Away { rank, .. } => ("away", Some(*rank)),
            Finding::RailLeft { ranks: (rank, _), .. } => ("rail_left", Some(*rank)),
            Finding::SlowPort { rank, .. } => ("slow_port", Some(*rank)),
            Finding::SlowLink { from, .. } => ("slow_link", Some(*from)),
            _ => ("other", None),
        };
        Found { finding, rank, text: found.to_string() }
    }
}

impl<'a> Part<'a> {
    fn new(rank: u32, part: &Rank<'a>) -> Part<'a> {
        let (recording, own) = (part.recording, part.own);
        Part {
            rank,
            process: recording.process,
            command: part.origin.command(),
            file: part.origin.file(),
            host: &recording.host,
            device: &recording.device,
            calls: own.calls,
            polled_ns: nanos(recording.polled),
            taken_ns: nanos(recording.taken),
            failure: own.failure.as_deref(),
            has_left: own.has_left,
            operations: own.forgotten + own.operations.len() as u64,
            peers: own.peers.iter().map(Peer::new).collect(),
        }
    }
}

impl Peer {
    fn new(peer: &PeerRecord) -> Peer {
        Peer {
            rank: peer.peer,
            qp: peer.qp,
            sent_bytes: peer.sent_bytes,
            received_bytes: peer.received_bytes,
            chunk_bytes: peer.chunk_bytes,
            sending_ns: nanos(peer.sending),
            quickest_bytes_per_second: peer.quickest,
            waited_ns: nanos(peer.waited),
            late: peer.late,
            late_ns: nanos(peer.late_by),
            late_at_most_ns: nanos(peer.late_at_most),
        }
    }
}

impl<'a> Operation<'a> {
    fn new(together: &Together<'a>) -> Option<Operation<'a>> {
        let (_, first) = together.parts.first()?;
        Some(Operation {
            call: first.call,
            operation: &first.operation,
            bytes: first.bytes,
            algorithm: first.algorithm.to_string(),
            ranks: together.parts.iter().map(|(rank, part)| AtRank::new(*rank, part)).collect(),
        })
    }
}

impl<'a> AtRank<'a> {
    fn new(rank: u32, part: &'a OperationRecord) -> AtRank<'a> {
        AtRank {
            rank,
            number: part.number,
            by_memory: part.is_mapped,
            began_ns: part.began.map(nanos),
            first_ns: part.first.map(nanos),
            last_ns: part.last.map(nanos),
            ended_ns: part.ended.map(nanos),
            steps: part.steps.0,
            steps_done: part.steps.1,
            last_to_begin: part.late.map(|(rank, _)| rank),
            last_to_begin_later_ns: part.late.map(|(_, by)| nanos(by)),
            waited_ns: nanos(part.waited),
            waits_for: &part.waits_for,
        }
    }
}
