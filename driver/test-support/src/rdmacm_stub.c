// A librdmacm for tests: each step that the kernel would take ends well at once, with an event, and peers answer as they
// should. What it does wrong is chosen by `stub_cm_fail`, `stub_cm_raise` and the like. What the real one would wait for without
// end, and what it would crash of, ends the process. Written without the headers of rdma-core, after its ABI.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "rnic_stub/abi.h"

struct cm_channel { int fd; };

struct cm_id {
    void *verbs;
    struct cm_channel *channel;
    void *context, *qp;
    uint8_t source[128], destination[128];
    uint64_t route[7];
    unsigned port_space;
    uint8_t port;
    uint64_t rest[8];
    // From here on its own.
    bool is_ended;
    int taken; // Events that are not acknowledged yet.
    struct cm_id *next;
};
_Static_assert(offsetof(struct cm_id, port_space) == 344, "port space");
_Static_assert(offsetof(struct cm_id, is_ended) == 416, "size");

struct conn_param {
    const void *private_data;
    uint8_t private_data_len, responder_resources, initiator_depth, flow_control, retry_count, rnr_retry_count, srq;
    uint32_t qp_num;
};

struct ud_param {
    const void *private_data;
    uint8_t private_data_len;
    struct ah_attr ah_attr;
    uint32_t qp_num, qkey;
};

struct cm_event {
    struct cm_id *id, *listen_id;
    unsigned event;
    int status;
    union { struct conn_param conn; struct ud_param ud; } param;
    // From here on its own.
    struct cm_event *next;
    struct cm_channel *channel;
};
_Static_assert(offsetof(struct cm_event, next) == 80, "size");

enum { ADDR_RESOLVED, ADDR_ERROR, ROUTE_RESOLVED, ROUTE_ERROR, CONNECT_REQUEST, CONNECT_RESPONSE, ESTABLISHED = 9,
    DISCONNECTED = 10, TIMEWAIT_EXIT = 15, PS_UDP = 0x111 };

static const char *const names[] = {
    "rdma_create_event_channel", "rdma_create_id", "rdma_bind_addr", "rdma_resolve_addr", "rdma_resolve_route",
    "rdma_connect", "rdma_listen", "rdma_accept", "rdma_reject", "rdma_establish", "rdma_disconnect", "rdma_notify",
    "rdma_get_cm_event", "rdma_ack_cm_event", "rdma_init_qp_attr", "rdma_set_option", "rdma_destroy_id",
    // What fails is not said.
    "no event",
};
enum { NAMES = sizeof names / sizeof *names };
static int failing[NAMES];
static int live;
static bool is_silent, takes_nothing;
static int private_data_len = -1;
static struct cm_event *first, **last = &first;
static struct cm_id *ids; // The newest first.
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int stub_cm_live(void) { return live; }

int stub_cm_fail(const char *name, int nth) {
    for (int n = 0; n < NAMES; n++)
        if (!strcmp(names[n], name)) {
            failing[n] = nth;
            return 0;
        }
    return -1;
}

static bool fails(const char *name) {
    for (int n = 0; n < NAMES; n++)
        if (!strcmp(names[n], name) && failing[n] > 0 && --failing[n] == 0) {
            errno = EPROTO;
            return true;
        }
    return false;
}

// Only what exists is given to the library.
static void known(const struct cm_id *id, const char *call) {
    pthread_mutex_lock(&lock);
    const struct cm_id *at = ids;
    while (at && at != id)
        at = at->next;
    pthread_mutex_unlock(&lock);
    if (!at) {
        fprintf(stderr, "%s of an identifier that does not exist\n", call);
        abort();
    }
}
#define KNOWN(id)                                                                                                      \
    known(id, __func__);                                                                                               \
    CHECK()
#define CHECK()                                                                                                        \
    if (fails(__func__))                                                                                               \
    return -1

static void put_with(struct cm_id *id, struct cm_id *listener, struct cm_channel *channel, unsigned kind, int status) {
    static const uint8_t answer[256] = "answer";
    pthread_mutex_lock(&lock);
    struct cm_event *event = calloc(1, sizeof *event);
    *event = (struct cm_event){ .id = id, .listen_id = listener, .event = kind, .status = status, .channel = channel };
    if (id && id->port_space == PS_UDP) {
        struct ah_attr ah = { .is_global = 1, .port_num = 1 };
        ah.grh = (struct global_route){ .sgid_index = 1, .hop_limit = 64 };
        memcpy(ah.grh.dgid + 10, "\xff\xff\x0a\0\0\x02", 6);
        event->param.ud = (struct ud_param){ answer, kind == CONNECT_REQUEST ? 180 : 136, ah, 99, 0x01234567 };
    } else {
        event->param.conn = (struct conn_param){ .private_data = answer, .private_data_len = 56, .responder_resources = 4,
            .initiator_depth = 4, .retry_count = 7, .rnr_retry_count = 7, .qp_num = 99 };
    }
    if (private_data_len >= 0)
        event->param.conn.private_data_len = private_data_len;
    if (takes_nothing)
        event->param.conn.private_data = NULL;
    *last = event;
    last = &event->next;
    live++;
    uint64_t one = 1;
    if (write(channel->fd, &one, sizeof one) < 0)
        abort();
    pthread_mutex_unlock(&lock);
}

static void put(struct cm_id *id, struct cm_id *listener, unsigned kind) {
    if (!is_silent || kind == CONNECT_REQUEST)
        put_with(id, listener, id->channel, kind, 0);
}

static struct cm_id *new_id(struct cm_channel *channel, void *context, unsigned space) {
    struct cm_id *id = calloc(1, sizeof *id);
    *id = (struct cm_id){ .channel = channel, .context = context, .port_space = space, .port = 1 };
    pthread_mutex_lock(&lock);
    id->next = ids;
    ids = id;
    live++;
    pthread_mutex_unlock(&lock);
    return id;
}

// Somebody asks who listens.
static void ask(struct cm_id *listener) {
    struct cm_id *id = new_id(listener->channel, listener->context, listener->port_space);
    memcpy(id->source, listener->source, sizeof id->source);
    struct sockaddr_in peer = { .sin_family = AF_INET, .sin_port = htons(5), .sin_addr.s_addr = htonl(0x0a000009) };
    memcpy(id->destination, &peer, sizeof peer);
    put(id, listener, CONNECT_REQUEST);
}

// What is asked for never ends.
void stub_cm_silent(int yes) { is_silent = yes; }

// How much private data events have from now on, at most 255 bytes, -1: as it should be; with a null pointer to it.
void stub_cm_private_data(int length, int is_null) {
    private_data_len = length;
    takes_nothing = is_null;
}

// An event of any number and status of the newest identifier but `nth`; a request comes to it. Below 0: of none, in the channel
// of the newest.
int stub_cm_raise(int nth, unsigned kind, int status) {
    struct cm_id *id = ids;
    for (int n = 0; n < nth && id; n++)
        id = id->next;
    if (!id)
        return -1;
    if (nth < 0)
        put_with(NULL, NULL, id->channel, kind, status);
    else if (kind == CONNECT_REQUEST)
        ask(id);
    else
        put_with(id, NULL, id->channel, kind, status);
    return 0;
}

struct cm_channel *rdma_create_event_channel(void) {
    if (fails(__func__))
        return NULL;
    struct cm_channel *channel = calloc(1, sizeof *channel);
    channel->fd = eventfd(0, EFD_SEMAPHORE | EFD_CLOEXEC);
    live++;
    return channel;
}

void rdma_destroy_event_channel(struct cm_channel *channel) {
    close(channel->fd);
    free(channel);
    live--;
}

int rdma_create_id(struct cm_channel *channel, struct cm_id **id, void *context, unsigned space) {
    CHECK();
    *id = new_id(channel, context, space);
    return 0;
}

int rdma_destroy_id(struct cm_id *id) {
    known(id, __func__);
    if (id->taken) {
        fprintf(stderr, "rdma_destroy_id waits for %d events to be acknowledged\n", id->taken);
        abort();
    }
    pthread_mutex_lock(&lock);
    for (struct cm_id **at = &ids; *at; at = &(*at)->next)
        if (*at == id) {
            *at = id->next;
            break;
        }
    struct cm_id *asking = NULL;
    // Events of it go with it.
    for (struct cm_event **at = &first; *at;) {
        struct cm_event *event = *at;
        if (event->id != id && event->listen_id != id) {
            at = &event->next;
            continue;
        }
        if (event->listen_id == id) {
            // A request that nobody has seen goes with the listener.
            for (struct cm_id **old = &ids; *old; old = &(*old)->next)
                if (*old == event->id) {
                    *old = event->id->next;
                    break;
                }
            event->id->next = asking;
            asking = event->id;
        }
        uint64_t one;
        *at = event->next;
        if (!*at)
            last = at;
        if (read(id->channel->fd, &one, sizeof one) < 0)
            abort();
        free(event);
        live--;
    }
    while (asking) {
        struct cm_id *next = asking->next;
        free(asking);
        live--;
        asking = next;
    }
    live--;
    pthread_mutex_unlock(&lock);
    free(id);
    CHECK();
    return 0;
}

int rdma_bind_addr(struct cm_id *id, void *address) {
    KNOWN(id);
    memcpy(id->source, address, 28);
    return 0;
}

int rdma_resolve_addr(struct cm_id *id, void *source, void *destination, int timeout) {
    (void)timeout;
    KNOWN(id);
    memcpy(id->source, source, 28);
    memcpy(id->destination, destination, 28);
    put(id, NULL, ADDR_RESOLVED);
    return 0;
}

int rdma_resolve_route(struct cm_id *id, int timeout) {
    (void)timeout;
    KNOWN(id);
    put(id, NULL, ROUTE_RESOLVED);
    return 0;
}

int rdma_connect(struct cm_id *id, struct conn_param *param) {
    (void)param;
    KNOWN(id);
    put(id, NULL, id->port_space == PS_UDP ? ESTABLISHED : CONNECT_RESPONSE);
    return 0;
}

// Somebody asks at once.
int rdma_listen(struct cm_id *listener, int backlog) {
    (void)backlog;
    KNOWN(listener);
    ask(listener);
    return 0;
}

int rdma_accept(struct cm_id *id, struct conn_param *param) {
    (void)param;
    KNOWN(id);
    if (id->port_space != PS_UDP)
        put(id, NULL, ESTABLISHED);
    return 0;
}

int rdma_reject(struct cm_id *id, const void *data, uint8_t length) {
    (void)data, (void)length;
    KNOWN(id);
    return 0;
}

int rdma_establish(struct cm_id *id) {
    KNOWN(id);
    return 0;
}

int rdma_disconnect(struct cm_id *id) {
    KNOWN(id);
    if (!id->is_ended) {
        id->is_ended = true;
        put(id, NULL, DISCONNECTED);
        put(id, NULL, TIMEWAIT_EXIT);
    }
    return 0;
}

int rdma_notify(struct cm_id *id, unsigned event) {
    (void)event;
    KNOWN(id);
    return 0;
}

int rdma_get_cm_event(struct cm_channel *channel, struct cm_event **event) {
    CHECK();
    if (fails("no event")) {
        *event = NULL;
        errno = EAGAIN;
        return 0;
    }
    uint64_t one;
    if (read(channel->fd, &one, sizeof one) < 0)
        return -1;
    pthread_mutex_lock(&lock);
    struct cm_event **at = &first;
    while ((*at)->channel != channel)
        at = &(*at)->next;
    *event = *at;
    *at = (*at)->next;
    if (!*at)
        last = at;
    struct cm_id *of = (*event)->listen_id ? (*event)->listen_id : (*event)->id;
    if (of)
        of->taken++;
    pthread_mutex_unlock(&lock);
    return 0;
}

int rdma_ack_cm_event(struct cm_event *event) {
    struct cm_id *of = event->listen_id ? event->listen_id : event->id;
    if (of) {
        known(of, __func__);
        of->taken--;
    }
    free(event);
    live--;
    CHECK();
    return 0;
}

int rdma_init_qp_attr(struct cm_id *id, struct qp_attr *attr, int *mask) {
    KNOWN(id);
    if (attr->qp_state == RTR) {
        attr->path_mtu = 3;
        attr->dest_qp_num = 99;
        attr->ah = (struct ah_attr){ .is_global = 1, .port_num = 1 };
        attr->ah.grh = (struct global_route){ .sgid_index = 1, .hop_limit = 64 };
        memcpy(attr->ah.grh.dgid + 10, "\xff\xff\x0a\0\0\x02", 6);
        *mask = MASK_STATE | MASK_AV | MASK_MTU | MASK_DEST_QPN | MASK_RQ_PSN | MASK_DEST_RD_ATOMIC | MASK_MIN_RNR;
    } else {
        attr->timeout = 14;
        attr->retry_cnt = attr->rnr_retry = 7;
        *mask = MASK_STATE | MASK_SQ_PSN | MASK_TIMEOUT | MASK_RETRY | MASK_RNR_RETRY | MASK_RD_ATOMIC;
    }
    return 0;
}

int rdma_set_option(struct cm_id *id, int level, int option, void *value, size_t length) {
    (void)level, (void)option, (void)value, (void)length;
    KNOWN(id);
    return 0;
}
