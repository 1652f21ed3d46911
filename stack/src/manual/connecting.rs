//! How two queue pairs find each other.
//!
//! | way | what the ends need | with |
//! |---|---|---|
//! | [`endpoint`](Context::endpoint_for) and [`handshake`](Context::handshake) | any connection of their own (TCP, a file, MPI) to tell each other a line of text | RC, UC; every program that exchanges QPN, PSN and GID |
//! | the connection manager: [`listen`](Context::listen), [`connect`](Context::connect), [`accept`](Context::accept) | an address and a port | RC, UC; the kernel's rdma_cm at either end |
//! | datagrams: [`resolve`](Context::resolve), [`create_ah`](Context::create_ah) | an address and a port; or GID, QPN and Q_Key | UD |
//! | single steps: [`modify_qp`](Context::modify_qp) with a [`Transition`] | as for a handshake | all; for timeouts, retries, traffic class, selective repeat |
//!
//! # By handshake
//!
//! [`first_program`](super::first_program) is the example. [`Context::endpoint_for`] says what the peer must know. Call it once for each
//! connection: it draws a new PSN, and the endpoint that the peer was told is the one that `handshake` needs. The ends may call
//! `handshake` in any order: a request to an end that is not ready is sent again. To post receives before the peer can send, go to
//! INIT first: `context.modify_qp(qp, Transition::Init { access })?`, `post_recv`, `handshake`.
//!
//! # By address and port
//!
//! The verbs never block; events tell how it went ([`CmEvent`]). Each has a form that waits: [`connect_blocking`](Context::connect_blocking),
//! [`accept_blocking`](Context::accept_blocking), [`resolve_blocking`](Context::resolve_blocking), [`wait_cm_event`](Context::wait_cm_event).
//!
//! ```
//! use std::net::SocketAddr;
//! use std::thread;
//! use std::time::Duration;
//!
//! use ferroce::*;
//!
//! const LONG: Duration = Duration::from_secs(5);
//!
//! fn main() -> Result<(), Error> {
//!     let server = SocketAddr::from(([192, 0, 2, 2], 7471));
//!     let (near, far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[server.ip()]);
//!
//!     let mut context = Context::open(Box::new(far), &Config::default())?;
//!     context.listen(PortSpace::Tcp, server, &ListenConfig::default())?;
//!     let serving = thread::spawn(move || serve(context));
//!
//!     let mut context = Context::open(Box::new(near), &Config::default())?;
//!     let (qp, _) = queue_pair(&mut context)?;
//!     let hello = ConnectionParameters::default().private_data(b"hello");
//!     let (id, answer) = context.connect_blocking(qp, server, &hello, LONG)?;
//!     assert!(answer.starts_with(b"welcome")); // zeros follow: private data has no length on the wire
//!     context.disconnect(id)?;
//!     assert!(matches!(context.wait_cm_event(LONG)?, Some(CmEvent::Disconnected { .. })));
//!     serving.join().expect("no panic")
//! }
//!
//! fn serve(mut context: Context) -> Result<(), Error> {
//!     loop {
//!         match context.wait_cm_event(LONG)? {
//!             Some(CmEvent::ConnectionRequest(request)) => {
//!                 assert!(request.private_data.starts_with(b"hello"));
//!                 let (qp, _) = queue_pair(&mut context)?;
//!                 let welcome = ConnectionParameters::default().private_data(b"welcome");
//!                 context.accept_blocking(request.id, qp, &welcome, LONG)?; // the queue pair is in RTS
//!             }
//!             Some(CmEvent::Disconnected { .. }) => return Ok(()), // its queue pair is in ERR: destroy or reset it
//!             other => panic!("{other:?}"),
//!         }
//!     }
//! }
//!
//! /// In INIT, where receives can be posted. What the peer may do is said here.
//! fn queue_pair(context: &mut Context) -> Result<(Qp, Cq), Error> {
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(64)?);
//!     let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE | Access::REMOTE_READ })?;
//!     Ok((qp, cq))
//! }
//! ```
//!
//! Private data is a good place for an [`Endpoint`] or a [`RemoteMemory`] of a peer (`to_bytes`): 56 bytes with a request, 196 with an
//! answer. The rules are those of IBA 12 and Annex A11 (port numbers as service ids).
//!
//! # Datagrams
//!
//! A UD queue pair has no peer. Each send names an address handle, a QPN and a Q_Key; each receive needs 40 bytes more in front,
//! for the network header. A datagram has at most one path MTU, may be lost, and is dropped where no receive is posted.
//!
//! ```
//! use std::net::SocketAddr;
//! use std::thread;
//! use std::time::Duration;
//!
//! use ferroce::*;
//!
//! const LONG: Duration = Duration::from_secs(5);
//!
//! fn main() -> Result<(), Error> {
//!     let server = SocketAddr::from(([192, 0, 2, 2], 7471));
//!     let (near, far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[server.ip()]);
//!
//!     let mut context = Context::open(Box::new(far), &Config::default())?;
//!     context.listen(PortSpace::Udp, server, &ListenConfig::default())?;
//!     let serving = thread::spawn(move || serve(context));
//!
//!     let mut context = Context::open(Box::new(near), &Config::default())?;
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     let qp = context.create_qp(&QpConfig::ud(pd, cq))?;
//!     context.start_datagrams(qp, 7)?;
//!     let service = context.resolve_blocking(server, &ConnectionParameters::default(), LONG)?;
//!     let ah = context.create_ah_blocking(pd, &service.address, LONG)?;
//!     let op = SendOp::SendTo(Destination { ah, qpn: service.qpn, qkey: service.qkey });
//!     let data = Data::Inline(b"hello");
//!     context.post_send(qp, &SendWorkRequest { wr_id: 1, op, data, flags: SendFlags::SIGNALED })?;
//!     context.wait_cq(cq, LONG)?.expect("it leaves within 5 s").ok()?;
//!     serving.join().expect("no panic")
//! }
//!
//! fn serve(mut context: Context) -> Result<(), Error> {
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     let qp = context.create_qp(&QpConfig::ud(pd, cq))?;
//!     context.start_datagrams(qp, 0x1234)?;
//!     let mr = context.register(pd, Memory::zeroed(40 + 1024)?, Access::LOCAL_WRITE)?;
//!     context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[mr.sge(0..40 + 1024)] })?;
//!     let Some(CmEvent::ConnectionRequest(request)) = context.wait_cm_event(LONG)? else { panic!("nobody asks") };
//!     context.accept_datagrams(request.id, qp, &[])?;
//!     let received = context.wait_cq(cq, LONG)?.expect("a datagram within 5 s").ok()?;
//!     // `address_from_wc` makes the way back to the sender of the first 40 bytes.
//!     assert_eq!(&context.bytes(mr)?[40..received.byte_len as usize], b"hello");
//!     Ok(())
//! }
//! ```
//!
//! For multicast create the address handle with the GID of the group, send to [`Qpn::MULTICAST`], and let receivers
//! [`attach_mcast`](Context::attach_mcast): `examples/publish.rs`.
//!
//! # Which GID
//!
//! The GID index chooses the source address: the row of [`Port::gids`]. Both ends must use the same IP version, or the verb fails with
//! [`Error::AddressFamily`]. [`Context::endpoint_for`] and [`Port::gid_index_for`] take the row that fits a peer. The connection
//! manager does so by itself. On an interface index 0 is often the link-local address, fe80::/10; a UDP socket has one address.
//! [`Context::add_gid`] adds an address of a VLAN. RoCE v1 is off unless [`Config::roce_v1`] turns it on.
//!
//! `ferroce devinfo` prints the table. The index of `show_gids` and of perftest's `-x` counts the peer's table, which is another one.
//!
//! # A peer that is gone
//!
//! A peer that is killed says nothing, and only a sender notices: its work requests complete with
//! [`RetryExcErr`](WcStatus::RetryExcErr) after [`retry_count`](ReadyToSend::retry_count) + 1 ACK timeouts. The defaults are:
//!
//! | connected by | ACK timeout | given up after |
//! |---|---|---|
//! | [`handshake`](Context::handshake) | 67 ms | 0.5 s |
//! | the connection manager | 0.5 s | 4.3 s |
//!
//! For another time make the transition with [`ReadyToSend::timeout_at_least`], or give
//! [`ConnectionParameters::timeout_at_least`]. An end that only receives stays in RTS: where that matters, post a WRITE of no bytes now
//! and then. A `connect` to somebody who neither answers nor is refused by the network ends after 69 s
//! ([`ConnectionParameters::patience`]).
//!
//! A connection of the connection manager outlives its queue pair's failure: [`destroy_qp`](Context::destroy_qp) or
//! [`disconnect`](Context::disconnect) ends it, some 10 s later, for a peer that is gone acknowledges nothing. A server that does
//! neither has its [`max_connections`](Config::max_connections) taken by dead peers in time, and then answers no request
//! ([`CmRxNoRoom`](Counter::CmRxNoRoom) counts them).
//!
//! [`disconnect`](Context::disconnect) tells the peer, and so does the end of a context for connections of the connection
//! manager. Queue pairs that were connected by `handshake` have nobody who tells: end them by a message of your own.

#[cfg(doc)]
use crate::*;
