//! The types of libibverbs, as its ABI defines them on 64-bit Linux (sizes and offsets compared with the headers of
//! rdma-core 44).

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{MaybeUninit, offset_of, size_of};

/// `struct ibv_device`: only its address is used.
#[repr(C)]
pub(super) struct Device {
    _opaque: [u8; 0],
}

/// Objects of which only the address is used.
#[repr(C)]
pub(super) struct Pd {
    _opaque: [u8; 0],
}
#[repr(C)]
pub(super) struct Srq {
    _opaque: [u8; 0],
}
#[repr(C)]
pub(super) struct Ah {
    _opaque: [u8; 0],
}
#[repr(C)]
pub(super) struct Cq {
    _opaque: [u8; 0],
}

/// The public part of `struct ibv_context`.
#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut Device,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

/// The part of `struct ibv_context_ops` that is called through it. The other functions are placeholders, and are called
/// by name.
#[repr(C)]
pub(super) struct ContextOps {
    _query_to_dereg: [*const c_void; 7],
    pub(super) alloc_mw: Option<unsafe extern "C" fn(*mut Pd, c_int) -> *mut Mw>,
    _bind_mw: *const c_void,
    pub(super) dealloc_mw: Option<unsafe extern "C" fn(*mut Mw) -> c_int>,
    _create_cq: *const c_void,
    pub(super) poll_cq: Option<unsafe extern "C" fn(*mut Cq, c_int, *mut super::Completion) -> c_int>,
    pub(super) req_notify_cq: Option<unsafe extern "C" fn(*mut Cq, c_int) -> c_int>,
    _cq_event_to_destroy_srq: [*const c_void; 7],
    pub(super) post_srq_recv: Option<unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _create_to_destroy_qp: [*const c_void; 4],
    pub(super) post_send: Option<unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int>,
    pub(super) post_recv: Option<unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int>,
    _create_ah_to_async_event: [*const c_void; 5],
}

/// `struct ibv_device_attr`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [c_char; 64],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    pub(super) max_ee_rd_atom: c_int,
    pub(super) max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    pub(super) max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    pub(super) max_ee: c_int,
    pub(super) max_rdd: c_int,
    pub(super) max_mw: c_int,
    pub(super) max_raw_ipv6_qp: c_int,
    pub(super) max_raw_ethy_qp: c_int,
    pub(super) max_mcast_grp: c_int,
    pub(super) max_mcast_qp_attach: c_int,
    pub(super) max_total_mcast_qp_attach: c_int,
    pub(super) max_ah: c_int,
    pub(super) max_fmr: c_int,
    pub(super) max_map_per_fmr: c_int,
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    pub(super) max_srq_sge: c_int,
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

/// `struct ibv_port_attr`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PortAttr {
    pub(super) state: c_int,
    pub(super) max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    pub(super) max_vl_num: u8,
    pub(super) sm_sl: u8,
    pub(super) subnet_timeout: u8,
    pub(super) init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    pub(super) port_cap_flags2: u16,
}

/// `struct ibv_gid_entry`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GidEntry {
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u32,
    pub(super) port_num: u32,
    pub(super) gid_type: u32,
    pub(super) ndev_ifindex: u32,
}

/// `struct ibv_mr`
#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// `struct ibv_mw`
#[repr(C)]
pub(super) struct Mw {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) rkey: u32,
    pub(super) handle: u32,
    pub(super) kind: c_int,
}

/// `struct ibv_comp_channel`
#[repr(C)]
pub(super) struct CompChannel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

/// The beginning of `struct ibv_qp`.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut Pd,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

/// `struct ibv_qp_cap`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

/// `struct ibv_qp_init_attr`
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

/// `struct ibv_global_route`, with the alignment of a GID of 64-bit words.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct GlobalRoute {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

/// `struct ibv_ah_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

/// `struct ibv_qp_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// `struct ibv_srq_attr`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct SrqAttr {
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

/// `struct ibv_srq_init_attr`
#[repr(C)]
pub(super) struct SrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) attr: SrqAttr,
}

/// `struct ibv_recv_wr`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: MaybeUninit<*mut RecvWr>,
    pub(super) sg_list: *mut super::Piece,
    pub(super) num_sge: c_int,
}

/// `struct ibv_send_wr`
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: MaybeUninit<*mut SendWr>,
    pub(super) sg_list: *mut super::Piece,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    /// An immediate in network byte order, or a key to invalidate.
    pub(super) imm_or_key: u32,
    pub(super) wr: SendTarget,
    pub(super) qp_type: MaybeUninit<u64>,
    pub(super) bind_mw: MaybeUninit<BindMw>,
}

/// The member `wr` of `struct ibv_send_wr`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) union SendTarget {
    pub(super) rdma: Rdma,
    pub(super) atomic: Atomic,
    pub(super) ud: Ud,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Rdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Atomic {
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) rkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Ud {
    pub(super) ah: *mut Ah,
    pub(super) remote_qpn: u32,
    pub(super) remote_qkey: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct BindMw {
    pub(super) mw: *mut Mw,
    pub(super) rkey: u32,
    pub(super) mr: *mut Mr,
    pub(super) addr: u64,
    pub(super) length: u64,
    pub(super) mw_access_flags: c_uint,
}

/// `struct ibv_async_event`
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct AsyncEvent {
    /// A pointer, or a port number in the first bytes.
    pub(super) element: u64,
    pub(super) event_type: c_uint,
}

/// `IBV_PORT_ACTIVE`, `IBV_LINK_LAYER_ETHERNET`.
pub(super) const PORT_ACTIVE: c_int = 4;
pub(super) const LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_MW_TYPE_2`
pub(super) const MW_TYPE_2: c_int = 2;
/// `IBV_SRQ_LIMIT`
pub(super) const SRQ_LIMIT: c_int = 2;

/// `enum ibv_qp_attr_mask`
pub(super) mod mask {
    use std::ffi::c_int;

    pub(crate) const STATE: c_int = 1;
    pub(crate) const CUR_STATE: c_int = 1 << 1;
    pub(crate) const EN_SQD_ASYNC_NOTIFY: c_int = 1 << 2;
    pub(crate) const ACCESS_FLAGS: c_int = 1 << 3;
    pub(crate) const PKEY_INDEX: c_int = 1 << 4;
    pub(crate) const PORT: c_int = 1 << 5;
    pub(crate) const QKEY: c_int = 1 << 6;
    pub(crate) const AV: c_int = 1 << 7;
    pub(crate) const PATH_MTU: c_int = 1 << 8;
    pub(crate) const TIMEOUT: c_int = 1 << 9;
    pub(crate) const RETRY_CNT: c_int = 1 << 10;
    pub(crate) const RNR_RETRY: c_int = 1 << 11;
    pub(crate) const RQ_PSN: c_int = 1 << 12;
    pub(crate) const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    pub(crate) const MIN_RNR_TIMER: c_int = 1 << 15;
    pub(crate) const SQ_PSN: c_int = 1 << 16;
    pub(crate) const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    pub(crate) const DEST_QPN: c_int = 1 << 20;
    /// All attributes that are queried.
    pub(crate) const ALL: c_int = (1 << 21) - 1;
}

const _: () = {
    assert!(offset_of!(Context, ops) == 8);
    assert!(offset_of!(Context, cmd_fd) == 264);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Context, num_comp_vectors) == 272);
    assert!(offset_of!(ContextOps, alloc_mw) == 56);
    assert!(offset_of!(ContextOps, dealloc_mw) == 72);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, req_notify_cq) == 96);
    assert!(offset_of!(ContextOps, post_srq_recv) == 160);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(ContextOps, post_recv) == 208);
    assert!(size_of::<DeviceAttr>() == 232);
    assert!(offset_of!(DeviceAttr, max_qp) == 108);
    assert!(offset_of!(DeviceAttr, device_cap_flags) == 116);
    assert!(offset_of!(DeviceAttr, max_sge) == 120);
    assert!(offset_of!(DeviceAttr, max_cqe) == 132);
    assert!(offset_of!(DeviceAttr, max_qp_rd_atom) == 144);
    assert!(offset_of!(DeviceAttr, max_qp_init_rd_atom) == 156);
    assert!(offset_of!(DeviceAttr, atomic_cap) == 164);
    assert!(offset_of!(DeviceAttr, max_mw) == 176);
    assert!(offset_of!(DeviceAttr, max_ah) == 200);
    assert!(offset_of!(DeviceAttr, max_srq) == 212);
    assert!(offset_of!(DeviceAttr, max_srq_sge) == 220);
    assert!(offset_of!(DeviceAttr, max_pkeys) == 224);
    assert!(offset_of!(DeviceAttr, phys_port_cnt) == 227);
    assert!(size_of::<PortAttr>() == 52);
    assert!(offset_of!(PortAttr, pkey_tbl_len) == 32);
    assert!(offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<GidEntry>() == 32);
    assert!(size_of::<Mr>() == 48);
    assert!(offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(size_of::<Mw>() == 32);
    assert!(offset_of!(Mw, rkey) == 16 && offset_of!(Mw, kind) == 24);
    assert!(size_of::<CompChannel>() == 16 && offset_of!(CompChannel, fd) == 8);
    assert!(offset_of!(Qp, handle) == 48 && offset_of!(Qp, qp_num) == 52);
    assert!(size_of::<QpInitAttr>() == 64);
    assert!(offset_of!(QpInitAttr, cap) == 32 && offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<GlobalRoute>() == 24);
    assert!(size_of::<AhAttr>() == 32 && offset_of!(AhAttr, dlid) == 24);
    assert!(size_of::<QpAttr>() == 144);
    assert!(offset_of!(QpAttr, cap) == 36 && offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, alt_ah_attr) == 88 && offset_of!(QpAttr, pkey_index) == 120);
    assert!(offset_of!(QpAttr, max_rd_atomic) == 126 && offset_of!(QpAttr, port_num) == 129);
    assert!(offset_of!(QpAttr, timeout) == 130 && offset_of!(QpAttr, rate_limit) == 136);
    assert!(size_of::<SrqAttr>() == 12 && size_of::<SrqInitAttr>() == 24);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<SendWr>() == 128);
    assert!(offset_of!(SendWr, sg_list) == 16 && offset_of!(SendWr, opcode) == 28);
    assert!(offset_of!(SendWr, imm_or_key) == 36 && offset_of!(SendWr, wr) == 40);
    assert!(offset_of!(Rdma, rkey) == 8 && offset_of!(Ud, remote_qpn) == 8);
    assert!(offset_of!(Atomic, compare_add) == 8 && offset_of!(Atomic, rkey) == 24);
    assert!(offset_of!(SendWr, qp_type) == 72 && offset_of!(SendWr, bind_mw) == 80);
    assert!(offset_of!(BindMw, mr) == 16 && offset_of!(BindMw, mw_access_flags) == 40);
    assert!(size_of::<AsyncEvent>() == 16 && offset_of!(AsyncEvent, event_type) == 8);
};
