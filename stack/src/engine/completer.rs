//! Responses to the requester of a reliable connection (docs/protocol.md §4).

use ferroce_wire::{Nak, Opcode, Operation, Packet, Position, Psn, Syndrome};

use crate::engine::destination::Direction;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{QpState, SendOp, WcStatus};

impl QueuePair {
    /// Processes an ACK, a NAK, a READ response or an Atomic Acknowledge.
    #[inline]
    pub(crate) fn receive_response(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            shared.count(Counter::RxWrongState);
            return;
        }
        let psn = packet.bth.psn();
        let outstanding = psn.distance(self.requester.una()) >= 0 && psn.distance(self.requester.sent()) < 0;
        if !outstanding {
            shared.count(Counter::StaleResponse);
            return;
        }
        // READ Middle has no AETH, and only acknowledges.
        let syndrome = packet.aeth().map_or(Some(Syndrome::ACK), |aeth| aeth.syndrome());
        let Some(syndrome) = syndrome else {
            shared.count(Counter::IgnoredSyndrome);
            return;
        };
        if self.selective.is_some() {
            return self.receive_selective(shared, packet, psn, syndrome);
        }
        // Whatever its syndrome, it acknowledges everything before `psn`.
        if !self.acknowledge_before(shared, psn) {
            return;
        }
        match syndrome {
            Syndrome::Ack { .. } => match packet.opcode.operation() {
                Operation::ReadResponse => self.take_read_response(shared, packet, psn),
                Operation::AtomicAcknowledge => self.take_atomic_acknowledge(shared, packet),
                _ => self.take_acknowledge(shared, psn),
            },
            nak => self.take_nak(shared, nak, psn),
        }
    }

    /// `syndrome` is a NAK of `psn`, before which everything was executed.
    pub(crate) fn take_nak(&mut self, shared: &mut Shared, syndrome: Syndrome, psn: Psn) {
        match syndrome {
            Syndrome::Ack { .. } => {}
            Syndrome::RnrNak(timer) => self.on_rnr_nak(shared, timer, psn),
            Syndrome::Nak(Nak::PsnSequenceError) => self.on_sequence_nak(shared),
            Syndrome::Nak(nak) => {
                let (status, counter) = match nak {
                    Nak::InvalidRequest => (WcStatus::RemInvReqErr, Counter::ReqRemoteInvalidRequest),
                    Nak::RemoteAccessError => (WcStatus::RemAccessErr, Counter::ReqRemoteAccessErrors),
                    Nak::RemoteOperationalError => (WcStatus::RemOpErr, Counter::ReqRemoteOperationalErrors),
                    // Reliable Datagram only.
                    Nak::InvalidRdRequest | Nak::PsnSequenceError => {
                        shared.count(Counter::IgnoredSyndrome);
                        return;
                    }
                };
                shared.count(counter);
                self.fail_oldest(shared, status);
            }
        }
    }

    /// Completes the work requests before `psn`. If the data of a READ or atomic among them has not arrived, its response
    /// was lost: then returns `false`, and the rest of the packet is ignored.
    #[inline]
    fn acknowledge_before(&mut self, shared: &mut Shared, psn: Psn) -> bool {
        let mut una = self.requester.una();
        while let Some(wqe) = self.sq.front() {
            if psn.distance(wqe.end_psn()) >= 0 {
                if wqe.kind.is_read_or_atomic {
                    self.progress(shared, Direction::There, una);
                    self.on_implied_nak(shared);
                    return false;
                }
                una = wqe.end_psn();
                self.complete_oldest(shared);
                continue;
            }
            if !wqe.kind.is_read_or_atomic {
                una = psn;
            }
            break;
        }
        self.progress(shared, Direction::There, una);
        true
    }

    #[inline]
    fn progress(&mut self, shared: &mut Shared, direction: Direction, una: Psn) {
        if una != self.requester.una() {
            self.note_arrival(shared, direction, una);
            self.acknowledged(shared, una);
        }
    }

    /// `psn` is in the oldest work request, which is a SEND or WRITE unless a response was lost.
    fn take_acknowledge(&mut self, shared: &mut Shared, psn: Psn) {
        let Some(wqe) = self.sq.front() else { return };
        if wqe.kind.is_read_or_atomic {
            self.on_implied_nak(shared);
            return;
        }
        let una = psn + 1;
        if una == wqe.end_psn() {
            self.complete_oldest(shared);
        }
        self.progress(shared, Direction::There, una);
    }

    fn take_atomic_acknowledge(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        let Some(wqe) = self.sq.front() else { return };
        let Some(answer) = packet.atomic_ack_eth() else { return };
        if !wqe.kind.is_atomic {
            self.fail_oldest(shared, WcStatus::LocQpOpErr);
            return;
        }
        let una = wqe.end_psn();
        let whole = shared.mrs.scatter(self.sq.sges(self.sq.head()), 0, &answer.original().to_ne_bytes());
        debug_assert!(whole, "memory of a device is refused when an atomic is posted");
        self.complete_oldest(shared);
        self.progress(shared, Direction::Back, una);
    }

    #[inline(never)]
    fn take_read_response(&mut self, shared: &mut Shared, packet: &Packet<'_>, psn: Psn) {
        let (Some(wqe), Some(connection)) = (self.sq.front(), &self.connection) else { return };
        let length = match wqe.op {
            SendOp::Read(_) => wqe.length,
            SendOp::Flush { .. } | SendOp::AtomicWrite(_) => 0,
            _ => {
                self.fail_oldest(shared, WcStatus::LocQpOpErr);
                return;
            }
        };
        // Data is accepted in order only: `una` is the next expected packet.
        if psn != self.requester.una() {
            self.on_implied_nak(shared);
            return;
        }
        let index = psn.distance(wqe.first_psn) as u32;
        let is_final = index + 1 == wqe.packets;
        let offset = index << connection.path_mtu.shift();
        let expected = (length - offset).min(connection.path_mtu.bytes());
        if !fits_place(packet.opcode, index == 0, is_final, self.staged.is_some()) {
            self.fail_oldest(shared, WcStatus::LocQpOpErr);
            return;
        }
        if packet.payload.len() != expected as usize {
            self.note_length(packet);
            self.fail_oldest(shared, WcStatus::LocLenErr);
            return;
        }
        let head = self.sq.head();
        if !shared.mrs.scatter(self.sq.sges(head), offset, packet.payload)
            && self.land_response(shared, head, (offset, packet.payload)).is_err()
        {
            self.await_room(shared, psn);
            return;
        }
        if is_final {
            self.complete_oldest(shared);
        }
        self.progress(shared, Direction::Back, psn + 1);
        if self.staged.is_some() {
            self.settle_reads(shared);
        }
    }
}

/// Whether a READ response with this opcode is valid at this position of the request. A response to a resumed request may
/// begin with First or Only, or continue with Middle and Last as rxe's does (docs/protocol.md §8), so only the first packet
/// of a READ and the last are distinguished from the others. A request in parts may end anywhere.
fn fits_place(opcode: Opcode, is_first: bool, is_final: bool, in_parts: bool) -> bool {
    match opcode.position() {
        Position::First => !is_final,
        Position::Middle => !is_final && !is_first,
        Position::Last => (is_final || in_parts) && !is_first,
        Position::Only => is_final || in_parts,
    }
}
