//! Completions of the card, and what an application is told of them.

use ferroce_driver::rnic::Completion;
use ferroce_wire::{Qpn, RKey};

use super::Hardware;
use super::work::{QueueKind, WorkId};
use crate::engine::cq::Pushed;
use crate::telemetry::counters::Counter;
use crate::verbs::{Cq, Event, Qp, QpState, QpType, WcOpcode, WcStatus, WorkCompletion};

impl Hardware {
    /// A work request has ended on the card, says the completion queue at `cq`.
    #[inline]
    pub(super) fn complete(&mut self, cq: u32, completion: &Completion) {
        let Some(id) = WorkId::from_card(completion.wr_id) else { return self.unknown(completion) };
        if id.queue == QueueKind::Shared {
            return self.complete_shared(cq, completion, id);
        }
        let Some((handle, queue_pair)) = self.qps.at_with_handle(id.index) else {
            return self.unknown(completion);
        };
        if !id.is_of(handle) {
            return;
        }
        if id.queue == QueueKind::Receive {
            let Some(work) = queue_pair.rq.complete(id.position) else { return };
            if completion.status != OK {
                queue_pair.state = QpState::Error;
            }
            let (qp, qpn) = (Qp(handle), queue_pair.qpn);
            return self.complete_receive(cq, completion, work.wr_id, (qp, qpn));
        }
        let Some(work) = queue_pair.sq.complete(id.position) else { return };
        let mut told = WorkCompletion {
            wr_id: work.wr_id,
            status: WcStatus::Success,
            opcode: work.opcode,
            byte_len: completion.byte_len,
            qp: Qp(handle),
            qpn: queue_pair.qpn,
            ..WorkCompletion::EMPTY
        };
        if completion.status != OK {
            (told.status, told.byte_len) = (status_of(completion.status), 0);
            queue_pair.state = failed_send(queue_pair.qp_type, queue_pair.state);
        }
        if queue_pair.sq.has_windows() {
            self.complete_windows(id, completion.status == OK);
        }
        if completion.status != OK || work.signaled {
            self.tell(cq, told);
        }
    }

    /// A receive has ended, of a queue pair or for it.
    #[inline(always)]
    fn complete_receive(&mut self, cq: u32, completion: &Completion, wr_id: u64, (qp, qpn): (Qp, Qpn)) {
        let mut told = WorkCompletion {
            wr_id,
            status: WcStatus::Success,
            opcode: WcOpcode::Recv,
            byte_len: completion.byte_len,
            qp,
            qpn,
            src_qpn: Qpn::new(completion.src_qp & 0xff_ffff),
            ..WorkCompletion::EMPTY
        };
        if completion.status != OK {
            (told.status, told.byte_len, told.src_qpn) = (status_of(completion.status), 0, Qpn::new(0));
        } else if completion.wc_flags != 0 {
            self.fill_flags(&mut told, completion);
        }
        self.tell(cq, told);
    }

    /// The same of a receive of a shared receive queue.
    fn complete_shared(&mut self, cq: u32, completion: &Completion, id: WorkId) {
        let Some(queue) = self.srqs.at_mut(id.index) else { return self.unknown(completion) };
        let Some(wr_id) = queue.slots.complete(id.position) else { return };
        let Some(handle) = self.qp_of(completion.qp_num) else { return self.unknown(completion) };
        if completion.status != OK
            && let Some(queue_pair) = self.qps.get_mut(handle)
        {
            queue_pair.state = QpState::Error;
        }
        let qpn = Qpn::new(completion.qp_num & 0xff_ffff);
        self.complete_receive(cq, completion, wr_id, (Qp(handle), qpn));
    }

    /// What it ends about windows: all before it have succeeded.
    #[cold]
    fn complete_windows(&mut self, id: WorkId, has_succeeded: bool) {
        while let Some((window, is_last)) =
            self.qps.at_mut(id.index).and_then(|queue_pair| queue_pair.sq.pop_window(id.position))
        {
            self.complete_window(window, has_succeeded || !is_last);
        }
    }

    /// What a receive has beside its bytes.
    fn fill_flags(&mut self, told: &mut WorkCompletion, completion: &Completion) {
        let flags = completion.wc_flags;
        // A card tells of a header of the network in front of every message; only a datagram's is in the receive.
        let is_datagram = self.qps.get(told.qp.0).is_some_and(|qp| qp.qp_type == QpType::Ud);
        told.grh = is_datagram && flags & Completion::GRH != 0;
        if completion.opcode == RECV_RDMA_WITH_IMM {
            told.opcode = WcOpcode::RecvRdmaWithImm;
        }
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

    #[inline(always)]
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

/// `IBV_WC_SUCCESS`
const OK: u32 = 0;
/// `IBV_WC_RECV_RDMA_WITH_IMM`
const RECV_RDMA_WITH_IMM: u32 = 129;
/// `IB_WC_WITH_INVALIDATE`
const KERNEL_WITH_INV: u32 = 4;

/// Where the state leads when a send fails: UC and UD go on receiving.
fn failed_send(qp_type: QpType, state: QpState) -> QpState {
    if qp_type == QpType::Rc || state == QpState::Error { QpState::Error } else { QpState::Sqe }
}

/// `enum ibv_wc_status` but success; those that RoCE does not have are general errors.
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
