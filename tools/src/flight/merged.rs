//! The ranks of a communicator, and its last operations on all of them.

use std::collections::BTreeMap;
use std::time::Duration;

use ferroce_collectives::flight::{Diagnosis, OperationRecord, RecordedCommunicator, Recording};

use super::sources::{Origin, Sources};

/// A communicator, merged from the recordings of several ranks.
pub(super) struct Merged<'a> {
    pub(super) diagnosis: &'a Diagnosis,
    /// By rank. If a rank has several recordings, the latest one.
    pub(super) ranks: BTreeMap<u32, Rank<'a>>,
    /// The last operations, oldest first.
    pub(super) operations: Vec<Together<'a>>,
}

/// One rank of a communicator.
pub(super) struct Rank<'a> {
    pub(super) recording: &'a Recording,
    pub(super) own: &'a RecordedCommunicator,
    pub(super) origin: &'a Origin,
}

/// An operation, on all ranks that have called it.
pub(super) struct Together<'a> {
    pub(super) parts: Vec<(u32, &'a OperationRecord)>,
}

impl<'a> Merged<'a> {
    /// Merges the last `last` operations.
    pub(super) fn new(diagnosis: &'a Diagnosis, sources: &'a Sources, last: usize) -> Merged<'a> {
        let mut ranks: BTreeMap<u32, Rank<'a>> = BTreeMap::new();
        for (recording, origin) in sources.recordings.iter().zip(&sources.origins) {
            for own in recording.communicators.iter().filter(|own| own.id == diagnosis.communicator) {
                if ranks.get(&own.rank).is_none_or(|known| known.recording.taken <= recording.taken) {
                    ranks.insert(own.rank, Rank { recording, own, origin });
                }
            }
        }
        // Collective calls have the same number at all ranks. Point-to-point operations are not merged.
        let mut together: BTreeMap<(Option<u32>, u32, u64), Together<'a>> = BTreeMap::new();
        for (rank, part) in &ranks {
            for operation in &part.own.operations {
                let key = match operation.call {
                    Some(call) => (Some(call), 0, 0),
                    None => (None, *rank, operation.number),
                };
                let entry = together.entry(key).or_insert(Together { parts: Vec::new() });
                entry.parts.push((*rank, operation));
            }
        }
        let mut operations: Vec<Together<'a>> = together.into_values().collect();
        operations.sort_by_key(|of| of.began().map_or((1, Duration::ZERO), |began| (0, began)));
        operations.drain(..operations.len().saturating_sub(last));
        Merged { diagnosis, ranks, operations }
    }

    /// The time of the latest recording.
    pub(super) fn taken(&self) -> Duration {
        self.ranks.values().map(|rank| rank.recording.taken).max().unwrap_or_default()
    }
}

impl Rank<'_> {
    /// The state of the communicator, as text.
    pub(super) fn state(&self) -> String {
        let ago = |time: Duration| seconds(self.recording.taken.saturating_sub(time));
        let polled = ago(self.recording.polled);
        if self.own.has_left {
            return "has given it back".to_owned();
        }
        let under_way = self.own.under_way().next();
        if self.own.failure.is_some() {
            return match under_way {
                None => "has failed, in no operation".to_owned(),
                Some(operation) => {
                    format!("has failed in {}: {}", operation.operation, self.progress(operation))
                }
            };
        }
        match under_way {
            None => format!("in no operation, polled {polled} before"),
            Some(operation) => {
                let since = operation
                    .last
                    .or(operation.began)
                    .map_or("not examined yet".to_owned(), |time| format!("no progress for {}", ago(time)));
                let progress = self.progress(operation);
                format!("in {}: {since}, {progress}, polled {polled} before", operation.operation)
            }
        }
    }

    /// The progress of an operation, and the rank that it waits for.
    fn progress(&self, operation: &OperationRecord) -> String {
        let (steps, done) = operation.steps;
        let named: Vec<String> = operation.waits_for.iter().map(u32::to_string).collect();
        let more = match (operation.waits_for_count as usize).saturating_sub(named.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let waits = match operation.waits_for.as_slice() {
            [] => String::new(),
            [own] if *own == self.own.rank => ", waits for its device".to_owned(),
            _ => format!(", waits for {}{more}", named.join(", ")),
        };
        format!("{done} of {steps} steps done{waits}")
    }
}

impl Together<'_> {
    /// The time at which the first rank started.
    pub(super) fn began(&self) -> Option<Duration> {
        self.parts.iter().filter_map(|(_, part)| part.began).min()
    }

    /// The rank that started last, and its delay after the first rank, by the clocks of their hosts.
    pub(super) fn last(&self) -> Option<(u32, Duration)> {
        let began = self.parts.iter().filter_map(|(rank, part)| Some((part.began?, *rank)));
        let (last, rank) = began.max()?;
        (self.parts.len() > 1).then(|| (rank, last.saturating_sub(self.began().unwrap_or(last))))
    }

    /// From the first start to the last end, if the operation has ended on all ranks that have called it.
    pub(super) fn time(&self) -> Option<Duration> {
        let ends: Option<Vec<Duration>> = self.parts.iter().map(|(_, part)| part.ended).collect();
        Some(ends?.into_iter().max()?.saturating_sub(self.began()?))
    }
}

/// A time with about three digits.
pub(super) fn seconds(time: Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        ..1e-3 => format!("{:.1} µs", seconds * 1e6),
        1e-3..1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}
