//! The runner's side of a handle.
//!
//! Nothing is lost when a ring is full. If the command ring is full, the handle returns `Error::QueueFull`. If the delivery ring
//! is full, completions stay in their queues, which are served in turn as room becomes free. A command whose delivery does not
//! fit delays the commands after it. Meanwhile a thread in `call` takes deliveries off the ring and keeps them: otherwise it
//! would wait for itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rtrb::{Consumer, Producer, PushError};

use super::claims::Claims;
use super::command::{Command, Delivery};
use super::wakeup::Desk;
use crate::Context;
use crate::verbs::{Cq, Error};

/// The most commands of one handle per turn.
const BURST: usize = 64;

/// The runner's side of a handle.
pub(super) struct Client {
    commands: Consumer<Command>,
    deliveries: Producer<Delivery>,
    pub(super) desk: Arc<Desk>,
    /// The queues whose completions go to the handle.
    cqs: Vec<Cq>,
    /// Deliveries of commands that did not fit: one, because no command is taken before it is delivered; more at the end.
    held: VecDeque<Delivery>,
    /// The ring was full in the last turn, so there may be more in the queues.
    is_full: bool,
    /// Something was taken or delivered in this turn.
    changed: bool,
    /// For the handle, when the runner ends.
    last: SyncSender<Unfinished>,
}

impl Client {
    pub(super) fn new(
        commands: Consumer<Command>,
        deliveries: Producer<Delivery>,
        desk: Arc<Desk>,
        last: SyncSender<Unfinished>,
    ) -> Client {
        let held = VecDeque::with_capacity(1);
        Client { commands, deliveries, desk, cqs: Vec::new(), held, is_full: false, changed: false, last }
    }

    /// Executes a burst of commands; returns how many.
    pub(super) fn take_commands(&mut self, context: &mut Context) -> usize {
        if !self.push_held() {
            return 0;
        }
        let mut taken = 0;
        while taken < BURST
            && let Ok(command) = self.commands.pop()
        {
            taken += 1;
            self.changed = true;
            if let Some(delivery) = command.execute(context, &mut self.cqs)
                && !self.push(delivery)
            {
                break;
            }
        }
        taken
    }

    /// Executes the commands posted before the end of the handle or the runner. Their deliveries are delivered as far as there is
    /// room, and then held.
    pub(super) fn take_last_commands(&mut self, context: &mut Context) {
        self.push_held();
        for _ in 0..self.commands.slots() {
            let Ok(command) = self.commands.pop() else { break };
            if let Some(delivery) = command.execute(context, &mut self.cqs) {
                self.push(delivery);
            }
        }
        self.changed = true;
    }

    /// Moves completions to the handle as far as there is room; returns how many. The others stay in their queues, for the next
    /// handle if this one was dropped.
    pub(super) fn deliver(&mut self, context: &mut Context, claims: &Claims) -> usize {
        if self.desk.has_left() {
            return 0;
        }
        let mut delivered = 0;
        let mut n = 0;
        // Held deliveries are first.
        while n < self.cqs.len() && self.held.is_empty() {
            let cq = self.cqs[n];
            if self.deliveries.is_full() {
                // The next queue begins with the room that becomes free.
                let next = (n + 1) % self.cqs.len();
                self.cqs.rotate_left(next);
                break;
            }
            match context.poll_cq(cq) {
                Ok(Some(completion)) => {
                    self.push(Delivery::Completed { cq, completion });
                    delivered += 1;
                }
                Ok(None) => n += 1,
                // It was destroyed.
                Err(_) => claims.remove(self.cqs.swap_remove(n)),
            }
        }
        self.is_full = self.deliveries.is_full();
        if std::mem::take(&mut self.changed) {
            self.desk.bell.ring();
        }
        delivered
    }

    /// Before the last check: the handle must report room for stuck deliveries.
    pub(super) fn announce_rest(&self) {
        self.desk.announce(self.is_full || !self.held.is_empty());
    }

    /// After the runner's sleep.
    pub(super) fn end_rest(&self) {
        self.desk.announce(false);
    }

    /// Whether there is nothing to do until the handle does something.
    pub(super) fn may_rest(&self) -> bool {
        let stuck = self.deliveries.is_full();
        if self.held.is_empty() { self.is_full == stuck && self.commands.is_empty() } else { stuck }
    }

    /// The runner ends: the handle gets all that is left.
    pub(super) fn leave(self) {
        let Client { held, commands, last, .. } = self;
        // It fails if the handle was dropped before.
        let _ = last.send(Unfinished { held, commands });
    }

    #[cfg(test)]
    pub(super) fn feed(&mut self, cq: Cq) {
        self.cqs.push(cq);
    }

    /// Delivers what is held. Returns whether nothing is held any longer.
    fn push_held(&mut self) -> bool {
        self.held.pop_front().is_none_or(|delivery| self.push(delivery))
    }

    /// Delivers; a delivery that does not fit is held, after those held before.
    fn push(&mut self, delivery: Delivery) -> bool {
        let pushed = if self.held.is_empty() {
            self.deliveries.push(delivery)
        } else {
            Err(PushError::Full(delivery))
        };
        match pushed {
            Ok(()) => self.changed = true,
            Err(PushError::Full(delivery)) => self.held.push_back(delivery),
        }
        self.held.is_empty()
    }
}

/// Unfinished commands and deliveries of a runner that has ended. The handle then has both ends of the command ring, so no
/// command is lost, whenever it was posted.
pub(super) struct Unfinished {
    /// Deliveries that did not fit.
    held: VecDeque<Delivery>,
    /// Commands not executed.
    commands: Consumer<Command>,
}

impl Unfinished {
    /// Takes the oldest delivery, or the refusal of the oldest command, with the error `why`.
    pub(super) fn next(&mut self, why: impl Fn() -> Error) -> Option<Delivery> {
        let Unfinished { held, commands } = self;
        let mut refusals = std::iter::from_fn(|| Some(commands.pop().ok()?.refuse(why())));
        held.pop_front().or_else(|| refusals.by_ref().flatten().next())
    }
}
