//! Errors: causes and remedies. Terms: [glossary](super::glossary).
//!
//! | reported by | meaning |
//! |---|---|
//! | [`Error`] from a verb | the verb failed and has changed nothing, with three [exceptions](#errors-of-verbs); the text names the wrong value and the valid ones |
//! | a [`WorkCompletion`] whose status is not `Success` | that work request failed, and its queue pair with it |
//! | an [`Event`] ([`next_event`](Context::next_event)) | a failure that no work request reports, or a notification |
//! | a [`CmEvent`] | a connection was established, or failed, with the reason |
//! | a [`Counter`] | packets were dropped or retransmitted, which by itself is not an error: networks lose packets |
//!
//! # When a work request fails
//!
//! An RC queue pair goes to ERR with its first failure. The failed work request completes first, with the cause. All other work
//! requests of its send and receive queue complete with [`WrFlushErr`](WcStatus::WrFlushErr), in the order of posting, unsignaled
//! ones included. **The first completion that is neither `Success` nor `WrFlushErr` has the cause.** On UC and UD a failed send
//! moves the queue pair to state SQE (send queue error), in which it still receives; [`Transition::Resume`] moves it back to RTS.
//!
//! To continue, poll the remaining completions, and then either destroy the queue pair or connect it again:
//! [`Transition::Reset`], a new [`endpoint`](Context::endpoint), and a new handshake at both ends.
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//!
//! fn main() -> Result<(), Error> {
//!     # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let peer = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let (here, there) = (context.endpoint(qp, 0)?, context.endpoint(peer, 0)?);
//!     # context.handshake(qp, &here, &there)?;
//!     # context.handshake(peer, &there, &here)?;
//!     // `qp` and `peer` are connected to each other. The region does not allow WRITEs.
//!     let mr = context.register(pd, Memory::zeroed(64)?, Access::REMOTE_READ)?;
//!     let (op, data) = (SendOp::Write(context.remote(mr)?.at(0)), Data::Inline(b"hello"));
//!     context.post_recv(peer, &ReceiveWorkRequest { wr_id: 1, sges: &[] })?;
//!     context.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::default() })?;
//!     context.post_send(qp, &SendWorkRequest { wr_id: 3, op, data, flags: SendFlags::default() })?;
//!
//!     let mut failed = Vec::new();
//!     while let Some(completion) = context.wait_cq(cq, Duration::from_millis(100))? {
//!         failed.push((completion.wr_id, completion.status));
//!         if let Err(error @ Error::Completion { status: WcStatus::RemAccessErr, .. }) = completion.ok() {
//!             // QP 0x...: RdmaWrite 2 completed with RemAccessErr: refused by the peer: it does not allow this access to
//!             // its memory
//!             println!("{error}");
//!         }
//!     }
//!     // Completions of one send or receive queue are in order; between these queues no order is defined, so sort.
//!     failed.sort_by_key(|(wr_id, _)| *wr_id);
//!     assert_eq!(failed, [(1, WcStatus::WrFlushErr), (2, WcStatus::RemAccessErr), (3, WcStatus::WrFlushErr)]);
//!     // The target gets an event: a WRITE uses no receive whose completion could report the refusal.
//!     assert_eq!(context.next_event_of(peer)?, Some(Event::QpAccessErr(peer)));
//!
//!     // Reset and connected again, they work.
//!     context.modify_qp(qp, Transition::Reset)?;
//!     context.modify_qp(peer, Transition::Reset)?;
//!     let (here, there) = (context.endpoint(qp, 0)?, context.endpoint(peer, 0)?);
//!     context.handshake(qp, &here, &there)?;
//!     context.handshake(peer, &there, &here)?;
//!     assert_eq!(context.query_qp(qp)?.state, QpState::Rts);
//!     Ok(())
//! }
//! ```
//!
//! # Completion statuses
//!
//! | status | cause | remedy |
//! |---|---|---|
//! | [`LocLenErr`](WcStatus::LocLenErr) | of a receive: the message is longer than its buffers. The sender gets `RemInvReqErr` | longer receives; the same message size at both ends. UD receives need 40 bytes more |
//! | | of a READ or atomic: the response does not have the requested length | the peer's implementation is at fault: record the packets ([captures](super::operating#captures)) and run `ferroce replay` |
//! | [`LocQpOpErr`](WcStatus::LocQpOpErr) | of a datagram: its address handle was destroyed before it was sent | destroy handles after the completion |
//! | | the response has an opcode that does not fit the request | as for a READ with `LocLenErr` |
//! | [`LocProtErr`](WcStatus::LocProtErr) | the local memory: bytes outside the region, another protection domain, or a result into a region without `LOCAL_WRITE` | check offsets and lengths of the [`Sge`]s; register with [`Access::LOCAL_WRITE`]; use one protection domain for queue pair and region |
//! | [`WrFlushErr`](WcStatus::WrFlushErr) | the queue pair is in ERR, by an earlier failure, `disconnect`, or [`Transition::Error`] | look at the first completion with another error, and at the events. Whether a flushed send reached the peer is not known |
//! | [`MwBindErr`](WcStatus::MwBindErr) | the bind of a memory window is invalid | [`SendOp::BindMw`] lists the conditions, such as a region registered with [`Access::MW_BIND`] |
//! | [`RemInvReqErr`](WcStatus::RemInvReqErr) | the peer finds the request invalid: longer than its receive, an operation that its queue pair does not allow or does not know, an atomic at an address that is not a multiple of 8, more READs and atomics at once than it has responder resources (`max_dest_rd_atomic`), or a packet longer than its path MTU | check the peer's `Transition::Init` access and its receives; set `max_rd_atomic` to at most its `max_dest_rd_atomic`, and the same path MTU at both ends; use FLUSH and ATOMIC WRITE only if the peer supports them |
//! | [`RemAccessErr`](WcStatus::RemAccessErr) | the peer's memory: a wrong or revoked key, bytes outside the region, or a right that the region does not have | send the peer a new [`RemoteMemory`] after each registration; the region's [`Access`]; keep it registered until the last peer is done |
//! | [`RemOpErr`](WcStatus::RemOpErr) | the peer can't execute it: its receive WR has invalid SGEs (`LocProtErr` there), or a copy of its GPU failed (`FatalErr` there, `device_errors`; the reason is logged) | correct the receives of the peer, or check its GPU |
//! | [`RetryExcErr`](WcStatus::RetryExcErr) | no acknowledgement after all retries: the peer is gone, does not poll, is in state ERR, or has another P_Key; or packets are lost on the path (MTU, firewall, NAT) | check the peer's program first; `ferroce doctor PEER` examines the path; [`Context::mismatches`] and the counters of both ends; a longer timeout if the peer's thread is off its core for long, or its GPU's copies are slow ([`timeout_at_least`](ReadyToSend::timeout_at_least)) |
//! | | with [`Event::QpUnreachable`] or [`Event::AhUnreachable`]: no next hop | the reason is in the event: route, ARP, neighbour discovery |
//! | [`RnrRetryExcErr`](WcStatus::RnrRetryExcErr) | the peer has no receive posted, and `rnr_retry` is used up. Does not occur with 7, the default, which is without limit | post receives before the peer sends, and enough of them; `rnr_retry` 7; a longer [`min_rnr_timer`](ReadyToReceive::min_rnr_timer) at the receiver |
//! | [`FatalErr`](WcStatus::FatalErr) | a device has failed: the GPU whose memory the work request names, or the RNIC | the log; the device's tools; create a new queue pair with other memory |
//! | [`BadRespErr`](WcStatus::BadRespErr), [`LocAccessErr`](WcStatus::LocAccessErr), [`RemAbortErr`](WcStatus::RemAbortErr), [`RespTimeoutErr`](WcStatus::RespTimeoutErr), [`GeneralErr`](WcStatus::GeneralErr) | only from an RNIC | the card's manual; the kernel's log |
//!
//! `RemInvReqErr` and `RemAccessErr` of a receive mean that this end refused a request of the peer that had already taken this
//! receive.
//! [`WcStatus::meaning`] says which end refused.
//!
//! # Errors of verbs
//!
//! | [`Error`] | cause | remedy |
//! |---|---|---|
//! | [`Invalid`](Error::Invalid), [`Access`](Error::Access) | a value out of range, or rights that can't be combined | the text says what is valid |
//! | [`InvalidHandle`](Error::InvalidHandle) | the object was destroyed, or is of another context | – |
//! | [`State`](Error::State) | the queue pair is in a state that does not allow this; `ERR` usually means that an earlier work request failed | the text names the states; look at the completions |
//! | [`QueueFull`](Error::QueueFull) | all entries of a send, receive or command queue are in use | poll the context, take completions, post again; a larger [`max_send_wr`](QpConfig::max_send_wr). Acknowledgements free the entries of unsignaled sends too, but only a completion shows this to the program: signal some sends |
//! | [`Exhausted`](Error::Exhausted) | the limit of the [`Config`] is reached | the text names the setting |
//! | [`Busy`](Error::Busy) | other objects or outstanding work depend on the object | wait for that work, or destroy those objects first |
//! | [`PathMtu`](Error::PathMtu) | the interface's MTU is too small for the path MTU | a smaller path MTU, or an MTU of 4200 on every hop (on hosts: `ip link set eth0 mtu 4200`) |
//! | [`AddressFamily`](Error::AddressFamily) | the GID at the given index and the peer's GID are of different IP versions | [`endpoint_for`](Context::endpoint_for), [`Port::gid_index_for`] |
//! | [`Unsupported`](Error::Unsupported) | this backend, port or build lacks the [`Feature`] | another device; the cargo feature `af_xdp` |
//! | [`Gpu`](Error::Gpu) | a GPU refused a call | see its text |
//! | [`Region`](Error::Region) | bytes outside the region | check offset and length |
//! | | a slice of memory that others may write | [`read`](Context::read) and [`write`](Context::write) instead of the slice |
//! | [`Unreachable`](Error::Unreachable), [`Rejected`](Error::Rejected), [`TimedOut`](Error::TimedOut) | a blocking verb failed | the text names the peer and the reason. After `connect` the queue pair is unchanged and you can try again; after `accept` it is in ERR |
//! | [`Memory`](Error::Memory), [`Thread`](Error::Thread), [`Wait`](Error::Wait), [`Export`](Error::Export) | the operating system refused | `ulimit`, permissions |
//! | [`RunnerEnded`](Error::RunnerEnded), [`OwnThread`](Error::OwnThread), [`NoQueue`](Error::NoQueue) | in this order: the runner has ended; a waiting verb was called on the runner's own thread; no completion queue is on the channel | [`threads`](super::threads) |
//! | [`Driver`](Error::Driver) | when opening: permissions, a missing interface, UDP port 4791 in use, missing libraries. From [`poll`](Context::poll): the port is gone | the text names the remedy; after `poll` has failed, open the device again |
//!
//! A verb that fails has changed nothing, except:
//!
//! - [`post_sends`](Context::post_sends) and [`post_recvs`](Context::post_recvs): the work requests before the refused one are
//!   posted ([`PostError`]);
//! - [`accept_blocking`](Context::accept_blocking): the connection has ended, and the queue pair is in ERR;
//! - [`modify_qp_blocking`](Context::modify_qp_blocking): [`Unreachable`](Error::Unreachable) leaves the queue pair in ERR, and
//!   after [`TimedOut`](Error::TimedOut) the search for the next hop continues.
//!
//! # Events
//!
//! | [`Event`] | meaning, and what to do |
//! |---|---|
//! | [`QpReqErr`](Event::QpReqErr), [`QpAccessErr`](Event::QpAccessErr) | a request of the peer was refused, and no receive could report it. The queue pair is in ERR: check rights and lengths, as above |
//! | [`QpFatal`](Event::QpFatal) | the queue pair's completion queue is full (`CqErr`, next row); or a GPU failed while the peer wrote or read that GPU's memory ([`DeviceErrors`](Counter::DeviceErrors); the reason is logged) |
//! | [`CqErr`](Event::CqErr) | the completion queue is full. Create it large enough for all outstanding work requests, or poll it more often |
//! | [`QpUnreachable`](Event::QpUnreachable), [`AhUnreachable`](Event::AhUnreachable) | no next hop; the reason is in the event |
//! | [`PkeyViolation`](Event::PkeyViolation) | a packet of another partition: use the same P_Key at both ends |
//! | [`DeviceFatal`](Event::DeviceFatal) | the card has failed; open it again |
//! | [`CommEst`](Event::CommEst), [`SqDrained`](Event::SqDrained), [`QpLastWqeReached`](Event::QpLastWqeReached), [`SrqLimitReached`](Event::SrqLimitReached), [`Completion`](Event::Completion) | no failures: notifications that the application requested |
//!
//! Sources: IBA 10.10.3 and 11.6 (errors and completion statuses), docs/protocol.md §4 to §6.

#[cfg(doc)]
use crate::*;
