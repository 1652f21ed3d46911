//! Raw ICMP sockets next to a port, for the messages that the kernel receives.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::Duration;

use super::{ICMP_UNREACHABLE, ICMPV6_UNREACHABLE, parse_v4, parse_v6};
use crate::udp::set_option;
use crate::{Nanos, Refusal};

/// Receives ICMP errors about RoCE packets on one interface. Needs CAP_NET_RAW; without it, it receives nothing.
#[derive(Debug)]
pub(crate) struct IcmpListener {
    /// Sockets of ICMP and ICMPv6 (`true`). The type is `UdpSocket` because its receive works on any datagram socket.
    sockets: Vec<(UdpSocket, bool)>,
    next_look: Nanos,
    /// The number of messages that may still be read in this check.
    left: u32,
}

/// The interval between checks; each costs one system call per socket.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// The most messages read in one check: any host can send them, and a poll must end.
const MESSAGES_MAX: u32 = 64;
/// The longest message: hosts quote at most 576 bytes in all (RFC 1812 4.3.2.3), and the outer headers.
const LONGEST: usize = 640;
/// The receive buffer of a socket between checks; the kernel allocates at least 2 KiB.
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

    /// The next error received. Checks every millisecond, for at most [`MESSAGES_MAX`] messages.
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
    // SAFETY: `fd` is a descriptor without another owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // Receive only Destination Unreachable: a set bit blocks a type.
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
