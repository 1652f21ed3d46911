//! Processes of this user that share a device's addresses.

use std::net::IpAddr;

use ferroce::driver::Capabilities;
use ferroce::driver::holder::Process;
use ferroce::driver::udp::sharers;
use serde::Serialize;

use crate::failure::Failure;
use crate::output::say;

/// A process with a slot of an address.
#[derive(Debug, Serialize)]
pub(super) struct Sharer {
    address: IpAddr,
    slot: usize,
    pid: u32,
    /// As shown by `ps -o comm`; null if this process may not read it.
    command: Option<String>,
}

impl Sharer {
    /// The processes on the addresses of a device that is closed again.
    pub(super) fn find(capabilities: &Capabilities) -> Vec<Sharer> {
        if !["udp", "af_xdp"].contains(&capabilities.driver) {
            return Vec::new();
        }
        let of = |address: &IpAddr| {
            let address = *address;
            // If they can't be listed, none is known.
            let all = sharers(address).unwrap_or_default();
            let command = |pid| Process::of(pid).map(|process| process.name);
            all.into_iter().map(move |(slot, pid)| Sharer { address, slot, pid, command: command(pid) })
        };
        capabilities.addresses.iter().flat_map(of).collect()
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        let Sharer { address, slot, pid, command } = self;
        let command = command.as_ref().map_or(String::new(), |command| format!(", {command}"));
        say!("  slot {slot} of {address}  pid {pid}{command}")
    }
}
