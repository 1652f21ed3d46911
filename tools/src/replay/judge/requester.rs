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

/// What is known of the end as a requester.
#[derive(Default)]
pub(super) struct Requester {
    /// The next PSN; known from the start, or since the first packet.
    next: Option<i64>,
    firsts: HashMap<i64, Rc<Seen>>,
    /// READs, as first PSN, PSN behind, and request.
    reads: Vec<(i64, i64, Rc<Seen>)>,
    /// The newest PSN that was acknowledged.
    acked: Option<i64>,
    /// READs and atomics that are not answered: the next PSN of their answers, and the last.
    open: VecDeque<(i64, i64)>,
    /// The newest request, and the PSN behind it.
    newest: Option<(i64, Rc<Seen>)>,
    /// A sequence error NAK that was not reacted to yet.
    asked: Option<(i64, Nanos)>,
    /// The PSN of the newest one that was: another one of it says nothing new.
    reacted: Option<i64>,
    /// What was told by RNR NAKs and not repeated yet.
    not_ready: Option<NotReady>,
    /// Repeats before the time that an RNR NAK asks for that may be the network's copies, as frame and what is to be
    /// said, and how many repeats came after it.
    early: Vec<(u64, String)>,
    waited: usize,
}

/// A wait for the receiver.
#[derive(Clone, Copy)]
struct NotReady {
    psn: i64,
    /// When the newest RNR NAK of it came, and the latest time that any of them asks for.
    told: Nanos,
    until: Nanos,
}

impl Requester {
    /// Whose first PSN is `next`, if it is known.
    pub(super) fn starting(next: Option<i64>) -> Requester {
        Requester { next, ..Requester::default() }
    }
}

impl Judge<'_> {
    pub(super) fn request_left(&mut self, event: &Event) {
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

    /// Whether a request is the first one behind a NAK that goes back, and to which PSN.
    fn restart(&mut self, event: &Event, is_repeat: bool) {
        let (packet, psn) = (&event.packet, event.psn);
        let numbers = self.of.numbers[self.side];
        let asked = self.requester.asked;
        // What the network held up says nothing of now. Without numbers it may as well be the first record of a resend.
        let is_late = |(behind, before): &(i64, Rc<Seen>)| match numbers {
            true => !packet.was_sent_behind(before),
            false => psn < *behind && !is_repeat && asked.is_some_and(|(asked, _)| psn > asked),
        };
        if self.requester.newest.as_ref().is_some_and(is_late) {
            return;
        }
        let before = self.requester.newest.replace((psn + self.of.span(packet), Rc::clone(packet)));
        let Some((asked, at)) = asked else { return };
        // What goes on was on its way, from an earlier restart maybe, and the first packet of this one may have been lost
        // before it was ever recorded. The engine reacts to a NAK at once.
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

    /// A packet is repeated: is it not too early for an RNR NAK?
    fn wait(&mut self, packet: &Seen, psn: i64) {
        // Packets behind the refused one may still have been on their way.
        if let Some(NotReady { psn: refused, told, until }) = self.requester.not_ready
            && psn == refused
        {
            let waited = packet.at.since(told);
            self.measured.rnr_wait.push(waited);
            let slack = if self.strict { Duration::ZERO } else { SLACK };
            // Earlier than the slack it may have been on its way when the NAK came.
            let is_early = packet.at + slack / 20 < until;
            if is_early && waited >= slack {
                let wait = until.since(told);
                let text = format!("PSN {} again after {waited:?}: the RNR NAK asks for {wait:?}", hex(psn));
                // Of a host that numbers its packets copies are known, and this is none.
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

    /// Who does not wait does so each time; the network delivers a packet late now and then, and nobody can tell it
    /// from one that was sent again.
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
        // What comes before the answer to a READ or an atomic says that this one is lost, and nothing else.
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
        // Nobody is held to what the network made of one packet.
        if event.copy && !self.strict {
            return;
        }
        let Requester { next, acked, asked, reacted, not_ready, .. } = &mut self.requester;
        let (psn, at) = (event.psn, event.packet.at);
        match syndrome {
            Syndrome::Nak(Nak::PsnSequenceError) => {
                // One that was overtaken names what is acknowledged by now.
                let is_stale = acked.is_some_and(|acked| psn <= acked) || *reacted == Some(psn);
                if next.is_some_and(|next| psn < next) && not_ready.is_none() && !is_stale {
                    *asked = asked.filter(|(asked, _)| *asked == psn).or(Some((psn, at)));
                }
            }
            Syndrome::RnrNak(timer) => {
                *asked = None;
                let before = not_ready.filter(|before| before.psn == psn);
                let until = (at + timer.duration()).max(before.map_or(Nanos::ZERO, |before| before.until));
                // A recorded one may not have reached it: the first, which is waited for, did.
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
        // A NAK acknowledges what is before it.
        if event.packet.is_nak() {
            *acked = (*acked).max(Some(psn - 1));
        }
    }

    /// Whether the packets of each WRITE are what its RETH announced.
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
