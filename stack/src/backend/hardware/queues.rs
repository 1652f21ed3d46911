//! Completion queues and shared receive queues.

use std::task::Waker;

use ferroce_driver::rnic::{CompletionQueue, SharedReceiveQueue};

use super::work::{QueueKind, Regions, WorkId};
use super::{Completions, Hardware, HardwareCq, HardwareSrq};
use crate::verbs::{Cq, Error, Handle, MAX_CQE, Mr, Notify, Srq, SrqAttributes, SrqConfig, WorkCompletion};

/// Completions of unsignaled work requests, which free room in a send queue: at most this many of each queue are
/// outstanding, because one per half queue is signaled.
const SILENT_OF_EACH: u32 = 3;
/// The polls of a context that leave it to the application to take the completions of a queue that it has just polled: two,
/// because it may poll its queues in turn.
const POLLS_TO_DRAIN: u8 = 2;

/// The receives of a shared receive queue, which complete in any order.
pub(super) struct ReceiveSlots {
    slots: Box<[(u64, u8)]>,
    regions: Box<[u32]>,
    /// The card's number of the receive in slot 0.
    first_id: u64,
    max_sge: u32,
    free: Vec<u32>,
}

impl ReceiveSlots {
    fn new(first_id: u64, depth: u32, max_sge: u8) -> ReceiveSlots {
        ReceiveSlots {
            first_id,
            slots: vec![(0, FREE); depth as usize].into(),
            regions: vec![0; depth as usize * usize::from(max_sge)].into(),
            max_sge: max_sge.into(),
            free: (0..depth).rev().collect(),
        }
    }

    pub(super) fn depth(&self) -> u32 {
        self.slots.len() as u32
    }

    fn posted(&self) -> u32 {
        self.depth() - self.free.len() as u32
    }

    /// The number of receives for which it has room.
    pub(super) fn free(&self) -> u32 {
        self.free.len() as u32
    }

    /// The places for the regions of the next one, if there is room for it.
    #[inline(always)]
    pub(super) fn next_regions(&mut self) -> &mut [u32] {
        let (slot, count) = (self.free.last().copied().unwrap_or_default(), self.max_sge as usize);
        let first = slot as usize * count;
        self.regions.get_mut(first..first + count).unwrap_or_default()
    }

    /// Adds one, for which there is room, and whose regions are in their places. Returns its number on the card.
    #[inline(always)]
    pub(super) fn push(&mut self, wr_id: u64, regions: Regions) -> u64 {
        if regions.count > 0
            && let Some(place) = self.next_regions().first_mut()
        {
            *place = regions.first;
        }
        let slot = self.free.pop().unwrap_or_default();
        self.slots[slot as usize] = (wr_id, regions.count);
        self.first_id | u64::from(slot)
    }

    /// Removes the receive of a slot, by its number.
    pub(super) fn complete(&mut self, slot: u32) -> Option<u64> {
        let (wr_id, regions) = self.slots.get_mut(slot as usize)?;
        if *regions == FREE {
            return None;
        }
        *regions = FREE;
        self.free.push(slot);
        Some(*wr_id)
    }

    pub(super) fn users_of(&self, mr: Mr) -> u32 {
        let places = self.slots.iter().zip(self.regions.chunks(self.max_sge as usize));
        let uses = |((_, used), regions): &(&(u64, u8), &[u32])| {
            *used != FREE && regions[..usize::from(*used)].contains(&mr.0.index)
        };
        places.filter(uses).count() as u32
    }
}

/// The slot is free.
const FREE: u8 = u8::MAX;

impl Hardware {
    pub(crate) fn create_cq(&mut self, capacity: u32) -> Result<Cq, Error> {
        let most = MAX_CQE.min(self.limits.max_cqe);
        if capacity == 0 || capacity > most {
            return Err(Error::invalid("CQ capacity", capacity, format!("1 to {most}")));
        }
        let full = Error::Exhausted { kind: "CQ", limit: self.cqs.capacity(), setting: "max_cqs" };
        let Some(index) = self.cqs.next_index() else { return Err(full) };
        // Room in addition to the requested, for whichever queue pairs complete here.
        let silent = SILENT_OF_EACH.saturating_mul(self.qps.capacity() as u32);
        let on_card = capacity.saturating_add(silent).min(self.limits.max_cqe);
        let card = CompletionQueue::new(on_card, &self.channel, index as usize)?;
        let (queue, most) = (Completions::new(capacity), on_card as usize);
        let cq = self
            .cqs
            .insert_with(|_| HardwareCq { card, queue, most, polls_to_drain: 0, solicited_only: false })
            .ok_or(full)?;
        self.live_cqs.push(index);
        Ok(Cq(cq))
    }

    pub(crate) fn destroy_cq(&mut self, cq: Cq) -> Result<(), Error> {
        let users = self.cq(cq)?.queue.users;
        if users > 0 {
            let users = format!("{users} send and receive queues");
            return Err(Error::Busy { kind: "CQ", handle: format!("{:?}", cq.0), users });
        }
        self.cqs.remove(cq.0);
        self.live_cqs.retain(|index| *index != cq.0.index);
        self.events.forget(cq.into());
        Ok(())
    }

    pub(crate) fn attach(&mut self, cq: Cq, waker: Waker) -> Result<(), Error> {
        self.cq(cq)?.queue.waker = Some(waker);
        Ok(())
    }

    /// The context is no longer polled: no thread should wait for completions.
    pub(crate) fn wake_channels(&mut self) {
        self.cqs.iter_mut().for_each(|cq| cq.queue.wake_waiting());
    }

    pub(crate) fn check_cq(&mut self, cq: Cq) -> Result<(), Error> {
        self.cq(cq).map(drop)
    }

    pub(crate) fn poll_cq(&mut self, cq: Cq) -> Result<Option<WorkCompletion>, Error> {
        Ok(self.cq(cq)?.queue.pop())
    }

    #[inline]
    pub(crate) fn poll_cq_into(&mut self, cq: Cq, room: &mut [WorkCompletion]) -> Result<usize, Error> {
        let is_gone = self.is_gone;
        let queue = self.cq(cq)?;
        queue.polls_to_drain = POLLS_TO_DRAIN;
        let count = queue.queue.pop_into(room);
        if count > 0 || queue.queue.is_armed() || is_gone {
            return Ok(count);
        }
        self.take(cq.0.index, room)
    }

    pub(crate) fn req_notify_cq(&mut self, cq: Cq, notify: Notify) -> Result<(), Error> {
        let cq = self.cq(cq)?;
        if notify == Notify::Solicited {
            cq.card.request_event(true)?;
        }
        cq.queue.arm(notify);
        cq.solicited_only = cq.queue.is_armed_for_solicited();
        Ok(())
    }

    pub(crate) fn create_srq(&mut self, config: &SrqConfig) -> Result<Srq, Error> {
        let domain = self.pd(config.pd)?;
        config.check()?;
        let full = Error::Exhausted { kind: "SRQ", limit: self.srqs.capacity(), setting: "max_srqs" };
        if self.srqs.is_full() {
            return Err(full);
        }
        let depth = config.max_wr;
        let card = SharedReceiveQueue::new(domain, depth, config.max_sge.into())?;
        let make = |handle: Handle| {
            let slots = ReceiveSlots::new(WorkId::first(QueueKind::Shared, handle), depth, config.max_sge);
            HardwareSrq { card, pd: config.pd, slots, limit: 0, users: 0 }
        };
        self.srqs.insert_with(make).map(Srq).ok_or(full)
    }

    pub(crate) fn arm_srq(&mut self, srq: Srq, limit: u32) -> Result<(), Error> {
        let queue = self.srq(srq)?;
        let depth = queue.slots.depth();
        if limit > depth {
            return Err(Error::invalid("SRQ limit", limit, format!("0 to {depth}, the depth of the SRQ")));
        }
        queue.card.set_limit(limit)?;
        queue.limit = limit;
        Ok(())
    }

    pub(crate) fn query_srq(&self, srq: Srq) -> Result<SrqAttributes, Error> {
        let queue = self.srqs.get(srq.0).ok_or_else(|| Error::invalid_handle("SRQ", srq.0))?;
        Ok(SrqAttributes { depth: queue.slots.depth(), posted: queue.slots.posted(), limit: queue.limit })
    }

    pub(crate) fn destroy_srq(&mut self, srq: Srq) -> Result<(), Error> {
        let users = self.srq(srq)?.users;
        if users > 0 {
            let users = format!("{users} queue pairs");
            return Err(Error::Busy { kind: "SRQ", handle: format!("{:?}", srq.0), users });
        }
        self.srqs.remove(srq.0);
        self.events.forget(srq.into());
        Ok(())
    }

    pub(super) fn srq(&mut self, srq: Srq) -> Result<&mut HardwareSrq, Error> {
        self.srqs.get_mut(srq.0).ok_or_else(|| Error::invalid_handle("SRQ", srq.0))
    }
}
