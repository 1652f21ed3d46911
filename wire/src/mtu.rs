use std::fmt;

/// The payload bytes of a full packet: one of five values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl PathMtu {
    /// All five, smallest first.
    pub const ALL: [PathMtu; 5] =
        [PathMtu::Mtu256, PathMtu::Mtu512, PathMtu::Mtu1024, PathMtu::Mtu2048, PathMtu::Mtu4096];

    /// Payload bytes of a full packet.
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    /// log2 of [`bytes`](PathMtu::bytes): divisions by the path MTU are shifts.
    pub const fn shift(self) -> u32 {
        7 + self as u32
    }

    /// The verbs code, 1 to 5.
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// The path MTU with this verbs code.
    pub fn from_code(code: u8) -> Option<PathMtu> {
        PathMtu::ALL.into_iter().find(|mtu| mtu.code() == code)
    }

    /// The largest IP packet with this path MTU: the payload and the longest headers, those of a WRITE Only with
    /// immediate or a UD SEND, 64 bytes over IPv4 and 84 over IPv6 (docs/protocol.md §1).
    pub const fn required_l3_mtu(self, ipv6: bool) -> u32 {
        self.bytes() + if ipv6 { 84 } else { 64 }
    }

    /// The largest path MTU that fits an interface's MTU, if any does.
    pub fn largest_for(l3_mtu: u32, ipv6: bool) -> Option<PathMtu> {
        PathMtu::ALL.into_iter().rev().find(|p| p.required_l3_mtu(ipv6) <= l3_mtu)
    }

    /// The number of packets of a message of `bytes`: at least one.
    pub const fn packets(self, bytes: u32) -> u32 {
        let before_last = (bytes - (bytes != 0) as u32) >> self.shift();
        before_last + 1
    }
}

/// An invalid path MTU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("path MTU {0}: must be 256, 512, 1024, 2048 or 4096 bytes")]
pub struct InvalidPathMtu(pub u32);

impl TryFrom<u32> for PathMtu {
    type Error = InvalidPathMtu;
    /// From a number of bytes, not from the code.
    fn try_from(bytes: u32) -> Result<PathMtu, InvalidPathMtu> {
        PathMtu::ALL.into_iter().find(|p| p.bytes() == bytes).ok_or(InvalidPathMtu(bytes))
    }
}

impl fmt::Display for PathMtu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fits_and_packets() {
        assert_eq!(PathMtu::largest_for(1500, false), Some(PathMtu::Mtu1024));
        assert_eq!(PathMtu::largest_for(4159, false), Some(PathMtu::Mtu2048));
        assert_eq!(PathMtu::largest_for(4160, false), Some(PathMtu::Mtu4096));
        assert_eq!(PathMtu::largest_for(4160, true), Some(PathMtu::Mtu2048));
        assert_eq!(PathMtu::largest_for(300, false), None);
        assert_eq!(PathMtu::Mtu1024.packets(0), 1);
        assert_eq!(PathMtu::Mtu1024.packets(1024), 1);
        assert_eq!(PathMtu::Mtu1024.packets(1025), 2);
        assert_eq!(PathMtu::Mtu256.packets(u32::MAX), 1 << 24);
        assert_eq!(PathMtu::try_from(1000), Err(InvalidPathMtu(1000)));
    }
}
