//! Opening sockets, and querying their state.
//!
//! No ICMP message influences the path MTU (`IP_PMTUDISC_PROBE`). Forging one takes only the two addresses, and would
//! stop every full packet to that peer for ten minutes. Packets up to the MTU of the interface are sent, without
//! fragmentation.

use std::io;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{DEFAULT_HOP_LIMIT, DEFAULT_TOS, LocalAddress, PORT, UdpConfig, os_error};
use crate::Error;
use crate::holder::Holder;
#[cfg(feature = "af_xdp")]
use crate::netlink::Interface;

/// Requested for both directions. Without privileges, net.core.rmem_max and wmem_max are the limits.
const BUFFER: i32 = 8 << 20;

/// Opens the first socket on port 4791 of the place's address, which others will join. It is refused while there is any
/// other, so if several processes open it at the same time, only one gets the address.
pub(super) fn claim(config: &UdpConfig, place: &LocalAddress) -> Result<OwnedFd, Error> {
    let socket = open(config, place, false)?;
    share_port(socket.as_fd()).map_err(|source| os_error("setting up the UDP socket", place, source))?;
    Ok(socket)
}

/// Opens another socket on the address of the one from [`claim`]. Linux admits only sockets of the same user.
pub(super) fn join(config: &UdpConfig, place: &LocalAddress) -> Result<OwnedFd, Error> {
    open(config, place, true)
}

fn open(config: &UdpConfig, place: &LocalAddress, joins: bool) -> Result<OwnedFd, Error> {
    let os = |source| os_error("setting up the UDP socket", place, source);
    let socket = create(config.address).map_err(os)?;
    let set = |level, option, value| set_option(socket.as_fd(), level, option, value);
    if joins {
        share_port(socket.as_fd()).map_err(os)?;
    }
    configure(socket.as_fd(), config, place)?;
    receive_marks(socket.as_fd(), config.address).map_err(os)?;
    // Don't fragment, and ignore ICMP messages about the path MTU: any host can forge them, and the two ends have
    // negotiated the MTU.
    if let IpAddr::V4(address) = config.address {
        let own = libc::in_addr { s_addr: u32::from_ne_bytes(address.octets()) };
        set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_MULTICAST_IF, own).map_err(os)?;
        set(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE).map_err(os)?;
        set(libc::IPPROTO_IP, libc::IP_TOS, DEFAULT_TOS.into()).map_err(os)?;
        set(libc::IPPROTO_IP, libc::IP_TTL, DEFAULT_HOP_LIMIT.into()).map_err(os)?;
        set(libc::IPPROTO_IP, libc::IP_MULTICAST_TTL, DEFAULT_HOP_LIMIT.into()).map_err(os)?;
        set(libc::IPPROTO_IP, libc::IP_MULTICAST_LOOP, 0).map_err(os)?;
    } else {
        set(libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE).map_err(os)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_DONTFRAG, 1).map_err(os)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, DEFAULT_TOS.into()).map_err(os)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS, DEFAULT_HOP_LIMIT.into()).map_err(os)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_HOPS, DEFAULT_HOP_LIMIT.into()).map_err(os)?;
        set(libc::IPPROTO_IPV6, libc::IPV6_MULTICAST_LOOP, 0).map_err(os)?;
    }
    free_bind(socket.as_fd(), config.address).map_err(os)?;
    bind(socket.as_fd(), address(config.address, PORT, place.scope)).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EADDRINUSE) => Holder::in_the_way(config.address, &place.interface),
            _ => os_error("binding UDP port 4791", place, source),
        }
    })?;
    Ok(socket)
}

/// Sets the options that depend on the process that owns the socket.
pub(super) fn configure(
    socket: BorrowedFd<'_>,
    config: &UdpConfig,
    place: &LocalAddress,
) -> Result<(), Error> {
    let os = |source| os_error("setting up the UDP socket", place, source);
    enlarge(socket, libc::SO_RCVBUFFORCE, libc::SO_RCVBUF).map_err(os)?;
    enlarge(socket, libc::SO_SNDBUFFORCE, libc::SO_SNDBUF).map_err(os)?;
    let poll_for = |time: i32| {
        set_option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL, time)?;
        set_option(socket, libc::SOL_SOCKET, libc::SO_PREFER_BUSY_POLL, i32::from(time > 0))
    };
    let Some(time) = config.busy_poll else {
        // The previous process may have polled. A kernel without busy polling does not have this option.
        let _ = poll_for(0);
        return Ok(());
    };
    poll_for(i32::try_from(time.as_micros()).unwrap_or(i32::MAX)).map_err(|source| {
        match source.raw_os_error() {
            Some(libc::EPERM) => Error::Permission {
                what: "busy polling",
                interface: place.interface.name.clone(),
                capability: "CAP_NET_ADMIN",
                cure: "run as root, or do without busy polling".to_owned(),
            },
            _ => os(source),
        }
    })
}

/// An IPv6 address that has just been added exists on the interface, but can't be bound yet.
fn free_bind(socket: BorrowedFd<'_>, own: IpAddr) -> io::Result<()> {
    let (level, option) = match own {
        IpAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_FREEBIND),
        IpAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_FREEBIND),
    };
    set_option(socket, level, option, 1)
}

fn share_port(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)
}

/// Whether the kernel may deliver aggregated segments (UDP GRO).
pub(super) fn set_aggregation(socket: BorrowedFd<'_>, aggregation: bool) -> io::Result<()> {
    set_option(socket, libc::SOL_UDP, libc::UDP_GRO, i32::from(aggregation))
}

/// Whether it may deliver them.
pub(super) fn aggregates(socket: BorrowedFd<'_>) -> bool {
    option::<i32>(socket, libc::SOL_UDP, libc::UDP_GRO).is_ok_and(|value| value != 0)
}

/// The duration of busy polling in microseconds.
#[cfg(test)]
pub(super) fn busy_polls(socket: BorrowedFd<'_>) -> i32 {
    option(socket, libc::SOL_SOCKET, libc::SO_BUSY_POLL).unwrap_or(0)
}

/// Sets whether the socket receives packets.
pub(super) fn hear(socket: BorrowedFd<'_>, hears: bool) -> io::Result<()> {
    if !hears {
        return hear_nothing(socket);
    }
    match set_option(socket, libc::SOL_SOCKET, libc::SO_DETACH_FILTER, 0) {
        // It had no filter, so it received packets before.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        detached => detached,
    }
}

fn hear_nothing(socket: BorrowedFd<'_>) -> io::Result<()> {
    let mut nothing = [libc::sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: 0 }];
    let program = libc::sock_fprog { len: nothing.len() as u16, filter: nothing.as_mut_ptr() };
    set_option(socket, libc::SOL_SOCKET, libc::SO_ATTACH_FILTER, program)
}

/// Discards pending packets, at most as many as fit into a socket.
pub(super) fn discard(socket: BorrowedFd<'_>) {
    const MOST: usize = 1 << 16;
    for _ in 0..MOST {
        // Longer datagrams are truncated.
        let received = rustix::net::recv(socket, &mut [0u8; 1], rustix::net::RecvFlags::DONTWAIT);
        // Any other error is an ICMP report, which is returned before pending packets.
        if received == Err(rustix::io::Errno::AGAIN) {
            break;
        }
    }
}

/// A socket on port 4791 of an address, for the packets of one interface, that receives nothing: it reserves the port.
/// It can coexist with other such sockets of the same user, but not with a socket that receives.
#[cfg(feature = "af_xdp")]
pub(crate) fn reserve(own: IpAddr, interface: &Interface) -> io::Result<OwnedFd> {
    let socket = create(own)?;
    let mut name = [0u8; libc::IFNAMSIZ];
    let longest = name.len() - 1;
    name.iter_mut().zip(interface.name.bytes().take(longest)).for_each(|(to, byte)| *to = byte);
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_BINDTODEVICE, name)?;
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEPORT, 1)?;
    // Packets that bypass the port (a fragment, a packet with IPv4 options) do not accumulate in it.
    hear_nothing(socket.as_fd())?;
    free_bind(socket.as_fd(), own)?;
    bind(socket.as_fd(), address(own, PORT, interface.index))?;
    Ok(socket)
}

/// A socket that is a member of a multicast group and receives its packets.
pub(super) fn of_group(group: IpAddr, interface: u32) -> io::Result<OwnedFd> {
    let socket = create(group)?;
    // Several contexts of a host may be members.
    set_option(socket.as_fd(), libc::SOL_SOCKET, libc::SO_REUSEADDR, 1)?;
    enlarge(socket.as_fd(), libc::SO_RCVBUFFORCE, libc::SO_RCVBUF)?;
    receive_marks(socket.as_fd(), group)?;
    bind(socket.as_fd(), address(group, PORT, interface))?;
    match group {
        IpAddr::V4(group) => {
            let request = libc::ip_mreqn {
                imr_multiaddr: libc::in_addr { s_addr: u32::from_ne_bytes(group.octets()) },
                imr_address: libc::in_addr { s_addr: 0 },
                imr_ifindex: interface as i32,
            };
            set_option(socket.as_fd(), libc::IPPROTO_IP, libc::IP_ADD_MEMBERSHIP, request)?;
        }
        IpAddr::V6(group) => {
            let request = libc::ipv6_mreq {
                ipv6mr_multiaddr: libc::in6_addr { s6_addr: group.octets() },
                ipv6mr_interface: interface,
            };
            set_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_ADD_MEMBERSHIP, request)?;
        }
    }
    Ok(socket)
}

/// Accepts UDP checksums of zero over IPv6 (linux/udp.h; not in the libc crate).
const UDP_NO_CHECK6_RX: i32 = 102;

/// Whether the kernel can divide a send into segments.
pub(super) fn can_segment(socket: BorrowedFd<'_>) -> bool {
    set_option(socket, libc::SOL_UDP, libc::UDP_SEGMENT, 0i32).is_ok()
}

/// The most bytes that can be pending in the socket, including the kernel's overhead.
pub(super) fn receive_buffer(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let value: i32 = option(socket, libc::SOL_SOCKET, libc::SO_RCVBUF)?;
    Ok(usize::try_from(value).unwrap_or(0))
}

/// Datagrams dropped because the socket had no room.
pub(super) fn dropped(socket: BorrowedFd<'_>) -> io::Result<u64> {
    /// `struct sock_meminfo`: SK_MEMINFO_DROPS is the last of nine.
    const DROPS: usize = 8;
    let info: [u32; DROPS + 1] = option(socket, libc::SOL_SOCKET, SO_MEMINFO)?;
    Ok(info[DROPS].into())
}

/// A socket of the same address, for querying the kernel's routes.
pub(super) fn probe(own: IpAddr, scope: u32) -> io::Result<UdpSocket> {
    UdpSocket::bind(address(own, 0, scope))
}

/// The largest IP packet on the path to the peer that the probe is connected to.
pub(super) fn path_mtu(probe: &UdpSocket) -> Option<u32> {
    let (level, which) = match probe.local_addr().ok()? {
        SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
        SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
    };
    option::<i32>(probe.as_fd(), level, which).ok().and_then(|mtu| u32::try_from(mtu).ok())
}

/// A socket address. `scope` is used only for addresses that need it.
pub(super) fn address(address: IpAddr, port: u16, scope: u32) -> SocketAddr {
    match address {
        IpAddr::V6(ip) if ip.is_unicast_link_local() || ip.is_multicast() => {
            SocketAddrV6::new(ip, port, 0, scope).into()
        }
        _ => (address, port).into(),
    }
}

const SO_MEMINFO: i32 = 55;

fn create(address: IpAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    // SAFETY: no pointers; the result is checked below.
    let fd = unsafe { libc::socket(family, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` is a new descriptor without another owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    if !address.is_ipv4() {
        set_option(socket.as_fd(), libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1)?;
        // The ICRC covers the packet, so peers may leave out the checksum (rdma_rxe does).
        set_option(socket.as_fd(), libc::SOL_UDP, UDP_NO_CHECK6_RX, 1)?;
    }
    Ok(socket)
}

/// Enables TOS and TTL as ancillary data of received datagrams.
fn receive_marks(socket: BorrowedFd<'_>, address: IpAddr) -> io::Result<()> {
    let (level, options) = if address.is_ipv4() {
        (libc::IPPROTO_IP, [libc::IP_RECVTOS, libc::IP_RECVTTL])
    } else {
        (libc::IPPROTO_IPV6, [libc::IPV6_RECVTCLASS, libc::IPV6_RECVHOPLIMIT])
    };
    options.into_iter().try_for_each(|option| set_option(socket, level, option, 1))
}

/// The kernel doubles the requested size. A buffer that is large enough is not changed: a process with more privileges
/// has set it.
fn enlarge(socket: BorrowedFd<'_>, force: i32, ask: i32) -> io::Result<()> {
    if option::<i32>(socket, libc::SOL_SOCKET, ask)? >= 2 * BUFFER {
        return Ok(());
    }
    set_option(socket, libc::SOL_SOCKET, force, BUFFER)
        .or_else(|_| set_option(socket, libc::SOL_SOCKET, ask, BUFFER))
}

fn bind(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let result = match address {
        SocketAddr::V4(address) => {
            let name = libc::sockaddr_in {
                sin_family: libc::AF_INET as libc::sa_family_t,
                sin_port: address.port().to_be(),
                sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(address.ip().octets()) },
                sin_zero: [0; 8],
            };
            let len = size_of_val(&name) as libc::socklen_t;
            // SAFETY: pointer and length describe `name`, which outlives the call.
            unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len) }
        }
        SocketAddr::V6(address) => {
            let name = libc::sockaddr_in6 {
                sin6_family: libc::AF_INET6 as libc::sa_family_t,
                sin6_port: address.port().to_be(),
                sin6_flowinfo: 0,
                sin6_addr: libc::in6_addr { s6_addr: address.ip().octets() },
                sin6_scope_id: address.scope_id(),
            };
            let len = size_of_val(&name) as libc::socklen_t;
            // SAFETY: pointer and length describe `name`, which outlives the call.
            unsafe { libc::bind(socket.as_raw_fd(), (&raw const name).cast(), len) }
        }
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// `T` is an `int` or one of the structures that the kernel reads.
pub(crate) fn set_option<T: Copy>(
    socket: BorrowedFd<'_>,
    level: i32,
    option: i32,
    value: T,
) -> io::Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`, which outlives the call, as does the memory it points to.
    match unsafe { libc::setsockopt(socket.as_raw_fd(), level, option, (&raw const value).cast(), len) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Types for which any bytes are valid.
trait Plain: Copy + Default {}
impl Plain for i32 {}
impl Plain for [u32; 9] {}

fn option<T: Plain>(socket: BorrowedFd<'_>, level: i32, option: i32) -> io::Result<T> {
    let mut value = T::default();
    let mut len = size_of::<T>() as libc::socklen_t;
    // SAFETY: pointer and length describe `value`, for which any bytes are valid and which outlives the call.
    match unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, (&raw mut value).cast(), &raw mut len)
    } {
        0 => Ok(value),
        _ => Err(io::Error::last_os_error()),
    }
}
