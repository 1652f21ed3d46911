//! What is counted, and how it is shown.

pub(crate) mod counters;
pub(crate) mod exporter;
pub(crate) mod metrics;
mod port;
