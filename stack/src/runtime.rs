//! Driving a context: loops, threads, and how they wait.
//!
//! - `idle.rs`: what an idle loop does
//! - `poller.rs`: the loop in the application's thread
//! - `runner.rs`, `runner/`: a context on a thread of its own, and the rings to it
//! - `affinity.rs`: the core of that thread
//! - `comp_channel.rs`: completion queues behind a file descriptor

pub(crate) mod affinity;
pub(crate) mod comp_channel;
pub(crate) mod idle;
pub(crate) mod poller;
pub(crate) mod runner;
