//! The placement of ranks, and the connection between them.

use std::net::Ipv4Addr;
use std::process::Command;

use ferroce_benches::veth::{Veth, is_root};

use crate::Outcome;

/// What carries elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Place {
    /// Ranks of one host
    Host,
    /// Ranks of two hosts (namespaces), ferroce over UDP sockets
    Udp,
    /// The same, ferroce over AF_XDP
    AfXdp,
}

impl Place {
    pub(crate) const ALL: [Place; 3] = [Place::Host, Place::Udp, Place::AfXdp];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Place::Host => "inside a host",
            Place::Udp => "between two namespaces (veth, MTU 9000), ferroce over UDP sockets",
            Place::AfXdp => "between two namespaces (veth, MTU 9000), ferroce over AF_XDP",
        }
    }
}

/// A place, set up for a number of ranks.
pub(crate) struct Stand {
    pub(crate) place: Place,
    pub(crate) ranks: usize,
    pub(crate) cores: [usize; 2],
    /// `None` inside a host.
    pub(crate) veth: Option<Veth>,
}

impl Stand {
    /// # Errors
    /// The place is not available on this machine or for this user.
    pub(crate) fn new(place: Place, ranks: usize, cores: [usize; 2]) -> Outcome<Stand> {
        if place == Place::AfXdp && ranks > 2 {
            return Err("an AF_XDP port is one process's, and each namespace has two ranks".into());
        }
        if place == Place::AfXdp && !cfg!(feature = "af_xdp") {
            return Err("built without the feature af_xdp".into());
        }
        let veth = match place {
            Place::Host => None,
            _ if !is_root() => return Err("needs root, for network namespaces".into()),
            Place::Udp | Place::AfXdp => Some(Veth::new("collectives", 9000)?),
        };
        Ok(Stand { place, ranks, cores, veth })
    }

    /// Both cores, in taskset's format.
    pub(crate) fn all_cores(&self) -> String {
        let [a, b] = self.cores;
        format!("{a},{b}")
    }

    /// Whether ranks yield their cores while they wait.
    pub(crate) fn yields(&self) -> bool {
        self.ranks > 2
    }

    /// The address of rank 0.
    pub(crate) fn master(&self) -> Ipv4Addr {
        if self.veth.is_some() { Veth::address(0) } else { Ipv4Addr::LOCALHOST }
    }

    /// ferroce's device argument.
    pub(crate) fn device(&self, rank: usize) -> String {
        match self.place {
            Place::Host => format!("udp:{}", self.master()),
            Place::Udp => format!("udp:{}", Veth::address(self.end(rank))),
            Place::AfXdp => format!("af_xdp:{}", Veth::INTERFACE),
        }
    }

    /// The first half of the ranks is at the first end.
    fn end(&self, rank: usize) -> usize {
        rank * 2 / self.ranks
    }

    /// A command that runs a program at a rank's end and on its core.
    pub(crate) fn command(&self, rank: usize) -> Command {
        let core = self.cores[rank % 2].to_string();
        match &self.veth {
            Some(veth) => {
                let mut command = veth.command(self.end(rank));
                command.args(["taskset", "-c", &core]);
                command
            }
            None => {
                let mut command = Command::new("taskset");
                command.args(["-c", &core]);
                command
            }
        }
    }
}
