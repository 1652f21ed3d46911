//! The IP and UDP headers, which the engine writes and reads, but the kernel does not pass through the socket.

use std::net::{IpAddr, SocketAddr};

use super::PORT;
use crate::next_hop::octets;
use crate::slots::owner::{QP1, SHARED, qpn_of};

/// IPv4 and UDP.
pub(super) const LEN_V4: usize = 28;
/// IPv6 and UDP.
pub(super) const LEN_V6: usize = 48;

/// Bytes of the headers for this address's IP version.
pub(super) fn len(address: IpAddr) -> usize {
    if address.is_ipv4() { LEN_V4 } else { LEN_V6 }
}

/// The headers of the segments of one received datagram. Only the lengths and the identification differ.
#[derive(Clone, Copy, Debug)]
pub(super) struct Template {
    bytes: [u8; LEN_V6],
    /// Sum of the IPv4 header without length, identification and checksum.
    sum: u32,
    v6: bool,
}

impl Template {
    pub(super) fn new(source: SocketAddr, destination: IpAddr, tos: u8, hop_limit: u8) -> Template {
        let mut bytes = [0; LEN_V6];
        let udp = match (source.ip(), destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                bytes[0] = 0x45;
                bytes[1] = tos;
                bytes[6] = 0x40; // a peer that sets no DF can't be known to have sent any identification
                bytes[8] = hop_limit;
                bytes[9] = libc::IPPROTO_UDP as u8;
                bytes[12..16].copy_from_slice(&source.octets());
                bytes[16..20].copy_from_slice(&destination.octets());
                20
            }
            (source, destination) => {
                bytes[0] = 0x60 | tos >> 4;
                bytes[1] = tos << 4;
                bytes[6] = libc::IPPROTO_UDP as u8;
                bytes[7] = hop_limit;
                bytes[8..24].copy_from_slice(&octets(source));
                bytes[24..40].copy_from_slice(&octets(destination));
                40
            }
        };
        bytes[udp..udp + 2].copy_from_slice(&source.port().to_be_bytes());
        bytes[udp + 2..udp + 4].copy_from_slice(&PORT.to_be_bytes());
        let sum = bytes[..20].chunks_exact(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])));
        Template { bytes, sum: sum.sum(), v6: udp == 40 }
    }

    pub(super) fn len(&self) -> usize {
        if self.v6 { LEN_V6 } else { LEN_V4 }
    }

    /// Writes the headers at the start of `frame`, which already contains the datagram.
    pub(super) fn write(&self, frame: &mut [u8], identification: u16) {
        let len = frame.len() as u16;
        if self.v6 {
            let payload = (len - 40).to_be_bytes();
            frame[..LEN_V6].copy_from_slice(&self.bytes);
            frame[4..6].copy_from_slice(&payload);
            frame[44..46].copy_from_slice(&payload);
            return;
        }
        frame[..LEN_V4].copy_from_slice(&self.bytes[..LEN_V4]);
        frame[2..4].copy_from_slice(&len.to_be_bytes());
        frame[4..6].copy_from_slice(&identification.to_be_bytes());
        let sum = self.sum + u32::from(len) + u32::from(identification);
        let sum = (sum & 0xffff) + (sum >> 16);
        let sum = (sum & 0xffff) + (sum >> 16);
        frame[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        frame[24..26].copy_from_slice(&(len - 20).to_be_bytes());
    }
}

/// The header fields that all packets of a send have in common. They are integers: a comparison of bytes that were just
/// stored one by one would stall, for each packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Key {
    /// The receiver: [`Ipv4Addr::to_bits`](std::net::Ipv4Addr::to_bits), or those of an IPv6 address.
    pub(super) destination: u128,
    pub(super) port: u16,
    pub(super) tos: u8,
    pub(super) hop_limit: u8,
    /// The queue pair, if the receiver's address may be [shared](SHARED): its kernel delivers the packets of a send to
    /// one socket. Otherwise 0.
    qpn: u32,
}

impl Key {
    /// Whether it is a MAD, for QP1.
    pub(super) fn is_mad(&self) -> bool {
        self.qpn == QP1
    }

    /// The key of a packet of the IP version whose headers have `len` bytes; `None` if it is not to be sent.
    pub(super) fn of(packet: &[u8], len: usize) -> Option<Key> {
        let qpn = qpn_of(packet.get(len..)?)?;
        let qpn = if qpn & SHARED == SHARED { qpn } else { 0 };
        let udp = len - 8;
        let port = u16::from_be_bytes([packet[udp + 2], packet[udp + 3]]);
        let (version, destination, tos, hop_limit) = if len == LEN_V4 {
            let destination = u32::from_be_bytes(*packet[16..].first_chunk()?);
            (4, destination.into(), packet[1], packet[8])
        } else {
            let destination = u128::from_be_bytes(*packet[24..].first_chunk()?);
            (6, destination, packet[0] << 4 | packet[1] >> 4, packet[7])
        };
        (packet[0] >> 4 == version).then_some(Key { destination, port, tos, hop_limit, qpn })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ipv4_header_has_a_valid_checksum() {
        let source = "10.9.0.1:49152".parse().expect("an address");
        let template = Template::new(source, "10.9.0.2".parse().expect("an address"), 0x6a, 63);
        for (len, identification) in [(44, 0), (1500, 0xffff), (65535, 0xfffe), (1068, 63)] {
            let mut frame = vec![0xed; len];
            template.write(&mut frame, identification);
            let words = frame[..20].chunks_exact(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
            let sum: u32 = words.sum();
            assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff);
            assert_eq!(frame[2..4], (len as u16).to_be_bytes());
            assert_eq!(frame[24..26], (len as u16 - 20).to_be_bytes());
            let key = Key::of(&frame, LEN_V4).expect("an IPv4 packet");
            assert_eq!((key.destination, key.port), (0x0a09_0002, PORT));
            assert_eq!((key.tos, key.hop_limit, key.qpn), (0x6a, 63, 0xeded_eded & 0x00ff_ffff));
            assert_eq!(Key::of(&frame, LEN_V6), None);
        }
    }

    #[test]
    fn an_ipv6_header_is_read_as_written() {
        let source = "[fd09::1]:4791".parse().expect("an address");
        let destination: std::net::Ipv6Addr = "fd09::2".parse().expect("an address");
        let mut frame = vec![0xee; 100];
        Template::new(source, destination.into(), 0x6a, 63).write(&mut frame, 7);
        let key = Key::of(&frame, LEN_V6).expect("an IPv6 packet");
        assert_eq!((key.destination, key.port), (destination.to_bits(), PORT));
        assert_eq!((key.tos, key.hop_limit), (0x6a, 63));
        assert_eq!((frame[4..6].to_vec(), frame[44..46].to_vec()), (vec![0, 60], vec![0, 60]));
        assert_eq!(Key::of(&frame, LEN_V4), None);
        assert_eq!(Key::of(&frame[..55], LEN_V6), None);
    }
}
