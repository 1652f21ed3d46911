//! The sub-commands, by name.

use std::process::ExitCode;

use clap::Subcommand;

use crate::failure::Failure;
use crate::{
    collective, demo, devinfo, dissect, doctor, fabric, flight, perf, pingpong, replay, rping, stat, topo,
    ucmatose, udaddy,
};

/// A sub-command with its arguments.
#[derive(Subcommand)]
#[expect(missing_docs, reason = "each is described by the arguments of its module")]
#[non_exhaustive]
pub enum Command {
    Collective(Box<collective::Args>),
    Demo(demo::Args),
    Devinfo(devinfo::Args),
    Dissect(dissect::Args),
    Doctor(doctor::Args),
    Fabric(Box<fabric::Args>),
    Flight(flight::Args),
    Perf(perf::Args),
    Pingpong(pingpong::Args),
    Replay(replay::Args),
    Rping(rping::Args),
    Stat(stat::Args),
    Topo(topo::Args),
    Ucmatose(ucmatose::Args),
    Udaddy(udaddy::Args),
}

impl Command {
    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Command::Collective(_) => "collective",
            Command::Demo(_) => "demo",
            Command::Devinfo(_) => "devinfo",
            Command::Dissect(_) => "dissect",
            Command::Doctor(_) => "doctor",
            Command::Fabric(_) => "fabric",
            Command::Flight(_) => "flight",
            Command::Perf(_) => "perf",
            Command::Pingpong(_) => "pingpong",
            Command::Replay(_) => "replay",
            Command::Rping(_) => "rping",
            Command::Stat(_) => "stat",
            Command::Topo(_) => "topo",
            Command::Ucmatose(_) => "ucmatose",
            Command::Udaddy(_) => "udaddy",
        }
    }

    /// Runs it. Returns its exit status.
    ///
    /// # Errors
    /// As the `run` of its module.
    pub fn run(self) -> Result<ExitCode, Failure> {
        match self {
            Command::Collective(args) => collective::run(*args),
            Command::Demo(args) => demo::run(args),
            Command::Devinfo(args) => devinfo::run(args),
            Command::Dissect(args) => dissect::run(args),
            Command::Doctor(args) => doctor::run(args),
            Command::Fabric(args) => fabric::run(*args),
            Command::Flight(args) => flight::run(args),
            Command::Perf(args) => perf::run(args),
            Command::Pingpong(args) => pingpong::run(args),
            Command::Replay(args) => replay::run(args),
            Command::Rping(args) => rping::run(args),
            Command::Stat(args) => stat::run(args),
            Command::Topo(args) => topo::run(args),
            Command::Ucmatose(args) => ucmatose::run(args),
            Command::Udaddy(args) => udaddy::run(args),
        }
    }
}
