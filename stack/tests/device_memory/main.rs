//! Device memory, over a network in virtual time. The device is strict: access by the CPU faults, and copies land late and
//! out of order.
//!
//!     cargo test -p ferroce --test device_memory
//!
//! The tests of `gpu` use a real device: OpenCL's first, or another by name (`FERROCE_GPU=cuda:0`).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

mod faults;
mod gpu;
mod lives;
mod order;
mod plain;
mod shortage;
mod world;
