//! Conformance cases: an engine against a scripted peer, in virtual time.
//!
//! A case is named after its number in the list of the README beside this file, and reads as a
//! script: post this, expect exactly these packets, inject those, expect these completions. What
//! is neither expected nor taken (a packet, a completion, an event) fails the case at its end.

mod a_parsing;
mod b_requester;
mod packet;
mod peer;
