//! Checks without a packet: interface, GID, route.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use ferroce::driver::netlink::{Interface, Neighbour, Netlink};
use ferroce::driver::{Capabilities, Error};
use ferroce::{DeviceSpec, Gid, PathMtu, SharedMemory};

use super::report::Check;
use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// The interface of the kernel's route to a peer.
pub(super) fn device_towards(peer: IpAddr) -> Result<DeviceSpec, Failure> {
    let none = || Failure::usage(format!("the kernel has no route to {peer}; name the interface: -d eth0"));
    let any: IpAddr = if peer.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    // Connecting a UDP socket sends nothing; it only looks up the route.
    let socket = UdpSocket::bind((any, 0)).map_err(|_| none())?;
    socket.connect((peer, ferroce::wire::ROCE_V2_PORT)).map_err(|_| none())?;
    let own = socket.local_addr().map_err(|_| none())?.ip();
    let interfaces = Netlink::open()?.interfaces()?;
    let owner = interfaces.into_iter().find(|i| i.addresses.iter().any(|(address, _)| *address == own));
    match owner {
        Some(interface) if interface.loopback => Err(Failure::usage(format!(
            "{peer} is this host; to check within it, give each end a socket: `ferroce doctor -d \
             udp:127.0.0.1` and `ferroce doctor -d udp:127.0.0.2 127.0.0.1`"
        ))),
        Some(interface) => {
            Ok(DeviceSpec::Interface { interface: interface.name, shared_memory: SharedMemory::Off })
        }
        None => Err(none()),
    }
}

/// The source GID: that of the index, or the first one of the peer's IP version.
pub(super) fn gid(
    capabilities: &Capabilities,
    wanted: Option<usize>,
    peer: IpAddr,
) -> (Option<IpAddr>, Check) {
    const NAME: &str = "GID";
    let table = &capabilities.addresses;
    let kind = |address: IpAddr| (address.is_ipv6(), Gid::from(address).is_link_local());
    let suitable = table.iter().position(|address| kind(*address) == kind(peer));
    let rows: Vec<_> = table.iter().enumerate().map(|(i, a)| format!("{i} {}", Gid::from(*a))).collect();
    let listed = format!("the table of '{}' has {}", capabilities.interface, rows.join(", "));
    let version = if peer.is_ipv4() { "IPv4" } else { "IPv6" };
    let take = match suitable {
        Some(index) => format!("`-x {index}`"),
        // A socket is bound to one address.
        None if capabilities.driver == "udp" => {
            format!(
                "`-d udp:ADDRESS` with an {version} address of this host; `ip addr add ADDRESS/PREFIX dev {}` gives it one",
                capabilities.interface
            )
        }
        None if Gid::from(peer).is_link_local() => {
            format!("`ip link set {} addrgenmode eui64`, for a link-local address", capabilities.interface)
        }
        None => {
            format!("`ip addr add ADDRESS/PREFIX dev {}`, with an {version} address", capabilities.interface)
        }
    };
    let index = wanted.or(suitable);
    let Some((index, address)) = index.and_then(|index| Some((index, *table.get(index)?))) else {
        let what = match wanted {
            Some(index) => format!("there is no index {index}: {listed}"),
            None => format!("none for an {version} peer: {listed}"),
        };
        return (None, Check::failed(NAME, what, take));
    };
    let row = format!("index {index}, {}, RoCE v2", Gid::from(address));
    let check = match (kind(address), kind(peer)) {
        (own, far) if own == far => Check::ok(NAME, format!("{row}; {listed}")),
        ((false, _), _) => {
            return (None, Check::failed(NAME, format!("{row}, is of IPv4, {peer} of IPv6"), take));
        }
        (_, (false, _)) => {
            return (None, Check::failed(NAME, format!("{row}, is of IPv6, {peer} of IPv4"), take));
        }
        ((_, true), _) => {
            Check::failed(NAME, format!("{row}, is link-local: routers do not forward it to {peer}"), take)
        }
        _ => Check::note(NAME, format!("{row}, is not link-local, {peer} is"), take),
    };
    (Some(address), check)
}

/// Interface and route of a device that the kernel knows.
pub(super) fn checks(capabilities: &Capabilities, source: IpAddr, peer: IpAddr) -> Vec<Check> {
    const NAMES: [&str; 2] = ["interface", "route"];
    let found = Netlink::open().and_then(|netlink| {
        let interface = netlink.interface(&capabilities.interface)?;
        Ok((netlink, interface))
    });
    let (netlink, interface) = match found {
        Ok(found) => found,
        Err(Error::NoInterface { name, .. }) => {
            return NAMES
                .map(|check| Check::not_checked(check, format!("'{name}' is not an interface of the kernel")))
                .into();
        }
        Err(error) => return NAMES.map(|check| Check::not_checked(check, error.to_string())).into(),
    };
    vec![
        interface_check(capabilities, &interface, peer.is_ipv6()),
        route_check(&netlink, &interface, (source, &capabilities.addresses), peer),
    ]
}

pub(super) fn interface_check(capabilities: &Capabilities, interface: &Interface, ipv6: bool) -> Check {
    const NAME: &str = "interface";
    let Interface { name, mtu, .. } = interface;
    let path_mtu = PathMtu::largest_for(*mtu, ipv6);
    let largest = path_mtu.map_or("none".to_owned(), |path_mtu| path_mtu.bytes().to_string());
    let row = format!("'{name}', {}, MTU {mtu}: path MTU {largest}", capabilities.driver);
    if !interface.up {
        return Check::failed(NAME, format!("{row}; it is down"), format!("`ip link set {name} up`"));
    }
    if !interface.carrier {
        return Check::failed(
            NAME,
            format!("{row}; no carrier"),
            "plug in the cable, or set up its other end",
        );
    }
    if path_mtu < Some(PathMtu::Mtu1024) {
        return Check::note(NAME, row, format!("`ip link set {name} mtu 1500`, for path MTU 1024"));
    }
    Check::ok(NAME, row)
}

fn route_check(
    netlink: &Netlink,
    interface: &Interface,
    (source, addresses): (IpAddr, &[IpAddr]),
    peer: IpAddr,
) -> Check {
    const NAME: &str = "route";
    let name = &interface.name;
    if interface.addresses.iter().any(|(address, _)| *address == peer) && !interface.loopback {
        return Check::note(NAME, format!("{peer} is this host"), "check from another host");
    }
    let route = match netlink.route(interface, peer) {
        Ok(route) => route,
        Err(error) => {
            return Check::failed(
                NAME,
                error.to_string(),
                format!(
                    "`ip route add {peer} via GATEWAY dev {name}`, or -d with the interface of `ip route get {peer}`"
                ),
            );
        }
    };
    let way = match route.gateway {
        Some(gateway) => format!("by {gateway}"),
        None => "on the link".to_owned(),
    };
    if let Some(other) = route.source.filter(|other| *other != source) {
        // A socket is bound to one address.
        let way_of_other = match addresses.contains(&other) {
            true => format!("-x with the index of {other}"),
            false => format!("-d udp:{other}"),
        };
        return Check::note(
            NAME,
            format!("{way}; the kernel's own packets leave from {other}, these from {source}"),
            format!("{way_of_other}, unless {peer} has a route back to {source}"),
        );
    }
    Check::ok(NAME, way)
}

const NEXT_HOP: &str = "next hop";

/// Whether the next hop answers.
pub(super) fn neighbour_check(resolved: Result<[u8; 6], Error>, peer: IpAddr) -> Check {
    match resolved {
        Ok(mac) => Check::ok(NEXT_HOP, ferroce::MacAddr(mac).to_string()),
        Err(ref error @ Error::NoNeighbour { peer: next_hop, .. }) => Check::failed(
            NEXT_HOP,
            error.to_string(),
            format!(
                "see that {next_hop} is up, in the same VLAN and subnet: `ip neigh show {next_hop}`, `arping {next_hop}`"
            ),
        ),
        Err(error) => Check::failed(NEXT_HOP, error.to_string(), format!("see `ip route get {peer}`")),
    }
}

/// The time for the kernel to resolve a next hop: three attempts, a second apart.
const KERNEL_LOOKS: Duration = Duration::from_millis(3500);

/// The kernel's neighbour entry of the next hop, once resolution has finished; a packet must have been sent there.
pub(super) fn next_hop(interface: &str, peer: IpAddr, interrupt: &Interrupt) -> Result<Check, Failure> {
    let until = Instant::now() + KERNEL_LOOKS;
    let known = Netlink::open().and_then(|netlink| {
        let interface = netlink.interface(interface)?;
        if interface.owns(peer) {
            return Ok(None);
        }
        let next_hop = netlink.route(&interface, peer)?.gateway.unwrap_or(peer);
        loop {
            match netlink.neighbour(&interface, next_hop)? {
                Neighbour::Incomplete if Instant::now() < until && !interrupt.is_set() => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                neighbour => return Ok(Some((next_hop, neighbour))),
            }
        }
    });
    interrupt.check()?;
    Ok(match known {
        Ok(None) => Check::not_checked(NEXT_HOP, format!("{peer} is this host")),
        Ok(Some((_, Neighbour::Fresh(mac) | Neighbour::Stale(mac)))) => neighbour_check(Ok(mac), peer),
        Ok(Some((next_hop, Neighbour::Failed))) => {
            let protocol = if next_hop.is_ipv4() { "ARP" } else { "ND" };
            let failed = Error::NoNeighbour { peer: next_hop, protocol, interface: interface.to_owned() };
            neighbour_check(Err(failed), peer)
        }
        Ok(Some(_)) => Check::not_checked(NEXT_HOP, "the kernel has not resolved it"),
        // The route has its own check.
        Err(error) => Check::not_checked(NEXT_HOP, error.to_string()),
    })
}

/// The remedy if this host's own packet filter drops packets.
pub(super) const OWN_FILTER: &str = "the packet filter of this host: exclude UDP port 4791 from the rule that drops it \
    (`iptables -S OUTPUT`, or a chain of output in `nft list ruleset`)";
/// The remedy for a rule that drops; a rule in another table that accepts does not override it.
pub(super) const LET_THROUGH: &str = "`nft list ruleset` and `iptables -S` show the rule that drops; exclude UDP port \
    4791 from it, or insert `udp dport 4791 accept` above it in the same chain";

/// A socket for plain UDP packets to port 4791 of a peer.
fn plain_socket(source: IpAddr, peer: IpAddr) -> Option<UdpSocket> {
    let socket = UdpSocket::bind((source, 0)).ok()?;
    socket.connect(SocketAddr::new(peer, ferroce::wire::ROCE_V2_PORT)).ok()?;
    Some(socket)
}

/// The reason that the local packet filter drops UDP packets to port 4791, if it does.
pub(super) fn refused_here(source: IpAddr, peer: IpAddr) -> Option<String> {
    let error = plain_socket(source, peer)?.send(&[0]).err()?;
    // Other errors concern the route, which has its own check.
    let is_filter = error.kind() == std::io::ErrorKind::PermissionDenied;
    is_filter.then(|| format!("this host refuses to send them: {error}"))
}

/// The answer to a plain UDP packet to port 4791, if any.
pub(super) fn ask_kernel(source: IpAddr, peer: IpAddr) -> Option<String> {
    let socket = plain_socket(source, peer)?;
    socket.set_read_timeout(Some(Duration::from_millis(500))).ok()?;
    socket.send(&[0]).ok()?;
    let error = socket.recv(&mut [0; 64]).err()?;
    match error.kind() {
        // From the peer, or from a firewall in front of it. Some drivers take packets before the kernel sees them, so
        // there is no socket.
        std::io::ErrorKind::ConnectionRefused => Some(format!(
            "a plain packet there is answered with ICMP port unreachable: no socket at {peer} has UDP port 4791 \
             (AF_XDP, DPDK and cards need none), or a firewall rejects it"
        )),
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => None,
        _ => Some(format!("a plain packet there is answered: {error}")),
    }
}
