use ferroce_driver::Nanos;
use ferroce_wire::{
    Ecn, Gid, MacAddr, NetworkHeader, PKEY_DEFAULT, PKey, Packet, PathAddress, PathHeader, PathMtu, Qpn,
    Service,
};

use crate::engine::congestion::Reaction;
use crate::engine::destination::DestinationPlace;
use crate::engine::frame_slot::FrameSlot;
use crate::engine::requester::Requester;
use crate::engine::responder::Responder;
use crate::engine::rq::ReceiveQueue;
use crate::engine::scheduler::{Ticket, Wait};
use crate::engine::selective::Selective;
use crate::engine::shared::Shared;
use crate::engine::sq::{Ended, SendQueue};
use crate::engine::staging::receives::Staged;
use crate::telemetry::counters::Counter;
use crate::verbs::{
    Access, AddressVector, CongestionControl, Cq, Error, Event, Handle, MAX_MESSAGE, MAX_WINDOW, Mismatch,
    Mr, Pd, Qp, QpAttributes, QpConfig, QpState, QpType, Srq, Unreachable, WcOpcode, WcStatus,
    WorkCompletion, may_be_on,
};

/// The peer of a connected queue pair, and the path to it.
#[derive(Clone, Copy)]
pub(crate) struct Connection {
    pub(crate) header: PathHeader,
    /// The peer's address and the local one as in the network headers of its packets: the first 8 bytes for IPv4, all
    /// otherwise.
    addresses: [u8; 32],
    /// The VLAN of its packets.
    vlan: Option<u16>,
    pub(crate) path_mtu: PathMtu,
    pub(crate) dest_qpn: Qpn,
}

impl Connection {
    /// `header` are the headers of `path`.
    pub(crate) fn new(
        path: &PathAddress,
        header: PathHeader,
        path_mtu: PathMtu,
        dest_qpn: Qpn,
    ) -> Connection {
        let (Gid(remote), Gid(local)) = (path.destination, path.source);
        let mut addresses = [0; 32];
        if header.network() == NetworkHeader::Ipv4 {
            // A GID that maps an IPv4 address ends with it.
            addresses[..4].copy_from_slice(&remote[12..]);
            addresses[4..8].copy_from_slice(&local[12..]);
        } else {
            addresses[..16].copy_from_slice(&remote);
            addresses[16..].copy_from_slice(&local);
        }
        Connection { header, addresses, vlan: path.vlan.map(|tag| tag.id), path_mtu, dest_qpn }
    }

    /// Whether a packet with these addresses is the peer's.
    #[inline(always)]
    pub(crate) fn admits(&self, packet: &Packet<'_>) -> bool {
        let addresses = packet.address_bytes();
        // An array's length is known, so the comparison is an instruction and not a call.
        let same = match packet.header {
            NetworkHeader::Ipv4 => addresses.first_chunk() == self.addresses.first_chunk::<8>(),
            NetworkHeader::Ipv6 | NetworkHeader::Grh => addresses.first_chunk() == Some(&self.addresses),
        };
        same && packet.header == self.header.network() && may_be_on(packet, self.vlan)
    }

    /// The headers of an acknowledgement if packets are ECN-capable: acknowledgements are not.
    pub(crate) fn acknowledging(&self) -> PathHeader {
        let mut header = self.header;
        header.set_ecn(Ecn::NotCapable);
        header
    }

    /// The longest message, in bytes: its packets must be fewer than half of the PSNs.
    pub(crate) fn max_message(&self) -> u32 {
        let most = u64::from(MAX_WINDOW) << self.path_mtu.shift();
        u32::try_from(most).map_or(MAX_MESSAGE, |most| most.min(MAX_MESSAGE))
    }
}

pub(crate) struct QueuePair {
    pub(crate) handle: Qp,
    pub(crate) qpn: Qpn,
    pub(crate) service: Service,
    pub(crate) pd: Pd,
    pub(crate) send_cq: Cq,
    pub(crate) recv_cq: Cq,
    pub(crate) srq: Option<Srq>,
    /// The protection domain of its receives: the SRQ's, if there is one.
    pub(crate) receive_pd: Pd,
    signal_all: bool,
    pub(crate) state: QpState,
    pub(crate) access: Access,
    /// UD: the Q_Key that datagrams must carry.
    pub(crate) qkey: u32,
    pub(crate) pkey: PKey,
    pub(crate) pkey_index: usize,
    pub(crate) address: Option<AddressVector>,
    pub(crate) connection: Option<Connection>,
    /// The destination that counts its packets in flight, unless it uses selective repeat or is not reliable.
    pub(crate) destination: DestinationPlace,
    pub(crate) sq: SendQueue,
    /// With an SRQ it holds only the receive of the current message.
    pub(crate) rq: ReceiveQueue,
    pub(crate) requester: Requester,
    pub(crate) responder: Responder,
    /// If both ends have negotiated selective repeat.
    pub(crate) selective: Option<Box<Selective>>,
    /// It is in a list of the scheduler.
    pub(crate) scheduled: bool,
    /// The next hop to its peer is being resolved; nothing is sent before.
    pub(crate) next_hop: Option<Ticket>,
    /// The last frame was a response.
    responded: bool,
    /// There was no room for a completion: the queue pair must fail.
    overflowed: bool,
    /// A detected mismatch with the peer.
    pub(crate) mismatch: Option<Mismatch>,
    /// The most unacknowledged packets.
    pub(crate) window: u32,
    /// If it uses a congestion control.
    pub(crate) reaction: Option<Box<Reaction>>,
    /// Created when it first uses device memory.
    pub(crate) staged: Option<Box<Staged>>,
}

impl QueuePair {
    /// A queue pair in RESET; `receives` are the PD and the SGEs of its SRQ's receives.
    pub(crate) fn new(
        handle: Handle,
        qpn: Qpn,
        config: &QpConfig,
        shared: Option<(Pd, u8)>,
        (window, reaction): (u32, Option<Reaction>),
    ) -> QueuePair {
        // Fills unused slots; never read.
        let filler = Mr(handle);
        let (receive_pd, rq) = match shared {
            Some((pd, max_sge)) => (pd, ReceiveQueue::new(1, max_sge, filler)),
            None => (config.pd, ReceiveQueue::new(config.max_recv_wr, config.max_recv_sge, filler)),
        };
        QueuePair {
            handle: Qp(handle),
            qpn,
            service: config.qp_type.service(),
            pd: config.pd,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            srq: config.srq,
            receive_pd,
            signal_all: config.signal_all,
            state: QpState::Reset,
            access: Access::NONE,
            qkey: 0,
            pkey: PKEY_DEFAULT,
            pkey_index: 0,
            address: None,
            connection: None,
            destination: DestinationPlace::NONE,
            sq: SendQueue::new(config.max_send_wr, config.max_send_sge, config.max_inline_data, filler),
            rq,
            requester: Requester::default(),
            responder: Responder::default(),
            selective: None,
            scheduled: false,
            next_hop: None,
            responded: false,
            overflowed: false,
            mismatch: None,
            window,
            reaction: reaction.map(Box::new),
            staged: None,
        }
    }

    pub(crate) fn qp_type(&self) -> QpType {
        match self.service {
            Service::Uc => QpType::Uc,
            Service::Ud => QpType::Ud,
            Service::Rc | Service::Cnp => QpType::Rc,
        }
    }

    pub(crate) fn attributes(&self, now: Nanos) -> QpAttributes {
        let is_rc = self.service == Service::Rc;
        let may_send = matches!(self.state, QpState::Rts | QpState::Sqd);
        QpAttributes {
            qp_type: self.qp_type(),
            state: self.state,
            sq_draining: self.state == QpState::Sqd && !self.is_drained(),
            qpn: self.qpn,
            dest_qpn: self.connection.as_ref().map(|c| c.dest_qpn),
            address: self.address,
            path_mtu: self.path_mtu(),
            selective_repeat: self.selective.is_some(),
            congestion: self.reaction.as_ref().map_or(CongestionControl::Off, |reaction| reaction.control()),
            reaction: self.reaction.as_ref().map(|reaction| reaction.state(now)),
            window: self.window,
            access: self.access,
            qkey: (self.service == Service::Ud).then_some(self.qkey),
            pkey_index: self.pkey_index,
            pkey: self.pkey,
            rq_psn: self.responder.expected_psn(),
            sq_psn: self.requester.next_psn(),
            send: (is_rc && may_send).then(|| self.requester.attributes()),
            max_dest_rd_atomic: self.responder.max_dest_rd_atomic(),
            min_rnr_timer: self.responder.min_rnr_timer(),
            srq: self.srq,
            outstanding_sends: self.sq.tail().wrapping_sub(self.sq.head()),
            outstanding_receives: self.rq.len(),
        }
    }

    /// Fails unless the state is in `allowed`.
    pub(crate) fn require(
        &self,
        verb: &'static str,
        expected: &'static str,
        allowed: &[QpState],
    ) -> Result<(), Error> {
        if allowed.contains(&self.state) {
            return Ok(());
        }
        Err(self.refused(verb, expected))
    }

    /// The error of a verb in a state that does not allow it.
    pub(crate) fn refused(&self, verb: &'static str, expected: &'static str) -> Error {
        Error::State { qpn: self.qpn, verb, state: self.state, expected }
    }

    /// The payload of a full packet; none before there is a connection.
    pub(crate) fn path_mtu(&self) -> Option<PathMtu> {
        self.connection.as_ref().map(|connection| connection.path_mtu)
    }

    /// Requests a turn in the transmit phase.
    #[inline]
    pub(crate) fn schedule(&mut self, shared: &mut Shared) {
        if !self.scheduled {
            self.scheduled = true;
            shared.scheduler.activate(self.handle.0.index);
        }
    }

    /// The next frame of this queue pair, or what it waits for.
    #[inline]
    pub(crate) fn transmit(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Result<usize, Wait> {
        if let Some(ticket) = self.next_hop {
            return Err(Wait::Ticket(ticket));
        }
        match self.reaction {
            None => self.transmit_unpaced(shared, slot),
            Some(_) => self.transmit_paced(shared, slot),
        }
    }

    /// As [`transmit`](QueuePair::transmit), as fast as the port accepts frames.
    #[inline(always)]
    pub(crate) fn transmit_unpaced(
        &mut self,
        shared: &mut Shared,
        slot: &mut FrameSlot<'_>,
    ) -> Result<usize, Wait> {
        let frame = match self.service {
            Service::Rc => self.transmit_in_turn(shared, slot).ok_or_else(|| self.waits_for(shared)),
            Service::Ud => self.transmit_datagram(shared, slot),
            Service::Uc | Service::Cnp => self.transmit_request(shared, slot).ok_or(Wait::Nothing),
        };
        self.settle(shared);
        frame
    }

    /// What a queue pair waits for if it has nothing to send, or may not send yet.
    #[inline]
    pub(crate) fn waits_for(&self, shared: &Shared) -> Wait {
        let timer = match &self.reaction {
            // A queue pair that may send now is scheduled, and waits for no time.
            Some(reaction) if reaction.ready() > shared.now => {
                self.requester.deadline().min(reaction.ready())
            }
            _ => self.requester.deadline(),
        };
        match self.ack_due(shared) {
            Some(due) if due <= shared.now => Wait::NextPoll,
            Some(due) => Wait::At(due.min(timer)),
            None => Wait::until(timer),
        }
    }

    /// Suspends sending until the resolution of a next hop has ended, or continues if there is none. Earlier waits are
    /// cancelled.
    pub(crate) fn await_next_hop(&mut self, shared: &mut Shared, search: Option<Ticket>) {
        if std::mem::replace(&mut self.next_hop, search) != search {
            if shared.scheduler.release(self.handle.0.index) {
                self.scheduled = false;
            }
            self.schedule(shared);
        }
    }

    /// The resolution of the next hop has ended.
    pub(crate) fn take_next_hop(&mut self, shared: &mut Shared, found: Result<MacAddr, Unreachable>) {
        self.next_hop = None;
        match (found, &mut self.connection) {
            (Ok(mac), Some(connection)) => connection.header.set_destination_mac(mac),
            (Ok(_), None) => {}
            (Err(_), _) if self.state == QpState::Error => {}
            (Err(reason), _) => {
                if let Some(ended) = self.sq.pop(&mut shared.mrs) {
                    self.complete_send(shared, &ended, WcStatus::RetryExcErr);
                }
                self.fail(shared);
                shared.raise(Event::QpUnreachable { qp: self.handle, reason });
            }
        }
    }

    /// Responses are first, because a peer waits for them, but requests and responses alternate, or a peer that sends READs
    /// all the time would block requests forever. An ACK is last: data of the application is more urgent, and is sent
    /// without delay by the ACK; `OwedAck` limits the delay of the ACK.
    #[inline(always)]
    fn transmit_in_turn(&mut self, shared: &mut Shared, slot: &mut FrameSlot<'_>) -> Option<usize> {
        let request_first = std::mem::take(&mut self.responded);
        if !request_first {
            if let Some(length) = self.transmit_response(shared, slot) {
                self.responded = true;
                return Some(length);
            }
            // Only here and below is it certain that nothing older is owed.
            if let Some(length) = self.transmit_acknowledge(shared, slot, true) {
                return Some(length);
            }
        }
        if let Some(length) = self.transmit_request(shared, slot) {
            self.responder.note_request(shared.poll);
            return Some(length);
        }
        if request_first && let Some(length) = self.transmit_response(shared, slot) {
            self.responded = true;
            return Some(length);
        }
        self.transmit_acknowledge(shared, slot, false)
    }

    /// ERR at the application's request, or because the connection can't continue: flushes everything, and nothing more is
    /// sent.
    pub(crate) fn fail(&mut self, shared: &mut Shared) {
        self.responder.silence();
        self.enter_error(shared);
    }

    /// ERR after a refused request: as [`fail`](QueuePair::fail), but owed responses are still sent, with the NAK last.
    pub(crate) fn enter_error(&mut self, shared: &mut Shared) {
        let failed_before = self.state == QpState::Error;
        self.state = QpState::Error;
        self.requester.stop();
        self.forget_in_flight(shared);
        self.release_held(shared);
        if self.staged.is_some() {
            self.finish_staged(shared);
        }
        self.flush(shared);
        if self.srq.is_some() && !failed_before {
            self.end_receives(shared);
        }
    }

    /// SQE: a send of an unreliable queue pair failed before it was sent.
    pub(crate) fn enter_send_error(&mut self, shared: &mut Shared) {
        self.state = QpState::Sqe;
        self.flush_sends(shared);
    }

    /// RESET: as if nothing had ever been posted.
    pub(crate) fn reset(&mut self, shared: &mut Shared) {
        while self.sq.pop(&mut shared.mrs).is_some() {}
        while self.rq.pop(&mut shared.mrs).is_some() {}
        for cq in [self.send_cq, self.recv_cq] {
            if let Some(queue) = shared.cqs.get_mut(cq.0) {
                queue.purge(self.handle);
            }
        }
        self.next_hop = None;
        if shared.scheduler.release(self.handle.0.index) {
            self.scheduled = false;
        }
        shared.mrs.unbind_windows_of(self.handle);
        self.forget_in_flight(shared);
        self.leave_destination(shared);
        self.requester = Requester::default();
        self.responder = Responder::default();
        self.release_held(shared);
        self.drop_staged(shared);
        self.selective = None;
        self.connection = None;
        self.address = None;
        self.access = Access::NONE;
        self.qkey = 0;
        self.pkey = PKEY_DEFAULT;
        self.pkey_index = 0;
        self.responded = false;
        self.overflowed = false;
        self.mismatch = None;
        if let Some(reaction) = &mut self.reaction {
            reaction.restart(PathMtu::Mtu4096);
        }
        self.state = QpState::Reset;
    }

    /// Completes all posted work requests as flushed, in the order of posting.
    pub(crate) fn flush(&mut self, shared: &mut Shared) {
        self.flush_sends(shared);
        while !self.rq.is_empty() {
            self.complete_receive_in_error(shared, WcStatus::WrFlushErr);
        }
        self.overflowed = false;
    }

    /// As [`flush`](QueuePair::flush), only the send queue.
    pub(crate) fn flush_sends(&mut self, shared: &mut Shared) {
        while let Some(ended) = self.sq.pop(&mut shared.mrs) {
            self.complete_send(shared, &ended, WcStatus::WrFlushErr);
        }
        self.requester.restart_at(self.sq.head());
        if self.staged.is_some() {
            self.restart_sends(shared);
        }
    }

    /// Fails the queue pair if one of its completions was lost.
    #[inline]
    pub(crate) fn settle(&mut self, shared: &mut Shared) {
        if self.overflowed {
            self.overflowed = false;
            if self.state != QpState::Error {
                self.fail(shared);
                shared.raise(Event::QpFatal(self.handle));
            }
        }
    }

    /// Completes a send that was just removed from the queue.
    #[inline(always)]
    pub(crate) fn complete_send(&mut self, shared: &mut Shared, ended: &Ended, status: WcStatus) {
        let failed = status != WcStatus::Success;
        if ended.signaled || self.signal_all || failed {
            shared.counters.count_if(failed, Counter::ReqCqeError);
            shared.counters.count_if(status == WcStatus::WrFlushErr, Counter::ReqCqeFlushError);
            let wc = WorkCompletion {
                byte_len: ended.length,
                ..self.completion(ended.wr_id, status, ended.opcode)
            };
            self.push(shared, self.send_cq, wc, false);
        } else if self.staged.is_some() {
            self.defer_unsignaled(self.completion(ended.wr_id, status, ended.opcode));
        }
    }

    /// Completes the oldest receive in error.
    pub(crate) fn complete_receive_in_error(&mut self, shared: &mut Shared, status: WcStatus) {
        if let Some(wr_id) = self.rq.pop(&mut shared.mrs) {
            shared.count(Counter::RespCqeError);
            shared.counters.count_if(status == WcStatus::WrFlushErr, Counter::RespCqeFlushError);
            let wc = self.completion(wr_id, status, WcOpcode::Recv);
            self.push(shared, self.recv_cq, wc, false);
        }
    }

    /// A completion of this queue pair with only its status.
    pub(crate) fn completion(&self, wr_id: u64, status: WcStatus, opcode: WcOpcode) -> WorkCompletion {
        WorkCompletion {
            wr_id,
            status,
            opcode,
            byte_len: 0,
            grh: false,
            immediate: None,
            invalidated: None,
            qp: self.handle,
            qpn: self.qpn,
            src_qpn: self.connection.as_ref().map(|c| c.dest_qpn).unwrap_or_default(),
            source_mac: None,
            vlan: None,
        }
    }

    #[inline(always)]
    pub(crate) fn push(&mut self, shared: &mut Shared, cq: Cq, wc: WorkCompletion, solicited: bool) {
        if self.staged.is_some() && self.defer(cq, wc, solicited) {
            return;
        }
        self.push_now(shared, cq, wc, solicited);
    }

    /// The same for a completion that does not wait for copies.
    #[inline(always)]
    pub(crate) fn push_now(&mut self, shared: &mut Shared, cq: Cq, wc: WorkCompletion, solicited: bool) {
        if !shared.complete(cq, wc, solicited) {
            self.overflowed = true;
        }
    }

    /// Whether there is a receive for a new message; takes one from the SRQ if necessary.
    pub(crate) fn has_receive(&mut self, shared: &mut Shared) -> bool {
        match self.srq {
            _ if !self.rq.is_empty() => true,
            Some(srq) => shared.take_shared_receive(srq, &mut self.rq),
            None => false,
        }
    }

    /// Reports once that a draining send queue has no outstanding work.
    #[inline]
    pub(crate) fn note_drained(&mut self, shared: &mut Shared) {
        if self.state == QpState::Sqd && self.is_drained() {
            shared.raise(Event::SqDrained(self.handle));
        }
    }

    /// No send is started and incomplete.
    pub(crate) fn is_drained(&self) -> bool {
        self.sq.front().is_none_or(|wqe| !wqe.started) && !self.is_fetching()
    }
}
