//! RDMA over Converged Ethernet v2 (RoCEv2) in user space: an API like libibverbs, and the protocol in software.
//!
//! A program needs neither an RDMA card nor a kernel module. Packets are sent through AF_XDP, a UDP socket or a DPDK port, or
//! stay inside the process. The peer is another ferroce, the kernel's `rdma_rxe`, or another implementation of RoCEv2; tested are
//! the first two. With an RDMA card, the same program runs on the card: only the device name differs. What RDMA is, and each term
//! used here: [glossary](manual::glossary).
//!
//! ```toml
//! [dependencies]
//! ferroce = "0.1" # once it is published; until then by path
//! ```
//!
//! | feature | what it adds | what it needs |
//! |---|---|---|
//! | none (the default) | UDP sockets and ports inside the process; DPDK and RNICs if their libraries are found at run time | – |
//! | `af_xdp` | AF_XDP sockets: the lowest latency on an ordinary interface | to build: clang, libclang, m4 and the headers of libelf and zlib; only libxdp-dev inside ferroce's own workspace (a path dependency from another workspace is not inside). At run time: root, or capabilities ([`manual::operating`]) |
//! | `opencl`, `cuda` | memory of GPUs ([`manual::device_memory`]); the API is [`driver::gpu`]; its modules `opencl` and `cuda` are documented if the features are enabled | at run time libOpenCL.so.1 and a driver for `opencl`, NVIDIA's driver for `cuda` |
//! | `serde` | `Serialize` and `Deserialize` for [`Endpoint`] and [`RemoteMemory`], which the two ends exchange | – |
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
//!     // Two ends exchange endpoint and memory. To keep this example short, the queue pair is connected to itself.
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
//! [`manual::first_program`] is the same program with two ends; `examples/write.rs` runs between two hosts.
//!
//! # Where to find what
//!
//! | to | |
//! |---|---|
//! | open a port | [`Device::open`], [`DeviceSpec`]; [`Context::open`], [`Config`]; [`driver::loopback`] for tests |
//! | allocate and register memory | [`Memory`]; [`Context::register`], [`Access`]; [`read`](Context::read), [`write`](Context::write), [`bytes`](Context::bytes) |
//! | create queues | [`create_cq`](Context::create_cq), [`create_qp`](Context::create_qp) with [`QpConfig`], [`create_srq`](Context::create_srq) |
//! | connect | [`endpoint_for`](Context::endpoint_for) and [`handshake`](Context::handshake); [`connect`](Context::connect) and [`listen`](Context::listen); [`resolve`](Context::resolve) and [`create_ah`](Context::create_ah) for datagrams |
//! | send, write, read | [`post_send`](Context::post_send) with [`SendOp`], [`post_recv`](Context::post_recv) |
//! | get completions and events | [`wait_cq`](Context::wait_cq), [`poll_cq`](Context::poll_cq); [`WorkCompletion`], [`WcStatus`]; [`next_event`](Context::next_event) |
//! | make progress, wait | [`Context::poll`], [`Poller`], [`Runner`]; by file descriptor [`prepare_wait`](Context::prepare_wait), [`CompChannel`] |
//! | monitor | [`counters`](Context::counters), [`metrics`](Context::metrics), [`export`](Context::export) |
//!
//! # The manual
//!
//! - [Glossary](manual::glossary): what RDMA is for, and each term
//! - [First program](manual::first_program): the steps, with two ends
//! - [Memory and ordering](manual::memory): who may access a buffer and when, and the order in which writes become visible
//! - [GPU memory](manual::device_memory): how it is registered and copied, GPU kernels, RNICs, cost
//! - [Connecting](manual::connecting): by handshake, by the connection manager, datagrams; GIDs; timeouts and retries
//! - [Threads and waiting](manual::threads): which thread polls, how to sleep, tokio
//! - [Errors](manual::errors): every completion status and error, with cause and remedy
//! - [Performance](manual::performance): what to tune
//! - [Operating](manual::operating): counters, `ferroce stat`, `ferroce doctor`, the log, captures
//!
//! # Conventions
//!
//! A [`Context`] is one opened port with all objects created on it; a port is a network interface, a port of an RDMA card, or one
//! inside the process. One thread owns the context, and packets are sent and received only while it is polled. Objects are named
//! by small `Copy` handles ([`Pd`], [`Mr`], [`Cq`], [`Qp`], …), so there are no locks and no lifetimes. A handle of a destroyed
//! object is refused.
//!
//! A configuration has a constructor that takes the fields without a default, and a setter for each other field. The setter of an
//! optional field takes a value or an `Option`. A value out of range is refused by the verb that gets the configuration, not by
//! the setter.
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
//! A verb that fails changes nothing ([exceptions](manual::errors#errors-of-verbs)), and its [`Error`] names the wrong value and
//! the valid ones.
//!
//! RDMA has no encryption and no authentication on the wire: use it only on a network of trusted hosts.
//!
//! # Logging
//!
//! ferroce logs through [`tracing`](https://docs.rs/tracing), under the targets `ferroce`, `ferroce_driver` and
//! `ferroce_collectives`, and prints nothing itself: without a subscriber there is no log. With `tracing_subscriber::fmt::init()`
//! and its `env-filter` feature, RUST_LOG chooses what is logged, as in `RUST_LOG=warn,ferroce_driver=debug`. The `ferroce`
//! command reads RUST_LOG too (default `info`), and no other variable for logging.
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
