use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{bits, set_bits};
use crate::{Gid, Qpn};

/// A path as described in a REQ, 44 bytes. RoCE has no LIDs and does not change them (0xffff from rdma_cm).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PathRecord {
    local_lid: U16,
    remote_lid: U16,
    local_gid: [u8; 16],
    remote_gid: [u8; 16],
    /// Flow label [31:12], rate [5:0].
    flow_label_rate: U32,
    traffic_class: u8,
    hop_limit: u8,
    /// Service level [7:4], subnet local [3].
    service_level: u8,
    /// Local ACK timeout [7:3].
    ack_timeout: u8,
}

impl PathRecord {
    /// A path from `local` to `remote` without LIDs; all other fields are zero.
    pub fn new(local: Gid, remote: Gid) -> PathRecord {
        let no_lid = U16::new(0xffff);
        PathRecord {
            local_lid: no_lid,
            remote_lid: no_lid,
            local_gid: local.0,
            remote_gid: remote.0,
            ..PathRecord::new_zeroed()
        }
    }

    /// The sender's LID.
    pub fn local_lid(&self) -> u16 {
        self.local_lid.get()
    }

    /// The receiver's LID.
    pub fn remote_lid(&self) -> u16 {
        self.remote_lid.get()
    }

    /// The sender's GID.
    pub fn local_gid(&self) -> Gid {
        Gid(self.local_gid)
    }

    /// The receiver's GID.
    pub fn remote_gid(&self) -> Gid {
        Gid(self.remote_gid)
    }

    /// The flow label, 20 bits.
    pub fn flow_label(&self) -> u32 {
        self.flow_label_rate.get() >> 12
    }

    /// Sets [`flow_label`](PathRecord::flow_label).
    pub fn set_flow_label(&mut self, label: u32) {
        self.flow_label_rate = U32::new(label << 12 | self.flow_label_rate.get() & 0xfff);
    }

    /// The code of the packet rate, 6 bits.
    pub fn rate(&self) -> u8 {
        self.flow_label_rate.get() as u8 & 0x3f
    }

    /// Sets [`rate`](PathRecord::rate).
    pub fn set_rate(&mut self, code: u8) {
        self.flow_label_rate = U32::new(self.flow_label_rate.get() & !0x3f | u32::from(code & 0x3f));
    }

    /// The traffic class.
    pub fn traffic_class(&self) -> u8 {
        self.traffic_class
    }

    /// Sets [`traffic_class`](PathRecord::traffic_class).
    pub fn set_traffic_class(&mut self, class: u8) {
        self.traffic_class = class;
    }

    /// The hop limit.
    pub fn hop_limit(&self) -> u8 {
        self.hop_limit
    }

    /// Sets [`hop_limit`](PathRecord::hop_limit).
    pub fn set_hop_limit(&mut self, limit: u8) {
        self.hop_limit = limit;
    }

    /// The service level, 4 bits.
    pub fn service_level(&self) -> u8 {
        bits(self.service_level, 4, 4)
    }

    /// Sets [`service_level`](PathRecord::service_level).
    pub fn set_service_level(&mut self, level: u8) {
        set_bits(&mut self.service_level, 4, 4, level);
    }

    /// Whether the path stays in the subnet.
    pub fn subnet_local(&self) -> bool {
        bits(self.service_level, 3, 1) != 0
    }

    /// Sets [`subnet_local`](PathRecord::subnet_local).
    pub fn set_subnet_local(&mut self, on: bool) {
        set_bits(&mut self.service_level, 3, 1, on.into());
    }

    /// The sender's ACK timeout: 4.096 µs · 2ⁿ, n from 0 to 31.
    pub fn ack_timeout(&self) -> u8 {
        bits(self.ack_timeout, 3, 5)
    }

    /// Sets [`ack_timeout`](PathRecord::ack_timeout).
    pub fn set_ack_timeout(&mut self, exponent: u8) {
        set_bits(&mut self.ack_timeout, 3, 5, exponent);
    }
}

/// Load alternate path. ferroce does not support path migration, and answers with an [`Apr`] with this status. So the
/// path itself, which has another format than in a REQ, is not parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Lap {
    local_comm_id: U32,
    remote_comm_id: U32,
    reserved_a: U32,
    remote_qpn: [u8; 3],
    /// Remote CM response timeout [7:3].
    timeout: u8,
    reserved_b: U32,
    alternate_path: [u8; 44],
    /// The application's private data.
    pub private_data: [u8; 168],
}

impl Lap {
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

/// Alternate path response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Apr {
    local_comm_id: U32,
    remote_comm_id: U32,
    info_length: u8,
    status: u8,
    reserved: U16,
    info: [u8; 72],
    /// The application's private data.
    pub private_data: [u8; 148],
}

impl Apr {
    /// The status of a responder without path migration.
    pub const UNSUPPORTED: u8 = 2;

    /// Answers a LAP.
    pub fn new(local_comm_id: u32, remote_comm_id: u32, status: u8) -> Apr {
        Apr {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            status,
            ..Apr::new_zeroed()
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

    /// 0 if the path is loaded.
    pub fn status(&self) -> u8 {
        self.status
    }
}
