//! When a queue pair is checked again. Its transmit step returns a [`Wait`], and so does its timer: what it waits for. Any
//! other event (a frame, a work request) puts it into the active list.

use std::collections::VecDeque;
use std::num::NonZeroU32;

use ferroce_driver::Nanos;

use crate::engine::timer::TimerWheel;

/// What a queue pair with nothing to send waits for. A packet of its peer or a work request ends every wait except that for
/// a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Nothing of its own.
    Nothing,
    /// The next poll, for an ACK that requests may delay further.
    NextPoll,
    /// A time: an ACK timeout, an RNR timer, the end of an ACK's delay.
    At(Nanos),
    /// An event at an unknown time: it sends nothing before.
    Ticket(Ticket),
}

impl Wait {
    /// For a time, which may be never.
    #[inline]
    pub(crate) fn until(time: Nanos) -> Wait {
        if time == Nanos::NEVER { Wait::Nothing } else { Wait::At(time) }
    }
}

/// An event other than a time: the resolution of a next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket(NonZeroU32);

/// The slots of queue pairs by what they wait for. Each is in at most one of `active`, `later` and `parked`
/// (`QueuePair::scheduled`), and may also be in the wheel.
pub(crate) struct Scheduler {
    /// Those that may have frames to send.
    active: VecDeque<u32>,
    /// Those that wait for the next poll.
    later: Vec<u32>,
    /// Those that wait for a ticket. There is room for all once there is a ticket.
    parked: Vec<(Ticket, u32)>,
    capacity: usize,
    wheel: TimerWheel,
    /// Frames sent in this turn by the queue pair at the front of the active list.
    turn: u32,
    /// The last ticket issued.
    last: Ticket,
}

/// The most frames of one queue pair before the turn of the next.
const QUANTUM: u32 = 32;

impl Scheduler {
    /// For the slots below `capacity`.
    pub(crate) fn new(capacity: u32) -> Scheduler {
        Scheduler {
            active: VecDeque::with_capacity(capacity as usize),
            later: Vec::with_capacity(capacity as usize),
            parked: Vec::new(),
            capacity: capacity as usize,
            wheel: TimerWheel::new(capacity),
            turn: 0,
            last: Ticket(NonZeroU32::MAX),
        }
    }

    /// A poll begins.
    #[inline]
    pub(crate) fn begin_poll(&mut self) {
        if self.awaits_poll() {
            self.active.extend(self.later.drain(..));
        }
    }

    /// Adds a queue pair that is in no list to the active one.
    #[inline]
    pub(crate) fn activate(&mut self, index: u32) {
        self.active.push_back(index);
    }

    /// The queue pair whose turn it is, and whether the turn starts.
    #[inline]
    pub(crate) fn turn(&mut self) -> Option<(u32, bool)> {
        if self.turn == QUANTUM && !self.active.is_empty() {
            self.turn = 0;
            self.active.rotate_left(1);
        }
        self.active.front().map(|index| (*index, self.turn == 0))
    }

    /// It has sent a frame.
    #[inline]
    pub(crate) fn sent(&mut self) {
        self.turn += 1;
    }

    /// Its turn is over.
    #[inline]
    pub(crate) fn end_turn(&mut self) {
        self.turn = 0;
        self.active.pop_front();
    }

    /// The queue pair at this position of the active list, counted from the front.
    #[inline]
    pub(crate) fn ahead(&self, places: usize) -> Option<u32> {
        self.active.get(places).copied()
    }

    /// A queue pair in no list waits. Returns whether it is in a list now.
    #[inline]
    pub(crate) fn wait(&mut self, index: u32, wait: Wait) -> bool {
        match wait {
            Wait::Nothing => return false,
            Wait::At(time) => {
                self.wheel.ensure(index, time);
                return false;
            }
            Wait::NextPoll => self.later.push(index),
            Wait::Ticket(ticket) => self.parked.push((ticket, index)),
        }
        true
    }

    /// A queue pair is checked by `time`, whatever else it waits for.
    #[inline]
    pub(crate) fn at(&mut self, index: u32, time: Nanos) {
        self.wheel.ensure(index, time);
    }

    /// The next queue pair whose time is due.
    #[inline]
    pub(crate) fn due(&mut self, now: Nanos) -> Option<u32> {
        self.wheel.pop(now)
    }

    /// A new ticket.
    pub(crate) fn ticket(&mut self) -> Ticket {
        self.parked.reserve(self.capacity - self.parked.len());
        self.last = Ticket(self.last.0.checked_add(1).unwrap_or(NonZeroU32::MIN));
        self.last
    }

    /// The event of the ticket has occurred, or never will: all that wait for it continue.
    pub(crate) fn redeem(&mut self, ticket: Ticket) {
        let Scheduler { active, parked, .. } = self;
        active.extend(parked.extract_if(.., |(of, _)| *of == ticket).map(|(_, index)| index));
    }

    /// Cancels the timer of a queue pair, and its wait for a ticket. Returns whether it waited for one.
    pub(crate) fn release(&mut self, index: u32) -> bool {
        self.wheel.cancel(index);
        let before = self.parked.len();
        self.parked.retain(|(_, parked)| *parked != index);
        self.parked.len() < before
    }

    /// A queue pair no longer exists.
    pub(crate) fn remove(&mut self, index: u32) {
        self.release(index);
        self.active.retain(|active| *active != index);
        self.later.retain(|later| *later != index);
        self.turn = 0;
    }

    /// Whether there may be frames to send.
    pub(crate) fn is_active(&self) -> bool {
        !self.active.is_empty()
    }

    /// Whether a queue pair waits for the next poll.
    #[inline]
    pub(crate) fn awaits_poll(&self) -> bool {
        !self.later.is_empty()
    }

    /// When a queue pair must be checked even without an event.
    pub(crate) fn next_deadline(&self, now: Nanos) -> Option<Nanos> {
        if self.awaits_poll() { Some(now) } else { self.wheel.next_deadline() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_pair_is_checked_when_its_wait_ends() {
        let mut scheduler = Scheduler::new(4);
        let ticket = scheduler.ticket();
        let waits = [Wait::Nothing, Wait::NextPoll, Wait::At(Nanos(5000)), Wait::Ticket(ticket)];
        let listed: Vec<bool> = (0..).zip(waits).map(|(index, wait)| scheduler.wait(index, wait)).collect();
        assert_eq!(listed, [false, true, false, true]);
        assert_eq!((scheduler.turn(), scheduler.next_deadline(Nanos(7))), (None, Some(Nanos(7))));
        scheduler.begin_poll();
        assert_eq!(scheduler.turn(), Some((1, true)));
        scheduler.end_turn();
        assert_eq!((scheduler.due(Nanos(4000)), scheduler.due(Nanos(7000))), (None, Some(2)));
        let other = scheduler.ticket();
        scheduler.redeem(other);
        assert!(!scheduler.is_active());
        scheduler.redeem(ticket);
        assert_eq!(scheduler.turn(), Some((3, true)));
        assert_eq!(scheduler.next_deadline(Nanos(9000)), None);
    }

    #[test]
    fn a_queue_pair_that_is_released_waits_for_nothing() {
        let mut scheduler = Scheduler::new(2);
        let ticket = scheduler.ticket();
        scheduler.wait(0, Wait::Ticket(ticket));
        scheduler.wait(1, Wait::At(Nanos(5000)));
        assert!(scheduler.release(0) && !scheduler.release(1));
        scheduler.redeem(ticket);
        assert!(!scheduler.is_active() && scheduler.due(Nanos(1_000_000)).is_none());
    }

    #[test]
    fn turns_are_round_robin() {
        let mut scheduler = Scheduler::new(2);
        scheduler.activate(0);
        scheduler.activate(1);
        for _ in 0..QUANTUM {
            assert_eq!(scheduler.turn().map(|(index, _)| index), Some(0));
            scheduler.sent();
        }
        assert_eq!(scheduler.turn(), Some((1, true)));
    }
}
