//! `[allreduce]` of a file: the operations of the ranks in the fabric.

use std::fmt;
use std::str::FromStr;

use ferroce_collectives::{Algorithm, Kind, MAX_RAILS, Options, SharedMemory};
use serde::{Deserialize, Serialize};

use crate::fabric::description::{ControlSection, Repeat, Shape, TimeSection};
use crate::fabric::wrong::Wrong;
use crate::quantity::{Bytes, Time};

/// All-reduces by size and algorithm. Each rank has its own host port.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "kebab-case")]
pub(crate) struct AllreduceSection {
    /// The ranks are on hosts 0 and following; by default as many as there are hosts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) ranks: Option<usize>,
    /// Ports of each rank, its rails. Rank r on rail k is host k · ranks + r.
    pub(crate) rails: usize,
    /// This many consecutive ranks count as one host with several ports.
    pub(crate) ranks_per_host: usize,
    pub(crate) algorithm: Algorithms,
    /// Sizes of the all-reduces.
    pub(crate) bytes: ByteList,
    /// Measured rounds of each size.
    pub(crate) count: usize,
    /// The chunks of long operations; the library's default if omitted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) chunk: Option<Bytes>,
    /// Up to this size the library copies elements and sends them at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) eager: Option<Bytes>,
}

impl Default for AllreduceSection {
    fn default() -> AllreduceSection {
        AllreduceSection {
            ranks: None,
            rails: 1,
            ranks_per_host: 1,
            algorithm: Algorithms::All,
            bytes: ByteList(vec![[Bytes(1 << 10), Bytes(4 << 20)]]),
            count: 1,
            chunk: None,
            eager: None,
        }
    }
}

/// The most ranks.
pub(crate) const MOST_RANKS: usize = 512;
/// The most bytes of all channels between ranks.
pub(super) const MOST_CHANNELS: u64 = 6 << 30;
/// The most bytes of an operation.
const MOST_BYTES: u64 = 1 << 30;
/// The most sizes.
const MOST_SIZES: usize = 100;

impl AllreduceSection {
    /// The number of ranks in a topology with `hosts` hosts.
    pub(crate) fn size(&self, hosts: usize) -> usize {
        self.ranks.unwrap_or(hosts / self.rails.max(1))
    }

    /// The options of the library.
    pub(super) fn options(&self) -> Options {
        let options = Options::default();
        let or = |bytes: Option<Bytes>, default: u32| {
            bytes.map_or(default, |bytes| u32::try_from(bytes.0).unwrap_or(u32::MAX))
        };
        options
            .chunk_bytes(or(self.chunk, options.chunk_bytes))
            .eager_bytes(or(self.eager, options.eager_bytes))
            .shared_memory(SharedMemory::Off)
    }

    /// Memory of the channels between all pairs of ranks: rings for four to eight short messages at both ends.
    pub(super) fn channel_bytes(&self, ranks: usize) -> u64 {
        let peers = (ranks as u64).saturating_sub(1).max(1);
        let messages = (256 / peers).clamp(4, 8);
        2 * ranks as u64 * peers * messages * u64::from(self.options().eager_bytes)
    }

    pub(crate) fn check(
        &self,
        topology: &Shape,
        control: &ControlSection,
        time: &TimeSection,
    ) -> Result<(), Wrong> {
        let hosts = topology.hosts();
        let wrong = |key: &str, value: &dyn fmt::Display, right: String| {
            Err(Wrong::new(format!("allreduce.{key}"), value, right))
        };
        let size = self.size(hosts);
        if !(1..=MAX_RAILS.min(hosts / 2)).contains(&self.rails) {
            let right = format!("1 to {}: each is a host of its own of {hosts}", MAX_RAILS.min(hosts / 2));
            return wrong("rails", &self.rails, right);
        }
        let most = MOST_RANKS.min(hosts / self.rails);
        if !(2..=most).contains(&size) {
            let right = match self.rails {
                1 => format!("2 to {most}, a host each of the {hosts} that there are"),
                rails => format!("2 to {most}, {rails} hosts each of the {hosts} that there are"),
            };
            return wrong("ranks", &size, right);
        }
        let each = self.ranks_per_host;
        if each == 0 || !size.is_multiple_of(each) {
            return wrong("ranks-per-host", &each, format!("a number that divides {size}, the ranks"));
        }
        if let Shape::LeafSpine { hosts_per_leaf, .. } = topology
            && !hosts_per_leaf.is_multiple_of(each)
        {
            let right =
                format!("a number that divides {hosts_per_leaf}, the hosts of a leaf: a host is under one");
            return wrong("ranks-per-host", &each, right);
        }
        if self.algorithm.is_named(Algorithm::Hierarchical) && (each == 1 || each == size) {
            let right = format!("2 or more, and less than {size}, for the hierarchical algorithm");
            return wrong("ranks-per-host", &each, right);
        }
        let sizes = self.bytes.sizes();
        if sizes.len() > MOST_SIZES {
            return wrong("bytes", &self.bytes, format!("at most {MOST_SIZES} sizes"));
        }
        if let Some(bad) = sizes.iter().find(|bytes| **bytes > MOST_BYTES || !bytes.is_multiple_of(8)) {
            let right = format!("multiples of 8 bytes, up to {}", Bytes(MOST_BYTES));
            return wrong("bytes", &Bytes(*bad), right);
        }
        if !(1..=1000).contains(&self.count) {
            return wrong("count", &self.count, "1 to 1000".into());
        }
        for (key, given, least, most) in
            [("chunk", self.chunk, 1 << 10, 16 << 20), ("eager", self.eager, 64, 64 << 10)]
        {
            let bytes = given.unwrap_or(Bytes(most));
            if !bytes.0.is_multiple_of(8) || !(least..=most).contains(&bytes.0) {
                let right = format!("a multiple of 8 bytes, {} to {}", Bytes(least), Bytes(most));
                return wrong(key, &bytes, right);
            }
        }
        let channels = self.channel_bytes(size);
        if channels > MOST_CHANNELS {
            let eager = Bytes(self.options().eager_bytes.into());
            let right = format!(
                "less: the channels between {size} ranks take {} MB, and may take {}",
                channels / 1_000_000,
                MOST_CHANNELS / 1_000_000
            );
            return wrong("eager", &eager, right);
        }
        if control.repeat != Repeat::GoBackN {
            let right = "go-back-n: queue pairs of the collectives have no other";
            return Err(Wrong::new("control.repeat", "selective", right));
        }
        if time.warm_up > Time::default() {
            let right = "left out: each size of an allreduce begins with a round that is not measured";
            return Err(Wrong::new("time.warm-up", time.warm_up, right));
        }
        Ok(())
    }
}

/// Which algorithms are simulated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Algorithms {
    /// All that are possible.
    All,
    /// For each size, the one that the library chooses.
    Auto,
    These(Vec<Algorithm>),
}

impl Algorithms {
    pub(crate) fn is_named(&self, algorithm: Algorithm) -> bool {
        matches!(self, Algorithms::These(these) if these.contains(&algorithm))
    }
}

/// Those that do not use shared memory.
pub(super) fn over_the_fabric() -> impl Iterator<Item = Algorithm> {
    Algorithm::ALL
        .into_iter()
        .filter(|algorithm| *algorithm != Algorithm::Mapped && algorithm.applies_to(Kind::AllReduce))
}

impl FromStr for Algorithms {
    type Err = String;

    fn from_str(text: &str) -> Result<Algorithms, String> {
        let named = |name: &str| {
            let found = over_the_fabric().find(|algorithm| algorithm.to_string() == name.trim());
            found.ok_or_else(|| {
                let names: Vec<String> = over_the_fabric().map(|algorithm| algorithm.to_string()).collect();
                format!("'{}': must be all, auto, or some of {}", name.trim(), names.join(","))
            })
        };
        match text {
            "all" => Ok(Algorithms::All),
            "auto" => Ok(Algorithms::Auto),
            list => list.split(',').map(named).collect::<Result<_, _>>().map(Algorithms::These),
        }
    }
}

impl fmt::Display for Algorithms {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithms::All => f.write_str("all"),
            Algorithms::Auto => f.write_str("auto"),
            Algorithms::These(these) => {
                let names: Vec<String> = these.iter().map(Algorithm::to_string).collect();
                f.write_str(&names.join(","))
            }
        }
    }
}

/// Sizes: `64KiB`, `1KiB,1MiB`, or `1KiB..16MiB`, where each is four times the previous one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ByteList(Vec<[Bytes; 2]>);

impl From<Bytes> for ByteList {
    fn from(bytes: Bytes) -> ByteList {
        ByteList(vec![[bytes; 2]])
    }
}

impl ByteList {
    /// All sizes, ascending.
    pub(crate) fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<u64> = Vec::new();
        for [Bytes(first), Bytes(last)] in &self.0 {
            let each = std::iter::successors(Some(*first), |size| size.checked_mul(4));
            sizes.extend(each.take_while(|size| size < last));
            sizes.push(*last);
        }
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    /// The size, if there is only one.
    pub(crate) fn single(&self) -> Option<Bytes> {
        match self.0.as_slice() {
            [[first, last]] if first == last => Some(*first),
            _ => None,
        }
    }
}

impl FromStr for ByteList {
    type Err = String;

    fn from_str(text: &str) -> Result<ByteList, String> {
        let part = |part: &str| {
            let (first, last) = part.split_once("..").unwrap_or((part, part));
            let range = [first.parse::<Bytes>()?, last.parse::<Bytes>()?];
            match range {
                [Bytes(0), _] => Err(format!("'{part}': must be at least 1 byte")),
                [first, last] if first > last => Err(format!("'{part}': must have the smaller size first")),
                range => Ok(range),
            }
        };
        text.split(',').map(part).collect::<Result<_, String>>().map(ByteList)
    }
}

impl fmt::Display for ByteList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, [first, last]) in self.0.iter().enumerate() {
            let comma = if at > 0 { "," } else { "" };
            match first == last {
                true => write!(f, "{comma}{first}")?,
                false => write!(f, "{comma}{first}..{last}")?,
            }
        }
        Ok(())
    }
}

macro_rules! as_text {
    ($name:ident) => {
        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<$name, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

as_text!(Algorithms);
as_text!(ByteList);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        for (text, sizes) in [
            ("64KiB", vec![65536]),
            ("1MiB,8B", vec![8, 1 << 20]),
            ("1KiB..16KiB", vec![1024, 4096, 16384]),
            ("1KiB..5KiB,4KiB", vec![1024, 4096, 5120]),
        ] {
            let list: ByteList = text.parse().unwrap();
            assert_eq!((list.sizes(), list.to_string()), (sizes, text.to_owned()));
        }
        for (text, words) in [
            ("2KiB..1KiB", "'2KiB..1KiB': must have the smaller size first"),
            ("0", "'0': must be at least 1 byte"),
            ("1KiB,", "'': must be bytes"),
        ] {
            let error = text.parse::<ByteList>().unwrap_err();
            assert!(error.starts_with(words), "{error}");
        }
        for text in ["all", "auto", "ring", "tree,two_step"] {
            assert_eq!(text.parse::<Algorithms>().unwrap().to_string(), text);
        }
        let error = "rign".parse::<Algorithms>().unwrap_err();
        assert_eq!(
            error,
            "'rign': must be all, auto, or some of direct,two_step,ring,halving,tree,hierarchical"
        );
        assert!("mapped".parse::<Algorithms>().is_err());
    }
}
