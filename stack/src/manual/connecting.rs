//! How to connect two queue pairs. Terms: [glossary](super::glossary).
//!
//! | method | what the ends need | for |
//! |---|---|---|
//! | [`endpoint_for`](Context::endpoint_for) and [`handshake`](Context::handshake) | any connection of their own (TCP, a file, MPI) to exchange a line of text | RC, UC; peers with another RDMA library, if their program exchanges queue pair number (QPN), first packet sequence number (PSN) and address (GID) |
//! | the connection manager (CM): [`listen`](Context::listen), [`connect`](Context::connect), [`accept`](Context::accept) | an IP address and a port number | RC, UC; compatible with the kernel's rdma_cm |
//! | datagrams: [`resolve`](Context::resolve), [`create_ah`](Context::create_ah) | an IP address and a port number; or GID, QPN and Q_Key | UD |
//! | state by state (RESET, INIT, RTR, RTS): [`modify_qp`](Context::modify_qp) with a [`Transition`] | as for a handshake | RC, UC, UD; to set timeouts, retries, traffic class or selective repeat |
//!
//! # By handshake
//!
//! [`first_program`](super::first_program) is the example. [`Context::endpoint_for`] returns the data that the peer needs. Call
//! it once per connection: each call draws a new PSN, and `handshake` needs the endpoint that was sent to the peer. The ends may
//! call `handshake` in any order: a request to an end that is not ready yet is retransmitted. Receives can be posted from state
//! INIT on. To post them before the peer can send: `context.modify_qp(qp, Transition::Init { access })?`, `post_recv`,
//! `handshake`.
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
//!             Some(CmEvent::Disconnected { .. }) => return Ok(()), // its queue pair is in state ERR: destroy or reset it
//!             other => panic!("{other:?}"),
//!         }
//!     }
//! }
//!
//! /// Creates a queue pair in state INIT, in which receives can be posted. `access` sets what the peer may do.
//! fn queue_pair(context: &mut Context) -> Result<(Qp, Cq), Error> {
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(64)?);
//!     let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     context.modify_qp(qp, Transition::Init { access: Access::REMOTE_WRITE | Access::REMOTE_READ })?;
//!     Ok((qp, cq))
//! }
//! ```
//!
//! A request carries up to 56 bytes of your own (*private data*), a reply up to 196: enough for an [`Endpoint`] (28 bytes) and a
//! [`RemoteMemory`] (20 bytes), by `to_bytes`.
//!
//! # Datagrams
//!
//! A UD queue pair has no peer. Each send names an address handle (the destination's GID with its MAC address), the QPN there,
//! and that queue pair's Q_Key, a 32-bit number without which it drops the datagram. Each receive needs 40 more bytes at the
//! beginning of its buffer, for the network header. A datagram is at most one path MTU long, may be lost, and is dropped if no
//! receive is posted. Its completion at the sender means that it was sent, not that it arrived.
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
//!     // To answer: `address_from_wc` computes the sender's address from the completion and the first 40 bytes of the buffer.
//!     assert_eq!(&context.bytes(mr)?[40..received.byte_len as usize], b"hello");
//!     Ok(())
//! }
//! ```
//!
//! For multicast, create the address handle with the GID of the group (its IP address as a [`Gid`]), and send to
//! [`Qpn::MULTICAST`]; receivers call [`attach_mcast`](Context::attach_mcast): `examples/publish.rs`.
//!
//! # Which GID
//!
//! The GID index selects the source address: it is a row of [`Port::gids`]. Both ends must use the same IP version, or the verb
//! fails with [`Error::AddressFamily`]. [`Context::endpoint_for`] and [`Port::gid_index_for`] find the row for a peer. The
//! connection manager does this itself. On an interface index 0 is often the link-local address, fe80::/10; a UDP socket has one
//! address. [`Context::add_gid`] adds an address of a VLAN. RoCE v1 is off unless [`Config::roce_v1`] turns it on.
//!
//! `ferroce devinfo` prints the table of this host. If the peer runs perftest, its `-x` is an index into the table that `show_gids`
//! prints there.
//!
//! # A peer that is gone
//!
//! A peer that is killed sends nothing, and only an end with outstanding sends notices: they complete with
//! [`RetryExcErr`](WcStatus::RetryExcErr) after the retry budget, [below](#timeouts-and-retries). An end that only receives stays
//! in RTS. If that matters, post a WRITE of 0 bytes from time to time.
//!
//! If a queue pair fails, its connection (the [`CmId`]) exists until you call [`destroy_qp`](Context::destroy_qp) or
//! [`disconnect`](Context::disconnect). If the peer then does not answer the disconnect request (DREQ), [`CmEvent::Disconnected`]
//! follows after 21 s: by default five DREQs, 4.3 s each. A server that calls neither reaches
//! [`max_connections`](Config::max_connections) by dead peers, and does not answer requests any more
//! ([`CmRxNoRoom`](Counter::CmRxNoRoom) counts them).
//!
//! [`disconnect`](Context::disconnect) notifies the peer, and so does dropping the context, for connections of the connection
//! manager. For queue pairs connected by `handshake` nothing notifies the peer: send a message of your own.
//!
//! # Timeouts and retries
//!
//! The protocol encodes an ACK timeout as a number N: it is 4.096 µs · 2ᴺ, with N from 1 to 31 (8.2 µs to 2.4 h). `timeout` sets N,
//! and `timeout_at_least` rounds a [`Duration`](std::time::Duration) up to the next such time. When the timer expires, the queue
//! pair retransmits and has one retry less; a NAK because of a lost packet uses a retry too. Each acknowledgement that makes
//! progress restarts the timer and restores all [`retry_count`](ReadyToSend::retry_count) retries (0 to 7). If the timer expires
//! and no retry is left, the work request fails. So the **retry budget**, the time for which a peer may be silent, is
//! (`retry_count` + 1) · 4.096 µs · 2ᴺ. With 7 retries:
//!
//! | ACK timeout | N | exactly | retry budget |
//! |---|---|---|---|
//! | default of [`handshake`](Context::handshake) | 14 | 67.1 ms | 0.54 s |
//! | default of the connection manager; 500 ms, the default of collectives | 17 | 536.9 ms | 4.3 s |
//! | `timeout_at_least` of 4 s | 20 | 4.295 s | 34 s |
//!
//! To change it, make the transition with [`ReadyToSend::timeout_at_least`], or set [`ConnectionParameters::timeout_at_least`],
//! which sets it for both ends. The error is reported later than this in two cases: by a quarter of the ACK timeout for sends with
//! [`lazy_ack`](SendFlags::lazy_ack); and while congestion control or a lack of staging chunks holds back requests at this end,
//! as the timer is extended then. An RNIC has a timer of its own, which may differ (docs/protocol.md §8).
//!
//! Messages of the connection manager have a timeout of the same form: 16 times 4.3 s (N = 20, 15 retries) are 69 s, after which a
//! `connect` to a host fails that does not answer and that the network does not report as unreachable
//! ([`ConnectionParameters::patience`]).
//!
//! Sources: IBA 12 (connection manager) and Annex A11 (port numbers as service IDs), docs/protocol.md §2 (messages), §4 (timer
//! and retries) and §6 (states); `stack/src/verbs/timeout.rs` (rounding), `stack/src/engine/requester/retransmission.rs` (retries).

#[cfg(doc)]
use crate::*;
