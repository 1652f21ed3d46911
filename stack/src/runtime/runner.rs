//! A context on a thread of its own, and the handles through which other threads use it.
//!
//! A [`Runner`] owns its context like any other owner; the context does not depend on it. A turn of its loop is: a burst of
//! commands from each handle, `Context::poll`, completions to each handle.
//!
//! - `command.rs`: the entries of the rings
//! - `handle.rs`: the side of the other thread
//! - `task.rs`: a handle in an asynchronous task
//! - `client.rs`: the runner's side of a handle
//! - `claims.rs`: which handle gets the completions of a queue
//! - `wakeup.rs`: how both sides sleep and wake each other
//! - `sync.rs`: the atomics and locks of `wakeup.rs`
//!
//! # With nothing to do
//!
//! A runner that may block sleeps for the time of `Context::quiet_for`: until the next timer, or for 50 µs if the port was full.
//! An exported context wakes ten times a second to check its socket. AF_XDP wakes as often to check whether its interface still
//! exists, because the kernel does not notify a sleeping process. A `Poller` still wakes every 2 ms, because its thread may have
//! other work.
//!
//! A sleeping runner still needs a core of its own. If it is woken on the core of a spinning thread, it waits for a time slice:
//! 3.6 ms. With a core for each, its first packet is served 115 to 125 µs after it was posted. A thread that blocks in the
//! kernel's `recv` gets a datagram after 102 to 123 µs (`--bench idle`, same rounds). This is the time to wake an idle core of
//! the machine.
//!
//! # The end
//!
//! A runner ends by `stop`, by drop, by an error of the driver or by a panic in a closure. Every handle is notified of the
//! reason, after all earlier deliveries. `stop` executes the posted commands, and returns the context. Commands that were not
//! executed are returned to their handle, including memory: the runner passes the handle the other end of its command ring before
//! it reports its end. Channels of armed completion queues are woken. In a closure on the runner's own thread, a wait for the
//! runner fails with `Error::OwnThread`, and dropping the runner only tells it to stop.

mod claims;
mod client;
mod command;
mod handle;
mod sync;
mod task;
mod wakeup;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;
use std::thread::{self, JoinHandle, ThreadId};
use std::time::Duration;

use ferroce_driver::Clock;
use rtrb::RingBuffer;
use tracing::{info, warn};

use crate::Context;
use crate::runtime::affinity::pin_to_core;
use crate::runtime::idle::{Idle, Idler};
use crate::verbs::Error;

use claims::Claims;
use client::Client;
pub use command::Delivery;
pub use handle::RunnerHandle;
use wakeup::{Desk, End, Sleep, lock};

/// The configuration of a [`Runner`]. [`manual::threads`](crate::manual::threads) has an example.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct RunnerConfig {
    /// What it does when there is nothing to do.
    pub idle: Idle,
    /// The core of its thread; with `None` the system chooses.
    pub core: Option<usize>,
}

impl RunnerConfig {
    /// What it does when there is nothing to do; [`Idle::Adaptive`] by default.
    pub fn idle(self, idle: Idle) -> Self {
        RunnerConfig { idle, ..self }
    }

    /// The core of its thread; any by default.
    pub fn core(self, core: impl Into<Option<usize>>) -> Self {
        RunnerConfig { core: core.into(), ..self }
    }
}

/// The rings of a [`RunnerHandle`], and how its thread waits.
///
/// ```
/// # use ferroce::*;
/// // For a thread that sleeps between messages and posts many at once.
/// let config = HandleConfig::default().commands(4096).idle(Idle::Block);
/// assert_eq!(config.deliveries, 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
#[non_exhaustive]
pub struct HandleConfig {
    /// Size of the command ring, 1 to 2²⁰; about 200 bytes per command.
    pub commands: u32,
    /// Size of the delivery ring, 1 to 2²⁰; 64 bytes per delivery.
    pub deliveries: u32,
    /// How [`RunnerHandle::wait`] and [`RunnerHandle::call`] wait.
    pub idle: Idle,
}

impl Default for HandleConfig {
    /// 256 commands, 1024 deliveries, an adaptive wait.
    fn default() -> HandleConfig {
        HandleConfig { commands: 256, deliveries: 1024, idle: Idle::default() }
    }
}

impl HandleConfig {
    /// Size of the command ring, 1 to 2²⁰; 256 by default.
    pub fn commands(self, commands: u32) -> Self {
        HandleConfig { commands, ..self }
    }

    /// Size of the delivery ring, 1 to 2²⁰; 1024 by default.
    pub fn deliveries(self, deliveries: u32) -> Self {
        HandleConfig { deliveries, ..self }
    }

    /// How to wait for a delivery or a result; [`Idle::Adaptive`] by default.
    pub fn idle(self, idle: Idle) -> Self {
        HandleConfig { idle, ..self }
    }
}

/// Drives a context on a thread of its own, until it is stopped or dropped. [`manual::threads`](crate::manual::threads) has an
/// example, for threads and for asynchronous tasks.
///
/// Other threads have a [`RunnerHandle`] each. A handle has a ring to the runner, for work requests and for closures called with
/// the context, and a ring back, to which the runner moves the completions of the handle's completion queues. Both rings are
/// lock-free, and only closures and errors are allocated.
///
/// With [`Idle::Block`] or [`Idle::Adaptive`] a runner with nothing to do sleeps until there is a frame, a command or a timer. If
/// the driver has no [`waker`](Context::waker) it checks for commands every millisecond, which is logged.
pub struct Runner {
    state: Arc<RunnerState>,
    thread: Option<JoinHandle<Option<Stopped>>>,
}

/// A runner that could not be started, with the context that it was to drive.
#[derive(thiserror::Error)]
#[error("{source}")]
#[non_exhaustive]
pub struct StartError {
    /// It is never locked: the lock makes the error `Sync`, as crates that collect errors require.
    context: Box<Mutex<Context>>,
    /// Why.
    pub source: Error,
}

impl StartError {
    /// The context, unchanged.
    pub fn into_context(self) -> Context {
        self.context.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.source.fmt(f)
    }
}

impl From<StartError> for Error {
    fn from(refused: StartError) -> Error {
        refused.source
    }
}

/// The result of a stopped [`Runner`].
#[non_exhaustive]
pub struct Stopped {
    /// The context with its objects. Completions that did not fit into a handle's ring are in their queues.
    pub context: Context,
    /// The error that ended the runner before `stop`, if any.
    pub error: Option<Error>,
}

impl Runner {
    /// Moves `context` to a new thread and drives it there.
    ///
    /// # Errors
    /// [`StartError`] with [`Error::Invalid`] for a core that does not exist, or [`Error::Thread`].
    pub fn start(context: Context, config: &RunnerConfig) -> Result<Runner, StartError> {
        let RunnerConfig { idle, core } = *config;
        let waker = context.waker();
        let (driver, interface) = (context.capabilities().driver, context.capabilities().interface.clone());
        let how_it_waits = match (idle.may_block(), waker.is_some()) {
            (false, _) => "never blocks",
            (true, true) => "sleeps until a frame, a command or a timer",
            (true, false) => "this driver can't be woken: the runner checks for commands every millisecond",
        };
        info!(driver, interface, ?idle, ?core, "runner: {how_it_waits}");
        let state = Arc::new(RunnerState::new(idle, waker));
        let (pinned, outcome) = sync_channel(1);
        let (handover, seat) = sync_channel::<Context>(1);
        let state_of_thread = state.clone();
        let body = move || {
            // Nothing else sets it.
            let _ = state_of_thread.thread.set(thread::current().id());
            // The receiver is missing only if `start` itself has ended.
            let _ = pinned.send(core.map_or(Ok(()), pin_to_core));
            // The thread is already on its core.
            let context = seat.recv().ok()?;
            let mut turns = Turns::new(context, idle, state_of_thread);
            // After a panic the context is only dropped.
            let ran = catch_unwind(AssertUnwindSafe(|| turns.run()));
            let reason = match &ran {
                Ok(Ok(())) => "it was stopped".to_owned(),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "its thread panicked, in a closure that was called on it".to_owned(),
            };
            if !matches!(ran, Ok(Ok(()))) {
                warn!(interface, "the runner ends: {reason}");
            }
            let context = turns.end(&reason);
            match ran {
                Ok(ran) => Some(Stopped { context, error: ran.err() }),
                Err(panic) => {
                    drop(context);
                    resume_unwind(panic)
                }
            }
        };
        let started = thread::Builder::new().name("ferroce-runner".into()).spawn(body).map_err(Error::Thread);
        // A thread that sends nothing has panicked; `stop` reports it.
        let started = started.and_then(|thread| outcome.recv().unwrap_or(Ok(())).map(|()| thread));
        match started {
            Ok(thread) => {
                // It waits for nothing else.
                let _ = handover.send(context);
                Ok(Runner { state, thread: Some(thread) })
            }
            Err(source) => Err(StartError { context: Box::new(Mutex::new(context)), source }),
        }
    }

    /// A handle for one thread.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a ring that is empty or too large, [`Error::RunnerEnded`].
    pub fn handle(&self, config: &HandleConfig) -> Result<RunnerHandle, Error> {
        self.state.handle(config)
    }

    /// Ends the thread after it has executed the commands posted before, and returns the context. The handles are notified, and
    /// get the deliveries that did not fit and the commands posted too late ([`RunnerHandle`]).
    ///
    /// # Panics
    /// With the panic of a closure of [`call`](RunnerHandle::call), if one panicked: that ended the thread and dropped the
    /// context. Also in a closure on the runner's thread: there the runner may only be dropped, which ends it and its context
    /// after the closure.
    pub fn stop(mut self) -> Stopped {
        assert!(
            !self.state.is_own_thread(),
            "Runner::stop on the runner's own thread can't wait for the thread's end: drop it there"
        );
        match self.join() {
            Some(Ok(Some(stopped))) => stopped,
            Some(Err(panic)) => resume_unwind(panic),
            Some(Ok(None)) | None => {
                unreachable!("the thread has the context, and only this and drop take it")
            }
        }
    }

    fn join(&mut self) -> Option<thread::Result<Option<Stopped>>> {
        let thread = self.thread.take()?;
        self.state.sleep.stop(|| self.state.wake());
        // Its own thread can't wait for its end, and the context is not needed.
        if self.state.is_own_thread() { None } else { Some(thread.join()) }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        // The thread itself has reported a panic.
        let _ = self.join();
    }
}

/// The size of the largest ring.
const MAX_RING: u32 = 1 << 20;
/// The longest block of a runner that can't be woken.
const BLIND: Duration = Duration::from_millis(1);
/// The longest block of one that can.
const LONGEST: Duration = Duration::from_secs(3600);

/// The state shared by the runner's thread and the others.
struct RunnerState {
    may_block: bool,
    waker: Option<Waker>,
    sleep: Sleep,
    end: End,
    arrivals: Mutex<Vec<Client>>,
    claims: Claims,
    /// The runner's thread, from its beginning.
    thread: OnceLock<ThreadId>,
}

impl RunnerState {
    fn new(idle: Idle, waker: Option<Waker>) -> RunnerState {
        RunnerState {
            may_block: idle.may_block(),
            waker,
            sleep: Sleep::new(),
            end: End::new(),
            arrivals: Mutex::default(),
            claims: Claims::default(),
            thread: OnceLock::new(),
        }
    }

    fn handle(self: &Arc<Self>, config: &HandleConfig) -> Result<RunnerHandle, Error> {
        let HandleConfig { commands, deliveries, idle } = *config;
        for (ring, size) in [("commands", commands), ("deliveries", deliveries)] {
            if !(1..=MAX_RING).contains(&size) {
                return Err(Error::invalid(ring, size, format!("1 to {MAX_RING}")));
            }
        }
        let (to_runner, from_handle) = RingBuffer::new(commands as usize);
        let (to_handle, from_runner) = RingBuffer::new(deliveries as usize);
        let (last, from_last) = sync_channel(1);
        let desk = Arc::new(Desk::new());
        let mut arrivals = lock(&self.arrivals);
        // A runner that ends after this finds the client and the desk in the lists.
        self.check()?;
        self.end.join(desk.clone());
        arrivals.push(Client::new(from_handle, to_handle, desk.clone(), last));
        drop(arrivals);
        self.tell_news();
        Ok(RunnerHandle::new(to_runner, from_runner, desk, self.clone(), idle, from_last))
    }

    /// A ring has an entry, or room again: wakes the runner if it sleeps.
    fn nudge(&self) {
        if !self.may_block {
            return;
        }
        self.sleep.nudge(|| self.wake());
    }

    fn tell_news(&self) {
        self.sleep.tell_news(|| self.wake());
    }

    /// Ends the runner's wait.
    fn wake(&self) {
        if let Some(waker) = &self.waker {
            waker.wake_by_ref();
        }
    }

    fn check(&self) -> Result<(), Error> {
        match self.end.reason() {
            None => Ok(()),
            Some(reason) => Err(Error::RunnerEnded { reason: reason.clone() }),
        }
    }

    /// A verb that waits for the runner would wait for itself on the runner's thread.
    fn check_thread(&self, verb: &'static str) -> Result<(), Error> {
        if self.is_own_thread() { Err(Error::OwnThread { verb }) } else { Ok(()) }
    }

    fn is_own_thread(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }
}

/// The loop of the runner's thread.
struct Turns {
    context: Context,
    clients: Vec<Client>,
    state: Arc<RunnerState>,
    clock: Clock,
    idler: Idler,
    /// The latest changes seen.
    seen: u32,
}

impl Turns {
    fn new(context: Context, idle: Idle, state: Arc<RunnerState>) -> Turns {
        let (clock, idler) = (Clock::start(), Idler::new(idle));
        Turns { context, clients: Vec::new(), state, clock, idler, seen: 0 }
    }

    fn run(&mut self) -> Result<(), Error> {
        while !self.is_told_to_stop() {
            if self.turn()? > 0 {
                self.idler.reset();
            } else if self.idler.rest() {
                self.block()?;
            }
        }
        self.finish();
        Ok(())
    }

    fn is_told_to_stop(&mut self) -> bool {
        let news = self.state.sleep.news();
        if news == self.seen {
            return false;
        }
        self.seen = news;
        self.take_news();
        self.state.sleep.is_stopping()
    }

    /// Commands, frames and timers, completions. Returns their total number.
    fn turn(&mut self) -> Result<usize, Error> {
        let Turns { context, clients, state, clock, .. } = self;
        let mut done = 0;
        for client in clients.iter_mut() {
            done += client.take_commands(context);
        }
        // The context may be ahead: before the first turn, or by a poll in a closure.
        done += context.poll(clock.catch_up_with(context.now()))?;
        for client in clients.iter_mut() {
            done += client.deliver(context, &state.claims);
        }
        Ok(done)
    }

    fn take_news(&mut self) {
        self.clients.append(&mut lock(&self.state.arrivals));
        let Turns { context, clients, state, .. } = self;
        clients.retain_mut(|client| {
            if !client.desk.has_left() {
                return true;
            }
            client.take_last_commands(context);
            state.end.forget(&client.desk);
            false
        });
    }

    /// Commands posted before the end. Those of one handle may complete for another.
    fn finish(&mut self) {
        let Turns { context, clients, state, .. } = self;
        clients.iter_mut().for_each(|client| client.take_last_commands(context));
        for client in clients {
            client.deliver(context, &state.claims);
        }
    }

    /// Notifies every handle that the runner has ended. Before that each gets its unfinished commands, so it checks for them
    /// once.
    fn end(self, reason: &str) -> Context {
        let Turns { mut context, clients, state, .. } = self;
        clients.into_iter().for_each(Client::leave);
        // Handles created too late to be registered; there are none after them.
        let mut arrivals = lock(&state.arrivals);
        arrivals.drain(..).for_each(Client::leave);
        state.end.set(reason);
        drop(arrivals);
        state.end.tell();
        context.wake_channels();
        context
    }

    fn block(&mut self) -> Result<(), Error> {
        let Turns { context, clients, state, clock, seen, .. } = self;
        clients.iter().for_each(Client::announce_rest);
        let block = || {
            let longest = if state.waker.is_some() { LONGEST } else { BLIND };
            let quiet = context.quiet_for(clock.now());
            context.wait(quiet.map_or(longest, |time| time.min(longest)))
        };
        let slept = state.sleep.sleep(*seen, || clients.iter().all(Client::may_rest), block);
        clients.iter().for_each(Client::end_rest);
        slept.unwrap_or(Ok(()))
    }
}

#[cfg(test)]
mod tests;
