//! The types of librdmacm, as its ABI defines them on 64-bit Linux (rdma/rdma_cma.h).

use std::ffi::{c_int, c_uint, c_void};
use std::mem::offset_of;

use super::abi::{AhAttr, Context, Qp};

/// `struct rdma_event_channel`
#[repr(C)]
pub(super) struct RawChannel {
    pub(super) fd: c_int,
}

/// An address in the kernel's format: `struct sockaddr_storage`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct Storage(pub(super) [u8; 128]);

/// The part of `struct rdma_cm_id` that is used.
#[repr(C)]
pub(super) struct RawId {
    /// The context of the device that it was resolved to; null before.
    pub(super) verbs: *mut Context,
    pub(super) channel: *mut RawChannel,
    pub(super) context: *mut c_void,
    pub(super) qp: *mut Qp,
    pub(super) source: Storage,
    pub(super) destination: Storage,
    /// `union rdma_addr`, and the paths.
    route: [u64; 7],
    pub(super) port_space: c_uint,
    pub(super) port: u8,
    rest: [u64; 8],
}

/// `struct rdma_conn_param`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConnParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

/// `struct rdma_ud_param`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct UdParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) ah_attr: AhAttr,
    pub(super) qp_num: u32,
    pub(super) qkey: u32,
}

/// The parameters of an event: of a connection, or of a datagram service.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union EventParam {
    pub(super) conn: ConnParam,
    pub(super) ud: UdParam,
}

/// `struct rdma_cm_event`
#[repr(C)]
pub(super) struct RawEvent {
    pub(super) id: *mut RawId,
    pub(super) listen_id: *mut RawId,
    pub(super) event: c_uint,
    pub(super) status: c_int,
    pub(super) param: EventParam,
}

const _: () = {
    assert!(size_of::<RawChannel>() == 4);
    assert!(size_of::<RawId>() == 416);
    assert!(offset_of!(RawId, context) == 16);
    assert!(offset_of!(RawId, source) == 32);
    assert!(offset_of!(RawId, destination) == 160);
    assert!(offset_of!(RawId, port_space) == 344);
    assert!(offset_of!(RawId, port) == 348);
    assert!(size_of::<ConnParam>() == 24);
    assert!(offset_of!(ConnParam, qp_num) == 16);
    assert!(size_of::<UdParam>() == 56);
    assert!(offset_of!(UdParam, ah_attr) == 16);
    assert!(offset_of!(UdParam, qp_num) == 48);
    assert!(size_of::<RawEvent>() == 80);
    assert!(offset_of!(RawEvent, param) == 24);
};

/// `enum rdma_port_space`
pub(super) const PS_TCP: c_uint = 0x106;
pub(super) const PS_UDP: c_uint = 0x111;
/// `RDMA_OPTION_ID`, and its options.
pub(super) const OPTION_ID: c_int = 0;
pub(super) const OPTION_TOS: c_int = 0;
pub(super) const OPTION_ACK_TIMEOUT: c_int = 3;
/// `RDMA_CM_EVENT_CONNECT_REQUEST`
pub(super) const CONNECT_REQUEST: c_uint = 4;
