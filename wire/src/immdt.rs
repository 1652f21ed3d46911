use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::RKey;

/// Immediate data, 4 bytes that are returned in the receiver's completion.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ImmDt {
    value: U32,
}

impl ImmDt {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// The immediate `value`; big-endian on the wire.
    pub fn new(value: u32) -> ImmDt {
        ImmDt { value: U32::new(value) }
    }

    /// The immediate.
    pub fn value(&self) -> u32 {
        self.value.get()
    }
}

/// The invalidate extended transport header, 4 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Ieth {
    rkey: U32,
}

impl Ieth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// Invalidates `rkey`.
    pub fn new(rkey: RKey) -> Ieth {
        Ieth { rkey: U32::new(rkey.value()) }
    }

    /// The key to invalidate.
    pub fn rkey(&self) -> RKey {
        RKey::new(self.rkey.get())
    }
}
