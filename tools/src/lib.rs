//! What the `ferroce` command does, as a library: for its `main`, for tests and fuzz targets, and for commands to
//! come that put its parts together.
//!
//! Each sub-command is a module with its arguments (`Args`, which [clap](https://docs.rs/clap) reads) and `run`, which
//! prints what came of it on standard output and returns the exit status. What keeps a command from its work is a
//! [`Failure`], which knows the exit status too. Beside them is what a peer's bytes mean, apart from sockets:
//! [`control_message`] with [`doctor::message`] and [`perf::message`], [`perf::plan`], [`perf::perftest::message`] and
//! [`pingpong::destination`].
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
