//! Memory of a device, over a network in virtual time. The device is strict: the CPU that touches its memory faults, and copies
//! land late and in no order.
//!
//!     cargo test -p ferroce --test device_memory
//!
//! The tests of `gpu` are about a device that there is: OpenCL's first, or another by name (`FERROCE_GPU=cuda:0`).

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

mod faults;
mod gpu;
mod lives;
mod order;
mod plain;
mod shortage;
mod world;
