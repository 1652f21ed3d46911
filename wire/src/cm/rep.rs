use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{bits, set_bits};
use crate::{Psn, Qpn};

/// Reply to a REQ: the connection is accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Rep {
    local_comm_id: U32,
    remote_comm_id: U32,
    qkey: U32,
    qpn: [u8; 3],
    reserved_a: u8,
    ee_context: [u8; 3],
    reserved_b: u8,
    starting_psn: [u8; 3],
    reserved_c: u8,
    responder_resources: u8,
    initiator_depth: u8,
    /// Target ack delay [7:3], failover accepted [2:1], end-to-end flow control [0].
    ack_delay: u8,
    /// RNR retry count [7:5], SRQ [4].
    rnr_retry: u8,
    ca_guid: U64,
    /// The application's private data.
    pub private_data: [u8; 196],
}

impl Rep {
    /// A reply with the queue pair `qpn`, which expects `starting_psn` in the first packet; all other fields are zero.
    pub fn new(local_comm_id: u32, remote_comm_id: u32, qpn: Qpn, starting_psn: Psn) -> Rep {
        Rep {
            local_comm_id: U32::new(local_comm_id),
            remote_comm_id: U32::new(remote_comm_id),
            qpn: qpn.to_bytes(),
            starting_psn: starting_psn.to_bytes(),
            ..Rep::new_zeroed()
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

    /// The Q_Key, for services with one.
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// Sets [`qkey`](Rep::qkey).
    pub fn set_qkey(&mut self, qkey: u32) {
        self.qkey = U32::new(qkey);
    }

    /// The sender's queue pair.
    pub fn qpn(&self) -> Qpn {
        Qpn::from_bytes(self.qpn)
    }

    /// The first PSN that the sender expects: the *receiver* numbers its packets from it.
    pub fn starting_psn(&self) -> Psn {
        Psn::from_bytes(self.starting_psn)
    }

    /// The number of outstanding READs and atomics that the sender accepts.
    pub fn responder_resources(&self) -> u8 {
        self.responder_resources
    }

    /// Sets [`responder_resources`](Rep::responder_resources).
    pub fn set_responder_resources(&mut self, count: u8) {
        self.responder_resources = count;
    }

    /// The number of READs and atomics that the sender will have outstanding.
    pub fn initiator_depth(&self) -> u8 {
        self.initiator_depth
    }

    /// Sets [`initiator_depth`](Rep::initiator_depth).
    pub fn set_initiator_depth(&mut self, count: u8) {
        self.initiator_depth = count;
    }

    /// The sender's delay of acknowledgements: 4.096 µs · 2ⁿ, n from 0 to 31.
    pub fn target_ack_delay(&self) -> u8 {
        bits(self.ack_delay, 3, 5)
    }

    /// Sets [`target_ack_delay`](Rep::target_ack_delay).
    pub fn set_target_ack_delay(&mut self, exponent: u8) {
        set_bits(&mut self.ack_delay, 3, 5, exponent);
    }

    /// Whether the alternate path was accepted (0), is not supported (1) or was refused (2).
    pub fn failover(&self) -> u8 {
        bits(self.ack_delay, 1, 2)
    }

    /// Sets [`failover`](Rep::failover).
    pub fn set_failover(&mut self, code: u8) {
        set_bits(&mut self.ack_delay, 1, 2, code);
    }

    /// Whether the sender returns credits.
    pub fn end_to_end_flow_control(&self) -> bool {
        bits(self.ack_delay, 0, 1) != 0
    }

    /// Sets [`end_to_end_flow_control`](Rep::end_to_end_flow_control).
    pub fn set_end_to_end_flow_control(&mut self, on: bool) {
        set_bits(&mut self.ack_delay, 0, 1, on.into());
    }

    /// The number of retries of the REP's receiver after an RNR NAK; 7 is unlimited.
    pub fn rnr_retry_count(&self) -> u8 {
        bits(self.rnr_retry, 5, 3)
    }

    /// Sets [`rnr_retry_count`](Rep::rnr_retry_count).
    pub fn set_rnr_retry_count(&mut self, count: u8) {
        set_bits(&mut self.rnr_retry, 5, 3, count);
    }

    /// Whether the sender receives through a shared receive queue.
    pub fn srq(&self) -> bool {
        bits(self.rnr_retry, 4, 1) != 0
    }

    /// Sets [`srq`](Rep::srq).
    pub fn set_srq(&mut self, on: bool) {
        set_bits(&mut self.rnr_retry, 4, 1, on.into());
    }

    /// The GUID of the sender's channel adapter.
    pub fn ca_guid(&self) -> u64 {
        self.ca_guid.get()
    }

    /// Sets [`ca_guid`](Rep::ca_guid).
    pub fn set_ca_guid(&mut self, guid: u64) {
        self.ca_guid = U64::new(guid);
    }
}

/// Ready to use: the requester has received the REP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Rtu {
    local_comm_id: U32,
    remote_comm_id: U32,
    /// The application's private data.
    pub private_data: [u8; 224],
}

impl Rtu {
    /// Answers a REP.
    pub fn new(local_comm_id: u32, remote_comm_id: u32) -> Rtu {
        Rtu {
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
