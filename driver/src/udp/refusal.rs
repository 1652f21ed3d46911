//! The kernel's reports of packets that were answered by ICMP messages: the socket's error queue (IP_RECVERR).
//!
//! An ICMP message that quotes a MAD ends the request in that MAD. With IP_RECVERR a socket refuses packets to any
//! address while its error queue has a report about another packet. So after a refused send, the sender takes the
//! report from the queue and sends again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::control::Control;
use super::{place, set_option};
use crate::{Refusal, RefusalReason};

/// Enables reports of ICMP messages.
pub(super) fn listen(socket: &OwnedFd, own: IpAddr) -> io::Result<()> {
    let (level, option) = match own {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    set_option(socket.as_fd(), level, option, 1i32)
}

/// An entry of the error queue.
#[derive(Debug)]
pub(super) struct Word {
    /// Whether it is an ICMP message, for which the socket has refused a packet or will refuse one. Otherwise the
    /// kernel itself has refused a packet.
    pub(super) came: bool,
    /// The packet that was not delivered, if the report names it.
    pub(super) refusal: Option<Refusal>,
}

/// Takes the oldest report.
pub(super) fn take(socket: BorrowedFd<'_>) -> Option<Word> {
    // SAFETY: both are plain old data, for which zeros are valid.
    let (mut name, mut header) = unsafe { std::mem::zeroed::<(libc::sockaddr_in6, libc::msghdr)>() };
    let (mut quoted, mut control) = ([0; Refusal::QUOTED], Control::empty());
    let mut place = place(&mut quoted);
    header.msg_name = (&raw mut name).cast();
    header.msg_namelen = size_of::<libc::sockaddr_in6>() as u32;
    header.msg_iov = &raw mut place;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control.bytes).cast();
    header.msg_controllen = Control::CAPACITY;
    let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
    // SAFETY: the header points to a name, a buffer and a control buffer with their lengths, all of which outlive the
    // call.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let len = usize::try_from(len).ok()?;
    let (level, kind) = (libc::IPPROTO_IP, libc::IP_RECVERR);
    let (level_v6, kind_v6) = (libc::IPPROTO_IPV6, libc::IPV6_RECVERR);
    let is_word = |(of, kind_of, _): &(i32, i32, &[u8])| {
        (*of, *kind_of) == (level, kind) || (*of, *kind_of) == (level_v6, kind_v6)
    };
    let data = control.messages(header.msg_controllen).find(is_word).map_or(&[][..], |(_, _, data)| data);
    let came = matches!(data.get(4), Some(&(SO_EE_ORIGIN_ICMP | SO_EE_ORIGIN_ICMP6)));
    // A truncated quote does not identify the packet.
    let known = parse(data).zip(address(&name)).filter(|_| len == Refusal::QUOTED);
    let refusal = known.map(|((reason, from), peer)| Refusal { peer, from, reason, quoted });
    Some(Word { came, refusal })
}

/// `struct sock_extended_err` followed by the address (linux/errqueue.h).
fn parse(data: &[u8]) -> Option<(RefusalReason, IpAddr)> {
    const LEN: usize = 16;
    let (origin, kind, code) = (*data.get(4)?, *data.get(5)?, *data.get(6)?);
    let family = u16::from_ne_bytes(*data.get(LEN..)?.first_chunk()?);
    let behind = |at: usize| data.get(LEN + at..);
    match (origin, kind) {
        (SO_EE_ORIGIN_ICMP, ICMP_UNREACHABLE) if i32::from(family) == libc::AF_INET => {
            let from: [u8; 4] = *behind(4)?.first_chunk()?;
            Some((RefusalReason::of_icmp(code)?, Ipv4Addr::from(from).into()))
        }
        (SO_EE_ORIGIN_ICMP6, ICMPV6_UNREACHABLE) if i32::from(family) == libc::AF_INET6 => {
            let from: [u8; 16] = *behind(8)?.first_chunk()?;
            Some((RefusalReason::of_icmpv6(code)?, Ipv6Addr::from(from).into()))
        }
        _ => None,
    }
}

fn address(name: &libc::sockaddr_in6) -> Option<IpAddr> {
    super::receive::source(name).map(|source| source.ip())
}

const SO_EE_ORIGIN_ICMP: u8 = 2;
const SO_EE_ORIGIN_ICMP6: u8 = 3;
const ICMP_UNREACHABLE: u8 = 3;
const ICMPV6_UNREACHABLE: u8 = 1;
