//! What chance does to the frames of one direction of a link.

use std::time::Duration;

use super::random::Random;
use super::{LinkConfig, REORDER_LIMIT};

/// What becomes of one frame, or of each of its copies.
pub(super) struct Treatment {
    /// The bit that is flipped.
    pub(super) flip: Option<usize>,
    pub(super) jitter: Duration,
    /// How many later frames overtake it at most; none if it keeps its place.
    pub(super) overtakers: usize,
}

impl LinkConfig {
    /// Whether chance does anything to frames.
    pub(super) fn impairs(&self) -> bool {
        let chances = [self.loss, self.duplicate, self.corrupt, self.reorder];
        chances.iter().any(|chance| *chance > 0.0) || !self.jitter.is_zero()
    }

    /// Draws what becomes of a frame of `len` bytes. A bit is flipped in any case if it has to be `corrupt`.
    pub(super) fn treatment(&self, random: &mut Random, len: usize, corrupt: bool) -> Treatment {
        let flips = corrupt || random.chance(self.corrupt);
        let flip = flips.then(|| random.below(len as u64 * 8) as usize);
        let jitter = self.jitter.as_nanos() as u64;
        let jitter = if jitter == 0 { 0 } else { random.below(jitter.saturating_add(1)) };
        let reorders = random.chance(self.reorder);
        let overtakers = if reorders { 1 + random.below(self.reorder_by as u64) as usize } else { 0 };
        Treatment { flip, jitter: Duration::from_nanos(jitter), overtakers }
    }
}

/// The order of the frames of one direction. Times are in any unit.
pub(super) struct Impairment<F> {
    /// The latest arrival of a frame in its place.
    last_arrival: u64,
    /// Frames held back, in the order in which they were sent.
    held: Vec<Held<F>>,
}

struct Held<F> {
    frame: F,
    /// When it arrives at the latest.
    deadline: u64,
    /// Frames that may still overtake it.
    overtakers: usize,
}

impl<F> Default for Impairment<F> {
    fn default() -> Impairment<F> {
        Impairment { last_arrival: 0, held: Vec::new() }
    }
}

impl<F> Impairment<F> {
    /// With memory for all that it can hold back.
    pub(super) fn with_capacity() -> Impairment<F> {
        Impairment { last_arrival: 0, held: Vec::with_capacity(REORDER_LIMIT) }
    }

    /// Takes a frame that would arrive at `arrival`, and is held back by `hold` at most for so many others to overtake it.
    /// Hands each frame whose arrival is known now to `arrives`. Returns whether this one was held back.
    pub(super) fn pass(
        &mut self,
        frame: F,
        arrival: u64,
        (overtakers, hold): (usize, u64),
        mut arrives: impl FnMut(u64, F),
    ) -> bool {
        let deadline = arrival.saturating_add(hold);
        self.last_arrival = self.last_arrival.max(arrival);
        let arrival = self.last_arrival;
        if overtakers > 0 && self.held.len() < REORDER_LIMIT {
            self.held.push(Held { frame, deadline: deadline.max(arrival), overtakers });
            return true;
        }
        let older = self.held.len();
        arrives(arrival, frame);
        self.overtaken(older, arrival, &mut arrives);
        false
    }

    /// Releases what need not be held back for longer than `now`.
    pub(super) fn release_due(&mut self, now: u64, mut arrives: impl FnMut(u64, F)) {
        while let Some(at) = self.held.iter().position(|held| held.deadline <= now) {
            self.release(at, now, &mut arrives);
            self.overtaken(at, now, &mut arrives);
        }
    }

    /// When the next frame arrives that is held back, if none overtakes it.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.held.iter().map(|held| held.deadline).min()
    }

    /// Takes out what is held back.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = F> {
        self.held.drain(..).map(|held| held.frame)
    }

    /// Tells the first `older` frames held back that a later one has arrived at `arrival`, and
    /// releases those for which it was the last. Each of these overtakes in turn those before it,
    /// so that none is ever overtaken by more than it was to be.
    fn overtaken(&mut self, older: usize, arrival: u64, arrives: &mut impl FnMut(u64, F)) {
        let mut older = older;
        loop {
            for held in &mut self.held[..older] {
                held.overtakers -= 1;
            }
            let Some(at) = self.held.iter().position(|held| held.overtakers == 0) else { break };
            self.release(at, arrival, arrives);
            older = at;
        }
    }

    fn release(&mut self, at: usize, arrival: u64, arrives: &mut impl FnMut(u64, F)) {
        let held = self.held.remove(at);
        arrives(arrival.min(held.deadline), held.frame);
    }
}
