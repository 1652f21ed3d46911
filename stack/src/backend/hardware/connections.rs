//! Connections with the kernel's connection manager, because QP1 of a card belongs to the kernel: librdmacm, loaded by the
//! first verb that needs it.

mod exchange;
mod progress;

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use ferroce_driver::Nanos;
use ferroce_driver::rnic::{CmFunctions, ConnectionId, ConnectionRequest, ConnectionTerms, EventChannel};
use ferroce_wire::cm::RDMA_UDP_QKEY;
use ferroce_wire::{Gid, PathMtu};

use super::Hardware;
use crate::cm::{
    CmChannel, CmEvent, CmEvents, CmId, ConnectionParameters, ListenConfig, Listener, PortSpace, REJ_PRIVATE,
    REP_PRIVATE, REQ_PRIVATE, SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, being_set_up, check_private_data, gone,
};
use crate::engine::slab::Slab;
use crate::verbs::{Config, Error, Feature, Handle, Qp, QpState, QpType, Transition};
use exchange::{Exchange, Proposal, Stage};

/// All connections of a context, created with the first.
pub(super) struct Connections {
    pub(super) channel: EventChannel,
    exchanges: Slab<Exchange>,
    listeners: Slab<CardListener>,
    pub(super) events: CmEvents,
    /// When the first attempt is given up.
    next_deadline: Option<Nanos>,
    /// The time limit of an attempt starts with the next poll: until then the time is not known.
    has_new: bool,
}

/// The limits of each kind of object.
#[derive(Clone, Copy)]
pub(super) struct ConnectionLimits {
    connections: u32,
    listeners: u32,
    channels: u32,
    generation: u32,
}

impl ConnectionLimits {
    pub(super) fn new(config: &Config, generation: u32) -> ConnectionLimits {
        let Config { max_connections, max_listeners, max_cm_channels, .. } = *config;
        let (connections, listeners, channels) = (max_connections, max_listeners, max_cm_channels);
        ConnectionLimits { connections, listeners, channels, generation }
    }
}

/// A listener.
struct CardListener {
    space: PortSpace,
    address: SocketAddr,
    config: ListenConfig,
    /// One for each address of the port, which listens as long as it exists.
    cards: Vec<ConnectionId>,
}

/// The highest bit of a tag marks a listener.
const LISTENER: u64 = 1 << 63;
/// The longest time in which the kernel resolves a next hop or a route.
const RESOLVE_MS: u32 = 4000;
/// The kernel's interval between retransmissions of requests, times their number.
const KERNEL_PATIENCE: Duration = Duration::from_micros(4_294_967 * 16);

fn tag(handle: Handle) -> u64 {
    u64::from(handle.generation & (u32::MAX >> 1)) << 32 | u64::from(handle.index)
}

impl Hardware {
    pub(crate) fn listen(
        &mut self,
        space: PortSpace,
        address: SocketAddr,
        config: &ListenConfig,
    ) -> Result<Listener, Error> {
        if address.port() == 0 {
            return Err(Error::invalid(
                "port",
                0,
                "1 to 65535 with an RNIC: the kernel would choose another",
            ));
        }
        if let Some(index) = config.pkey_index {
            self.only_partition(index)?;
        }
        let asked = address.ip().to_canonical();
        let addresses = self.addresses(|ip| asked.is_unspecified() || ip == asked);
        if addresses.is_empty() {
            let expected = format!("an address of '{}', or 0.0.0.0 for all", self.capabilities.interface);
            return Err(Error::invalid("address", address, expected));
        }
        let cm = self.cm()?;
        let address = SocketAddr::new(
            if asked.is_unspecified() { std::net::Ipv4Addr::UNSPECIFIED.into() } else { asked },
            address.port(),
        );
        if cm.listeners.iter().any(|other| other.space == space && other.address == address) {
            return Err(Error::invalid("address", address, "one without a listener of this context"));
        }
        config.channel.map_or(Ok(()), |channel| cm.events.check(channel))?;
        let full =
            Error::Exhausted { kind: "listener", limit: cm.listeners.capacity(), setting: "max_listeners" };
        let cards = Vec::new();
        let listener = CardListener { space, address, config: *config, cards };
        let handle = cm.listeners.insert_with(|_| listener).ok_or(full)?;
        let listen = |(ip, scope): &(IpAddr, u32)| {
            let id = ConnectionId::new(&cm.channel, LISTENER | tag(handle), space == PortSpace::Udp)?;
            id.listen(SocketAddr::new(*ip, address.port()), *scope, config.backlog.max(1))?;
            Ok(id)
        };
        match addresses.iter().map(listen).collect::<Result<Vec<_>, Error>>() {
            Ok(cards) => {
                if let Some(listener) = cm.listeners.get_mut(handle) {
                    listener.cards = cards;
                }
            }
            Err(error) => {
                cm.listeners.remove(handle);
                return Err(error);
            }
        }
        Ok(Listener(handle))
    }

    /// The port's current addresses selected by `is_wanted`, each with its interface if it is link-local: the interfaces of
    /// VLANs share one link-local address, and others may be set on several.
    fn addresses(&self, is_wanted: impl Fn(IpAddr) -> bool) -> Vec<(IpAddr, u32)> {
        let mut addresses = Vec::new();
        for (entry, row) in self.port.gids.iter().zip(&self.gid_rows.rows) {
            let ip = entry.gid.to_ip().to_canonical();
            let address = (ip, if entry.gid.is_link_local() { row.interface } else { 0 });
            if row.is_there && !entry.roce_v1 && is_wanted(ip) && !addresses.contains(&address) {
                addresses.push(address);
            }
        }
        addresses
    }

    pub(crate) fn unlisten(&mut self, listener: Listener) -> Result<(), Error> {
        let unknown = || Error::invalid_handle("listener", listener.0);
        let cm = self.connections.as_mut().ok_or_else(unknown)?;
        cm.listeners.remove(listener.0).ok_or_else(unknown)?;
        let waits =
            |exchange: &Exchange| exchange.listener == Some(listener) && exchange.stage == Stage::Requested;
        let ids: Vec<CmId> = cm.ids(waits);
        for id in ids {
            cm.forget_request(id);
            cm.refuse(id, &[]);
        }
        Ok(())
    }

    pub(crate) fn connect(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        parameters.check(REQ_PRIVATE)?;
        self.connectable(qp)?;
        self.begin(to, parameters, Some(qp))
    }

    pub(crate) fn resolve(
        &mut self,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        parameters.check(SIDR_REQ_PRIVATE)?;
        self.begin(to, parameters, None)
    }

    /// Starts an attempt, or a search.
    fn begin(
        &mut self,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
        qp: Option<Qp>,
    ) -> Result<CmId, Error> {
        let index = self.port.source_for(to.ip())?;
        let source = self.port.gids[index].gid.to_ip().to_canonical();
        let scope = self.gid_rows.rows.get(index).map_or(0, |row| row.interface);
        if let Some(index) = parameters.pkey_index {
            self.only_partition(index)?;
        }
        if let Some(path_mtu) = parameters.path_mtu {
            self.only_path_mtu(path_mtu, to.ip())?;
        }
        let cm = self.cm()?;
        parameters.channel.map_or(Ok(()), |channel| cm.events.check(channel))?;
        cm.events.check_room(parameters.channel)?;
        let limit = cm.exchanges.capacity();
        let full = Error::Exhausted { kind: "connection", limit, setting: "max_connections" };
        let Some(handle) = cm.exchanges.insert_with(|_| Exchange::asking(qp, to, parameters)) else {
            return Err(full);
        };
        let begun = ConnectionId::new(&cm.channel, tag(handle), qp.is_none()).and_then(|card| {
            if let Some(traffic_class) = parameters.traffic_class {
                card.set_traffic_class(traffic_class)?;
            }
            if qp.is_some() {
                card.set_ack_timeout(parameters.timeout)?;
            }
            card.resolve_address(source, to, scope, RESOLVE_MS)?;
            Ok(card)
        });
        match begun {
            Ok(card) => {
                if let Some(exchange) = cm.exchanges.get_mut(handle) {
                    exchange.card = Some(card);
                }
                cm.has_new = true;
                Ok(CmId(handle))
            }
            Err(error) => {
                cm.exchanges.remove(handle);
                Err(error.into())
            }
        }
    }

    pub(crate) fn accept(
        &mut self,
        id: CmId,
        qp: Qp,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<(), Error> {
        parameters.check(REP_PRIVATE)?;
        let (qp_type, asked) = self.asked_for(id)?;
        if qp_type == QpType::Ud {
            return Err(Error::invalid(
                "id",
                format!("{id:?}"),
                "a connection; accept_datagrams answers a search",
            ));
        }
        if let Some(index) = parameters.pkey_index {
            self.only_partition(index)?;
        }
        self.connectable(qp)?;
        let cm = self.cm()?;
        parameters.channel.map_or(Ok(()), |channel| cm.events.check(channel))?;
        let terms = ConnectionTerms {
            responder_resources: parameters.responder_resources.min(asked.responder_resources),
            initiator_depth: parameters.initiator_depth.min(asked.initiator_depth),
            rnr_retry: parameters.rnr_retry,
            retry_count: asked.retry_count,
        };
        let Some(exchange) = cm.exchanges.get_mut(id.0) else { return Err(gone(id)) };
        let Some(card) = &exchange.card else { return Err(gone(id)) };
        if let Some(traffic_class) = parameters.traffic_class {
            card.set_traffic_class(traffic_class)?;
        }
        let change = card.change_to(QpState::Rtr as u32)?;
        self.make_ready_to_receive(qp, change, terms.responder_resources)?;
        let (qpn, has_srq) = self.qp(qp).map(|qp| (qp.card.qpn(), qp.srq.is_some()))?;
        let request = ConnectionRequest { qpn, has_srq, terms, private_data: parameters.private_data };
        let cm = self.cm()?;
        let Some(exchange) = cm.exchanges.get_mut(id.0) else { return Err(gone(id)) };
        let Some(card) = &exchange.card else { return Err(gone(id)) };
        if let Err(error) = card.accept(&request) {
            // As before, except for its receives.
            let access = self.qp(qp)?.told.access;
            self.modify_qp(qp, Transition::Reset)?;
            self.modify_qp(qp, Transition::Init { access })?;
            return Err(error.into());
        }
        exchange.qp = Some(qp);
        exchange.stage = Stage::Accepted;
        exchange.terms.initiator_depth = terms.initiator_depth;
        let old = exchange.channel;
        if let Some(channel) = parameters.channel {
            exchange.channel = Some(channel);
            cm.events.migrate(id, old, Some(channel));
        }
        Ok(())
    }

    pub(crate) fn accept_datagrams(&mut self, id: CmId, qp: Qp, private_data: &[u8]) -> Result<(), Error> {
        check_private_data(private_data, SIDR_REP_PRIVATE)?;
        let (asked, _) = self.asked_for(id)?;
        let queue_pair = self.qp(qp)?;
        let (qp_type, qpn, qkey) = (queue_pair.qp_type, queue_pair.card.qpn(), queue_pair.told.qkey);
        let has_srq = queue_pair.srq.is_some();
        if asked != QpType::Ud || qp_type != asked {
            return Err(Error::invalid("qp", format_args!("{qp_type:?}"), format!("a {asked:?} QP")));
        }
        if qkey != RDMA_UDP_QKEY {
            let expected =
                format!("{RDMA_UDP_QKEY:#x}, which the kernel's connection manager sends to every client");
            return Err(Error::invalid("qkey", format_args!("{qkey:#x}"), expected));
        }
        let cm = self.cm()?;
        let terms = ConnectionTerms::default();
        if let Some(card) = cm.exchanges.get(id.0).and_then(|exchange| exchange.card.as_ref()) {
            card.accept(&ConnectionRequest { qpn, has_srq, terms, private_data })?;
        }
        cm.exchanges.remove(id.0);
        Ok(())
    }

    pub(crate) fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        let (asked, _) = self.asked_for(id)?;
        check_private_data(private_data, if asked == QpType::Ud { SIDR_REP_PRIVATE } else { REJ_PRIVATE })?;
        self.cm()?.refuse(id, private_data);
        Ok(())
    }

    pub(crate) fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        let cm = self.connections.as_mut().ok_or_else(|| gone(id))?;
        let exchange = cm.exchanges.get_mut(id.0).ok_or_else(|| gone(id))?;
        match exchange.stage {
            Stage::Established => {
                let qp = exchange.qp.take();
                exchange.stage = Stage::Ending;
                let told = exchange.card.as_ref().map_or(Ok(()), ConnectionId::disconnect);
                if told.is_err() {
                    // There would be no event; the kernel ends the connection with the identifier.
                    cm.tell(id, CmEvent::Disconnected { id });
                    cm.exchanges.remove(id.0);
                }
                self.fail_qp(qp);
                told?;
            }
            Stage::Ending | Stage::Timewait => {}
            Stage::Requested => cm.refuse(id, &[]),
            Stage::FindingAddress | Stage::FindingRoute | Stage::Asked => {
                cm.exchanges.remove(id.0);
            }
            Stage::Accepted => {
                let qp = exchange.qp;
                // The kernel ends the identifier with a reject, although the peer may consider the connection established.
                cm.tell(id, CmEvent::Disconnected { id });
                cm.exchanges.remove(id.0);
                self.fail_qp(qp);
            }
        }
        Ok(())
    }

    pub(crate) fn next_cm_event(&mut self) -> Option<CmEvent> {
        self.connections.as_mut()?.events.pop(None)
    }

    pub(crate) fn create_cm_channel(&mut self) -> Result<CmChannel, Error> {
        self.cm()?.events.create()
    }

    pub(crate) fn destroy_cm_channel(&mut self, channel: CmChannel) -> Result<(), Error> {
        let cm = self.cm()?;
        let listeners = cm.listeners.iter().filter(|l| l.config.channel == Some(channel)).count();
        let connections = cm.exchanges.iter().filter(|e| e.channel == Some(channel)).count();
        cm.events.destroy_unused(channel, listeners, connections)
    }

    pub(crate) fn next_cm_event_of(&mut self, channel: CmChannel) -> Result<Option<CmEvent>, Error> {
        let cm = self.cm()?;
        cm.events.check(channel)?;
        Ok(cm.events.pop(Some(channel)))
    }

    pub(crate) fn take_cm_event(&mut self, id: CmId) -> Option<CmEvent> {
        self.connections.as_mut()?.events.take(id)
    }

    /// The connections; loads librdmacm if necessary.
    fn cm(&mut self) -> Result<&mut Connections, Error> {
        if self.is_gone {
            return Err(self.gone());
        }
        let connections = match self.connections.take() {
            Some(connections) => connections,
            None => Box::new(self.new_connections()?),
        };
        Ok(self.connections.insert(connections))
    }

    fn new_connections(&mut self) -> Result<Connections, Error> {
        let functions = match &self.cm_functions {
            Some(functions) => functions.clone(),
            None => CmFunctions::load()?,
        };
        let channel = EventChannel::new(&functions, &self.device)?;
        self.waiting.add(&channel)?;
        let ConnectionLimits { connections, listeners, channels, generation } = self.connection_limits;
        Ok(Connections {
            channel,
            exchanges: Slab::new(connections, generation),
            listeners: Slab::new(listeners, generation),
            events: CmEvents::new(connections, channels, generation),
            next_deadline: None,
            has_new: false,
        })
    }

    /// The parameters of a request that can be answered.
    fn asked_for(&mut self, id: CmId) -> Result<(QpType, ConnectionTerms), Error> {
        let cm = self.connections.as_ref().ok_or_else(|| gone(id))?;
        let exchange = cm.exchanges.get(id.0).ok_or_else(|| gone(id))?;
        if exchange.stage != Stage::Requested {
            return Err(Error::invalid("id", format!("{id:?}"), "a request that has not been answered"));
        }
        let Proposal { responder_resources, initiator_depth, retry_count, .. } = exchange.terms;
        let terms = ConnectionTerms { responder_resources, initiator_depth, retry_count, rnr_retry: 0 };
        Ok((exchange.qp_type, terms))
    }

    /// Checks that a queue pair can be connected.
    fn connectable(&mut self, qp: Qp) -> Result<(), Error> {
        let queue_pair = self.qp(qp)?;
        match queue_pair.qp_type {
            QpType::Rc => {}
            QpType::Uc => return Err(Error::Unsupported(Feature::UnreliableConnectionOfCard)),
            QpType::Ud => {
                let expected = "an RC QP; resolve and accept_datagrams are for UD";
                return Err(Error::invalid("qp", "UD", expected));
            }
        }
        queue_pair.require("connecting", "INIT", &[QpState::Init])?;
        if let Some(id) = self.connection_of(qp) {
            return Err(being_set_up(qp, id));
        }
        Ok(())
    }

    fn connection_of(&self, qp: Qp) -> Option<CmId> {
        let cm = self.connections.as_ref()?;
        cm.exchanges.iter_with_handles().find(|(_, exchange)| exchange.qp == Some(qp)).map(|(at, _)| CmId(at))
    }

    /// A queue pair is about to be destroyed, and its connection with it.
    pub(super) fn release_connection(&mut self, qp: Qp) {
        if let Some(id) = self.connection_of(qp)
            && let Err(error) = self.disconnect(id)
        {
            tracing::debug!("the connection of a queue pair that is destroyed: {error}");
        }
    }

    /// The kernel's connection manager uses the first partition.
    fn only_partition(&self, index: usize) -> Result<(), Error> {
        self.port.pkey(index)?;
        if index == 0 { Ok(()) } else { Err(Error::Unsupported(Feature::PartitionOfCard)) }
    }

    /// It uses the largest path MTU that the interface allows.
    fn only_path_mtu(&self, path_mtu: PathMtu, peer: IpAddr) -> Result<(), Error> {
        let is_ipv6 = Gid::from(peer.to_canonical()).is_ipv6();
        let needed = path_mtu.required_l3_mtu(is_ipv6);
        if needed > self.port.mtu {
            let (interface, mtu) = (self.port.interface.clone(), self.port.mtu);
            return Err(Error::PathMtu { path_mtu, needed, interface, mtu });
        }
        match self.port.path_mtu(is_ipv6) {
            Some(largest) if largest != path_mtu => Err(Error::Unsupported(Feature::PathMtuOfCard)),
            _ => Ok(()),
        }
    }

    pub(super) fn fail_qp(&mut self, qp: Option<Qp>) {
        if let Some(qp) = qp
            && let Err(error) = self.modify_qp(qp, Transition::Error)
        {
            tracing::debug!("the queue pair of a connection that is over: {error}");
        }
    }
}

impl Connections {
    fn ids(&self, which: impl Fn(&Exchange) -> bool) -> Vec<CmId> {
        let all = self.exchanges.iter_with_handles();
        all.filter(|(_, exchange)| which(exchange)).map(|(handle, _)| CmId(handle)).collect()
    }

    /// Removes a request that the application has not seen. Returns whether there was one.
    fn forget_request(&mut self, id: CmId) -> bool {
        let channel = self.exchanges.get(id.0).and_then(|exchange| exchange.channel);
        let is_it = |event: &CmEvent| matches!(event, CmEvent::ConnectionRequest(r) if r.id == id);
        self.events.forget(channel, is_it)
    }

    /// Rejects a request, or a search.
    fn refuse(&mut self, id: CmId, private_data: &[u8]) {
        if let Some(exchange) = self.exchanges.remove(id.0)
            && let Some(card) = &exchange.card
            && let Err(error) = card.reject(private_data)
        {
            tracing::debug!("a request that is refused: {error}");
        }
    }
}
