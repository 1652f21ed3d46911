//! The runner's side of a handle.
//!
//! Nothing is lost when a ring is full. For a full ring of commands the handle returns `Error::QueueFull`. If the ring
//! of deliveries is full, completions stay in their queues, which take turns as room becomes free. A command whose
//! delivery finds no room holds up the commands behind it. Meanwhile a thread in `call` takes deliveries off the ring
//! and keeps them: it would wait for itself otherwise.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;

use rtrb::{Consumer, Producer, PushError};

use super::claims::Claims;
use super::command::{Command, Delivery};
use super::wakeup::Desk;
use crate::Context;
use crate::verbs::{Cq, Error};

/// Commands of one handle before the others have their turn.
const BURST: usize = 64;

/// The runner's side of a handle.
pub(super) struct Client {
    commands: Consumer<Command>,
    deliveries: Producer<Delivery>,
    pub(super) desk: Arc<Desk>,
    /// The queues whose completions go to the handle.
    cqs: Vec<Cq>,
    /// What commands brought and found no room: one delivery, for nothing more is taken before it is delivered; more at
    /// the end.
    held: VecDeque<Delivery>,
    /// The ring was full in the last turn, so there may be more in the queues.
    is_full: bool,
    /// Something was taken or delivered in this turn.
    changed: bool,
    /// To the handle, when the runner ends.
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

    /// Carries out a burst of commands; returns how many.
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

    /// Carries out what was posted before the end, of the handle or of the runner. What these commands
    /// bring is delivered as far as there is room, and held then.
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

    /// Moves completions to the handle as far as there is room; returns how many. The others stay in
    /// their queues, for the next handle if this one is gone.
    pub(super) fn deliver(&mut self, context: &mut Context, claims: &Claims) -> usize {
        if self.desk.has_left() {
            return 0;
        }
        let mut delivered = 0;
        let mut n = 0;
        // What is held comes first.
        while n < self.cqs.len() && self.held.is_empty() {
            let cq = self.cqs[n];
            if self.deliveries.is_full() {
                // The next to have room is another one.
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

    /// Before the last look: what is stuck is the handle's to tell.
    pub(super) fn announce_rest(&self) {
        self.desk.announce(self.is_full || !self.held.is_empty());
    }

    /// After the runner's sleep.
    pub(super) fn end_rest(&self) {
        self.desk.announce(false);
    }

    /// Whether there is nothing to do before the handle does something.
    pub(super) fn may_rest(&self) -> bool {
        let stuck = self.deliveries.is_full();
        if self.held.is_empty() { self.is_full == stuck && self.commands.is_empty() } else { stuck }
    }

    /// The runner ends: the handle has all that is left.
    pub(super) fn leave(self) {
        let Client { held, commands, last, .. } = self;
        // It fails if the handle has gone before.
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

    /// Delivers; what finds no room is held, behind what is.
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

/// What a runner has not finished when it ends. The handle has both ends of the ring of commands then, so none is lost,
/// whenever it was posted.
pub(super) struct Unfinished {
    /// Deliveries that found no room.
    held: VecDeque<Delivery>,
    /// Not carried out.
    commands: Consumer<Command>,
}

impl Unfinished {
    /// Takes the oldest delivery, or the refusal of the oldest command, with what `why` says.
    pub(super) fn next(&mut self, why: impl Fn() -> Error) -> Option<Delivery> {
        let Unfinished { held, commands } = self;
        let mut refusals = std::iter::from_fn(|| Some(commands.pop().ok()?.refuse(why())));
        held.pop_front().or_else(|| refusals.by_ref().flatten().next())
    }
}
