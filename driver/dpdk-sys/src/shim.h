/* The ABI between ferroce and its shim over DPDK: a table of functions over types that are all ours, so that ferroce
 * is built without DPDK, and one shim serves every program. abi.rs declares the same by hand.
 *
 * Functions that return int return 0, or DPDK's error number, negated, where nothing else is said. */
#ifndef FERROCE_DPDK_SHIM_H
#define FERROCE_DPDK_SHIM_H

#include <stddef.h>
#include <stdint.h>

/* Counts the changes of what is below. */
#define FERROCE_DPDK_ABI 1

/* Bytes for the name of a port, with its NUL. */
#define FERROCE_NAME_SIZE 64
/* Bytes for what DPDK keeps beside a payload that stays where it is. */
#define FERROCE_SHARED_SIZE 32

struct rte_mbuf;
struct rte_mempool;

/* A received frame: its first segment, and its whole length. */
struct ferroce_frame {
	const uint8_t *data;
	uint32_t segment;
	uint32_t length;
};

/* What a port is. */
struct ferroce_port_info {
	/* The name of its driver. */
	const char *driver;
	/* The arguments that its device was made with ("role=client,..."); NULL if there are none. */
	const char *arguments;
	/* What receive-side scaling can hash of UDP; 0 if nothing. */
	uint64_t rss_udp;
	/* The kernel's interface behind it; 0 if there is none. */
	uint32_t interface;
	uint32_t min_mtu;
	uint32_t max_mtu;
	/* Queues that it can have, each way. */
	uint16_t max_queues;
	/* Whether it sends frames of several segments. */
	uint16_t multi_segment;
};

/* How a port is configured. */
struct ferroce_port_settings {
	/* What to spread over the queues by; 0 for nothing. */
	uint64_t rss;
	/* 0 for the port's own. */
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

/* Memory for what DPDK keeps beside a payload. */
struct ferroce_shared {
	uint64_t opaque[FERROCE_SHARED_SIZE / 8];
};

struct ferroce_dpdk {
	/* First, whatever else changes: FERROCE_DPDK_ABI, and the size of this table. */
	uint32_t abi;
	uint32_t size;
	/* Largest number of bytes for a frame in a buffer of a pool. */
	uint16_t max_room;

	/* Starts EAL, once a process. */
	int (*eal_start)(int argc, char **argv);
	const char *(*error_text)(int code);
	int (*thread_register)(void);
	void (*thread_unregister)(void);
	/* Waits until DPDK's control thread has done what it has been woken for so far. Not for that thread. */
	void (*await_control)(void);

	/* Makes a device by its name and arguments. */
	int (*device_probe)(const char *device);
	int (*port_find)(const char *name, uint16_t *port);
	/* The name of the first port from this number on that has one; returns its number, or -1 if there is none. */
	int (*port_next)(uint16_t from, char name[FERROCE_NAME_SIZE]);
	int (*port_info)(uint16_t port, struct ferroce_port_info *info);
	int (*port_configure)(uint16_t port, const struct ferroce_port_settings *settings);
	int (*port_mtu)(uint16_t port, uint16_t *mtu);
	int (*port_set_mtu)(uint16_t port, uint16_t mtu);
	/* Fits numbers of descriptors to what the port allows. */
	int (*port_fit)(uint16_t port, uint16_t *rx_descriptors, uint16_t *tx_descriptors);
	/* The NUMA node of the port; -1 if that can't be told. */
	int (*port_node)(uint16_t port);
	int (*rx_queue)(uint16_t port, uint16_t queue, uint16_t descriptors, int node, struct rte_mempool *pool);
	int (*tx_queue)(uint16_t port, uint16_t queue, uint16_t descriptors, int node);
	int (*port_start)(uint16_t port);
	int (*port_stop)(uint16_t port);
	/* Takes the port's device off its bus, which closes the port. */
	int (*port_remove)(uint16_t port);
	int (*port_mac)(uint16_t port, uint8_t mac[6]);
	int (*port_hear_multicast)(uint16_t port);
	/* Directs a UDP port, over IPv4 and IPv6, to the port's queues; returns whether it does. */
	int (*port_steer)(uint16_t port, uint16_t udp_port, uint16_t queues, uint64_t rss);
	/* Whether the port's other end is there; 0 also when that can't be told. */
	int (*link_is_up)(uint16_t port);
	/* The speed of the port's link in Mb/s; 0 if that can't be told. */
	uint32_t (*link_speed)(uint16_t port);
	int (*port_losses)(uint16_t port, struct ferroce_losses *losses);

	/* A pool of `count` buffers; NULL if there is none to be had, with the reason in error. */
	struct rte_mempool *(*pool_create)(const char *name, uint32_t count, uint32_t cache, uint16_t private_size,
					   uint16_t room, int node, int *error);
	void (*pool_free)(struct rte_mempool *pool);
	/* Buffers that nobody has. */
	uint32_t (*pool_available)(const struct rte_mempool *pool);

	/* Receives up to n frames. */
	uint16_t (*rx_burst)(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, struct ferroce_frame *frames,
			     uint16_t n);
	/* The bytes of a frame in one piece; copied to buffer, of at least its length, if it has several. */
	const uint8_t *(*contiguous)(const struct rte_mbuf *mbuf, uint32_t length, uint8_t *buffer);
	/* Takes n buffers, and tells where their data go; 0, or -ENOENT if there are fewer. */
	int (*take)(struct rte_mempool *pool, struct rte_mbuf **mbufs, uint8_t **rooms, uint16_t n);
	/* Gives buffers back to their pools; a null pointer is nothing. */
	void (*give)(struct rte_mbuf **mbufs, uint32_t n);
	void (*set_length)(struct rte_mbuf *mbuf, uint16_t length);
	/* A buffer's private data, as many bytes as its pool was made with. */
	void *(*private_data)(struct rte_mbuf *mbuf);
	/* Makes one frame of the head, a payload that stays where it is, and the tail. shared is in the
	 * payload's private data, as is what released gets when the payload has been sent. */
	void (*chain)(struct rte_mbuf *head, uint16_t head_length, struct rte_mbuf *payload, void *address,
		      uint16_t length, struct ferroce_shared *shared, void (*released)(void *address, void *pinned),
		      void *pinned, struct rte_mbuf *tail, uint16_t tail_length);
	/* Sends; returns how many the port took. */
	uint16_t (*tx_burst)(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t n);
};

/* The one symbol of the shim. */
extern const struct ferroce_dpdk ferroce_dpdk;

#endif
