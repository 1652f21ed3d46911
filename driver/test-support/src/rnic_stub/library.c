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
//   FLOOD_POLL                as many completions as have room, at each call, of nothing that was posted
//   GARBAGE_EVENT             events that can't be
//   STATUS=<n>                every send completes with that status
//   LEAN                      what is posted to queue pairs completes at once and is not carried out
#include "devices.h"
#include "memory.h"
#include "completions.h"
#include "queues.h"

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

// Registrations of dma-bufs fail with that from now on; 0: they don't.
void stub_refuse_dma_buf(int error) {
    LOCKED;
    dma_buf_error = error;
}

// The registrations of dma-bufs that have succeeded, from the oldest on, as many as have room; returns how many.
int stub_dma_bufs(struct dma_buf *room, int most) {
    LOCKED;
    int count = dma_buf_count < most ? dma_buf_count : most;
    memcpy(room, dma_bufs, count * sizeof *room);
    return count;
}

// The first piece of the last work request that has one.
void stub_last_sge(struct sge *last) {
    LOCKED;
    *last = last_sge;
}

// The devices are that maker's from now on.
void stub_set_vendor(uint32_t number) {
    LOCKED;
    vendor = number;
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
