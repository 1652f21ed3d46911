/* The ABI between ferroce and its shim over DPDK: a table of functions with ferroce's own types, so that ferroce is
 * built without DPDK, and one shim serves every program. abi.rs declares the same by hand.
 *
 * Functions that return int return 0, or DPDK's error number, negated, unless stated otherwise. */
#ifndef FERROCE_DPDK_SHIM_H
#define FERROCE_DPDK_SHIM_H

#include <stddef.h>
#include <stdint.h>

/* The version of the declarations below. */
#define FERROCE_DPDK_ABI 1

/* Bytes for the name of a port, with its NUL. */
#define FERROCE_NAME_SIZE 64
/* Bytes for DPDK's data about a payload that is not copied. */
#define FERROCE_SHARED_SIZE 32

struct rte_mbuf;
struct rte_mempool;

/* A received frame: its first segment, and its total length. */
struct ferroce_frame {
	const uint8_t *data;
	uint32_t segment;
	uint32_t length;
};

/* The properties of a port. */
struct ferroce_port_info {
	/* The name of its driver. */
	const char *driver;
	/* The arguments that its device was created with ("role=client,..."); NULL if there are none. */
	const char *arguments;
	/* The UDP types that receive-side scaling can hash; 0 if none. */
	uint64_t rss_udp;
	/* Its kernel interface; 0 if there is none. */
	uint32_t interface;
	uint32_t min_mtu;
	uint32_t max_mtu;
	/* The most queues in each direction. */
	uint16_t max_queues;
	/* Whether it supports sending frames of several segments. */
	uint16_t multi_segment;
};

/* The configuration of a port. */
struct ferroce_port_settings {
	/* The hash types for spreading frames over the queues; 0 for none. */
	uint64_t rss;
	/* 0 for the port's own MTU. */
	uint32_t mtu;
	uint16_t queues;
	/* Whether to send frames of several segments. */
	uint16_t multi_segment;
};

/* Frames that a port has lost. */
struct ferroce_losses {
	uint64_t received;
	uint64_t sent;
};

/* Memory for DPDK's data about a payload. */
struct ferroce_shared {
	uint64_t opaque[FERROCE_SHARED_SIZE / 8];
};

struct ferroce_dpdk {
	/* Always first: FERROCE_DPDK_ABI, and the size of this table. */
	uint32_t abi;
	uint32_t size;
	/* The most bytes for a frame in a buffer of a pool. */
	uint16_t max_room;

	/* Starts EAL, once in a process. */
	int (*eal_start)(int argc, char **argv);
	const char *(*error_text)(int code);
	int (*thread_register)(void);
	void (*thread_unregister)(void);
	/* Waits until DPDK's control thread has processed all earlier events. Must not be called by that thread. */
	void (*await_control)(void);

	/* Creates a device by its name and arguments. */
	int (*device_probe)(const char *device);
	int (*port_find)(const char *name, uint16_t *port);
	/* The name of the first port with a name, from this number on. Returns its number, or -1 if there is none. */
	int (*port_next)(uint16_t from, char name[FERROCE_NAME_SIZE]);
	int (*port_info)(uint16_t port, struct ferroce_port_info *info);
	int (*port_configure)(uint16_t port, const struct ferroce_port_settings *settings);
	int (*port_mtu)(uint16_t port, uint16_t *mtu);
	int (*port_set_mtu)(uint16_t port, uint16_t mtu);
	/* Adjusts numbers of descriptors to the port's limits. */
	int (*port_fit)(uint16_t port, uint16_t *rx_descriptors, uint16_t *tx_descriptors);
	/* The NUMA node of the port; -1 if unknown. */
	int (*port_node)(uint16_t port);
	int (*rx_queue)(uint16_t port, uint16_t queue, uint16_t descriptors, int node, struct rte_mempool *pool);
	int (*tx_queue)(uint16_t port, uint16_t queue, uint16_t descriptors, int node);
	int (*port_start)(uint16_t port);
	int (*port_stop)(uint16_t port);
	/* Removes the port's device from its bus, which closes the port. */
	int (*port_remove)(uint16_t port);
	int (*port_mac)(uint16_t port, uint8_t mac[6]);
	int (*port_hear_multicast)(uint16_t port);
	/* Directs a UDP port, over IPv4 and IPv6, to the port's queues. Returns whether this succeeded. */
	int (*port_steer)(uint16_t port, uint16_t udp_port, uint16_t queues, uint64_t rss);
	/* Whether the port's link is up; 0 also if unknown. */
	int (*link_is_up)(uint16_t port);
	/* The speed of the port's link in Mb/s; 0 if unknown. */
	uint32_t (*link_speed)(uint16_t port);
	int (*port_losses)(uint16_t port, struct ferroce_losses *losses);

	/* Creates a pool of `count` buffers; NULL on failure, with the reason in error. */
	struct rte_mempool *(*pool_create)(const char *name, uint32_t count, uint32_t cache, uint16_t private_size,
					   uint16_t room, int node, int *error);
	void (*pool_free)(struct rte_mempool *pool);
	/* The number of free buffers. */
	uint32_t (*pool_available)(const struct rte_mempool *pool);

	/* Receives up to n frames. */
	uint16_t (*rx_burst)(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, struct ferroce_frame *frames,
			     uint16_t n);
	/* The contiguous bytes of a frame; copied to buffer, of at least its length, if it has several segments. */
	const uint8_t *(*contiguous)(const struct rte_mbuf *mbuf, uint32_t length, uint8_t *buffer);
	/* Takes n buffers, and returns the places of their data in rooms; 0, or -ENOENT if there are fewer. */
	int (*take)(struct rte_mempool *pool, struct rte_mbuf **mbufs, uint8_t **rooms, uint16_t n);
	/* Returns buffers to their pools; null pointers are ignored. */
	void (*give)(struct rte_mbuf **mbufs, uint32_t n);
	void (*set_length)(struct rte_mbuf *mbuf, uint16_t length);
	/* A buffer's private data, of the size that its pool was created with. */
	void *(*private_data)(struct rte_mbuf *mbuf);
	/* Makes one frame of the head, a payload that is not copied, and the tail. shared is in the payload's
	 * private data, and so is pinned, which is passed to released when the payload has been sent. */
	void (*chain)(struct rte_mbuf *head, uint16_t head_length, struct rte_mbuf *payload, void *address,
		      uint16_t length, struct ferroce_shared *shared, void (*released)(void *address, void *pinned),
		      void *pinned, struct rte_mbuf *tail, uint16_t tail_length);
	/* Sends frames. Returns how many the port took. */
	uint16_t (*tx_burst)(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t n);
};

/* The only symbol of the shim. */
extern const struct ferroce_dpdk ferroce_dpdk;

#endif
