use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};

/// Multicast groups of an interface. A kernel socket is their member, which opens the filter of the
/// network card and tells the routers (IGMP, MLD); the frames themselves come through the rings.
#[derive(Debug)]
pub(super) struct Membership {
    interface: u32,
    /// The interface's first IPv4 address, by which the kernel names it.
    address: Option<Ipv4Addr>,
    v4: Option<UdpSocket>,
    v6: Option<UdpSocket>,
}

impl Membership {
    pub(super) fn new(interface: u32, addresses: &[IpAddr]) -> Membership {
        let address = addresses.iter().find_map(|address| match address {
            IpAddr::V4(address) => Some(*address),
            IpAddr::V6(_) => None,
        });
        Membership { interface, address, v4: None, v6: None }
    }

    pub(super) fn join(&mut self, group: IpAddr) -> io::Result<()> {
        match group {
            IpAddr::V4(group) => {
                let address = self.address()?;
                open(&mut self.v4, IpAddr::V4(Ipv4Addr::UNSPECIFIED))?.join_multicast_v4(&group, &address)
            }
            IpAddr::V6(group) => open(&mut self.v6, IpAddr::V6(Ipv6Addr::UNSPECIFIED))?
                .join_multicast_v6(&group, self.interface),
        }
    }

    pub(super) fn leave(&mut self, group: IpAddr) -> io::Result<()> {
        match (group, &self.v4, &self.v6) {
            (IpAddr::V4(group), Some(socket), _) => socket.leave_multicast_v4(&group, &self.address()?),
            (IpAddr::V6(group), _, Some(socket)) => socket.leave_multicast_v6(&group, self.interface),
            _ => Ok(()),
        }
    }

    fn address(&self) -> io::Result<Ipv4Addr> {
        let none = || io::Error::other("the interface has no IPv4 address");
        self.address.ok_or_else(none)
    }
}

fn open(socket: &mut Option<UdpSocket>, any: IpAddr) -> io::Result<&UdpSocket> {
    let opened = match socket.take() {
        Some(open) => open,
        None => UdpSocket::bind((any, 0))?,
    };
    Ok(socket.insert(opened))
}
