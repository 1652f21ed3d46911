// The least that a provider does: a work request is written to a ring and completes at once, without locks and without being
// carried out. What it costs is no provider's cost, but a bound from below: with it, a caller's own instructions show.
#pragma once
#include "objects.h"

#ifdef LEAN

// A work queue entry, about as a card takes it.
struct wqe {
    uint64_t wr_id, addr, remote_addr;
    uint32_t opcode, flags, length, lkey, rkey, imm_or_key;
    uint8_t inline_data[16];
};
static struct wqe wqes[256];
static unsigned next_wqe;

static bool lean_complete(struct cq *cq, uint64_t wr_id, uint32_t opcode, uint32_t qp_num) {
    if (cq->tail - cq->head == (uint64_t)cq->cqe)
        return false;
    struct wc *wc = &cq->ring[cq->tail++ % cq->cqe].wc;
    *wc = (struct wc){ .wr_id = wr_id, .opcode = opcode, .qp_num = qp_num };
    return true;
}

static int lean_post_send(struct qp *qp, struct send_wr *wr, struct send_wr **bad) {
    for (; wr; wr = wr->next) {
        struct wqe *wqe = &wqes[next_wqe++ % 256];
        wqe->wr_id = wr->wr_id;
        wqe->opcode = wr->opcode;
        wqe->flags = wr->flags;
        wqe->remote_addr = wr->wr.rdma.addr;
        wqe->rkey = wr->wr.rdma.rkey;
        wqe->imm_or_key = wr->imm_or_key;
        wqe->length = 0;
        if (wr->num_sge == 1) {
            const struct sge *sge = wr->sg_list;
            wqe->length = sge->length;
            if (wr->flags & INLINE && sge->length <= sizeof wqe->inline_data) {
                memcpy(wqe->inline_data, (const void *)sge->addr, sge->length);
            } else {
                wqe->addr = sge->addr;
                wqe->lkey = sge->lkey;
            }
        }
        // `enum ibv_wc_opcode`: a WRITE is 1, a SEND 0.
        if ((wr->flags & SIGNALED || qp->sig_all) &&
            !lean_complete(qp->send_cq, wr->wr_id, wr->opcode == WRITE, qp->qp_num)) {
            *bad = wr;
            return ENOMEM;
        }
    }
    return 0;
}

static int lean_post_recv(struct qp *qp, struct recv_wr *wr, struct recv_wr **bad) {
    for (; wr; wr = wr->next) {
        struct wqe *wqe = &wqes[next_wqe++ % 256];
        wqe->wr_id = wr->wr_id;
        if (wr->num_sge == 1) {
            wqe->addr = wr->sg_list->addr;
            wqe->length = wr->sg_list->length;
            wqe->lkey = wr->sg_list->lkey;
        }
        if (!lean_complete(qp->recv_cq, wr->wr_id, 128, qp->qp_num)) {
            *bad = wr;
            return ENOMEM;
        }
    }
    return 0;
}

static int lean_poll_cq(struct cq *cq, int room, struct wc *wc) {
    int count = 0;
    while (count < room && cq->head < cq->tail)
        wc[count++] = cq->ring[cq->head++ % cq->cqe].wc;
    return count;
}

#endif
