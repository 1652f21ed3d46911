use zerocopy::byteorder::big_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The length of a management datagram, always the whole payload of a UD SEND to QP1.
pub const MAD_LEN: usize = 256;

/// The header of a management datagram, 24 bytes (docs/protocol.md §2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct MadHeader {
    base_version: u8,
    class: u8,
    class_version: u8,
    method: u8,
    status: U16,
    class_specific: U16,
    transaction_id: U64,
    attribute_id: U16,
    reserved: U16,
    attribute_modifier: U32,
}

impl MadHeader {
    /// Bytes on the wire.
    pub const LEN: usize = 24;
    /// The only base version.
    pub const BASE_VERSION: u8 = 1;
    /// Class of the connection manager.
    pub const CLASS_CM: u8 = 0x07;
    /// Class version of the connection manager.
    pub const CLASS_VERSION_CM: u8 = 2;
    /// The method of every connection manager MAD.
    pub const METHOD_SEND: u8 = 0x03;

    /// The header of a connection manager MAD.
    pub fn cm(transaction_id: u64, attribute_id: u16) -> MadHeader {
        MadHeader {
            base_version: MadHeader::BASE_VERSION,
            class: MadHeader::CLASS_CM,
            class_version: MadHeader::CLASS_VERSION_CM,
            method: MadHeader::METHOD_SEND,
            status: U16::ZERO,
            class_specific: U16::ZERO,
            transaction_id: U64::new(transaction_id),
            attribute_id: U16::new(attribute_id),
            reserved: U16::ZERO,
            attribute_modifier: U32::ZERO,
        }
    }

    /// Whether this is a connection manager MAD.
    ///
    /// # Errors
    /// The first invalid field of base version, class, class version and method.
    pub fn check_cm(&self) -> Result<(), MadError> {
        if self.base_version != MadHeader::BASE_VERSION {
            return Err(MadError::BaseVersion(self.base_version));
        }
        if self.class != MadHeader::CLASS_CM {
            return Err(MadError::Class(self.class));
        }
        if self.class_version != MadHeader::CLASS_VERSION_CM {
            return Err(MadError::ClassVersion(self.class_version));
        }
        if self.method != MadHeader::METHOD_SEND {
            return Err(MadError::Method(self.method));
        }
        Ok(())
    }

    /// The identifier that all messages of an exchange have in common.
    pub fn transaction_id(&self) -> u64 {
        self.transaction_id.get()
    }

    /// The kind of the message.
    pub fn attribute_id(&self) -> u16 {
        self.attribute_id.get()
    }
}

/// The reason why a payload is not a connection manager MAD. Such a packet is dropped without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum MadError {
    /// Not 256 bytes.
    #[error("MAD of {0} bytes: must be {MAD_LEN}")]
    Length(usize),
    /// A base version that does not exist.
    #[error("MAD base version {0}: must be {base}", base = MadHeader::BASE_VERSION)]
    BaseVersion(u8),
    /// Another management class.
    #[error("MAD class {0:#04x}: must be {class:#04x}", class = MadHeader::CLASS_CM)]
    Class(u8),
    /// Another version of the class.
    #[error("CM class version {0}: must be {version}", version = MadHeader::CLASS_VERSION_CM)]
    ClassVersion(u8),
    /// Not a Send.
    #[error("CM method {0:#04x}: must be {method:#04x}", method = MadHeader::METHOD_SEND)]
    Method(u8),
    /// An unknown attribute.
    #[error("CM attribute {0:#06x}: must be 0x0010 (REQ) to 0x001a (APR)")]
    Attribute(u16),
}
