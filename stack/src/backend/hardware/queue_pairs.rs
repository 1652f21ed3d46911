//! Queue pairs.

use ferroce_driver::rnic::{QueuePair, QueuePairConfig};
use ferroce_wire::{Gid, PKey, PathMtu, Psn, Qpn, RnrTimer, Service};

use super::Hardware;
use super::work::{QueueKind, WorkId, WorkQueue};
use crate::verbs::{
    Access, AddressVector, CongestionControl, Cq, Error, Feature, Handle, MAX_MESSAGE, Mismatch, Mr, Pd, Qp,
    QpAttributes, QpConfig, QpState, QpType, ReadyToSend, Srq, WcOpcode, WcStatus, WorkCompletion,
};

pub(super) struct HardwareQp {
    pub(super) card: QueuePair,
    pub(super) qpn: Qpn,
    pub(super) qp_type: QpType,
    pub(super) service: Service,
    pub(super) pd: Pd,
    pub(super) send_cq: Cq,
    pub(super) recv_cq: Cq,
    pub(super) srq: Option<Srq>,
    /// The last known state; the card can change it too.
    pub(super) state: QpState,
    pub(super) sq: WorkQueue,
    pub(super) rq: WorkQueue,
    /// The common fields of all completions of its sends.
    pub(super) sent: WorkCompletion,
    /// The same for its receives, with the peer's QPN once known, because cards report it only for datagrams.
    pub(super) received: WorkCompletion,
    /// 1 for UD, 0 for others.
    pub(super) is_ud: u32,
    pub(super) signal_all: bool,
    pub(super) max_inline: u32,
    /// The longest message: one packet for a datagram.
    pub(super) max_message: u32,
    pub(super) groups: Vec<Gid>,
    /// The attributes set, which the card does not report in this form.
    pub(super) told: Told,
}

/// The attributes that transitions have set.
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
    /// How many outstanding work requests refer to a region.
    pub(super) fn users_of(&self, mr: Mr) -> u32 {
        self.sq.users_of(mr.0.index) + self.rq.users_of(mr.0.index)
    }

    /// Fails unless the state is in `allowed`.
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

    /// Clears its state.
    pub(super) fn forget(&mut self) {
        self.sq.clear();
        self.rq.clear();
        self.told = Told::default();
        self.received.src_qpn = Qpn::new(0);
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
        // Not more than requested: a card's limits depend on more than it reports.
        let (sends, receives) = (config.max_send_wr, config.max_recv_wr);
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
        let completed = |handle, opcode| WorkCompletion {
            status: WcStatus::Success,
            opcode,
            qp: Qp(handle),
            qpn: Qpn::new(number & 0xff_ffff),
            ..WorkCompletion::EMPTY
        };
        let make = |handle: Handle| HardwareQp {
            card,
            qpn: Qpn::new(number & 0xff_ffff),
            qp_type: config.qp_type,
            service: config.qp_type.service(),
            pd: config.pd,
            send_cq: config.send_cq,
            recv_cq: config.recv_cq,
            srq: config.srq,
            state: QpState::Reset,
            sq: WorkQueue::new(WorkId::first(QueueKind::Send, handle), sends, config.max_send_sge.into()),
            rq: WorkQueue::new(
                WorkId::first(QueueKind::Receive, handle),
                receives,
                config.max_recv_sge.into(),
            ),
            sent: completed(handle, WcOpcode::Send),
            received: completed(handle, WcOpcode::Recv),
            is_ud: (config.qp_type == QpType::Ud).into(),
            signal_all: config.signal_all,
            max_inline: config.max_inline_data,
            max_message: if config.qp_type == QpType::Ud { path_mtu } else { self.max_message },
            groups: Vec::new(),
            told: Told::default(),
        };
        let handle = self.qps.insert_with(make).ok_or(full)?;
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
        self.release_connection(qp);
        let (send_cq, recv_cq) = self.qp(qp).map(|qp| (qp.send_cq, qp.recv_cq))?;
        // The card's queue pair is destroyed with its completions, and with receives taken from a shared queue.
        self.purge(qp, send_cq, recv_cq);
        let Some(removed) = self.qps.remove(qp.0) else { return Err(Error::invalid_handle("QP", qp.0)) };
        let HardwareQp { card, qpn, srq, .. } = removed;
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

    /// Removes the completions of a queue pair that is destroyed or reset. Those still on the card are recognised by their
    /// numbers.
    pub(super) fn purge(&mut self, qp: Qp, send_cq: Cq, recv_cq: Cq) {
        for cq in [send_cq, recv_cq] {
            if let Err(error) = self.drain(cq.0.index) {
                // The next poll reports it too.
                tracing::debug!("completions of a queue pair that is given up: {error}");
            }
            if let Some(queue) = self.cqs.get_mut(cq.0) {
                queue.queue.purge(qp);
            }
        }
    }

    /// A card acknowledges by itself.
    pub(crate) fn acknowledge(&mut self, qp: Qp) -> Result<(), Error> {
        self.qps.get(qp.0).map(drop).ok_or_else(|| Error::invalid_handle("QP", qp.0))
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
}

/// `enum ibv_qp_state`
pub(super) fn state_of(number: u32) -> Option<QpState> {
    use QpState::{Error, Init, Reset, Rtr, Rts, Sqd, Sqe};
    [Reset, Init, Rtr, Rts, Sqd, Sqe, Error].get(number as usize).copied()
}
