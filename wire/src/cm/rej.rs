use std::fmt;

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{bits, set_bits};

/// The message that a REJ or an MRA refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// A REQ.
    Req = 0,
    /// A REP.
    Rep = 1,
    /// In a REJ: none of them; in an MRA: a LAP.
    Other = 2,
}

impl Stage {
    fn from_bits(code: u8) -> Option<Stage> {
        match code {
            0 => Some(Stage::Req),
            1 => Some(Stage::Rep),
            2 => Some(Stage::Other),
            _ => None,
        }
    }
}

/// Rejection of a REQ or REP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Rej {
    local_comm_id: U32,
    remote_comm_id: U32,
    /// Message rejected [7:6].
    stage: u8,
    /// Length of the additional information [7:1].
    info_length: u8,
    reason: U16,
    info: [u8; 72],
    /// The application's private data.
    pub private_data: [u8; 148],
}

impl Rej {
    /// Rejects a message of `stage` for `reason`.
    pub fn new(local_comm_id: u32, remote_comm_id: u32, stage: Stage, reason: RejectReason) -> Rej {
        Rej {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            stage: (stage as u8) << 6,
            reason: U16::new(reason.0),
            ..Rej::new_zeroed()
        }
    }

    /// The sender's communication id; 0 if it has none for the connection.
    pub fn local_comm_id(&self) -> u32 {
        self.local_comm_id.get()
    }

    /// The receiver's communication id.
    pub fn remote_comm_id(&self) -> u32 {
        self.remote_comm_id.get()
    }

    /// The rejected message; `None` for the reserved code.
    pub fn stage(&self) -> Option<Stage> {
        Stage::from_bits(bits(self.stage, 6, 2))
    }

    /// The reason.
    pub fn reason(&self) -> RejectReason {
        RejectReason(self.reason.get())
    }

    /// The additional information for some reasons (an acceptable path MTU, ...).
    pub fn info(&self) -> &[u8] {
        let length = usize::from(bits(self.info_length, 1, 7));
        &self.info[..length.min(self.info.len())]
    }

    /// Sets [`info`](Rej::info), of at most 72 bytes; `false` if it is longer.
    pub fn set_info(&mut self, info: &[u8]) -> bool {
        let Some(room) = self.info.get_mut(..info.len()) else { return false };
        room.copy_from_slice(info);
        set_bits(&mut self.info_length, 1, 7, info.len() as u8);
        true
    }
}

/// The reason for rejecting a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No queue pair is left.
    pub const NO_QP: RejectReason = RejectReason(1);
    /// Another resource is exhausted.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// The other side did not answer in time.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// The communication id is not known.
    pub const INVALID_COMM_ID: RejectReason = RejectReason(6);
    /// There is no listener on the service id.
    pub const INVALID_SERVICE_ID: RejectReason = RejectReason(8);
    /// The transport is not supported.
    pub const INVALID_TRANSPORT: RejectReason = RejectReason(9);
    /// The queue pair belongs to a connection that has not ended.
    pub const STALE_CONNECTION: RejectReason = RejectReason(10);
    /// The GID is not the receiver's.
    pub const INVALID_GID: RejectReason = RejectReason(12);
    /// The path MTU is not supported.
    pub const INVALID_MTU: RejectReason = RejectReason(26);
    /// The listener rejected the request.
    pub const CONSUMER: RejectReason = RejectReason(28);
    /// The communication id is in use.
    pub const DUPLICATE_COMM_ID: RejectReason = RejectReason(30);

    /// A short name of the reason, if it is one of these.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            RejectReason::NO_QP => "no QP",
            RejectReason::NO_RESOURCES => "no resources",
            RejectReason::TIMEOUT => "timeout",
            RejectReason::INVALID_COMM_ID => "invalid communication id",
            RejectReason::INVALID_SERVICE_ID => "invalid service id",
            RejectReason::INVALID_TRANSPORT => "invalid transport",
            RejectReason::STALE_CONNECTION => "stale connection",
            RejectReason::INVALID_GID => "invalid GID",
            RejectReason::INVALID_MTU => "invalid MTU",
            RejectReason::CONSUMER => "consumer",
            RejectReason::DUPLICATE_COMM_ID => "duplicate communication id",
            _ => return None,
        })
    }
}

impl fmt::Display for RejectReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "reason {}", self.0),
        }
    }
}

/// Message receipt acknowledgement: the answer will take longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Mra {
    local_comm_id: U32,
    remote_comm_id: U32,
    /// Message received [7:6].
    stage: u8,
    /// Service timeout [7:3].
    timeout: u8,
    /// The application's private data.
    pub private_data: [u8; 222],
}

impl Mra {
    /// Announces the answer to a message of `stage` within 4.096 µs · 2ⁿ, n from 0 to 31.
    pub fn new(local_comm_id: u32, remote_comm_id: u32, stage: Stage, exponent: u8) -> Mra {
        let mut mra = Mra {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            stage: (stage as u8) << 6,
            ..Mra::new_zeroed()
        };
        set_bits(&mut mra.timeout, 3, 5, exponent);
        mra
    }

    /// The sender's communication id.
    pub fn local_comm_id(&self) -> u32 {
        self.local_comm_id.get()
    }

    /// The receiver's communication id.
    pub fn remote_comm_id(&self) -> u32 {
        self.remote_comm_id.get()
    }

    /// The received message; `None` for the reserved code.
    pub fn stage(&self) -> Option<Stage> {
        Stage::from_bits(bits(self.stage, 6, 2))
    }

    /// The time that the answer may take: 4.096 µs · 2ⁿ.
    pub fn service_timeout(&self) -> u8 {
        bits(self.timeout, 3, 5)
    }
}
