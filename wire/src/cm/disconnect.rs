use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Qpn;

/// Disconnection request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Dreq {
    local_comm_id: U32,
    remote_comm_id: U32,
    remote_qpn: [u8; 3],
    reserved: u8,
    /// The application's private data.
    pub private_data: [u8; 220],
}

impl Dreq {
    /// Ends the connection of the receiver's queue pair `remote_qpn`.
    pub fn new(local_comm_id: u32, remote_comm_id: u32, remote_qpn: Qpn) -> Dreq {
        Dreq {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            remote_qpn: remote_qpn.to_bytes(),
            ..Dreq::new_zeroed()
        }
    }

    /// The sender's communication id.
    pub fn local_comm_id(&self) -> u32 {
        self.local_comm_id.get()
    }

    /// The receiver's communication id.
    pub fn remote_comm_id(&self) -> u32 {
        self.remote_comm_id.get()
    }

    /// The receiver's queue pair.
    pub fn remote_qpn(&self) -> Qpn {
        Qpn::from_bytes(self.remote_qpn)
    }
}

/// Disconnection reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Drep {
    local_comm_id: U32,
    remote_comm_id: U32,
    /// The application's private data.
    pub private_data: [u8; 224],
}

impl Drep {
    /// Answers a DREQ.
    pub fn new(local_comm_id: u32, remote_comm_id: u32) -> Drep {
        Drep {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            private_data: [0; 224],
        }
    }

    /// The sender's communication id.
    pub fn local_comm_id(&self) -> u32 {
        self.local_comm_id.get()
    }

    /// The receiver's communication id.
    pub fn remote_comm_id(&self) -> u32 {
        self.remote_comm_id.get()
    }
}
