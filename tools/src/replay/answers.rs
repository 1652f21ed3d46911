//! The responses of an end of a conversation, by PSN: packets with a valid ICRC.

use std::collections::HashMap;
use std::ops::Range;

use ferroce::wire::Operation;

use super::conversation::Event;

/// The responses of one end.
#[derive(Debug, Default)]
pub(super) struct Answers {
    /// READ responses: their PSNs in order, and their indices in the events.
    reads: Vec<(i64, usize)>,
    /// The values that atomics returned.
    originals: HashMap<i64, u64>,
    /// PSNs of NAKs other than sequence errors, in order.
    refusals: Vec<i64>,
    /// The newest PSN of any other response.
    pub(super) newest: Option<i64>,
}

impl Answers {
    pub(super) fn of(events: &[Event], end: usize) -> Answers {
        let mut answers = Answers::default();
        let all = events.iter().enumerate().filter(|(_, event)| event.from == end);
        // A damaged packet may contain anything.
        for (index, event) in all.filter(|(_, event)| event.packet.is_whole_response()) {
            let packet = &event.packet;
            if packet.is_refusal() {
                answers.refusals.push(event.psn);
            } else if !packet.is_nak() {
                answers.newest = answers.newest.max(Some(event.psn));
            }
            if packet.opcode.operation() == Operation::ReadResponse {
                answers.reads.push((event.psn, index));
            }
            if let Some(original) = packet.original() {
                answers.originals.entry(event.psn).or_insert(original);
            }
        }
        answers.reads.sort_unstable();
        answers.refusals.sort_unstable();
        answers
    }

    /// The first refused PSN from `first` to `last`.
    pub(super) fn refused(&self, first: i64, last: i64) -> Option<i64> {
        let at = self.refusals.partition_point(|psn| *psn < first);
        self.refusals.get(at).copied().filter(|psn| *psn <= last)
    }

    /// The original value that the atomic at a PSN returned.
    pub(super) fn original(&self, psn: i64) -> Option<u64> {
        self.originals.get(&psn).copied()
    }

    /// The READ responses of these PSNs, by PSN: their indices in the events, the earliest first.
    pub(super) fn reads(&self, psns: Range<i64>) -> impl Iterator<Item = (i64, &[(i64, usize)])> {
        let at = |psn: i64| self.reads.partition_point(|(other, _)| *other < psn);
        let range = self.reads.get(at(psns.start)..at(psns.end)).unwrap_or_default();
        range.chunk_by(|a, b| a.0 == b.0).filter_map(|alike| Some((alike.first()?.0, alike)))
    }
}
