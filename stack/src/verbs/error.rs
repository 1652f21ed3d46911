use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use ferroce_driver::gpu::GpuError;
use ferroce_driver::{Memory, MemoryError};
use ferroce_wire::cm::RejectReason;
use ferroce_wire::{Gid, PathMtu, Qpn};

use crate::verbs::{Access, Feature, GidEntry, Handle, QpState, Unreachable, WcOpcode, WcStatus};

/// Why a verb failed. A verb that fails changes nothing. The text names the value and the valid ones;
/// [`manual::errors`](crate::manual::errors) has cause and remedy of each error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The handle names no object of this context any more.
    #[error("{kind} {handle} does not exist (destroyed, or of another context)")]
    InvalidHandle {
        /// The expected kind: `QP`, `CQ`, ...
        kind: &'static str,
        /// The handle.
        handle: String,
    },
    /// All configured objects of this kind are in use.
    #[error("all {limit} {kind}s of this context are in use; raise {setting} in its Config")]
    Exhausted {
        /// The kind of objects.
        kind: &'static str,
        /// The limit.
        limit: usize,
        /// The setting of [`Config`](crate::Config).
        setting: &'static str,
    },
    /// Other objects or outstanding work depend on the object.
    #[error("{kind} {handle} is in use by {users}")]
    Busy {
        /// What it is.
        kind: &'static str,
        /// The handle.
        handle: String,
        /// The users, in words.
        users: String,
    },
    /// An attribute is out of range.
    #[error("{attribute} = {value}: {expected}")]
    Invalid {
        /// The attribute.
        attribute: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// A GPU refused a call.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// Access rights that can't be combined.
    #[error("access {access:?}: {reason}")]
    Access {
        /// The requested rights.
        access: Access,
        /// What is missing.
        reason: &'static str,
    },
    /// The queue pair's state does not allow this.
    #[error("QP {qpn} is in {state:?}: {verb} needs {expected}")]
    State {
        /// The number of the queue pair.
        qpn: Qpn,
        /// The operation.
        verb: &'static str,
        /// The state it is in.
        state: QpState,
        /// The states that allow it.
        expected: &'static str,
    },
    /// The send, receive or command queue is full.
    #[error("{queue} queue is full: all {depth} entries are in use; {}", room(queue))]
    QueueFull {
        /// `send` or `receive`; `command` for the ring from a handle to its runner.
        queue: &'static str,
        /// Its depth.
        depth: u32,
    },
    /// The interface's MTU is too small for the path MTU.
    #[error("path MTU {path_mtu} needs an interface MTU of {needed}, '{interface}' has {mtu}")]
    PathMtu {
        /// The requested path MTU.
        path_mtu: PathMtu,
        /// The L3 MTU that it needs, in bytes.
        needed: u32,
        /// The interface.
        interface: String,
        /// The interface's MTU.
        mtu: u32,
    },
    /// The two ends of a path have different IP versions.
    #[error(
        "sgid_index = {index}: the index of a GID of the same IP version as the destination {}; {index} is {}, and \
         the GID table has {}",
        destination.to_ip(), source_gid.to_ip(), rows(gids)
    )]
    AddressFamily {
        /// The peer.
        destination: Gid,
        /// Index in the GID table.
        index: usize,
        /// That GID.
        source_gid: Gid,
        /// The port's GID table.
        gids: Vec<GidEntry>,
    },
    /// The backend can't do this; nothing is silently emulated.
    #[error("not supported by this backend: {0}")]
    Unsupported(Feature),
    /// A region's memory can't be accessed like this.
    #[error("MR {handle}: {source}")]
    Region {
        /// The region's handle.
        handle: String,
        /// Why.
        source: MemoryError,
    },
    /// The operating system refused memory.
    #[error("memory: {0}")]
    Memory(#[from] io::Error),
    /// The socket for [`Context::export`](crate::Context::export) could not be opened.
    #[error("{path}: {source}", path = path.display())]
    Export {
        /// The socket, or its directory.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The operating system refused a thread.
    #[error("thread: {0}")]
    Thread(io::Error),
    /// Waiting for a completion channel failed in the operating system.
    #[error("waiting for a completion channel: {0}")]
    Wait(io::Error),
    /// A completion channel has no completion queue, so it can have no events.
    #[error(
        "the completion channel has no completion queue: all were destroyed, also with their context, or none was \
         created on it"
    )]
    NoQueue,
    /// A verb that waits for a runner was called on the thread of that runner, by a closure.
    #[error(
        "{verb} on the runner's own thread would wait forever: use the context that the closure receives"
    )]
    OwnThread {
        /// The verb.
        verb: &'static str,
    },
    /// The runner of a handle has ended. Commands that it did not execute are returned by
    /// [`RunnerHandle::poll`](crate::RunnerHandle::poll).
    #[error("the runner has ended: {reason}")]
    RunnerEnded {
        /// Why.
        reason: Arc<str>,
    },
    /// A peer can't be reached, or does not answer.
    #[error(transparent)]
    Unreachable(#[from] Unreachable),
    /// A peer rejected a connection, or the search for a datagram service.
    #[error("{peer} rejects the request: {}", rejection(*peer, *reason))]
    Rejected {
        /// The peer, with the requested port.
        peer: SocketAddr,
        /// Why; for a search the status of the SIDR reply.
        reason: RejectReason,
    },
    /// A blocking verb timed out.
    #[error("{what} takes longer than {timeout:?}")]
    TimedOut {
        /// The awaited result.
        what: String,
        /// The timeout.
        timeout: Duration,
    },
    /// A work request did not succeed ([`WorkCompletion::ok`](crate::WorkCompletion::ok)). Verbs do not return it.
    #[error("QP {qpn}: {opcode:?} {wr_id} completed with {status}: {}", status.meaning(*opcode))]
    Completion {
        /// The number of the queue pair.
        qpn: Qpn,
        /// The `wr_id` of the work request.
        wr_id: u64,
        /// Its kind.
        opcode: WcOpcode,
        /// Its status.
        status: WcStatus,
    },
    /// The driver failed or refused.
    #[error(transparent)]
    Driver(#[from] ferroce_driver::Error),
}

/// How to free entries of a queue.
fn room(queue: &str) -> &'static str {
    match queue {
        "send" => "Context::poll frees an entry when its work request ends and its CQ has room (poll_cq)",
        "receive" => "Context::poll frees an entry when a message takes its receive",
        _ => "the runner frees an entry when it takes the command",
    }
}

/// A GID table, with the indices.
fn rows(gids: &[GidEntry]) -> String {
    let rows: Vec<String> =
        gids.iter().enumerate().map(|(index, entry)| format!("{index}: {}", entry.gid.to_ip())).collect();
    rows.join(", ")
}

fn rejection(peer: SocketAddr, reason: RejectReason) -> String {
    if reason == RejectReason::INVALID_SERVICE_ID {
        format!("no listener on port {} in this partition ({reason})", peer.port())
    } else {
        reason.to_string()
    }
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    pub(crate) fn export(path: &Path, source: io::Error) -> Error {
        Error::Export { path: path.to_owned(), source }
    }

    /// A system call for waiting by file descriptor failed.
    pub(crate) fn waiting(interface: &str, source: io::Error) -> Error {
        let interface = interface.to_owned();
        ferroce_driver::Error::Os { what: "waiting by file descriptor", interface, source }.into()
    }

    pub(crate) fn invalid_handle(kind: &'static str, handle: Handle) -> Error {
        Error::InvalidHandle { kind, handle: format!("{handle:?}") }
    }

    pub(crate) fn invalid(
        attribute: &'static str,
        value: impl ToString,
        expected: impl Into<String>,
    ) -> Error {
        Error::Invalid { attribute, value: printable(&value.to_string()), expected: expected.into() }
    }
}

/// The most bytes of a value that an error quotes.
const VALUE_MAX: usize = 200;

/// A value may be untrusted text: control characters are escaped, and a long one is truncated.
fn printable(value: &str) -> String {
    let escape = |c: char| if c.is_control() { c.escape_debug().to_string() } else { c.into() };
    let fits = value.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= VALUE_MAX);
    let start = &value[..fits.last().unwrap_or(0)];
    let rest = if start.len() < value.len() { format!("… ({} bytes)", value.len()) } else { String::new() };
    start.chars().map(escape).chain([rest]).collect()
}

/// One work request of a list was refused.
#[derive(thiserror::Error)]
#[error("after {posted} work requests that were posted: {source}")]
#[non_exhaustive]
pub struct PostError {
    /// How many were posted: the index of the refused one.
    pub posted: usize,
    /// Why.
    pub source: Error,
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<PostError> for Error {
    fn from(refused: PostError) -> Error {
        refused.source
    }
}

/// A refused registration or exchange. It returns the memory.
#[derive(thiserror::Error)]
#[error("{source}")]
#[non_exhaustive]
pub struct RegisterError {
    /// The memory.
    pub memory: Memory,
    /// Why.
    pub source: Error,
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for RegisterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<RegisterError> for Error {
    fn from(refused: RegisterError) -> Error {
        refused.source
    }
}
