use std::sync::Arc;

use rtrb::{Consumer, Producer, PushError};

use super::command::{Command, Delivery};
use super::wakeup::Desk;
use crate::Context;
use crate::verbs::Cq;

/// Commands of one handle before the others have their turn.
const BURST: usize = 64;

/// The runner's side of a handle.
pub(super) struct Client {
    commands: Consumer<Command>,
    deliveries: Producer<Delivery>,
    pub(super) desk: Arc<Desk>,
    /// The queues whose completions go to the handle.
    cqs: Vec<Cq>,
    /// What a command brought and found no room. Nothing more is taken before it is delivered.
    held: Option<Delivery>,
    /// The ring was full in the last turn, so there may be more in the queues.
    is_full: bool,
    /// Something was taken or delivered in this turn.
    changed: bool,
}

impl Client {
    pub(super) fn new(
        commands: Consumer<Command>,
        deliveries: Producer<Delivery>,
        desk: Arc<Desk>,
    ) -> Client {
        Client { commands, deliveries, desk, cqs: Vec::new(), held: None, is_full: false, changed: false }
    }

    /// Carries out a burst of commands; returns how many.
    pub(super) fn take_commands(&mut self, context: &mut Context) -> usize {
        if let Some(delivery) = self.held.take()
            && !self.push(delivery)
        {
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
    /// bring is delivered as far as there is room.
    pub(super) fn take_last_commands(&mut self, context: &mut Context) {
        for _ in 0..self.commands.slots() {
            self.held = None;
            let Ok(command) = self.commands.pop() else { break };
            if let Some(delivery) = command.execute(context, &mut self.cqs) {
                self.push(delivery);
            }
        }
        self.changed = true;
    }

    /// Moves completions to the handle as far as there is room; returns how many. The others stay in
    /// their queues.
    pub(super) fn deliver(&mut self, context: &mut Context) -> usize {
        let mut delivered = 0;
        let mut n = 0;
        // What is held comes first.
        while n < self.cqs.len() && self.held.is_none() {
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
                Err(_) => {
                    self.cqs.swap_remove(n);
                }
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
        self.desk.announce(self.is_full || self.held.is_some());
    }

    /// After the runner's sleep.
    pub(super) fn end_rest(&self) {
        self.desk.announce(false);
    }

    /// Whether there is nothing to do before the handle does something.
    pub(super) fn may_rest(&self) -> bool {
        let stuck = self.deliveries.is_full();
        if self.held.is_some() { stuck } else { self.is_full == stuck && self.commands.is_empty() }
    }

    #[cfg(test)]
    pub(super) fn feed(&mut self, cq: Cq) {
        self.cqs.push(cq);
    }

    /// Delivers; what finds no room is held.
    fn push(&mut self, delivery: Delivery) -> bool {
        match self.deliveries.push(delivery) {
            Ok(()) => self.changed = true,
            Err(PushError::Full(delivery)) => self.held = Some(delivery),
        }
        self.held.is_none()
    }
}
