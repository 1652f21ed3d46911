//! Who may access which bytes and when, and the order in which writes become visible.
//!
//! # Kinds of memory
//!
//! Peers and work requests reach only memory that is registered: [`Context::register`] takes a [`Memory`] and returns an [`Mr`],
//! and [`Context::deregister`] returns the memory.
//!
//! | made by | kind | who may write it while it is registered | slices ([`Context::bytes`]) |
//! |---|---|---|---|
//! | [`Memory::zeroed`], [`Memory::copy_of`] | owned | the context that holds it | yes |
//! | [`Memory::shared`], then [`share`](Memory::share) | shared | all contexts and threads with a handle | no |
//! | [`Memory::from_raw`] (unsafe) | foreign | anything with the pointer: a C library, another process | no |
//! | [`Device::allocate`](crate::driver::gpu::Device::allocate) of [`driver::gpu`] | device | the GPU | no |
//!
//! [`Context::read`], [`write`](Context::write), [`load_u64`](Context::load_u64) and [`store_u64`](Context::store_u64) copy, and
//! work on every kind. A slice of owned memory borrows the context, so nothing is polled and no peer writes while it lives.
//! Memory registered with an RNIC has no slices, because the card may write it at any time. Begin with owned memory.
//!
//! Device memory is copied by the device, through [`staging`](Config::staging_chunk) chunks. Completions, acknowledgements and
//! READ responses wait until the copy is done. It does not support atomics, and the last bytes of a WRITE are not stored last.
//! `deregister` returns [`Error::Busy`] while copies are in progress: poll, and try again. A copy that fails completes the work
//! request with [`FatalErr`](WcStatus::FatalErr) here, and with [`RemOpErr`](WcStatus::RemOpErr) at the peer. ACK timeouts of
//! peers must be longer than copies take.
//!
//! An RNIC accesses device memory directly, through the dma-buf that the device [exports](Memory::export). There is no fallback
//! to copies: if the card can't import it, `register` fails and names what is missing:
//!
//! | missing | error |
//! |---|---|
//! | in libibverbs, before rdma-core 34: `ibv_reg_dmabuf_mr` | `Verbs` of [`driver::Error`] |
//! | in the card, its driver or the kernel: dma-bufs (rdma_rxe has none) | `Verbs`, mostly with `EOPNOTSUPP` |
//! | in the device: a dma-buf of its memory (OpenCL has none) | `NoDmaBuf` |
//! | with ConnectX: `MLX5_SCATTER_TO_CQE=0` in the environment; otherwise its provider copies short messages with the CPU | `Invalid` |
//!
//! In these cases register host memory and copy ([`Memory::read`], [`Memory::write`], or a [`Queue`](crate::driver::gpu::Queue)),
//! or use another port. With an RNIC, memory windows on device memory are not supported, and data that the card wrote is visible
//! to kernels started after the completion, not to kernels that are already running.
//!
//! # Who may do what
//!
//! | [`Access`] of the region | allows |
//! |---|---|
//! | none | to be the source of a SEND or WRITE |
//! | [`LOCAL_WRITE`](Access::LOCAL_WRITE) | to receive into it, and the results of local READs and atomics |
//! | [`REMOTE_WRITE`](Access::REMOTE_WRITE), [`REMOTE_READ`](Access::REMOTE_READ), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) | access by peers that know the key; the first and the last need `LOCAL_WRITE` too |
//! | [`MW_BIND`](Access::MW_BIND) | memory windows, which grant one peer access to a part of it |
//!
//! A local work request names a region and an offset ([`Mr::sge`]). A peer names an address and a key: [`Context::remote`]
//! returns both as a [`RemoteMemory`] to send to the peer, and [`RemoteMemory::at`] returns the address of a byte for a work
//! request. Addresses start at 0 unless [`register_at`](Context::register_at) says otherwise. Keys are random. The queue pair
//! must allow the access too: [`handshake`](Context::handshake) from RESET allows everything, [`Transition::Init`] what it names.
//! With the connection manager, you set it with `Init`.
//!
//! # When a buffer may be accessed
//!
//! | buffer | used by the stack until |
//! |---|---|
//! | [`Data::Inline`] | the post returns: the bytes are copied |
//! | [`Data::Sges`] of a SEND or WRITE | the completion. Bytes are read when they are sent and when they are retransmitted; if you change them, the peer gets a mix of old and new ones |
//! | the target of a READ or atomic | the completion. Until then its contents are undefined |
//! | a receive | its completion |
//! | the peer's memory in a READ, WRITE or atomic | the peer decides; its [`deregister`](Context::deregister) ends the access at once, and does not wait |
//!
//! A work request without [`SendFlags::SIGNALED`] has no completion of its own if it succeeds. It is done when a later one of
//! the same queue pair has completed. `deregister` and [`exchange`](Context::exchange) are refused with [`Error::Busy`] while a
//! posted work request names the region.
//!
//! # Ordering
//!
//! The requests of one RC queue pair are executed by the peer in the order of posting (IBA 9.5 and 10.8.3.3, docs/protocol.md
//! §5). There is no order between queue pairs.
//!
//! | you want | do |
//! |---|---|
//! | to notify the peer of a WRITE | post a SEND after it, or use [`WriteWithImm`](SendOp::WriteWithImm): when its receive completes, the peer sees all earlier WRITEs completely |
//! | to notify it without a receive | let it poll the last byte or word of the WRITE: ferroce stores the last bytes last. Other implementations do not guarantee this |
//! | to send the result of a READ | [`fence`](SendFlags::fence) on the SEND or WRITE, or wait for the completion of the READ |
//! | an earlier READ not to see a WRITE | [`fence`](SendFlags::fence) on the WRITE: a READ whose response was lost is executed again |
//! | READs in order | nothing with go-back-N, the default; with selective repeat a fence on the later one |
//! | several writers for one word | [`FetchAdd`](SendOp::FetchAdd), [`CompareSwap`](SendOp::CompareSwap): atomic against each other for all queue pairs of a context, at multiples of 8 |
//! | a word stored in one piece | [`AtomicWrite`](SendOp::AtomicWrite) (IBA 1.6; ferroce, and rdma_rxe since Linux 6.2) |
//!
//! The bytes within one WRITE, READ or SEND are in no order. A completion of your WRITE means that the bytes are in the peer's
//! memory, not that its application has read them.
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
//! More: `examples/key_value.rs` has a table that its owner writes while peers READ it, `examples/two_ports.rs` uses one buffer
//! on two ports; docs/decisions/01-memory.md explains why each call is sound.

#[cfg(doc)]
use crate::*;
