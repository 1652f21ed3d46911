//! Shared code of ferroce's tests, and of the benchmarks that flood it.
//!
//! A dev-dependency: no application is built with it. Code that only needs the drivers is in `ferroce-driver-test-support`.
//!
//! - [`peer`]: an engine against a scripted peer, in virtual time; [`packet`] has the elements of its scripts, [`cable`] is
//!   the port under the engine.
//! - [`pair`]: two connected contexts on a simulated link, in virtual time.
//! - [`junk`]: frames that a receiver must drop, by the reason.
//! - [`semantics`]: the semantics of the verbs, as cases for two contexts of any backend.
//! - [`repository`]: the files of this repository, for tests of its rules.
//! - [`strangers`]: working connections during a flood of requests from hosts that do not exist.
//!
//! Programs that use it count their allocations: `allocation_counter` is their allocator.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test that can't go on fails")]

pub mod cable;
pub mod junk;
pub mod packet;
pub mod pair;
pub mod peer;
pub mod repository;
pub mod semantics;
pub mod strangers;
