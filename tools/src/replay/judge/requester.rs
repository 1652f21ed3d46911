//! An end as a requester: its requests, and its reaction to NAKs.

use std::collections::{HashMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use ferroce::Nanos;
use ferroce::wire::{Nak, Opcode, Operation, Service, Successor, Syndrome};

use super::{Judge, LOOK_BACK, SLACK, goes_on, hex};
use crate::replay::conversation::Event;
use crate::replay::packet::Seen;
use crate::replay::rule::Rule;

/// The state of the end as a requester.
#[derive(Default)]
pub(super) struct Requester {
    /// The next PSN; known from the start, or since the first packet.
    next: Option<i64>,
    firsts: HashMap<i64, Rc<Seen>>,
    /// READs: first PSN, PSN after the last, and request.
    reads: Vec<(i64, i64, Rc<Seen>)>,
    /// The newest acknowledged PSN.
    acked: Option<i64>,
    /// Unanswered READs and atomics: the next PSN of their responses, and the last.
    open: VecDeque<(i64, i64)>,
    /// The newest request, and the PSN after it.
    newest: Option<(i64, Rc<Seen>)>,
    /// A sequence error NAK without a reaction so far.
    asked: Option<(i64, Nanos)>,
    /// The PSN of the last NAK with a reaction: a repetition of it is ignored.
    reacted: Option<i64>,
    /// The RNR NAK that has not led to a retransmission yet.
    not_ready: Option<NotReady>,
    /// Retransmissions before the end of an RNR wait that may be copies made by the network (frame and text), and the
    /// number of later retransmissions.
    early: Vec<(u64, String)>,
    waited: usize,
}

/// A wait for the receiver.
#[derive(Clone, Copy)]
struct NotReady {
    psn: i64,
    /// The time of the newest RNR NAK, and the latest end of all requested waits.
    told: Nanos,
    until: Nanos,
}

impl Requester {
    /// A requester whose first PSN is `next`, if it is known.
    pub(super) fn starting(next: Option<i64>) -> Requester {
        Requester { next, ..Requester::default() }
    }
}

impl Judge<'_> {
    pub(super) fn request_left(&mut self, event: &Event) {
        let (packet, psn) = (&event.packet, event.psn);
        if self.of.service == Service::Ud {
            return; // its PSNs count the packets to all its peers, and receivers ignore them
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
        self.restart(event, is_repeat);
        if is_repeat {
            self.measured.repeats += 1;
            self.wait(packet, psn);
        }
        if let Some(first) = first {
            let same_work = first.opcode == packet.opcode
                && first.carries_the_same_as(packet)
                && first.extensions.reth.map(|r| (r.va(), r.rkey()))
                    == packet.extensions.reth.map(|r| (r.va(), r.rkey()))
                && first.immediate() == packet.immediate()
                && first.invalidates() == packet.invalidates()
                && first.extensions.feth == packet.extensions.feth
                && first.extensions.atomic_eth == packet.extensions.atomic_eth
                && match (first.extensions.reth, packet.extensions.reth) {
                    // A READ may request less.
                    (Some(first), Some(now)) if is_read => now.length() <= first.length(),
                    (first, now) => first.map(|r| r.length()) == now.map(|r| r.length()),
                };
            // An acknowledged request is not retransmitted, so this is another connection with the same numbers.
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
            let (before, now) = (read.extensions.reth, packet.extensions.reth);
            let mtu = u64::from(self.of.path_mtu.bytes());
            match (is_read, before, now) {
                (true, Some(before), Some(now)) => {
                    let done = (psn - start) as u64 * mtu;
                    if !goes_on(&before, &now, done) {
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
            if packet.opcode.is_answered_explicitly() {
                self.requester.open.push_back((psn, psn + span - 1));
            }
            let next = self.requester.next.unwrap_or(psn).max(psn + span);
            self.requester.next = Some(next);
        }
    }

    /// Checks that a new packet may follow the previous one.
    fn order(&mut self, packet: &Seen, psn: i64) {
        let before = self.requester.firsts.get(&(psn - 1)).map(|before| before.opcode.successor());
        let behind_read = self.requester.reads.last().is_some_and(|(_, end, _)| *end == psn);
        let expected = if behind_read { Some(Successor::NewMessage) } else { before };
        if expected.is_some_and(|expected| !packet.opcode.may_come(expected)) {
            let text = format!("{} at PSN {} does not go on with the packet before", packet.opcode, hex(psn));
            self.violation(Rule::OpcodeOrder, packet.frame, text);
        }
    }

    /// Recognizes the first request of a restart after a NAK, and checks its PSN.
    fn restart(&mut self, event: &Event, is_repeat: bool) {
        let (packet, psn) = (&event.packet, event.psn);
        let numbers = self.of.numbers[self.side];
        let asked = self.requester.asked;
        // A packet that the network delayed is ignored. Without numbers it may also be the first recorded packet of a
        // restart.
        let is_late = |(behind, before): &(i64, Rc<Seen>)| match numbers {
            true => !packet.was_sent_behind(before),
            false => psn < *behind && !is_repeat && asked.is_some_and(|(asked, _)| psn > asked),
        };
        if self.requester.newest.as_ref().is_some_and(is_late) {
            return;
        }
        let before = self.requester.newest.replace((psn + self.of.span(packet), Rc::clone(packet)));
        let Some((asked, at)) = asked else { return };
        // A packet that continues may have been in flight, possibly from an earlier restart. The first packet of this
        // restart may have been lost before the recording point. The engine reacts to a NAK at once.
        let goes_back = before.as_ref().is_some_and(|(behind, _)| psn < *behind && !event.twin);
        if !(psn <= asked || goes_back || self.strict && is_repeat) {
            return;
        }
        self.requester.asked = None;
        self.requester.reacted = Some(asked);
        let sent = before.filter(|_| numbers).and_then(|(_, before)| packet.sent_since(&before));
        if psn > asked && !self.strict && sent.is_none_or(|sent| i64::from(sent) > psn - asked) {
            self.measured.restarts_unseen += 1;
            return;
        }
        self.measured.nak_reaction.push(packet.at.since(at));
        self.measured.go_back_n.1 += 1;
        // An earlier READ or atomic, whose response was lost or out of order, is retransmitted first.
        let first = self.requester.firsts.get(&psn);
        let is_unanswered = first.is_none_or(|first| first.opcode.is_answered_explicitly());
        if psn == asked {
            self.measured.go_back_n.0 += 1;
        } else if self.strict && !(psn < asked && is_unanswered) {
            let text = format!("PSN {} is repeated first: the NAK names {}", hex(psn), hex(asked));
            self.violation(Rule::GoBackN, packet.frame, text);
        }
    }

    /// Checks that a retransmission is not too early after an RNR NAK.
    fn wait(&mut self, packet: &Seen, psn: i64) {
        // Only the refused packet counts: those after it may have been in flight.
        if let Some(NotReady { psn: refused, told, until }) = self.requester.not_ready
            && psn == refused
        {
            let waited = packet.at.since(told);
            self.measured.rnr_wait.push(waited);
            let slack = if self.strict { Duration::ZERO } else { SLACK };
            // Within the slack, it may have been in flight when the NAK arrived.
            let is_early = packet.at + slack / 20 < until;
            if is_early && waited >= slack {
                let wait = until.since(told);
                let text = format!("PSN {} again after {waited:?}: the RNR NAK asks for {wait:?}", hex(psn));
                // If the host numbers its packets, copies are known, and this is none.
                let first = self.requester.firsts.get(&psn);
                if first.is_some_and(|first| first.is_same_as(packet)) && !self.strict {
                    self.requester.early.push((packet.frame, text));
                } else {
                    self.violation(Rule::RnrWait, packet.frame, text);
                }
            } else if !is_early {
                self.requester.waited += 1;
            }
            if self.strict || !is_early {
                self.requester.not_ready = None;
            }
        }
    }

    /// Decides whether early retransmissions are violations: an end that does not wait never does. The network
    /// occasionally delays a packet, which can't be distinguished from a retransmission.
    pub(super) fn settle_waits(&mut self) {
        let (early, waited) = (std::mem::take(&mut self.requester.early), self.requester.waited);
        let is_habit = early.len() > waited;
        for (frame, text) in early {
            match is_habit {
                true => self.violation(Rule::RnrWait, frame, text),
                false => self.lawful(
                    Rule::RnrWait,
                    frame,
                    format!("{text}; it may have been on its way for so long"),
                ),
            }
        }
    }

    pub(super) fn response_came(&mut self, event: &Event) {
        // A packet ahead of the response to a READ or an atomic only shows that this response is lost.
        if let Some((next, last)) = self.requester.open.front_mut().filter(|_| self.strict) {
            let is_answer = event.packet.original().is_some()
                || event.packet.opcode.operation() == Operation::ReadResponse && !event.packet.is_nak();
            if event.psn > *next || (event.psn == *next && !is_answer && !event.packet.is_nak()) {
                return;
            }
            if event.psn == *next && is_answer {
                *next += 1;
                if *next > *last {
                    self.requester.open.pop_front();
                }
            }
        }
        let Some(syndrome) = event.packet.extensions.aeth.and_then(|aeth| aeth.syndrome()) else { return };
        // A copy made by the network requires no reaction.
        if event.copy && !self.strict {
            return;
        }
        let Requester { next, acked, asked, reacted, not_ready, .. } = &mut self.requester;
        let (psn, at) = (event.psn, event.packet.at);
        match syndrome {
            Syndrome::Nak(Nak::PsnSequenceError) => {
                // A NAK that was overtaken names a PSN that is acknowledged by now.
                let is_stale = acked.is_some_and(|acked| psn <= acked) || *reacted == Some(psn);
                if next.is_some_and(|next| psn < next) && not_ready.is_none() && !is_stale {
                    *asked = asked.filter(|(asked, _)| *asked == psn).or(Some((psn, at)));
                }
            }
            Syndrome::RnrNak(timer) => {
                *asked = None;
                let before = not_ready.filter(|before| before.psn == psn);
                let until = (at + timer.duration()).max(before.map_or(Nanos::ZERO, |before| before.until));
                // A recorded RNR NAK may not have arrived; the first one, whose wait is in progress, did.
                if !self.strict && before.is_some_and(|before| at < before.until) {
                    return;
                }
                if acked.is_none_or(|acked| psn > acked) {
                    *not_ready = Some(NotReady { psn, told: at, until });
                }
            }
            Syndrome::Ack { .. } => {
                *asked = asked.filter(|(asked, _)| *asked > psn);
                *acked = (*acked).max(Some(psn));
            }
            Syndrome::Nak(_) => {}
        }
        // A NAK acknowledges all PSNs before its own.
        if event.packet.is_nak() {
            *acked = (*acked).max(Some(psn - 1));
        }
    }

    /// Checks that the packets of each WRITE have the length of its RETH.
    pub(super) fn lengths(&mut self) {
        let mut wrong = Vec::new();
        for message in &self.own.list {
            let sent: usize = message.packets.iter().flatten().map(|packet| packet.payload_len()).sum();
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
