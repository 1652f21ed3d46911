//! Whether an end keeps the rules, by its packets alone: the recorded ones, of which some may be
//! missing in the capture, and the engine's, of which none is.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Duration;

use ferroce::Nanos;
use ferroce::wire::{Nak, Opcode, Operation, Position, Service, Successor, Syndrome, credits};

use super::conversation::{Conversation, Event, wrapped};
use super::message::Messages;
use super::packet::Seen;
use super::rule::{Finding, Rule, Weight};

/// What was measured of an end, in the way of Lumina's analysers.
#[derive(Clone, Debug, Default)]
pub(super) struct Measured {
    /// From the packet that shows a gap to the NAK.
    pub(super) nak_generation: Vec<Duration>,
    /// From the NAK to the first packet that is repeated.
    pub(super) nak_reaction: Vec<Duration>,
    /// From an RNR NAK to the repeat.
    pub(super) rnr_wait: Vec<Duration>,
    /// Between two CNPs.
    pub(super) cnp_interval: Vec<Duration>,
    /// Times that the end began again at the PSN of the NAK, of all times.
    pub(super) go_back_n: (u64, u64),
    /// Request packets that were sent again.
    pub(super) repeats: u64,
    pub(super) requests: u64,
    pub(super) responses: u64,
    pub(super) cnps: u64,
    /// Packets that came marked by a switch.
    pub(super) marked: u64,
    pub(super) naks: u64,
    pub(super) rnr_naks: u64,
}

/// What is known where every packet is, as of the engine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Strict {
    /// The first PSNs of both ends.
    pub(super) starts: [i64; 2],
    /// From which event on its queue pair was in error, for one of its own work requests.
    pub(super) dead_from: Option<usize>,
}

/// Judges the end `side` by `events`, strictly where every packet is known.
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
        own: Messages::among(of, events, side),
        theirs: Messages::among(of, events, 1 - side),
        requester: Requester { next: strict.map(|strict| strict.starts[side]), ..Requester::default() },
        responder: Responder {
            expected: strict.map(|strict| strict.starts[1 - side]),
            ..Responder::default()
        },
        oldest_ever: oldest(events, 1 - side),
        newest_ever: newest(of, events, 1 - side),
        findings: Vec::new(),
        measured: Measured::default(),
    };
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
    requester: Requester,
    responder: Responder,
    /// The first and the last PSN that the other end's requests take up in all the capture.
    oldest_ever: Option<i64>,
    newest_ever: Option<i64>,
    findings: Vec<Finding>,
    measured: Measured,
}

/// What is known of the end as a requester.
#[derive(Default)]
struct Requester {
    /// The next PSN; known from the start, or since the first packet.
    next: Option<i64>,
    firsts: HashMap<i64, Rc<Seen>>,
    /// READs, as first PSN, PSN behind, and request.
    reads: Vec<(i64, i64, Rc<Seen>)>,
    /// The newest PSN that was acknowledged.
    acked: Option<i64>,
    /// A sequence error NAK that was not reacted to yet.
    asked: Option<(i64, Nanos)>,
    /// An RNR NAK: PSN, when, and how long to wait.
    not_ready: Option<(i64, Nanos, Duration)>,
}

/// What is known of the end as a responder.
#[derive(Default)]
struct Responder {
    expected: Option<i64>,
    /// The gap has been told, or must not be.
    quiet: bool,
    /// A gap that must be told: since which frame, and when.
    due: Option<(u64, Nanos)>,
    last_nak: Option<i64>,
    /// The PSN that there was no receive for.
    not_ready: Option<i64>,
    /// The newest PSN that was acknowledged, and when.
    acked: Option<(i64, Nanos)>,
    /// The newest PSN of which the sender wants an ACK.
    wanted: Option<(i64, u64)>,
    /// READ requests as they came, resumed ones too: first PSN, PSN behind, and frame.
    reads: Vec<(i64, i64)>,
    answered: HashSet<i64>,
    /// What atomics returned, by PSN.
    originals: HashMap<i64, u64>,
    /// What came twice and must be answered: its PSN and operation.
    duplicate: Option<(i64, Operation, u64)>,
    /// How many messages there may have been before the capture, least and most, as the MSNs so far tell.
    before: Option<(i64, i64)>,
    /// The newest MSN, without wraps.
    newest_msn: Option<i64>,
    /// The capture has the connection's first message.
    is_start: bool,
    /// READs that end without having been seen to begin: they may count or not.
    strays: i64,
    /// It has refused a request, and its queue pair is in error.
    is_dead: bool,
    last_cnp: Option<Nanos>,
}

/// What is under way is among so many READs.
const LOOK_BACK: usize = 1024;

/// Nobody has so many packets under way.
const NO_WINDOW: i64 = 1 << 16;

/// Clocks of captures, and packets that cross.
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

    /// What every packet must be.
    fn header(&mut self, packet: &Seen) {
        let (opcode, frame) = (packet.opcode, packet.frame);
        if !packet.pad_fits && !packet.is_cnp() {
            let text = format!("pad {} behind {} bytes", packet.bth.pad(), packet.payload().len());
            self.violation(Rule::Pad, frame, text);
        }
        if packet.bth.transport_version() != 0 {
            let text = format!("transport version {}: must be 0", packet.bth.transport_version());
            self.violation(Rule::Header, frame, text);
        }
        if packet.bth.pkey().0 & 0x7fff != 0x7fff {
            self.violation(
                Rule::Header,
                frame,
                format!("P_Key {:#06x}: RoCE has 0xffff", packet.bth.pkey().0),
            );
        }
        if packet.bth.solicited() && !packet.may_solicit() {
            self.violation(Rule::Header, frame, format!("{opcode} with the solicited event bit"));
        }
        let (len, mtu) = (packet.payload().len(), self.of.path_mtu.bytes() as usize);
        if self.of.service != Service::Ud && !packet.is_cnp() && !opcode.payload().admits(len, mtu) {
            self.violation(
                Rule::PayloadLength,
                frame,
                format!("{opcode} with {len} bytes under path MTU {mtu}"),
            );
        }
    }

    // As a requester.

    fn request_left(&mut self, event: &Event) {
        let (packet, psn) = (&event.packet, event.psn);
        if self.of.service == Service::Ud {
            return; // its PSNs count the packets to all its peers, and nobody looks at them
        }
        let span = self.of.span(packet);
        let frame = packet.frame;
        let first = self.requester.firsts.get(&psn).cloned();
        let inside = self
            .requester
            .reads
            .iter()
            .rev()
            .take(LOOK_BACK)
            .find(|(start, end, _)| psn > *start && psn < *end)
            .cloned();
        let inside = inside.filter(|_| self.of.knows_path_mtu());
        let is_read = packet.opcode == Opcode::RC_READ_REQUEST;
        let is_repeat = first.is_some() || inside.is_some();
        if is_repeat {
            self.measured.repeats += 1;
            self.reaction(packet, psn);
        }
        if let Some(first) = first {
            let same_work = first.opcode == packet.opcode
                && first.payload() == packet.payload()
                && first.reth.map(|r| (r.va(), r.rkey())) == packet.reth.map(|r| (r.va(), r.rkey()))
                && first.immediate == packet.immediate
                && first.invalidates == packet.invalidates
                && first.feth == packet.feth
                && first.atomic == packet.atomic
                && match (first.reth, packet.reth) {
                    // A READ may ask for less.
                    (Some(first), Some(now)) if is_read => now.length() <= first.length(),
                    (first, now) => first.map(|r| r.length()) == now.map(|r| r.length()),
                };
            // What is done already is not sent again: that is another connection of the same numbers.
            let is_done = !self.strict && self.requester.acked.is_some_and(|acked| acked >= psn);
            if !same_work && !is_done {
                let text = format!(
                    "PSN {} was {} in frame {}, and is {} with other contents",
                    hex(psn),
                    first.opcode,
                    first.frame,
                    packet.opcode
                );
                self.violation(Rule::Repeat, frame, text);
            }
        } else if let Some((start, end, read)) = inside {
            let (before, now) = (read.reth, packet.reth);
            let mtu = u64::from(self.of.path_mtu.bytes());
            match (is_read, before, now) {
                (true, Some(before), Some(now)) => {
                    let done = (psn - start) as u64 * mtu;
                    let right = now.rkey() == before.rkey()
                        && now.va() == before.va().wrapping_add(done)
                        && u64::from(now.length()) <= u64::from(before.length()) - done;
                    if !right {
                        let text = format!(
                            "a READ is taken up again at PSN {} with address {:#x} and {} bytes: must be {:#x} and at most {}",
                            hex(psn),
                            now.va(),
                            now.length(),
                            before.va().wrapping_add(done),
                            u64::from(before.length()) - done
                        );
                        self.violation(Rule::ReadResume, frame, text);
                    }
                }
                _ => {
                    let text = format!(
                        "{} at PSN {}, which belongs to the READ of PSN {} to {}",
                        packet.opcode,
                        hex(psn),
                        hex(start),
                        hex(end - 1)
                    );
                    self.violation(Rule::PsnStep, frame, text);
                }
            }
        } else {
            if self.strict && self.requester.next.is_some_and(|next| next != psn) {
                let next = self.requester.next.unwrap_or(psn);
                self.violation(Rule::PsnStep, frame, format!("PSN {}: must be {}", hex(psn), hex(next)));
            }
            self.order(packet, psn);
            self.requester.firsts.insert(psn, Rc::clone(packet));
            if is_read {
                self.requester.reads.push((psn, psn + span, Rc::clone(packet)));
            }
            let next = self.requester.next.unwrap_or(psn).max(psn + span);
            self.requester.next = Some(next);
        }
    }

    /// Whether a new packet may come behind the one before.
    fn order(&mut self, packet: &Seen, psn: i64) {
        let before = self.requester.firsts.get(&(psn - 1)).map(|before| before.opcode.successor());
        let behind_read = self.requester.reads.last().is_some_and(|(_, end, _)| *end == psn);
        let expected = if behind_read { Some(Successor::NewMessage) } else { before };
        if expected.is_some_and(|expected| !packet.opcode.may_come(expected)) {
            let text = format!("{} at PSN {} does not go on with the packet before", packet.opcode, hex(psn));
            self.violation(Rule::OpcodeOrder, packet.frame, text);
        }
    }

    /// A packet is repeated: is it the one that was asked for, and not too early?
    fn reaction(&mut self, packet: &Seen, psn: i64) {
        if let Some((asked, at)) = self.requester.asked.take() {
            self.measured.nak_reaction.push(packet.at.since(at));
            self.measured.go_back_n.1 += 1;
            // A READ or an atomic before it whose answer was lost, or came out of turn, comes first.
            let first = self.requester.firsts.get(&psn);
            let is_unanswered = first.is_none_or(|first| first.opcode.is_answered_explicitly());
            if psn == asked {
                self.measured.go_back_n.0 += 1;
            } else if self.strict && !(psn < asked && is_unanswered) {
                let text = format!("PSN {} is repeated first: the NAK names {}", hex(psn), hex(asked));
                self.violation(Rule::GoBackN, packet.frame, text);
            }
        }
        // Packets behind the refused one may still have been on their way.
        if let Some((refused, at, wait)) = self.requester.not_ready
            && psn == refused
        {
            let waited = packet.at.since(at);
            self.measured.rnr_wait.push(waited);
            let slack = if self.strict { Duration::ZERO } else { SLACK };
            // Earlier than the slack it may have been on its way when the NAK came.
            if waited + slack / 20 < wait && waited >= slack {
                let text = format!("PSN {} again after {waited:?}: the RNR NAK asks for {wait:?}", hex(psn));
                self.violation(Rule::RnrWait, packet.frame, text);
            }
            self.requester.not_ready = None;
        }
    }

    fn response_came(&mut self, event: &Event) {
        let Some(syndrome) = event.packet.aeth.and_then(|aeth| aeth.syndrome()) else { return };
        match syndrome {
            Syndrome::Nak(Nak::PsnSequenceError) => {
                let is_known = self.requester.next.is_some_and(|next| event.psn < next);
                if is_known && self.requester.not_ready.is_none() {
                    self.requester.asked = Some((event.psn, event.packet.at));
                }
            }
            Syndrome::RnrNak(timer) => {
                self.requester.asked = None;
                self.requester.not_ready = Some((event.psn, event.packet.at, timer.duration()));
            }
            Syndrome::Ack { .. } => self.requester.acked = self.requester.acked.max(Some(event.psn)),
            Syndrome::Nak(_) => {}
        }
    }

    // As a responder.

    fn request_came(&mut self, event: &Event) {
        if self.of.service != Service::Rc {
            return;
        }
        let (packet, psn) = (&event.packet, event.psn);
        let span = self.of.span(packet);
        if packet.opcode == Opcode::RC_READ_REQUEST {
            self.responder.reads.push((psn, psn + span));
        }
        let expected = *self.responder.expected.get_or_insert(psn);
        if self.responder.is_dead {
            return;
        }
        if psn == expected {
            self.responder.expected = Some(psn + span);
            self.responder.quiet = false;
            if packet.bth.ack_req() {
                self.responder.wanted = Some((psn + span - 1, packet.frame));
            }
        } else if psn > expected {
            if !self.responder.quiet {
                self.responder.due = Some((packet.frame, packet.at));
                self.responder.quiet = true;
            }
        } else if self.must_be_answered(packet, psn) {
            self.responder.duplicate = Some((psn, packet.opcode.operation(), packet.frame));
        }
    }

    /// Whether a request that came before must be answered again: not one that says something else.
    fn must_be_answered(&self, packet: &Seen, psn: i64) -> bool {
        if !packet.opcode.is_answered_explicitly() {
            return packet.bth.ack_req();
        }
        let Some(message) = self.theirs.at(psn) else { return false };
        let Some(first) = message.packets.first().and_then(Option::as_ref) else { return false };
        match (first.reth, packet.reth) {
            _ if first.opcode != packet.opcode => false,
            (Some(first), Some(again)) => {
                let done = (psn - message.first) as u64 * u64::from(self.of.path_mtu.bytes());
                let rest = u64::from(first.length()).saturating_sub(done);
                again.rkey() == first.rkey()
                    && again.va() == first.va().wrapping_add(done)
                    && u64::from(again.length()) <= rest
            }
            _ => first.atomic == packet.atomic,
        }
    }

    /// What came twice should have been answered by now.
    fn settle_duplicate(&mut self) {
        if let Some((psn, operation, frame)) = self.responder.duplicate.take()
            && self.strict
            && !self.responder.is_dead
        {
            let text = format!("{operation:?} at PSN {} came again and is not answered", hex(psn));
            self.violation(Rule::Duplicate, frame, text);
        }
    }

    /// A gap should have been told by now.
    fn settle_gap(&mut self) {
        if let Some((frame, _)) = self.responder.due.take()
            && self.strict
            && !self.responder.is_dead
        {
            let text =
                format!("PSN {} is missing, and no NAK tells it", hex(self.responder.expected.unwrap_or(0)));
            self.violation(Rule::NakMissing, frame, text);
        }
    }

    fn response_left(&mut self, event: &Event) {
        let (packet, psn) = (&event.packet, event.psn);
        let is_read = packet.opcode.operation() == Operation::ReadResponse;
        let began = self.theirs.at(psn).map(|message| message.operation() == Some(Operation::ReadRequest));
        if is_read && packet.ends() && began != Some(true) {
            self.responder.strays += 1;
        }
        if let Some(aeth) = packet.aeth {
            match aeth.syndrome() {
                None => {
                    let text = format!("syndrome {:#04x} does not exist", aeth.syndrome_byte());
                    self.violation(Rule::Syndrome, packet.frame, text);
                }
                Some(Syndrome::Nak(Nak::PsnSequenceError)) => self.sequence_error(packet, psn),
                Some(Syndrome::RnrNak(_)) => {
                    self.measured.rnr_naks += 1;
                    self.responder.not_ready = Some(psn);
                    self.take_back(psn);
                    self.responder.quiet = true;
                    self.responder.due = None;
                }
                Some(Syndrome::Nak(_)) => {
                    self.measured.naks += 1;
                    self.take_back(psn);
                    self.responder.is_dead = true;
                    self.responder.due = None;
                }
                Some(Syndrome::Ack { credit_code }) => {
                    let told = credits(credit_code).filter(|_| self.strict);
                    let posted = || self.theirs.list.iter().filter(|message| message.takes_receive()).count();
                    if let Some((told, posted)) = told.map(|told| (told as usize, posted()))
                        && told > posted
                    {
                        let text =
                            format!("credit code {credit_code} where {posted} receives were posted in all");
                        self.violation(Rule::Credits, packet.frame, text);
                    }
                    self.acknowledged(packet, psn, is_read);
                }
            }
            self.msn(packet, aeth.msn(), psn);
        } else if is_read {
            self.acknowledged(packet, psn, true);
        }
        if is_read {
            self.read_response(packet, psn);
        }
        if let Some(original) = packet.original {
            let before = *self.responder.originals.entry(psn).or_insert(original);
            if before != original {
                let text = format!(
                    "the atomic at PSN {} returned {before:#x} before, now {original:#x}: it was carried out twice",
                    hex(psn)
                );
                self.violation(Rule::Duplicate, packet.frame, text);
            }
        }
        if let Some((asked, operation, _)) = self.responder.duplicate {
            let explicit = matches!(operation, Operation::ReadRequest) || operation_is_atomic(operation);
            if !explicit || psn == asked {
                self.responder.duplicate = None;
            }
        }
    }

    /// A message was refused: it has not been carried out after all.
    fn take_back(&mut self, psn: i64) {
        let Responder { expected, wanted, .. } = &mut self.responder;
        *expected = expected.map(|expected| expected.min(psn));
        if wanted.is_some_and(|(wanted, _)| wanted >= psn) {
            *wanted = None;
        }
    }

    fn sequence_error(&mut self, packet: &Seen, psn: i64) {
        self.measured.naks += 1;
        let responder = &mut self.responder;
        if let Some((_, at)) = responder.due.take() {
            self.measured.nak_generation.push(packet.at.since(at));
        }
        if self.strict {
            let expected = self.responder.expected.unwrap_or(psn);
            if self.responder.last_nak == Some(psn) {
                self.violation(Rule::NakOnce, packet.frame, format!("a second NAK for PSN {}", hex(psn)));
            } else if psn != expected {
                let text = format!("a NAK for PSN {}: {} is missing", hex(psn), hex(expected));
                self.violation(Rule::NakPsn, packet.frame, text);
            }
        } else if self.responder.not_ready == Some(psn) {
            let text = "a sequence error NAK behind the RNR NAK of the same PSN: rdma_rxe sends it, and a requester waits all the same";
            self.lawful(Rule::NakOnce, packet.frame, text);
        } else if self.responder.last_nak == Some(psn) {
            self.violation(Rule::NakOnce, packet.frame, format!("a second NAK for PSN {}", hex(psn)));
        } else if self
            .responder
            .acked
            .is_some_and(|(acked, at)| psn <= acked && packet.at.since(at) > SLACK * 5)
        {
            let text = format!("a NAK for PSN {}, which was acknowledged before", hex(psn));
            self.violation(Rule::NakPsn, packet.frame, text);
        }
        self.responder.last_nak = Some(psn);
        if !self.strict {
            self.responder.expected = Some(psn);
        }
    }

    fn acknowledged(&mut self, packet: &Seen, psn: i64, is_read: bool) {
        if self.strict {
            let expected = self.responder.expected.unwrap_or(0);
            if psn >= expected {
                let text = format!("PSN {} is acknowledged, and {} has not come", hex(psn), hex(expected));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
            let explicit = is_read || packet.original.is_some();
            if let Some((acked, _)) = self.responder.acked
                && psn < acked
                && !explicit
            {
                let text = format!("PSN {} is acknowledged after {}", hex(psn), hex(acked));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
        } else {
            // A little beyond it may be packets that the capture does not have.
            if self.newest_ever.is_some_and(|newest| psn > newest + NO_WINDOW) {
                let text = format!("PSN {} is acknowledged, which was never sent", hex(psn));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
            // What was not recorded has come.
            let expected = self.responder.expected.get_or_insert(psn + 1);
            *expected = (*expected).max(psn + 1);
        }
        let newest = self.responder.acked.is_none_or(|(acked, _)| psn > acked);
        if newest {
            self.responder.acked = Some((psn, packet.at));
        }
    }

    fn msn(&mut self, packet: &Seen, msn: u32, psn: i64) {
        let is_open = self.theirs.cut.is_some_and(|(cut, _)| psn >= cut);
        let is_behind = self.newest_ever.is_none_or(|newest| psn > newest);
        // Of what was sent before the capture began nobody knows how many messages it was.
        if is_open || is_behind || self.oldest_ever.is_none_or(|oldest| psn + 1 < oldest) {
            return;
        }
        let Some(oldest) = self.theirs.list.first().map(|message| message.first) else { return };
        let is_nak = packet.is_nak();
        // A NAK is for a packet that is not done.
        let least = self.theirs.ended_by(if is_nak { psn - 1 } else { psn }) as i64;
        // A READ may count when it is validated, at the PSN of its request.
        let begun = match self.theirs.at(psn) {
            Some(message) if message.operation() == Some(Operation::ReadRequest) && psn < message.last => 1,
            _ => 0,
        };
        let expected = self.responder.expected.unwrap_or(psn + 1);
        let done = (self.theirs.ended_by(expected - 1) as i64).max(least + begun);
        let is_start = self.of.agreed.is_some_and(|agreed| agreed.start[1 - self.side] == wrapped(oldest));
        let counted = match self.responder.newest_msn {
            None => i64::from(msn),
            Some(newest) => {
                let far = (i64::from(msn) - newest) & MSN_MASK;
                newest + if far > MSN_MASK / 2 { far - MSN_MASK - 1 } else { far }
            }
        };
        // The first answer of a connection that begins here has the MSN of its message.
        let begins = self.responder.newest_msn.is_none()
            && self.theirs.orphans == 0
            && (least..=done).contains(&counted)
            && counted == least + begun;
        self.responder.newest_msn = self.responder.newest_msn.max(Some(counted));
        self.responder.is_start |= self.strict || is_start || begins;
        let (fewest, largest) = match self.responder.is_start {
            true => (0, 0),
            false => self.responder.before.unwrap_or((i64::MIN, i64::MAX)),
        };
        // What was done before the capture and is only repeated in it counts already.
        let most = match (self.responder.is_start, self.theirs.cut) {
            (true, _) => done + self.responder.strays,
            (false, None) => {
                self.theirs.ended_by(i64::MAX) as i64 + self.responder.strays + self.theirs.unseen + begun
            }
            (false, Some(_)) => i64::MAX,
        };
        let before = (fewest.max(counted.saturating_sub(most)), largest.min(counted - least));
        if before.0 > before.1 {
            let (from, to) = (least.saturating_add(fewest), most.saturating_add(largest));
            let range = if from >= to { from.to_string() } else { format!("{from} to {to}") };
            self.violation(
                Rule::Msn,
                packet.frame,
                format!("MSN {msn} at PSN {}: must be {range}", hex(psn)),
            );
        } else {
            self.responder.before = Some(before);
        }
    }

    fn read_response(&mut self, packet: &Seen, psn: i64) {
        self.responder.answered.insert(psn);
        let Some(message) = self.theirs.at(psn) else { return };
        if message.operation() != Some(Operation::ReadRequest) {
            // FLUSH and ATOMIC WRITE are answered so, too.
            return;
        }
        let (first, last, len) = (message.first, message.last, message.remote().map_or(0, |(_, _, len)| len));
        let mtu = u64::from(self.of.path_mtu.bytes());
        let due = if psn == last { len - (last - first) as u64 * mtu } else { mtu };
        if packet.payload().len() as u64 != due {
            let text = format!(
                "{} with {} bytes at PSN {}: must have {due}",
                packet.opcode,
                packet.payload().len(),
                hex(psn)
            );
            self.violation(Rule::ReadResponse, packet.frame, text);
            return;
        }
        if !self.of.knows_path_mtu() {
            return;
        }
        let asked: Vec<(i64, i64)> = self
            .responder
            .reads
            .iter()
            .rev()
            .take(LOOK_BACK)
            .filter(|(start, end)| psn >= *start && psn < *end)
            .copied()
            .collect();
        if asked.is_empty() {
            return; // the request was not recorded
        }
        let shape = |(start, end): &(i64, i64)| match (psn == *start, psn == end - 1) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, true) => Position::Last,
            (false, false) => Position::Middle,
        };
        let position = packet.opcode.position();
        if asked.iter().any(|read| shape(read) == position) {
            return;
        }
        let due = shape(&asked[0]);
        if !self.strict && packet.starts() && psn != first {
            return; // the request that it answers was not recorded
        }
        if !self.strict && psn != first && asked.iter().any(|(start, _)| psn == *start) {
            let text = format!(
                "a READ that was taken up again is answered with {position:?} first, where {due:?} is due: \
                 rdma_rxe does, and a requester has to take it"
            );
            self.lawful(Rule::ReadShape, packet.frame, text);
        } else {
            let text = format!("{} at PSN {}: {due:?} is due", packet.opcode, hex(psn));
            self.violation(Rule::ReadResponse, packet.frame, text);
        }
    }

    fn cnp_left(&mut self, packet: &Seen) {
        self.measured.cnps += 1;
        if packet.payload().len() != 16 || packet.payload().iter().any(|byte| *byte != 0) {
            self.violation(Rule::Cnp, packet.frame, "a CNP whose payload is not 16 zeros");
        }
        if !packet.bth.becn() {
            self.violation(Rule::Cnp, packet.frame, "a CNP without the BECN bit");
        }
        if let Some(last) = self.responder.last_cnp.replace(packet.at) {
            self.measured.cnp_interval.push(packet.at.since(last));
        }
    }

    fn end(&mut self) {
        self.settle_duplicate();
        self.settle_gap();
        self.lengths();
        if !self.strict || self.responder.is_dead {
            return;
        }
        if let Some((wanted, frame)) = self.responder.wanted
            && self.responder.acked.is_none_or(|(acked, _)| acked < wanted)
        {
            let text = format!("PSN {} asks for an ACK and gets none", hex(wanted));
            self.violation(Rule::AckMissing, frame, text);
        }
        let expected = self.responder.expected.unwrap_or(0);
        let reads =
            self.theirs.list.iter().filter(|message| message.operation() == Some(Operation::ReadRequest));
        let missing = reads.filter(|message| message.last < expected).find_map(|message| {
            let psn = (message.first..=message.last).find(|psn| !self.responder.answered.contains(psn))?;
            Some((message.frame, psn))
        });
        if let Some((frame, psn)) = missing {
            self.violation(Rule::ReadResponse, frame, format!("no response for PSN {} of a READ", hex(psn)));
        }
    }

    /// Whether the packets of each WRITE are what its RETH announced.
    fn lengths(&mut self) {
        let mut wrong = Vec::new();
        for message in &self.own.list {
            let sent: usize = message.packets.iter().flatten().map(|packet| packet.payload().len()).sum();
            if let (Some(Operation::Write), Some((_, _, len)), true) =
                (message.operation(), message.remote(), message.is_whole())
                && sent as u64 != len
            {
                wrong.push((message.frame, format!("a WRITE of {sent} bytes announces {len}")));
            }
        }
        for (frame, text) in wrong {
            self.violation(Rule::PayloadLength, frame, text);
        }
    }
}

const MSN_MASK: i64 = 0x00ff_ffff;

/// The first PSN of the requests of an end.
fn oldest(events: &[Event], end: usize) -> Option<i64> {
    events.iter().filter(|event| event.from == end && event.packet.is_request()).map(|event| event.psn).min()
}

/// The last PSN that the requests of an end take up.
fn newest(of: &Conversation, events: &[Event], end: usize) -> Option<i64> {
    let requests = events.iter().filter(|event| event.from == end && event.packet.is_request());
    requests.map(|event| event.psn + of.span(&event.packet) - 1).max()
}

fn operation_is_atomic(operation: Operation) -> bool {
    matches!(operation, Operation::CompareSwap | Operation::FetchAdd)
}

/// A PSN as it is on the wire.
pub(super) fn hex(psn: i64) -> String {
    format!("{:#08x}", psn & 0x00ff_ffff)
}
