//! Bytes of a device's memory that are to be sent, in the order in which they are: gathered ahead, kept as long as they may be
//! needed.

use std::collections::VecDeque;

use ferroce_driver::gpu::{GpuError, QUEUE_DEPTH};
use ferroce_driver::{Nanos, Piece, Span};

use super::{Purpose, StagingPool};
use crate::engine::mr::Source;
use crate::verbs::Qp;

/// Positions count the bytes that were ever in it.
pub(crate) struct Stream {
    owner: (Qp, Purpose),
    /// Oldest first.
    chunks: VecDeque<u16>,
    /// The position of the first byte of the oldest chunk.
    base: u64,
    /// Copies were started for everything before it.
    end: u64,
    /// Those that have not ended, or stand behind one.
    copies: VecDeque<Copying>,
    /// Everything before it is there.
    ready: u64,
    /// Where the first bytes are that a copy has failed to bring.
    failed: Option<u64>,
    /// There was no chunk for what comes next.
    waits: bool,
}

struct Copying {
    number: u64,
    end: u64,
    ended: bool,
}

/// Room for the next bytes.
#[derive(Clone, Copy)]
pub(crate) struct Room {
    chunk: u16,
    at: usize,
    pub(crate) len: usize,
}

/// What became of bytes that were to be copied.
pub(crate) enum Taken {
    /// So many are being copied.
    Bytes(u32),
    /// None: the device takes no more copies now.
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

    /// Where the next bytes will be.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// Whether a copy is under way.
    pub(crate) fn is_copying(&self) -> bool {
        !self.copies.is_empty()
    }

    /// Whether the bytes before `end` are there.
    pub(crate) fn has(&self, end: u64) -> bool {
        end <= self.ready
    }

    /// Whether a copy has failed to bring bytes before `end`.
    pub(crate) fn lacks(&self, end: u64) -> bool {
        self.failed.is_some_and(|failed| failed < end)
    }

    /// Whether the queue pair has all the chunks for it that it may have.
    pub(crate) fn has_its_share(&self, pool: &StagingPool) -> bool {
        self.chunks.len() >= pool.share()
    }

    /// Room behind the end; `None` if the queue pair has its share, or there is no chunk.
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

    /// What comes next has so many bytes: if they end behind the chunk at the end, they begin with another one, so that no packet
    /// of theirs lies in two.
    pub(crate) fn begin(&mut self, pool: &StagingPool, bytes: u32) {
        let (_, at) = self.place(pool, self.end);
        let room = pool.chunk_bytes() - at;
        if at > 0 && bytes as usize > room {
            self.push(room, None);
        }
    }

    /// Starts a copy of these bytes to the room, or copies them if they are memory of the host.
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
            // Its region is gone, which is found out when it is sent.
            None => (len, Ok(None)),
        };
        match copy {
            Ok(copy) => self.push(bytes, copy),
            // It is told when there is room.
            Err(GpuError::Full { .. }) => return Taken::Nothing,
            Err(error) => {
                tracing::error!("a copy from a device can't begin: {error}");
                self.failed.get_or_insert(self.end);
                self.push(bytes, None);
            }
        }
        Taken::Bytes(bytes as u32)
    }

    /// So many bytes are being copied, or are there already.
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

    /// The `len` bytes of a packet from `position` on, which are there; `None` if they are there no more.
    pub(crate) fn span<'a>(&self, pool: &'a StagingPool, position: u64, len: usize) -> Option<Span<'a>> {
        position.checked_sub(self.base)?;
        let (index, at) = self.place(pool, position);
        Some(pool.span(*self.chunks.get(index)?, at, len))
    }

    /// Nothing before `position` is needed any more.
    pub(crate) fn free(&mut self, pool: &mut StagingPool, position: u64) {
        if position >= self.end {
            // All of it: the chunk at the end too.
            self.clear_used(pool);
        }
        while position.saturating_sub(self.base) >= pool.chunk_bytes() as u64
            && let Some(chunk) = self.chunks.pop_front()
        {
            pool.release(chunk);
            self.base += pool.chunk_bytes() as u64;
        }
    }

    /// Nothing of it is needed any more, nor what would come next.
    pub(crate) fn give_up(&mut self, pool: &mut StagingPool) {
        if self.waits {
            pool.waiting.leave(self.owner.0, self.owner.1);
        }
        self.clear(pool);
    }

    /// As [`clear`](Stream::clear), but for a chunk that was taken and has no bytes yet: it is for what comes next.
    pub(crate) fn clear_used(&mut self, pool: &mut StagingPool) {
        if self.base < self.end {
            self.clear(pool);
        }
    }

    /// Nothing of it is needed any more. Copies that are under way end without it.
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
