//! The hand-written declarations match the system's libxdp and kernel headers.
#![cfg(feature = "use_cc_build")]

use std::path::Path;

use ferroce_driver_test_support::c_layout::printed;
use ferroce_driver_test_support::layouts;
use libxdp_sys::*;

#[test]
fn every_field_is_where_c_has_it() {
    let (mut program, mut here) = layouts! {
        xsk_ring_prod, "xsk_ring_prod": cached_prod, cached_cons, mask, size, producer, consumer, ring, flags;
        xsk_ring_cons, "xsk_ring_cons": cached_prod, cached_cons, mask, size, producer, consumer, ring, flags;
        xsk_umem_config, "xsk_umem_config": fill_size, comp_size, frame_size, frame_headroom, flags;
        xsk_socket_config, "xsk_socket_config": rx_size, tx_size, xdp_flags, bind_flags;
        xdp_desc, "xdp_desc": addr, len, options;
        xdp_statistics, "xdp_statistics":
            rx_dropped, rx_invalid_descs, tx_invalid_descs, rx_ring_full, rx_fill_ring_empty_descs, tx_ring_empty_descs;
    };
    for (name, value) in [
        ("XDP_PACKET_HEADROOM", XDP_PACKET_HEADROOM),
        ("XDP_RING_NEED_WAKEUP", XDP_RING_NEED_WAKEUP),
        ("XDP_STATISTICS", XDP_STATISTICS),
        ("XSK_RING_CONS__DEFAULT_NUM_DESCS", XSK_RING_CONS__DEFAULT_NUM_DESCS),
        ("XSK_RING_PROD__DEFAULT_NUM_DESCS", XSK_RING_PROD__DEFAULT_NUM_DESCS),
        ("XSK_UMEM__DEFAULT_FRAME_HEADROOM", XSK_UMEM__DEFAULT_FRAME_HEADROOM),
        ("XSK_UMEM__DEFAULT_FRAME_SIZE", XSK_UMEM__DEFAULT_FRAME_SIZE),
    ] {
        program += &format!("printf(\"{name} %u\\n\", {name});\n");
        here += &format!("{name} {value}\n");
    }
    // The headroom of a packet is defined in linux/bpf.h; xdp/xsk.h includes linux/if_xdp.h.
    assert_eq!(printed(Path::new("/usr/include"), &["xdp/xsk.h", "linux/bpf.h"], &program), here);
}
