//! The requesting end: sends a REQ, receives a REP or REJ, sends an RTU.
//!
//! The next hop is resolved before the REQ is sent. So a REP moves the queue pair from INIT to RTS in the receive phase.

use std::net::SocketAddr;

use ferroce_driver::Refusal;
use ferroce_wire::cm::{
    CmBody, IpCm, Mra, PathRecord, Rej, RejectReason, Rep, Req, Rtu, Stage, TransportType,
};
use ferroce_wire::{MacAddr, PathMtu, Psn, Qpn};
use rand_chacha::rand_core::RngCore;

use super::communication::{Communication, State, Terms};
use super::{
    Arrival, CmEvent, CmId, ConnectionManager, ConnectionParameters, Gsi, PortSpace, PrivateData, Verbs,
    canonical, time_of,
};
use crate::engine::ah::Hop;
use crate::engine::shared::Shared;
use crate::telemetry::counters::Counter;
use crate::verbs::{AddressVector, Error, Qp, QpType, Unreachable};

impl ConnectionManager {
    /// Requests a connection for `qp`, which is in INIT: immediately, or when the next hop is resolved.
    pub(crate) fn connect(
        &mut self,
        (qp, local_qpn, qp_type): (Qp, Qpn, QpType),
        to: SocketAddr,
        (address, hop): (AddressVector, Hop),
        path_mtu: PathMtu,
        parameters: &ConnectionParameters<'_>,
        verbs: &mut Verbs<'_>,
    ) -> Result<CmId, Error> {
        let ConnectionParameters { responder_resources, initiator_depth, cm_timeout, cm_retries, .. } =
            *parameters;
        let (rq_psn, transaction_id) = (Psn::new(verbs.shared.rng.next_u32()), verbs.shared.rng.next_u64());
        let header = verbs.port.header(&address.path(verbs.port, Qpn::GSI, Qpn::GSI)?);
        let own = || verbs.qps.get(qp.0).map_or(0, |qp| qp.pkey_index);
        let pkey_index = parameters.pkey_index.unwrap_or_else(own);
        let pkey = verbs.port.pkey(pkey_index)?;
        let terms = Terms {
            qp_type,
            path_mtu,
            rq_psn,
            sq_psn: Psn::new(0),
            max_dest_rd_atomic: responder_resources,
            max_rd_atomic: initiator_depth,
            timeout: parameters.timeout,
            retry_count: parameters.retry_count,
            rnr_retry: 7,
        };
        let service_id = PortSpace::Tcp.service_id(to.port());
        let source = verbs.port.gids[address.sgid_index].gid;
        let source_port = ephemeral_port(verbs.shared.rng.next_u32());
        let addresses = IpCm { source: canonical(source), source_port, destination: canonical(address.gid) };
        let addresses = addresses.to_bytes().map_err(|e| Error::invalid("address", to, e.to_string()))?;
        let (id, index) = self.begin(verbs.shared, parameters.channel, |ids| Communication {
            transaction_id,
            local_qpn,
            pkey_index,
            pkey,
            terms,
            cm_timeout,
            cm_retries,
            retries_left: cm_retries,
            ..Communication::asking(ids, PortSpace::Tcp, (address, hop), header)
        })?;
        self.take_qp(index, qp);
        if let Some(queue_pair) = verbs.qps.get_mut(qp.0) {
            queue_pair.responder.reserve(responder_resources);
        }
        let mut path = PathRecord::new(source, address.gid);
        path.set_flow_label(address.flow_label);
        path.set_traffic_class(address.traffic_class);
        path.set_hop_limit(address.hop_limit);
        path.set_service_level(address.service_level);
        path.set_ack_timeout(parameters.timeout);
        let local_comm_id = self.communications.at(index).map_or(0, |c| c.local_comm_id);
        let mut req = Req::new(local_comm_id, service_id, local_qpn, rq_psn, path_mtu, path);
        req.set_ca_guid(self.guid);
        req.set_pkey(pkey);
        req.set_responder_resources(responder_resources);
        req.set_initiator_depth(initiator_depth);
        req.set_remote_cm_timeout(cm_timeout);
        req.set_local_cm_timeout(cm_timeout);
        req.set_max_cm_retries(cm_retries);
        req.set_retry_count(parameters.retry_count);
        req.set_rnr_retry_count(parameters.rnr_retry);
        req.set_transport(if qp_type == QpType::Uc { TransportType::Uc } else { TransportType::Rc });
        req.private_data[..IpCm::LEN].copy_from_slice(&addresses);
        let behind = &mut req.private_data[IpCm::LEN..];
        behind[..parameters.private_data.len()].copy_from_slice(parameters.private_data);
        self.ask(index, CmBody::Req(&req), verbs.shared);
        Ok(id)
    }

    /// Sends the first message of an exchange, or keeps it until the next hop is resolved.
    pub(super) fn ask(&mut self, index: u32, body: CmBody<'_>, shared: &mut Shared) {
        let Some(communication) = self.communications.at_mut(index) else { return };
        communication.keep(body);
        if communication.state != State::Resolving {
            self.send_again(index, shared);
            self.wait_from_now_on(index);
        }
    }

    /// Whether an exchange waits for its next hop.
    pub(crate) fn awaits_next_hop(&self, id: CmId) -> bool {
        self.communications.get(id.0).is_some_and(|c| c.state == State::Resolving)
    }

    /// The resolution of the next hop of an exchange has ended.
    pub(crate) fn take_next_hop(
        &mut self,
        id: CmId,
        found: Result<MacAddr, Unreachable>,
        verbs: &mut Verbs<'_>,
    ) {
        let Some(communication) = self.communications.get_mut(id.0) else { return };
        if communication.state != State::Resolving {
            return;
        }
        let index = id.0.index;
        match found {
            Ok(mac) => {
                communication.take_next_hop(mac);
                communication.begin_waiting(verbs.shared.now);
                self.send_again(index, verbs.shared);
                self.wait(index, verbs.shared.now);
            }
            Err(reason) => self.end_unreachable(index, reason),
        }
    }

    /// The network reports an undelivered packet, and quotes it: two random numbers in it identify the exchange, so only a
    /// host that has seen the packet can end it.
    pub(crate) fn on_refusal(&mut self, refusal: &Refusal) {
        let Refusal { peer, from, reason, quoted } = *refusal;
        let Some((transaction_id, ours)) = Gsi::quoted(&quoted) else { return };
        let Some(index) = self.comm_ids.get(ours) else { return };
        let Some(communication) = self.communications.at(index) else { return };
        let asks = matches!(communication.state, State::ReqSent | State::SidrSent);
        if asks
            && communication.transaction_id == transaction_id
            && canonical(communication.address.gid) == peer
        {
            self.end_unreachable(index, Unreachable::Refused { peer, from, reason });
        }
    }

    pub(super) fn end_unreachable(&mut self, index: u32, reason: Unreachable) {
        let Some(communication) = self.communications.at(index) else { return };
        self.tell(CmEvent::Unreachable { id: communication.id, reason });
        self.remove(index);
    }

    pub(super) fn on_rep(
        &mut self,
        arrival: &Arrival,
        rep: &Rep,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let index = self.find(arrival, rep.remote_comm_id())?;
        let communication = self.communications.at_mut(index).ok_or(Counter::CmRxUnknown)?;
        match communication.state {
            State::ReqSent if communication.space == PortSpace::Tcp => {}
            State::Established if communication.remote_comm_id == rep.local_comm_id() => {
                verbs.shared.count(Counter::CmRxDuplicates);
                // The RTU was lost.
                self.send_again(index, verbs.shared);
                return Ok(());
            }
            _ => return Err(Counter::CmRxUnknown),
        }
        communication.remote_comm_id = rep.local_comm_id();
        communication.remote_qpn = rep.qpn();
        let terms = &mut communication.terms;
        terms.sq_psn = rep.starting_psn();
        terms.rnr_retry = rep.rnr_retry_count();
        terms.max_rd_atomic = terms.max_rd_atomic.min(rep.responder_resources());
        terms.max_dest_rd_atomic = terms.max_dest_rd_atomic.min(rep.initiator_depth().max(1));
        let (id, key) = (communication.id, (arrival.source, rep.qpn()));
        if self.by_qpn.contains_key(&key) {
            self.reject(index, RejectReason::STALE_CONNECTION, &[], verbs);
            return self.end_refused(index, RejectReason::STALE_CONNECTION, &[]);
        }
        let communication = self.communications.at(index).ok_or(Counter::CmRxUnknown)?;
        let ready = rep.qpn().is_ordinary()
            && communication.make_ready_to_receive(verbs).is_ok()
            && communication.make_ready_to_send(verbs).is_ok();
        if !ready {
            // The application has moved the queue pair meanwhile, or the peer has none.
            self.reject(index, RejectReason::CONSUMER, &[], verbs);
            return self.end_refused(index, RejectReason::NO_QP, &[]);
        }
        let rtu = Rtu::new(communication.local_comm_id, communication.remote_comm_id);
        self.by_qpn.insert(key, index);
        self.timers.cancel(index);
        if let Some(communication) = self.communications.at_mut(index) {
            communication.state = State::Established;
        }
        self.send_kept(index, CmBody::Rtu(&rtu), verbs.shared);
        self.tell(CmEvent::Established { id, private_data: PrivateData::new(&rep.private_data) });
        Ok(())
    }

    /// The peer needs longer. It may repeat this, and has two minutes in total.
    pub(super) fn on_mra(
        &mut self,
        arrival: &Arrival,
        mra: &Mra,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let index = self.find(arrival, mra.remote_comm_id())?;
        let communication = self.communications.at_mut(index).ok_or(Counter::CmRxUnknown)?;
        let waits = matches!(
            (communication.state, mra.stage()),
            (State::ReqSent, Some(Stage::Req)) | (State::RepSent, Some(Stage::Rep))
        );
        if !waits {
            return Err(Counter::CmRxUnknown);
        }
        let longer = time_of(mra.service_timeout()) + time_of(communication.cm_timeout);
        communication.wait_until(verbs.shared.now + longer);
        self.timers.ensure(index, communication.deadline);
        Ok(())
    }

    pub(super) fn on_rej(
        &mut self,
        arrival: &Arrival,
        rej: &Rej,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let index = match rej.remote_comm_id() {
            // A requester that gives up may not know the local ID yet.
            0 => {
                let named = self.by_peer.get(&(arrival.source, rej.local_comm_id(), PortSpace::Tcp));
                *named.ok_or(Counter::CmRxUnknown)?
            }
            ours => self.find(arrival, ours)?,
        };
        let communication = self.communications.at(index).ok_or(Counter::CmRxUnknown)?;
        if communication.space != PortSpace::Tcp {
            return Err(Counter::CmRxUnknown);
        }
        let is_its = communication.remote_comm_id == rej.local_comm_id();
        match communication.state {
            State::ReqSent if rej.remote_comm_id() != 0 => {}
            State::RepSent if is_its => self.fail_qp(index, verbs),
            State::ReqReceived if is_its => {
                if self.take_back_request(communication.id) {
                    self.remove(index);
                    return Ok(());
                }
            }
            _ => return Err(Counter::CmRxUnknown),
        }
        self.end_refused(index, rej.reason(), &rej.private_data)
    }

    pub(super) fn end_refused(
        &mut self,
        index: u32,
        reason: RejectReason,
        private_data: &[u8],
    ) -> Result<(), Counter> {
        if let Some(communication) = self.communications.at(index) {
            let (id, private_data) = (communication.id, PrivateData::new(private_data));
            self.tell(CmEvent::Rejected { id, reason, private_data });
            self.remove(index);
        }
        Ok(())
    }

    /// Rejects the peer's message.
    pub(super) fn reject(
        &mut self,
        index: u32,
        reason: RejectReason,
        private_data: &[u8],
        verbs: &mut Verbs<'_>,
    ) {
        let Some(communication) = self.communications.at(index) else { return };
        let stage = match communication.state {
            State::ReqReceived => Stage::Req,
            State::ReqSent if communication.remote_comm_id != 0 => Stage::Rep,
            _ => Stage::Other,
        };
        let mut rej = Rej::new(communication.local_comm_id, communication.remote_comm_id, stage, reason);
        if reason == RejectReason::TIMEOUT {
            // It identifies the request to a peer that has no local ID.
            rej.set_info(&self.guid.to_be_bytes());
        }
        rej.private_data[..private_data.len()].copy_from_slice(private_data);
        self.send(index, communication.transaction_id, CmBody::Rej(&rej), verbs.shared);
    }
}

/// A port from the range without registered services (RFC 6335).
pub(super) fn ephemeral_port(random: u32) -> u16 {
    0xc000 | (random as u16 & 0x3fff)
}
