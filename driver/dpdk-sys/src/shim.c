#include "shim.h"

#include <sched.h>
#include <stdatomic.h>

#include <rte_alarm.h>
#include <rte_dev.h>
#include <rte_devargs.h>
#include <rte_prefetch.h>

int ferroce_errno(void)
{
	return rte_errno;
}

const char *ferroce_port_arguments(uint16_t port)
{
	struct rte_eth_dev_info info;
	const struct rte_devargs *arguments;

	if (rte_eth_dev_info_get(port, &info) != 0 || info.device == NULL)
		return NULL;
	arguments = rte_dev_devargs(info.device);
	return arguments == NULL ? NULL : arguments->args;
}

int ferroce_link_is_up(uint16_t port)
{
	struct rte_eth_link link;

	return rte_eth_link_get_nowait(port, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
}

uint32_t ferroce_link_speed(uint16_t port)
{
	struct rte_eth_link link;

	if (rte_eth_link_get_nowait(port, &link) != 0 || link.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN)
		return RTE_ETH_SPEED_NUM_NONE;
	return link.link_speed;
}

int ferroce_port_remove(uint16_t port)
{
	struct rte_eth_dev_info info;
	int result = rte_eth_dev_info_get(port, &info);

	return result != 0 ? result : rte_dev_remove(info.device);
}

static void reached(void *flag)
{
	atomic_store((atomic_int *)flag, 1);
}

void ferroce_await_control(void)
{
	atomic_int flag = 0;

	/* Alarms ring on that thread, behind what woke it before. */
	if (rte_eal_alarm_set(1, reached, &flag) != 0)
		return;
	while (!atomic_load(&flag))
		sched_yield();
}

uint16_t ferroce_rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs,
			  struct ferroce_frame *frames, uint16_t n)
{
	uint16_t received = rte_eth_rx_burst(port, queue, mbufs, n);

	for (uint16_t i = 0; i < received; i++) {
		frames[i].data = rte_pktmbuf_mtod(mbufs[i], const uint8_t *);
		frames[i].segment = mbufs[i]->data_len;
		frames[i].length = mbufs[i]->pkt_len;
		rte_prefetch0(frames[i].data);
	}
	return received;
}

const uint8_t *ferroce_contiguous(const struct rte_mbuf *mbuf, uint32_t length, uint8_t *buffer)
{
	return rte_pktmbuf_read(mbuf, 0, length, buffer);
}

int ferroce_take(struct rte_mempool *pool, struct rte_mbuf **mbufs, uint8_t **rooms, uint16_t n)
{
	int result = rte_pktmbuf_alloc_bulk(pool, mbufs, n);

	if (result != 0)
		return result;
	for (uint16_t i = 0; i < n; i++)
		rooms[i] = rte_pktmbuf_mtod(mbufs[i], uint8_t *);
	return 0;
}

void ferroce_set_length(struct rte_mbuf *mbuf, uint16_t length)
{
	mbuf->data_len = length;
	mbuf->pkt_len = length;
}

void *ferroce_private(struct rte_mbuf *mbuf)
{
	return rte_mbuf_to_priv(mbuf);
}

void ferroce_chain(struct rte_mbuf *head, uint16_t head_length, struct rte_mbuf *payload, void *address,
		   uint16_t length, struct rte_mbuf_ext_shared_info *shared,
		   void (*released)(void *address, void *pinned), void *pinned, struct rte_mbuf *tail,
		   uint16_t tail_length)
{
	shared->free_cb = released;
	shared->fcb_opaque = pinned;
	rte_mbuf_ext_refcnt_set(shared, 1);
	/* No IOVA: only ports whose driver copies with the processor gather. */
	rte_pktmbuf_attach_extbuf(payload, address, RTE_BAD_IOVA, length, shared);
	payload->data_len = length;
	payload->next = tail;
	tail->data_len = tail_length;
	head->data_len = head_length;
	head->pkt_len = (uint32_t)head_length + length + tail_length;
	head->nb_segs = 3;
	head->next = payload;
}

uint16_t ferroce_tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t n)
{
	return rte_eth_tx_burst(port, queue, mbufs, n);
}
