//! The manual: pages of text with examples, and no code.
//!
//! | page | |
//! |---|---|
//! | [`first_program`] | the steps from a device to a WRITE between two ends |
//! | [`memory`] | kinds of memory, access rights, when a buffer may be touched, what is seen in which order |
//! | [`device_memory`] | memory of GPUs: which, how it travels, kernels beside it, RNICs, what it costs |
//! | [`connecting`] | by handshake, by the connection manager, datagrams; which GID; when a peer is gone |
//! | [`threads`] | who polls; [`Poller`](crate::Poller), [`Runner`](crate::Runner), descriptors, tokio |
//! | [`errors`] | every completion status, error and event: cause and remedy |
//! | [`performance`] | what makes it fast, what to tune, how to measure |
//! | [`operating`] | what a host needs; counters, `ferroce stat`, `ferroce doctor`, the log, captures |
//!
//! All examples are tests: they run over [`driver::loopback`](crate::driver::loopback), ports inside one process. On a network the
//! device is opened by its name instead ([`Device::open`](crate::Device::open)); the rest is the same.
//!
//! The rules of the protocol are those of the InfiniBand Architecture Specification (IBA) with Annex A17 (RoCEv2);
//! `docs/protocol.md` of the repository is the extract that the engine is built and tested against. Pages name sections of
//! both.

pub mod connecting;
pub mod device_memory;
pub mod errors;
pub mod first_program;
pub mod memory;
pub mod operating;
pub mod performance;
pub mod threads;
