//! A ring of frames from one process to another, in memory that both have mapped.
//!
//! It is a ring of bytes. An entry is a whole number of cache lines. It begins with a word that describes the entry,
//! followed by the head of a frame. If the payload of the frame was placed, payload and tail begin at the third line
//! after it. The word is stored last: until the next entry is complete, there is a zero at its beginning. So the
//! consumer reads no index for a frame, and sees a new frame with its first cache line. From time to time the consumer
//! stores its position.
//!
//! The ends need not trust each other. A word is read once and checked, a frame is copied out before it is used, and an
//! invalid index closes the ring.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::memory::SpanMut;
use crate::sealed::{SealedError, SealedMemory};

/// The header, a page before the entries.
const HEADER: usize = 4096;
/// Words of the header, in separate cache lines, two lines apart because the prefetcher fetches pairs.
const MAGIC: usize = 0;
const CONSUMED: usize = 128;
const SLEEPING: usize = 256;
const READY: u64 = u64::from_be_bytes(*b"ferroce1");

const LINE: usize = 64;
/// The offset of the head of a frame in its entry.
const HEAD: usize = 8;
/// The offset of a payload, which limits the length of a head before it.
const PAYLOAD: usize = 3 * LINE;
/// The longest frame.
pub(crate) const FRAME_MAX: usize = 9216 + 64;
/// The most frames that become visible to the consumer at once, if they are sent at once.
const BATCH: u32 = 16;
/// The longest entry.
const ENTRY_MAX: usize = PAYLOAD + (FRAME_MAX + LINE).next_multiple_of(LINE);
/// Bytes of entries, a power of two.
const SIZE_MIN: usize = 1 << 16;
const SIZE_MAX: usize = 1 << 26;

/// The meaning of an entry's word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Entry {
    /// It is not written yet.
    None,
    /// The rest of the ring is skipped.
    Skip,
    Frame(Lengths),
}

/// Bytes of a frame before its payload, of the payload, and after it. A payload that was not placed is counted in the
/// head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lengths {
    pub(super) head: usize,
    pub(super) payload: usize,
    pub(super) tail: usize,
}

impl Lengths {
    fn word(self) -> u64 {
        1 << 63 | (self.head as u64) << 40 | (self.payload as u64) << 16 | self.tail as u64
    }

    pub(super) fn frame(self) -> usize {
        self.head + self.payload + self.tail
    }

    /// Bytes of the entry.
    fn entry(self) -> usize {
        let end = if self.payload == 0 { HEAD + self.head } else { PAYLOAD + self.payload + self.tail };
        end.next_multiple_of(LINE)
    }
}

const SKIP: u64 = 1 << 62;

impl Entry {
    /// Returns `None` for an invalid word.
    #[inline]
    fn of(word: u64) -> Option<Entry> {
        match word {
            0 => return Some(Entry::None),
            SKIP => return Some(Entry::Skip),
            _ => {}
        }
        let lengths = Lengths {
            head: (word >> 40 & 0x3fff) as usize,
            payload: (word >> 16 & 0x3fff) as usize,
            tail: (word & 0xff) as usize,
        };
        let head_max = if lengths.payload == 0 { FRAME_MAX } else { PAYLOAD - HEAD };
        let is_right = word == lengths.word()
            && (1..=head_max).contains(&lengths.head)
            && (lengths.payload > 0 || lengths.tail == 0)
            && lengths.frame() <= FRAME_MAX;
        is_right.then_some(Entry::Frame(lengths))
    }
}

/// The other end has written something invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Corrupt;

#[derive(Debug)]
struct Memory {
    memory: SealedMemory,
    /// Bytes of entries, checked when the memory was mapped.
    size: usize,
}

impl Memory {
    #[inline]
    fn place(&self, at: u64) -> usize {
        HEADER + (at as usize & (self.size - 1))
    }

    /// The word of the entry at `at`, a multiple of a cache line.
    #[inline]
    fn word(&self, at: u64) -> &AtomicU64 {
        self.memory.word(self.place(at))
    }

    /// Bytes from `at` to the end of the ring.
    #[inline]
    fn to_end(&self, at: u64) -> usize {
        self.size - (at as usize & (self.size - 1))
    }
}

/// The sending end.
#[derive(Debug)]
pub(super) struct FrameProducer {
    memory: Memory,
    /// Bytes written so far, and those that the consumer was known to have released.
    next: u64,
    consumed: u64,
    /// The position of the first entry of a batch, and its word, which is stored when the batch ends. Until then the
    /// consumer sees none of it, and does not fetch lines that are still being written.
    first: (u64, u64),
    /// Entries of the batch.
    batch: u32,
}

#[cfg(any(test, fuzzing))]
impl FrameProducer {
    /// The position of the consumer's index.
    pub(super) const CONSUMED: usize = CONSUMED;

    /// The position of the next entry's word in the memory.
    pub(super) fn next_word(&self) -> usize {
        self.memory.place(self.next)
    }

    /// The memory that the other end can write.
    #[cfg(test)]
    pub(super) fn memory(&self) -> &SealedMemory {
        &self.memory.memory
    }
}

#[cfg(any(test, fuzzing))]
impl FrameConsumer {
    /// The position of the next entry's word in the memory.
    pub(super) fn next_word(&self) -> usize {
        self.memory.place(self.next)
    }
}

impl FrameProducer {
    /// Creates a ring for `size` bytes of entries, a power of two. Returns it and its memory for the consumer.
    pub(super) fn create(size: usize) -> Result<(FrameProducer, OwnedFd), SealedError> {
        let size = size.clamp(SIZE_MIN, SIZE_MAX).next_power_of_two();
        let (memory, file) = SealedMemory::create("ferroce-shm", HEADER + size)?;
        memory.word(MAGIC).store(READY, Ordering::Release);
        let memory = Memory { memory, size };
        Ok((FrameProducer { memory, next: 0, consumed: 0, first: (0, 0), batch: 0 }, file))
    }

    /// Whether there is room for a frame of any length.
    #[inline]
    pub(super) fn has_room(&mut self) -> Result<bool, Corrupt> {
        // A skipped part at the end, the entry, and the word of the next entry.
        const NEEDED: u64 = (ENTRY_MAX + LINE + ENTRY_MAX + LINE) as u64;
        let size = self.memory.size as u64;
        if size - (self.next - self.consumed) < NEEDED {
            self.look()?;
        }
        Ok(size - (self.next - self.consumed) >= NEEDED)
    }

    /// Whether the consumer has released at least half of the ring.
    pub(super) fn is_half_empty(&mut self) -> Result<bool, Corrupt> {
        self.look()?;
        Ok(self.next - self.consumed <= self.memory.size as u64 / 2)
    }

    /// Bytes that the consumer was known to have released.
    pub(super) fn consumed(&self) -> u64 {
        self.consumed
    }

    /// Reads the consumer's position.
    fn look(&mut self) -> Result<(), Corrupt> {
        let consumed = self.memory.memory.word(CONSUMED).load(Ordering::Acquire);
        // Ahead of the bytes sent, or behind the earlier position.
        if consumed > self.next || consumed < self.consumed {
            return Err(Corrupt);
        }
        self.consumed = consumed;
        Ok(())
    }

    /// Begins an entry with space for a frame of any length. There is [room](FrameProducer::has_room).
    #[inline]
    fn begin(&mut self) {
        let left = self.memory.to_end(self.next);
        if left < ENTRY_MAX + LINE {
            self.memory.word(self.next + left as u64).store(0, Ordering::Relaxed);
            self.memory.word(self.next).store(SKIP, Ordering::Release);
            self.next += left as u64;
        }
    }

    /// The place for a payload of this length, of a frame that is then [published](FrameProducer::publish).
    #[inline]
    pub(super) fn place(&mut self, payload: usize) -> Option<SpanMut<'_>> {
        if payload > FRAME_MAX {
            return None;
        }
        self.begin();
        Some(self.memory.memory.span_mut(self.memory.place(self.next) + PAYLOAD, payload))
    }

    /// Sends a frame, of whose payload `payload` bytes are [placed](FrameProducer::place). It becomes visible at the
    /// [end](FrameProducer::flush) of its batch at the latest.
    ///
    /// # Panics
    /// If it is longer than the longest frame.
    #[inline]
    pub(super) fn publish(&mut self, head: &[u8], payload: usize, tail: &[u8]) {
        if payload == 0 {
            self.begin();
        }
        let lengths = Lengths { head: head.len(), payload, tail: tail.len() };
        let head_max = if payload == 0 { FRAME_MAX } else { PAYLOAD - HEAD };
        assert!(lengths.frame() <= FRAME_MAX && head.len() <= head_max, "a frame of {lengths:?} bytes");
        let place = self.memory.place(self.next);
        self.memory.memory.copy_in(place + HEAD, head);
        if payload > 0 {
            self.memory.memory.copy_in(place + PAYLOAD + payload, tail);
        }
        let next = self.next + lengths.entry() as u64;
        self.memory.word(next).store(0, Ordering::Relaxed);
        if self.batch == 0 {
            self.first = (self.next, lengths.word());
        } else {
            self.memory.word(self.next).store(lengths.word(), Ordering::Relaxed);
        }
        self.next = next;
        self.batch += 1;
        if self.batch == BATCH {
            self.flush();
        }
    }

    /// Ends a batch.
    #[inline]
    pub(super) fn flush(&mut self) {
        if self.batch > 0 {
            let (at, word) = self.first;
            self.memory.word(at).store(word, Ordering::Release);
            self.batch = 0;
        }
    }

    /// Whether the consumer sleeps and must be woken, checked after a [batch](FrameProducer::flush). True once for each
    /// sleep.
    #[inline]
    pub(super) fn wakes(&self) -> bool {
        fence(Ordering::SeqCst);
        let sleeping = self.memory.memory.word(SLEEPING);
        sleeping.load(Ordering::Relaxed) != 0 && sleeping.swap(0, Ordering::Relaxed) != 0
    }
}

/// The receiving end.
#[derive(Debug)]
pub(super) struct FrameConsumer {
    memory: Memory,
    next: u64,
    /// The last position stored for the producer.
    told: u64,
}

impl FrameConsumer {
    /// Opens the other end of a ring by the descriptor of its memory.
    pub(super) fn open(file: &OwnedFd) -> Result<FrameConsumer, String> {
        let memory = SealedMemory::open(file, HEADER + SIZE_MIN..=HEADER + SIZE_MAX)
            .map_err(|error| format!("{error:?}"))?;
        let size = memory.len() - HEADER;
        if !size.is_power_of_two() || memory.word(MAGIC).load(Ordering::Acquire) != READY {
            return Err(format!("memory of {} bytes is not a ring of frames", memory.len()));
        }
        Ok(FrameConsumer { memory: Memory { memory, size }, next: 0, told: 0 })
    }

    /// Whether there is an entry.
    #[inline]
    pub(super) fn is_ready(&self) -> bool {
        self.memory.word(self.next).load(Ordering::Acquire) != 0
    }

    /// Copies the next frame to the start of `frame`, which has room for the longest one, and returns its length.
    #[inline]
    pub(super) fn take(&mut self, frame: &mut [u8; FRAME_MAX]) -> Result<Option<usize>, Corrupt> {
        // A skipped part must be followed by an entry, so a second one is treated as no entry.
        for _ in 0..2 {
            let word = self.memory.word(self.next).load(Ordering::Acquire);
            match Entry::of(word).ok_or(Corrupt)? {
                Entry::None => return Ok(None),
                Entry::Skip => self.next += self.memory.to_end(self.next) as u64,
                Entry::Frame(lengths) => {
                    if lengths.entry() > self.memory.to_end(self.next) {
                        return Err(Corrupt);
                    }
                    let place = self.memory.place(self.next);
                    let Lengths { head, payload, .. } = lengths;
                    self.memory.memory.copy_out(place + HEAD, &mut frame[..head]);
                    if payload > 0 {
                        self.memory.memory.copy_out(place + PAYLOAD, &mut frame[head..lengths.frame()]);
                    }
                    self.next += lengths.entry() as u64;
                    if self.next - self.told >= self.memory.size as u64 / 8 {
                        self.tell();
                    }
                    return Ok(Some(lengths.frame()));
                }
            }
        }
        Err(Corrupt)
    }

    /// Prefetches the next frame, if it is there, while another one is processed: most of a frame's cost for its
    /// consumer is that its bytes are fetched from another core.
    #[inline]
    pub(super) fn prefetch(&self) {
        let word = self.memory.word(self.next).load(Ordering::Relaxed);
        if let Some(Entry::Frame(lengths)) = Entry::of(word) {
            self.memory.memory.prefetch(self.memory.place(self.next), lengths.entry());
        }
    }

    /// Stores for the producer how far the ring is released.
    #[inline]
    pub(super) fn tell(&mut self) {
        if self.told != self.next {
            self.told = self.next;
            self.memory.memory.word(CONSUMED).store(self.next, Ordering::Release);
        }
    }

    /// The consumer is about to sleep. Returns whether it may: not if there is an entry.
    pub(super) fn rest(&self) -> bool {
        self.memory.memory.word(SLEEPING).store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        !self.is_ready()
    }

    /// The consumer is awake.
    pub(super) fn rise(&self) {
        self.memory.memory.word(SLEEPING).store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use ferroce_driver_test_support::random::Random;

    use super::*;

    fn pair(size: usize) -> (FrameProducer, FrameConsumer) {
        let (producer, file) = FrameProducer::create(size).unwrap();
        let consumer = FrameConsumer::open(&file).unwrap();
        (producer, consumer)
    }

    /// The bytes of a frame, by its number.
    fn frame(number: u64, length: usize) -> Vec<u8> {
        (0..length).map(|at| (number as usize * 31 + at * 7 + (at >> 8)) as u8).collect()
    }

    /// Of all kinds: in one piece, and in three.
    fn length(number: u64) -> Lengths {
        let mut random = Random::new(number);
        match random.below(4) {
            0 => Lengths { head: 1 + random.below(FRAME_MAX as u64) as usize, payload: 0, tail: 0 },
            1 => Lengths { head: 1 + random.below(100) as usize, payload: 0, tail: 0 },
            2 => Lengths { head: 56, payload: 4096, tail: 4 },
            _ => {
                let head = 1 + random.below((PAYLOAD - HEAD) as u64) as usize;
                Lengths { head, payload: 1 + random.below(9000) as usize, tail: random.below(9) as usize }
            }
        }
    }

    fn send(producer: &mut FrameProducer, number: u64) {
        let Lengths { head, payload, tail } = length(number);
        let bytes = frame(number, head + payload + tail);
        if payload > 0 {
            producer.place(payload).unwrap().copy_from(bytes[head..head + payload].into());
        }
        producer.publish(&bytes[..head], payload, &bytes[head + payload..][..tail]);
        if number.is_multiple_of(3) {
            producer.flush();
        }
    }

    #[test]
    fn frames_are_received_unchanged() {
        for size in [SIZE_MIN, 1 << 19] {
            let (mut producer, mut consumer) = pair(size);
            let mut room = Box::new([0; FRAME_MAX]);
            let mut random = Random::from_env("FERROCE_SHM_SEED");
            let (mut sent, mut taken) = (0u64, 0u64);
            while taken < 20_000 {
                for _ in 0..random.below(40) {
                    if producer.has_room().unwrap() {
                        send(&mut producer, sent);
                        sent += 1;
                    }
                }
                producer.flush();
                for _ in 0..random.below(40) {
                    let Some(len) = consumer.take(&mut room).unwrap() else {
                        consumer.tell();
                        assert_eq!(taken, sent);
                        break;
                    };
                    assert_eq!(len, length(taken).frame());
                    assert!(room[..len] == frame(taken, len), "frame {taken}");
                    taken += 1;
                }
            }
        }
    }

    #[test]
    fn frames_are_sent_between_threads() {
        const COUNT: u64 = 100_000;
        let (mut producer, mut consumer) = pair(SIZE_MIN);
        let sender = std::thread::spawn(move || {
            let mut sent = 0;
            while sent < COUNT {
                if producer.has_room().unwrap() {
                    send(&mut producer, sent);
                    sent += 1;
                } else {
                    producer.flush();
                    std::thread::yield_now();
                }
            }
            producer.flush();
        });
        let mut room = Box::new([0; FRAME_MAX]);
        let mut taken = 0;
        while taken < COUNT {
            match consumer.take(&mut room).unwrap() {
                Some(len) => {
                    assert!(room[..len] == frame(taken, length(taken).frame()), "frame {taken}");
                    taken += 1;
                }
                None => {
                    consumer.tell();
                    std::thread::yield_now();
                }
            }
        }
        sender.join().unwrap();
    }

    #[test]
    fn a_consumer_that_sleeps_is_woken_once() {
        let (mut producer, consumer) = pair(SIZE_MIN);
        assert!(!producer.wakes());
        assert!(consumer.rest());
        send(&mut producer, 3);
        assert!(producer.wakes() && !producer.wakes());
        assert!(!consumer.rest(), "something is there");
        consumer.rise();
        assert!(!producer.wakes());
    }
}
