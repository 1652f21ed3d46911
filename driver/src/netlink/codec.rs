//! The byte format of rtnetlink (`man 7 netlink`, `man 7 rtnetlink`): requests, replies and the
//! attributes inside them. Native byte order, everything padded to four bytes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Bytes of `struct nlmsghdr`: length, type, flags, sequence number, port.
const HEADER: usize = 16;
/// Bytes of `struct rtattr`: length, type.
const ATTRIBUTE: usize = 4;
/// The bits of an attribute's type that are not flags (`NLA_TYPE_MASK`).
const TYPE_MASK: u16 = 0x3fff;

/// A request under construction.
pub(super) struct Request {
    bytes: Vec<u8>,
}

impl Request {
    /// A request of type `kind` with its fixed header (`struct ifinfomsg` and the like).
    pub(super) fn new(kind: u16, flags: u16, fixed: &[u8]) -> Request {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(fixed);
        Request { bytes }
    }

    /// Appends an attribute.
    pub(super) fn attribute(mut self, kind: u16, value: &[u8]) -> Request {
        append_attribute(&mut self.bytes, kind, value);
        self
    }

    /// Appends an attribute that contains attributes.
    pub(super) fn nested(self, kind: u16, attributes: &[(u16, &[u8])]) -> Request {
        let mut inner = Vec::new();
        for (kind, value) in attributes {
            append_attribute(&mut inner, *kind, value);
        }
        self.attribute(kind | libc::NLA_F_NESTED as u16, &inner)
    }

    /// The bytes to send, with this sequence number.
    pub(super) fn finish(mut self, sequence: u32) -> Vec<u8> {
        let len = self.bytes.len() as u32;
        self.bytes[0..4].copy_from_slice(&len.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
        self.bytes
    }
}

/// One message of a reply.
pub(super) struct NetlinkMessage<'a> {
    pub(super) kind: u16,
    pub(super) sequence: u32,
    pub(super) payload: &'a [u8],
}

/// The messages of one datagram. Stops at the first incomplete one.
pub(super) fn messages(mut datagram: &[u8]) -> impl Iterator<Item = NetlinkMessage<'_>> {
    std::iter::from_fn(move || {
        let len = u32_at(datagram, 0)? as usize;
        let message = NetlinkMessage {
            kind: u16_at(datagram, 4)?,
            sequence: u32_at(datagram, 8)?,
            payload: datagram.get(HEADER..len)?,
        };
        datagram = datagram.get(align(len)..).unwrap_or_default();
        Some(message)
    })
}

/// The attributes in `bytes`, as (type, value). Stops at the first incomplete one.
pub(super) fn attributes(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let len = usize::from(u16_at(bytes, 0)?);
        let kind = u16_at(bytes, 2)? & TYPE_MASK;
        let value = bytes.get(ATTRIBUTE..len)?;
        bytes = bytes.get(align(len)..).unwrap_or_default();
        Some((kind, value))
    })
}

pub(super) fn u16_at(bytes: &[u8], offset: usize) -> Option<u16> {
    Some(u16::from_ne_bytes(bytes.get(offset..offset + 2)?.try_into().ok()?))
}

pub(super) fn u32_at(bytes: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(offset..offset + 4)?.try_into().ok()?))
}

pub(super) fn u64_at(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(offset..offset + 8)?.try_into().ok()?))
}

/// An address attribute: the family follows from the length.
pub(super) fn address(value: &[u8]) -> Option<IpAddr> {
    match value.len() {
        4 => Some(IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?))),
        16 => Some(IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?))),
        _ => None,
    }
}

/// The bytes of an address, as in attributes.
pub(super) fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// The address family, as in netlink headers.
pub(super) fn family(address: IpAddr) -> u8 {
    match address {
        IpAddr::V4(_) => libc::AF_INET as u8,
        IpAddr::V6(_) => libc::AF_INET6 as u8,
    }
}

/// A NUL-terminated string attribute.
pub(super) fn string(value: &[u8]) -> String {
    let end = value.iter().position(|b| *b == 0).unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end]).into_owned()
}

fn append_attribute(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    bytes.extend_from_slice(&((ATTRIBUTE + value.len()) as u16).to_ne_bytes());
    bytes.extend_from_slice(&kind.to_ne_bytes());
    bytes.extend_from_slice(value);
    bytes.resize(align(bytes.len()), 0);
}

fn align(len: usize) -> usize {
    len.next_multiple_of(4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_reads_back_with_its_attributes() {
        let bytes = Request::new(18, 5, &[0; 16])
            .attribute(3, b"veth0\0")
            .nested(43, &[(1, &7u32.to_ne_bytes()), (3, &[9])])
            .finish(77);
        assert_eq!(bytes.len() % 4, 0);
        let all: Vec<_> = messages(&bytes).collect();
        assert_eq!(all.len(), 1);
        assert_eq!((all[0].kind, all[0].sequence), (18, 77));
        let outer: Vec<_> = attributes(&all[0].payload[16..]).collect();
        assert_eq!(outer[0], (3, &b"veth0\0"[..]));
        assert_eq!(string(outer[0].1), "veth0");
        assert_eq!(outer[1].0, 43);
        let inner: Vec<_> = attributes(outer[1].1).collect();
        assert_eq!(inner, vec![(1, &7u32.to_ne_bytes()[..]), (3, &[9u8][..])]);
    }

    #[test]
    fn truncated_input_ends_the_walk() {
        let bytes = Request::new(16, 0, &[0; 16]).attribute(4, &[1, 2, 3, 4]).finish(1);
        for cut in 0..bytes.len() {
            assert_eq!(messages(&bytes[..cut]).count(), 0, "cut at {cut}");
        }
        // A length smaller than the header must not cause an endless loop or a panic.
        assert_eq!(attributes(&[2, 0, 1, 0, 0, 0, 0, 0]).count(), 0);
        assert_eq!(messages(&[0; 64]).count(), 0);
    }
}
