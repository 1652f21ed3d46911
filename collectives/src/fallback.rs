//! What goes a slower way than it might: an event with its reason, in the log and among the metrics of the context.

use ferroce::{Context, ProgramCounter};
use tracing::warn;

const FALLBACKS: ProgramCounter = ProgramCounter::new(
    "collective_fallbacks",
    "Communicators of one host that go by packets, and steps on a device's memory that the CPU carries out.",
    "reason",
);

/// The ranks of a communicator share no memory, though they may.
pub(crate) fn without_memory(context: &mut Context, communicator: u64, reason: &'static str) {
    warn!("communicator {communicator:016x} goes by packets: {reason}");
    context.count(&FALLBACKS, reason);
}

/// A device's memory goes to the host and back, in blocks.
pub(crate) fn by_the_host(context: &mut Context, reason: &'static str, is_first: bool) {
    if is_first {
        warn!("{reason}, by way of the host");
    }
    context.count(&FALLBACKS, reason);
}
