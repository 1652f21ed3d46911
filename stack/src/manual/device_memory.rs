//! GPU memory: how to register it and compute with it, what it costs, and how an RNIC accesses it. A kernel, on this page, is a
//! program that runs on the GPU. Terms: [glossary](super::glossary).
//!
//! # From a device to a WRITE
//!
//! A GPU is opened by name ([`GpuSpec`]: `opencl:0`, `cuda:1`) or by `open` of a module of [`driver::gpu`]; memory is allocated
//! from the opened device and registered like any other memory. Every operation may use it, except atomics; one list of SGEs may
//! mix it with host memory. Two calls fail with [`Unsupported`](Error::Unsupported) ([`Feature::AtomicsOfDevice`]): to post an
//! atomic whose result goes to GPU memory, and to register GPU memory with the right `REMOTE_ATOMIC`. Binding a window with that
//! right completes with `MwBindErr`. A peer's atomic on GPU memory completes with `RemAccessErr`, as on memory without the right.
//! ATOMIC WRITE is allowed, and executed as a WRITE of 8 bytes: whether a concurrent kernel can see half of it depends on the GPU.
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//! use ferroce::driver::gpu::{Device as Gpu, strict::Strict};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // `"opencl:0".parse::<GpuSpec>()?.open()?` with the feature `opencl`; here a test device, whose memory the CPU can't reach.
//! let gpu = Strict::default().open()?;
//! # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//! # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//! # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//! # let own = context.endpoint(qp, 0)?;
//! # context.handshake(qp, &own, &own)?;
//! // `qp` is connected to itself, as in the first example of the crate's documentation.
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let tensor = context.register(pd, gpu.allocate(8192)?, rights)?;
//! context.write(tensor, 0, &[7; 4096])?; // the GPU copies, and `write` waits for it
//! let sges = [tensor.sge(0..4096)];
//! let write = SendOp::Write(context.remote(tensor)?.at(4096));
//! let wr = SendWorkRequest { wr_id: 1, op: write, data: Data::Sges(&sges), flags: SendFlags::SIGNALED };
//! context.post_send(qp, &wr)?;
//! context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
//!
//! // The data is in the peer's memory: a kernel there may use it.
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
//! | RNIC | the card accesses GPU memory directly, through a dma-buf ([`memory`](super::memory) lists the conditions); if the card, its driver or Linux refuses, [`Context::register`] fails with the reason: there is no automatic fallback to copies |
//!
//! A completion is reported, and an acknowledgement or a READ response is sent, only when the copy is complete; the reception of
//! the packet is not enough. (An RNIC's completions are an exception: [below](#concurrent-kernels).) If a copy fails,
//! the queue pair goes to ERR. The work request completes with [`FatalErr`](WcStatus::FatalErr) if it was posted here, with
//! [`RemOpErr`](WcStatus::RemOpErr) if it was posted at the peer. Requests executed before that copy complete as usual. If a WRITE
//! or READ of the peer fails in this way, this end has no work request to report it, and gets [`Event::QpFatal`]. A GPU that hangs
//! without an error delays this end's requests indefinitely: only the program can distinguish it from a slow GPU, by a time limit
//! of its own. Requests of peers complete with [`RetryExcErr`](WcStatus::RetryExcErr) when their retries are used up.
//!
//! Bytes are written to GPU memory in any order, also those of two WRITEs. A WRITE or an atomic to host memory is executed only
//! when the GPU copies of all earlier requests of its queue pair are complete. So a flag in host memory shows that the data in
//! GPU memory is complete; a flag in GPU memory does not ([the rule for host memory](super::memory#the-last-byte-of-a-write)).
//!
//! The peers' ACK timeouts must be longer than the copies; otherwise the peers retransmit packets that were not lost. If no staging
//! chunk is free for a packet, it is dropped. When chunks are free, this end requests the packet by a sequence error NAK, which
//! uses one of the peer's retries. If the peer has already retransmitted the packet twice, it gets an RNR NAK (receiver not ready)
//! with a timer of 10 ms or more: set the peer's `rnr_retry` to 7, which is without limit. Datagrams and UC messages are lost if no
//! chunk is free.
//!
//! # Concurrent kernels
//!
//! The context orders its own copies and completions; it knows nothing of the program's kernels. The rules of
//! [`memory`](super::memory) apply:
//!
//! - Wait until a kernel has finished (`clFinish`, `cuStreamSynchronize`, or a completed event) before you post the data that it
//!   wrote.
//! - Wait for the completion before you start a kernel on data that was received, read or sent. With an RNIC, a kernel that is
//!   already running and polls the memory may see old bytes after the completion: the card's writes bypass the CPU, and nothing
//!   flushes them for the GPU (`docs/rnic.md`).
//! - Copies that have begun continue when their queue pair is reset, is destroyed or enters ERR. Copies to the GPU then overwrite
//!   what the program writes to the same memory. In ERR, flushed receives complete after the copies of received data, and flushed
//!   sends after the copies of READ responses; a request whose data had arrived completely still succeeds. Flushed sends do not
//!   wait for copies from the GPU, which only read its memory. [`Context::deregister`] returns [`Busy`](Error::Busy) until all
//!   copies have ended: poll, and try again.
//! - In state SQD (send queue drained), `SqDrained` is raised when all sent requests are acknowledged and the copies of READ
//!   responses are complete.
//!
//! [`Context::piece`] names a part of a region for a [`Reducer`](crate::driver::gpu::Reducer) or a
//! [`Queue`](crate::driver::gpu::Queue) of your own; with the cargo features, `OpenCl::buffer` and `Cuda::pointer` return the
//! kernel argument for a piece. `OpenCl::import` and `Cuda::import` take an allocation made elsewhere, such as a PyTorch tensor:
//! its owner must not free or move it while the memory exists. Memory and queues belong to the device handle that created them, so
//! open each device only once:
//!
//! ```ignore
//! use ferroce::driver::gpu::opencl::{self, OpenCl};
//!
//! let gpu = opencl::open(0)?; // `GpuSpec` opens a GPU of any library, but has no `context()`, `buffer()`, `import()`
//! let kernels = gpu.context(); // the cl_context, for programs and queues of your own
//! let tensor = context.register(pd, gpu.allocate(8192)?, rights)?;
//! let (buffer, offset) = OpenCl::buffer(context.piece(tensor, 0, 8192)?).expect("memory of OpenCL");
//! // clSetKernelArg(kernel, 0, size_of::<cl_mem>(), &buffer), enqueue, clFinish: now it may be posted.
//! ```
//!
//! A reducer computes sums, products, minima and maxima of up to eight sources, divides a result by a number, and multiplies by a
//! factor. The results have the same bits as on the CPU. A reducer refuses f64 on a GPU without double precision, and divisions
//! that the GPU does not round as the CPU does. It also copies within the GPU's memory.
//!
//! # What it costs
//!
//! GPU memory costs one copy more than host memory at each end: by the GPU, between its memory and the chunk. The copy between the
//! chunk and the packet exists for host memory too. A copy takes microseconds to start (tens of microseconds with PoCL), and a
//! small message waits for two copies, one at each end. Counters: `device_gathers`, `device_scatters`, `device_bytes`,
//! `device_errors`; `rx_staging_full` counts packets for which no chunk was free; if it grows, raise [`Config::staging_chunks`]
//! (128 chunks of 64 KiB by default, shared by all queue pairs of a context).
//!
//! To measure the cost, run `ferroce perf write bw -d eth0 --memory opencl:0` at one host, the same command with that host's
//! address at the other, and both again without `--memory`. docs/measurements.md has the numbers of an H200 and of PoCL.
//!
//! Sources: docs/protocol.md §5 (memory order); docs/decisions/11-device-memory.md; docs/rnic.md and NVIDIA's guide to GPUDirect
//! RDMA (RNICs); `driver/src/gpu.rs`, `stack/src/engine/staging.rs`, `stack/tests/device_memory` (the tests).

#[cfg(doc)]
use crate::driver::gpu::GpuSpec;
#[cfg(doc)]
use crate::*;
