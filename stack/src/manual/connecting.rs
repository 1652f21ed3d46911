//! How to connect two queue pairs. Terms: [glossary](super::glossary).
//!
//! | method | what the ends need | for |
//! |---|---|---|
//! | [`endpoint_for`](Context::endpoint_for) and [`handshake`](Context::handshake) | any means to exchange endpoints (TCP, a file, MPI) | RC, UC; peers with another RDMA library, if their program exchanges queue pair number (QPN), first packet sequence number (PSN) and address (GID) |
//! | the connection manager (CM): [`listen`](Context::listen), [`connect`](Context::connect), [`accept`](Context::accept) | an IP address and a port number | RC, UC; compatible with the kernel's rdma_cm |
//! | datagrams: [`resolve`](Context::resolve), [`create_ah`](Context::create_ah) | an IP address and a port number; or GID, QPN and Q_Key | UD |
//! | state by state (RESET, INIT, RTR, RTS): [`modify_qp`](Context::modify_qp) with a [`Transition`] | as for a handshake | RC, UC, UD; to set timeouts, retries, traffic class or selective repeat |
//!
//! # By handshake
//!
//! [`first_program`](super::first_program) is the example. [`Context::endpoint_for`] returns the data that the peer needs. Call it
//! once per connection: each call draws a new PSN, and `handshake` needs the endpoint that was sent to the peer. The ends may call
//! `handshake` in any order: an RC request to an end that is not ready yet is retransmitted. (A UC message is lost.) Receives can
//! be posted from state INIT on. To post them before the peer can send: `context.modify_qp(qp, Transition::Init { access })?`,
//! `post_recv`, `handshake`.
//!
//! # By address and port
//!
//! The verbs of the connection manager do not block: [`CmEvent`]s report the results. Blocking forms:
//! [`connect_blocking`](Context::connect_blocking), [`accept_blocking`](Context::accept_blocking),
//! [`resolve_blocking`](Context::resolve_blocking). [`wait_cm_event`](Context::wait_cm_event) waits for an event.
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
//! A request carries up to 56 bytes of your own (*private data*), a reply up to 196: enough for the `to_bytes` of an [`Endpoint`]
//! (28 bytes) and a [`RemoteMemory`] (20 bytes).
//!
//! # Datagrams
//!
//! A UD queue pair has no peer. Each send names an address handle (the destination's GID with its MAC address), and QPN and Q_Key
//! of the receiving queue pair, which drops datagrams with another Q_Key. Each receive needs 40 more bytes at the beginning of its
//! buffer, for the network header. A datagram is at most one path MTU long, may be lost, and is dropped if no receive is posted.
//! The completion of the send means that the datagram was sent, not that it arrived.
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
//! The GID index is a row number of the table [`Port::gids`]; this row is the source address. Both ends must use the same IP
//! version; otherwise `handshake`, `modify_qp` or `create_ah` fails with [`Error::AddressFamily`]. [`Context::endpoint_for`] and
//! [`Port::gid_index_for`] find the row for a peer. The connection manager does this itself. With AF_XDP, index 0 is often the
//! link-local address, fe80::/10; a UDP socket has one address, index 0. [`Context::add_gid`] adds an address of a VLAN. RoCE v1 is
//! off unless [`Config::roce_v1`] turns it on.
//!
//! `ferroce devinfo` prints the table of this host. If the peer runs perftest, its `-x` is an index into the table that `show_gids`
//! prints there.
//!
//! # A peer that is gone
//!
//! A peer that is killed sends nothing, and only an end with outstanding sends notices: they complete with
//! [`RetryExcErr`](WcStatus::RetryExcErr) after the retry budget, [below](#timeouts-and-retries). An end that only receives stays
//! in RTS. If that matters, post a WRITE of 0 bytes from time to time. The peer's queue pair must allow
//! [`REMOTE_WRITE`](Access::REMOTE_WRITE); otherwise it refuses the WRITE, and the connection fails.
//!
//! If a queue pair fails, its connection (the [`CmId`]) exists until you call [`destroy_qp`](Context::destroy_qp) or
//! [`disconnect`](Context::disconnect). If the peer then does not answer the disconnect request (DREQ), [`CmEvent::Disconnected`]
//! follows after 21 s: by default five DREQs with a timeout of 4.3 s. A server that calls neither keeps connections to dead peers.
//! At [`max_connections`](Config::max_connections) it drops requests, counted by [`CmRxNoRoom`](Counter::CmRxNoRoom).
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
//! | default of the connection manager, and of collectives (500 ms, rounded up) | 17 | 536.9 ms | 4.3 s |
//! | `timeout_at_least` of 4 s | 20 | 4.295 s | 34 s |
//!
//! To change the ACK timeout, use [`ReadyToSend::timeout_at_least`] in the transition to RTS, or
//! [`ConnectionParameters::timeout_at_least`] with `connect`, for both ends (with `accept` it has no effect). In two cases a
//! failure is reported later than the retry budget: for sends with [`lazy_ack`](SendFlags::lazy_ack) by a quarter of the ACK
//! timeout; and while congestion control or a lack of [staging chunks](Config::staging_chunk) delays requests at this end, because
//! this extends the timer. An RNIC has a timer of its own, which may differ (docs/protocol.md §8).
//!
//! Messages of the connection manager have a timeout of the same form, by default N = 20 (4.3 s) and 15 retries. So a `connect` to
//! a host that does not answer fails after 16 · 4.3 s = 69 s ([`ConnectionParameters::patience`]), and sooner if the network
//! reports the host as unreachable.
//!
//! Sources: IBA 12 (connection manager) and Annex A11 (port numbers as service IDs), docs/protocol.md §2 (messages), §4 (timer
//! and retries) and §6 (states); `stack/src/verbs/timeout.rs` (rounding), `stack/src/engine/requester/retransmission.rs` (retries).

#[cfg(doc)]
use crate::*;
