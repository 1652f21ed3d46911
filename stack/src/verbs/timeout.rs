//! Timeouts as the protocol encodes them: 4.096 µs · 2ⁿ, n from 1 to 31 (8.2 µs to 2.4 h), and 0 for none.

use std::time::Duration;

/// The longest that there is.
const LONGEST: u8 = 31;

/// The time that an exponent stands for.
pub(crate) fn time_of(exponent: u8) -> Duration {
    Duration::from_nanos(4096 << exponent.min(LONGEST))
}

/// The exponent of the shortest timeout that is no shorter than `time`; of the longest one if all are. 0 stands for
/// no time.
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
