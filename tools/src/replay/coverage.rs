//! The packets of a conversation that are judged, and those that the engine got or could have sent.
//!
//! A response that fits no recorded request does not count as judged, because the request may be missing in the
//! capture. The properties that are visible without the request (P_Key, syndrome, an acknowledged PSN far from all that
//! were sent) are checked all the same.

use std::collections::BTreeMap;

use ferroce::wire::Service;

use super::conversation::{Conversation, Event};
use super::message::Messages;

/// The packets that a verdict on a conversation covers.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    /// Judged packets of each end.
    judged: [u64; 2],
    /// Responses to unrecorded requests.
    pub(super) strays: u64,
    /// Whether a request is judged.
    pub(super) has_requests: bool,
}

impl Coverage {
    pub(super) fn of(conversation: &Conversation) -> Coverage {
        let mut coverage = Coverage::default();
        let asked = AskedPsns::of(conversation);
        for event in &conversation.events {
            if asked.judges(event) {
                coverage.judged[event.from] += 1;
                coverage.has_requests |= event.packet.is_request();
            } else if event.packet.icrc_is_right {
                coverage.strays += 1;
            }
        }
        coverage
    }

    pub(super) fn judged(&self) -> u64 {
        self.judged.iter().sum()
    }

    /// Whether no packet of an end is judged.
    pub(super) fn tells_nothing_of(&self, end: usize) -> bool {
        self.judged[end] == 0
    }
}

/// Judged packets that no engine in place of these ends gets or sends: the capture lacks parts of their messages.
pub(super) fn not_played(conversation: &Conversation, ends: &[usize]) -> u64 {
    if conversation.service == Service::Ud {
        return 0; // each datagram is a message
    }
    let asked = AskedPsns::of(conversation);
    let known = [0, 1].map(|end| match ends.contains(&end) {
        true => Messages::posted(conversation, end),
        false => conversation.messages[end].clone(),
    });
    let is_left_out = |event: &&Event| {
        asked.judges(event) && !event.packet.is_cnp() && known[event.space()].at(event.psn).is_none()
    };
    conversation.events.iter().filter(is_left_out).count() as u64
}

/// The PSNs of the recorded requests of each end, as ranges (end exclusive).
struct AskedPsns([BTreeMap<i64, i64>; 2]);

impl AskedPsns {
    fn of(conversation: &Conversation) -> AskedPsns {
        let mut asked = [BTreeMap::new(), BTreeMap::new()];
        for event in &conversation.events {
            if event.packet.is_whole_request() {
                let end = event.psn + conversation.span(&event.packet);
                let known = asked[event.from].entry(event.psn).or_insert(end);
                *known = end.max(*known);
            }
        }
        // Resumed READs overlap.
        for stretches in &mut asked {
            let mut newest = i64::MIN;
            for end in stretches.values_mut() {
                newest = newest.max(*end);
                *end = newest;
            }
        }
        AskedPsns(asked)
    }

    /// A damaged packet, or a response to an unrecorded request, says nothing about its sender.
    fn judges(&self, event: &Event) -> bool {
        let packet = &event.packet;
        let fits = || {
            let before = self.0[event.space()].range(..=event.psn).next_back();
            before.is_some_and(|(_, end)| event.psn < *end)
        };
        packet.icrc_is_right && (!packet.is_response() || fits())
    }
}
