use std::fmt;

use zerocopy::byteorder::big_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::{Opcode, Psn, Qpn};

/// The partition key of every RoCEv2 port: the default partition, full member.
pub const PKEY_DEFAULT: PKey = PKey(0xffff);

/// A partition key: 15 bits of partition and the full-member bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PKey(pub u16);

impl PKey {
    /// Whether packets with the key `other` may be received with this one: the same partition, and at least one of the
    /// two a full member (docs/protocol.md §1).
    pub const fn admits(self, other: PKey) -> bool {
        (self.0 ^ other.0) & 0x7fff == 0 && (self.0 | other.0) & 0x8000 != 0
    }

    /// Whether it is a full member's key rather than a limited one's.
    pub const fn is_full_member(self) -> bool {
        self.0 & 0x8000 != 0
    }

    /// Whether it is the key of a partition: 0 is not.
    pub const fn is_valid(self) -> bool {
        self.0 & 0x7fff != 0
    }
}

impl fmt::Display for PKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#06x}", self.0)
    }
}

/// The base transport header, 12 bytes, the first transport header of every packet.
#[derive(Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Bth {
    opcode: u8,
    flags: u8,
    pkey: U16,
    /// FECN, BECN, six reserved bits, the destination QPN.
    dest: U32,
    /// AckReq, seven reserved bits, the PSN.
    psn: U32,
}

const SOLICITED: u8 = 0x80;
const MIG_REQ: u8 = 0x40;
const ACK_REQ: u32 = 1 << 31;
const FECN: u32 = 1 << 31;
const BECN: u32 = 1 << 30;

impl Bth {
    /// Bytes on the wire.
    pub const LEN: usize = 12;

    /// A header with MigReq set (like those of ConnectX; docs/protocol.md §1), the default P_Key and zeros elsewhere.
    #[inline]
    pub fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Bth {
        Bth {
            opcode: opcode.byte(),
            flags: MIG_REQ,
            pkey: U16::new(PKEY_DEFAULT.0),
            dest: U32::new(dest_qpn.value()),
            psn: U32::new(psn.value()),
        }
    }

    /// The opcode byte, which may be invalid.
    pub fn opcode_byte(&self) -> u8 {
        self.opcode
    }

    pub(crate) fn set_opcode(&mut self, opcode: Opcode) {
        self.opcode = opcode.byte();
    }

    /// Whether the responder is requested to raise a solicited event.
    pub fn solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }

    /// Sets [`solicited`](Bth::solicited).
    pub fn set_solicited(&mut self, on: bool) {
        set(&mut self.flags, SOLICITED, on);
    }

    /// The migration state bit, ignored on receive.
    pub fn mig_req(&self) -> bool {
        self.flags & MIG_REQ != 0
    }

    /// Sets [`mig_req`](Bth::mig_req).
    pub fn set_mig_req(&mut self, on: bool) {
        set(&mut self.flags, MIG_REQ, on);
    }

    /// Zero bytes between the payload and the ICRC, 0 to 3.
    pub fn pad(&self) -> usize {
        usize::from(self.flags >> 4 & 3)
    }

    /// Sets [`pad`](Bth::pad) to the low two bits of `pad`.
    pub fn set_pad(&mut self, pad: usize) {
        self.flags = self.flags & !0x30 | (pad as u8 & 3) << 4;
    }

    /// The transport header version; 0 is the only one.
    pub fn transport_version(&self) -> u8 {
        self.flags & 0x0f
    }

    /// The partition key.
    pub fn pkey(&self) -> PKey {
        PKey(self.pkey.get())
    }

    /// The same header with another [`pkey`](Bth::pkey).
    #[inline]
    pub fn in_partition(mut self, pkey: PKey) -> Bth {
        self.set_pkey(pkey);
        self
    }

    /// Sets [`pkey`](Bth::pkey).
    pub fn set_pkey(&mut self, pkey: PKey) {
        self.pkey = U16::new(pkey.0);
    }

    /// Forward congestion notification; outside the ICRC.
    pub fn fecn(&self) -> bool {
        self.dest.get() & FECN != 0
    }

    /// Backward congestion notification, set in CNPs; outside the ICRC.
    pub fn becn(&self) -> bool {
        self.dest.get() & BECN != 0
    }

    /// Sets [`becn`](Bth::becn).
    pub fn set_becn(&mut self, on: bool) {
        set_wide(&mut self.dest, BECN, on);
    }

    /// The destination queue pair.
    pub fn dest_qpn(&self) -> Qpn {
        Qpn::new(self.dest.get())
    }

    /// Sets [`dest_qpn`](Bth::dest_qpn); the other bits of the word are unchanged.
    pub fn set_dest_qpn(&mut self, qpn: Qpn) {
        self.dest = U32::new(self.dest.get() & 0xff00_0000 | qpn.value());
    }

    /// The header as covered by the ICRC: all bits that a switch may change are set. FECN, BECN and the six reserved
    /// bits are a byte of their own.
    pub fn masked(mut self) -> Bth {
        self.dest = U32::new(self.dest.get() | 0xff00_0000);
        self
    }

    /// Whether the responder is requested to acknowledge.
    pub fn ack_req(&self) -> bool {
        self.psn.get() & ACK_REQ != 0
    }

    /// Sets [`ack_req`](Bth::ack_req).
    pub fn set_ack_req(&mut self, on: bool) {
        set_wide(&mut self.psn, ACK_REQ, on);
    }

    /// The packet sequence number.
    pub fn psn(&self) -> Psn {
        Psn::new(self.psn.get())
    }
}

fn set(byte: &mut u8, mask: u8, on: bool) {
    *byte = if on { *byte | mask } else { *byte & !mask };
}

fn set_wide(word: &mut U32, mask: u32, on: bool) {
    *word = U32::new(if on { word.get() | mask } else { word.get() & !mask });
}

impl fmt::Debug for Bth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bth")
            .field("opcode", &format_args!("{:#04x}", self.opcode))
            .field("solicited", &self.solicited())
            .field("mig_req", &self.mig_req())
            .field("pad", &self.pad())
            .field("pkey", &format_args!("{:#06x}", self.pkey.get()))
            .field("dest_qpn", &self.dest_qpn())
            .field("ack_req", &self.ack_req())
            .field("psn", &self.psn())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_land_on_their_bits() {
        let mut bth = Bth::new(Opcode::RC_SEND_ONLY, Qpn::new(0x11), Psn::new(0xfe));
        bth.set_ack_req(true);
        bth.set_pad(3);
        assert_eq!(bth.as_bytes(), [4, 0x70, 0xff, 0xff, 0, 0, 0, 0x11, 0x80, 0, 0, 0xfe]);
        bth.set_solicited(true);
        bth.set_mig_req(false);
        bth.set_becn(true);
        assert_eq!(bth.as_bytes()[1], 0xb0);
        assert!(bth.becn() && !bth.fecn());
        bth.set_dest_qpn(Qpn::new(0x12));
        assert_eq!(bth.as_bytes()[4..8], [0x40, 0, 0, 0x12]);
        assert_eq!(bth.masked().as_bytes()[4..8], [0xff, 0, 0, 0x12]);
        assert_eq!((bth.pad(), bth.transport_version()), (3, 0));
    }

    #[test]
    fn pkeys_match_by_partition_and_membership() {
        assert!(PKEY_DEFAULT.admits(PKey(0x7fff)));
        assert!(PKey(0x7fff).admits(PKEY_DEFAULT));
        assert!(!PKey(0x7fff).admits(PKey(0x7fff)));
        assert!(!PKEY_DEFAULT.admits(PKey(0x1234)));
    }
}
