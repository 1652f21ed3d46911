//! Random impairments of the frames of one direction of a link.

use std::time::Duration;

use super::random::Random;
use super::{LinkConfig, REORDER_LIMIT};

/// The treatment of one frame, or of each of its copies.
pub(super) struct Treatment {
    /// The bit to flip.
    pub(super) flip: Option<usize>,
    pub(super) jitter: Duration,
    /// The most later frames that overtake it; none if it keeps its place.
    pub(super) overtakers: usize,
}

impl LinkConfig {
    /// Whether there is any random impairment.
    pub(super) fn impairs(&self) -> bool {
        let chances = [self.loss, self.duplicate, self.corrupt, self.reorder];
        chances.iter().any(|chance| *chance > 0.0) || !self.jitter.is_zero()
    }

    /// Draws the treatment of a frame of `len` bytes. With `corrupt` a bit is always flipped.
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
    /// The latest arrival of a frame that was not held back.
    last_arrival: u64,
    /// Frames held back, in the order in which they were sent.
    held: Vec<Held<F>>,
}

struct Held<F> {
    frame: F,
    /// Its latest time of arrival.
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
    /// With memory for the most frames that it can hold back.
    pub(super) fn with_capacity() -> Impairment<F> {
        Impairment { last_arrival: 0, held: Vec::with_capacity(REORDER_LIMIT) }
    }

    /// Accepts a frame that would arrive at `arrival`, and is held back for at most `hold` so that others can overtake it.
    /// Passes each frame whose arrival is now known to `arrives`. Returns whether this frame was held back.
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

    /// Releases the frames whose deadline is not after `now`.
    pub(super) fn release_due(&mut self, now: u64, mut arrives: impl FnMut(u64, F)) {
        while let Some(at) = self.held.iter().position(|held| held.deadline <= now) {
            self.release(at, now, &mut arrives);
            self.overtaken(at, now, &mut arrives);
        }
    }

    /// When the next held-back frame arrives, if none overtakes it.
    pub(super) fn next_deadline(&self) -> Option<u64> {
        self.held.iter().map(|held| held.deadline).min()
    }

    /// Removes all frames held back.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = F> {
        self.held.drain(..).map(|held| held.frame)
    }

    /// Records for the first `older` frames held back that a later one has arrived at `arrival`, and releases those that no
    /// more frames may overtake. Each released frame overtakes in turn those before it, so that no frame is overtaken by
    /// more than its limit.
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
