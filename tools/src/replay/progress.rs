//! A word on stderr now and then while a replay lasts.

use std::time::{Duration, Instant};

use crate::output::note;

/// When something was said last.
pub(super) struct Progress(Instant);

const INTERVAL: Duration = Duration::from_secs(5);

impl Progress {
    pub(super) fn start() -> Progress {
        Progress(Instant::now())
    }

    /// Says how far it is, at most every few seconds.
    pub(super) fn tell(&mut self, how_far: impl FnOnce() -> String) {
        if self.0.elapsed() >= INTERVAL {
            note!("ferroce replay: {}", how_far());
            self.0 = Instant::now();
        }
    }
}
