//! The public API: each verb calls the backend, in one line; blocking verbs and the handshake are built from other verbs.
//!
//! - `queue_pairs.rs`, `transitions.rs`, `queues.rs`, `memory.rs`, `datagrams.rs`, `connections.rs`, `waiting.rs`: the
//!   verbs, as in the backends
//! - `blocking.rs`: the blocking verbs
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
/// One thread owns it and calls [`poll`](Context::poll) repeatedly. Packets are sent, received, acknowledged and retransmitted
/// only there, so the passive side must poll too: the target of a READ or WRITE polls until its peers are done
/// ([`manual::threads`](crate::manual::threads)). The front page of the [crate] has an example and a table of the verbs by task;
/// [`manual::errors`](crate::manual::errors) says what to do about each error.
///
/// Dropping a context sends its pending ACKs, and disconnects every connection of the connection manager (a DREQ is sent once,
/// without waiting for the DREP). Posted work that is not yet sent is discarded without a completion. The peers of queue pairs
/// connected by [`handshake`](Context::handshake) are not notified: their work requests complete with `RetryExcErr`.
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
    /// [`Error::Invalid`] for a setting out of range. [`Error::Unsupported`] for RoCE v1 on a driver without Ethernet headers,
    /// and for settings that an RNIC does not support (ferroce's congestion control, `drop_access_errors`): leave these at their
    /// defaults. [`Error::Driver`] when this process may open no more file descriptors (`ulimit -n`): a context uses three,
    /// besides the driver's.
    pub fn open(device: impl Into<Device>, config: &Config) -> Result<Context, Error> {
        Ok(Context { backend: Backend::open(device.into(), config)? })
    }

    /// The port: addresses, GID table, MTU. [`Port::gid_index_for`] returns the index of the GID for a peer.
    pub fn port(&self) -> &Port {
        dispatch!(&self.backend, port())
    }

    /// Adds a row to the GID table and returns its index: an address of a VLAN on this port, or one that the driver does not
    /// know.
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
    /// [`Error::Invalid`] for an invalid VLAN, for RoCE v1 if it is off, and for an existing row; [`Error::Unsupported`] on a
    /// socket, which has one address.
    pub fn add_gid(&mut self, entry: GidEntry) -> Result<usize, Error> {
        dispatch!(&mut self.backend, add_gid(entry))
    }

    /// Adds a P_Key to the port's table and returns its index, which queue pairs
    /// ([`QpUpdate::pkey_index`](crate::QpUpdate::pkey_index)) and connections
    /// ([`ConnectionParameters`](crate::ConnectionParameters)) name. Two limited members of a partition can't communicate with
    /// each other; a full member can communicate with all.
    ///
    /// # Errors
    /// [`Error::Invalid`] for partition 0, and for an existing key; [`Error::Exhausted`] when the table is full:
    /// [remove](Context::remove_pkey) one.
    pub fn add_pkey(&mut self, pkey: PKey) -> Result<usize, Error> {
        dispatch!(&mut self.backend, add_pkey(pkey))
    }

    /// Removes the P_Key at an index of the port's table, which may be the default one if it is unused. Queue pairs get the key
    /// at index 0 with INIT: they can't leave RESET until index 0 has a key again, which is the next one that
    /// [`add_pkey`](Context::add_pkey) adds.
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

    /// The driver's description of itself.
    pub fn capabilities(&self) -> &Capabilities {
        dispatch!(&self.backend, capabilities())
    }

    /// Frames and bytes that the driver has sent and received.
    pub fn driver_stats(&self) -> Stats {
        dispatch!(&self.backend, driver_stats())
    }

    /// The counters since the context was opened. [`manual::operating`](crate::manual::operating) has an example and the meaning
    /// of the counters.
    pub fn counters(&self) -> &Counters {
        dispatch!(&self.backend, counters())
    }

    /// All metrics: [`counters`](Context::counters), [`driver_stats`](Context::driver_stats), objects in use, and limits.
    pub fn metrics(&self) -> Metrics {
        dispatch!(&self.backend, metrics())
    }

    /// Increments a counter of the program's own, which [`metrics`](Context::metrics) includes.
    pub fn count(&mut self, counter: &ProgramCounter, label: &'static str) {
        match &mut self.backend {
            Backend::Software(software) => software.program_counters.count(counter, label),
            Backend::Hardware(hardware) => hardware.program_counters.count(counter, label),
        }
    }

    /// Exports [`metrics`](Context::metrics) to other processes of this user from now on, such as `ferroce stat`
    /// ([`Exported`](crate::Exported)). [`poll`](Context::poll) serves them: it checks for readers every few milliseconds.
    ///
    /// # Errors
    /// [`Error::Export`] if the socket can't be created: it names the directory. Everything else works without it.
    pub fn export(&mut self) -> Result<(), Error> {
        dispatch!(&mut self.backend, export())
    }

    /// Takes an asynchronous event of any object, for a program that does not share the context. Events of one object are in
    /// order; events of different objects may not be.
    ///
    /// With a [`Runner`](crate::Runner), use `handle.call(|context| context.next_event())`: handles do not deliver events.
    /// [`manual::errors`](crate::manual::errors) says what to do about each.
    pub fn next_event(&mut self) -> Option<Event> {
        dispatch!(&mut self.backend, next_event())
    }

    /// Takes the oldest asynchronous event of one queue pair, completion queue, shared receive queue or address handle, or of the
    /// port. Libraries that share a context use it to take only the events of their own objects. Without an event it costs one
    /// check.
    ///
    /// # Errors
    /// [`Error::InvalidHandle`].
    pub fn next_event_of(&mut self, source: impl Into<EventSource>) -> Result<Option<Event>, Error> {
        dispatch!(&mut self.backend, next_event_of(source.into()))
    }

    /// An initial PSN: one that an attacker can't guess, and that does not match packets of an earlier connection
    /// (docs/protocol.md §9).
    pub fn random_psn(&mut self) -> Psn {
        dispatch!(&mut self.backend, random_psn())
    }

    /// One turn of the engine at the time `now`: receives a burst of frames, runs expired timers, sends acknowledgements,
    /// responses and posted work. Returns the number of frames received and sent.
    ///
    /// A context's time never goes back: with an earlier time than before, it stands still until that time is reached. All
    /// [`Clock`](crate::Clock)s of a process share one time base; an application with a time of its own passes that, or lets
    /// clocks [catch up](crate::Clock::catch_up_with) with [`now`](Context::now). A [`Poller`](crate::Poller) does both, and
    /// idles when there is nothing to do.
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
    /// [`Error::Driver`] when the port is gone: open it again. [`Error::Invalid`] for times from 2⁶³ ns on, including
    /// [`Nanos::NEVER`], which would stop the context for ever; nothing has happened then.
    pub fn poll(&mut self, now: Nanos) -> Result<usize, Error> {
        dispatch!(&mut self.backend, poll(now))
    }

    /// The time of the latest poll; zero before the first one.
    pub fn now(&self) -> Nanos {
        dispatch!(&self.backend, now())
    }
}
