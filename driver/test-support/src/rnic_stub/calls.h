// What each function begins with: whether it is there, and whether it fails.
#pragma once
#include "fabric.h"

// Each function: its name in the settings, its error, and what a caller knows it by.
#define FUNCTIONS(X)                                                                                                   \
    X(GET_DEVICE_LIST, EPERM, "ibv_get_device_list")                                                                   \
    X(FREE_DEVICE_LIST, 0, "ibv_free_device_list")                                                                     \
    X(GET_DEVICE_NAME, EIO, "ibv_get_device_name")                                                                     \
    X(OPEN_DEVICE, EACCES, "ibv_open_device")                                                                          \
    X(CLOSE_DEVICE, EBUSY, "ibv_close_device")                                                                         \
    X(QUERY_DEVICE, EIO, "ibv_query_device")                                                                           \
    X(QUERY_PORT, ENODEV, "ibv_query_port")                                                                            \
    X(QUERY_GID_TABLE, EOPNOTSUPP, "_ibv_query_gid_table")                                                             \
    X(QUERY_PKEY, EIO, "ibv_query_pkey")                                                                               \
    X(GET_ASYNC_EVENT, EIO, "ibv_get_async_event")                                                                     \
    X(ACK_ASYNC_EVENT, 0, "ibv_ack_async_event")                                                                       \
    X(ALLOC_PD, ENOSPC, "ibv_alloc_pd")                                                                                \
    X(DEALLOC_PD, EBUSY, "ibv_dealloc_pd")                                                                             \
    X(REG_MR_IOVA2, EFAULT, "ibv_reg_mr_iova2")                                                                        \
    X(REG_DMABUF_MR, EOPNOTSUPP, "ibv_reg_dmabuf_mr")                                                                  \
    X(DEREG_MR, EBUSY, "ibv_dereg_mr")                                                                                 \
    X(CREATE_COMP_CHANNEL, EMFILE, "ibv_create_comp_channel")                                                          \
    X(DESTROY_COMP_CHANNEL, EBUSY, "ibv_destroy_comp_channel")                                                         \
    X(GET_CQ_EVENT, EIO, "ibv_get_cq_event")                                                                           \
    X(ACK_CQ_EVENTS, 0, "ibv_ack_cq_events")                                                                           \
    X(CREATE_CQ, ENOMEM, "ibv_create_cq")                                                                              \
    X(DESTROY_CQ, EBUSY, "ibv_destroy_cq")                                                                             \
    X(CREATE_QP, ENOSPC, "ibv_create_qp")                                                                              \
    X(MODIFY_QP, ETIMEDOUT, "ibv_modify_qp")                                                                           \
    X(QUERY_QP, EIO, "ibv_query_qp")                                                                                   \
    X(DESTROY_QP, EBUSY, "ibv_destroy_qp")                                                                             \
    X(CREATE_SRQ, ENOSPC, "ibv_create_srq")                                                                            \
    X(MODIFY_SRQ, EINVAL, "ibv_modify_srq")                                                                            \
    X(QUERY_SRQ, EIO, "ibv_query_srq")                                                                                 \
    X(DESTROY_SRQ, EBUSY, "ibv_destroy_srq")                                                                           \
    X(CREATE_AH, EHOSTUNREACH, "ibv_create_ah")                                                                        \
    X(DESTROY_AH, EBUSY, "ibv_destroy_ah")                                                                             \
    X(ATTACH_MCAST, ENOSPC, "ibv_attach_mcast")                                                                        \
    X(DETACH_MCAST, EIO, "ibv_detach_mcast")                                                                           \
    X(ALLOC_MW, ENOSPC, "ibv_alloc_mw")                                                                                \
    X(DEALLOC_MW, EBUSY, "ibv_dealloc_mw")                                                                             \
    X(POLL_CQ, EIO, "ibv_poll_cq")                                                                                     \
    X(REQ_NOTIFY_CQ, EIO, "ibv_req_notify_cq")                                                                         \
    X(POST_SRQ_RECV, EIO, "ibv_post_srq_recv")                                                                         \
    X(POST_SEND, EIO, "ibv_post_send")                                                                                 \
    X(POST_RECV, EIO, "ibv_post_recv")

// 1 for a setting that was given with -D, otherwise 0.
#define PLACE_1 0,
#define IS_SET(setting) IS_SET_(setting)
#define IS_SET_(value) IS_SET__(PLACE_##value)
#define IS_SET__(first) IS_SET___(first 1, 0)
#define IS_SET___(first, second, ...) second

#define X(name, error, call) F_##name,
enum { FUNCTIONS(X) FUNCTIONS_IN_ALL };
#undef X
#define X(name, error, call) error,
static const int errors[] = { FUNCTIONS(X) };
#undef X
#define X(name, error, call) call,
static const char *const calls[] = { FUNCTIONS(X) };
#undef X
// -1: it always fails; n: the n-th call from now on fails.
#define X(name, error, call) -IS_SET(FAIL_##name),
static int failing[] = { FUNCTIONS(X) };
#undef X

// The name of a function, or another if it is to be missing.
#define EXPORT(name, symbol) EXPORT_(IS_SET(MISSING_##name), symbol)
#define EXPORT_(missing, symbol) EXPORT__(missing, symbol)
#define EXPORT__(missing, symbol) EXPORT_##missing(symbol)
#define EXPORT_0(symbol) symbol
#define EXPORT_1(symbol) missing_##symbol

static bool fails(int function) {
    if (failing[function] > 0)
        return --failing[function] == 0;
    return failing[function] < 0;
}

static int refuse(int function) {
    return fails(function) ? errors[function] : removed ? EIO : 0;
}

// The start of functions that return an error's number.
#define ENTER(name)                                                                                                    \
    LOCKED;                                                                                                            \
    int refused = refuse(F_##name);                                                                                    \
    if (refused)                                                                                                       \
    return refused
// Of those that return an object, or errno.
#define ENTER_MAKING(name)                                                                                             \
    LOCKED;                                                                                                            \
    if ((errno = refuse(F_##name)))                                                                                    \
    return NULL

static void *refuse_object(int error) {
    errno = error;
    return NULL;
}

__attribute__((constructor)) static void start(void) {
#ifdef STATUS
    forced_status = STATUS;
#endif
}
