//! Chunks of a queue that contain kept frames, and their return.
//!
//! The chunk of a kept frame is given back to the kernel after its holder has dropped the frame. The drop sets a bit,
//! on any thread (docs/decisions/06-driver-wrappers-and-kept-frames.md). While no frame is kept, polls do not check
//! these bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use xsk_rs::umem::Umem;

use crate::kept::{Home, Keeper, KeptFrame};

/// The kept frames of a queue.
#[derive(Debug)]
pub(super) struct Returns {
    home: Arc<Mailbox>,
    /// Frames that are kept, or were returned and have not been collected.
    kept: usize,
    limit: usize,
}

/// The frames returned by their holders, on any thread: one bit for each chunk.
#[derive(Debug)]
struct Mailbox {
    chunks: Box<[AtomicU64]>,
    /// Returned frames of several chunks, which had been copied.
    copies: AtomicUsize,
    /// Frames returned since the last collection.
    waiting: AtomicUsize,
    /// Keeps the frames' memory mapped.
    _umem: Umem,
}

// SAFETY: the UMEM is only held, and dropped by the last holder, for which `Send` is enough.
unsafe impl Sync for Mailbox {}

/// The token of a copy. No chunk has this number.
const COPY: usize = usize::MAX;

impl Returns {
    /// For a queue with this number of chunks, a quarter of which may be kept.
    pub(super) fn new(chunks: usize, umem: Umem) -> Returns {
        let words = (0..chunks.div_ceil(64)).map(|_| AtomicU64::new(0)).collect();
        let (copies, waiting) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let home = Mailbox { chunks: words, copies, waiting, _umem: umem };
        Returns { home: Arc::new(home), kept: 0, limit: chunks / 4 }
    }

    /// Frames that may be kept at once.
    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Calls `back` with the number, in the queue, of each chunk that was returned.
    #[inline]
    pub(super) fn collect(&mut self, back: impl FnMut(usize)) {
        if self.kept > 0 && self.home.waiting.load(Ordering::Relaxed) > 0 {
            self.open(back);
        }
    }

    #[cold]
    fn open(&mut self, mut back: impl FnMut(usize)) {
        let mut count = self.home.copies.swap(0, Ordering::Relaxed);
        for (word, chunks) in self.home.chunks.iter().enumerate() {
            if chunks.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // Acquire: the holder's reads of the frame happen before the kernel writes to the chunk again.
            let mut chunks = chunks.swap(0, Ordering::Acquire);
            while chunks != 0 {
                back(64 * word + chunks.trailing_zeros() as usize);
                chunks &= chunks - 1;
                count += 1;
            }
        }
        self.kept -= count;
        self.home.waiting.fetch_sub(count, Ordering::Relaxed);
    }

    /// A keeper of the frame in `chunk`, or of a frame in several chunks.
    #[inline]
    pub(super) fn keeper(&mut self, chunk: Option<usize>) -> ChunkKeeper<'_> {
        ChunkKeeper { returns: self, chunk, lent: false }
    }
}

/// Keeps one frame.
pub(super) struct ChunkKeeper<'a> {
    returns: &'a mut Returns,
    chunk: Option<usize>,
    /// Whether the holder has the chunk now.
    pub(super) lent: bool,
}

impl Keeper for ChunkKeeper<'_> {
    fn keep(&mut self, bytes: &[u8]) -> Option<KeptFrame> {
        if self.returns.kept == self.returns.limit {
            return None;
        }
        self.returns.kept += 1;
        let home = self.returns.home.clone();
        let Some(chunk) = self.chunk else { return Some(KeptFrame::copied(bytes, COPY, home)) };
        self.lent = true;
        // SAFETY: the bytes are of this chunk in the UMEM that `home` holds. The queue checks `lent`, and does not give
        // the chunk to the kernel until it is returned.
        Some(unsafe { KeptFrame::lent(bytes, chunk, home) })
    }
}

impl Home for Mailbox {
    fn give_back(&self, chunk: usize) {
        if chunk == COPY {
            self.copies.fetch_add(1, Ordering::Relaxed);
        } else {
            self.chunks[chunk / 64].fetch_or(1 << (chunk % 64), Ordering::Release);
        }
        // After the bit. A thread that sees the count may see the bit only later, and then looks again.
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }
}
