//! The outstanding copies of one device, and the queue pairs that wait to start one.

use std::collections::VecDeque;
use std::sync::Arc;

use ferroce_driver::gpu::{Device, Failed, GpuError, QUEUE_DEPTH, Queue, Staging, Ticket};
use ferroce_driver::{Nanos, Piece};

use super::Purpose;
use crate::verbs::Qp;

/// The queues of one device: gathers don't wait for scatters.
pub(super) struct Copier {
    pub(super) device: Arc<dyn Device>,
    pub(super) gathers: Lane,
    pub(super) scatters: Lane,
}

pub(super) struct Lane {
    pub(super) queue: Box<dyn Queue>,
    /// Copies up to it may be of a queue pair that no longer exists: later copies to the same memory must come after them.
    pub(super) abandoned: Ticket,
    /// Those that are not known to have ended, by ticket.
    pub(super) flights: VecDeque<CopyUnderWay>,
    /// All up to it have ended, and one after it has failed.
    ended: Ticket,
    failed: Option<Failed>,
    /// Queue pairs that found the queue full, in order.
    pub(super) behind: VecDeque<Behind>,
    /// The number of copies that have ended since queue pairs were last notified.
    room: usize,
}

/// A queue pair that waits for room in the queue of a device.
pub(super) struct Behind {
    pub(super) qp: Qp,
    /// It was notified of room. If it is still here in the next poll, it needs none any more.
    pub(super) is_told: bool,
}

pub(super) struct CopyUnderWay {
    pub(super) ticket: Ticket,
    pub(super) qp: Qp,
    pub(super) purpose: Purpose,
    pub(super) number: u64,
    pub(super) chunk: u16,
}

impl Copier {
    /// Opens the queues of a device, to and from this staging; up to `max_qps` queue pairs wait for one.
    pub(super) fn open(
        device: &Arc<dyn Device>,
        staging: &Staging,
        max_qps: usize,
    ) -> Result<Copier, GpuError> {
        let lane = |max_qps: usize| -> Result<Lane, GpuError> {
            Ok(Lane {
                queue: device.queue(staging)?,
                abandoned: Ticket::NONE,
                flights: VecDeque::with_capacity(QUEUE_DEPTH),
                ended: Ticket::NONE,
                failed: None,
                behind: VecDeque::with_capacity(max_qps),
                room: 0,
            })
        };
        // Received data waits in its batches.
        Ok(Copier { device: Arc::clone(device), gathers: lane(max_qps)?, scatters: lane(0)? })
    }

    /// Whether no copy is outstanding.
    pub(super) fn is_idle(&self) -> bool {
        self.gathers.flights.is_empty() && self.scatters.flights.is_empty()
    }
}

impl Lane {
    /// Starts a copy from a device, unless others wait for that.
    pub(super) fn start_gather(
        &mut self,
        now: Nanos,
        qp: Qp,
        pieces: &[Piece<'_>],
        start: usize,
    ) -> Result<Ticket, GpuError> {
        let place = self.behind.iter().position(|behind| behind.qp == qp);
        let is_next = place.map_or(self.behind.is_empty(), |place| self.behind[place].is_told);
        let started = if is_next {
            self.queue.gather(now, pieces, start)
        } else {
            Err(GpuError::Full { copies: self.flights.len() })
        };
        match (&started, place) {
            (Err(GpuError::Full { .. }), Some(place)) => self.behind[place].is_told = false,
            (Err(GpuError::Full { .. }), None) => self.behind.push_back(Behind { qp, is_told: false }),
            (_, Some(place)) => drop(self.behind.remove(place)),
            (_, None) => {}
        }
        started
    }

    /// The next waiting queue pair, if a copy has ended, or none is outstanding. It must be notified.
    pub(super) fn next_behind(&mut self) -> Option<Qp> {
        let next = self.behind.iter_mut().find(|behind| !behind.is_told);
        let Some(next) = next.filter(|_| self.room > 0 || self.flights.is_empty()) else {
            self.room = 0;
            return None;
        };
        self.room = self.room.saturating_sub(1);
        next.is_told = true;
        Some(next.qp)
    }

    /// The oldest copy, if it has ended by `now`, and its error, if it has failed.
    pub(super) fn next_ended(&mut self, now: Nanos) -> Option<(CopyUnderWay, Option<GpuError>)> {
        let oldest = self.flights.front()?.ticket;
        if self.ended < oldest && self.failed.is_none() {
            match self.queue.done(now) {
                Ok(done) => self.ended = done,
                Err(failed) => {
                    // All before it have succeeded.
                    self.ended = Ticket(failed.ticket.0 - 1);
                    self.failed = Some(failed);
                }
            }
        }
        // A failed one may never have been submitted.
        let failed = self.failed.take_if(|failed| failed.ticket <= oldest);
        let failure = failed.filter(|failed| failed.ticket == oldest).map(|failed| failed.source);
        if failure.is_none() && self.ended < oldest {
            return None;
        }
        self.room += 1;
        Some((self.flights.pop_front()?, failure))
    }
}
