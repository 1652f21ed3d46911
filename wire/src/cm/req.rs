use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{PathRecord, bits, set_bits};
use crate::{PKEY_DEFAULT, PKey, PathMtu, Psn, Qpn};

/// The transport of a requested connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TransportType {
    /// Reliable Connection.
    Rc = 0,
    /// Unreliable Connection.
    Uc = 1,
}

/// Request for communication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Req {
    local_comm_id: U32,
    reserved_a: U32,
    service_id: U64,
    ca_guid: U64,
    reserved_b: U32,
    qkey: U32,
    qpn: [u8; 3],
    responder_resources: u8,
    local_ee_context: [u8; 3],
    initiator_depth: u8,
    remote_ee_context: [u8; 3],
    /// Remote CM response timeout [7:3], transport [2:1], end-to-end flow control [0].
    remote_timeout: u8,
    starting_psn: [u8; 3],
    /// Local CM response timeout [7:3], retry count [2:0].
    local_timeout: u8,
    pkey: U16,
    /// Path MTU [7:4], RDC exists [3], RNR retry count [2:0].
    mtu: u8,
    /// Max CM retries [7:4], SRQ [3], extended transport [2:0].
    max_cm_retries: u8,
    /// The primary path.
    pub primary_path: PathRecord,
    /// The alternate path; all zero if there is none.
    pub alternate_path: PathRecord,
    /// The application's private data; the first 36 bytes may be an [`IpCm`](super::IpCm).
    pub private_data: [u8; 92],
}

impl Req {
    /// A request for an RC connection to `service_id` over `path`, from `qpn`, which expects `starting_psn` in the
    /// first packet. The P_Key is the default one; all other fields are zero.
    pub fn new(
        local_comm_id: u32,
        service_id: u64,
        qpn: Qpn,
        starting_psn: Psn,
        mtu: PathMtu,
        path: PathRecord,
    ) -> Req {
        Req {
            local_comm_id: U32::new(local_comm_id),
            service_id: U64::new(service_id),
            qpn: qpn.to_bytes(),
            starting_psn: starting_psn.to_bytes(),
            pkey: U16::new(PKEY_DEFAULT.0),
            mtu: mtu.code() << 4,
            primary_path: path,
            ..Req::new_zeroed()
        }
    }

    /// The sender's communication id.
    pub fn local_comm_id(&self) -> u32 {
        self.local_comm_id.get()
    }

    /// The requested service.
    pub fn service_id(&self) -> u64 {
        self.service_id.get()
    }

    /// The GUID of the sender's channel adapter.
    pub fn ca_guid(&self) -> u64 {
        self.ca_guid.get()
    }

    /// Sets [`ca_guid`](Req::ca_guid).
    pub fn set_ca_guid(&mut self, guid: u64) {
        self.ca_guid = U64::new(guid);
    }

    /// The Q_Key, for services with one.
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// Sets [`qkey`](Req::qkey).
    pub fn set_qkey(&mut self, qkey: u32) {
        self.qkey = U32::new(qkey);
    }

    /// The sender's queue pair.
    pub fn qpn(&self) -> Qpn {
        Qpn::from_bytes(self.qpn)
    }

    /// The number of outstanding READs and atomics that the sender accepts.
    pub fn responder_resources(&self) -> u8 {
        self.responder_resources
    }

    /// Sets [`responder_resources`](Req::responder_resources).
    pub fn set_responder_resources(&mut self, count: u8) {
        self.responder_resources = count;
    }

    /// The number of READs and atomics that the sender requests to have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.initiator_depth
    }

    /// Sets [`initiator_depth`](Req::initiator_depth).
    pub fn set_initiator_depth(&mut self, count: u8) {
        self.initiator_depth = count;
    }

    /// The time in which the receiver must answer: 4.096 µs · 2ⁿ, n from 0 to 31.
    pub fn remote_cm_timeout(&self) -> u8 {
        bits(self.remote_timeout, 3, 5)
    }

    /// Sets [`remote_cm_timeout`](Req::remote_cm_timeout).
    pub fn set_remote_cm_timeout(&mut self, exponent: u8) {
        set_bits(&mut self.remote_timeout, 3, 5, exponent);
    }

    /// The transport; `None` for RD and the extended types.
    pub fn transport(&self) -> Option<TransportType> {
        match bits(self.remote_timeout, 1, 2) {
            0 => Some(TransportType::Rc),
            1 => Some(TransportType::Uc),
            _ => None,
        }
    }

    /// Sets [`transport`](Req::transport).
    pub fn set_transport(&mut self, transport: TransportType) {
        set_bits(&mut self.remote_timeout, 1, 2, transport as u8);
    }

    /// Whether the sender returns credits.
    pub fn end_to_end_flow_control(&self) -> bool {
        bits(self.remote_timeout, 0, 1) != 0
    }

    /// Sets [`end_to_end_flow_control`](Req::end_to_end_flow_control).
    pub fn set_end_to_end_flow_control(&mut self, on: bool) {
        set_bits(&mut self.remote_timeout, 0, 1, on.into());
    }

    /// The first PSN that the sender expects: the *receiver* numbers its packets from it.
    pub fn starting_psn(&self) -> Psn {
        Psn::from_bytes(self.starting_psn)
    }

    /// The time in which the sender answers: 4.096 µs · 2ⁿ, n from 0 to 31.
    pub fn local_cm_timeout(&self) -> u8 {
        bits(self.local_timeout, 3, 5)
    }

    /// Sets [`local_cm_timeout`](Req::local_cm_timeout).
    pub fn set_local_cm_timeout(&mut self, exponent: u8) {
        set_bits(&mut self.local_timeout, 3, 5, exponent);
    }

    /// The number of retries of the receiver after a timeout, 0 to 7.
    pub fn retry_count(&self) -> u8 {
        bits(self.local_timeout, 0, 3)
    }

    /// Sets [`retry_count`](Req::retry_count).
    pub fn set_retry_count(&mut self, count: u8) {
        set_bits(&mut self.local_timeout, 0, 3, count);
    }

    /// The partition.
    pub fn pkey(&self) -> PKey {
        PKey(self.pkey.get())
    }

    /// Sets [`pkey`](Req::pkey).
    pub fn set_pkey(&mut self, pkey: PKey) {
        self.pkey = U16::new(pkey.0);
    }

    /// The path MTU; `None` for an invalid code.
    pub fn path_mtu(&self) -> Option<PathMtu> {
        let code = bits(self.mtu, 4, 4);
        PathMtu::from_code(code)
    }

    /// The number of retries of the receiver after an RNR NAK, 0 to 7; 7 is unlimited.
    pub fn rnr_retry_count(&self) -> u8 {
        bits(self.mtu, 0, 3)
    }

    /// Sets [`rnr_retry_count`](Req::rnr_retry_count).
    pub fn set_rnr_retry_count(&mut self, count: u8) {
        set_bits(&mut self.mtu, 0, 3, count);
    }

    /// How often messages are retransmitted, 0 to 15.
    pub fn max_cm_retries(&self) -> u8 {
        bits(self.max_cm_retries, 4, 4)
    }

    /// Sets [`max_cm_retries`](Req::max_cm_retries).
    pub fn set_max_cm_retries(&mut self, count: u8) {
        set_bits(&mut self.max_cm_retries, 4, 4, count);
    }

    /// Whether the sender receives through a shared receive queue.
    pub fn srq(&self) -> bool {
        bits(self.max_cm_retries, 3, 1) != 0
    }

    /// Sets [`srq`](Req::srq).
    pub fn set_srq(&mut self, on: bool) {
        set_bits(&mut self.max_cm_retries, 3, 1, on.into());
    }
}
