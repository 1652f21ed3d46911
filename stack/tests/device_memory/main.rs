//! Memory of a device, over a network in virtual time. The device is strict: the CPU that touches its memory faults, and copies
//! land late and in no order.
//!
//!     cargo test -p ferroce --test device_memory

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

mod faults;
mod lives;
mod opencl;
mod order;
mod plain;
mod shortage;
mod world;
