//! The manual: pages of text and examples. This module exports nothing. New to RDMA: begin with the [glossary] and
//! [`first_program`].
//!
//! | page | |
//! |---|---|
//! | [`first_program`] | the steps from a device to a WRITE between two ends |
//! | [`memory`] | kinds of memory, access rights, when a buffer may be accessed, ordering |
//! | [`device_memory`] | GPU memory: how to register it, how data is copied, GPU kernels, RNICs, cost |
//! | [`connecting`] | by handshake, by the connection manager, datagrams; which GID; how a lost peer is noticed |
//! | [`threads`] | which thread polls; [`Poller`](crate::Poller), [`Runner`](crate::Runner), descriptors, tokio |
//! | [`errors`] | every completion status, error and event: cause and remedy |
//! | [`performance`] | what to tune, how to measure |
//! | [`operating`] | what a host needs; counters, `ferroce stat`, `ferroce doctor`, the log, captures |
//! | [`glossary`] | the terms of RDMA, networks, GPUs and collectives |
//!
//! All examples are tests: they run over [`driver::loopback`](crate::driver::loopback), ports inside one process. On a network,
//! open the device by its name instead ([`Device::open`](crate::Device::open)).
//!
//! The rules of the protocol are those of the InfiniBand Architecture Specification (IBA, volume 1, published by
//! [infinibandta.org](https://www.infinibandta.org)) with Annex A17 (RoCEv2). `docs/protocol.md` of the repository is the extract
//! that the engine is built and tested against. The last line of each page names the sections of the IBA, the sections (§) of
//! `docs/protocol.md` and the files that it describes. Paths such as `docs/rnic.md` are those of the repository.

pub mod connecting;
pub mod device_memory;
pub mod errors;
pub mod first_program;
pub mod glossary;
pub mod memory;
pub mod operating;
pub mod performance;
pub mod threads;
