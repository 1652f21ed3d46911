//! RDMA over Converged Ethernet v2 in user space.
//!
//! A [`Context`] is one port of one driver with everything that the verbs know: protection
//! domains, memory regions and windows, completion queues, queue pairs. One thread owns it and
//! drives it with [`Context::poll`]; objects are named by small `Copy` handles, so there are no
//! locks and no lifetimes.
//!
//! Where to look: verbs in [`Context`], work requests in [`SendWorkRequest`] and
//! [`ReceiveWorkRequest`], connection set-up in [`Transition`], and a whole example in the README.
#![forbid(unsafe_code)]

mod access;
mod address;
mod affinity;
mod ah;
mod cm;
mod completer;
mod config;
mod context;
mod counters;
mod cq;
mod crc;
mod destination;
mod device;
mod engine;
mod error;
mod event;
mod exporter;
mod idle;
mod key_table;
mod kind;
mod metrics;
mod mismatch;
mod mr;
mod multicast;
mod mw;
mod outcome;
mod pkey;
mod poller;
mod psn_set;
mod qp;
mod reorder;
mod requester;
mod responder;
mod rq;
mod runner;
mod selective;
mod shared;
mod slab;
mod slot;
mod sq;
mod srq;
mod timer;
mod transition;
mod uc;
mod ud;
mod wr;

pub use access::Access;
pub use address::{AddressVector, GidEntry, Port};
pub use affinity::pin_to_core;
pub use cm::{
    CmEvent, CmId, ConnectionParameters, ConnectionRequest, ListenConfig, Listener, PortSpace, PrivateData,
};
pub use config::{Config, DEFAULT_WINDOW};
pub use context::Context;
pub use counters::{Counter, Counters, Origin};
pub use cq::{Notify, WcOpcode, WcStatus, WorkCompletion};
pub use device::{DeviceAttributes, DeviceSpec, DpdkSpec};
pub use error::{Error, RegisterError};
pub use event::Event;
pub use exporter::Exported;
pub use ferroce_driver as driver;
pub use ferroce_driver::{Clock, Memory, Nanos, PacketDriver};
pub use ferroce_wire as wire;
pub use ferroce_wire::{
    FlushType, Gid, MacAddr, PKEY_DEFAULT, PKey, PathMtu, Psn, Qpn, RKey, RnrTimer, Selectivity,
};
pub use idle::Idle;
pub use metrics::{Exposition, Label, Metric, MetricKind, Metrics, MetricsError, Sample, is_unprintable};
pub use mismatch::Mismatch;
pub use mr::RemoteMemory;
pub use pkey::PkeyTable;
pub use poller::Poller;
pub use qp::{QpAttributes, QpConfig, QpState, QpType};
pub use runner::{Delivery, HandleConfig, Runner, RunnerConfig, RunnerHandle, Stopped};
pub use slab::{Ah, Cq, Mr, Mw, Pd, Qp, Srq};
pub use srq::{SrqAttributes, SrqConfig};
pub use transition::{QpUpdate, ReadyToReceive, ReadyToSend, Transition, UnreliablePath};
pub use wr::{Data, Destination, ReceiveWorkRequest, RemoteAddress, SendFlags, SendOp, SendWorkRequest, Sge};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
