use zerocopy::byteorder::big_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::RKey;

/// The RDMA extended transport header, 16 bytes: the remote memory of a READ, WRITE, FLUSH or ATOMIC WRITE.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Reth {
    va: U64,
    rkey: U32,
    length: U32,
}

impl Reth {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// `length` bytes at `va` in the region of `rkey`.
    pub fn new(va: u64, rkey: RKey, length: u32) -> Reth {
        Reth { va: U64::new(va), rkey: U32::new(rkey.value()), length: U32::new(length) }
    }

    /// The virtual address on the responder.
    pub fn va(&self) -> u64 {
        self.va.get()
    }

    /// The remote key.
    pub fn rkey(&self) -> RKey {
        RKey::new(self.rkey.get())
    }

    /// The DMA length of the whole message, in bytes.
    pub fn length(&self) -> u32 {
        self.length.get()
    }
}
