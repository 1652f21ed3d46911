use ferroce_wire::{Gid, PKey};

use crate::verbs::{Ah, Cq, Qp, Srq, Unreachable};

/// Something that happened outside any work completion. [`manual::errors`](crate::manual::errors) says what to do about each.
///
/// The verbs make an application acknowledge each event before it may destroy the object; here
/// events name objects by handle, and a handle that outlives its object is refused, so there is
/// nothing to acknowledge. The events of a destroyed object are forgotten.
///
/// Each kind of event waits once for each object until it is read ([`Context::next_event`](crate::Context::next_event),
/// [`next_event_of`](crate::Context::next_event_of)). If it occurs again before that, the two are one event, and a counter
/// counts both. So there is always room, and no event is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A completion arrived in a CQ that was armed; it is disarmed now.
    Completion(Cq),
    /// A completion did not fit into the CQ; the QP that it was for is in the error state.
    CqErr(Cq),
    /// A QP failed without a work request that could say so: its completion found no room in a CQ, or a copy of a GPU
    /// has failed, to which a WRITE or from which a READ of the peer was.
    QpFatal(Qp),
    /// The next hop to a QP's peer was looked for in vain, and the QP is in the error state. Its oldest send
    /// completed with `RetryExcErr`, everything behind it was flushed.
    QpUnreachable {
        /// The QP.
        qp: Qp,
        /// Why there is no way to its peer.
        reason: Unreachable,
    },
    /// The next hop of an address handle was looked for in vain. Datagrams that are posted with it complete with
    /// `RetryExcErr`, and their QP is in SQE then.
    AhUnreachable {
        /// The address handle.
        ah: Ah,
        /// Why there is no way.
        reason: Unreachable,
    },
    /// A peer sent a request that the QP does not allow, and the QP is in the error state. The request had not taken a
    /// receive, so no work completion reports the error.
    QpReqErr(Qp),
    /// A peer named memory that it may not reach, and the QP is in the error state. The request had not taken a receive, so
    /// no work completion reports the error.
    QpAccessErr(Qp),
    /// The first packet came to a QP that is ready to receive but not yet to send.
    CommEst(Qp),
    /// A draining QP has finished the messages that it had started.
    SqDrained(Qp),
    /// A QP with an SRQ has failed, and takes nothing more from it.
    QpLastWqeReached(Qp),
    /// The RNIC has failed or was removed. All that was posted is flushed, and [`poll`](crate::Context::poll) fails from now on.
    DeviceFatal,
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

impl Event {
    /// What it happened to.
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

/// What an [`Event`] happens to; of a [`Qp`], [`Cq`], [`Srq`] or [`Ah`] by `into()`.
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
