// The functions of protection domains, regions, windows and address handles.
#pragma once
#include "calls.h"

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

static struct region *make_region(struct pd *pd, void *addr, size_t length, uint64_t iova, unsigned access) {
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
    return region;
}

struct mr *EXPORT(REG_MR_IOVA2, ibv_reg_mr_iova2)(struct pd *pd, void *addr, size_t length, uint64_t iova,
                                                  unsigned access) {
    ENTER_MAKING(REG_MR_IOVA2);
    struct region *region = make_region(pd, addr, length, iova, access);
    return region ? &region->mr : NULL;
}

// Of any file that can be mapped.
struct mr *EXPORT(REG_DMABUF_MR, ibv_reg_dmabuf_mr)(struct pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                                    int access) {
    ENTER_MAKING(REG_DMABUF_MR);
    if (dma_buf_error)
        return refuse_object(dma_buf_error);
    uint64_t in_page = offset % 4096;
    struct stat of;
    // As the kernel: no windows, and whole pages.
    if (access & MW_BIND || in_page != iova % 4096)
        return refuse_object(EINVAL);
    if (fstat(fd, &of))
        return NULL;
    size_t mapped = length + in_page;
    uint8_t *mapping = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset - in_page);
    if (mapping == MAP_FAILED)
        return NULL;
    struct region *region = make_region(pd, mapping + in_page, length, iova, access);
    if (!region) {
        int error = errno;
        munmap(mapping, mapped);
        return refuse_object(error);
    }
    region->mapping = mapping;
    region->mapped = mapped;
    dma_bufs[dma_buf_count++ % DMA_BUFS] =
        (struct dma_buf){ of.st_dev, of.st_ino, offset, length, iova, access, region->mr.lkey, region->mr.rkey };
    return &region->mr;
}

int EXPORT(DEREG_MR, ibv_dereg_mr)(struct mr *mr) {
    struct region *region = (struct region *)mr;
    ENTER(DEREG_MR);
    if (region->windows)
        return EBUSY;
    keys[mr->lkey >> 8].region = NULL;
    mr->pd->users--;
    if (region->mapping)
        munmap(region->mapping, region->mapped);
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
