//! Who may access which bytes and when, and the order in which writes become visible. Terms: [glossary](super::glossary).
//!
//! # Kinds of memory
//!
//! Peers and work requests reach only memory that is registered: [`Context::register`] takes a [`Memory`] and returns an [`Mr`],
//! and [`Context::deregister`] returns the memory.
//!
//! | made by | kind | who may write it while it is registered | may be borrowed as a slice ([`Context::bytes`]) |
//! |---|---|---|---|
//! | [`Memory::zeroed`], [`Memory::copy_of`] | owned | the context that holds it | yes |
//! | [`Memory::shared`], then [`share`](Memory::share) | shared | all contexts and threads with a handle | no |
//! | [`Memory::from_raw`] (unsafe) | foreign | anything with the pointer: a C library, another process | no |
//! | [`Device::allocate`](crate::driver::gpu::Device::allocate) of [`driver::gpu`] | device | the GPU | no |
//!
//! [`Context::read`], [`write`](Context::write), [`load_u64`](Context::load_u64) and [`store_u64`](Context::store_u64) copy, and
//! work on every kind. A slice of owned memory borrows the context: while a program holds the slice, it can't poll the context,
//! so no peer can write the memory. Memory registered with an RNIC has no slices, because the card may write it at any time.
//! Begin with owned memory.
//!
//! On the software stack the GPU copies device memory, through [staging chunks](Config::staging_chunk) in host memory. Completions,
//! acknowledgements and READ responses wait until the copy is done. Device memory does not support atomics, and the bytes of a
//! WRITE are stored in any order ([below](#the-last-byte-of-a-write)). `deregister` returns [`Error::Busy`] while copies are in
//! progress: poll, and try again. If a copy fails, a work request of this end completes with [`FatalErr`](WcStatus::FatalErr), one
//! of the peer with [`RemOpErr`](WcStatus::RemOpErr). The peers' ACK timeouts must be longer than the copies.
//!
//! An RNIC accesses device memory directly, through the dma-buf that the device [exports](Memory::export). There is no fallback
//! to copies: if the card can't import it, `register` fails and names what is missing:
//!
//! | missing | [`driver::Error`] |
//! |---|---|
//! | `ibv_reg_dmabuf_mr`: libibverbs is older than rdma-core 34 | `Verbs` |
//! | support of dma-bufs in the card, its driver or the kernel (rdma_rxe has none) | `Verbs`, mostly with `EOPNOTSUPP` |
//! | a dma-buf of the device's memory (OpenCL has none) | `NoDmaBuf` |
//! | the environment variable `MLX5_SCATTER_TO_CQE=0` for a ConnectX: without it libmlx5 copies short messages with the CPU | `Invalid` |
//!
//! In these cases register host memory and copy ([`Memory::read`], [`Memory::write`], or a [`Queue`](crate::driver::gpu::Queue)),
//! or use another port. With an RNIC, memory windows on device memory are not supported. GPU kernels started after the completion
//! see the data that the card wrote; a kernel that is already running may see old bytes.
//!
//! # Who may do what
//!
//! | [`Access`] of the region | allows |
//! |---|---|
//! | none | to be the source of a SEND or WRITE |
//! | [`LOCAL_WRITE`](Access::LOCAL_WRITE) | to receive into it, and the results of local READs and atomics |
//! | [`REMOTE_WRITE`](Access::REMOTE_WRITE), [`REMOTE_READ`](Access::REMOTE_READ), [`REMOTE_ATOMIC`](Access::REMOTE_ATOMIC) | access by peers that know the key; the first and the last need `LOCAL_WRITE` too |
//! | [`MW_BIND`](Access::MW_BIND) | memory windows: a window is a part of the region with a key of its own, for the peer of one queue pair ([`SendOp::BindMw`]) |
//!
//! A local work request names a region and an offset ([`Mr::sge`]). A peer names an address and a key: [`Context::remote`]
//! returns both as a [`RemoteMemory`] to send to the peer, and [`RemoteMemory::at`] returns the address of a byte for a work
//! request. Addresses start at 0, or at the address given to [`register_at`](Context::register_at). Keys are random.
//!
//! The queue pair must allow the access too. A queue pair that [`handshake`](Context::handshake) moves out of RESET allows all
//! remote access. To choose the rights, make the [`Transition::Init`] before `handshake`. Before `connect` and `accept` of the
//! connection manager this transition is always necessary.
//!
//! # When a buffer may be accessed
//!
//! | buffer | used by the stack until |
//! |---|---|
//! | [`Data::Inline`] | the post returns: the bytes are copied |
//! | [`Data::Sges`] of a SEND or WRITE | the completion. Bytes are read when they are sent and when they are retransmitted; if you change them, the peer gets a mix of old and new ones |
//! | the target of a READ or atomic | the completion. Until then its contents are undefined |
//! | a receive | its completion |
//! | the peer's memory in a READ, WRITE or atomic | the peer deregisters it. [`deregister`](Context::deregister) does not wait for requests of other ends: they are refused at once |
//!
//! A work request without [`SendFlags::SIGNALED`] has no completion of its own if it succeeds. It is done when a later send of the
//! same queue pair has completed. `deregister` and [`exchange`](Context::exchange) are refused with [`Error::Busy`] while a work
//! request posted at this end names the region.
//!
//! # Ordering
//!
//! The peer executes the requests of one RC queue pair in the order of posting, with one exception: a READ whose response was
//! lost is executed again, and may then see later WRITEs. There is no order between queue pairs.
//!
//! | you want | do |
//! |---|---|
//! | to notify the peer of a WRITE | post a SEND after it, or use [`WriteWithImm`](SendOp::WriteWithImm): when its receive completes, the peer sees all earlier WRITEs completely |
//! | to notify the peer without a receive | the peer polls the last byte of the WRITE, if its target [stores that byte last](#the-last-byte-of-a-write) |
//! | to send the result of a READ | [`fence`](SendFlags::fence) on the SEND or WRITE, or wait for the completion of the READ |
//! | a WRITE not to change the result of an earlier READ | [`fence`](SendFlags::fence) on the WRITE: it is sent after the response to the READ |
//! | READs executed in order | with go-back-N (the default) this is so; with [selective repeat](ReadyToReceive::selective_repeat) set `fence` on the later READ |
//! | several writers of one word | [`FetchAdd`](SendOp::FetchAdd), [`CompareSwap`](SendOp::CompareSwap): atomic against each other for all queue pairs of a context; the address must be a multiple of 8 |
//! | a word stored in one piece, not byte by byte | [`AtomicWrite`](SendOp::AtomicWrite) (IBA 1.5; ferroce, and rdma_rxe since Linux 6.2) |
//!
//! A completion of your WRITE means that the bytes are in the peer's memory, not that its application has read them.
//!
//! ## The last byte of a WRITE
//!
//! The standard defines no order between the bytes of one message. It guarantees only that all bytes are there at the
//! completion, and at the receive of a later message. A target on the software stack guarantees more **for host memory**
//! (owned, shared and foreign):
//!
//! - Packets of a queue pair are executed in the order of their PSNs, also with selective repeat.
//! - The last 8 bytes of a packet are stored after its other bytes, with release ordering: byte by byte, the last byte last, or as
//!   one word if their address in memory is a multiple of 8. (While earlier data of the queue pair is copied to a GPU, an aligned
//!   word may be stored byte by byte too.) See `copy_in` in `driver/src/memory/span.rs`.
//!
//! So a program that sees the last byte of a WRITE by an acquire load ([`load_u64`](Context::load_u64),
//! [`atomics`](Context::atomics)) sees the whole WRITE, and all earlier WRITEs of that queue pair. Do not rely on this with
//!
//! - **GPU memory**: bytes are stored in any order, also those of two WRITEs. Put the flag into host memory
//!   ([`device_memory`](super::device_memory#how-data-is-copied)).
//! - **an RNIC as the target**: the standard's rule applies. `docs/rnic.md` says what the usual cards do.
//! - **another implementation** as the target, unless its documentation promises it.
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
//!     // `qp` is connected to itself, as in the first example of the crate's documentation.
//!     let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
//!     let mr = context.register(pd, Memory::zeroed(8192)?, access)?;
//!     let there = context.remote(mr)?.at(4096);
//!
//!     // A WRITE of 1000 bytes, then an empty SEND whose immediate data is that length. The WRITE is unsignaled: the completion of
//!     // the SEND covers it.
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
//!     // A READ, and a WRITE that sends the data read: the fence makes the WRITE wait for the READ.
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
//!     // No work request names the region any more, so its memory can be replaced by other memory of the same length.
//!     let filled = context.exchange(mr, Memory::zeroed(8192)?)?;
//!     assert_eq!(filled.len(), 8192);
//!     Ok(())
//! }
//! ```
//!
//! More: `examples/key_value.rs` has a table that its owner writes while peers READ it, `examples/two_ports.rs` uses one buffer
//! on two ports.
//!
//! Sources: IBA 9.5 and 10.8.3.3 (ordering), 10.6.7.2 (memory windows), docs/protocol.md §5 (memory order);
//! docs/decisions/01-memory.md (why each call is memory-safe), `stack/tests/memory_kinds.rs` and `stack/tests/read_order.rs` (the
//! tests).

#[cfg(doc)]
use crate::*;
