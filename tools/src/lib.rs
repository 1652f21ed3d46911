//! The `ferroce` command as a library: for its `main`, for tests and fuzz targets, and for further commands that reuse
//! its parts.
//!
//! Each sub-command is a public module with its arguments (`Args`, which [clap](https://docs.rs/clap) parses) and
//! `run`, which prints the result on standard output and returns the exit status. A failure is a [`Failure`], which
//! also has the exit status. The parsing of a peer's bytes is separate from sockets, so that the fuzzer reaches it:
//! [`control_message`] with [`doctor::message`] and [`perf::message`], [`perf::plan`], [`perf::perftest::message`] and
//! [`pingpong::destination`]; for collectives it is `collectives/src/rendezvous/frame.rs`.
//!
//! ```
//! use clap::Parser;
//! use ferroce_tools::Command;
//!
//! #[derive(Parser)]
//! struct Cli {
//!     #[command(subcommand)]
//!     command: Command,
//! }
//!
//! let cli = Cli::try_parse_from(["ferroce", "pingpong", "-d", "loopback", "-n", "10"]).unwrap();
//! assert_eq!(cli.command.name(), "pingpong");
//! assert!(cli.command.run().is_ok());
//! ```
//!
//! # Files
//!
//! Besides the sub-commands:
//!
//! - `main.rs`: parses the arguments, sets up the log, and ends the process with the exit status
//! - `cli.rs`, `command.rs`: the command line; the sub-commands by name
//! - `endpoint.rs`: opens a port and connects queue pairs, for all sub-commands
//! - `selftest.rs`: both ends of a measurement in one process
//! - `failure.rs`, `cause.rs`: exit statuses; the cause of failed work
//! - `output.rs`, `progress.rs`: standard output, standard error, `--json`; progress of a measurement
//! - `quantity.rs`: sizes, times and rates as text
//! - `host.rs`, `role.rs`: the peer's address; the roles of an rdma_cm program
//! - `tcp.rs`, `control_message.rs`: TCP connections of the two ends; their framing
//! - `serving.rs`: a server that serves its clients one by one
//! - `visitors.rs`, `callers.rs`: TCP clients of a server; clients of its connection manager
//! - `capture_input.rs`, `diagnosis.rs`: reading captures; the cause of a wrong ICRC
//! - `congestion.rs`, `memory.rs`, `dscp.rs`: options of congestion control; `--memory`; traffic classes of a port
//! - `netns.rs`, `process.rs`: network namespaces of ranks; other processes of the host

mod callers;
mod capture_input;
mod cause;
mod cli;
pub mod collective;
mod command;
mod congestion;
pub mod control_message;
pub mod demo;
pub mod devinfo;
mod diagnosis;
pub mod dissect;
pub mod doctor;
mod dscp;
mod endpoint;
pub mod fabric;
mod failure;
pub mod flight;
#[cfg(test)]
mod groups;
mod host;
mod memory;
mod netns;
mod output;
pub mod perf;
pub mod pingpong;
mod process;
mod progress;
mod quantity;
pub mod replay;
mod role;
pub mod rping;
mod selftest;
mod serving;
pub mod stat;
mod tcp;
pub mod topo;
pub mod ucmatose;
pub mod udaddy;
mod visitors;

pub use cli::Cli;
pub use command::Command;
pub use failure::Failure;
