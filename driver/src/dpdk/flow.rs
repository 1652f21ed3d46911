//! Flow rules: RoCEv2 to the port's queues, where the device can tell it from the rest.

use std::ffi::c_void;
use std::ptr;

use ferroce_dpdk_sys as sys;

use crate::ROCE_PORT;

/// Directs UDP port 4791, over IPv4 and IPv6, to the port's queues. Returns whether it does; without
/// such a rule everything comes, and the engine leaves aside what is not for it.
pub(super) fn steer(port: u16, queues: u16, rss: u64) -> bool {
    let rules =
        [sys::rte_flow_item_type_RTE_FLOW_ITEM_TYPE_IPV4, sys::rte_flow_item_type_RTE_FLOW_ITEM_TYPE_IPV6];
    rules.into_iter().all(|network| create(port, network, queues, rss))
}

fn create(port: u16, network: sys::rte_flow_item_type, queues: u16, rss: u64) -> bool {
    let mut udp = sys::rte_flow_item_udp::default();
    let mut mask = udp;
    udp.hdr.dst_port = ROCE_PORT.to_be();
    mask.hdr.dst_port = u16::MAX;
    let item = |type_, spec: *const c_void, mask: *const c_void| sys::rte_flow_item {
        type_,
        spec,
        last: ptr::null(),
        mask,
    };
    let any = |type_| item(type_, ptr::null(), ptr::null());
    let pattern = [
        any(sys::rte_flow_item_type_RTE_FLOW_ITEM_TYPE_ETH),
        any(network),
        item(
            sys::rte_flow_item_type_RTE_FLOW_ITEM_TYPE_UDP,
            (&raw const udp).cast(),
            (&raw const mask).cast(),
        ),
        any(sys::rte_flow_item_type_RTE_FLOW_ITEM_TYPE_END),
    ];
    let numbers: Vec<u16> = (0..queues).collect();
    let one = sys::rte_flow_action_queue { index: 0 };
    let spread = sys::rte_flow_action_rss {
        types: rss,
        queue_num: queues.into(),
        queue: numbers.as_ptr(),
        ..Default::default()
    };
    let action = |type_, conf: *const c_void| sys::rte_flow_action { type_, conf };
    let direct = if queues > 1 {
        action(sys::rte_flow_action_type_RTE_FLOW_ACTION_TYPE_RSS, (&raw const spread).cast())
    } else {
        action(sys::rte_flow_action_type_RTE_FLOW_ACTION_TYPE_QUEUE, (&raw const one).cast())
    };
    let actions = [direct, action(sys::rte_flow_action_type_RTE_FLOW_ACTION_TYPE_END, ptr::null())];
    let mut attributes = sys::rte_flow_attr::default();
    attributes.set_ingress(1);
    let mut error = sys::rte_flow_error::default();
    // SAFETY: the pattern and the actions end with END, and all that they point to outlives the calls.
    unsafe {
        let (pattern, actions) = (pattern.as_ptr(), actions.as_ptr());
        sys::rte_flow_validate(port, &attributes, pattern, actions, &raw mut error) == 0
            && !sys::rte_flow_create(port, &attributes, pattern, actions, &raw mut error).is_null()
    }
}
