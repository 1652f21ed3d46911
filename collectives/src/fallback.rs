//! What goes a slower way than it might: an event with its reason, in the log and among the metrics of the context.

use ferroce::{Context, ProgramCounter};
use tracing::info;

const FALLBACKS: ProgramCounter = ProgramCounter::new(
    "collective_fallbacks",
    "Communicators and reductions of collectives that go a slower way than they might.",
    "reason",
);

/// The ranks of a communicator share no memory, though they may.
pub(crate) fn without_memory(context: &mut Context, communicator: u64, reason: &'static str) {
    info!("communicator {communicator:016x} goes by packets: {reason}");
    context.count(&FALLBACKS, reason);
}

/// A device's memory is combined by the CPU, in blocks that are copied to the host and back.
pub(crate) fn by_the_host(context: &mut Context, is_first: bool) {
    if is_first {
        info!(
            "memory of a device is combined by the CPU, in blocks that are copied: the device does not do this itself"
        );
    }
    context.count(&FALLBACKS, "memory of a device is combined by the CPU");
}
