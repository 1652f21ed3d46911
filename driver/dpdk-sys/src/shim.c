#include "shim.h"

#include <sched.h>
#include <stdatomic.h>
#include <string.h>

#include <rte_alarm.h>
#include <rte_dev.h>
#include <rte_devargs.h>
#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_ethdev.h>
#include <rte_flow.h>
#include <rte_lcore.h>
#include <rte_mbuf.h>
#include <rte_mempool.h>
#include <rte_prefetch.h>
#include <rte_version.h>

/* rte_eth_conf has the MTU since 21.11. The oldest release tested is that of Debian 12. */
#if RTE_VERSION < RTE_VERSION_NUM(22, 11, 0, 0)
#error "ferroce needs DPDK 22.11 or later"
#endif

_Static_assert(sizeof(struct rte_mbuf_ext_shared_info) <= sizeof(struct ferroce_shared), "FERROCE_SHARED_SIZE");
_Static_assert(RTE_ETH_NAME_MAX_LEN <= FERROCE_NAME_SIZE, "FERROCE_NAME_SIZE");

/* ---------------------------------------------------------------- environment */

static int eal_start(int argc, char **argv)
{
	return rte_eal_init(argc, argv) < 0 ? -rte_errno : 0;
}

static const char *error_text(int code)
{
	return rte_strerror(code);
}

static int thread_register(void)
{
	return rte_thread_register() == 0 ? 0 : -rte_errno;
}

static void thread_unregister(void)
{
	rte_thread_unregister();
}

static void reached(void *flag)
{
	atomic_store((atomic_int *)flag, 1);
}

static void await_control(void)
{
	atomic_int flag = 0;

	/* Alarms run on that thread, after all earlier events. */
	if (rte_eal_alarm_set(1, reached, &flag) != 0)
		return;
	while (!atomic_load(&flag))
		sched_yield();
}

/* ---------------------------------------------------------------- ports */

static int device_probe(const char *device)
{
	return rte_dev_probe(device);
}

static int port_find(const char *name, uint16_t *port)
{
	return rte_eth_dev_get_port_by_name(name, port);
}

static int port_next(uint16_t from, char name[FERROCE_NAME_SIZE])
{
	uint64_t port = rte_eth_find_next_owned_by(from, RTE_ETH_DEV_NO_OWNER);

	while (port < RTE_MAX_ETHPORTS && rte_eth_dev_get_name_by_port(port, name) != 0)
		port = rte_eth_find_next_owned_by(port + 1, RTE_ETH_DEV_NO_OWNER);
	return port < RTE_MAX_ETHPORTS ? (int)port : -1;
}

static int port_info(uint16_t port, struct ferroce_port_info *info)
{
	struct rte_eth_dev_info from;
	const struct rte_devargs *arguments = NULL;
	int result = rte_eth_dev_info_get(port, &from);

	if (result != 0)
		return result;
	if (from.device != NULL)
		arguments = rte_dev_devargs(from.device);
	*info = (struct ferroce_port_info){
		.driver = from.driver_name,
		.arguments = arguments == NULL ? NULL : arguments->args,
		.rss_udp = from.flow_type_rss_offloads & (RTE_ETH_RSS_NONFRAG_IPV4_UDP | RTE_ETH_RSS_NONFRAG_IPV6_UDP),
		.interface = from.if_index,
		.min_mtu = from.min_mtu,
		.max_mtu = from.max_mtu,
		.max_queues = RTE_MIN(from.max_rx_queues, from.max_tx_queues),
		.multi_segment = (from.tx_offload_capa & RTE_ETH_TX_OFFLOAD_MULTI_SEGS) != 0,
	};
	return 0;
}

static int port_configure(uint16_t port, const struct ferroce_port_settings *settings)
{
	struct rte_eth_conf conf;

	memset(&conf, 0, sizeof(conf));
	if (settings->rss != 0) {
		conf.rxmode.mq_mode = RTE_ETH_MQ_RX_RSS;
		conf.rx_adv_conf.rss_conf.rss_hf = settings->rss;
	}
	if (settings->multi_segment)
		conf.txmode.offloads = RTE_ETH_TX_OFFLOAD_MULTI_SEGS;
	conf.rxmode.mtu = settings->mtu;
	return rte_eth_dev_configure(port, settings->queues, settings->queues, &conf);
}

static int port_mtu(uint16_t port, uint16_t *mtu)
{
	return rte_eth_dev_get_mtu(port, mtu);
}

static int port_set_mtu(uint16_t port, uint16_t mtu)
{
	return rte_eth_dev_set_mtu(port, mtu);
}

static int port_fit(uint16_t port, uint16_t *rx_descriptors, uint16_t *tx_descriptors)
{
	return rte_eth_dev_adjust_nb_rx_tx_desc(port, rx_descriptors, tx_descriptors);
}

static int port_node(uint16_t port)
{
	return rte_eth_dev_socket_id(port);
}

static int rx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, int node, struct rte_mempool *pool)
{
	return rte_eth_rx_queue_setup(port, queue, descriptors, node, NULL, pool);
}

static int tx_queue(uint16_t port, uint16_t queue, uint16_t descriptors, int node)
{
	return rte_eth_tx_queue_setup(port, queue, descriptors, node, NULL);
}

static int port_start(uint16_t port)
{
	return rte_eth_dev_start(port);
}

static int port_stop(uint16_t port)
{
	return rte_eth_dev_stop(port);
}

static int port_remove(uint16_t port)
{
	struct rte_eth_dev_info info;
	int result = rte_eth_dev_info_get(port, &info);

	return result != 0 ? result : rte_dev_remove(info.device);
}

static int port_mac(uint16_t port, uint8_t mac[6])
{
	struct rte_ether_addr address;
	int result = rte_eth_macaddr_get(port, &address);

	if (result == 0)
		memcpy(mac, address.addr_bytes, sizeof(address.addr_bytes));
	return result;
}

static int port_hear_multicast(uint16_t port)
{
	return rte_eth_allmulticast_enable(port);
}

/* Creates a flow rule for one network protocol. Returns whether the port has accepted it. */
static int steer(uint16_t port, enum rte_flow_item_type network, uint16_t udp_port, uint16_t queues, uint64_t rss)
{
	const struct rte_flow_attr attributes = { .ingress = 1 };
	const struct rte_flow_item_udp udp = { .hdr.dst_port = rte_cpu_to_be_16(udp_port) };
	const struct rte_flow_item_udp mask = { .hdr.dst_port = UINT16_MAX };
	const struct rte_flow_item pattern[] = {
		{ .type = RTE_FLOW_ITEM_TYPE_ETH },
		{ .type = network },
		{ .type = RTE_FLOW_ITEM_TYPE_UDP, .spec = &udp, .mask = &mask },
		{ .type = RTE_FLOW_ITEM_TYPE_END },
	};
	uint16_t numbers[RTE_MAX_QUEUES_PER_PORT];
	const struct rte_flow_action_queue one = { .index = 0 };
	const struct rte_flow_action_rss spread = { .types = rss, .queue_num = queues, .queue = numbers };
	const struct rte_flow_action actions[] = {
		{ .type = queues > 1 ? RTE_FLOW_ACTION_TYPE_RSS : RTE_FLOW_ACTION_TYPE_QUEUE,
		  .conf = queues > 1 ? (const void *)&spread : &one },
		{ .type = RTE_FLOW_ACTION_TYPE_END },
	};
	struct rte_flow_error error;

	if (queues > RTE_MAX_QUEUES_PER_PORT)
		return 0;
	for (uint16_t i = 0; i < queues; i++)
		numbers[i] = i;
	return rte_flow_validate(port, &attributes, pattern, actions, &error) == 0 &&
	       rte_flow_create(port, &attributes, pattern, actions, &error) != NULL;
}

static int port_steer(uint16_t port, uint16_t udp_port, uint16_t queues, uint64_t rss)
{
	return steer(port, RTE_FLOW_ITEM_TYPE_IPV4, udp_port, queues, rss) &&
	       steer(port, RTE_FLOW_ITEM_TYPE_IPV6, udp_port, queues, rss);
}

static int link_is_up(uint16_t port)
{
	struct rte_eth_link link;

	return rte_eth_link_get_nowait(port, &link) == 0 && link.link_status == RTE_ETH_LINK_UP;
}

static uint32_t link_speed(uint16_t port)
{
	struct rte_eth_link link;

	if (rte_eth_link_get_nowait(port, &link) != 0 || link.link_speed == RTE_ETH_SPEED_NUM_UNKNOWN)
		return RTE_ETH_SPEED_NUM_NONE;
	return link.link_speed;
}

static int port_losses(uint16_t port, struct ferroce_losses *losses)
{
	struct rte_eth_stats stats;
	int result = rte_eth_stats_get(port, &stats);

	if (result == 0) {
		losses->received = stats.imissed + stats.rx_nombuf;
		losses->sent = stats.oerrors;
	}
	return result;
}

/* ---------------------------------------------------------------- packet buffers */

static struct rte_mempool *pool_create(const char *name, uint32_t count, uint32_t cache, uint16_t private_size,
				       uint16_t room, int node, int *error)
{
	struct rte_mempool *pool =
		rte_pktmbuf_pool_create(name, count, cache, private_size, room + RTE_PKTMBUF_HEADROOM, node);

	*error = pool == NULL ? -rte_errno : 0;
	return pool;
}

static void pool_free(struct rte_mempool *pool)
{
	rte_mempool_free(pool);
}

static uint32_t pool_available(const struct rte_mempool *pool)
{
	return rte_mempool_avail_count(pool);
}

static uint16_t rx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, struct ferroce_frame *frames,
			 uint16_t n)
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

static const uint8_t *contiguous(const struct rte_mbuf *mbuf, uint32_t length, uint8_t *buffer)
{
	return rte_pktmbuf_read(mbuf, 0, length, buffer);
}

static int take(struct rte_mempool *pool, struct rte_mbuf **mbufs, uint8_t **rooms, uint16_t n)
{
	int result = rte_pktmbuf_alloc_bulk(pool, mbufs, n);

	if (result != 0)
		return result;
	for (uint16_t i = 0; i < n; i++)
		rooms[i] = rte_pktmbuf_mtod(mbufs[i], uint8_t *);
	return 0;
}

static void give(struct rte_mbuf **mbufs, uint32_t n)
{
	rte_pktmbuf_free_bulk(mbufs, n);
}

static void set_length(struct rte_mbuf *mbuf, uint16_t length)
{
	mbuf->data_len = length;
	mbuf->pkt_len = length;
}

static void *private_data(struct rte_mbuf *mbuf)
{
	return rte_mbuf_to_priv(mbuf);
}

static void chain(struct rte_mbuf *head, uint16_t head_length, struct rte_mbuf *payload, void *address,
		  uint16_t length, struct ferroce_shared *room, void (*released)(void *address, void *pinned),
		  void *pinned, struct rte_mbuf *tail, uint16_t tail_length)
{
	struct rte_mbuf_ext_shared_info *shared = (struct rte_mbuf_ext_shared_info *)room;

	shared->free_cb = released;
	shared->fcb_opaque = pinned;
	rte_mbuf_ext_refcnt_set(shared, 1);
	/* No IOVA: only ports whose driver copies with the CPU gather. */
	rte_pktmbuf_attach_extbuf(payload, address, RTE_BAD_IOVA, length, shared);
	payload->data_len = length;
	payload->next = tail;
	tail->data_len = tail_length;
	head->data_len = head_length;
	head->pkt_len = (uint32_t)head_length + length + tail_length;
	head->nb_segs = 3;
	head->next = payload;
}

static uint16_t tx_burst(uint16_t port, uint16_t queue, struct rte_mbuf **mbufs, uint16_t n)
{
	return rte_eth_tx_burst(port, queue, mbufs, n);
}

const struct ferroce_dpdk ferroce_dpdk = {
	.abi = FERROCE_DPDK_ABI,
	.size = sizeof(struct ferroce_dpdk),
	.max_room = UINT16_MAX - RTE_PKTMBUF_HEADROOM,
	.eal_start = eal_start,
	.error_text = error_text,
	.thread_register = thread_register,
	.thread_unregister = thread_unregister,
	.await_control = await_control,
	.device_probe = device_probe,
	.port_find = port_find,
	.port_next = port_next,
	.port_info = port_info,
	.port_configure = port_configure,
	.port_mtu = port_mtu,
	.port_set_mtu = port_set_mtu,
	.port_fit = port_fit,
	.port_node = port_node,
	.rx_queue = rx_queue,
	.tx_queue = tx_queue,
	.port_start = port_start,
	.port_stop = port_stop,
	.port_remove = port_remove,
	.port_mac = port_mac,
	.port_hear_multicast = port_hear_multicast,
	.port_steer = port_steer,
	.link_is_up = link_is_up,
	.link_speed = link_speed,
	.port_losses = port_losses,
	.pool_create = pool_create,
	.pool_free = pool_free,
	.pool_available = pool_available,
	.rx_burst = rx_burst,
	.contiguous = contiguous,
	.take = take,
	.give = give,
	.set_length = set_length,
	.private_data = private_data,
	.chain = chain,
	.tx_burst = tx_burst,
};
