//! The protocol: queue pairs with their requesters and responders, the queues and the memory that they work on, and
//! what they share. It sends and receives nothing by itself: a backend hands it packets, room for packets, and the time.

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
