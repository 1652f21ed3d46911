//! What each rank sends and receives, and in which order: pure arithmetic.
//!
//! The elements are cut into as many segments as there are ranks. In step `t` of `2 (n − 1)`, rank
//! `r` sends segment `r − t` to rank `r + 1` and receives segment `r − t − 1` from rank `r − 1`, all
//! modulo `n`. In the first `n − 1` steps (reduce-scatter) what is received is reduced into the
//! rank's own elements; after them, rank `r` has the whole of segment `r + 1`. In the other `n − 1`
//! (all-gather) it replaces them.
//!
//! What is received in one step is what is sent in the next, so the steps need no boundaries: chunk
//! `i` of all that a rank sends may go as soon as chunk `i −` [`head_start`](Schedule::head_start) of
//! all that it receives was taken. The first segment of all needs nothing.

use std::ops::Range;

/// The part of one rank in a ring all-reduce of `count` elements over `size` ranks, in chunks of at
/// most `chunk` elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    rank: usize,
    size: usize,
    count: usize,
    chunk: usize,
}

/// What is done with a chunk where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Phase {
    /// It is reduced into the elements there.
    ReduceScatter,
    /// It replaces the elements there.
    AllGather,
}

/// A run of elements that travels as one message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// 0 to `2 (n − 1)`, exclusive.
    pub step: usize,
    /// The half that the step belongs to.
    pub phase: Phase,
    /// The elements; never empty.
    pub elements: Range<usize>,
}

impl Schedule {
    /// Rank `rank` of `size`.
    ///
    /// # Panics
    /// Unless `rank` < `size` and `chunk` > 0.
    pub fn new(rank: usize, size: usize, count: usize, chunk: usize) -> Schedule {
        assert!(rank < size && chunk > 0, "rank {rank} of {size}, chunks of {chunk} elements");
        Schedule { rank, size, count, chunk }
    }

    /// `2 (n − 1)`.
    pub fn steps(&self) -> usize {
        2 * (self.size - 1)
    }

    /// The elements of a segment. Segments differ by one element at most, the longer ones first;
    /// some are empty if there are fewer elements than ranks.
    pub fn segment(&self, index: usize) -> Range<usize> {
        let (length, longer) = (self.count / self.size, self.count % self.size);
        let start = |index: usize| index * length + index.min(longer);
        start(index)..start(index + 1)
    }

    /// The segment that leaves in a step.
    pub fn sent_segment(&self, step: usize) -> usize {
        (self.rank + 2 * self.size - step) % self.size
    }

    /// The segment that arrives in a step.
    pub fn received_segment(&self, step: usize) -> usize {
        self.sent_segment(step + 1)
    }

    /// All that this rank sends to rank `r + 1`, in order.
    pub fn sends(&self) -> impl Iterator<Item = Chunk> + use<> {
        let schedule = *self;
        (0..self.steps()).flat_map(move |step| schedule.chunks(step, schedule.sent_segment(step)))
    }

    /// All that this rank receives from rank `r − 1`, in order.
    pub fn receives(&self) -> impl Iterator<Item = Chunk> + use<> {
        let schedule = *self;
        (0..self.steps()).flat_map(move |step| schedule.chunks(step, schedule.received_segment(step)))
    }

    /// How many chunks this rank sends.
    pub fn sent_chunks(&self) -> usize {
        (0..self.steps()).map(|step| self.chunks_of(self.sent_segment(step))).sum()
    }

    /// How many chunks this rank receives.
    pub fn received_chunks(&self) -> usize {
        (0..self.steps()).map(|step| self.chunks_of(self.received_segment(step))).sum()
    }

    /// How many chunks may be sent before any has been received.
    pub fn head_start(&self) -> usize {
        if self.size == 1 { 0 } else { self.chunks_of(self.rank) }
    }

    fn chunks_of(&self, segment: usize) -> usize {
        self.segment(segment).len().div_ceil(self.chunk)
    }

    fn chunks(&self, step: usize, segment: usize) -> impl Iterator<Item = Chunk> + use<> {
        let phase = if step < self.size - 1 { Phase::ReduceScatter } else { Phase::AllGather };
        let (segment, chunk) = (self.segment(segment), self.chunk);
        segment.clone().step_by(chunk).map(move |start| {
            let end = segment.end.min(start.saturating_add(chunk));
            Chunk { step, phase, elements: start..end }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// A rank as the executor drives it; an element is the set of ranks that are summed up in it.
    struct Rank {
        schedule: Schedule,
        elements: Vec<u64>,
        sends: Vec<Chunk>,
        receives: Vec<Chunk>,
        sent: usize,
        received: usize,
        /// Reduce-scatter chunks lie in staging slots; all-gather chunks are in place already.
        inbox: VecDeque<Option<Vec<u64>>>,
    }

    fn ring(size: usize, count: usize, chunk: usize) -> Vec<Rank> {
        let rank = |rank| {
            let schedule = Schedule::new(rank, size, count, chunk);
            Rank {
                schedule,
                elements: vec![1 << rank; count],
                sends: schedule.sends().collect(),
                receives: schedule.receives().collect(),
                sent: 0,
                received: 0,
                inbox: VecDeque::new(),
            }
        };
        (0..size).map(rank).collect()
    }

    impl Rank {
        fn may_send(&self, right: &Rank, slots: usize) -> bool {
            self.sent < self.sends.len()
                && self.sent < self.schedule.head_start() + self.received
                && right.inbox.len() < slots
        }
    }

    proptest! {
        /// Whatever the interleaving and however few slots: every rank ends with the sum of all,
        /// nothing is added twice, and nothing that is still needed is overwritten.
        #[test]
        fn every_rank_gets_every_contribution_once(
            size in 1usize..=64,
            count in 0usize..400,
            chunk in 1usize..20,
            slots in 1usize..6,
            picks in prop::collection::vec(any::<prop::sample::Index>(), 64),
        ) {
            let mut ranks = ring(size, count, chunk);
            let mut pick = picks.iter().cycle();
            loop {
                // (rank, whether it takes rather than sends)
                let mut possible: Vec<(usize, bool)> = Vec::new();
                for r in 0..size {
                    if ranks[r].may_send(&ranks[(r + 1) % size], slots) {
                        possible.push((r, false));
                    }
                    if !ranks[r].inbox.is_empty() {
                        possible.push((r, true));
                    }
                }
                if possible.is_empty() {
                    break;
                }
                let (r, takes) = *pick.next().unwrap().get(&possible);
                if takes {
                    let rank = &mut ranks[r];
                    let chunk = rank.receives[rank.received].clone();
                    rank.received += 1;
                    if let Some(values) = rank.inbox.pop_front().unwrap() {
                        prop_assert_eq!(values.len(), chunk.elements.len());
                        for (own, other) in rank.elements[chunk.elements].iter_mut().zip(values) {
                            prop_assert_eq!(*own & other, 0, "added twice");
                            *own |= other;
                        }
                    }
                    continue;
                }
                let chunk = ranks[r].sends[ranks[r].sent].clone();
                ranks[r].sent += 1;
                let values = ranks[r].elements[chunk.elements.clone()].to_vec();
                let right = &mut ranks[(r + 1) % size];
                match chunk.phase {
                    Phase::ReduceScatter => right.inbox.push_back(Some(values)),
                    Phase::AllGather => {
                        // The neighbour has sent its own part, or the sum would not be whole.
                        let all = u64::MAX >> (64 - size);
                        prop_assert!(values.iter().all(|v| *v == all), "gathered before it was reduced");
                        right.elements[chunk.elements].copy_from_slice(&values);
                        right.inbox.push_back(None);
                    }
                }
            }
            for rank in &ranks {
                prop_assert!(rank.elements.iter().all(|v| *v == u64::MAX >> (64 - size)));
                prop_assert_eq!(rank.sent, rank.sends.len(), "deadlock");
                prop_assert_eq!(rank.received, rank.receives.len(), "deadlock");
            }
        }

        /// The two ends of a link agree, without asking, on every message.
        #[test]
        fn neighbours_agree(size in 1usize..=64, count in 0usize..100_000, chunk in 1usize..5000, rank: prop::sample::Index) {
            let rank = rank.index(size);
            let schedule = Schedule::new(rank, size, count, chunk);
            let right = Schedule::new((rank + 1) % size, size, count, chunk);
            let sends: Vec<Chunk> = schedule.sends().collect();
            prop_assert_eq!(&sends, &right.receives().collect::<Vec<_>>());
            prop_assert_eq!(sends.len(), schedule.sent_chunks());
            prop_assert_eq!(right.receives().count(), right.received_chunks());
            // What is sent is what was received `head_start` messages ago.
            let forwarded = sends.iter().skip(schedule.head_start()).map(|c| &c.elements);
            let received: Vec<Chunk> = schedule.receives().collect();
            prop_assert!(forwarded.eq(received[..sends.len() - schedule.head_start()].iter().map(|c| &c.elements)));
        }

        /// Segments and the chunks of each phase cover the elements, without overlap.
        #[test]
        fn ranges_cover(size in 1usize..=64, count in 0usize..100_000, chunk in 1usize..5000, rank: prop::sample::Index) {
            let schedule = Schedule::new(rank.index(size), size, count, chunk);
            let mut end = 0;
            for index in 0..size {
                let segment = schedule.segment(index);
                prop_assert_eq!(segment.start, end);
                prop_assert!((count / size..=count.div_ceil(size)).contains(&segment.len()));
                end = segment.end;
            }
            prop_assert_eq!(end, count);
            for phase in [Phase::ReduceScatter, Phase::AllGather] {
                let mut ranges: Vec<Range<usize>> =
                    schedule.sends().filter(|c| c.phase == phase).map(|c| c.elements).collect();
                prop_assert!(ranges.iter().all(|r| !r.is_empty() && r.len() <= chunk));
                ranges.sort_by_key(|r| r.start);
                prop_assert!(ranges.windows(2).all(|w| w[0].end <= w[1].start));
                // All but the one segment that stays, or has come already.
                let sent: usize = ranges.iter().map(|r| r.len()).sum();
                let kept = match phase {
                    Phase::ReduceScatter => schedule.segment((rank.index(size) + 1) % size),
                    Phase::AllGather => schedule.segment((rank.index(size) + 2) % size),
                };
                prop_assert_eq!(sent, if size == 1 { 0 } else { count - kept.len() });
            }
        }
    }
}
