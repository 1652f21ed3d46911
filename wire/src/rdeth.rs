use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The reliable datagram extended transport header, 4 bytes. Reliable Datagram itself is not implemented (here or
/// elsewhere); the type is for dissectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Rdeth {
    ee_context: U32,
}

impl Rdeth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// A header for the end-to-end context `ee_context` (24 bits).
    pub fn new(ee_context: u32) -> Rdeth {
        Rdeth { ee_context: U32::new(ee_context & 0x00ff_ffff) }
    }

    /// The end-to-end context, 24 bits.
    pub fn ee_context(&self) -> u32 {
        self.ee_context.get() & 0x00ff_ffff
    }
}
