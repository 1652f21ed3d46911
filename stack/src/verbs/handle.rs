//! Objects by handle: an index and a generation, so that a handle to a destroyed object is known
//! as such and never names its successor.

use std::fmt;

#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Handle {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// A protection domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pd(pub(crate) Handle);

/// A memory region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mr(pub(crate) Handle);

/// A memory window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Mw(pub(crate) Handle);

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Cq(pub(crate) Handle);

/// A shared receive queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Srq(pub(crate) Handle);

/// An address handle: the way to a peer, for datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ah(pub(crate) Handle);

/// A queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Qp(pub(crate) Handle);

impl Qp {
    /// Names no queue pair: no context has so many.
    pub(crate) const NONE: Qp = Qp(Handle { index: u32::MAX, generation: u32::MAX });
}
