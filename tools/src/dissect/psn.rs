//! Whether the PSNs of a stream of packets are consecutive.

use std::collections::VecDeque;

use ferroce_wire::{PathMtu, Psn};
use serde::Serialize;

/// One direction's requests, or responses, of a queue pair.
#[derive(Default, Serialize)]
pub(super) struct PsnTracker {
    /// The lowest and the newest PSN.
    first_psn: Option<u32>,
    last_psn: Option<u32>,
    /// The number of PSNs that were not the next one.
    pub(super) gaps: u64,
    /// PSNs in gaps that did not arrive later.
    pub(super) missing: u64,
    /// First occurrences of packets that arrived after later ones.
    pub(super) late: u64,
    /// PSNs that had occurred before.
    pub(super) duplicates: u64,
    #[serde(skip)]
    last: Option<Last>,
    /// From the lowest PSN to the newest, without wraps.
    #[serde(skip)]
    range: i64,
    /// Missing PSNs, as first and count; oldest first.
    #[serde(skip)]
    holes: VecDeque<(Psn, u32)>,
}

#[derive(Clone, Copy)]
struct Last {
    psn: Psn,
    span: Span,
}

/// The number of PSNs of a packet: several candidates for a READ request with an unknown path MTU.
#[derive(Clone, Copy)]
pub(super) struct Span([u32; 5]);

/// The path MTUs between two hosts, one bit for each code.
#[derive(Clone, Copy, Default)]
pub(super) struct SeenMtus(u8);

impl SeenMtus {
    /// Takes the payload length of a First or Middle packet.
    pub(super) fn learn(&mut self, payload_len: usize) {
        let mtu = u32::try_from(payload_len).ok().and_then(|bytes| PathMtu::try_from(bytes).ok());
        self.0 |= mtu.map_or(0, |mtu| 1 << mtu.code());
    }
}

impl Span {
    /// Any packet except a READ request.
    pub(super) const ONE: Span = Span([1; 5]);

    /// A READ request for `bytes`.
    pub(super) fn of_read(bytes: u32, seen: SeenMtus) -> Span {
        let known = PathMtu::ALL.into_iter().find(|mtu| seen.0 == 1 << mtu.code());
        Span(PathMtu::ALL.map(|mtu| known.unwrap_or(mtu).packets(bytes)))
    }

    fn max(self) -> u32 {
        self.0.into_iter().max().unwrap_or(1)
    }
}

/// The most holes that are kept; PSNs of older holes remain missing.
const MAX_HOLES: usize = 64;

impl PsnTracker {
    /// Takes a packet. `resync`: any later PSN is as good as the next one, as for the first response to a READ.
    pub(super) fn observe(&mut self, psn: Psn, span: Span, resync: bool) {
        self.first_psn.get_or_insert(psn.value());
        let Some(last) = self.last else {
            self.advance(psn, span);
            return;
        };
        let distance = psn.distance(last.psn);
        let due = last.span.max();
        if distance <= 0 {
            if self.fill(psn, span) {
                self.late += 1;
            } else if self.range + i64::from(distance) < 0 {
                // From before the capture.
                self.late += 1;
                let skipped = -(self.range + i64::from(distance)) - i64::from(span.max());
                if skipped > 0 && !resync {
                    self.miss(skipped as u32);
                    self.holes.push_front((psn + span.max(), skipped as u32));
                }
                self.range = -i64::from(distance);
                self.first_psn = Some(psn.value());
            } else {
                self.duplicates += 1;
            }
        } else if distance as u32 <= due && !last.span.0.contains(&(distance as u32)) {
            // Inside the range of the previous READ: that READ, resumed.
            self.duplicates += 1;
        } else {
            let skipped = (distance as u32).saturating_sub(due);
            if skipped > 0 && !resync {
                self.gaps += 1;
                self.miss(skipped);
                self.holes.push_back((last.psn + due, skipped));
            }
            self.range += i64::from(distance);
            self.advance(psn, span);
        }
    }

    /// Counts missing PSNs, and makes room for their hole.
    fn miss(&mut self, count: u32) {
        self.missing += u64::from(count);
        if self.holes.len() == MAX_HOLES {
            self.holes.pop_front();
        }
    }

    /// The lowest and the newest PSN.
    pub(super) fn range(&self) -> Option<(u32, u32)> {
        self.first_psn.zip(self.last_psn)
    }

    fn advance(&mut self, psn: Psn, span: Span) {
        self.last = Some(Last { psn, span });
        self.last_psn = Some(psn.value());
    }

    /// Removes the PSNs of a packet from the hole that it begins in.
    fn fill(&mut self, psn: Psn, span: Span) -> bool {
        let inside = |&(first, count): &(Psn, u32)| {
            let distance = psn.distance(first);
            distance >= 0 && (distance as u32) < count
        };
        let Some(index) = self.holes.iter().position(inside) else { return false };
        let (first, count) = self.holes[index];
        let before = psn.distance(first) as u32;
        let filled = span.max().clamp(1, count - before);
        let after = count - before - filled;
        self.holes.remove(index);
        if after > 0 {
            self.holes.insert(index, (psn + filled, after));
        }
        if before > 0 {
            self.holes.insert(index, (first, before));
        }
        while self.holes.len() > MAX_HOLES {
            self.holes.pop_front();
        }
        self.missing -= u64::from(filled);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(psns: &[u32]) -> PsnTracker {
        let mut tracker = PsnTracker::default();
        for &psn in psns {
            tracker.observe(Psn::new(psn), Span::ONE, false);
        }
        tracker
    }

    #[test]
    fn gaps_late_ones_and_duplicates() {
        let t = track(&[0xff_fffe, 0xff_ffff, 0, 1]);
        assert_eq!((t.gaps, t.missing, t.late, t.duplicates), (0, 0, 0, 0));
        let t = track(&[0xff_fffe, 2, 0, 0xff_ffff, 0xff_ffff]);
        assert_eq!((t.gaps, t.missing, t.late, t.duplicates), (1, 1, 2, 1));
        let t = track(&[5, 8, 5, 6, 7, 8, 9]);
        assert_eq!((t.gaps, t.missing, t.late, t.duplicates), (1, 0, 2, 2));
        assert_eq!((t.first_psn, t.last_psn), (Some(5), Some(9)));
    }

    /// In a capture that begins during a retransmission, some packets from before it arrive later.
    #[test]
    fn a_packet_from_before_the_first_is_no_duplicate() {
        let t = track(&[8, 9, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!((t.gaps, t.missing, t.late, t.duplicates), (0, 0, 4, 2));
        assert_eq!((t.first_psn, t.last_psn), (Some(4), Some(10)));
        let t = track(&[1, 2, 0xff_fffe, 0, 1]);
        assert_eq!((t.gaps, t.missing, t.late, t.duplicates), (0, 1, 2, 1));
        // In a long capture PSNs wrap, so an old one is not from before the capture.
        let mut t = PsnTracker::default();
        for psn in [0, 0x60_0000, 0xa0_0000, 0x9f_ffff] {
            t.observe(Psn::new(psn), Span::ONE, true);
        }
        assert_eq!((t.late, t.duplicates, t.first_psn), (0, 1, Some(0)));
    }

    #[test]
    fn reads_take_up_as_many_psns_as_responses() {
        let mut seen = SeenMtus::default();
        let next = |seen, psn| {
            let mut tracker = PsnTracker::default();
            tracker.observe(Psn::new(10), Span::of_read(5000, seen), false);
            tracker.observe(Psn::new(psn), Span::ONE, false);
            (tracker.gaps, tracker.duplicates)
        };
        assert_eq!([12, 13, 15, 20, 30].map(|psn| next(seen, psn)), [(0, 0); 5]);
        assert_eq!((next(seen, 31), next(seen, 11)), ((1, 0), (0, 1)));
        seen.learn(1000);
        seen.learn(1024);
        assert_eq!((next(seen, 15), next(seen, 16), next(seen, 12)), ((0, 0), (1, 0), (0, 1)));
    }

    #[test]
    fn a_late_read_fills_all_that_it_takes_up() {
        let mut seen = SeenMtus::default();
        seen.learn(1024);
        let mut tracker = PsnTracker::default();
        for psn in [0, 16, 64, 32, 48] {
            tracker.observe(Psn::new(psn), Span::of_read(16 << 10, seen), false);
        }
        assert_eq!((tracker.gaps, tracker.missing, tracker.late, tracker.duplicates), (1, 0, 2, 0));
    }

    #[test]
    fn holes_are_bounded() {
        let psns: Vec<u32> = (0..1000).map(|i| 2 * i).collect();
        let t = track(&psns);
        assert_eq!((t.gaps, t.missing, t.holes.len()), (999, 999, MAX_HOLES));
    }
}
