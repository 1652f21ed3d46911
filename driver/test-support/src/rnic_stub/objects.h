// The objects, their queues and their events. One lock covers all.
#pragma once
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "abi.h"

enum { DEVICES = 2, PORTS = 2, GIDS = 2, SLOTS = 1 << 16, SGE_MAX = 30, INLINE_MAX = 1024, WR_MAX = 32768,
    CQE_MAX = 1 << 22, RD_ATOMIC_MAX = 16 };

// An event that waits to be taken: of a device, or of a channel.
struct event {
    struct event *next;
    void *object;
    struct async_event async;
};

// `tokens` counts the events and makes it readable.
struct events {
    struct event *first, **last;
    int tokens;
};

struct context {
    struct device *device;
    struct ops ops;
    int cmd_fd, async_fd, num_comp_vectors;
    // From here on the library's own, in each object.
    struct context *next;
    struct events events;
    int users;
};

struct pd {
    struct context *context;
    uint32_t handle;
    int users;
};

struct region {
    struct mr mr;
    unsigned access;
    uint64_t iova;
    int windows;
    // Of a dma-buf: what of it is mapped.
    void *mapping;
    size_t mapped;
};

// How a dma-buf was registered: the file, and the arguments.
struct dma_buf {
    uint64_t dev, ino, offset, length, iova, access, lkey, rkey;
};

struct window {
    struct mw mw;
    // Those of the bind; no region: it is not bound.
    struct region *region;
    struct qp *qp;
    uint32_t key;
    unsigned access;
    uint64_t addr, length;
};

struct ah {
    struct context *context;
    struct pd *pd;
    uint32_t handle;
    struct ah_attr attr;
};

struct completion_channel {
    struct channel channel;
    struct events events;
    int users;
};

// Events of an object that were taken, and of those the ones that were acknowledged: it can't go before.
struct taken { unsigned taken, acked; };

struct cqe {
    struct wc wc;
    struct qp *qp;
    uint64_t seq;
    bool send;
};

struct cq {
    struct context *context;
    struct completion_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
    struct cq *next;
    struct taken async, events;
    int users;
    // 1: the next solicited completion raises an event; 2: any.
    int armed;
    bool overrun;
    struct cqe *ring;
    uint64_t head, tail;
};

struct receive {
    uint64_t wr_id;
    int num_sge;
    struct sge sges[];
};

// `used` counts those that were not polled yet: so long they have their place.
struct receives {
    uint8_t *ring;
    size_t size;
    uint32_t cap, max_sge, used;
    uint64_t head, tail;
};

struct srq {
    struct context *context;
    void *srq_context;
    struct pd *pd;
    uint32_t handle;
    struct srq *next;
    struct taken async;
    int users;
    uint32_t limit;
    struct receives receives;
};

struct send {
    struct send_wr wr;
    uint32_t inline_len;
    // The pieces, or the bytes inline.
    union {
        struct sge sges[1];
        uint8_t bytes[16];
    };
};

struct qp {
    struct context *context;
    void *qp_context;
    struct pd *pd;
    struct cq *send_cq, *recv_cq;
    struct srq *srq;
    uint32_t handle, qp_num, state, type;
    // Waits for its peer, or for a receive there, with the first send; its neighbours that do.
    struct qp *next, *prev;
    bool waits;
    struct taken async;
    struct qp_attr attr;
    struct qp_cap cap;
    bool sig_all, was_connected, established;
    int groups;
    uint8_t *sends;
    size_t send_size;
    // The first send that still has its place, the first that is not carried out, the next to be posted.
    uint64_t freed, head, tail;
    struct receives receives;
};

struct attachment {
    struct attachment *next;
    struct qp *qp;
    uint8_t gid[16];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t acknowledged = PTHREAD_COND_INITIALIZER;
static int live;
static bool removed;
// What every send completes with, if not -1.
static int64_t forced_status = -1;
static struct device devices[DEVICES] = { { "stub0" }, { "stub1" } };
static struct context *contexts;
static struct cq *cqs;
static struct srq *srqs;
static struct qp *qps[SLOTS];
static struct attachment *attachments;
// By the index in a key.
static struct { struct region *region; struct window *window; } keys[SLOTS];
// The registrations of dma-bufs, and the first piece of the last work request that has one.
enum { DMA_BUFS = 64 };
static struct dma_buf dma_bufs[DMA_BUFS];
static int dma_buf_count, dma_buf_error;
static struct sge last_sge;
// The maker of the devices: Mellanox, whose provider copies by the processor, unless its environment says no.
static uint32_t vendor = 0x02c9;
static bool scatters;
static uint32_t next_qpn = 17, next_key = 1;
// A key for peers is never one for work requests.
static const uint32_t RKEY = 1u << 31;

static int lock(void) {
    pthread_mutex_lock(&mutex);
    return 0;
}

static void unlock(int *unused) {
    (void)unused;
    pthread_mutex_unlock(&mutex);
}

// Until the end of the function.
#define LOCKED __attribute__((cleanup(unlock), unused)) int locked = lock()

static void *make(size_t size) {
    void *object = calloc(1, size);
    if (object)
        live += 1;
    else
        errno = ENOMEM;
    return object;
}

static void unmake(void *object) {
    live -= 1;
    free(object);
}

// Puts it in a list by its field `next`, or takes it out.
#define LINK(list, object) ((object)->next = (list), (list) = (object))
#define UNLINK(list, object)                                 \
    do {                                                     \
        __typeof__(object) *at = &(list);                    \
        while (*at != (object))                              \
            at = &(*at)->next;                               \
        *at = (object)->next;                                \
    } while (0)

static int events_open(struct events *events) {
    events->last = &events->first;
    return events->tokens = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
}

static void events_wake(struct events *events) {
    uint64_t one = 1;
    (void)!write(events->tokens, &one, sizeof one);
}

static void events_put(struct events *events, void *object, struct async_event async) {
    struct event *event = calloc(1, sizeof *event);
    if (!event)
        abort();
    *event = (struct event){ .object = object, .async = async };
    *events->last = event;
    events->last = &event->next;
    events_wake(events);
}

// Without those of an object that goes.
static void events_forget(struct events *events, const void *object) {
    struct event **at = &events->first;
    while (*at) {
        struct event *event = *at;
        if (object && event->object != object) {
            at = &event->next;
            continue;
        }
        *at = event->next;
        free(event);
        uint64_t token;
        struct pollfd ready = { .fd = events->tokens, .events = POLLIN };
        if (poll(&ready, 1, 0) == 1)
            (void)!read(events->tokens, &token, sizeof token);
    }
    events->last = at;
}

static void events_close(struct events *events) {
    events_forget(events, NULL);
    close(events->tokens);
}

// Waits, unless the descriptor doesn't. Returns with the lock held and an event, which the caller frees; or without both.
static struct event *events_take(struct events *events) {
    for (;;) {
        uint64_t token;
        if (read(events->tokens, &token, sizeof token) != sizeof token)
            return NULL;
        lock();
        struct event *event = events->first;
        if (event) {
            events->first = event->next;
            if (!event->next)
                events->last = &events->first;
            return event;
        }
        bool gone = removed;
        unlock(NULL);
        if (gone) {
            // Whoever waits from now on is told too.
            events_wake(events);
            errno = EIO;
            return NULL;
        }
    }
}

// The real one waits without end for the events to be acknowledged.
static int wait_for_acknowledgement(const struct taken *events) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    while (events->taken != events->acked)
        if (pthread_cond_timedwait(&acknowledged, &mutex, &until))
            return EBUSY;
    return 0;
}

static void raise_async(struct context *context, unsigned type, void *object, uint64_t element) {
    struct async_event event = { .element = object ? (uint64_t)object : element, .type = type };
    events_put(&context->events, object, event);
}

static struct qp *find_qp(uint32_t qpn) {
    struct qp *qp = qps[qpn % SLOTS];
    return qp && qp->qp_num == qpn ? qp : NULL;
}

// A place for a key: the index, or 0.
static uint32_t free_key(void) {
    for (int tried = 0; tried < SLOTS; tried++) {
        uint32_t index = next_key++ % SLOTS;
        if (index && !keys[index].region && !keys[index].window)
            return index;
    }
    return 0;
}

// Of a device's ports only the first has GIDs: one address, for RoCE v1 and for v2.
static void gid_of(const struct device *device, uint8_t gid[16]) {
    memset(gid, 0, 16);
    gid[10] = gid[11] = 0xff;
    gid[12] = 10, gid[15] = 2 + (device - devices);
}

static bool is_gid_of(const struct device *device, const uint8_t gid[16]) {
    uint8_t own[16];
    gid_of(device, own);
    return memcmp(own, gid, sizeof own) == 0;
}

static bool is_ipv4(const uint8_t gid[16]) {
    static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
    return memcmp(gid, mapped, sizeof mapped) == 0;
}

static bool is_multicast(const uint8_t gid[16]) {
    return gid[0] == 0xff || (is_ipv4(gid) && gid[12] >> 4 == 0xe);
}

static int receives_make(struct receives *receives, uint32_t cap, uint32_t max_sge) {
    *receives = (struct receives){ .cap = cap, .max_sge = max_sge };
    receives->size = sizeof(struct receive) + max_sge * sizeof(struct sge);
    receives->ring = calloc(cap ? cap : 1, receives->size);
    return receives->ring ? 0 : ENOMEM;
}

static struct receive *receive_at(const struct receives *receives, uint64_t place) {
    return (struct receive *)(receives->ring + place % receives->cap * receives->size);
}

static int receives_put(struct receives *receives, const struct recv_wr *wr) {
    if (wr->num_sge < 0 || (uint32_t)wr->num_sge > receives->max_sge)
        return EINVAL;
    if (receives->used == receives->cap)
        return ENOMEM;
    struct receive *receive = receive_at(receives, receives->tail++);
    receives->used++;
    receive->wr_id = wr->wr_id;
    if (wr->num_sge)
        last_sge = *wr->sg_list;
    receive->num_sge = wr->num_sge;
    memcpy(receive->sges, wr->sg_list, wr->num_sge * sizeof(struct sge));
    return 0;
}

static struct send *send_at(const struct qp *qp, uint64_t place) {
    return (struct send *)(qp->sends + place % qp->cap.max_send_wr * qp->send_size);
}

// Puts a completion into its queue. On an error only what the verbs promise is there: the rest is noise.
static void complete(struct cq *cq, struct cqe entry, bool solicited) {
    if (entry.wc.status) {
        struct wc *wc = &entry.wc;
        struct wc noise = { .wr_id = wc->wr_id, .status = wc->status, .qp_num = wc->qp_num, .vendor_err = 0x5bad };
        // The opcode looks like that of the other side.
        noise.opcode = entry.send ? 0xa5a5a5a5 : 0x5a5a5a5a;
        noise.byte_len = noise.imm_or_key = noise.src_qp = noise.flags = 0xa5a5a5a5;
        *wc = noise;
    }
    if (cq->tail - cq->head == (uint64_t)cq->cqe) {
        if (!cq->overrun)
            raise_async(cq->context, EVENT_CQ_ERR, cq, 0);
        cq->overrun = true;
        return;
    }
    cq->ring[cq->tail++ % cq->cqe] = entry;
    if (cq->armed == 2 || (cq->armed == 1 && (solicited || entry.wc.status))) {
        cq->armed = 0;
        if (cq->channel)
            events_put(&cq->channel->events, cq, (struct async_event){ 0 });
    }
}

// A completion was taken: its work request gives its place back.
static void reclaim(const struct cqe *entry) {
    struct qp *qp = entry->qp;
    if (entry->send)
        qp->freed = entry->seq + 1;
    else
        (qp->srq ? &qp->srq->receives : &qp->receives)->used--;
}

// Completions of a queue pair that starts again, or goes, go too.
static void forget_completions(struct cq *cq, const struct qp *qp) {
    uint64_t to = cq->head;
    for (uint64_t from = cq->head; from < cq->tail; from++) {
        struct cqe *entry = &cq->ring[from % cq->cqe];
        if (entry->qp != qp)
            cq->ring[to++ % cq->cqe] = *entry;
        else
            reclaim(entry);
    }
    cq->tail = to;
}
