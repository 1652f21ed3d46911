//! What drives a context: loops, threads, and how they wait.

pub(crate) mod affinity;
pub(crate) mod comp_channel;
pub(crate) mod idle;
pub(crate) mod poller;
pub(crate) mod runner;
