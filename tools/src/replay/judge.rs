//! Checks whether an end keeps the rules, by its packets alone.
//!
//! - `judge/requester.rs`, `judge/responder.rs`: an end as a requester; as a responder
//! - `judge/statements.rs`: contradictions between a responder's packets
//!
//! A capture may lack any packet, so a recorded end is judged only by what is certain. The engine is judged strictly,
//! because all its packets are known.
//!
//! - Receive WRs, memory, permissions and the path MTU are inferred from the responses to requests. If the responses do
//!   not show one of them, it is not used for judging, and an end whose path MTU would be a guess is not played.
//! - If a host numbers its IPv4 packets (`numbering.rs`), a bit-identical duplicate is a copy made by the network: it
//!   arrived twice, and was sent once. For hosts that do not number them this can't be decided, so a second NAK is no
//!   violation. Requests of UC and datagrams are never retransmitted, so a second one is a copy from any host.

mod requester;
mod responder;
mod statements;

use std::collections::HashSet;
use std::time::Duration;

use ferroce::wire::{PKEY_DEFAULT, Reth, Service};

use super::conversation::{Conversation, Event};
use super::message::Messages;
use super::packet::Seen;
use super::rule::{Finding, Rule, Weight};
use requester::Requester;
use responder::Responder;
use statements::Statements;

/// Measurements of an end, as in Lumina's analysers.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    /// From the packet that shows a gap to the NAK.
    pub(super) nak_generation: Vec<Duration>,
    /// From the NAK to the first retransmitted packet.
    pub(super) nak_reaction: Vec<Duration>,
    /// From an RNR NAK to the retransmission.
    pub(super) rnr_wait: Vec<Duration>,
    /// Between two CNPs.
    pub(super) cnp_interval: Vec<Duration>,
    /// Restarts at the PSN of the NAK, and all restarts.
    pub(super) go_back_n: (u64, u64),
    /// Restarts whose first packets may not have been recorded.
    pub(super) restarts_unseen: u64,
    /// Retransmitted request packets.
    pub(super) repeats: u64,
    pub(super) requests: u64,
    pub(super) responses: u64,
    pub(super) cnps: u64,
    /// Packets that the network duplicated.
    pub(super) copies: u64,
    /// Retransmissions that may be copies made by the network.
    pub(super) twins: u64,
    /// Packets that arrived with Congestion Experienced.
    pub(super) marked: u64,
    pub(super) naks: u64,
    pub(super) rnr_naks: u64,
}

/// Known facts if every packet is known, as for the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strict {
    /// The first PSNs of both ends.
    pub(super) starts: [i64; 2],
    /// The index of the event from which on its queue pair was in the error state, due to one of its own work requests.
    pub(super) dead_from: Option<usize>,
}

/// Judges the end `side` by `events`, strictly if every packet is known.
pub(super) fn judge(
    of: &Conversation,
    events: &[Event],
    side: usize,
    strict: Option<Strict>,
) -> (Vec<Finding>, Measured) {
    let mut judge = Judge {
        of,
        side,
        strict: strict.is_some(),
        receives: 0,
        asked_again: false,
        own: Messages::among(of, events, side),
        theirs: Messages::among(of, events, 1 - side),
        requester: Requester::starting(strict.map(|strict| strict.starts[side])),
        responder: Responder::expecting(strict.map(|strict| strict.starts[1 - side])),
        // The engine is judged by stricter checks.
        statements: Statements::of(of, events, side).filter(|_| strict.is_none()),
        oldest_ever: oldest(events, 1 - side),
        newest_ever: newest(of, events, 1 - side),
        findings: Vec::new(),
        measured: Measured::default(),
    };
    let mut asked = HashSet::new();
    judge.asked_again = requests(events, 1 - side).any(|event| !asked.insert(event.psn));
    judge.receives = judge.theirs.list.iter().filter(|message| message.takes_receive()).count();
    let dead_from = strict.and_then(|strict| strict.dead_from);
    for (index, event) in events.iter().enumerate() {
        judge.responder.is_dead |= dead_from == Some(index);
        judge.event(event);
    }
    judge.responder.is_dead |= dead_from.is_some();
    judge.end();
    (judge.findings, judge.measured)
}

struct Judge<'a> {
    of: &'a Conversation,
    side: usize,
    strict: bool,
    own: Messages,
    theirs: Messages,
    /// Whether the other end repeats a request anywhere in the capture.
    asked_again: bool,
    /// Receive WRs that the other end's messages consume.
    receives: usize,
    requester: Requester,
    responder: Responder,
    statements: Option<Statements>,
    /// The first and the last PSN of the other end's requests in the whole capture.
    oldest_ever: Option<i64>,
    newest_ever: Option<i64>,
    findings: Vec<Finding>,
    measured: Measured,
}

/// The most READs that may be in flight.
const LOOK_BACK: usize = 1024;

/// Tolerance for clocks of captures and for packets that cross.
const SLACK: Duration = Duration::from_micros(200);

impl Judge<'_> {
    fn violation(&mut self, rule: Rule, frame: u64, text: impl Into<String>) {
        self.findings.push(Finding { rule, weight: Weight::Violation, frame, text: text.into() });
    }

    fn lawful(&mut self, rule: Rule, frame: u64, text: impl Into<String>) {
        self.findings.push(Finding { rule, weight: Weight::Lawful, frame, text: text.into() });
    }

    fn event(&mut self, event: &Event) {
        let packet = &event.packet;
        if event.from != self.side {
            self.measured.marked += u64::from(packet.is_marked());
            if packet.is_whole_request() {
                self.responder.asked(event.psn + self.of.span(packet) - 1);
                self.hear(event);
            }
            if event.lost {
                return;
            }
            if packet.is_request() {
                self.settle_duplicate();
                self.settle_gap();
                self.request_came(event);
            } else if packet.is_response() {
                self.response_came(event);
            }
            return;
        }
        if event.copy {
            self.measured.copies += 1;
            return;
        }
        self.measured.twins += u64::from(event.twin);
        if !packet.icrc_is_right {
            if self.strict {
                self.violation(Rule::Icrc, packet.frame, format!("{} with a wrong ICRC", packet.opcode));
            } else {
                self.lawful(
                    Rule::Icrc,
                    packet.frame,
                    "its ICRC is wrong where it was recorded; `ferroce dissect` tells more",
                );
            }
            return;
        }
        self.header(packet);
        if packet.is_request() {
            self.measured.requests += 1;
            self.request_left(event);
        } else if packet.is_response() {
            self.measured.responses += 1;
            self.response_left(event);
        } else if packet.is_cnp() {
            self.cnp_left(packet);
        }
    }

    /// Checks the header of any packet.
    fn header(&mut self, packet: &Seen) {
        let (opcode, frame) = (packet.opcode, packet.frame);
        if !self.strict && packet.is_roce_v1() != self.of.is_roce_v1(self.side) {
            self.lawful(
                Rule::Encapsulation,
                frame,
                "RoCE v1 and v2 on one connection: a ConnectX takes both",
            );
        }
        if !packet.pad_fits && !packet.is_cnp() {
            let text = format!("pad {} behind {} bytes", packet.bth.pad(), packet.payload_len());
            self.violation(Rule::Pad, frame, text);
        }
        if packet.bth.transport_version() != 0 {
            let text = format!("transport version {}: must be 0", packet.bth.transport_version());
            self.violation(Rule::Header, frame, text);
        }
        let pkey = packet.bth.pkey();
        // CNPs may use the default P_Key, too.
        if !(self.of.pkey.admits(pkey) || packet.is_cnp() && PKEY_DEFAULT.admits(pkey)) {
            self.violation(Rule::Header, frame, format!("P_Key {pkey}: must be {}", self.of.pkey));
        } else if !pkey.is_full_member() && self.of.limited[1 - self.side] && !packet.is_cnp() {
            let text = format!(
                "P_Key {pkey}, of a limited member to a limited member: one must be {}",
                self.of.pkey
            );
            self.violation(Rule::Header, frame, text);
        }
        if packet.bth.solicited() && !packet.may_solicit() {
            self.violation(Rule::Header, frame, format!("{opcode} with the solicited event bit"));
        }
        let (len, mtu) = (packet.payload_len(), self.of.path_mtu.bytes() as usize);
        if self.of.service != Service::Ud && !packet.is_cnp() && !opcode.payload().admits(len, mtu) {
            self.violation(
                Rule::PayloadLength,
                frame,
                format!("{opcode} with {len} bytes under path MTU {mtu}"),
            );
        }
    }

    fn end(&mut self) {
        self.settle_duplicate();
        self.settle_gap();
        self.settle_waits();
        self.lengths();
        if self.strict && !self.responder.is_dead {
            self.all_answered();
        }
    }
}

/// The first PSN of the requests of an end.
fn oldest(events: &[Event], end: usize) -> Option<i64> {
    requests(events, end).map(|event| event.psn).min()
}

/// The last PSN of the requests of an end.
fn newest(of: &Conversation, events: &[Event], end: usize) -> Option<i64> {
    requests(events, end).map(|event| event.psn + of.span(&event.packet) - 1).max()
}

/// The undamaged requests of an end.
fn requests(events: &[Event], end: usize) -> impl Iterator<Item = &Event> {
    events.iter().filter(move |event| event.from == end && event.packet.is_whole_request())
}

/// Whether a READ requests the same as another one, or the rest of it after `done` bytes.
fn goes_on(first: &Reth, again: &Reth, done: u64) -> bool {
    again.rkey() == first.rkey()
        && again.va() == first.va().wrapping_add(done)
        && u64::from(again.length()) <= u64::from(first.length()).saturating_sub(done)
}

/// A PSN as on the wire.
pub(super) fn hex(psn: i64) -> String {
    format!("{:#08x}", psn & 0x00ff_ffff)
}
