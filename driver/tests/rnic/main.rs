//! RNICs by a libibverbs that the test builds: what it tells, what is done with it, and what it does wrong.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod connected;
mod datagrams;
mod dma_buf;
mod ends;
mod events;
mod failing;
mod listing;
mod order;
mod refused;
mod windows;
