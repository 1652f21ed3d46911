//! Submitted work by ticket, and the events that signal its end.

use std::collections::VecDeque;

use arrayvec::ArrayVec;

use super::Cuda;
use super::context::{Current, Event, Stream};
use crate::gpu::{Failed, GpuError, MAX_PIECES, QUEUE_DEPTH, Span, Ticket};

/// The outstanding work, oldest first.
#[derive(Debug)]
pub(super) struct UnderWay {
    commands: VecDeque<Commands>,
    /// Unused events. There are `QUEUE_DEPTH` in all.
    events: Vec<Event>,
    last: Ticket,
}

/// The commands submitted to one stream under one ticket.
#[derive(Debug)]
pub(super) struct Commands {
    pub(super) ticket: Ticket,
    /// Completes when they have ended.
    pub(super) event: Event,
    /// Whether they copy to the host.
    pub(super) is_gather: bool,
    /// The error of a refused call.
    failed: Option<GpuError>,
    /// Kept until the commands have ended.
    _spans: ArrayVec<Span, MAX_PIECES>,
}

impl UnderWay {
    pub(super) fn new(cuda: &Cuda) -> Result<UnderWay, GpuError> {
        let events: Result<Vec<Event>, GpuError> =
            (0..QUEUE_DEPTH).map(|_| Event::new(&cuda.context)).collect();
        Ok(UnderWay { commands: VecDeque::with_capacity(QUEUE_DEPTH), events: events?, last: Ticket::NONE })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// The newest outstanding commands for which `holds` returns true.
    pub(super) fn newest(&self, holds: impl Fn(&Commands) -> bool) -> Option<&Commands> {
        self.commands.iter().rev().find(|commands| holds(commands))
    }

    /// Checks that one more may be submitted.
    pub(super) fn check_room(&self) -> Result<(), GpuError> {
        match self.events.is_empty() {
            false => Ok(()),
            true => Err(GpuError::Full { copies: self.commands.len() }),
        }
    }

    /// Records the commands submitted to the stream, all of them or those before the call that failed.
    ///
    /// # Errors
    /// As [`check_room`](UnderWay::check_room), which is to be called first.
    pub(super) fn submitted(
        &mut self,
        (current, stream): (&Current<'_>, &Stream),
        is_gather: bool,
        result: Result<(), GpuError>,
        spans: ArrayVec<Span, MAX_PIECES>,
    ) -> Result<Ticket, GpuError> {
        let Some(event) = self.events.pop() else {
            // Spans must not be released earlier.
            stream.end_at_last();
            return Err(GpuError::Full { copies: self.commands.len() });
        };
        // SAFETY: an event and a stream of this context.
        let recorded =
            current.call("cuEventRecord", |cuda| unsafe { (cuda.record_event)(event.raw(), stream.raw()) });
        if recorded.is_err() {
            // The event was not recorded and says nothing about the commands, so they are waited for.
            stream.end_at_last();
        }
        let ticket = self.last.next();
        let failed = result.and(recorded).err();
        self.last = ticket;
        self.commands.push_back(Commands { ticket, event, is_gather, failed, _spans: spans });
        Ok(ticket)
    }

    /// The ticket up to which all has completed. If the device is gone, the query of each event fails.
    pub(super) fn done(&mut self, cuda: &Cuda, streams: &[&Stream]) -> Result<Ticket, Failed> {
        while let Some(oldest) = self.commands.front() {
            let has_come = cuda.context.enter().and_then(|current| current.has_come(&oldest.event));
            if let Ok(false) = has_come {
                return Ok(Ticket(oldest.ticket.0 - 1));
            }
            if has_come.is_err() {
                // The error does not tell whether the commands have ended, and their memory is released now, so the streams
                // are waited for.
                streams.iter().for_each(|stream| stream.end_at_last());
            }
            let Some(Commands { ticket, event, failed, .. }) = self.commands.pop_front() else { break };
            self.events.push(event);
            if let Some(source) = failed.or(has_come.err()) {
                return Err(Failed::new(ticket, source));
            }
        }
        Ok(self.last)
    }
}
