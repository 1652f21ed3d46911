//! Memory of GPUs: to register it, to compute with it, what it costs, and what an RNIC does with it.
//!
//! # From a device to a WRITE
//!
//! A GPU is opened by name ([`GpuSpec`]: `opencl:0`, `cuda:1`) or by its module ([`driver::gpu`]); its memory is allocated there and
//! registers as any other. Whatever a work request or a peer names may lie in it, also in one list with memory of the host; only
//! atomics may not. Where this end can see that, they are [`Unsupported`](Error::Unsupported) ([`Feature::AtomicsOfDevice`]): as where the
//! result goes, and with the right `REMOTE_ATOMIC` of a region. A window with that right is not bound (`MwBindErr`). The peer of an atomic to
//! such memory refuses it as to any other without the right (`RemAccessErr`). ATOMIC WRITE is allowed, as a WRITE of 8 bytes: whether a kernel
//! beside it can see half of them is the device's.
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
//! # How bytes travel
//!
//! | backend | between the GPU and the wire |
//! |---|---|
//! | software (AF_XDP, UDP sockets, DPDK, ...) | the GPU copies 64 KiB at a time ([`Config::staging_chunk`]) to host memory, from which packets are sent, and the other way round; no copy for each packet, and no load or store of the CPU to the GPU's memory |
//! | RNIC | by itself, through a dma-buf that the kernel makes of the GPU's memory ([`memory`](super::memory) has the conditions); where the card, its driver or the kernel refuses, so does [`Context::register`], with the reason: nothing is copied instead unless you do |
//!
//! What is told is there, but for an RNIC's completions (below): a completion, an acknowledgement, the response to a READ and the MSN follow the copy, not the packet. A copy that
//! fails ends the work request with [`FatalErr`](WcStatus::FatalErr) here and [`RemOpErr`](WcStatus::RemOpErr) at the peer, and the queue
//! pair with it; what was executed before that copy is told as usual. Where a peer's WRITE or READ fails so, this end has no work request that
//! could say it, and [`Event::QpFatal`] does. A device that neither copies nor fails holds the requests of this end
//! up without end: only the program can tell it from a slow one, by a time limit of its own. Requests of its peers end in
//! [`RetryExcErr`](WcStatus::RetryExcErr) when their retries are used up.
//!
//! Bytes land in a device's memory in any order, also those of two WRITEs. Memory of the host is written behind them: a WRITE or an atomic
//! that sets a flag there comes when all is there that came before on its queue pair. A flag in memory of a device tells nothing.
//!
//! ACK timeouts of peers must be longer than copies take, or they repeat what is not lost. A request that finds no staging is asked
//! for again when there is some, which takes one of the peer's retries. A peer that has repeated it twice by then is told to wait, by an RNR
//! NAK of 10 ms and more, so its `rnr_retry` should be 7. Datagrams, and messages on UC, that find none are lost.
//!
//! # Kernels beside it
//!
//! The context orders its copies with its completions, and knows nothing of the program's kernels. The rules are those of
//! [`memory`](super::memory) for any buffer:
//!
//! - Post what a kernel has written when the kernel has ended (`clFinish`, `cuStreamSynchronize`, or an event that is done).
//! - Start a kernel on what was received, read or sent when the completion has come. With an RNIC one that runs already, and polls the
//!   memory, may see old bytes behind the completion: the card writes past the processor, and nothing flushes that (`docs/rnic.md`).
//! - Copies that have begun go on when their queue pair is reset, destroyed or in ERR. Those to the device write over whatever the program
//!   writes there meanwhile. In ERR flushed receives come behind copies of what was received, and flushed sends behind copies of what
//!   READs have brought; what had come as a whole is a success even so. Flushed sends do not wait for copies from the device, which only
//!   read it. [`Context::deregister`] is [`Busy`](Error::Busy) until all have ended: poll, and try again.
//! - SQD waits for copies as for acknowledgements: `SqDrained` comes when the requests sent, and what READs have brought, are complete.
//!
//! [`Context::piece`] names a part of a region for a [`Reducer`](crate::driver::gpu::Reducer) or a [`Queue`](crate::driver::gpu::Queue)
//! of your own; with the features, `OpenCl::buffer` and `Cuda::pointer` say of a piece what kernels call it. `OpenCl::import` and
//! `Cuda::import` take an allocation that somebody else has made, such as a tensor of PyTorch: it is kept for as long as the memory lives,
//! and must not be freed or moved by its owner before. All that is of one handle of the device:
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
//! A reducer computes what the processor does, with the same bits: sums, products, minima and maxima of up to eight sources, quotients,
//! products by a factor, and copies within the device's memory, of every type.
//!
//! # What it costs
//!
//! One copy more than memory of the host, at either end: by the GPU, between its memory and the chunk; that between the chunk and the packet
//! host memory has as well. A copy
//! takes microseconds to begin (PoCL's some tens), and a small message waits for two, one at each end. Counters tell how much was copied:
//! `device_gathers`, `device_scatters`, `device_bytes`, `device_errors`; `rx_staging_full` counts packets that found no room, for which
//! [`Config::staging_chunks`] may be raised (128 chunks of 64 KiB by default, shared by all queue pairs of a context).
//! `ferroce perf --memory opencl:0` measures it.

#[cfg(doc)]
use crate::driver::gpu::GpuSpec;
#[cfg(doc)]
use crate::*;
