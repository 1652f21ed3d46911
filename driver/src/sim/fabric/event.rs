//! Scheduled events.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::Duration;

use crate::Nanos;

/// A point in virtual time, in picoseconds: at 400 Gb/s a byte takes 20 ps, so rounding errors do not accumulate. The
/// largest time is 213 days.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Picos(pub(super) u64);

impl Picos {
    pub(super) fn at(time: Nanos) -> Picos {
        Picos(time.0.saturating_mul(1000))
    }

    /// The first nanosecond that is not earlier.
    pub(super) fn nanos(self) -> Nanos {
        Nanos(self.0.div_ceil(1000))
    }

    pub(super) fn after(self, picos: u64) -> Picos {
        Picos(self.0.saturating_add(picos))
    }

    pub(super) fn since(self, earlier: Picos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A duration in picoseconds, clamped to the largest time.
pub(super) fn picos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX).saturating_mul(1000)
}

/// An event. Ports and frames are given by their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Event {
    /// The last bit of a frame arrives at a port.
    Arrival { port: u32, frame: u32 },
    /// The last bit of a frame has left a port that has more to send.
    Free { port: u32 },
    /// A PFC frame takes effect at a port: it pauses each of these classes for this many quanta; 0 resumes them.
    Pause { port: u32, classes: u8, quanta: u16 },
    /// A pause ends, unless it was renewed or ended before.
    PauseEnd { port: u32, class: u8 },
    /// A pause that a port has sent is due to be renewed, unless it was ended before.
    Renew { port: u32, class: u8 },
    /// The check whether a class of a port has been paused for too long.
    Watchdog { port: u32, class: u8 },
    /// A link has held back a frame for long enough.
    Release { port: u32 },
    /// A scheduled change.
    Change { number: u32 },
}

/// Events in the order of their times; events of the same time in the order in which they were scheduled.
///
/// A calendar queue: a day is 4.096 ns, and each day of the next 16 µs has its page. Later events are in a heap. Today's
/// page is sorted, so that the events after the next one are known.
pub(super) struct Events {
    today: u64,
    /// Today's events, the next one last; events of earlier days too.
    page: Vec<Planned>,
    pages: Vec<Vec<Planned>>,
    /// Empty pages. The last one is used first, because it is in the cache.
    spare: Vec<Vec<Planned>>,
    /// A bitmap of the pages that have events.
    written: Vec<u64>,
    later: BinaryHeap<Reverse<Planned>>,
    planned: u64,
}

#[derive(Clone, Copy)]
struct Planned {
    time: Picos,
    order: u64,
    event: Event,
}

/// The picoseconds of a day and the number of pages, as powers of two.
const DAY: u32 = 12;
const PAGES: u64 = 1 << 12;

impl Default for Events {
    fn default() -> Events {
        Events {
            today: 0,
            page: Vec::new(),
            pages: vec![Vec::new(); PAGES as usize],
            spare: Vec::new(),
            written: vec![0; PAGES as usize / 64],
            later: BinaryHeap::new(),
            planned: 0,
        }
    }
}

impl Events {
    pub(super) fn plan(&mut self, time: Picos, event: Event) {
        let planned = Planned { time, order: self.planned, event };
        self.planned += 1;
        let day = planned.day();
        if day <= self.today {
            let place = self.page.partition_point(|other| *other > planned);
            self.page.insert(place, planned);
        } else if day - self.today < PAGES {
            let page = day % PAGES;
            let entries = &mut self.pages[page as usize];
            if entries.is_empty() {
                *entries = self.spare.pop().unwrap_or_default();
            }
            entries.push(planned);
            self.written[page as usize / 64] |= 1 << (page % 64);
        } else {
            self.later.push(Reverse(planned));
        }
    }

    /// The time of the next event.
    pub(super) fn next(&mut self) -> Option<Picos> {
        if self.page.is_empty() {
            self.turn_pages();
        }
        self.page.last().map(|planned| planned.time)
    }

    /// The next event, if it is not after `limit`.
    pub(super) fn pop(&mut self, limit: Picos) -> Option<(Picos, Event)> {
        if self.next()? > limit {
            return None;
        }
        self.page.pop().map(|planned| (planned.time, planned.event))
    }

    /// The event after the next `ahead` ones, if it is near.
    pub(super) fn peek(&self, ahead: usize) -> Option<Event> {
        let place = self.page.len().checked_sub(ahead + 1)?;
        Some(self.page[place].event)
    }

    /// The number of events scheduled so far.
    pub(super) fn planned(&self) -> u64 {
        self.planned
    }

    /// Advances to the next day that has events.
    fn turn_pages(&mut self) {
        let written = self.next_page();
        let later = self.later.peek().map(|Reverse(planned)| planned.day());
        let Some(day) = written.into_iter().chain(later).min() else { return };
        self.today = day;
        if written == Some(day) {
            let page = day % PAGES;
            let entries = std::mem::take(&mut self.pages[page as usize]);
            self.spare.push(std::mem::replace(&mut self.page, entries));
            self.written[page as usize / 64] &= !(1 << (page % 64));
        }
        while self.later.peek().is_some_and(|Reverse(planned)| planned.day() == day) {
            self.page.extend(self.later.pop().map(|Reverse(planned)| planned));
        }
        self.page.sort_unstable_by(|a, b| b.cmp(a));
    }

    /// The next day whose page has events.
    fn next_page(&self) -> Option<u64> {
        let first = self.today + 1;
        let (word, bit) = ((first % PAGES / 64) as usize, first % 64);
        let words = self.written.len();
        // The first word is examined twice: first its upper bits, last its lower ones.
        (0..=words).find_map(|ahead| {
            let at = (word + ahead) % words;
            let mask = match ahead {
                0 => u64::MAX << bit,
                _ if ahead == words => !(u64::MAX << bit),
                _ => u64::MAX,
            };
            let found = self.written[at] & mask;
            let page = at as u64 * 64 + u64::from(found.trailing_zeros());
            (found != 0).then(|| first + (page + PAGES - first % PAGES) % PAGES)
        })
    }
}

impl Planned {
    fn day(&self) -> u64 {
        self.time.0 >> DAY
    }
}

impl Ord for Planned {
    fn cmp(&self, other: &Planned) -> Ordering {
        (self.time, self.order).cmp(&(other.time, other.order))
    }
}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Planned) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Planned {
    fn eq(&self, other: &Planned) -> bool {
        self.order == other.order
    }
}

impl Eq for Planned {}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with a sorted list: near and far times, many of them equal, scheduled while others are taken.
    #[test]
    fn events_are_in_order() {
        let mut seed = 1_u64;
        let mut random = |below: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % below
        };
        for horizon in [100, 5_000, 1_000_000, 16_777_216, 40_000_000, 1_000_000_000_000] {
            let mut events = Events::default();
            let mut expected: Vec<(Picos, u32)> = Vec::new();
            let (mut now, mut number) = (Picos(0), 0);
            for _ in 0..20_000 {
                for _ in 0..random(4) {
                    let time = now.after(random(horizon) / 100 * 100);
                    events.plan(time, Event::Free { port: number });
                    expected.push((time, number));
                    number += 1;
                }
                let limit = now.after(random(horizon));
                if random(2) == 0 {
                    // The first of the earliest ones.
                    let next = expected.iter().copied().min_by_key(|(time, number)| (*time, *number));
                    assert_eq!(events.next(), next.map(|(time, _)| time));
                    let next = next.filter(|(time, _)| *time <= limit);
                    let event = next.map(|(time, port)| (time, Event::Free { port }));
                    assert_eq!(events.pop(limit), event);
                    if let Some(next) = next {
                        now = next.0;
                        expected.retain(|other| *other != next);
                    }
                }
                if expected.len() > 200 {
                    while let Some((time, _)) = events.pop(Picos(u64::MAX)) {
                        now = time;
                    }
                    expected.clear();
                }
            }
        }
    }
}
