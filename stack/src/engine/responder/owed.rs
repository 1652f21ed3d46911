//! When an owed ACK is sent. A peer that requests one gets it without sending more (docs/protocol.md §5); the rest is the
//! responder's choice.

use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::Psn;

/// How long an ACK is delayed after a response, and twice that if requests are sent in every poll: some round trips of a
/// fast port. A peer's timeout is usually longer (4 µs·2ⁿ, and n is 14 by default); a peer with a shorter one retransmits
/// occasionally.
const PATIENCE: Duration = Duration::from_micros(50);
/// This many packets are acknowledged without delay.
const PACKETS_MAX: u32 = 16;
/// The least and the most ACKs sent without delay after the peer had to wait for a delayed one.
const PROMPT_MIN: u16 = 16;
const PROMPT_MAX: u16 = 1024;

/// The ACK of a queue pair.
#[derive(Clone, Copy)]
pub(crate) struct OwedAck {
    /// Since when it is owed; never if it is not.
    since: Nanos,
    /// Since which poll.
    since_poll: u64,
    /// The poll in which a request was last sent.
    requested: u64,
    /// The expected PSN when the last ACK was sent.
    acknowledged: Psn,
    /// When it was last requested.
    asked: Nanos,
    /// This many ACKs are not delayed, because the peer has waited for one.
    prompt: u16,
    /// The number used last time.
    penalty: u16,
}

impl Default for OwedAck {
    fn default() -> OwedAck {
        OwedAck {
            since: Nanos::NEVER,
            since_poll: 0,
            requested: 0,
            acknowledged: Psn::default(),
            asked: Nanos::ZERO,
            prompt: 0,
            penalty: 0,
        }
    }
}

impl OwedAck {
    /// The peer requests an ACK.
    pub(crate) fn owe(&mut self, now: Nanos, poll: u64) {
        self.asked = now;
        self.begin(now, poll);
    }

    fn begin(&mut self, now: Nanos, poll: u64) {
        if !self.is_owed() {
            (self.since, self.since_poll) = (now, poll);
        }
    }

    /// The peer has retransmitted `psn`, which was executed: it waits for its ACK. This does not count if the packet
    /// requests an ACK for the first time.
    pub(crate) fn owe_again(&mut self, now: Nanos, poll: u64, psn: Psn) {
        let had_asked = self.is_owed() || psn.distance(self.acknowledged) < 0;
        self.begin(now, poll);
        if had_asked && self.prompt == 0 {
            self.be_prompt();
        }
    }

    fn be_prompt(&mut self) {
        self.penalty = (2 * self.penalty).clamp(PROMPT_MIN, PROMPT_MAX);
        self.prompt = self.penalty;
    }

    pub(crate) fn is_owed(&self) -> bool {
        self.since != Nanos::NEVER
    }

    /// It is no longer owed.
    pub(crate) fn forget(&mut self) {
        self.since = Nanos::NEVER;
    }

    /// A request was sent.
    pub(crate) fn note_request(&mut self, poll: u64) {
        self.requested = poll;
    }

    /// Whether it is sent before the requests of this poll, because they have delayed it long enough; `expected` is the
    /// next expected PSN.
    pub(crate) fn is_overdue(&self, now: Nanos, poll: u64, expected: Psn) -> bool {
        let late = |until: Nanos| now >= until + PATIENCE;
        self.is_owed() && poll - self.since_poll >= 2 && self.kept_until(expected).is_none_or(late)
    }

    /// Whether it is sent in a poll that has nothing else to send for this queue pair.
    pub(crate) fn is_due(&self, now: Nanos, poll: u64, expected: Psn) -> bool {
        self.is_owed()
            && poll > self.since_poll
            && self.requested != poll
            && self.kept_until(expected).is_none_or(|until| now >= until)
    }

    /// Until when it is delayed: for a while after a response to the request that it acknowledges, which acknowledges it
    /// too, and is usually followed by more.
    pub(crate) fn kept_until(&self, expected: Psn) -> Option<Nanos> {
        let packets = expected.distance(self.acknowledged) as u32;
        let is_kept = self.is_owed() && self.requested > self.since_poll;
        (is_kept && self.prompt == 0 && packets < PACKETS_MAX).then(|| self.since + PATIENCE)
    }

    /// It is sent.
    pub(crate) fn pay(&mut self, now: Nanos, expected: Psn) {
        // In a hurry there is nothing to learn.
        let kept_back = now != Nanos::NEVER && self.kept_until(expected).is_some_and(|until| now >= until);
        // A peer that has requested one again since does not wait.
        let waits = kept_back && now >= self.asked + PATIENCE / 2;
        match (kept_back, waits) {
            (true, true) => self.be_prompt(),
            (true, false) => self.penalty = 0,
            (false, _) => self.prompt = self.prompt.saturating_sub(1),
        }
        self.acknowledged = expected;
        self.forget();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const US: u64 = 1000;

    /// A request arrives in `poll` at `now` and is answered in the next one.
    fn answered(ack: &mut OwedAck, now: u64, poll: u64) {
        ack.owe(Nanos(now), poll);
        ack.note_request(poll + 1);
    }

    #[test]
    fn an_ack_waits_a_poll_and_for_requests_but_not_forever() {
        let mut ack = OwedAck::default();
        let expected = Psn::new(100);
        ack.owe(Nanos(0), 5);
        assert!(!ack.is_due(Nanos(1), 5, expected) && ack.is_due(Nanos(1), 6, expected));
        ack.note_request(6);
        assert!(!ack.is_due(Nanos(1), 6, expected) && !ack.is_overdue(Nanos(1), 6, expected));
        // Not delayed: the last ACK was long ago.
        assert!(ack.is_overdue(Nanos(2), 7, expected));
    }

    #[test]
    fn an_ack_is_delayed_after_responses_for_a_while() {
        let mut ack = OwedAck { acknowledged: Psn::new(99), ..OwedAck::default() };
        let expected = Psn::new(100);
        answered(&mut ack, 0, 5);
        for (now, due, overdue) in
            [(1, false, false), (50, true, false), (99, true, false), (100, true, true)]
        {
            let now = Nanos(now * US);
            assert_eq!((ack.is_due(now, 9, expected), ack.is_overdue(now, 9, expected)), (due, overdue));
        }
        // But it is due if much has arrived since.
        assert!(ack.is_due(Nanos(1), 9, expected + 16));
    }

    #[test]
    fn a_peer_that_waits_for_acks_gets_them_without_delay() {
        let mut ack = OwedAck { acknowledged: Psn::new(99), ..OwedAck::default() };
        let expected = Psn::new(100);
        for penalty in [16, 32, 64, 128, 256, 512, 1024, 1024] {
            answered(&mut ack, 0, 5);
            assert!(!ack.is_due(Nanos(US), 9, expected));
            ack.pay(Nanos(50 * US), expected);
            for _ in 0..penalty {
                answered(&mut ack, 0, 5);
                assert!(ack.is_due(Nanos(US), 9, expected));
                ack.pay(Nanos(US), expected);
            }
        }
        // A peer that retransmits waits too.
        answered(&mut ack, 0, 5);
        ack.owe_again(Nanos(US), 9, expected - 1);
        assert!(ack.is_due(Nanos(US), 9, expected));
        for _ in 0..=1024 {
            ack.pay(Nanos(US), expected);
        }
        // If it continues nevertheless, delays are used again.
        answered(&mut ack, 0, 5);
        ack.owe(Nanos(26 * US), 9);
        ack.pay(Nanos(50 * US), expected);
        answered(&mut ack, 0, 5);
        assert!(!ack.is_due(Nanos(US), 9, expected));
    }

    /// A request that requested no ACK is retransmitted to request one: no ACK was delayed.
    #[test]
    fn a_late_request_for_an_ack_does_not_count_as_waiting() {
        for (psn, is_prompt) in [(102, false), (99, true)] {
            let mut ack = OwedAck::default();
            answered(&mut ack, 0, 5);
            ack.pay(Nanos(1), Psn::new(100));
            // Three that requested none.
            let expected = Psn::new(103);
            ack.owe_again(Nanos(US), 9, Psn::new(psn));
            ack.note_request(10);
            assert_eq!(ack.is_due(Nanos(US + 1), 11, expected), is_prompt, "{psn}");
        }
    }
}
