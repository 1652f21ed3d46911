//! Detection of differing parameters at the two ends of a connection.

use ferroce_wire::{Opcode, Operation, Packet, PayloadRule, Service};

use crate::engine::qp::QueuePair;
use crate::engine::responder::RequestRefusal;
use crate::verbs::Mismatch;

impl QueuePair {
    /// The first one is kept, because later ones may be its consequences.
    #[cold]
    pub(crate) fn note(&mut self, mismatch: Mismatch) {
        self.mismatch.get_or_insert(mismatch);
    }

    /// A packet of another service.
    #[cold]
    pub(crate) fn note_service(&mut self, packet: Opcode) {
        if packet.service() != Service::Cnp {
            self.note(Mismatch::Service { packet, qp_type: self.qp_type() });
        }
    }

    /// A request that is not valid here: for lack of a right, or for another reason.
    #[cold]
    pub(crate) fn out_of_place(&mut self, packet: &Packet<'_>) -> RequestRefusal {
        let opcode = packet.opcode;
        let is_forbidden = opcode.may_come(self.responder.successor()) && !self.allows(packet);
        if is_forbidden && opcode.operation() != Operation::Flush {
            self.note(Mismatch::Access { packet: opcode });
        }
        RequestRefusal::Invalid
    }

    /// A packet whose lengths do not match each other, or the path MTU.
    #[cold]
    pub(crate) fn misfit(&mut self, packet: &Packet<'_>) -> RequestRefusal {
        self.note_length(packet);
        RequestRefusal::Invalid
    }

    /// A packet with an invalid payload length.
    #[cold]
    pub(crate) fn note_length(&mut self, packet: &Packet<'_>) {
        let (rule, payload) = (packet.opcode.payload(), packet.payload.len());
        if let Some(path_mtu) = self.path_mtu()
            && !matches!(rule, PayloadRule::Exactly(_))
            && !rule.admits(payload, path_mtu.bytes() as usize)
        {
            self.note(Mismatch::PathMtu { packet: packet.opcode, payload: payload as u32, path_mtu });
        }
    }
}
