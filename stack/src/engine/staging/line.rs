//! Who waits for chunks, in the order in which they get them.

use std::collections::VecDeque;

use super::{Line, Purpose};
use crate::verbs::Qp;

/// The queue pairs that found too few chunks. Each has one place for each purpose.
pub(crate) struct Lines([VecDeque<InLine>; Line::COUNT]);

/// Who found too few chunks.
#[derive(Clone, Copy)]
pub(crate) struct InLine {
    pub(crate) qp: Qp,
    pub(crate) purpose: Purpose,
    /// So many are needed at the same time.
    pub(crate) chunks: usize,
    /// The peer has asked for what is to be sent, and keeps chunks for it.
    pub(crate) is_awaited: bool,
    /// It was told that there are so many. If it is still here in the next poll, it needs them no more.
    pub(crate) is_offered: bool,
}

impl Lines {
    pub(crate) fn new() -> Lines {
        Lines(Default::default())
    }

    /// Has room for so many queue pairs.
    pub(crate) fn reserve(&mut self, qps: usize) {
        // Each waits for no more than two purposes of one line.
        self.0.iter_mut().for_each(|line| line.reserve(2 * qps));
    }

    /// Whether nobody waits for chunks for this, or for what has the same line.
    pub(crate) fn is_empty(&self, purpose: Purpose) -> bool {
        self.0[purpose.line() as usize].is_empty()
    }

    /// The first of each line in which somebody waits.
    pub(crate) fn first(&self) -> impl Iterator<Item = &InLine> {
        self.0.iter().filter_map(VecDeque::front)
    }

    /// Whether it is the turn of `qp` if `left` chunks are there, of which it needs so many. If not, it waits.
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

    /// Lets `qp` wait for chunks.
    pub(crate) fn wait(&mut self, qp: Qp, purpose: Purpose, chunks: usize) {
        let line = &mut self.0[purpose.line() as usize];
        match line.iter_mut().find(|waiting| waiting.is(qp, purpose)) {
            // Another was quicker, if it was told.
            Some(waiting) => (waiting.chunks, waiting.is_offered) = (chunks, false),
            None => line.push_back(InLine { qp, purpose, chunks, is_awaited: false, is_offered: false }),
        }
    }

    /// Lets `qp` wait for a chunk ahead of others, for its peer waits for what is sent from that.
    pub(crate) fn hasten(&mut self, qp: Qp, purpose: Purpose) {
        let line = &mut self.0[purpose.line() as usize];
        let place = line.iter().position(|waiting| waiting.is(qp, purpose) && !waiting.is_awaited);
        if let Some(hastened) = place.and_then(|place| line.remove(place)) {
            let behind = line.iter().take_while(|waiting| waiting.is_awaited).count();
            line.insert(behind, InLine { is_awaited: true, ..hastened });
        }
    }

    /// `qp` waits for no chunk any more for this.
    pub(crate) fn leave(&mut self, qp: Qp, purpose: Purpose) {
        self.0[purpose.line() as usize].retain(|waiting| !waiting.is(qp, purpose));
    }

    /// `qp` waits for no chunk any more.
    pub(crate) fn leave_all(&mut self, qp: Qp) {
        self.0.iter_mut().for_each(|line| line.retain(|waiting| waiting.qp != qp));
    }

    /// Whether `qp` waits for a chunk for its own requests.
    pub(crate) fn waits_to_send(&self, qp: Qp) -> bool {
        let [_, sends, awaited] = &self.0;
        sends.iter().chain(awaited).any(|waiting| waiting.qp == qp)
    }

    /// The next that has its turn, where so many chunks are left to each line. It is to be told.
    pub(crate) fn next_offer(&mut self, left: [usize; Line::COUNT]) -> Option<Qp> {
        self.0.iter_mut().zip(left).find_map(|(line, mut left)| {
            let fits =
                |waiting: &&mut InLine| left.checked_sub(waiting.chunks).map(|rest| left = rest).is_some();
            let next = line.iter_mut().take_while(fits).find(|waiting| !waiting.is_offered)?;
            next.is_offered = true;
            Some(next.qp)
        })
    }

    /// Whoever was told in the last poll that it has its turn, and is still here, needs no chunks.
    pub(crate) fn end_offers(&mut self) {
        self.0.iter_mut().for_each(|line| line.retain(|waiting| !waiting.is_offered));
    }
}

impl InLine {
    pub(crate) fn is(&self, qp: Qp, purpose: Purpose) -> bool {
        (self.qp, self.purpose) == (qp, purpose)
    }
}
