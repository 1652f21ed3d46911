//! Features that a backend or a port may lack.

use std::fmt;

/// The feature that [`Error::Unsupported`](crate::Error::Unsupported) names as missing. There is no emulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// FLUSH: off in the [`Config`](crate::Config).
    Flush,
    /// ATOMIC WRITE: off in the [`Config`](crate::Config).
    AtomicWrite,
    /// RoCE v1, on a UDP socket.
    RoceV1,
    /// Another address, on a port that is a socket.
    SecondAddress,
    /// A connection of UC queue pairs by the connection manager, with an RNIC.
    UnreliableConnectionOfCard,
    /// A connection in another partition than the first, with an RNIC.
    PartitionOfCard,
    /// A connection with another path MTU than the largest, with an RNIC.
    PathMtuOfCard,
    /// Another address or P_Key, with an RNIC.
    TablesOfCard,
    /// A SEND that invalidates a region, with an RNIC.
    RemoteInvalidate,
    /// Exchange of the memory of a region, with an RNIC.
    Exchange,
    /// Selective repeat, with an RNIC.
    SelectiveRepeat,
    /// Congestion control configured by ferroce, with an RNIC.
    CongestionControl,
    /// The window of a queue pair ([`QpConfig::window`](crate::QpConfig::window)), with an RNIC.
    Window,
    /// Dropping requests instead of an access error, with an RNIC.
    DropAccessErrors,
    /// A next hop chosen by the application, with an RNIC.
    ChosenNextHop,
    /// Atomics to and from memory of a device.
    AtomicsOfDevice,
    /// AF_XDP: not in this build.
    AfXdp,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::Flush => "FLUSH, which its Config turns off or an RNIC lacks",
            Feature::AtomicWrite => "ATOMIC WRITE, which its Config turns off or an RNIC lacks",
            Feature::RoceV1 => "RoCE v1, which does not use UDP",
            Feature::SecondAddress => "another address on a socket; open another socket for it",
            Feature::UnreliableConnectionOfCard => {
                "UC connections by the connection manager, with an RNIC: the kernel's connection manager only makes RC \
                 connections; Context::handshake connects UC queue pairs"
            }
            Feature::PartitionOfCard => {
                "connections in another partition than the first, with an RNIC: the kernel chooses"
            }
            Feature::PathMtuOfCard => {
                "connections of another path MTU than the largest, with an RNIC: the kernel chooses"
            }
            Feature::TablesOfCard => {
                "changes of an RNIC's GID and P_Key tables, which are the kernel's: `ip addr add` adds a GID, \
                 and the P_Key of RoCE is 0xffff"
            }
            Feature::RemoteInvalidate => {
                "a region that a peer's SEND invalidates, with an RNIC; memory windows can be"
            }
            Feature::Exchange => "replacing the memory of a region, with an RNIC; register a new region",
            Feature::SelectiveRepeat => "selective repeat, with an RNIC, whose firmware chooses",
            Feature::CongestionControl => "congestion control by the Config, with an RNIC, which has its own",
            Feature::Window => "a window of unacknowledged packets, with an RNIC, which has its own",
            Feature::DropAccessErrors => "drop_access_errors, with an RNIC, which answers with a NAK",
            Feature::ChosenNextHop => {
                "a next hop that the application names, with an RNIC: the kernel finds it"
            }
            Feature::AtomicsOfDevice => {
                "atomics of a device's memory, which the CPU can't reach; use memory of the host for them"
            }
            Feature::AfXdp => "AF_XDP, which this build does not include (cargo build --features af_xdp)",
        })
    }
}
