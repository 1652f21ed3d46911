//! The progress of a long measurement, as a line from time to time.

use std::time::Duration;

use ferroce::Nanos;

use crate::output::note;

/// The interval of progress lines.
pub(crate) const SELDOM: Duration = Duration::from_secs(5);
/// The interval if the measurement has a duration in seconds.
pub(crate) const EACH_SECOND: Duration = Duration::from_secs(1);

/// The last line and its time.
pub(crate) struct Progress {
    interval: Duration,
    started: Nanos,
    told: Nanos,
    messages: u64,
}

impl Progress {
    pub(crate) fn start(interval: Duration, now: Nanos) -> Progress {
        Progress { interval, started: now, told: now, messages: 0 }
    }

    /// Restarts, with a number of messages that do not count.
    pub(crate) fn restart(&mut self, now: Nanos, messages: u64) {
        *self = Progress { messages, ..Progress::start(self.interval, now) };
    }

    /// If a line is due, prints the rate of messages of `size` bytes since the last line. `messages` is the total so
    /// far.
    pub(crate) fn tell(&mut self, now: Nanos, messages: u64, size: u32) {
        let since = now.since(self.told);
        if since < self.interval {
            return;
        }
        let moved = messages.saturating_sub(self.messages);
        let gigabits = moved as f64 * f64::from(size) * 8.0 / since.as_secs_f64() / 1e9;
        note!("{:>7.1} s {gigabits:>9.3} Gb/s {moved:>10} messages", now.since(self.started).as_secs_f64());
        (self.told, self.messages) = (now, messages);
    }
}
