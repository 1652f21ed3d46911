//! The types of the API: handles, work requests, completions, queue pairs and their transitions, addresses, limits, errors. They
//! do not depend on the engine, and all backends use them.
//!
//! - `handle.rs`, `work_request.rs`, `completion.rs`, `event.rs`: handles, work requests, completions, events
//! - `qp.rs`, `transition.rs`, `srq.rs`: queue pairs and their states, transitions, shared receive queues
//! - `attributes.rs`: the queried attributes of the device, of a queue pair and of a shared receive queue
//! - `feature.rs`: optional features of a backend
//! - `address.rs`: the port, its GID table, address vectors
//! - `pkey.rs`: the port's P_Key table
//! - `endpoint.rs`: the data that the two ends of a connection exchange
//! - `memory.rs`, `access.rs`: remote memory, access rights
//! - `congestion.rs`: parameters and presets of congestion control
//! - `config.rs`, `limits.rs`: settings, limits
//! - `timeout.rs`: timeouts as the protocol encodes them
//! - `number.rs`: numbers in text
//! - `error.rs`: errors
//! - `unreachable.rs`: why a peer can't be reached
//! - `mismatch.rs`: configuration mismatches that a packet reveals

mod access;
mod address;
mod attributes;
mod completion;
mod config;
mod congestion;
mod endpoint;
mod error;
mod event;
mod feature;
mod handle;
mod limits;
mod memory;
mod mismatch;
pub(crate) mod number;
mod pkey;
mod qp;
mod srq;
mod timeout;
mod transition;
mod unreachable;
mod work_request;

pub use access::Access;
pub use address::{AddressVector, GidEntry, Port};
pub(crate) use address::{best_in_vlan, may_be_on};
pub use attributes::{DeviceAttributes, QpAttributes, ReactionState, SrqAttributes};
pub use completion::{Notify, WcOpcode, WcStatus, WorkCompletion};
#[cfg(test)]
pub(crate) use config::MAX_QPS;
pub(crate) use config::MAX_WINDOW;
pub use config::{Config, DEFAULT_WINDOW};
pub use congestion::{CnpScope, CongestionControl, CongestionNotification, Dcqcn, DcqcnRules};
pub use endpoint::Endpoint;
pub use error::{Error, PostError, RegisterError};
pub use event::{Event, EventSource};
pub use feature::Feature;
pub(crate) use handle::Handle;
pub use handle::{Ah, Cq, Mr, Mw, Pd, Qp, Srq};
pub(crate) use limits::{MAX_CQE, MAX_MESSAGE, MAX_RD_ATOMIC};
pub use memory::RemoteMemory;
pub use mismatch::Mismatch;
pub use pkey::PkeyTable;
pub use qp::{QpConfig, QpState, QpType};
pub use srq::SrqConfig;
pub(crate) use timeout::{exponent_of, time_of};
pub use transition::{QpUpdate, ReadyToReceive, ReadyToSend, Transition, UnreliablePath};
pub use unreachable::Unreachable;
pub use work_request::{
    Data, Destination, ReceiveWorkRequest, RemoteAddress, SendFlags, SendOp, SendWorkRequest, Sge,
};
