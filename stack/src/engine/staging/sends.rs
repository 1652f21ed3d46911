//! Data that a queue pair sends from device memory: gathered ahead of the cursor, and held until it is acknowledged or
//! others need the chunks.

use ferroce_wire::FrameBuilder;

use super::stream::{Stream, Taken};
use super::{Purpose, StagingPool};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::verbs::{Qp, WcStatus};

/// The bytes of work requests with device memory, one after the other.
pub(crate) struct Sends {
    stream: Stream,
    /// The work request whose bytes are gathered next, and its first byte to gather.
    next: u32,
    offset: u32,
    /// The position of each work request's first byte in the stream, by its place in the queue.
    starts: Box<[u64]>,
}

impl Sends {
    /// Whether a copy is outstanding.
    pub(crate) fn is_copying(&self) -> bool {
        self.stream.is_copying()
    }

    pub(crate) fn new(qp: Qp, pool: &StagingPool, depth: u32, head: u32) -> Sends {
        let starts = vec![0; depth as usize].into();
        Sends { stream: Stream::new((qp, Purpose::Sends), pool), next: head, offset: 0, starts }
    }

    /// The position of a work request's byte in the stream, if copies of all bytes before it were started.
    fn position(&self, number: u32, offset: u32) -> Option<u64> {
        let ahead = self.next.wrapping_sub(number) as i32;
        let start = self.starts[self.place(number)];
        (ahead > 0 || ahead == 0 && offset <= self.offset && self.offset > 0)
            .then(|| start.wrapping_add(offset.into()))
    }

    fn place(&self, number: u32) -> usize {
        number as usize & (self.starts.len() - 1)
    }

    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        self.stream.ended(number, succeeded);
    }

    /// Drops all; data is gathered again from byte `offset` of the work request `head` on.
    pub(crate) fn restart(&mut self, pool: &mut StagingPool, head: u32, offset: u32) {
        self.stream.clear(pool);
        self.start_at(head, offset);
    }

    fn start_at(&mut self, head: u32, offset: u32) {
        (self.next, self.offset) = (head, offset);
        let place = self.place(head);
        self.starts[place] = self.stream.end().wrapping_sub(offset.into());
    }
}

impl QueuePair {
    /// Whether a work request's bytes are gathered from device memory before they are sent.
    pub(crate) fn is_gathered(&self, shared: &Shared, number: u32) -> bool {
        let wqe = self.sq.wqe(number);
        wqe.kind.has_payload && wqe.length > 0 && shared.mrs.has_device(self.sq.sges(number))
    }

    /// A packet was not sent, because its `len` bytes from `offset` on were not there. The bytes needed next are gathered;
    /// the work request fails, in order, if they can't be. Returns whether they are there now, as bytes of host memory in a
    /// list with device memory may be.
    pub(crate) fn await_gather(&mut self, shared: &mut Shared, number: u32, offset: u32, len: u32) -> bool {
        self.stage(shared);
        self.gather_sends(shared);
        let Some(staged) = &self.staged else { return false };
        let Some(end) = staged.sends.position(number, offset + len) else { return false };
        if !staged.sends.stream.lacks(end) {
            return staged.sends.stream.has(end);
        }
        // The error completes in order, after everything posted before.
        if number == self.sq.head() {
            self.fail_oldest(shared, WcStatus::FatalErr);
        }
        false
    }

    /// Whether the data to send next is being copied, or waits for chunks while no answer is outstanding.
    pub(crate) fn awaits_staging(&mut self, shared: &Shared) -> bool {
        let next = (self.requester.cursor(), self.requester.cursor_packet());
        let (number, packet) = self.next_lost(self.requester.una()).unwrap_or(next);
        let (Some(staged), Some(path_mtu)) = (&self.staged, self.path_mtu()) else { return false };
        if number == self.sq.tail() || !self.sq.wqe(number).started {
            return false;
        }
        let wqe = self.sq.wqe(number);
        // Otherwise answers to what was sent are missing, and these may free chunks.
        let is_oldest = wqe.first_psn + packet == self.requester.una();
        let awaits_room = is_oldest && shared.staging.waiting.waits_to_send(self.handle);
        if wqe.kind.is_read {
            return awaits_room;
        }
        let end = ((packet + 1) << path_mtu.shift()).min(wqe.length);
        let is_there = staged.sends.position(number, end).is_some_and(|end| staged.sends.stream.has(end));
        self.is_gathered(shared, number) && !is_there && (staged.sends.stream.is_copying() || awaits_room)
    }

    /// Starts copies for the data to send next, as far as there are chunks.
    fn gather_sends(&mut self, shared: &mut Shared) {
        self.free_sends(shared);
        let fetching = self.is_fetching();
        let (handle, head, tail) = (self.handle, self.sq.head(), self.sq.tail());
        while let Some(staged) = &self.staged
            && staged.sends.next != tail
        {
            let number = staged.sends.next;
            let is_gathered = self.is_gathered(shared, number);
            let wqe = self.sq.wqe(number);
            let Some(staged) = &mut self.staged else { return };
            let sends = &mut staged.sends;
            if !is_gathered {
                (sends.next, sends.offset) = (number.wrapping_add(1), 0);
                continue;
            }
            // Data of earlier READs may be part of the data to send.
            if wqe.flags.fence && !wqe.started && (number != head || fetching) {
                return;
            }
            let Shared { staging, mrs, now, .. } = &mut *shared;
            if sends.offset == 0 {
                sends.stream.begin(staging, wqe.length);
                let place = sends.place(number);
                sends.starts[place] = sends.stream.end();
            }
            let mut room = sends.stream.room(staging, *now);
            if room.is_none() && number == head && !sends.stream.has_its_share(staging) {
                // Chunks that later READs have reserved are of no use before it has completed.
                let has_more = staged.responses.yield_parts(staging);
                room = has_more.then(|| sends.stream.room(staging, *now)).flatten();
            }
            let Some(room) = room else {
                if number == head && self.requester.is_asked_again() {
                    shared.staging.waiting.hasten(handle, Purpose::Sends);
                }
                return;
            };
            let wanted = room.len.min((wqe.length - sends.offset) as usize);
            let next = mrs.next_source(self.sq.sges(number), sends.offset, wanted);
            match sends.stream.take(staging, *now, room, next) {
                Taken::Bytes(bytes) => sends.offset += bytes.min(wanted as u32),
                Taken::Nothing => return,
            }
            if sends.offset == wqe.length {
                (sends.next, sends.offset) = (number.wrapping_add(1), 0);
            }
        }
    }

    /// Completes a frame with bytes that are not in one piece of host memory; `None` if they are not there.
    #[cold]
    #[inline(never)]
    pub(crate) fn fill_in_parts(
        &self,
        shared: &Shared,
        frame: FrameBuilder<'_>,
        (number, offset, len): (u32, u32, u32),
    ) -> Option<(usize, usize)> {
        if len == 0 || !self.is_gathered(shared, number) {
            return Some(frame.fill(shared.crc, shared.mrs.pieces(self.sq.sges(number), offset, len)));
        }
        let sends = &self.staged.as_ref()?.sends;
        let position = sends.position(number, offset)?;
        let end = position.wrapping_add(len.into());
        if sends.position(number, offset + len).is_none() || sends.stream.lacks(end) || !sends.stream.has(end)
        {
            return None;
        }
        let span = sends.stream.span(&shared.staging, position, len as usize)?;
        Some(frame.fill(shared.crc, std::iter::once(span)))
    }

    /// The oldest work request with bytes in the stream, and the first unacknowledged byte.
    fn oldest_gathered(&self, shared: &Shared) -> Option<(u32, u32)> {
        let sends = &self.staged.as_ref()?.sends;
        let executed = self.executed_by_peer();
        let mut number = self.sq.head();
        while (sends.next.wrapping_sub(number) as i32) >= 0 && number != self.sq.tail() {
            let wqe = self.sq.wqe(number);
            let done = if wqe.started { executed.distance(wqe.first_psn).max(0) } else { 0 };
            let is_executed = wqe.started && done as u32 >= wqe.packets;
            if !is_executed && self.is_gathered(shared, number) {
                let shift = self.path_mtu().map_or(0, |path_mtu| path_mtu.shift());
                return Some((number, ((done as u32) << shift).min(wqe.length)));
            }
            number = number.wrapping_add(1);
        }
        None
    }

    /// Releases acknowledged data.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_sends(&mut self, shared: &mut Shared) {
        let oldest = self.oldest_gathered(shared);
        let head = self.sq.head();
        let Some(staged) = &mut self.staged else { return };
        let sends = &mut staged.sends;
        if (sends.next.wrapping_sub(head) as i32) < 0 {
            (sends.next, sends.offset) = (head, 0);
        }
        let pool = &mut shared.staging;
        let Some((number, done)) = oldest else {
            sends.stream.give_up(pool);
            return;
        };
        match sends.position(number, done) {
            Some(kept) => sends.stream.free(pool, kept),
            // More is acknowledged than was gathered again. The next bytes start with a packet, so that no packet spans two
            // chunks.
            None => {
                sends.stream.clear_used(pool);
                sends.start_at(number, done);
            }
        }
    }

    /// Drops gathered data, because others need the chunks: it is gathered again when it is sent.
    #[cold]
    pub(crate) fn give_up_sends(&mut self, shared: &mut Shared) {
        let (head, done) = self.oldest_gathered(shared).unwrap_or((self.sq.head(), 0));
        if let Some(staged) = &mut self.staged {
            staged.sends.restart(&mut shared.staging, head, done);
        }
    }
}
