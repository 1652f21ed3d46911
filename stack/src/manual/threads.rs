//! Which thread polls, and how a thread waits. Terms: [glossary](super::glossary).
//!
//! A [`Context`] sends, receives, acknowledges and retransmits only inside [`Context::poll`]. So a thread must poll as long as a
//! peer may send requests, also at the target of a WRITE or READ and at an end that waits for nothing. A peer that gets no
//! answer for its [retry budget](super::connecting#timeouts-and-retries), 0.5 to 4.3 s by default, treats a context as dead.
//!
//! | your program | use |
//! |---|---|
//! | waits for one thing at a time | the blocking verbs: [`wait_cq`](Context::wait_cq), [`wait_cm_event`](Context::wait_cm_event), [`connect_blocking`](Context::connect_blocking) and similar |
//! | has a loop of its own | a [`Poller`] |
//! | has threads that compute, or several that send and receive | a [`Runner`], with a [`RunnerHandle`] for each thread |
//! | is asynchronous | a [`Runner`] and [`RunnerHandle::next`] with any executor, or the descriptor in tokio's `AsyncFd` |
//! | waits for sockets and timers too (epoll) | the context's descriptor: [`Context::prepare_wait`] |
//! | one thread polls, another waits for completions | a [`CompChannel`] |
//!
//! A context can be moved to another thread (it is `Send`) but not shared: every verb that changes something takes `&mut self`.
//!
//! # What an idle loop does
//!
//! [`Idle`] is the setting for [`Poller`], [`Runner`] and the waits of a [`RunnerHandle`]:
//!
//! | | cost when idle | response time |
//! |---|---|---|
//! | [`Idle::Spin`] | a whole core | one poll; for a dedicated core |
//! | [`Idle::Yield`] | the part of a core that other threads leave | one poll, and the time slices of other threads |
//! | [`Idle::Adaptive`], the default: spins 200 times (about 10 µs), yields 20 times, then blocks | that of `Spin`, `Yield` and `Block`, in turn | likewise |
//! | [`Idle::Block`] | nothing | a wake-up by the kernel: microseconds to tens of microseconds |
//!
//! On a machine with fewer cores than polling threads `Spin` makes everything slower.
//!
//! # A loop of its own
//!
//! ```
//! use ferroce::*;
//!
//! fn main() -> Result<(), Error> {
//!     # let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     # let (pd, cq) = (context.alloc_pd()?, context.create_cq(16)?);
//!     # let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     # let own = context.endpoint(qp, 0)?;
//!     # context.handshake(qp, &own, &own)?;
//!     # context.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] })?;
//!     # let (op, data) = (SendOp::SendWithImm(7), Data::Inline(&[]));
//!     # context.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::default() })?;
//!     // `context` has a connected queue pair with a receive posted, and its completions go to `cq`.
//!     let mut poller = Poller::idling(Idle::default());
//!     let message = loop {
//!         poller.poll(&mut context)?;
//!         while let Some(event) = context.next_event() {
//!             println!("{event:?}");
//!         }
//!         if let Some(completion) = context.poll_cq(cq)? {
//!             break completion.ok()?;
//!         }
//!     };
//!     assert_eq!(message.immediate, Some(7));
//!     Ok(())
//! }
//! ```
//!
//! # A runner
//!
//! A runner moves the context to a thread of its own. Work requests are passed to it through a lock-free ring, and completions back
//! through another. Everything else is a closure called on that thread ([`RunnerHandle::call`]). A handle belongs to one thread or
//! task.
//!
//! ```
//! use std::time::Duration;
//! use ferroce::*;
//!
//! fn main() -> Result<(), Box<dyn std::error::Error>> {
//!     let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
//!     let (pd, cq) = (context.alloc_pd()?, context.create_cq(64)?);
//!     let qp = context.create_qp(&QpConfig::rc(pd, cq))?;
//!     let own = context.endpoint(qp, 0)?;
//!     context.handshake(qp, &own, &own)?;
//!
//!     // `.core(3)` would keep it on core 3.
//!     let runner = Runner::start(context, &RunnerConfig::default().idle(Idle::Block))?;
//!     let mut handle = runner.handle(&HandleConfig::default())?;
//!     handle.deliver(cq)?; // the completions of this queue come to this handle
//!
//!     handle.post_recv(qp, &ReceiveWorkRequest { wr_id: 1, sges: &[] })?;
//!     let (op, data) = (SendOp::SendWithImm(7), Data::Inline(&[]));
//!     handle.post_send(qp, &SendWorkRequest { wr_id: 2, op, data, flags: SendFlags::default() })?;
//!     match handle.wait(Duration::from_secs(5))? {
//!         Some(Delivery::Completed { completion, .. }) => assert_eq!(completion.ok()?.immediate, Some(7)),
//!         other => panic!("{other:?}"),
//!     }
//!
//!     // The same in a task, with any executor; this is tokio's.
//!     let task = async move {
//!         handle.post_recv(qp, &ReceiveWorkRequest { wr_id: 3, sges: &[] })?;
//!         handle.post_send(qp, &SendWorkRequest { wr_id: 4, op, data, flags: SendFlags::default() })?;
//!         let Delivery::Completed { completion, .. } = handle.next().await? else { panic!("no completion") };
//!         let events = handle.call_async(|context| context.next_event()).await?;
//!         Ok::<_, Error>((completion.ok()?.immediate, events))
//!     };
//!     let received = tokio::runtime::Builder::new_current_thread().build()?.block_on(task)?;
//!     assert_eq!(received, (Some(7), None));
//!
//!     let Stopped { context, error, .. } = runner.stop();
//!     assert!(error.is_none() && context.query_qp(qp)?.state == QpState::Rts);
//!     Ok(())
//! }
//! ```
//!
//! - A handle delivers completions, refused work requests and exchanged memory, but no events: these do not wake it. Take events
//!   with `handle.call(|context| context.next_cm_event())` and [`next_event`](Context::next_event), on a timer. A server whose
//!   clients connect and disconnect should poll its context itself, and wait for the context's [descriptor](#a-descriptor).
//! - Posting to a full command ring does not block: on [`Error::QueueFull`] take deliveries and post again.
//! - A work request that the context refuses is returned as [`Delivery::Refused`], in the order of posting.
//! - Data is passed to the thread of a handle by [`RunnerHandle::exchange`] (no copy), or by a closure that copies.
//! - A runner ends when its context fails or a closure panics. Handles still return all deliveries, then each work request that was
//!   not executed ([`Delivery::Refused`]), then [`Error::RunnerEnded`]. [`Runner::stop`] returns the context and the reason, or
//!   panics with the panic of the closure.
//!
//! # A descriptor
//!
//! [`Context::prepare_wait`] arms the context's descriptor and returns whether to wait; its documentation has the loop. The order
//! is: poll, take completions and events until there are none, post, poll again if you have posted, `prepare_wait`, wait. A work
//! request posted after `prepare_wait` is sent only by the next poll. `examples/tokio_server.rs` serves 100 connections in this
//! manner in one task. It uses `AsyncFd::new`, which tokio marks as deprecated because its replacement, `register`, is unsafe; the
//! example allows the lint, as the descriptor of a context never changes.
//!
//! A [`CompChannel`] is the counterpart of `ibv_comp_channel`: completion queues for which another thread waits with a descriptor
//! of its own ([`create_cq_on`](Context::create_cq_on), [`req_notify_cq`](Context::req_notify_cq)).
//!
//! # Several cores
//!
//! A context has one thread. For more cores open several: one for each queue of the interface (`af_xdp:eth0:0`, `af_xdp:eth0:1`),
//! each with a runner and its share of the queue pairs (`examples/cores.rs`). Contexts share no state, so each frame must reach
//! the right queue. On a card set `ethtool -N` rules. A frame sent on queue n of a veth arrives on queue n of the other end: open
//! the same queue number at both ends.
//!
//! Sources: docs/decisions/02-nothing-blocks.md, 04-waiting-from-outside.md, 05-all-queues.md; `stack/src/runtime`, and the tests
//! `stack/tests/{waiting,runner,tasks}.rs`. The IBA has no rule on threads.

#[cfg(doc)]
use crate::*;
