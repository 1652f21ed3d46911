//! Completions of the card, and their translation for the application.

use ferroce_driver::rnic::Completion;
use ferroce_wire::{Qpn, RKey};

use super::Hardware;
use super::queue_pairs::HardwareQp;
use super::work::{QueueKind, WorkId};
use crate::engine::cq::Pushed;
use crate::telemetry::counters::Counter;
use crate::verbs::{Cq, Error, Event, QpState, QpType, WcOpcode, WcStatus, WorkCompletion};

/// Storage for a batch of completions: in the card's form, and in the application's.
pub(super) struct Batch {
    card: [Completion; BATCH],
    told: [WorkCompletion; BATCH],
}

/// Completions taken at once.
const BATCH: usize = 16;

/// Places for the application's completions.
type Places<'a> = std::slice::IterMut<'a, WorkCompletion>;

impl Batch {
    pub(super) const EMPTY: Batch =
        Batch { card: [Completion::EMPTY; BATCH], told: [WorkCompletion::EMPTY; BATCH] };
}

impl Hardware {
    /// Moves completions of the card into the local queue, as many as it has room for. Returns their number.
    pub(super) fn drain(&mut self, index: u32) -> Result<usize, Error> {
        // A device that is gone has reported all completions, and its work has ended: its memory may have been reused.
        if self.is_gone {
            return Ok(0);
        }
        // Taken out, because completing changes all other state.
        let Some(mut batch) = self.batch.take() else { return Ok(0) };
        let taken = self.drain_by(index, &mut batch);
        self.batch = Some(batch);
        taken
    }

    fn drain_by(&mut self, index: u32, Batch { card, told }: &mut Batch) -> Result<usize, Error> {
        let mut taken = 0;
        loop {
            let Some(cq) = self.cqs.at(index) else { return Ok(taken) };
            let most = cq.queue.room().min(BATCH).min(cq.most.saturating_sub(taken));
            if most == 0 {
                return Ok(taken);
            }
            let count = cq.card.poll(&mut card[..most])?;
            let filled = self.complete(&card[..count], told);
            told[..filled].iter().for_each(|told| self.tell(index, *told));
            taken += count;
            if count < most {
                return Ok(taken);
            }
        }
    }

    /// Moves completions of the card into `room`, bypassing the local queue, which is empty. Returns how many are visible
    /// to the application.
    pub(super) fn take(&mut self, index: u32, room: &mut [WorkCompletion]) -> Result<usize, Error> {
        let Some(mut batch) = self.batch.take() else { return Ok(0) };
        let mut filled = 0;
        let ended = self.take_by(index, &mut batch, room, &mut filled);
        self.batch = Some(batch);
        match ended {
            // The next call returns the error again; the taken completions are not lost.
            Err(error) if filled == 0 => Err(error.into()),
            _ => Ok(filled),
        }
    }

    fn take_by(
        &mut self,
        index: u32,
        Batch { card, .. }: &mut Batch,
        room: &mut [WorkCompletion],
        filled: &mut usize,
    ) -> Result<(), ferroce_driver::Error> {
        let mut taken = 0;
        loop {
            let Some(cq) = self.cqs.at(index) else { return Ok(()) };
            let most = (room.len() - *filled).min(BATCH).min(cq.most.saturating_sub(taken));
            if most == 0 {
                return Ok(());
            }
            let count = cq.card.poll(&mut card[..most])?;
            *filled += self.complete(&card[..count], &mut room[*filled..]);
            taken += count;
            if count < most || *filled == room.len() {
                return Ok(());
            }
        }
    }

    /// Work requests have ended on the card. Returns how many are visible to the application, in `room`, which has places
    /// for all.
    #[inline]
    fn complete(&mut self, completions: &[Completion], room: &mut [WorkCompletion]) -> usize {
        let (mut rest, places, mut free) = (completions, room.len(), room.iter_mut());
        while let [first, others @ ..] = rest {
            rest = match WorkId::from_card(first.wr_id) {
                Some(id) if id.queue == QueueKind::Send => self.complete_sends(id, first, others, &mut free),
                Some(id) if id.queue == QueueKind::Receive => {
                    self.complete_receives(id, first, others, &mut free)
                }
                Some(id) => {
                    self.complete_shared(id, first, &mut free);
                    others
                }
                None => {
                    self.unknown(first);
                    others
                }
            };
        }
        places - free.len()
    }

    /// The queue pair of a completion, if it still exists.
    #[inline(always)]
    fn queue_pair_of(&mut self, id: WorkId, completion: &Completion) -> Option<&mut HardwareQp> {
        let Some(handle) = self.qps.handle_at(id.index) else {
            self.unknown(completion);
            return None;
        };
        self.qps.get_mut(handle).filter(|_| id.is_of(handle))
    }

    /// Processes the first completion, of the send queue of `id`, and following ones of the same queue. Returns the others.
    #[inline(always)]
    fn complete_sends<'a>(
        &mut self,
        id: WorkId,
        first: &Completion,
        mut others: &'a [Completion],
        free: &mut Places<'_>,
    ) -> &'a [Completion] {
        let Some(queue_pair) = self.queue_pair_of(id, first) else { return others };
        let has_windows = queue_pair.sq.has_windows();
        let (mut completion, mut position) = (first, id.position);
        loop {
            if let Some(work) = queue_pair.sq.complete(position)
                && (work.signaled || completion.status != OK)
            {
                let Some(told) = free.next() else { break };
                *told = queue_pair.sent;
                told.wr_id = work.wr_id;
                told.opcode = work.opcode;
                // Not every card reports the length of a send.
                told.byte_len = work.length;
                if completion.status != OK {
                    queue_pair.fail_send(told, completion);
                }
            }
            if has_windows {
                break;
            }
            let [next, behind @ ..] = others else { break };
            let Some(next_position) = id.position_of(next.wr_id) else { break };
            (completion, position, others) = (next, next_position, behind);
        }
        if has_windows {
            self.complete_windows(id.index, id.position, first.status == OK);
        }
        others
    }

    /// The same for a receive queue.
    #[inline(always)]
    fn complete_receives<'a>(
        &mut self,
        id: WorkId,
        first: &Completion,
        mut others: &'a [Completion],
        free: &mut Places<'_>,
    ) -> &'a [Completion] {
        let is_rxe = self.is_rxe;
        let Some(queue_pair) = self.queue_pair_of(id, first) else { return others };
        let (mut completion, mut position) = (first, id.position);
        loop {
            if let Some(work) = queue_pair.rq.complete(position) {
                let (wr_id, Some(told)) = (work.wr_id, free.next()) else { break };
                queue_pair.fill_receive(told, wr_id, completion);
                if completion.status | completion.wc_flags | queue_pair.is_ud != 0 {
                    queue_pair.fill_other(told, completion, is_rxe);
                    if let Some(key) = told.invalidated {
                        self.revoke(key.value());
                        break;
                    }
                }
            }
            let [next, behind @ ..] = others else { break };
            let Some(next_position) = id.position_of(next.wr_id) else { break };
            (completion, position, others) = (next, next_position, behind);
        }
        others
    }

    /// Completes a receive of a shared receive queue.
    #[inline(never)]
    fn complete_shared(&mut self, id: WorkId, completion: &Completion, free: &mut Places<'_>) {
        let Some(queue) = self.srqs.at_mut(id.index) else { return self.unknown(completion) };
        let Some(wr_id) = queue.slots.complete(id.position) else { return };
        let Some(handle) = self.numbers.get(&completion.qp_num).copied() else {
            return self.unknown(completion);
        };
        let Some(queue_pair) = self.qps.get_mut(handle) else { return self.unknown(completion) };
        let Some(told) = free.next() else { return };
        queue_pair.fill_receive(told, wr_id, completion);
        queue_pair.fill_other(told, completion, self.is_rxe);
        if let Some(key) = told.invalidated {
            self.revoke(key.value());
        }
    }

    /// Completes work requests on windows: all before it have succeeded.
    #[cold]
    fn complete_windows(&mut self, index: u32, position: u32, has_succeeded: bool) {
        while let Some((window, is_last)) =
            self.qps.at_mut(index).and_then(|queue_pair| queue_pair.sq.pop_window(position))
        {
            self.complete_window(window, has_succeeded || !is_last);
        }
    }

    /// Adds a completion to the local queue.
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

    /// Ignores a completion without a posted work request.
    #[cold]
    fn unknown(&self, completion: &Completion) {
        tracing::warn!(device = self.device.name(), "a completion of no work request: {completion:?}");
    }
}

/// `IBV_WC_SUCCESS`
const OK: u32 = 0;
/// `IBV_WC_RECV_RDMA_WITH_IMM`
const RECV_RDMA_WITH_IMM: u32 = 129;
/// `IB_WC_WITH_INVALIDATE`
const KERNEL_WITH_INV: u32 = 4;

impl HardwareQp {
    /// Completes a receive, of its own or of its shared receive queue.
    #[inline(always)]
    fn fill_receive(&self, told: &mut WorkCompletion, wr_id: u64, completion: &Completion) {
        *told = self.received;
        told.wr_id = wr_id;
        told.byte_len = completion.byte_len;
    }

    /// Completes a failed send.
    #[cold]
    fn fail_send(&mut self, told: &mut WorkCompletion, completion: &Completion) {
        tracing::debug!(qpn = %self.qpn, "a send has failed: {completion:?}");
        (told.status, told.byte_len) = (status_of(completion.status), 0);
        // UC and UD continue to receive.
        let is_over = self.qp_type == QpType::Rc || self.state == QpState::Error;
        self.state = if is_over { QpState::Error } else { QpState::Sqe };
    }

    /// Completes a receive that has failed, or has fields in addition to its bytes.
    #[inline(never)]
    fn fill_other(&mut self, told: &mut WorkCompletion, completion: &Completion, is_rxe: bool) {
        if completion.status != OK {
            tracing::debug!(qpn = %self.qpn, "a receive has failed: {completion:?}");
            (told.status, told.byte_len, told.src_qpn) = (status_of(completion.status), 0, Qpn::new(0));
            self.state = QpState::Error;
            return;
        }
        if self.is_ud != 0 {
            told.src_qpn = Qpn::new(completion.src_qp & 0xff_ffff);
        }
        let flags = completion.wc_flags;
        // A card reports a network header for every message; only a datagram's is in the receive.
        told.grh = self.is_ud != 0 && flags & Completion::GRH != 0;
        if completion.opcode == RECV_RDMA_WITH_IMM {
            told.opcode = WcOpcode::RecvRdmaWithImm;
        }
        if flags & Completion::WITH_IMM != 0 {
            told.immediate = Some(u32::from_be(completion.imm_or_key));
        }
        // rdma_rxe uses the kernel's flag here, whose number is that of IBV_WC_IP_CSUM_OK for applications.
        let invalidated = Completion::WITH_INV | if is_rxe { KERNEL_WITH_INV } else { 0 };
        if flags & invalidated != 0 {
            told.invalidated = Some(RKey::new(completion.imm_or_key));
        }
    }
}

/// `enum ibv_wc_status` except success; those that RoCE does not have become general errors.
#[cold]
fn status_of(number: u32) -> WcStatus {
    use WcStatus as S;
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
