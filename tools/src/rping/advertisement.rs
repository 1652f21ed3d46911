//! The message by which rping's ends exchange memory addresses: 16 bytes, big-endian.

use ferroce::{RKey, RemoteAddress};

/// Memory that the other end may access. The server's go-aheads have the same length; their contents are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Advertisement {
    pub(super) address: u64,
    pub(super) rkey: u32,
    /// In bytes.
    pub(super) length: u32,
}

impl Advertisement {
    pub(super) const LEN: usize = 16;

    pub(super) fn to_bytes(self) -> [u8; Advertisement::LEN] {
        let mut bytes = [0; Advertisement::LEN];
        bytes[..8].copy_from_slice(&self.address.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.to_be_bytes());
        bytes[12..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Advertisement> {
        let (address, rest) = bytes.split_first_chunk()?;
        let (rkey, rest) = rest.split_first_chunk()?;
        let (length, _) = rest.split_first_chunk()?;
        Some(Advertisement {
            address: u64::from_be_bytes(*address),
            rkey: u32::from_be_bytes(*rkey),
            length: u32::from_be_bytes(*length),
        })
    }

    pub(super) fn remote(self) -> RemoteAddress {
        RemoteAddress { addr: self.address, rkey: RKey::new(self.rkey) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bytes_there_and_back() {
        let memory = Advertisement { address: 0x0102_0304_0506_0708, rkey: 0x1122_3344, length: 64 };
        let bytes = memory.to_bytes();
        assert_eq!(bytes, *b"\x01\x02\x03\x04\x05\x06\x07\x08\x11\x22\x33\x44\0\0\0\x40");
        assert_eq!(Advertisement::parse(&bytes), Some(memory));
        assert_eq!(Advertisement::parse(&bytes[..15]), None);
    }
}
