//! The progress of a long measurement, as a line from time to time.

use std::time::Duration;

use ferroce::Nanos;

use crate::output::note;

/// Who measures for a while says so at least this often.
pub(crate) const SELDOM: Duration = Duration::from_secs(5);
/// For who asked to measure for some seconds.
pub(crate) const EACH_SECOND: Duration = Duration::from_secs(1);

/// What was told, and when.
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

    /// Begins anew, with so many messages that do not count.
    pub(crate) fn restart(&mut self, now: Nanos, messages: u64) {
        *self = Progress { messages, ..Progress::start(self.interval, now) };
    }

    /// Says, if it is time, at what rate messages of `size` bytes have come or gone since the last line. `messages` is
    /// how many there were in all.
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
