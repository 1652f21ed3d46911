//! How long a context is idle, and waiting: inside, or on its file descriptor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::Nanos;

use super::Software;
use crate::engine::cq::CompletionQueue;
use crate::engine::shared::Shared;
use crate::telemetry::exporter::Exporter;
use crate::verbs::Error;

impl Software {
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.engine.next_timeout()
    }

    pub(crate) fn quiet_for(&self, now: Nanos) -> Option<Duration> {
        let now = now.max(self.now());
        let timer = self.next_timeout();
        let reader = self.exporter.as_ref().map(Exporter::next_look);
        // Frames for which the port had no room; nothing signals when it has.
        let backlog = self.engine.has_backlog().then(|| now + BACKLOG_RETRY);
        [timer, reader, backlog].into_iter().flatten().min().map(|at| at.since(now))
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        let Shared { now, scheduler, .. } = &self.engine.shared;
        if !scheduler.awaits_poll() {
            let timer = self.engine.next_timeout().map_or(timeout, |at| at.since(*now));
            self.driver.wait(timeout.min(timer))?;
        }
        Ok(())
    }

    /// Whether completions or events were added since the last call, or events were taken.
    pub(crate) fn take_news(&mut self) -> bool {
        let connections = self.engine.cm_if_used().is_some_and(|(cm, _)| cm.take_news());
        std::mem::take(&mut self.engine.shared.has_news) | connections
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.engine.shared.cqs.iter().any(CompletionQueue::has_completions)
    }

    pub(crate) fn waker(&self) -> Option<Waker> {
        self.driver.waker()
    }

    pub(crate) fn prepare_wait(&mut self, now: Nanos) -> Result<bool, Error> {
        let quiet = self.quiet_for(now);
        if quiet == Some(Duration::ZERO) {
            return Ok(false);
        }
        self.armed = true;
        let port = self.driver.arm()?;
        let armed = self.readiness.arm(port, quiet);
        armed.map_err(|source| self.waiting_failed(source))
    }

    /// Makes the descriptor unreadable, before the poll processes the events.
    #[cold]
    pub(super) fn end_wait(&mut self) -> Result<(), Error> {
        self.armed = false;
        self.driver.disarm();
        let disarmed = self.readiness.disarm();
        disarmed.map_err(|source| self.waiting_failed(source))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }

    pub(crate) fn now(&self) -> Nanos {
        self.engine.shared.now
    }

    fn waiting_failed(&self, source: io::Error) -> Error {
        Error::waiting(&self.driver.capabilities().interface, source)
    }
}

/// The delay until a port that was full is tried again.
const BACKLOG_RETRY: Duration = Duration::from_micros(50);
