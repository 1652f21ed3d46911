//! The transfer time of a cache line from one core to another.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Builder};
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// The transfer time of a cache line from one core to another, one way.
///
/// A virtual machine can have two states. Every access to data shared by two cores takes 2 to 10 times as long in one
/// as in the other, and the state may change within seconds. No other indicator distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineTime {
    /// The two cores.
    pub cores: [usize; 2],
    /// Nanoseconds one way: the median over short series.
    pub nanos: u32,
}

impl LineTime {
    /// The time above which the machine is in its slow state. The two states of the machine used for the measurements
    /// have 110 to 120 ns and 550 ns. The limit is more than twice the former and about half the latter.
    pub const SLOW_NANOS: u32 = 300;

    /// Measures between the first two cores that the calling thread may use. `None` if it may use only one.
    pub fn measure() -> Option<LineTime> {
        LineTime::between(first_two()?)
    }

    /// Measures between these two cores, which takes 1 ms, or a few in the slow state. `None` if they are equal, or if
    /// this process may not use them.
    pub fn between(cores: [usize; 2]) -> Option<LineTime> {
        if cores[0] == cores[1] {
            return None;
        }
        let nanos = median(bounce(cores)?)?;
        Some(LineTime { cores, nanos })
    }

    /// Whether the machine is in its slow state.
    pub fn is_slow(&self) -> bool {
        self.nanos > LineTime::SLOW_NANOS
    }
}

impl fmt::Display for LineTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let LineTime { cores: [a, b], nanos } = self;
        let state = if self.is_slow() { " (the slow state)" } else { "" };
        write!(f, "a cache line goes between cores {a} and {b} in {:.2} µs{state}", f64::from(*nanos) / 1e3)
    }
}

/// A word on separate cache lines: processors prefetch lines in pairs.
#[repr(align(128))]
struct Line(AtomicU64);

/// The answering thread has not started yet.
const ABSENT: u64 = u64::MAX - 1;
/// The answering thread shall end, or could not be pinned.
const STOP: u64 = u64::MAX;
/// The number of timed series. A thread that is preempted for a time slice spoils one of them.
const STRETCHES: usize = 32;
/// The number of round trips in a series.
const ROUND_TRIPS: u64 = 128;

/// Nanoseconds one way, for each series.
fn bounce([near, far]: [usize; 2]) -> Option<Vec<u32>> {
    // The calling thread is one of the two, and spins. If it slept, it might wake up on the core of another spinning
    // thread of its program, and wait there for a time slice: milliseconds of its next measurement.
    let _pinned = Pinned::to(near)?;
    let line = &Line(AtomicU64::new(ABSENT));
    thread::scope(|scope| {
        let answer = move || match Pinned::to(far) {
            Some(_pinned) => answer(line),
            None => line.0.store(STOP, Ordering::Release),
        };
        Builder::new().spawn_scoped(scope, answer).ok()?;
        while line.0.load(Ordering::Acquire) == ABSENT {
            thread::yield_now();
        }
        let stretches = (line.0.load(Ordering::Acquire) != STOP).then(|| ask(line));
        line.0.store(STOP, Ordering::Release);
        stretches
    })
}

/// Writes odd numbers, and waits for the even number after each. The loops have no pause instruction, which on some
/// processors takes longer than the measured time.
fn ask(line: &Line) -> Vec<u32> {
    let mut number = 0;
    let mut stretch = || {
        let start = Instant::now();
        for _ in 0..ROUND_TRIPS {
            line.0.store(number + 1, Ordering::Release);
            number += 2;
            while line.0.load(Ordering::Acquire) != number {}
        }
        (start.elapsed().as_nanos() as u64 / (2 * ROUND_TRIPS)) as u32
    };
    // The cores wake up in the first series.
    stretch();
    (0..STRETCHES).map(|_| stretch()).collect()
}

/// Replaces each odd number by the next even one.
fn answer(line: &Line) {
    line.0.store(0, Ordering::Release);
    loop {
        match line.0.load(Ordering::Acquire) {
            STOP => return,
            number if number % 2 == 1 => line.0.store(number + 1, Ordering::Release),
            _ => {}
        }
    }
}

fn median(mut stretches: Vec<u32>) -> Option<u32> {
    stretches.sort_unstable();
    stretches.get(stretches.len() / 2).copied()
}

/// The first two cores that this thread may use.
fn first_two() -> Option<[usize; 2]> {
    let allowed = sched_getaffinity(None).ok()?;
    let mut cores = (0..CpuSet::MAX_CPU).filter(|core| allowed.is_set(*core));
    Some([cores.next()?, cores.next()?])
}

/// Pins this thread to a core until it is dropped.
struct Pinned {
    /// The original cores of the thread.
    before: CpuSet,
}

impl Pinned {
    /// `None` if it may not run there.
    fn to(core: usize) -> Option<Pinned> {
        let before = sched_getaffinity(None).ok()?;
        let mut only = CpuSet::new();
        if core >= CpuSet::MAX_CPU {
            return None;
        }
        only.set(core);
        sched_setaffinity(None, &only).ok()?;
        Some(Pinned { before })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // The kernel has reported these cores. It refuses them only if all were removed since.
        let _ = sched_setaffinity(None, &self.before);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(nanos: u32) -> LineTime {
        LineTime { cores: [0, 1], nanos }
    }

    #[test]
    fn the_threshold_is_between_the_two_states() {
        assert_eq!(
            [110, 120, 300, 301, 550].map(|nanos| of(nanos).is_slow()),
            [false, false, false, true, true]
        );
        assert_eq!(of(118).to_string(), "a cache line goes between cores 0 and 1 in 0.12 µs");
        assert_eq!(
            of(553).to_string(),
            "a cache line goes between cores 0 and 1 in 0.55 µs (the slow state)"
        );
    }

    /// A preemption takes milliseconds of one series.
    #[test]
    fn one_long_series_does_not_count() {
        assert_eq!(median(vec![115, 4_000_000, 112, 118, 116]), Some(116));
        assert_eq!(median(Vec::new()), None);
    }

    #[test]
    fn one_core_has_no_time() {
        assert_eq!(LineTime::between([0, 0]), None);
        assert_eq!(LineTime::between([0, CpuSet::MAX_CPU]), None);
        assert_eq!(LineTime::between([CpuSet::MAX_CPU, 0]), None);
        let last = first_two().map_or(0, |cores| cores[1]);
        let _pinned = Pinned::to(last).unwrap();
        assert_eq!(LineTime::measure(), None);
    }

    #[test]
    fn two_cores_have_a_time_and_the_caller_keeps_its_cores() {
        let before = sched_getaffinity(None).unwrap();
        let Some(cores) = first_two() else { return println!("skipped: one core") };
        let time = LineTime::measure().unwrap();
        assert_eq!(time.cores, cores);
        assert!(time.nanos > 0, "{time}");
        assert_eq!(sched_getaffinity(None).unwrap(), before);
    }
}
