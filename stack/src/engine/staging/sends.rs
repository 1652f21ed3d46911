//! What a queue pair sends from memory of a device: gathered ahead of the cursor, kept until it is acknowledged.

use ferroce_wire::FrameBuilder;

use super::stream::{Stream, Taken};
use super::{Purpose, StagingPool};
use crate::engine::qp::QueuePair;
use crate::engine::shared::Shared;
use crate::verbs::WcStatus;

/// The bytes of work requests with memory of a device, one after the other.
pub(crate) struct Sends {
    stream: Stream,
    /// The work request whose bytes are gathered next, and from which on.
    next: u32,
    offset: u32,
    /// Where each work request begins in the stream, by its place in the queue.
    starts: Box<[u64]>,
}

impl Sends {
    pub(crate) fn new(pool: &StagingPool, depth: u32, head: u32) -> Sends {
        let starts = vec![0; depth as usize].into();
        Sends { stream: Stream::new(Purpose::Sends, pool), next: head, offset: 0, starts }
    }

    fn start(&mut self, number: u32) -> &mut u64 {
        let places = self.starts.len();
        &mut self.starts[number as usize & (places - 1)]
    }

    /// Where a byte of a work request is in the stream, if copies of all bytes before it were started.
    fn position(&self, number: u32, offset: u32) -> Option<u64> {
        let ahead = self.next.wrapping_sub(number) as i32;
        let start = self.starts[number as usize & (self.starts.len() - 1)];
        (ahead > 0 || ahead == 0 && offset <= self.offset && self.offset > 0).then(|| start + u64::from(offset))
    }

    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) {
        self.stream.ended(number, succeeded);
    }

    /// Nothing was posted, or all of it was flushed.
    pub(crate) fn restart(&mut self, pool: &mut StagingPool, head: u32) {
        self.stream.give_up(pool);
        (self.next, self.offset) = (head, 0);
    }
}

impl QueuePair {
    /// Whether the `len` bytes of a work request from `offset` on are not there yet. What is needed next is gathered; the work
    /// request fails if it can't be, in its turn.
    #[cold]
    #[inline(never)]
    pub(crate) fn awaits_gather(&mut self, shared: &mut Shared, number: u32, offset: u32, len: u32) -> bool {
        self.stage(shared);
        self.gather_sends(shared);
        let Some(staged) = &self.staged else { return true };
        let Sends { stream, .. } = &staged.sends;
        let end = staged.sends.position(number, offset + len);
        if end.is_some_and(|end| stream.lacks(end)) {
            // The error completes in order, after everything posted before.
            if number == self.sq.head() {
                self.fail_oldest(shared, WcStatus::FatalErr);
            }
            return true;
        }
        !end.is_some_and(|end| stream.has(end))
    }

    /// Starts copies for what is sent next, as far as there is room.
    fn gather_sends(&mut self, shared: &mut Shared) {
        let fetching = self.is_fetching();
        let (handle, head, tail) = (self.handle, self.sq.head(), self.sq.tail());
        let Some(staged) = &mut self.staged else { return };
        let sends = &mut staged.sends;
        if (sends.next.wrapping_sub(head) as i32) < 0 {
            (sends.next, sends.offset) = (head, 0);
        }
        while sends.next != tail {
            let number = sends.next;
            let wqe = self.sq.wqe(number);
            if !wqe.is_gathered() {
                (sends.next, sends.offset) = (number.wrapping_add(1), 0);
                continue;
            }
            // What READs before it bring may be what it sends.
            let waits = wqe.flags.fence && !wqe.started && (number != head || fetching);
            if waits {
                return;
            }
            if sends.offset == 0 {
                *sends.start(number) = sends.stream.end();
            }
            let Shared { staging, mrs, now, .. } = shared;
            let Some(room) = sends.stream.room(staging, *now, handle) else { return };
            let wanted = room.len.min((wqe.length - sends.offset) as usize);
            let next = mrs.next_source(self.sq.sges(number), sends.offset, wanted);
            match sends.stream.take(staging, *now, handle, room, next) {
                Taken::Bytes(bytes) => sends.offset += bytes,
                Taken::Nothing => return,
            }
            if sends.offset == wqe.length {
                (sends.next, sends.offset) = (number.wrapping_add(1), 0);
            }
        }
    }

    /// Ends a frame with bytes of a device's memory, which are there.
    #[cold]
    #[inline(never)]
    pub(crate) fn fill_gathered(
        &self,
        shared: &Shared,
        frame: FrameBuilder<'_>,
        (number, offset, len): (u32, u32, u32),
    ) -> (usize, usize) {
        let spans = self.staged.as_ref().and_then(|staged| {
            let position = staged.sends.position(number, offset)?;
            Some(staged.sends.stream.spans(&shared.staging, position, len as usize))
        });
        frame.fill(shared.crc, spans.unwrap_or_default().into_iter())
    }

    /// What was acknowledged is kept no longer.
    #[cold]
    #[inline(never)]
    pub(crate) fn free_sends(&mut self, shared: &mut Shared) {
        let (Some(staged), head) = (&mut self.staged, self.sq.head()) else { return };
        let sends = &mut staged.sends;
        // The oldest that is not complete and has bytes there.
        let mut number = head;
        let kept = loop {
            if (sends.next.wrapping_sub(number) as i32) < 0 || number == self.sq.tail() {
                break sends.stream.end();
            }
            let wqe = self.sq.wqe(number);
            if wqe.is_gathered() {
                let done = if wqe.started { self.requester.una().distance(wqe.first_psn).max(0) } else { 0 };
                let shift = self.connection.as_ref().map_or(0, |connection| connection.path_mtu.shift());
                let done = (u64::from(done as u32) << shift).min(wqe.length.into());
                break sends.position(number, 0).map_or(sends.stream.end(), |start| start + done);
            }
            number = number.wrapping_add(1);
        };
        if sends.stream.free(&mut shared.staging, kept) && sends.next != self.sq.tail() {
            self.schedule(shared);
        }
    }
}
