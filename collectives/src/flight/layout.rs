//! The layout of a recording: words of eight bytes, in the byte order of the machine. Times are nanoseconds by the
//! clock of the process; 0 is none.

/// The first word: the format, and its version.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"ferrflt2");

// The head.
pub(super) const FORMAT: usize = 0;
pub(super) const PROCESS: usize = 8;
/// When the process has polled last.
pub(super) const POLLED: usize = 16;
/// The same moment by the clock of the process, and in nanoseconds since the Unix epoch.
pub(super) const CLOCK: usize = 24;
pub(super) const EPOCH: usize = 32;
/// When the recording was taken, since the Unix epoch: in a file alone.
pub(super) const TAKEN: usize = 40;
/// Bytes of the file: in a file alone.
pub(super) const LENGTH: usize = 48;
/// Texts: their bytes, and zeros behind them.
pub(super) const HOST: usize = 64;
pub(super) const DEVICE: usize = 128;
pub(super) const TEXT: usize = 64;
pub(super) const HEAD: usize = 256;

/// Communicators that are recorded at a time.
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
/// Once its program has given it back: how many of the recording were before it, and 1.
pub(super) const HAS_LEFT: usize = 32;
/// When its first operation began.
pub(super) const STARTED: usize = 40;
/// For how long the rank was off its core while it waited for operations: in all, and at most.
pub(super) const AWAY: usize = 48;
pub(super) const AWAY_MOST: usize = 56;
/// Why it has failed, as text; zeros if it has not.
pub(super) const FAILURE: usize = 64;
pub(super) const FAILURE_TEXT: usize = 448;
pub(super) const OPERATIONS: usize = 512;

/// Operations that are kept.
pub(super) const KEPT: usize = 256;
pub(super) const OPERATION: usize = 128;

// An operation.
/// Its number and 1; 0 while it is written.
pub(super) const NUMBER: usize = 0;
/// The call, as headers of messages have it.
pub(super) const CALL: usize = 8;
pub(super) const BYTES: usize = 40;
pub(super) const BEGAN: usize = 48;
/// When something moved first, and last.
pub(super) const FIRST: usize = 56;
pub(super) const LAST: usize = 64;
pub(super) const ENDED: usize = 72;
/// Steps, and those that are done.
pub(super) const STEPS: usize = 80;
/// The rank that began last and 1, and whether the operation is on mapped memory.
pub(super) const LATE: usize = 88;
/// By how much later than this rank it began.
pub(super) const LATE_TIME: usize = 96;
/// How long it had nothing to do until another rank sent something.
pub(super) const WAITED: usize = 104;
/// The first ranks that it waits for, each 16 bits and 1 more; and how many there are.
pub(super) const WAITS_FOR: usize = 112;
pub(super) const WAITS_FOR_COUNT: usize = 120;
/// Ranks of that word.
pub(super) const NAMED: usize = 4;

pub(super) const PEERS: usize = OPERATIONS + KEPT * OPERATION;
/// Ranks of which is recorded what this one exchanges with them; of those behind them it is not.
pub(super) const PEERS_MAX: usize = 248;
pub(super) const PEER: usize = 80;

// A peer.
/// Its queue pair here, and how often it was the last to begin.
pub(super) const QP: usize = 0;
pub(super) const SENT: usize = 8;
/// Of those bytes, the ones in chunks, and for how long chunks were not acknowledged.
pub(super) const CHUNKS: usize = 16;
pub(super) const SENDING: usize = 24;
pub(super) const RECEIVED: usize = 32;
/// For how long this rank had nothing to do until that one sent something.
pub(super) const WAITED_FOR: usize = 40;
/// By how much it was later than this rank, where it was the last to begin: in all, and at most.
pub(super) const LATE_ALL: usize = 48;
pub(super) const LATE_MOST: usize = 56;
/// Bytes in a second of the quickest chunks that were under way together.
pub(super) const QUICKEST: usize = 64;
/// How often a rail to it was left; and those that are, a bit each.
pub(super) const RAILS: usize = 72;

pub(super) const LOG: usize = PEERS + PEERS_MAX * PEER;
pub(super) const BYTES_ALL: usize = HEAD + LOGS * LOG;
