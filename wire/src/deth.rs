use zerocopy::byteorder::big_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Qpn;

/// The datagram extended transport header, 8 bytes.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, Hash, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Deth {
    qkey: U32,
    reserved: u8,
    source_qpn: [u8; 3],
}

impl Deth {
    /// Bytes on the wire.
    pub const LEN: usize = 8;

    /// A header from `source_qpn` to a queue pair with the Q_Key `qkey`.
    pub fn new(qkey: u32, source_qpn: Qpn) -> Deth {
        Deth { qkey: U32::new(qkey), reserved: 0, source_qpn: source_qpn.to_bytes() }
    }

    /// The Q_Key.
    pub fn qkey(&self) -> u32 {
        self.qkey.get()
    }

    /// The sender's queue pair.
    pub fn source_qpn(&self) -> Qpn {
        Qpn::from_bytes(self.source_qpn)
    }
}
