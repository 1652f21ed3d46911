//! UDP sockets, as listed by the kernel: by netlink (`man 7 sock_diag`), or in `/proc` if the kernel has no socket
//! monitoring.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::codec::{Request, address, attributes, u32_at};
use super::socket::NetlinkSocket;
use super::{DUMP, os_error};
use crate::Error;

/// A UDP socket that is bound to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BoundSocket {
    /// Its address; unspecified for all addresses of its IP version.
    pub(crate) address: IpAddr,
    /// Whether it receives both IPv6 and IPv4: all addresses of both.
    pub(crate) is_of_both: bool,
    /// The index of the only interface that it is bound to, 0 for all; `None` if the kernel does not report it.
    pub(crate) interface: Option<u32>,
    /// The user of the process that created it.
    pub(crate) user: u32,
    /// Its inode; 0 if it has none.
    pub(crate) inode: u32,
}

impl BoundSocket {
    /// Whether it receives packets to `own`, an address of the interface with this index.
    pub(crate) fn covers(&self, own: IpAddr, interface: u32) -> bool {
        let is_there = self.interface.is_none_or(|index| index == 0 || index == interface);
        let is_all = self.address.is_unspecified()
            && (self.address.is_ipv4() == own.is_ipv4() || (self.is_of_both && own.is_ipv4()));
        is_there && (is_all || self.address == own)
    }
}

/// All UDP sockets of the calling thread's network namespace that are bound to a port. Needs no privilege.
///
/// # Errors
/// [`Error::Os`] if both listings fail.
pub(crate) fn bound_to(port: u16) -> Result<Vec<BoundSocket>, Error> {
    let listed = match NetlinkSocket::open(libc::NETLINK_SOCK_DIAG) {
        Ok(socket) => by_netlink(&socket, port),
        Err(Error::Os { source, .. }) => Err(source),
        Err(error) => return Err(error),
    };
    // A kernel without the modules (CONFIG_INET_DIAG, CONFIG_INET_UDP_DIAG) does not support the protocol or the
    // request.
    match listed {
        Err(error) if is_unknown(&error) => in_proc(port),
        listed => listed,
    }
    .map_err(|source| os_error("listing UDP sockets", "(any)", source))
}

fn by_netlink(socket: &NetlinkSocket, port: u16) -> io::Result<Vec<BoundSocket>> {
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let request = request(family as u8, libc::IPPROTO_UDP as u8, port);
        let asked = socket.exchange(request, |payload| found.extend(parse(payload, port)));
        match asked {
            // A kernel without IPv6 has no IPv6 sockets.
            Err(error) if family == libc::AF_INET6 && is_unknown(&error) => {}
            other => other?,
        }
    }
    Ok(found)
}

/// The same without the interfaces. Each IPv6 socket on all addresses is assumed to receive both versions.
fn in_proc(port: u16) -> io::Result<Vec<BoundSocket>> {
    // The thread's: its namespace may differ from that of the process.
    let mut table = fs::read_to_string("/proc/thread-self/net/udp")?;
    match fs::read_to_string("/proc/thread-self/net/udp6") {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        sockets => table += &sockets?,
    }
    Ok(table.lines().filter_map(|line| parse_line(line, port)).collect())
}

/// A line of `/proc/net/udp` or `/proc/net/udp6`: number, own address, peer's address, state, queues, timer,
/// retransmissions, user, timeout, inode. Addresses are words in native byte order.
fn parse_line(line: &str, port: u16) -> Option<BoundSocket> {
    let mut fields = line.split_whitespace().skip(1);
    let (address, own_port) = fields.next()?.split_once(':')?;
    if u16::from_str_radix(own_port, 16).ok()? != port {
        return None;
    }
    let word = |at: usize| {
        let digits = address.get(8 * at..8 * at + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let source = match address.len() {
        8 => IpAddr::from(Ipv4Addr::from(word(0)?)),
        32 => {
            let words = [word(0)?, word(1)?, word(2)?, word(3)?];
            IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(words.as_flattened()).ok()?))
        }
        _ => return None,
    };
    let user = fields.nth(5)?.parse().ok()?;
    Some(BoundSocket {
        address: source.to_canonical(),
        is_of_both: source.is_ipv6() && source.is_unspecified(),
        interface: None,
        user,
        inode: fields.nth(1)?.parse().ok()?,
    })
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT | libc::EINVAL)
    )
}

/// `struct inet_diag_req_v2` (linux/inet_diag.h): the port in network byte order.
fn request(family: u8, protocol: u8, port: u16) -> Request {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    let mut fixed = [0; 56];
    fixed[0] = family;
    fixed[1] = protocol;
    // In any state.
    fixed[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    fixed[8..10].copy_from_slice(&port.to_be_bytes());
    Request::new(SOCK_DIAG_BY_FAMILY, DUMP, &fixed)
}

/// `struct inet_diag_msg`, followed by attributes.
fn parse(payload: &[u8], port: u16) -> Option<BoundSocket> {
    const FIXED: usize = 72;
    const SOURCE: usize = 8;
    const INTERFACE: usize = 40;
    const USER: usize = 64;
    const INODE: usize = 68;
    const INET_DIAG_SKV6ONLY: u16 = 11;
    let rest = payload.get(FIXED..)?;
    // The kernel may list more than requested.
    if payload[4..6] != port.to_be_bytes() {
        return None;
    }
    let is_v6 = i32::from(payload[0]) == libc::AF_INET6;
    let source = address(&payload[SOURCE..SOURCE + if is_v6 { 16 } else { 4 }])?;
    let is_v6_only =
        || attributes(rest).any(|(kind, value)| kind == INET_DIAG_SKV6ONLY && value.starts_with(&[1]));
    Some(BoundSocket {
        address: source.to_canonical(),
        is_of_both: is_v6 && source.is_unspecified() && !is_v6_only(),
        interface: Some(u32_at(payload, INTERFACE)?),
        user: u32_at(payload, USER)?,
        inode: u32_at(payload, INODE)?,
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    /// Both listings contain this process's sockets, and none of another port.
    #[test]
    fn proc_lists_what_netlink_lists() {
        let own = ["127.77.3.1:0", "[::1]:0", "0.0.0.0:0"].map(|address| UdpSocket::bind(address).ok());
        for socket in own.iter().flatten() {
            let bound = socket.local_addr().unwrap();
            let listed = in_proc(bound.port()).unwrap();
            assert!(
                listed.iter().any(|socket| socket.address == bound.ip() && socket.inode != 0),
                "{listed:?}"
            );
            let monitoring = NetlinkSocket::open(libc::NETLINK_SOCK_DIAG).unwrap();
            let Ok(told) = by_netlink(&monitoring, bound.port()) else {
                println!("skipped: this kernel has no socket monitoring");
                return;
            };
            let untold = |socket: &BoundSocket| BoundSocket { interface: None, ..*socket };
            assert_eq!(told.iter().map(untold).collect::<Vec<_>>(), listed);
        }
    }

    /// The kernel reports this in the message that ends the list, which would otherwise look like a short list. This is
    /// the answer of a kernel without sockets of a protocol; protocol 200 does not exist.
    #[test]
    fn a_failed_listing_is_an_error() {
        let monitoring = NetlinkSocket::open(libc::NETLINK_SOCK_DIAG).unwrap();
        let error = monitoring.exchange(request(libc::AF_INET as u8, 200, 4791), |_| {}).unwrap_err();
        assert!(is_unknown(&error), "{error}");
    }

    #[test]
    fn a_line_of_both_tables_is_read() {
        let line = "  123: 0100007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 5555 2 0000 0";
        let all = "  9: 00000000000000000000000000000000:12B7 00000000000000000000000000000000:0000 07 0:0 00:0 0 0 0 0 2 00 0";
        let socket = parse_line(line, 4791).unwrap();
        let (user, inode) = (1000, 5555);
        if cfg!(target_endian = "little") {
            assert_eq!(socket.address, IpAddr::from([127, 0, 0, 1]));
        }
        assert_eq!(
            (socket.user, socket.inode, socket.interface, socket.is_of_both),
            (user, inode, None, false)
        );
        let socket = parse_line(all, 4791).unwrap();
        assert!(socket.is_of_both && socket.inode == 0 && socket.covers([10, 0, 0, 1].into(), 7));
        for wrong in
            ["", "sl local_address", "1: 01:12B7", "1: 0100007F:12B7 0:0", "1: 0100007é:12B7 0 0 0 0 0 0 0 0"]
        {
            assert_eq!(parse_line(wrong, 4791), None, "{wrong}");
        }
        assert_eq!(parse_line(line, 4792), None);
    }
}
