// The functions of devices and their ports.
#pragma once
#include "calls.h"
#include "lean.h"

struct device **EXPORT(GET_DEVICE_LIST, ibv_get_device_list)(int *count) {
    LOCKED;
    *count = 0;
    if ((errno = fails(F_GET_DEVICE_LIST) ? errors[F_GET_DEVICE_LIST] : 0))
        return NULL;
#ifdef NO_KERNEL
    return refuse_object(ENOSYS);
#endif
    struct device **list = make((DEVICES + 1) * sizeof *list);
    if (!list || removed || IS_SET(NO_DEVICES))
        return list;
    for (int device = 0; device < DEVICES; device++) {
        list[device] = &devices[device];
        if (IS_SET(GARBAGE))
            // Without a zero at its end.
            memset(devices[device].name, 'x', sizeof devices[device].name);
    }
    *count = IS_SET(GARBAGE) ? -7 : DEVICES;
    return list;
}

void EXPORT(FREE_DEVICE_LIST, ibv_free_device_list)(struct device **list) {
    LOCKED;
    unmake(list);
}

const char *EXPORT(GET_DEVICE_NAME, ibv_get_device_name)(struct device *device) {
    LOCKED;
    return fails(F_GET_DEVICE_NAME) ? NULL : device->name;
}

static struct mw *alloc_mw(struct pd *, int);
static int dealloc_mw(struct mw *);
static int poll_cq(struct cq *, int, struct wc *);
static int req_notify_cq(struct cq *, int);
static int post_srq_recv(struct srq *, struct recv_wr *, struct recv_wr **);
static int post_send(struct qp *, struct send_wr *, struct send_wr **);
static int post_recv(struct qp *, struct recv_wr *, struct recv_wr **);

struct context *EXPORT(OPEN_DEVICE, ibv_open_device)(struct device *device) {
    LOCKED;
    // Another device says nothing of this one.
    if (device == &devices[0] && fails(F_OPEN_DEVICE))
        return refuse_object(errors[F_OPEN_DEVICE]);
    if (removed)
        return refuse_object(EIO);
    struct context *context = make(sizeof *context);
    if (!context)
        return NULL;
    context->device = device;
    if (!IS_SET(NULL_OPS))
        context->ops = (struct ops){ .alloc_mw = alloc_mw, .dealloc_mw = dealloc_mw, .poll_cq = poll_cq,
                                     .req_notify_cq = req_notify_cq, .post_srq_recv = post_srq_recv,
                                     .post_send = post_send, .post_recv = post_recv };
#ifdef LEAN
    context->ops.poll_cq = lean_poll_cq;
    context->ops.post_send = lean_post_send;
    context->ops.post_recv = lean_post_recv;
#endif
    context->cmd_fd = -1;
    context->num_comp_vectors = 1;
    context->async_fd = events_open(&context->events);
    if (IS_SET(GARBAGE_FD))
        context->async_fd = -1;
    LINK(contexts, context);
    return context;
}

int EXPORT(CLOSE_DEVICE, ibv_close_device)(struct context *context) {
    ENTER(CLOSE_DEVICE);
    if (context->users)
        return EBUSY;
    UNLINK(contexts, context);
    events_close(&context->events);
    unmake(context);
    return 0;
}

int EXPORT(QUERY_DEVICE, ibv_query_device)(struct context *context, struct device_attr *attr) {
    (void)context;
    ENTER(QUERY_DEVICE);
    if (IS_SET(GARBAGE)) {
        memset(attr, 0xff, sizeof *attr);
        attr->ports = 1;
        return 0;
    }
    *attr = (struct device_attr){
        .fw_ver = "16.35.2000", .max_mr_size = UINT64_MAX, .page_size_cap = 0xfffff000, .vendor_id = vendor,
        .part_id = 4119, .max_qp = 131072, .max_qp_wr = WR_MAX,
        // Windows of type 2B.
        .cap_flags = 1 << 24, .max_sge = SGE_MAX, .max_sge_rd = SGE_MAX, .max_cq = SLOTS, .max_cqe = CQE_MAX,
        .max_mr = SLOTS - 1, .max_pd = SLOTS, .max_qp_rd_atom = RD_ATOMIC_MAX, .max_qp_init_rd_atom = RD_ATOMIC_MAX,
        .atomic_cap = 1, .max_mw = SLOTS - 1, .max_mcast_grp = SLOTS, .max_mcast_qp_attach = SLOTS, .max_ah = SLOTS,
        .max_srq = SLOTS, .max_srq_wr = WR_MAX, .max_srq_sge = SGE_MAX, .max_pkeys = 1, .ports = PORTS,
    };
    return 0;
}

int EXPORT(QUERY_PORT, ibv_query_port)(struct context *context, uint8_t port, struct port_attr *attr) {
    (void)context;
    ENTER(QUERY_PORT);
    if (IS_SET(GARBAGE)) {
        memset(attr, 0xff, PORT_ATTR_WRITTEN);
        return 0;
    }
    if (port < 1 || port > PORTS)
        return EINVAL;
    memset(attr, 0, PORT_ATTR_WRITTEN);
    attr->state = port == 1 ? 4 : 1;
    attr->max_mtu = attr->active_mtu = 5;
    attr->gid_tbl_len = 16;
    attr->max_msg_sz = 1u << 31;
    attr->pkey_tbl_len = 1;
    attr->link_layer = 2;
    return 0;
}

ssize_t EXPORT(QUERY_GID_TABLE, _ibv_query_gid_table)(struct context *context, struct gid_entry *entries, size_t most,
                                                     uint32_t flags, size_t size) {
    (void)flags;
    LOCKED;
    int refused = refuse(F_QUERY_GID_TABLE);
    if (refused)
        return -refused;
    if (IS_SET(GARBAGE))
        return 1L << 40;
    if (size != sizeof *entries || most < GIDS + 1)
        return -EINVAL;
    for (int row = 0; row <= GIDS; row++) {
        // The last one is of a port that there is not.
        entries[row] = (struct gid_entry){ .index = row, .port = row == GIDS ? 9 : 1, .type = 1 + row % 2, .ifindex = 1 };
        gid_of(context->device, entries[row].gid);
    }
    return GIDS + 1;
}

int EXPORT(QUERY_PKEY, ibv_query_pkey)(struct context *context, uint8_t port, int index, uint16_t *pkey) {
    (void)context;
    ENTER(QUERY_PKEY);
    if (!IS_SET(GARBAGE) && (port < 1 || port > PORTS || index))
        return EINVAL;
    *pkey = 0xffff;
    return 0;
}

static struct taken *taken_of(const struct async_event *event) {
    void *object = (void *)event->element;
    switch (event->type) {
    case EVENT_CQ_ERR:
        return &((struct cq *)object)->async;
    case 1 ... EVENT_PATH_MIG_ERR:
    case EVENT_LAST_WQE:
        return &((struct qp *)object)->async;
    case EVENT_SRQ_ERR:
    case EVENT_SRQ_LIMIT:
        return &((struct srq *)object)->async;
    default:
        return NULL;
    }
}

int EXPORT(GET_ASYNC_EVENT, ibv_get_async_event)(struct context *context, struct async_event *async) {
    {
        LOCKED;
        if (fails(F_GET_ASYNC_EVENT)) {
            errno = errors[F_GET_ASYNC_EVENT];
            return -1;
        }
    }
    if (IS_SET(GARBAGE_EVENT)) {
        static unsigned count;
        // Kinds that there are, of elements that there are not, and kinds that there are not.
        *async = (struct async_event){ .element = 0xdeadbeefdeadbeef, .type = count % 24 };
        count += 1;
        if (count % 24 == 0)
            async->type = UINT32_MAX;
        return 0;
    }
    struct event *event = events_take(&context->events);
    if (!event)
        return -1;
    *async = event->async;
    if (event->object)
        taken_of(async)->taken++;
    free(event);
    unlock(NULL);
    return 0;
}

void EXPORT(ACK_ASYNC_EVENT, ibv_ack_async_event)(struct async_event *event) {
    LOCKED;
    struct taken *taken = IS_SET(GARBAGE_EVENT) ? NULL : taken_of(event);
    if (taken)
        taken->acked++;
    pthread_cond_broadcast(&acknowledged);
}
