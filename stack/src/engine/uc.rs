//! The receiving half of an unreliable connection (docs/protocol.md §6): nothing is answered, and a message that is
//! incomplete, or not allowed, is dropped. Its receive is available for the next one; bytes written by a WRITE stay.

use ferroce_wire::{Packet, Successor};

use crate::engine::qp::QueuePair;
use crate::engine::responder::RequestRefusal;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{QpState, WcStatus};

impl QueuePair {
    /// Processes a packet of an unreliable connection.
    pub(crate) fn receive_unreliable(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        if !matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Sqe) {
            shared.count(Counter::RxWrongState);
            return;
        }
        let psn = packet.bth.psn();
        if psn != self.responder.expected_psn() {
            shared.count(Counter::OutOfSequence);
            self.responder.abandon_message();
            self.responder.expect(psn);
        }
        // A message that is not continued has ended, whatever follows.
        if !packet.opcode.may_come(self.responder.successor()) {
            self.responder.abandon_message();
        }
        if !packet.opcode.may_come(Successor::NewMessage)
            && self.responder.successor() == Successor::NewMessage
        {
            shared.count(Counter::RxIncomplete);
            self.responder.expect(psn + 1);
            return;
        }
        self.note_established(shared);
        match self.execute(shared, packet) {
            Ok(()) => self.executed(shared, packet),
            Err(refusal) => {
                self.responder.abandon_message();
                self.responder.expect(psn + 1);
                self.drop_unreliable(shared, refusal);
            }
        }
    }

    fn drop_unreliable(&mut self, shared: &mut Shared, refusal: RequestRefusal) {
        match refusal {
            RequestRefusal::NotReady => shared.count(Counter::OutOfBuffer),
            RequestRefusal::NoRoom => shared.count(Counter::RxStagingFull),
            RequestRefusal::Invalid => shared.count(Counter::RxInvalidRequest),
            RequestRefusal::Access => shared.count(Counter::RxAccessErrors),
            RequestRefusal::Receive(WcStatus::LocLenErr, _) => shared.count(Counter::RxTooLong),
            // The receive itself is at fault, and no other message can use it.
            RequestRefusal::Receive(status, _) => {
                self.complete_receive_in_error(shared, status);
                self.fail(shared);
            }
        }
    }
}
