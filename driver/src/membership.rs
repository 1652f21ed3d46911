//! Membership of multicast groups.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Multicast groups of an interface. Kernel sockets are their members, which opens the filter of the network card and
/// notifies the routers (IGMP, MLD); the frames themselves arrive through the rings.
#[derive(Debug)]
pub struct Membership {
    interface: u32,
    /// The interface's first IPv4 address, by which the kernel identifies it.
    address: Option<Ipv4Addr>,
    v4: io::Result<UdpSocket>,
    v6: io::Result<UdpSocket>,
}

impl Membership {
    /// A member of no group yet. The sockets are in the caller's network namespace.
    pub fn new(interface: u32, addresses: &[IpAddr]) -> Membership {
        let address = addresses.iter().find_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        });
        let v4 = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0));
        let v6 = UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0));
        Membership { interface, address, v4, v6 }
    }

    /// Joins a group.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn join(&self, group: IpAddr) -> io::Result<()> {
        match group {
            IpAddr::V4(group) => opened(&self.v4)?.join_multicast_v4(&group, &self.address()?),
            IpAddr::V6(group) => opened(&self.v6)?.join_multicast_v6(&group, self.interface),
        }
    }

    /// Leaves a group.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn leave(&self, group: IpAddr) -> io::Result<()> {
        match group {
            IpAddr::V4(group) => opened(&self.v4)?.leave_multicast_v4(&group, &self.address()?),
            IpAddr::V6(group) => opened(&self.v6)?.leave_multicast_v6(&group, self.interface),
        }
    }

    fn address(&self) -> io::Result<Ipv4Addr> {
        self.address.ok_or_else(|| io::Error::other("the interface has no IPv4 address"))
    }
}

/// A namespace may lack one of the protocols; that only affects its groups.
fn opened(socket: &io::Result<UdpSocket>) -> io::Result<&UdpSocket> {
    socket.as_ref().map_err(|error| io::Error::new(error.kind(), error.to_string()))
}
