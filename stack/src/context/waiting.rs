//! How long a context has nothing to do, and waiting until it has: inside, or by its file descriptor.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::{Capabilities, Nanos, PacketDriver};

use super::Context;
use crate::engine::shared::Shared;
use crate::telemetry::exporter::Exporter;
use crate::verbs::Error;

impl Context {
    /// When [`poll`](Context::poll) has something to do even if no frame comes: when the next timer is
    /// due, or at once if an ACK waits for what the application has to send.
    pub fn next_timeout(&self) -> Option<Nanos> {
        self.engine.next_timeout()
    }

    /// How long from `now` [`poll`](Context::poll) has nothing to do unless a frame comes or a verb is
    /// called; `None` is for ever.
    pub fn quiet_for(&self, now: Nanos) -> Option<Duration> {
        let timer = self.next_timeout();
        let reader = self.exporter.as_ref().map(Exporter::next_look);
        // Frames that the port had no room for; nothing tells when it has.
        let backlog = self.engine.has_backlog().then(|| now + BACKLOG_RETRY);
        [timer, reader, backlog].into_iter().flatten().min().map(|at| at.since(now))
    }

    /// Blocks until a frame may have come, a timer may be due, or for `timeout`; not at all if an ACK waits
    /// for the next poll.
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let Shared { now, scheduler, .. } = &self.engine.shared;
        if !scheduler.awaits_poll() {
            let timer = self.engine.next_timeout().map_or(timeout, |at| at.since(*now));
            self.driver.wait(timeout.min(timer))?;
        }
        Ok(())
    }

    /// What another thread ends [`wait`](Context::wait) with, or a wait for the context's file descriptor: the driver's
    /// [`waker`](PacketDriver::waker), if it has one.
    pub fn waker(&self) -> Option<Waker> {
        self.driver.waker()
    }

    /// Readies the context for a wait by its file descriptor, with epoll, [`poll`](https://man7.org/linux/man-pages/man2/poll.2.html)
    /// or an asynchronous runtime. Returns whether to wait: `true` arms the descriptor, `false` means that there is
    /// something to do, so [`poll`](Context::poll) again first.
    ///
    /// The descriptor ([`AsFd`]) is readable from the moment when a frame may have come, the [`waker`](Context::waker) was
    /// used, or something in the context is due, until the next [`poll`](Context::poll). When this returns `true` it was
    /// not readable, so edge-triggered waits (tokio's `AsyncFd` is one) lose nothing either. Completions and events that
    /// the application has not taken do not make it readable: take them before. What a verb posts after this call leaves
    /// with the next poll, so poll before waiting.
    ///
    /// System calls are made here, and in the first poll after it; a loop that never waits makes none.
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use ferroce::*;
    /// use rustix::event::{PollFd, PollFlags, poll};
    ///
    /// # fn serve(context: &mut Context, cq: Cq) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut clock = Clock::start();
    /// loop {
    ///     context.poll(clock.now())?;
    ///     while let Some(completion) = context.poll_cq(cq)? {
    ///         println!("{completion:?}");
    ///         # return Ok(());
    ///     }
    ///     if context.prepare_wait(clock.now())? {
    ///         poll(&mut [PollFd::new(&context.as_fd(), PollFlags::IN)], None)?; // beside other descriptors
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone, and with [`Unsupported`](ferroce_driver::Error::Unsupported) for a driver
    /// that nothing outside can wait for (`sim`, whose time is virtual).
    #[must_use = "`false` means: do not wait, poll again"]
    pub fn prepare_wait(&mut self, now: Nanos) -> Result<bool, Error> {
        let quiet = self.quiet_for(now);
        if quiet == Some(Duration::ZERO) {
            return Ok(false);
        }
        self.armed = true;
        let port = self.driver.arm()?;
        let armed = self.readiness.arm(port, quiet);
        armed.map_err(|source| self.waiting_failed(source))
    }

    /// Makes the descriptor unreadable, before the poll looks at what made it readable.
    #[cold]
    pub(super) fn end_wait(&mut self) -> Result<(), Error> {
        self.armed = false;
        self.driver.disarm();
        let disarmed = self.readiness.disarm();
        disarmed.map_err(|source| self.waiting_failed(source))
    }

    /// The error of a system call that waiting takes.
    pub(crate) fn waiting_failed(&self, source: io::Error) -> Error {
        waiting_failed(self.driver.capabilities(), source)
    }
}

/// The descriptor to wait for after [`prepare_wait`](Context::prepare_wait). It is only ever waited for: nothing is read
/// from it.
impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }
}

impl AsRawFd for Context {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

/// The error of a system call that waiting takes.
pub(super) fn waiting_failed(capabilities: &Capabilities, source: io::Error) -> Error {
    let interface = capabilities.interface.clone();
    ferroce_driver::Error::Os { what: "waiting by file descriptor", interface, source }.into()
}

/// How soon a port that was full is tried again.
const BACKLOG_RETRY: Duration = Duration::from_micros(50);
