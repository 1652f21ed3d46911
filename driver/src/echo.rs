//! ICMP echo with "don't fragment": the packet lengths that a peer without ferroce answers.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::udp::set_option;

/// The result of an echo request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Echo {
    /// It was answered, in the same length.
    Answered,
    /// The packet is too long for the local interface.
    TooLong,
    /// There was no answer before the timeout.
    Silence,
}

/// Sends echo requests to one peer.
///
/// With the kernel's ping socket if `net.ipv4.ping_group_range` allows it, otherwise with a raw socket, which needs CAP_NET_RAW.
#[derive(Debug)]
pub struct Pinger {
    /// An ICMP socket. The type is `UdpSocket` because its connect, send and timeouts work on any datagram socket.
    socket: UdpSocket,
    ipv6: bool,
    sequence: u16,
    buffer: Vec<u8>,
}

/// The longest IP packet.
const LONGEST: usize = 65_535;
/// ICMP's own header.
const HEADER: usize = 8;

impl Pinger {
    /// For `peer`, on the interface of index `scope` if it is a link-local address.
    ///
    /// # Errors
    /// The kernel's error: `PermissionDenied` if neither socket is permitted.
    pub fn new(peer: IpAddr, scope: u32) -> io::Result<Pinger> {
        let ipv6 = peer.is_ipv6();
        // Don't fragment, and ignore the cached path MTU.
        let socket = create(ipv6, libc::SOCK_DGRAM).or_else(|_| create(ipv6, libc::SOCK_RAW))?;
        if ipv6 {
            set_option(
                socket.as_fd(),
                libc::IPPROTO_IPV6,
                libc::IPV6_MTU_DISCOVER,
                libc::IPV6_PMTUDISC_PROBE,
            )?;
            set_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1)?;
        } else {
            set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)?;
        }
        let socket = UdpSocket::from(socket);
        let to = match peer {
            IpAddr::V6(ip) if ip.is_unicast_link_local() => {
                SocketAddr::V6(std::net::SocketAddrV6::new(ip, 0, 0, scope))
            }
            _ => SocketAddr::new(peer, 0),
        };
        socket.connect(to)?;
        Ok(Pinger { socket, ipv6, sequence: 0, buffer: vec![0; LONGEST] })
    }

    /// Sends a request in an IP packet of `length` bytes and waits for its answer.
    ///
    /// # Errors
    /// The kernel's error, such as no route.
    pub fn ask(&mut self, length: u32, patience: Duration) -> io::Result<Echo> {
        self.sequence = self.sequence.wrapping_add(1);
        let request = self.request(length);
        match self.socket.send(&request) {
            Ok(_) => {}
            Err(error) if error.raw_os_error() == Some(libc::EMSGSIZE) => return Ok(Echo::TooLong),
            Err(error) => return Err(error),
        }
        let deadline = Instant::now() + patience;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(Echo::Silence);
            }
            self.socket.set_read_timeout(Some(left))?;
            match self.socket.recv(&mut self.buffer) {
                Ok(count) if self.answers(&request, count) => return Ok(Echo::Answered),
                // A raw socket receives all of ICMP; a router's "packet too big" has the same result as no answer.
                Ok(_) => {}
                Err(error)
                    if [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted]
                        .contains(&error.kind())
                        || error.raw_os_error() == Some(libc::EMSGSIZE) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// An ICMP message that fills an IP packet of `length` bytes.
    fn request(&self, length: u32) -> Vec<u8> {
        let ip_header = if self.ipv6 { 40 } else { 20 };
        let length = (length as usize).clamp(ip_header + HEADER + TOKEN, LONGEST) - ip_header;
        let mut message: Vec<u8> = (0..length).map(|i| i as u8).collect();
        message[..HEADER].fill(0);
        message[0] = if self.ipv6 { 128 } else { 8 };
        message[6..8].copy_from_slice(&self.sequence.to_be_bytes());
        // Distinguishes the answers to several processes: a raw socket receives all of them.
        message[HEADER..HEADER + TOKEN].copy_from_slice(&std::process::id().to_be_bytes());
        if !self.ipv6 {
            // For IPv6 the kernel computes it, because it covers the addresses.
            let sum = checksum(&message);
            message[2..4].copy_from_slice(&sum.to_be_bytes());
        }
        message
    }

    /// Whether the first `count` bytes of the buffer are the answer to `request`.
    fn answers(&self, request: &[u8], count: usize) -> bool {
        let received = &self.buffer[..count];
        // A raw IPv4 socket receives the IP header too; none of our ICMP messages starts with this byte.
        let header_len = match received.first() {
            Some(first) if !self.ipv6 && first >> 4 == 4 => usize::from(first & 15) * 4,
            _ => 0,
        };
        let Some(message) = received.get(header_len..) else { return false };
        let reply = if self.ipv6 { 129 } else { 0 };
        message.len() == request.len() && message[0] == reply && message[6..] == request[6..]
    }
}

/// Bytes behind the header that name the process.
const TOKEN: usize = 4;

fn create(ipv6: bool, kind: i32) -> io::Result<OwnedFd> {
    let (family, protocol) =
        if ipv6 { (libc::AF_INET6, libc::IPPROTO_ICMPV6) } else { (libc::AF_INET, libc::IPPROTO_ICMP) };
    // SAFETY: no pointers; the result is checked below.
    let fd = unsafe { libc::socket(family, kind | libc::SOCK_CLOEXEC, protocol) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The Internet checksum (RFC 1071).
fn checksum(message: &[u8]) -> u16 {
    let words =
        message.chunks(2).map(|pair| u32::from(pair[0]) << 8 | pair.get(1).map_or(0, |b| u32::from(*b)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_of_a_request_is_correct() {
        // RFC 1071's own example, and a request whose sum is that of all ones.
        assert_eq!(checksum(&[0x00, 0x01, 0xf2, 0x03, 0xf4, 0xf5, 0xf6, 0xf7]), !0xddf2);
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a socket");
        let pinger = Pinger { socket, ipv6: false, sequence: 7, buffer: Vec::new() };
        for length in [36, 1088, 4160, 65_535] {
            let request = pinger.request(length);
            assert_eq!((request.len() + 20, checksum(&request)), (length as usize, 0));
        }
    }

    #[test]
    fn the_host_answers_itself() {
        let loopback = IpAddr::from([127, 0, 0, 1]);
        let mut pinger = match Pinger::new(loopback, 0) {
            Ok(pinger) => pinger,
            Err(error) => return println!("skipped: no ICMP socket for this user: {error}"),
        };
        let patience = Duration::from_secs(5);
        assert_eq!(pinger.ask(1088, patience).expect("a socket"), Echo::Answered);
        assert_eq!(pinger.ask(65_535, patience).expect("a socket"), Echo::Answered);
    }
}
