//! Reads a recording: in this process, in another one, or in a file. Nothing in it is trusted: a file may be from anyone, and a
//! recording may be written at the same time.

use std::path::{Path, PathBuf};
use std::time::Duration;

use ferroce::driver::segment;
use zerocopy::FromBytes;

use super::layout as at;
use crate::channel::message::{Call, Header};
use crate::operation::Kind;
use crate::ports::MAX_RAILS;
use crate::{Algorithm, MAX_SIZE};

/// The latest operations of a process's communicators. Times are since the Unix epoch, by the clock of the process's host.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Recording {
    /// Its number on its host.
    pub process: u32,
    /// Its host's name.
    pub host: String,
    /// The device that sends its packets.
    pub device: String,
    /// When it last polled: between polls it does not answer.
    pub polled: Duration,
    /// When the recording was taken.
    pub taken: Duration,
    /// Its communicators, including those that it has left, up to 64 in total: a new one replaces the one that was left first.
    pub communicators: Vec<RecordedCommunicator>,
}

/// One rank's part of a communicator.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct RecordedCommunicator {
    /// The same at all ranks.
    pub id: u64,
    /// The rank.
    pub rank: u32,
    /// The number of ranks.
    pub size: u32,
    /// Operations of all ranks that its program has called.
    pub calls: u64,
    /// Why it has failed.
    pub failure: Option<String>,
    /// The program has left it.
    pub has_left: bool,
    /// When its first operation started.
    pub started: Option<Duration>,
    /// How long the rank was off its core, 10 ms or more at a time, while its program waited for operations
    /// ([`Collectives::wait`](crate::Collectives::wait)): total and maximum.
    pub away: Duration,
    /// See [`away`](RecordedCommunicator::away).
    pub away_at_most: Duration,
    /// The operations that are still kept, the oldest first, and how many there were before them.
    pub operations: Vec<OperationRecord>,
    /// See [`operations`](RecordedCommunicator::operations).
    pub forgotten: u64,
    /// Its traffic with other ranks.
    pub peers: Vec<PeerRecord>,
}

/// An operation of one rank.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct OperationRecord {
    /// Its number among all operations of this rank.
    pub number: u64,
    /// Its number among the calls of all ranks; `None` for sends and receives, and for operations of the communicator itself.
    pub call: Option<u32>,
    /// The operation, in words.
    pub operation: String,
    /// The same without its number and algorithm.
    pub kind: Kind,
    /// Its algorithm.
    pub algorithm: Algorithm,
    /// Bytes of its input or output, whichever is longer.
    pub bytes: u64,
    /// Whether it is without packets.
    pub is_mapped: bool,
    /// When the rank first polled it; `None` if it has not polled since the call.
    pub began: Option<Duration>,
    /// When it made progress first and last.
    pub first: Option<Duration>,
    /// See [`first`](OperationRecord::first).
    pub last: Option<Duration>,
    /// When it ended; `None` if it has not.
    pub ended: Option<Duration>,
    /// The number of steps, and of completed steps.
    pub steps: (u32, u32),
    /// The rank that started it last, and how much later than this one, as far as this rank knows.
    pub late: Option<(u32, Duration)>,
    /// How long it was idle until another rank sent something.
    pub waited: Duration,
    /// The first ranks that it waits for, after a long wait, and how many there are. If it is the recorded rank itself, its
    /// device has not completed its work.
    pub waits_for: Vec<u32>,
    /// See [`waits_for`](OperationRecord::waits_for).
    pub waits_for_count: u32,
}

/// The traffic of a rank with another one, by packets.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct PeerRecord {
    /// The other rank.
    pub peer: u32,
    /// The number of the queue pair to it; 0 if there is none.
    pub qp: u32,
    /// Bytes of elements sent.
    pub sent_bytes: u64,
    /// Of these, the bytes in chunks, the time in which chunks were outstanding, and the bytes per second of the fastest that
    /// were outstanding together: the bandwidth of the link, independent of pauses of the other rank.
    pub chunk_bytes: u64,
    /// See [`chunk_bytes`](PeerRecord::chunk_bytes).
    pub sending: Duration,
    /// See [`chunk_bytes`](PeerRecord::chunk_bytes).
    pub quickest: u64,
    /// Bytes of elements received.
    pub received_bytes: u64,
    /// How long this rank was idle until that one sent something.
    pub waited: Duration,
    /// In how many operations it was the last to start, and how much later than this rank: total and maximum.
    pub late: u64,
    /// See [`late`](PeerRecord::late).
    pub late_by: Duration,
    /// See [`late`](PeerRecord::late).
    pub late_at_most: Duration,
    /// The rails to it that have failed and not recovered, and the number of failures.
    pub rails_left: Vec<u32>,
    /// See [`rails_left`](PeerRecord::rails_left).
    pub rail_failures: u32,
}

/// These bytes are no recording.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no flight recording: {problem}")]
pub struct NotARecording {
    problem: &'static str,
}

impl Recording {
    /// Parses the bytes of a file that a rank has written.
    ///
    /// # Errors
    /// [`NotARecording`]. Invalid parts of a recording are left out.
    pub fn parse(bytes: &[u8]) -> Result<Recording, NotARecording> {
        let not = |problem| Err(NotARecording { problem });
        let words = Words(bytes);
        match words.at(at::FORMAT) {
            at::MAGIC => {}
            magic if magic.swap_bytes() == at::MAGIC => {
                return not("it was written on a host with the other byte order");
            }
            magic if magic as u32 == at::MAGIC as u32 => return not("it has another version"),
            _ => return not("it does not begin like one"),
        }
        if bytes.len() < at::HEAD || (bytes.len() as u64) < words.at(at::LENGTH) {
            return not("it is cut off");
        }
        let clock = ProcessClock { now: words.at(at::CLOCK), epoch: words.at(at::EPOCH) };
        let logs = bytes[at::HEAD..].chunks_exact(at::LOG).take(at::LOGS);
        Ok(Recording {
            process: words.at(at::PROCESS) as u32,
            host: words.text(at::HOST, at::TEXT),
            device: words.text(at::DEVICE, at::TEXT),
            polled: clock.time(words.at(at::POLLED)).unwrap_or_default(),
            taken: Duration::from_nanos(words.at(at::TAKEN)),
            communicators: logs.filter_map(|log| RecordedCommunicator::parse(Words(log), &clock)).collect(),
        })
    }

    /// Recordings of the processes of this host that this one may read, working or hanging: of the same user, or for root of all
    /// users. Each is the recording or the reason why it could not be read; a process that has ended meanwhile is left out.
    pub fn running() -> Vec<(u32, Result<Recording, String>)> {
        let parse = |(pid, bytes): (u32, Result<Vec<u8>, String>)| {
            let recording =
                bytes.and_then(|bytes| Recording::parse(&bytes).map_err(|error| error.to_string()));
            (pid, recording)
        };
        running_bytes(|_| true).map(parse).collect()
    }

    /// Writes those of the [running](Recording::running) processes that are `wanted` to files in a directory, as
    /// [`FlightRecorder::dump_into`](super::FlightRecorder::dump_into) does in the process itself. Returns the path for each
    /// process, or the error.
    pub fn dump_running(folder: &Path, wanted: impl Fn(u32) -> bool) -> Vec<(u32, Result<PathBuf, String>)> {
        let dump = |(pid, bytes): (u32, Result<Vec<u8>, String>)| {
            let path = bytes.and_then(|mut bytes| {
                let host = Recording::parse(&bytes).map_err(|error| error.to_string())?.host;
                let end = super::end_of_logs(|offset| Words(&bytes).at(offset));
                bytes.truncate(end);
                super::set(&mut bytes, at::LENGTH, end as u64);
                super::write_new(folder, &host, pid, &bytes).map_err(|error| error.to_string())
            });
            (pid, path)
        };
        running_bytes(wanted).map(dump).collect()
    }
}

/// The bytes of running recordings, in the format of files.
fn running_bytes(wanted: impl Fn(u32) -> bool) -> impl Iterator<Item = (u32, Result<Vec<u8>, String>)> {
    let read = |found: segment::Found| {
        let bytes = match found.read(super::NAME, at::BYTES_ALL) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
            bytes => bytes.map_err(|error| error.to_string()),
        };
        let stamp = |mut bytes: Vec<u8>| {
            // Its process may have another PID in its own namespace.
            super::set(&mut bytes, at::PROCESS, found.pid.into());
            super::set(&mut bytes, at::TAKEN, super::nanos(super::since_epoch()));
            bytes
        };
        Some((found.pid, bytes.map(stamp)))
    };
    segment::find(super::NAME).into_iter().filter(move |found| wanted(found.pid)).filter_map(read)
}

impl RecordedCommunicator {
    fn parse(log: Words<'_>, clock: &ProcessClock) -> Option<RecordedCommunicator> {
        let (id, (rank, size)) = (log.at(at::COMMUNICATOR), log.pair(at::PLACE));
        if id == 0 || rank >= size || size > MAX_SIZE {
            return None;
        }
        let count = log.at(at::COUNT);
        let operation = |index: usize| {
            let base = at::OPERATIONS + index * at::OPERATION;
            OperationRecord::parse(Words(log.0.get(base..base + at::OPERATION)?), (index, count), clock)
        };
        let mut operations: Vec<OperationRecord> = (0..at::KEPT).filter_map(operation).collect();
        operations.sort_unstable_by_key(|operation| operation.number);
        let peer = |peer: u32| {
            let base = at::PEERS + peer as usize * at::PEER;
            let words = Words(log.0.get(base..base + at::PEER)?);
            let (qp, late) = words.pair(at::QP);
            let (rail_failures, left) = words.pair(at::RAILS);
            Some(PeerRecord {
                peer,
                qp,
                sent_bytes: words.at(at::SENT),
                chunk_bytes: words.at(at::CHUNKS),
                sending: Duration::from_nanos(words.at(at::SENDING)),
                quickest: words.at(at::QUICKEST),
                received_bytes: words.at(at::RECEIVED),
                waited: Duration::from_nanos(words.at(at::WAITED_FOR)),
                late: late.into(),
                late_by: Duration::from_nanos(words.at(at::LATE_ALL)),
                late_at_most: Duration::from_nanos(words.at(at::LATE_MOST)),
                rails_left: (0..MAX_RAILS as u32).filter(|rail| left & 1 << rail != 0).collect(),
                rail_failures,
            })
        };
        let peers = (0..size.min(at::PEERS_MAX as u32)).filter_map(peer);
        let failure = log.text(at::FAILURE, at::FAILURE_TEXT);
        Some(RecordedCommunicator {
            id,
            rank,
            size,
            calls: log.at(at::CALLS),
            failure: Some(failure).filter(|failure| !failure.is_empty()),
            has_left: log.at(at::HAS_LEFT) != 0,
            started: clock.time(log.at(at::STARTED)),
            away: Duration::from_nanos(log.at(at::AWAY)),
            away_at_most: Duration::from_nanos(log.at(at::AWAY_MOST)),
            forgotten: count.saturating_sub(operations.len() as u64),
            operations,
            peers: peers
                .filter(|peer| *peer != PeerRecord { peer: peer.peer, ..PeerRecord::default() })
                .collect(),
        })
    }

    /// Operations started and not ended.
    pub fn under_way(&self) -> impl Iterator<Item = &OperationRecord> {
        self.operations.iter().filter(|operation| operation.ended.is_none())
    }
}

impl OperationRecord {
    fn parse(
        record: Words<'_>,
        (index, count): (usize, u64),
        clock: &ProcessClock,
    ) -> Option<OperationRecord> {
        let number = record.at(at::NUMBER).checked_sub(1)?;
        // One that is being written has no number or that of an earlier one.
        if number >= count || number % at::KEPT as u64 != index as u64 || number + (at::KEPT as u64) < count {
            return None;
        }
        let (header, _) = Header::read_from_prefix(record.0.get(at::CALL..)?).ok()?;
        let (call, _) = header.parse().ok()?;
        let time = |field: usize| clock.time(record.at(field));
        let (late, is_mapped) = record.pair(at::LATE);
        let late_by = Duration::from_nanos(record.at(at::LATE_TIME));
        let count = record.at(at::WAITS_FOR_COUNT).min(MAX_SIZE.into()) as u32;
        let named =
            (0..at::NAMED.min(count as usize)).map(|place| record.at(at::WAITS_FOR) >> (16 * place) & 0xffff);
        Some(OperationRecord {
            number,
            call: (call.number & (Call::OF_TWO | Call::OWN) == 0).then_some(call.number),
            operation: call.to_string(),
            kind: call.kind,
            algorithm: call.algorithm,
            bytes: record.at(at::BYTES),
            is_mapped: is_mapped != 0,
            began: time(at::BEGAN),
            first: time(at::FIRST),
            last: time(at::LAST),
            ended: time(at::ENDED),
            steps: record.pair(at::STEPS),
            late: late.checked_sub(1).map(|late| (late, late_by)),
            waited: Duration::from_nanos(record.at(at::WAITED)),
            waits_for: named.filter_map(|word| (word as u32).checked_sub(1)).collect(),
            waits_for_count: count,
        })
    }
}

/// Two clocks at the same time.
struct ProcessClock {
    now: u64,
    epoch: u64,
}

impl ProcessClock {
    /// Since the Unix epoch.
    fn time(&self, nanos: u64) -> Option<Duration> {
        let since = i128::from(nanos) - i128::from(self.now) + i128::from(self.epoch);
        (nanos != 0).then(|| Duration::from_nanos(u64::try_from(since).unwrap_or(0)))
    }
}

/// Words of eight bytes; 0 after the end.
#[derive(Clone, Copy)]
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn at(self, offset: usize) -> u64 {
        let bytes = self.0.get(offset..).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u64::from_ne_bytes(*bytes))
    }

    fn pair(self, offset: usize) -> (u32, u32) {
        let word = self.at(offset);
        ((word >> 32) as u32, word as u32)
    }

    /// Unprintable text is replaced.
    fn text(self, offset: usize, length: usize) -> String {
        let bytes = self.0.get(offset..offset + length).unwrap_or_default();
        let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(length.min(bytes.len()));
        String::from_utf8_lossy(&bytes[..end]).replace(ferroce::is_unprintable, "\u{fffd}")
    }
}
