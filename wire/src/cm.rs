//! Messages of the connection manager: the MADs that set up and end connections over QP1.
//!
//! ```
//! use ferroce_wire::cm::{CmBody, CmMessage, Rtu};
//!
//! let rtu = Rtu::new(7, 9);
//! let mut mad = [0; ferroce_wire::MAD_LEN];
//! CmMessage { transaction_id: 1, body: CmBody::Rtu(&rtu) }.emit(&mut mad);
//! assert_eq!(CmMessage::parse(&mad).unwrap().body, CmBody::Rtu(&rtu));
//! ```

use zerocopy::{FromBytes, IntoBytes};

use crate::{MAD_LEN, MadError, MadHeader};

mod disconnect;
mod ip_cm;
mod path;
mod rej;
mod rep;
mod req;
mod sidr;

pub use disconnect::{Drep, Dreq};
pub use ip_cm::{IpCm, IpCmError, RDMA_UDP_QKEY, SERVICE_ID_TCP, SERVICE_ID_UDP};
pub use path::{Apr, Lap, PathRecord};
pub use rej::{Mra, Rej, RejectReason, Stage};
pub use rep::{Rep, Rtu};
pub use req::{Req, TransportType};
pub use sidr::{SidrRep, SidrReq};

/// A connection manager MAD that borrows its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CmMessage<'a> {
    /// Chosen by the end that begins an exchange, and repeated in answers.
    pub transaction_id: u64,
    /// The message with its fields.
    pub body: CmBody<'a>,
}

/// The messages, each 232 bytes after the [`MadHeader`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each names the type of its message")]
pub enum CmBody<'a> {
    Req(&'a Req),
    Mra(&'a Mra),
    Rej(&'a Rej),
    Rep(&'a Rep),
    Rtu(&'a Rtu),
    Dreq(&'a Dreq),
    Drep(&'a Drep),
    SidrReq(&'a SidrReq),
    SidrRep(&'a SidrRep),
    Lap(&'a Lap),
    Apr(&'a Apr),
}

impl<'a> CmMessage<'a> {
    /// Reads the payload of a packet for QP1.
    ///
    /// # Errors
    /// The first check that fails; the packet is dropped (docs/protocol.md §10, case 118).
    pub fn parse(mad: &'a [u8]) -> Result<CmMessage<'a>, MadError> {
        let wrong_length = || MadError::Length(mad.len());
        let (header, body) = MadHeader::ref_from_prefix(mad).map_err(|_| wrong_length())?;
        let body: &[u8; BODY_LEN] = body.try_into().map_err(|_| wrong_length())?;
        header.check_cm()?;
        let body = match header.attribute_id() {
            REQ => CmBody::Req(zerocopy::transmute_ref!(body)),
            MRA => CmBody::Mra(zerocopy::transmute_ref!(body)),
            REJ => CmBody::Rej(zerocopy::transmute_ref!(body)),
            REP => CmBody::Rep(zerocopy::transmute_ref!(body)),
            RTU => CmBody::Rtu(zerocopy::transmute_ref!(body)),
            DREQ => CmBody::Dreq(zerocopy::transmute_ref!(body)),
            DREP => CmBody::Drep(zerocopy::transmute_ref!(body)),
            SIDR_REQ => CmBody::SidrReq(zerocopy::transmute_ref!(body)),
            SIDR_REP => CmBody::SidrRep(zerocopy::transmute_ref!(body)),
            LAP => CmBody::Lap(zerocopy::transmute_ref!(body)),
            APR => CmBody::Apr(zerocopy::transmute_ref!(body)),
            other => return Err(MadError::Attribute(other)),
        };
        Ok(CmMessage { transaction_id: header.transaction_id(), body })
    }

    /// Writes the MAD, the payload of a UD SEND Only to QP1.
    pub fn emit(&self, mad: &mut [u8; MAD_LEN]) {
        let (attribute, body) = match self.body {
            CmBody::Req(body) => (REQ, body.as_bytes()),
            CmBody::Mra(body) => (MRA, body.as_bytes()),
            CmBody::Rej(body) => (REJ, body.as_bytes()),
            CmBody::Rep(body) => (REP, body.as_bytes()),
            CmBody::Rtu(body) => (RTU, body.as_bytes()),
            CmBody::Dreq(body) => (DREQ, body.as_bytes()),
            CmBody::Drep(body) => (DREP, body.as_bytes()),
            CmBody::SidrReq(body) => (SIDR_REQ, body.as_bytes()),
            CmBody::SidrRep(body) => (SIDR_REP, body.as_bytes()),
            CmBody::Lap(body) => (LAP, body.as_bytes()),
            CmBody::Apr(body) => (APR, body.as_bytes()),
        };
        let (header, rest) = mad.split_at_mut(MadHeader::LEN);
        header.copy_from_slice(MadHeader::cm(self.transaction_id, attribute).as_bytes());
        rest.copy_from_slice(body);
    }
}

impl CmBody<'_> {
    /// The name in the standard: `REQ`, `SIDR_REP`.
    pub const fn name(&self) -> &'static str {
        match self {
            CmBody::Req(_) => "REQ",
            CmBody::Mra(_) => "MRA",
            CmBody::Rej(_) => "REJ",
            CmBody::Rep(_) => "REP",
            CmBody::Rtu(_) => "RTU",
            CmBody::Dreq(_) => "DREQ",
            CmBody::Drep(_) => "DREP",
            CmBody::SidrReq(_) => "SIDR_REQ",
            CmBody::SidrRep(_) => "SIDR_REP",
            CmBody::Lap(_) => "LAP",
            CmBody::Apr(_) => "APR",
        }
    }
}

const BODY_LEN: usize = MAD_LEN - MadHeader::LEN;

// Attribute ids (docs/protocol.md §2).
const REQ: u16 = 0x10;
const MRA: u16 = 0x11;
const REJ: u16 = 0x12;
const REP: u16 = 0x13;
const RTU: u16 = 0x14;
const DREQ: u16 = 0x15;
const DREP: u16 = 0x16;
const SIDR_REQ: u16 = 0x17;
const SIDR_REP: u16 = 0x18;
const LAP: u16 = 0x19;
const APR: u16 = 0x1a;

/// `width` bits of `byte` from bit `shift` up.
const fn bits(byte: u8, shift: u32, width: u32) -> u8 {
    byte >> shift & mask(width)
}

/// Replaces the bits that [`bits`] returns by the lowest `width` bits of `value`.
const fn set_bits(byte: &mut u8, shift: u32, width: u32, value: u8) {
    *byte = *byte & !(mask(width) << shift) | (value & mask(width)) << shift;
}

const fn mask(width: u32) -> u8 {
    (1 << width) - 1
}
