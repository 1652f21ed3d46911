//! An end as a responder: its ACKs, NAKs, READ responses and atomics, and its CNPs.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use ferroce::Nanos;
use ferroce::wire::{Nak, Opcode, Operation, Position, Service, Syndrome, credits};

use super::{Judge, LOOK_BACK, SLACK, goes_on, hex};
use crate::replay::conversation::{Event, wrapped};
use crate::replay::packet::Seen;
use crate::replay::rule::Rule;

/// The state of the end as a responder.
#[derive(Default)]
pub(super) struct Responder {
    expected: Option<i64>,
    /// The NAK for the gap was sent, or must not be sent.
    quiet: bool,
    /// The frame and time of a gap that needs a NAK.
    due: Option<(u64, Nanos)>,
    last_nak: Option<(i64, Rc<Seen>)>,
    /// The PSN without a receive WR.
    not_ready: Option<i64>,
    /// The newest acknowledged PSN, and the packet that acknowledged it.
    acked: Option<(i64, Rc<Seen>)>,
    /// The newest requested PSN, whether the request arrived or not.
    newest_asked: Option<i64>,
    /// A request was repeated: from then on a response may be a second one, with the MSN of either time.
    was_repeated: bool,
    /// The newest PSN with AckReq set, and its frame.
    wanted: Option<(i64, u64)>,
    /// READ requests in order of arrival, including resumed ones: first PSN, and the PSN after the last.
    reads: Vec<(i64, i64)>,
    answered: HashSet<i64>,
    /// Original values that atomics returned, by PSN.
    originals: HashMap<i64, u64>,
    /// A duplicate request that needs a response: its PSN, opcode and frame.
    duplicate: Option<(i64, Opcode, u64)>,
    /// The newest MSN, without wraps.
    newest_msn: Option<i64>,
    /// The capture has the connection's first message.
    is_start: bool,
    /// READs that end without a recorded beginning: the MSN may count them or not.
    strays: i64,
    /// It has refused a request, and its queue pair is in the error state.
    pub(super) is_dead: bool,
    last_cnp: Option<Nanos>,
}

/// More packets than are ever in flight.
pub(super) const NO_WINDOW: i64 = 1 << 16;

const MSN_MASK: i64 = 0x00ff_ffff;

impl Responder {
    /// A responder that expects the PSN `expected`, if it is known.
    pub(super) fn expecting(expected: Option<i64>) -> Responder {
        Responder { expected, ..Responder::default() }
    }

    /// Records a requested PSN, whether the request arrived or not.
    pub(super) fn asked(&mut self, psn: i64) {
        self.was_repeated |= self.newest_asked.is_some_and(|newest| psn <= newest);
        self.newest_asked = self.newest_asked.max(Some(psn));
    }
}

impl Judge<'_> {
    pub(super) fn request_came(&mut self, event: &Event) {
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
            self.responder.duplicate = Some((psn, packet.opcode, packet.frame));
        }
    }

    /// Whether a duplicate request must be answered again; not if its contents differ.
    fn must_be_answered(&self, packet: &Seen, psn: i64) -> bool {
        if !packet.opcode.is_answered_explicitly() {
            return packet.bth.ack_req();
        }
        let Some(message) = self.theirs.at(psn) else { return false };
        let Some(first) = message.packets.first().and_then(Option::as_ref) else { return false };
        match (first.extensions.reth, packet.extensions.reth) {
            _ if first.opcode != packet.opcode => false,
            (Some(first), Some(again)) => {
                let done = (psn - message.first) as u64 * u64::from(self.of.path_mtu.bytes());
                goes_on(&first, &again, done)
            }
            _ => first.extensions.atomic_eth == packet.extensions.atomic_eth,
        }
    }

    /// Checks that the last duplicate was answered by now.
    pub(super) fn settle_duplicate(&mut self) {
        if let Some((psn, opcode, frame)) = self.responder.duplicate.take()
            && self.strict
            && !self.responder.is_dead
        {
            let text = format!("{:?} at PSN {} came again and is not answered", opcode.operation(), hex(psn));
            self.violation(Rule::Duplicate, frame, text);
        }
    }

    /// Checks that the last gap has got a NAK by now.
    pub(super) fn settle_gap(&mut self) {
        if let Some((frame, _)) = self.responder.due.take()
            && self.strict
            && !self.responder.is_dead
        {
            let text =
                format!("PSN {} is missing, and no NAK tells it", hex(self.responder.expected.unwrap_or(0)));
            self.violation(Rule::NakMissing, frame, text);
        }
    }

    pub(super) fn response_left(&mut self, event: &Event) {
        let (packet, psn) = (&event.packet, event.psn);
        let is_read = packet.opcode.operation() == Operation::ReadResponse;
        let is_again = self.responder.was_repeated
            || self.responder.acked.as_ref().is_some_and(|(acked, _)| psn <= *acked);
        let began = self.theirs.at(psn).map(|message| message.operation() == Some(Operation::ReadRequest));
        self.contradicts(packet, psn);
        // A duplicate may be acknowledged with the newest PSN, and its retransmission may be missing in the capture.
        if !is_again && (self.strict || !self.asked_again) {
            self.kind(packet, psn);
        }
        if is_read && packet.ends() && began != Some(true) {
            self.responder.strays += 1;
        }
        // As for ACKs.
        if packet.is_nak() && !self.strict && self.newest_ever.is_some_and(|newest| psn > newest + NO_WINDOW)
        {
            let text = format!("a NAK for PSN {}, which was never sent", hex(psn));
            self.violation(Rule::NakPsn, packet.frame, text);
        }
        if let Some(aeth) = packet.extensions.aeth {
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
                    if told.is_some_and(|told| told as usize > self.receives) {
                        let text = format!(
                            "credit code {credit_code} where {} receives were posted in all",
                            self.receives
                        );
                        self.violation(Rule::Credits, packet.frame, text);
                    }
                    self.acknowledged(packet, psn, is_read);
                }
            }
            self.msn(packet, aeth.msn(), psn, is_again);
        } else if is_read {
            self.acknowledged(packet, psn, true);
        }
        if is_read {
            self.read_response(packet, psn);
        }
        if let Some(original) = packet.original() {
            let before = *self.responder.originals.entry(psn).or_insert(original);
            if before != original {
                let text = format!(
                    "the atomic at PSN {} returned {before:#x} before, now {original:#x}: it was carried out twice",
                    hex(psn)
                );
                self.violation(Rule::Duplicate, packet.frame, text);
            }
        }
        if let Some((asked, opcode, _)) = self.responder.duplicate
            && (!opcode.is_answered_explicitly() || psn == asked)
        {
            self.responder.duplicate = None;
        }
    }

    /// Checks that the kind of a response fits its request.
    fn kind(&mut self, packet: &Seen, psn: i64) {
        let Some(message) = self.theirs.at(psn).filter(|message| message.frame <= packet.frame) else {
            return;
        };
        // If the right response was recorded, too, this one may answer a retransmission that the capture does not have.
        // The same if its MSN counts messages before the capture. For the engine all packets are known.
        let answers = &self.of.answers[self.side];
        let is_answered = answers.original(psn).is_some() || answers.reads(psn..psn + 1).next().is_some();
        let recorded = self.theirs.ended_by(psn);
        let begins_late = packet.extensions.aeth.is_some_and(|aeth| aeth.msn() as usize > recorded);
        if !self.strict && (is_answered || begins_late) && packet.opcode.operation() == Operation::Acknowledge
        {
            return;
        }
        if let Some(request) = message.operation().filter(|request| !packet.may_answer(*request)) {
            let text = format!("{} at PSN {}, which is of a {request:?}", packet.opcode, hex(psn));
            // After its response an atomic may be acknowledged again, and the response may be missing in a capture.
            if self.strict || packet.opcode.operation() != Operation::Acknowledge {
                self.violation(Rule::AnswerKind, packet.frame, text);
            } else {
                let text =
                    format!("{text}; only an answer before it that was not recorded can account for it");
                self.lawful(Rule::AnswerKind, packet.frame, text);
            }
        }
    }

    /// Undoes a message that was refused.
    fn take_back(&mut self, psn: i64) {
        let Responder { expected, wanted, .. } = &mut self.responder;
        *expected = expected.map(|expected| expected.min(psn));
        if wanted.is_some_and(|(wanted, _)| wanted >= psn) {
            *wanted = None;
        }
    }

    fn sequence_error(&mut self, packet: &Rc<Seen>, psn: i64) {
        self.measured.naks += 1;
        let responder = &mut self.responder;
        if let Some((_, at)) = responder.due.take() {
            self.measured.nak_generation.push(packet.at.since(at));
        }
        let before = self.responder.last_nak.take().filter(|(before, _)| *before == psn);
        if self.strict {
            let expected = self.responder.expected.unwrap_or(psn);
            if before.is_some() {
                self.violation(Rule::NakOnce, packet.frame, format!("a second NAK for PSN {}", hex(psn)));
            } else if psn != expected {
                let text = format!("a NAK for PSN {}: {} is missing", hex(psn), hex(expected));
                self.violation(Rule::NakPsn, packet.frame, text);
            }
        } else if self.responder.not_ready == Some(psn) {
            let text = "a sequence error NAK behind the RNR NAK of the same PSN: rdma_rxe sends it, and a requester waits all the same";
            self.lawful(Rule::NakOnce, packet.frame, text);
        } else if let Some((_, before)) = before {
            if before.is_same_as(packet) {
                let text = "a second one to the last bit, of a sender that does not number its packets: it may be the network's copy";
                self.lawful(Rule::NakOnce, packet.frame, text);
            } else {
                self.violation(Rule::NakOnce, packet.frame, format!("a second NAK for PSN {}", hex(psn)));
            }
        } else if self.responder.acked.as_ref().is_some_and(|(acked, by)| {
            psn <= *acked
                && packet.at.since(by.at) > SLACK * 5
                && self.of.numbers[self.side]
                && packet.was_sent_behind(by)
        }) {
            let text = format!("a NAK for PSN {}, which was acknowledged before", hex(psn));
            self.violation(Rule::NakPsn, packet.frame, text);
        }
        self.responder.last_nak = Some((psn, Rc::clone(packet)));
        if !self.strict {
            self.responder.expected = Some(psn);
        }
    }

    fn acknowledged(&mut self, packet: &Rc<Seen>, psn: i64, is_read: bool) {
        if self.strict {
            let expected = self.responder.expected.unwrap_or(0);
            if psn >= expected {
                let text = format!("PSN {} is acknowledged, and {} has not come", hex(psn), hex(expected));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
            let explicit = is_read || packet.original().is_some();
            if let Some((acked, _)) = &self.responder.acked
                && psn < *acked
                && !explicit
            {
                let text = format!("PSN {} is acknowledged after {}", hex(psn), hex(*acked));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
        } else {
            // Slightly ahead, there may be packets that the capture does not have.
            if self.newest_ever.is_some_and(|newest| psn > newest + NO_WINDOW) {
                let text = format!("PSN {} is acknowledged, which was never sent", hex(psn));
                self.violation(Rule::AckPsn, packet.frame, text);
            }
            // Unrecorded requests have arrived.
            let expected = self.responder.expected.get_or_insert(psn + 1);
            *expected = (*expected).max(psn + 1);
        }
        if self.responder.acked.as_ref().is_none_or(|(acked, _)| psn > *acked) {
            self.responder.acked = Some((psn, Rc::clone(packet)));
        }
    }

    /// `is_again`: it repeats an earlier response, with the MSN of either time.
    fn msn(&mut self, packet: &Seen, msn: u32, psn: i64, is_again: bool) {
        let is_open = self.theirs.cut.is_some_and(|(cut, _)| psn >= cut);
        let is_behind = self.newest_ever.is_none_or(|newest| psn > newest);
        // The number of messages before the capture is unknown. A NAK is for a packet that was not executed.
        let is_nak = packet.is_nak();
        let newest_done = if is_nak { psn - 1 } else { psn };
        if is_open || is_behind || self.oldest_ever.is_none_or(|oldest| newest_done + 1 < oldest) {
            return;
        }
        let Some(oldest) = self.theirs.list.first().map(|message| message.first) else { return };
        let least = self.theirs.ended_by(newest_done) as i64;
        // A READ may be counted when it is validated, at the PSN of its request.
        let begun = match self.theirs.at(psn) {
            Some(message) if message.operation() == Some(Operation::ReadRequest) && psn < message.last => 1,
            _ => 0,
        };
        let mut expected = self.responder.expected.unwrap_or(psn + 1);
        if is_again && !self.strict {
            // Requests that arrived since then may have no recorded response yet.
            expected = expected.max(self.responder.newest_asked.map_or(expected, |newest| newest + 1));
        }
        let done = (self.theirs.ended_by(expected - 1) as i64).max(least + begun);
        let is_start = self.of.agreed.is_some_and(|agreed| agreed.start[1 - self.side] == wrapped(oldest));
        let counted = match self.responder.newest_msn {
            None => i64::from(msn),
            Some(newest) => {
                let far = (i64::from(msn) - newest) & MSN_MASK;
                newest + if far > MSN_MASK / 2 { far - MSN_MASK - 1 } else { far }
            }
        };
        // The first response of a connection that begins in the capture has the MSN of its message.
        let begins = self.responder.newest_msn.is_none()
            && self.theirs.orphans == 0
            && !is_again
            && (least..=done).contains(&counted)
            && counted == least + begun;
        self.responder.newest_msn = self.responder.newest_msn.max(Some(counted));
        self.responder.is_start |= self.strict || is_start || begins;
        // The number of messages before the capture, and of unanswered ones then, is unknown.
        if !self.responder.is_start {
            return;
        }
        let most = done + self.responder.strays;
        // The number of messages after an unrecorded part is unknown, and a repeated response counts them.
        let is_open = !self.strict && self.theirs.cut.is_some_and(|(cut, _)| expected > cut);
        if counted < least || counted > most && !is_open {
            let range = match least >= most {
                _ if is_open => format!("{least} or more"),
                true => least.to_string(),
                false => format!("{least} to {most}"),
            };
            let text = format!("MSN {msn} at PSN {}: must be {range}", hex(psn));
            self.violation(Rule::Msn, packet.frame, text);
        }
    }

    fn read_response(&mut self, packet: &Seen, psn: i64) {
        self.responder.answered.insert(psn);
        let Some(message) = self.theirs.at(psn) else { return };
        if message.operation() != Some(Operation::ReadRequest) {
            // FLUSH and ATOMIC WRITE are answered in this way, too.
            return;
        }
        let (first, last, len) = (message.first, message.last, message.remote().map_or(0, |(_, _, len)| len));
        let mtu = u64::from(self.of.path_mtu.bytes());
        let due = if psn == last { len - (last - first) as u64 * mtu } else { mtu };
        if packet.payload_len() as u64 != due {
            let text = format!(
                "{} with {} bytes at PSN {}: must have {due}",
                packet.opcode,
                packet.payload_len(),
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
            return; // the request of this response was not recorded
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

    pub(super) fn cnp_left(&mut self, packet: &Seen) {
        self.measured.cnps += 1;
        if packet.payload_len() != 16 || packet.payload.iter().any(|byte| *byte != 0) {
            self.violation(Rule::Cnp, packet.frame, "a CNP whose payload is not 16 zeros");
        }
        if !packet.bth.becn() {
            self.violation(Rule::Cnp, packet.frame, "a CNP without the BECN bit");
        }
        if let Some(last) = self.responder.last_cnp.replace(packet.at) {
            self.measured.cnp_interval.push(packet.at.since(last));
        }
    }

    /// Checks that every request with AckReq and every READ was answered.
    pub(super) fn all_answered(&mut self) {
        if let Some((wanted, frame)) = self.responder.wanted
            && self.responder.acked.as_ref().is_none_or(|(acked, _)| *acked < wanted)
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
}
