//! The whole command line, for `main`, for man pages and for completions.
//!
//! `examples/manual.rs` makes man pages and shell completions from it.

use clap::Parser;

use crate::command::Command;

/// RDMA over Ethernet (RoCEv2) in user space: measures, checks and decodes it, with or without an RDMA card (RNIC).
#[derive(Parser)]
#[command(name = "ferroce", version, long_version = LONG_VERSION, after_help = CONVENTIONS)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// Print only errors and warnings to standard error, no progress; the report is still printed.
    // `perf` uses -q for its queue pairs, as perftest does.
    #[arg(short, long, global = true)]
    pub quiet: bool,
}

/// Conventions of all sub-commands.
const CONVENTIONS: &str = "\
Results go to standard output; progress, warnings and errors to standard error.

Environment:
  RUST_LOG  what is logged to standard error: a level (error, warn, info, debug, trace, off; info
            by default), and TARGET=LEVEL for a crate or module of ferroce, separated by commas:
            RUST_LOG=warn,ferroce_driver=debug. --quiet is the same as RUST_LOG=warn.
  FERROCE_FLIGHT_DIR  the directory in which a rank whose communicator fails writes its flight
            recording (see `ferroce flight`).
  NO_COLOR  if not empty, no ANSI codes; the same if TERM is dumb or standard error is not a
            terminal.

Exit status:
  0    the work was done
  1    the work failed, or a check found an error
  2    wrong usage: options are invalid, do not fit together, or do not fit this host;
       dissect and replay: also a failure (1 is a fault in the capture)
  3    replay: nothing to judge
  130  a signal (SIGINT, SIGTERM) ended it before the work was done; a server that serves no
       client when the signal arrives ends with 0
If the reader of standard output closes it (`| head -1`), the rest is not printed, and the exit
status does not change. Any other failure to write standard output is an error.";

const LONG_VERSION: &str = if cfg!(feature = "af_xdp") {
    concat!(
        env!("CARGO_PKG_VERSION"),
        "\ndrivers: af_xdp, udp, shm, loopback; dpdk and ibverbs where their libraries are"
    )
} else {
    concat!(
        env!("CARGO_PKG_VERSION"),
        "\ndrivers: udp, shm, loopback; dpdk and ibverbs where their libraries are; built without af_xdp"
    )
};
