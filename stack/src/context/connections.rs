//! Connections by the connection manager.

use std::net::SocketAddr;

use super::Context;
use crate::backend::dispatch;
use crate::cm::{CmChannel, CmEvent, CmId, ConnectionParameters, ListenConfig, Listener, PortSpace};
use crate::verbs::{Error, Qp};

impl Context {
    /// Takes requests for connections ([`PortSpace::Tcp`]) or for a datagram service
    /// ([`PortSpace::Udp`]) to a port of one of this port's addresses, or of all (`0.0.0.0` or `::`, which
    /// are the same here). They come as [`CmEvent::ConnectionRequest`]. Port 0 is the port with the number 0; no free port is
    /// chosen. [`manual::connecting`](crate::manual::connecting) has an example of both. Where processes share the address, it waits
    /// while another one comes or goes: for ten seconds at most, if that is stopped.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an address that is not the port's or has its listener;
    /// [`Error::Exhausted`]: raise [`Config::max_listeners`](crate::Config::max_listeners); [`Error::Unsupported`] on a socket of
    /// a group that is not the one for QP1.
    pub fn listen(
        &mut self,
        space: PortSpace,
        address: SocketAddr,
        config: &ListenConfig,
    ) -> Result<Listener, Error> {
        dispatch!(&mut self.backend, listen(space, address, config))
    }

    /// Ends a listener; requests that wait at it are rejected. It may wait as [`listen`](Context::listen) does.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn unlisten(&mut self, listener: Listener) -> Result<(), Error> {
        dispatch!(&mut self.backend, unlisten(listener))
    }

    /// Asks for a connection of `qp`, RC or UC and in INIT, to a port of a peer. The queue pair is in RTS
    /// with [`CmEvent::Established`]; with [`CmEvent::Rejected`] and [`CmEvent::Unreachable`] it is as
    /// before.
    ///
    /// Never blocks: the request leaves as soon as the next hop is found, and [`CmEvent::Unreachable`] says who
    /// can't be reached and why, as soon as it is known: a neighbour that does not answer, or a word of the
    /// network that the request was not delivered (ICMP, heard by the UDP socket driver).
    /// [`connect_blocking`](Context::connect_blocking) waits for the outcome.
    ///
    /// # Errors
    /// [`Error::State`] for a queue pair that is not in INIT; [`Error::Invalid`] for a parameter, or an address that is not one
    /// peer's; [`Error::PathMtu`]; [`Error::Exhausted`]: raise [`Config::max_connections`](crate::Config::max_connections);
    /// [`Error::Busy`] when events are not taken ([`next_cm_event`](Context::next_cm_event)); [`Error::Unsupported`] on a socket of
    /// a group that is not the one for QP1; or the driver's word, as that there is no route.
    pub fn connect(
        &mut self,
        qp: Qp,
        to: SocketAddr,
        parameters: &ConnectionParameters<'_>,
    ) -> Result<CmId, Error> {
        dispatch!(&mut self.backend, connect(qp, to, parameters))
    }

    /// Accepts a request for a connection with `qp`, of the service that was asked for and in INIT. It
    /// receives from now on, and is in RTS with [`CmEvent::Established`].
    ///
    /// Never blocks: the connection goes to the hardware address that the request came from.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a request that is over: the peer has given up. [`Error::State`] for a queue pair that is not
    /// in INIT, [`Error::Invalid`] for a parameter or a queue pair of another service: the request can still be accepted or
    /// rejected then.
    pub fn accept(&mut self, id: CmId, qp: Qp, parameters: &ConnectionParameters<'_>) -> Result<(), Error> {
        dispatch!(&mut self.backend, accept(id, qp, parameters))
    }

    /// Answers the search for a datagram service: `qp`, which is UD, is where it is.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`] for a search that is over, [`Error::Invalid`].
    pub fn accept_datagrams(&mut self, id: CmId, qp: Qp, private_data: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, accept_datagrams(id, qp, private_data))
    }

    /// Says no to a request, or to a search.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`], [`Error::Invalid`].
    pub fn reject(&mut self, id: CmId, private_data: &[u8]) -> Result<(), Error> {
        dispatch!(&mut self.backend, reject(id, private_data))
    }

    /// Asks a peer for the datagram service at one of its ports: [`CmEvent::Resolved`] says where it is.
    /// Of `parameters` the private data (180 bytes), `cm_timeout` and `cm_retries` matter.
    ///
    /// # Errors
    /// As [`connect`](Context::connect).
    pub fn resolve(&mut self, to: SocketAddr, parameters: &ConnectionParameters<'_>) -> Result<CmId, Error> {
        dispatch!(&mut self.backend, resolve(to, parameters))
    }

    /// Ends a connection: its queue pair goes to ERR, and the peer is told. [`CmEvent::Disconnected`]
    /// comes when it has answered, or when no repetition was answered. The peer is told by [`poll`](Context::poll): a program that
    /// ends before the event may leave it with the connection. Ends an attempt, or a search, without an event.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn disconnect(&mut self, id: CmId) -> Result<(), Error> {
        dispatch!(&mut self.backend, disconnect(id))
    }

    /// Takes the oldest event of the listeners and connections that do not name a channel. With a
    /// [`Runner`](crate::Runner), use `handle.call(|context| context.next_cm_event())`: handles do not deliver these events.
    ///
    /// When three events for each of `max_connections` are unread, no new connection begins: [`connect`](Context::connect)
    /// fails with [`Error::Busy`], and a peer's request is not answered, so the peer sends it again. No event is lost.
    pub fn next_cm_event(&mut self) -> Option<CmEvent> {
        dispatch!(&mut self.backend, next_cm_event())
    }

    /// Creates a separate queue of connection events. Libraries that share a context create one each, and name it in
    /// [`ListenConfig::channel`] and [`ConnectionParameters::channel`]. It has the same limit as
    /// [`next_cm_event`](Context::next_cm_event): a channel that is not read stops only its own connections. It takes its
    /// memory at once, about 2 KiB for each of [`max_connections`](crate::Config::max_connections).
    ///
    /// # Errors
    /// [`Error::Exhausted`]; [`Error::Memory`] when there is none; [`Error::Unsupported`] on a socket that is not the one for QP1.
    pub fn create_cm_channel(&mut self) -> Result<CmChannel, Error> {
        dispatch!(&mut self.backend, create_cm_channel())
    }

    /// Destroys a channel, with the events that wait there.
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
