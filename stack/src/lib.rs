//! RDMA over Converged Ethernet v2 (RoCEv2) in user space: an API like the verbs of libibverbs, and the protocol beneath it in
//! software.
//!
//! A program needs no RDMA card and no kernel module. Packets leave through AF_XDP, a UDP socket or a port of DPDK, or stay
//! inside the process. The peer is another ferroce, the kernel's `rdma_rxe`, or whatever else speaks RoCEv2 as the standard has it.
//! Where there is an RDMA card, the same program runs on it by another device name.
//!
//! ```toml
//! [dependencies]
//! ferroce = "0.1" # once it is published; until then by path
//! ```
//!
//! | feature | what it adds | what it needs |
//! |---|---|---|
//! | none (the default) | UDP sockets, ports inside the process, DPDK and RNICs where their libraries are found at run time | – |
//! | `af_xdp` | AF_XDP sockets: the lowest latency on an ordinary interface | at build time clang, libclang, m4 and the headers of libelf and zlib, in a checkout libxdp-dev alone; root or capabilities at run time |
//! | `opencl`, `cuda` | memory of GPUs ([`manual::device_memory`]); the API is in [`driver::gpu`], whose modules `opencl` and `cuda` its page shows with the features | at run time libOpenCL.so.1 and a driver; NVIDIA's driver |
//! | `serde` | `Serialize` and `Deserialize` for what two ends tell each other: [`Endpoint`], [`RemoteMemory`] | – |
//!
//! # A first program
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//!
//! fn main() -> Result<(), Error> {
//!     // A port inside this process. "eth0" or "udp:192.0.2.1" would be one on a network.
//!     let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!
//!     // Each end tells the other its endpoint and its memory. This queue pair is its own peer.
//!     let (endpoint, memory) = (context.endpoint(qp, 0)?, context.remote(mr)?);
//!     context.handshake(qp, &endpoint, &endpoint)?;
//!
//!     context.write(mr, 0, b"hello")?;
//!     let (op, data) = (SendOp::Write(memory.at(100)), Data::Sges(&[mr.sge(0..5)]));
//!     context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
//!     context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
//!     assert_eq!(&context.bytes(mr)?[100..105], b"hello");
//!     Ok(())
//! }
//! ```
//!
//! [`manual::first_program`] has it with two ends, and `examples/write.rs` between two hosts.
//!
//! # Where to find what
//!
//! | to | |
//! |---|---|
//! | open a port | [`Device::open`], [`DeviceSpec`]; [`Context::open`], [`Config`]; [`driver::loopback`] for tests |
//! | have memory | [`Memory`]; [`Context::register`], [`Access`]; [`read`](Context::read), [`write`](Context::write), [`bytes`](Context::bytes) |
//! | create queues | [`create_cq`](Context::create_cq), [`create_qp`](Context::create_qp) with [`QpConfig`], [`create_srq`](Context::create_srq) |
//! | connect | [`endpoint_for`](Context::endpoint_for) and [`handshake`](Context::handshake); [`connect`](Context::connect) and [`listen`](Context::listen); [`resolve`](Context::resolve) and [`create_ah`](Context::create_ah) for datagrams |
//! | send, write, read | [`post_send`](Context::post_send) with [`SendOp`], [`post_recv`](Context::post_recv) |
//! | learn how it ended | [`wait_cq`](Context::wait_cq), [`poll_cq`](Context::poll_cq); [`WorkCompletion`], [`WcStatus`]; [`next_event`](Context::next_event) |
//! | let time pass | [`Context::poll`], [`Poller`], [`Runner`]; by file descriptor [`prepare_wait`](Context::prepare_wait), [`CompChannel`] |
//! | see what happens | [`counters`](Context::counters), [`metrics`](Context::metrics), [`export`](Context::export) |
//!
//! # The manual
//!
//! - [First program](manual::first_program): the steps, with two ends
//! - [Memory and ordering](manual::memory): who may touch what and when, and what is seen in which order
//! - [Connecting](manual::connecting): by handshake, by the connection manager, datagrams; GIDs
//! - [Threads and waiting](manual::threads): who polls, how to sleep, tokio
//! - [Errors](manual::errors): every completion status and error, with cause and remedy
//! - [Performance](manual::performance): what makes it fast, and what to tune
//! - [Operating](manual::operating): counters, `ferroce stat`, `ferroce doctor`, the log, captures
//!
//! # Conventions
//!
//! A [`Context`] is one port with its objects. One thread owns it, and packets are sent and received only while it is polled.
//! Objects are named by small `Copy` handles ([`Pd`], [`Mr`], [`Cq`], [`Qp`], …), so there are no locks and no lifetimes. The
//! handle of a destroyed object is refused.
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
//! A verb that is refused changes nothing, and its [`Error`] names the value and what would be right.
//!
//! RDMA has no encryption and no authentication on the wire: it belongs on a network whose hosts are trusted.
//!
//! # Logging
//!
//! ferroce logs through [`tracing`](https://docs.rs/tracing), under the targets `ferroce`, `ferroce_driver` and
//! `ferroce_collectives`, and prints nothing itself: a program that installs no subscriber sees no log. With
//! `tracing_subscriber::fmt::init()` and its `env-filter` feature, RUST_LOG chooses what is logged, as in
//! `RUST_LOG=warn,ferroce_driver=debug`. The `ferroce` command reads RUST_LOG too, at `info` by default, and no other
//! variable for logging.
#![forbid(unsafe_code)]

mod backend;
mod cm;
mod context;
mod device;
mod engine;
pub mod manual;
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
#[doc(hidden)]
pub use ferroce_driver::is_unprintable;
pub use ferroce_driver::{
    Clock, Memory, MemoryError, MemoryKind, Nanos, PacketDriver, RefusalReason, SharedMemory,
};
pub use ferroce_wire as wire;
pub use ferroce_wire::{
    FlushType, Gid, MacAddr, PKEY_DEFAULT, PKey, PathMtu, Psn, Qpn, RKey, RnrTimer, Selectivity,
};
pub use runtime::affinity::pin_to_core;
pub use runtime::comp_channel::CompChannel;
pub use runtime::idle::{Idle, Idler};
pub use runtime::poller::Poller;
pub use runtime::runner::{Delivery, HandleConfig, Runner, RunnerConfig, RunnerHandle, StartError, Stopped};
pub use telemetry::counters::{Counter, Counters, Origin};
pub use telemetry::exporter::Exported;
pub use telemetry::metrics::{
    Exposition, Label, Metric, MetricKind, Metrics, MetricsError, ProgramCounter, Sample,
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
