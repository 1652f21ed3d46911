//! The connection manager: IB CM over the general service interface (QP1), with addresses and ports as in rdma_cm
//! (docs/protocol.md §2).
//!
//! It is a state machine without IO, like the rest of the engine. MADs come from the receive phase, and wait in [`Gsi`]
//! for the transmit phase; timers fire with the others. It moves the queue pairs that it was given from state to state,
//! and reports to the application by [`CmEvent`]s. A queue pair belongs to one connection, and to the application again
//! when the connection ends.
//!
//! - `gsi.rs`: QP1
//! - `communication.rs`: one exchange with a peer
//! - `active.rs`: the requesting end
//! - `passive.rs`: the end that is asked
//! - `disconnect.rs`: the end of a connection
//! - `service.rs`: datagram services
//! - `parameters.rs`: what an end asks for
//! - `event.rs`: what is reported to the application
//! - `channel.rs`: where events wait
//!
//! # Time
//!
//! The time of a message starts with the poll that sends it, not with the verb, because a context may not have been
//! polled for long. A message without an answer is sent again after 4.3 s, as rdma_cm does.
//!
//! # Which messages are accepted
//!
//! A REP, a REJ of a request and an MRA must contain our communication id, which is random, and come from the peer. All
//! other messages of an exchange must contain both ids. A request from a group's address is dropped, and so is one that
//! another station sends from one of the port's own addresses.
//!
//! # Floods
//!
//! A listener has a limit on half-open requests, in all and for one address. Above it a REQ is answered by REJ 3, and a
//! search is not answered, because it asks again. Only the tables are allocated, with the first use, and a request
//! costs the same however many connections there are.
//!
//! # Answers
//!
//! An answer goes back to the hardware address that the request came from, which is the router's if there is one. The
//! same holds for a connection and for a datagram (`address_from_wc`). No neighbour is looked up because of a packet
//! that anybody can send, so `accept` does not wait for one.
//!
//! # What is not there
//!
//! Alternate paths (LAP is answered with "unsupported") and redirection. Of sockets that share an address by
//! SO_REUSEPORT, the first has QP1. Of contexts with one AF_XDP queue each, only the one whose queue the card's hash
//! chooses receives a MAD; one of them should receive all of them (an ethtool rule). A context on all queues does.

mod active;
mod channel;
mod communication;
mod disconnect;
mod event;
mod gsi;
mod parameters;
mod passive;
mod service;

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use ferroce_driver::Nanos;
use ferroce_wire::cm::{Apr, CmBody, CmMessage, IpCm, RejectReason, SERVICE_ID_TCP, SERVICE_ID_UDP};
use ferroce_wire::{Ecn, Gid, MAD_LEN, MacAddr, PKey, Packet, Qpn};
use rand_chacha::rand_core::RngCore;

use crate::engine::key_table::KeyTable;
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::engine::slab::Slab;
use crate::engine::timer::TimerWheel;
use crate::telemetry::counters::Counter;
use crate::verbs::{AddressVector, Error, Handle, Port, Qp, Unreachable, time_of};
pub use channel::CmChannel;
pub(crate) use channel::CmEvents;
use communication::{Communication, State};
pub use event::{CmEvent, ConnectionRequest, PrivateData};
pub(crate) use gsi::Gsi;
pub(crate) use parameters::check_private_data;
pub use parameters::{ConnectionParameters, ListenConfig};

/// A connection, from its setup to its end, or the search for a datagram service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CmId(pub(crate) Handle);

/// A port on which requests are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Listener(pub(crate) Handle);

/// The kind of ports: of connections, or of datagram services.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PortSpace {
    /// `RDMA_PS_TCP`: connections (RC and UC).
    Tcp,
    /// `RDMA_PS_UDP`: datagram services, found by SIDR.
    Udp,
}

impl PortSpace {
    fn service_id(self, port: u16) -> u64 {
        match self {
            PortSpace::Tcp => SERVICE_ID_TCP + u64::from(port),
            PortSpace::Udp => SERVICE_ID_UDP + u64::from(port),
        }
    }
}

/// The state that the connection manager accesses.
pub(crate) struct Verbs<'a> {
    pub(crate) qps: &'a mut Slab<QueuePair>,
    pub(crate) shared: &'a mut Shared,
    pub(crate) port: &'a Port,
}

/// A listener.
struct Listening {
    space: PortSpace,
    /// IPv4 addresses as such; unspecified ones all as 0.0.0.0.
    address: SocketAddr,
    config: ListenConfig,
    /// Unanswered requests, and connections not yet confirmed by the peer, with their addresses.
    half_open: Vec<(u32, Gid)>,
}

/// The source of a message, and the path back.
#[derive(Clone, Copy)]
struct Arrival {
    source: Gid,
    destination: Gid,
    back: AddressVector,
    /// The P_Key of the port's table with which it arrived.
    pkey: PKey,
}

/// The identification of an exchange at its start: the peer, its ID, and the kind of exchange.
type PeerKey = (Gid, u32, PortSpace);

/// All connections of a context.
pub(crate) struct ConnectionManager {
    communications: Slab<Communication>,
    listeners: Slab<Listening>,
    /// Local communication IDs, which are random.
    comm_ids: KeyTable<u32>,
    /// `(rest, divisor)` of the IDs: contexts that share an address share QP1.
    share: (u32, u32),
    /// Requests of peers, by the peers' IDs.
    by_peer: HashMap<PeerKey, u32>,
    /// Connections, by the peer's queue pair.
    by_qpn: HashMap<(Gid, Qpn), u32>,
    /// Connections, by the local queue pair.
    by_qp: HashMap<Qp, u32>,
    timers: TimerWheel,
    /// Communications whose time starts with the next poll, which sends their message.
    starting: Vec<u32>,
    events: CmEvents,
    pub(crate) gsi: Gsi,
    guid: u64,
}

impl ConnectionManager {
    pub(crate) fn new(
        (max_connections, max_listeners, max_channels): (u32, u32, u32),
        port: &Port,
        shared: &mut Shared,
    ) -> Self {
        let most = max_connections as usize;
        ConnectionManager {
            communications: Slab::new(max_connections, shared.generation),
            listeners: Slab::new(max_listeners, shared.generation),
            comm_ids: KeyTable::new(max_connections, 32).at_full_size(max_connections),
            share: port.comm_ids,
            // Twice as many places as keys: a table that is half full never grows.
            by_peer: HashMap::with_capacity(2 * most),
            by_qpn: HashMap::with_capacity(2 * most),
            by_qp: HashMap::with_capacity(2 * most),
            timers: TimerWheel::new(max_connections),
            starting: Vec::with_capacity(most),
            events: CmEvents::new(max_connections, max_channels, shared.generation),
            gsi: Gsi::new(),
            guid: guid(port.mac, shared),
        }
    }

    /// Starts to accept requests.
    pub(crate) fn listen(
        &mut self,
        space: PortSpace,
        address: SocketAddr,
        config: ListenConfig,
    ) -> Result<Listener, Error> {
        let ip = address.ip().to_canonical();
        let ip = if ip.is_unspecified() { Ipv4Addr::UNSPECIFIED.into() } else { ip };
        let address = SocketAddr::new(ip, address.port());
        if self.listeners.iter().any(|l| l.space == space && l.address == address) {
            return Err(Error::invalid("address", address, "one without a listener of this context"));
        }
        config.channel.map_or(Ok(()), |channel| self.events.check(channel))?;
        let full =
            Error::Exhausted { kind: "listener", limit: self.listeners.capacity(), setting: "max_listeners" };
        let most = (config.backlog as usize).min(self.communications.capacity());
        let listening = Listening { space, address, config, half_open: Vec::with_capacity(most) };
        self.listeners.insert_with(|_| listening).map(Listener).ok_or(full)
    }

    /// The service of a listener.
    pub(crate) fn service_of(&self, listener: Listener) -> Option<u64> {
        self.listeners.get(listener.0).map(|listening| listening.space.service_id(listening.address.port()))
    }

    /// Whether there is a listener for a service.
    pub(crate) fn has_service(&self, service: u64) -> bool {
        self.listeners.iter().any(|listening| listening.space.service_id(listening.address.port()) == service)
    }

    /// Ends a listener. Its unanswered requests are rejected.
    pub(crate) fn unlisten(&mut self, listener: Listener, verbs: &mut Verbs<'_>) -> bool {
        if self.listeners.remove(listener.0).is_none() {
            return false;
        }
        for index in 0..self.communications.capacity() as u32 {
            let waits = |c: &&Communication| c.listener == Some(listener) && c.state.awaits_application();
            if let Some(id) = self.communications.at(index).filter(waits).map(|c| c.id) {
                self.take_back_request(id);
                self.refuse(id, &[], verbs);
            }
        }
        true
    }

    /// When [`fire_timers`](ConnectionManager::fire_timers) is due.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.timers.next_deadline()
    }

    /// The number of exchanges, and its limit.
    pub(crate) fn usage(&self) -> (usize, usize) {
        self.communications.usage()
    }

    /// Exchanges and listeners of a partition.
    pub(crate) fn pkey_users(&self, index: usize) -> usize {
        let communications = self.communications.iter().filter(|c| c.pkey_index == index).count();
        communications + self.listeners.iter().filter(|l| l.config.pkey_index == Some(index)).count()
    }

    /// Processes a MAD that arrived at QP1 in the partition of `pkey`; everything except its body has been checked.
    pub(crate) fn receive(
        &mut self,
        packet: &Packet<'_>,
        pkey: PKey,
        message: &CmMessage<'_>,
        verbs: &mut Verbs<'_>,
    ) -> Result<(), Counter> {
        let arrival = Arrival::of(packet, pkey, verbs.port).ok_or(Counter::RxWrongAddress)?;
        let transaction = message.transaction_id;
        match message.body {
            CmBody::Req(req) => self.on_req(&arrival, transaction, req, verbs),
            CmBody::Rep(rep) => self.on_rep(&arrival, rep, verbs),
            CmBody::Rtu(rtu) => self.on_rtu(&arrival, rtu, verbs),
            CmBody::Rej(rej) => self.on_rej(&arrival, rej, verbs),
            CmBody::Mra(mra) => self.on_mra(&arrival, mra, verbs),
            CmBody::Dreq(dreq) => self.on_dreq(&arrival, transaction, dreq, verbs),
            CmBody::Drep(drep) => self.on_drep(&arrival, drep, verbs),
            CmBody::SidrReq(req) => self.on_sidr_req(&arrival, transaction, req, verbs),
            CmBody::SidrRep(rep) => self.on_sidr_rep(&arrival, rep),
            CmBody::Lap(lap) => {
                let index = self.find_pair(&arrival, lap.remote_comm_id(), lap.local_comm_id())?;
                let apr = Apr::new(lap.remote_comm_id(), lap.local_comm_id(), Apr::UNSUPPORTED);
                self.send(index, transaction, CmBody::Apr(&apr), verbs.shared);
                Ok(())
            }
            CmBody::Apr(_) => Err(Counter::CmRxUnknown),
        }
    }

    /// Retransmits unanswered messages, and gives up expired ones.
    pub(crate) fn fire_timers(&mut self, verbs: &mut Verbs<'_>) {
        while let Some(index) = self.starting.pop() {
            // Unless the answer has arrived already.
            if let Some(begun) = self.communications.at_mut(index).filter(|c| c.state.repeats()) {
                begun.begin_waiting(verbs.shared.now);
                self.wait(index, verbs.shared.now);
            }
        }
        while let Some(index) = self.timers.pop(verbs.shared.now) {
            let Some(communication) = self.communications.at_mut(index) else { continue };
            if communication.deadline > verbs.shared.now {
                self.timers.ensure(index, communication.deadline);
                continue;
            }
            let may_repeat = communication.retries_left > 0 && communication.latest > verbs.shared.now;
            if communication.state.repeats() && may_repeat {
                communication.retries_left -= 1;
                verbs.shared.count(Counter::CmTxRetries);
                self.send_again(index, verbs.shared);
                self.wait(index, verbs.shared.now);
            } else {
                self.give_up(index, verbs);
            }
        }
    }

    /// A communication's time has expired.
    fn give_up(&mut self, index: u32, verbs: &mut Verbs<'_>) {
        let Some(communication) = self.communications.at(index) else { return };
        let Communication { id, state, .. } = *communication;
        let silent = Unreachable::Silent { peer: canonical(communication.address.gid) };
        match state {
            State::ReqSent | State::RepSent => {
                self.reject(index, RejectReason::TIMEOUT, &[], verbs);
                if state == State::RepSent {
                    self.fail_qp(index, verbs);
                }
                self.end_unreachable(index, silent);
            }
            State::SidrSent => self.end_unreachable(index, silent),
            State::ReqReceived | State::SidrReceived => {
                // If the application has not seen the request, it is removed; otherwise the application is notified.
                if self.take_back_request(id) {
                    self.remove(index);
                } else {
                    self.end_unreachable(index, silent);
                }
            }
            State::DreqSent => {
                self.tell(CmEvent::Disconnected { id });
                self.enter_timewait(index, verbs.shared.now);
            }
            State::Timewait => {
                self.tell(CmEvent::TimewaitExit { id });
                self.remove(index);
            }
            // The resolution of a next hop has its own time limit.
            State::Resolving | State::Established => {}
        }
    }

    /// Removes a request that the application has not seen. Returns whether there was one.
    fn take_back_request(&mut self, id: CmId) -> bool {
        let is_it = |event: &CmEvent| matches!(event, CmEvent::ConnectionRequest(r) if r.id == id);
        self.events.forget(self.channel_of(id), is_it)
    }

    /// A communication is half open.
    fn join_listener(&mut self, listener: Listener, index: u32, source: Gid) {
        if let Some(listening) = self.listeners.get_mut(listener.0) {
            listening.half_open.push((index, source));
        }
    }

    /// A communication is no longer half open.
    fn leave_listener(&mut self, index: u32) {
        let listener = self.communications.at(index).and_then(|c| c.listener);
        if let Some(listening) = listener.and_then(|listener| self.listeners.get_mut(listener.0)) {
            listening.half_open.retain(|(other, _)| *other != index);
        }
    }

    /// The communication with this local ID, if the message is from its peer.
    fn find(&self, arrival: &Arrival, ours: u32) -> Result<u32, Counter> {
        let known = self.comm_ids.get(ours).ok_or(Counter::CmRxUnknown)?;
        let communication = self.communications.at(known).ok_or(Counter::CmRxUnknown)?;
        if communication.address.gid == arrival.source { Ok(known) } else { Err(Counter::CmRxUnknown) }
    }

    /// The same by both ids.
    fn find_pair(&self, arrival: &Arrival, ours: u32, theirs: u32) -> Result<u32, Counter> {
        let index = self.find(arrival, ours)?;
        let is_its = self.communications.at(index).is_some_and(|c| c.remote_comm_id == theirs);
        if is_its { Ok(index) } else { Err(Counter::CmRxUnknown) }
    }

    /// Sends a message that is not retransmitted.
    fn send(&mut self, index: u32, transaction: u64, body: CmBody<'_>, shared: &mut Shared) {
        let Some(communication) = self.communications.at(index) else { return };
        let mut mad = [0; MAD_LEN];
        CmMessage { transaction_id: transaction, body }.emit(&mut mad);
        self.gsi.push(communication.header, communication.pkey, &mad, shared);
    }

    /// Sends a message that may be retransmitted.
    fn send_kept(&mut self, index: u32, body: CmBody<'_>, shared: &mut Shared) {
        let Some(communication) = self.communications.at_mut(index) else { return };
        communication.keep(body);
        self.send_again(index, shared);
    }

    fn send_again(&mut self, index: u32, shared: &mut Shared) {
        let Some(communication) = self.communications.at(index) else { return };
        self.gsi.push(communication.header, communication.pkey, &communication.mad, shared);
    }

    /// Answers a message without a communication.
    fn answer(&mut self, arrival: &Arrival, transaction: u64, body: CmBody<'_>, verbs: &mut Verbs<'_>) {
        let Ok(path) = arrival.back.path(verbs.port, Qpn::GSI, Qpn::GSI) else { return };
        let mut mad = [0; MAD_LEN];
        CmMessage { transaction_id: transaction, body }.emit(&mut mad);
        self.gsi.push(verbs.port.header(&path), arrival.pkey, &mad, verbs.shared);
    }

    /// Starts the time in which the peer must answer.
    fn wait(&mut self, index: u32, now: Nanos) {
        let Some(communication) = self.communications.at_mut(index) else { return };
        communication.wait_until(now + time_of(communication.cm_timeout));
        self.timers.ensure(index, communication.deadline);
    }

    /// The same for a message that a verb sends.
    fn wait_from_now_on(&mut self, index: u32) {
        self.timers.cancel(index);
        if !self.starting.contains(&index) {
            self.starting.push(index);
        }
    }

    fn remove(&mut self, index: u32) {
        let Some(communication) = self.communications.at(index) else { return };
        let Communication { id, address, remote_comm_id, remote_qpn, local_comm_id, space, .. } =
            *communication;
        self.leave_listener(index);
        self.release_qp(index);
        self.timers.cancel(index);
        self.starting.retain(|other| *other != index);
        self.comm_ids.retire(local_comm_id);
        let key = (address.gid, remote_comm_id, space);
        if self.by_peer.get(&key) == Some(&index) {
            self.by_peer.remove(&key);
        }
        if self.by_qpn.get(&(address.gid, remote_qpn)) == Some(&index) {
            self.by_qpn.remove(&(address.gid, remote_qpn));
        }
        self.communications.remove(id.0);
    }

    /// Assigns the queue pair to the connection.
    fn take_qp(&mut self, index: u32, qp: Qp) {
        if let Some(communication) = self.communications.at_mut(index) {
            communication.qp = Some(qp);
            self.by_qp.insert(qp, index);
        }
    }

    /// Returns the queue pair to the application.
    fn release_qp(&mut self, index: u32) -> Option<Qp> {
        let qp = self.communications.at_mut(index)?.qp.take()?;
        self.by_qp.remove(&qp);
        Some(qp)
    }

    /// Creates an exchange, whose events are delivered to `channel`, and draws its communication ID.
    fn begin(
        &mut self,
        shared: &mut Shared,
        channel: Option<CmChannel>,
        make: impl FnOnce((CmId, u32)) -> Communication,
    ) -> Result<(CmId, u32), Error> {
        let ConnectionManager { communications, comm_ids, events, share: (rest, divisor), .. } = self;
        let limit = communications.capacity();
        channel.map_or(Ok(()), |channel| events.check(channel))?;
        events.check_room(channel)?;
        let handle = communications.insert_with(|handle| {
            let usable = |id: u32| id % *divisor == *rest && id != 0;
            let comm_id = comm_ids.insert(&mut shared.rng, handle.index, usable);
            Communication { channel, ..make((CmId(handle), comm_id)) }
        });
        let full = Error::Exhausted { kind: "connection", limit, setting: "max_connections" };
        handle.map(|handle| (CmId(handle), handle.index)).ok_or(full)
    }

    fn index_of(&self, id: CmId) -> Result<u32, Error> {
        self.communications.get(id.0).map(|_| id.0.index).ok_or_else(|| gone(id))
    }
}

impl Arrival {
    fn of(packet: &Packet<'_>, pkey: PKey, port: &Port) -> Option<Arrival> {
        let network = packet.network();
        if network.source.is_multicast() || is_nobody(network.source.to_ip().to_canonical()) {
            return None;
        }
        let index = port.index_of_destination(packet)?;
        // The path by which it arrived: no next hop is resolved because of a packet that anybody can send.
        let back = AddressVector {
            mac: Some(port.way_back(packet)?),
            traffic_class: network.traffic_class & !Ecn::MASK,
            flow_label: network.flow_label,
            ..AddressVector::new(network.source, index)
        };
        Some(Arrival { source: network.source, destination: network.destination, back, pkey })
    }

    /// The addresses in a request, if they match those of its packet.
    fn addresses(&self, private_data: &[u8]) -> Result<IpCm, RejectReason> {
        let addresses = IpCm::parse(private_data).map_err(|_| RejectReason::CONSUMER)?;
        let came_so = addresses.source == canonical(self.source)
            && addresses.destination == canonical(self.destination);
        if came_so { Ok(addresses) } else { Err(RejectReason::INVALID_GID) }
    }
}

/// Whether it is not the address of a host.
fn is_nobody(ip: IpAddr) -> bool {
    ip.is_unspecified() || ip == IpAddr::V4(Ipv4Addr::BROADCAST)
}

fn canonical(gid: Gid) -> IpAddr {
    gid.to_ip().to_canonical()
}

/// A MAC as EUI-64, as the kernel derives node GUIDs; a random one if there is none.
fn guid(mac: MacAddr, shared: &mut Shared) -> u64 {
    match mac.0 {
        [0, 0, 0, 0, 0, 0] => shared.rng.next_u64(),
        [a, b, c, d, e, f] => u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f]),
    }
}

/// The error for a queue pair that already has a connection.
pub(crate) fn being_set_up(qp: Qp, id: CmId) -> Error {
    let users = format!("connection {:?}, which is being set up", id.0);
    Error::Busy { kind: "QP", handle: format!("{:?}", qp.0), users }
}

pub(crate) fn gone(id: CmId) -> Error {
    Error::invalid_handle("connection", id.0)
}
/// Bytes of a request's private data that are available to the application.
pub(crate) const REQ_PRIVATE: usize = 56;
/// The same for an acceptance.
pub(crate) const REP_PRIVATE: usize = PrivateData::MAX;
/// The same for a rejection.
pub(crate) const REJ_PRIVATE: usize = 148;
/// The same for the search for a service, and for its answer.
pub(crate) const SIDR_REQ_PRIVATE: usize = 180;
pub(crate) const SIDR_REP_PRIVATE: usize = 136;
