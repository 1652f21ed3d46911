//! RNICs through a libibverbs built by the test: its reports, its use, and its errors.
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
