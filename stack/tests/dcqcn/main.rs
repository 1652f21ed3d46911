//! The reaction point of DCQCN: the numbers of docs/protocol.md §7, the traces of two published simulators, and invariants
//! for any CNPs and parameters.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod manual;
mod properties;
mod reference;
mod rules;
