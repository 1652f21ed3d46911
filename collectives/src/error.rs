use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ferroce::MemoryError;
use ferroce::driver::gpu::GpuError;

/// Why a communicator could not be created, or a collective operation failed.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable is missing or invalid.
    #[error("environment variable {variable} {problem}: {expected}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// `is not set`, or its value.
        problem: String,
        /// The valid values.
        expected: String,
    },
    /// An argument or option is out of range.
    #[error("{what} = {value}: {expected}")]
    Invalid {
        /// The argument or option.
        what: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// Rank 0 can't listen on the bootstrap address.
    #[error(
        "rank 0 can't listen on {address}: {source} (if the port is taken, as MASTER_PORT may be by torchrun's own store, set \
         FERROCE_MASTER_PORT to a free one for all ranks; if the address is not of rank 0's host, FERROCE_MASTER_ADDR)"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: io::Error,
    },
    /// Rank 0 can't be reached.
    #[error(
        "rank {rank}: no process listens at the bootstrap address {address} after {waited:?}: {source} (rank 0 has \
         not started, or all ranks have already joined)"
    )]
    Connect {
        /// The rank that tried.
        rank: u32,
        /// The address.
        address: SocketAddr,
        /// How long.
        waited: Duration,
        /// The system's error of the last attempt.
        source: io::Error,
    },
    /// Ranks did not come to the rendezvous.
    #[error("rendezvous at {address}: {missing} missing of {size} ranks after {waited:?}{refused}")]
    Missing {
        /// The bootstrap address.
        address: SocketAddr,
        /// The missing ranks, in words: `rank 2`, `ranks 1, 3`.
        missing: String,
        /// The number of ranks.
        size: u32,
        /// How long rank 0 waited.
        waited: Duration,
        /// Refused connections with the reasons, and other obstacles; empty if there were none.
        refused: String,
    },
    /// Rank 0 refused this rank.
    #[error("rank {rank} was refused by rank 0 at {address}: {reason}")]
    Refused {
        /// This rank.
        rank: u32,
        /// The bootstrap address.
        address: SocketAddr,
        /// The reason of rank 0.
        reason: String,
    },
    /// The other end of a bootstrap connection closed it or used another protocol.
    #[error("rank {rank}, bootstrap connection with {peer}: {problem}")]
    Bootstrap {
        /// This rank.
        rank: u32,
        /// The other end, in words.
        peer: String,
        /// What is wrong.
        problem: String,
    },
    /// An operation has failed, and the communicator can't be used any more.
    #[error("rank {rank}, {operation}: {cause}")]
    Failed {
        /// This rank.
        rank: u32,
        /// Its operation, in words: `call 3, all_reduce of 1000 f32 (sum) by ring`.
        operation: String,
        /// Why.
        cause: Cause,
    },
    /// Memory could not be shared with the processes of this host.
    #[error("memory shared with the ranks of this host: {reason}")]
    Shared {
        /// Why.
        reason: String,
    },
    /// The runner's thread has ended.
    #[error("the runner has ended")]
    Ended,
    /// The handle of a communicator, request or buffer that does not exist or has ended.
    #[error("{what}: this handle does not exist, or was destroyed")]
    InvalidHandle {
        /// `communicator`, `request` or `buffer`.
        what: &'static str,
    },
    /// A verb was refused.
    #[error(transparent)]
    Verbs(#[from] ferroce::Error),
    /// A GPU refused a call or has failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Memory for the communicator's buffers could not be allocated.
    #[error("{bytes} bytes of memory: {source}")]
    Memory {
        /// The requested bytes.
        bytes: usize,
        /// The system's error.
        source: io::Error,
    },
}

/// Why an operation has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Cause {
    /// Ranks called different operations, or the same with different arguments.
    #[error("ranks call different operations: rank {peer} has {theirs}; here it is {ours}")]
    Mismatch {
        /// The other rank.
        peer: u32,
        /// What this rank called, in words.
        ours: String,
        /// The operation of the other rank.
        theirs: String,
    },
    /// A rank does not answer: its process, its host or the network has failed, or it has not polled for longer than the retry
    /// budget.
    #[error("rank {peer} is gone: {how}")]
    Lost {
        /// Which.
        peer: u32,
        /// How it was noticed.
        how: String,
    },
    /// Another rank has failed and notified this one.
    #[error("rank {origin} failed first: {reason}")]
    Aborted {
        /// Which.
        origin: u32,
        /// The rank that it reports as lost.
        lost: Option<u32>,
        /// Its reason.
        reason: String,
    },
    /// All ranks answer, but there is no progress.
    #[error("no progress for {waited:?}, although all ranks answer: {waits_for}")]
    Stalled {
        /// How long.
        waited: Duration,
        /// The ranks that it waits for, and their answers.
        waits_for: String,
    },
    /// A rank violated the protocol.
    #[error("rank {peer} broke the protocol: {problem}")]
    Protocol {
        /// Which.
        peer: u32,
        /// What it did.
        problem: String,
    },
    /// A rank's GPU failed to copy or to compute.
    #[error("the device of rank {rank} has failed: {problem}")]
    Device {
        /// The rank.
        rank: u32,
        /// The failed action.
        problem: String,
    },
    /// This rank can't continue.
    #[error("{problem}")]
    Local {
        /// Why.
        problem: String,
    },
}

impl Cause {
    /// The lost rank, if there is one.
    pub fn lost(&self) -> Option<u32> {
        match self {
            Cause::Lost { peer, .. } => Some(*peer),
            Cause::Aborted { lost, .. } => *lost,
            _ => None,
        }
    }
}

impl Cause {
    /// Why a rank can't continue after an error.
    pub(crate) fn of(rank: u32, error: &Error) -> Cause {
        match error.of_device() {
            Some(error) => Cause::Device { rank, problem: error.to_string() },
            None => Cause::Local { problem: error.to_string() },
        }
    }
}

impl Error {
    /// The error of a GPU, if it is one.
    fn of_device(&self) -> Option<&GpuError> {
        match self {
            Error::Gpu(error) | Error::Verbs(ferroce::Error::Gpu(error)) => Some(error),
            Error::Verbs(ferroce::Error::Region { source: MemoryError::Gpu(error), .. }) => Some(error),
            _ => None,
        }
    }

    pub(crate) fn invalid(what: &'static str, value: impl ToString, expected: impl Into<String>) -> Error {
        Error::Invalid { what, value: value.to_string(), expected: expected.into() }
    }
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
