//! The line rate of the senders, given or estimated.

use std::collections::HashMap;
use std::fmt;

use ferroce::{Dcqcn, Gid, Nanos, ReactionPoint};
use serde::Serialize;

use super::super::sample::Sample;
use super::gigabits;
use super::window::windows;
use crate::congestion::Gigabits;
use crate::failure::Failure;

#[derive(Serialize)]
pub(super) struct LineRate {
    /// In bit/s.
    rate: u64,
    origin: Origin,
}

/// The source of the line rate.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case", tag = "known")]
enum Origin {
    Given,
    /// The next Ethernet rate above the fastest rate of a host.
    Estimated {
        host: String,
        seen: f64,
    },
    /// Without anything to estimate it from.
    Assumed,
}

/// Ethernet rates in bit/s.
const ETHERNET: [u64; 11] = [
    1_000_000_000,
    2_500_000_000,
    5_000_000_000,
    10_000_000_000,
    25_000_000_000,
    40_000_000_000,
    50_000_000_000,
    100_000_000_000,
    200_000_000_000,
    400_000_000_000,
    800_000_000_000,
];

const ASSUMED: u64 = 100_000_000_000;

impl LineRate {
    pub(super) fn of(samples: &[Sample], given: Option<Gigabits>, parameters: Dcqcn) -> LineRate {
        if let Some(rate) = given {
            return LineRate { rate: rate.bits(), origin: Origin::Given };
        }
        let Some((host, seen)) = fastest(samples) else {
            return LineRate { rate: ASSUMED, origin: Origin::Assumed };
        };
        let fits = |rate: &&u64| **rate as f64 >= seen && ReactionPoint::new(parameters, **rate).is_ok();
        let rate = ETHERNET.iter().find(fits).copied().unwrap_or(seen as u64);
        LineRate { rate, origin: Origin::Estimated { host: host.to_ip().to_string(), seen } }
    }

    /// The reaction point of a sender that has received no CNP.
    ///
    /// # Errors
    /// A parameter does not fit the line rate.
    pub(super) fn reaction_point(&self, parameters: Dcqcn) -> Result<ReactionPoint, Failure> {
        ReactionPoint::new(parameters, self.rate)
            .map_err(|error| Failure::usage(format!("--congestion: {error}; line rate {self}")))
    }
}

/// The host that sent fastest over 1 ms, or over the whole capture if that is shorter, and its rate.
fn fastest(samples: &[Sample]) -> Option<(Gid, f64)> {
    let mut hosts: Vec<(Gid, Vec<Nanos>, Vec<f64>)> = Vec::new();
    let mut places: HashMap<Gid, usize> = HashMap::new();
    for sample in samples {
        let place = *places.entry(sample.source).or_insert_with(|| {
            hosts.push((sample.source, Vec::new(), vec![0.0]));
            hosts.len() - 1
        });
        let (_, times, bits) = &mut hosts[place];
        times.push(sample.at);
        bits.push(bits.last().unwrap_or(&0.0) + 8.0 * f64::from(sample.bytes));
    }
    let fastest = |times: &[Nanos], bits: &[f64]| {
        let rate = |(start, end): (usize, usize)| {
            let time = times[end].0 - times[start].0;
            (time > 0).then(|| (bits[end] - bits[start]) * 1e9 / time as f64)
        };
        windows(times, 1).filter_map(rate).reduce(f64::max).or_else(|| rate((0, times.len() - 1)))
    };
    let rates = hosts.iter().filter_map(|(host, times, bits)| Some((*host, fastest(times, bits)?)));
    rates.reduce(|a, b| if b.1 > a.1 { b } else { a })
}

impl fmt::Display for LineRate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} Gb/s, ", gigabits(Some(self.rate as f64)))?;
        match &self.origin {
            Origin::Given => f.write_str("given"),
            Origin::Estimated { host, seen } => write!(
                f,
                "estimated: the next Ethernet rate above {} Gb/s, the highest rate of {host}, over 1 ms or all of the \
                 capture; --line-rate sets it",
                gigabits(Some(*seen))
            ),
            Origin::Assumed => {
                f.write_str("assumed: there are too few packets to estimate it; --line-rate sets it")
            }
        }
    }
}
