use std::fmt;
use std::str::FromStr;

use ferroce_wire::RKey;

use crate::verbs::endpoint::fields;
use crate::verbs::{Error, RemoteAddress};

/// The data that a peer needs to access a region or a window, as text, as bytes, or through serde (feature `serde`).
///
/// ```
/// # use ferroce::*;
/// let text = "addr=0x1000/rkey=0x00c0ffee/length=4096";
/// let memory: RemoteMemory = text.parse()?;
/// assert_eq!(memory.at(16).addr, 0x1010);
/// assert_eq!(memory.to_string(), text);
/// assert_eq!(RemoteMemory::from_bytes(&memory.to_bytes())?, memory);
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "String", try_from = "String"))]
#[non_exhaustive]
pub struct RemoteMemory {
    /// Virtual address of the first byte.
    pub addr: u64,
    /// The key.
    pub rkey: RKey,
    /// Bytes.
    pub length: u64,
}

impl RemoteMemory {
    /// Bytes of [`to_bytes`](RemoteMemory::to_bytes).
    pub const LEN: usize = 20;

    /// `length` bytes from the virtual address `addr` on, under `rkey`.
    pub fn new(addr: u64, rkey: RKey, length: u64) -> RemoteMemory {
        RemoteMemory { addr, rkey, length }
    }

    /// The address of byte `offset`, for a work request. The peer checks whether it is inside the memory.
    pub fn at(&self, offset: u64) -> RemoteAddress {
        RemoteAddress { addr: self.addr.wrapping_add(offset), rkey: self.rkey }
    }

    /// Address, key and length, big-endian.
    pub fn to_bytes(&self) -> [u8; RemoteMemory::LEN] {
        let mut bytes = [0; RemoteMemory::LEN];
        bytes[..8].copy_from_slice(&self.addr.to_be_bytes());
        bytes[8..12].copy_from_slice(&self.rkey.value().to_be_bytes());
        bytes[12..].copy_from_slice(&self.length.to_be_bytes());
        bytes
    }

    /// The reverse of [`to_bytes`](RemoteMemory::to_bytes). Private data of the connection manager is padded with zeros:
    /// take its first [`LEN`](RemoteMemory::LEN) bytes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another length, and for memory that passes the end of the address space.
    pub fn from_bytes(bytes: &[u8]) -> Result<RemoteMemory, Error> {
        if bytes.len() != RemoteMemory::LEN {
            let expected = "20 bytes; of a peer's private data, which is padded, the first RemoteMemory::LEN";
            return Err(Error::invalid("remote memory", format_args!("{} bytes", bytes.len()), expected));
        }
        let number = |bytes: &[u8]| bytes.iter().fold(0, |value: u64, byte| value << 8 | u64::from(*byte));
        let (addr, length) = (number(&bytes[..8]), number(&bytes[12..]));
        RemoteMemory { addr, rkey: RKey::new(number(&bytes[8..12]) as u32), length }.checked()
    }
}

impl RemoteMemory {
    /// Fails if no region can have these values.
    fn checked(self) -> Result<RemoteMemory, Error> {
        if self.addr.checked_add(self.length.saturating_sub(1)).is_none() {
            return Err(Error::invalid("remote memory", self, "addr + length of at most 2^64"));
        }
        Ok(self)
    }
}

impl fmt::Display for RemoteMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "addr={:#x}/rkey={}/length={}", self.addr, self.rkey, self.length)
    }
}

impl FromStr for RemoteMemory {
    type Err = Error;

    fn from_str(text: &str) -> Result<RemoteMemory, Error> {
        let wrong = || Error::invalid("remote memory", text, "addr=N/rkey=N/length=N, a key of 32 bits");
        let [addr, rkey, length] = fields(text.split('/'), ["addr", "rkey", "length"]).ok_or_else(wrong)?;
        let rkey = RKey::new(u32::try_from(rkey).map_err(|_| wrong())?);
        RemoteMemory { addr, rkey, length }.checked()
    }
}

impl From<RemoteMemory> for String {
    fn from(memory: RemoteMemory) -> String {
        memory.to_string()
    }
}

impl TryFrom<String> for RemoteMemory {
    type Error = Error;

    fn try_from(text: String) -> Result<RemoteMemory, Error> {
        text.parse()
    }
}
