use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::MacAddr;

/// A global identifier: an IPv6 address, or an IPv4 one as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The IPv4-mapped GID.
    pub const fn from_ipv4(address: Ipv4Addr) -> Gid {
        Gid(address.to_ipv6_mapped().octets())
    }

    /// The GID that an interface with this hardware address has without configuration: fe80::/64 and the modified
    /// EUI-64.
    pub const fn link_local(mac: MacAddr) -> Gid {
        let [a, b, c, d, e, f] = mac.0;
        Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, a ^ 2, b, c, 0xff, 0xfe, d, e, f])
    }

    /// The IPv4 address, if this GID maps one.
    pub fn to_ipv4(self) -> Option<Ipv4Addr> {
        Ipv6Addr::from(self.0).to_ipv4_mapped()
    }

    /// The IP address in packets for this GID.
    pub fn to_ip(self) -> IpAddr {
        match self.to_ipv4() {
            Some(v4) => IpAddr::V4(v4),
            None => IpAddr::V6(self.0.into()),
        }
    }

    /// Whether packets for this GID are sent over IPv6.
    pub fn is_ipv6(self) -> bool {
        self.to_ipv4().is_none()
    }

    /// Whether this is a multicast group.
    pub fn is_multicast(self) -> bool {
        self.to_ip().is_multicast()
    }

    /// The hardware address of a multicast group (RFC 1112 §6.4, RFC 2464 §7).
    pub fn multicast_mac(self) -> Option<MacAddr> {
        let [.., a, b, c, d] = self.0;
        self.is_multicast().then_some(match self.is_ipv6() {
            true => MacAddr([0x33, 0x33, a, b, c, d]),
            false => MacAddr([0x01, 0x00, 0x5e, b & 0x7f, c, d]),
        })
    }

    /// Whether this is a link-local IPv6 address.
    pub fn is_link_local(self) -> bool {
        self.0[0] == 0xfe && self.0[1] & 0xc0 == 0x80
    }
}

impl From<IpAddr> for Gid {
    fn from(address: IpAddr) -> Gid {
        match address {
            IpAddr::V4(v4) => Gid::from_ipv4(v4),
            IpAddr::V6(v6) => Gid(v6.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_link_local_and_plain() {
        let v4 = Gid::from_ipv4([10, 77, 0, 11].into());
        assert_eq!(v4.to_string(), "::ffff:10.77.0.11");
        assert_eq!(v4.to_ip(), IpAddr::from([10, 77, 0, 11]));
        assert!(!v4.is_ipv6());
        let local = Gid::link_local(MacAddr([2, 0, 0, 0, 0, 1]));
        assert_eq!(local.to_string(), "fe80::ff:fe00:1");
        assert!(local.is_ipv6() && local.is_link_local());
        let v6: IpAddr = "fd77::1".parse().unwrap();
        assert_eq!(Gid::from(v6).to_ip(), v6);
    }

    #[test]
    fn multicast_groups() {
        let v4 = Gid::from_ipv4([239, 129, 2, 3].into());
        assert_eq!(v4.multicast_mac(), Some(MacAddr([0x01, 0x00, 0x5e, 0x01, 2, 3])));
        let v6: IpAddr = "ff0e::1:2:3".parse().unwrap();
        assert_eq!(Gid::from(v6).multicast_mac(), Some(MacAddr([0x33, 0x33, 0, 2, 0, 3])));
        assert_eq!(Gid::from_ipv4([10, 0, 0, 1].into()).multicast_mac(), None);
    }
}
