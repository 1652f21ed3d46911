use std::time::Duration;

use ferroce_driver::{Clock, Nanos};

use crate::{Context, Error};

/// Polls that find nothing before the loop yields its core, and before it blocks.
const SPINS: u32 = 200;
const YIELDS: u32 = 20;
/// The longest block: what the application wants besides frames is noticed within this time.
const LONGEST_BLOCK: Duration = Duration::from_millis(2);

/// Drives a context: polls while there is work, then spins, then yields, then blocks on the driver,
/// so that more contexts than cores get on with each other and an idle one costs no core.
#[derive(Debug)]
pub struct Poller {
    clock: Clock,
    idle: u32,
    spins: u32,
    yields: u32,
}

impl Default for Poller {
    fn default() -> Poller {
        Poller::new()
    }
}

impl Poller {
    /// A loop that gives way to others as described.
    pub fn new() -> Poller {
        Poller { clock: Clock::start(), idle: 0, spins: SPINS, yields: YIELDS }
    }

    /// A loop that never gives way: for a core of its own.
    pub fn spinning() -> Poller {
        Poller { spins: u32::MAX, ..Poller::new() }
    }

    /// A loop that blocks as soon as a poll finds nothing.
    pub fn blocking() -> Poller {
        Poller { spins: 0, yields: 0, ..Poller::new() }
    }

    /// The time now, as the context is told it.
    pub fn now(&self) -> Nanos {
        self.clock.now()
    }

    /// One turn of the loop. Returns how many frames came and went.
    ///
    /// # Errors
    /// Those of [`Context::poll`].
    pub fn poll(&mut self, context: &mut Context) -> Result<usize, Error> {
        let frames = context.poll(self.clock.now())?;
        if frames > 0 {
            self.idle = 0;
            return Ok(frames);
        }
        self.idle = self.idle.saturating_add(1);
        if self.idle <= self.spins {
            std::hint::spin_loop();
        } else if self.idle <= self.spins.saturating_add(self.yields) {
            std::thread::yield_now();
        } else {
            let due = context.next_timeout().map_or(LONGEST_BLOCK, |at| at.since(self.clock.now()));
            context.wait(due.min(LONGEST_BLOCK))?;
        }
        Ok(0)
    }
}
