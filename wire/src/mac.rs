use std::fmt;

/// An Ethernet hardware address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// Whether it can be the address of a station: neither a group address (IEEE 802's I/G bit) nor all zeros.
    pub const fn is_station(self) -> bool {
        self.0[0] & 1 == 0 && !matches!(self.0, [0, 0, 0, 0, 0, 0])
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

/// An 802.1Q tag. The ICRC does not cover it, so a switch may rewrite it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct VlanTag {
    /// VLAN id, 12 bits.
    pub id: u16,
    /// Priority code point, 3 bits.
    pub priority: u8,
}
