//! A cache of the latest operations of the program, checked and planned. Programs call the same operations repeatedly; a
//! repeated one is neither checked nor planned again.

use super::*;

/// A checked operation.
#[derive(Clone, Copy)]
pub(super) struct Checked {
    /// Elements of input and output.
    pub(super) lengths: (usize, usize),
    pub(super) in_place: bool,
    pub(super) algorithm: Algorithm,
}

/// A plan: an operation, on buffers of these lengths, with an algorithm; and the result of the check.
struct Plan {
    /// Its unique number among the plans of the communicator, which also determines its position.
    key: u64,
    operation: Operation,
    buffers: [u64; 2],
    forced: Option<Algorithm>,
    checked: Checked,
    /// It has ended, and may be started again.
    ended: Option<Execution>,
}

/// The cached plans.
#[derive(Default)]
pub(super) struct Plans {
    plans: Vec<Plan>,
    /// The one found last: the next lookup starts after it.
    latest: usize,
    /// The number of plans so far.
    count: u64,
}

/// The most plans of a communicator: programs may use this many buffers in turn.
const KEPT: usize = 64;
/// The most steps of a cached execution, to limit its memory: a longer operation takes long enough to be planned again.
const STEPS: usize = 1024;

impl Plans {
    /// The key of an operation's plan, if it is cached.
    pub(super) fn find(
        &mut self,
        operation: &Operation,
        buffers: [u64; 2],
        forced: Option<Algorithm>,
    ) -> Option<u64> {
        let (before, after) = (0..self.latest, self.latest..self.plans.len());
        let found = after.chain(before).find(|index| {
            let plan = &self.plans[*index];
            (plan.buffers, plan.forced) == (buffers, forced) && plan.operation == *operation
        });
        self.latest = found.unwrap_or(self.latest);
        found.map(|index| self.plans[index].key)
    }

    /// Adds a plan, which replaces the oldest one if there are too many. Returns its key.
    pub(super) fn keep(
        &mut self,
        (operation, buffers, forced): (&Operation, [u64; 2], Option<Algorithm>),
        checked: Checked,
    ) -> u64 {
        let key = self.count;
        self.count += 1;
        let plan = Plan { key, operation: operation.clone(), buffers, forced, checked, ended: None };
        self.latest = place(key);
        match self.plans.get_mut(self.latest) {
            Some(oldest) => *oldest = plan,
            None => self.plans.push(plan),
        }
        key
    }

    /// The checked operation of a plan that was just found or added.
    pub(super) fn checked(&self, key: u64) -> Checked {
        self.plans[place(key)].checked
    }

    /// An ended execution of this plan.
    pub(super) fn take_ended(&mut self, key: u64) -> Option<Execution> {
        self.plans[place(key)].ended.take()
    }

    /// Keeps an ended execution for the next time, if its plan still exists.
    pub(super) fn end(&mut self, execution: Execution) {
        let plan = self.plans.get_mut(place(execution.plan));
        let (steps, _) = execution.progress();
        if let Some(plan) = plan.filter(|plan| plan.key == execution.plan && steps <= STEPS) {
            plan.ended = Some(execution);
        }
    }

    /// Removes all: their parameters have changed.
    pub(super) fn clear(&mut self) {
        // Keys are not reused, so that an outstanding execution is not returned to another plan.
        (self.plans, self.latest, self.count) = (Vec::new(), 0, self.count.next_multiple_of(KEPT as u64));
    }
}

/// The position of the plan with a key.
fn place(key: u64) -> usize {
    (key % KEPT as u64) as usize
}
