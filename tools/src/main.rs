//! The `ferroce` command.

mod callers;
mod cause;
mod demo;
mod devinfo;
mod diagnosis;
mod dissect;
mod doctor;
mod endpoint;
mod failure;
#[cfg(test)]
mod groups;
mod netns;
mod output;
mod perf;
mod pingpong;
mod replay;
mod role;
mod rping;
mod selftest;
mod stat;
mod tcp;
mod ucmatose;
mod udaddy;
mod visitors;

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use failure::Failure;

/// RoCEv2 in user space.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Demo(demo::Args),
    Devinfo(devinfo::Args),
    Dissect(dissect::Args),
    Doctor(doctor::Args),
    Perf(perf::Args),
    Pingpong(pingpong::Args),
    Replay(replay::Args),
    Rping(rping::Args),
    Stat(stat::Args),
    Ucmatose(ucmatose::Args),
    Udaddy(udaddy::Args),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(said) => return answer(&said),
    };
    let level = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let has_color = io::stderr().is_terminal() && !is_plain;
    tracing_subscriber::fmt().with_env_filter(level).with_writer(io::stderr).with_ansi(has_color).init();
    match cli.command {
        Command::Demo(args) => demo::run(args),
        Command::Devinfo(args) => devinfo::run(args),
        Command::Dissect(args) => dissect::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Perf(args) => perf::run(args),
        Command::Pingpong(args) => pingpong::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Rping(args) => rping::run(args),
        Command::Stat(args) => stat::run(args),
        Command::Ucmatose(args) => ucmatose::run(args),
        Command::Udaddy(args) => udaddy::run(args),
    }
}

/// Prints the help that was asked for, or what is wrong with the command line.
fn answer(said: &clap::Error) -> ExitCode {
    match said.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Failure::run(format!("standard output: {error}")).report("--help")
        }
        _ => ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(2)),
    }
}
