//! What the two ends of a connection were told differently, as far as a packet shows it.

use std::fmt;

use ferroce_wire::{Opcode, Operation, Packet, PathMtu, PayloadRule, Service};

use crate::qp::{QpType, QueuePair};
use crate::responder::Refusal;

/// What a packet showed about how its sender was set up: otherwise than the queue pair that it came to.
///
/// Neither end can know it beforehand. It is kept for the application to say when work fails, by
/// [`Context::mismatches`](crate::Context::mismatches).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Mismatch {
    /// The packet is of another transport service than the queue pair.
    Service {
        /// Of the packet.
        packet: Opcode,
        /// Of the queue pair.
        qp_type: QpType,
    },
    /// The payload does not fit its place in a message at the queue pair's path MTU.
    PathMtu {
        /// Of the packet.
        packet: Opcode,
        /// Bytes.
        payload: u32,
        /// Of the queue pair.
        path_mtu: PathMtu,
    },
    /// The queue pair was not given the right to the operation.
    Access {
        /// Of the packet.
        packet: Opcode,
    },
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Mismatch::Service { packet, qp_type } => {
                let (sent, here) = (format!("{:?}", packet.service()), format!("{qp_type:?}"));
                let (sent, here) = (sent.to_uppercase(), here.to_uppercase());
                write!(f, "the peer sends {sent} packets ({packet}) to a queue pair of the {here} service")
            }
            Mismatch::PathMtu { packet, payload, path_mtu } => write!(
                f,
                "the peer sent {packet} of {payload} bytes to a queue pair with a path MTU of {path_mtu} bytes"
            ),
            Mismatch::Access { packet } => {
                write!(f, "the peer sent {packet}, which this queue pair was not given the right to")
            }
        }
    }
}

impl QueuePair {
    /// The first one is kept: what follows from it says less.
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

    /// A request that has no place here: for want of a right, or for another reason.
    #[cold]
    pub(crate) fn out_of_place(&mut self, packet: &Packet<'_>) -> Refusal {
        let opcode = packet.opcode;
        let is_forbidden = opcode.may_come(self.responder.successor()) && !self.allows(packet);
        if is_forbidden && opcode.operation() != Operation::Flush {
            self.note(Mismatch::Access { packet: opcode });
        }
        Refusal::Invalid
    }

    /// A packet whose lengths do not fit each other, or the path MTU.
    #[cold]
    pub(crate) fn misfit(&mut self, packet: &Packet<'_>) -> Refusal {
        self.note_length(packet);
        Refusal::Invalid
    }

    /// A packet whose payload may not be of that length here.
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
