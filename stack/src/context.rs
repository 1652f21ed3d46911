//! The public API: each verb goes to the backend, in one line; verbs that wait, and the handshake, are made of verbs.
//!
//! - `queue_pairs.rs`, `transitions.rs`, `queues.rs`, `memory.rs`, `datagrams.rs`, `connections.rs`, `waiting.rs`: the
//!   verbs, as in the backends
//! - `blocking.rs`: the verbs that wait
//! - `endpoints.rs`: the handshake

mod blocking;
mod connections;
mod datagrams;
mod endpoints;
mod memory;
mod queue_pairs;
mod queues;
mod transitions;
mod waiting;

pub use blocking::DatagramService;

use ferroce_driver::{Capabilities, Nanos, Stats};
use ferroce_wire::{PKey, Psn};

use crate::backend::{Backend, Device, dispatch};
use crate::telemetry::counters::Counters;
use crate::telemetry::metrics::{Metrics, ProgramCounter};
use crate::verbs::{Config, DeviceAttributes, Error, Event, EventSource, GidEntry, Port};

/// One port with its protection domains, memory regions and windows, completion queues and queue
/// pairs.
///
/// One thread owns it and calls [`poll`](Context::poll) again and again. Packets are sent, received, acknowledged and
/// retransmitted only there, so the passive side must poll too: the target of a READ or WRITE polls until its peers are
/// done ([`manual::threads`](crate::manual::threads)). The front page of the [crate] has an example and a table of the verbs
/// by task; [`manual::errors`](crate::manual::errors) says what to do about each error.
///
/// Dropping a context sends the ACKs that it owes, and disconnects every connection of the connection manager (a DREQ is
/// sent once, and its answer is not awaited). Work that is posted and not yet sent is discarded without a completion. The
/// peers of queue pairs that were connected by [`handshake`](Context::handshake) are not told: their work requests end with
/// `RetryExcErr`.
pub struct Context {
    backend: Backend,
}

impl Context {
    /// Opens a context on a packet driver, or on a port of an RNIC.
    ///
    /// ```
    /// # use ferroce::*;
    /// // By name; or a driver of your choice, such as one end of a cable inside this process.
    /// let context = Context::open(Device::open("loopback")?, &Config::default().max_qps(1024))?;
    /// let (near, _far) = driver::loopback::pair(&[[192, 0, 2, 1].into()], &[[192, 0, 2, 2].into()]);
    /// let other = Context::open(Box::new(near), &Config::default())?;
    /// assert_eq!((context.port().gids.len(), other.port().gids.len()), (1, 1));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a setting out of range. [`Error::Unsupported`] for RoCE v1 over a driver
    /// that starts above Ethernet, and for what an RNIC can't do (congestion control of ours, `drop_access_errors`): leave the
    /// setting at its default there. [`Error::Driver`] when this process may have no more file descriptors (`ulimit -n`): a
    /// context takes three beside the driver's.
    pub fn open(device: impl Into<Device>, config: &Config) -> Result<Context, Error> {
        Ok(Context { backend: Backend::open(device.into(), config)? })
    }

    /// The port: addresses, GID table, MTU. The index of a GID that fits a peer is
    /// [`Port::gid_index_for`].
    pub fn port(&self) -> &Port {
        dispatch!(&self.backend, port())
    }

    /// Adds a row to the GID table and returns its index: an address of a VLAN on this port, or one
    /// that the driver does not know of.
    ///
    /// ```
    /// # use std::net::IpAddr;
    /// # use ferroce::*;
    /// let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// let address = IpAddr::from([192, 0, 2, 1]);
    /// let index = context.add_gid(GidEntry::new(address.into()).vlan(5))?;
    /// assert_eq!(context.port().gids[index].vlan, Some(5));
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a VLAN that does not exist, for RoCE v1 while that is off, and for a
    /// row that is there; [`Error::Unsupported`] on a socket, which has one address.
    pub fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        dispatch!(&mut self.backend, add_gid(entry))
    }

    /// Adds a P_Key to the port's table and returns its index, which queue pairs
    /// ([`QpUpdate::pkey_index`](crate::QpUpdate::pkey_index)) and connections
    /// ([`ConnectionParameters`](crate::ConnectionParameters)) name. Two limited members of a partition do not hear each other; a full member hears all.
    ///
    /// # Errors
    /// [`Error::Invalid`] for partition 0, and for a key that is there; [`Error::Exhausted`] when the table is full:
    /// [remove](Context::remove_pkey) one.
    pub fn add_pkey(&mut self, pkey: PKey) -> Result<usize, Error> {
        dispatch!(&mut self.backend, add_pkey(pkey))
    }

    /// Removes the P_Key at an index of the port's table; the default one too, if nobody uses it. Queue pairs
    /// get the key at index 0 with INIT: no more of them leave RESET until index 0 has a key again, which is
    /// the next one that [`add_pkey`](Context::add_pkey) adds.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an index without a key, [`Error::Busy`] while queue pairs that are not in
    /// RESET, connections or listeners use it.
    pub fn remove_pkey(&mut self, index: usize) -> Result<(), Error> {
        dispatch!(&mut self.backend, remove_pkey(index))
    }

    /// Limits and capabilities of this context.
    pub fn query_device(&self) -> &DeviceAttributes {
        dispatch!(&self.backend, query_device())
    }

    /// What the driver says of itself.
    pub fn capabilities(&self) -> &Capabilities {
        dispatch!(&self.backend, capabilities())
    }

    /// Frames and bytes that the driver has moved.
    pub fn driver_stats(&self) -> Stats {
        dispatch!(&self.backend, driver_stats())
    }

    /// What has been counted since the context was opened. [`manual::operating`](crate::manual::operating) has an example, and
    /// says what it means when a counter grows.
    pub fn counters(&self) -> &Counters {
        dispatch!(&self.backend, counters())
    }

    /// Everything that can be told in numbers: [`counters`](Context::counters),
    /// [`driver_stats`](Context::driver_stats), what is in use, and how much there can be.
    pub fn metrics(&self) -> Metrics {
        dispatch!(&self.backend, metrics())
    }

    /// Counts something of the program's own, which [`metrics`](Context::metrics) show with the rest.
    pub fn count(&mut self, counter: &ProgramCounter, label: &'static str) {
        match &mut self.backend {
            Backend::Software(software) => software.program_counters.count(counter, label),
            Backend::Hardware(hardware) => hardware.program_counters.count(counter, label),
        }
    }

    /// Shows [`metrics`](Context::metrics) to other processes of this user from now on, as
    /// `ferroce stat` does ([`Exported`](crate::Exported)). They are answered by
    /// [`poll`](Context::poll), which looks every few milliseconds whether somebody asks.
    ///
    /// # Errors
    /// [`Error::Export`] if there is no place for the socket: it names the directory. All else goes on without.
    pub fn export(&mut self) -> Result<(), Error> {
        dispatch!(&mut self.backend, export())
    }

    /// Takes an asynchronous event of any object, for a program that does not share the context. The events of one object
    /// come in their order; the events of different objects may not.
    ///
    /// With a [`Runner`](crate::Runner), use `handle.call(|context| context.next_event())`: handles do not deliver events.
    /// [`manual::errors`](crate::manual::errors) says what to do about each.
    pub fn next_event(&mut self) -> Option<Event> {
        dispatch!(&mut self.backend, next_event())
    }

    /// Takes the oldest asynchronous event of one queue pair, completion queue, shared receive queue or address handle, or of the port.
    /// Libraries that share a context take those of their own objects so, and neither sees the other's. While there is
    /// none it costs a look.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn next_event_of(&mut self, source: impl Into<EventSource>) -> Result<Option<Event>, Error> {
        dispatch!(&mut self.backend, next_event_of(source.into()))
    }

    /// A PSN to start from: one that nobody outside can guess, and that packets of an earlier
    /// connection do not fit (docs/protocol.md §9).
    pub fn random_psn(&mut self) -> Psn {
        dispatch!(&mut self.backend, random_psn())
    }

    /// One turn of the engine at the time `now`: takes a burst of frames, fires the timers that
    /// are due, sends what is owed and what is posted. Returns how many frames came and went.
    ///
    /// A context's time never goes back: told an earlier one than before, it stands still until that has come. A
    /// [`Clock`](crate::Clock) goes on where others stopped; an application with a time of its own tells that, or lets
    /// clocks [catch up](crate::Clock::catch_up_with) with [`now`](Context::now). A [`Poller`](crate::Poller) does both, and
    /// rests when there is nothing to do.
    ///
    /// ```
    /// # use ferroce::*;
    /// let mut context = Context::open(Device::open("loopback")?, &Config::default())?;
    /// let mut clock = Clock::start();
    /// let frames = context.poll(clock.now())?;
    /// assert_eq!(frames, 0); // nothing is connected
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone: open it anew. [`Error::Invalid`] for a time from 2⁶³ ns on, [`Nanos::NEVER`] too:
    /// the context would stand still for ever. Nothing has happened then.
    pub fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        dispatch!(&mut self.backend, poll(now))
    }

    /// The latest time that the context was told; zero before the first poll.
    pub fn now(&self) -> Nanos {
        dispatch!(&self.backend, now())
    }
}
