//! Finds the system's DPDK with pkg-config, translates the declarations that the driver uses and
//! compiles the shim for the inline functions.

use std::env;
use std::path::PathBuf;
use std::process::{Command, exit};

/// Debian 12's. `rte_eth_conf` has the MTU since 21.11; nothing older than this one was tried.
const OLDEST: &str = "22.11";

/// What is linked. The drivers of devices are plug-ins, which EAL loads from the folder that DPDK was
/// built with.
const LIBRARIES: [&str; 5] = ["rte_ethdev", "rte_mbuf", "rte_mempool", "rte_eal", "rte_kvargs"];

const FUNCTIONS: &str = "rte_eal_init|rte_dev_probe|rte_strerror|rte_thread_register|rte_thread_unregister\
    |rte_eth_dev_(get_port_by_name|get_name_by_port|info_get|configure)\
    |rte_eth_dev_(start|stop|set_mtu|get_mtu|socket_id)\
    |rte_eth_(rx_queue_setup|tx_queue_setup|dev_adjust_nb_rx_tx_desc|macaddr_get|stats_get)\
    |rte_eth_allmulticast_enable|rte_eth_find_next_owned_by\
    |rte_flow_(validate|create)\
    |rte_pktmbuf_(pool_create|free_bulk)\
    |rte_mempool_(free|avail_count)\
    |ferroce_.*";

const TYPES: &str = "rte_eth_(dev_info|conf|rxconf|txconf|stats)|rte_ether_addr\
    |rte_flow_(attr|item|item_udp|action|action_rss|action_queue|error)";

const VALUES: &str = "RTE_MAX_ETHPORTS|RTE_PKTMBUF_HEADROOM|RTE_ETH_NAME_MAX_LEN\
    |rte_flow_(item|action)_type_RTE_FLOW_(ITEM|ACTION)_TYPE_(END|ETH|IPV4|IPV6|UDP|QUEUE|RSS)\
    |rte_eth_rx_mq_mode_RTE_ETH_MQ_RX_(NONE|RSS)\
    |ferroce_.*";

fn main() {
    println!("cargo:rerun-if-changed=src/shim.h");
    println!("cargo:rerun-if-changed=src/shim.c");
    if env::var_os("CARGO_FEATURE_SYSTEM").is_none() {
        return;
    }
    let found = pkg_config::Config::new().atleast_version(OLDEST).cargo_metadata(false).probe("libdpdk");
    let dpdk = found.unwrap_or_else(|error| {
        fail(&format!(
            "no DPDK {OLDEST} or later for the feature 'dpdk': install Debian's packages libdpdk-dev and dpdk \
             (or point PKG_CONFIG_PATH at libdpdk.pc), or build without the feature\n{error}"
        ))
    });
    let flags = compiler_flags();

    cc::Build::new().file("src/shim.c").flags(&flags).opt_level(3).compile("ferroce_dpdk_shim");
    for path in &dpdk.link_paths {
        println!("cargo:rustc-link-search=native={}", path.display());
    }
    for library in LIBRARIES {
        println!("cargo:rustc-link-lib=dylib={library}");
    }

    let bindings = bindgen::Builder::default()
        .header("src/shim.h")
        .clang_args(&flags)
        .allowlist_function(FUNCTIONS)
        .allowlist_type(TYPES)
        .allowlist_var(VALUES)
        // Only pointers to these are passed about.
        .opaque_type("rte_mbuf|rte_mempool|rte_device|rte_mbuf_ext_shared_info")
        // Packed with aligned parts, which Rust has no name for.
        .opaque_type("rte_arp_.*|rte_l2tpv2_.*")
        .derive_default(true)
        .layout_tests(false)
        .generate_comments(false)
        .generate()
        .unwrap_or_else(|error| fail(&format!("translating DPDK {}'s headers: {error}", dpdk.version)));
    let out = PathBuf::from(env::var_os("OUT_DIR").unwrap_or_else(|| fail("cargo sets OUT_DIR")));
    if let Err(error) = bindings.write_to_file(out.join("bindings.rs")) {
        fail(&format!("writing the bindings: {error}"));
    }
}

/// DPDK's own flags, of which the pkg-config crate passes on only a part: its headers need the
/// configuration and the instruction set that the library was built with.
fn compiler_flags() -> Vec<String> {
    let pkg_config = env::var_os("PKG_CONFIG").unwrap_or_else(|| "pkg-config".into());
    let output = Command::new(pkg_config).args(["--cflags", "libdpdk"]).output();
    let output = output.unwrap_or_else(|error| fail(&format!("running pkg-config: {error}")));
    String::from_utf8_lossy(&output.stdout).split_whitespace().map(str::to_owned).collect()
}

fn fail(message: &str) -> ! {
    // The `=error` form shows without --verbose.
    println!("cargo::error={}", message.lines().next().unwrap_or_default());
    eprintln!("{message}");
    exit(1)
}
