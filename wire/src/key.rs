use std::fmt;

/// A remote key, with which, and with an address, a peer accesses a memory region or window.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct RKey(u32);

impl RKey {
    /// The key `value`.
    pub const fn new(value: u32) -> RKey {
        RKey(value)
    }

    /// Its 32 bits.
    pub const fn value(self) -> u32 {
        self.0
    }
}

impl fmt::Debug for RKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RKey({:#010x})", self.0)
    }
}

impl fmt::Display for RKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}
