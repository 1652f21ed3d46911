//! The board, on which a process publishes for the others of its host: which operation each of its communicators has
//! started and ended, and the places of its elements.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use ferroce::driver::segment::{Segment, SegmentError, Ticket};
use zerocopy::{FromBytes, IntoBytes};

use crate::channel::message::Header;

/// Bytes of elements that are published with the operation itself.
pub(super) const INLINE: usize = 4096;
/// The most communicators of a process that can be published.
const SLOTS: usize = 512;
/// The most retired segments whose nonces others can look up.
const NONCES_MAX: u64 = 64;

// A board consists of a head (whether the process sleeps; the number of its retired segments, and the nonces of the last
// ones; the communicator of each slot) and of slots. A slot consists of a cache line for ended operations, and of two
// areas, used in turns, for started ones, each followed by the elements if they are few, or by their places. Each line
// contains its communicator: a slot is reused by another communicator after its own has left.
const ASLEEP: usize = 0;
const RETIRED: usize = 64;
const NONCES: usize = 128;
const DIRECTORY: usize = NONCES + 8 * NONCES_MAX as usize;
const HEAD: usize = DIRECTORY + 8 * SLOTS;
const LINE: usize = 64;
/// The line of ended operations: the number of the operation that has ended, the communicator, whether it has failed, the
/// number of the operation whose block is reduced.
const ENDED: usize = 0;
const FAILED: usize = 16;
const REDUCED: usize = 24;
/// The line of started operations: the number, the communicator, the header of the operation.
const BEGUN: usize = LINE;
const OF: usize = 8;
const WORDS: usize = 16;
const BEHIND: usize = WORDS + Header::BYTES;
const BEGUN_EACH: usize = (BEHIND + INLINE).next_multiple_of(LINE);
const SLOT: usize = BEGUN + 2 * BEGUN_EACH;

/// The board of a process.
#[derive(Debug)]
pub(super) struct Board(pub(super) Segment);

/// A communicator's slot on a board.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    index: usize,
    communicator: u64,
}

/// The place of a rank's elements: in a segment of its process, or published with the operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Shown {
    pub(super) fd: u32,
    pub(super) length: u64,
    /// 0 if there is no segment.
    pub(super) nonce: u64,
    pub(super) offset: u64,
}

impl Slot {
    fn at(self, field: usize) -> usize {
        HEAD + self.index * SLOT + field
    }

    /// The line of a started operation.
    fn begun(self, number: u64) -> usize {
        self.at(BEGUN + number as usize % 2 * BEGUN_EACH)
    }

    /// The offset of elements that are published with an operation.
    pub(super) fn elements(self, number: u64) -> u64 {
        (self.begun(number) + BEHIND) as u64
    }
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

    fn owner(&self, index: usize) -> &AtomicU64 {
        self.0.word(DIRECTORY + 8 * index)
    }

    /// Allocates a free slot for a communicator.
    pub(super) fn take(&self, communicator: u64) -> Option<Slot> {
        let index = (0..SLOTS).find(|index| self.owner(*index).load(Ordering::Relaxed) == 0)?;
        let slot = Slot { index, communicator };
        for field in [FAILED, REDUCED] {
            self.0.word(slot.at(field)).store(0, Ordering::Relaxed);
        }
        for line in [slot.at(ENDED), slot.begun(0), slot.begun(1)] {
            self.0.word(line + OF).store(communicator, Ordering::Relaxed);
            // A reader that sees a number also sees its communicator.
            self.0.word(line).store(0, Ordering::Release);
        }
        self.owner(index).store(communicator, Ordering::Release);
        Some(slot)
    }

    /// Frees a slot.
    pub(super) fn free(&self, slot: Slot) {
        for line in [slot.at(ENDED), slot.begun(0), slot.begun(1)] {
            self.0.word(line + OF).store(0, Ordering::Release);
        }
        self.owner(slot.index).store(0, Ordering::Release);
    }

    /// The slot of a communicator, once its process has allocated one.
    pub(super) fn find(&self, communicator: u64) -> Option<Slot> {
        let index = (0..SLOTS).find(|index| self.owner(*index).load(Ordering::Acquire) == communicator)?;
        Some(Slot { index, communicator })
    }

    /// Publishes that an operation has started, and the places of its elements if they do not follow.
    pub(super) fn begin(&self, slot: Slot, number: u64, header: &Header, places: Option<&[Shown; 2]>) {
        let line = slot.begun(number);
        let words = header.as_bytes().as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        let places = places.into_iter().flatten();
        let places = places.flat_map(|place| [place.fd.into(), place.length, place.nonce, place.offset]);
        for (index, word) in words.chain(places).enumerate() {
            self.0.word(line + WORDS + 8 * index).store(word, Ordering::Relaxed);
        }
        self.0.word(line).store(number, Ordering::Release);
    }

    /// Publishes that an operation has ended.
    pub(super) fn end(&self, slot: Slot, number: u64) {
        self.0.word(slot.at(ENDED)).store(number, Ordering::Release);
    }

    /// Publishes that the rank has reduced its block.
    pub(super) fn reduce(&self, slot: Slot, number: u64) {
        self.0.word(slot.at(REDUCED)).store(number, Ordering::Release);
    }

    /// Publishes that the communicator has failed: the published data of its ranks is invalid from now on.
    pub(super) fn fail(&self, slot: Slot) {
        self.0.word(slot.at(FAILED)).store(1, Ordering::Release);
        // Before any change of the memory by the program.
        fence(Ordering::SeqCst);
    }

    /// Whether an operation has started and no other one has since.
    pub(super) fn has_begun(&self, slot: Slot, number: u64) -> bool {
        let line = slot.begun(number);
        self.says(slot, [line, line + OF], |begun| begun == number)
    }

    pub(super) fn has_ended(&self, slot: Slot, number: u64) -> bool {
        self.says(slot, [slot.at(ENDED), slot.at(ENDED + OF)], |ended| ended >= number)
    }

    pub(super) fn has_reduced(&self, slot: Slot, number: u64) -> bool {
        self.says(slot, [slot.at(REDUCED), slot.at(ENDED + OF)], |reduced| reduced >= number)
    }

    /// Whether a word has the expected value, and its line still belongs to the communicator.
    fn says(&self, slot: Slot, [word, of]: [usize; 2], what: impl Fn(u64) -> bool) -> bool {
        what(self.0.word(word).load(Ordering::Acquire))
            && self.0.word(of).load(Ordering::Relaxed) == slot.communicator
    }

    /// Whether all that was read of an operation since its start is what the rank had published.
    pub(super) fn is_intact(&self, slot: Slot, number: u64) -> bool {
        // Earlier reads are ordered before the following one.
        fence(Ordering::Acquire);
        self.has_begun(slot, number) && self.0.word(slot.at(FAILED)).load(Ordering::Relaxed) == 0
    }

    /// The header of a started operation.
    pub(super) fn header(&self, slot: Slot, number: u64) -> Header {
        let at = slot.begun(number) + WORDS;
        let word = |index: usize| self.0.word(at + 8 * index).load(Ordering::Relaxed).to_ne_bytes();
        let header: [u8; Header::BYTES] = zerocopy::transmute!([0, 1, 2, 3].map(word));
        // Any bytes are a valid header.
        Header::read_from_bytes(&header).unwrap_or_else(|_| unreachable!("as long as a header"))
    }

    /// The places of the elements that do not follow the header.
    pub(super) fn places(&self, slot: Slot, number: u64) -> [Shown; 2] {
        let at = slot.begun(number) + BEHIND;
        let word = |index: usize| self.0.word(at + 8 * index).load(Ordering::Relaxed);
        [0, 4].map(|first| Shown {
            fd: word(first) as u32,
            length: word(first + 1),
            nonce: word(first + 2),
            offset: word(first + 3),
        })
    }

    /// A segment of the process no longer exists.
    pub(super) fn retire(&self, nonce: u64) {
        let count = self.0.word(RETIRED).load(Ordering::Relaxed);
        self.0.word(Board::nonce(count)).store(nonce, Ordering::Relaxed);
        // Other processes can write it.
        self.0.word(RETIRED).store(count.wrapping_add(1), Ordering::Release);
    }

    /// The number of retired segments.
    pub(super) fn retired(&self) -> u64 {
        self.0.word(RETIRED).load(Ordering::Acquire)
    }

    /// Whether a segment was retired, from the `since`th on; also if there were too many to know.
    pub(super) fn has_retired(&self, nonce: u64, since: u64) -> bool {
        let count = self.retired();
        let is_it = |number: u64| self.0.word(Board::nonce(number)).load(Ordering::Relaxed) == nonce;
        let is_there = count.saturating_sub(since) < NONCES_MAX && (since..count).any(is_it);
        fence(Ordering::Acquire);
        // The entries that were read may have been overwritten meanwhile.
        is_there || self.retired().saturating_sub(since) >= NONCES_MAX
    }

    fn nonce(number: u64) -> usize {
        NONCES + 8 * (number % NONCES_MAX) as usize
    }

    /// The process is about to sleep: a process that publishes for it must wake it.
    pub(super) fn sleep(&self) {
        self.0.word(ASLEEP).store(1, Ordering::Relaxed);
        // What others published before they could see this is visible.
        fence(Ordering::SeqCst);
    }

    pub(super) fn rise(&self) {
        self.0.word(ASLEEP).store(0, Ordering::Relaxed);
    }

    /// Whether it sleeps; it must be woken once.
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

    fn header() -> Header {
        let call = Call {
            number: 3,
            kind: Kind::AllReduce,
            data_type: DataType::F16,
            reduction: 1,
            algorithm: Algorithm::Mapped,
            root: 0,
            count: Count::Each(9),
        };
        Header::new(&call, Purpose::Call, 0)
    }

    #[test]
    fn another_process_reads_what_was_published() {
        let own = Board::create().unwrap();
        let there = Board::open(&own.0.ticket()).unwrap();
        assert_eq!(there.find(77), None);
        let slot = own.take(77).unwrap();
        assert_eq!(there.find(77), Some(slot));
        assert_ne!(own.take(78).unwrap().index, slot.index);
        let places = [Shown { fd: 3, length: 4096, nonce: 5, offset: 64 }, Shown::default()];
        assert!(!there.has_begun(slot, 1));
        own.begin(slot, 1, &header(), Some(&places));
        assert!(there.has_begun(slot, 1) && !there.has_ended(slot, 1) && there.is_intact(slot, 1));
        assert_eq!((there.header(slot, 1), there.places(slot, 1)), (header(), places));
        own.reduce(slot, 1);
        assert!(there.has_reduced(slot, 1) && !there.has_reduced(slot, 2) && !there.has_ended(slot, 1));
        own.end(slot, 1);
        assert!(there.has_ended(slot, 1) && !there.has_ended(slot, 2));
        own.begin(slot, 2, &header(), None);
        assert!(there.has_begun(slot, 2) && there.has_begun(slot, 1));
        own.begin(slot, 3, &header(), None);
        assert!(!there.is_intact(slot, 1));
        own.retire(9);
        assert!(there.has_retired(9, 0) && !there.has_retired(9, 1) && !there.has_retired(8, 0));
        (0..NONCES_MAX).for_each(|nonce| own.retire(nonce));
        assert!(there.has_retired(1000, 0) && !there.has_retired(1000, there.retired()));
        own.sleep();
        assert!(there.is_to_be_woken() && !there.is_to_be_woken());
    }

    #[test]
    fn a_reused_slot_is_not_mistaken_for_the_previous_communicators() {
        let own = Board::create().unwrap();
        let old = own.take(77).unwrap();
        own.begin(old, 1, &header(), None);
        own.end(old, 1);
        own.free(old);
        assert!(!own.has_begun(old, 1) && !own.has_ended(old, 1));
        assert_eq!(own.find(77), None);
        let new = own.take(78).unwrap();
        assert_eq!(new.index, old.index);
        for number in 1..=3 {
            own.begin(new, number, &header(), None);
            own.end(new, number);
        }
        assert!(own.has_ended(new, 3) && !own.has_ended(old, 1) && !own.has_begun(old, 3));
        own.fail(new);
        assert!(own.has_begun(new, 3) && !own.is_intact(new, 3));
    }
}
