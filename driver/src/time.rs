use std::ops::{Add, Sub};
use std::time::{Duration, Instant};

/// A point in time: nanoseconds since an arbitrary start. The engine has no clock of its own;
/// this comes in once per poll, from a [`Clock`] or from a simulation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Nanos(pub u64);

impl Nanos {
    /// The start of time.
    pub const ZERO: Nanos = Nanos(0);
    /// A time that never comes.
    pub const NEVER: Nanos = Nanos(u64::MAX);

    /// The time from `earlier` to `self`, zero if `earlier` is later.
    pub fn since(self, earlier: Nanos) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Duration> for Nanos {
    type Output = Nanos;
    fn add(self, rhs: Duration) -> Nanos {
        Nanos(self.0.saturating_add(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub<Duration> for Nanos {
    type Output = Nanos;
    fn sub(self, rhs: Duration) -> Nanos {
        Nanos(self.0.saturating_sub(u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX)))
    }
}

/// The machine's monotonic clock, as [`Nanos`] since the clock was made.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
}

impl Clock {
    /// A clock that reads 1 s now, so that times shortly before its start can be expressed.
    pub fn start() -> Clock {
        Clock { start: Instant::now() }
    }

    /// The time now.
    pub fn now(&self) -> Nanos {
        Nanos(1_000_000_000) + self.start.elapsed()
    }
}
