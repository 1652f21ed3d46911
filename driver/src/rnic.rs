//! RNICs: RoCE cards, and rdma_rxe, through libibverbs.
//!
//! The library is loaded on demand: a build does not need it, and [`Verbs::load`] fails if it is absent. This module
//! contains nothing of the protocol. It creates, uses and destroys objects, with the numbers of the verbs, and an error
//! names the call that failed. Each object keeps the objects that it depends on, so they may be dropped in any order.
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
mod cm_abi;
mod completion;
mod connection;
mod counters;
mod device;
mod dma_buf;
mod functions;
mod memory;
mod queue_pair;
pub(crate) mod remedy;
mod verbs;
mod waiting;
mod work;

use crate::Error;
use abi::DeviceAttr;

pub use completion::{Completion, CompletionChannel, CompletionQueue};
pub use connection::{
    CmFunctions, ConnectionEvent, ConnectionId, ConnectionRequest, ConnectionTerms, EventChannel, Peer,
};
pub use counters::PortCounters;
pub use device::{AsyncEvent, Device};
pub(crate) use dma_buf::COPY_INSTEAD;
pub use memory::{Address, AddressHandle, ProtectionDomain, Region, Window, access};
pub use queue_pair::{QueuePair, QueuePairChange, QueuePairConfig, QueuePairState, SharedReceiveQueue};
pub use verbs::Verbs;
pub use waiting::Waiting;
pub use work::{
    Bind, Piece, PostRefused, ReceiveRequest, Remote, SendData, SendOperation, SendRequest, Target,
};

/// A device that libibverbs knows.
#[derive(Debug)]
#[non_exhaustive]
pub struct Rnic {
    /// Such as `mlx5_0` or `rxe0`.
    pub name: String,
    /// Its attributes; the error, if it can't be opened or queried.
    pub details: Result<RnicDetails, Error>,
}

/// The attributes of an RNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicDetails {
    /// The version of its firmware; empty for a device without one.
    pub firmware: String,
    /// The PCI vendor, and the part as the vendor numbers it.
    pub vendor: u32,
    /// See [`vendor`](RnicDetails::vendor).
    pub part: u32,
    /// Its limits.
    pub limits: RnicLimits,
    /// Its ports, from number 1.
    pub ports: Vec<RnicPort>,
}

impl RnicDetails {
    /// Whether it is rdma_rxe, the kernel's software, by its vendor number.
    pub fn is_rxe(&self) -> bool {
        self.vendor == 0xff_ffff
    }
}

/// The limits of objects, as `ibv_query_device` reports them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the verbs' names")]
#[non_exhaustive]
pub struct RnicLimits {
    pub max_mr_size: u64,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_sge: u32,
    pub max_cq: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
    pub max_mw: u32,
    pub max_pd: u32,
    pub max_ah: u32,
    pub max_srq: u32,
    pub max_srq_wr: u32,
    pub max_srq_sge: u32,
    /// Outstanding READs and atomics of a queue pair as responder.
    pub max_qp_rd_atom: u32,
    /// Outstanding READs and atomics of a queue pair as requester.
    pub max_qp_init_rd_atom: u32,
    /// Whether it supports atomics.
    pub has_atomics: bool,
    /// Whether it supports memory windows of type 2B.
    pub has_windows_2b: bool,
}

impl RnicLimits {
    fn of(attributes: &DeviceAttr) -> RnicLimits {
        const WINDOWS_2B: u32 = 1 << 24;
        let count = |count: i32| u32::try_from(count).unwrap_or(0);
        RnicLimits {
            max_mr_size: attributes.max_mr_size,
            max_qp: count(attributes.max_qp),
            max_qp_wr: count(attributes.max_qp_wr),
            max_sge: count(attributes.max_sge),
            max_cq: count(attributes.max_cq),
            max_cqe: count(attributes.max_cqe),
            max_mr: count(attributes.max_mr),
            max_mw: count(attributes.max_mw),
            max_pd: count(attributes.max_pd),
            max_ah: count(attributes.max_ah),
            max_srq: count(attributes.max_srq),
            max_srq_wr: count(attributes.max_srq_wr),
            max_srq_sge: count(attributes.max_srq_sge),
            max_qp_rd_atom: count(attributes.max_qp_rd_atom),
            max_qp_init_rd_atom: count(attributes.max_qp_init_rd_atom),
            has_atomics: attributes.atomic_cap != 0,
            has_windows_2b: attributes.device_cap_flags & WINDOWS_2B != 0,
        }
    }
}

/// A port of an RNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicPort {
    /// From 1.
    pub number: u8,
    /// Whether the port is active.
    pub is_active: bool,
    /// Whether its link is Ethernet, that is, a RoCE port.
    pub is_ethernet: bool,
    /// The largest path MTU of the link now, in bytes; `None` for a code that is not in the specification.
    pub path_mtu: Option<u32>,
    /// The longest message, in bytes.
    pub max_message: u32,
    /// Its P_Key table; 0 for a row without a key.
    pub pkeys: Vec<u16>,
    /// The rows of its GID table that are in use.
    pub gids: Vec<RnicGid>,
}

/// A row of a GID table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RnicGid {
    /// Its index in the table.
    pub index: u32,
    /// The GID.
    pub gid: [u8; 16],
    /// Its protocol.
    pub kind: RnicGidKind,
    /// The index of the interface that has the address, if the kernel reported it.
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
