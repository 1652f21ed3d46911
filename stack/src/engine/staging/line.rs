//! Queue pairs that wait for chunks, in the order in which they get them.

use std::collections::VecDeque;

use super::{Line, Purpose};
use crate::verbs::Qp;

/// The queue pairs that found too few chunks. Each has one place per purpose.
pub(crate) struct Lines([VecDeque<InLine>; Line::COUNT]);

/// A queue pair that found too few chunks.
#[derive(Clone, Copy)]
pub(crate) struct InLine {
    pub(crate) qp: Qp,
    pub(crate) purpose: Purpose,
    /// The number of chunks needed at the same time.
    pub(crate) chunks: usize,
    /// The peer has requested the data to send, and holds chunks for it.
    pub(crate) is_awaited: bool,
    /// It was notified that there are enough. If it is still here in the next poll, it needs them no more.
    pub(crate) is_offered: bool,
}

impl Lines {
    pub(crate) fn new() -> Lines {
        Lines(Default::default())
    }

    /// Reserves room for this many queue pairs.
    pub(crate) fn reserve(&mut self, qps: usize) {
        // Each waits for at most two purposes of one queue.
        self.0.iter_mut().for_each(|line| line.reserve(2 * qps));
    }

    /// Whether no queue pair waits for chunks for this purpose, or for one in the same queue.
    pub(crate) fn is_empty(&self, purpose: Purpose) -> bool {
        self.0[purpose.line() as usize].is_empty()
    }

    /// The first of each nonempty queue.
    pub(crate) fn first(&self) -> impl Iterator<Item = &InLine> {
        self.0.iter().filter_map(VecDeque::front)
    }

    /// Whether it is the turn of `qp`, which needs `chunks` of the `left` ones. If not, it waits.
    pub(crate) fn has_turn(&mut self, qp: Qp, purpose: Purpose, chunks: usize, left: usize) -> bool {
        let line = &mut self.0[purpose.line() as usize];
        let place = line.iter().position(|waiting| waiting.is(qp, purpose));
        let ahead: usize = line.range(..place.unwrap_or(line.len())).map(|waiting| waiting.chunks).sum();
        let has_turn = ahead + chunks <= left;
        match place {
            Some(place) if has_turn => drop(line.remove(place)),
            None if has_turn => {}
            _ => self.wait(qp, purpose, chunks),
        }
        has_turn
    }

    /// Queues `qp` for chunks.
    pub(crate) fn wait(&mut self, qp: Qp, purpose: Purpose, chunks: usize) {
        let line = &mut self.0[purpose.line() as usize];
        match line.iter_mut().find(|waiting| waiting.is(qp, purpose)) {
            // If it was notified, another one was faster.
            Some(waiting) => (waiting.chunks, waiting.is_offered) = (chunks, false),
            None => line.push_back(InLine { qp, purpose, chunks, is_awaited: false, is_offered: false }),
        }
    }

    /// Moves `qp` to the front, because its peer waits for the data.
    pub(crate) fn hasten(&mut self, qp: Qp, purpose: Purpose) {
        let line = &mut self.0[purpose.line() as usize];
        let place = line.iter().position(|waiting| waiting.is(qp, purpose) && !waiting.is_awaited);
        if let Some(hastened) = place.and_then(|place| line.remove(place)) {
            let behind = line.iter().take_while(|waiting| waiting.is_awaited).count();
            line.insert(behind, InLine { is_awaited: true, ..hastened });
        }
    }

    /// `qp` no longer waits for chunks for this purpose.
    pub(crate) fn leave(&mut self, qp: Qp, purpose: Purpose) {
        self.0[purpose.line() as usize].retain(|waiting| !waiting.is(qp, purpose));
    }

    /// `qp` no longer waits for chunks.
    pub(crate) fn leave_all(&mut self, qp: Qp) {
        self.0.iter_mut().for_each(|line| line.retain(|waiting| waiting.qp != qp));
    }

    /// Whether `qp` waits for a chunk for its own requests.
    pub(crate) fn waits_to_send(&self, qp: Qp) -> bool {
        let [_, sends, awaited] = &self.0;
        sends.iter().chain(awaited).any(|waiting| waiting.qp == qp)
    }

    /// The next one whose turn it is, with this many chunks left for each queue. It must be notified.
    pub(crate) fn next_offer(&mut self, left: [usize; Line::COUNT]) -> Option<Qp> {
        self.0.iter_mut().zip(left).find_map(|(line, mut left)| {
            let fits =
                |waiting: &&mut InLine| left.checked_sub(waiting.chunks).map(|rest| left = rest).is_some();
            let next = line.iter_mut().take_while(fits).find(|waiting| !waiting.is_offered)?;
            next.is_offered = true;
            Some(next.qp)
        })
    }

    /// A queue pair that was notified of its turn in the last poll, and is still here, needs no chunks.
    pub(crate) fn end_offers(&mut self) {
        self.0.iter_mut().for_each(|line| line.retain(|waiting| !waiting.is_offered));
    }
}

impl InLine {
    pub(crate) fn is(&self, qp: Qp, purpose: Purpose) -> bool {
        (self.qp, self.purpose) == (qp, purpose)
    }
}
