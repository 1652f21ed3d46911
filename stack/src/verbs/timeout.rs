//! Timeouts as the protocol encodes them: 4.096 µs · 2ⁿ, n from 1 to 31 (8.2 µs to 2.4 h), and 0 for none.

use std::time::Duration;

/// The longest timeout.
const LONGEST: u8 = 31;

/// The time of an exponent.
pub(crate) fn time_of(exponent: u8) -> Duration {
    Duration::from_nanos(4096 << exponent.min(LONGEST))
}

/// The exponent of the shortest timeout that is at least `time`; that of the longest one if none is. 0 is for a time of zero.
pub(crate) fn exponent_of(time: Duration) -> u8 {
    if time.is_zero() {
        return 0;
    }
    (1..LONGEST).find(|exponent| time_of(*exponent) >= time).unwrap_or(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up() {
        let cases = [(0, 0), (1, 1), (8192, 1), (8193, 2), (67_108_864, 14), (67_108_865, 15)];
        for (nanos, exponent) in cases {
            assert_eq!(exponent_of(Duration::from_nanos(nanos)), exponent, "{nanos} ns");
        }
        assert_eq!((exponent_of(Duration::MAX), exponent_of(time_of(31))), (31, 31));
        assert!((1..=31).all(|exponent| exponent_of(time_of(exponent)) == exponent));
    }
}
