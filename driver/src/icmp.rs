//! ICMP errors for packets that were not delivered, for ports that bypass the kernel: from additional raw ICMP sockets, or from
//! received frames.

#[cfg(feature = "af_xdp")]
mod listener;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::{ROCE_PORT, Refusal, RefusalReason};

#[cfg(feature = "af_xdp")]
pub(crate) use listener::IcmpListener;

/// Whether the frame may be for [`of_frame`].
#[inline]
pub(crate) fn concerns(frame: &[u8]) -> bool {
    match frame.get(12..14) {
        Some([0x08, 0x00]) => frame.get(23) == Some(&ICMP) && frame.get(34) == Some(&ICMP_UNREACHABLE),
        Some([0x86, 0xdd]) => frame.get(20) == Some(&ICMPV6) && frame.get(54) == Some(&ICMPV6_UNREACHABLE),
        _ => false,
    }
}

/// The error in an Ethernet frame for a RoCE packet, if there is one. The checksum is not verified: the quoted packet must be one
/// that was sent.
pub(crate) fn of_frame(frame: &[u8]) -> Option<Refusal> {
    let packet = frame.get(14..)?;
    if frame[12] == 0x08 {
        let from = Ipv4Addr::from(*packet.get(12..)?.first_chunk::<4>()?);
        parse_v4(packet, from.into())
    } else {
        let from = Ipv6Addr::from(*packet.get(8..)?.first_chunk::<16>()?);
        parse_v6(packet.get(40..)?, from.into())
    }
}

/// An ICMP message, after its IP header.
fn parse_v4(packet: &[u8], from: IpAddr) -> Option<Refusal> {
    let icmp = packet.get(header_len(packet)?..)?;
    if *icmp.first()? != ICMP_UNREACHABLE {
        return None;
    }
    let reason = RefusalReason::of_icmp(*icmp.get(1)?)?;
    let quote = icmp.get(8..)?;
    let udp = quote.get(header_len(quote)?..)?;
    let peer = Ipv4Addr::from(*quote.get(16..)?.first_chunk::<4>()?).into();
    refusal(peer, from, reason, *quote.get(9)?, udp)
}

/// An ICMPv6 message, which the socket receives without IP header.
fn parse_v6(icmp: &[u8], from: IpAddr) -> Option<Refusal> {
    if *icmp.first()? != ICMPV6_UNREACHABLE {
        return None;
    }
    let reason = RefusalReason::of_icmpv6(*icmp.get(1)?)?;
    let quote = icmp.get(8..)?;
    let peer = Ipv6Addr::from(*quote.get(24..)?.first_chunk::<16>()?).into();
    refusal(peer, from, reason, *quote.get(6)?, quote.get(40..)?)
}

fn refusal(peer: IpAddr, from: IpAddr, reason: RefusalReason, protocol: u8, udp: &[u8]) -> Option<Refusal> {
    let is_roce = protocol == libc::IPPROTO_UDP as u8 && udp.get(2..4)? == ROCE_PORT.to_be_bytes();
    let quoted = *udp.get(8..)?.first_chunk()?;
    is_roce.then_some(Refusal { peer, from, reason, quoted })
}

fn header_len(packet: &[u8]) -> Option<usize> {
    packet.first().map(|first| usize::from(first & 15) * 4)
}

const ICMP: u8 = libc::IPPROTO_ICMP as u8;
const ICMPV6: u8 = libc::IPPROTO_ICMPV6 as u8;
const ICMP_UNREACHABLE: u8 = 3;
const ICMPV6_UNREACHABLE: u8 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    /// ICMP port unreachable from 10.9.0.2 that quotes a packet to its port 4791.
    fn message() -> Vec<u8> {
        let header = |protocol, from: [u8; 4], to: [u8; 4]| {
            let mut header = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, protocol, 0, 0];
            header.extend([from, to].concat());
            header
        };
        let mut message = header(1, [10, 9, 0, 2], [10, 9, 0, 1]);
        message.extend([3, 3, 0, 0, 0, 0, 0, 0]);
        message.extend(header(17, [10, 9, 0, 1], [10, 9, 0, 2]));
        message.extend([0xc0, 0, 0x12, 0xb7, 0, 0, 0, 0]);
        message.extend(0..Refusal::QUOTED as u8);
        message
    }

    #[test]
    fn a_frame_is_parsed_as_the_message_in_it() {
        let peer = IpAddr::from([10, 9, 0, 2]);
        let framed = |ethertype: [u8; 2], packet: &[u8]| [&[2; 12], &ethertype[..], packet].concat();
        let good = framed([0x08, 0x00], &message());
        assert!(concerns(&good) && of_frame(&good) == parse_v4(&message(), peer));
        assert!((0..good.len()).all(|len| !concerns(&good[..len]) || of_frame(&good[..len]).is_none()));
        // IPv6: fd07::2 quotes a packet to its port 4791.
        let header = |next: u8, from: u8, to: u8| {
            let mut header = vec![0x60, 0, 0, 0, 0, 0, next, 64];
            for end in [from, to] {
                header.extend([0xfd, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, end]);
            }
            header
        };
        let mut packet = header(58, 2, 1);
        packet.extend([1, 4, 0, 0, 0, 0, 0, 0]);
        packet.extend(header(17, 1, 2));
        packet.extend([0xc0, 0, 0x12, 0xb7, 0, 0, 0, 0]);
        packet.extend(0..Refusal::QUOTED as u8);
        let good = framed([0x86, 0xdd], &packet);
        let refusal = of_frame(&good).expect("a refusal");
        assert!(concerns(&good));
        let peer: IpAddr = "fd07::2".parse().unwrap();
        assert_eq!((refusal.peer, refusal.from, refusal.reason), (peer, peer, RefusalReason::Port));
        assert!((0..good.len()).all(|len| !concerns(&good[..len]) || of_frame(&good[..len]).is_none()));
        // A packet of RoCE, an echo request, ARP.
        for (at, value) in [(20, 17), (54, 128), (13, 6)] {
            let mut other = good.clone();
            other[at] = value;
            assert!(!concerns(&other), "byte {at}");
        }
    }

    #[test]
    fn a_message_without_its_packet_is_ignored() {
        let good = message();
        let peer = IpAddr::from([10, 9, 0, 2]);
        let refusal = parse_v4(&good, peer).expect("a refusal");
        assert_eq!((refusal.peer, refusal.from, refusal.reason), (peer, peer, RefusalReason::Port));
        assert_eq!(refusal.quoted[..], good[good.len() - Refusal::QUOTED..]);
        // Truncated, another type, packet too long, TCP, another port.
        assert!((0..good.len()).all(|len| parse_v4(&good[..len], peer).is_none()));
        for (at, value) in [(20, 11), (21, 4), (28 + 9, 6), (48 + 3, 0xb8)] {
            let mut other = good.clone();
            other[at] = value;
            assert_eq!(parse_v4(&other, peer), None, "byte {at}");
        }
    }
}
