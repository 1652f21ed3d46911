//! Who may touch which bytes, when, and what is seen in which order.
//!
//! # Kinds of memory
//!
//! Peers and work requests reach only memory that is registered: [`Context::register`] takes a [`Memory`] and returns an [`Mr`],
//! and [`Context::deregister`] gives the memory back.
//!
//! | made by | kind | who may write it while it is registered | slices ([`Context::bytes`]) |
//! |---|---|---|---|
//! | [`Memory::zeroed`], [`Memory::copy_of`] | owned | the context that holds it | yes |
//! | [`Memory::shared`], then [`share`](Memory::share) | shared | all contexts and threads with a handle | no |
//! | [`Memory::from_raw`] (unsafe) | foreign | anybody: a C library, another process | no |
//! | [`Device::allocate`](crate::driver::gpu::Device::allocate) of [`driver::gpu`] | device | the GPU | no |
//!
//! [`Context::read`], [`write`](Context::write), [`load_u64`](Context::load_u64) and [`store_u64`](Context::store_u64) copy, and
//! work on every kind. A slice of owned memory borrows the context, so nothing is polled and no peer writes while it lives.
//! Memory that is registered with an RNIC has no slices, for the card may write it at any time. Owned memory is the one to
//! begin with.
//!
//! Memory of a device is copied by the device, through [`staging`](Config::staging_chunk). Completions, acknowledgements and answers
//! wait until the bytes are there. It has no atomics, and the last bytes of a WRITE are not stored last. `deregister` is refused with
//! [`Error::Busy`] while copies are under way: poll, and try again. A copy that fails ends the work request with
//! [`FatalErr`](WcStatus::FatalErr) here, and with [`RemOpErr`](WcStatus::RemOpErr) at the peer. ACK timeouts of peers must be longer
//! than copies take.
//!
//! An RNIC reaches memory of a device itself, by the dma-buf that the device [exports](Memory::export), and nothing is copied:
//! a card that can't has no way around it, and `register` fails with what is missing:
//!
//! | missing | error |
//! |---|---|
//! | in libibverbs, before rdma-core 34: `ibv_reg_dmabuf_mr` | `Verbs` of [`driver::Error`] |
//! | in the card, its driver or the kernel: dma-bufs (rdma_rxe has none) | `Verbs`, mostly with `EOPNOTSUPP` |
//! | in the device: a dma-buf of its memory (OpenCL has none) | `NoDmaBuf` |
//! | with ConnectX: `MLX5_SCATTER_TO_CQE=0` in the environment, for its provider else copies short messages with the CPU | `Invalid` |
//!
//! Then register memory of the host and copy ([`Memory::read`], [`Memory::write`], or a [`Queue`](crate::driver::gpu::Queue)), or
//! take another port. There are no memory windows on it with an RNIC, and what the card wrote is there for kernels that are started behind
//! the completion, not for those that run already.
//!
//! # Who may do what
//!
//! | [`Access`] of the region | allows |
//! |---|---|
//! | always | to send from it and to write from it |
//! | [`LOCAL_WRITE`](Access::LOCAL_WRITE) | receives, and the results of READs and atomics, here |
//! | [`REMOTE_WRITE`](Access::REMOTE_WRITE), [`REMOTE_READ`](Access::REMOTE_READ), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) | peers that know the key; the first and the last need `LOCAL_WRITE` too |
//! | [`MW_BIND`](Access::MW_BIND) | memory windows, which open a part of it to one peer |
//!
//! A local work request names a region and an offset ([`Mr::sge`]). A peer names an address and a key: [`Context::remote`] returns
//! both as [`RemoteMemory`], to be told to it, and [`RemoteMemory::at`] is the address of a byte for a work request. Addresses start
//! at 0 unless [`register_at`](Context::register_at) says otherwise. Keys are random. The queue pair must allow the access too:
//! [`handshake`](Context::handshake) from RESET allows everything, [`Transition::Init`] what it names. With the connection
//! manager it is what you have set with `Init`.
//!
//! # When a buffer may be touched
//!
//! | buffer | is the stack's until |
//! |---|---|
//! | [`Data::Inline`] | the post returns: the bytes are copied |
//! | [`Data::Sges`] of a SEND or WRITE | the completion. Bytes are read when they are sent, and read again when they are sent again; if you change them, the peer gets some old and some new ones |
//! | the target of a READ or atomic | the completion. Until then it may hold anything |
//! | a receive | its completion |
//! | the peer's memory in a READ, WRITE or atomic | the peer decides; its [`deregister`](Context::deregister) ends the access at once, and waits for nobody |
//!
//! A work request without [`SendFlags::SIGNALED`] has no completion of its own if it succeeds. It is done when a later one of
//! the same queue pair has completed. `deregister` and [`exchange`](Context::exchange) are refused with [`Error::Busy`] while a
//! posted work request names the region.
//!
//! # What is seen in which order
//!
//! The requests of one RC queue pair are carried out by the peer in the order of their posting (IBA 9.5 and 10.8.3.3,
//! docs/protocol.md §5). Of two queue pairs nothing is promised.
//!
//! | you want | do |
//! |---|---|
//! | the peer to learn that a WRITE is there | post a SEND behind it, or take [`WriteWithImm`](SendOp::WriteWithImm): with the completion of its receive the peer sees all earlier WRITEs whole |
//! | the peer to notice without a receive | let it look at the last byte or word of the WRITE: ferroce stores the last bytes last. Other implementations do not promise that |
//! | to send what a READ brings | [`fence`](SendFlags::fence) on the SEND or WRITE, or wait for the completion of the READ |
//! | a WRITE not to be seen by an earlier READ | [`fence`](SendFlags::fence) on the WRITE: a READ whose response was lost is carried out again |
//! | READs in order | nothing with go-back-N, the default; with selective repeat a fence on the later one |
//! | several writers of one word | [`FetchAdd`](SendOp::FetchAdd), [`CompareSwap`](SendOp::CompareSwap): atomic against each other for all queue pairs of a context, at multiples of 8 |
//! | a word stored in one piece | [`AtomicWrite`](SendOp::AtomicWrite) (IBA 1.6; ferroce, and rdma_rxe since Linux 6.2) |
//!
//! The bytes within one WRITE, READ or SEND have no order. A completion of your WRITE says that the peer's memory has the bytes, and
//! not that its application has looked at them.
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//!
//! fn main() -> Result<(), Error> {
//!     # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let own = context.endpoint(qp, 0)?;
//!     # context.handshake(qp, &own, &own)?;
//!     // A queue pair that is its own peer, as on the front page.
//!     let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
//!     let mr = context.register(pd, Memory::zeroed(8192)?, access)?;
//!     let there = context.remote(mr)?.at(4096);
//!
//!     // A WRITE of 1000 bytes, and behind it a message of none that says so. The WRITE needs no completion of its own.
//!     context.write(mr, 0, &[7; 1000])?;
//!     context.post_recv(qp, &ReceiveWorkRequest { wr_id: 10, sges: &[] })?;
//!     let sges = [mr.sge(0..1000)];
//!     let write = SendWorkRequest {
//!         wr_id: 1,
//!         op: SendOp::Write(there),
//!         data: Data::Sges(&sges),
//!         flags: SendFlags::default(),
//!     };
//!     let (op, data) = (SendOp::SendWithImm(1000), Data::Inline(&[]));
//!     context.post_sends(qp, &[write, SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::SIGNALED }])?;
//!     for _ in 0..2 {
//!         let completion = context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
//!         match completion.wr_id {
//!             // The receiver sees the whole WRITE now.
//!             10 => assert_eq!(
//!                 (completion.immediate, &context.bytes(mr)?[4096..5096]),
//!                 (Some(1000), &[7; 1000][..])
//!             ),
//!             // The sender may use the first 1000 bytes again.
//!             id => assert_eq!(id, 2),
//!         }
//!     }
//!
//!     // A READ, and a WRITE of what it brings: the fence makes the second wait for the first.
//!     let (sges, flags) = ([mr.sge(2000..2100)], SendFlags::SIGNALED);
//!     let read = SendWorkRequest { wr_id: 3, op: SendOp::Read(there), data: Data::Sges(&sges), flags };
//!     let op = SendOp::Write(context.remote(mr)?.at(3000));
//!     context.post_sends(qp, &[read, SendWorkRequest { wr_id: 4, op, flags: flags.fence(true), ..read }])?;
//!     for wr_id in [3, 4] {
//!         let completion = context.wait_cq(cq, Duration::from_secs(5))?.expect("a completion within 5 s").ok()?;
//!         assert_eq!(completion.wr_id, wr_id);
//!     }
//!     assert_eq!(&context.bytes(mr)?[3000..3100], &[7; 100]);
//!
//!     // No work request names the region any more: other memory of the same length can take the place of this.
//!     let filled = context.exchange(mr, Memory::zeroed(8192)?)?;
//!     assert_eq!(filled.len(), 8192);
//!     Ok(())
//! }
//! ```
//!
//! More: `examples/key_value.rs` has a table that its owner writes while peers READ it, `examples/two_ports.rs` one buffer on two
//! ports; docs/decisions/01-memory.md says why each call is sound.

#[cfg(doc)]
use crate::*;
