//! Connections by the connection manager.

use std::net::SocketAddr;

use super::Context;
use crate::backend::dispatch;
use crate::cm::{CmChannel, CmEvent, CmId, ConnectionParameters, ListenConfig, Listener, PortSpace};
use crate::verbs::{Error, Qp};

impl Context {
    /// Listens for connections ([`PortSpace::Tcp`]) or for searches of a datagram service ([`PortSpace::Udp`]) at a port number
    /// of one of this port's addresses, or of all (`0.0.0.0` or `::`, which are the same here). Requests are reported as
    /// [`CmEvent::ConnectionRequest`]. Port 0 is port number 0; no free port is chosen.
    /// [`manual::connecting`](crate::manual::connecting) has an example of both. If processes share the address, it waits while
    /// another one joins or leaves: at most ten seconds, if that process is stopped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an address that is not the port's or already has a listener; [`Error::Exhausted`]: raise
    /// [`Config::max_listeners`](crate::Config::max_listeners); [`Error::Unsupported`] on a socket of a group that is not the one
    /// for QP1.
    pub fn listen(
        &mut self,
        space: PortSpace,
        address: SocketAddr,
        config: &ListenConfig,
    ) -> Result<Listener, Error> {
        dispatch!(&mut self.backend, listen(space, address, config))
    }

    /// Ends a listener; its pending requests are rejected. It may wait as [`listen`](Context::listen) does.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn unlisten(&mut self, listener: Listener) -> Result<(), Error> {
        dispatch!(&mut self.backend, unlisten(listener))
    }

    /// Requests a connection of `qp`, which is RC or UC and in INIT, to a port number of a peer. After [`CmEvent::Established`]
    /// the queue pair is in RTS; after [`CmEvent::Rejected`] and [`CmEvent::Unreachable`] it is unchanged.
    ///
    /// Does not block: the request is sent as soon as the next hop is found. [`CmEvent::Unreachable`] reports an unreachable peer
    /// and the reason as soon as it is known: a neighbour that does not answer, or an ICMP error for the request (received by the
    /// UDP socket driver). [`connect_blocking`](Context::connect_blocking) waits for the outcome.
    ///
    /// # Errors
    /// [`Error::State`] for a queue pair that is not in INIT; [`Error::Invalid`] for a parameter, or an address that is not
    /// unicast; [`Error::PathMtu`]; [`Error::Exhausted`]: raise [`Config::max_connections`](crate::Config::max_connections);
    /// [`Error::Busy`] when events are not taken ([`next_cm_event`](Context::next_cm_event)); [`Error::Unsupported`] on a socket
    /// of a group that is not the one for QP1; or the driver's error, such as no route.
    pub fn connect(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        dispatch!(&mut self.backend, connect(qp, to, parameters))
    }

    /// Accepts a request for a connection with `qp`, which is of the requested service and in INIT. It can receive from now on,
    /// and is in RTS after [`CmEvent::Established`].
    ///
    /// Does not block: the connection uses the source hardware address of the request.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a request that has ended: the peer has given up. [`Error::State`] for a queue pair that is
    /// not in INIT, [`Error::Invalid`] for a parameter or a queue pair of another service: the request can still be accepted or
    /// rejected then.
    pub fn accept(&mut self, id: CmId, qp: Qp, parameters: &ConnectionParameters<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, accept(id, qp, parameters))
    }

    /// Answers the search for a datagram service with the UD queue pair `qp`.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a search that has ended, [`Error::Invalid`].
    pub fn accept_datagrams(&mut self, id: CmId, qp: Qp, private_data: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, accept_datagrams(id, qp, private_data))
    }

    /// Rejects a request, or a search.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::Invalid`].
    pub fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, reject(id, private_data))
    }

    /// Asks a peer for the datagram service at one of its port numbers: [`CmEvent::Resolved`] has its address. Of `parameters`
    /// only the private data (180 bytes), `cm_timeout` and `cm_retries` are used.
    ///
    /// # Errors
    /// As [`connect`](Context::connect).
    pub fn resolve(&mut self, to: SocketAddr, parameters: &ConnectionParameters<'_>) -> Result<CmId, Error> {
        dispatch!(&mut self.backend, resolve(to, parameters))
    }

    /// Ends a connection: its queue pair goes to ERR, and the peer is notified. [`CmEvent::Disconnected`] is raised when the peer
    /// has answered, or after the last retry. [`poll`](Context::poll) sends the notification: if the program ends before the
    /// event, the peer may still have the connection. Ends an attempt, or a search, without an event.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        dispatch!(&mut self.backend, disconnect(id))
    }

    /// Takes the oldest event of the listeners and connections that do not name a channel. With a
    /// [`Runner`](crate::Runner), use `handle.call(|context| context.next_cm_event())`: handles do not deliver these events.
    ///
    /// When three events for each of `max_connections` are unread, no new connection begins: [`connect`](Context::connect) fails
    /// with [`Error::Busy`], and a peer's request is not answered, so the peer retransmits it. No event is lost.
    pub fn next_cm_event(&mut self) -> Option<CmEvent> {
        dispatch!(&mut self.backend, next_cm_event())
    }

    /// Creates a separate queue of connection events. Libraries that share a context create one each, and name it in
    /// [`ListenConfig::channel`] and [`ConnectionParameters::channel`]. It has the same limit as
    /// [`next_cm_event`](Context::next_cm_event): a channel that is not read blocks only its own connections. It allocates its
    /// memory at once, about 2 KiB for each of [`max_connections`](crate::Config::max_connections).
    ///
    /// # Errors
    /// [`Error::Exhausted`]; [`Error::Memory`]; [`Error::Unsupported`] on a socket that is not the one for QP1.
    pub fn create_cm_channel(&mut self) -> Result<CmChannel, Error> {
        dispatch!(&mut self.backend, create_cm_channel())
    }

    /// Destroys a channel and its pending events.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`]; [`Error::Busy`] while listeners or connections name it.
    pub fn destroy_cm_channel(&mut self, channel: CmChannel) -> Result<(), Error> {
        dispatch!(&mut self.backend, destroy_cm_channel(channel))
    }

    /// Takes the oldest event of the listeners and connections that name `channel`.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn next_cm_event_of(&mut self, channel: CmChannel) -> Result<Option<CmEvent>, Error> {
        dispatch!(&mut self.backend, next_cm_event_of(channel))
    }
}
