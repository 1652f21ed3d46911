//! Parsing of sizes, times and rates, on the command line and in files.
//!
//! The units of sizes are those of GNU's dd: KB is 1000 bytes; K, k and KiB are 1024, as in perftest and iperf.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// A number of bytes: `4096`, `64K`, `100KB`, `1MiB`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Bytes(pub(crate) u64);

/// A time: `250ns`, `10us`, `1.5ms`, `2s`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Time(pub(crate) Duration);

/// A rate in bit/s: `100G`, `25Gb/s`, `500M`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rate(pub(crate) u64);

/// A time in reports for programs: nanoseconds.
pub(crate) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The units of a quantity: suffix and factor. The first ones are used for printing.
type Units = &'static [(&'static str, u64)];

const BYTES: Units = &[
    ("GB", 1_000_000_000),
    ("GiB", 1 << 30),
    ("MB", 1_000_000),
    ("MiB", 1 << 20),
    ("KB", 1000),
    ("KiB", 1 << 10),
    ("B", 1),
    ("", 1),
    ("kB", 1000),
    ("k", 1 << 10),
    ("K", 1 << 10),
    ("M", 1 << 20),
    ("G", 1 << 30),
];
const NANOSECONDS: Units = &[("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1000), ("ns", 1), ("µs", 1000)];
const BITS: Units = &[
    ("G", 1_000_000_000),
    ("M", 1_000_000),
    ("K", 1000),
    ("b/s", 1),
    ("T", 1_000_000_000_000),
    ("Gb/s", 1_000_000_000),
    ("Gbps", 1_000_000_000),
    ("Gbit", 1_000_000_000),
    ("Mb/s", 1_000_000),
    ("Mbps", 1_000_000),
    ("Mbit", 1_000_000),
    ("Tb/s", 1_000_000_000_000),
];

/// Parses a text. Fractions of a unit are truncated.
fn read(text: &str, units: Units) -> Option<u64> {
    let text = text.trim();
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.').len();
    let (number, unit) = text.split_at(digits);
    let (_, many) = units.iter().find(|(name, _)| *name == unit.trim_start())?;
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(*many);
    }
    let number = number.parse::<f64>().ok()? * *many as f64;
    (number < 1e18).then_some(number.round() as u64)
}

/// A hint for a number with an unknown unit.
fn hint(text: &str, units: Units) -> String {
    let text = text.trim();
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit() || c == '.');
    let number = &text[..text.len() - unit.len()];
    let unit = unit.trim_start();
    match units.iter().any(|(name, _)| *name == unit) {
        _ if number.is_empty() || number.parse::<f64>().is_err() => String::new(),
        true => "; this is too much".to_owned(),
        false if unit.is_empty() => String::new(),
        false => {
            let names: Vec<&str> =
                units.iter().map(|(name, _)| *name).filter(|name| !name.is_empty()).collect();
            format!("; '{unit}' is not a unit; units are {}", names.join(", "))
        }
    }
}

/// In the unit that gives a whole number, or the last one.
fn write(f: &mut fmt::Formatter<'_>, value: u64, units: Units) -> fmt::Result {
    let fits = |unit: &&(&str, u64)| unit.1 == 1 || value > 0 && value.is_multiple_of(unit.1);
    match units.iter().find(fits) {
        Some((name, many)) => f.pad(&format!("{}{name}", value / many)),
        None => f.pad(&value.to_string()),
    }
}

macro_rules! quantity {
    ($name:ident, $units:ident, $expected:literal, $from:expr, $to:expr) => {
        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<$name, String> {
                let wrong = || format!("'{text}': must be {}{}", $expected, hint(text, $units));
                read(text, $units).map($from).ok_or_else(wrong)
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write(f, $to(self), $units)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                deserializer
                    .deserialize_any(Text($expected))
                    .and_then(|text| text.parse().map_err(de::Error::custom))
            }
        }
    };
}

quantity!(
    Bytes,
    BYTES,
    "bytes, as 4096, 64K or 64KiB (65,536), 100KB (100,000) or 1MiB (1,048,576)",
    Bytes,
    |bytes: &Bytes| bytes.0
);
quantity!(
    Time,
    NANOSECONDS,
    "a time with its unit, as 250ns, 10us, 1.5ms or 2s",
    |nanos| Time(Duration::from_nanos(nanos)),
    |time: &Time| time.0.as_nanos() as u64
);
quantity!(Rate, BITS, "a rate with its unit, as 100G, 25Gb/s or 500M", Rate, |rate: &Rate| rate.0);

/// Parses the length of a message, for clap.
pub(crate) fn length<const LEAST: u32, const MOST: u32>(text: &str) -> Result<u32, String> {
    let bytes: Bytes = text.parse()?;
    let length = u32::try_from(bytes.0).ok().filter(|length| (LEAST..=MOST).contains(length));
    length.ok_or_else(|| format!("{} bytes: must be {LEAST} to {MOST}", bytes.0))
}

/// Parses a total number of bytes, for clap.
pub(crate) fn total(text: &str) -> Result<u64, String> {
    match text.parse()? {
        Bytes(0) => Err("must be at least 1 byte".into()),
        Bytes(bytes) => Ok(bytes),
    }
}

/// Deserializes a text, or a number without a unit.
struct Text(&'static str);

impl Visitor<'_> for Text {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<String, E> {
        Ok(text.to_owned())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<String, E> {
        Ok(number.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantities_are_read_and_written() {
        for (text, bytes, again) in [
            ("4096", 4096, "4KiB"),
            ("100KB", 100_000, "100KB"),
            ("1MiB", 1 << 20, "1MiB"),
            ("1.5MB", 1_500_000, "1500KB"),
            ("32 MiB", 32 << 20, "32MiB"),
            ("64K", 65536, "64KiB"),
            ("64k", 65536, "64KiB"),
            ("1M", 1 << 20, "1MiB"),
            ("1.5G", 3 << 29, "1536MiB"),
            ("1", 1, "1B"),
            ("0", 0, "0B"),
        ] {
            assert_eq!(text.parse(), Ok(Bytes(bytes)));
            assert_eq!(Bytes(bytes).to_string(), again);
            assert_eq!(again.parse(), Ok(Bytes(bytes)));
        }
        for (text, nanos, again) in [
            ("250ns", 250, "250ns"),
            ("1.5us", 1500, "1500ns"),
            ("10ms", 10_000_000, "10ms"),
            ("0s", 0, "0ns"),
        ] {
            assert_eq!(text.parse(), Ok(Time(Duration::from_nanos(nanos))));
            assert_eq!(Time(Duration::from_nanos(nanos)).to_string(), again);
        }
        assert_eq!("100G".parse(), Ok(Rate(100_000_000_000)));
        assert_eq!("2.5Gb/s".parse(), Ok(Rate(2_500_000_000)));
        assert_eq!(Rate(2_500_000_000).to_string(), "2500M");
        for wrong in ["", "KB", "-1", "1 KBit", "1e9", "1..2KB", "99999999999999999999", "99999999999GB"] {
            let error = wrong.parse::<Bytes>().unwrap_err();
            assert!(error.starts_with(&format!("'{wrong}': must be bytes, as 4096")), "{error}");
        }
        assert_eq!(length::<1, 65536>("64K"), Ok(65536));
        for wrong in ["64.1K", "0", "4G"] {
            assert!(
                length::<1, 65536>(wrong).is_err_and(|said| said.contains("must be 1 to 65536")),
                "{wrong}"
            );
        }
        assert!(total("0").is_err() && total("4G") == Ok(1 << 32));
        assert!("10".parse::<Time>().is_err() && "100".parse::<Rate>().is_err());
    }
}
