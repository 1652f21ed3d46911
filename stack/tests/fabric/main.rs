//! DCQCN in a fabric: our reaction point, pacer and switch compared with those of two published simulators.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod compare;
mod nic;
mod reference;
mod scenario;
