//! DPDK at run time: a shim over the system's DPDK, which is loaded when a port is opened.
//!
//! DPDK's functions for bursts are inline in C, and its structures differ between releases. So the shim is C
//! (`shim.c`), a shared object of its own with an ABI of ours (`shim.h`), which [`abi`] declares by hand: ferroce is
//! built without DPDK, and one program runs where there is none, and with any DPDK that the shim is built for.
//!
//! `build-shim` in this package builds the shim, `libferroce_dpdk.so`, with a C compiler and Debian's libdpdk-dev; the
//! README has the command. In a checkout of ferroce `./do dpdk` does it.

pub mod abi;
mod shim;

pub use abi::{Frame, Functions, Losses, Mbuf, Mempool, PortInfo, PortSettings, Shared};
pub use shim::{LoadError, SHIM, load};
