//! What came of a demo: as a table for people, as JSON for machines.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::rank::{Opened, PacketTotals, Totals};
use super::shapes::Tensor;
use super::values::Wrong;

/// What one rank reported, in the course of the run.
#[derive(Debug, Default)]
pub(super) struct RankLog {
    /// Its port.
    pub(super) opened: Option<Opened>,
    /// For each round, the time of each tensor's all-reduce in nanoseconds.
    pub(super) rounds: Vec<Vec<u64>>,
    /// Elements that were compared with the reference.
    pub(super) elements: u64,
    /// The tensors with wrong elements.
    pub(super) wrong: Vec<Wrong>,
    /// What it counted.
    pub(super) totals: Option<Totals>,
}

/// The outcome of a demo.
#[derive(Debug, Serialize)]
pub(super) struct DemoReport {
    /// Ranks.
    pub(super) ranks: u32,
    /// Times that each tensor was all-reduced.
    pub(super) rounds: u32,
    /// One entry a rank.
    ports: Vec<RankPort>,
    /// One row a tensor size, smallest first.
    sizes: Vec<Row>,
    /// All tensors, one after the other.
    total: Row,
    /// Elements that were compared with the reference, on all ranks and in all rounds.
    elements_checked: u64,
    /// The tensors that came out wrong.
    pub(super) wrong: Vec<WrongAt>,
}

/// A tensor that came out wrong, and where.
#[derive(Debug, Serialize)]
pub(super) struct WrongAt {
    /// At which rank.
    rank: usize,
    /// What.
    #[serde(flatten)]
    wrong: Wrong,
}

#[derive(Debug, Serialize)]
struct RankPort {
    rank: usize,
    #[serde(flatten)]
    opened: Opened,
    #[serde(flatten)]
    totals: Totals,
}

/// Times and bandwidths as nccl-tests has them: the algorithm bandwidth is the tensor's bytes by
/// the time of the slowest rank; the bus bandwidth is what each rank has to send for it, 2 (n − 1)
/// / n of the tensor's bytes, by the same time.
#[derive(Debug, PartialEq, Serialize)]
struct Row {
    bytes: usize,
    tensors: usize,
    median_us: f64,
    algbw_gb_s: f64,
    busbw_gb_s: f64,
}

impl Row {
    fn new(bytes: usize, tensors: usize, ranks: u32, mut times: Vec<u64>) -> Row {
        times.sort_unstable();
        let nanoseconds = times.get(times.len() / 2).copied().unwrap_or(0).max(1) as f64;
        let algbw_gb_s = bytes as f64 / nanoseconds;
        let n = f64::from(ranks);
        let busbw_gb_s = algbw_gb_s * 2.0 * (n - 1.0) / n;
        Row { bytes, tensors, median_us: nanoseconds / 1e3, algbw_gb_s, busbw_gb_s }
    }
}

impl DemoReport {
    /// Draws up what the ranks reported. All of them have finished.
    pub(super) fn new(tensors: &[Tensor], logs: Vec<RankLog>) -> DemoReport {
        let ranks = logs.len() as u32;
        let rounds: Vec<Vec<u64>> = slowest(&logs);
        let mut by_size: BTreeMap<usize, (usize, Vec<u64>)> = BTreeMap::new();
        for (number, tensor) in tensors.iter().enumerate() {
            let (count, times) = by_size.entry(tensor.bytes()).or_default();
            *count += 1;
            times.extend(rounds.iter().map(|round| round[number]));
        }
        let sizes =
            by_size.into_iter().map(|(bytes, (count, times))| Row::new(bytes, count, ranks, times)).collect();
        let bytes = tensors.iter().map(|tensor| tensor.bytes()).sum();
        let times = (0..rounds.len()).map(|round| round_time(&logs, round)).collect();
        let total = Row::new(bytes, tensors.len(), ranks, times);

        let elements_checked = logs.iter().map(|log| log.elements).sum();
        let (mut ports, mut wrong) = (Vec::new(), Vec::new());
        for (rank, log) in logs.into_iter().enumerate() {
            wrong.extend(log.wrong.into_iter().map(|wrong| WrongAt { rank, wrong }));
            let (opened, totals) = (log.opened.unwrap_or_default(), log.totals.unwrap_or_default());
            ports.push(RankPort { rank, opened, totals });
        }
        DemoReport { ranks, rounds: rounds.len() as u32, ports, sizes, total, elements_checked, wrong }
    }
}

/// Nanoseconds that the slowest rank took for all tensors of a round.
pub(super) fn round_time(logs: &[RankLog], round: usize) -> u64 {
    logs.iter().map(|log| log.rounds[round].iter().sum()).max().unwrap_or(0)
}

/// The time of the slowest rank, for each round and tensor.
fn slowest(logs: &[RankLog]) -> Vec<Vec<u64>> {
    let rounds = logs.iter().map(|log| log.rounds.len()).min().unwrap_or(0);
    let slowest = |round: usize| {
        let mut times = logs[0].rounds[round].clone();
        for log in &logs[1..] {
            times.iter_mut().zip(&log.rounds[round]).for_each(|(time, other)| *time = (*time).max(*other));
        }
        times
    };
    (0..rounds).map(slowest).collect()
}

impl fmt::Display for DemoReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let DemoReport { ranks, rounds, ports, sizes, total, elements_checked, wrong } = self;
        for RankPort { rank, opened, .. } in ports {
            writeln!(f, "rank {rank}: {opened}")?;
        }
        writeln!(
            f,
            "\nall-reduce (sum) of the parameters of ResNet-50 in f32 over {ranks} ranks; each tensor {rounds} times, \
             median of the slowest rank's times"
        )?;
        let head = ("bytes", "tensors", "time µs", "algbw GB/s", "busbw GB/s");
        writeln!(f, "{:>13} {:>8} {:>12} {:>11} {:>11}", head.0, head.1, head.2, head.3, head.4)?;
        sizes.iter().try_for_each(|row| writeln!(f, "{row}"))?;
        writeln!(f, "{total}  <- all, one after the other\n")?;

        writeln!(
            f,
            "{:>4} {:>10} {:>10} {:>14} {:>9} {:>9} {:>9}",
            "rank", "sent", "received", "retransmitted", "timeouts", "seq. NAKs", "dropped"
        )?;
        for RankPort { rank, totals, .. } in ports {
            let Some(packets) = &totals.packets else {
                writeln!(f, "{rank:>4} the card counts its packets with those of all that use its port")?;
                continue;
            };
            let PacketTotals { sent, received, retransmitted, timeouts, sequence_naks, dropped } = packets;
            writeln!(
                f,
                "{rank:>4} {sent:>10} {received:>10} {retransmitted:>14} {timeouts:>9} {sequence_naks:>9} {:>9}",
                dropped.values().sum::<u64>()
            )?;
        }
        for RankPort { rank, totals, .. } in ports {
            for (reason, count) in totals.packets.iter().flat_map(|packets| &packets.dropped) {
                writeln!(f, "rank {rank} dropped {count} packets: {reason}")?;
            }
        }
        writeln!(f)?;
        for WrongAt { rank, wrong } in wrong.iter().take(SHOWN) {
            writeln!(f, "WRONG at rank {rank}: {wrong}")?;
        }
        if wrong.len() > SHOWN {
            writeln!(f, "and {} more tensors (all of them with --json)", wrong.len() - SHOWN)?;
        }
        let count: usize = wrong.iter().map(|at| at.wrong.count).sum();
        match count {
            0 => write!(f, "all {} elements right", grouped(*elements_checked)),
            _ => write!(f, "{} of {} elements WRONG", grouped(count as u64), grouped(*elements_checked)),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { bytes, tensors, median_us, algbw_gb_s, busbw_gb_s } = self;
        let bytes = grouped(*bytes as u64);
        write!(f, "{bytes:>13} {tensors:>8} {median_us:>12.1} {algbw_gb_s:>11.4} {busbw_gb_s:>11.4}")
    }
}

/// Wrong tensors that are shown.
const SHOWN: usize = 20;

/// A number with a comma before each group of three digits.
fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped() {
        let cases = [(0, "0"), (999, "999"), (1000, "1,000"), (25_557_032, "25,557,032")];
        for (n, text) in cases {
            assert_eq!(grouped(n), text);
        }
    }

    /// 3,000 B in 1 µs at the slowest rank is 3 GB/s, and with 4 ranks 1.5 times that on the bus.
    #[test]
    fn bandwidths_follow_from_the_slowest_rank() {
        let tensors = ["a", "b"].map(|name| Tensor { name: name.into(), shape: vec![750] });
        let log =
            |times: [[u64; 2]; 3]| RankLog { rounds: times.map(Vec::from).into(), ..RankLog::default() };
        let logs = vec![
            log([[500, 500], [1000, 900], [900, 900]]),
            log([[1000, 1000], [500, 1000], [1000, 7000]]),
            log([[1, 1], [1, 1], [1, 1]]),
            log([[1, 1], [1, 1], [1, 1]]),
        ];
        let report = DemoReport::new(&tensors, logs);
        let row =
            |bytes, tensors, median_us| Row { bytes, tensors, median_us, algbw_gb_s: 3.0, busbw_gb_s: 4.5 };
        assert_eq!(report.sizes, [row(3000, 2, 1.0)]);
        assert_eq!(report.total, row(6000, 2, 2.0));
        assert!(report.to_string().contains("all 0 elements right"), "{report}");
    }

    #[test]
    fn wrong_elements_are_told() {
        let wrong = Wrong { tensor: "fc.bias".into(), index: 7, expected: 2.0, got_bits: 0, count: 3 };
        let log = RankLog { elements: 1000, wrong: vec![wrong], ..RankLog::default() };
        let text = DemoReport::new(&[], vec![RankLog::default(), log]).to_string();
        assert!(
            text.contains("WRONG at rank 1: fc.bias[7] is 0.0 (0x00000000), not 2.0; 3 elements"),
            "{text}"
        );
        assert!(text.ends_with("3 of 1,000 elements WRONG"), "{text}");
    }
}
