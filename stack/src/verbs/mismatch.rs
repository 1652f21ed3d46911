//! Configuration mismatches of the two ends of a connection, as far as a packet reveals them.

use std::fmt;

use ferroce_wire::{Opcode, PathMtu};

use crate::verbs::QpType;

/// A mismatch between the configuration of a packet's sender and that of the queue pair that received it.
///
/// Neither end can know it in advance. An application can report it when work fails
/// ([`Context::mismatches`](crate::Context::mismatches)).
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
    /// The payload's length does not fit the packet's position in a message at the queue pair's path MTU.
    PathMtu {
        /// Of the packet.
        packet: Opcode,
        /// Bytes.
        payload: u32,
        /// Of the queue pair.
        path_mtu: PathMtu,
    },
    /// The queue pair does not allow the operation.
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
                write!(f, "the peer sent {packet}, which the access flags of this queue pair do not allow")
            }
        }
    }
}
