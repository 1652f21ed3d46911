//! Operations that use a slower path than possible: each is an event with its reason, in the log and in the metrics of the
//! context.

use ferroce::{Context, ProgramCounter};
use tracing::{info, warn};

use crate::ports::{MAX_RAILS, Ports};

const FALLBACKS: ProgramCounter = ProgramCounter::new(
    "collective_fallbacks",
    "Communicators of one host that use packets instead of shared memory, and steps on a device's memory that the CPU \
     executes.",
    "reason",
);

const RAILS_LEFT: ProgramCounter =
    ProgramCounter::new("collective_rails_left", "Times that a rail to a peer was taken out of use.", "rail");

const RAILS_BACK: ProgramCounter =
    ProgramCounter::new("collective_rails_back", "Times that such a rail was used again.", "rail");

const RAILS: [&str; MAX_RAILS] = ["0", "1", "2", "3", "4", "5", "6", "7"];

/// The ranks of a communicator share no memory, although they are allowed to.
pub(crate) fn without_memory(context: &mut Context, communicator: u64, reason: &'static str) {
    warn!("communicator {communicator:016x} uses packets: {reason}");
    context.count(&FALLBACKS, reason);
}

/// A rail to a peer has failed: its messages are sent on the others.
pub(crate) fn without_rail(ports: &mut Ports, (rank, peer, rail): (u32, u32, usize), why: &str) {
    warn!(rank, peer, "rail {rail} ({}) is no longer used: {why}", ports.of(rail).device());
    ports.of_mut(rail).context.count(&RAILS_LEFT, RAILS[rail]);
}

/// A rail to a peer works again.
pub(crate) fn with_rail(ports: &mut Ports, (rank, peer, rail): (u32, u32, usize)) {
    info!(rank, peer, "rail {rail} ({}) is used again", ports.of(rail).device());
    ports.of_mut(rail).context.count(&RAILS_BACK, RAILS[rail]);
}

/// Device memory is copied to the host and back, in blocks.
pub(crate) fn by_the_host(context: &mut Context, reason: &'static str, is_first: bool) {
    if is_first {
        warn!("{reason}, through host memory");
    }
    context.count(&FALLBACKS, reason);
}
