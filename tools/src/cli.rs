//! The whole command line, for `main`, for man pages and for completions.
//!
//! `examples/manual.rs` makes man pages and shell completions from it.

use clap::Parser;

use crate::command::Command;

/// RoCEv2 in user space: measure, check and look into RDMA over Ethernet, with or without an RNIC.
#[derive(Parser)]
#[command(name = "ferroce", version, long_version = LONG_VERSION, after_help = CONVENTIONS)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Print only errors and warnings to standard error, no progress; the report stays.
    // `perf` uses -q for its queue pairs, as perftest does.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

/// Conventions of all sub-commands.
const CONVENTIONS: &str = "\
Results go to standard output; progress, warnings and errors to standard error.

Environment:
  RUST_LOG  what is logged to standard error: a level (error, warn, info, debug, trace, off), or TARGET=LEVEL for a part of
            ferroce, with commas between them, as RUST_LOG=warn,ferroce_driver=debug. What it does not name is logged at
            info. --quiet stands for RUST_LOG=warn.
  FERROCE_FLIGHT_DIR  a directory in which a rank whose communicator fails leaves its flight recording (`ferroce flight`).
  NO_COLOR  if it is set, there are no ANSI codes. There are none either with TERM=dumb, or if standard error is no
            terminal.

Exit status:
  0    the work was done
  1    it failed, or a check found something
  2    the command line can't be carried out as it is
  130  a signal (SIGINT, SIGTERM) ended it before the work was done; a server whose clients are done, or that has none yet,
       ends with 0
If the reader of standard output closes it (`| head -1`), the rest is not printed, and the exit status is that of the work. If
standard output can't be written, that is an error.";

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
