//! What the connection manager reports to the application.

use std::fmt;
use std::net::SocketAddr;
use std::ops::Deref;

use ferroce_wire::cm::RejectReason;
use ferroce_wire::{PathMtu, Qpn};

use super::{CmId, Listener};
use crate::verbs::{AddressVector, QpType, Unreachable};

/// Private data of the peer's application. A message of the connection manager has no length field for it, so it always has
/// the full size of its message, and zeros follow the bytes that the peer sent. Take the bytes that you expect:
/// `&private_data[..RemoteMemory::LEN]`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData {
    bytes: [u8; PrivateData::MAX],
    len: u8,
}

impl PrivateData {
    /// The most bytes: those of a reply.
    pub const MAX: usize = 196;

    pub(crate) fn new(data: &[u8]) -> PrivateData {
        let len = data.len().min(PrivateData::MAX);
        let mut bytes = [0; PrivateData::MAX];
        bytes[..len].copy_from_slice(&data[..len]);
        PrivateData { bytes, len: len as u8 }
    }
}

impl Deref for PrivateData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl fmt::Debug for PrivateData {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = self.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        write!(f, "\"{}\"", self[..used].escape_ascii())
    }
}

/// A request to a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConnectionRequest {
    /// The listener.
    pub listener: Listener,
    /// The ID to accept or reject.
    pub id: CmId,
    /// The source of the request.
    pub peer: SocketAddr,
    /// The requested address and port.
    pub local: SocketAddr,
    /// RC, UC, or UD for a datagram service.
    pub qp_type: QpType,
    /// The private data of the request: 56 bytes, 180 of a search for a datagram service.
    pub private_data: PrivateData,
    /// READs and atomics that this end may have outstanding at the peer; 0 for UD, like the next field.
    pub responder_resources: u8,
    /// READs and atomics that the peer wants to have outstanding here.
    pub initiator_depth: u8,
    /// The peer's choice; the largest supported here for UD.
    pub path_mtu: PathMtu,
    /// The requested partition, as an index of the port's P_Key table.
    pub pkey_index: usize,
}

/// An event of a connection. [`manual::connecting`](crate::manual::connecting) has a server and a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CmEvent {
    /// A peer requests a connection, or searches for a datagram service.
    ConnectionRequest(ConnectionRequest),
    /// The queue pair is in RTS.
    Established {
        /// The connection.
        id: CmId,
        /// The private data of the peer's acceptance; empty at the accepting end.
        private_data: PrivateData,
    },
    /// A datagram service was found.
    Resolved {
        /// The search, which has ended.
        id: CmId,
        /// The path to it, for an address handle.
        address: AddressVector,
        /// The queue pair of the service.
        qpn: Qpn,
        /// The Q_Key that its datagrams must carry.
        qkey: u32,
        /// The private data of the service.
        private_data: PrivateData,
    },
    /// The peer rejects. The ID no longer exists; the queue pair is unchanged, or in ERR if it had been accepted.
    Rejected {
        /// The connection, or the search.
        id: CmId,
        /// The reason: for a search the status of the SIDR reply.
        reason: RejectReason,
        /// Its private data.
        private_data: PrivateData,
    },
    /// The peer is unreachable, or does not answer. The ID no longer exists.
    Unreachable {
        /// The connection, or the search.
        id: CmId,
        /// The peer, and why it is unreachable.
        reason: Unreachable,
    },
    /// The connection has ended, and its queue pair is in ERR.
    Disconnected {
        /// The connection.
        id: CmId,
    },
    /// Late packets of the connection are gone from the network; the ID no longer exists.
    TimewaitExit {
        /// The connection.
        id: CmId,
    },
}

impl CmEvent {
    /// The connection, the request or the search.
    pub fn id(&self) -> CmId {
        match *self {
            CmEvent::ConnectionRequest(ConnectionRequest { id, .. })
            | CmEvent::Established { id, .. }
            | CmEvent::Resolved { id, .. }
            | CmEvent::Rejected { id, .. }
            | CmEvent::Unreachable { id, .. }
            | CmEvent::Disconnected { id }
            | CmEvent::TimewaitExit { id } => id,
        }
    }
}
