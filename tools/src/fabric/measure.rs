//! The numbers computed from the outcome of a run.

use std::ops::RangeInclusive;
use std::time::Duration;

use super::outcome::{FlowOutcome, MessageOutcome, Outcome, QueueOutcome};
use super::traffic::{Group, Offer};
use super::world::time_of;

/// A measured value with its label and unit.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Measure {
    /// The index of the traffic group; `None` for all traffic.
    pub(crate) group: Option<usize>,
    /// Its key in the JSON.
    pub(crate) key: &'static str,
    pub(crate) label: &'static str,
    /// `None` without a value, such as a completion time if nothing was completed.
    pub(crate) value: Option<f64>,
    /// A name in place of a number.
    pub(crate) name: Option<String>,
}

/// Classes of message sizes: the upper limit, and the keys and labels of their measures.
const SIZES: [(u64, [(&str, &str); 4]); 4] = [
    (
        10_000,
        [
            ("to_10kb_messages", "messages up to 10 KB"),
            ("to_10kb_slowdown_mean", "  slowdown mean"),
            ("to_10kb_slowdown_p50", "           p50"),
            ("to_10kb_slowdown_p99", "           p99"),
        ],
    ),
    (
        100_000,
        [
            ("to_100kb_messages", "messages up to 100 KB"),
            ("to_100kb_slowdown_mean", "  slowdown mean"),
            ("to_100kb_slowdown_p50", "           p50"),
            ("to_100kb_slowdown_p99", "           p99"),
        ],
    ),
    (
        1_000_000,
        [
            ("to_1mb_messages", "messages up to 1 MB"),
            ("to_1mb_slowdown_mean", "  slowdown mean"),
            ("to_1mb_slowdown_p50", "           p50"),
            ("to_1mb_slowdown_p99", "           p99"),
        ],
    ),
    (
        u64::MAX,
        [
            ("above_1mb_messages", "messages above 1 MB"),
            ("above_1mb_slowdown_mean", "  slowdown mean"),
            ("above_1mb_slowdown_p50", "           p50"),
            ("above_1mb_slowdown_p99", "           p99"),
        ],
    ),
];

/// Rows that a table omits if they are 0 in all columns.
pub(crate) const QUIET: [&str; 5] =
    ["drops_buffer", "drops_link", "drops_no_way", "drops_watchdog", "drops_host"];

/// The measures of a run. Runs with the same groups have the same measures in the same order.
pub(crate) fn measures(outcome: &Outcome, groups: &[Group], has_failures: bool) -> Vec<Measure> {
    let mut measures = Vec::new();
    for (number, group) in groups.iter().enumerate() {
        let mut add = |key, label, value: Option<f64>| {
            let value = value.filter(|value| value.is_finite());
            measures.push(Measure { group: Some(number), key, label, value, name: None });
        };
        let flows = &outcome.flows[group.flows.clone()];
        let messages = &outcome.messages[group.messages.clone()];
        if let Some(offer) = group.offer {
            let Offered { offered, goodput } = Offered::of(offer, outcome, flows, messages);
            add("offered_gbps", "offered, Gb/s", offered.map(|rate| rate / 1e9));
            let percent = offered.map(|rate| 100.0 * rate / offer.capacity);
            add("offered_percent", "  of the senders' links, %", percent);
            add("goodput_gbps", "goodput while offered, Gb/s", goodput.map(|rate| rate / 1e9));
        } else {
            let rates: Vec<f64> = flows.iter().filter_map(FlowOutcome::goodput).collect();
            let goodput = match group.is_endless {
                true => (!rates.is_empty()).then(|| rates.iter().sum()),
                false => rate(flows, messages, outcome.duration),
            };
            add("goodput_gbps", "goodput, Gb/s", goodput.map(|rate: f64| rate / 1e9));
            if flows.len() > 1 {
                add(
                    "goodput_least_gbps",
                    "  of the slowest flow, Gb/s",
                    least(&rates).map(|rate| rate / 1e9),
                );
                add("jain", "Jain's index", jain(&rates));
            }
        }
        if has_failures {
            let mut stills: Vec<f64> = flows.iter().map(|flow| micros(flow.still)).collect();
            stills.sort_unstable_by(f64::total_cmp);
            add("still_max_us", "a flow stood still at most, us", stills.last().copied());
            add("still_p50_us", "  median of the flows, us", percentile(&stills, 50));
        }
        if group.is_endless {
            continue;
        }
        let mut times: Vec<f64> = messages.iter().filter_map(MessageOutcome::time).map(micros).collect();
        times.sort_unstable_by(f64::total_cmp);
        let slowdowns = slowdowns(messages, 0..=u64::MAX);
        add("fct_mean_us", "FCT mean, us", mean(&times));
        add("fct_p50_us", "    p50, us", percentile(&times, 50));
        add("fct_p99_us", "    p99, us", percentile(&times, 99));
        add("fct_max_us", "    max, us", times.last().copied());
        add("slowdown_mean", "slowdown mean", mean(&slowdowns));
        add("slowdown_p50", "         p50", percentile(&slowdowns, 50));
        add("slowdown_p99", "         p99", percentile(&slowdowns, 99));
        let mut least = 0;
        for (most, [count, mean_, p50, p99]) in SIZES {
            if group.offer.is_some_and(|offer| offer.has_sizes) {
                let slowdowns = self::slowdowns(messages, least..=most);
                add(count.0, count.1, Some(slowdowns.len() as f64));
                add(mean_.0, mean_.1, mean(&slowdowns));
                add(p50.0, p50.1, percentile(&slowdowns, 50));
                add(p99.0, p99.1, percentile(&slowdowns, 99));
            }
            least = most.saturating_add(1);
        }
        add("all_us", "from first to last, us", span(messages).map(micros));
        add("completed", "messages completed", Some(times.len() as f64));
        add("unfinished", "messages unfinished", Some((messages.len() - times.len()) as f64));
    }
    let mut add = |key, label, value: f64| {
        let value = Some(value).filter(|value| value.is_finite());
        measures.push(Measure { group: None, key, label, value, name: None });
    };
    let busiest = outcome.queues.iter().max_by(|a, b| a.used.total_cmp(&b.used));
    add("busiest_used_percent", "  used, %", busiest.map_or(0.0, |queue| 100.0 * queue.used));
    let longest = outcome.longest_queues().into_iter().next();
    let sum = |of: fn(&QueueOutcome) -> u64| outcome.queues.iter().map(of).sum::<u64>() as f64;
    add("queue_mean_kb", "  mean, KB", longest.map_or(0.0, |queue| queue.mean / 1e3));
    add("queue_p99_kb", "  p99, KB", longest.map_or(0.0, |queue| queue.p99 as f64 / 1e3));
    add("queue_max_kb", "  max, KB", longest.map_or(0.0, |queue| queue.max as f64 / 1e3));
    add("marked", "frames marked", sum(|queue| queue.marked));
    add("cnps", "CNPs", outcome.hosts.cnps_sent as f64);
    let paused: Duration = outcome.pauses.iter().map(|link| link.paused).sum();
    add("pauses", "pauses, whole run", outcome.pauses.iter().map(|link| link.pauses).sum::<u64>() as f64);
    add("paused_us", "  sum of all links, us", micros(paused));
    let between: Duration =
        outcome.pauses.iter().filter(|link| link.is_between_switches).map(|link| link.paused).sum();
    add("paused_between_switches_us", "  of those between switches, us", micros(between));
    add("drops", "frames dropped", outcome.fabric.dropped() as f64);
    let causes = outcome.fabric;
    add("drops_buffer", "  no room in a switch", causes.buffer_dropped as f64);
    add("drops_link", "  lost on a link", causes.lost as f64);
    add("drops_no_way", "  no path to their host", causes.unroutable as f64);
    add("drops_watchdog", "  paused for too long", causes.storm_dropped as f64);
    add("drops_host", "  no room at their host", causes.host_dropped as f64);
    add("retransmitted", "packets retransmitted", outcome.hosts.retransmitted as f64);
    add("timeouts", "ACK timeouts", outcome.hosts.timeouts as f64);
    let failed = outcome.flows.iter().filter(|flow| flow.failure.is_some()).count();
    add("failed_queue_pairs", "queue pairs failed", failed as f64);
    add("time_ms", "virtual time, ms", micros(outcome.duration) / 1e3);
    let mut name = |before, key, label, queue: Option<&QueueOutcome>| {
        let at = measures.iter().position(|measure| measure.key == before).unwrap_or(measures.len());
        let name = Some(queue.map_or("-".to_owned(), |queue| queue.name.clone()));
        measures.insert(at, Measure { group: None, key, label, value: None, name });
    };
    name("busiest_used_percent", "busiest_port", "busiest switch port", busiest);
    name("queue_mean_kb", "longest_queue", "longest queue", longest);
    measures
}

/// The rate of random messages, in bit/s.
struct Offered {
    offered: Option<f64>,
    goodput: Option<f64>,
}

impl Offered {
    /// Counts the time in which messages were posted. The time after it depends on how long the last ones took.
    fn of(offer: Offer, outcome: &Outcome, flows: &[FlowOutcome], messages: &[MessageOutcome]) -> Offered {
        let is_done = messages.iter().all(|message| message.completed.is_some());
        let until = if is_done { offer.until } else { offer.until.min(outcome.duration) };
        if until <= offer.from {
            return Offered { offered: None, goodput: None };
        }
        let seconds = (until - offer.from).as_secs_f64();
        let posted = messages.iter().filter(|message| message.posted.is_some());
        let bytes: u64 = posted.map(|message| message.bytes).sum();
        let mut bits = 0.0;
        let mut before = Duration::ZERO;
        for (sample, time) in outcome.times.iter().enumerate() {
            let part = (*time).min(until).saturating_sub(before.max(offer.from));
            let rates = flows.iter().filter_map(|flow| flow.goodputs.get(sample));
            bits += rates.sum::<f64>() * part.as_secs_f64();
            before = *time;
        }
        Offered { offered: Some(8.0 * bytes as f64 / seconds), goodput: Some(bits / seconds) }
    }
}

/// The slowdowns of messages with this many bytes, sorted.
fn slowdowns(messages: &[MessageOutcome], bytes: RangeInclusive<u64>) -> Vec<f64> {
    let slowdown =
        |message: &MessageOutcome| Some(message.time()?.as_secs_f64() / message.alone.as_secs_f64());
    let of_size = messages.iter().filter(|message| bytes.contains(&message.bytes));
    let mut slowdowns: Vec<f64> = of_size.filter_map(slowdown).collect();
    slowdowns.sort_unstable_by(f64::total_cmp);
    slowdowns
}

/// The bytes that arrived, divided by the time from the first post to the last completion, or to the end.
fn rate(flows: &[FlowOutcome], messages: &[MessageOutcome], end: Duration) -> Option<f64> {
    let time = time_of(messages.iter(), end);
    let bytes: u64 = flows.iter().map(|flow| flow.bytes).sum();
    (!time.is_zero()).then(|| 8.0 * bytes as f64 / time.as_secs_f64())
}

/// From the first post to the last completion, if all messages were completed.
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

/// By the nearest-rank method.
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
