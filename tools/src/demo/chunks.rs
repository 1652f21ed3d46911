//! The order in which a rank of the baseline sends and receives chunks: pure arithmetic.
//!
//! The elements are divided into as many segments as there are ranks. In step `t` of `2 (n − 1)`, rank `r` sends
//! segment `r − t` to rank `r + 1` and receives segment `r − t − 1` from rank `r − 1`, all modulo `n`. In the first
//! `n − 1` steps (reduce-scatter) received elements are reduced into the rank's own; in the others (all-gather) they
//! replace them. The elements received in one step are sent in the next one, so the steps need no boundaries: a chunk
//! may be sent when the chunk [`head_start`](Chunks::head_start) before it has been received.

use std::ops::Range;

/// The part of one rank in a ring all-reduce of `count` elements over `size` ranks, in chunks of at most `chunk` elements.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunks {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) count: usize,
    pub(super) chunk: usize,
}

/// Elements that are sent together, and whether the receiver reduces them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    pub(super) is_reduced: bool,
    pub(super) elements: Range<usize>,
}

impl Chunks {
    /// The chunks to the next rank, in order.
    pub(super) fn sends(self) -> impl Iterator<Item = Chunk> {
        (0..2 * (self.size - 1)).flat_map(move |step| self.of_step(step, step))
    }

    /// The chunks from the previous rank, in order.
    pub(super) fn receives(self) -> impl Iterator<Item = Chunk> {
        (0..2 * (self.size - 1)).flat_map(move |step| self.of_step(step, step + 1))
    }

    /// The number of chunks that may be sent before the first one is received.
    pub(super) fn head_start(self) -> usize {
        self.of_step(0, 0).count()
    }

    /// The lengths of segments differ by at most one element; longer segments come first.
    fn segment(self, index: usize) -> Range<usize> {
        let (length, longer) = (self.count / self.size, self.count % self.size);
        let start = |index: usize| index * length + index.min(longer);
        start(index)..start(index + 1)
    }

    /// The chunks of one step: those of the segment `back` before the rank's own.
    fn of_step(self, step: usize, back: usize) -> impl Iterator<Item = Chunk> {
        let segment = self.segment((self.rank + 2 * self.size - back) % self.size);
        segment.clone().step_by(self.chunk).map(move |start| Chunk {
            is_reduced: step < self.size - 1,
            elements: start..segment.end.min(start + self.chunk),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each rank sends what the next one expects, and receives every element.
    #[test]
    fn ranks_agree() {
        for (size, count, chunk) in [(2, 0, 1), (2, 5, 2), (3, 2, 7), (4, 1003, 10), (5, 64, 64)] {
            let of = |rank| Chunks { rank, size, count, chunk };
            for rank in 0..size {
                let sent: Vec<Chunk> = of(rank).sends().collect();
                assert_eq!(sent, of((rank + 1) % size).receives().collect::<Vec<_>>());
                let (start, steps) = (of(rank).head_start(), of(rank).receives());
                for (before, after) in steps.zip(&sent[start.min(sent.len())..]) {
                    assert_eq!(before.elements, after.elements);
                }
                let mut came = vec![0; count];
                for chunk in of(rank).receives() {
                    chunk.elements.for_each(|index| came[index] += if chunk.is_reduced { 1 } else { 10 });
                }
                // Received only to be reduced: 1; only as a result: 10; both: 11.
                assert!(came.iter().all(|n| matches!(n, 1 | 11 | 10)), "{came:?}");
            }
        }
    }
}
