//! The hand-written declarations match `shim.h`: a C compiler prints the offset of each field.
use std::path::Path;

use ferroce_dpdk_sys::abi::{ABI, NAME_SIZE, SHARED_SIZE};
use ferroce_dpdk_sys::{Frame, Functions, Losses, PortInfo, PortSettings, Shared};
use ferroce_driver_test_support::c_layout::printed;
use ferroce_driver_test_support::layouts;

#[test]
fn every_field_is_where_c_has_it() {
    let (mut program, mut here) = layouts! {
        Frame, "ferroce_frame": data, segment, length;
        PortInfo, "ferroce_port_info":
            driver, arguments, rss_udp, interface, min_mtu, max_mtu, max_queues, multi_segment;
        PortSettings, "ferroce_port_settings": rss, mtu, queues, multi_segment;
        Losses, "ferroce_losses": received, sent;
        Shared, "ferroce_shared": opaque;
        Functions, "ferroce_dpdk":
            abi, size, max_room, eal_start, error_text, thread_register, thread_unregister, await_control,
            device_probe, port_find, port_next, port_info, port_configure, port_mtu, port_set_mtu, port_fit, port_node,
            rx_queue, tx_queue, port_start, port_stop, port_remove, port_mac, port_hear_multicast, port_steer,
            link_is_up, link_speed, port_losses, pool_create, pool_free, pool_available, rx_burst, contiguous, take,
            give, set_length, private_data, chain, tx_burst;
    };
    program += "printf(\"%d %d %d\\n\", FERROCE_DPDK_ABI, FERROCE_NAME_SIZE, FERROCE_SHARED_SIZE);\n";
    here += &format!("{ABI} {NAME_SIZE} {SHARED_SIZE}\n");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    assert_eq!(printed(&folder, &["shim.h"], &program), here);
}
