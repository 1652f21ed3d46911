//! The receiving half of a reliable connection (protocol.md §5).
//!
//! Receiving only notes what is owed: results of READs and atomics, one NAK, one ACK. The transmit
//! phase pays, in the order of the PSNs, which is what coalesces ACKs.

use std::collections::VecDeque;

use ferroce_wire::{
    Aeth, AtomicAckEth, Bth, Extension, Feth, FrameBuilder, Nak, Opcode, Operation, Packet, Position, Psn,
    RKey, RnrTimer, Selectivity, Successor, Syndrome,
};

use crate::Access;
use crate::counters::Counter;
use crate::cq::{WcOpcode, WcStatus, WorkCompletion};
use crate::event::Event;
use crate::qp::{Connection, QpState, QueuePair, ReadyToReceive};
use crate::rq::MAX_MESSAGE;
use crate::shared::Shared;

/// The message under way.
#[derive(Clone, Copy)]
enum Message {
    None,
    /// Into the oldest receive, of which so much is filled.
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

/// The answer to a READ, an atomic, a FLUSH or an ATOMIC WRITE. It is kept after it was sent, so
/// that a duplicate of the request can be answered without executing it again.
#[derive(Clone, Copy)]
struct Outcome {
    first_psn: Psn,
    packets: u32,
    msn: u32,
    answer: Answer,
    /// The answer under way: the packet that it began with, the next one to be sent, and the one
    /// after its last, which carries the bytes of a READ up to `limit`.
    start: u32,
    next: u32,
    end: u32,
    limit: u32,
    /// All of it was sent once: what is owed now, if anything, answers a duplicate.
    answered: bool,
}

#[derive(Clone, Copy)]
enum Answer {
    /// From memory, as it is when it is sent.
    Read {
        va: u64,
        rkey: RKey,
        length: u32,
    },
    Atomic {
        original: u64,
    },
    /// FLUSH and ATOMIC WRITE: an empty READ response.
    Done,
}

impl Outcome {
    fn is_owed(&self) -> bool {
        self.next < self.end
    }

    fn covers(&self, psn: Psn) -> bool {
        let distance = psn.distance(self.first_psn);
        distance >= 0 && (distance as u32) < self.packets
    }
}

pub(crate) struct Responder {
    /// The PSN of the next new request.
    expected: Psn,
    /// Messages completed, modulo 2²⁴.
    msn: u32,
    successor: Successor,
    message: Message,
    /// The expected packet was asked for with a NAK: later ones are dropped in silence.
    nak_sent: bool,
    ack_owed: bool,
    nak_owed: Option<(Psn, Syndrome)>,
    /// Oldest first.
    outcomes: VecDeque<Outcome>,
    /// How many outcomes are remembered.
    depth: usize,
    min_rnr_timer: Option<RnrTimer>,
    /// The first request has come.
    established: bool,
}

impl Default for Responder {
    fn default() -> Responder {
        Responder {
            expected: Psn::new(0),
            msn: 0,
            successor: Successor::NewMessage,
            message: Message::None,
            nak_sent: false,
            ack_owed: false,
            nak_owed: None,
            outcomes: VecDeque::new(),
            depth: 0,
            min_rnr_timer: None,
            established: false,
        }
    }
}

impl Responder {
    pub(crate) fn new(attributes: &ReadyToReceive) -> Responder {
        let depth = usize::from(attributes.max_dest_rd_atomic);
        Responder {
            expected: attributes.rq_psn,
            outcomes: VecDeque::with_capacity(depth),
            depth,
            min_rnr_timer: Some(attributes.min_rnr_timer),
            ..Responder::default()
        }
    }

    pub(crate) fn expected_psn(&self) -> Psn {
        self.expected
    }

    /// Forgets what is owed.
    pub(crate) fn silence(&mut self) {
        self.ack_owed = false;
        self.nak_owed = None;
        self.outcomes.clear();
    }

    /// The latest outcome at `psn`: the PSNs of one that is long forgotten by the peer may have come
    /// round again.
    fn outcome_at(&mut self, psn: Psn) -> Option<&mut Outcome> {
        self.outcomes.iter_mut().rev().find(|outcome| outcome.covers(psn))
    }

    fn count_message(&mut self) {
        self.msn = (self.msn + 1) & 0x00ff_ffff;
    }
}

/// Why a request is not executed.
#[derive(Clone, Copy)]
enum Refusal {
    /// Malformed or not allowed.
    Invalid,
    /// Memory that it may not reach.
    Access,
    /// The local receive is at fault: how it ends, and what the peer is told.
    Receive(WcStatus, Nak),
    /// There is no receive for it.
    NotReady,
}

impl QueuePair {
    /// Takes a request.
    pub(crate) fn receive_request(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        if !matches!(self.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
            shared.count(Counter::RxWrongState);
            return;
        }
        let distance = packet.bth.psn().distance(self.responder.expected);
        if distance < 0 {
            self.receive_duplicate(shared, packet);
        } else if distance > 0 {
            self.receive_early(shared);
        } else {
            self.responder.nak_sent = false;
            // What a NAK that is still owed asks for is here.
            self.responder.nak_owed = None;
            match self.execute(shared, packet) {
                Ok(()) => self.executed(shared, packet),
                Err(refusal) => self.refuse(shared, refusal),
            }
        }
    }

    /// Something is missing before this packet: one NAK says what.
    fn receive_early(&mut self, shared: &mut Shared) {
        shared.count(Counter::OutOfSequence);
        if !self.responder.nak_sent {
            self.responder.nak_sent = true;
            self.owe_nak(shared, Syndrome::Nak(Nak::PsnSequenceError));
        }
    }

    fn executed(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        if self.state == QpState::Rtr && !self.responder.established {
            self.responder.established = true;
            shared.raise(Event::CommEst(self.handle));
        }
        self.responder.successor = packet.opcode.successor();
        if packet.bth.ack_req() && !packet.opcode.is_answered_explicitly() {
            self.responder.ack_owed = true;
        }
        if self.responder.ack_owed || packet.opcode.is_answered_explicitly() {
            self.schedule(shared);
        }
    }

    fn execute(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Some(connection) = self.connection else { return Err(Refusal::Invalid) };
        let opcode = packet.opcode;
        let payload_fits =
            opcode.payload().admits(packet.payload.len(), connection.path_mtu.bytes() as usize);
        let pad_fits = packet.bth.pad() == packet.payload.len().wrapping_neg() & 3;
        let length_fits = packet.reth().is_none_or(|reth| reth.length() <= MAX_MESSAGE);
        if !opcode.may_come(self.responder.successor) || !self.allows(packet) {
            return Err(Refusal::Invalid);
        }
        let needs_receive = match opcode.operation() {
            Operation::Send => matches!(opcode.position(), Position::First | Position::Only),
            Operation::Write => opcode.has(Extension::ImmDt),
            _ => false,
        };
        if needs_receive && self.rq_is_empty() {
            return Err(Refusal::NotReady);
        }
        if needs_receive && opcode.operation() == Operation::Send {
            // From here on a failure is that of the receive in hand.
            self.responder.message = Message::Send { received: 0 };
        }
        if !payload_fits || !pad_fits || !length_fits {
            return Err(Refusal::Invalid);
        }
        match opcode.operation() {
            Operation::Send => self.execute_send(shared, packet)?,
            Operation::Write => self.execute_write(shared, packet)?,
            Operation::ReadRequest => return self.execute_read(shared, packet, &connection),
            Operation::CompareSwap | Operation::FetchAdd => self.execute_atomic(shared, packet)?,
            Operation::Flush => self.execute_flush(shared, packet)?,
            Operation::AtomicWrite => self.execute_atomic_write(shared, packet)?,
            _ => return Err(Refusal::Invalid),
        }
        self.responder.expected += 1;
        Ok(())
    }

    /// Whether the queue pair was given the right to this operation.
    fn allows(&self, packet: &Packet<'_>) -> bool {
        let needed = match packet.opcode.operation() {
            Operation::Write | Operation::AtomicWrite => Access::REMOTE_WRITE,
            Operation::ReadRequest => Access::REMOTE_READ,
            Operation::CompareSwap | Operation::FetchAdd => Access::REMOTE_ATOMIC,
            Operation::Flush => packet.feth().map_or(Access::NONE, flush_access),
            _ => Access::NONE,
        };
        self.access.contains(needed)
    }

    fn execute_send(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Message::Send { received } = self.responder.message else { return Err(Refusal::Invalid) };
        let Some(receive) = self.rq.front() else { return Err(Refusal::NotReady) };
        let total = received + packet.payload.len() as u32;
        if total > receive.length {
            return Err(Refusal::Receive(WcStatus::LocLenErr, Nak::InvalidRequest));
        }
        if shared.mrs.check_local(self.pd, receive.sges, Access::LOCAL_WRITE).is_err() {
            return Err(Refusal::Receive(WcStatus::LocProtErr, Nak::RemoteOperationalError));
        }
        shared.mrs.scatter(receive.sges, received, packet.payload);
        if !matches!(packet.opcode.position(), Position::Last | Position::Only) {
            self.responder.message = Message::Send { received: total };
            return Ok(());
        }
        let invalidated = packet.ieth().map(|ieth| ieth.rkey());
        if let Some(rkey) = invalidated
            && shared.mrs.invalidate(self.pd, rkey, Access::REMOTE_INVALIDATE).is_err()
        {
            return Err(Refusal::Receive(WcStatus::RemInvReqErr, Nak::RemoteAccessError));
        }
        self.responder.message = Message::None;
        self.responder.count_message();
        self.complete_receive(shared, packet, WcOpcode::Recv, total, invalidated);
        Ok(())
    }

    fn execute_write(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let (va, rkey, remaining, total) = match (packet.reth(), self.responder.message) {
            (Some(reth), _) => (reth.va(), reth.rkey(), reth.length(), reth.length()),
            (None, Message::Write { va, rkey, remaining, total }) => (va, rkey, remaining, total),
            (None, _) => return Err(Refusal::Invalid),
        };
        let len = packet.payload.len() as u32;
        let is_last = matches!(packet.opcode.position(), Position::Last | Position::Only);
        if is_last != (len == remaining) || len > remaining {
            return Err(Refusal::Invalid);
        }
        // The whole range on the first packet, what is left of it on each later one: the region
        // may have gone in between. Nothing is checked for a WRITE of nothing (C9-88).
        if total > 0 {
            let grant = shared.mrs.grant(self.pd, rkey, Access::REMOTE_WRITE, va, remaining);
            let grant = grant.map_err(|_| Refusal::Access)?;
            shared.mrs.granted_mut(grant)[..packet.payload.len()].copy_from_slice(packet.payload);
        }
        if !is_last {
            let va = va.wrapping_add(u64::from(len));
            self.responder.message = Message::Write { va, rkey, remaining: remaining - len, total };
            return Ok(());
        }
        self.responder.message = Message::None;
        self.responder.count_message();
        if packet.immdt().is_some() {
            self.complete_receive(shared, packet, WcOpcode::RecvRdmaWithImm, total, None);
        }
        Ok(())
    }

    fn execute_read(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
        connection: &Connection,
    ) -> Result<(), Refusal> {
        let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
        let (va, rkey, length) = (reth.va(), reth.rkey(), reth.length());
        self.make_room_for_outcome()?;
        if length > 0 {
            let grant = shared.mrs.grant(self.pd, rkey, Access::REMOTE_READ, va, length);
            grant.map_err(|_| Refusal::Access)?;
        }
        let packets = connection.path_mtu.packets(length);
        self.responder.count_message();
        self.remember(packets, Answer::Read { va, rkey, length });
        self.responder.expected += packets;
        Ok(())
    }

    fn execute_atomic(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Some(atomic) = packet.atomic_eth() else { return Err(Refusal::Invalid) };
        if atomic.va() % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        self.make_room_for_outcome()?;
        let grant = shared.mrs.grant(self.pd, atomic.rkey(), Access::REMOTE_ATOMIC, atomic.va(), 8);
        let word = shared.mrs.granted_mut(grant.map_err(|_| Refusal::Access)?);
        let Ok(bytes) = <[u8; 8]>::try_from(&*word) else { return Err(Refusal::Access) };
        let original = u64::from_ne_bytes(bytes);
        let new = match packet.opcode.operation() {
            Operation::CompareSwap if original == atomic.compare() => atomic.swap_or_add(),
            Operation::CompareSwap => original,
            _ => original.wrapping_add(atomic.swap_or_add()),
        };
        word.copy_from_slice(&new.to_ne_bytes());
        self.responder.count_message();
        self.remember(1, Answer::Atomic { original });
        Ok(())
    }

    /// Host memory is coherent: what was written before is visible already, and only the right to
    /// ask is checked. Unlike READ and WRITE, also for a length of 0 (protocol.md §5).
    fn execute_flush(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let (Some(feth), Some(reth)) = (packet.feth(), packet.reth()) else { return Err(Refusal::Invalid) };
        let access = flush_access(feth);
        let Some(selectivity) = feth.selectivity().filter(|_| access != Access::NONE) else {
            return Err(Refusal::Invalid);
        };
        self.make_room_for_outcome()?;
        let allowed = match selectivity {
            Selectivity::Range => {
                shared.mrs.grant(self.pd, reth.rkey(), access, reth.va(), reth.length()).map(drop)
            }
            // Address and length mean nothing then; rxe looks at neither.
            Selectivity::MemoryRegion => shared.mrs.grant_whole(self.pd, reth.rkey(), access),
        };
        allowed.map_err(|_| Refusal::Access)?;
        self.responder.count_message();
        self.remember(1, Answer::Done);
        Ok(())
    }

    fn execute_atomic_write(&mut self, shared: &mut Shared, packet: &Packet<'_>) -> Result<(), Refusal> {
        let Some(reth) = packet.reth() else { return Err(Refusal::Invalid) };
        if reth.length() != 8 || reth.va() % 8 != 0 {
            return Err(Refusal::Invalid);
        }
        self.make_room_for_outcome()?;
        let grant = shared.mrs.grant(self.pd, reth.rkey(), Access::REMOTE_WRITE, reth.va(), 8);
        shared.mrs.granted_mut(grant.map_err(|_| Refusal::Access)?).copy_from_slice(packet.payload);
        self.responder.count_message();
        self.remember(1, Answer::Done);
        Ok(())
    }

    /// Forgets the oldest outcome, if all places are taken. One that was never sent is live, and a
    /// peer with more requests outstanding than it was told breaks the contract. One that is owed
    /// again is not: a peer that sends something new has its answer already.
    fn make_room_for_outcome(&mut self) -> Result<(), Refusal> {
        let Responder { outcomes, depth, .. } = &mut self.responder;
        if outcomes.len() < *depth {
            return Ok(());
        }
        match outcomes.front() {
            Some(oldest) if oldest.answered => {
                outcomes.pop_front();
                Ok(())
            }
            _ => Err(Refusal::Invalid),
        }
    }

    fn remember(&mut self, packets: u32, answer: Answer) {
        let limit = if let Answer::Read { length, .. } = answer { length } else { 0 };
        let Responder { outcomes, expected, msn, .. } = &mut self.responder;
        outcomes.push_back(Outcome {
            first_psn: *expected,
            packets,
            msn: *msn,
            answer,
            start: 0,
            next: 0,
            end: packets,
            limit,
            answered: false,
        });
    }

    fn complete_receive(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
        opcode: WcOpcode,
        byte_len: u32,
        invalidated: Option<RKey>,
    ) {
        if let Some(wr_id) = self.rq.pop(&mut shared.mrs) {
            let immediate = packet.immdt().map(|immdt| immdt.value());
            let plain = self.completion(wr_id, WcStatus::Success, opcode);
            let wc = WorkCompletion { byte_len, immediate, invalidated, ..plain };
            self.push(shared, self.recv_cq, wc, packet.bth.solicited());
        }
    }

    /// A request that was executed before: nothing is executed again, but the answer may have been
    /// lost.
    fn receive_duplicate(&mut self, shared: &mut Shared, packet: &Packet<'_>) {
        shared.count(Counter::DuplicateRequest);
        let psn = packet.bth.psn();
        if !packet.opcode.is_answered_explicitly() {
            if packet.bth.ack_req() {
                self.responder.ack_owed = true;
                self.schedule(shared);
            }
            return;
        }
        let path_mtu = self.connection.map(|c| c.path_mtu);
        let (Some(outcome), Some(path_mtu)) = (self.responder.outcome_at(psn), path_mtu) else {
            shared.count(Counter::RxForgottenDuplicate);
            return;
        };
        let skipped = psn.distance(outcome.first_psn) as u32;
        let (mut end, mut limit) = (outcome.packets, 0);
        let same = match outcome.answer {
            // All that is left of it, or a part of that.
            Answer::Read { va, rkey, length } => {
                let offset = skipped << path_mtu.shift();
                let rest = length.saturating_sub(offset);
                packet.opcode.operation() == Operation::ReadRequest
                    && packet.reth().is_some_and(|reth| {
                        let wanted = reth.length();
                        (end, limit) = (skipped + path_mtu.packets(wanted), offset.saturating_add(wanted));
                        let may_read = || {
                            shared.mrs.grant(self.pd, rkey, Access::REMOTE_READ, reth.va(), wanted).is_ok()
                        };
                        reth.rkey() == rkey
                            && Some(reth.va()) == va.checked_add(offset.into())
                            && wanted <= rest
                            && (rest == 0 || wanted > 0 && may_read())
                    })
            }
            Answer::Atomic { .. } => {
                matches!(packet.opcode.operation(), Operation::CompareSwap | Operation::FetchAdd)
            }
            Answer::Done => matches!(packet.opcode.operation(), Operation::Flush | Operation::AtomicWrite),
        };
        if !same {
            shared.count(Counter::RxForgottenDuplicate);
            return;
        }
        (outcome.start, outcome.next, outcome.end, outcome.limit) = (skipped, skipped, end, limit);
        self.schedule(shared);
    }

    fn refuse(&mut self, shared: &mut Shared, refusal: Refusal) {
        match refusal {
            Refusal::NotReady => {
                let Some(timer) = self.responder.min_rnr_timer else { return };
                self.responder.nak_sent = true;
                shared.count(Counter::SendRnrErr);
                self.owe_nak(shared, Syndrome::RnrNak(timer));
            }
            Refusal::Invalid => {
                shared.count(Counter::RespInvalidRequest);
                self.owe_nak(shared, Syndrome::Nak(Nak::InvalidRequest));
                self.fail_receive(shared, WcStatus::RemInvReqErr, Event::QpReqErr(self.handle));
            }
            Refusal::Access => {
                shared.count(Counter::RespRemoteAccessErrors);
                self.owe_nak(shared, Syndrome::Nak(Nak::RemoteAccessError));
                self.fail_receive(shared, WcStatus::RemAccessErr, Event::QpAccessErr(self.handle));
            }
            Refusal::Receive(status, nak) => {
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

    /// The end of a connection by a bad request: the receive in hand tells the application, or,
    /// when there is none, an event does (C9-222.1.1).
    fn fail_receive(&mut self, shared: &mut Shared, status: WcStatus, event: Event) {
        match self.responder.message {
            Message::Send { .. } => self.complete_receive_in_error(shared, status),
            _ => shared.raise(event),
        }
        self.responder.message = Message::None;
        self.enter_error(shared);
    }

    /// The NAK names the expected PSN, and acknowledges everything before it.
    fn owe_nak(&mut self, shared: &mut Shared, syndrome: Syndrome) {
        self.responder.nak_owed = Some((self.responder.expected, syndrome));
        self.responder.ack_owed = false;
        self.schedule(shared);
    }

    /// Writes the next response frame, if one is owed.
    pub(crate) fn transmit_response(&mut self, shared: &mut Shared, buffer: &mut [u8]) -> Option<usize> {
        let connection = self.connection?;
        if let Some(position) = self.responder.outcomes.iter().position(Outcome::is_owed) {
            return self.write_outcome(shared, buffer, &connection, position);
        }
        let responder = &mut self.responder;
        let (psn, syndrome) = match responder.nak_owed.take() {
            Some(nak) => nak,
            None if responder.ack_owed => {
                responder.ack_owed = false;
                (responder.expected - 1, Syndrome::ACK)
            }
            None => return None,
        };
        let bth = Bth::new(Opcode::RC_ACKNOWLEDGE, connection.dest_qpn, psn);
        let mut frame = FrameBuilder::start(buffer, &connection.header, bth, 0)?;
        frame.put(&Aeth::new(syndrome, responder.msn));
        shared.count(Counter::SentPkts);
        Some(frame.finish())
    }

    fn write_outcome(
        &mut self,
        shared: &mut Shared,
        buffer: &mut [u8],
        connection: &Connection,
        position: usize,
    ) -> Option<usize> {
        let outcome = self.responder.outcomes.get_mut(position)?;
        let index = outcome.next;
        let psn = outcome.first_psn + index;
        let aeth = Aeth::new(Syndrome::ACK, outcome.msn);
        let frame = match outcome.answer {
            Answer::Atomic { original } => {
                let bth = Bth::new(Opcode::RC_ATOMIC_ACKNOWLEDGE, connection.dest_qpn, psn);
                let mut frame = FrameBuilder::start(buffer, &connection.header, bth, 0)?;
                frame.put(&aeth);
                frame.put(&AtomicAckEth::new(original));
                frame
            }
            Answer::Done => {
                let bth = Bth::new(Opcode::RC_READ_RESPONSE_ONLY, connection.dest_qpn, psn);
                let mut frame = FrameBuilder::start(buffer, &connection.header, bth, 0)?;
                frame.put(&aeth);
                frame
            }
            Answer::Read { va, rkey, length } => {
                let offset = index << connection.path_mtu.shift();
                let payload = (outcome.limit - offset).min(connection.path_mtu.bytes());
                let opcode = match (index == outcome.start, index + 1 == outcome.end) {
                    (true, true) => Opcode::RC_READ_RESPONSE_ONLY,
                    (true, false) => Opcode::RC_READ_RESPONSE_FIRST,
                    (false, false) => Opcode::RC_READ_RESPONSE_MIDDLE,
                    (false, true) => Opcode::RC_READ_RESPONSE_LAST,
                };
                let bth = Bth::new(opcode, connection.dest_qpn, psn);
                let mut frame = FrameBuilder::start(buffer, &connection.header, bth, payload as usize)?;
                if opcode.has(Extension::Aeth) {
                    frame.put(&aeth);
                }
                if length > 0 {
                    let va = va.wrapping_add(offset.into());
                    // Checked for each packet: the region may have gone since the request came.
                    match shared.mrs.grant(self.pd, rkey, Access::REMOTE_READ, va, payload) {
                        Ok(grant) => frame.payload().copy_from_slice(shared.mrs.granted(grant)),
                        // The peer has had all of it before, and may have let go of it since.
                        Err(_) if outcome.answered => {
                            outcome.next = outcome.end;
                            shared.count(Counter::RxForgottenDuplicate);
                            return self.transmit_response(shared, buffer);
                        }
                        Err(_) => {
                            self.refuse_read_under_way(shared, psn);
                            return self.transmit_response(shared, buffer);
                        }
                    }
                }
                frame
            }
        };
        outcome.next += 1;
        outcome.answered |= !outcome.is_owed();
        shared.count(Counter::SentPkts);
        Some(frame.finish())
    }

    /// The memory of a READ went away while its response was under way.
    fn refuse_read_under_way(&mut self, shared: &mut Shared, psn: Psn) {
        shared.count(Counter::RespRemoteAccessErrors);
        self.responder.silence();
        self.responder.nak_owed = Some((psn, Syndrome::Nak(Nak::RemoteAccessError)));
        self.fail_receive(shared, WcStatus::RemAccessErr, Event::QpAccessErr(self.handle));
    }
}

/// The right that a FLUSH needs, of the queue pair and of the memory.
fn flush_access(feth: &Feth) -> Access {
    let kind = feth.flush_type();
    let global = if kind.global_visibility { Access::FLUSH_GLOBAL } else { Access::NONE };
    let persistent = if kind.persistence { Access::FLUSH_PERSISTENT } else { Access::NONE };
    global | persistent
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An outcome may be remembered for so long that its PSNs come round again.
    #[test]
    fn a_duplicate_is_of_the_latest_outcome_at_its_psn() {
        let outcome = |first_psn, packets, answer| Outcome {
            first_psn: Psn::new(first_psn),
            packets,
            msn: 0,
            answer,
            start: 0,
            next: packets,
            end: packets,
            limit: 0,
            answered: true,
        };
        let mut responder = Responder::default();
        let long = Answer::Read { va: 0, rkey: RKey(1), length: 1 << 30 };
        responder.outcomes.push_back(outcome(0xff_0000, 1 << 20, long));
        responder.outcomes.push_back(outcome(0x00_1000, 1, Answer::Atomic { original: 7 }));
        let found = responder.outcome_at(Psn::new(0x00_1000)).unwrap();
        assert!(matches!(found.answer, Answer::Atomic { original: 7 }));
        let found = responder.outcome_at(Psn::new(0x00_1001)).unwrap();
        assert!(matches!(found.answer, Answer::Read { .. }));
        assert!(responder.outcome_at(Psn::new(0xfe_ffff)).is_none());
    }
}
