//! What goes a slower way than it might: an event with its reason, in the log and among the metrics of the context.

use ferroce::{Context, ProgramCounter};
use tracing::warn;

const FALLBACKS: ProgramCounter = ProgramCounter::new(
    "collective_fallbacks",
    "Communicators of one host that go by packets, rails to a peer that were left, and steps on a device's memory that the CPU carries out.",
    "reason",
);

/// The ranks of a communicator share no memory, though they may.
pub(crate) fn without_memory(context: &mut Context, communicator: u64, reason: &'static str) {
    warn!("communicator {communicator:016x} goes by packets: {reason}");
    context.count(&FALLBACKS, reason);
}

/// A rail to a peer has failed: what went by it goes by the others.
pub(crate) fn without_rail(context: &mut Context, (rank, peer, rail): (u32, u32, usize), why: &str) {
    warn!(rank, peer, rail, "the rail is left: {why}");
    context.count(&FALLBACKS, "a rail that failed");
}

/// A device's memory goes to the host and back, in blocks.
pub(crate) fn by_the_host(context: &mut Context, reason: &'static str, is_first: bool) {
    if is_first {
        warn!("{reason}, by way of the host");
    }
    context.count(&FALLBACKS, reason);
}
