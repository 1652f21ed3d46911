//! What a process shows the others of its host: which operation each of its communicators has begun and ended, and where
//! that one's elements are.

use std::sync::atomic::{Ordering, fence};

use ferroce::driver::segment::{Segment, SegmentError, Ticket};
use zerocopy::{FromBytes, IntoBytes};

use crate::channel::message::Header;

/// Bytes of elements that are shown with the operation itself.
pub(super) const INLINE: usize = 1024;
/// Communicators of a process that can be shown.
const SLOTS: usize = 64;
/// Segments that are no more, of which others can find out which.
const NONCES_MAX: u64 = 64;

// A board: its head (whether the process sleeps; how many of its segments are no more, and which were the last), then slots. Of a slot: whose it is, what has begun, what has ended, each in a cache line of its own;
// then, twice and used in turns, what has begun in words, and its elements if they are few.
const ASLEEP: usize = 0;
const RETIRED: usize = 64;
const NONCES: usize = 128;
const HEAD: usize = NONCES + 8 * NONCES_MAX as usize;
const BEGUN: usize = 64;
const ENDED: usize = 128;
const WORDS: usize = 192;
const WORDS_EACH: usize = 128;
const ELEMENTS: usize = WORDS + 2 * WORDS_EACH;
const SLOT: usize = ELEMENTS + 2 * INLINE;

/// A process's board.
#[derive(Debug)]
pub(super) struct Board(pub(super) Segment);

/// Where elements of a rank are: in a segment of its process, or shown with the operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) fd: u32,
    pub(super) length: u64,
    /// 0 if there is no segment.
    pub(super) nonce: u64,
    pub(super) offset: u64,
}

impl Board {
    pub(super) fn create() -> Result<Board, SegmentError> {
        Segment::create(HEAD + SLOTS * SLOT).map(Board)
    }

    pub(super) fn open(ticket: &Ticket) -> Result<Board, SegmentError> {
        if ticket.length as usize != HEAD + SLOTS * SLOT {
            return Err(SegmentError::Memory(format!("a board of {} bytes", ticket.length)));
        }
        Segment::open(ticket).map(Board)
    }

    fn at(slot: usize, field: usize) -> usize {
        HEAD + slot * SLOT + field
    }

    /// Where elements are that are shown with an operation.
    pub(super) fn elements(slot: usize, number: u64) -> u64 {
        Board::at(slot, ELEMENTS + number as usize % 2 * INLINE) as u64
    }

    /// Takes a free slot for a communicator.
    pub(super) fn take(&self, communicator: u64) -> Option<usize> {
        let free = (0..SLOTS).find(|slot| self.0.word(Board::at(*slot, 0)).load(Ordering::Relaxed) == 0)?;
        for field in [BEGUN, ENDED] {
            self.0.word(Board::at(free, field)).store(0, Ordering::Relaxed);
        }
        self.0.word(Board::at(free, 0)).store(communicator, Ordering::Release);
        Some(free)
    }

    /// Frees a slot.
    pub(super) fn free(&self, slot: usize) {
        self.0.word(Board::at(slot, 0)).store(0, Ordering::Release);
    }

    /// The slot of a communicator, once its process has taken one.
    pub(super) fn find(&self, communicator: u64) -> Option<usize> {
        (0..SLOTS).find(|slot| self.0.word(Board::at(*slot, 0)).load(Ordering::Acquire) == communicator)
    }

    /// Shows that an operation has begun.
    pub(super) fn begin(&self, slot: usize, number: u64, header: &Header, places: &[Shown; 2]) {
        let at = Board::at(slot, WORDS + number as usize % 2 * WORDS_EACH);
        let words = header.as_bytes().as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let places =
            places.iter().flat_map(|place| [place.fd.into(), place.length, place.nonce, place.offset]);
        for (index, word) in words.chain(places).enumerate() {
            self.0.word(at + 8 * index).store(word, Ordering::Relaxed);
        }
        self.0.word(Board::at(slot, BEGUN)).store(number, Ordering::Release);
    }

    /// Shows that an operation has ended.
    pub(super) fn end(&self, slot: usize, number: u64) {
        self.0.word(Board::at(slot, ENDED)).store(number, Ordering::Release);
    }

    pub(super) fn has_begun(&self, slot: usize, number: u64) -> bool {
        self.0.word(Board::at(slot, BEGUN)).load(Ordering::Acquire) >= number
    }

    pub(super) fn has_ended(&self, slot: usize, number: u64) -> bool {
        self.0.word(Board::at(slot, ENDED)).load(Ordering::Acquire) >= number
    }

    /// An operation that has begun.
    pub(super) fn read(&self, slot: usize, number: u64) -> (Header, [Shown; 2]) {
        let at = Board::at(slot, WORDS + number as usize % 2 * WORDS_EACH);
        let word = |index: usize| self.0.word(at + 8 * index).load(Ordering::Relaxed);
        let header: [u8; Header::BYTES] =
            zerocopy::transmute!([0, 1, 2, 3].map(|index| word(index).to_ne_bytes()));
        let place = |first: usize| Shown {
            fd: word(first) as u32,
            length: word(first + 1),
            nonce: word(first + 2),
            offset: word(first + 3),
        };
        // Any bytes are a header.
        let header = Header::read_from_bytes(&header).unwrap_or_else(|_| unreachable!("as long as a header"));
        (header, [place(4), place(8)])
    }

    /// A segment of the process is no more.
    pub(super) fn retire(&self, nonce: u64) {
        let count = self.0.word(RETIRED).load(Ordering::Relaxed);
        self.0.word(Board::nonce(count)).store(nonce, Ordering::Relaxed);
        self.0.word(RETIRED).store(count + 1, Ordering::Release);
    }

    /// How many are no more.
    pub(super) fn retired(&self) -> u64 {
        self.0.word(RETIRED).load(Ordering::Acquire)
    }

    /// Whether a segment is among those that are no more, from the `since`th on; also if there were too many to know.
    pub(super) fn has_retired(&self, nonce: u64, since: u64) -> bool {
        let count = self.retired();
        let is_it = |number: u64| self.0.word(Board::nonce(number)).load(Ordering::Relaxed) == nonce;
        count.saturating_sub(since) >= NONCES_MAX || (since..count).any(is_it)
    }

    fn nonce(number: u64) -> usize {
        NONCES + 8 * (number % NONCES_MAX) as usize
    }

    /// The process is about to sleep: whoever shows it something wakes it.
    pub(super) fn sleep(&self) {
        self.0.word(ASLEEP).store(1, Ordering::Relaxed);
        // What others showed before they could see this is seen.
        fence(Ordering::SeqCst);
    }

    pub(super) fn rise(&self) {
        self.0.word(ASLEEP).store(0, Ordering::Relaxed);
    }

    /// Whether it sleeps; it has to be woken once.
    pub(super) fn is_to_be_woken(&self) -> bool {
        let word = self.0.word(ASLEEP);
        word.load(Ordering::Relaxed) == 1 && word.swap(0, Ordering::Relaxed) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::channel::message::{Call, Count, Purpose};
    use crate::operation::Kind;
    use crate::schedule::Algorithm;
    use ferroce::driver::reduction::DataType;

    #[test]
    fn another_process_finds_what_is_shown() {
        let own = Board::create().unwrap();
        let there = Board::open(&own.0.ticket()).unwrap();
        assert_eq!(there.find(77), None);
        let slot = own.take(77).unwrap();
        assert_eq!((there.find(77), own.take(78)), (Some(slot), Some(slot + 1)));
        let call = Call {
            number: 3,
            kind: Kind::AllReduce,
            data_type: DataType::F16,
            reduction: 1,
            algorithm: Algorithm::Mapped,
            root: 0,
            count: Count::Each(9),
        };
        let header = Header::new(&call, Purpose::Call, 0);
        let places = [Shown { fd: 3, length: 4096, nonce: 5, offset: 64 }, Shown::default()];
        assert!(!there.has_begun(slot, 1));
        own.begin(slot, 1, &header, &places);
        assert!(there.has_begun(slot, 1) && !there.has_ended(slot, 1));
        assert_eq!(there.read(slot, 1), (header, places));
        own.end(slot, 1);
        assert!(there.has_ended(slot, 1));
        own.free(slot);
        assert_eq!(there.find(77), None);
        own.retire(9);
        assert!(there.has_retired(9, 0) && !there.has_retired(9, 1) && !there.has_retired(8, 0));
        (0..NONCES_MAX).for_each(|nonce| own.retire(nonce));
        assert!(there.has_retired(1000, 0) && !there.has_retired(1000, there.retired()));
        own.sleep();
        assert!(there.is_to_be_woken() && !there.is_to_be_woken());
    }
}
