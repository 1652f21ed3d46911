//! Statements of a responder that it must not contradict later. They are used if each request was recorded once and in
//! order: then nothing was retransmitted, unless the capture began during a retransmission.

use ferroce::wire::{Nak, Service, Syndrome};

use super::responder::NO_WINDOW;
use super::{Judge, hex};
use crate::replay::conversation::{Conversation, Event, wrapped};
use crate::replay::packet::Seen;
use crate::replay::rule::Rule;

/// The responses of an end so far.
pub(super) struct Statements {
    /// The newest PSN of the other end's requests so far, and the number of requests still to come.
    newest: Option<i64>,
    left: usize,
    /// The newest MSN, its PSN and its frame.
    msn: Option<(u32, i64, u64)>,
    /// A packet requested again: its PSN, the frame and kind of the request, and the newest PSN sent by then.
    asked: Option<(i64, u64, &'static str, i64)>,
    /// A PSN that was refused, and the frame.
    refused: Option<(i64, u64)>,
}

/// A recorder does not lose this many requests without a gap, whether repeated or new.
const MANY: i64 = 4;

impl Statements {
    /// `None` if the requests of the other end were not all recorded, or were not sent once and in order.
    pub(super) fn of(conversation: &Conversation, events: &[Event], end: usize) -> Option<Statements> {
        let mut next = None;
        let mut left = 0;
        for event in events.iter().filter(|event| event.from != end && event.packet.is_request()) {
            let is_next = next.is_none_or(|next| next == event.psn);
            if !is_next || !event.packet.icrc_is_right {
                return None;
            }
            next = Some(event.psn + conversation.span(&event.packet));
            left += 1;
        }
        let is_known = left > 0 && conversation.service == Service::Rc && conversation.knows_path_mtu();
        is_known.then_some(Statements { newest: None, left, msn: None, asked: None, refused: None })
    }
}

impl Judge<'_> {
    /// Records a request of the other end.
    pub(super) fn hear(&mut self, event: &Event) {
        let newest = event.psn + self.of.span(&event.packet) - 1;
        if let Some(statements) = &mut self.statements {
            statements.newest = statements.newest.max(Some(newest));
            statements.left = statements.left.saturating_sub(1);
        }
    }

    /// Checks whether a response contradicts earlier ones.
    pub(super) fn contradicts(&mut self, packet: &Seen, psn: i64) {
        let newest_ever = self.newest_ever;
        let Some(oldest) = self.oldest_ever.filter(|oldest| psn >= *oldest) else { return };
        // All recorded requests may be a retransmission of what was sent before the capture, but not of more than a
        // window.
        let start = self.of.agreed.map(|agreed| agreed.start[1 - self.side]);
        let is_sure = |from: i64| start == Some(wrapped(oldest)) || from - oldest > NO_WINDOW;
        let Some(statements) = &mut self.statements else { return };
        let syndrome = packet.extensions.aeth.and_then(|aeth| aeth.syndrome());
        let mut wrong = None;
        // A NAK acknowledges all PSNs before its own, and a sequence error shows that a later packet has arrived.
        let ahead = newest_ever.map_or(0, |newest| psn - newest);
        let is_ahead = (1..=NO_WINDOW).contains(&ahead) && statements.left as i64 >= MANY;
        match syndrome {
            _ if is_ahead => {
                let (rule, what) = match packet.is_nak() {
                    true => (Rule::NakPsn, "answered with a NAK"),
                    false => (Rule::AckPsn, "acknowledged"),
                };
                let text = format!("PSN {} is {what}, and requests before it are still to be sent", hex(psn));
                wrong = Some((rule, text, is_sure(statements.newest.unwrap_or(oldest))));
            }
            Some(Syndrome::Nak(Nak::PsnSequenceError)) => {
                statements.asked =
                    statements.newest.map(|sent| (psn, packet.frame, "a sequence error NAK", sent));
            }
            Some(Syndrome::RnrNak(_)) => {
                statements.asked = statements.newest.map(|sent| (psn, packet.frame, "an RNR NAK", sent));
            }
            Some(Syndrome::Nak(_)) => statements.refused = Some((psn, packet.frame)),
            // Also the READ responses without an AETH.
            Some(Syndrome::Ack { .. }) | None => {
                if let Some((refused, frame)) = statements.refused.filter(|(refused, _)| psn >= *refused) {
                    statements.refused = None;
                    let text = format!(
                        "PSN {} is acknowledged behind the refusal of PSN {} in frame {frame}: a queue pair that refused is \
                         in error",
                        hex(psn),
                        hex(refused)
                    );
                    // However often the requests were sent.
                    wrong = Some((Rule::AckPsn, text, true));
                } else if let Some((asked, frame, how, sent)) = statements.asked
                    && psn >= sent
                    && sent - asked + 1 >= MANY
                {
                    statements.asked = None;
                    let text = format!(
                        "{how} for PSN {} in frame {frame}, and PSN {} is acknowledged without anything sent again",
                        hex(asked),
                        hex(psn)
                    );
                    wrong = Some((Rule::NakPsn, text, is_sure(asked)));
                }
            }
        }
        if let (None, Some(aeth)) = (&wrong, packet.extensions.aeth) {
            let msn = aeth.msn();
            match statements.msn {
                Some((before, of, frame)) if is_less(msn, before) => {
                    if psn > of {
                        let text = format!(
                            "MSN {msn} at PSN {} behind {before} at PSN {} in frame {frame}, and it never goes back",
                            hex(psn),
                            hex(of)
                        );
                        wrong = Some((Rule::Msn, text, is_sure(of)));
                    }
                }
                _ => statements.msn = Some((msn, psn, packet.frame)),
            }
        }
        match wrong {
            Some((rule, text, true)) => self.violation(rule, packet.frame, text),
            Some((rule, text, false)) => {
                let text = format!("{text}; only what was sent before the capture began can account for it");
                self.lawful(rule, packet.frame, text);
            }
            None => {}
        }
    }
}

/// Compares two 24-bit MSNs with wraps.
fn is_less(msn: u32, than: u32) -> bool {
    (than.wrapping_sub(msn) & 0x00ff_ffff).wrapping_sub(1) < 0x007f_ffff
}
