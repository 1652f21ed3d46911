//! Operations on memory that all ranks have mapped.

use super::calls::ends;
use super::*;
use crate::fallback;
use crate::options::SharedMemory;

/// How often other ranks' boards are read before packets are polled again: a rank publishes in less than a microsecond, or
/// is late.
const LOOKS: u32 = 64;

impl Group {
    /// Starts an operation on memory that all ranks have mapped. It may end immediately.
    pub(super) fn start_mapped(
        &mut self,
        process: &mut Process<'_>,
        operation: &Operation,
        lengths: (usize, usize),
        is_own: bool,
    ) -> u64 {
        let id = self.first + self.executions.len() as u64;
        let call = self.call(operation, Algorithm::Mapped, is_own);
        let (places, what) = (Places::of(operation), self.arithmetic(operation));
        let counts = operation.sent.as_ref().or(operation.received.as_ref());
        let ends = counts.map(|counts| ends(counts));
        let (root, count) = (operation.root as usize, operation.count);
        let job = Job { id, call, places, what, root, lengths, count, ends };
        let is_first = self.executions.is_empty();
        let Group { mapped: Ok(mapped), wake, log, .. } = self else { return id };
        let mut bench = bench(process, wake, log, 1);
        let started = mapped.start(job, &mut bench);
        let has_ended = matches!(started, Ok(true));
        if has_ended && is_first {
            // It need not be remembered.
            self.first += 1;
            self.idle_since = process.now;
        } else {
            let mut execution = Execution::elsewhere(id, call, places, what);
            if has_ended {
                execution.end();
                self.is_dirty = true;
            }
            self.executions.push_back(Some(execution));
            self.next_look = Nanos::ZERO;
        }
        let moved = started.and_then(|_| self.wake_all(process).map_err(Trouble::from));
        self.moved(moved.map(|()| true));
        id
    }

    /// Wakes the sleeping processes of ranks, because something was published.
    fn wake_all(&mut self, process: &mut Process<'_>) -> Result<(), Error> {
        while let Some(peer) = self.wake.pop() {
            self.tell(process, peer, Message::Wake)?;
        }
        Ok(())
    }

    /// Advances only operations on mapped memory. Returns whether there was any progress.
    pub(crate) fn poll_memory(&mut self, process: &mut Process<'_>) -> bool {
        if self.failed.is_some() {
            return false;
        }
        let moved = self.advance_mapped(process);
        self.moved(moved)
    }

    /// Whether operations on mapped memory are outstanding.
    pub(crate) fn is_on_memory(&self) -> bool {
        self.failed.is_none() && self.mapped.as_ref().is_ok_and(|mapped| !mapped.is_idle())
    }

    /// Advances operations on mapped memory.
    pub(super) fn advance_mapped(&mut self, process: &mut Process<'_>) -> Result<bool, Trouble> {
        let Group { mapped: Ok(mapped), executions, first, wake, options, log, .. } = self else {
            return Ok(false);
        };
        if mapped.is_idle() {
            return Ok(false);
        }
        let spins = matches!(options.idle, Idle::Spin | Idle::Adaptive { spins: 1.., .. });
        let mut bench = bench(process, wake, log, if spins { LOOKS } else { 1 });
        let mut has_ended = false;
        let moved = mapped.advance(&mut bench, |id| {
            if let Some(Some(execution)) = executions.get_mut((id - *first) as usize) {
                execution.end();
                has_ended = true;
            }
        })?;
        if moved {
            // The time is that of the next poll: a turn on memory alone does not read the clock.
            let elsewhere = executions.iter_mut().flatten().filter(|execution| !execution.has_steps());
            elsewhere.for_each(|execution| execution.moved = None);
        }
        self.wake_all(process)?;
        if has_ended {
            let now = process.clock.now();
            self.retire(process.ports, now)?;
        }
        Ok(moved)
    }

    /// The boards of the ranks, if all of them are on this host and have one; otherwise why not.
    pub(crate) fn boards(&self) -> Result<Vec<Ticket>, &'static str> {
        let boards: Vec<Ticket> = self.cards.iter().map(Card::board).collect();
        match self.hosts.count() {
            1 if boards.iter().all(|board| board.nonce != 0) => Ok(boards),
            1 => Err("a rank has no memory to share"),
            _ => Err("the ranks are on several hosts"),
        }
    }

    /// Sets whether operations use mapped memory from now on, or why not.
    pub(crate) fn set_mapped(&mut self, context: &mut Context, mapped: Result<Mapped, &'static str>) {
        let is_allowed = self.options.shared_memory != SharedMemory::Off;
        let is_possible = is_allowed && self.hosts.count() == 1 && self.size() > 1;
        match &mapped {
            Ok(_) => info!(rank = self.rank, "communicator {:016x}: the ranks share memory", self.id),
            Err(problem) if is_possible => fallback::without_memory(context, self.id, problem),
            Err(problem) => {
                info!(rank = self.rank, "communicator {:016x}: no shared memory, because {problem}", self.id)
            }
        }
        self.mapped = mapped;
        self.plans.clear();
    }

    /// The boards of some ranks, if this communicator's ranks share memory.
    pub(crate) fn mapped_boards(&self, ranks: &[u32]) -> Result<Vec<Ticket>, &'static str> {
        self.mapped.as_ref().map(|mapped| mapped.boards(ranks)).map_err(|problem| *problem)
    }
}

/// The resources of the process for operations on mapped memory.
fn bench<'a>(process: &'a mut Process<'_>, wake: &'a mut Vec<u32>, log: &'a Log, looks: u32) -> Bench<'a> {
    let Process { ports, host, computer, clock, .. } = process;
    let pd = ports.pd();
    Bench { context: ports, pd, host, computer, wake, log, clock, budget: BUDGET, looks }
}
