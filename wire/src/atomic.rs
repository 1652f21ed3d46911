use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::RKey;

/// The atomic extended transport header, 28 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicEth {
    va: U64,
    rkey: U32,
    swap_or_add: U64,
    compare: U64,
}

impl AtomicEth {
    /// Bytes on the wire.
    pub const LEN: usize = 28;

    /// An operation on the 8 bytes at `va`; `compare` is unused by FETCH_ADD.
    pub fn new(va: u64, rkey: RKey, swap_or_add: u64, compare: u64) -> AtomicEth {
        AtomicEth {
            va: U64::new(va),
            rkey: U32::new(rkey.value()),
            swap_or_add: U64::new(swap_or_add),
            compare: U64::new(compare),
        }
    }

    /// The virtual address on the responder; must be a multiple of 8.
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// The remote key.
    pub fn rkey(&self) -> RKey {
        RKey::new(self.rkey.get())
    }

    /// The value to store (COMPARE_SWAP) or to add (FETCH_ADD).
    pub fn swap_or_add(&self) -> u64 {
        self.swap_or_add.get()
    }

    /// The value at which COMPARE_SWAP stores.
    pub fn compare(&self) -> u64 {
        self.compare.get()
    }
}

/// The header of an Atomic Acknowledge, 8 bytes: the previous value.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicAckEth {
    original: U64,
}

impl AtomicAckEth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// The original value.
    pub fn new(original: u64) -> AtomicAckEth {
        AtomicAckEth { original: U64::new(original) }
    }

    /// The original value.
    pub fn original(&self) -> u64 {
        self.original.get()
    }
}
