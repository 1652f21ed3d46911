//! Writes what a responder owes as frames: outcomes, NAKs, ACKs, in the order of the PSNs.

use std::sync::atomic::Ordering;

use ferroce_driver::Nanos;
use ferroce_wire::{Aeth, AtomicAckEth, Bth, Extension, Nak, Opcode, Psn, Syndrome};

use crate::engine::crc::fill_placed;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::outcome::Answer;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::staging::answers::FromDevice;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, Event, WcStatus};

use super::{InboundMessage, Responder};

/// The result of a turn to send an outcome.
enum Wrote {
    /// A frame of this length.
    Frame(usize),
    /// The oldest one is no longer owed; there may be others.
    NothingYet,
    /// None is owed.
    Nothing,
}

impl QueuePair {
    /// Writes the next response frame except an ACK, if one is owed.
    #[inline(always)]
    pub(crate) fn transmit_response(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Option<usize> {
        // Avoids a call if nothing is owed, as before most requests.
        while self.responder.outcomes.maybe_owe() {
            match self.write_outcome(shared, slot) {
                Wrote::Frame(length) => return Some(length),
                Wrote::NothingYet => {}
                Wrote::Nothing => break,
            }
        }
        let (psn, syndrome) = self.take_owed_nak()?;
        self.write_acknowledge(shared, slot, (psn, self.responder.msn), syndrome)
    }

    /// The owed NAK, if it may be sent: it also acknowledges everything before it.
    #[inline(always)]
    fn take_owed_nak(&mut self) -> Option<(Psn, Syndrome)> {
        let nak = self.responder.nak_owed?;
        if self.holds_back() {
            self.want_visible();
            return None;
        }
        self.responder.nak_owed = None;
        Some(nak)
    }

    /// Whether bytes of executed requests, or of a response, are not copied yet.
    #[inline(always)]
    fn holds_back(&self) -> bool {
        self.staged.is_some() && (self.is_landing() || self.may_owe_response())
    }

    /// Whether a response may be owed, which an ACK must not overtake.
    pub(crate) fn may_owe_response(&self) -> bool {
        self.responder.outcomes.maybe_owe()
    }

    /// Writes the owed NAK or ACK. No response may be owed.
    pub(crate) fn transmit_acknowledgement(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Option<usize> {
        match self.take_owed_nak() {
            Some((psn, syndrome)) => {
                self.write_acknowledge(shared, slot, (psn, self.responder.msn), syndrome)
            }
            None => self.transmit_acknowledge(shared, slot, false),
        }
    }

    /// Writes the ACK of all executed requests, if one is owed and due, either `ahead` of requests or after them.
    #[inline(always)]
    pub(crate) fn transmit_acknowledge(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        ahead: bool,
    ) -> Option<usize> {
        if !self.responder.ack.is_owed() {
            return None;
        }
        let (now, poll) = (self.ack_time(shared), shared.poll);
        let Responder { mut expected, mut msn, .. } = self.responder;
        if self.staged.is_some() {
            (expected, msn) = self.acknowledgeable()?;
        }
        let ack = &mut self.responder.ack;
        let goes = if ahead { ack.is_overdue(now, poll, expected) } else { ack.is_due(now, poll, expected) };
        if !goes {
            return None;
        }
        ack.pay(now, expected);
        if let Some(staged) = &mut self.staged {
            staged.requests.acknowledged = expected;
        }
        if let Some(length) = self.write_selective_acknowledge(shared, slot, msn) {
            return Some(length);
        }
        self.write_acknowledge(shared, slot, (expected - 1, msn), Syndrome::ACK)
    }

    /// When the owed ACK must be checked again, if one is owed.
    pub(crate) fn ack_due(&self, shared: &Shared) -> Option<Nanos> {
        let Responder { ack, expected, .. } = &self.responder;
        let now = self.ack_time(shared);
        // After a response that is being copied from device memory nothing is due.
        let is_due = ack.is_owed() && !(self.staged.is_some() && self.may_owe_response());
        is_due.then(|| ack.kept_until(*expected).filter(|until| *until > now).unwrap_or(shared.now))
    }

    /// The time used to judge an ACK's delay: there is no delay in a hurry, or with selective repeat, whose requester
    /// considers missing ACKs a loss.
    fn ack_time(&self, shared: &Shared) -> Nanos {
        if shared.hurry || self.selective.is_some() { Nanos::NEVER } else { shared.now }
    }

    fn write_acknowledge(
        &self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        (psn, msn): (Psn, u32),
        syndrome: Syndrome,
    ) -> Option<usize> {
        let connection = self.connection.as_ref()?;
        let bth = Bth::new(Opcode::RC_ACKNOWLEDGE, connection.dest_qpn, psn).in_partition(self.pkey);
        let plain = self.reaction.is_some().then(|| connection.acknowledging());
        let mut frame = slot.start(plain.as_ref().unwrap_or(&connection.header), bth, 0)?;
        frame.put(&Aeth::new(syndrome, msn));
        shared.count(Counter::SentPkts);
        Some(frame.finish_with(shared.crc))
    }

    /// Writes the next packet of the oldest owed outcome.
    fn write_outcome(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Wrote {
        let Some(connection) = &self.connection else { return Wrote::Nothing };
        let Some(outcome) = self.responder.outcomes.next_owed() else {
            if self.staged.is_some() {
                self.settle_answers(shared);
            }
            return Wrote::Nothing;
        };
        let psn = outcome.next_psn();
        if let Some(staged) = &mut self.staged
            && staged.requests.hides(outcome.first_psn)
        {
            return Wrote::Nothing;
        }
        let (opcode, payload) = match outcome.answer {
            Answer::Atomic { .. } => (Opcode::RC_ATOMIC_ACKNOWLEDGE, None),
            Answer::Done => (Opcode::RC_READ_RESPONSE_ONLY, None),
            Answer::Read { va, rkey, length } => {
                let (opcode, offset, bytes) = outcome.next_read_packet(connection.path_mtu);
                // Checked for each packet: the region may have been deregistered since the request arrived.
                let va = va.wrapping_add(offset.into());
                let grant = || shared.mrs.grant(self.pd, self.handle, rkey, Access::REMOTE_READ, va, bytes);
                match (length > 0).then(grant).transpose() {
                    Ok(grant) => (opcode, grant),
                    // The peer has received all of it before, and may have revoked access since.
                    Err(_) if outcome.is_answered() => {
                        outcome.abandon();
                        shared.count(Counter::RxForgottenDuplicate);
                        return Wrote::NothingYet;
                    }
                    Err(_) => {
                        shared.count(Counter::RespRemoteAccessErrors);
                        self.refuse_read_under_way(shared, psn, Nak::RemoteAccessError);
                        return Wrote::NothingYet;
                    }
                }
            }
        };
        let Shared { mrs, counters, crc, .. } = shared;
        let apart = payload.filter(|grant| slot.wants_apart(grant.len()) && mrs.payload(*grant).is_some());
        // READs see memory in their order, whichever thread writes it.
        std::sync::atomic::fence(Ordering::Acquire);
        let payload = match payload {
            None => (&[][..]).into(),
            Some(grant) => match mrs.granted(grant) {
                Some(payload) => payload,
                None => return self.answer_from_device(shared, slot, (psn, opcode, grant.len())),
            },
        };
        let bth = Bth::new(opcode, connection.dest_qpn, psn).in_partition(self.pkey);
        let placed = slot.place(&connection.header, connection.dest_qpn, payload.len());
        let frame = match &placed {
            Some(_) => slot.start_placed(&connection.header, bth, payload.len()),
            None => slot.start_apart(&connection.header, bth, payload.len(), apart),
        };
        let Some(mut frame) = frame else { return Wrote::Nothing };
        if opcode.has(Extension::Aeth) {
            frame.put(&Aeth::new(Syndrome::ACK, outcome.msn));
        }
        if let Answer::Atomic { original } = outcome.answer {
            frame.put(&AtomicAckEth::new(original));
        }
        let written = match placed {
            Some(placed) => fill_placed(*crc, frame, payload, placed),
            None => frame.fill(*crc, std::iter::once(payload)),
        };
        outcome.advance();
        counters.count(Counter::SentPkts);
        Wrote::Frame(slot.end(written))
    }

    /// Writes a packet of a READ response whose bytes are in device memory.
    #[cold]
    fn answer_from_device(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        (psn, opcode, bytes): (Psn, Opcode, u32),
    ) -> Wrote {
        match self.write_from_device(shared, slot, (opcode, bytes)) {
            FromDevice::Frame(length) => Wrote::Frame(length),
            FromDevice::Nothing => Wrote::Nothing,
            FromDevice::Failed => {
                shared.count(Counter::RespRemoteOperationalErrors);
                self.refuse_read_under_way(shared, psn, Nak::RemoteOperationalError);
                Wrote::NothingYet
            }
        }
    }

    /// The memory of a READ was deregistered, or its device failed, before its response was complete.
    fn refuse_read_under_way(&mut self, shared: &mut Shared, psn: Psn, nak: Nak) {
        self.responder.silence();
        self.responder.nak_owed = Some((psn, Syndrome::Nak(nak)));
        // A message after the READ may have started. It is not at fault.
        self.responder.message = InboundMessage::None;
        let (status, event) = match nak {
            Nak::RemoteAccessError => (WcStatus::RemAccessErr, Event::QpAccessErr(self.handle)),
            _ => (WcStatus::FatalErr, Event::QpFatal(self.handle)),
        };
        self.fail_receive(shared, status, event);
    }
}
