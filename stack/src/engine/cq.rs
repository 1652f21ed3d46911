use std::collections::VecDeque;
use std::task::Waker;

use crate::engine::event::Events;
use crate::telemetry::counters::{Counter, Counters};
use crate::verbs::{Cq, Event, Notify, Qp, WcStatus, WorkCompletion};

pub(crate) struct CompletionQueue {
    ring: VecDeque<WorkCompletion>,
    capacity: usize,
    armed: Option<Notify>,
    /// Woken by the completions for which it was armed: a completion channel.
    pub(crate) waker: Option<Waker>,
    /// It has overflowed; it accepts no more completions.
    failed: bool,
    /// Queue pairs that use it; it can't be destroyed before them.
    pub(crate) users: u32,
}

/// The result of adding a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pushed {
    /// It was added.
    Quietly,
    /// It was added, and the owner must be notified.
    Notify,
    /// There was no room, for the first time.
    Overflow,
    /// The queue had overflowed before.
    Lost,
}

impl CompletionQueue {
    pub(crate) fn new(capacity: u32) -> CompletionQueue {
        let capacity = capacity as usize;
        CompletionQueue {
            ring: VecDeque::with_capacity(capacity),
            capacity,
            armed: None,
            waker: None,
            failed: false,
            users: 0,
        }
    }

    #[inline]
    pub(crate) fn push(&mut self, wc: WorkCompletion, solicited: bool) -> Pushed {
        if self.failed {
            return Pushed::Lost;
        }
        if self.ring.len() == self.capacity {
            self.failed = true;
            return Pushed::Overflow;
        }
        self.ring.push_back(wc);
        let wanted = match self.armed {
            Some(Notify::Next) => true,
            Some(Notify::Solicited) => solicited || wc.status != WcStatus::Success,
            None => false,
        };
        if wanted {
            self.armed = None;
            return Pushed::Notify;
        }
        Pushed::Quietly
    }

    pub(crate) fn pop(&mut self) -> Option<WorkCompletion> {
        self.ring.pop_front()
    }

    /// Moves the oldest completions into `room`, as many as fit. Returns their number.
    #[inline]
    pub(crate) fn pop_into(&mut self, room: &mut [WorkCompletion]) -> usize {
        let mut count = 0;
        for (place, completion) in room.iter_mut().zip(std::iter::from_fn(|| self.pop())) {
            *place = completion;
            count += 1;
        }
        count
    }

    /// Reports a completion for which it, which is `cq`, was armed.
    #[cold]
    pub(crate) fn notify(&self, cq: Cq, events: &mut Events, counters: &mut Counters) {
        match &self.waker {
            Some(waker) => waker.wake_by_ref(),
            None if events.raise(Event::Completion(cq)) => {}
            None => return,
        }
        counters.count(Counter::EventCompletion);
    }

    pub(crate) fn has_completions(&self) -> bool {
        !self.ring.is_empty()
    }

    pub(crate) fn arm(&mut self, notify: Notify) {
        // Arming for any completion takes precedence and is kept.
        if self.armed != Some(Notify::Next) {
            self.armed = Some(notify);
        }
    }

    #[inline]
    pub(crate) fn is_armed(&self) -> bool {
        self.armed.is_some()
    }

    pub(crate) fn is_armed_for_solicited(&self) -> bool {
        self.armed == Some(Notify::Solicited)
    }

    /// How many more completions it can hold.
    pub(crate) fn room(&self) -> usize {
        self.capacity - self.ring.len()
    }

    /// Disarms it. Returns whether it was armed.
    pub(crate) fn trip(&mut self) -> bool {
        self.armed.take().is_some()
    }

    /// Wakes waiters for a completion that will not arrive.
    pub(crate) fn wake_waiting(&mut self) {
        if let Some(waker) = &self.waker
            && self.armed.take().is_some()
        {
            waker.wake_by_ref();
        }
    }

    /// Removes the completions of a destroyed or reset queue pair.
    pub(crate) fn purge(&mut self, qp: Qp) {
        self.ring.retain(|wc| wc.qp != qp);
    }
}
