//! Bindings to the system's DPDK: the declarations that the driver uses, translated from the headers
//! at build time, and a shim for the functions that are inline in C.
//!
//! Packet buffers stay opaque: their layout is a matter of the shim, which fills in and reads a burst
//! of them at a time. The names are DPDK's, and so is the documentation (<https://doc.dpdk.org>).

#![allow(missing_docs, non_camel_case_types, non_upper_case_globals, non_snake_case, unused_qualifications)]
#![allow(clippy::all, clippy::undocumented_unsafe_blocks)]

#[cfg(feature = "system")]
include!(concat!(env!("OUT_DIR"), "/bindings.rs"));
