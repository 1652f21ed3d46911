use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The memory that a FLUSH affects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selectivity {
    /// The range of the RETH.
    Range,
    /// The whole memory region.
    MemoryRegion,
}

/// The guarantees of a FLUSH for the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlushType {
    /// Visible to every reader on the responder's host.
    pub global_visibility: bool,
    /// Kept after a loss of power.
    pub persistence: bool,
}

/// The flush extended transport header, 4 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Feth {
    word: U32,
}

impl Feth {
    /// Bytes on the wire.
    pub const LEN: usize = 4;

    /// A flush of `kind` over `selectivity`.
    pub fn new(selectivity: Selectivity, kind: FlushType) -> Feth {
        let sel = u32::from(selectivity == Selectivity::MemoryRegion);
        let plt = u32::from(kind.global_visibility) | u32::from(kind.persistence) << 1;
        Feth { word: U32::new(sel << 4 | plt) }
    }

    /// The memory to flush; `None` for the two reserved codes.
    pub fn selectivity(&self) -> Option<Selectivity> {
        match self.word.get() >> 4 & 3 {
            0 => Some(Selectivity::Range),
            1 => Some(Selectivity::MemoryRegion),
            _ => None,
        }
    }

    /// The requested guarantees.
    pub fn flush_type(&self) -> FlushType {
        let plt = self.word.get();
        FlushType { global_visibility: plt & 1 != 0, persistence: plt & 2 != 0 }
    }
}
