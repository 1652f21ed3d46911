//! How long a context has nothing to do, and waiting until it has: by a call, or by its file descriptor.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::Nanos;
#[cfg(doc)]
use ferroce_driver::PacketDriver;

use super::Context;
use crate::backend::dispatch;
use crate::verbs::Error;

impl Context {
    /// When [`poll`](Context::poll) has something to do even if no frame arrives: when the next timer is due, or at once if an
    /// ACK is delayed for requests of the application.
    pub fn next_timeout(&self) -> Option<Nanos> {
        dispatch!(&self.backend, next_timeout())
    }

    /// How long from `now` [`poll`](Context::poll) has nothing to do unless a frame arrives or a verb is called; `None` is for
    /// ever.
    pub fn quiet_for(&self, now: Nanos) -> Option<Duration> {
        dispatch!(&self.backend, quiet_for(now))
    }

    /// Blocks until a frame may have arrived, a timer may be due, or `timeout` has passed; not at all if an ACK waits for the
    /// next poll.
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone.
    pub fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        dispatch!(&mut self.backend, wait(timeout))
    }

    /// Whether completions or events were added, or events taken, since the last call.
    pub(crate) fn take_news(&mut self) -> bool {
        dispatch!(&mut self.backend, take_news())
    }

    /// Whether there are completions that were not polled.
    pub(crate) fn has_completions(&self) -> bool {
        dispatch!(&self.backend, has_completions())
    }

    /// The driver's [`waker`](PacketDriver::waker), if it has one, with which another thread ends [`wait`](Context::wait) or a
    /// wait for the context's file descriptor.
    pub fn waker(&self) -> Option<Waker> {
        dispatch!(&self.backend, waker())
    }

    /// Prepares the context for a wait by its file descriptor, with epoll,
    /// [`poll`](https://man7.org/linux/man-pages/man2/poll.2.html) or an asynchronous runtime. Returns whether to wait: `true`
    /// arms the descriptor, `false` means that there is something to do, so [`poll`](Context::poll) again first.
    ///
    /// **Call it after the last verb.** A work request that is posted after this call does not make the descriptor readable,
    /// and is sent only by the next [`poll`](Context::poll). So after posting, poll before waiting.
    ///
    /// The descriptor ([`AsFd`]) becomes readable when a frame may have arrived, the [`waker`](Context::waker) was used, or
    /// something in the context is due, and stays so until the next [`poll`](Context::poll). When this returns `true` it was not
    /// readable, so edge-triggered waits (such as tokio's `AsyncFd`) lose nothing. Completions and events that the application
    /// has not taken do not make it readable: take them first.
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
    ///         poll(&mut [PollFd::new(&context.as_fd(), PollFlags::IN)], None)?; // with other descriptors
    ///     }
    /// }
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Driver`] when the port is gone, and with [`Unsupported`](ferroce_driver::Error::Unsupported) for a driver without
    /// a descriptor (`sim`, whose time is virtual).
    #[must_use = "`false` means: do not wait, poll again"]
    pub fn prepare_wait(&mut self, now: Nanos) -> Result<bool, Error> {
        dispatch!(&mut self.backend, prepare_wait(now))
    }
}

/// The descriptor to wait for after [`prepare_wait`](Context::prepare_wait). Only wait for it: do not read from it.
impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        dispatch!(&self.backend, descriptor())
    }
}

impl AsRawFd for Context {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
