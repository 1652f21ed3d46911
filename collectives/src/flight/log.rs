//! Writes a recording, one word at a time, by the thread that owns the communicators. A reader may see an operation
//! between two words of it.
//!
//! The memory is a `driver::segment`, which readers find by its name under `/proc/PID/fd`.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ferroce::Nanos;
use ferroce::driver::segment::Segment;
use zerocopy::IntoBytes;

use super::{layout as at, nanos};
use crate::channel::message::{Call, Header, Purpose};

/// The log of one communicator; without memory it writes nothing.
#[derive(Debug)]
pub(crate) struct Log {
    memory: Option<Arc<Segment>>,
    base: usize,
    count: Cell<u64>,
}

impl Log {
    /// Begins the log of a communicator, in the place of one that was left.
    pub(super) fn new(memory: Option<Arc<Segment>>, communicator: u64, (rank, size): (u32, u32)) -> Log {
        let place = memory.as_ref().and_then(|memory| free_place(memory));
        let memory = memory.filter(|_| place.is_some());
        if let (Some(memory), Some((base, true))) = (&memory, place) {
            // Meanwhile readers ignore it. Unused pages stay unused.
            let word = |field: usize| memory.word(base + field);
            word(at::COMMUNICATOR).store(0, Ordering::Release);
            for fields in
                used(word(at::COUNT).load(Ordering::Relaxed), word(at::PLACE).load(Ordering::Relaxed))
            {
                fields.step_by(8).for_each(|field| word(field).store(0, Ordering::Relaxed));
            }
        }
        let log = Log { memory, base: place.map_or(0, |(base, _)| base), count: Cell::new(0) };
        log.set(at::PLACE, pair(rank, size));
        if let Some(memory) = &log.memory {
            memory.word(log.base + at::COMMUNICATOR).store(communicator.max(1), Ordering::Release);
        }
        log
    }

    /// Whether there is room for it.
    pub(super) fn is_kept(&self) -> bool {
        self.memory.is_some()
    }

    #[inline]
    fn set(&self, field: usize, value: u64) {
        if let Some(memory) = &self.memory {
            memory.word(self.base + field).store(value, Ordering::Relaxed);
        }
    }

    /// There is no other writer.
    #[inline]
    fn change(&self, field: usize, change: impl FnOnce(u64) -> u64) {
        if let Some(memory) = &self.memory {
            let word = memory.word(self.base + field);
            word.store(change(word.load(Ordering::Relaxed)), Ordering::Relaxed);
        }
    }

    /// An operation is called. Returns its number.
    pub(crate) fn called(&self, call: &Call, bytes: u64, steps: usize, is_mapped: bool) -> u64 {
        let number = self.count.get();
        self.count.set(number + 1);
        let Some(memory) = &self.memory else { return number };
        let base = self.base + operation(number);
        memory.word(base + at::NUMBER).store(0, Ordering::Relaxed);
        let header = Header::new(call, Purpose::Call, 0);
        let words = header.as_bytes().as_chunks::<8>().0.iter().map(|word| u64::from_ne_bytes(*word));
        for (index, word) in words.enumerate() {
            memory.word(base + at::CALL + 8 * index).store(word, Ordering::Relaxed);
        }
        for (field, value) in [
            (at::BYTES, bytes),
            (at::BEGAN, 0),
            (at::FIRST, 0),
            (at::LAST, 0),
            (at::ENDED, 0),
            (at::STEPS, pair(steps as u32, 0)),
            (at::LATE, u64::from(is_mapped)),
            (at::LATE_TIME, 0),
            (at::WAITED, 0),
            (at::WAITS_FOR, 0),
            (at::WAITS_FOR_COUNT, 0),
        ] {
            memory.word(base + field).store(value, Ordering::Relaxed);
        }
        memory.word(base + at::NUMBER).store(number + 1, Ordering::Release);
        self.set(at::COUNT, number + 1);
        if call.number & (Call::OF_TWO | Call::OWN) == 0 {
            self.change(at::CALLS, |calls| calls + 1);
        }
        number
    }

    /// The first poll of an operation.
    pub(crate) fn began(&self, number: u64, now: Nanos) {
        self.of(number, at::BEGAN, some(now));
        self.change(at::STARTED, |started| if started == 0 { some(now) } else { started });
    }

    /// There was progress.
    pub(crate) fn moved(&self, number: u64, now: Nanos, (steps, done): (usize, usize)) {
        if let Some(base) = self.kept(number) {
            self.change(base + at::FIRST, |first| if first == 0 { some(now) } else { first });
            self.set(base + at::LAST, some(now));
            self.set(base + at::STEPS, pair(steps as u32, done as u32));
        }
    }

    /// An operation waits for these ranks: for this rank itself if its device has not completed its work.
    pub(crate) fn waits(&self, number: u64, peers: &[u32]) {
        let named = peers.iter().take(at::NAMED).rev();
        let named = named.fold(0, |word, peer| word << 16 | (u64::from(*peer) + 1) & 0xffff);
        self.of(number, at::WAITS_FOR, named);
        self.of(number, at::WAITS_FOR_COUNT, peers.len() as u64);
    }

    /// An operation was idle for this time, until a peer sent something.
    pub(crate) fn waited(&self, number: u64, peer: u32, time: Duration) {
        let nanos = nanos(time);
        if let Some(base) = self.kept(number) {
            self.change(base + at::WAITED, |waited| waited + nanos);
        }
        self.of_peer(peer, at::WAITED_FOR, nanos);
    }

    /// An operation has ended. The rank that started it last, if it was not this one, and how much later.
    pub(crate) fn ended(&self, number: u64, now: Nanos, late: Option<(u32, Duration)>) {
        let late = late.map(|(peer, by)| (peer, nanos(by)));
        if let Some(base) = self.kept(number) {
            self.set(base + at::ENDED, some(now));
            self.change(base + at::STEPS, |steps| pair((steps >> 32) as u32, (steps >> 32) as u32));
            if let Some((peer, nanos)) = late {
                self.change(base + at::LATE, |word| word | (u64::from(peer) + 1) << 32);
                self.set(base + at::LATE_TIME, nanos);
            }
        }
        if let Some((peer, nanos)) = late
            && let Some(base) = peer_at(peer)
        {
            self.change(base + at::QP, |word| word + 1);
            self.change(base + at::LATE_ALL, |all| all + nanos);
            self.change(base + at::LATE_MOST, |most| most.max(nanos));
        }
    }

    /// The queue pair to a peer.
    pub(crate) fn linked(&self, peer: u32, qp: u32) {
        if let Some(base) = peer_at(peer) {
            self.change(base + at::QP, |word| word & 0xffff_ffff | u64::from(qp) << 32);
        }
    }

    /// This many bytes of elements were sent to a peer.
    pub(crate) fn sent(&self, peer: u32, bytes: u64, is_chunk: bool) {
        self.of_peer(peer, at::SENT, bytes);
        if is_chunk {
            self.of_peer(peer, at::CHUNKS, bytes);
        }
    }

    /// Chunks of this many bytes were outstanding to a peer for this time.
    pub(crate) fn was_sending(&self, peer: u32, bytes: u64, time: Duration) {
        /// Shorter transfers measure latency rather than bandwidth.
        const LEAST: u64 = 128 << 10;
        self.of_peer(peer, at::SENDING, nanos(time));
        if bytes >= LEAST
            && let Some(base) = peer_at(peer)
        {
            let rate = (bytes as f64 / time.as_secs_f64().max(1e-9)) as u64;
            self.change(base + at::QUICKEST, |quickest| quickest.max(rate));
        }
    }

    /// This many bytes of elements were received from a peer.
    pub(crate) fn received(&self, peer: u32, bytes: u64) {
        self.of_peer(peer, at::RECEIVED, bytes);
    }

    /// The rank was off its core for this time while it waited for an operation.
    pub(crate) fn away(&self, time: Duration) {
        let nanos = nanos(time);
        self.change(at::AWAY, |away| away.wrapping_add(nanos));
        self.change(at::AWAY_MOST, |most| most.max(nanos));
    }

    /// A rail to a peer has failed.
    pub(crate) fn rail_is_left(&self, peer: u32, rail: usize) {
        if let Some(base) = peer_at(peer) {
            self.change(base + at::RAILS, |rails| (rails | 1 << rail).wrapping_add(1 << 32));
        }
    }

    /// A rail to a peer is used again.
    pub(crate) fn rail_is_back(&self, peer: u32, rail: usize) {
        if let Some(base) = peer_at(peer) {
            self.change(base + at::RAILS, |rails| rails & !(1 << rail));
        }
    }

    /// The communicator has failed.
    pub(crate) fn failed(&self, why: &str) {
        for (word, bytes) in why.as_bytes().chunks(8).take(at::FAILURE_TEXT / 8).enumerate() {
            self.set(at::FAILURE + 8 * word, word_of(bytes));
        }
    }

    /// The program has left it. The recording stays until another communicator needs the room.
    pub(crate) fn left(&self) {
        if let Some(memory) = &self.memory
            && memory.word(self.base + at::HAS_LEFT).load(Ordering::Relaxed) == 0
        {
            let before = words(memory, at::HAS_LEFT).map(|(_, left)| left).max().unwrap_or(0);
            self.set(at::HAS_LEFT, before + 1);
        }
    }

    /// The position of an operation, if it is still kept.
    fn kept(&self, number: u64) -> Option<usize> {
        (self.memory.is_some() && number + at::KEPT as u64 >= self.count.get()).then(|| operation(number))
    }

    fn of(&self, number: u64, field: usize, value: u64) {
        if let Some(base) = self.kept(number) {
            self.set(base + field, value);
        }
    }

    fn of_peer(&self, peer: u32, field: usize, more: u64) {
        if let Some(base) = peer_at(peer) {
            self.change(base + field, |value| value.wrapping_add(more));
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.left();
    }
}

fn operation(number: u64) -> usize {
    at::OPERATIONS + (number % at::KEPT as u64) as usize * at::OPERATION
}

fn peer_at(peer: u32) -> Option<usize> {
    ((peer as usize) < at::PEERS_MAX).then(|| at::PEERS + peer as usize * at::PEER)
}

/// An unused place, or else that of the communicator that was left first; and whether any was left.
fn free_place(memory: &Segment) -> Option<(usize, bool)> {
    let unused = words(memory, at::COMMUNICATOR).find(|(_, id)| *id == 0);
    let left = || words(memory, at::HAS_LEFT).filter(|(_, left)| *left != 0).min_by_key(|(_, left)| *left);
    unused.map(|(place, _)| (place, false)).or_else(|| left().map(|(place, _)| (place, true)))
}

/// The ranges of a log that were written, by its count of operations and its place: unused pages stay unused.
fn used(count: u64, place: u64) -> [Range<usize>; 2] {
    let operations = count.min(at::KEPT as u64) as usize;
    let peers = (place as u32 as usize).min(at::PEERS_MAX);
    [8..at::OPERATIONS + operations * at::OPERATION, at::PEERS..at::PEERS + peers * at::PEER]
}

/// A word of each log, with the place of the log.
fn words(memory: &Segment, field: usize) -> impl Iterator<Item = (usize, u64)> {
    let places = (0..at::LOGS).map(|index| at::HEAD + index * at::LOG);
    places.map(move |place| (place, memory.word(place + field).load(Ordering::Relaxed)))
}

/// A time other than 0: the clock of a simulation begins at 0.
fn some(now: Nanos) -> u64 {
    now.0.max(1)
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// At most eight bytes, padded with zeros.
pub(super) fn word_of(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_ne_bytes(word)
}
