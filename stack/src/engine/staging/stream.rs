//! Bytes of device memory to send, in order: gathered in advance, and held as long as they may be needed.

use std::collections::VecDeque;

use ferroce_driver::gpu::{GpuError, QUEUE_DEPTH};
use ferroce_driver::{Nanos, Piece, Span};

use super::{Purpose, StagingPool};
use crate::engine::mr::Source;
use crate::verbs::Qp;

/// Positions count all bytes that were ever in it.
pub(crate) struct Stream {
    owner: (Qp, Purpose),
    /// The oldest first.
    chunks: VecDeque<u16>,
    /// The position of the first byte of the oldest chunk.
    base: u64,
    /// Copies were started for everything before it.
    end: u64,
    /// Copies that have not ended, or follow one that has not.
    copies: VecDeque<Copying>,
    /// Everything before it is there.
    ready: u64,
    /// The position of the first bytes whose copy has failed.
    failed: Option<u64>,
    /// There was no chunk for the next bytes.
    waits: bool,
}

struct Copying {
    number: u64,
    end: u64,
    ended: bool,
}

/// Space for the next bytes.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    chunk: u16,
    at: usize,
    pub(crate) len: usize,
}

/// The result of an attempt to copy bytes.
pub(crate) enum Taken {
    /// This many are being copied.
    Bytes(u32),
    /// None: the device accepts no more copies now.
    Nothing,
}

impl Stream {
    pub(crate) fn new(owner: (Qp, Purpose), pool: &StagingPool) -> Stream {
        let share = pool.share();
        Stream {
            owner,
            chunks: VecDeque::with_capacity(share),
            base: 0,
            end: 0,
            copies: VecDeque::with_capacity(2 * QUEUE_DEPTH + 1),
            ready: 0,
            failed: None,
            waits: false,
        }
    }

    /// The position of the next bytes.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Whether a copy is outstanding.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether the bytes before `end` are there.
    pub(crate) fn has(&self, end: u64) -> bool {
        end <= self.ready
    }

    /// Whether a copy of bytes before `end` has failed.
    pub(crate) fn lacks(&self, end: u64) -> bool {
        self.failed.is_some_and(|failed| failed < end)
    }

    /// Whether the queue pair has its maximum of chunks for it.
    pub(crate) fn has_its_share(&self, pool: &StagingPool) -> bool {
        self.chunks.len() >= pool.share()
    }

    /// Space after the end; `None` if the queue pair has its maximum, or there is no chunk.
    pub(crate) fn room(&mut self, pool: &mut StagingPool, now: Nanos) -> Option<Room> {
        let chunk_bytes = pool.chunk_bytes();
        let (index, at) = self.place(pool, self.end);
        if index == self.chunks.len() {
            if index == pool.share() {
                return None;
            }
            let chunk = pool.take(now, self.owner.0, self.owner.1);
            self.waits = chunk.is_none();
            self.chunks.push_back(chunk?);
        }
        Some(Room { chunk: self.chunks[index], at, len: chunk_bytes - at })
    }

    /// The next unit has this many bytes: if they do not fit in the last chunk, they start in another one, so that no
    /// packet of theirs spans two.
    pub(crate) fn begin(&mut self, pool: &StagingPool, bytes: u32) {
        let (_, at) = self.place(pool, self.end);
        let room = pool.chunk_bytes() - at;
        if at > 0 && bytes as usize > room {
            self.push(room, None);
        }
    }

    /// Starts a copy of these bytes, or copies them if they are host memory.
    pub(crate) fn take(
        &mut self,
        pool: &mut StagingPool,
        now: Nanos,
        room: Room,
        bytes: Option<Source<'_>>,
    ) -> Taken {
        let Room { chunk, at, len } = room;
        let (bytes, copy) = match bytes {
            Some(Source::Host(span)) => {
                pool.copy(chunk, at, span);
                (span.len(), Ok(None))
            }
            Some(Source::Device(copier, pieces)) => {
                let bytes = pieces.iter().map(Piece::len).sum();
                (bytes, pool.gather(now, (copier, &pieces), (chunk, at), self.owner).map(Some))
            }
            // Its region is gone, which is detected when it is sent.
            None => (len, Ok(None)),
        };
        match copy {
            Ok(copy) => self.push(bytes, copy),
            // The queue pair is notified when there is room.
            Err(GpuError::Full { .. }) => return Taken::Nothing,
            Err(error) => {
                tracing::error!("a copy from a device can't begin: {error}");
                self.failed.get_or_insert(self.end);
                self.push(bytes, None);
            }
        }
        Taken::Bytes(bytes as u32)
    }

    /// This many bytes are being copied, or are there already.
    fn push(&mut self, bytes: usize, copy: Option<u64>) {
        self.end += bytes as u64;
        match copy {
            None if self.copies.is_empty() => self.ready = self.end,
            None if let Some(last) = self.copies.back_mut().filter(|last| last.ended) => last.end = self.end,
            None => self.copies.push_back(Copying { number: 0, end: self.end, ended: true }),
            Some(number) => self.copies.push_back(Copying { number, end: self.end, ended: false }),
        }
    }

    /// A copy has ended. Returns whether it was one of these.
    pub(crate) fn ended(&mut self, number: u64, succeeded: bool) -> bool {
        let Some(index) = self.copies.iter().position(|copy| copy.number == number) else { return false };
        self.copies[index].ended = true;
        if !succeeded {
            let start = if index == 0 { self.ready } else { self.copies[index - 1].end };
            self.failed = Some(self.failed.map_or(start, |failed| failed.min(start)));
        }
        while let Some(copy) = self.copies.front().filter(|copy| copy.ended) {
            self.ready = copy.end;
            self.copies.pop_front();
        }
        true
    }

    /// The `len` bytes of a packet from `position` on, which are there; `None` if they were released.
    pub(crate) fn span<'a>(&self, pool: &'a StagingPool, position: u64, len: usize) -> Option<Span<'a>> {
        position.checked_sub(self.base)?;
        let (index, at) = self.place(pool, position);
        Some(pool.span(*self.chunks.get(index)?, at, len))
    }

    /// Nothing before `position` is needed any more.
    pub(crate) fn free(&mut self, pool: &mut StagingPool, position: u64) {
        if position >= self.end {
            // All of it, including the last chunk.
            self.clear_used(pool);
        }
        while position.saturating_sub(self.base) >= pool.chunk_bytes() as u64
            && let Some(chunk) = self.chunks.pop_front()
        {
            pool.release(chunk);
            self.base += pool.chunk_bytes() as u64;
        }
    }

    /// Neither its contents nor further bytes are needed any more.
    pub(crate) fn give_up(&mut self, pool: &mut StagingPool) {
        if self.waits {
            pool.waiting.leave(self.owner.0, self.owner.1);
        }
        self.clear(pool);
    }

    /// As [`clear`](Stream::clear), except for an allocated chunk without bytes: it is for the next ones.
    pub(crate) fn clear_used(&mut self, pool: &mut StagingPool) {
        if self.base < self.end {
            self.clear(pool);
        }
    }

    /// Its contents are not needed any more. Outstanding copies end without it.
    pub(crate) fn clear(&mut self, pool: &mut StagingPool) {
        self.chunks.drain(..).for_each(|chunk| pool.release(chunk));
        self.copies.clear();
        (self.base, self.ready, self.failed) = (self.end, self.end, None);
    }

    /// The chunk, counted from the oldest, and the byte there.
    fn place(&self, pool: &StagingPool, position: u64) -> (usize, usize) {
        let distance = position.saturating_sub(self.base) as usize;
        (distance / pool.chunk_bytes(), distance % pool.chunk_bytes())
    }
}
