//! A hierarchical timing wheel: one timer for each queue pair, in constant time.
//!
//! Eight levels of 64 slots; a slot of level `n` is 64ⁿ ticks wide. A timer is in the highest level in which its time and
//! the wheel's differ, and moves down as that time approaches.

use ferroce_driver::Nanos;

/// log2 of the nanoseconds of a tick: about 1 µs, a tenth of the shortest RNR timer.
const TICK_SHIFT: u32 = 10;
const LEVELS: usize = 8;
const SLOTS: usize = 64;
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    next: u32,
    prev: u32,
    /// Its slot, or `NONE`.
    slot: u32,
    /// In ticks, rounded up: a timer never fires early.
    deadline: u64,
}

pub(crate) struct TimerWheel {
    entries: Box<[Entry]>,
    heads: [[u32; SLOTS]; LEVELS],
    /// One bit per nonempty slot.
    occupied: [u64; LEVELS],
    /// In ticks; every timer at or before it has fired.
    elapsed: u64,
    /// In ticks; before it nothing is due. Most polls check only this.
    quiet_until: u64,
}

impl TimerWheel {
    /// For the ids below `capacity`.
    pub(crate) fn new(capacity: u32) -> TimerWheel {
        let idle = Entry { next: NONE, prev: NONE, slot: NONE, deadline: 0 };
        TimerWheel {
            entries: vec![idle; capacity as usize].into_boxed_slice(),
            heads: [[NONE; SLOTS]; LEVELS],
            occupied: [0; LEVELS],
            elapsed: 0,
            quiet_until: u64::MAX,
        }
    }

    /// Ensures that `id` fires at `deadline` or before. Postponing a deadline costs nothing: the timer fires at the old
    /// time and its owner calls this again.
    pub(crate) fn ensure(&mut self, id: u32, deadline: Nanos) {
        if deadline == Nanos::NEVER {
            return;
        }
        let ticks = deadline.0.div_ceil(1 << TICK_SHIFT);
        let entry = &self.entries[id as usize];
        if entry.slot != NONE {
            if entry.deadline <= ticks {
                return;
            }
            self.unlink(id);
        }
        self.link(id, ticks.max(self.elapsed + 1));
    }

    /// Removes `id`.
    pub(crate) fn cancel(&mut self, id: u32) {
        if self.entries[id as usize].slot != NONE {
            self.unlink(id);
        }
    }

    /// The next timer due at `now`, if any; it is removed.
    #[inline]
    pub(crate) fn pop(&mut self, now: Nanos) -> Option<u32> {
        let now = now.0 >> TICK_SHIFT;
        if now < self.quiet_until {
            self.elapsed = self.elapsed.max(now);
            return None;
        }
        self.turn_to(now)
    }

    /// Advances the wheel to the next timer that is due, which is removed.
    fn turn_to(&mut self, now: u64) -> Option<u32> {
        while let Some((level, slot, start)) = self.next_slot() {
            if start > now {
                self.quiet_until = start;
                self.elapsed = self.elapsed.max(now);
                return None;
            }
            self.elapsed = self.elapsed.max(start);
            if level == 0 {
                let id = self.heads[0][slot];
                self.unlink(id);
                return Some(id);
            }
            // All its timers move down: from now on they differ from `elapsed` only in lower bits.
            while self.heads[level][slot] != NONE {
                let id = self.heads[level][slot];
                self.unlink(id);
                self.link(id, self.entries[id as usize].deadline);
            }
        }
        self.quiet_until = u64::MAX;
        self.elapsed = self.elapsed.max(now);
        None
    }

    /// A time at which `pop` must be called; no timer fires before it.
    pub(crate) fn next_deadline(&self) -> Option<Nanos> {
        self.next_slot().map(|(_, _, start)| Nanos(start << TICK_SHIFT))
    }

    /// The earliest nonempty slot: level, slot, and the tick at which it starts.
    fn next_slot(&self) -> Option<(usize, usize, u64)> {
        // Slots of a lower level always precede those of a higher one.
        let level = self.occupied.iter().position(|bits| *bits != 0)?;
        let shift = 6 * level as u32;
        let current = (self.elapsed >> shift) as u32 & 63;
        let ahead = self.occupied[level].rotate_right(current).trailing_zeros();
        let slot = (current + ahead) & 63;
        let base = self.elapsed >> shift & !63;
        let wrapped = if slot < current { 64 } else { 0 };
        let start = (base + u64::from(slot) + wrapped) << shift;
        Some((level, slot as usize, start.max(self.elapsed)))
    }

    fn link(&mut self, id: u32, deadline: u64) {
        let differing = 63 - (self.elapsed ^ deadline | 63).leading_zeros();
        let level = (differing as usize / 6).min(LEVELS - 1);
        let start = deadline >> (6 * level);
        self.quiet_until = self.quiet_until.min(start << (6 * level));
        let slot = start as usize & 63;
        let head = self.heads[level][slot];
        self.entries[id as usize] =
            Entry { next: head, prev: NONE, slot: (level * SLOTS + slot) as u32, deadline };
        if head != NONE {
            self.entries[head as usize].prev = id;
        }
        self.heads[level][slot] = id;
        self.occupied[level] |= 1 << slot;
    }

    fn unlink(&mut self, id: u32) {
        let Entry { next, prev, slot, .. } = self.entries[id as usize];
        let (level, index) = (slot as usize / SLOTS, slot as usize % SLOTS);
        if next != NONE {
            self.entries[next as usize].prev = prev;
        }
        if prev != NONE {
            self.entries[prev as usize].next = next;
        } else {
            self.heads[level][index] = next;
            if next == NONE {
                self.occupied[level] &= !(1 << index);
            }
        }
        self.entries[id as usize].slot = NONE;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TICK: u64 = 1 << TICK_SHIFT;

    proptest! {
        /// Compares with a plain list: nothing fires early, nothing later than a tick, nothing is lost.
        #[test]
        fn timers_fire_in_time(
            start in 0u64..1 << 40,
            timers in prop::collection::vec(0u64..1 << 36, 1..40),
            steps in prop::collection::vec(1u64..1 << 33, 1..60),
        ) {
            let mut wheel = TimerWheel::new(timers.len() as u32);
            prop_assert_eq!(wheel.pop(Nanos(start)), None);
            let mut pending: Vec<(u32, u64)> = Vec::new();
            for (id, delay) in timers.iter().enumerate() {
                wheel.ensure(id as u32, Nanos(start + delay));
                pending.push((id as u32, start + delay));
            }
            let mut now = start;
            for step in steps.into_iter().chain([1 << 36, 1 << 37]) {
                now += step;
                if let Some(next) = wheel.next_deadline() {
                    let earliest = pending.iter().map(|p| p.1).min().unwrap();
                    prop_assert!(next.0 <= earliest.max(start) + 2 * TICK);
                }
                while let Some(id) = wheel.pop(Nanos(now)) {
                    let at = pending.iter().position(|p| p.0 == id).unwrap();
                    prop_assert!(pending.swap_remove(at).1 <= now);
                }
                prop_assert!(pending.iter().all(|p| p.1 + 2 * TICK > now));
            }
            prop_assert!(pending.is_empty());
        }
    }

    #[test]
    fn the_earlier_deadline_counts_and_a_cancelled_one_never_fires() {
        let mut wheel = TimerWheel::new(2);
        wheel.ensure(0, Nanos(1_000_000));
        wheel.ensure(0, Nanos(500_000));
        wheel.ensure(0, Nanos(900_000));
        wheel.ensure(1, Nanos(400_000));
        wheel.cancel(1);
        assert_eq!(wheel.pop(Nanos(499_000)), None);
        assert_eq!(wheel.pop(Nanos(502_000)), Some(0));
        assert_eq!(wheel.pop(Nanos(2_000_000)), None);
    }
}
