//! Datagram services: SIDR, which finds the queue pair for a port.
//!
//! An answered search is removed immediately, as in Linux. A requester whose answer was lost sends it again.

use std::net::SocketAddr;

use ferroce_wire::cm::{CmBody, IpCm, RejectReason, SERVICE_ID_UDP, SidrRep, SidrReq};
use ferroce_wire::{PKey, PathMtu, Qpn};
use rand_chacha::rand_core::RngCore;

use super::active::ephemeral_port;
use super::communication::{Communication, State};
use super::passive::port_of;
use super::{
    Arrival, CmEvent, CmId, ConnectionManager, ConnectionParameters, ConnectionRequest, Listener, PortSpace,
    PrivateData, Verbs, canonical, time_of,
};
use crate::engine::ah::Hop;
use crate::telemetry::counters::Counter;
use crate::verbs::{AddressVector, Error, QpType};

/// Statuses of a reply (IBA 12.11.2): there is no such service, and the service rejects.
const UNSUPPORTED: u8 = 1;
const REJECTED: u8 = 2;
/// How long a search is kept for the application's answer, as exponent: 17 s.
const KEPT: u8 = 22;

impl ConnectionManager {
    /// Searches for the datagram service at `to`.
    pub(crate) fn resolve(
        &mut self,
        to: SocketAddr,
        (address, hop): (AddressVector, Hop),
        parameters: &ConnectionParameters<'_>,
        verbs: &mut Verbs<'_>,
    ) -> Result<CmId, Error> {
        let header = verbs.port.header(&address.path(verbs.port, Qpn::GSI, Qpn::GSI)?);
        let pkey_index = parameters.pkey_index.unwrap_or(0);
        let pkey = verbs.port.pkey(pkey_index)?;
        let transaction_id = verbs.shared.rng.next_u64();
        let source = canonical(verbs.port.gids[address.sgid_index].gid);
        let source_port = ephemeral_port(verbs.shared.rng.next_u32());
        let addresses = IpCm { source, source_port, destination: canonical(address.gid) };
        let addresses = addresses.to_bytes().map_err(|e| Error::invalid("address", to, e.to_string()))?;
        let (id, index) = self.begin(verbs.shared, parameters.channel, |ids| Communication {
            transaction_id,
            pkey_index,
            pkey,
            cm_timeout: parameters.cm_timeout,
            cm_retries: parameters.cm_retries,
            retries_left: parameters.cm_retries,
            ..Communication::asking(ids, PortSpace::Udp, (address, hop), header)
        })?;
        let request_id = self.communications.at(index).map_or(0, |c| c.local_comm_id);
        let mut req = SidrReq::new(request_id, PortSpace::Udp.service_id(to.port()), pkey);
        req.private_data[..IpCm::LEN].copy_from_slice(&addresses);
        let behind = &mut req.private_data[IpCm::LEN..];
        behind[..parameters.private_data.len()].copy_from_slice(parameters.private_data);
        self.ask(index, CmBody::SidrReq(&req), verbs.shared);
        Ok(id)
    }

    pub(super) fn on_sidr_req(
        &mut self,
        arrival: &Arrival,
        transaction_id: u64,
        req: &SidrReq,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let key = (arrival.source, req.request_id(), PortSpace::Udp);
        if self.by_peer.contains_key(&key) {
            verbs.shared.count(Counter::CmRxDuplicates);
            return Ok(());
        }
        let admitted = self.admit_seeker(arrival, req, verbs);
        let (listener, addresses, port, (pkey_index, pkey)) = match admitted {
            Ok(admitted) => admitted,
            // It is retransmitted, and finds room then.
            Err(RejectReason::NO_RESOURCES) => return Err(Counter::CmRxNoRoom),
            Err(_) => {
                verbs.shared.count(Counter::CmTxRejects);
                let rep = SidrRep::refused(req.request_id(), req.service_id(), UNSUPPORTED);
                self.answer(arrival, transaction_id, CmBody::SidrRep(&rep), verbs);
                return Ok(());
            }
        };
        let Ok(path) = arrival.back.path(verbs.port, Qpn::GSI, Qpn::GSI) else { return Ok(()) };
        let header = verbs.port.header(&path);
        let deadline = verbs.shared.now + time_of(KEPT);
        let begun = self.begin(verbs.shared, self.channel_of_listener(listener), |ids| Communication {
            transaction_id,
            remote_comm_id: req.request_id(),
            pkey_index,
            pkey,
            peer_pkey: req.pkey(),
            listener: Some(listener),
            service_id: req.service_id(),
            deadline,
            ..Communication::new(ids, (State::SidrReceived, PortSpace::Udp), arrival.back, header)
        });
        let (id, index) = begun.map_err(|_| Counter::CmRxNoRoom)?;
        self.join_listener(listener, index, arrival.source);
        self.by_peer.insert(key, index);
        self.timers.ensure(index, deadline);
        let largest = verbs.port.path_mtu(arrival.source.is_ipv6());
        self.tell(CmEvent::ConnectionRequest(ConnectionRequest {
            listener,
            id,
            peer: SocketAddr::new(addresses.source, addresses.source_port),
            local: SocketAddr::new(addresses.destination, port),
            qp_type: QpType::Ud,
            private_data: PrivateData::new(&req.private_data[IpCm::LEN..]),
            responder_resources: 0,
            initiator_depth: 0,
            path_mtu: largest.unwrap_or(PathMtu::Mtu256),
            pkey_index,
        }));
        Ok(())
    }

    fn admit_seeker(
        &self,
        arrival: &Arrival,
        req: &SidrReq,
        verbs: &mut Verbs<'_>,
    ) -> Result<(Listener, IpCm, u16, (usize, PKey)), RejectReason> {
        let port = port_of(req.service_id(), SERVICE_ID_UDP).ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let (listener, partition) = self.listener(PortSpace::Udp, arrival, port, req.pkey(), verbs)?;
        let addresses = arrival.addresses(&req.private_data)?;
        self.check_room(listener, arrival)?;
        Ok((listener, addresses, port, partition))
    }

    /// Sends the queue pair to the requester.
    pub(crate) fn serve(
        &mut self,
        id: CmId,
        (qpn, qkey): (Qpn, u32),
        private_data: &[u8],
        verbs: &mut Verbs<'_>,
    ) {
        let Some(communication) = self.communications.get(id.0) else { return };
        let Communication { remote_comm_id, service_id, .. } = *communication;
        let mut rep = SidrRep::found(remote_comm_id, service_id, qpn, qkey);
        rep.private_data[..private_data.len()].copy_from_slice(private_data);
        self.say(id.0.index, &rep, verbs);
    }

    pub(super) fn refuse_service(&mut self, index: u32, private_data: &[u8], verbs: &mut Verbs<'_>) {
        let Some(communication) = self.communications.at(index) else { return };
        let Communication { remote_comm_id, service_id, .. } = *communication;
        let mut rep = SidrRep::refused(remote_comm_id, service_id, REJECTED);
        rep.private_data[..private_data.len()].copy_from_slice(private_data);
        self.say(index, &rep, verbs);
    }

    /// The answer ends a search. A requester that does not receive it searches again.
    fn say(&mut self, index: u32, rep: &SidrRep, verbs: &mut Verbs<'_>) {
        let Some(communication) = self.communications.at(index) else { return };
        self.send(index, communication.transaction_id, CmBody::SidrRep(rep), verbs.shared);
        self.remove(index);
    }

    pub(super) fn on_sidr_rep(&mut self, arrival: &Arrival, rep: &SidrRep) -> Result<(), Counter> {
        let index = self.find(arrival, rep.request_id())?;
        let communication = self.communications.at(index).ok_or(Counter::CmRxUnknown)?;
        let Communication { id, address, state, .. } = *communication;
        if state != State::SidrSent {
            return Err(Counter::CmRxUnknown);
        }
        let private_data = PrivateData::new(&rep.private_data);
        self.tell(match rep.status() {
            0 => CmEvent::Resolved { id, address, qpn: rep.qpn(), qkey: rep.qkey(), private_data },
            status => CmEvent::Rejected { id, reason: RejectReason(status.into()), private_data },
        });
        self.remove(index);
        Ok(())
    }
}
