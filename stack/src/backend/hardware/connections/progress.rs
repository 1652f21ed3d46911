//! Events of the kernel's connection manager, and their effects.

use std::net::{IpAddr, SocketAddr};

use ferroce_driver::Nanos;
use ferroce_driver::rnic::{ConnectionEvent, ConnectionRequest as Request, ConnectionTerms, QueuePairChange};
use ferroce_wire::cm::RejectReason;
use ferroce_wire::{PathMtu, Psn, Qpn, RnrTimer};
use rustix::io::Errno;

use super::exchange::{Exchange, Proposal, Stage};
use super::{Connections, Hardware, LISTENER, RESOLVE_MS, tag};
use crate::cm::{CmEvent, CmId, ConnectionRequest, Listener, PortSpace, PrivateData};
use crate::verbs::{AddressVector, Error, Handle, Qp, QpState, QpType, ReadyToSend, Unreachable};

/// The most events of one poll.
const EVENTS_AT_ONCE: usize = 64;

/// `enum rdma_cm_event_type`
mod kind {
    pub(super) const ADDR_RESOLVED: u32 = 0;
    pub(super) const ADDR_ERROR: u32 = 1;
    pub(super) const ROUTE_RESOLVED: u32 = 2;
    pub(super) const ROUTE_ERROR: u32 = 3;
    pub(super) const CONNECT_REQUEST: u32 = 4;
    pub(super) const CONNECT_RESPONSE: u32 = 5;
    pub(super) const CONNECT_ERROR: u32 = 6;
    pub(super) const UNREACHABLE: u32 = 7;
    pub(super) const REJECTED: u32 = 8;
    pub(super) const ESTABLISHED: u32 = 9;
    pub(super) const DISCONNECTED: u32 = 10;
    pub(super) const DEVICE_REMOVAL: u32 = 11;
    pub(super) const TIMEWAIT_EXIT: u32 = 15;
}

impl Hardware {
    /// Processes the events of the connection manager, and gives up attempts without an answer.
    #[cold]
    pub(in super::super) fn look_for_connections(&mut self) -> Result<(), Error> {
        let taken = self.take_connection_events();
        let now = self.now;
        if let Some(cm) = &mut self.connections {
            cm.give_up(now);
        }
        taken
    }

    fn take_connection_events(&mut self) -> Result<(), Error> {
        for _ in 0..EVENTS_AT_ONCE {
            let Some(cm) = &self.connections else { return Ok(()) };
            let Some(event) = cm.channel.event()? else { break };
            tracing::debug!(device = self.device.name(), "event of rdma_cm: {event:?}");
            self.take_connection_event(event);
        }
        Ok(())
    }

    fn take_connection_event(&mut self, mut event: ConnectionEvent) {
        if event.kind == kind::CONNECT_REQUEST {
            return self.take_request(&mut event);
        }
        let Some(cm) = &mut self.connections else { return };
        let Some(id) = cm.id_of(event.tag) else { return };
        let Some(exchange) = cm.exchanges.get(id.0) else { return };
        let (stage, qp, peer) = (exchange.stage, exchange.qp, exchange.peer.ip());
        let is_connected = matches!(stage, Stage::Established | Stage::Ending);
        match event.kind {
            // For a connection that has ended, only the end of timewait is relevant.
            kind::TIMEWAIT_EXIT | kind::DEVICE_REMOVAL if stage == Stage::Timewait => {
                cm.tell(id, CmEvent::TimewaitExit { id });
                cm.exchanges.remove(id.0);
            }
            _ if stage == Stage::Timewait => {}
            kind::ADDR_RESOLVED if stage == Stage::FindingAddress => self.go_on_or_end(id, stage),
            kind::ROUTE_RESOLVED if stage == Stage::FindingRoute => self.go_on_or_end(id, stage),
            kind::CONNECT_RESPONSE => {
                if let Err(error) = self.complete_connection(id, &event) {
                    tracing::warn!(device = self.device.name(), "connecting to {peer}: {error}");
                    self.fail_qp(qp);
                    let errno = errno_of(&error);
                    self.end_unreachable(id, Unreachable::NotResolved { peer, errno });
                }
            }
            kind::ESTABLISHED => match event.peer {
                Some(found) if stage == Stage::Asked => self.tell_service(id, found, &event.private_data),
                Some(_) => {}
                None => self.establish(id, qp),
            },
            // The peer gave up before it received that the connection is ready: the kernel enters timewait.
            kind::REJECTED if is_connected => self.end_connection(id, qp),
            kind::REJECTED => self.end_refused(id, stage, qp, &event),
            kind::ADDR_ERROR | kind::ROUTE_ERROR | kind::CONNECT_ERROR | kind::UNREACHABLE
                if is_connected =>
            {
                self.end_connection(id, qp);
                self.connections.as_mut().and_then(|cm| cm.exchanges.remove(id.0));
            }
            // The status of a SIDR reply.
            kind::UNREACHABLE if event.status > 0 => self.end_refused(id, stage, qp, &event),
            kind::ADDR_ERROR | kind::ROUTE_ERROR | kind::CONNECT_ERROR | kind::UNREACHABLE => {
                self.end_attempt(id, stage, qp, unreachable(peer, &event));
            }
            kind::DISCONNECTED => {
                // If the peer ends it, it waits for an answer.
                if stage != Stage::Ending
                    && let Some(Err(error)) = exchange.card.as_ref().map(|card| card.disconnect())
                {
                    tracing::debug!(device = self.device.name(), "the end of a connection: {error}");
                }
                self.end_connection(id, qp);
            }
            kind::TIMEWAIT_EXIT if is_connected || stage == Stage::Accepted => {
                self.end_connection(id, qp);
                if let Some(cm) = &mut self.connections {
                    cm.tell(id, CmEvent::TimewaitExit { id });
                    cm.exchanges.remove(id.0);
                }
            }
            kind::DEVICE_REMOVAL if is_connected || stage == Stage::Accepted => {
                self.end_connection(id, qp);
                self.connections.as_mut().and_then(|cm| cm.exchanges.remove(id.0));
            }
            kind::DEVICE_REMOVAL => {
                self.end_attempt(id, stage, qp, Unreachable::NotResolved { peer, errno: None });
            }
            _ => {}
        }
        self.has_news = true;
    }

    /// The connection has ended, and waits for the end of timewait.
    fn end_connection(&mut self, id: CmId, qp: Option<Qp>) {
        if let Some(cm) = &mut self.connections {
            if let Some(exchange) = cm.exchanges.get_mut(id.0) {
                exchange.stage = Stage::Timewait;
                exchange.qp = None;
            }
            cm.tell(id, CmEvent::Disconnected { id });
        }
        self.fail_qp(qp);
    }

    /// An attempt of either end has failed. If the application has not seen the request, nothing is reported.
    fn end_attempt(&mut self, id: CmId, stage: Stage, qp: Option<Qp>, reason: Unreachable) {
        if stage == Stage::Accepted {
            self.fail_qp(qp);
        }
        let Some(cm) = &mut self.connections else { return };
        if stage == Stage::Requested && cm.forget_request(id) {
            cm.exchanges.remove(id.0);
        } else {
            self.end_unreachable(id, reason);
        }
    }

    fn go_on_or_end(&mut self, id: CmId, stage: Stage) {
        if let Err(error) = self.go_on(id, stage) {
            let exchange = self.connections.as_ref().and_then(|cm| cm.exchanges.get(id.0));
            let Some(peer) = exchange.map(|exchange| exchange.peer.ip()) else { return };
            tracing::warn!(device = self.device.name(), "connecting to {peer}: {error}");
            let errno = errno_of(&error);
            self.end_unreachable(id, Unreachable::NotResolved { peer, errno });
        }
    }

    /// The next step of an attempt or a search.
    fn go_on(&mut self, id: CmId, stage: Stage) -> Result<(), Error> {
        let (own, port) = (self.device.name().to_owned(), self.port_number);
        let qp = self.connections.as_ref().and_then(|cm| cm.exchanges.get(id.0)).and_then(|e| e.qp);
        let (qpn, has_srq) = match qp {
            Some(qp) => self.qp(qp).map(|qp| (qp.card.qpn(), qp.srq.is_some()))?,
            None => (0, false),
        };
        let Some(cm) = &mut self.connections else { return Ok(()) };
        let Some(exchange) = cm.exchanges.get_mut(id.0) else { return Ok(()) };
        let Some(card) = &exchange.card else { return Ok(()) };
        match stage {
            Stage::FindingAddress => {
                if let Some(found) = card.device()
                    && found != (own.clone(), port)
                {
                    let value = format!("{}, which is reached by {}:{}", exchange.peer, found.0, found.1);
                    return Err(Error::invalid(
                        "address",
                        value,
                        format!("a peer that {own}:{port} reaches"),
                    ));
                }
                exchange.stage = Stage::FindingRoute;
                Ok(card.resolve_route(RESOLVE_MS)?)
            }
            Stage::FindingRoute => {
                exchange.stage = Stage::Asked;
                let Proposal { responder_resources, initiator_depth, retry_count, rnr_retry, private_data } =
                    exchange.terms;
                let terms = ConnectionTerms { responder_resources, initiator_depth, retry_count, rnr_retry };
                Ok(card.connect(&Request { qpn, has_srq, terms, private_data: &private_data })?)
            }
            _ => Ok(()),
        }
    }

    /// The peer has accepted.
    fn complete_connection(&mut self, id: CmId, event: &ConnectionEvent) -> Result<(), Error> {
        let Some(exchange) = self.connections.as_ref().and_then(|cm| cm.exchanges.get(id.0)) else {
            return Ok(());
        };
        let (Some(card), Some(qp)) = (&exchange.card, exchange.qp) else { return Ok(()) };
        if exchange.stage != Stage::Asked {
            return Ok(());
        }
        let responder_resources = exchange.terms.responder_resources.min(event.terms.responder_resources);
        let initiator_depth = exchange.terms.initiator_depth.min(event.terms.initiator_depth);
        let receive = card.change_to(QpState::Rtr as u32)?;
        self.make_ready_to_receive(qp, receive, responder_resources)?;
        self.make_ready_to_send(id, qp, initiator_depth)?;
        let Some(cm) = &mut self.connections else { return Ok(()) };
        let Some(exchange) = cm.exchanges.get_mut(id.0) else { return Ok(()) };
        if let Some(card) = &exchange.card {
            card.establish()?;
        }
        exchange.stage = Stage::Established;
        exchange.deadline = None;
        cm.tell(id, CmEvent::Established { id, private_data: PrivateData::new(&event.private_data) });
        Ok(())
    }

    /// The peer has confirmed a connection that was accepted here.
    fn establish(&mut self, id: CmId, qp: Option<Qp>) {
        let Some(exchange) = self.connections.as_ref().and_then(|cm| cm.exchanges.get(id.0)) else { return };
        let (Stage::Accepted, Some(qp)) = (exchange.stage, qp) else { return };
        let (peer, depth) = (exchange.peer.ip(), exchange.terms.initiator_depth);
        if let Err(error) = self.make_ready_to_send(id, qp, depth) {
            tracing::warn!(device = self.device.name(), "a connection from {peer}: {error}");
            self.fail_qp(Some(qp));
            let errno = errno_of(&error);
            return self.end_unreachable(id, Unreachable::NotResolved { peer, errno });
        }
        if let Some(cm) = &mut self.connections {
            if let Some(exchange) = cm.exchanges.get_mut(id.0) {
                exchange.stage = Stage::Established;
            }
            cm.tell(id, CmEvent::Established { id, private_data: PrivateData::new(&[]) });
        }
    }

    /// INIT → RTR, with the attributes of the connection manager.
    pub(super) fn make_ready_to_receive(
        &mut self,
        qp: Qp,
        change: QueuePairChange,
        max_dest_rd_atomic: u8,
    ) -> Result<(), Error> {
        let most = self.attributes.max_qp_rd_atom;
        let max_dest_rd_atomic = max_dest_rd_atomic.min(most);
        // The kernel's own choice, 0, is the longest of all.
        let min_rnr_timer = RnrTimer::DEFAULT;
        let change = QueuePairChange {
            max_dest_rd_atomic: Some(max_dest_rd_atomic),
            min_rnr_timer: Some(min_rnr_timer.code()),
            ..change
        };
        self.change(qp, QpState::Rtr, change)?;
        let address = change.address.map(|address| self.address_vector(&address));
        let told = &mut self.qp(qp)?.told;
        told.address = address;
        told.path_mtu = change.path_mtu.and_then(path_mtu_of);
        told.dest_qpn = change.dest_qpn.map(Qpn::new);
        told.max_dest_rd_atomic = max_dest_rd_atomic;
        told.min_rnr_timer = Some(min_rnr_timer);
        self.qp(qp)?.received.src_qpn = Qpn::new(change.dest_qpn.unwrap_or(0));
        Ok(())
    }

    /// RTR → RTS.
    fn make_ready_to_send(&mut self, id: CmId, qp: Qp, max_rd_atomic: u8) -> Result<(), Error> {
        let exchange = self.connections.as_ref().and_then(|cm| cm.exchanges.get(id.0));
        let Some(card) = exchange.and_then(|exchange| exchange.card.as_ref()) else { return Ok(()) };
        let change = card.change_to(QpState::Rts as u32)?;
        let max_rd_atomic = max_rd_atomic.min(self.attributes.max_qp_rd_atom);
        let change = QueuePairChange { max_rd_atomic: Some(max_rd_atomic), ..change };
        self.change(qp, QpState::Rts, change)?;
        self.qp(qp)?.told.send = Some(ReadyToSend {
            sq_psn: Psn::new(change.sq_psn.unwrap_or(0)),
            timeout: change.timeout.unwrap_or(0),
            retry_count: change.retry_count.unwrap_or(0),
            rnr_retry: change.rnr_retry.unwrap_or(0),
            max_rd_atomic,
        });
        Ok(())
    }

    fn address_vector(&self, address: &ferroce_driver::rnic::Address) -> AddressVector {
        let ferroce_driver::rnic::Address {
            gid,
            sgid_index,
            flow_label,
            hop_limit,
            traffic_class,
            service_level,
            ..
        } = *address;
        let own = self.gid_rows.rows.iter().position(|row| row.index == sgid_index).unwrap_or(0);
        let way = AddressVector::new(ferroce_wire::Gid(gid), own);
        AddressVector { flow_label, hop_limit, traffic_class, service_level, ..way }
    }

    fn tell_service(&mut self, id: CmId, found: ferroce_driver::rnic::Peer, private_data: &[u8]) {
        let address = self.address_vector(&found.address);
        let Some(cm) = &mut self.connections else { return };
        let (qpn, qkey) = (Qpn::new(found.qpn & 0xff_ffff), found.qkey);
        let private_data = PrivateData::new(private_data);
        cm.tell(id, CmEvent::Resolved { id, address, qpn, qkey, private_data });
        cm.exchanges.remove(id.0);
    }

    fn end_unreachable(&mut self, id: CmId, reason: Unreachable) {
        if let Some(cm) = &mut self.connections {
            cm.tell(id, CmEvent::Unreachable { id, reason });
            cm.exchanges.remove(id.0);
        }
    }

    fn end_refused(&mut self, id: CmId, stage: Stage, qp: Option<Qp>, event: &ConnectionEvent) {
        let Some(cm) = &mut self.connections else { return };
        if stage == Stage::Requested && cm.forget_request(id) {
            cm.exchanges.remove(id.0);
            return;
        }
        let reason = RejectReason(u16::try_from(event.status).unwrap_or(u16::MAX));
        cm.tell(id, CmEvent::Rejected { id, reason, private_data: PrivateData::new(&event.private_data) });
        cm.exchanges.remove(id.0);
        if stage == Stage::Accepted {
            self.fail_qp(qp);
        }
    }

    fn take_request(&mut self, event: &mut ConnectionEvent) {
        let Some(card) = event.request.take() else { return };
        let (own, port) = (self.device.name().to_owned(), self.port_number);
        let largest = self.port.path_mtu(false).unwrap_or(PathMtu::Mtu256);
        let Some(cm) = &mut self.connections else { return };
        let Some(listener) = cm.listener_of(event.tag) else { return };
        let Some(listening) = cm.listeners.get(listener.0) else { return };
        let (config, space, port_asked) = (listening.config, listening.space, listening.address);
        let (peer, local) = (card.peer(), card.local());
        let Some((peer, local)) = peer.zip(local) else { return };
        let is_here = card.device().is_none_or(|found| found == (own, port));
        let is_open = |e: &&Exchange| {
            e.listener == Some(listener) && matches!(e.stage, Stage::Requested | Stage::Accepted)
        };
        let open = cm.exchanges.iter().filter(is_open).count();
        let from_peer = cm.exchanges.iter().filter(is_open).filter(|e| e.peer.ip() == peer.ip()).count();
        let has_room = open < config.backlog as usize
            && from_peer < config.per_source as usize
            && !cm.exchanges.is_full()
            && cm.events.check_room(config.channel).is_ok();
        if !is_here || !has_room {
            if let Err(error) = card.reject(&[]) {
                tracing::debug!("rejecting a request: {error}");
            }
            return;
        }
        let qp_type = if space == PortSpace::Udp { QpType::Ud } else { QpType::Rc };
        let path = card.change_to(QpState::Rtr as u32).unwrap_or_default();
        let ConnectionTerms { responder_resources, initiator_depth, retry_count, rnr_retry } = event.terms;
        let private_data = PrivateData::new(&event.private_data);
        let exchange = Exchange {
            card: None,
            stage: Stage::Requested,
            qp: None,
            qp_type,
            peer,
            listener: Some(listener),
            channel: config.channel,
            terms: Proposal { responder_resources, initiator_depth, retry_count, rnr_retry, private_data },
            patience: None,
            deadline: None,
        };
        let Some(handle) = cm.exchanges.insert_with(|_| exchange) else { return };
        let id = CmId(handle);
        if let Some(exchange) = cm.exchanges.get_mut(handle) {
            let mut card = card;
            card.set_tag(tag(handle));
            exchange.card = Some(card);
        }
        let local = SocketAddr::new(local.ip(), port_asked.port());
        cm.tell(
            id,
            CmEvent::ConnectionRequest(ConnectionRequest {
                listener,
                id,
                peer,
                local,
                qp_type,
                private_data,
                responder_resources: initiator_depth,
                initiator_depth: responder_resources,
                path_mtu: path.path_mtu.and_then(path_mtu_of).unwrap_or(largest),
                pkey_index: 0,
            }),
        );
        self.has_news = true;
    }

    /// When the next attempt is given up.
    pub(in super::super) fn next_connection_deadline(&self) -> Option<Nanos> {
        self.connections.as_ref().and_then(|cm| if cm.has_new { Some(self.now) } else { cm.next_deadline })
    }

    /// A queue pair has received packets of a peer: its connection is established.
    pub(in super::super) fn notify_connection(&mut self, element: u64) {
        let is_its = |exchange: &&Exchange| {
            let qp = exchange.qp.and_then(|qp| self.qps.get(qp.0));
            exchange.stage == Stage::Accepted && qp.is_some_and(|qp| qp.card.id() == element)
        };
        let exchange = self.connections.as_ref().and_then(|cm| cm.exchanges.iter().find(is_its));
        if let Some(card) = exchange.and_then(|exchange| exchange.card.as_ref())
            && let Err(error) = card.notify_established()
        {
            tracing::debug!(device = self.device.name(), "the first packets of a connection: {error}");
        }
    }
}

/// Why a peer is unreachable.
fn unreachable(peer: IpAddr, event: &ConnectionEvent) -> Unreachable {
    let no_route = [Errno::NETUNREACH, Errno::HOSTUNREACH].map(|errno| -errno.raw_os_error());
    match event.kind {
        kind::UNREACHABLE => Unreachable::Silent { peer },
        _ if no_route.contains(&event.status) => Unreachable::NoRoute { peer },
        _ => Unreachable::NotResolved { peer, errno: event.status.checked_neg().filter(|errno| *errno > 0) },
    }
}

fn errno_of(error: &Error) -> Option<i32> {
    match error {
        Error::Driver(ferroce_driver::Error::Verbs { source, .. }) => source.raw_os_error(),
        _ => None,
    }
}

fn path_mtu_of(code: u32) -> Option<PathMtu> {
    u8::try_from(code).ok().and_then(PathMtu::from_code)
}

impl Connections {
    fn id_of(&self, tag: u64) -> Option<CmId> {
        let handle = self.exchanges.handle_at(tag as u32)?;
        (tag == super::tag(handle)).then_some(CmId(handle))
    }

    fn listener_of(&self, tag: u64) -> Option<Listener> {
        let handle: Handle = self.listeners.handle_at(tag as u32)?;
        (tag == LISTENER | super::tag(handle)).then_some(Listener(handle))
    }

    pub(super) fn tell(&mut self, id: CmId, event: CmEvent) {
        let channel = self.exchanges.get(id.0).and_then(|exchange| exchange.channel);
        self.events.push(channel, event);
    }

    /// Ends the attempts whose time has expired.
    fn give_up(&mut self, now: Nanos) {
        if !self.has_new && self.next_deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.has_new = false;
        let mut over = Vec::new();
        self.next_deadline = None;
        for (handle, exchange) in self.exchanges.iter_mut_with_handles() {
            let Some(patience) = exchange.patience.filter(|_| exchange.is_attempt()) else { continue };
            let deadline = *exchange.deadline.get_or_insert(now + patience);
            if deadline <= now {
                over.push((CmId(handle), exchange.peer.ip()));
            } else {
                self.next_deadline = Some(self.next_deadline.map_or(deadline, |next| next.min(deadline)));
            }
        }
        for (id, peer) in over {
            self.tell(id, CmEvent::Unreachable { id, reason: Unreachable::Silent { peer } });
            self.exchanges.remove(id.0);
        }
    }
}
