use std::fmt;

/// A queue pair number: 24 bits. 0 is never used, 1 is the general service interface, 0xFFFFFF
/// addresses multicast groups.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Qpn(u32);

impl Qpn {
    /// The general service interface, where the connection manager listens.
    pub const GSI: Qpn = Qpn(1);
    /// The destination of multicast UD packets.
    pub const MULTICAST: Qpn = Qpn(0x00ff_ffff);

    /// The QPN `value` modulo 2²⁴.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & 0x00ff_ffff)
    }

    /// The 24-bit value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// Whether an ordinary QP can have this number.
    pub const fn is_ordinary(self) -> bool {
        self.0 > 1 && self.0 != Self::MULTICAST.0
    }

    pub(crate) const fn from_bytes(bytes: [u8; 3]) -> Qpn {
        Qpn(u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]))
    }

    pub(crate) const fn to_bytes(self) -> [u8; 3] {
        let [_, a, b, c] = self.0.to_be_bytes();
        [a, b, c]
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#08x})", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}
