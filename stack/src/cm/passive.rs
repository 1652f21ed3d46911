//! The accepting end: receives a REQ, sends a REP or REJ, receives an RTU.
//!
//! The queue pair receives from `accept` on. It goes to RTS with the RTU, or with the first packet, which has the same
//! meaning (`CommEst`).
//!
//! A REQ for a queue pair number of the peer that has a connection is stale (REJ 10). It ends this connection only if its
//! local queue pair is dead already (in ERR, or destroyed). Linux always ends it; then anybody who can forge a source
//! address could end a connection.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ferroce_driver::Nanos;
use ferroce_wire::cm::{
    CmBody, IpCm, Mra, Rej, RejectReason, Rep, Req, Rtu, SERVICE_ID_TCP, Stage, TransportType,
};
use ferroce_wire::{Ecn, PKey, PathMtu, Psn, Qpn};
use rand_chacha::rand_core::RngCore;

use super::communication::{ACK_TIMEOUTS, Communication, PATIENCE_MAX, State, Terms};
use super::{
    Arrival, CmEvent, CmId, ConnectionManager, ConnectionParameters, ConnectionRequest, Listener, Listening,
    PortSpace, PrivateData, Verbs, time_of,
};
use crate::engine::qp::QueuePair;
use crate::engine::slab::Slab;
use crate::telemetry::counters::Counter;
use crate::verbs::{Error, MAX_RD_ATOMIC, Qp, QpState, QpType};

/// The time that a peer is asked to wait for the application, as exponent: 4.3 s, repeatedly.
const MRA_TIMEOUT: u8 = 20;

/// A request that passed the checks.
struct Admitted {
    listener: Listener,
    addresses: IpCm,
    path_mtu: PathMtu,
    /// In the port's table: index and key.
    partition: (usize, PKey),
}

impl Verbs<'_> {
    /// The local P_Key for a request with `pkey`. The standard has no reject reason for a missing one; Linux uses "invalid
    /// GID" (`cm_req_handler` does for every path that `cm_init_av_by_path` can't use, and that looks the P_Key up).
    pub(super) fn partition(&mut self, arrival: &Arrival, pkey: PKey) -> Result<(usize, PKey), RejectReason> {
        let pkeys = &self.port.pkeys;
        let found = pkeys.index_admitting(pkey).and_then(|index| Some((index, pkeys.get(index)?)));
        if found.is_none() {
            self.shared.raise_pkey_violation(None, arrival.source, pkey);
        }
        found.ok_or(RejectReason::INVALID_GID)
    }
}

impl ConnectionManager {
    pub(super) fn on_req(
        &mut self,
        arrival: &Arrival,
        transaction: u64,
        req: &Req,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        if let Some(&index) = self.by_peer.get(&(arrival.source, req.local_comm_id(), PortSpace::Tcp)) {
            verbs.shared.count(Counter::CmRxDuplicates);
            self.on_req_again(index, transaction, verbs);
            return Ok(());
        }
        match self.admit(arrival, req, verbs) {
            Ok(admitted) => self.accept_request(arrival, transaction, req, admitted, verbs)?,
            Err(reason) => {
                self.end_stale(arrival, req, verbs);
                verbs.shared.count(Counter::CmTxRejects);
                let mut rej = Rej::new(0, req.local_comm_id(), Stage::Req, reason);
                if reason == RejectReason::INVALID_MTU {
                    // The supported value.
                    let largest = verbs.port.path_mtu(arrival.source.is_ipv6());
                    rej.set_info(&[largest.map_or(0, PathMtu::code) << 4]);
                }
                self.answer(arrival, transaction, CmBody::Rej(&rej), verbs);
            }
        }
        Ok(())
    }

    /// A queue pair number that the peer reuses is no longer that of a connection. The local one ends if it is dead
    /// already; a live one is not ended by a packet that anybody can send.
    fn end_stale(&mut self, arrival: &Arrival, req: &Req, verbs: &mut Verbs<'_>) {
        let Some(&index) = self.by_qpn.get(&(arrival.source, req.qpn())) else { return };
        let Some(communication) = self.communications.at(index) else { return };
        let qp = communication.qp.and_then(|qp| verbs.qps.get(qp.0));
        if communication.state == State::Established && qp.is_none_or(|qp| qp.state == QpState::Error) {
            self.disconnect(communication.id, verbs);
        }
    }

    /// The peer has no answer yet.
    fn on_req_again(&mut self, index: u32, transaction: u64, verbs: &mut Verbs<'_>) {
        let Some(communication) = self.communications.at_mut(index) else { return };
        let (ours, theirs) = (communication.local_comm_id, communication.remote_comm_id);
        match communication.state {
            State::ReqReceived => {
                // The peer waits longer then, and the application has more time.
                let longer = verbs.shared.now + 2 * time_of(MRA_TIMEOUT);
                communication.wait_until(communication.deadline.max(longer));
                let mra = Mra::new(ours, theirs, Stage::Req, MRA_TIMEOUT);
                self.send(index, transaction, CmBody::Mra(&mra), verbs.shared);
            }
            State::RepSent => self.send_again(index, verbs.shared),
            State::DreqSent | State::Timewait => {
                let rej = Rej::new(ours, theirs, Stage::Req, RejectReason::STALE_CONNECTION);
                self.send(index, transaction, CmBody::Rej(&rej), verbs.shared);
            }
            _ => {}
        }
    }

    /// The listener, and the checked request; or why it is rejected.
    fn admit(&self, arrival: &Arrival, req: &Req, verbs: &mut Verbs<'_>) -> Result<Admitted, RejectReason> {
        if self.by_qpn.contains_key(&(arrival.source, req.qpn())) || !req.qpn().is_ordinary() {
            return Err(RejectReason::STALE_CONNECTION);
        }
        if req.transport().is_none() {
            return Err(RejectReason::INVALID_TRANSPORT);
        }
        let port = port_of(req.service_id(), SERVICE_ID_TCP).ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let (listener, partition) = self.listener(PortSpace::Tcp, arrival, port, req.pkey(), verbs)?;
        let addresses = arrival.addresses(&req.private_data)?;
        let path = &req.primary_path;
        if path.local_gid() != arrival.source || path.remote_gid() != arrival.destination {
            return Err(RejectReason::INVALID_GID);
        }
        let largest = verbs.port.path_mtu(arrival.source.is_ipv6());
        let path_mtu = req.path_mtu().filter(|mtu| largest.is_some_and(|most| *mtu <= most));
        let path_mtu = path_mtu.ok_or(RejectReason::INVALID_MTU)?;
        self.check_room(listener, arrival)?;
        Ok(Admitted { listener, addresses, path_mtu, partition })
    }

    /// The listener on a port of the address to which a request was sent, and the local P_Key for a request with `pkey`:
    /// the listener's own, if it has one.
    pub(super) fn listener(
        &self,
        space: PortSpace,
        arrival: &Arrival,
        port: u16,
        pkey: PKey,
        verbs: &mut Verbs<'_>,
    ) -> Result<(Listener, (usize, PKey)), RejectReason> {
        let admitting = verbs.partition(arrival, pkey)?;
        let to: IpAddr = super::canonical(arrival.destination);
        let on = |ip: IpAddr| {
            let address = SocketAddr::new(ip, port);
            let mut listeners = self.listeners.iter_with_handles();
            listeners.find(|(_, l)| l.space == space && l.address == address)
        };
        let found = on(to).or_else(|| on(Ipv4Addr::UNSPECIFIED.into()));
        let (handle, listening) = found.ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let partition = match listening.config.pkey_index {
            None => admitting,
            Some(own) => {
                let key = verbs.port.pkeys.get(own).filter(|key| key.admits(pkey));
                (own, key.ok_or(RejectReason::INVALID_SERVICE_ID)?)
            }
        };
        Ok((Listener(handle), partition))
    }

    /// Whether one more may be pending.
    pub(super) fn check_room(&self, listener: Listener, arrival: &Arrival) -> Result<(), RejectReason> {
        let listening = self.listeners.get(listener.0).ok_or(RejectReason::INVALID_SERVICE_ID)?;
        let Listening { half_open, config, .. } = listening;
        let of_source = || half_open.iter().filter(|(_, source)| *source == arrival.source).count();
        let room = half_open.len() < half_open.capacity().min(config.backlog as usize)
            && of_source() < config.per_source as usize;
        if room { Ok(()) } else { Err(RejectReason::NO_RESOURCES) }
    }

    fn accept_request(
        &mut self,
        arrival: &Arrival,
        transaction_id: u64,
        req: &Req,
        admitted: Admitted,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let path = arrival.back.path(verbs.port, Qpn::GSI, Qpn::GSI);
        let path = path.map_err(|_| Counter::RxWrongAddress)?;
        let Admitted { listener, addresses, path_mtu, partition: (pkey_index, pkey) } = admitted;
        let now = verbs.shared.now;
        let qp_type = if req.transport() == Some(TransportType::Uc) { QpType::Uc } else { QpType::Rc };
        // The time after which the peer gives up.
        let patience = time_of(req.remote_cm_timeout()) * (u32::from(req.max_cm_retries()) + 1);
        let primary = &req.primary_path;
        let ack_timeout = match primary.ack_timeout() {
            asked if ACK_TIMEOUTS.contains(&asked) => asked,
            _ => *ACK_TIMEOUTS.end(),
        };
        let terms = Terms {
            qp_type,
            path_mtu,
            rq_psn: Psn::new(verbs.shared.rng.next_u32()),
            sq_psn: req.starting_psn(),
            max_dest_rd_atomic: req.initiator_depth(),
            max_rd_atomic: req.responder_resources(),
            timeout: ack_timeout,
            retry_count: req.retry_count(),
            rnr_retry: req.rnr_retry_count(),
        };
        let mut address = arrival.back;
        address.traffic_class = primary.traffic_class() & !Ecn::MASK;
        address.flow_label = primary.flow_label();
        address.service_level = primary.service_level().min(7);
        let deadline = now + patience.min(PATIENCE_MAX);
        let header = verbs.port.header(&path);
        let begun = self.begin(verbs.shared, self.channel_of_listener(listener), |ids| Communication {
            transaction_id,
            remote_comm_id: req.local_comm_id(),
            remote_qpn: req.qpn(),
            pkey_index,
            pkey,
            peer_pkey: req.pkey(),
            listener: Some(listener),
            terms,
            deadline,
            latest: now + PATIENCE_MAX,
            ..Communication::new(ids, (State::ReqReceived, PortSpace::Tcp), address, header)
        });
        // It is retransmitted, and finds room then.
        let (id, index) = begun.map_err(|_| Counter::CmRxNoRoom)?;
        self.join_listener(listener, index, arrival.source);
        self.by_peer.insert((arrival.source, req.local_comm_id(), PortSpace::Tcp), index);
        self.by_qpn.insert((arrival.source, req.qpn()), index);
        self.timers.ensure(index, deadline);
        let local_port = (req.service_id() - SERVICE_ID_TCP) as u16;
        self.tell(CmEvent::ConnectionRequest(ConnectionRequest {
            listener,
            id,
            peer: SocketAddr::new(addresses.source, addresses.source_port),
            local: SocketAddr::new(addresses.destination, local_port),
            qp_type,
            private_data: PrivateData::new(&req.private_data[IpCm::LEN..]),
            responder_resources: req.responder_resources(),
            initiator_depth: req.initiator_depth(),
            path_mtu,
            pkey_index,
        }));
        Ok(())
    }

    /// The parameters of a request, the local index of its partition, and the P_Key of the peer.
    pub(crate) fn asked_for(&self, id: CmId) -> Result<(QpType, usize, PKey), Error> {
        let index = self.index_of(id)?;
        let waiting = self.communications.at(index).filter(|c| c.state.awaits_application());
        let communication = waiting.ok_or_else(|| {
            Error::invalid("id", format_args!("{:?}", id.0), "a request that has not been answered")
        })?;
        let is_service = communication.space == PortSpace::Udp;
        let qp_type = if is_service { QpType::Ud } else { communication.terms.qp_type };
        Ok((qp_type, communication.pkey_index, communication.peer_pkey))
    }

    /// Accepts with `qp`, which is in INIT.
    pub(crate) fn accept(
        &mut self,
        id: CmId,
        (qp, local_qpn): (Qp, Qpn),
        parameters: &ConnectionParameters<'_>,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Error> {
        let index = self.index_of(id)?;
        let guid = self.guid;
        if let Some(channel) = parameters.channel.filter(|channel| self.channel_of(id) != Some(*channel)) {
            self.events.check(channel)?;
            self.events.check_room(Some(channel))?;
        }
        self.take_qp(index, qp);
        let Some(communication) = self.communications.at_mut(index) else { return Ok(()) };
        communication.local_qpn = local_qpn;
        let before = (communication.terms, communication.address.traffic_class);
        communication.address.traffic_class = parameters.traffic_class.unwrap_or(before.1);
        let terms = &mut communication.terms;
        terms.max_dest_rd_atomic = agreed(parameters.responder_resources, terms.max_dest_rd_atomic);
        terms.max_rd_atomic = agreed(parameters.initiator_depth, terms.max_rd_atomic);
        if let Err(error) = communication.make_ready_to_receive(verbs) {
            (communication.terms, communication.address.traffic_class) = before;
            self.release_qp(index);
            return Err(error);
        }
        let Communication { local_comm_id, remote_comm_id, terms, .. } = *communication;
        communication.state = State::RepSent;
        communication.cm_timeout = parameters.cm_timeout;
        let told_before = communication.channel;
        communication.channel = parameters.channel.or(told_before);
        self.events.migrate(id, told_before, communication.channel);
        communication.cm_retries = parameters.cm_retries;
        communication.retries_left = parameters.cm_retries;
        let mut rep = Rep::new(local_comm_id, remote_comm_id, local_qpn, terms.rq_psn);
        rep.set_ca_guid(guid);
        rep.set_responder_resources(terms.max_dest_rd_atomic);
        rep.set_initiator_depth(terms.max_rd_atomic);
        rep.set_rnr_retry_count(parameters.rnr_retry);
        rep.private_data[..parameters.private_data.len()].copy_from_slice(parameters.private_data);
        self.send_kept(index, CmBody::Rep(&rep), verbs.shared);
        self.wait_from_now_on(index);
        Ok(())
    }

    /// Rejects a request.
    pub(crate) fn refuse(&mut self, id: CmId, private_data: &[u8], verbs: &mut Verbs<'_>) {
        let Ok(index) = self.index_of(id) else { return };
        match self.communications.at(index).map(|c| c.state) {
            Some(State::ReqReceived) => {
                verbs.shared.count(Counter::CmTxRejects);
                self.reject(index, RejectReason::CONSUMER, private_data, verbs);
                self.remove(index);
            }
            Some(State::SidrReceived) => self.refuse_service(index, private_data, verbs),
            _ => {}
        }
    }

    pub(super) fn on_rtu(
        &mut self,
        arrival: &Arrival,
        rtu: &Rtu,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let index = self.find_pair(arrival, rtu.remote_comm_id(), rtu.local_comm_id())?;
        match self.communications.at(index).map(|c| c.state) {
            Some(State::RepSent) => self.establish(index, verbs),
            Some(_) => verbs.shared.count(Counter::CmRxDuplicates),
            None => {}
        }
        Ok(())
    }

    /// Packets of connections arrived whose RTU has not arrived yet: they have the same meaning.
    pub(crate) fn on_first_packets(&mut self, verbs: &mut Verbs<'_>) {
        while let Some(index) = self.half_open_that_has_begun(verbs.qps) {
            self.establish(index, verbs);
        }
    }

    fn half_open_that_has_begun(&self, qps: &Slab<QueuePair>) -> Option<u32> {
        let mut half_open = self.listeners.iter().flat_map(|listening| &listening.half_open).map(|(n, _)| *n);
        half_open.find(|index| self.communications.at(*index).is_some_and(|c| has_begun(c, qps)))
    }

    fn establish(&mut self, index: u32, verbs: &mut Verbs<'_>) {
        let Some(communication) = self.communications.at_mut(index) else { return };
        // Only the application can have moved the queue pair to another state, and it knows.
        let _ = communication.make_ready_to_send(verbs);
        communication.state = State::Established;
        communication.deadline = Nanos::NEVER;
        let id = communication.id;
        self.leave_listener(index);
        self.timers.cancel(index);
        self.tell(CmEvent::Established { id, private_data: PrivateData::new(&[]) });
    }
}

/// A value that both ends support.
fn agreed(ours: u8, theirs: u8) -> u8 {
    ours.min(theirs).min(MAX_RD_ATOMIC)
}

/// Whether the peer uses a connection that it has not confirmed.
fn has_begun(communication: &Communication, qps: &Slab<QueuePair>) -> bool {
    let qp = communication.qp.and_then(|qp| qps.get(qp.0));
    communication.state == State::RepSent && qp.is_some_and(|qp| qp.responder.established)
}

/// The port in a service ID of a port space.
pub(super) fn port_of(service_id: u64, space: u64) -> Option<u16> {
    service_id.checked_sub(space).and_then(|port| u16::try_from(port).ok())
}
