//! Pacing of a queue pair: a token bucket of a few frames.

use ferroce_driver::Nanos;

/// Frames that may leave at once after a pause. Together with the frame that overdraws the bucket they are 2 % of 200
/// packets, the period over which a rate must be accurate.
const BURST_FRAMES: u64 = 3;

/// The longest delay of a wake-up, in ns: two ticks of the timer wheel. At high rates that is more than a few frames.
const LATENESS: u64 = 2048;

/// A sender that was due all the time and whose poll was late sends what it has missed: the frames of at most this many ns,
/// or this many frames.
const MISSED: u64 = 1_000_000;
const MISSED_FRAMES: u64 = 16;

/// Bits times nanoseconds per second: the credit of 1 bit/s in 1 ns.
const PER_BYTE: u64 = 8 * 1_000_000_000;

/// A token bucket. Frames may leave while it is not overdrawn, so at most one frame and the burst are ahead of the rate.
///
/// It has no clock, no timer and no rate: the caller passes the time, and the rate of the elapsed time. Rates are in bit/s.
///
/// ```
/// use ferroce::{Nanos, Pacer};
///
/// let mut pacer = Pacer::new(1000);
/// let (mut now, rate, mut sent) = (Nanos(1_000_000), 1_000_000_000, 0);
/// while now < Nanos(2_000_000) {
///     pacer.gain(now, rate);
///     if pacer.admits() {
///         pacer.charge(1000);
///         sent += 1;
///     } else {
///         pacer.wait_until(Nanos(now.0 + pacer.lacking().div_ceil(rate)));
///         now = pacer.ready();
///     }
/// }
/// // A millisecond of 1 Gb/s, and the three frames of the burst.
/// assert_eq!(sent, 125 + 3);
/// ```
#[derive(Clone, Debug)]
pub struct Pacer {
    /// The credit, negative if overdrawn; in [units](PER_BYTE).
    credit: i64,
    /// The time of this credit.
    since: Nanos,
    /// When a waiting frame may leave; never if none waits.
    ready: Nanos,
    /// It has had frames to send ever since a frame left or had to wait.
    busy: bool,
    /// A full frame, in the same units.
    frame: u64,
}

impl Pacer {
    /// For frames of at most `frame` bytes.
    pub fn new(frame: u32) -> Pacer {
        let frame = u64::from(frame) * PER_BYTE;
        let credit = (BURST_FRAMES * frame) as i64;
        Pacer { credit, since: Nanos::ZERO, ready: Nanos::NEVER, busy: false, frame }
    }

    /// Adds the credit of this rate since the last call, until `now`.
    #[inline]
    pub fn gain(&mut self, now: Nanos, rate: u64) {
        let gone = now.0.saturating_sub(self.since.0);
        self.since = self.since.max(now);
        let (frames, time) = if self.busy { (MISSED_FRAMES, MISSED) } else { (BURST_FRAMES, LATENESS) };
        let most = (frames * self.frame).max(rate.saturating_mul(time)) as i64;
        let gained = rate.saturating_mul(gone).min(i64::MAX as u64) as i64;
        // Credit gained at a higher rate, or while there was more to send, is clamped.
        self.credit = self.credit.saturating_add(gained).min(most);
    }

    /// Whether a frame may leave.
    #[inline]
    pub fn admits(&mut self) -> bool {
        self.ready = Nanos::NEVER;
        self.credit > 0
    }

    /// The missing credit until the next frame may leave, as ns at a rate of 1 bit/s.
    pub fn lacking(&self) -> u64 {
        self.credit.min(0).unsigned_abs() + 1
    }

    /// Sets the time at which the waiting frame may leave.
    #[inline]
    pub fn wait_until(&mut self, ready: Nanos) {
        (self.ready, self.busy) = (ready, true);
    }

    /// When the waiting frame may leave.
    #[inline]
    pub fn ready(&self) -> Nanos {
        self.ready
    }

    /// A frame of `bytes` bytes leaves.
    #[inline]
    pub fn charge(&mut self, bytes: u32) {
        self.credit -= (u64::from(bytes) * PER_BYTE) as i64;
        self.busy = true;
    }

    /// There are no frames to send.
    #[inline]
    pub fn rest(&mut self) {
        self.busy = false;
    }

    /// Whether this many frames take longer than `time`, in ns.
    pub(crate) fn takes_longer(&self, frames: u64, rate: u64, time: u64) -> bool {
        rate.saturating_mul(time) < frames * self.frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABIT: u64 = 1_000_000_000;

    /// At a constant rate.
    fn admits(pacer: &mut Pacer, now: u64, rate: u64) -> bool {
        pacer.gain(Nanos(now), rate);
        let admits = pacer.admits();
        if !admits {
            pacer.wait_until(Nanos(now.saturating_add(pacer.lacking().div_ceil(rate))));
        }
        admits
    }

    /// A sender that always has frames to send, woken by a wheel with this tick in ns. Returns the departure times.
    fn departures(rate: u64, frame: u32, tick: u64, end: u64) -> Vec<u64> {
        let mut pacer = Pacer::new(frame);
        let (mut now, mut left) = (1_000_000, Vec::new());
        while now < 1_000_000 + end {
            while admits(&mut pacer, now, rate) {
                pacer.charge(frame);
                left.push(now);
            }
            now = pacer.ready().0.next_multiple_of(tick).max(now + 1);
        }
        left
    }

    /// Over the longer of 1 ms and 200 packets at most 2 % deviation; never more than one frame and the burst ahead.
    #[test]
    fn rates_from_100_mbit_to_400_gbit_are_accurate() {
        for rate in [GIGABIT / 10, GIGABIT, 10 * GIGABIT, 25 * GIGABIT, 100 * GIGABIT, 400 * GIGABIT] {
            for frame in [320, 1100, 4170] {
                let bits = 8 * u64::from(frame);
                let window = (200 * bits * GIGABIT / rate).max(1_000_000);
                let left = departures(rate, frame, 1024, 4 * window);
                let ideal = rate as f64 / 1e9 / bits as f64;
                let burst = BURST_FRAMES.max(rate * LATENESS / GIGABIT / bits + 1) as f64;
                let mut start = 0;
                for (sent, at) in (1..).zip(&left) {
                    let ahead = f64::from(sent) - (at - left[0]) as f64 * ideal;
                    assert!(ahead <= burst + 1.001, "{ahead} frames of {frame} bytes ahead at {rate} bit/s");
                    // A window that ends here.
                    while at - left[start] > window {
                        start += 1;
                    }
                    if start > 0 {
                        let count = f64::from(sent) - start as f64;
                        let off = count / (window as f64 * ideal) - 1.0;
                        assert!(off.abs() <= 0.02, "{off} at {rate} bit/s with frames of {frame} bytes");
                    }
                }
            }
        }
    }

    /// The number of frames of 1000 bytes that may leave at once.
    fn burst(pacer: &mut Pacer, now: u64, rate: u64) -> u32 {
        let mut frames = 0;
        while admits(pacer, now, rate) {
            pacer.charge(1000);
            frames += 1;
        }
        frames
    }

    #[test]
    fn a_pause_gains_a_burst_and_a_late_poll_one_millisecond() {
        let mut pacer = Pacer::new(1000);
        assert_eq!(burst(&mut pacer, 1000, GIGABIT), 3);
        assert_eq!(pacer.ready(), Nanos(1001));
        // A second late: 1 ms at 1 Gb/s, and a few frames at a low rate.
        assert_eq!(burst(&mut pacer, 1_000_000_000, GIGABIT), 125);
        assert_eq!(burst(&mut pacer, 2_000_000_000, GIGABIT / 1000), 16);
        // No frame was waiting meanwhile.
        pacer.rest();
        assert_eq!(burst(&mut pacer, 3_000_000_000, GIGABIT), 3);
    }

    /// Credit gained at a high rate, or by being late, is not used at a low rate, nor after a pause.
    #[test]
    fn credit_is_clamped_at_a_lower_rate_and_after_a_pause() {
        let mut pacer = Pacer::new(1000);
        pacer.gain(Nanos(1_000_000), 400 * GIGABIT);
        assert_eq!(burst(&mut pacer, 1_000_000, GIGABIT), 3);
        pacer.gain(Nanos(1_000_000_000), GIGABIT);
        pacer.rest();
        assert_eq!(burst(&mut pacer, 1_000_000_000, GIGABIT), 3);
    }

    #[test]
    fn nothing_overflows() {
        let mut pacer = Pacer::new(65_535);
        for rate in [1, 1_000_000, 400 * GIGABIT, 4000 * GIGABIT] {
            for now in [0, 1, u64::MAX / 2, u64::MAX] {
                if admits(&mut pacer, now, rate) {
                    pacer.charge(u32::from(u16::MAX));
                }
                assert!(pacer.ready() == Nanos::NEVER || pacer.ready() > Nanos(now) || now == u64::MAX);
            }
        }
    }
}
