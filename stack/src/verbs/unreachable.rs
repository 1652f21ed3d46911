use std::fmt;
use std::net::IpAddr;

use ferroce_driver::RefusalReason;
use rustix::io::Errno;

/// Why a peer can't be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unreachable {
    /// There is no route to it from the port's interface.
    NoRoute {
        /// The peer.
        peer: IpAddr,
    },
    /// No answer to ARP or neighbour discovery.
    NoNeighbour {
        /// The peer.
        peer: IpAddr,
        /// The peer itself on the same link, otherwise the router to it.
        next_hop: IpAddr,
    },
    /// A packet came back (ICMP Destination Unreachable).
    Refused {
        /// The peer.
        peer: IpAddr,
        /// The sender of the message: the peer, a router, or this host.
        from: IpAddr,
        /// The reason in the message.
        reason: RefusalReason,
    },
    /// The kernel can't determine the next hop.
    NotResolved {
        /// The peer.
        peer: IpAddr,
        /// The kernel's error number, if any; the driver's error is logged.
        errno: Option<i32>,
    },
    /// It does not answer, for an unknown reason.
    Silent {
        /// The peer.
        peer: IpAddr,
    },
}

impl Unreachable {
    /// The unreachable peer.
    pub fn peer(&self) -> IpAddr {
        match *self {
            Unreachable::NoRoute { peer }
            | Unreachable::NoNeighbour { peer, .. }
            | Unreachable::Refused { peer, .. }
            | Unreachable::NotResolved { peer, .. }
            | Unreachable::Silent { peer } => peer,
        }
    }

    /// From a driver's answer for the next hop to `peer`.
    pub(crate) fn of(peer: IpAddr, error: &ferroce_driver::Error) -> Unreachable {
        match error {
            ferroce_driver::Error::NoRoute { .. } => Unreachable::NoRoute { peer },
            ferroce_driver::Error::NoNeighbour { peer: next_hop, .. } => {
                Unreachable::NoNeighbour { peer, next_hop: *next_hop }
            }
            ferroce_driver::Error::Os { source, .. } => {
                Unreachable::NotResolved { peer, errno: source.raw_os_error() }
            }
            _ => Unreachable::NotResolved { peer, errno: None },
        }
    }
}

impl fmt::Display for Unreachable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let protocol = |hop: &IpAddr| if hop.is_ipv4() { "ARP" } else { "neighbour discovery" };
        match self {
            Unreachable::NoRoute { peer } => write!(f, "no route to {peer}"),
            Unreachable::NoNeighbour { peer, next_hop } if peer == next_hop => {
                write!(f, "{peer} does not answer {}", protocol(peer))
            }
            Unreachable::NoNeighbour { peer, next_hop } => {
                write!(f, "{next_hop}, the router to {peer}, does not answer {}", protocol(next_hop))
            }
            Unreachable::Refused { peer, from, reason: RefusalReason::Port } if peer == from => {
                write!(f, "{peer} has nothing on UDP port 4791 (ICMP port unreachable)")
            }
            Unreachable::Refused { peer, from, reason } => {
                write!(f, "packets to {peer} come back: {reason} (ICMP, from {from})")
            }
            Unreachable::NotResolved { peer, errno: Some(errno) } => {
                let is_silent = *errno == Errno::TIMEDOUT.raw_os_error();
                let hint =
                    if is_silent { "; it, or the router to it, does not answer ARP or ND" } else { "" };
                write!(f, "the next hop to {peer}: {}{hint}", std::io::Error::from_raw_os_error(*errno))
            }
            Unreachable::NotResolved { peer, errno: None } => {
                write!(f, "the next hop to {peer} can't be found")
            }
            Unreachable::Silent { peer } => write!(f, "{peer} does not answer"),
        }
    }
}

impl std::error::Error for Unreachable {}
