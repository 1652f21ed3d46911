use std::time::Duration;

use ferroce_driver::{Clock, Nanos};

use crate::Context;
use crate::runtime::idle::{Idle, Idler};
use crate::verbs::Error;

/// The longest block: other work of the application's thread waits at most this long.
const LONGEST_BLOCK: Duration = Duration::from_millis(2);

/// Drives a context in the thread of its application. The default, [`Idle::Adaptive`], suits more contexts than cores, and an
/// idle context costs almost nothing. Its time continues from the context's. [`manual::threads`](crate::manual::threads) has an
/// example.
///
/// One poller has one time. It may drive several contexts in turn; all of them then have the time of the one that is furthest
/// ahead. Contexts with different times (of a simulation, of a program's own clock) need one poller each: a jump of time expires
/// the timers of a context and ends its connections.
#[derive(Debug)]
pub struct Poller {
    clock: Clock,
    idler: Idler,
}

impl Default for Poller {
    fn default() -> Poller {
        Poller::new()
    }
}

impl Poller {
    /// A loop that spins, then yields, then blocks.
    pub fn new() -> Poller {
        Poller::idling(Idle::default())
    }

    /// A loop that never yields: for a dedicated core.
    pub fn spinning() -> Poller {
        Poller::idling(Idle::Spin)
    }

    /// A loop that blocks as soon as a poll finds nothing.
    pub fn blocking() -> Poller {
        Poller::idling(Idle::Block)
    }

    /// A loop with this idle setting. It blocks for at most 2 ms, because its thread may have other work; a
    /// [`Runner`](crate::Runner) has none, and sleeps until something happens.
    pub fn idling(idle: Idle) -> Poller {
        Poller { clock: Clock::start(), idler: Idler::new(idle) }
    }

    /// The time now, as passed to the contexts.
    pub fn now(&mut self) -> Nanos {
        self.clock.now()
    }

    /// One turn of the loop: a poll, and if that finds nothing, the idle action. It does not block while a completion is in its
    /// queue, nor after a turn in which an event was raised or taken, so several events may be taken one per turn. Events that
    /// are not taken do not keep the loop awake. Returns the number of frames received and sent.
    ///
    /// # Errors
    /// Those of [`Context::poll`].
    pub fn poll(&mut self, context: &mut Context) -> Result<usize, Error> {
        let frames = context.poll(self.clock.catch_up_with(context.now()))?;
        // The application handles results of timers and verbs too, not only those of frames.
        if context.take_news() || frames > 0 {
            self.idler.reset();
        } else if self.idler.rest() {
            if context.has_completions() {
                self.idler.reset();
                return Ok(frames);
            }
            let quiet = context.quiet_for(self.clock.now());
            context.wait(quiet.map_or(LONGEST_BLOCK, |time| time.min(LONGEST_BLOCK)))?;
        }
        Ok(frames)
    }
}
