// A libibverbs for tests: two devices in memory, whose queue pairs reach each other. Written without the headers of
// rdma-core, after its ABI. What it does wrong is chosen when it is compiled, or by `stub_...` while it runs:
//
//   NO_DEVICES, NO_KERNEL     there are none
//   MISSING_<FUNCTION>        it lacks a function
//   FAIL_<FUNCTION>           a function always fails
//   NULL_OPS                  the provider has no functions
//   GARBAGE                   names, limits and counts that can't be
//   GARBAGE_FD                descriptors of -1
//   GARBAGE_POLL              counts and completions that can't be
//   GARBAGE_EVENT             events that can't be
//   STATUS=<n>                every send completes with that status
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

// Devices

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
        .fw_ver = "16.35.2000", .max_mr_size = UINT64_MAX, .page_size_cap = 0xfffff000, .vendor_id = 0x02c9,
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

// Protection domains, regions, windows, addresses

struct pd *EXPORT(ALLOC_PD, ibv_alloc_pd)(struct context *context) {
    ENTER_MAKING(ALLOC_PD);
    struct pd *pd = make(sizeof *pd);
    if (!pd)
        return NULL;
    pd->context = context;
    context->users++;
    return pd;
}

int EXPORT(DEALLOC_PD, ibv_dealloc_pd)(struct pd *pd) {
    ENTER(DEALLOC_PD);
    if (pd->users)
        return EBUSY;
    pd->context->users--;
    unmake(pd);
    return 0;
}

struct mr *EXPORT(REG_MR_IOVA2, ibv_reg_mr_iova2)(struct pd *pd, void *addr, size_t length, uint64_t iova,
                                                  unsigned access) {
    ENTER_MAKING(REG_MR_IOVA2);
    bool writes = access & (REMOTE_WRITE | REMOTE_ATOMIC);
    if (access & ~31u || (writes && !(access & LOCAL_WRITE)) || !length || iova + length < iova)
        return refuse_object(EINVAL);
    uint32_t index = free_key();
    if (!index)
        return refuse_object(ENOSPC);
    struct region *region = make(sizeof *region);
    if (!region)
        return NULL;
    static uint8_t generation;
    uint32_t key = index << 8 | ++generation;
    region->mr = (struct mr){ pd->context, pd, addr, length, index, key, key | RKEY };
    region->access = access;
    region->iova = iova;
    keys[index].region = region;
    pd->users++;
    return &region->mr;
}

int EXPORT(DEREG_MR, ibv_dereg_mr)(struct mr *mr) {
    struct region *region = (struct region *)mr;
    ENTER(DEREG_MR);
    if (region->windows)
        return EBUSY;
    keys[mr->lkey >> 8].region = NULL;
    mr->pd->users--;
    unmake(region);
    return 0;
}

static struct mw *alloc_mw(struct pd *pd, int type) {
    ENTER_MAKING(ALLOC_MW);
    if (type != 2)
        return refuse_object(EINVAL);
    uint32_t index = free_key();
    if (!index)
        return refuse_object(ENOSPC);
    struct window *window = make(sizeof *window);
    if (!window)
        return NULL;
    window->mw = (struct mw){ pd->context, pd, RKEY | index << 8, index, type };
    keys[index].window = window;
    pd->users++;
    return &window->mw;
}

static int dealloc_mw(struct mw *mw) {
    struct window *window = (struct window *)mw;
    ENTER(DEALLOC_MW);
    if (window->region)
        window->region->windows--;
    keys[mw->handle].window = NULL;
    mw->pd->users--;
    unmake(window);
    return 0;
}

static bool is_address(const struct ah_attr *attr) {
    return attr->is_global && attr->port_num == 1 && attr->grh.sgid_index < GIDS && attr->grh.flow_label < 1 << 20 &&
           attr->sl < 8;
}

struct ah *EXPORT(CREATE_AH, ibv_create_ah)(struct pd *pd, struct ah_attr *attr) {
    ENTER_MAKING(CREATE_AH);
    if (!is_address(attr))
        return refuse_object(EINVAL);
    struct ah *ah = make(sizeof *ah);
    if (!ah)
        return NULL;
    *ah = (struct ah){ .context = pd->context, .pd = pd, .attr = *attr };
    pd->users++;
    return ah;
}

int EXPORT(DESTROY_AH, ibv_destroy_ah)(struct ah *ah) {
    ENTER(DESTROY_AH);
    ah->pd->users--;
    unmake(ah);
    return 0;
}

// Completions

struct channel *EXPORT(CREATE_COMP_CHANNEL, ibv_create_comp_channel)(struct context *context) {
    ENTER_MAKING(CREATE_COMP_CHANNEL);
    struct completion_channel *channel = make(sizeof *channel);
    if (!channel)
        return NULL;
    channel->channel.context = context;
    channel->channel.fd = events_open(&channel->events);
    if (IS_SET(GARBAGE_FD))
        channel->channel.fd = -1;
    context->users++;
    return &channel->channel;
}

int EXPORT(DESTROY_COMP_CHANNEL, ibv_destroy_comp_channel)(struct channel *raw) {
    struct completion_channel *channel = (struct completion_channel *)raw;
    ENTER(DESTROY_COMP_CHANNEL);
    if (channel->users)
        return EBUSY;
    raw->context->users--;
    events_close(&channel->events);
    unmake(channel);
    return 0;
}

int EXPORT(GET_CQ_EVENT, ibv_get_cq_event)(struct channel *raw, struct cq **cq, void **cq_context) {
    struct completion_channel *channel = (struct completion_channel *)raw;
    {
        LOCKED;
        if (fails(F_GET_CQ_EVENT)) {
            errno = errors[F_GET_CQ_EVENT];
            return -1;
        }
    }
    if (IS_SET(GARBAGE_EVENT)) {
        *cq = (struct cq *)0xdeadbeef;
        *cq_context = (void *)0xfeedfacefeedface;
        return 0;
    }
    struct event *event = events_take(&channel->events);
    if (!event)
        return -1;
    *cq = event->object;
    *cq_context = (*cq)->cq_context;
    (*cq)->events.taken++;
    free(event);
    unlock(NULL);
    return 0;
}

void EXPORT(ACK_CQ_EVENTS, ibv_ack_cq_events)(struct cq *cq, unsigned count) {
    LOCKED;
    if (IS_SET(GARBAGE_EVENT))
        return;
    cq->events.acked += count;
    pthread_cond_broadcast(&acknowledged);
}

struct cq *EXPORT(CREATE_CQ, ibv_create_cq)(struct context *context, int cqe, void *cq_context, struct channel *channel,
                                            int vector) {
    ENTER_MAKING(CREATE_CQ);
    if (cqe < 1 || cqe > CQE_MAX || vector)
        return refuse_object(EINVAL);
    struct cqe *ring = calloc(cqe, sizeof *ring);
    struct cq *cq = ring ? make(sizeof *cq) : refuse_object(ENOMEM);
    if (!cq) {
        free(ring);
        return NULL;
    }
    cq->context = context;
    cq->channel = (struct completion_channel *)channel;
    cq->cq_context = cq_context;
    cq->cqe = cqe;
    cq->ring = ring;
    context->users++;
    if (channel)
        cq->channel->users++;
    LINK(cqs, cq);
    return cq;
}

int EXPORT(DESTROY_CQ, ibv_destroy_cq)(struct cq *cq) {
    ENTER(DESTROY_CQ);
    if (cq->users)
        return EBUSY;
    events_forget(&cq->context->events, cq);
    if (cq->channel)
        events_forget(&cq->channel->events, cq);
    if (wait_for_acknowledgement(&cq->async) || wait_for_acknowledgement(&cq->events))
        return EBUSY;
    if (cq->channel)
        cq->channel->users--;
    cq->context->users--;
    UNLINK(cqs, cq);
    free(cq->ring);
    unmake(cq);
    return 0;
}

// Counts that can't be, then a completion with a work request, status, operation, queue pair that can't be.
static int poll_garbage(int room, struct wc *wc) {
    static unsigned count;
    struct wc garbage = { .wr_id = 0xdeadbeefdeadbeef, .qp_num = 0xffffffff };
    switch (count++ % 8) {
    case 0:
        return room + 1;
    case 1:
        return -EIO;
    case 2:
        return INT32_MIN;
    case 3:
        break;
    case 4:
        garbage.status = UINT32_MAX;
        break;
    case 5:
        garbage.opcode = UINT32_MAX;
        break;
    case 6:
        garbage.opcode = 128, garbage.byte_len = UINT32_MAX, garbage.flags = UINT32_MAX;
        break;
    default:
        return 0;
    }
    if (room < 1)
        return 0;
    for (const struct qp *qp = qps[17]; qp; qp = NULL)
        // One that there is, at times.
        garbage.qp_num = count % 16 < 8 ? qp->qp_num : UINT32_MAX;
    *wc = garbage;
    return 1;
}

static int poll_cq(struct cq *cq, int room, struct wc *wc) {
    LOCKED;
    if (fails(F_POLL_CQ))
        return -errors[F_POLL_CQ];
    if (removed)
        return 0;
    if (IS_SET(GARBAGE_POLL))
        return poll_garbage(room, wc);
    int count = 0;
    while (count < room && cq->head < cq->tail) {
        const struct cqe *entry = &cq->ring[cq->head++ % cq->cqe];
        wc[count++] = entry->wc;
        reclaim(entry);
    }
    return count;
}

static int req_notify_cq(struct cq *cq, int solicited_only) {
    ENTER(REQ_NOTIFY_CQ);
    cq->armed = solicited_only && cq->armed != 2 ? 1 : 2;
    return 0;
}

// Shared receive queues

struct srq *EXPORT(CREATE_SRQ, ibv_create_srq)(struct pd *pd, struct srq_init_attr *init) {
    ENTER_MAKING(CREATE_SRQ);
    if (!init->attr.max_wr || init->attr.max_wr > WR_MAX || init->attr.max_sge > SGE_MAX)
        return refuse_object(EINVAL);
    struct srq *srq = make(sizeof *srq);
    if (!srq)
        return NULL;
    srq->context = pd->context;
    srq->srq_context = init->srq_context;
    srq->pd = pd;
    if (receives_make(&srq->receives, init->attr.max_wr, init->attr.max_sge)) {
        unmake(srq);
        return refuse_object(ENOMEM);
    }
    pd->users++;
    LINK(srqs, srq);
    return srq;
}

int EXPORT(MODIFY_SRQ, ibv_modify_srq)(struct srq *srq, struct srq_attr *attr, int mask) {
    ENTER(MODIFY_SRQ);
    if (mask != 2 || attr->srq_limit > srq->receives.cap)
        return EINVAL;
    srq->limit = attr->srq_limit;
    return 0;
}

int EXPORT(QUERY_SRQ, ibv_query_srq)(struct srq *srq, struct srq_attr *attr) {
    ENTER(QUERY_SRQ);
    *attr = (struct srq_attr){ srq->receives.cap, srq->receives.max_sge, srq->limit };
    return 0;
}

int EXPORT(DESTROY_SRQ, ibv_destroy_srq)(struct srq *srq) {
    ENTER(DESTROY_SRQ);
    if (srq->users)
        return EBUSY;
    events_forget(&srq->context->events, srq);
    if (wait_for_acknowledgement(&srq->async))
        return EBUSY;
    srq->pd->users--;
    UNLINK(srqs, srq);
    free(srq->receives.ring);
    unmake(srq);
    return 0;
}

static int post_srq_recv(struct srq *srq, struct recv_wr *wr, struct recv_wr **bad) {
    *bad = wr;
    ENTER(POST_SRQ_RECV);
    for (; wr; wr = wr->next) {
        int error = receives_put(&srq->receives, wr);
        if (error) {
            *bad = wr;
            settle();
            return error;
        }
        changed = true;
    }
    settle();
    return 0;
}

// Queue pairs

struct qp *EXPORT(CREATE_QP, ibv_create_qp)(struct pd *pd, struct qp_init_attr *init) {
    ENTER_MAKING(CREATE_QP);
    const struct qp_cap *cap = &init->cap;
    if (init->qp_type < RC || init->qp_type > UD || !init->send_cq || !init->recv_cq || cap->max_send_wr > WR_MAX ||
        cap->max_recv_wr > WR_MAX || cap->max_send_sge > SGE_MAX || cap->max_recv_sge > SGE_MAX ||
        cap->max_inline_data > INLINE_MAX || (init->srq && (init->qp_type == UC || init->srq->pd != pd)))
        return refuse_object(EINVAL);
    uint32_t tried = 0, qpn = next_qpn;
    while (qps[qpn % SLOTS] && tried++ < SLOTS)
        qpn = (qpn + 1) & 0xffffff;
    struct qp *qp = qpn > 1 && !qps[qpn % SLOTS] ? make(sizeof *qp) : refuse_object(ENOSPC);
    if (!qp)
        return NULL;
    // In steps of more than one: who counts them himself is wrong.
    next_qpn = qpn + 3 < 0xfffff0 ? qpn + 3 : 17;
    qp->context = pd->context;
    qp->qp_context = init->qp_context;
    qp->pd = pd;
    qp->send_cq = init->send_cq;
    qp->recv_cq = init->recv_cq;
    qp->srq = init->srq;
    qp->qp_num = qp->handle = qpn;
    qp->type = init->qp_type;
    qp->cap = *cap;
    if (qp->srq)
        qp->cap.max_recv_wr = qp->cap.max_recv_sge = 0;
    qp->sig_all = init->sq_sig_all;
    size_t pieces = cap->max_send_sge * sizeof(struct sge);
    size_t room = pieces > cap->max_inline_data ? pieces : (cap->max_inline_data + 7) & ~7u;
    qp->send_size = sizeof(struct send) + room;
    qp->sends = calloc(cap->max_send_wr + 1, qp->send_size);
    if (!qp->sends || receives_make(&qp->receives, qp->cap.max_recv_wr, qp->cap.max_recv_sge)) {
        free(qp->sends);
        unmake(qp);
        return refuse_object(ENOMEM);
    }
    init->cap = qp->cap;
    pd->users++;
    qp->send_cq->users++;
    qp->recv_cq->users++;
    if (qp->srq)
        qp->srq->users++;
    return qps[qpn % SLOTS] = qp;
}

enum { CONNECTED = 1 << RC | 1 << UC, ANY = CONNECTED | 1 << UD };

// The moves of queue pairs, the kinds of them, what each needs and what it may have.
static const struct move { int from, to, kinds, needs, may; } moves[] = {
    { RESET, INIT, CONNECTED, MASK_PKEY | MASK_PORT | MASK_ACCESS, 0 },
    { RESET, INIT, 1 << UD, MASK_PKEY | MASK_PORT | MASK_QKEY, 0 },
    { INIT, INIT, CONNECTED, 0, MASK_PKEY | MASK_PORT | MASK_ACCESS },
    { INIT, INIT, 1 << UD, 0, MASK_PKEY | MASK_PORT | MASK_QKEY },
    { INIT, RTR, 1 << RC, MASK_AV | MASK_MTU | MASK_DEST_QPN | MASK_RQ_PSN | MASK_DEST_RD_ATOMIC | MASK_MIN_RNR,
      MASK_ACCESS | MASK_PKEY },
    { INIT, RTR, 1 << UC, MASK_AV | MASK_MTU | MASK_DEST_QPN | MASK_RQ_PSN, MASK_ACCESS | MASK_PKEY },
    { INIT, RTR, 1 << UD, 0, MASK_PKEY | MASK_QKEY },
    { RTR, RTS, 1 << RC, MASK_SQ_PSN | MASK_TIMEOUT | MASK_RETRY | MASK_RNR_RETRY | MASK_RD_ATOMIC,
      MASK_CUR_STATE | MASK_ACCESS | MASK_MIN_RNR },
    { RTR, RTS, 1 << UC, MASK_SQ_PSN, MASK_CUR_STATE | MASK_ACCESS },
    { RTR, RTS, 1 << UD, MASK_SQ_PSN, MASK_CUR_STATE | MASK_QKEY },
    { RTS, RTS, 1 << RC, 0, MASK_CUR_STATE | MASK_ACCESS | MASK_MIN_RNR },
    { RTS, RTS, 1 << UC, 0, MASK_CUR_STATE | MASK_ACCESS },
    { RTS, RTS, 1 << UD, 0, MASK_CUR_STATE | MASK_QKEY },
    { RTS, SQD, ANY, 0, MASK_SQD_NOTIFY },
    { SQD, RTS, 1 << RC, 0, MASK_CUR_STATE | MASK_ACCESS | MASK_MIN_RNR },
    { SQD, RTS, 1 << UC, 0, MASK_CUR_STATE | MASK_ACCESS },
    { SQD, RTS, 1 << UD, 0, MASK_CUR_STATE | MASK_QKEY },
    { SQD, SQD, 1 << RC, 0,
      MASK_PORT | MASK_AV | MASK_TIMEOUT | MASK_RETRY | MASK_RNR_RETRY | MASK_RD_ATOMIC | MASK_DEST_RD_ATOMIC |
          MASK_ACCESS | MASK_PKEY | MASK_MIN_RNR },
    { SQD, SQD, 1 << UC, 0, MASK_AV | MASK_ACCESS | MASK_PKEY },
    { SQD, SQD, 1 << UD, 0, MASK_PKEY | MASK_QKEY },
    { SQE, RTS, 1 << UC, 0, MASK_CUR_STATE | MASK_ACCESS },
    { SQE, RTS, 1 << UD, 0, MASK_CUR_STATE | MASK_QKEY },
};

static bool may_move(const struct qp *qp, int from, int to, int mask) {
    if (to == RESET || to == ERR)
        return (from != RESET || to == RESET) && !(mask & ~(MASK_STATE | MASK_CUR_STATE));
    for (const struct move *move = moves; move < moves + sizeof moves / sizeof *moves; move++)
        if (move->from == from && move->to == to && move->kinds >> qp->type & 1)
            return (mask & move->needs) == move->needs && !(mask & ~(move->needs | move->may | MASK_STATE));
    return false;
}

static bool is_possible(const struct qp_attr *attr, int mask) {
    return !((mask & MASK_PKEY && attr->pkey_index) || (mask & MASK_PORT && (attr->port_num < 1 || attr->port_num > PORTS)) ||
             (mask & MASK_AV && !is_address(&attr->ah)) || (mask & MASK_MTU && (attr->path_mtu < 1 || attr->path_mtu > 5)) ||
             (mask & MASK_TIMEOUT && attr->timeout > 31) || (mask & MASK_MIN_RNR && attr->min_rnr_timer > 31) ||
             (mask & MASK_RETRY && attr->retry_cnt > 7) || (mask & MASK_RNR_RETRY && attr->rnr_retry > 7) ||
             (mask & MASK_RD_ATOMIC && attr->max_rd_atomic > RD_ATOMIC_MAX) ||
             (mask & MASK_DEST_RD_ATOMIC && attr->max_dest_rd_atomic > RD_ATOMIC_MAX) ||
             (mask & MASK_ACCESS && attr->access & ~15u) || (mask & MASK_DEST_QPN && attr->dest_qp_num >> 24));
}

int EXPORT(MODIFY_QP, ibv_modify_qp)(struct qp *qp, struct qp_attr *attr, int mask) {
    ENTER(MODIFY_QP);
    unsigned from = mask & MASK_CUR_STATE ? attr->cur_qp_state : qp->state;
    unsigned to = mask & MASK_STATE ? attr->qp_state : from;
    if (mask & MASK_CUR_STATE && (from != qp->state || from < RTR || from > SQE))
        return EINVAL;
    if (!may_move(qp, from, to, mask) || !is_possible(attr, mask))
        return EINVAL;
    struct qp_attr *own = &qp->attr;
#define SET(bit, field)                                                                                                \
    if (mask & bit)                                                                                                    \
    own->field = attr->field
    SET(MASK_ACCESS, access);
    SET(MASK_PKEY, pkey_index);
    SET(MASK_PORT, port_num);
    SET(MASK_QKEY, qkey);
    SET(MASK_AV, ah);
    SET(MASK_MTU, path_mtu);
    SET(MASK_TIMEOUT, timeout);
    SET(MASK_RETRY, retry_cnt);
    SET(MASK_RNR_RETRY, rnr_retry);
    SET(MASK_RQ_PSN, rq_psn);
    SET(MASK_RD_ATOMIC, max_rd_atomic);
    SET(MASK_MIN_RNR, min_rnr_timer);
    SET(MASK_SQ_PSN, sq_psn);
    SET(MASK_DEST_RD_ATOMIC, max_dest_rd_atomic);
    SET(MASK_DEST_QPN, dest_qp_num);
    own->rq_psn &= 0xffffff;
    own->sq_psn &= 0xffffff;
    if (!(mask & MASK_STATE))
        return 0;
    changed = true;
    own->en_sqd_async_notify = mask & MASK_SQD_NOTIFY && attr->en_sqd_async_notify;
    if (to == RESET) {
        stop_waiting(qp);
        forget_completions(qp->send_cq, qp);
        forget_completions(qp->recv_cq, qp);
        qp->freed = qp->head = qp->tail;
        qp->receives.head = qp->receives.tail;
        qp->receives.used = 0;
        *own = (struct qp_attr){ 0 };
        qp->established = false;
    } else if (to == ERR) {
        to_error(qp);
    }
    qp->state = to;
    if (to == RTR)
        qp->was_connected = true;
    if (to == SQD && from == RTS) {
        own->sq_draining = 1;
        // Only what has been started goes on.
        if (!qp->waits)
            drained(qp);
    } else {
        own->sq_draining = 0;
        progress(qp);
    }
    settle();
    return 0;
}

int EXPORT(QUERY_QP, ibv_query_qp)(struct qp *qp, struct qp_attr *attr, int mask, struct qp_init_attr *init) {
    (void)mask;
    ENTER(QUERY_QP);
    *attr = qp->attr;
    attr->qp_state = attr->cur_qp_state = qp->state;
    attr->cap = qp->cap;
    *init = (struct qp_init_attr){ qp->qp_context, qp->send_cq, qp->recv_cq, qp->srq, qp->cap, qp->type, qp->sig_all };
    return 0;
}

int EXPORT(DESTROY_QP, ibv_destroy_qp)(struct qp *qp) {
    ENTER(DESTROY_QP);
    if (qp->groups)
        return EBUSY;
    events_forget(&qp->context->events, qp);
    if (wait_for_acknowledgement(&qp->async))
        return EBUSY;
    stop_waiting(qp);
    forget_completions(qp->send_cq, qp);
    forget_completions(qp->recv_cq, qp);
    for (int index = 0; index < SLOTS; index++)
        // The bind stays until the window goes, but nobody can use it.
        if (keys[index].window && keys[index].window->qp == qp)
            keys[index].window->qp = NULL;
    qps[qp->qp_num % SLOTS] = NULL;
    qp->pd->users--;
    qp->send_cq->users--;
    qp->recv_cq->users--;
    if (qp->srq)
        qp->srq->users--;
    free(qp->sends);
    free(qp->receives.ring);
    unmake(qp);
    changed = true;
    settle();
    return 0;
}

static int check_send(const struct qp *qp, const struct send_wr *wr) {
    static const unsigned operations[] = { [RC] = 0x3ff, [UC] = 0x00f, [UD] = 0x00c };
    bool fetches = wr->opcode == READ || wr->opcode == COMPARE_SWAP || wr->opcode == FETCH_ADD;
    if (qp->state < RTS || wr->opcode > SEND_WITH_INV || !(operations[qp->type] >> wr->opcode & 1) || wr->num_sge < 0 ||
        wr->flags & ~15u)
        return EINVAL;
    if (wr->flags & INLINE) {
        uint64_t len = 0;
        for (int piece = 0; piece < wr->num_sge; piece++)
            len += wr->sg_list[piece].length;
        if (fetches || len > qp->cap.max_inline_data)
            return EINVAL;
    } else if ((uint32_t)wr->num_sge > qp->cap.max_send_sge) {
        return EINVAL;
    }
    return qp->tail - qp->freed >= qp->cap.max_send_wr ? ENOMEM : 0;
}

static int post_send(struct qp *qp, struct send_wr *wr, struct send_wr **bad) {
    *bad = wr;
    ENTER(POST_SEND);
    for (; wr; wr = wr->next) {
        int error = check_send(qp, wr);
        if (error) {
            *bad = wr;
            settle();
            return error;
        }
        struct send *send = send_at(qp, qp->tail++);
        send->wr = *wr;
        send->inline_len = 0;
        for (int piece = 0; piece < wr->num_sge; piece++) {
            const struct sge *sge = &wr->sg_list[piece];
            if (wr->flags & INLINE) {
                memcpy(send->bytes + send->inline_len, (const void *)sge->addr, sge->length);
                send->inline_len += sge->length;
            } else {
                send->sges[piece] = *sge;
            }
        }
        if (!qp->waits)
            progress(qp);
    }
    settle();
    return 0;
}

static int post_recv(struct qp *qp, struct recv_wr *wr, struct recv_wr **bad) {
    *bad = wr;
    ENTER(POST_RECV);
    for (; wr; wr = wr->next) {
        int error = qp->srq || qp->state == RESET ? EINVAL : receives_put(&qp->receives, wr);
        if (error) {
            *bad = wr;
            settle();
            return error;
        }
        changed = true;
    }
    if (qp->state == ERR)
        flush_receives(qp);
    settle();
    return 0;
}

int EXPORT(ATTACH_MCAST, ibv_attach_mcast)(struct qp *qp, const uint8_t gid[16], uint16_t lid) {
    (void)lid;
    ENTER(ATTACH_MCAST);
    if (qp->type != UD || !is_multicast(gid))
        return EINVAL;
    for (struct attachment *at = attachments; at; at = at->next)
        if (at->qp == qp && !memcmp(at->gid, gid, sizeof at->gid))
            return 0;
    struct attachment *attachment = calloc(1, sizeof *attachment);
    if (!attachment)
        return ENOMEM;
    attachment->qp = qp;
    memcpy(attachment->gid, gid, sizeof attachment->gid);
    LINK(attachments, attachment);
    qp->groups++;
    return 0;
}

int EXPORT(DETACH_MCAST, ibv_detach_mcast)(struct qp *qp, const uint8_t gid[16], uint16_t lid) {
    (void)lid;
    ENTER(DETACH_MCAST);
    for (struct attachment **at = &attachments; *at; at = &(*at)->next) {
        struct attachment *attachment = *at;
        if (attachment->qp == qp && !memcmp(attachment->gid, gid, sizeof attachment->gid)) {
            *at = attachment->next;
            free(attachment);
            qp->groups--;
            return 0;
        }
    }
    return EINVAL;
}

// For tests alone

// Objects that were made and not destroyed, contexts and lists of devices among them.
int stub_live_objects(void) {
    LOCKED;
    return live;
}

// A function by what a caller knows it by: -1: it fails from now on; 0: it does not; n: its n-th call from now on fails.
int stub_fail(const char *call, int nth) {
    LOCKED;
    for (int function = 0; function < FUNCTIONS_IN_ALL; function++)
        if (!strcmp(calls[function], call)) {
            failing[function] = nth;
            return 0;
        }
    return -1;
}

// Sends complete with that status from now on; -1: with what becomes of them.
void stub_set_status(int64_t status) {
    LOCKED;
    forced_status = status;
}

// Raises an event: of the queue pair of that number, of the completion queue or shared receive queue that was made so many
// before the newest, or of that port or whatever else on all devices. Returns how often.
int stub_raise(int type, int which) {
    LOCKED;
    struct async_event event = { .type = type };
    if (type == EVENT_CQ_ERR || type == EVENT_SRQ_ERR || type == EVENT_SRQ_LIMIT) {
        struct cq *cq = cqs;
        struct srq *srq = srqs;
        for (; which > 0; which--) {
            cq = cq ? cq->next : NULL;
            srq = srq ? srq->next : NULL;
        }
        if (type == EVENT_CQ_ERR && cq)
            raise_async(cq->context, type, cq, 0);
        else if (type != EVENT_CQ_ERR && srq)
            raise_async(srq->context, type, srq, 0);
        else
            return 0;
        return 1;
    }
    if ((type > 0 && type <= EVENT_PATH_MIG_ERR) || type == EVENT_LAST_WQE) {
        struct qp *qp = find_qp(which);
        if (qp)
            raise_async(qp->context, type, qp, 0);
        return qp != NULL;
    }
    int count = 0;
    // A port's number has four bytes: those behind are whatever was there.
    bool is_of_port = (type >= EVENT_DEVICE_FATAL && type <= 13) || type == 17 || type == 18;
    event.element = (uint32_t)which | (is_of_port ? 0xabadcafeULL << 32 : 0);
    for (struct context *context = contexts; context; context = context->next, count++)
        events_put(&context->events, NULL, event);
    return count;
}

// The devices are pulled out: there is one more event, and from then on nothing works.
void stub_remove_device(void) {
    stub_raise(EVENT_DEVICE_FATAL, 0);
    LOCKED;
    removed = true;
    for (struct cq *cq = cqs; cq; cq = cq->next)
        if (cq->channel)
            events_wake(&cq->channel->events);
}
