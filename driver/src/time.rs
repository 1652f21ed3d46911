use std::ops::{Add, Sub};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

/// A point in time: nanoseconds since an arbitrary start. The engine has no clock; each poll passes the time, of a [`Clock`] or
/// of a simulation.
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

/// The machine's monotonic clock, as [`Nanos`], for a loop that reads it at every turn. All clocks of a process show the same
/// time, whenever they were started, so that several loops can use one context in turn.
///
/// If the kernel's clock source is the processor's counter (x86-64, `tsc`), the clock reads the counter itself, which takes less
/// than half of the time, and is synchronised with the kernel's clock repeatedly.
#[derive(Debug)]
pub struct Clock {
    /// The start of time.
    start: Instant,
    /// Its lead over other clocks.
    ahead: Duration,
    counter: Option<Counter>,
}

/// The start of time in this process, and whether the processor's counter is used.
static START: LazyLock<(Instant, bool)> = LazyLock::new(|| (Instant::now(), counts_time()));

impl Clock {
    /// A clock. The first of a process reads 1 s now, so that times shortly before its start can be expressed.
    pub fn start() -> Clock {
        let (start, counts) = *START;
        Clock { start, ahead: Duration::ZERO, counter: counts.then(Counter::default) }
    }

    /// The time now, but never earlier than `time`, from another clock: this clock continues from there.
    #[inline]
    pub fn catch_up_with(&mut self, time: Nanos) -> Nanos {
        let now = self.now();
        if now < time {
            self.go_ahead(time, time.since(now));
        }
        now.max(time)
    }

    #[cold]
    fn go_ahead(&mut self, to: Nanos, by: Duration) {
        self.ahead += by;
        // The count belongs to the time before. The kernel's clock may be slightly behind it.
        self.counter = self.counter.is_some().then(|| Counter { last: to, ..Counter::default() });
    }

    /// The time now.
    #[inline]
    pub fn now(&mut self) -> Nanos {
        let Clock { start, ahead, counter } = self;
        let read = || Nanos(1_000_000_000) + start.elapsed() + *ahead;
        match counter {
            Some(counter) => counter.time(count, read),
            None => read(),
        }
    }
}

/// Counts of [`Counter::time`] between two synchronisations: about a millisecond.
const SET_AFTER: u64 = 1 << 21;

/// The most counts for reading the kernel's clock, unless the thread loses its core meanwhile.
const AT_ONCE: u64 = 1 << 12;

/// The time by a counter whose rate is measured.
#[derive(Debug, Default)]
struct Counter {
    /// The count and the time of the last synchronisation.
    set: Option<(u64, Nanos)>,
    /// Nanoseconds per count, in units of 2⁻³²; 0 until it is known.
    rate: u64,
    /// The last time returned.
    last: Nanos,
}

impl Counter {
    /// The time from `count`, or from `clock` if necessary. Never earlier than the last one.
    #[inline]
    fn time(&mut self, mut count: impl FnMut() -> u64, clock: impl FnOnce() -> Nanos) -> Nanos {
        let now = count();
        let time = match self.set {
            Some((at, time)) if now.wrapping_sub(at) < SET_AFTER && self.rate != 0 => {
                // Less than 2²¹ counts, and less than 4 ns each.
                Nanos(time.0.saturating_add((now.wrapping_sub(at) * self.rate) >> 32))
            }
            _ => {
                let time = clock();
                // With a pause in between, the time of the reading is unknown.
                if count().wrapping_sub(now) < AT_ONCE {
                    self.set(now, time);
                }
                time
            }
        };
        self.last = self.last.max(time);
        self.last
    }

    #[cold]
    fn set(&mut self, count: u64, time: Nanos) {
        match self.set {
            // Too early to determine the rate.
            Some((at, _)) if count.wrapping_sub(at) < SET_AFTER => {}
            Some((at, before)) => {
                let counts = u128::from(count.wrapping_sub(at));
                self.rate = ((time.since(before).as_nanos() << 32) / counts).min(SLOWEST) as u64;
                self.set = Some((count, time));
            }
            None => self.set = Some((count, time)),
        }
    }
}

/// The rate of a counter of 250 MHz, slower than any.
const SLOWEST: u128 = 4 << 32;

/// Whether the kernel's clock source is the processor's counter: then it is the same on all cores, and always runs.
fn counts_time() -> bool {
    const SOURCE: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64") && std::fs::read_to_string(SOURCE).is_ok_and(|name| name.trim() == "tsc")
}

#[inline]
fn count() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: reads a register that every x86-64 processor has, and touches nothing else; where a
    // process may not read it, the kernel's own clock, which does so in the process, would not work.
    unsafe {
        std::arch::x86_64::_rdtsc()
    }
    #[cfg(not(target_arch = "x86_64"))]
    0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_agrees_with_the_kernels() {
        let mut clock = Clock::start();
        let start = Instant::now();
        let (first, mut last) = (clock.now(), Nanos::ZERO);
        while start.elapsed() < Duration::from_millis(50) {
            let now = clock.now();
            assert!(now >= last);
            last = now;
        }
        let (passed, expected) = (clock.now().since(first), start.elapsed());
        assert!(passed.abs_diff(expected) < Duration::from_millis(2), "{passed:?} of {expected:?}");
    }

    #[test]
    fn clocks_agree_whenever_they_were_started() {
        let mut old = Clock::start();
        std::thread::sleep(Duration::from_millis(20));
        let mut young = Clock::start();
        let [first, second, third] = [old.now(), young.now(), old.now()];
        let apart = first.since(second) + second.since(third);
        assert!(apart < Duration::from_micros(100), "{first:?} {second:?} {third:?}");
    }

    #[test]
    fn a_clock_continues_from_a_given_time() {
        let mut clock = Clock::start();
        let before = clock.now();
        clock.catch_up_with(Nanos(5));
        assert!(clock.now().since(before) < Duration::from_secs(1), "a time that is over");
        for hours in [1, 2] {
            let later = before + Duration::from_secs(hours * 3600);
            clock.catch_up_with(later);
            let (first, start) = (clock.now(), Instant::now());
            assert!(first >= later && first.since(later) < Duration::from_secs(1), "{first:?}");
            std::thread::sleep(Duration::from_millis(20));
            let (passed, expected) = (clock.now().since(first), start.elapsed());
            assert!(passed.abs_diff(expected) < Duration::from_millis(2), "{passed:?} of {expected:?}");
        }
        clock.catch_up_with(Nanos::NEVER);
        assert_eq!(clock.now(), Nanos::NEVER);
    }

    #[test]
    fn a_counter_is_read_between_synchronisations_and_never_decreases() {
        let mut counter = Counter::default();
        // 2 GHz; the clock is read at the start, until the rate is known, and every 2^21 counts.
        let time = |counter: &mut Counter, count: u64, told: Option<u64>| {
            counter.time(|| count, || Nanos(told.expect("no need to ask"))).0
        };
        assert_eq!(time(&mut counter, 1000, Some(500)), 500);
        assert_eq!(time(&mut counter, 3000, Some(1500)), 1500);
        let next = 1000 + SET_AFTER;
        assert_eq!(time(&mut counter, next, Some(500 + SET_AFTER / 2)), 500 + SET_AFTER / 2);
        assert_eq!(time(&mut counter, next + 2000, None), 1500 + SET_AFTER / 2);
        // The kernel's clock is behind the last time returned: this clock stands still until it has caught up.
        let told = time(&mut counter, next + SET_AFTER - 1, None);
        assert_eq!(time(&mut counter, next + SET_AFTER, Some(told - 100)), told);
        assert_eq!(time(&mut counter, next + SET_AFTER + 100, None), told);
        assert!(time(&mut counter, next + SET_AFTER + 1000, None) > told);
        // After a count that goes back, or is far ahead, only the clock is read.
        assert_eq!(time(&mut counter, 5, Some(told + 5000)), told + 5000);
        assert_eq!(time(&mut counter, u64::MAX / 2, Some(u64::MAX / 4)), u64::MAX / 4);
        // A pause while the clock is read: it is read again.
        let mut counter = Counter::default();
        let mut counts = [0, 1 << 20].into_iter();
        assert_eq!(counter.time(|| counts.next().unwrap(), || Nanos(7)), Nanos(7));
        assert!(counter.set.is_none());
    }
}
