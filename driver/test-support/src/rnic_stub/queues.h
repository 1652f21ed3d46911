// The functions of shared receive queues and queue pairs.
#pragma once
#include "calls.h"

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
    // As mlx5 asks.
    const char *set = getenv("MLX5_SCATTER_TO_CQE");
    scatters = !set || strcmp(set, "0");
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
                if (!piece)
                    last_sge = *sge;
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
