//! Interfaces, routes and neighbours from the kernel's tables (rtnetlink).
//!
//! ARP and neighbour discovery are left to the kernel: it answers requests and resolves addresses
//! ([`Netlink::resolve`]), and its table is read for the results. No call waits for the network: the kernel answers
//! from its tables.

mod codec;
mod dcb;
mod ethtool;
mod pause;
mod socket;
pub(crate) mod sockets;

use std::cell::RefCell;
use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use codec::{Request, address, attributes, family, octets, string, u16_at, u32_at};
use socket::NetlinkSocket;

pub use dcb::{Dcb, Ets, Pfc, Selection};
pub use pause::Pause;

use crate::{Error, NextHop};

/// A connection to the routing tables of one network namespace: that of the thread which opened it, even if another
/// thread uses it later.
#[derive(Debug)]
pub struct Netlink {
    socket: NetlinkSocket,
    /// Peers whose next hops the kernel is resolving.
    sought: RefCell<Vec<Sought>>,
}

/// A next hop that the kernel is resolving.
#[derive(Debug)]
struct Sought {
    peer: IpAddr,
    next_hop: IpAddr,
    interface: Interface,
    /// The time at which the resolution counts as failed.
    until: Instant,
}

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// Its index in the namespace.
    pub index: u32,
    /// Its hardware address; zeros if it has none.
    pub mac: [u8; 6],
    /// Largest IP packet, in bytes.
    pub mtu: u32,
    /// Whether the administrator has set it up (`ip link set … up`).
    pub up: bool,
    /// Whether the link has a carrier.
    pub carrier: bool,
    /// Whether it is the loopback interface.
    pub loopback: bool,
    /// Its kind (`veth`, `bridge`, `bond`); `None` for a plain device.
    pub kind: Option<String>,
    /// Its VLAN, if it is a VLAN interface.
    pub vlan: Option<u16>,
    /// The index of its lower interface: a VLAN's port, the peer of a veth.
    pub link: Option<u32>,
    /// Its addresses with their prefix lengths, in the kernel's order.
    pub addresses: Vec<(IpAddr, u8)>,
    /// Receive queues in use.
    pub rx_queues: u32,
    /// Transmit queues in use.
    pub tx_queues: u32,
    /// Bits per second, as reported by its driver; `None` if unknown.
    pub speed: Option<u64>,
    /// The XDP program on it.
    pub xdp: Option<AttachedXdp>,
}

/// An XDP program on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AttachedXdp {
    /// The program's id, as `bpftool prog` lists it.
    pub program: u32,
    /// Its mode.
    pub mode: XdpMode,
}

/// The mode of an XDP program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In the device's driver, before an skb is allocated.
    Native,
    /// In the network stack, on an skb; every interface supports it.
    Generic,
    /// On the NIC itself, or several programs at once.
    Other,
}

/// The route to a peer through one interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Route {
    /// The gateway; `None` if the peer is on the link.
    pub gateway: Option<IpAddr>,
    /// The source address that the kernel would choose.
    pub source: Option<IpAddr>,
    /// Largest IP packet on this path, if the route (or path MTU discovery) sets one.
    pub mtu: Option<u32>,
}

/// An entry of the neighbour (ARP, ND) table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Neighbour {
    /// The hardware address, recently confirmed or permanent.
    Fresh([u8; 6]),
    /// The last known hardware address, not recently confirmed. It may be used, but the kernel should be notified of
    /// the use, so that it checks the address.
    Stale([u8; 6]),
    /// Resolution is in progress.
    Incomplete,
    /// Resolution failed: there was no answer.
    Failed,
    /// The table has no entry.
    Absent,
}

/// The time after which resolution counts as failed if the kernel does not report it: it sends three requests, one per
/// second.
const RESOLVE_TIMEOUT: Duration = Duration::from_millis(3500);
/// After this time without another call, a resolution is abandoned.
const ABANDONED: Duration = Duration::from_secs(10);

impl Netlink {
    /// Opens a connection to the tables of the calling thread's network namespace. Needs no
    /// privilege.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn open() -> Result<Netlink, Error> {
        Ok(Netlink { socket: NetlinkSocket::open(libc::NETLINK_ROUTE)?, sought: RefCell::default() })
    }

    /// All interfaces of the namespace, in the order of their indices.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn interfaces(&self) -> Result<Vec<Interface>, Error> {
        let os = |source| os_error("listing interfaces", "(any)", source);
        let mut list = Vec::new();
        let links = Request::new(libc::RTM_GETLINK, DUMP, &[0; IFINFOMSG]);
        self.socket.exchange(links, |payload| list.extend(parse_link(payload))).map_err(os)?;
        let addresses = Request::new(libc::RTM_GETADDR, DUMP, &[0; IFADDRMSG]);
        self.socket
            .exchange(addresses, |payload| {
                if let Some((index, address, prefix)) = parse_address(payload)
                    && let Some(interface) = list.iter_mut().find(|i| i.index == index)
                {
                    interface.addresses.push((address, prefix));
                }
            })
            .map_err(os)?;
        for interface in &mut list {
            self.ask_driver(interface);
        }
        list.sort_by_key(|i| i.index);
        Ok(list)
    }

    /// The interface with this name.
    ///
    /// # Errors
    /// [`Error::NoInterface`], [`Error::Os`].
    pub fn interface(&self, name: &str) -> Result<Interface, Error> {
        let mut all = self.interfaces()?;
        match all.iter().position(|i| i.name == name) {
            Some(at) => Ok(all.swap_remove(at)),
            None => {
                let present: Vec<_> = all.into_iter().map(|i| i.name).collect();
                let is_rnic = crate::rnic::remedy::is_device(name);
                Err(Error::NoInterface { name: name.to_owned(), is_rnic, present: present.join(", ") })
            }
        }
    }

    /// The route to `peer` through `interface`.
    ///
    /// # Errors
    /// [`Error::NoRoute`] if no route to it leaves through this interface, [`Error::Os`].
    pub fn route(&self, interface: &Interface, peer: IpAddr) -> Result<Route, Error> {
        // If no route is configured through an interface, the kernel assumes that an IPv4 peer is on the link. Only a lookup of
        // the table entry itself shows this.
        self.lookup_route(interface, peer, RTM_F_FIB_MATCH)?;
        self.lookup_route(interface, peer, 0)
    }

    /// The entry of `address` in the neighbour table.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn neighbour(&self, interface: &Interface, address: IpAddr) -> Result<Neighbour, Error> {
        let request = Request::new(libc::RTM_GETNEIGH, ONE, &ndmsg(interface, address, 0))
            .attribute(NDA_DST, &octets(address));
        let mut found = Neighbour::Absent;
        match self.socket.exchange(request, |payload| found = parse_neighbour(payload)) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => Ok(Neighbour::Absent),
            Err(e) => Err(os_error("reading the neighbour table", &interface.name, e)),
            Ok(()) => Ok(found),
        }
    }

    /// The destination hardware address of frames for `peer`: the peer's on the same link, the interface's own for its
    /// own addresses, otherwise the gateway's. Asks the kernel to resolve an unknown address, and checks for the result
    /// in each further call.
    ///
    /// # Errors
    /// [`Error::NoRoute`]; [`Error::NoNeighbour`] if the kernel's resolution has failed, after about 3 seconds;
    /// [`Error::Permission`] if the entry is missing and the process may not request its resolution (CAP_NET_ADMIN).
    pub fn resolve(&self, interface: &Interface, peer: IpAddr) -> Result<NextHop, Error> {
        if let Some(looked) = self.look_again(interface.index, peer) {
            return looked;
        }
        if interface.addresses.iter().any(|(address, _)| *address == peer) {
            return Ok(NextHop::Found(interface.mac));
        }
        let next_hop = self.route(interface, peer)?.gateway.unwrap_or(peer);
        match self.neighbour(interface, next_hop)? {
            Neighbour::Fresh(mac) => return Ok(NextHop::Found(mac)),
            Neighbour::Stale(mac) => {
                self.touch(interface, next_hop)?;
                return Ok(NextHop::Found(mac));
            }
            Neighbour::Incomplete => {}
            Neighbour::Failed | Neighbour::Absent => self.touch(interface, next_hop)?,
        }
        let (interface, until) = (interface.clone(), Instant::now() + RESOLVE_TIMEOUT);
        self.sought.borrow_mut().push(Sought { peer, next_hop, interface, until });
        Ok(NextHop::Pending)
    }

    /// As [`resolve`](Netlink::resolve), through the interface of a VLAN on the one with this index.
    ///
    /// # Errors
    /// [`Error::NoVlan`]; as [`resolve`](Netlink::resolve).
    pub fn resolve_in_vlan(&self, port: u32, vlan: u16, peer: IpAddr) -> Result<NextHop, Error> {
        let is_it = |own: &Interface| own.vlan == Some(vlan) && own.link == Some(port);
        if let Some(looked) = self.look_again_on(is_it, peer) {
            return looked;
        }
        let all = self.interfaces()?;
        if let Some(interface) = all.iter().find(|own| is_it(own)) {
            return self.resolve(interface, peer);
        }
        let name = all.into_iter().find(|own| own.index == port).map(|own| own.name);
        Err(Error::NoVlan { interface: name.unwrap_or_else(|| format!("interface {port}")), vlan })
    }

    /// The result of [`resolve`](Netlink::resolve) for a peer that was pending; `None` for others. Reads only one entry
    /// of the neighbour table, and no routes or interfaces.
    pub(crate) fn look_again(&self, interface: u32, peer: IpAddr) -> Option<Result<NextHop, Error>> {
        self.look_again_on(|own| own.index == interface, peer)
    }

    fn look_again_on(
        &self,
        is_it: impl Fn(&Interface) -> bool,
        peer: IpAddr,
    ) -> Option<Result<NextHop, Error>> {
        let (mut sought, now) = (self.sought.borrow_mut(), Instant::now());
        sought.retain(|sought| now < sought.until + ABANDONED);
        let at = sought.iter().position(|s| s.peer == peer && is_it(&s.interface))?;
        let Sought { next_hop, interface, until, .. } = &sought[at];
        let looked = match self.neighbour(interface, *next_hop) {
            Ok(Neighbour::Fresh(mac) | Neighbour::Stale(mac)) => Ok(NextHop::Found(mac)),
            Ok(Neighbour::Incomplete | Neighbour::Absent) if now < *until => {
                return Some(Ok(NextHop::Pending));
            }
            Ok(_) => Err(Error::no_neighbour(*next_hop, &interface.name)),
            Err(error) => Err(error),
        };
        sought.swap_remove(at);
        Some(looked)
    }

    /// Replaces the XDP program `old` of an interface by `new`. It must be attached without a link. `None` is no
    /// program.
    ///
    /// # Errors
    /// The kernel's error: `EEXIST` if another program than `old` is attached, `EBUSY` if it is attached through a
    /// link.
    pub fn replace_xdp(
        &self,
        interface: &Interface,
        mode: XdpMode,
        old: Option<BorrowedFd<'_>>,
        new: Option<BorrowedFd<'_>>,
    ) -> io::Result<()> {
        let fd = |program: Option<BorrowedFd<'_>>| program.map_or(-1, |fd| fd.as_raw_fd()).to_ne_bytes();
        let mode = if mode == XdpMode::Native { XDP_FLAGS_DRV_MODE } else { XDP_FLAGS_SKB_MODE };
        let mut fixed = [0; IFINFOMSG];
        fixed[4..8].copy_from_slice(&interface.index.to_ne_bytes());
        let request = Request::new(libc::RTM_SETLINK, ONE, &fixed).nested(
            IFLA_XDP,
            &[
                (IFLA_XDP_FD, &fd(new)),
                (IFLA_XDP_EXPECTED_FD, &fd(old)),
                (IFLA_XDP_FLAGS, &(mode | XDP_FLAGS_REPLACE).to_ne_bytes()),
            ],
        );
        self.socket.exchange(request, |_| {})
    }

    /// Notifies the kernel that the neighbour is in use: a missing entry is resolved, a stale one checked.
    fn touch(&self, interface: &Interface, address: IpAddr) -> Result<(), Error> {
        let flags = ONE | libc::NLM_F_CREATE as u16;
        let request = Request::new(libc::RTM_NEWNEIGH, flags, &ndmsg(interface, address, NTF_USE))
            .attribute(NDA_DST, &octets(address));
        self.socket.exchange(request, |_| {}).map_err(|source| not_touched(interface, address, source))
    }

    fn lookup_route(&self, interface: &Interface, peer: IpAddr, flags: u32) -> Result<Route, Error> {
        let mut fixed = [0; RTMSG];
        fixed[0] = family(peer);
        fixed[1] = if peer.is_ipv4() { 32 } else { 128 };
        fixed[8..12].copy_from_slice(&flags.to_ne_bytes());
        let request = Request::new(libc::RTM_GETROUTE, ONE, &fixed)
            .attribute(libc::RTA_DST, &octets(peer))
            .attribute(libc::RTA_OIF, &interface.index.to_ne_bytes());
        let no_route = || Error::NoRoute { peer, interface: interface.name.clone() };
        let mut route = None;
        self.socket.exchange(request, |payload| route = parse_route(payload)).map_err(
            |source| match source.raw_os_error() {
                Some(libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EACCES | libc::EINVAL) => no_route(),
                _ => os_error("looking up a route", &interface.name, source),
            },
        )?;
        route.ok_or_else(no_route)
    }
}

impl Interface {
    /// The addresses in the order of a RoCE GID table: IPv6 link-local first, then IPv4, then
    /// other IPv6.
    pub fn gid_order(&self) -> Vec<IpAddr> {
        gid_order(&self.addresses)
    }

    /// Whether the interface has this address. The loopback interface has all of 127.0.0.0/8.
    pub fn owns(&self, address: IpAddr) -> bool {
        self.addresses.iter().any(|(own, prefix)| match (own, address) {
            (IpAddr::V4(own), IpAddr::V4(address)) if self.loopback => {
                let mask = u32::MAX.checked_shl(32 - u32::from(*prefix)).unwrap_or(0);
                (u32::from(*own) ^ u32::from(address)) & mask == 0
            }
            _ => *own == address,
        })
    }
}

/// Addresses in the order of a RoCE GID table, as in [`Interface::gid_order`].
pub(crate) fn gid_order(addresses: &[(IpAddr, u8)]) -> Vec<IpAddr> {
    let mut list: Vec<_> = addresses.iter().map(|(address, _)| *address).collect();
    list.sort_by_key(|address| match address {
        IpAddr::V6(v6) if v6.is_unicast_link_local() => 0,
        IpAddr::V4(_) => 1,
        IpAddr::V6(_) => 2,
    });
    list
}

const DUMP: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_DUMP) as u16;
const ONE: u16 = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;

// Sizes of the fixed headers (linux/rtnetlink.h, linux/if_addr.h, linux/neighbour.h).
const IFINFOMSG: usize = 16;
const IFADDRMSG: usize = 8;
const RTMSG: usize = 12;
const NDMSG: usize = 12;
/// The offset of the route type in `struct rtmsg`.
const RTM_TYPE: usize = 7;

// Attribute types and flags that are not in libc (linux/if_link.h, linux/neighbour.h, linux/rtnetlink.h).
/// The first attribute of a VLAN's data (linux/if_link.h).
const IFLA_VLAN_ID: u16 = 1;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_FD: u16 = 1;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_FLAGS: u16 = 3;
const IFLA_XDP_PROG_ID: u16 = 4;
const IFLA_XDP_EXPECTED_FD: u16 = 8;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const XDP_FLAGS_REPLACE: u32 = 1 << 4;
const NDA_DST: u16 = 1;
const NDA_LLADDR: u16 = 2;
const NTF_USE: u8 = 1;
const NUD_INCOMPLETE: u16 = 0x01;
const NUD_STALE: u16 = 0x04;
const NUD_FAILED: u16 = 0x20;
const RTAX_MTU: u16 = 2;
const RTM_F_FIB_MATCH: u32 = 0x2000;

/// `struct ndmsg`.
fn ndmsg(interface: &Interface, address: IpAddr, flags: u8) -> [u8; NDMSG] {
    let mut fixed = [0; NDMSG];
    fixed[0] = family(address);
    fixed[4..8].copy_from_slice(&interface.index.to_ne_bytes());
    fixed[10] = flags;
    fixed
}

fn parse_link(payload: &[u8]) -> Option<Interface> {
    let flags = u32_at(payload, 8)? as i32;
    let mut interface = Interface {
        name: String::new(),
        index: u32_at(payload, 4)?,
        mac: [0; 6],
        mtu: 0,
        up: flags & libc::IFF_UP != 0,
        carrier: flags & libc::IFF_RUNNING != 0,
        loopback: flags & libc::IFF_LOOPBACK != 0,
        kind: None,
        vlan: None,
        link: None,
        addresses: Vec::new(),
        rx_queues: 1,
        tx_queues: 1,
        speed: None,
        xdp: None,
    };
    for (kind, value) in attributes(payload.get(IFINFOMSG..)?) {
        match kind {
            libc::IFLA_IFNAME => interface.name = string(value),
            libc::IFLA_ADDRESS => interface.mac = value.try_into().unwrap_or_default(),
            libc::IFLA_LINK => interface.link = u32_at(value, 0),
            libc::IFLA_MTU => interface.mtu = u32_at(value, 0)?,
            libc::IFLA_NUM_RX_QUEUES => interface.rx_queues = u32_at(value, 0)?,
            libc::IFLA_NUM_TX_QUEUES => interface.tx_queues = u32_at(value, 0)?,
            libc::IFLA_LINKINFO => {
                let kind = attributes(value).find(|(kind, _)| *kind == libc::IFLA_INFO_KIND);
                interface.kind = kind.map(|(_, value)| string(value));
                if interface.kind.as_deref() == Some("vlan") {
                    interface.vlan = vlan_of(value);
                }
            }
            IFLA_XDP => interface.xdp = parse_xdp(value),
            _ => {}
        }
    }
    Some(interface)
}

/// The VLAN in the link information of a VLAN interface.
fn vlan_of(link: &[u8]) -> Option<u16> {
    let of = |list, wanted| attributes(list).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let id = of(of(link, libc::IFLA_INFO_DATA)?, IFLA_VLAN_ID)?;
    Some(u16::from_ne_bytes([*id.first()?, *id.get(1)?]))
}

fn parse_xdp(value: &[u8]) -> Option<AttachedXdp> {
    let of = |wanted| attributes(value).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
    let mode = match of(IFLA_XDP_ATTACHED)?.first()? {
        0 => return None,
        1 => XdpMode::Native,
        2 => XdpMode::Generic,
        _ => XdpMode::Other,
    };
    Some(AttachedXdp { program: of(IFLA_XDP_PROG_ID).and_then(|v| u32_at(v, 0)).unwrap_or(0), mode })
}

fn parse_address(payload: &[u8]) -> Option<(u32, IpAddr, u8)> {
    let prefix = *payload.get(1)?;
    let mut flags = u32::from(*payload.get(2)?);
    let (mut own, mut other) = (None, None);
    for (kind, value) in attributes(payload.get(IFADDRMSG..)?) {
        match kind {
            // On a point-to-point link IFA_ADDRESS is the peer's address.
            libc::IFA_LOCAL => own = address(value),
            libc::IFA_ADDRESS => other = address(value),
            libc::IFA_FLAGS => flags = u32_at(value, 0)?,
            _ => {}
        }
    }
    // A duplicate of another host's address.
    if flags & libc::IFA_F_DADFAILED != 0 {
        return None;
    }
    Some((u32_at(payload, 4)?, own.or(other)?, prefix))
}

/// Returns `None` for a broadcast address, which no peer has.
fn parse_route(payload: &[u8]) -> Option<Route> {
    if payload.get(RTM_TYPE) == Some(&libc::RTN_BROADCAST) {
        return None;
    }
    let mut route = Route { gateway: None, source: None, mtu: None };
    for (kind, value) in attributes(payload.get(RTMSG..).unwrap_or_default()) {
        match kind {
            libc::RTA_GATEWAY => route.gateway = address(value),
            // A gateway of the other address family: `struct rtvia`, with the family before the address.
            libc::RTA_VIA => route.gateway = value.get(2..).and_then(address),
            libc::RTA_PREFSRC => route.source = address(value),
            libc::RTA_METRICS => {
                let mtu = attributes(value).find(|(kind, _)| *kind == RTAX_MTU);
                route.mtu = mtu.and_then(|(_, value)| u32_at(value, 0)).filter(|mtu| *mtu != 0);
            }
            _ => {}
        }
    }
    Some(route)
}

fn parse_neighbour(payload: &[u8]) -> Neighbour {
    let state = u16_at(payload, 8).unwrap_or(0);
    let mac = attributes(payload.get(NDMSG..).unwrap_or_default())
        .find(|(kind, _)| *kind == NDA_LLADDR)
        .and_then(|(_, value)| <[u8; 6]>::try_from(value).ok());
    match (state, mac) {
        (NUD_FAILED, _) => Neighbour::Failed,
        (0 | NUD_INCOMPLETE, _) | (_, None) => Neighbour::Incomplete,
        (NUD_STALE, Some(mac)) => Neighbour::Stale(mac),
        (_, Some(mac)) => Neighbour::Fresh(mac),
    }
}

/// Why the kernel does not resolve a neighbour.
fn not_touched(interface: &Interface, address: IpAddr, source: io::Error) -> Error {
    const WHAT: &str = "asking the kernel to resolve a neighbour";
    match (source.raw_os_error(), address) {
        (Some(libc::EPERM), _) => Error::Permission {
            what: WHAT,
            interface: interface.name.clone(),
            capability: "CAP_NET_ADMIN",
            cure: format!("run as root, or let the kernel resolve {address} first (ping it)"),
        },
        // The table is full. All namespaces share it.
        (Some(libc::ENOBUFS), IpAddr::V4(_)) => os_error(
            "asking the kernel to resolve a neighbour (its table is full: raise net.ipv4.neigh.default.gc_thresh3)",
            &interface.name,
            source,
        ),
        (Some(libc::ENOBUFS), IpAddr::V6(_)) => os_error(
            "asking the kernel to resolve a neighbour (its table is full: raise net.ipv6.neigh.default.gc_thresh3)",
            &interface.name,
            source,
        ),
        _ => os_error(WHAT, &interface.name, source),
    }
}

fn os_error(what: &'static str, interface: &str, source: io::Error) -> Error {
    Error::Os { what, interface: interface.to_owned(), source }
}

#[cfg(test)]
mod tests;
