//! The frames of the bootstrap protocol.
//!
//! Every frame starts with the magic and the version, so that each end can refuse the other with an understandable text.
//! Integers are big-endian. Nothing longer than the reader expects is read.
//!
//! | frame | from | to | fields after magic and version |
//! |---|---|---|---|
//! | hello | rank r | rank 0 | rank, size, nonce, [`Card`] |
//! | table | rank 0 | all | 1, length, `size` cards |
//! | refusal | rank 0 | one | 2, length, text |
//!
//! The nonce is that of the [`UniqueId`](crate::UniqueId), or of a launcher's job; 0 without either. Rank 0 does not send
//! it.

use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::card::Card;

const MAGIC: [u8; 4] = *b"frcc";
const VERSION: u32 = 2;
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
    pub(super) nonce: U64,
    pub(super) card: Card,
}

/// The start of every frame except a hello.
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
    pub(super) fn new(rank: u32, size: u32, nonce: u64, card: Card) -> Hello {
        let (rank, size, nonce) = (U32::new(rank), U32::new(size), U64::new(nonce));
        Hello { magic: MAGIC, version: U32::new(VERSION), rank, size, nonce, card }
    }

    /// The hello, once it is complete. `bytes` may be the start of one.
    pub(super) fn parse(bytes: &[u8]) -> Result<Option<Hello>, String> {
        check_start(bytes)?;
        if bytes.len() < size_of::<Hello>() {
            return Ok(None);
        }
        Hello::read_from_bytes(bytes).map(Some).map_err(|e| e.to_string())
    }

    /// Why rank 0, which has `card`, refuses this rank of a job of `size` ranks and `nonce`.
    pub(super) fn problem(
        &self,
        size: u32,
        nonce: u64,
        card: &Card,
        is_here: impl FnOnce(u32) -> bool,
    ) -> Option<String> {
        let (rank, theirs) = (self.rank.get(), self.size.get());
        if self.nonce.get() != nonce {
            Some(format!("rank {rank} belongs to another job than rank 0: their unique ids differ"))
        } else if theirs != size {
            Some(format!("the size differs: rank {rank} has {theirs}, rank 0 has {size}"))
        } else if rank == 0 || rank >= size {
            Some(format!("rank {rank}: must be 1 to {}, below the size {size}", size - 1))
        } else if is_here(rank) {
            Some(format!("rank {rank} has already joined: two processes were started with this rank"))
        } else {
            card.difference(0, &self.card, rank)
        }
    }
}

/// The answer of rank 0 to a hello, and the length of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Table(usize),
    Refusal(usize),
}

impl Answer {
    /// Parses the start of an answer, in a group of `size` ranks.
    pub(super) fn parse(start: &[u8; size_of::<Reply>()], size: u32) -> Result<Answer, String> {
        check_start(start)?;
        let Reply { kind, length, .. } = Reply::read_from_bytes(start).map_err(|e| e.to_string())?;
        let length = length.get() as usize;
        let expected = size as usize * size_of::<Card>();
        match kind.get() {
            TABLE if length == expected => Ok(Answer::Table(length)),
            REFUSAL if length <= MAX_REFUSAL => Ok(Answer::Refusal(length)),
            kind => Err(format!("a frame of kind {kind} and {length} bytes: must be {expected} of kind 1")),
        }
    }

    /// The length of the body.
    pub(super) fn length(self) -> usize {
        match self {
            Answer::Table(length) | Answer::Refusal(length) => length,
        }
    }
}

/// The cards of a table, by rank, for rank `rank` with the card `own`.
pub(super) fn table(body: &[u8], rank: u32, own: &Card) -> Result<Vec<Card>, String> {
    let cards = <[Card]>::ref_from_bytes(body).map_err(|e| e.to_string())?;
    if cards.get(rank as usize) != Some(own) {
        return Err("the table of rank 0 differs from the values that this rank sent".to_owned());
    }
    Ok(cards.to_vec())
}

/// Checks the magic and the version, as far as they have arrived.
fn check_start(bytes: &[u8]) -> Result<(), String> {
    let magic = &bytes[..bytes.len().min(MAGIC.len())];
    if !MAGIC.starts_with(magic) {
        return Err(format!("'{}' is not the start of ferroce's bootstrap protocol", magic.escape_ascii()));
    }
    match bytes.get(4..8).and_then(|version| U32::read_from_bytes(version).ok()) {
        Some(version) if version.get() != VERSION => Err(format!(
            "bootstrap protocol version {version}: must be {VERSION}; every rank needs the same \
                 version of ferroce"
        )),
        _ => Ok(()),
    }
}
