//! How to connect two queue pairs.
//!
//! | method | what the ends need | for |
//! |---|---|---|
//! | [`endpoint`](Context::endpoint_for) and [`handshake`](Context::handshake) | any connection of their own (TCP, a file, MPI) to exchange a line of text | RC, UC; every program that exchanges QPN, PSN and GID |
//! | the connection manager: [`listen`](Context::listen), [`connect`](Context::connect), [`accept`](Context::accept) | an address and a port | RC, UC; compatible with the kernel's rdma_cm |
//! | datagrams: [`resolve`](Context::resolve), [`create_ah`](Context::create_ah) | an address and a port; or GID, QPN and Q_Key | UD |
//! | single steps: [`modify_qp`](Context::modify_qp) with a [`Transition`] | as for a handshake | all; for timeouts, retries, traffic class, selective repeat |
//!
//! # By handshake
//!
//! [`first_program`](super::first_program) is the example. [`Context::endpoint_for`] returns the data that the peer needs. Call
//! it once per connection: each call draws a new PSN, and `handshake` needs the endpoint that was sent to the peer. The ends may
//! call `handshake` in any order: a request to an end that is not ready yet is retransmitted. To post receives before the peer
//! can send, first move to INIT: `context.modify_qp(qp, Transition::Init { access })?`, `post_recv`, `handshake`.
//!
//! # By address and port
//!
//! These verbs do not block; events report the result ([`CmEvent`]). Each has a blocking form:
//! [`connect_blocking`](Context::connect_blocking), [`accept_blocking`](Context::accept_blocking),
//! [`resolve_blocking`](Context::resolve_blocking), [`wait_cm_event`](Context::wait_cm_event).
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
//! Private data can carry an [`Endpoint`] or a [`RemoteMemory`] (`to_bytes`): 56 bytes in a request, 196 in a reply. The rules
//! are those of IBA 12 and Annex A11 (port numbers as service IDs).
//!
//! # Datagrams
//!
//! A UD queue pair has no peer. Each send names an address handle, a QPN and a Q_Key; each receive needs 40 more bytes at the
//! beginning of its buffer, for the network header. A datagram is at most one path MTU long, may be lost, and is dropped if no
//! receive is posted.
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
//! For multicast, create the address handle with the GID of the group and send to [`Qpn::MULTICAST`]; receivers call
//! [`attach_mcast`](Context::attach_mcast): `examples/publish.rs`.
//!
//! # Which GID
//!
//! The GID index selects the source address: it is a row of [`Port::gids`]. Both ends must use the same IP version, or the verb
//! fails with [`Error::AddressFamily`]. [`Context::endpoint_for`] and [`Port::gid_index_for`] find the row for a peer. The
//! connection manager does this itself. On an interface index 0 is often the link-local address, fe80::/10; a UDP socket has one
//! address. [`Context::add_gid`] adds an address of a VLAN. RoCE v1 is off unless [`Config::roce_v1`] turns it on.
//!
//! `ferroce devinfo` prints the table. The index in `show_gids` and in perftest's `-x` refers to the peer's own table.
//!
//! # A peer that is gone
//!
//! A peer that is killed sends nothing, and only a sender notices: its work requests complete with
//! [`RetryExcErr`](WcStatus::RetryExcErr) after [`retry_count`](ReadyToSend::retry_count) + 1 ACK timeouts. The defaults are:
//!
//! | connected by | ACK timeout | error after |
//! |---|---|---|
//! | [`handshake`](Context::handshake) | 67 ms | 0.5 s |
//! | the connection manager | 0.5 s | 4.3 s |
//!
//! To change it, make the transition with [`ReadyToSend::timeout_at_least`], or set [`ConnectionParameters::timeout_at_least`].
//! An end that only receives stays in RTS: if that matters, post a WRITE of 0 bytes from time to time. A `connect` to a host that
//! does not answer, and that the network does not report as unreachable, fails after 69 s ([`ConnectionParameters::patience`]).
//!
//! A connection of the connection manager outlives a failure of its queue pair: [`destroy_qp`](Context::destroy_qp) or
//! [`disconnect`](Context::disconnect) ends it, about 10 s later if the peer is gone and acknowledges nothing. In a server that
//! calls neither, dead peers use up [`max_connections`](Config::max_connections), and it then answers no request
//! ([`CmRxNoRoom`](Counter::CmRxNoRoom) counts them).
//!
//! [`disconnect`](Context::disconnect) notifies the peer, and so does dropping the context, for connections of the connection
//! manager. For queue pairs connected by `handshake` nothing notifies the peer: send a message of your own.

#[cfg(doc)]
use crate::*;
