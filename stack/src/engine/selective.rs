//! Selective repeat, the sending half: packets that the peer holds are not retransmitted, and missing ones are
//! retransmitted once a packet sent later has arrived.
//!
//! Every transmission has a serial number, and every arrival (a request that is reported as held or acknowledged, a
//! response) is evidence of one. Packets of a queue pair stay in order, so a transmission before the newest evidence that
//! has not arrived is lost. A retransmission gets a new number, so the same rule determines when it is lost as well.
//! Retransmissions overtake held requests, so of those only the reported ones are evidence.

use ferroce_driver::Nanos;
use ferroce_wire::{Nak, Opcode, Operation, Packet, Position, Psn, Sack, Syndrome};

use crate::engine::frame_slot::FrameSlot;
use crate::engine::psn_set::{PsnSet, SPAN};
use crate::engine::qp::QueuePair;
use crate::engine::reorder::Reorder;
use crate::engine::shared::Shared;
use crate::engine::sq::Wqe;
use crate::telemetry::counters::Counter;
use crate::verbs::{SendOp, WcStatus};

/// The additional state of a queue pair if both ends have negotiated selective repeat.
pub(crate) struct Selective {
    pub(crate) reorder: Reorder,
    pub(crate) scoreboard: Scoreboard,
}

impl Selective {
    pub(crate) fn new(rq_psn: Psn, window: u32) -> Selective {
        Selective { reorder: Reorder::new(rq_psn), scoreboard: Scoreboard::new(window) }
    }
}

/// The state of the packets in flight. PSNs are those from the requester's `una` to `sent`, less than `SPAN`.
pub(crate) struct Scoreboard {
    /// The most packets in flight that are not known to have arrived.
    window: u32,
    /// READs are requested in parts of this many packets, each a READ to the responder, so that the packets in flight stay
    /// within the span.
    read_part: u32,
    /// Everything before it was executed.
    executed: Psn,
    /// Not to be retransmitted: the responder holds or has executed it; for a READ or an atomic, its response has arrived.
    held: PsnSet,
    /// To be retransmitted.
    lost: PsnSet,
    /// Sent more than once: an arrival may be of any transmission.
    resent: PsnSet,
    /// READs and atomics: only their responses complete them.
    explicit: PsnSet,
    /// Those whose requests are held early.
    waiting: PsnSet,
    transmissions: Box<[Transmission; SPAN as usize]>,
    /// The newest packet that requested an acknowledgement because it filled the window.
    asked: Psn,
    /// The serial number of the newest transmission.
    serial: u32,
    /// Executed and answered requests: evidence about everything executed before, and about the next expected request.
    /// Others may be held, and retransmissions overtake them.
    progress: Evidence,
    /// Held requests: evidence about the requests before them.
    named: Evidence,
    /// There is new evidence.
    fresh: bool,
    /// After the newest PSN known to have arrived.
    high: Psn,
    /// The shortest time from a transmission to its evidence, in ticks.
    min_rtt: u32,
}

#[derive(Clone, Copy, Default)]
struct Transmission {
    serial: u32,
    /// The time, in ticks that wrap.
    at: u32,
}

/// The newest transmission that is known to have arrived.
#[derive(Clone, Copy, Default)]
struct Evidence {
    serial: u32,
    /// The PSN after it.
    behind: Psn,
    /// It was a retransmission.
    is_resent: bool,
}

impl Evidence {
    /// Whether it is newer than the transmission with this number, for packets before `psn`.
    fn is_after(&self, serial: u32, psn: Psn) -> bool {
        let newer = self.serial.wrapping_sub(serial) as i32;
        newer > 0 || newer == 0 && self.behind.distance(psn) > 0
    }
}

/// The most packets in flight. A hole is filled one window after it was detected, and as many new packets are sent
/// meanwhile, if the span has room for two windows and a part of a READ.
const MAX_SELECTIVE_WINDOW: u32 = SPAN * 7 / 16;

/// 256 ns, so that 32 bits of ticks exceed the lifetime of a packet in flight.
fn ticks(now: Nanos) -> u32 {
    (now.0 >> 8) as u32
}

impl Scoreboard {
    fn new(window: u32) -> Scoreboard {
        let window = window.min(MAX_SELECTIVE_WINDOW);
        Scoreboard {
            window,
            read_part: (window / 4).max(1),
            executed: Psn::default(),
            held: PsnSet::default(),
            lost: PsnSet::default(),
            resent: PsnSet::default(),
            explicit: PsnSet::default(),
            waiting: PsnSet::default(),
            transmissions: Box::new([Transmission::default(); SPAN as usize]),
            asked: Psn::default(),
            serial: 0,
            progress: Evidence::default(),
            named: Evidence::default(),
            fresh: false,
            high: Psn::default(),
            min_rtt: u32::MAX,
        }
    }

    /// Ready to send from `psn` on.
    pub(crate) fn start(&mut self, psn: Psn) {
        self.executed = psn;
        self.high = psn;
        self.asked = psn - 1;
    }

    fn transmission(&mut self, psn: Psn) -> &mut Transmission {
        &mut self.transmissions[(psn.value() % SPAN) as usize]
    }

    /// How many of the packets between `una` and `sent` may still be in flight.
    fn in_flight(&self, una: Psn, sent: Psn) -> u32 {
        (sent.distance(una).max(0) as u32).saturating_sub(self.held.len())
    }

    /// Whether `wanted` more may be sent from `psn` on, the first that was never sent.
    pub(crate) fn admits(&self, una: Psn, psn: Psn, wanted: u32) -> bool {
        let span = psn.distance(una).max(0) as u32 + wanted;
        span < SPAN && self.in_flight(una, psn) + wanted <= self.window
    }

    /// Whether a new packet at `psn` must request an acknowledgement because nothing more may be sent after it. Not if
    /// another one did: otherwise every packet would be acknowledged while the window is full.
    pub(crate) fn must_ask(&mut self, una: Psn, psn: Psn) -> bool {
        let under_way = self.asked.distance(una) >= 0 && !self.held.contains(self.asked);
        let must = !under_way && !self.admits(una, psn + 1, 1);
        if must {
            self.asked = psn;
        }
        must
    }

    /// How many packets of a READ are requested at once from `packet` on, of those that are left.
    pub(crate) fn read_count(&self, packet: u32, packets: u32) -> u32 {
        (packets - packet).min(self.read_part - packet % self.read_part)
    }

    /// A request that occupies `count` PSNs was sent.
    pub(crate) fn note_sent(&mut self, psn: Psn, count: u32, explicit: bool, now: Nanos) {
        self.serial = self.serial.wrapping_add(1);
        let transmission = Transmission { serial: self.serial, at: ticks(now) };
        for i in 0..count {
            *self.transmission(psn + i) = transmission;
        }
        if explicit {
            self.explicit.insert_range_without(psn, psn + count, &PsnSet::default());
        }
    }

    /// As `note_sent`, for a retransmission.
    fn note_resent(&mut self, psn: Psn, count: u32, now: Nanos) {
        self.note_sent(psn, count, false, now);
        self.resent.insert_range_without(psn, psn + count, &PsnSet::default());
        self.lost.remove_range(psn, psn + count);
    }

    /// The request at `psn`, a READ or an atomic, is held at the responder until the missing packets before it were
    /// executed: until then no response to it can be lost.
    fn note_waiting(&mut self, psn: Psn, sent: Psn) {
        if psn.distance(self.executed) < 0 {
            return;
        }
        let serial = self.transmission(psn).serial;
        let mut at = psn;
        while sent.distance(at) > 0 && self.explicit.contains(at) && self.transmission(at).serial == serial {
            self.waiting.insert(at);
            self.lost.remove(at);
            at += 1;
        }
    }

    /// A transmission of `psn` has arrived; `is_named` if it is held.
    fn arrived(&mut self, psn: Psn, is_named: bool, now: Nanos) {
        let Transmission { serial, at } = *self.transmission(psn);
        let is_resent = self.resent.contains(psn);
        let took = ticks(now).wrapping_sub(at);
        if (psn + 1).distance(self.high) > 0 {
            self.high = psn + 1;
        }
        if !is_resent {
            self.min_rtt = self.min_rtt.min(took);
        } else if took < self.min_rtt {
            // Too early for the retransmission: the first one was late, not lost.
            return;
        }
        let evidence = Evidence { serial, behind: psn + 1, is_resent };
        let newest = if is_named { &mut self.named } else { &mut self.progress };
        if evidence.is_after(newest.serial, newest.behind) {
            *newest = evidence;
            self.fresh = true;
        }
    }

    /// Everything before `psn` was executed.
    fn executed_before(&mut self, psn: Psn, now: Nanos) {
        while psn.distance(self.executed) > 0 {
            self.arrived(self.executed, false, now);
            self.waiting.remove(self.executed);
            self.executed += 1;
        }
    }

    /// As `executed_before`, and nothing is held after it, because the responder would have reported it.
    fn all_executed_before(&mut self, psn: Psn, now: Nanos) {
        self.executed_before(psn, now);
        if self.progress.is_after(self.named.serial, self.named.behind) {
            self.named = self.progress;
        }
    }

    /// A response has arrived.
    fn answered(&mut self, psn: Psn, now: Nanos) {
        self.arrived(psn, false, now);
        self.held.insert(psn);
        self.executed_before(psn + 1, now);
    }

    /// The responder lacks `missing` and reports what it holds after it. Returns whether it reported anything new.
    fn named(&mut self, missing: Psn, sent: Psn, sack: &Sack, now: Nanos) -> bool {
        let unknown = PsnSet::from_bits(sack.bits()).without(&self.held);
        let (mut any, mut from) = (false, missing + 1);
        while let Some(psn) = unknown.first(from, sent) {
            from = psn + 1;
            self.arrived(psn, true, now);
            if self.explicit.contains(psn) {
                self.note_waiting(psn, sent);
            } else {
                any |= self.held.insert(psn);
            }
        }
        // Packets after it may not have found room, and then none is reported.
        if !self.resent.contains(missing) && !self.held.contains(missing) {
            self.lost.insert(missing);
        }
        any
    }

    /// Everything before `una` is complete.
    fn forget(&mut self, from: Psn, una: Psn) {
        let Scoreboard { held, lost, resent, explicit, waiting, .. } = self;
        for set in [held, lost, resent, explicit, waiting] {
            set.remove_range(from, una);
        }
    }

    /// Executed packets after an incomplete READ are not retransmitted.
    fn keep_executed(&mut self, una: Psn) {
        if self.executed.distance(una) > 0 {
            self.held.insert_range_without(una, self.executed, &self.explicit);
        } else {
            self.executed = una;
        }
    }

    /// Determines what is lost from the evidence since the last time. Returns whether anything must be retransmitted.
    fn find_lost(&mut self, una: Psn, sent: Psn) -> bool {
        if std::mem::take(&mut self.fresh) {
            let Scoreboard { progress, named, executed, .. } = *self;
            let newest = if named.is_after(progress.serial, progress.behind) { named } else { progress };
            // First transmissions are in the order of their PSNs.
            let ordered = !newest.is_resent && sent.distance(self.high) > 0;
            let end = if ordered { self.high } else { sent };
            let mut from = una;
            while let Some(psn) = self.held.first_missing(from, end) {
                from = psn + 1;
                let shown = if psn.distance(executed) <= 0 { newest } else { named };
                let Transmission { serial, .. } = *self.transmission(psn);
                if shown.is_after(serial, psn) && !self.waiting.contains(psn) {
                    self.lost.insert(psn);
                }
            }
        }
        self.lost.len() > 0
    }

    /// Everything that is not known to be held is considered lost. The oldest is in any case: it may have been held, and
    /// found no receive.
    pub(crate) fn lose_all(&mut self, una: Psn, sent: Psn) {
        self.held.remove(una);
        self.waiting = PsnSet::default();
        self.lost.insert_range_without(una, sent, &self.held);
    }

    /// This must be retransmitted.
    pub(crate) fn lose(&mut self, psn: Psn) {
        self.lost.insert(psn);
    }

    /// How many packets are requested again from `psn` on, of the `most` that are left of its part. If the request itself
    /// may be lost, all of them: the responder must not process a part of it as a separate READ, which would exceed the
    /// number that it expects.
    fn missing_of_read(&self, psn: Psn, most: u32) -> u32 {
        if psn.distance(self.executed) >= 0 {
            return most;
        }
        let missing = |at: &u32| self.lost.contains(psn + *at) && !self.held.contains(psn + *at);
        1 + (1..most).take_while(missing).count() as u32
    }

    /// The oldest that must be retransmitted.
    fn next_lost(&mut self, una: Psn, sent: Psn) -> Option<Psn> {
        loop {
            let psn = self.lost.first(una, sent)?;
            if !self.held.contains(psn) {
                return Some(psn);
            }
            self.lost.remove(psn);
        }
    }
}

impl QueuePair {
    /// Writes the oldest request that must be retransmitted.
    #[inline(never)]
    pub(crate) fn transmit_again(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let (number, packet, count) = self.next_again(shared)?;
        let psn = self.sq.wqe(number).first_psn + packet;
        let length = match self.write_request(shared, slot, (number, packet, count), true) {
            Some(length) => length,
            None => {
                let path_mtu = self.path_mtu()?;
                if !self.await_bytes(shared, number, packet, path_mtu) {
                    return None;
                }
                self.write_request(shared, slot, (number, packet, count), true)?
            }
        };
        shared.count(Counter::RetransmittedPkts);
        if let Some(selective) = &mut self.selective {
            selective.scoreboard.note_resent(psn, count, shared.now);
        }
        self.ensure_ack_timer(shared);
        Some(length)
    }

    /// The first lost packet that can be sent: its work request, its number there, and how many packets it requests. A READ
    /// without room for its responses does not delay other requests, which the peer may need to free its own room.
    fn next_again(&mut self, shared: &mut Shared) -> Option<(u32, u32, u32)> {
        let mut from = self.requester.una();
        let mut reads_wait = false;
        loop {
            let (number, packet) = self.next_lost(from)?;
            let wqe = *self.sq.wqe(number);
            if !wqe.kind.is_read {
                return Some((number, packet, 1));
            }
            let psn = wqe.first_psn + packet;
            let scoreboard = &self.selective.as_ref()?.scoreboard;
            let count = scoreboard.missing_of_read(psn, scoreboard.read_count(packet, wqe.packets));
            if !reads_wait && let Some(count) = self.room_for_read(shared, number, psn, count) {
                return Some((number, packet, count));
            }
            reads_wait = true;
            from = wqe.end_psn();
        }
    }

    /// The first lost packet from `from` on: its work request, and its number there.
    pub(crate) fn next_lost(&mut self, from: Psn) -> Option<(u32, u32)> {
        let sent = self.requester.sent();
        let psn = self.selective.as_mut()?.scoreboard.next_lost(from, sent)?;
        let number = self.find_sent(psn)?;
        Some((number, psn.distance(self.sq.wqe(number).first_psn) as u32))
    }

    /// The PSN before which the peer has executed everything: with selective repeat it may be after READs whose responses
    /// have not arrived.
    pub(crate) fn executed_by_peer(&self) -> Psn {
        let una = self.requester.una();
        match &self.selective {
            Some(selective) if selective.scoreboard.executed.distance(una) > 0 => {
                selective.scoreboard.executed
            }
            _ => una,
        }
    }

    /// The work request of `psn`, which was sent.
    fn find_sent(&self, psn: Psn) -> Option<u32> {
        let head = self.sq.head();
        let (mut from, mut count) = (head, self.requester.started(head));
        // The last one that starts at `psn` or before.
        while count > 1 {
            let middle = from.wrapping_add(count / 2);
            if psn.distance(self.sq.wqe(middle).first_psn) >= 0 {
                from = middle;
                count -= count / 2;
            } else {
                count /= 2;
            }
        }
        let wqe = self.sq.wqe(from);
        let inside = psn.distance(wqe.first_psn) >= 0 && psn.distance(wqe.end_psn()) < 0;
        (count == 1 && wqe.started && inside).then_some(from)
    }

    /// Processes an ACK, a NAK, a READ response or an Atomic Acknowledge of a peer that uses selective repeat; `psn` is
    /// outstanding.
    #[inline(never)]
    pub(crate) fn receive_selective(
        &mut self,
        shared: &mut Shared,
        packet: &Packet<'_>,
        psn: Psn,
        syndrome: Syndrome,
    ) {
        let now = shared.now;
        let (sent, executed) = (self.requester.sent(), self.executed_by_peer());
        let is_ack = matches!(syndrome, Syndrome::Ack { .. });
        let Some(Selective { scoreboard, .. }) = self.selective.as_deref_mut() else { return };
        match packet.opcode.operation() {
            Operation::ReadResponse | Operation::AtomicAcknowledge if is_ack => {
                scoreboard.executed_before(psn, now);
                // Before it is evaluated, earlier work requests are completed.
                self.complete_executed(shared);
                self.take_answer(shared, packet, psn);
            }
            Operation::SelectiveAcknowledge => {
                let Some(sack) = packet.sack().filter(|_| is_ack) else {
                    shared.count(Counter::RxLengthErrors);
                    return;
                };
                scoreboard.executed_before(psn, now);
                let any = scoreboard.named(psn, sent, sack, now);
                shared.count(Counter::RcvdSelectiveAck);
                if any {
                    self.note_held(shared);
                }
            }
            _ if is_ack => scoreboard.all_executed_before(psn + 1, now),
            _ => scoreboard.executed_before(psn, now),
        }
        self.complete_executed(shared);
        if self.staged.is_some() && self.executed_by_peer() != executed {
            self.free_sends(shared);
        }
        let ahead = psn.distance(self.requester.una());
        if ahead == 0 && !is_ack || ahead > 0 && self.refused_before_answers(psn, syndrome) {
            self.take_nak(shared, syndrome, psn);
        }
        let (una, sent) = (self.requester.una(), self.requester.sent());
        if let Some(selective) = &mut self.selective
            && selective.scoreboard.find_lost(una, sent)
        {
            self.schedule(shared);
        }
    }

    /// Whether this NAK is for a request before which everything was executed, although not all responses have arrived. It
    /// may have been held, and no longer is.
    fn refused_before_answers(&mut self, psn: Psn, syndrome: Syndrome) -> bool {
        let asks = matches!(syndrome, Syndrome::RnrNak(_) | Syndrome::Nak(Nak::PsnSequenceError));
        let Some(Selective { scoreboard, .. }) = self.selective.as_deref_mut() else { return false };
        // If it was executed since, the NAK is late.
        let counts = asks && psn == scoreboard.executed;
        if counts {
            scoreboard.held.remove(psn);
        }
        counts
    }

    /// Accepts the data of a READ response or Atomic Acknowledge, in order or not: until the work request is complete, its
    /// memory is undefined.
    fn take_answer(&mut self, shared: &mut Shared, packet: &Packet<'_>, psn: Psn) {
        let (Some(number), Some(path_mtu)) = (self.find_sent(psn), self.path_mtu()) else { return };
        let wqe = *self.sq.wqe(number);
        let (length, data) = match (wqe.op, packet.atomic_ack_eth()) {
            (SendOp::Read(_), None) => (wqe.length, packet.payload),
            (SendOp::Flush { .. } | SendOp::AtomicWrite(_), None) => (0, packet.payload),
            (op, Some(answer)) if op.kind().is_atomic => (8, &answer.original().to_ne_bytes()[..]),
            _ => return self.refuse_answer(shared, psn, WcStatus::LocQpOpErr),
        };
        let index = psn.distance(wqe.first_psn) as u32;
        if !fits_place(packet.opcode, &wqe, index) {
            return self.refuse_answer(shared, psn, WcStatus::LocQpOpErr);
        }
        let offset = index << path_mtu.shift();
        let expected = (length - offset).min(path_mtu.bytes());
        if data.len() != expected as usize {
            return self.refuse_answer(shared, psn, WcStatus::LocLenErr);
        }
        if self.selective.as_ref().is_some_and(|selective| selective.scoreboard.held.contains(psn)) {
            shared.count(Counter::StaleResponse);
            return;
        }
        if !shared.mrs.scatter(self.sq.sges(number), offset, data)
            && self.land_response(shared, number, (offset, data)).is_err()
        {
            self.await_room(shared, psn);
            return;
        }
        if let Some(selective) = &mut self.selective {
            selective.scoreboard.answered(psn, shared.now);
        }
        self.note_held(shared);
    }

    /// More packets are held: they leave the window, and the peer responds.
    fn note_held(&mut self, shared: &mut Shared) {
        self.arm_ack_timer(shared);
        self.schedule(shared);
    }

    /// An invalid response ends the connection when it is the expected one; before that it is considered lost.
    fn refuse_answer(&mut self, shared: &mut Shared, psn: Psn, status: WcStatus) {
        if psn == self.requester.una() {
            self.fail_oldest(shared, status);
        } else {
            shared.count(Counter::StaleResponse);
        }
    }

    /// Completes, in order, work requests that were executed and have their data.
    fn complete_executed(&mut self, shared: &mut Shared) {
        let (from, sent) = (self.requester.una(), self.requester.sent());
        let mut una = from;
        while let (Some(wqe), Some(selective)) = (self.sq.front(), &self.selective)
            && wqe.started
        {
            let Scoreboard { executed, held, read_part, .. } = &selective.scoreboard;
            let (start, first, end) = (una, wqe.first_psn, wqe.end_psn());
            let known = if end.distance(sent) > 0 { sent } else { end };
            if wqe.kind.is_read_or_atomic {
                una = held.first_missing(una, known).unwrap_or(known);
            } else if executed.distance(una) > 0 {
                una = if known.distance(*executed) > 0 { *executed } else { known };
            }
            let complete = una == end;
            if wqe.kind.is_read {
                // Each part was a separate READ; the last ends with the work request.
                let parts = |psn: Psn| psn.distance(first) as u32 / read_part;
                let last = if complete { end - 1 } else { una };
                self.requester.end_reads(parts(last) - parts(start));
            }
            if !complete {
                break;
            }
            self.complete_oldest(shared);
        }
        let Some(selective) = &mut self.selective else { return };
        selective.scoreboard.forget(from, una);
        selective.scoreboard.keep_executed(una);
        if una != from {
            self.acknowledged(shared, una);
            if self.staged.is_some() {
                self.settle_reads(shared);
            }
        }
    }
}

/// Whether a response is valid at packet `index` of the work request: a part of a READ may start and end anywhere, but not
/// extend before its start or beyond its end.
fn fits_place(opcode: Opcode, wqe: &Wqe, index: u32) -> bool {
    let begins = matches!(opcode.position(), Position::First | Position::Only);
    let ends = matches!(opcode.position(), Position::Last | Position::Only);
    (index > 0 || begins) && (index + 1 < wqe.packets || ends)
}
