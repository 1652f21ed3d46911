//! UDP sockets, as the kernel lists them (`man 7 sock_diag`).

use std::io;
use std::net::IpAddr;

use super::codec::{Request, address, attributes, u32_at};
use super::socket::NetlinkSocket;
use super::{DUMP, os_error};
use crate::Error;

/// A UDP socket that is bound to a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BoundSocket {
    /// Where it is bound; unspecified for all addresses of its IP version.
    pub(crate) address: IpAddr,
    /// Whether it has IPv4 beside IPv6: all addresses of both.
    pub(crate) is_of_both: bool,
    /// The index of the interface that alone it is bound to; 0 for all.
    pub(crate) interface: u32,
    /// The user whose process made it.
    pub(crate) user: u32,
    /// Its number in the file system of sockets; 0 for the kernel's own sockets.
    pub(crate) inode: u32,
}

impl BoundSocket {
    /// Whether packets to `own`, an address of the interface with that index, are its.
    pub(crate) fn covers(&self, own: IpAddr, interface: u32) -> bool {
        let is_there = self.interface == 0 || self.interface == interface;
        let is_all = self.address.is_unspecified()
            && (self.address.is_ipv4() == own.is_ipv4() || (self.is_of_both && own.is_ipv4()));
        is_there && (is_all || self.address == own)
    }
}

/// All UDP sockets of the calling thread's network namespace that are bound to a port. Needs no privilege.
///
/// # Errors
/// [`Error::Os`] where the kernel has no socket monitoring (`CONFIG_INET_UDP_DIAG`).
pub(crate) fn bound_to(port: u16) -> Result<Vec<BoundSocket>, Error> {
    let socket = NetlinkSocket::open(libc::NETLINK_SOCK_DIAG)?;
    let mut found = Vec::new();
    for family in [libc::AF_INET, libc::AF_INET6] {
        let asked =
            socket.exchange(request(family as u8, port), |payload| found.extend(parse(payload, port)));
        match asked {
            // A kernel without IPv6 has none of its sockets.
            Err(error) if family == libc::AF_INET6 && is_unknown(&error) => {}
            other => other.map_err(|source| os_error("listing UDP sockets", "(any)", source))?,
        }
    }
    Ok(found)
}

fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::EAFNOSUPPORT | libc::EINVAL))
}

/// `struct inet_diag_req_v2` (linux/inet_diag.h): the port in network byte order.
fn request(family: u8, port: u16) -> Request {
    const SOCK_DIAG_BY_FAMILY: u16 = 20;
    let mut fixed = [0; 56];
    fixed[0] = family;
    fixed[1] = libc::IPPROTO_UDP as u8;
    // In whatever state.
    fixed[4..8].copy_from_slice(&u32::MAX.to_ne_bytes());
    fixed[8..10].copy_from_slice(&port.to_be_bytes());
    Request::new(SOCK_DIAG_BY_FAMILY, DUMP, &fixed)
}

/// `struct inet_diag_msg`, and the attributes behind it.
fn parse(payload: &[u8], port: u16) -> Option<BoundSocket> {
    const FIXED: usize = 72;
    const SOURCE: usize = 8;
    const INTERFACE: usize = 40;
    const USER: usize = 64;
    const INODE: usize = 68;
    const INET_DIAG_SKV6ONLY: u16 = 11;
    let rest = payload.get(FIXED..)?;
    // The kernel may list more than was asked for.
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
        interface: u32_at(payload, INTERFACE)?,
        user: u32_at(payload, USER)?,
        inode: u32_at(payload, INODE)?,
    })
}
