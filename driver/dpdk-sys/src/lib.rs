//! DPDK at run time: a shim over the system's DPDK, which is loaded when the first port is opened.
//!
//! DPDK's functions for bursts are inline functions in C, and its structures differ between releases. So the shim is
//! written in C (`shim.c`). It is a separate shared object, and exports one table of functions with ferroce's own types
//! (`shim.h`). [`abi`] declares the table by hand, and a test compares it with the header. So ferroce is built without
//! DPDK, and one program runs without DPDK or with any DPDK that the shim is built for. Packet buffers are opaque: the
//! shim reads and writes a burst of them. The shim links EAL, ethdev, mbuf and mempool; EAL loads the drivers of the
//! devices as plug-ins.
//!
//! `build-shim` in this package builds the shim, `libferroce_dpdk.so`, with a C compiler and Debian's libdpdk-dev; the
//! README has the command. In a checkout of ferroce `./do dpdk` does it.

pub mod abi;
mod shim;

pub use abi::{Frame, Functions, Losses, Mbuf, Mempool, PortInfo, PortSettings, Shared};
pub use shim::{LoadError, SHIM, load};
