use std::collections::VecDeque;

use ferroce_wire::{Gid, PKey};

use crate::slab::{Cq, Qp, Srq};

/// Something that happened outside any work completion.
///
/// The verbs make an application acknowledge each event before it may destroy the object; here
/// events name objects by handle, and a handle that outlives its object is refused, so there is
/// nothing to acknowledge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A completion arrived in a CQ that was armed; it is disarmed now.
    Completion(Cq),
    /// A completion did not fit into the CQ; the QP that it was for is in the error state.
    CqErr(Cq),
    /// A QP failed without a work request that could say so.
    QpFatal(Qp),
    /// A peer sent a request that the QP does not allow, with no receive in hand.
    QpReqErr(Qp),
    /// A peer named memory that it may not reach, with no receive in hand.
    QpAccessErr(Qp),
    /// The first packet came to a QP that is ready to receive but not yet to send.
    CommEst(Qp),
    /// A draining QP has finished the messages that it had started.
    SqDrained(Qp),
    /// A QP with an SRQ has failed, and takes nothing more from it.
    QpLastWqeReached(Qp),
    /// An SRQ has fewer receives than its limit; the limit is off now.
    SrqLimitReached(Srq),
    /// A packet was dropped, or a request of the connection manager refused, for a partition that is not
    /// its receiver's. One such event waits at a time, whatever comes meanwhile; `rx_pkey_mismatch` counts
    /// the packets. (The P_Key table is the application's own, so that nothing tells it of changes.)
    PkeyViolation {
        /// The queue pair that it was for; `None` for QP1 and multicast groups.
        qp: Option<Qp>,
        /// The key that it named.
        pkey: PKey,
        /// Whose address it came from.
        source: Gid,
    },
}

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
