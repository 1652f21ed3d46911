use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use ferroce::WcStatus;
use ferroce::driver::gpu::GpuError;

/// Why a communicator could not be made, or a collective did not finish.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An environment variable is missing or makes no sense.
    #[error("environment variable {variable} {problem}: {expected}")]
    Environment {
        /// Its name.
        variable: &'static str,
        /// `is not set`, or its value.
        problem: String,
        /// What would be right.
        expected: String,
    },
    /// An argument or option is outside its range.
    #[error("{what} = {value}: {expected}")]
    Invalid {
        /// The argument or option.
        what: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// Rank 0 can't listen on the bootstrap address.
    #[error(
        "rank 0 can't listen on {address}: {source} (torchrun's own store may hold MASTER_PORT: \
         set FERROCE_MASTER_PORT to a free port for all ranks)"
    )]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's word.
        source: io::Error,
    },
    /// Rank 0 is not to be reached.
    #[error(
        "rank {rank}: nobody listens at the bootstrap address {address} after {waited:?}: {source} (rank 0 is not there, or \
         all ranks have met and gone on)"
    )]
    Connect {
        /// The rank that tried.
        rank: u32,
        /// The address.
        address: SocketAddr,
        /// For how long.
        waited: Duration,
        /// The system's word on the last attempt.
        source: io::Error,
    },
    /// Ranks did not come to the rendezvous.
    #[error("rendezvous at {address}: {missing} missing of {size} ranks after {waited:?}{refused}")]
    Missing {
        /// The bootstrap address.
        address: SocketAddr,
        /// Which, in words: `rank 2`, `ranks 1, 3`.
        missing: String,
        /// How many there are to be.
        size: u32,
        /// For how long rank 0 waited.
        waited: Duration,
        /// Who came and was refused, and why, and what kept others out; empty if nothing did.
        refused: String,
    },
    /// Rank 0 refused this rank.
    #[error("rank {rank} was refused by rank 0 at {address}: {reason}")]
    Refused {
        /// This rank.
        rank: u32,
        /// The bootstrap address.
        address: SocketAddr,
        /// Rank 0's word.
        reason: String,
    },
    /// The other end of a bootstrap connection went away or spoke something else.
    #[error("rank {rank}, bootstrap connection with {peer}: {problem}")]
    Bootstrap {
        /// This rank.
        rank: u32,
        /// The other end, in words.
        peer: String,
        /// What is wrong.
        problem: String,
    },
    /// Ranks called different collectives, or the same with different arguments.
    #[error(
        "rank {rank} and rank {peer} call different collectives: {what} is {ours} here and {theirs} there"
    )]
    Mismatch {
        /// This rank.
        rank: u32,
        /// Its neighbour.
        peer: u32,
        /// What differs.
        what: &'static str,
        /// Here.
        ours: String,
        /// There.
        theirs: String,
    },
    /// The connection to a neighbour failed: its process is gone, the network between is, or it
    /// did not poll for longer than the retries last.
    #[error(
        "rank {rank}: the connection to rank {peer} failed with {status:?} (it is gone, or computed for longer than \
         {budget:?} without a call: Options::ack_timeout and retry_count)"
    )]
    Neighbour {
        /// This rank.
        rank: u32,
        /// Its neighbour.
        peer: u32,
        /// How the work request ended.
        status: WcStatus,
        /// For how long a lost packet is sent again.
        budget: Duration,
    },
    /// A neighbour sent what the ring does not provide for.
    #[error("rank {rank}: rank {peer} broke the protocol: {problem}")]
    Protocol {
        /// This rank.
        rank: u32,
        /// Its neighbour.
        peer: u32,
        /// What it did.
        problem: String,
    },
    /// Another rank gave up and said so.
    #[error("rank {rank}: rank {origin} failed first, as rank {peer} says")]
    Aborted {
        /// This rank.
        rank: u32,
        /// The rank that failed first.
        origin: u32,
        /// The neighbour that passed it on.
        peer: u32,
    },
    /// All neighbours answer, and yet nothing has moved.
    #[error(
        "rank {rank}: nothing has moved for {waited:?}: {received} of {expected} chunks received, {sent} sent, of call \
         {call}; a rank has not called"
    )]
    Stalled {
        /// This rank.
        rank: u32,
        /// For how long.
        waited: Duration,
        /// Chunks received in this call.
        received: u64,
        /// Chunks to be received in this call, and to be sent.
        expected: u64,
        /// Chunks sent in this call.
        sent: u64,
        /// The call's number, from 0.
        call: u32,
    },
    /// A collective failed before; the communicator is of no use any more.
    #[error("rank {rank}: this communicator has failed before: {reason}")]
    Failed {
        /// This rank.
        rank: u32,
        /// The first error.
        reason: String,
    },
    /// A verb was refused.
    #[error(transparent)]
    Verbs(#[from] ferroce::Error),
    /// A GPU was asked in vain, or has failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// There is no memory for the communicator's buffers.
    #[error("{bytes} bytes of memory: {source}")]
    Memory {
        /// How much was wanted.
        bytes: usize,
        /// The system's word.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn invalid(what: &'static str, value: impl ToString, expected: impl Into<String>) -> Error {
        Error::Invalid { what, value: value.to_string(), expected: expected.into() }
    }
}

/// As it reads, for `main() -> Result` prints it so.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
