//! The end of a connection: DREQ and DREP, and timewait until late packets are gone.
//!
//! A DREQ for an id that does not exist is answered by a DREP. Otherwise a peer whose first DREP was lost would repeat
//! its DREQ for a minute.

use ferroce_driver::Nanos;
use ferroce_wire::cm::{CmBody, Drep, Dreq, RejectReason};

use super::communication::{Communication, State};
use super::{Arrival, CmEvent, CmId, ConnectionManager, Verbs, time_of};
use crate::telemetry::counters::Counter;
use crate::verbs::Qp;

impl ConnectionManager {
    /// Ends a connection, or the attempt at one. Returns whether there is such an ID.
    pub(crate) fn disconnect(&mut self, id: CmId, verbs: &mut Verbs<'_>) -> bool {
        let Ok(index) = self.index_of(id) else { return false };
        let Some(communication) = self.communications.at(index) else { return false };
        match communication.state {
            State::Established | State::RepSent => {
                let Communication { local_comm_id, remote_comm_id, remote_qpn, .. } = *communication;
                self.fail_qp(index, verbs);
                self.leave_listener(index);
                let dreq = Dreq::new(local_comm_id, remote_comm_id, remote_qpn);
                if let Some(communication) = self.communications.at_mut(index) {
                    communication.state = State::DreqSent;
                    communication.retries_left = DREQ_RETRIES.min(communication.cm_retries);
                }
                self.send_kept(index, CmBody::Dreq(&dreq), verbs.shared);
                self.wait_from_now_on(index);
            }
            State::ReqSent => {
                self.reject(index, RejectReason::TIMEOUT, &[], verbs);
                self.remove(index);
            }
            State::SidrSent | State::Resolving => self.remove(index),
            State::ReqReceived | State::SidrReceived => self.refuse(id, &[], verbs),
            State::DreqSent | State::Timewait => {}
        }
        true
    }

    /// A queue pair is about to be destroyed, and its connection with it.
    pub(crate) fn release(&mut self, qp: Qp, verbs: &mut Verbs<'_>) {
        if let Some(id) = self.user_of(qp) {
            self.disconnect(id, verbs);
        }
    }

    /// The connection of a queue pair.
    pub(crate) fn user_of(&self, qp: Qp) -> Option<CmId> {
        self.communications.at(*self.by_qp.get(&qp)?).map(|c| c.id)
    }

    /// Ends as many connections as the port can send DREQs for at a time. Returns whether there are any.
    pub(crate) fn disconnect_some(&mut self, verbs: &mut Verbs<'_>) -> bool {
        let lives =
            |c: &&Communication| matches!(c.state, State::Established | State::RepSent | State::ReqSent);
        while !self.gsi.is_full() {
            let Some(id) = self.communications.iter().find(lives).map(|c| c.id) else { break };
            self.disconnect(id, verbs);
        }
        !self.gsi.is_empty()
    }

    pub(super) fn on_dreq(
        &mut self,
        arrival: &Arrival,
        transaction: u64,
        dreq: &Dreq,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        if self.comm_ids.get(dreq.remote_comm_id()).is_none() {
            // For a connection that has ended, whose peer has not received that.
            let drep = Drep::new(dreq.remote_comm_id(), dreq.local_comm_id());
            self.answer(arrival, transaction, CmBody::Drep(&drep), verbs);
            verbs.shared.count(Counter::CmRxDuplicates);
            return Ok(());
        }
        let index = self.find_pair(arrival, dreq.remote_comm_id(), dreq.local_comm_id())?;
        let communication = self.communications.at(index).ok_or(Counter::CmRxUnknown)?;
        if dreq.remote_qpn() != communication.local_qpn {
            return Err(Counter::CmRxUnknown);
        }
        let (id, state) = (communication.id, communication.state);
        let drep = Drep::new(communication.local_comm_id, communication.remote_comm_id);
        match state {
            State::Established | State::RepSent | State::DreqSent => {
                self.fail_qp(index, verbs);
                self.send(index, transaction, CmBody::Drep(&drep), verbs.shared);
                self.tell(CmEvent::Disconnected { id });
                self.enter_timewait(index, verbs.shared.now);
            }
            State::Timewait => {
                verbs.shared.count(Counter::CmRxDuplicates);
                self.send(index, transaction, CmBody::Drep(&drep), verbs.shared);
            }
            _ => return Err(Counter::CmRxUnknown),
        }
        Ok(())
    }

    pub(super) fn on_drep(
        &mut self,
        arrival: &Arrival,
        drep: &Drep,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let index = self.find_pair(arrival, drep.remote_comm_id(), drep.local_comm_id())?;
        let ended = self.communications.at(index).filter(|c| c.state == State::DreqSent);
        let id = ended.ok_or(Counter::CmRxUnknown)?.id;
        self.tell(CmEvent::Disconnected { id });
        self.enter_timewait(index, verbs.shared.now);
        Ok(())
    }

    /// Late packets exist as long as an ACK is waited for, in both directions; no longer than a network can hold them,
    /// whatever the peer has requested.
    pub(super) fn enter_timewait(&mut self, index: u32, now: Nanos) {
        self.timers.cancel(index);
        self.leave_listener(index);
        let Some(communication) = self.communications.at_mut(index) else { return };
        communication.state = State::Timewait;
        communication.deadline = now + 2 * time_of(communication.terms.timeout.min(TIMEWAIT_MAX));
        self.timers.ensure(index, communication.deadline);
    }

    /// Moves the queue pair to ERR: posted work requests are flushed. It belongs to the application from then on.
    pub(super) fn fail_qp(&mut self, index: u32, verbs: &mut Verbs<'_>) {
        let qp = self.release_qp(index);
        if let Some(qp) = qp.and_then(|qp| verbs.qps.get_mut(qp.0)) {
            qp.enter_error(verbs.shared);
        }
    }
}

/// A peer that may be gone is notified with fewer retries than a request has.
const DREQ_RETRIES: u8 = 4;
/// The longest ACK timeout assumed for the lifetime of late packets, as exponent: 1.1 s.
const TIMEWAIT_MAX: u8 = 18;
