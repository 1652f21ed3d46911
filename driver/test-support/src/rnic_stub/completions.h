// The functions of completion queues and their channels.
#pragma once
#include "calls.h"

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
    if (IS_SET(FLOOD_POLL)) {
        for (int place = 0; place < room; place++)
            wc[place] = (struct wc){ .wr_id = UINT64_MAX };
        return room;
    }
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
