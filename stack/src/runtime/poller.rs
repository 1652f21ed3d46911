use std::time::Duration;

use ferroce_driver::{Clock, Nanos};

use crate::Context;
use crate::runtime::idle::{Idle, Idler};
use crate::verbs::Error;

/// The longest block: what the application wants besides frames is noticed within this time.
const LONGEST_BLOCK: Duration = Duration::from_millis(2);

/// Drives a context in the thread of its application, by default so that more contexts than cores get
/// on with each other and an idle one costs next to nothing ([`Idle::Adaptive`]). Its time goes on from what the context
/// was told before. [`manual::threads`](crate::manual::threads) has an example.
///
/// One poller has one time. It may drive several contexts in turn, and then all of them have the time of the one that is
/// furthest ahead. Contexts that were told different times (a simulation's, that of a program's own clock) need a poller
/// each: time that jumps ahead ends the connections and timers of a context.
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

    /// A loop that never gives way: for a core of its own.
    pub fn spinning() -> Poller {
        Poller::idling(Idle::Spin)
    }

    /// A loop that blocks as soon as a poll finds nothing.
    pub fn blocking() -> Poller {
        Poller::idling(Idle::Block)
    }

    /// A loop that does this when a poll finds nothing. It blocks for 2 ms at most, for its thread has
    /// other things to look after; a [`Runner`](crate::Runner), which has not, sleeps as long as
    /// nothing happens.
    pub fn idling(idle: Idle) -> Poller {
        Poller { clock: Clock::start(), idler: Idler::new(idle) }
    }

    /// The time now, as the contexts are told it.
    pub fn now(&mut self) -> Nanos {
        self.clock.now()
    }

    /// One turn of the loop: a poll, and if that has found nothing what the loop does then. It does not block while a
    /// completion is in its queue, nor after a turn in which an event came or one was taken, so several that came together
    /// may be taken one in each turn. Events that nobody takes do not keep the loop awake. Returns how many frames came and
    /// went.
    ///
    /// # Errors
    /// Those of [`Context::poll`].
    pub fn poll(&mut self, context: &mut Context) -> Result<usize, Error> {
        let frames = context.poll(self.clock.catch_up_with(context.now()))?;
        // What a timer or a verb has brought the application wants to see, as what a frame has.
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
