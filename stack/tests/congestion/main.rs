//! Congestion control of whole engines: pacing, the effect of CNPs on connections, marks, and a link that marks.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod link;
mod marks;
mod mixed;
mod pacing;
mod slow;

use ferroce::wire::Opcode;
use ferroce::{Config, CongestionControl, Dcqcn, ReactionState};
use ferroce_test_support::packet::{Script, packet};
use ferroce_test_support::peer::Peer;

pub(crate) const GIGABIT: u64 = 1_000_000_000;

pub(crate) fn with(config: Config, dcqcn: Dcqcn, line_rate: u64) -> Config {
    config.congestion(CongestionControl::Dcqcn(dcqcn)).line_rate(line_rate)
}

/// A congestion notification packet for the queue pair under test.
pub(crate) fn cnp() -> Script {
    packet(Opcode::CNP, 0).payload(&[0; 16])
}

pub(crate) fn reaction(peer: &Peer) -> ReactionState {
    peer.query().reaction.unwrap()
}
