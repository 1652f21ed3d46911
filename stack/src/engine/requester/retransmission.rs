//! Retransmission of a requester: the ACK timer, NAKs, and giving up (docs/protocol.md §4).

use ferroce_driver::Nanos;
use ferroce_wire::{Psn, RnrTimer};

use super::Asking;
use crate::engine::destination::Direction;
use crate::engine::qp::QueuePair;
use crate::engine::scheduler::Wait;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::WcStatus;

impl QueuePair {
    /// A timer has expired, possibly an earlier one that is no longer relevant.
    pub(crate) fn on_timer(&mut self, shared: &mut Shared) {
        if self.reaction.as_ref().is_some_and(|reaction| reaction.ready() <= shared.now) {
            self.schedule(shared);
        }
        let requester = &mut self.requester;
        if requester.rnr_deadline <= shared.now {
            requester.rnr_deadline = Nanos::NEVER;
            self.schedule(shared);
        } else if requester.ack_deadline <= shared.now
            && !self.ask_late(shared)
            && !self.extend_ack_timer(shared)
        {
            let requester = &mut self.requester;
            requester.ack_deadline = Nanos::NEVER;
            requester.sequence_nak_seen = false;
            requester.implied_nak_seen = false;
            shared.count(Counter::LocalAckTimeoutErr);
            self.note_silence(shared);
            self.retry(shared);
        }
        match self.waits_for(shared) {
            Wait::NextPoll => self.schedule(shared),
            wait if !self.scheduled => self.scheduled = shared.scheduler.wait(self.handle.0.index, wait),
            // Its turn ends with the state that it waits for, but that may be late.
            Wait::At(time) => shared.scheduler.at(self.handle.0.index, time),
            _ => {}
        }
        self.settle(shared);
    }

    /// Requests the ACK of lazy requests, by the next new packet, or else by retransmitting the last one. Returns whether
    /// there are such requests, and no ACK was requested.
    #[cold]
    fn ask_late(&mut self, shared: &mut Shared) -> bool {
        let Some(timeout) = self.requester.ack_timeout() else { return false };
        if self.requester.asking == Asking::Done || self.awaits_answer() {
            return false;
        }
        let mut patience = timeout;
        self.requester.asking = match self.requester.asking {
            // It waits for the port, or for its turn.
            Asking::Again => Asking::Again,
            // A longer message has started, and will request an ACK.
            _ if !self.is_lazy() => Asking::Done,
            Asking::Late if self.requester.cursor != self.sq.tail() => {
                patience = timeout / 4;
                Asking::Next
            }
            _ => {
                self.step_back(shared);
                Asking::Again
            }
        };
        self.requester.ack_deadline = shared.now + patience;
        shared.scheduler.at(self.handle.0.index, self.requester.ack_deadline);
        self.schedule(shared);
        true
    }

    /// The newest packet is retransmitted next.
    fn step_back(&mut self, shared: &mut Shared) {
        let requester = &mut self.requester;
        requester.cursor = requester.cursor.wrapping_sub(1);
        let wqe = self.sq.wqe(requester.cursor);
        requester.cursor_packet = wqe.packets - 1;
        let direction = Direction::of(wqe.kind);
        self.forget_newest(shared, direction);
    }

    /// Extends the ACK timer if the pacer, or the staging of device memory, delays the packet that would request an answer:
    /// a missing answer means nothing then. Returns whether it does.
    #[cold]
    fn extend_ack_timer(&mut self, shared: &mut Shared) -> bool {
        let Some(timeout) = self.requester.ack_timeout() else { return false };
        if self.awaits_staging(shared) {
            self.requester.ack_deadline = shared.now + timeout;
            shared.scheduler.at(self.handle.0.index, self.requester.ack_deadline);
            return true;
        }
        let Some(reaction) = &self.reaction else { return false };
        let ready = reaction.ready();
        if self.awaits_answer() || ready <= shared.now || ready == Nanos::NEVER {
            return false;
        }
        self.requester.ack_deadline = ready + timeout;
        shared.scheduler.at(self.handle.0.index, self.requester.ack_deadline);
        true
    }

    /// A sequence NAK: goes back, once for each gap.
    pub(crate) fn on_sequence_nak(&mut self, shared: &mut Shared) {
        if self.requester.waits_for_receiver() || self.requester.sequence_nak_seen {
            return;
        }
        shared.count(Counter::PacketSeqErr);
        self.requester.sequence_nak_seen = true;
        self.retry(shared);
    }

    /// A response that is only possible if an earlier one was lost: goes back, once.
    pub(crate) fn on_implied_nak(&mut self, shared: &mut Shared) {
        if self.requester.waits_for_receiver() || self.requester.implied_nak_seen {
            return;
        }
        shared.count(Counter::ImpliedNakSeqErr);
        self.requester.implied_nak_seen = true;
        self.retry(shared);
    }

    pub(crate) fn on_rnr_nak(&mut self, shared: &mut Shared, timer: RnrTimer, psn: Psn) {
        /// The value of `rnr_retry` for an unlimited number of retries.
        const FOREVER: u8 = 7;
        let requester = &mut self.requester;
        let mut deadline = shared.now + timer.duration();
        requester.rnr_psn = psn;
        if requester.waits_for_receiver() {
            deadline = deadline.max(requester.rnr_deadline);
            // Nothing was retransmitted since the previous one, so this is not a further retry, within the longest time
            // that one NAK can request. After that it is one: NAKs must not delay a sender forever.
            if shared.now.since(requester.rnr_began) <= RnrTimer::LONGEST.duration() {
                requester.rnr_deadline = deadline;
                return;
            }
        }
        shared.count(Counter::RnrNakRetryErr);
        if requester.attributes.rnr_retry != FOREVER {
            if requester.rnr_retries_left == 0 {
                shared.count(Counter::ReqRnrRetriesExceeded);
                self.fail_oldest(shared, WcStatus::RnrRetryExcErr);
                return;
            }
            requester.rnr_retries_left -= 1;
        }
        requester.rnr_deadline = deadline;
        requester.rnr_began = shared.now;
        requester.ack_deadline = Nanos::NEVER;
        self.go_back(shared);
        self.schedule(shared);
    }

    /// There was no staging chunk for a response into device memory: it is requested again when there is one. This is not a
    /// retry, because the peer responds.
    #[cold]
    pub(crate) fn await_room(&mut self, shared: &mut Shared, psn: Psn) {
        shared.count(Counter::RxStagingFull);
        if let Some(staged) = &mut self.staged {
            // Copying the received data frees chunks.
            staged.responses.want();
        }
        match &mut self.selective {
            Some(selective) => selective.scoreboard.lose(psn),
            None => {
                // The following packets are on their way.
                self.requester.implied_nak_seen = true;
                self.go_back(shared);
            }
        }
        self.arm_ack_timer(shared);
        self.schedule(shared);
    }

    /// There is room for what it waits for.
    #[cold]
    pub(crate) fn take_room(&mut self, shared: &mut Shared) {
        self.feed(shared);
        self.schedule(shared);
    }

    /// Retransmits from the oldest unacknowledged packet on, or gives up.
    fn retry(&mut self, shared: &mut Shared) {
        if self.requester.retries_left == 0 {
            shared.count(Counter::ReqTransportRetriesExceeded);
            self.fail_oldest(shared, WcStatus::RetryExcErr);
            return;
        }
        self.requester.retries_left -= 1;
        self.go_back(shared);
        self.arm_ack_timer(shared);
        self.schedule(shared);
    }

    fn go_back(&mut self, shared: &mut Shared) {
        self.await_no_answer();
        self.requester.asking = Asking::Done;
        if let Some(selective) = &mut self.selective {
            return selective.scoreboard.lose_all(self.requester.una, self.requester.sent);
        }
        self.forget_in_flight(shared);
        self.requester.cursor = self.sq.head();
        self.requester.cursor_packet = 0;
        self.skip_acknowledged();
    }
}
