use std::fmt;
use std::ops::{Add, AddAssign, Sub};

/// A packet sequence number: 24 bits that wrap.
///
/// It deliberately has no `Ord`: on a circle, "less" has no meaning. Use the [`distance`](Psn::distance) instead.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Psn(u32);

impl Psn {
    /// The PSN `value` modulo 2²⁴ (like in the verbs).
    pub const fn new(value: u32) -> Psn {
        Psn(value & 0x00ff_ffff)
    }

    /// The 24-bit value.
    pub const fn value(self) -> u32 {
        self.0
    }

    /// The distance by which `self` is ahead of `origin`: negative if it is older. The opposite point, 2²³ away, counts
    /// as older (docs/protocol.md §1).
    pub const fn distance(self, origin: Psn) -> i32 {
        ((self.0.wrapping_sub(origin.0) << 8) as i32) >> 8
    }

    pub(crate) const fn from_bytes(bytes: [u8; 3]) -> Psn {
        Psn(u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]]))
    }

    pub(crate) const fn to_bytes(self) -> [u8; 3] {
        let [_, a, b, c] = self.0.to_be_bytes();
        [a, b, c]
    }
}

impl Add<u32> for Psn {
    type Output = Psn;
    fn add(self, packets: u32) -> Psn {
        Psn::new(self.0.wrapping_add(packets))
    }
}

impl Sub<u32> for Psn {
    type Output = Psn;
    fn sub(self, packets: u32) -> Psn {
        Psn::new(self.0.wrapping_sub(packets))
    }
}

impl AddAssign<u32> for Psn {
    fn add_assign(&mut self, packets: u32) {
        *self = *self + packets;
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distance_wraps_and_the_far_point_is_older() {
        assert_eq!(Psn::new(1).distance(Psn::new(0xff_fffe)), 3);
        assert_eq!(Psn::new(0xff_fffe).distance(Psn::new(1)), -3);
        assert_eq!(Psn::new(0x80_0000).distance(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0).distance(Psn::new(0x80_0000)), -(1 << 23));
        assert_eq!(Psn::new(0x7f_ffff).distance(Psn::new(0)), (1 << 23) - 1);
        assert_eq!(Psn::new(0x0123_4567), Psn::new(0x23_4567));
        assert_eq!(Psn::new(0) - 1, Psn::new(0xff_ffff));
    }
}
