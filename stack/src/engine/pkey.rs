//! Packets of other partitions (docs/protocol.md §1).

use ferroce_wire::{Gid, PKey, Packet};

use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{Event, Qp};

impl Shared {
    /// A packet's partition is not one of this port's. The first one raises an event; another event is raised only after it
    /// was read.
    #[cold]
    pub(crate) fn refuse_pkey(&mut self, qp: Option<Qp>, packet: &Packet<'_>) -> Counter {
        self.raise_pkey_violation(qp, packet.network().source, packet.bth.pkey());
        Counter::RxPkeyMismatch
    }

    /// The same for a request whose partition differs from its packet's.
    pub(crate) fn raise_pkey_violation(&mut self, qp: Option<Qp>, source: Gid, pkey: PKey) {
        if !self.events.has_pkey_violation() {
            self.raise(Event::PkeyViolation { qp, pkey, source });
        }
    }
}
