//! The latest operations of the program, checked and planned. Programs call the same operations again and again; one
//! that is called again is neither checked nor planned again.

use super::*;

/// What an operation is to a rank.
#[derive(Clone, Copy)]
pub(super) struct Checked {
    /// Elements of input and output.
    pub(super) lengths: (usize, usize),
    pub(super) in_place: bool,
    pub(super) algorithm: Algorithm,
}

/// What was asked for: an operation, on buffers of so many bytes, by an algorithm; and what became of it.
struct Plan {
    /// Its number among all plans of the communicator, by which it is known. Its place follows from that.
    key: u64,
    operation: Operation,
    buffers: [u64; 2],
    forced: Option<Algorithm>,
    checked: Checked,
    /// It has ended, and may begin again.
    ended: Option<Execution>,
}

/// The plans that are kept.
#[derive(Default)]
pub(super) struct Plans {
    plans: Vec<Plan>,
    /// The one that was found last: what follows it follows it again.
    latest: usize,
    /// Plans so far.
    count: u64,
}

/// Plans of a communicator, at most: programs go through as many buffers in turn.
const KEPT: usize = 64;
/// Steps of an execution that is kept, at most, for its memory: one of more takes long enough to be planned anew.
const STEPS: usize = 1024;

impl Plans {
    /// The key of the plan of an operation, if it is kept.
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

    /// Keeps a plan, in place of the oldest if there are too many. Returns its key.
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

    /// What the operation of a plan that was just found or kept is to this rank.
    pub(super) fn checked(&self, key: u64) -> Checked {
        self.plans[place(key)].checked
    }

    /// An execution of such a plan that has ended.
    pub(super) fn take_ended(&mut self, key: u64) -> Option<Execution> {
        self.plans[place(key)].ended.take()
    }

    /// Keeps an execution that has ended for the next time, if its plan is still there.
    pub(super) fn end(&mut self, execution: Execution) {
        let plan = self.plans.get_mut(place(execution.plan));
        let (steps, _) = execution.progress();
        if let Some(plan) = plan.filter(|plan| plan.key == execution.plan && steps <= STEPS) {
            plan.ended = Some(execution);
        }
    }

    /// Forgets all: what they were made by has changed.
    pub(super) fn clear(&mut self) {
        // Keys go on, so that nothing that is under way comes back to another plan.
        (self.plans, self.latest, self.count) = (Vec::new(), 0, self.count.next_multiple_of(KEPT as u64));
    }
}

/// Where the plan with a key is.
fn place(key: u64) -> usize {
    (key % KEPT as u64) as usize
}
