//! A port of a host or a switch: its transmit queues, and one end of a link.

use std::collections::VecDeque;

use super::config::{CLASSES, Scheduling};
use super::counters::{PortCounters, QueueCounters};
use super::event::Picos;
use super::scheduler::Scheduler;
use crate::prefetch;
use crate::sim::impairment::Impairment;
use crate::sim::random::Random;

/// The owner of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    Host(u32),
    Switch(u32),
}

impl Owner {
    /// A number unique to this owner.
    pub(super) fn key(self) -> u64 {
        match self {
            Owner::Host(host) => host.into(),
            Owner::Switch(switch) => 1 << 32 | u64::from(switch),
        }
    }
}

/// The position of a port.
#[derive(Clone, Copy)]
pub(super) struct PortOf {
    pub(super) owner: Owner,
    /// Its number at its owner.
    pub(super) number: u32,
    pub(super) link: u32,
    /// The port at the other end.
    pub(super) peer: u32,
    /// A number that depends only on the ends of its link.
    pub(super) identity: u64,
}

/// A port's view of its link.
#[derive(Clone, Copy)]
pub(super) struct Line {
    /// In bit/s.
    pub(super) rate: u64,
    /// In picoseconds.
    pub(super) delay: u64,
    /// Whether the link has random impairments.
    pub(super) impairs: bool,
    /// Whether the link and the nodes at its ends are up.
    pub(super) carries: bool,
}

/// The state that each frame needs, kept small because there are many ports.
pub(super) struct Port {
    pub(super) of: PortOf,
    pub(super) link: Line,
    /// Classes with frames to send.
    occupied: u8,
    /// Classes paused by the other end.
    paused: u8,
    /// Classes whose frames are dropped, because they were paused for too long.
    pub(super) stormy: u8,
    /// Classes that a PFC frame must pause or resume. It is sent before all other frames.
    pub(super) to_pause: u8,
    pub(super) to_resume: u8,
    /// Whether an event is scheduled for when the port becomes free.
    pub(super) is_awaited: bool,
    /// When the last bit of the sent frames has left.
    pub(super) busy_until: Picos,
    pub(super) counters: PortCounters,
    /// Created when a class is first used.
    queues: [Option<Box<Queue>>; CLASSES],
    scheduler: Box<Scheduler>,
    /// The random impairments of the link, and the random marking of switches.
    pub(super) chance: Box<Chance>,
}

/// The random state of a port.
pub(super) struct Chance {
    pub(super) random: Random,
    pub(super) impairment: Impairment<u32>,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<u32>,
    bytes: u64,
    /// The time up to which `counters` is summed.
    since: Picos,
    counters: QueueCounters,
    /// When the last pause of the class started, and when it ends unless it is renewed.
    paused_since: Picos,
    paused_until: Picos,
}

impl Port {
    pub(super) fn new(
        of: PortOf,
        link: Line,
        scheduling: &[Scheduling; CLASSES],
        max_frame: usize,
        random: Random,
    ) -> Port {
        Port {
            of,
            link,
            occupied: 0,
            paused: 0,
            stormy: 0,
            to_pause: 0,
            to_resume: 0,
            is_awaited: false,
            busy_until: Picos::default(),
            counters: PortCounters::default(),
            queues: Default::default(),
            scheduler: Box::new(Scheduler::new(scheduling, max_frame)),
            chance: Box::new(Chance { random, impairment: Impairment::default() }),
        }
    }

    /// Prefetches the queue of a class, or of the one that probably sends next.
    #[inline]
    pub(super) fn prefetch(&self, class: Option<u8>) {
        let class = class.or_else(|| Some(self.occupied.checked_ilog2()? as u8)).unwrap_or(0);
        if let Some(queue) = &self.queues[usize::from(class)] {
            prefetch(&**queue);
        }
    }

    /// The frame that probably leaves next.
    #[inline]
    pub(super) fn front(&self) -> Option<u32> {
        self.queues[self.occupied.checked_ilog2()? as usize].as_ref()?.frames.front().copied()
    }

    fn queue(&mut self, class: u8) -> &mut Queue {
        self.queues[usize::from(class)].get_or_insert_default()
    }

    /// Queued bytes of a class.
    pub(super) fn bytes(&self, class: u8) -> u64 {
        self.queues[usize::from(class)].as_ref().map_or(0, |queue| queue.bytes)
    }

    /// Whether a class has queued frames.
    pub(super) fn has(&self, class: u8) -> bool {
        self.occupied & 1 << class != 0
    }

    /// Whether a queued frame may be sent.
    pub(super) fn is_ready(&self) -> bool {
        self.occupied & !self.paused != 0 || self.to_pause | self.to_resume != 0
    }

    pub(super) fn push(&mut self, now: Picos, class: u8, frame: u32, len: u64) {
        self.occupied |= 1 << class;
        let queue = self.queue(class);
        queue.sum_up(now);
        queue.frames.push_back(frame);
        queue.bytes += len;
        queue.counters.max_bytes = queue.counters.max_bytes.max(queue.bytes);
    }

    /// Removes the next frame to send, and returns it with its class. `length` returns a frame's length.
    pub(super) fn pop(&mut self, now: Picos, length: impl Fn(u32) -> u64) -> Option<(u8, u32)> {
        let Port { queues, scheduler, occupied, paused, .. } = self;
        let first = |class: usize| {
            let queue = queues[class].as_ref();
            queue.and_then(|queue| queue.frames.front()).map_or(0, |frame| length(*frame))
        };
        let ready = *occupied & !*paused;
        let class =
            if ready.is_power_of_two() { ready.ilog2() } else { scheduler.pick(ready, first)? as u32 };
        let class = class as u8;
        let frame = self.remove(now, class, &length)?;
        let counters = self.count(class);
        counters.sent += 1;
        counters.sent_bytes += length(frame);
        Some((class, frame))
    }

    /// Removes the first frame of a class.
    pub(super) fn remove(&mut self, now: Picos, class: u8, length: impl Fn(u32) -> u64) -> Option<u32> {
        let queue = self.queues[usize::from(class)].as_mut()?;
        let frame = queue.frames.pop_front()?;
        queue.sum_up(now);
        queue.bytes -= length(frame);
        if queue.frames.is_empty() {
            self.occupied &= !(1 << class);
        }
        Some(frame)
    }

    /// The counters of a class until now.
    pub(super) fn counters(&self, now: Picos, class: u8) -> QueueCounters {
        let Some(queue) = &self.queues[usize::from(class)] else { return QueueCounters::default() };
        let mut counters = queue.counters;
        counters.byte_picos += u128::from(queue.bytes) * u128::from(now.since(queue.since));
        if self.is_paused(class) {
            counters.paused_picos += now.since(queue.paused_since);
        }
        counters
    }

    pub(super) fn count(&mut self, class: u8) -> &mut QueueCounters {
        &mut self.queue(class).counters
    }

    pub(super) fn is_paused(&self, class: u8) -> bool {
        self.paused & 1 << class != 0
    }

    /// The time for which a class has been paused.
    pub(super) fn paused_for(&self, now: Picos, class: u8) -> Option<u64> {
        let queue = self.queues[usize::from(class)].as_ref()?;
        self.is_paused(class).then(|| now.since(queue.paused_since))
    }

    /// Pauses a class until this time. Returns whether it was not paused.
    pub(super) fn pause(&mut self, now: Picos, class: u8, until: Picos) -> bool {
        let begins = !self.is_paused(class);
        self.paused |= 1 << class;
        let queue = self.queue(class);
        queue.paused_until = until;
        if begins {
            queue.paused_since = now;
            queue.counters.pauses += 1;
        }
        begins
    }

    /// Ends the pause of a class.
    pub(super) fn resume(&mut self, now: Picos, class: u8) {
        if let Some(paused) = self.paused_for(now, class) {
            self.paused &= !(1 << class);
            self.count(class).paused_picos += paused;
        }
    }

    /// Ends the pause of a class if it was not renewed. Returns whether it did.
    pub(super) fn expire(&mut self, now: Picos, class: u8) -> bool {
        let ends = self.is_paused(class) && self.queue(class).paused_until <= now;
        if ends {
            self.resume(now, class);
            self.count(class).pauses_expired += 1;
        }
        ends
    }
}

impl Queue {
    fn sum_up(&mut self, now: Picos) {
        self.counters.byte_picos += u128::from(self.bytes) * u128::from(now.since(self.since));
        self.since = now;
    }
}
