//! The card's numbers of work requests, and the record of each until it completes.

use std::collections::VecDeque;

use ferroce_driver::rnic::Piece;

use super::memory::WindowBinding;
use crate::verbs::{Error, Handle, Mw, WcOpcode};

/// The most work requests passed to the card at once, and pieces of each.
pub(super) const CHUNK: usize = 16;
pub(super) const SGES: usize = 32;

/// Storage for the pieces of this many work requests.
pub(super) type PieceRoom = [[Piece; SGES]; CHUNK];

/// The position of a work request's record: the card's `wr_id`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkId {
    pub(super) queue: QueueKind,
    /// Of the queue pair, or of the shared receive queue.
    pub(super) index: u32,
    /// The low bits of its generation: a completion of an earlier object is recognised.
    generation: u32,
    /// In the queue, or of the slot.
    pub(super) position: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueKind {
    Send = 0,
    Receive = 1,
    Shared = 2,
}

const INDEX_BITS: u32 = 20;
const GENERATION_BITS: u32 = 10;
const GENERATIONS: u32 = (1 << GENERATION_BITS) - 1;

impl WorkId {
    /// The most objects that can be distinguished.
    pub(super) const OBJECTS: u32 = 1 << INDEX_BITS;

    fn new(queue: QueueKind, handle: Handle, position: u32) -> WorkId {
        WorkId { queue, index: handle.index, generation: handle.generation & GENERATIONS, position }
    }

    /// The card's number of the work request at position 0; a position is added to it.
    pub(super) fn first(queue: QueueKind, handle: Handle) -> u64 {
        WorkId::new(queue, handle, 0).to_card()
    }

    fn to_card(self) -> u64 {
        let WorkId { queue, index, generation, position } = self;
        let object = (queue as u32) << (INDEX_BITS + GENERATION_BITS) | generation << INDEX_BITS | index;
        u64::from(object) << 32 | u64::from(position)
    }

    /// `None` for a number that was never passed to a card.
    #[inline]
    pub(super) fn from_card(number: u64) -> Option<WorkId> {
        let (object, position) = ((number >> 32) as u32, number as u32);
        let queue = match object >> (INDEX_BITS + GENERATION_BITS) {
            0 => QueueKind::Send,
            1 => QueueKind::Receive,
            2 => QueueKind::Shared,
            _ => return None,
        };
        let index = object & ((1 << INDEX_BITS) - 1);
        Some(WorkId { queue, index, generation: object >> INDEX_BITS & GENERATIONS, position })
    }

    /// The position of another number, if it is of the same queue.
    #[inline(always)]
    pub(super) fn position_of(self, number: u64) -> Option<u32> {
        let of_queue = WorkId { position: 0, ..self }.to_card();
        (number >> 32 == of_queue >> 32).then_some(number as u32)
    }

    #[inline]
    pub(super) fn is_of(self, handle: Handle) -> bool {
        self.generation == handle.generation & GENERATIONS
    }
}

/// The record of a work request, kept small because each is written once and read once.
#[derive(Clone, Copy)]
pub(super) struct Work {
    /// The application's number.
    pub(super) wr_id: u64,
    /// The slot of the first region.
    region: u32,
    /// Of a send, in bytes.
    pub(super) length: u32,
    pub(super) opcode: WcOpcode,
    /// Its success is reported.
    pub(super) signaled: bool,
    /// The number of regions to which it refers.
    regions: u8,
}

/// The effect on a window when a work request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WindowWork {
    Bind { window: Mw, binding: WindowBinding },
    Invalidate { rkey: u32 },
}

/// The regions of a work request: their number, and the slot of the first; the others are in [`WorkQueue::next_regions`].
#[derive(Clone, Copy, Default)]
pub(super) struct Regions {
    pub(super) first: u32,
    pub(super) count: u8,
}

impl Work {
    #[inline(always)]
    pub(super) fn new(wr_id: u64, opcode: WcOpcode, signaled: bool, regions: Regions, length: u32) -> Work {
        Work { wr_id, region: regions.first, length, opcode, signaled, regions: regions.count }
    }
}

/// Work requests in the order in which they complete, and the regions of each.
pub(super) struct WorkQueue {
    ring: Box<[Work]>,
    /// The length of the ring, a power of two, minus one.
    mask: u32,
    /// The positions of the oldest and of the next one.
    tail: u32,
    head: u32,
    pub(super) depth: u32,
    /// The position of the last one that the card reports.
    told: u32,
    /// The card's number of the one at position 0.
    first_id: u64,
    /// Those that concern windows, by their positions.
    windows: VecDeque<(u32, WindowWork)>,
    pub(super) max_sge: u32,
    /// The slots of regions except the first: [`max_sge`](WorkQueue::max_sge) places for each work request.
    regions: Box<[u32]>,
}

impl WorkQueue {
    /// For `depth` work requests of `max_sge` pieces; `first_id` is from [`WorkId::first`].
    pub(super) fn new(first_id: u64, depth: u32, max_sge: u32) -> WorkQueue {
        let places = depth.next_power_of_two() as usize;
        let empty = Work::new(0, WcOpcode::Send, false, Regions::default(), 0);
        WorkQueue {
            ring: vec![empty; places].into(),
            mask: places as u32 - 1,
            tail: 0,
            head: 0,
            depth,
            told: 0,
            first_id,
            windows: VecDeque::new(),
            max_sge,
            regions: vec![0; places * max_sge as usize].into(),
        }
    }

    #[inline(always)]
    pub(super) fn len(&self) -> u32 {
        self.head.wrapping_sub(self.tail)
    }

    /// The number of work requests for which it has room.
    #[inline(always)]
    pub(super) fn free(&self) -> u32 {
        self.depth.saturating_sub(self.len())
    }

    /// The error that it is full.
    #[cold]
    pub(super) fn full(&self, queue: &'static str) -> Error {
        Error::QueueFull { queue, depth: self.depth }
    }

    #[inline(always)]
    fn place(&self, position: u32) -> usize {
        (position & self.mask) as usize
    }

    /// The places for the regions of the next one; that of the first is not used.
    pub(super) fn next_regions(&mut self) -> &mut [u32] {
        let (first, count) = (self.place(self.head) * self.max_sge as usize, self.max_sge as usize);
        self.regions.get_mut(first..first + count).unwrap_or_default()
    }

    /// Adds one, for which there is room, and whose regions are in their places. Returns its number on the card.
    #[inline(always)]
    pub(super) fn push(&mut self, work: Work) -> u64 {
        let place = self.place(self.head);
        self.ring[place] = work;
        let id = self.first_id | u64::from(self.head);
        self.head = self.head.wrapping_add(1);
        id
    }

    /// The same for a send; also returns whether the card must report it: only reported completions free room in a send
    /// queue, so one in several unsignaled ones is reported.
    #[inline(always)]
    pub(super) fn push_send(&mut self, work: Work) -> (u64, bool) {
        let tells = work.signaled || self.head.wrapping_sub(self.told) >= self.depth / 2;
        if tells {
            self.told = self.head;
        }
        (self.push(work), tells)
    }

    /// The last one concerns a window.
    #[cold]
    pub(super) fn newest_is_of(&mut self, window: WindowWork) {
        let position = self.head.wrapping_sub(1);
        let place = self.place(position);
        if let WindowWork::Bind { binding, .. } = window {
            (self.ring[place].region, self.ring[place].regions) = (binding.region.0.index, 1);
        }
        self.windows.push_back((position, window));
    }

    /// Removes the last one, which the card has refused.
    #[cold]
    pub(super) fn pop_newest(&mut self) {
        if self.len() > 0 {
            self.head = self.head.wrapping_sub(1);
            if self.windows.back().is_some_and(|(position, _)| *position == self.head) {
                self.windows.pop_back();
            }
            // The position reported before is no longer known, so the card reports the next one.
            self.told = self.head.wrapping_sub(self.depth);
        }
    }

    /// Removes the one at `position` and all before it, which are complete too. `None` if it is not outstanding.
    #[inline(always)]
    pub(super) fn complete(&mut self, position: u32) -> Option<&Work> {
        if position.wrapping_sub(self.tail) >= self.len() {
            return None;
        }
        self.tail = position.wrapping_add(1);
        self.ring.get(self.place(position))
    }

    /// The next one that completes.
    pub(super) fn pop_oldest(&mut self) -> Option<&Work> {
        self.complete(self.tail)
    }

    /// Whether any concern windows.
    #[inline(always)]
    pub(super) fn has_windows(&self) -> bool {
        !self.windows.is_empty()
    }

    /// Removes the oldest completed one that concerns a window; also returns whether it was at `position`.
    pub(super) fn pop_window(&mut self, position: u32) -> Option<(WindowWork, bool)> {
        let (at, _) = self.windows.front()?;
        if at.wrapping_sub(self.tail) < self.len() {
            return None;
        }
        let (at, window) = self.windows.pop_front()?;
        Some((window, at == position))
    }

    pub(super) fn clear(&mut self) {
        (self.tail, self.told) = (self.head, self.head);
        self.windows.clear();
    }

    /// How many of the work requests refer to a region.
    pub(super) fn users_of(&self, region: u32) -> u32 {
        let uses = |n: &u32| {
            let place = self.place(self.tail.wrapping_add(*n));
            let work = &self.ring[place];
            let first = place * self.max_sge as usize;
            match work.regions {
                0 => false,
                count => {
                    let others = &self.regions[first..first + usize::from(count)];
                    work.region == region || others.iter().skip(1).any(|other| *other == region)
                }
            }
        };
        (0..self.len()).filter(uses).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_converts_back() {
        for queue in [QueueKind::Send, QueueKind::Receive, QueueKind::Shared] {
            for (index, generation, position) in [(0, 0, 0), (1, 2, 3), (0xf_ffff, 0x3ff, u32::MAX)] {
                let handle = Handle { index, generation };
                let id = WorkId::new(queue, handle, position);
                assert_eq!(WorkId::from_card(id.to_card()), Some(id));
                assert!(id.is_of(handle) && id.is_of(Handle { index, generation: generation | 0x400 }));
                assert!(!id.is_of(Handle { index, generation: generation ^ 1 }));
            }
        }
        assert_eq!(WorkId::from_card(u64::MAX), None);
    }

    #[test]
    fn a_completion_ends_all_before_it() {
        let mut queue = WorkQueue::new(0, 4, 2);
        for round in 0..10u64 {
            for n in 0..4 {
                assert_eq!(u64::from(queue.free()), 4 - n);
                queue.next_regions().copy_from_slice(&[n as u32, 7]);
                let regions = Regions { first: n as u32, count: 2 };
                queue.push(Work::new(10 * round + n, WcOpcode::Send, true, regions, 0));
            }
            assert_eq!(queue.free(), 0);
            assert_eq!((queue.users_of(7), queue.users_of(2), queue.users_of(9)), (4, 1, 0));
            let first = queue.head.wrapping_sub(4);
            assert!(
                queue.complete(first.wrapping_add(4)).is_none()
                    && queue.complete(first.wrapping_sub(1)).is_none()
            );
            assert_eq!(queue.complete(first.wrapping_add(1)).map(|work| work.wr_id), Some(10 * round + 1));
            assert_eq!((queue.users_of(7), queue.users_of(0), queue.users_of(3)), (2, 0, 1));
            assert!(queue.complete(first).is_none(), "done already");
            assert_eq!(queue.pop_oldest().map(|work| work.wr_id), Some(10 * round + 2));
            queue.clear();
            assert!(queue.pop_oldest().is_none() && queue.users_of(7) == 0);
        }
    }

    #[test]
    fn the_card_reports_one_in_several_unsignaled_sends() {
        let mut queue = WorkQueue::new(7 << 32, 8, 1);
        let silent = Work::new(0, WcOpcode::Send, false, Regions::default(), 0);
        let told: Vec<bool> = (0..8).map(|_| queue.push_send(silent).1).collect();
        assert_eq!(told, [false, false, false, false, true, false, false, false]);
        assert_eq!(queue.free(), 0);
        assert_eq!((queue.complete(4).is_some(), queue.len()), (true, 3));
        // A refused one may have been the one to report.
        queue.pop_newest();
        assert_eq!(queue.push_send(silent), (7 << 32 | 7, true));
        assert!(!queue.push_send(silent).1 && queue.push_send(Work { signaled: true, ..silent }).1);
    }

    #[test]
    fn windows_complete_with_later_work_requests() {
        let mut queue = WorkQueue::new(0, 8, 1);
        queue.head = u32::MAX - 1;
        queue.clear();
        let work = Work::new(0, WcOpcode::BindMw, false, Regions::default(), 0);
        for index in 0..3 {
            queue.push(work);
            queue.newest_is_of(WindowWork::Invalidate { rkey: index });
        }
        queue.pop_newest();
        assert!(queue.has_windows() && queue.complete(u32::MAX).is_some());
        let windows: Vec<_> = std::iter::from_fn(|| queue.pop_window(u32::MAX)).collect();
        assert_eq!(
            windows,
            [(WindowWork::Invalidate { rkey: 0 }, false), (WindowWork::Invalidate { rkey: 1 }, true)]
        );
        assert!(!queue.has_windows());
    }
}
