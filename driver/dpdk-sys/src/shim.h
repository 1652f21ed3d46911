/* DPDK's inline functions for a burst of packet buffers at a time, and its thread's errno. */
#ifndef FERROCE_DPDK_SHIM_H
#define FERROCE_DPDK_SHIM_H

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_flow.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>

/* A received frame: its first segment, and its whole length. */
struct ferroce_frame {
	const uint8_t *data;
	uint32_t segment;
	uint32_t length;
};

/* Flags whose macros bindgen does not evaluate. */
static const uint64_t ferroce_tx_multi_segs = RTE_ETH_TX_OFFLOAD_MULTI_SEGS;
static const uint64_t ferroce_rss_udp = RTE_ETH_RSS_NONFRAG_IPV4_UDP | RTE_ETH_RSS_NONFRAG_IPV6_UDP;

int ferroce_errno(void);

/* The arguments that the port's device was made with ("role=client,..."); NULL if there are none. */
const char *ferroce_port_arguments(uint16_t port);

/* Takes the port's device off its bus, which closes the port. */
int ferroce_port_remove(uint16_t port);

/* Whether the port's other end is there; 0 also when that can't be told. */
int ferroce_link_is_up(uint16_t port);

/* The speed of the port's link in Mb/s; 0 if that can't be told. */
uint32_t ferroce_link_speed(uint16_t port);

/* Waits until DPDK's control thread has done what it has been woken for so far. Not for that thread. */
void ferroce_await_control(void);

/* Receives up to n frames. */
uint16_t ferroce_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs,
			  struct ferroce_frame *frames, uint16_t n);

/* The bytes of a frame in one piece; copied to buffer, of at least its length, if it has several. */
const uint8_t *ferroce_contiguous(const struct rte_mbuf *mbuf, uint32_t length, uint8_t *buffer);

/* Takes n buffers, and tells where their data go; 0, or -ENOENT if there are fewer. */
int ferroce_take(struct rte_mempool *pool, struct rte_mbuf **mbufs, uint8_t **rooms, uint16_t n);

void ferroce_set_length(struct rte_mbuf *mbuf, uint16_t length);

/* A buffer's private data, as many bytes as its pool was made with. */
void *ferroce_private(struct rte_mbuf *mbuf);

/* Makes one frame of the head, a payload that stays where it is, and the tail. shared is in the
 * payload's private data, as is what released gets when the payload has been sent. */
void ferroce_chain(struct rte_mbuf *head, uint16_t head_length, struct rte_mbuf *payload, void *address,
		   uint16_t length, struct rte_mbuf_ext_shared_info *shared,
		   void (*released)(void *address, void *pinned), void *pinned, struct rte_mbuf *tail,
		   uint16_t tail_length);

/* Sends; returns how many the port took. */
uint16_t ferroce_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t n);

#endif
