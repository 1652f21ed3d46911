//! The frames of the bootstrap protocol.
//!
//! Every frame starts with the magic and the version, so that either end can refuse the other in
//! words it understands. Integers are big-endian. Nothing is read that is longer than what the
//! reader expects.
//!
//! | frame | from | to | fields after magic and version |
//! |---|---|---|---|
//! | hello | rank r | rank 0 | rank, size, [`Endpoint`] |
//! | table | rank 0 | all | 1, length, `size` endpoints |
//! | refusal | rank 0 | one | 2, length, text |
//! | ready | all, then rank 0 to all | | 3, 0 |
//! | leave | all, then rank 0 to all | | 4, 0 |

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// What the neighbours of a rank must know about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(crate) struct Endpoint {
    pub(crate) gid: [u8; 16],
    /// The queue pair towards rank r − 1, and the one towards rank r + 1.
    pub(crate) left_qpn: U32,
    pub(crate) right_qpn: U32,
    /// The PSNs of their first requests.
    pub(crate) left_psn: U32,
    pub(crate) right_psn: U32,
    /// Where rank r − 1 writes what is to be reduced.
    pub(crate) staging_addr: U64,
    pub(crate) staging_rkey: U32,
    pub(crate) chunk_bytes: U32,
    pub(crate) chunks_in_flight: U32,
    /// The largest that the rank's port has room for, in bytes.
    pub(crate) path_mtu: U32,
    pub(crate) byte_order: [u8; 4],
}

impl Endpoint {
    /// 1 to 4 in the byte order of this machine, which is that of the elements.
    pub(crate) const BYTE_ORDER: [u8; 4] = 0x0102_0304_u32.to_ne_bytes();

    /// What `self` and `other` must have in common and have not, in words.
    fn difference(&self, rank: u32, other: &Endpoint, peer: u32) -> Option<String> {
        let differs = |what, ours, theirs| {
            Some(format!("{what} differs: rank {rank} has {ours}, rank {peer} has {theirs}"))
        };
        if self.chunk_bytes != other.chunk_bytes {
            return differs("chunk_bytes", self.chunk_bytes.get(), other.chunk_bytes.get());
        }
        if self.chunks_in_flight != other.chunks_in_flight {
            return differs("chunks_in_flight", self.chunks_in_flight.get(), other.chunks_in_flight.get());
        }
        if self.byte_order != other.byte_order {
            return Some(format!("the byte order of rank {rank} is not that of rank {peer}"));
        }
        None
    }
}

const MAGIC: [u8; 4] = *b"frcc";
const VERSION: u32 = 1;
pub(super) const TABLE: u32 = 1;
pub(super) const REFUSAL: u32 = 2;
/// The longest refusal that is read, in bytes.
pub(super) const MAX_REFUSAL: usize = 512;

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    pub(super) magic: [u8; 4],
    pub(super) version: U32,
    pub(super) rank: U32,
    pub(super) size: U32,
    pub(super) endpoint: Endpoint,
}

/// What goes before everything but a hello.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Reply {
    pub(super) magic: [u8; 4],
    pub(super) version: U32,
    pub(super) kind: U32,
    pub(super) length: U32,
}

impl Reply {
    pub(super) fn new(kind: u32, length: usize) -> Reply {
        Reply {
            magic: MAGIC,
            version: U32::new(VERSION),
            kind: U32::new(kind),
            length: U32::new(length as u32),
        }
    }
}

impl Hello {
    pub(super) fn new(rank: u32, size: u32, endpoint: Endpoint) -> Hello {
        let (rank, size) = (U32::new(rank), U32::new(size));
        Hello { magic: MAGIC, version: U32::new(VERSION), rank, size, endpoint }
    }

    /// The hello, once all of it is there. `bytes` may be the start of one.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Hello>, String> {
        check_start(bytes)?;
        if bytes.len() < size_of::<Hello>() {
            return Ok(None);
        }
        Hello::read_from_bytes(bytes).map(Some).map_err(|e| e.to_string())
    }

    /// Why rank 0, which has `endpoint` and `size` ranks, does not let this one in.
    pub(super) fn problem(
        &self,
        size: u32,
        endpoint: &Endpoint,
        is_here: impl FnOnce(u32) -> bool,
    ) -> Option<String> {
        let (rank, theirs) = (self.rank.get(), self.size.get());
        if theirs != size {
            Some(format!("the size differs: rank {rank} has {theirs}, rank 0 has {size}"))
        } else if rank == 0 || rank >= size {
            Some(format!("rank {rank}: must be 1 to {}, below the size {size}", size - 1))
        } else if is_here(rank) {
            Some(format!("rank {rank} is here already: two processes were started with this rank"))
        } else {
            endpoint.difference(0, &self.endpoint, rank)
        }
    }
}

/// What rank 0 says to a hello, and how many bytes of it follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Table(usize),
    Refusal(usize),
}

impl Answer {
    /// What goes before the body, in a group of `size` ranks.
    pub(super) fn parse(start: &[u8; size_of::<Reply>()], size: u32) -> Result<Answer, String> {
        check_start(start)?;
        let Reply { kind, length, .. } = Reply::read_from_bytes(start).map_err(|e| e.to_string())?;
        let length = length.get() as usize;
        let expected = size as usize * size_of::<Endpoint>();
        match kind.get() {
            TABLE if length == expected => Ok(Answer::Table(length)),
            REFUSAL if length <= MAX_REFUSAL => Ok(Answer::Refusal(length)),
            kind => Err(format!("a frame of kind {kind} and {length} bytes; {expected} of kind 1 were due")),
        }
    }

    /// Bytes of the body.
    pub(super) fn length(self) -> usize {
        match self {
            Answer::Table(length) | Answer::Refusal(length) => length,
        }
    }
}

/// The endpoints of a table, by rank, for the rank that said `own`.
pub(super) fn table(body: &[u8], rank: u32, own: &Endpoint) -> Result<Vec<Endpoint>, String> {
    let endpoints = <[Endpoint]>::ref_from_bytes(body).map_err(|e| e.to_string())?;
    if endpoints.get(rank as usize) != Some(own) {
        return Err("the table of rank 0 says something else of this rank than it said".to_owned());
    }
    Ok(endpoints.to_vec())
}

/// Looks at the magic and the version, as far as they have come.
fn check_start(bytes: &[u8]) -> Result<(), String> {
    let magic = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(magic) {
        return Err(format!("'{}' is no start of ferroce's bootstrap protocol", magic.escape_ascii()));
    }
    match bytes.get(4..8).and_then(|version| U32::read_from_bytes(version).ok()) {
        Some(version) if version.get() != VERSION => Err(format!(
            "bootstrap protocol version {version}; this is version {VERSION}: every rank needs the same \
                 version of ferroce"
        )),
        _ => Ok(()),
    }
}
