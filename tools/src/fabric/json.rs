//! The report as JSON.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::description::Description;
use super::outcome::{Outcome, QueueOutcome};
use super::report::{Case, Run};

/// All runs of all settings.
#[derive(Serialize)]
pub(crate) struct Report<'a> {
    /// The description with all options applied except those of `--compare`.
    pub(crate) description: &'a Description,
    /// The command that repeats all runs.
    pub(crate) command: &'a str,
    pub(crate) interrupted: bool,
    /// The results that an interruption left out.
    pub(crate) left_out: Option<&'a str>,
    /// Notes on misleading settings and results.
    pub(crate) notes: &'a [String],
    /// The process's peak memory so far, if the kernel reports it.
    peak_memory_kb: Option<u64>,
    cases: Vec<Value>,
}

impl<'a> Report<'a> {
    pub(crate) fn new(
        description: &'a Description,
        command: &'a str,
        interrupted: Option<&'a str>,
        notes: &'a [String],
        cases: &[Case],
        with_series: bool,
    ) -> Report<'a> {
        let cases = cases.iter().map(|case| {
            let runs: Vec<Value> = case.runs.iter().map(|run| self::run(run, with_series)).collect();
            json!({ "label": case.label, "runs": runs })
        });
        Report {
            description,
            command,
            interrupted: interrupted.is_some(),
            left_out: interrupted,
            notes,
            peak_memory_kb: peak_memory_kb(),
            cases: cases.collect(),
        }
    }
}

/// The peak memory of this process, as the kernel reports it.
pub(crate) fn peak_memory_kb() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse().ok()
}

fn run(run: &Run, with_series: bool) -> Value {
    let Run { seed, groups, measures, outcome, command, .. } = run;
    let mut all = Map::new();
    let mut of_groups: Vec<Map<String, Value>> = groups.iter().map(|_| Map::new()).collect();
    for measure in measures {
        let place = measure.group.map_or(&mut all, |group| &mut of_groups[group]);
        let value = measure.name.as_ref().map_or(json!(measure.value), |name| json!(name));
        place.insert(measure.key.to_owned(), value);
    }
    let named = groups.iter().zip(of_groups).map(|(group, measures)| (group.name.clone(), measures));
    let mut value = json!({
        "seed": seed,
        "trace_hash": format!("{:016x}", outcome.trace_hash),
        "command": command,
        "measures": all,
        "traffic": named.collect::<BTreeMap<_, _>>(),
        "flows": flows(outcome),
        "messages": messages(outcome),
        "queues": outcome.queues.iter().map(queue).collect::<Vec<_>>(),
        "pauses": outcome.pauses.iter().map(|link| json!({
            "link": link.name, "between_switches": link.is_between_switches, "pauses": link.pauses, "paused_us": link.paused.as_nanos() as f64 / 1e3,
        })).collect::<Vec<_>>(),
        "measured_ms": outcome.measured.as_secs_f64() * 1e3,
        "events": outcome.events,
        "polls": outcome.polls,
        "wall_ms": outcome.wall.as_secs_f64() * 1e3,
        "set_up_ms": outcome.set_up.as_secs_f64() * 1e3,
    });
    if with_series {
        value["series"] = series(outcome);
    }
    value
}

fn flows(outcome: &Outcome) -> Vec<Value> {
    let flow = |flow: &super::outcome::FlowOutcome| {
        json!({
            "from": flow.from, "to": flow.to, "bytes": flow.bytes,
            "goodput_gbps": flow.goodput().map(|rate| rate / 1e9),
            "still_us": micros(flow.still), "still_at_end_us": micros(flow.still_at_end), "failure": flow.failure,
        })
    };
    outcome.flows.iter().map(flow).collect()
}

fn micros(time: std::time::Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn messages(outcome: &Outcome) -> Vec<Value> {
    let message = |message: &super::outcome::MessageOutcome| {
        json!({
            "flow": message.flow, "bytes": message.bytes, "posted_us": message.posted.map(micros),
            "fct_us": message.time().map(micros), "alone_us": micros(message.alone),
        })
    };
    outcome.messages.iter().map(message).collect()
}

fn queue(queue: &QueueOutcome) -> Value {
    json!({
        "port": queue.name, "used": queue.used, "mean": queue.mean, "p99": queue.p99, "max": queue.max, "marked": queue.marked,
        "dropped": queue.dropped,
    })
}

/// The series of samples: times in µs, rates in bit/s, queues in bytes.
fn series(outcome: &Outcome) -> Value {
    let times: Vec<f64> = outcome.times.iter().map(|time| time.as_nanos() as f64 / 1e3).collect();
    let goodputs: Vec<&Vec<f64>> = outcome.flows.iter().map(|flow| &flow.goodputs).collect();
    let rates: Vec<&Vec<f64>> = outcome.flows.iter().map(|flow| &flow.rates).collect();
    let queues: BTreeMap<&str, &Vec<u64>> =
        outcome.queues.iter().map(|queue| (queue.name.as_str(), &queue.lengths)).collect();
    json!({ "time_us": times, "goodput": goodputs, "rate": rates, "queue": queues })
}
