//! How long a context is idle, and waiting: inside, or on its file descriptor.

use std::os::fd::{AsFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::Nanos;

use super::Hardware;
use crate::telemetry::exporter::Exporter;
use crate::verbs::{Error, EventSource, Unreachable};

impl Hardware {
    /// A card has its own timers; the limits of connection attempts are here.
    pub(crate) fn next_timeout(&self) -> Option<Nanos> {
        self.next_connection_deadline()
    }

    pub(crate) fn quiet_for(&self, now: Nanos) -> Option<Duration> {
        let now = now.max(self.now);
        let exporter = self.exporter.as_ref().map(Exporter::next_look);
        exporter.into_iter().chain(self.next_connection_deadline()).min().map(|next| next.since(now))
    }

    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        if self.request_events()? {
            let given_up = self.next_connection_deadline().map_or(timeout, |at| at.since(self.now));
            self.waiting.wait(timeout.min(given_up))?;
        }
        self.polls_to_look = 0;
        Ok(())
    }

    /// Requests an event for the next completion of any queue. Returns `false` if there is one already.
    fn request_events(&mut self) -> Result<bool, Error> {
        if self.is_gone {
            return Err(self.gone());
        }
        for place in 0..self.live_cqs.len() {
            let index = self.live_cqs[place];
            if let Some(cq) = self.cqs.at_mut(index) {
                cq.card.request_event(cq.solicited_only)?;
            }
            // Completions before the request raise no event.
            if self.drain(index)? > 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(crate) fn take_news(&mut self) -> bool {
        let connections = self.connections.as_mut().is_some_and(|cm| std::mem::take(&mut cm.events.has_news));
        std::mem::take(&mut self.has_news) | connections
    }

    pub(crate) fn has_completions(&self) -> bool {
        self.live_cqs.iter().any(|index| self.cqs.at(*index).is_some_and(|cq| cq.queue.has_completions()))
    }

    pub(crate) fn waker(&self) -> Option<Waker> {
        Some(self.waiting.waker())
    }

    pub(crate) fn prepare_wait(&mut self, now: Nanos) -> Result<bool, Error> {
        let quiet = self.quiet_for(now);
        if quiet == Some(Duration::ZERO) || !self.request_events()? {
            return Ok(false);
        }
        self.armed = true;
        let armed = self.readiness.arm(self.waiting.arm()?, quiet);
        armed.map_err(|source| Error::waiting(&self.capabilities.interface, source))
    }

    /// Makes the descriptor unreadable, before the poll processes the events.
    #[cold]
    pub(super) fn end_wait(&mut self) -> Result<(), Error> {
        self.armed = false;
        self.waiting.disarm();
        self.polls_to_look = 0;
        let disarmed = self.readiness.disarm();
        disarmed.map_err(|source| Error::waiting(&self.capabilities.interface, source))
    }

    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.readiness.as_fd()
    }

    /// The kernel resolves next hops inside the verbs that need them.
    pub(crate) fn awaits_next_hop(&self, source: EventSource) -> Result<bool, Error> {
        match source {
            EventSource::Qp(qp) if self.qps.get(qp.0).is_none() => Err(Error::invalid_handle("QP", qp.0)),
            EventSource::Ah(ah) => self.ah(ah).map(|_| false),
            _ => Ok(false),
        }
    }

    pub(crate) fn take_unreachable(&mut self, source: EventSource) -> Option<Unreachable> {
        self.events.take_unreachable(source)
    }
}
