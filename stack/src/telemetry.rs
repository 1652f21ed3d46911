//! Counters and metrics, and how they are exported.
//!
//! - `counters.rs`: the counters
//! - `metrics.rs`: a context's state as Prometheus text
//! - `port.rs`: a context's port and the peers of its queue pairs
//! - `exporter.rs`, `exporter/`: the socket from which other processes read the text

pub(crate) mod counters;
pub(crate) mod exporter;
pub(crate) mod metrics;
mod port;
