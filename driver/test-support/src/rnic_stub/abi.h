// What libibverbs and its callers share in memory, as its ABI fixes it on 64-bit Linux, written without its headers.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct context;
struct pd;
struct cq;
struct qp;
struct srq;
struct ah;

struct device { char name[64]; };

struct device_attr {
    char fw_ver[64];
    uint64_t node_guid, sys_image_guid, max_mr_size, page_size_cap;
    uint32_t vendor_id, part_id, hw_ver;
    int max_qp, max_qp_wr;
    unsigned cap_flags;
    int max_sge, max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom, max_ee_rd_atom, max_res_rd_atom,
        max_qp_init_rd_atom, max_ee_init_rd_atom, atomic_cap, max_ee, max_rdd, max_mw, max_raw_ipv6_qp,
        max_raw_ethy_qp, max_mcast_grp, max_mcast_qp_attach, max_total_mcast_qp_attach, max_ah, max_fmr,
        max_map_per_fmr, max_srq, max_srq_wr, max_srq_sge;
    uint16_t max_pkeys;
    uint8_t ack_delay, ports;
};

struct port_attr {
    int state, max_mtu, active_mtu, gid_tbl_len;
    uint32_t cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    uint16_t pkey_tbl_len, lid, sm_lid;
    uint8_t lmc, max_vl_num, sm_sl, subnet_timeout, init_type_reply, active_width, active_speed, phys_state, link_layer,
        flags;
    uint16_t cap_flags2;
};
// The function of that name has always written so many.
#define PORT_ATTR_WRITTEN 48

struct gid_entry {
    uint8_t gid[16];
    uint32_t index, port, type, ifindex;
};

struct qp_cap { uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data; };

struct qp_init_attr {
    void *qp_context;
    struct cq *send_cq, *recv_cq;
    struct srq *srq;
    struct qp_cap cap;
    unsigned qp_type;
    int sq_sig_all;
};

struct global_route {
    _Alignas(8) uint8_t dgid[16];
    uint32_t flow_label;
    uint8_t sgid_index, hop_limit, traffic_class;
};

struct ah_attr {
    struct global_route grh;
    uint16_t dlid;
    uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct qp_attr {
    unsigned qp_state, cur_qp_state, path_mtu, path_mig_state;
    uint32_t qkey, rq_psn, sq_psn, dest_qp_num;
    unsigned access;
    struct qp_cap cap;
    struct ah_attr ah, alt_ah;
    uint16_t pkey_index, alt_pkey_index;
    uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout,
        retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    uint32_t rate_limit;
};

struct srq_attr { uint32_t max_wr, max_sge, srq_limit; };

struct srq_init_attr {
    void *srq_context;
    struct srq_attr attr;
};

struct sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct recv_wr {
    uint64_t wr_id;
    struct recv_wr *next;
    struct sge *sg_list;
    int num_sge;
};

struct mr {
    struct context *context;
    struct pd *pd;
    void *addr;
    size_t length;
    uint32_t handle, lkey, rkey;
};

struct mw {
    struct context *context;
    struct pd *pd;
    uint32_t rkey, handle;
    int type;
};

struct bind {
    struct mw *mw;
    uint32_t rkey;
    struct mr *mr;
    uint64_t addr, length;
    unsigned access;
};

struct send_wr {
    uint64_t wr_id;
    struct send_wr *next;
    struct sge *sg_list;
    int num_sge;
    unsigned opcode, flags;
    uint32_t imm_or_key;
    union {
        struct { uint64_t addr; uint32_t rkey; } rdma;
        struct { uint64_t addr, compare_add, swap; uint32_t rkey; } atomic;
        struct { struct ah *ah; uint32_t qpn, qkey; } ud;
    } wr;
    uint64_t xrc;
    struct bind bind;
};

struct wc {
    uint64_t wr_id;
    uint32_t status, opcode, vendor_err, byte_len, imm_or_key, qp_num, src_qp, flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

struct async_event {
    uint64_t element;
    unsigned type;
};

struct channel {
    struct context *context;
    int fd, refcnt;
};

// What is called by pointer has a name here.
struct ops {
    void *to_dereg_mr[7];
    struct mw *(*alloc_mw)(struct pd *, int);
    void *bind_mw;
    int (*dealloc_mw)(struct mw *);
    void *create_cq;
    int (*poll_cq)(struct cq *, int, struct wc *);
    int (*req_notify_cq)(struct cq *, int);
    void *cq_event_to_destroy_srq[7];
    int (*post_srq_recv)(struct srq *, struct recv_wr *, struct recv_wr **);
    void *create_to_destroy_qp[4];
    int (*post_send)(struct qp *, struct send_wr *, struct send_wr **);
    int (*post_recv)(struct qp *, struct recv_wr *, struct recv_wr **);
    void *create_ah_to_async_event[5];
};

enum { RESET, INIT, RTR, RTS, SQD, SQE, ERR };
enum { RC = 2, UC = 3, UD = 4 };
enum { LOCAL_WRITE = 1, REMOTE_WRITE = 2, REMOTE_READ = 4, REMOTE_ATOMIC = 8, MW_BIND = 16 };
enum { WRITE, WRITE_WITH_IMM, SEND, SEND_WITH_IMM, READ, COMPARE_SWAP, FETCH_ADD, LOCAL_INV, BIND_MW, SEND_WITH_INV };
enum { FENCE = 1, SIGNALED = 2, SOLICITED = 4, INLINE = 8 };
enum { WC_GRH = 1, WC_IMM = 2, WC_INV = 8 };
enum {
    OK = 0, LOC_LEN = 1, LOC_QP_OP = 2, LOC_PROT = 4, WR_FLUSH = 5, MW_BIND_FAILED = 6, REM_INV_REQ = 9, REM_ACCESS = 10,
    REM_OP = 11, RETRY_EXC = 12, RNR_RETRY_EXC = 13,
};
enum {
    EVENT_CQ_ERR = 0, EVENT_QP_REQ_ERR = 2, EVENT_QP_ACCESS_ERR = 3, EVENT_COMM_EST = 4, EVENT_SQ_DRAINED = 5,
    EVENT_PATH_MIG_ERR = 7, EVENT_DEVICE_FATAL = 8, EVENT_SRQ_ERR = 14, EVENT_SRQ_LIMIT = 15, EVENT_LAST_WQE = 16,
};
enum {
    MASK_STATE = 1, MASK_CUR_STATE = 1 << 1, MASK_SQD_NOTIFY = 1 << 2, MASK_ACCESS = 1 << 3, MASK_PKEY = 1 << 4,
    MASK_PORT = 1 << 5, MASK_QKEY = 1 << 6, MASK_AV = 1 << 7, MASK_MTU = 1 << 8, MASK_TIMEOUT = 1 << 9,
    MASK_RETRY = 1 << 10, MASK_RNR_RETRY = 1 << 11, MASK_RQ_PSN = 1 << 12, MASK_RD_ATOMIC = 1 << 13,
    MASK_MIN_RNR = 1 << 15, MASK_SQ_PSN = 1 << 16, MASK_DEST_RD_ATOMIC = 1 << 17, MASK_DEST_QPN = 1 << 20,
};

#define AT(type, field, offset) _Static_assert(offsetof(struct type, field) == (offset), #type "." #field)
#define SIZE(type, size) _Static_assert(sizeof(struct type) == (size), #type)
SIZE(device_attr, 232);
AT(device_attr, vendor_id, 96);
AT(device_attr, max_qp, 108);
AT(device_attr, cap_flags, 116);
AT(device_attr, max_qp_rd_atom, 144);
AT(device_attr, atomic_cap, 164);
AT(device_attr, max_srq_sge, 220);
AT(device_attr, ports, 227);
SIZE(port_attr, 52);
AT(port_attr, pkey_tbl_len, 32);
AT(port_attr, link_layer, 46);
SIZE(gid_entry, 32);
SIZE(qp_init_attr, 64);
AT(qp_init_attr, cap, 32);
AT(qp_init_attr, qp_type, 52);
SIZE(global_route, 24);
SIZE(ah_attr, 32);
AT(ah_attr, dlid, 24);
SIZE(qp_attr, 144);
AT(qp_attr, cap, 36);
AT(qp_attr, ah, 56);
AT(qp_attr, alt_ah, 88);
AT(qp_attr, pkey_index, 120);
AT(qp_attr, max_rd_atomic, 126);
AT(qp_attr, port_num, 129);
AT(qp_attr, rate_limit, 136);
SIZE(srq_init_attr, 24);
SIZE(sge, 16);
SIZE(recv_wr, 32);
SIZE(mr, 48);
AT(mr, lkey, 36);
AT(mr, rkey, 40);
SIZE(mw, 32);
AT(mw, rkey, 16);
SIZE(send_wr, 128);
AT(send_wr, opcode, 28);
AT(send_wr, imm_or_key, 36);
AT(send_wr, wr, 40);
AT(send_wr, bind, 80);
AT(bind, mr, 16);
AT(bind, access, 40);
SIZE(wc, 48);
AT(wc, imm_or_key, 24);
AT(wc, flags, 36);
SIZE(async_event, 16);
SIZE(channel, 16);
SIZE(ops, 256);
AT(ops, alloc_mw, 56);
AT(ops, poll_cq, 88);
AT(ops, req_notify_cq, 96);
AT(ops, post_srq_recv, 160);
AT(ops, post_send, 200);
AT(ops, post_recv, 208);
