//! Word of packets that were not delivered, for ports whose packets the kernel does not know: ICMP's raw sockets
//! beside them.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::udp::set_option;
use crate::{Nanos, ROCE_PORT, Refusal, RefusalReason};

/// Hears what ICMP says of RoCE packets on one interface. Needs CAP_NET_RAW; where that is missing it hears nothing.
#[derive(Debug)]
pub(crate) struct IcmpListener {
    /// Of ICMP and ICMPv6 (`true`), though their type says UDP: that one receives from any datagram socket.
    sockets: Vec<(UdpSocket, bool)>,
    next_look: Nanos,
    /// Messages that are still read in this look.
    left: u32,
}

/// A look costs a system call for each socket.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Messages that are read in one look: anybody can send them, and a poll must end.
const MESSAGES_MAX: u32 = 64;
/// As much as hosts quote of a packet (RFC 1812 4.3.2.3: no more than 576 bytes in all), and the outer headers.
const LONGEST: usize = 640;
/// What waits at most while nobody asks; the kernel takes at least 2 KiB.
const BUFFER: i32 = 16 << 10;

impl IcmpListener {
    /// On the interface of that name, in the network namespace of the calling thread.
    pub(crate) fn new(interface: &str) -> IcmpListener {
        let open = |ipv6| match open(interface, ipv6) {
            Ok(socket) => Some((UdpSocket::from(socket), ipv6)),
            Err(error) => {
                tracing::debug!(interface, "ICMP is not heard (IPv6: {ipv6}): {error}");
                None
            }
        };
        IcmpListener {
            sockets: [false, true].into_iter().filter_map(open).collect(),
            next_look: Nanos::ZERO,
            left: MESSAGES_MAX,
        }
    }

    /// The next word that has come. Looks every millisecond, for [`MESSAGES_MAX`] messages at most.
    pub(crate) fn hear(&mut self, now: Nanos) -> Option<Refusal> {
        if now < self.next_look {
            return None;
        }
        let mut message = [0; LONGEST];
        for (socket, ipv6) in &self.sockets {
            while self.left > 0
                && let Ok((len, from)) = socket.recv_from(&mut message)
            {
                self.left -= 1;
                let parse = if *ipv6 { parse_v6 } else { parse_v4 };
                let refusal = parse(&message[..len], from.ip());
                if refusal.is_some() {
                    return refusal;
                }
            }
        }
        (self.next_look, self.left) = (now + LOOK_EVERY, MESSAGES_MAX);
        None
    }
}

fn open(interface: &str, ipv6: bool) -> io::Result<OwnedFd> {
    let (family, protocol) =
        if ipv6 { (libc::AF_INET6, libc::IPPROTO_ICMPV6) } else { (libc::AF_INET, libc::IPPROTO_ICMP) };
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers; the result is checked below.
    let fd = unsafe { libc::socket(family, kind, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // Only Destination Unreachable: each other type has its bit set.
    if ipv6 {
        let mut others = [u32::MAX; 8];
        others[0] &= !(1 << ICMPV6_UNREACHABLE);
        set_option(socket.as_fd(), libc::IPPROTO_ICMPV6, ICMP6_FILTER, others)?;
    } else {
        set_option(socket.as_fd(), libc::SOL_RAW, ICMP_FILTER, !(1u32 << ICMP_UNREACHABLE))?;
    }
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER)?;
    let mut name = [0u8; libc::IFNAMSIZ];
    for (to, from) in name.iter_mut().zip(interface.bytes()) {
        *to = from;
    }
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name)?;
    Ok(socket)
}

/// An ICMP message behind its IP header.
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

/// An ICMPv6 message, of which the socket has no IP header.
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

const ICMP_UNREACHABLE: u8 = 3;
const ICMPV6_UNREACHABLE: u8 = 1;
// linux/icmp.h, linux/icmpv6.h.
const ICMP_FILTER: i32 = 1;
const ICMP6_FILTER: i32 = 1;

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
    fn a_message_names_its_packet_or_counts_for_nothing() {
        let good = message();
        let peer = IpAddr::from([10, 9, 0, 2]);
        let refusal = parse_v4(&good, peer).expect("a refusal");
        assert_eq!((refusal.peer, refusal.from, refusal.reason), (peer, peer, RefusalReason::Port));
        assert_eq!(refusal.quoted[..], good[good.len() - Refusal::QUOTED..]);
        // Cut short, of another type, that the packet was too long, of TCP, of another port.
        assert!((0..good.len()).all(|len| parse_v4(&good[..len], peer).is_none()));
        for (at, value) in [(20, 11), (21, 4), (28 + 9, 6), (48 + 3, 0xb8)] {
            let mut other = good.clone();
            other[at] = value;
            assert_eq!(parse_v4(&other, peer), None, "byte {at}");
        }
    }
}
