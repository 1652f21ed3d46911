//! How a queue pair keeps to a rate: a token bucket of a few frames.

use ferroce_driver::Nanos;

/// Frames that may leave at once after a pause. With the frame that overdraws the bucket they are 2 % of 200 packets, over
/// which a rate is to be right.
const BURST_FRAMES: u64 = 3;

/// Frames that may leave at once if the poll in which they were due came late.
const LATE_FRAMES: u64 = 16;

/// How late a wake-up may be, in ns: two ticks of the timer wheel. At high rates that is more than a few frames.
const LATENESS: u64 = 2048;

/// Bits times nanoseconds per second: what a rate of 1 bit/s gives in 1 ns.
const PER_BYTE: u64 = 8 * 1_000_000_000;

/// A token bucket. Frames leave while it is not overdrawn, so that at most one frame and the burst are ahead of the rate.
#[derive(Clone, Debug)]
pub(crate) struct Pacer {
    /// What may be sent, less what is owed; in [units](PER_BYTE).
    credit: i64,
    /// When that was so.
    since: Nanos,
    /// When a frame that waits may leave; never if none does.
    ready: Nanos,
    /// A full frame, in the same units.
    frame: u64,
}

impl Pacer {
    /// For frames of at most so many bytes.
    pub(crate) fn new(frame: u32) -> Pacer {
        let frame = u64::from(frame) * PER_BYTE;
        Pacer { credit: (BURST_FRAMES * frame) as i64, since: Nanos::ZERO, ready: Nanos::NEVER, frame }
    }

    /// Whether a frame may leave at this rate. If not, [`ready`](Pacer::ready) says when.
    #[inline]
    pub(crate) fn admits(&mut self, now: Nanos, rate: u64) -> bool {
        let frames = if self.ready == Nanos::NEVER { BURST_FRAMES } else { LATE_FRAMES };
        let most = (frames * self.frame).max(rate.saturating_mul(LATENESS)) as i64;
        let gone = now.0.saturating_sub(self.since.0);
        // As much as there is room for at most, so that it fits.
        let gained = rate.saturating_mul(gone).min(most.saturating_sub(self.credit).max(0) as u64);
        self.credit += gained as i64;
        self.since = self.since.max(now);
        if self.credit > 0 {
            self.ready = Nanos::NEVER;
            return true;
        }
        let lacking = self.credit.unsigned_abs() + 1;
        self.ready = Nanos(self.since.0.saturating_add(lacking.div_ceil(rate)));
        false
    }

    /// When the frame may leave that was not admitted.
    #[inline]
    pub(crate) fn ready(&self) -> Nanos {
        self.ready
    }

    /// A frame of so many bytes leaves.
    #[inline]
    pub(crate) fn charge(&mut self, bytes: u32) {
        self.credit -= (u64::from(bytes) * PER_BYTE) as i64;
    }

    /// Whether so many frames take longer than `time`, in ns.
    pub(crate) fn takes_longer(&self, frames: u64, rate: u64, time: u64) -> bool {
        rate.saturating_mul(time) < frames * self.frame
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIGABIT: u64 = 1_000_000_000;

    /// A sender that always has something to send, woken by a wheel of so many ns. Returns when its frames left.
    fn departures(rate: u64, frame: u32, tick: u64, end: u64) -> Vec<u64> {
        let mut pacer = Pacer::new(frame);
        let (mut now, mut left) = (1_000_000, Vec::new());
        while now < 1_000_000 + end {
            while pacer.admits(Nanos(now), rate) {
                pacer.charge(frame);
                left.push(now);
            }
            now = pacer.ready().0.next_multiple_of(tick).max(now + 1);
        }
        left
    }

    /// Over the longer of 1 ms and 200 packets at most 2 % off; never more than one frame and the burst ahead.
    #[test]
    fn a_rate_is_kept_from_a_tenth_to_four_hundred_gigabits() {
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

    #[test]
    fn a_pause_saves_a_burst_and_a_late_poll_a_little_more() {
        let burst = |pacer: &mut Pacer, now| {
            let mut frames = 0;
            while pacer.admits(Nanos(now), GIGABIT) {
                pacer.charge(1000);
                frames += 1;
            }
            frames
        };
        let mut pacer = Pacer::new(1000);
        assert_eq!(burst(&mut pacer, 1000), 3);
        assert_eq!(pacer.ready(), Nanos(1001));
        // A second late.
        assert_eq!(burst(&mut pacer, 1_000_000_000), 16);
        // Nobody waited in the meantime.
        pacer.ready = Nanos::NEVER;
        assert_eq!(burst(&mut pacer, 2_000_000_000), 3);
    }

    #[test]
    fn nothing_overflows() {
        let mut pacer = Pacer::new(65_535);
        for rate in [1, 1_000_000, 400 * GIGABIT, 4000 * GIGABIT] {
            for now in [0, 1, u64::MAX / 2, u64::MAX] {
                if pacer.admits(Nanos(now), rate) {
                    pacer.charge(u32::from(u16::MAX));
                }
                assert!(pacer.ready() == Nanos::NEVER || pacer.ready() > Nanos(now) || now == u64::MAX);
            }
        }
    }
}
