//! The protocol: queue pairs with their requesters and responders, the queues and the memory that they work on, and
//! what they share. It sends and receives nothing by itself: a backend passes it packets, room for packets, and the
//! time.
//!
//! - `qp.rs`: a queue pair, and how it fails
//! - `transition.rs`: how a queue pair moves from state to state
//! - `requester.rs`: what a queue pair sends
//! - `requester.rs`: the requests that a queue pair sends
//! - `completer.rs`: the responses that it receives
//! - `destination.rs`: the window: what a queue pair, and all queue pairs to one destination, have in flight
//! - `responder.rs`: the execution of requests; `responder/explicit.rs` those with a response of their own
//! - `responder/owed.rs`, `responder/response.rs`: when a response is sent, and owed responses as frames
//! - `outcome.rs`: the responses that are kept for duplicates
//! - `congestion.rs`: congestion control; `congestion/dcqcn.rs` the rate, `congestion/pacing.rs` pacing,
//!   `congestion/cnp.rs` CNPs to the senders of marked packets
//! - `selective.rs`, `reorder.rs`, `psn_set.rs`: selective repeat: the sending half, the receiving half, sets of PSNs
//! - `uc.rs`, `ud.rs`: what is different in the unreliable services
//! - `ah.rs`, `multicast.rs`: address handles, and the members of multicast groups
//! - `sq.rs`, `rq.rs`, `srq.rs`, `cq.rs`, `event.rs`: send, receive, shared receive and completion queues, and events
//! - `mr.rs`, `mw.rs`: memory regions and memory windows
//! - `kind.rs`: the properties of an operation, looked up once
//! - `staging.rs`, `staging/`: device memory (docs/decisions/11-device-memory.md): chunks of host memory; `line.rs` queue
//!   pairs that wait for them, `copier.rs` outstanding copies; `sends.rs` and `answers.rs` data to send, in a `stream.rs`;
//!   `receives.rs` received data, in a `landing.rs`
//! - `frame_slot.rs`: where one frame is written, in one piece or in several
//! - `crc.rs`: the driver's CRC-32 for `wire`
//! - `pkey.rs`: packets of other partitions
//! - `mismatch.rs`: packets of a peer with a different configuration
//! - `shared.rs`: what queue pairs share; every completion, event and counter passes through it
//! - `scheduler.rs`: when a queue pair is checked again: the active list, the next poll, times, tickets
//! - `key_table.rs`, `timer.rs`, `slab.rs`: numbers on the wire, the timing wheel, objects by handle

pub(crate) mod ah;
pub(crate) mod completer;
pub(crate) mod congestion;
pub(crate) mod cq;
pub(crate) mod crc;
pub(crate) mod destination;
pub(crate) mod event;
pub(crate) mod frame_slot;
pub(crate) mod key_table;
pub(crate) mod kind;
pub(crate) mod mismatch;
pub(crate) mod mr;
pub(crate) mod multicast;
pub(crate) mod mw;
pub(crate) mod outcome;
pub(crate) mod pkey;
pub(crate) mod psn_set;
pub(crate) mod qp;
pub(crate) mod reorder;
pub(crate) mod requester;
pub(crate) mod responder;
pub(crate) mod rq;
pub(crate) mod scheduler;
pub(crate) mod selective;
pub(crate) mod shared;
pub(crate) mod slab;
pub(crate) mod sq;
pub(crate) mod srq;
pub(crate) mod staging;
pub(crate) mod timer;
pub(crate) mod transition;
pub(crate) mod uc;
pub(crate) mod ud;
