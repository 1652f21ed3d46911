//! From a device to a WRITE between two ends. The [glossary](super::glossary) explains the terms.
//!
//! | step | verb |
//! |---|---|
//! | open a port | [`Device::open`], [`Context::open`] |
//! | a protection domain: a queue pair can access only memory of its own domain | [`Context::alloc_pd`] |
//! | a completion queue: reports finished work requests | [`Context::create_cq`] |
//! | a queue pair: this end of a connection | [`Context::create_qp`] with [`QpConfig::rc`] |
//! | memory that the stack or the peer may access | [`Memory::zeroed`], [`Context::register`] |
//! | get what the peer must know: this end's endpoint (GID, queue pair number, first PSN), and the address and key of its memory | [`Context::endpoint_for`], [`Context::remote`] |
//! | send both to the peer, by any means | `Display` and `FromStr`, `to_bytes` and `from_bytes`, or serde |
//! | connect | [`Context::handshake`] |
//! | post work | [`Context::post_send`], [`Context::post_recv`] |
//! | wait for completion | [`Context::wait_cq`], then [`WorkCompletion::ok`] |
//!
//! The two ends below are threads of one program. They exchange endpoint and memory as lines of text through channels. Between
//! hosts use a TCP connection, as `examples/write.rs` of the crate does.
//!
//! ```
//! use std::net::IpAddr;
//! use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
//! use std::thread;
//! use std::time::Duration;
//!
//! use ferroce::*;
//!
//! type Any = Box<dyn std::error::Error + Send + Sync>;
//! const NEAR: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1));
//! const FAR: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2));
//!
//! fn main() -> Result<(), Any> {
//!     // Two ports with a cable between them. On a host: `Device::open("eth0")?`.
//!     let (near, far) = driver::loopback::pair(&[NEAR], &[FAR]);
//!     let ((to_far, from_near), (to_near, from_far)) = (channel(), channel());
//!     let passive = thread::spawn(move || passive(Box::new(far).into(), to_near, from_near));
//!     active(Box::new(near).into(), to_far, from_far)?;
//!     passive.join().expect("no panic")
//! }
//!
//! /// Writes into the peer's memory.
//! fn active(device: Device, to: Sender<String>, from: Receiver<String>) -> Result<(), Any> {
//!     let mut end = End::open(device, FAR)?;
//!     let memory = end.connect(&to, &from)?;
//!     end.context.write(end.mr, 0, b"hello")?;
//!     let (op, data) = (SendOp::Write(memory.at(100)), Data::Sges(&[end.mr.sge(0..5)]));
//!     end.context.post_send(end.qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
//!     end.context.wait_cq(end.cq, Duration::from_secs(5))?.ok_or("no completion in 5 s")?.ok()?;
//!     Ok(()) // the channel closes, which tells the peer
//! }
//!
//! /// The end whose memory is written. It must poll: packets are received and acknowledged only in a poll.
//! fn passive(device: Device, to: Sender<String>, from: Receiver<String>) -> Result<(), Any> {
//!     let mut end = End::open(device, NEAR)?;
//!     end.connect(&to, &from)?;
//!     while from.try_recv() != Err(TryRecvError::Disconnected) {
//!         end.context.wait_cq(end.cq, Duration::from_millis(1))?;
//!     }
//!     assert_eq!(&end.context.bytes(end.mr)?[100..105], b"hello");
//!     Ok(())
//! }
//!
//! struct End {
//!     context: Context,
//!     cq: Cq,
//!     qp: Qp,
//!     mr: Mr,
//!     peer: IpAddr,
//! }
//!
//! impl End {
//!     fn open(device: Device, peer: IpAddr) -> Result<End, Any> {
//!         let mut context = Context::open(device, &Config::default())?;
//!         let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!         let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!         let mr = context.register(pd, Memory::zeroed(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//!         Ok(End { context, cq, qp, mr, peer })
//!     }
//!
//!     /// Sends endpoint and memory of this end to the peer, receives those of the peer, and connects. Returns the peer's memory.
//!     fn connect(&mut self, to: &Sender<String>, from: &Receiver<String>) -> Result<RemoteMemory, Any> {
//!         let local = self.context.endpoint_for(self.qp, self.peer)?;
//!         to.send(local.to_string())?;
//!         to.send(self.context.remote(self.mr)?.to_string())?;
//!         let (remote, memory) = (from.recv()?.parse::<Endpoint>()?, from.recv()?.parse()?);
//!         self.context.handshake(self.qp, &local, &remote)?;
//!         Ok(memory)
//!     }
//! }
//! ```
//!
//! Next:
//!
//! - **Both ends poll.** A context sends, receives, acknowledges and retransmits only inside [`Context::poll`], which every verb
//!   that waits calls. The target of a WRITE or READ polls until its peers are done ([`threads`](super::threads)).
//! - **A completion may be an error.** [`WorkCompletion::ok`] turns it into an [`Error`] ([`errors`](super::errors)).
//! - **A buffer belongs to the stack until its work request completes** ([`memory`](super::memory)).
//! - **An exchange of your own is not needed**: the connection manager connects by address and port
//!   ([`connecting`](super::connecting)).
//!
//! More examples in the repository: `read.rs`, `datagrams.rs`, `publish.rs` (multicast), `key_value.rs`, `workers.rs`,
//! `cores.rs`, `tokio_server.rs`, `two_ports.rs`, all in `stack/examples`.
//!
//! Sources: IBA 10 and 11 (queue pairs, verbs), docs/protocol.md §6 (states), docs/decisions/18-verbs.md (differences from
//! libibverbs).

#[cfg(doc)]
use crate::*;
