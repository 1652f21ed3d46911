//! What the tests of the drivers have in common, and those of the crates above that need real interfaces.
//!
//! A dev-dependency: no application is built with it. It builds no more of the project than the drivers.
//!
//! - [`namespaces`]: two hosts on one machine, network namespaces joined by a veth pair.
//! - [`c_layout`]: whether declarations by hand are those of a C header.
//! - [`dpdk`]: whether ports of DPDK can be tested here.
//! - [`exchange`]: RoCE frames, and ports that send them to each other.
//! - [`file_gpu`]: a GPU whose memory is files, which it gives out as dma-bufs.
//! - [`gpu`]: a GPU to test with.
//! - [`keep`]: the test that every port passes whose frames may be kept.
//! - [`readiness`]: the test that every port passes that can be waited for by file descriptor.
//! - [`mortal`]: a port that dies when told.
//! - [`patience`]: waiting for what the kernel does a moment later.
//! - [`random`]: numbers that a test draws again by its seed.
//! - [`rnic_stub`]: a libibverbs with two RNICs in memory.
//! - [`rdmacm_stub`]: a librdmacm whose peers answer at once.
//! - [`signal`]: signals to processes.
//! - [`sysfs`]: sysfs trees of servers as files.
//! - [`waited`]: a port that counts how often it is waited for.
//!
//! The unit tests of `ferroce-driver` can't use [`exchange`], [`keep`], [`mortal`], [`readiness`] and [`waited`]: these are about the
//! types of another instance of that crate, which is compiled without its tests.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

pub mod c_layout;
pub mod dpdk;
pub mod exchange;
pub mod file_gpu;
pub mod gpu;
pub mod keep;
pub mod mortal;
pub mod namespaces;
pub mod patience;
pub mod random;
pub mod rdmacm_stub;
pub mod readiness;
pub mod rnic_stub;
pub mod signal;
pub mod sysfs;
pub mod waited;
