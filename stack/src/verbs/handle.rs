//! Handles: an index and a generation, so a handle of a destroyed object is recognised and never names its successor. The
//! generations of a context start at a random number, or at one of its [`Config::seed`](crate::Config::seed): a handle of another
//! context is refused as well, unless both have the same seed (or once in 2³² times).

use std::fmt;
use std::ops::Range;

use crate::verbs::Sge;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:x}", self.index, self.generation)
    }
}

/// A protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pd(pub(crate) Handle);

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mr(pub(crate) Handle);

impl Mr {
    /// Bytes of the region, counted from its first byte, for a work request. Posting does not check whether they are
    /// inside the region: a work request with bytes outside completes with
    /// [`LocProtErr`](crate::WcStatus::LocProtErr), and its queue pair goes to ERR (to SQE after a send on UC or UD).
    ///
    /// # Panics
    /// If the range ends before it starts, or has more than 2³² - 1 bytes.
    #[track_caller]
    pub fn sge(self, bytes: Range<u64>) -> Sge {
        let length = bytes.end.checked_sub(bytes.start).and_then(|length| u32::try_from(length).ok());
        match length {
            Some(length) => Sge { mr: self, offset: bytes.start, length },
            None => panic!("bytes {bytes:?}: a range of at most 2^32 - 1 bytes"),
        }
    }
}

/// A memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mw(pub(crate) Handle);

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cq(pub(crate) Handle);

/// A shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Srq(pub(crate) Handle);

/// An address handle: the path to a peer, for datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ah(pub(crate) Handle);

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Qp(pub(crate) Handle);

impl Qp {
    /// Names no queue pair: no context has this many.
    pub(crate) const NONE: Qp = Qp(Handle { index: u32::MAX, generation: u32::MAX });
}
