//! Distributions of message sizes.

use serde::{Deserialize, Serialize};

use super::chance::Chance;

/// A published distribution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Sizes {
    /// Flows of a web search cluster: DCTCP (SIGCOMM 2010), figure 4, with the numbers that pFabric (SIGCOMM 2013) read
    /// from it, in bytes as in the HPCC repository (`traffic_gen/WebSearch_distribution.txt`).
    Websearch,
}

/// Bytes, and the percentage of messages with at most that size. Between two rows, linear interpolation.
const WEBSEARCH: [(u64, u64); 12] = [
    (1, 0),
    (10_000, 15),
    (20_000, 20),
    (30_000, 30),
    (50_000, 40),
    (80_000, 53),
    (200_000, 60),
    (1_000_000, 70),
    (2_000_000, 80),
    (5_000_000, 90),
    (10_000_000, 97),
    (30_000_000, 100),
];

impl Sizes {
    fn rows(self) -> &'static [(u64, u64)] {
        match self {
            Sizes::Websearch => &WEBSEARCH,
        }
    }

    /// The mean size in bytes.
    pub(super) fn mean(self) -> f64 {
        let part = |rows: &[(u64, u64)]| {
            let [(from, before), (to, until)] = rows else { return 0.0 };
            (from + to) as f64 / 2.0 * (until - before) as f64 / 100.0
        };
        self.rows().windows(2).map(part).sum()
    }

    pub(super) fn draw(self, chance: &mut Chance) -> u64 {
        let percent = 100.0 * chance.unit();
        let rows = self.rows();
        let at = rows.iter().position(|(_, until)| percent < *until as f64).unwrap_or(rows.len() - 1);
        let ((from, before), (to, until)) = (rows[at - 1], rows[at]);
        let part = (percent - before as f64) / (until - before) as f64;
        (from as f64 + part * (to - from) as f64).round().max(1.0) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_mean_and_the_median_of_the_table() {
        let mut chance = Chance::new(1, 0, 0);
        let mut draws: Vec<u64> = (0..200_000).map(|_| Sizes::Websearch.draw(&mut chance)).collect();
        let mean = draws.iter().sum::<u64>() as f64 / draws.len() as f64;
        assert!((mean / Sizes::Websearch.mean() - 1.0).abs() < 0.02, "{mean}");
        draws.sort_unstable();
        let median = draws[draws.len() / 2] as f64;
        assert!((median / 73_077.0 - 1.0).abs() < 0.02, "{median}");
        assert!(draws[0] >= 1 && *draws.last().unwrap() <= 30_000_000);
    }
}
