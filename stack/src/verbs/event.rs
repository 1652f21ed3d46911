use ferroce_wire::{Gid, PKey};

use crate::verbs::{Ah, Cq, Qp, Srq, Unreachable};

/// An event that no work completion reports. [`manual::errors`](crate::manual::errors) says what to do about each.
///
/// The verbs make an application acknowledge each event before it may destroy the object; here events name objects by handle, and
/// a handle that outlives its object is refused, so there is nothing to acknowledge. The events of a destroyed object are
/// discarded.
///
/// Each kind of event is pending at most once per object until it is read ([`Context::next_event`](crate::Context::next_event),
/// [`next_event_of`](crate::Context::next_event_of)). If it occurs again before that, the two are one event, and a counter counts
/// both. So no event is lost for lack of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A completion was added to an armed CQ, which is now disarmed.
    Completion(Cq),
    /// A completion did not fit into the CQ; its QP is in the error state.
    CqErr(Cq),
    /// A QP failed and no work request reports it: its completion did not fit into a CQ, or a GPU copy for a WRITE or READ of the
    /// peer failed.
    QpFatal(Qp),
    /// The next hop to a QP's peer was not found, and the QP is in the error state. Its oldest send completed with `RetryExcErr`,
    /// all later ones were flushed.
    QpUnreachable {
        /// The QP.
        qp: Qp,
        /// Why its peer can't be reached.
        reason: Unreachable,
    },
    /// The next hop of an address handle was not found. Datagrams posted with it complete with `RetryExcErr`, which moves their
    /// QP to SQE.
    AhUnreachable {
        /// The address handle.
        ah: Ah,
        /// Why it can't be reached.
        reason: Unreachable,
    },
    /// A peer sent a request that the QP does not allow, and the QP is in the error state. The request used no receive, so no
    /// work completion reports the error.
    QpReqErr(Qp),
    /// A peer's request was an access violation, and the QP is in the error state. The request used no receive, so no work
    /// completion reports the error.
    QpAccessErr(Qp),
    /// A QP that is ready to receive but not yet to send received its first packet.
    CommEst(Qp),
    /// A draining QP has completed the messages that it had started.
    SqDrained(Qp),
    /// A QP with an SRQ has failed, and uses no more receives from it.
    QpLastWqeReached(Qp),
    /// The RNIC has failed or was removed. All posted work is flushed, and [`poll`](crate::Context::poll) fails from now on.
    DeviceFatal,
    /// An SRQ has fewer receives than its limit; the limit is now off.
    SrqLimitReached(Srq),
    /// A packet was dropped, or a request of the connection manager refused, because its partition is not the receiver's. At most
    /// one such event is pending; `rx_pkey_mismatch` counts the packets. (The application itself changes the P_Key table, so
    /// there are no events for changes.)
    PkeyViolation {
        /// The destination queue pair; `None` for QP1 and multicast groups.
        qp: Option<Qp>,
        /// Its P_Key.
        pkey: PKey,
        /// Its source address.
        source: Gid,
    },
}

impl Event {
    /// The object of the event.
    pub fn source(&self) -> EventSource {
        match *self {
            Event::Completion(cq) | Event::CqErr(cq) => EventSource::Cq(cq),
            Event::QpFatal(qp)
            | Event::QpUnreachable { qp, .. }
            | Event::QpReqErr(qp)
            | Event::QpAccessErr(qp)
            | Event::CommEst(qp)
            | Event::SqDrained(qp)
            | Event::QpLastWqeReached(qp) => EventSource::Qp(qp),
            Event::SrqLimitReached(srq) => EventSource::Srq(srq),
            Event::AhUnreachable { ah, .. } => EventSource::Ah(ah),
            Event::PkeyViolation { .. } | Event::DeviceFatal => EventSource::Port,
        }
    }
}

/// The object of an [`Event`]; a [`Qp`], [`Cq`], [`Srq`] or [`Ah`] converts to it with `into()`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum EventSource {
    /// A queue pair.
    Qp(Qp),
    /// A completion queue.
    Cq(Cq),
    /// A shared receive queue.
    Srq(Srq),
    /// An address handle.
    Ah(Ah),
    /// The port: [`Event::PkeyViolation`], [`Event::DeviceFatal`].
    Port,
}

impl From<Qp> for EventSource {
    fn from(qp: Qp) -> EventSource {
        EventSource::Qp(qp)
    }
}

impl From<Cq> for EventSource {
    fn from(cq: Cq) -> EventSource {
        EventSource::Cq(cq)
    }
}

impl From<Srq> for EventSource {
    fn from(srq: Srq) -> EventSource {
        EventSource::Srq(srq)
    }
}

impl From<Ah> for EventSource {
    fn from(ah: Ah) -> EventSource {
        EventSource::Ah(ah)
    }
}
