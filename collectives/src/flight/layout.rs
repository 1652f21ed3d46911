//! The layout of a recording: words of eight bytes, in the byte order of the machine. Times are nanoseconds by the
//! clock of the process; 0 is none.

/// The first word: the format, and its version.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"ferrflt2");

// The head.
pub(super) const FORMAT: usize = 0;
pub(super) const PROCESS: usize = 8;
/// When the process last polled.
pub(super) const POLLED: usize = 16;
/// The same moment by the clock of the process, and in nanoseconds since the Unix epoch.
pub(super) const CLOCK: usize = 24;
pub(super) const EPOCH: usize = 32;
/// When the recording was taken, since the Unix epoch: only in a file.
pub(super) const TAKEN: usize = 40;
/// Bytes of the file: only in a file.
pub(super) const LENGTH: usize = 48;
/// Texts: their bytes, padded with zeros.
pub(super) const HOST: usize = 64;
pub(super) const DEVICE: usize = 128;
pub(super) const TEXT: usize = 64;
pub(super) const HEAD: usize = 256;

/// The most communicators in a recording.
pub(super) const LOGS: usize = 64;

// The log of a communicator, from its start on.
/// 0 if there is none.
pub(super) const COMMUNICATOR: usize = 0;
/// Rank and size.
pub(super) const PLACE: usize = 8;
/// Operations of all ranks that the program has called.
pub(super) const CALLS: usize = 16;
/// Operations so far, of any kind.
pub(super) const COUNT: usize = 24;
/// After its program has left it: how many of the recording were left before it, plus 1.
pub(super) const HAS_LEFT: usize = 32;
/// When its first operation started.
pub(super) const STARTED: usize = 40;
/// How long the rank was off its core while it waited for operations: total and maximum.
pub(super) const AWAY: usize = 48;
pub(super) const AWAY_MOST: usize = 56;
/// Why it has failed, as text; zeros if it has not.
pub(super) const FAILURE: usize = 64;
pub(super) const FAILURE_TEXT: usize = 448;
pub(super) const OPERATIONS: usize = 512;

/// The number of operations kept.
pub(super) const KEPT: usize = 256;
pub(super) const OPERATION: usize = 128;

// An operation.
/// Its number plus 1; 0 while it is written.
pub(super) const NUMBER: usize = 0;
/// The call, as in message headers.
pub(super) const CALL: usize = 8;
pub(super) const BYTES: usize = 40;
pub(super) const BEGAN: usize = 48;
/// When it made progress first, and last.
pub(super) const FIRST: usize = 56;
pub(super) const LAST: usize = 64;
pub(super) const ENDED: usize = 72;
/// Steps, and completed steps.
pub(super) const STEPS: usize = 80;
/// The rank that started last plus 1, and whether the operation is on mapped memory.
pub(super) const LATE: usize = 88;
/// How much later than this rank it started.
pub(super) const LATE_TIME: usize = 96;
/// How long it was idle until another rank sent something.
pub(super) const WAITED: usize = 104;
/// The first ranks that it waits for, each as 16 bits plus 1; and how many there are.
pub(super) const WAITS_FOR: usize = 112;
pub(super) const WAITS_FOR_COUNT: usize = 120;
/// Ranks of that word.
pub(super) const NAMED: usize = 4;

pub(super) const PEERS: usize = OPERATIONS + KEPT * OPERATION;
/// The number of ranks whose traffic with this one is recorded; that of further ranks is not.
pub(super) const PEERS_MAX: usize = 248;
pub(super) const PEER: usize = 80;

// A peer.
/// Its local queue pair, and how often it was the last to start.
pub(super) const QP: usize = 0;
pub(super) const SENT: usize = 8;
/// Of those bytes, the ones in chunks, and how long chunks were unacknowledged.
pub(super) const CHUNKS: usize = 16;
pub(super) const SENDING: usize = 24;
pub(super) const RECEIVED: usize = 32;
/// How long this rank was idle until that one sent something.
pub(super) const WAITED_FOR: usize = 40;
/// How much later than this rank it started, when it was the last: total and maximum.
pub(super) const LATE_ALL: usize = 48;
pub(super) const LATE_MOST: usize = 56;
/// Bytes per second of the fastest chunks that were outstanding together.
pub(super) const QUICKEST: usize = 64;
/// How often a rail to it failed; and those that have failed now, one bit each.
pub(super) const RAILS: usize = 72;

pub(super) const LOG: usize = PEERS + PEERS_MAX * PEER;
pub(super) const BYTES_ALL: usize = HEAD + LOGS * LOG;
