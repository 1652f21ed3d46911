//! RNICs: cards that speak RoCE themselves, and rdma_rxe, through libibverbs.
//!
//! The library is loaded when it is asked for: a build needs none of it, and where it is absent, [`Verbs::load`] says so.
//! Nothing of the protocol is here. So far devices are found and described.
//!
//! ```
//! use ferroce_driver::rnic::Verbs;
//!
//! match Verbs::load() {
//!     Err(reason) => println!("no RNICs: {reason}"),
//!     Ok(verbs) => {
//!         for rnic in verbs.rnics()? {
//!             println!("{}: {:?}", rnic.name, rnic.details);
//!         }
//!     }
//! }
//! # Ok::<(), ferroce_driver::Error>(())
//! ```

mod abi;
mod verbs;

use crate::Error;

pub use verbs::Verbs;

/// A device that libibverbs knows.
#[derive(Debug)]
#[non_exhaustive]
pub struct Rnic {
    /// Such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// What it says of itself; the error, if it can't be opened or asked.
    pub details: Result<RnicDetails, Error>,
}

/// What an RNIC says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicDetails {
    /// The version of its firmware; empty for a device without.
    pub firmware: String,
    /// The PCI vendor, and the part as the vendor numbers it.
    pub vendor: u32,
    /// See [`vendor`](RnicDetails::vendor).
    pub part: u32,
    /// Queue pairs at most, and work requests of each queue.
    pub max_qps: u32,
    /// See [`max_qps`](RnicDetails::max_qps).
    pub max_qp_wr: u32,
    /// Its ports, from number 1.
    pub ports: Vec<RnicPort>,
}

/// A port of an RNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicPort {
    /// From 1.
    pub number: u8,
    /// Whether packets can pass.
    pub is_active: bool,
    /// Whether its link is Ethernet, so that it speaks RoCE.
    pub is_ethernet: bool,
    /// The largest path MTU of the link now, in bytes; `None` for a code that the specification does not have.
    pub path_mtu: Option<u32>,
    /// The rows of its GID table that are in use.
    pub gids: Vec<RnicGid>,
}

/// A row of a GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicGid {
    /// Its place in the table.
    pub index: u32,
    /// The GID.
    pub gid: [u8; 16],
    /// What speaks by it.
    pub kind: RnicGidKind,
    /// The index of the interface that has the address, if the kernel told.
    pub interface: Option<u32>,
}

/// The protocol of a GID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RnicGidKind {
    /// InfiniBand.
    InfiniBand,
    /// RoCE v1.
    RoceV1,
    /// RoCE v2.
    RoceV2,
    /// Another one, by its number.
    Other(u32),
}
