//! The declarations by hand are those of `shim.h`: a C compiler prints where each field is.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::fmt::Write;
use std::mem::offset_of;
use std::path::Path;
use std::process::Command;
use std::{env, fs, process};

use ferroce_dpdk_sys::abi::{ABI, NAME_SIZE, SHARED_SIZE};
use ferroce_dpdk_sys::{Frame, Functions, Losses, PortInfo, PortSettings, Shared};

/// Each structure's size and fields, as C and as Rust has them: a program that prints the one, and the other.
macro_rules! layouts {
    ($($rust:ident, $c:literal: $($field:ident),*;)*) => {{
        let (mut program, mut here) = (String::new(), String::new());
        $(
            let c = $c;
            writeln!(program, "printf(\"{c} %zu\\n\", sizeof(struct {c}));").unwrap();
            writeln!(here, "{c} {}", size_of::<$rust>()).unwrap();
            $(
                let field = stringify!($field);
                writeln!(program, "printf(\"{c}.{field} %zu\\n\", offsetof(struct {c}, {field}));").unwrap();
                writeln!(here, "{c}.{field} {}", offset_of!($rust, $field)).unwrap();
            )*
        )*
        (program, here)
    }};
}

#[test]
fn every_field_is_where_c_has_it() {
    let (program, mut here) = layouts! {
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
    writeln!(here, "{ABI} {NAME_SIZE} {SHARED_SIZE}").unwrap();

    let scratch = env::temp_dir().join(format!("ferroce-abi-{}", process::id()));
    fs::create_dir(&scratch).unwrap();
    let (source, binary) = (scratch.join("abi.c"), scratch.join("abi"));
    let numbers = "printf(\"%d %d %d\\n\", FERROCE_DPDK_ABI, FERROCE_NAME_SIZE, FERROCE_SHARED_SIZE);";
    let text = format!(
        "#include <stdio.h>\n#include \"shim.h\"\nint main(void) {{\n{program}{numbers}\nreturn 0; }}\n"
    );
    fs::write(&source, text).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    // Whoever links Rust has a C compiler.
    let built =
        Command::new("cc").arg("-I").arg(folder).arg("-o").arg(&binary).arg(&source).status().unwrap();
    assert!(built.success());
    let printed = Command::new(&binary).output().unwrap();
    fs::remove_dir_all(&scratch).unwrap();
    assert_eq!(String::from_utf8(printed.stdout).unwrap(), here);
}
