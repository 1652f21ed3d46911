//! GPU memory: how to register it and compute with it, what it costs, and how an RNIC accesses it.
//!
//! # From a device to a WRITE
//!
//! A GPU is opened by name ([`GpuSpec`]: `opencl:0`, `cuda:1`) or by its module ([`driver::gpu`]); its memory is allocated there
//! and registered like any other memory. All operations may use it, also in one list of SGEs with host memory; only atomics may
//! not. If the local end can detect it, it returns [`Unsupported`](Error::Unsupported) ([`Feature::AtomicsOfDevice`]): for the
//! result of an atomic, and for a region with the right `REMOTE_ATOMIC`. Binding a window with that right fails (`MwBindErr`). An
//! atomic of a peer to such memory fails as without the right (`RemAccessErr`). ATOMIC WRITE is allowed, as a WRITE of 8 bytes:
//! whether a concurrent kernel can see half of it depends on the device.
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//! use ferroce::driver::gpu::{Device as Gpu, strict::Strict};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // `"opencl:0".parse::<GpuSpec>()?.open()?` with the feature `opencl`; here a device for tests, whose memory the CPU can't reach.
//! let gpu = Strict::default().open()?;
//! # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//! # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//! # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//! # let own = context.endpoint(qp, 0)?;
//! # context.handshake(qp, &own, &own)?;
//! // A queue pair that is its own peer, as on the front page.
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let tensor = context.register(pd, gpu.allocate(8192)?, rights)?;
//! context.write(tensor, 0, &[7; 4096])?; // a copy by the GPU, which this waits for
//! let sges = [tensor.sge(0..4096)];
//! let write = SendOp::Write(context.remote(tensor)?.at(4096));
//! let wr = SendWorkRequest { wr_id: 1, op: write, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
//! context.post_send(qp, &wr)?;
//! context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
//!
//! // It is in the peer's memory: a kernel there may use it.
//! let mut arrived = [0; 4096];
//! context.read(tensor, 4096, &mut arrived)?;
//! assert_eq!(arrived, [7; 4096]);
//! # Ok(())
//! # }
//! ```
//!
//! `examples/tensor.rs` sends a tensor from one GPU to another, on two hosts.
//!
//! # How data is copied
//!
//! | backend | between the GPU and the wire |
//! |---|---|
//! | software (AF_XDP, UDP sockets, DPDK, ...) | the GPU copies chunks of 64 KiB ([`Config::staging_chunk`]) to and from host memory, where packets are sent and received; there is no GPU copy per packet, and the CPU does not access the GPU's memory |
//! | RNIC | the card accesses GPU memory directly, through a dma-buf ([`memory`](super::memory) lists the conditions); if the card, its driver or the kernel refuses, [`Context::register`] fails with the reason: there is no automatic fallback to copies |
//!
//! Completions, acknowledgements, responses to READs and the MSN are delayed until the copy is done, not only the packet received
//! (an RNIC's completions are an exception, see below). A copy that fails completes the work request with
//! [`FatalErr`](WcStatus::FatalErr) here and with [`RemOpErr`](WcStatus::RemOpErr) at the peer, and moves the queue pair to ERR;
//! requests executed before that copy complete as usual. If a WRITE or READ of the peer fails in this way, this end has no work
//! request to report it, and gets [`Event::QpFatal`]. A device that neither copies nor fails delays this end's requests
//! indefinitely: only the program can distinguish it from a slow one, by a time limit of its own. Requests of its peers complete
//! with [`RetryExcErr`](WcStatus::RetryExcErr) when their retries are used up.
//!
//! Bytes are written to GPU memory in any order, also those of two WRITEs. Host memory is written after them: a WRITE or an
//! atomic that sets a flag in host memory is executed when all earlier requests of its queue pair are complete. A flag in GPU
//! memory indicates nothing.
//!
//! ACK timeouts of peers must be longer than copies take; otherwise they retransmit what is not lost. A request for which no
//! staging chunk is free is requested again when one is, which uses one of the peer's retries. If the peer has retransmitted it
//! twice by then, it gets an RNR NAK with a timer of 10 ms or more, so its `rnr_retry` should be 7. Datagrams, and messages on
//! UC, for which no chunk is free are lost.
//!
//! # Concurrent kernels
//!
//! The context orders its copies and its completions; it does not know the program's kernels. The rules of
//! [`memory`](super::memory) apply:
//!
//! - Post data that a kernel writes after the kernel has finished (`clFinish`, `cuStreamSynchronize`, or a completed event).
//! - Start a kernel on data that was received, read or sent after its completion. With an RNIC, a kernel that is already running
//!   and polls the memory may see old bytes after the completion: the card's writes bypass the CPU, and nothing flushes them for
//!   the GPU (`docs/rnic.md`).
//! - Copies that have begun continue when their queue pair is reset, destroyed or in ERR. Those to the device overwrite data that
//!   the program writes there meanwhile. In ERR, flushed receives complete after the copies of received data, and flushed sends
//!   after the copies of READ responses; a request whose data had arrived completely still succeeds. Flushed sends do not wait
//!   for copies from the device, which only read it. [`Context::deregister`] returns [`Busy`](Error::Busy) until all copies have
//!   ended: poll, and try again.
//! - SQD waits for copies as for acknowledgements: `SqDrained` is raised when the requests sent, and the copies of READ
//!   responses, are complete.
//!
//! [`Context::piece`] names a part of a region for a [`Reducer`](crate::driver::gpu::Reducer) or a
//! [`Queue`](crate::driver::gpu::Queue) of your own; with the cargo features, `OpenCl::buffer` and `Cuda::pointer` return the
//! kernel argument for a piece. `OpenCl::import` and `Cuda::import` take an allocation made elsewhere, such as a PyTorch tensor:
//! its owner must not free or move it while the memory exists. All of these must use one handle of the device:
//!
//! ```ignore
//! use ferroce::driver::gpu::opencl::{self, OpenCl};
//!
//! let gpu = opencl::open(0)?; // GpuSpec opens any library's, without its own calls
//! let kernels = gpu.context(); // the cl_context, for programs and queues of your own
//! let tensor = context.register(pd, gpu.allocate(8192)?, rights)?;
//! let (buffer, offset) = OpenCl::buffer(context.piece(tensor, 0, 8192)?).expect("memory of OpenCL");
//! // clSetKernelArg(kernel, 0, size_of::<cl_mem>(), &buffer), enqueue, clFinish: now it may be posted.
//! ```
//!
//! A reducer computes the same bits as the CPU: sums, products, minima and maxima of up to eight sources, quotients, products by
//! a factor, and copies within the device's memory, of every type.
//!
//! # What it costs
//!
//! GPU memory costs one copy more than host memory at each end: by the GPU, between its memory and the chunk. The copy between
//! the chunk and the packet exists for host memory too. A copy takes microseconds to start (with PoCL some tens of them), and a
//! small message waits for two, one at each end. Counters: `device_gathers`, `device_scatters`, `device_bytes`, `device_errors`;
//! `rx_staging_full` counts packets for which no chunk was free; if it grows, raise [`Config::staging_chunks`] (128 chunks of 64
//! KiB by default, shared by all queue pairs of a context). `ferroce perf --memory opencl:0` measures it.

#[cfg(doc)]
use crate::driver::gpu::GpuSpec;
#[cfg(doc)]
use crate::*;
