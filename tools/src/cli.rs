//! The whole command line: for `main`, for man pages and for completions.

use clap::Parser;

use crate::command::Command;

/// RoCEv2 in user space: measure, check and look into RDMA over Ethernet, with or without an RNIC.
#[derive(Parser)]
#[command(name = "ferroce", version, long_version = LONG_VERSION)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

const LONG_VERSION: &str = if cfg!(feature = "af_xdp") {
    concat!(
        env!("CARGO_PKG_VERSION"),
        "\ndrivers: af_xdp, udp, loopback; dpdk and ibverbs where their libraries are"
    )
} else {
    concat!(
        env!("CARGO_PKG_VERSION"),
        "\ndrivers: udp, loopback; dpdk and ibverbs where their libraries are; built without af_xdp"
    )
};
