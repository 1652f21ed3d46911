//! The receiving half of a reliable connection (docs/protocol.md §5). UC executes requests in the same way; its own rules
//! are in `uc.rs`.
//!
//! The receive phase only records what is owed: results of READs and atomics, one NAK, one ACK. The transmit phase sends it
//! in the order of the PSNs, which coalesces ACKs.

mod explicit;
mod owed;
mod response;

use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::{
    Extension, Nak, Operation, Packet, Position, Psn, RKey, Reth, RnrTimer, Service, Successor, Syndrome,
};

use crate::engine::outcome::{Answer, Outcomes, Part};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::staging::landing::NoRoom;
use crate::telemetry::counters::Counter;
use crate::verbs::{
    Access, Event, MAX_MESSAGE, QpState, QpUpdate, ReadyToReceive, WcOpcode, WcStatus, WorkCompletion,
};

use explicit::flush_access;
use owed::OwedAck;

/// The current message.
#[derive(Clone, Copy)]
enum InboundMessage {
    None,
    /// Into the oldest receive, with the number of bytes received.
    Send {
        received: u32,
    },
    /// Into memory.
    Write {
        va: u64,
        rkey: RKey,
        remaining: u32,
        total: u32,
    },
}

pub(crate) struct Responder {
    /// The PSN of the next new request.
    expected: Psn,
    /// Completed messages, modulo 2²⁴.
    msn: u32,
    successor: Successor,
    message: InboundMessage,
    /// A NAK was sent for the expected packet: later packets are dropped silently.
    nak_sent: bool,
    ack: OwedAck,
    nak_owed: Option<(Psn, Syndrome)>,
    pub(crate) outcomes: Outcomes,
    min_rnr_timer: Option<RnrTimer>,
    rnr_naks: RnrNaks,
    /// The first request has arrived.
    pub(crate) established: bool,
}

/// Limits the RNR NAKs for a packet that is sent repeatedly.
#[derive(Clone, Copy, Default)]
struct RnrNaks {
    /// The packet refused last.
    psn: Psn,
    /// Until this time this many more may be sent for it.
    until: Nanos,
    left: u8,
}

impl RnrNaks {
    /// A peer sends a packet at most eight times without an answer (`retry_count` is 7), so a peer that loses seven NAKs
    /// still receives the eighth. A peer that receives any waits for the whole timer.
    const IN_HALF_A_TIMER: u8 = 8;

    /// Whether another one may be sent for `psn`.
    fn admit(&mut self, now: Nanos, psn: Psn, timer: RnrTimer) -> bool {
        if psn != self.psn || now >= self.until {
            *self = RnrNaks { psn, until: now + timer.duration() / 2, left: RnrNaks::IN_HALF_A_TIMER };
        }
        let admitted = self.left > 0;
        self.left = self.left.saturating_sub(1);
        admitted
    }
}

impl Default for Responder {
    fn default() -> Responder {
        Responder {
            expected: Psn::new(0),
            msn: 0,
            successor: Successor::NewMessage,
            message: InboundMessage::None,
            nak_sent: false,
            ack: OwedAck::default(),
            nak_owed: None,
            outcomes: Outcomes::default(),
            min_rnr_timer: None,
            rnr_naks: RnrNaks::default(),
            established: false,
        }
    }
}

impl Responder {
    /// For a connection, in the memory of the previous one.
    pub(crate) fn renewed(self, attributes: &ReadyToReceive) -> Responder {
        Responder {
            expected: attributes.rq_psn,
            outcomes: self.outcomes.renewed(attributes.max_dest_rd_atomic, attributes.selective_repeat),
            min_rnr_timer: Some(attributes.min_rnr_timer),
            ..Responder::default()
        }
    }

    /// Allocates the memory for this many READs and atomics now, when allocation is permitted.
    pub(crate) fn reserve(&mut self, max_dest_rd_atomic: u8) {
        self.outcomes.resize(max_dest_rd_atomic);
    }

    /// For an unreliable connection.
    pub(crate) fn expecting(rq_psn: Psn) -> Responder {
        Responder { expected: rq_psn, ..Responder::default() }
    }

    pub(crate) fn update(&mut self, update: &QpUpdate) {
        self.min_rnr_timer = update.min_rnr_timer.or(self.min_rnr_timer);
        if let Some(depth) = update.max_dest_rd_atomic {
            self.outcomes.resize(depth);
        }
    }

    pub(crate) fn max_dest_rd_atomic(&self) -> u8 {
        self.outcomes.depth()
    }

    pub(crate) fn min_rnr_timer(&self) -> Option<RnrTimer> {
        self.min_rnr_timer
    }

    /// The packets that may follow.
    pub(crate) fn successor(&self) -> Successor {
        self.successor
    }

    /// Drops the current message; its receive is available for the next one.
    pub(crate) fn abandon_message(&mut self) {
        self.message = InboundMessage::None;
        self.successor = Successor::NewMessage;
    }

    /// Sets the PSN of the next packet.
    pub(crate) fn expect(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// The acknowledgement is no longer owed.
    pub(crate) fn forget_ack(&mut self) {
        self.ack.forget();
    }

    /// Completed messages.
    pub(crate) fn msn(&self) -> u32 {
        self.msn
    }

    /// The requests executed from `psn` on can't be made visible: the messages before are complete, and their responses are
    /// still owed. Returns whether a response to later ones was owed.
    pub(crate) fn go_back_to(&mut self, psn: Psn, msn: u32) -> bool {
        let tells = self.ack.is_owed() || self.nak_owed.is_some() || self.outcomes.maybe_owe();
        self.ack.forget();
        self.nak_owed = None;
        self.outcomes.forget_from(psn);
        (self.expected, self.msn) = (psn, msn);
        tells
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// A local request has ended the connection: cancels what is owed except the ACK of executed requests; the ACK too if a
    /// response is missing before it.
    pub(crate) fn give_up(&mut self) {
        let ack = self.ack;
        let is_last = self.outcomes.next_owed().is_none();
        self.silence();
        if is_last {
            self.ack = ack;
        }
    }

    /// Cancels what is owed.
    pub(crate) fn silence(&mut self) {
        self.ack.forget();
        self.nak_owed = None;
        self.outcomes.clear();
    }

    /// A local request was sent.
    pub(crate) fn note_request(&mut self, poll: u64) {
        self.ack.note_request(poll);
    }

    /// A message is complete.
    fn count_message(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }
}

/// Why a request is not executed.
#[derive(Clone, Copy)]
pub(crate) enum RequestRefusal {
    /// Malformed or not allowed.
    Invalid,
    /// Memory that it may not access.
    Access,
    /// A fault of the local receive: its status, and the NAK.
    Receive(WcStatus, Nak),
    /// There is no receive for it.
    NotReady,
    /// It is for device memory, and there is no free staging chunk.
    NoRoom,
}

impl From<NoRoom> for RequestRefusal {
    fn from(NoRoom(_): NoRoom) -> RequestRefusal {
        RequestRefusal::NoRoom
    }
}

impl QueuePair {
    /// Processes a request.
    #[inline]
    pub(crate) fn receive_request(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        if !matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            shared.count(Counter::RxWrongState);
            return;
        }
        let distance = packet.bth.psn().distance(self.responder.expected);
        if distance < 0 {
            self.receive_duplicate(shared, packet);
        } else if distance > 0 {
            self.receive_early(shared, packet, distance as u32);
        } else {
            self.receive_expected(shared, packet);
            self.execute_held(shared);
        }
    }

    /// Processes the expected request.
    #[inline(always)]
    pub(crate) fn receive_expected(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        self.note_established(shared);
        match self.execute(shared, packet) {
            Ok(()) => {
                if self.responder.nak_sent {
                    self.end_refusal(shared);
                }
                self.executed(shared, packet);
            }
            Err(refusal) => self.refuse(shared, refusal),
        }
    }

    /// The packet for which a NAK was sent or is owed has arrived.
    #[cold]
    #[inline(never)]
    fn end_refusal(&mut self, shared: &mut Shared) {
        self.responder.nak_sent = false;
        self.responder.nak_owed = None;
        self.end_wait_for_request(shared);
    }

    /// Reports once that the peer has started to send, whether there is a receive or not.
    #[inline]
    pub(crate) fn note_established(&mut self, shared: &mut Shared) {
        if self.state == QpState::Rtr && !self.responder.established {
            self.responder.established = true;
            shared.comm_est = true;
            shared.raise(Event::CommEst(self.handle));
        }
    }

    /// A packet is missing before this one: one NAK reports it.
    fn receive_early(&mut self, shared: &mut Shared, packet: &Packet<'_>, distance: u32) {
        shared.count(Counter::OutOfSequence);
        if self.selective.is_some() {
            self.hold_early(shared, packet, distance);
        } else if !self.responder.nak_sent {
            self.responder.nak_sent = true;
            self.owe_nak(shared, Syndrome::Nak(Nak::PsnSequenceError));
        }
    }

    #[inline]
    pub(crate) fn executed(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        self.responder.successor = packet.opcode.successor();
        if self.service != Service::Rc {
            return;
        }
        if packet.opcode.is_answered_explicitly() {
            self.schedule(shared);
        } else if packet.bth.ack_req() {
            self.owe_ack(shared);
        }
    }

    #[inline(always)]
    pub(crate) fn execute(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), RequestRefusal> {
        let Some(path_mtu) = self.path_mtu() else { return Err(RequestRefusal::Invalid) };
        let opcode = packet.opcode;
        let payload_fits = opcode.payload().admits(packet.payload.len(), path_mtu.bytes() as usize);
        let reth = if opcode.has(Extension::Reth) { packet.reth() } else { None };
        let length_fits = reth.is_none_or(|reth| reth.length() <= MAX_MESSAGE);
        let exists = shared.device.supports(opcode.operation());
        if !exists || !opcode.may_come(self.responder.successor) || !self.allows(packet) {
            return Err(self.out_of_place(packet));
        }
        let needs_receive = match opcode.operation() {
            Operation::Send => matches!(opcode.position(), Position::First | Position::Only),
            Operation::Write => opcode.has(Extension::ImmDt),
            _ => false,
        };
        if needs_receive && !self.has_receive(shared) {
            return Err(RequestRefusal::NotReady);
        }
        if needs_receive && opcode.operation() == Operation::Send {
            // From here on a failure is attributed to the current receive.
            self.responder.message = InboundMessage::Send { received: 0 };
        }
        if !payload_fits || !packet.pad_fits() || !length_fits {
            return Err(self.misfit(packet));
        }
        match opcode.operation() {
            Operation::Send => self.execute_send(shared, packet)?,
            Operation::Write => self.execute_write(shared, packet, reth)?,
            Operation::ReadRequest => return self.execute_read(shared, reth, path_mtu),
            Operation::CompareSwap | Operation::FetchAdd => self.execute_atomic(shared, packet)?,
            Operation::Flush => self.execute_flush(shared, packet)?,
            Operation::AtomicWrite => self.execute_atomic_write(shared, packet)?,
            _ => return Err(RequestRefusal::Invalid),
        }
        self.responder.expected += 1;
        Ok(())
    }

    /// Whether the queue pair has the right to this operation.
    #[inline(always)]
    pub(crate) fn allows(&self, packet: &Packet<'_>) -> bool {
        let needed = match packet.opcode.operation() {
            Operation::Write | Operation::AtomicWrite => Access::REMOTE_WRITE,
            Operation::ReadRequest => Access::REMOTE_READ,
            Operation::CompareSwap | Operation::FetchAdd => Access::REMOTE_ATOMIC,
            Operation::Flush => packet.feth().map_or(Access::NONE, flush_access),
            _ => Access::NONE,
        };
        self.access.contains(needed)
    }

    fn execute_send(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), RequestRefusal> {
        let InboundMessage::Send { received } = self.responder.message else {
            return Err(RequestRefusal::Invalid);
        };
        let Some(receive) = self.rq.front() else { return Err(RequestRefusal::NotReady) };
        let total = received + packet.payload.len() as u32;
        if total > receive.length {
            return Err(RequestRefusal::Receive(WcStatus::LocLenErr, Nak::InvalidRequest));
        }
        if shared.mrs.check_local(self.receive_pd, receive.sges, Access::LOCAL_WRITE).is_err() {
            return Err(RequestRefusal::Receive(WcStatus::LocProtErr, Nak::RemoteOperationalError));
        }
        // Outstanding copies may be for the same host memory.
        let with_host = self.is_landing();
        if with_host || !shared.mrs.scatter(receive.sges, received, packet.payload) {
            self.land_receive(shared, &[(received, packet.payload)], with_host)?;
        }
        if !matches!(packet.opcode.position(), Position::Last | Position::Only) {
            self.responder.message = InboundMessage::Send { received: total };
            return Ok(());
        }
        let invalidated = packet.ieth().map(|ieth| ieth.rkey());
        if let Some(rkey) = invalidated
            && shared.mrs.invalidate(self.pd, self.handle, rkey, Access::REMOTE_INVALIDATE).is_err()
        {
            return Err(RequestRefusal::Receive(WcStatus::RemInvReqErr, Nak::RemoteAccessError));
        }
        self.responder.message = InboundMessage::None;
        self.responder.count_message();
        let plain = self.completion(0, WcStatus::Success, WcOpcode::Recv);
        self.complete_receive(shared, packet, WorkCompletion { byte_len: total, invalidated, ..plain });
        Ok(())
    }

    #[inline]
    fn execute_write(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
        reth: Option<&Reth>,
    ) -> Result<(), RequestRefusal> {
        let (va, rkey, remaining, total) = match (reth, self.responder.message) {
            (Some(reth), _) => (reth.va(), reth.rkey(), reth.length(), reth.length()),
            (None, InboundMessage::Write { va, rkey, remaining, total }) => (va, rkey, remaining, total),
            (None, _) => return Err(RequestRefusal::Invalid),
        };
        let len = packet.payload.len() as u32;
        let is_last = matches!(packet.opcode.position(), Position::Last | Position::Only);
        if is_last != (len == remaining) || len > remaining {
            return Err(RequestRefusal::Invalid);
        }
        // The whole range on the first packet, the rest of it on each later one: the region may have been deregistered in
        // between. A zero-length WRITE is not checked (C9-88).
        if total > 0 {
            let grant = shared.mrs.grant(self.pd, self.handle, rkey, Access::REMOTE_WRITE, va, remaining);
            let grant = grant.map_err(|_| RequestRefusal::Access)?;
            // Data in host memory may signal that earlier data has arrived.
            if self.is_landing() || !shared.mrs.write(grant, packet.payload) {
                self.land_write(shared, grant, packet.payload, is_last)?;
            }
        }
        shared.counters.count_if(reth.is_some(), Counter::RxWriteRequests);
        if !is_last {
            let va = va.wrapping_add(u64::from(len));
            self.responder.message = InboundMessage::Write { va, rkey, remaining: remaining - len, total };
            return Ok(());
        }
        self.responder.message = InboundMessage::None;
        self.responder.count_message();
        if packet.immdt().is_some() {
            let plain = self.completion(0, WcStatus::Success, WcOpcode::RecvRdmaWithImm);
            self.complete_receive(shared, packet, WorkCompletion { byte_len: total, ..plain });
        }
        Ok(())
    }

    /// Completes the oldest receive: `wc` plus the fields of the packet and the receive.
    pub(crate) fn complete_receive(&mut self, shared: &mut Shared, packet: &Packet<'_>, wc: WorkCompletion) {
        if let Some(wr_id) = self.rq.pop(&mut shared.mrs) {
            shared.counters.count_if(wc.opcode == WcOpcode::Recv, Counter::RdmaRecvs);
            let immediate = packet.immdt().map(|immdt| immdt.value());
            let wc = WorkCompletion { wr_id, immediate, ..wc };
            self.push(shared, self.recv_cq, wc, packet.bth.solicited());
        }
    }

    /// A request that was executed before: it is not executed again, but the response may have been lost.
    #[inline(never)]
    fn receive_duplicate(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        shared.count(Counter::DuplicateRequest);
        let psn = packet.bth.psn();
        if !packet.opcode.is_answered_explicitly() {
            if packet.bth.ack_req() {
                self.responder.ack.owe_again(shared.now, shared.poll, psn);
                self.schedule(shared);
            }
            return;
        }
        let part = self.remembered_part(shared, packet);
        let Some(part) = part else {
            shared.count(Counter::RxForgottenDuplicate);
            return;
        };
        let Responder { outcomes, msn, .. } = &mut self.responder;
        match self.selective {
            Some(_) => outcomes.repair(psn, part, *msn),
            None => outcomes.replay(psn, part),
        }
        self.schedule(shared);
    }

    /// The remembered part of a duplicate's response. Memory that is read again must still be accessible to the peer.
    fn remembered_part(&self, shared: &Shared, packet: &Packet<'_>) -> Option<Part> {
        let (psn, reth) = (packet.bth.psn(), packet.reth());
        let outcome = self.responder.outcomes.at(psn)?;
        let part = outcome.part_for(packet.opcode.operation(), reth, psn, self.path_mtu()?)?;
        if let (Answer::Read { rkey, .. }, Some(reth)) = (outcome.answer, reth)
            && reth.length() > 0
        {
            shared
                .mrs
                .grant(self.pd, self.handle, rkey, Access::REMOTE_READ, reth.va(), reth.length())
                .ok()?;
        }
        Some(part)
    }

    fn refuse(&mut self, shared: &mut Shared, refusal: RequestRefusal) {
        match refusal {
            RequestRefusal::NotReady => {
                shared.count(Counter::OutOfBuffer);
                self.refuse_for_now(shared, Duration::ZERO);
            }
            RequestRefusal::NoRoom => {
                /// Before a copy ends, a peer with a small `rnr_retry` must not have used it up.
                const LONG_COPY: Duration = Duration::from_millis(10);
                shared.count(Counter::RxStagingFull);
                // It may have been the first of a message, which is then not received.
                if self.responder.successor == Successor::NewMessage {
                    self.responder.message = InboundMessage::None;
                }
                // A NAK requests it again when there is room. A peer whose timer expires before gets an RNR NAK.
                if self.is_refused_again() {
                    self.refuse_for_now(shared, LONG_COPY);
                } else {
                    self.responder.nak_sent = true;
                }
            }
            RequestRefusal::Invalid => {
                shared.count(Counter::RespInvalidRequest);
                self.owe_nak(shared, Syndrome::Nak(Nak::InvalidRequest));
                self.fail_receive(shared, WcStatus::RemInvReqErr, Event::QpReqErr(self.handle));
            }
            RequestRefusal::Access | RequestRefusal::Receive(WcStatus::RemInvReqErr, _)
                if shared.drop_access_errors =>
            {
                shared.count(Counter::RxAccessErrors);
                // It may have been the first of a message, which is then not received.
                if self.responder.successor == Successor::NewMessage {
                    self.responder.message = InboundMessage::None;
                }
            }
            RequestRefusal::Access => {
                shared.count(Counter::RespRemoteAccessErrors);
                self.owe_nak(shared, Syndrome::Nak(Nak::RemoteAccessError));
                self.fail_receive(shared, WcStatus::RemAccessErr, Event::QpAccessErr(self.handle));
            }
            RequestRefusal::Receive(status, nak) => {
                shared.counters.count_if(status == WcStatus::LocLenErr, Counter::RespLocalLengthError);
                shared.count(match nak {
                    Nak::RemoteOperationalError => Counter::RespRemoteOperationalErrors,
                    Nak::RemoteAccessError => Counter::RespRemoteAccessErrors,
                    _ => Counter::RespInvalidRequest,
                });
                self.owe_nak(shared, Syndrome::Nak(nak));
                self.fail_receive(shared, status, Event::QpReqErr(self.handle));
            }
        }
    }

    /// There is room for the request that was dropped for lack of it.
    #[cold]
    pub(crate) fn ask_again(&mut self, shared: &mut Shared) {
        if self.service == Service::Rc && self.state != QpState::Error {
            self.owe_nak(shared, Syndrome::Nak(Nak::PsnSequenceError));
        }
    }

    /// An RNR NAK, unless the limit for this packet is reached.
    pub(crate) fn refuse_for_now(&mut self, shared: &mut Shared, least: Duration) {
        let Some(mut timer) = self.responder.min_rnr_timer else { return };
        if timer.duration() < least {
            timer = RnrTimer::at_least(least);
        }
        let Responder { rnr_naks, nak_sent, nak_owed, expected, .. } = &mut self.responder;
        *nak_sent = true;
        if let Some((_, Syndrome::RnrNak(_))) = nak_owed {
            // The outstanding one answers this one too.
            return;
        }
        *nak_owed = None;
        if !rnr_naks.admit(shared.now, *expected, timer) {
            shared.count(Counter::NakSuppressed);
            return;
        }
        shared.count(Counter::SendRnrErr);
        self.owe_nak(shared, Syndrome::RnrNak(timer));
    }

    /// Ends a connection after a bad request: the application is notified by the current receive, or, if there is none, by
    /// an event (C9-222.1.1).
    pub(crate) fn fail_receive(&mut self, shared: &mut Shared, status: WcStatus, event: Event) {
        match self.responder.message {
            InboundMessage::Send { .. } => self.complete_receive_in_error(shared, status),
            _ => shared.raise(event),
        }
        self.responder.message = InboundMessage::None;
        self.enter_error(shared);
    }

    /// All executed requests must be acknowledged.
    pub(crate) fn owe_ack(&mut self, shared: &mut Shared) {
        self.responder.ack.owe(shared.now, shared.poll);
        self.schedule(shared);
    }

    /// The NAK contains the expected PSN, and acknowledges everything before it.
    pub(crate) fn owe_nak(&mut self, shared: &mut Shared, syndrome: Syndrome) {
        self.responder.nak_owed = Some((self.responder.expected, syndrome));
        self.responder.ack.forget();
        self.schedule(shared);
    }
}
