//! Compares the engine's packets with the recorded ones: which parts must be equal, and which may differ.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use ferroce::wire::{Nak, Operation, Service, Syndrome, credits};

use super::conversation::{Conversation, Event};
use super::judge::hex;
use super::message::{Message, Messages};
use super::packet::Seen;
use super::play::Played;
use super::rule::{Finding, Rule, Weight};

/// The differences between the recorded end and the engine in its place.
pub(super) fn compare(of: &Conversation, played: &Played) -> Vec<Finding> {
    let mut comparison = Comparison { of, ports: BTreeMap::new(), findings: Vec::new() };
    fn side(events: &[Event], end: usize) -> Vec<&Event> {
        events.iter().filter(|event| event.from == end && !event.copy).collect()
    }
    let end = played.place.end;
    let (recorded, engine) = (side(&of.events, end), side(&played.events, end));
    comparison.requests(&recorded, &engine, played);
    // The engine can't answer requests that it did not get.
    let came = Messages::among(of, &played.events, 1 - end);
    let asked = |event: &&Event| came.at(event.psn).is_some();
    let answered: Vec<&Event> =
        recorded.into_iter().filter(|e| e.packet.is_whole_response() && asked(e)).collect();
    comparison.responses(&answered, &engine);
    // One finding per port: all packets of a queue pair, or of a socket, have the same one.
    for (port, frame) in std::mem::take(&mut comparison.ports) {
        comparison.lawful(Rule::SourcePort, frame, format!("the UDP source port {port} is another here"));
    }
    comparison.findings
}

struct Comparison<'a> {
    of: &'a Conversation,
    /// Recorded UDP source ports that the engine does not use, with the first frame of each.
    ports: BTreeMap<u16, u64>,
    findings: Vec<Finding>,
}

impl Comparison<'_> {
    fn violation(&mut self, rule: Rule, frame: u64, text: impl Into<String>) {
        self.findings.push(Finding { rule, weight: Weight::Violation, frame, text: text.into() });
    }

    fn lawful(&mut self, rule: Rule, frame: u64, text: impl Into<String>) {
        self.findings.push(Finding { rule, weight: Weight::Lawful, frame, text: text.into() });
    }

    fn requests(&mut self, recorded: &[&Event], engine: &[&Event], played: &Played) {
        let (theirs, ours) = (self.firsts(recorded), self.firsts(engine));
        let known = Messages::posted(self.of, played.place.end);
        for (psn, there) in &theirs {
            // The first recorded packet of a READ may be a resumed one.
            let is_start = |message: &Message| {
                message.operation() != Some(Operation::ReadRequest) || message.first == *psn
            };
            let is_known = self.of.service == Service::Ud || known.at(*psn).is_some_and(is_start);
            if !is_known {
                continue; // before the first complete message, or after the last one
            }
            match ours.get(psn) {
                Some(here) => self.request(there, here),
                None if played.given_up.is_some_and(|given_up| *psn >= given_up) => {}
                None => {
                    let text = format!("{} at PSN {} is not sent", there.opcode, hex(*psn));
                    self.violation(Rule::Content, there.frame, text);
                }
            }
        }
        if let Some((psn, here)) =
            ours.iter().find(|(psn, _)| !theirs.contains_key(psn) && known.at(**psn).is_none())
        {
            let text = format!("{} at PSN {} was not recorded", here.opcode, hex(*psn));
            self.violation(Rule::Content, here.frame, text);
        }
        let repeats = |events: &[&Event], firsts: &BTreeMap<i64, &Seen>| {
            let whole = events.iter().filter(|event| event.packet.is_whole_request());
            whole.count() - firsts.len()
        };
        let (there, here) = (repeats(recorded, &theirs), repeats(engine, &ours));
        if there != here && self.of.service == Service::Rc {
            let frame = recorded.first().map_or(0, |event| event.packet.frame);
            let text = format!(
                "{there} packets were repeated, here {here}: timers, and what was under way, are each end's own"
            );
            self.lawful(Rule::Repeats, frame, text);
        }
    }

    /// The first transmissions, by PSN; datagrams by number, since their PSNs also count packets to other peers.
    fn firsts<'e>(&self, events: &[&'e Event]) -> BTreeMap<i64, &'e Seen> {
        let mut firsts = BTreeMap::new();
        let mut reads: Vec<(i64, i64)> = Vec::new();
        let requests = events.iter().filter(|e| e.packet.is_whole_request());
        for (number, event) in requests.enumerate() {
            let key = if self.of.service == Service::Ud { number as i64 } else { event.psn };
            let span = self.of.span(&event.packet);
            // A resumed READ is a retransmission.
            if reads.iter().rev().take(256).any(|(start, end)| key > *start && key < *end) {
                continue;
            }
            if span > 1 {
                reads.push((key, key + span));
            }
            firsts.entry(key).or_insert(&*event.packet);
        }
        firsts
    }

    fn request(&mut self, there: &Seen, here: &Seen) {
        let frame = there.frame;
        let same = there.opcode == here.opcode
            && there.extensions.reth == here.extensions.reth
            && there.extensions.atomic_eth == here.extensions.atomic_eth
            && there.extensions.feth == here.extensions.feth
            && there.immediate() == here.immediate()
            && there.invalidates() == here.invalidates()
            && there.extensions.deth.map(|deth| deth.qkey()) == here.extensions.deth.map(|deth| deth.qkey())
            && there.bth.dest_qpn() == here.bth.dest_qpn()
            && (there.bth.solicited() == here.bth.solicited() || !there.may_solicit());
        if !same {
            let text = format!(
                "{} at PSN {} has other headers than the recorded {}",
                here.opcode,
                hex(here.psn().value().into()),
                there.opcode
            );
            self.violation(Rule::Content, frame, text);
        } else if !there.carries_the_same_as(here) {
            let text =
                format!("{} at PSN {} has another payload", here.opcode, hex(here.psn().value().into()));
            self.violation(Rule::Content, frame, text);
        }
        if there.bth.pad() != here.bth.pad() {
            let text = format!("pad {}: was {}", here.bth.pad(), there.bth.pad());
            self.violation(Rule::Pad, frame, text);
        }
        if there.bth.ack_req() != here.bth.ack_req() {
            let asks = |packet: &Seen| if packet.bth.ack_req() { "asks" } else { "does not ask" };
            let text = format!("the recorded packet {} for an ACK, ferroce's {}", asks(there), asks(here));
            self.lawful(Rule::AckRequest, frame, text);
        }
        self.choices(there, here);
    }

    /// Fields that an implementation may choose.
    fn choices(&mut self, there: &Seen, here: &Seen) {
        if there.bth.mig_req() != here.bth.mig_req() {
            let value = u8::from(there.bth.mig_req());
            self.lawful(Rule::MigrationRequest, there.frame, format!("MigReq was {value}"));
        }
        if let Some(port) = there.network.source_port
            && here.network.source_port != Some(port)
        {
            let first = self.ports.entry(port).or_insert(there.frame);
            *first = there.frame.min(*first);
        }
    }

    fn responses(&mut self, recorded: &[&Event], engine: &[&Event]) {
        self.refusals(recorded, engine);
        let mut there: HashMap<i64, Vec<&Seen>> = HashMap::new();
        let mut known = HashSet::new();
        fn answers<'e>(events: &[&'e Event]) -> Vec<&'e Event> {
            let answers = events.iter().filter(|event| event.packet.is_whole_response());
            answers.copied().collect()
        }
        let (recorded, engine) = (answers(recorded), answers(engine));
        for event in &recorded {
            // A repetition of the same response is skipped.
            let packet = &event.packet;
            if known.insert((event.psn, packet.opcode.byte(), packet.original(), packet.payload_digest())) {
                there.entry(event.psn).or_default().push(packet);
            }
        }
        for event in &engine {
            let here = &event.packet;
            let Some(candidates) = there.get(&event.psn) else { continue };
            self.response(candidates, here, event.psn);
        }
        let count = |events: &[&Event]| {
            let acks =
                events.iter().filter(|event| event.packet.opcode.operation() == Operation::Acknowledge);
            acks.filter(|event| !event.packet.is_nak()).count()
        };
        let (was, is) = (count(&recorded), count(&engine));
        if was != is && was > 0 {
            let frame = recorded.first().map_or(0, |event| event.packet.frame);
            self.lawful(Rule::AckCoalescing, frame, format!("{was} ACKs were recorded, here are {is}"));
        }
    }

    fn response(&mut self, candidates: &[&Seen], here: &Seen, psn: i64) {
        let operation = here.opcode.operation();
        let alike: Vec<&&Seen> =
            candidates.iter().filter(|there| there.opcode.operation() == operation).collect();
        let Some(first) = alike.first() else { return };
        match operation {
            // A response of another length is a violation that the judge reports.
            Operation::ReadResponse
                if alike.iter().all(|there| there.payload_len() != here.payload_len()) => {}
            Operation::ReadResponse => {
                if !alike.iter().any(|there| there.carries_the_same_as(here)) {
                    let text = format!("the READ response of PSN {} has another payload", hex(psn));
                    self.violation(Rule::Data, first.frame, text);
                } else if !alike.iter().any(|there| there.opcode == here.opcode) {
                    let text = format!(
                        "{} at PSN {}, recorded as {}: where the READ was taken up again",
                        here.opcode,
                        hex(psn),
                        first.opcode
                    );
                    self.lawful(Rule::ReadShape, first.frame, text);
                }
            }
            Operation::AtomicAcknowledge
                if !alike.iter().any(|there| there.original() == here.original()) =>
            {
                let text = format!(
                    "the atomic at PSN {} returns {:#x?}, recorded {:#x?}",
                    hex(psn),
                    here.original(),
                    first.original()
                );
                self.violation(Rule::Data, first.frame, text);
            }
            _ => {}
        }
        let code = |packet: &Seen| match packet.extensions.aeth?.syndrome()? {
            Syndrome::Ack { credit_code } => Some(credit_code),
            _ => None,
        };
        if let (Some(was), Some(is)) = (code(first), code(here))
            && was != is
        {
            let told = |code: u8| credits(code).map_or("no limit".to_owned(), |credits| credits.to_string());
            self.lawful(
                Rule::CreditCode,
                first.frame,
                format!("credits were {}, here {}", told(was), told(is)),
            );
        }
        self.choices(first, here);
    }

    /// Compares the NAKs one by one.
    fn refusals(&mut self, recorded: &[&Event], engine: &[&Event]) {
        let naks = |events: &[&Event]| -> Vec<(i64, u8, u64)> {
            let responses = events.iter().filter(|event| event.packet.is_nak() && event.packet.icrc_is_right);
            let byte = |event: &Event| event.packet.extensions.aeth.map_or(0, |aeth| aeth.syndrome_byte());
            responses.map(|event| (event.psn, byte(event), event.packet.frame)).collect()
        };
        let mut there = naks(recorded);
        let mut here = Naks::new();
        for (psn, byte, frame) in naks(engine) {
            here.entry(psn).or_default().push_back((byte, frame));
        }
        there.retain(|(psn, byte, _)| take(&mut here, *psn, |other| other == *byte).is_none());
        let of = self.of;
        let asker = recorded.first().map_or(0, |event| 1 - event.from);
        let message_of = |psn: i64| of.messages[asker].at(psn).map(|message| message.first..=message.last);
        for (psn, byte, frame) in there {
            let was = name(byte);
            // Address and rkey are checked with each packet.
            let elsewhere = message_of(psn).filter(|_| byte == 0x62).and_then(|psns| {
                let mut refusals = here.range(psns);
                refusals.find(|(_, naks)| naks.iter().any(|(is, _)| *is == byte)).map(|(psn, _)| *psn)
            });
            if let Some(elsewhere) = elsewhere.filter(|psn| take(&mut here, *psn, |is| is == byte).is_some())
            {
                let text = format!(
                    "{was} for PSN {}, here for PSN {} of the same message",
                    hex(psn),
                    hex(elsewhere)
                );
                self.lawful(Rule::Refusal, frame, text);
                continue;
            }
            match take(&mut here, psn, |other| ![other, byte].contains(&0x60)) {
                Some((is, _)) if [0x61, 0x62, 0x63].contains(&byte) && is == 0x61 => {
                    let text = format!(
                        "refused with {} where {was} was recorded: a message longer than its receive is an invalid request",
                        name(is)
                    );
                    self.lawful(Rule::NakCode, frame, text);
                }
                Some((is, _)) => {
                    let text = format!("PSN {} is answered with {}, recorded {was}", hex(psn), name(is));
                    self.violation(Rule::Refusal, frame, text);
                }
                // The judge checks NAKs of gaps, by the packets that reached the engine.
                None if byte == 0x60 => {
                    let text =
                        format!("{was} for PSN {} was recorded: here the packets before it came", hex(psn));
                    self.lawful(Rule::Repeats, frame, text);
                }
                None if byte >> 5 == 1 => {
                    let text = format!(
                        "{was} for PSN {} was recorded: here the receive was posted by then",
                        hex(psn)
                    );
                    self.lawful(Rule::Receives, frame, text);
                }
                None => self.violation(
                    Rule::Refusal,
                    frame,
                    format!("{was} for PSN {} was recorded, here is none", hex(psn)),
                ),
            }
        }
        let newest_done = recorded.iter().filter(|event| !event.packet.is_nak()).map(|event| event.psn).max();
        let refused: HashSet<i64> =
            recorded.iter().filter(|event| event.packet.is_nak()).map(|event| event.psn).collect();
        let all = here
            .into_iter()
            .flat_map(|(psn, naks)| naks.into_iter().map(move |(byte, frame)| (psn, byte, frame)));
        for (psn, byte, frame) in all {
            let (told, is) = (format!("{} for PSN {} was not recorded", name(byte), hex(psn)), byte >> 5);
            let is_open = newest_done.is_none_or(|newest| newest < psn);
            match is {
                // The recorded end's response may come after the end of the capture.
                3 if is_open => {}
                // The recorded end had no receive WR either, or its response was not recorded.
                1 if is_open || refused.contains(&psn) => {
                    self.lawful(Rule::Receives, frame, format!("{told}: here the receive was posted later"));
                }
                3 if byte == 0x60 => {}
                _ => self.violation(Rule::Refusal, frame, told),
            }
        }
    }
}

/// The NAKs of an end, by PSN: syndrome and frame.
type Naks = BTreeMap<i64, VecDeque<(u8, u64)>>;

/// Removes a NAK of a PSN whose syndrome fits.
fn take(naks: &mut Naks, psn: i64, fits: impl Fn(u8) -> bool) -> Option<(u8, u64)> {
    let of_psn = naks.get_mut(&psn)?;
    of_psn.remove(of_psn.iter().position(|(syndrome, _)| fits(*syndrome))?)
}

fn name(syndrome: u8) -> String {
    match Syndrome::from_byte(syndrome) {
        Some(Syndrome::RnrNak(timer)) => format!("an RNR NAK of {:?}", timer.duration()),
        Some(Syndrome::Nak(nak)) => match nak {
            Nak::PsnSequenceError => "a sequence error NAK".into(),
            Nak::InvalidRequest => "NAK invalid request".into(),
            Nak::RemoteAccessError => "NAK remote access error".into(),
            Nak::RemoteOperationalError => "NAK remote operational error".into(),
            Nak::InvalidRdRequest => "NAK invalid RD request".into(),
        },
        _ => format!("syndrome {syndrome:#04x}"),
    }
}
