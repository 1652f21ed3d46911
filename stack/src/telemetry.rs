//! What is counted, and how it is shown.
//!
//! - `counters.rs`: what is counted
//! - `metrics.rs`: a context's state as Prometheus text
//! - `port.rs`: a context's port and the peers of its queue pairs
//! - `exporter.rs`, `exporter/`: the socket where other processes read the text

pub(crate) mod counters;
pub(crate) mod exporter;
pub(crate) mod metrics;
mod port;
