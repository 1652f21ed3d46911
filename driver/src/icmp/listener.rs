//! ICMP's raw sockets beside a port: the kernel's part of its traffic.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::{ICMP_UNREACHABLE, ICMPV6_UNREACHABLE, parse_v4, parse_v6};
use crate::udp::set_option;
use crate::{Nanos, Refusal};

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
                tracing::debug!(interface, "ICMP errors are not received (IPv6: {ipv6}): {error}");
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

// linux/icmp.h, linux/icmpv6.h.
const ICMP_FILTER: i32 = 1;
const ICMP6_FILTER: i32 = 1;
