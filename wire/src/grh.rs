use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::Gid;

/// The global routing header, 40 bytes: the network header of RoCE v1, and the header before a received UD message. It
/// has the format of an IPv6 header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Grh {
    version_class_flow: U32,
    payload_length: U16,
    next_header: u8,
    hop_limit: u8,
    sgid: [u8; 16],
    dgid: [u8; 16],
}

impl Grh {
    /// Bytes on the wire.
    pub const LEN: usize = 40;
    /// The next header value for a BTH (RoCE v1).
    pub const NEXT_HEADER_BTH: u8 = 0x1b;
    /// The next header value for UDP (RoCEv2 over IPv6).
    pub const NEXT_HEADER_UDP: u8 = 17;

    /// A header; `payload_length` counts the bytes after it, ICRC included.
    pub fn new(
        traffic_class: u8,
        flow_label: u32,
        payload_length: u16,
        next_header: u8,
        hop_limit: u8,
        sgid: Gid,
        dgid: Gid,
    ) -> Grh {
        let word = 6 << 28 | u32::from(traffic_class) << 20 | flow_label & 0x000f_ffff;
        Grh {
            version_class_flow: U32::new(word),
            payload_length: U16::new(payload_length),
            next_header,
            hop_limit,
            sgid: sgid.0,
            dgid: dgid.0,
        }
    }

    /// The IP version; must be 6.
    pub fn version(&self) -> u8 {
        (self.version_class_flow.get() >> 28) as u8
    }

    /// The traffic class: DSCP and ECN.
    pub fn traffic_class(&self) -> u8 {
        (self.version_class_flow.get() >> 20) as u8
    }

    /// The flow label, 20 bits.
    pub fn flow_label(&self) -> u32 {
        self.version_class_flow.get() & 0x000f_ffff
    }

    /// The number of bytes after this header.
    pub fn payload_length(&self) -> u16 {
        self.payload_length.get()
    }

    /// The next header: [`NEXT_HEADER_BTH`](Grh::NEXT_HEADER_BTH) or UDP.
    pub fn next_header(&self) -> u8 {
        self.next_header
    }

    /// The hop limit.
    pub fn hop_limit(&self) -> u8 {
        self.hop_limit
    }

    /// The source.
    pub fn sgid(&self) -> Gid {
        Gid(self.sgid)
    }

    /// The destination.
    pub fn dgid(&self) -> Gid {
        Gid(self.dgid)
    }
}
