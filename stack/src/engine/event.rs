use std::collections::VecDeque;

use crate::verbs::{Cq, Event};

/// Bounded: an application that does not read its events must not grow memory.
pub(crate) struct EventQueue {
    queue: VecDeque<Event>,
    limit: usize,
    pkey_violation_waits: bool,
}

impl EventQueue {
    /// For `limit` events, and one completion event for each of `cqs` completion queues beside.
    pub(crate) fn new(limit: u32, cqs: u32) -> EventQueue {
        let limit = limit as usize;
        EventQueue {
            queue: VecDeque::with_capacity(limit + cqs as usize),
            limit,
            pkey_violation_waits: false,
        }
    }

    /// Whether the event found room.
    #[must_use]
    pub(crate) fn push(&mut self, event: Event) -> bool {
        let room = self.queue.len() < self.limit;
        if room {
            self.pkey_violation_waits |= is_pkey_violation(&event);
            self.queue.push_back(event);
        }
        room
    }

    /// Adds the event of a completion queue that has none here: an application may sleep until it
    /// comes, so there is always room for it.
    pub(crate) fn push_completion(&mut self, cq: Cq) {
        self.queue.push_back(Event::Completion(cq));
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        let event = self.queue.pop_front()?;
        self.pkey_violation_waits &= !is_pkey_violation(&event);
        Some(event)
    }

    /// Takes the oldest event that is `wanted`.
    pub(crate) fn take(&mut self, wanted: impl Fn(&Event) -> bool) -> Option<Event> {
        let at = self.queue.iter().position(wanted)?;
        self.queue.remove(at)
    }

    /// Whether an event of this kind waits to be read.
    pub(crate) fn has_pkey_violation(&self) -> bool {
        self.pkey_violation_waits
    }

    /// Forgets the events of an object that is destroyed.
    pub(crate) fn purge(&mut self, is_its_own: impl Fn(&Event) -> bool) {
        self.queue.retain(|event| !is_its_own(event));
    }
}

fn is_pkey_violation(event: &Event) -> bool {
    matches!(event, Event::PkeyViolation { .. })
}
