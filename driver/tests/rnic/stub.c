// A libibverbs with two devices, for tests. What it does wrong is chosen when it is compiled.
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/types.h>

struct device { char name[64]; };
struct device_attr { char fw_ver[64]; uint64_t guids[4]; uint32_t vendor_id, part_id, hw_ver; int max_qp, max_qp_wr;
    uint32_t others[27]; uint16_t pkeys; uint8_t ack_delay, ports; };
struct port_attr { int state, max_mtu, active_mtu, gid_tbl_len; uint32_t words[4]; uint16_t shorts[3]; uint8_t bytes[8],
    link_layer; };
struct gid_entry { uint8_t gid[16]; uint32_t index, port, type, ifindex; };

static struct device devices[2] = { { "stub0" }, { "stub1" } };
static int opened;

#ifndef MISSING_GET_DEVICE_LIST
struct device **ibv_get_device_list(int *count) {
#ifdef NO_DEVICES
    static struct device *list[] = { NULL };
    *count = 0;
    return list;
#elif defined(NO_KERNEL)
    *count = 0;
    errno = ENOSYS;
    return NULL;
#elif defined(FAIL_GET_DEVICE_LIST)
    errno = EPERM;
    return NULL;
#else
    static struct device *list[] = { &devices[0], &devices[1], NULL };
#ifdef GARBAGE
    *count = -7;
#else
    *count = 2;
#endif
    return list;
#endif
}
#endif

void ibv_free_device_list(struct device **list) { (void)list; }

const char *ibv_get_device_name(struct device *device) {
#ifdef GARBAGE
    // No zero at its end.
    memset(device->name, 'x', sizeof device->name);
#endif
    return device->name;
}

void *ibv_open_device(struct device *device) {
#ifdef FAIL_OPEN_DEVICE
    if (device == &devices[0]) {
        errno = EACCES;
        return NULL;
    }
#endif
    opened += 1;
    return device;
}

int ibv_close_device(void *context) {
    (void)context;
#ifdef FAIL_CLOSE_DEVICE
    return EBUSY;
#endif
    opened -= 1;
    return 0;
}

int stub_opened(void) { return opened; }

int ibv_query_device(void *context, struct device_attr *attr) {
    (void)context;
    _Static_assert(sizeof *attr == 232, "as the ABI has it");
#ifdef FAIL_QUERY_DEVICE
    return EIO;
#endif
#ifdef GARBAGE
    memset(attr, 0xff, sizeof *attr);
    attr->ports = 1;
#else
    memset(attr, 0, sizeof *attr);
    strcpy(attr->fw_ver, "16.35.2000");
    attr->vendor_id = 0x02c9;
    attr->part_id = 4119;
    attr->max_qp = 131072;
    attr->max_qp_wr = 32768;
    attr->ports = 2;
#endif
    return 0;
}

int ibv_query_port(void *context, uint8_t number, struct port_attr *attr) {
    (void)context;
#ifdef FAIL_QUERY_PORT
    return ENODEV;
#endif
#ifdef GARBAGE
    memset(attr, 0xff, 48);
#else
    memset(attr, 0, 48);
    attr->state = number == 1 ? 4 : 1;
    attr->active_mtu = 5;
    attr->gid_tbl_len = 16;
    attr->link_layer = 2;
#endif
    return 0;
}

#ifndef MISSING_QUERY_GID_TABLE
ssize_t _ibv_query_gid_table(void *context, struct gid_entry *entries, size_t most, uint32_t flags, size_t size) {
    (void)context, (void)flags;
#ifdef FAIL_QUERY_GID_TABLE
    return -EOPNOTSUPP;
#endif
#ifdef GARBAGE
    return 1L << 40;
#endif
    if (size != sizeof *entries || most < 3)
        return -EINVAL;
    memset(entries, 0, 3 * sizeof *entries);
    for (int row = 0; row < 3; row++) {
        entries[row].gid[10] = entries[row].gid[11] = 0xff;
        entries[row].gid[12] = 10, entries[row].gid[15] = 1 + row;
        entries[row].index = row;
        // The last one is of a port that there is not.
        entries[row].port = row == 2 ? 9 : 1;
        entries[row].type = 1 + row % 2;
        entries[row].ifindex = 1;
    }
    return 3;
}
#endif

int ibv_query_pkey(void *context, uint8_t port, int index, uint16_t *pkey) {
    (void)context, (void)port, (void)index;
    *pkey = 0xffff;
    return 0;
}

// What is found when the library is loaded, and not called by these tests.
#define NOT_CALLED(name) int name(void) { return ENOSYS; }
NOT_CALLED(ibv_get_async_event)
NOT_CALLED(ibv_ack_async_event)
NOT_CALLED(ibv_alloc_pd)
NOT_CALLED(ibv_dealloc_pd)
NOT_CALLED(ibv_reg_mr_iova2)
NOT_CALLED(ibv_dereg_mr)
NOT_CALLED(ibv_create_comp_channel)
NOT_CALLED(ibv_destroy_comp_channel)
NOT_CALLED(ibv_get_cq_event)
NOT_CALLED(ibv_ack_cq_events)
NOT_CALLED(ibv_create_cq)
NOT_CALLED(ibv_destroy_cq)
NOT_CALLED(ibv_create_qp)
NOT_CALLED(ibv_modify_qp)
NOT_CALLED(ibv_query_qp)
NOT_CALLED(ibv_destroy_qp)
NOT_CALLED(ibv_create_srq)
NOT_CALLED(ibv_modify_srq)
NOT_CALLED(ibv_query_srq)
NOT_CALLED(ibv_destroy_srq)
NOT_CALLED(ibv_create_ah)
NOT_CALLED(ibv_destroy_ah)
NOT_CALLED(ibv_attach_mcast)
NOT_CALLED(ibv_detach_mcast)
