// The same work as in `main.rs`, by direct calls of libibverbs: direct LIBRARY WORKLOAD ROUNDS.
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

enum { BATCH = 16, LENGTH = 8 };

static void *library;

static void *function(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "no %s\n", name);
        exit(1);
    }
    return found;
}

static void *made(const char *name, void *object) {
    if (!object) {
        perror(name);
        exit(1);
    }
    return object;
}

static void check(const char *name, int returned) {
    if (returned) {
        fprintf(stderr, "%s: %s\n", name, strerror(returned));
        exit(1);
    }
}

struct end {
    struct qp *qp;
    struct cq *cq;
    struct mr *mr;
    uint8_t *memory;
};

static struct end make(struct context *context, struct pd *pd) {
    struct end end;
    struct cq *(*create_cq)(struct context *, int, void *, struct channel *, int) = function("ibv_create_cq");
    struct qp *(*create_qp)(struct pd *, struct qp_init_attr *) = function("ibv_create_qp");
    struct mr *(*reg_mr)(struct pd *, void *, size_t, uint64_t, unsigned) = function("ibv_reg_mr_iova2");
    end.memory = made("calloc", calloc(1, 4096));
    end.mr = made("ibv_reg_mr_iova2", reg_mr(pd, end.memory, 4096, (uint64_t)end.memory, LOCAL_WRITE | REMOTE_WRITE));
    end.cq = made("ibv_create_cq", create_cq(context, 256, NULL, NULL, 0));
    struct qp_init_attr init = { .send_cq = end.cq, .recv_cq = end.cq, .qp_type = RC };
    init.cap = (struct qp_cap){ .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = 4, .max_recv_sge = 4, .max_inline_data = 64 };
    end.qp = made("ibv_create_qp", create_qp(pd, &init));
    return end;
}

// The number of a queue pair, from `struct ibv_qp`: the library's private fields after it are not used.
static uint32_t qp_num(struct qp *qp) {
    uint32_t number;
    memcpy(&number, (uint8_t *)qp + 52, sizeof number);
    return number;
}

static struct context *context_of(struct qp *qp) {
    struct context *context;
    memcpy(&context, qp, sizeof context);
    return context;
}

static const struct ops *ops(struct context *context) {
    return (const struct ops *)((uint8_t *)context + 8);
}

static void connect(struct end *end, struct end *peer, const uint8_t gid[16]) {
    int (*modify_qp)(struct qp *, struct qp_attr *, int) = function("ibv_modify_qp");
    struct qp_attr attr = { .qp_state = INIT, .port_num = 1, .access = REMOTE_WRITE };
    check("to INIT", modify_qp(end->qp, &attr, MASK_STATE | MASK_PKEY | MASK_PORT | MASK_ACCESS));
    attr = (struct qp_attr){ .qp_state = RTR, .path_mtu = 3, .dest_qp_num = qp_num(peer->qp), .max_dest_rd_atomic = 1, .min_rnr_timer = 1 };
    attr.ah = (struct ah_attr){ .is_global = 1, .port_num = 1 };
    memcpy(attr.ah.grh.dgid, gid, 16);
    attr.ah.grh.hop_limit = 64;
    attr.ah.grh.sgid_index = 1;
    check("to RTR", modify_qp(end->qp, &attr, MASK_STATE | MASK_AV | MASK_MTU | MASK_DEST_QPN | MASK_RQ_PSN | MASK_DEST_RD_ATOMIC | MASK_MIN_RNR));
    attr = (struct qp_attr){ .qp_state = RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .max_rd_atomic = 1 };
    check("to RTS", modify_qp(end->qp, &attr, MASK_STATE | MASK_SQ_PSN | MASK_TIMEOUT | MASK_RETRY | MASK_RNR_RETRY | MASK_RD_ATOMIC));
}

static void poll_cq(struct cq *cq, struct context *context, int expected) {
    struct wc wc[BATCH];
    while (expected > 0) {
        int count = ops(context)->poll_cq(cq, BATCH, wc);
        if (count < 0)
            check("ibv_poll_cq", -count);
        for (int n = 0; n < count; n++)
            if (wc[n].status) {
                fprintf(stderr, "status %u\n", wc[n].status);
                exit(1);
            }
        expected -= count;
    }
}

static struct send_wr send(uint64_t wr_id, struct sge *sge, unsigned opcode, unsigned flags, struct end *peer) {
    struct send_wr wr = { .wr_id = wr_id, .sg_list = sge, .num_sge = 1, .opcode = opcode, .flags = flags };
    if (opcode == WRITE) {
        wr.wr.rdma.addr = (uint64_t)peer->memory;
        wr.wr.rdma.rkey = peer->mr->rkey;
    }
    return wr;
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    library = dlopen(argv[1], RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const char *workload = argv[2];
    unsigned long rounds = strtoul(argv[3], NULL, 10);
    struct device **(*get_device_list)(int *) = function("ibv_get_device_list");
    struct context *(*open_device)(struct device *) = function("ibv_open_device");
    struct pd *(*alloc_pd)(struct context *) = function("ibv_alloc_pd");
    int count;
    struct device **list = made("ibv_get_device_list", get_device_list(&count));
    struct context *context = made("ibv_open_device", open_device(list[0]));
    struct pd *pd = made("ibv_alloc_pd", alloc_pd(context));
    struct end a = make(context, pd), b = make(context, pd);
    static const uint8_t gid[16] = { [10] = 0xff, 0xff, 10, 0, 0, 2 };
    connect(&a, &b, gid);
    connect(&b, &a, gid);
    bool is_list = !strcmp(workload, "write-list"), is_inline = !strcmp(workload, "write-inline");
    bool is_send = !strcmp(workload, "send-list");
    if (!is_list && !is_inline && !is_send && strcmp(workload, "write"))
        return 2;
    struct sge here = { (uint64_t)a.memory, LENGTH, a.mr->lkey }, there = { (uint64_t)b.memory, LENGTH, b.mr->lkey };
    if (is_inline)
        here = (struct sge){ (uint64_t)a.memory, LENGTH, 0 };
    struct send_wr *bad;
    struct recv_wr *bad_receive;
    for (unsigned long round = 0; round < rounds; round++) {
        if (is_send) {
            struct recv_wr receives[BATCH];
            for (int n = 0; n < BATCH; n++)
                receives[n] = (struct recv_wr){ .wr_id = n, .next = n + 1 < BATCH ? &receives[n + 1] : NULL, .sg_list = &there, .num_sge = 1 };
            check("ibv_post_recv", ops(context_of(b.qp))->post_recv(b.qp, receives, &bad_receive));
        }
        if (is_send || is_list) {
            struct send_wr sends[BATCH];
            for (int n = 0; n < BATCH; n++) {
                unsigned flags = is_send || n + 1 == BATCH ? SIGNALED : 0;
                sends[n] = send(n, &here, is_send ? SEND : WRITE, flags, &b);
                sends[n].next = n + 1 < BATCH ? &sends[n + 1] : NULL;
            }
            check("ibv_post_send", ops(context_of(a.qp))->post_send(a.qp, sends, &bad));
        } else {
            for (int n = 0; n < BATCH; n++) {
                struct send_wr wr = send(n, &here, WRITE, SIGNALED | (is_inline ? INLINE : 0), &b);
                check("ibv_post_send", ops(context_of(a.qp))->post_send(a.qp, &wr, &bad));
            }
        }
        poll_cq(a.cq, context, is_list ? 1 : BATCH);
        if (is_send)
            poll_cq(b.cq, context, BATCH);
    }
    return 0;
}
