//! Queue pairs, the work requests that are posted to them, and their completions.

use ferroce_driver::rnic::{
    Bind, Completion, Piece, QueuePair, QueuePairConfig, ReceiveRequest, Remote, SendData, SendOperation,
    SendRequest, Target,
};
use ferroce_wire::{Gid, PKey, PathMtu, Psn, Qpn, RKey, RnrTimer};

use super::memory::{HardwareRegion, WindowBinding, remote_rights};
use super::work::{CHUNK, QueueKind, SGES, WindowWork, Work, WorkId, WorkQueue};
use super::{Hardware, HardwareAh};
use crate::engine::cq::Pushed;
use crate::engine::kind::Kind;
use crate::engine::mr::invalid;
use crate::engine::rq::total_length;
use crate::engine::slab::Slab;
use crate::engine::sq::{check_inline, check_length};
use crate::telemetry::counters::Counter;
use crate::verbs::{
    Access, AddressVector, CongestionControl, Cq, Data, Destination, Error, Event, Feature, MAX_MESSAGE,
    Mismatch, Mr, Pd, PostError, Qp, QpAttributes, QpConfig, QpState, QpType, ReadyToSend,
    ReceiveWorkRequest, RemoteAddress, RemoteMemory, SendOp, SendWorkRequest, Sge, Srq, WcOpcode, WcStatus,
    WorkCompletion,
};

pub(super) struct HardwareQp {
    pub(super) card: QueuePair,
    pub(super) qpn: Qpn,
    pub(super) qp_type: QpType,
    pub(super) pd: Pd,
    pub(super) send_cq: Cq,
    pub(super) recv_cq: Cq,
    pub(super) srq: Option<Srq>,
    /// The last that is known; the card changes it too.
    pub(super) state: QpState,
    pub(super) sq: WorkQueue,
    pub(super) rq: WorkQueue,
    signal_all: bool,
    max_inline: u32,
    /// The longest message: one packet of a datagram.
    pub(super) max_message: u32,
    pub(super) groups: Vec<Gid>,
    /// What it was told, as the card does not tell it in our words.
    pub(super) told: Told,
}

/// What a queue pair was told by its transitions.
#[derive(Clone, Copy, Default)]
pub(super) struct Told {
    pub(super) access: Access,
    pub(super) qkey: u32,
    pub(super) pkey_index: usize,
    pub(super) address: Option<AddressVector>,
    pub(super) path_mtu: Option<PathMtu>,
    pub(super) dest_qpn: Option<Qpn>,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: Option<RnrTimer>,
    pub(super) send: Option<ReadyToSend>,
}

impl HardwareQp {
    /// How many outstanding work requests name a region.
    pub(super) fn users_of(&self, mr: Mr) -> u32 {
        self.sq.users_of(mr.0.index) + self.rq.users_of(mr.0.index)
    }

    /// Fails if the state is none of `allowed`.
    pub(super) fn require(
        &self,
        verb: &'static str,
        expected: &'static str,
        allowed: &[QpState],
    ) -> Result<(), Error> {
        if allowed.contains(&self.state) {
            return Ok(());
        }
        Err(Error::State { qpn: self.qpn, verb, state: self.state, expected })
    }

    /// What it was is over.
    pub(super) fn forget(&mut self) {
        self.sq.clear();
        self.rq.clear();
        self.told = Told::default();
    }
}

impl Hardware {
    pub(crate) fn create_qp(&mut self, config: &QpConfig) -> Result<Qp, Error> {
        config.check()?;
        let domain = self.pd(config.pd)?.clone();
        let send_cq = self.cq(config.send_cq)?.card.clone();
        let recv_cq = self.cq(config.recv_cq)?.card.clone();
        let srq = config.srq.map(|srq| self.srq(srq).map(|srq| srq.card.clone())).transpose()?;
        if config.congestion.is_some_and(|control| control != CongestionControl::Off) {
            return Err(Error::Unsupported(Feature::CongestionControl));
        }
        if config.window.is_some() {
            return Err(Error::Unsupported(Feature::Window));
        }
        let full = Error::Exhausted { kind: "QP", limit: self.qps.capacity(), setting: "max_qps" };
        if self.qps.is_full() {
            return Err(full);
        }
        let depth = |asked: u32| asked.next_power_of_two().min(self.limits.max_qp_wr.max(asked));
        let (sends, receives) = (depth(config.max_send_wr), depth(config.max_recv_wr));
        let card = QueuePair::new(
            &domain,
            &QueuePairConfig {
                kind: match config.qp_type {
                    QpType::Rc => 2,
                    QpType::Uc => 3,
                    QpType::Ud => 4,
                },
                send_cq: &send_cq,
                recv_cq: &recv_cq,
                srq: srq.as_ref(),
                max_send_wr: sends,
                max_recv_wr: if srq.is_some() { 0 } else { receives },
                max_send_sge: config.max_send_sge.into(),
                max_recv_sge: if srq.is_some() { 0 } else { config.max_recv_sge.into() },
                max_inline_data: config.max_inline_data,
                signal_all: config.signal_all,
            },
        )?;
        let number = card.qpn();
        let path_mtu = self.port.path_mtu(false).map_or(MAX_MESSAGE, PathMtu::bytes);
        let qp = HardwareQp {
            card,
            qpn: Qpn::new(number & 0xff_ffff),
            qp_type: config.qp_type,
            pd: config.pd,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            srq: config.srq,
            state: QpState::Reset,
            sq: WorkQueue::new(sends, config.max_send_sge.into()),
            rq: WorkQueue::new(receives, config.max_recv_sge.into()),
            signal_all: config.signal_all,
            max_inline: config.max_inline_data,
            max_message: if config.qp_type == QpType::Ud { path_mtu } else { MAX_MESSAGE },
            groups: Vec::new(),
            told: Told::default(),
        };
        let handle = self.qps.insert_with(|_| qp).ok_or(full)?;
        self.numbers.insert(number, handle);
        self.cq(config.send_cq)?.queue.users += 1;
        self.cq(config.recv_cq)?.queue.users += 1;
        if let Some(srq) = config.srq {
            self.srq(srq)?.users += 1;
        }
        Ok(Qp(handle))
    }

    pub(crate) fn destroy_qp(&mut self, qp: Qp) -> Result<(), Error> {
        let groups = self.qp(qp)?.groups.len();
        if groups > 0 {
            let users = format!("{groups} multicast groups; detach it first");
            return Err(Error::Busy { kind: "QP", handle: format!("{:?}", qp.0), users });
        }
        let Some(removed) = self.qps.remove(qp.0) else { return Err(Error::invalid_handle("QP", qp.0)) };
        let HardwareQp { card, qpn, send_cq, recv_cq, srq, .. } = removed;
        drop(card);
        self.numbers.remove(&qpn.value());
        self.purge(qp, send_cq, recv_cq);
        self.cq(send_cq)?.queue.users -= 1;
        self.cq(recv_cq)?.queue.users -= 1;
        if let Some(srq) = srq {
            self.srq(srq)?.users -= 1;
        }
        self.events.forget(qp.into());
        Ok(())
    }

    /// Forgets the completions of a queue pair that is destroyed or reset. Those that the card still has are known by their
    /// numbers.
    pub(super) fn purge(&mut self, qp: Qp, send_cq: Cq, recv_cq: Cq) {
        for cq in [send_cq, recv_cq] {
            if let Err(error) = self.drain(cq.0.index) {
                // The next poll says so too.
                tracing::debug!("completions of a queue pair that is given up: {error}");
            }
            if let Some(queue) = self.cqs.get_mut(cq.0) {
                queue.queue.purge(qp);
            }
        }
    }

    pub(crate) fn query_qp(&self, qp: Qp) -> Result<QpAttributes, Error> {
        let queue_pair = self.qps.get(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        let card = queue_pair.card.query()?;
        let Told {
            access,
            qkey,
            pkey_index,
            address,
            path_mtu,
            dest_qpn,
            max_dest_rd_atomic,
            min_rnr_timer,
            send,
        } = queue_pair.told;
        let state = state_of(card.state).unwrap_or(queue_pair.state);
        Ok(QpAttributes {
            qp_type: queue_pair.qp_type,
            state,
            sq_draining: state == QpState::Sqd && card.sq_draining,
            qpn: queue_pair.qpn,
            dest_qpn,
            address,
            path_mtu,
            selective_repeat: false,
            congestion: CongestionControl::Off,
            reaction: None,
            window: 0,
            access,
            qkey: (queue_pair.qp_type == QpType::Ud).then_some(qkey),
            pkey_index,
            pkey: self.port.pkeys.get(pkey_index).unwrap_or(PKey(0)),
            rq_psn: Psn::new(card.rq_psn),
            sq_psn: Psn::new(card.sq_psn),
            send: if matches!(state, QpState::Rts | QpState::Sqd) { send } else { None },
            max_dest_rd_atomic,
            min_rnr_timer,
            srq: queue_pair.srq,
            outstanding_sends: queue_pair.sq.len(),
            outstanding_receives: queue_pair.rq.len(),
        })
    }

    pub(crate) fn mismatches(&self) -> Vec<(Qpn, Mismatch)> {
        Vec::new()
    }

    #[inline]
    pub(crate) fn post_send(&mut self, qp: Qp, wr: &SendWorkRequest<'_>) -> Result<(), Error> {
        if self.is_gone {
            return Err(self.gone());
        }
        let Hardware { qps, mrs, mws, ahs, pieces, attributes, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| Error::invalid_handle("QP", qp.0))?;
        if queue_pair.state != QpState::Rts {
            let states = [QpState::Rts, QpState::Sqd, QpState::Sqe, QpState::Error];
            queue_pair.require("post_send", "RTS, SQD, SQE or ERR", &states)?;
        }
        let kind = wr.op.kind();
        if !kind.is_on(queue_pair.qp_type.service()) {
            return Err(wr.op.not_on(queue_pair.qp_type.service()));
        }
        if kind.is_read_or_atomic {
            if queue_pair.state != QpState::Error
                && queue_pair.told.send.is_some_and(|send| send.max_rd_atomic == 0)
            {
                return Err(Error::invalid("max_rd_atomic", 0, "at least 1 for READ, atomics and FLUSH"));
            }
            wr.op.check(attributes)?;
        }
        if queue_pair.sq.is_full() {
            return Err(Error::QueueFull { queue: "send", depth: queue_pair.sq.depth });
        }
        let (data, sges) = match wr.data {
            Data::Inline(bytes) => {
                check_inline(kind, bytes, queue_pair.max_inline)?;
                (SendData::Inline(bytes), &[][..])
            }
            Data::Sges(sges) => {
                check_sges(kind, sges, queue_pair)?;
                (SendData::Pieces(translate(mrs, sges, &mut pieces[..SGES])?), sges)
            }
        };
        let signaled = wr.flags.signaled || queue_pair.signal_all;
        let mut work = Work::new(wr.wr_id, kind.wc_opcode, signaled);
        let mut bound = None;
        let operation = match wr.op {
            SendOp::Send => SendOperation::Send,
            SendOp::SendWithImm(immediate) => SendOperation::SendWithImm(immediate),
            SendOp::SendWithInvalidate(key) => SendOperation::SendWithInvalidate(key.value()),
            SendOp::SendTo(to) => SendOperation::SendTo(target(ahs, to)?),
            SendOp::SendToWithImm(to, immediate) => SendOperation::SendToWithImm(target(ahs, to)?, immediate),
            SendOp::Write(to) => SendOperation::Write(remote(to)),
            SendOp::WriteWithImm(to, immediate) => SendOperation::WriteWithImm(remote(to), immediate),
            SendOp::Read(from) => SendOperation::Read(remote(from)),
            SendOp::CompareSwap { remote: at, compare, swap } => {
                SendOperation::CompareSwap { remote: remote(at), compare, swap }
            }
            SendOp::FetchAdd { remote: at, add } => SendOperation::FetchAdd { remote: remote(at), add },
            SendOp::LocalInvalidate(key) => {
                work.window = WindowWork::Invalidate { rkey: key.value() };
                SendOperation::LocalInvalidate(key.value())
            }
            SendOp::BindMw { mw, mr, offset, length, access } => {
                crate::engine::mw::check_rights(access, length)?;
                let window = mws.get(mw.0).ok_or_else(|| Error::invalid_handle("MW", mw.0))?;
                let region = mrs.get(mr.0).ok_or_else(|| invalid(mr))?;
                let Some(card) = &region.card else { return Err(invalid(mr)) };
                let key = window.key.wrapping_add(1);
                let rkey = window.card.rkey() & !0xff | u32::from(key);
                let addr = region.iova.wrapping_add(offset);
                work.window = WindowWork::Bind { index: mw.0.index };
                let to = RemoteMemory { addr, rkey: RKey::new(rkey), length };
                bound = Some((mw, mr, key, to));
                let access = remote_rights(access);
                SendOperation::Bind(Bind { window: &window.card, rkey, region: card, addr, length, access })
            }
            // `check` has refused them, for the device has neither.
            SendOp::Flush { .. } => return Err(Error::Unsupported(Feature::Flush)),
            SendOp::AtomicWrite(_) => return Err(Error::Unsupported(Feature::AtomicWrite)),
        };
        // A send queue gets room only by what the card tells, so it is told of one in so many.
        let tells = signaled || queue_pair.sq.silent >= queue_pair.sq.depth / 2;
        let flags = if tells { SendRequest::SIGNALED } else { 0 }
            | if wr.flags.fence { SendRequest::FENCE } else { 0 }
            | if wr.flags.solicited { SendRequest::SOLICITED } else { 0 };
        let wr_id = WorkId::new(QueueKind::Send, qp.0, queue_pair.sq.next()).to_card();
        queue_pair.card.post_send(&SendRequest { wr_id, operation, data, flags })?;
        match bound {
            None => queue_pair.sq.push(work, sges),
            Some((mw, mr, key, remote)) => {
                queue_pair.sq.push_with(work, mr);
                if let Some(window) = mws.get_mut(mw.0) {
                    window.key = key;
                    window.posted = Some(WindowBinding { region: mr, remote });
                }
            }
        }
        queue_pair.sq.silent = if tells { 0 } else { queue_pair.sq.silent + 1 };
        Ok(())
    }

    pub(crate) fn post_recv(&mut self, qp: Qp, wr: &ReceiveWorkRequest<'_>) -> Result<(), Error> {
        self.post_recvs(qp, std::slice::from_ref(wr)).map_err(Error::from)
    }

    pub(crate) fn post_sends(&mut self, qp: Qp, wrs: &[SendWorkRequest<'_>]) -> Result<(), PostError> {
        crate::backend::in_order(wrs, |wr| self.post_send(qp, wr))
    }

    pub(crate) fn post_recvs(&mut self, qp: Qp, wrs: &[ReceiveWorkRequest<'_>]) -> Result<(), PostError> {
        let first = |source| PostError { posted: 0, source };
        if self.is_gone {
            return Err(first(self.gone()));
        }
        let Hardware { qps, mrs, pieces, .. } = self;
        let queue_pair = qps.get_mut(qp.0).ok_or_else(|| first(Error::invalid_handle("QP", qp.0)))?;
        queue_pair.require("post_recv", "any state but RESET", &QpState::ALL_BUT_RESET).map_err(first)?;
        if queue_pair.srq.is_some() {
            let expected = "post receives to the SRQ with post_srq_recv";
            return Err(first(Error::invalid("qp", "attached to an SRQ", expected)));
        }
        for (chunk, wrs) in wrs.chunks(CHUNK).enumerate() {
            let mut requests = [ReceiveRequest { wr_id: 0, pieces: &[] }; CHUNK];
            let mut wrong = None;
            let mut count = 0;
            for ((wr, request), room) in wrs.iter().zip(&mut requests).zip(pieces.chunks_mut(SGES)) {
                let HardwareQp { rq, .. } = queue_pair;
                let checked = if rq.is_full() {
                    Err(Error::QueueFull { queue: "receive", depth: rq.depth })
                } else {
                    total_length(wr.sges, rq.max_sge as usize).and_then(|_| translate(mrs, wr.sges, room))
                };
                match checked {
                    Ok(pieces) => {
                        let wr_id = WorkId::new(QueueKind::Receive, qp.0, rq.next()).to_card();
                        *request = ReceiveRequest { wr_id, pieces };
                        rq.push(Work::new(wr.wr_id, WcOpcode::Recv, true), wr.sges);
                        count += 1;
                    }
                    Err(error) => {
                        wrong = Some(error);
                        break;
                    }
                }
            }
            let refused = queue_pair.card.post_receives(&requests[..count]).err();
            let posted = refused.as_ref().map_or(count, |refused| refused.posted);
            (posted..count).for_each(|_| queue_pair.rq.pop_newest());
            if let Some(source) = refused.map(|refused| refused.error.into()).or(wrong) {
                return Err(PostError { posted: chunk * CHUNK + posted, source });
            }
        }
        Ok(())
    }

    /// A work request has ended on the card, says the completion queue at `cq`.
    #[inline]
    pub(super) fn complete(&mut self, cq: u32, completion: &Completion) {
        let Some(id) = WorkId::from_card(completion.wr_id) else { return self.unknown(completion) };
        let status = status_of(completion.status);
        let is_success = status == WcStatus::Success;
        let mut told = WorkCompletion { status, ..WorkCompletion::EMPTY };
        match id.queue {
            QueueKind::Send => {
                let Some((handle, queue_pair)) = self.qps.at_with_handle(id.index) else {
                    return self.unknown(completion);
                };
                if !id.is_of(handle) {
                    return;
                }
                let windows = queue_pair.sq.until(id.position).any(|work| work.window != WindowWork::None);
                if windows {
                    return self.complete_with_windows(cq, completion, id);
                }
                let Some(work) = queue_pair.sq.complete(id.position) else { return };
                told.wr_id = work.wr_id;
                told.opcode = work.opcode;
                told.byte_len = completion.byte_len;
                told.qp = Qp(handle);
                told.qpn = queue_pair.qpn;
                if !is_success {
                    queue_pair.state = failed_send(queue_pair.qp_type, queue_pair.state);
                }
                if work.window != WindowWork::None {
                    self.complete_window(work.window, is_success);
                }
                if is_success && !work.signaled {
                    return;
                }
            }
            QueueKind::Receive => {
                let Some((handle, queue_pair)) = self.qps.at_with_handle(id.index) else {
                    return self.unknown(completion);
                };
                if !id.is_of(handle) {
                    return;
                }
                let Some(work) = queue_pair.rq.complete(id.position) else { return };
                told.wr_id = work.wr_id;
                told.qp = Qp(handle);
                told.qpn = queue_pair.qpn;
                if !is_success {
                    queue_pair.state = QpState::Error;
                }
                self.fill_receive(&mut told, completion);
            }
            QueueKind::Shared => {
                let Some(queue) = self.srqs.at_mut(id.index) else { return self.unknown(completion) };
                let Some(wr_id) = queue.slots.complete(id.position) else { return };
                told.wr_id = wr_id;
                let Some(handle) = self.qp_of(completion.qp_num) else { return self.unknown(completion) };
                told.qp = Qp(handle);
                told.qpn = Qpn::new(completion.qp_num & 0xff_ffff);
                if !is_success && let Some(queue_pair) = self.qps.get_mut(handle) {
                    queue_pair.state = QpState::Error;
                }
                self.fill_receive(&mut told, completion);
            }
        }
        self.tell(cq, told);
    }

    /// The same where work requests on windows end with it, whose success nobody asked for.
    #[cold]
    fn complete_with_windows(&mut self, cq: u32, completion: &Completion, id: WorkId) {
        let Some((_, queue_pair)) = self.qps.at_with_handle(id.index) else { return };
        let windows: Vec<WindowWork> = queue_pair.sq.until(id.position).map(|work| work.window).collect();
        for _ in &windows {
            queue_pair.sq.pop_oldest();
        }
        windows.into_iter().for_each(|work| self.complete_window(work, true));
        self.complete(cq, completion);
    }

    fn fill_receive(&mut self, told: &mut WorkCompletion, completion: &Completion) {
        told.opcode = if completion.opcode == 129 { WcOpcode::RecvRdmaWithImm } else { WcOpcode::Recv };
        told.byte_len = completion.byte_len;
        told.src_qpn = Qpn::new(completion.src_qp & 0xff_ffff);
        if told.status != WcStatus::Success {
            return;
        }
        let flags = completion.wc_flags;
        // A card tells of a header of the network in front of every message; only a datagram's is in the receive.
        let is_datagram = self.qps.get(told.qp.0).is_some_and(|qp| qp.qp_type == QpType::Ud);
        told.grh = is_datagram && flags & Completion::GRH != 0;
        if flags & Completion::WITH_IMM != 0 {
            told.immediate = Some(u32::from_be(completion.imm_or_key));
        }
        // rdma_rxe has the number of the kernel's flag there, which is that of IBV_WC_IP_CSUM_OK for applications.
        let invalidated = Completion::WITH_INV | if self.is_rxe { KERNEL_WITH_INV } else { 0 };
        if flags & invalidated != 0 {
            told.invalidated = Some(RKey::new(completion.imm_or_key));
            self.revoke(completion.imm_or_key);
        }
    }

    pub(super) fn tell(&mut self, cq: u32, told: WorkCompletion) {
        self.has_news = true;
        let Hardware { cqs, events, counters, .. } = self;
        let Some((handle, queue)) = cqs.at_with_handle(cq) else { return };
        let cq = Cq(handle);
        match queue.queue.push(told, false) {
            Pushed::Quietly => {}
            Pushed::Notify => {
                queue.solicited_only = false;
                queue.queue.notify(cq, events, counters);
            }
            Pushed::Overflow => {
                events.raise(Event::CqErr(cq));
                counters.count(Counter::CqOverflow);
            }
            Pushed::Lost => counters.count(Counter::CqOverflow),
        }
    }

    /// A completion of no work request that was posted.
    #[cold]
    fn unknown(&mut self, completion: &Completion) {
        tracing::warn!(device = self.device.name(), "a completion of no work request: {completion:?}");
    }
}

/// `IB_WC_WITH_INVALIDATE`
const KERNEL_WITH_INV: u32 = 4;

/// Where the state leads when a send fails: UC and UD go on receiving.
fn failed_send(qp_type: QpType, state: QpState) -> QpState {
    if qp_type == QpType::Rc || state == QpState::Error { QpState::Error } else { QpState::Sqe }
}

fn check_sges(kind: &Kind, sges: &[Sge], queue_pair: &HardwareQp) -> Result<(), Error> {
    let length = total_length(sges, queue_pair.sq.max_sge as usize)?;
    check_length(kind, length, queue_pair.max_message)
}

/// The pieces of a work request as the card takes them.
#[inline]
pub(super) fn translate<'a>(
    mrs: &Slab<HardwareRegion>,
    sges: &[Sge],
    room: &'a mut [Piece],
) -> Result<&'a [Piece], Error> {
    for (piece, sge) in room.iter_mut().zip(sges) {
        let region = mrs.get(sge.mr.0).ok_or_else(|| invalid(sge.mr))?;
        let Some(card) = &region.card else { return Err(invalid(sge.mr)) };
        let addr = region.iova.wrapping_add(sge.offset);
        *piece = Piece { addr, length: sge.length, lkey: card.lkey() };
    }
    Ok(&room[..sges.len()])
}

fn remote(to: RemoteAddress) -> Remote {
    Remote { addr: to.addr, rkey: to.rkey.value() }
}

fn target(ahs: &Slab<HardwareAh>, to: Destination) -> Result<Target<'_>, Error> {
    let ah = ahs.get(to.ah.0).ok_or_else(|| Error::invalid_handle("AH", to.ah.0))?;
    Ok(Target { ah: &ah.card, qpn: to.qpn.value(), qkey: to.qkey })
}

/// `enum ibv_qp_state`
pub(super) fn state_of(number: u32) -> Option<QpState> {
    use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
    [Reset, Init, Rtr, Rts, Sqd, Sqe, Error].get(number as usize).copied()
}

/// `enum ibv_wc_status`; those that RoCE does not have are general errors.
#[inline]
fn status_of(number: u32) -> WcStatus {
    use WcStatus as S;
    if number == 0 {
        return S::Success;
    }
    let all = [
        S::LocLenErr,
        S::LocQpOpErr,
        S::LocProtErr,
        S::WrFlushErr,
        S::MwBindErr,
        S::BadRespErr,
        S::LocAccessErr,
        S::RemInvReqErr,
        S::RemAccessErr,
        S::RemOpErr,
        S::RetryExcErr,
        S::RnrRetryExcErr,
        S::RemAbortErr,
        S::FatalErr,
        S::RespTimeoutErr,
    ];
    all.into_iter().find(|status| *status as u32 == number).unwrap_or(S::GeneralErr)
}
