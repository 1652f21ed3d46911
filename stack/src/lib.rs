//! RDMA over Converged Ethernet v2 in user space.
//!
//! A [`Context`] is one port of one driver with everything that the verbs know: protection
//! domains, memory regions, completion queues, queue pairs. One thread owns it and drives it with
//! [`Context::poll`]; objects are named by small `Copy` handles, so there are no locks and no
//! lifetimes.
//!
//! Where to look: verbs in [`Context`], work requests in [`SendWorkRequest`] and
//! [`ReceiveWorkRequest`], connection set-up in [`Transition`], and a whole example in the README.
#![forbid(unsafe_code)]

mod access;
mod address;
mod completer;
mod config;
mod context;
mod counters;
mod cq;
mod device;
mod engine;
mod error;
mod event;
mod key_table;
mod mr;
mod outcome;
mod poller;
mod qp;
mod requester;
mod responder;
mod rq;
mod shared;
mod slab;
mod sq;
mod timer;
mod wr;

pub use access::Access;
pub use address::{AddressVector, GidEntry, Port};
pub use config::{Config, DEFAULT_WINDOW};
pub use context::Context;
pub use counters::{Counter, Counters};
pub use cq::{Notify, WcOpcode, WcStatus, WorkCompletion};
pub use device::DeviceSpec;
pub use error::{Error, RegisterError};
pub use event::Event;
pub use ferroce_driver as driver;
pub use ferroce_driver::{Clock, Memory, Nanos, PacketDriver};
pub use ferroce_wire as wire;
pub use ferroce_wire::{Gid, MacAddr, PathMtu, Psn, Qpn, RKey, RnrTimer};
pub use mr::RemoteMemory;
pub use poller::Poller;
pub use qp::{QpAttributes, QpConfig, QpState, QpType, ReadyToReceive, ReadyToSend, Transition};
pub use slab::{Cq, Mr, Pd, Qp};
pub use wr::{Data, ReceiveWorkRequest, RemoteAddress, SendFlags, SendOp, SendWorkRequest, Sge};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
