//! Shared code of the fuzz targets of the protocol engine, and the targets themselves: a live queue pair gets the
//! fuzzer's input, and is compared with a model of its permitted behavior.
#![forbid(unsafe_code)]

mod input;
pub mod joined;
mod live;
mod packet;
pub mod requester;
pub mod responder;
pub mod selective;

pub use packet::seal;
