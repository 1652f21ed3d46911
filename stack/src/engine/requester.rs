//! The sending half of a connection: PSNs, segmentation, and the ACK timer (docs/protocol.md §4). `retransmission.rs`
//! retransmits, `completer.rs` processes responses, `ud.rs` sends datagrams.

mod retransmission;

use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_wire::{AtomicEth, Bth, Feth, Ieth, ImmDt, PathMtu, Psn, Reth, Service};

use crate::engine::crc::fill_placed;
use crate::engine::destination::Flight;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::kind::{Kind, Place};
use crate::engine::mw::MwBind;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::sq::Wqe;
use crate::telemetry::counters::Counter;
use crate::verbs::{Access, QpState, QpUpdate, ReadyToSend, SendOp, WcOpcode, WcStatus, time_of};

/// In a long message one packet in this many requests an acknowledgement, so that the window moves and a loss is detected
/// early.
pub(crate) const ACK_REQ_INTERVAL: u32 = 16;

/// How an answer is requested if lazy requests have not requested one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asking {
    /// It was requested, or nothing in flight could be answered.
    Done,
    /// At the ACK deadline.
    Late,
    /// By the next new packet.
    Next,
    /// By the newest packet, which is retransmitted.
    Again,
}

#[derive(Clone, Copy)]
pub(crate) struct Requester {
    attributes: ReadyToSend,
    /// The oldest unacknowledged PSN.
    una: Psn,
    /// The PSN after the last one sent.
    sent: Psn,
    /// The PSN of the next message to be started.
    next: Psn,
    /// The next work request to send, and its next packet. Before `sent` during a replay.
    cursor: u32,
    cursor_packet: u32,
    pub(crate) flight: Flight,
    /// READs and atomics that are started and incomplete.
    reads_outstanding: u32,
    retries_left: u8,
    rnr_retries_left: u8,
    /// When the oldest packet is considered lost.
    ack_deadline: Nanos,
    /// What happens to lazy requests at `ack_deadline`.
    asking: Asking,
    /// Nothing is sent before this, after an RNR NAK.
    rnr_deadline: Nanos,
    /// When that wait started, and for which packet.
    rnr_began: Nanos,
    rnr_psn: Psn,
    /// Since the last progress a sequence NAK has started a replay; another one is ignored.
    sequence_nak_seen: bool,
    /// Since the last progress a response has revealed a loss; another one is ignored.
    implied_nak_seen: bool,
}

impl Default for Requester {
    fn default() -> Requester {
        Requester::new(ReadyToSend::new(Psn::new(0)), 0)
    }
}

impl Requester {
    /// Ready to send, with `head` the oldest work request in the queue.
    pub(crate) fn new(attributes: ReadyToSend, head: u32) -> Requester {
        Requester {
            attributes,
            una: attributes.sq_psn,
            sent: attributes.sq_psn,
            next: attributes.sq_psn,
            cursor: head,
            cursor_packet: 0,
            flight: Flight::new(attributes.sq_psn),
            reads_outstanding: 0,
            retries_left: attributes.retry_count,
            rnr_retries_left: attributes.rnr_retry,
            ack_deadline: Nanos::NEVER,
            asking: Asking::Done,
            rnr_deadline: Nanos::NEVER,
            rnr_began: Nanos::ZERO,
            rnr_psn: attributes.sq_psn,
            sequence_nak_seen: false,
            implied_nak_seen: false,
        }
    }

    pub(crate) fn next_psn(&self) -> Psn {
        self.next
    }

    pub(crate) fn una(&self) -> Psn {
        self.una
    }

    pub(crate) fn sent(&self) -> Psn {
        self.sent
    }

    pub(crate) fn attributes(&self) -> ReadyToSend {
        self.attributes
    }

    /// Its attributes after an update.
    pub(crate) fn updated(&self, update: &QpUpdate) -> ReadyToSend {
        let ReadyToSend { sq_psn, timeout, retry_count, rnr_retry, max_rd_atomic } = self.attributes;
        ReadyToSend {
            sq_psn,
            timeout: update.timeout.unwrap_or(timeout),
            retry_count: update.retry_count.unwrap_or(retry_count),
            rnr_retry: update.rnr_retry.unwrap_or(rnr_retry),
            max_rd_atomic: update.max_rd_atomic.unwrap_or(max_rd_atomic),
        }
    }

    /// Whether a NAK has requested the oldest packet.
    pub(crate) fn is_asked_again(&self) -> bool {
        self.sequence_nak_seen
    }

    /// Changes its attributes while nothing is outstanding.
    pub(crate) fn set_attributes(&mut self, attributes: ReadyToSend) {
        self.attributes = attributes;
        self.retries_left = attributes.retry_count;
        self.rnr_retries_left = attributes.rnr_retry;
    }

    /// The next work request to send is `head`, and it is not started.
    pub(crate) fn restart_at(&mut self, head: u32) {
        self.cursor = head;
        self.cursor_packet = 0;
    }

    /// The next work request to send.
    pub(crate) fn cursor(&self) -> u32 {
        self.cursor
    }

    /// Its next packet to send.
    pub(crate) fn cursor_packet(&self) -> u32 {
        self.cursor_packet
    }

    /// Allocates the PSN of a datagram.
    pub(crate) fn take_psn(&mut self) -> Psn {
        let psn = self.next;
        self.next += 1;
        psn
    }

    /// The number of work requests from `head` on with packets sent; not valid during a replay.
    pub(crate) fn started(&self, head: u32) -> u32 {
        self.cursor.wrapping_sub(head) + u32::from(self.cursor_packet > 0)
    }

    /// This many parts of READs are complete.
    pub(crate) fn end_reads(&mut self, count: u32) {
        self.reads_outstanding -= count;
    }

    pub(crate) fn waits_for_receiver(&self) -> bool {
        self.rnr_deadline != Nanos::NEVER
    }

    /// When its next timer is due.
    #[inline]
    pub(crate) fn deadline(&self) -> Nanos {
        self.rnr_deadline.min(self.ack_deadline)
    }

    /// Stops all timers.
    pub(crate) fn stop(&mut self) {
        self.ack_deadline = Nanos::NEVER;
        self.rnr_deadline = Nanos::NEVER;
    }

    pub(crate) fn ack_timeout(&self) -> Option<Duration> {
        match self.attributes.timeout {
            0 => None,
            n => Some(time_of(n)),
        }
    }
}

impl QueuePair {
    /// Writes the next request frame, if one may be sent.
    #[inline(always)]
    pub(crate) fn transmit_request(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Option<usize> {
        // Every turn ends here, and most turns after a packet of the peer consist of nothing else.
        if self.requester.cursor == self.sq.tail() && self.selective.is_none() {
            return None;
        }
        self.transmit_next(shared, slot)
    }

    #[inline]
    fn transmit_next(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let path_mtu = self.path_mtu()?;
        loop {
            let number = self.requester.cursor;
            let sendable = matches!(self.state, QpState::Rts | QpState::Sqd);
            if !sendable || self.requester.waits_for_receiver() {
                return None;
            }
            if self.selective.is_some()
                && let Some(length) = self.transmit_again(shared, slot)
            {
                return Some(length);
            }
            if number == self.sq.tail() {
                return None;
            }
            if !self.sq.wqe(number).started && !self.start(shared, number, path_mtu) {
                // A local operation is done immediately, and the next request may be ready.
                if self.requester.cursor != number && self.state == QpState::Rts {
                    continue;
                }
                return None;
            }
            let packet = self.requester.cursor_packet;
            let count = if self.sq.wqe(number).kind.is_read { self.psns_of_read(shared, number)? } else { 1 };
            let wqe = self.sq.wqe(number);
            let psn = wqe.first_psn + packet;
            if !self.window_admits(shared, wqe.kind, psn, count) || self.read_waits(wqe, packet) {
                return None;
            }
            let (kind, after) = (wqe.kind, (packet + count, wqe.packets));
            let asks = kind.is_read_or_atomic
                || after.0 == after.1 && !(wqe.flags.lazy_ack && self.may_ask_late(shared, psn))
                || after.0.is_multiple_of(ACK_REQ_INTERVAL);
            let asks = self.must_ask(shared, psn, asks);
            let Some(length) = self.write_request(shared, slot, (number, packet, count), asks) else {
                if self.await_bytes(shared, number, packet, path_mtu) {
                    continue;
                }
                return None;
            };
            if self.service == Service::Rc {
                self.advance(shared, kind, psn, (count, asks), after);
            } else {
                self.advance_unacknowledged(shared, number, psn);
            }
            return Some(length);
        }
    }

    /// This packet was not written. If its bytes are in device memory, they are gathered. Returns whether they are there
    /// now.
    #[cold]
    pub(crate) fn await_bytes(
        &mut self,
        shared: &mut Shared,
        number: u32,
        packet: u32,
        path_mtu: PathMtu,
    ) -> bool {
        let offset = packet << path_mtu.shift();
        let len = (self.sq.wqe(number).length - offset).min(path_mtu.bytes());
        self.is_gathered(shared, number) && self.await_gather(shared, number, offset, len)
    }

    /// Assigns PSNs to the work request, if it is next. Local operations are executed.
    #[inline]
    fn start(&mut self, shared: &mut Shared, number: u32, path_mtu: PathMtu) -> bool {
        if self.state == QpState::Sqd {
            return false;
        }
        let wqe = self.sq.wqe(number);
        let is_oldest = number == self.sq.head();
        let reads = self.requester.reads_outstanding;
        if wqe.kind.is_local {
            if is_oldest {
                self.carry_out(shared, wqe.op);
            }
            return false;
        }
        if wqe.flags.fence && (reads > 0 || self.is_fetching()) {
            return false;
        }
        if wqe.kind.is_read_or_atomic && reads >= u32::from(self.requester.attributes.max_rd_atomic) {
            return false;
        }
        let access = if wqe.kind.writes_local_memory() { Access::LOCAL_WRITE } else { Access::NONE };
        if shared.mrs.check_local(self.pd, self.sq.sges(number), access).is_err() {
            // The error completes in order, after everything posted before.
            if is_oldest {
                self.fail_oldest(shared, WcStatus::LocProtErr);
            }
            return false;
        }
        let requester = &mut self.requester;
        let packets = if wqe.kind.is_atomic { 1 } else { path_mtu.packets(wqe.length) };
        requester.reads_outstanding += u32::from(wqe.kind.is_read_or_atomic);
        let wqe = self.sq.wqe_mut(number);
        wqe.first_psn = requester.next;
        wqe.packets = packets;
        wqe.started = true;
        requester.next += packets;
        true
    }

    /// Executes a local operation, which is the oldest in the queue.
    #[inline(never)]
    fn carry_out(&mut self, shared: &mut Shared, op: SendOp) {
        let failure = match op {
            SendOp::LocalInvalidate(rkey) => match self.invalidate(shared, rkey) {
                Some(invalidated) => invalidated.err().map(|_| WcStatus::LocProtErr),
                None => return,
            },
            SendOp::BindMw { mw, mr, offset, length, access } => {
                let Shared { mrs, rng, .. } = &mut *shared;
                let bind = MwBind { mw, mr, offset, length, access };
                mrs.bind(rng, self.pd, self.handle, &bind).err().map(|_| WcStatus::MwBindErr)
            }
            _ => None,
        };
        if let Some(status) = failure {
            self.fail_oldest(shared, status);
            return;
        }
        if let Some(ended) = self.sq.pop(&mut shared.mrs) {
            self.requester.cursor = self.sq.head();
            self.complete_send(shared, &ended, WcStatus::Success);
        }
    }

    /// The number of PSNs of a READ's next request: those of the response, or of the part that is requested at once. `None`
    /// if nothing of it can be requested now.
    #[cold]
    #[inline(never)]
    fn psns_of_read(&mut self, shared: &mut Shared, number: u32) -> Option<u32> {
        let (wqe, packet) = (self.sq.wqe(number), self.requester.cursor_packet);
        let count = match &self.selective {
            Some(selective) => selective.scoreboard.read_count(packet, wqe.packets),
            None => wqe.packets - packet,
        };
        let psn = wqe.first_psn + packet;
        self.room_for_read(shared, number, psn, count)
    }

    /// How many of the packets of a READ from `psn` on may be requested; `None` if none now.
    pub(crate) fn room_for_read(
        &mut self,
        shared: &mut Shared,
        number: u32,
        psn: Psn,
        count: u32,
    ) -> Option<u32> {
        if shared.staging.is_used() { self.reserve_read(shared, number, psn, count) } else { Some(count) }
    }

    /// Whether this is a later part of a READ, and the peer accepts no more READs now.
    #[inline]
    fn read_waits(&self, wqe: &Wqe, packet: u32) -> bool {
        let Requester { reads_outstanding, attributes, .. } = &self.requester;
        self.is_later_part(wqe.kind, packet) && *reads_outstanding >= u32::from(attributes.max_rd_atomic)
    }

    #[inline]
    fn is_later_part(&self, kind: &Kind, packet: u32) -> bool {
        self.selective.is_some() && kind.is_read && packet > 0
    }

    /// Advances after a packet at `psn` that was written and occupies `count` PSNs: `next` of the `packets` of its work
    /// request is the next one to send.
    #[inline(always)]
    fn advance(
        &mut self,
        shared: &mut Shared,
        kind: &Kind,
        psn: Psn,
        (count, asks): (u32, bool),
        (next, packets): (u32, u32),
    ) {
        let is_later_part = self.is_later_part(kind, self.requester.cursor_packet);
        if let Some(selective) = &mut self.selective {
            selective.scoreboard.note_sent(psn, count, kind.is_read_or_atomic, shared.now);
        }
        let is_first_to_ask = asks && !self.awaits_answer();
        self.note_departure(shared, kind, psn, (count, asks));
        let requester = &mut self.requester;
        requester.reads_outstanding += u32::from(is_later_part);
        let end = psn + count;
        requester.cursor_packet = next;
        if next == packets {
            requester.cursor = requester.cursor.wrapping_add(1);
            requester.cursor_packet = 0;
        }
        if end.distance(requester.sent) > 0 {
            requester.sent = end;
        } else if requester.asking != Asking::Again {
            shared.count(Counter::RetransmittedPkts);
        }
        // Earlier packets have not requested an answer, however long ago they were sent. The last packet of a lazy message
        // is the last that can.
        let ends_lazy = next == packets && !asks && requester.asking == Asking::Done && !self.awaits_answer();
        if is_first_to_ask || ends_lazy {
            self.arm_ack_timer(shared);
        } else {
            self.ensure_ack_timer(shared);
        }
    }

    /// Whether the last packet of a lazy message may leave the request for the ACK to a later one. One of 16 in a row
    /// requests one, and so does each one if much is in flight to the destination: unacknowledged packets occupy others'
    /// room.
    #[cold]
    fn may_ask_late(&self, shared: &Shared, psn: Psn) -> bool {
        let Requester { sent, asking, attributes, .. } = &self.requester;
        psn == *sent
            && *asking != Asking::Next
            && attributes.timeout > 0
            && self.selective.is_none()
            && self.unasked(psn) < ACK_REQ_INTERVAL as i32 - 1
            && self.is_quiet(shared)
    }

    /// Whether nothing in flight requests an answer, because its requests are lazy, and nothing is being retransmitted.
    #[cold]
    fn is_lazy(&self) -> bool {
        let newest = self.requester.cursor.wrapping_sub(1);
        if self.awaits_answer() || self.requester.cursor_packet > 0 || self.requester.cursor == self.sq.head()
        {
            return false;
        }
        let wqe = self.sq.wqe(newest);
        wqe.flags.lazy_ack && wqe.first_psn + wqe.packets == self.requester.sent && self.selective.is_none()
    }

    /// Starts the ACK timer if it is not running.
    #[inline]
    pub(crate) fn ensure_ack_timer(&mut self, shared: &mut Shared) {
        if self.requester.ack_deadline == Nanos::NEVER {
            self.arm_ack_timer(shared);
        }
    }

    /// As [`advance`](QueuePair::advance) on an unreliable connection: what was sent is complete.
    fn advance_unacknowledged(&mut self, shared: &mut Shared, number: u32, psn: Psn) {
        let packets = self.sq.wqe(number).packets;
        let requester = &mut self.requester;
        (requester.una, requester.sent) = (psn + 1, psn + 1);
        requester.cursor_packet += 1;
        let is_over = requester.cursor_packet == packets;
        if is_over {
            self.complete_oldest(shared);
            self.requester.restart_at(self.sq.head());
        }
    }

    /// Restarts the ACK timer. It runs for a scheduled queue pair too, because a port that accepts no frames gives no queue
    /// pair a turn.
    pub(crate) fn arm_ack_timer(&mut self, shared: &mut Shared) {
        let is_in_flight = self.requester.una != self.requester.sent;
        let asks_late = is_in_flight && !self.awaits_answer() && self.is_lazy();
        let requester = &mut self.requester;
        requester.asking = if asks_late { Asking::Late } else { Asking::Done };
        requester.ack_deadline = match requester.ack_timeout() {
            Some(timeout) if asks_late => shared.now + timeout / 4,
            Some(timeout) if is_in_flight => shared.now + timeout,
            _ => Nanos::NEVER,
        };
        shared.scheduler.at(self.handle.0.index, requester.ack_deadline);
    }

    /// Progress: everything before `una` is acknowledged.
    pub(crate) fn acknowledged(&mut self, shared: &mut Shared, una: Psn) {
        let requester = &mut self.requester;
        requester.una = una;
        requester.retries_left = requester.attributes.retry_count;
        requester.rnr_retries_left = requester.attributes.rnr_retry;
        // READs before the refused request may complete meanwhile.
        if requester.waits_for_receiver() && una.distance(requester.rnr_psn) > 0 {
            requester.rnr_deadline = Nanos::NEVER;
        }
        requester.sequence_nak_seen = false;
        requester.implied_nak_seen = false;
        self.skip_acknowledged();
        self.arm_ack_timer(shared);
        self.schedule(shared);
        if self.staged.is_some() {
            self.free_sends(shared);
        }
    }

    /// Completes the oldest send as successful.
    #[inline(always)]
    pub(crate) fn complete_oldest(&mut self, shared: &mut Shared) {
        if let Some(ended) = self.sq.pop(&mut shared.mrs) {
            self.requester.reads_outstanding -= u32::from(ended.is_read_or_atomic);
            shared.counters.count_if(ended.opcode == WcOpcode::Send, Counter::RdmaSends);
            self.complete_send(shared, &ended, WcStatus::Success);
            self.note_drained(shared);
        }
    }

    /// Completes the oldest send in error; the queue pair fails, or only its send queue if it is unreliable.
    pub(crate) fn fail_oldest(&mut self, shared: &mut Shared, status: WcStatus) {
        if let Some(ended) = self.sq.pop(&mut shared.mrs) {
            self.complete_send(shared, &ended, status);
        }
        match self.service {
            Service::Rc => {
                self.responder.give_up();
                self.enter_error(shared);
            }
            _ => self.enter_send_error(shared),
        }
    }

    /// Moves the cursor to the oldest unacknowledged packet, if it is before it.
    fn skip_acknowledged(&mut self) {
        let head = self.sq.head();
        let requester = &mut self.requester;
        if (requester.cursor.wrapping_sub(head) as i32) < 0 {
            requester.cursor = head;
            requester.cursor_packet = 0;
        }
        if requester.cursor == head
            && let Some(wqe) = self.sq.front()
            && wqe.started
        {
            let done = requester.una.distance(wqe.first_psn).max(0) as u32;
            requester.cursor_packet = requester.cursor_packet.max(done);
        }
    }

    /// Writes packet `packet` of the work request `number`, which occupies `count` PSNs and may request an answer.
    #[inline(always)]
    pub(crate) fn write_request(
        &self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
        (number, packet, count): (u32, u32, u32),
        asks: bool,
    ) -> Option<usize> {
        let connection = self.connection.as_ref()?;
        let wqe = self.sq.wqe(number);
        let psn = wqe.first_psn + packet;
        let offset = packet << connection.path_mtu.shift();
        let rest = wqe.length - offset;
        let (is_first, is_last) = (packet == 0, packet + 1 == wqe.packets);
        let mut opcode = wqe.kind.opcode(Place::new(is_first, is_last))?;
        if self.service != Service::Rc {
            opcode = opcode.on(self.service)?;
        }
        let payload = if wqe.kind.has_payload { rest.min(connection.path_mtu.bytes()) } else { 0 };

        let mut bth = Bth::new(opcode, connection.dest_qpn, psn).in_partition(self.pkey);
        bth.set_ack_req(asks && self.service == Service::Rc);
        bth.set_solicited(wqe.flags.solicited && is_last && wqe.kind.notifies);

        let piece = self.sq.piece(number, offset, payload, &shared.mrs);
        let placed = match piece {
            Some(_) => slot.place(&connection.header, connection.dest_qpn, payload as usize),
            None => None,
        };
        let mut frame = if placed.is_some() {
            slot.start_placed(&connection.header, bth, payload as usize)?
        } else {
            let wants_apart = slot.wants_apart(payload);
            let apart = wants_apart.then(|| self.sq.apart(number, offset, payload, &shared.mrs)).flatten();
            slot.start_apart(&connection.header, bth, payload as usize, apart)?
        };
        match wqe.op {
            SendOp::Send => {}
            SendOp::SendWithImm(imm) if is_last => frame.put(&ImmDt::new(imm)),
            SendOp::SendWithInvalidate(rkey) if is_last => frame.put(&Ieth::new(rkey)),
            SendOp::SendWithImm(_) | SendOp::SendWithInvalidate(_) => {}
            SendOp::Write(remote) | SendOp::WriteWithImm(remote, _) => {
                if is_first {
                    frame.put(&Reth::new(remote.addr, remote.rkey, wqe.length));
                }
                if let SendOp::WriteWithImm(_, imm) = wqe.op
                    && is_last
                {
                    frame.put(&ImmDt::new(imm));
                }
            }
            SendOp::Read(remote) => {
                let wanted = rest.min(count << connection.path_mtu.shift());
                frame.put(&Reth::new(remote.addr.wrapping_add(u64::from(offset)), remote.rkey, wanted));
            }
            SendOp::CompareSwap { remote, compare, swap } => {
                frame.put(&AtomicEth::new(remote.addr, remote.rkey, swap, compare));
            }
            SendOp::FetchAdd { remote, add } => frame.put(&AtomicEth::new(remote.addr, remote.rkey, add, 0)),
            SendOp::Flush { remote, length, selectivity, kind } => {
                frame.put(&Feth::new(selectivity, kind));
                frame.put(&Reth::new(remote.addr, remote.rkey, length));
            }
            SendOp::AtomicWrite(remote) => frame.put(&Reth::new(remote.addr, remote.rkey, wqe.length)),
            SendOp::LocalInvalidate(_)
            | SendOp::BindMw { .. }
            | SendOp::SendTo(_)
            | SendOp::SendToWithImm(..) => return None,
        }
        let written = match (piece, placed) {
            (Some(piece), None) => frame.fill(shared.crc, std::iter::once(piece)),
            (Some(piece), Some(placed)) => fill_placed(shared.crc, frame, piece, placed),
            (None, _) => self.fill_in_parts(shared, frame, (number, offset, payload))?,
        };
        shared.count(Counter::SentPkts);
        Some(slot.end(written))
    }
}
