//! What the fuzz targets of the protocol engine share, and the targets themselves: a live queue pair
//! that is fed with what the fuzzer makes up, beside a model of what may come of it.
#![forbid(unsafe_code)]

mod input;
pub mod joined;
mod live;
mod packet;
pub mod requester;
pub mod responder;
pub mod selective;

pub use packet::seal;
