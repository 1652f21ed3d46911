//! What a backend or a port may lack.

use std::fmt;

/// What [`Error::Unsupported`](crate::Error::Unsupported) says is not there. Nothing is emulated in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Feature {
    /// FLUSH: off in the [`Config`](crate::Config).
    Flush,
    /// ATOMIC WRITE: off in the [`Config`](crate::Config).
    AtomicWrite,
    /// RoCE v1, on a port whose packets are UDP's.
    RoceV1,
    /// Another address, on a port that is a socket.
    SecondAddress,
    /// The connection manager, on a socket of a group that gets no messages for QP1.
    ConnectionManager,
    /// Ports of DPDK: left out of this build.
    Dpdk,
    /// AF_XDP: left out of this build.
    AfXdp,
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Feature::Flush => "FLUSH, which its Config turns off",
            Feature::AtomicWrite => "ATOMIC WRITE, which its Config turns off",
            Feature::RoceV1 => "RoCE v1, which is no UDP",
            Feature::SecondAddress => "another address on a socket; open one more for it",
            Feature::ConnectionManager => {
                "connections on this context of a group: messages for QP1 come to another one"
            }
            Feature::Dpdk => "ports of DPDK, in a build without the feature 'dpdk'",
            Feature::AfXdp => "interfaces, in a build without the feature 'af_xdp'",
        })
    }
}
