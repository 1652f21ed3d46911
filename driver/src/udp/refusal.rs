//! What the kernel reports of packets that were answered by ICMP messages: the socket's error queue (IP_RECVERR).
//!
//! An ICMP message that quotes a MAD ends the request that the MAD is. With IP_RECVERR a socket refuses a packet to any
//! address while its error queue has a report about another packet. So a sender that is refused takes the report from
//! the queue and sends again.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use super::control::Control;
use super::{place, set_option};
use crate::{Refusal, RefusalReason};

/// Asks the kernel to keep word of packets that came back.
pub(super) fn listen(socket: &OwnedFd, own: IpAddr) -> io::Result<()> {
    let (level, option) = match own {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_RECVERR),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_RECVERR),
    };
    set_option(socket.as_fd(), level, option, 1i32)
}

/// Something that the kernel has kept.
#[derive(Debug)]
pub(super) struct Word {
    /// An ICMP message came, and the socket has refused a packet for it or will; otherwise the kernel itself has
    /// refused one.
    pub(super) came: bool,
    /// If it says that a packet was not delivered, and which.
    pub(super) refusal: Option<Refusal>,
}

/// Takes the oldest word that is kept.
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
    // SAFETY: the header points to a name, a place and a control buffer with their lengths, all of which outlive
    // the call.
    let len = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let len = usize::try_from(len).ok()?;
    let (level, kind) = (libc::IPPROTO_IP, libc::IP_RECVERR);
    let (level_v6, kind_v6) = (libc::IPPROTO_IPV6, libc::IPV6_RECVERR);
    let is_word = |(of, kind_of, _): &(i32, i32, &[u8])| {
        (*of, *kind_of) == (level, kind) || (*of, *kind_of) == (level_v6, kind_v6)
    };
    let data = control.messages(header.msg_controllen).find(is_word).map_or(&[][..], |(_, _, data)| data);
    let came = matches!(data.get(4), Some(&(SO_EE_ORIGIN_ICMP | SO_EE_ORIGIN_ICMP6)));
    // A quote that is cut short does not say which packet it is of.
    let known = parse(data).zip(address(&name)).filter(|_| len == Refusal::QUOTED);
    let refusal = known.map(|((reason, from), peer)| Refusal { peer, from, reason, quoted });
    Some(Word { came, refusal })
}

/// `struct sock_extended_err` with the address behind it (linux/errqueue.h).
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
