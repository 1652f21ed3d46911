//! What is told of a run in numbers.

use std::ops::Range;
use std::time::Duration;

use super::outcome::{FlowOutcome, MessageOutcome, Outcome};
use super::traffic::Group;

/// A number, what it is of, and in which unit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Measure {
    /// The group of traffic, by its place, or all.
    pub(crate) group: Option<usize>,
    /// What programs know it by.
    pub(crate) key: &'static str,
    pub(crate) label: &'static str,
    /// `None` where there is none, as of completion times if nothing was completed.
    pub(crate) value: Option<f64>,
}

/// Of a run. Runs of the same traffic have the same measures in the same order, whatever came of it.
pub(crate) fn measures(outcome: &Outcome, groups: &[Group]) -> Vec<Measure> {
    let mut measures = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        let mut add = |key, label, value: Option<f64>| {
            let value = value.filter(|value| value.is_finite());
            measures.push(Measure { group: Some(number), key, label, value });
        };
        let flows = &outcome.flows[group.flows.clone()];
        let messages = &outcome.messages[group.messages.clone()];
        let all: Vec<&MessageOutcome> = messages.iter().collect();
        let (goodput, rates) = if group.is_endless {
            let rates: Vec<f64> = flows.iter().map(|flow| flow.goodput).collect();
            (Some(rates.iter().sum()), rates)
        } else if let (true, Some(posting)) = (group.is_random, posting(messages)) {
            let time = (posting.end - posting.start).as_secs_f64();
            let offered =
                messages.iter().filter(|message| message.posted.is_some()).map(|message| message.bytes);
            let offered = 8.0 * offered.sum::<u64>() as f64 / time;
            add("offered_gbps", "offered while messages come, Gb/s", Some(offered / 1e9));
            (Some(8.0 * acknowledged(outcome, flows, &posting) / time), Vec::new())
        } else if group.is_random {
            add("offered_gbps", "offered while messages come, Gb/s", None);
            (None, Vec::new())
        } else {
            (rate(&all, outcome.duration), flow_rates(messages, group, outcome.duration))
        };
        add("goodput_gbps", "goodput, Gb/s", goodput.map(|rate| rate / 1e9));
        if flows.len() > 1 && !group.is_random {
            add("goodput_least_gbps", "  of the slowest flow, Gb/s", least(&rates).map(|rate| rate / 1e9));
            add("jain", "Jain's index", jain(&rates));
        }
        if group.is_endless {
            continue;
        }
        let mut times: Vec<f64> = messages.iter().filter_map(MessageOutcome::time).map(micros).collect();
        times.sort_unstable_by(f64::total_cmp);
        let slowdown =
            |message: &MessageOutcome| Some(message.time()?.as_secs_f64() / message.alone.as_secs_f64());
        let mut slowdowns: Vec<f64> = messages.iter().filter_map(slowdown).collect();
        slowdowns.sort_unstable_by(f64::total_cmp);
        add("fct_mean_us", "FCT mean, us", mean(&times));
        add("fct_p50_us", "    p50, us", percentile(&times, 50));
        add("fct_p99_us", "    p99, us", percentile(&times, 99));
        add("fct_max_us", "    max, us", times.last().copied());
        add("slowdown_mean", "slowdown mean", mean(&slowdowns));
        add("slowdown_p50", "         p50", percentile(&slowdowns, 50));
        add("slowdown_p99", "         p99", percentile(&slowdowns, 99));
        if group.is_random {
            for bin in &BINS {
                let is_in = |message: &&MessageOutcome| bin.bytes.contains(&message.bytes);
                let mut slowdowns: Vec<f64> = messages.iter().filter(is_in).filter_map(slowdown).collect();
                slowdowns.sort_unstable_by(f64::total_cmp);
                let [(p50, of_p50), (p99, of_p99), (count, of_count)] = bin.rows;
                add(p50, of_p50, percentile(&slowdowns, 50));
                add(p99, of_p99, percentile(&slowdowns, 99));
                add(count, of_count, Some(slowdowns.len() as f64));
            }
        }
        add("all_us", "from first to last, us", span(messages).map(micros));
        add("completed", "messages completed", Some(times.len() as f64));
        add("unfinished", "messages unfinished", Some((messages.len() - times.len()) as f64));
    }
    let mut add = |key, label, value: f64| {
        measures.push(Measure {
            group: None,
            key,
            label,
            value: Some(value).filter(|value| value.is_finite()),
        });
    };
    let longest = outcome.queues.iter().max_by_key(|queue| queue.max);
    let sum =
        |of: fn(&super::outcome::QueueOutcome) -> u64| outcome.queues.iter().map(of).sum::<u64>() as f64;
    let busiest = outcome.queues.iter().map(|queue| queue.used).fold(0.0, f64::max);
    add("busiest_port", "busiest switch port, used %", 100.0 * busiest);
    add("queue_mean_kb", "longest queue mean, KB", longest.map_or(0.0, |queue| queue.mean / 1e3));
    add("queue_p99_kb", "              p99, KB", longest.map_or(0.0, |queue| queue.p99 as f64 / 1e3));
    add("queue_max_kb", "              max, KB", longest.map_or(0.0, |queue| queue.max as f64 / 1e3));
    add("marked", "frames marked", sum(|queue| queue.marked));
    add("cnps", "CNPs", outcome.hosts.cnps_sent as f64);
    let paused: Duration = outcome.pauses.iter().map(|link| link.paused).sum();
    add("pauses", "pauses", outcome.pauses.iter().map(|link| link.pauses).sum::<u64>() as f64);
    add("paused_us", "paused, all links, us", micros(paused));
    add("drops", "frames dropped", outcome.fabric.dropped() as f64);
    add("retransmitted", "packets retransmitted", outcome.hosts.retransmitted as f64);
    add("timeouts", "ACK timeouts", outcome.hosts.timeouts as f64);
    let failed = outcome.flows.iter().filter(|flow| flow.failure.is_some()).count();
    add("failed_queue_pairs", "queue pairs failed", failed as f64);
    add("time_ms", "virtual time, ms", micros(outcome.duration) / 1e3);
    measures
}

/// Messages of some lengths, whose slowdown is told apart: the key and the label of each row.
struct Bin {
    bytes: Range<u64>,
    rows: [(&'static str, &'static str); 3],
}

const BINS: [Bin; 4] = [
    Bin {
        bytes: 0..10_000,
        rows: [
            ("slowdown_p50_below_10kb", "slowdown below 10 KB p50"),
            ("slowdown_p99_below_10kb", "                     p99"),
            ("completed_below_10kb", "      messages completed"),
        ],
    },
    Bin {
        bytes: 10_000..100_000,
        rows: [
            ("slowdown_p50_10_to_100kb", "       10 to 100 KB  p50"),
            ("slowdown_p99_10_to_100kb", "                     p99"),
            ("completed_10_to_100kb", "      messages completed"),
        ],
    },
    Bin {
        bytes: 100_000..1_000_000,
        rows: [
            ("slowdown_p50_100kb_to_1mb", "     100 KB to 1 MB  p50"),
            ("slowdown_p99_100kb_to_1mb", "                     p99"),
            ("completed_100kb_to_1mb", "      messages completed"),
        ],
    },
    Bin {
        bytes: 1_000_000..u64::MAX,
        rows: [
            ("slowdown_p50_from_1mb", "       from 1 MB on  p50"),
            ("slowdown_p99_from_1mb", "                     p99"),
            ("completed_from_1mb", "      messages completed"),
        ],
    },
];

/// The time in which messages are posted: what comes later is the tail of the last ones.
fn posting(messages: &[MessageOutcome]) -> Option<Range<Duration>> {
    let posted = || messages.iter().filter_map(|message| message.posted);
    let time = posted().min()?..posted().max()?;
    (!time.is_empty()).then_some(time)
}

/// Bytes of flows that were acknowledged in a time, to the next sample.
fn acknowledged(outcome: &Outcome, flows: &[FlowOutcome], time: &Range<Duration>) -> f64 {
    let before = [Duration::ZERO].into_iter().chain(outcome.times.iter().copied());
    let samples = outcome.times.iter().zip(before).enumerate();
    let in_time = samples.filter(|(_, (at, _))| (time.start..=time.end).contains(at));
    let bytes = in_time.map(|(sample, (at, before))| {
        let rates = flows.iter().filter_map(|flow| flow.goodputs.get(sample));
        rates.sum::<f64>() * (*at - before).as_secs_f64() / 8.0
    });
    bytes.sum()
}

/// The rate of each flow, from its first message to its last completion, or to the end if one was not completed.
fn flow_rates(messages: &[MessageOutcome], group: &Group, end: Duration) -> Vec<f64> {
    let mut by_flow: Vec<Vec<&MessageOutcome>> = vec![Vec::new(); group.flows.len()];
    for message in messages {
        by_flow[message.flow - group.flows.start].push(message);
    }
    by_flow.iter().filter_map(|messages| rate(messages, end)).collect()
}

fn rate(messages: &[&MessageOutcome], end: Duration) -> Option<f64> {
    let first = messages.iter().filter_map(|message| message.posted).min()?;
    let completed = |message: &&MessageOutcome| message.completed.map(|at| (at, message.bytes));
    let completed: Vec<(Duration, u64)> = messages.iter().filter_map(completed).collect();
    let last = completed.iter().map(|(at, _)| *at).max();
    let until = last.filter(|_| completed.len() == messages.len()).unwrap_or(end);
    let bytes: u64 = completed.iter().map(|(_, bytes)| bytes).sum();
    (until > first).then(|| 8.0 * bytes as f64 / (until - first).as_secs_f64())
}

/// From the first message posted to the last one completed, if all were.
fn span(messages: &[MessageOutcome]) -> Option<Duration> {
    let first = messages.iter().filter_map(|message| message.posted).min()?;
    let completed: Option<Vec<Duration>> = messages.iter().map(|message| message.completed).collect();
    Some(completed?.into_iter().max()? - first)
}

fn jain(rates: &[f64]) -> Option<f64> {
    let (sum, squares) =
        rates.iter().fold((0.0, 0.0), |(sum, squares), rate| (sum + rate, squares + rate * rate));
    (squares > 0.0 && rates.len() > 1).then(|| sum * sum / (rates.len() as f64 * squares))
}

fn least(values: &[f64]) -> Option<f64> {
    values.iter().copied().min_by(f64::total_cmp)
}

pub(super) fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// The standard deviation of a sample.
pub(super) fn deviation(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// By the nearest rank.
fn percentile(sorted: &[f64], percent: usize) -> Option<f64> {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

fn micros(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statistics_are_those_of_the_textbook() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!(mean(&values), Some(100.5));
        assert_eq!([50, 99, 100].map(|p| percentile(&values, p)), [Some(100.0), Some(198.0), Some(200.0)]);
        assert_eq!(percentile(&[7.0], 1), Some(7.0));
        assert_eq!((mean(&[]), percentile(&[], 50), deviation(&[1.0])), (None, None, None));
        assert_eq!(deviation(&[1.0, 3.0]), Some(2.0_f64.sqrt()));
        assert_eq!(jain(&[5.0, 5.0, 5.0]), Some(1.0));
        assert_eq!(jain(&[1.0, 0.0, 0.0, 0.0]), Some(0.25));
    }
}
