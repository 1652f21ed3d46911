// What connects the queue pairs of the process: sends are carried out when they are posted, or when what they wait for is
// there.
#pragma once
#include "objects.h"

enum { WAIT = -1 };

// Queue pairs that wait.
static struct qp *waiting;
// Something changed that they may wait for.
static bool changed;
// A queue pair that the send which is carried out now brings into its error state, and the event beside, or -1.
static struct qp *broken;
static int broken_event;

// A piece of the process's memory.
struct span {
    uint8_t *at;
    size_t len;
};

struct spans {
    struct span span[SGE_MAX];
    int count;
    uint64_t len;
};

static int resolve(const struct pd *pd, const struct sge *sges, int count, unsigned access, struct spans *spans) {
    spans->count = 0;
    spans->len = 0;
    for (const struct sge *sge = sges; sge < sges + count; sge++) {
        if (!sge->length)
            continue;
        uint32_t index = sge->lkey >> 8;
        struct region *region = index < SLOTS ? keys[index].region : NULL;
        uint64_t offset = region ? sge->addr - region->iova : 0;
        if (!region || region->mr.lkey != sge->lkey || region->mr.pd != pd || (region->access & access) != access ||
            sge->addr < region->iova || offset > region->mr.length || sge->length > region->mr.length - offset)
            return LOC_PROT;
        // As mlx5 does with what came in a completion: by the processor, to the address that was posted.
        bool by_address = sge->length <= 64 && vendor == 0x02c9 && scatters;
        uint8_t *at = by_address ? (uint8_t *)sge->addr : (uint8_t *)region->mr.addr + offset;
        spans->span[spans->count++] = (struct span){ at, sge->length };
        spans->len += sge->length;
    }
    return OK;
}

static struct window *find_window(uint32_t key) {
    uint32_t index = (key & ~RKEY) >> 8;
    struct window *window = index < SLOTS ? keys[index].window : NULL;
    return window && window->region && window->key == key ? window : NULL;
}

static int resolve_remote(const struct qp *qp, uint32_t key, uint64_t addr, uint64_t len, unsigned access,
                          struct spans *spans) {
    spans->count = 0;
    spans->len = len;
    if (!len)
        return OK;
    uint32_t index = (key & ~RKEY) >> 8;
    struct region *region = index < SLOTS ? keys[index].region : NULL;
    struct window *window = find_window(key);
    if (region && region->mr.rkey == key) {
        uint64_t offset = addr - region->iova;
        if (region->mr.pd != qp->pd || !(region->access & access) || addr < region->iova ||
            offset > region->mr.length || len > region->mr.length - offset)
            return REM_ACCESS;
    } else if (window) {
        region = window->region;
        uint64_t offset = addr - window->addr;
        if (window->mw.pd != qp->pd || window->qp != qp || !(window->access & access) || addr < window->addr ||
            offset > window->length || len > window->length - offset)
            return REM_ACCESS;
    } else {
        return REM_ACCESS;
    }
    spans->span[spans->count++] = (struct span){ (uint8_t *)region->mr.addr + (addr - region->iova), len };
    return OK;
}

// The last bytes come last: who polls for them sees those before.
static void copy_ordered(uint8_t *to, const uint8_t *from, size_t len) {
    uint64_t word;
    if (len >= sizeof word && ((uintptr_t)to + len) % sizeof word == 0) {
        len -= sizeof word;
        memcpy(&word, from + len, sizeof word);
        memmove(to, from, len);
        __atomic_store_n((uint64_t *)(to + len), word, __ATOMIC_RELEASE);
    } else if (len) {
        uint8_t byte = from[len - 1];
        memmove(to, from, len - 1);
        __atomic_store_n(to + len - 1, byte, __ATOMIC_RELEASE);
    }
}

// As much as both have, from `offset` of the destination on.
static void copy(const struct spans *to, uint64_t offset, const struct spans *from) {
    int target = 0, source = 0;
    size_t in_target = offset, in_source = 0;
    while (target < to->count && source < from->count) {
        size_t room = to->span[target].len, there = from->span[source].len - in_source;
        if (in_target >= room) {
            in_target -= room, target++;
            continue;
        }
        size_t len = room - in_target < there ? room - in_target : there;
        copy_ordered(to->span[target].at + in_target, from->span[source].at + in_source, len);
        in_target += len, in_source += len;
        if (in_source == from->span[source].len)
            source++, in_source = 0;
    }
}

static void stop_waiting(struct qp *qp) {
    if (!qp->waits)
        return;
    qp->waits = false;
    if (qp->next)
        qp->next->prev = qp->prev;
    *(qp->prev ? &qp->prev->next : &waiting) = qp->next;
    qp->next = qp->prev = NULL;
}

static void start_waiting(struct qp *qp) {
    if (qp->waits)
        return;
    qp->waits = true;
    qp->next = waiting;
    if (waiting)
        waiting->prev = qp;
    waiting = qp;
}

static void complete_send(struct qp *qp, uint64_t place, uint32_t status, uint32_t opcode, uint32_t len) {
    const struct send *send = send_at(qp, place);
    if (forced_status > 0)
        status = forced_status;
    if (!status && !qp->sig_all && !(send->wr.flags & SIGNALED))
        return;
    struct wc wc = { .wr_id = send->wr.wr_id, .status = status, .opcode = opcode, .byte_len = len,
                     .qp_num = qp->qp_num };
    complete(qp->send_cq, (struct cqe){ wc, qp, place, true }, false);
}

static void complete_receive(struct qp *qp, struct wc wc, bool solicited) {
    wc.qp_num = qp->qp_num;
    complete(qp->recv_cq, (struct cqe){ .wc = wc, .qp = qp }, solicited);
}

static void flush_sends(struct qp *qp) {
    stop_waiting(qp);
    while (qp->head < qp->tail)
        complete_send(qp, qp->head++, WR_FLUSH, 0, 0);
}

static void flush_receives(struct qp *qp) {
    struct receives *receives = &qp->receives;
    while (receives->head < receives->tail) {
        uint64_t wr_id = receive_at(receives, receives->head++)->wr_id;
        complete_receive(qp, (struct wc){ .wr_id = wr_id, .status = WR_FLUSH }, false);
    }
}

static void to_error(struct qp *qp) {
    bool was = qp->state == ERR;
    qp->state = ERR;
    flush_sends(qp);
    flush_receives(qp);
    if (qp->srq && !was)
        raise_async(qp->context, EVENT_LAST_WQE, qp, 0);
    changed = true;
}

static void breaks(struct qp *qp, int event) {
    broken = qp;
    broken_event = event;
}

// The next receive, which stays there; NULL if there is none.
static struct receive *next_receive(const struct qp *qp) {
    const struct receives *receives = qp->srq ? &qp->srq->receives : &qp->receives;
    return receives->head < receives->tail ? receive_at(receives, receives->head) : NULL;
}

static void check_limit(struct srq *srq) {
    if (srq->limit && srq->receives.tail - srq->receives.head < srq->limit) {
        srq->limit = 0;
        raise_async(srq->context, EVENT_SRQ_LIMIT, srq, 0);
    }
}

static void take_receive(struct qp *qp) {
    (qp->srq ? &qp->srq->receives : &qp->receives)->head++;
    if (qp->srq)
        check_limit(qp->srq);
}

static void establish(struct qp *qp) {
    if (qp->state == RTR && !qp->established) {
        qp->established = true;
        raise_async(qp->context, EVENT_COMM_EST, qp, 0);
    }
}

// The other end of a connected queue pair. OK, or what becomes of the send without it.
static int find_peer(const struct qp *qp, struct qp **found) {
    const struct qp_attr *attr = &qp->attr;
    struct qp *peer = find_qp(attr->dest_qp_num);
    bool is_there = peer && peer->type == qp->type && is_gid_of(peer->context->device, attr->ah.grh.dgid);
    if (is_there && peer->state >= RTR && peer->state != ERR && peer->attr.dest_qp_num == qp->qp_num &&
        is_gid_of(qp->context->device, peer->attr.ah.grh.dgid)) {
        *found = peer;
        return OK;
    }
    bool will_be = is_there && (peer->state == INIT || (peer->state == RESET && !peer->was_connected));
    return will_be || !attr->timeout ? WAIT : RETRY_EXC;
}

// What a request that a responder refuses does to both.
static int refuse_request(struct qp *peer, int status) {
    if (peer->type == RC)
        breaks(peer, status == REM_ACCESS ? EVENT_QP_ACCESS_ERR : EVENT_QP_REQ_ERR);
    return peer->type == RC ? status : OK;
}

static int no_receive(const struct qp *qp) {
    if (qp->type != RC)
        return OK;
    return qp->attr.rnr_retry ? WAIT : RNR_RETRY_EXC;
}

static int run_send(struct qp *qp, struct qp *peer, const struct send *send, const struct spans *from) {
    struct receive *receive = next_receive(peer);
    if (!receive)
        return no_receive(qp);
    struct wc wc = { .wr_id = receive->wr_id, .opcode = 128, .byte_len = from->len };
    struct spans to;
    bool fits = !resolve(peer->pd, receive->sges, receive->num_sge, LOCAL_WRITE, &to);
    if (!fits || to.len < from->len) {
        // UC keeps the receive for the next message.
        if (qp->type == UC && fits)
            return OK;
        take_receive(peer);
        wc.status = fits ? LOC_LEN : LOC_PROT;
        complete_receive(peer, wc, true);
        breaks(peer, -1);
        return qp->type == UC ? OK : fits ? REM_INV_REQ : REM_OP;
    }
    copy(&to, 0, from);
    take_receive(peer);
    if (send->wr.opcode == SEND_WITH_IMM) {
        wc.flags = WC_IMM;
        wc.imm_or_key = send->wr.imm_or_key;
    } else if (send->wr.opcode == SEND_WITH_INV) {
        struct window *window = find_window(send->wr.imm_or_key);
        if (window && window->qp == peer) {
            window->region->windows--;
            window->region = NULL;
            wc.flags = WC_INV;
            wc.imm_or_key = send->wr.imm_or_key;
        } else {
            // As rdma_rxe: the sender is told nothing.
            wc.status = REM_INV_REQ;
            breaks(peer, -1);
        }
    }
    complete_receive(peer, wc, send->wr.flags & SOLICITED);
    return OK;
}

static int run_write(struct qp *qp, struct qp *peer, const struct send *send, const struct spans *from) {
    struct spans to;
    if (!(peer->attr.access & REMOTE_WRITE))
        return refuse_request(peer, REM_INV_REQ);
    int status = resolve_remote(peer, send->wr.wr.rdma.rkey, send->wr.wr.rdma.addr, from->len, REMOTE_WRITE, &to);
    if (status)
        return refuse_request(peer, status);
    if (send->wr.opcode == WRITE_WITH_IMM) {
        struct receive *receive = next_receive(peer);
        if (!receive)
            return no_receive(qp);
        struct wc wc = { .wr_id = receive->wr_id, .opcode = 129, .byte_len = from->len, .flags = WC_IMM,
                         .imm_or_key = send->wr.imm_or_key };
        copy(&to, 0, from);
        take_receive(peer);
        complete_receive(peer, wc, send->wr.flags & SOLICITED);
    } else {
        copy(&to, 0, from);
    }
    return OK;
}

static int run_read(struct qp *peer, const struct send *send, const struct spans *to) {
    struct spans from;
    if (!(peer->attr.access & REMOTE_READ) || !peer->attr.max_dest_rd_atomic)
        return refuse_request(peer, REM_INV_REQ);
    int status = resolve_remote(peer, send->wr.wr.rdma.rkey, send->wr.wr.rdma.addr, to->len, REMOTE_READ, &from);
    if (status)
        return refuse_request(peer, status);
    copy(to, 0, &from);
    return OK;
}

static int run_atomic(struct qp *peer, const struct send *send, const struct spans *to) {
    struct spans at;
    if (to->len != 8)
        return LOC_LEN;
    uint64_t addr = send->wr.wr.atomic.addr;
    if (!(peer->attr.access & REMOTE_ATOMIC) || !peer->attr.max_dest_rd_atomic || addr % 8)
        return refuse_request(peer, REM_INV_REQ);
    int status = resolve_remote(peer, send->wr.wr.atomic.rkey, addr, 8, REMOTE_ATOMIC, &at);
    if (status)
        return refuse_request(peer, status);
    uint64_t *word = (uint64_t *)at.span[0].at, operand = send->wr.wr.atomic.compare_add, old = operand;
    if ((uintptr_t)word % 8)
        return refuse_request(peer, REM_INV_REQ);
    if (send->wr.opcode == FETCH_ADD)
        old = __atomic_fetch_add(word, operand, __ATOMIC_SEQ_CST);
    else
        __atomic_compare_exchange_n(word, &old, send->wr.wr.atomic.swap, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    struct spans from = { .span = { { (uint8_t *)&old, 8 } }, .count = 1, .len = 8 };
    copy(to, 0, &from);
    return OK;
}

static int run_bind(struct qp *qp, const struct bind *bind) {
    struct window *window = (struct window *)bind->mw;
    struct region *region = (struct region *)bind->mr;
    if (!window || !region)
        return MW_BIND_FAILED;
    uint64_t offset = bind->addr - region->iova;
    bool writes = bind->access & (REMOTE_WRITE | REMOTE_ATOMIC);
    if (window->region || window->mw.pd != qp->pd || region->mr.pd != qp->pd || !bind->length ||
        (window->mw.rkey ^ bind->rkey) >> 8 || !(region->access & MW_BIND) ||
        (writes && !(region->access & LOCAL_WRITE)) ||
        bind->access & ~(REMOTE_WRITE | REMOTE_READ | REMOTE_ATOMIC) || bind->addr < region->iova ||
        offset > region->mr.length || bind->length > region->mr.length - offset)
        return MW_BIND_FAILED;
    window->region = region;
    window->qp = qp;
    window->key = bind->rkey;
    window->access = bind->access;
    window->addr = bind->addr;
    window->length = bind->length;
    region->windows++;
    return OK;
}

static int run_local_invalidate(const struct qp *qp, uint32_t key) {
    struct window *window = find_window(key);
    if (!window || window->qp != qp)
        return LOC_QP_OP;
    window->region->windows--;
    window->region = NULL;
    return OK;
}

// What a datagram starts with in the receiver's memory.
static void network_header(uint8_t header[40], const struct qp *qp, const struct global_route *route, uint64_t len) {
    uint8_t from[16];
    // Behind it are UDP's header, those of the transport, the payload with its padding, and the checksum.
    uint16_t behind = 8 + 20 + ((len + 3) & ~3) + 4;
    gid_of(qp->context->device, from);
    memset(header, 0, 40);
    if (is_ipv4(route->dgid)) {
        uint8_t *ip = header + 20;
        uint16_t total = 20 + behind;
        ip[0] = 0x45, ip[1] = route->traffic_class, ip[2] = total >> 8, ip[3] = total, ip[6] = 0x40;
        ip[8] = route->hop_limit, ip[9] = 17;
        memcpy(ip + 12, from + 12, 4);
        memcpy(ip + 16, route->dgid + 12, 4);
        uint32_t sum = 0;
        for (int byte = 0; byte < 20; byte += 2)
            sum += ip[byte] << 8 | ip[byte + 1];
        sum = (sum & 0xffff) + (sum >> 16);
        sum = ~((sum & 0xffff) + (sum >> 16));
        ip[10] = sum >> 8, ip[11] = sum;
    } else {
        header[0] = 0x60 | route->traffic_class >> 4;
        header[1] = route->traffic_class << 4 | (route->flow_label >> 16 & 15);
        header[2] = route->flow_label >> 8, header[3] = route->flow_label;
        header[4] = behind >> 8, header[5] = behind;
        header[6] = 17, header[7] = route->hop_limit;
        memcpy(header + 8, from, 16);
        memcpy(header + 24, route->dgid, 16);
    }
}

static void deliver_datagram(struct qp *qp, struct qp *to, const struct send *send, const struct spans *from) {
    const struct ah_attr *attr = &send->wr.wr.ud.ah->attr;
    // The controlled keys stand for the queue pair's own.
    uint32_t qkey = send->wr.wr.ud.qkey >> 31 ? qp->attr.qkey : send->wr.wr.ud.qkey;
    struct receive *receive = next_receive(to);
    if (to->type != UD || to->state < RTR || to->state == ERR || to->attr.qkey != qkey || !receive)
        return;
    struct wc wc = { .wr_id = receive->wr_id, .opcode = 128, .byte_len = 40 + from->len, .flags = WC_GRH,
                     .src_qp = qp->qp_num, .sl = attr->sl };
    struct spans room;
    if (resolve(to->pd, receive->sges, receive->num_sge, LOCAL_WRITE, &room)) {
        take_receive(to);
        wc.status = LOC_PROT;
        complete_receive(to, wc, true);
        breaks(to, -1);
        return;
    }
    if (room.len < 40 + from->len)
        return;
    uint8_t header[40];
    network_header(header, qp, &attr->grh, from->len);
    copy(&room, 0, &(struct spans){ .span = { { header, sizeof header } }, .count = 1, .len = sizeof header });
    copy(&room, sizeof header, from);
    if (send->wr.opcode == SEND_WITH_IMM) {
        wc.flags |= WC_IMM;
        wc.imm_or_key = send->wr.imm_or_key;
    }
    take_receive(to);
    complete_receive(to, wc, send->wr.flags & SOLICITED);
}

static int run_datagram(struct qp *qp, const struct send *send, const struct spans *from) {
    const struct ah *ah = send->wr.wr.ud.ah;
    uint32_t qpn = send->wr.wr.ud.qpn;
    if (!ah || ah->pd != qp->pd)
        return LOC_QP_OP;
    // What is larger than the MTU is not sent.
    if (from->len > 4096)
        return OK;
    if (is_multicast(ah->attr.grh.dgid)) {
        for (struct attachment *at = attachments; at && qpn == 0xffffff; at = at->next)
            if (!memcmp(at->gid, ah->attr.grh.dgid, sizeof at->gid))
                deliver_datagram(qp, at->qp, send, from);
        return OK;
    }
    struct qp *to = find_qp(qpn);
    if (to && is_gid_of(to->context->device, ah->attr.grh.dgid))
        deliver_datagram(qp, to, send, from);
    return OK;
}

// Carries a send out: OK or how it failed, or WAIT. `len` is what its completion tells.
static int run(struct qp *qp, struct send *send, uint32_t *opcode, uint32_t *len) {
    static const uint8_t opcodes[] = { 1, 1, 0, 0, 2, 3, 4, 6, 5, 0 };
    unsigned operation = send->wr.opcode;
    *opcode = opcodes[operation];
    *len = 0;
    if (forced_status > 0)
        return forced_status > INT32_MAX ? 1 : forced_status;
    if (operation == BIND_MW)
        return run_bind(qp, &send->wr.bind);
    if (operation == LOCAL_INV)
        return run_local_invalidate(qp, send->wr.imm_or_key);
    struct spans local;
    bool fetches = operation == READ || operation == COMPARE_SWAP || operation == FETCH_ADD;
    if (send->wr.flags & INLINE) {
        local = (struct spans){ .count = 1, .len = send->inline_len };
        local.span[0] = (struct span){ send->bytes, send->inline_len };
    } else {
        int status = resolve(qp->pd, send->sges, send->wr.num_sge, fetches ? LOCAL_WRITE : 0, &local);
        if (status)
            return status;
    }
    if (local.len > 1u << 31)
        return LOC_LEN;
    if (qp->type == UD)
        return run_datagram(qp, send, &local);
    struct qp *peer = NULL;
    int status = find_peer(qp, &peer);
    if (!peer)
        return qp->type == UC ? OK : status;
    establish(peer);
    if (fetches)
        *len = local.len;
    switch (operation) {
    case WRITE:
    case WRITE_WITH_IMM:
        return run_write(qp, peer, send, &local);
    case READ:
        return run_read(peer, send, &local);
    case COMPARE_SWAP:
    case FETCH_ADD:
        return run_atomic(peer, send, &local);
    default:
        return run_send(qp, peer, send, &local);
    }
}

static void drained(struct qp *qp) {
    qp->attr.sq_draining = 0;
    if (qp->attr.en_sqd_async_notify)
        raise_async(qp->context, EVENT_SQ_DRAINED, qp, 0);
}

// Carries out the sends of a queue pair, as far as they go.
static void progress(struct qp *qp) {
    while (qp->head < qp->tail && (qp->state == RTS || (qp->state == SQD && qp->attr.sq_draining))) {
        uint32_t opcode, len;
        broken = NULL;
        int status = run(qp, send_at(qp, qp->head), &opcode, &len);
        if (status == WAIT) {
            start_waiting(qp);
            return;
        }
        stop_waiting(qp);
        complete_send(qp, qp->head++, status, opcode, len);
        if (broken) {
            struct qp *responder = broken;
            if (broken_event >= 0)
                raise_async(responder->context, broken_event, responder, 0);
            to_error(responder);
        }
        if (status && qp->type == RC) {
            to_error(qp);
        } else if (status && qp->state != ERR) {
            qp->state = SQE;
            flush_sends(qp);
        } else if (qp->state == SQD && qp->attr.sq_draining) {
            // Only the first one had been started.
            drained(qp);
        }
    }
    if (qp->state == SQE || qp->state == ERR)
        flush_sends(qp);
}

// Whoever waits for what has changed goes on.
static void settle(void) {
    while (changed && waiting) {
        changed = false;
        size_t count = 0, all = 0;
        for (struct qp *qp = waiting; qp; qp = qp->next)
            all++;
        struct qp **each = calloc(all, sizeof *each);
        if (!each)
            abort();
        for (struct qp *qp = waiting; qp; qp = qp->next)
            each[count++] = qp;
        // None of them goes meanwhile, for nobody else has the lock.
        while (count)
            progress(each[--count]);
        free(each);
    }
    changed = false;
}
