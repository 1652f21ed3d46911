//! RDMA over Converged Ethernet v2 in user space.
//!
//! A [`Context`] is one port of one driver with the objects of the verbs: protection domains, memory regions and windows,
//! completion queues, queue pairs. One thread owns it and drives it with [`Context::poll`]. Objects are named by small
//! `Copy` handles, so there are no locks and no lifetimes.
//!
//! The verbs are methods of [`Context`]. Work requests are [`SendWorkRequest`] and [`ReceiveWorkRequest`]. Queue pairs are
//! connected by [`Context::handshake`], when the ends exchange their [`Endpoint`]s themselves, or by [`Context::connect`] and
//! [`Context::accept`], with the connection manager; [`Transition`] has the single steps. The README has a whole example.
//!
//! Settings are made by a constructor, which takes what has no default, and a setter for each other field. The setter of
//! an `Option` takes a value, an `Option` or `None`. A value out of its range is refused where it is used.
//!
//! ```
//! # use ferroce::*;
//! # fn settings(pd: Pd, cq: Cq, core: Option<usize>) {
//! let config = Config::default().max_qps(1024).seed([7; 32]);
//! let queue_pair = QpConfig::rc(pd, cq).max_send_wr(512).max_inline_data(0);
//! let runner = RunnerConfig::default().idle(Idle::Block).core(core);
//! # }
//! ```
//!
//! # Logging
//!
//! ferroce logs through [`tracing`](https://docs.rs/tracing), under the targets `ferroce`, `ferroce_driver` and
//! `ferroce_collectives`, and prints nothing itself: a program that installs no subscriber sees no log. With
//! `tracing_subscriber::fmt::init()` and its `env-filter` feature, RUST_LOG says what is logged, as in
//! `RUST_LOG=warn,ferroce_driver=debug`; the `ferroce` command does the same, at `info` by default. It is the only variable for
//! logging.
#![forbid(unsafe_code)]

mod backend;
mod cm;
mod context;
mod device;
mod engine;
mod runtime;
mod telemetry;
mod verbs;

pub use backend::{Device, RnicPort};
pub use cm::{
    CmChannel, CmEvent, CmId, ConnectionParameters, ConnectionRequest, ListenConfig, Listener, PortSpace,
    PrivateData,
};
pub use context::{Context, DatagramService};
pub use device::{DeviceSpec, DpdkSpec};
pub use engine::congestion::dcqcn::ReactionPoint;
pub use engine::congestion::pacing::Pacer;
pub use ferroce_driver as driver;
pub use ferroce_driver::{Clock, Memory, MemoryError, MemoryKind, Nanos, PacketDriver, RefusalReason};
pub use ferroce_wire as wire;
pub use ferroce_wire::{
    FlushType, Gid, MacAddr, PKEY_DEFAULT, PKey, PathMtu, Psn, Qpn, RKey, RnrTimer, Selectivity,
};
pub use runtime::affinity::pin_to_core;
pub use runtime::comp_channel::CompChannel;
pub use runtime::idle::Idle;
pub use runtime::poller::Poller;
pub use runtime::runner::{Delivery, HandleConfig, Runner, RunnerConfig, RunnerHandle, StartError, Stopped};
pub use telemetry::counters::{Counter, Counters, Origin};
pub use telemetry::exporter::Exported;
pub use telemetry::metrics::{
    Exposition, Label, Metric, MetricKind, Metrics, MetricsError, Sample, is_unprintable,
};
pub use verbs::{
    Access, AddressVector, Ah, CnpScope, Config, CongestionControl, CongestionNotification, Cq,
    DEFAULT_WINDOW, Data, Dcqcn, DcqcnRules, Destination, DeviceAttributes, Endpoint, Error, Event,
    EventSource, Feature, GidEntry, Mismatch, Mr, Mw, Notify, Pd, PkeyTable, Port, PostError, Qp,
    QpAttributes, QpConfig, QpState, QpType, QpUpdate, ReactionState, ReadyToReceive, ReadyToSend,
    ReceiveWorkRequest, RegisterError, RemoteAddress, RemoteMemory, SendFlags, SendOp, SendWorkRequest, Sge,
    Srq, SrqAttributes, SrqConfig, Transition, Unreachable, UnreliablePath, WcOpcode, WcStatus,
    WorkCompletion,
};

/// The README's example is a test.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;
