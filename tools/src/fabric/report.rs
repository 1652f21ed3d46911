//! The printed report: a table and the text around it.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::time::Duration;

use super::compile::Compiled;
use super::description::Description;
use super::heading::Heading;
use super::json::peak_memory_kb;
use super::measure::{Measure, QUIET, deviation, mean, measures};
use super::memory::Memory;
use super::outcome::{LinkPauses, Outcome};
use super::traffic::Group;
use crate::quantity::Time;

/// Runs of the same settings with different seeds.
pub(crate) struct Case {
    pub(crate) label: String,
    pub(crate) runs: Vec<Run>,
}

/// One run, with its seed.
pub(crate) struct Run {
    pub(crate) seed: u64,
    /// Its traffic: random choices differ between seeds.
    pub(crate) groups: Vec<Group>,
    pub(crate) measures: Vec<Measure>,
    pub(crate) outcome: Outcome,
    /// The command that repeats this run alone.
    pub(crate) command: String,
    /// The work that was not completed.
    complaint: Option<String>,
    /// The number of stalled flows at the end.
    still: Option<String>,
}

/// The data of a run to keep in addition to its measures: only what the report shows, since there may be thousands of
/// runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Keeping {
    /// Flows, messages, queues and links.
    pub(crate) details: bool,
    /// Rates and queues, sample by sample.
    pub(crate) series: bool,
}

/// The most columns side by side.
const COLUMNS: usize = 8;
/// The most queues, and links of hosts, that are listed.
const NAMED: usize = 5;
/// The most links between switches that are listed. There are more of these, since their pauses affect unrelated flows.
const BETWEEN_SWITCHES: usize = 64;

/// The settings. With several settings, those of the first; the report says what differs.
pub(crate) fn heading(description: &Description, memory: &Memory, labels: &[&str]) -> String {
    let first = match labels {
        [first, _, ..] => format!("\nthis is '{first}'; the others are labelled by their differences"),
        _ => String::new(),
    };
    format!("{}{first}", Heading(description, memory))
}

/// The measures as rows, the cases as columns.
pub(crate) fn table(cases: &[Case], groups: &[String]) -> String {
    let mut text = String::new();
    for (at, cases) in cases.chunks(COLUMNS).enumerate() {
        if at > 0 {
            text.push('\n');
        }
        block(&mut text, cases, groups);
    }
    text
}

fn block(text: &mut String, cases: &[Case], groups: &[String]) {
    let Some(rows) = cases.first().and_then(|case| case.runs.first()).map(|run| &run.measures) else {
        return;
    };
    let mut lines: Vec<Vec<String>> = Vec::new();
    let heads: Vec<Vec<&str>> = cases.iter().map(|case| case.label.split_whitespace().collect()).collect();
    for line in 0..heads.iter().map(Vec::len).max().unwrap_or(0) {
        let mut cells = vec![String::new()];
        cells.extend(heads.iter().map(|head| head.get(line).copied().unwrap_or_default().to_owned()));
        lines.push(cells);
    }
    let mut group = None;
    for (at, row) in rows.iter().enumerate() {
        if QUIET.contains(&row.key)
            && cases.iter().all(|case| case.values(at).iter().all(|value| *value == 0.0))
        {
            continue;
        }
        if groups.len() > 1 && row.group != group {
            group = row.group;
            lines.push(vec![group.map_or("all traffic".to_owned(), |group| groups[group].clone())]);
        }
        let indent = if groups.len() > 1 { "  " } else { "" };
        let mut cells = vec![format!("{indent}{}", row.label)];
        cells.extend(cases.iter().map(|case| case.name(at).unwrap_or_else(|| cell(&case.values(at)))));
        lines.push(cells);
    }
    let columns = cases.len() + 1;
    let width = |column: usize| {
        lines
            .iter()
            .filter(|line| line.len() == columns)
            .map(|line| line[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    for line in lines {
        let mut cells = line.iter().zip(&widths);
        let mut printed = String::new();
        if let Some((label, width)) = cells.next() {
            printed += &format!("{label:width$}");
        }
        for (cell, width) in cells {
            let pad = width - cell.chars().count() + 2;
            printed += &format!("{:pad$}{cell}", "");
        }
        text.push_str(printed.trim_end());
        text.push('\n');
    }
}

impl Case {
    /// A measure of all runs.
    pub(crate) fn values(&self, at: usize) -> Vec<f64> {
        self.runs.iter().filter_map(|run| run.measures.get(at)?.value).collect()
    }

    /// The name that is the value of a measure, or the number of different names in the runs.
    fn name(&self, at: usize) -> Option<String> {
        let names: BTreeSet<&String> =
            self.runs.iter().filter_map(|run| run.measures.get(at)?.name.as_ref()).collect();
        let first = names.first()?.to_string();
        Some(if names.len() > 1 { format!("{} ports", names.len()) } else { first })
    }

    /// Details of the first run: the trace hash; for a single case also queues and pauses.
    pub(crate) fn details(&self, is_alone: bool) -> String {
        let Some(Run { outcome, seed, .. }) = self.runs.first() else { return String::new() };
        let mut text = format!(
            "{}trace hash {:016x}; {} events in {:.2} s, {:.2} s of set-up\n",
            self.prefix(*seed),
            outcome.trace_hash,
            outcome.events,
            outcome.wall.as_secs_f64(),
            outcome.set_up.as_secs_f64(),
        );
        let queues = outcome.longest_queues();
        if !is_alone {
            if let Some(queue) = queues.first() {
                let _ = writeln!(text, "  longest queue: {}", queue.name);
            }
            return text;
        }
        for queue in queues.iter().take(NAMED) {
            let _ = writeln!(
                text,
                "  queue {}: mean {} KB, p99 {} KB, max {} KB; {} marked, {} dropped",
                queue.name,
                number(queue.mean / 1e3),
                number(queue.p99 as f64 / 1e3),
                number(queue.max as f64 / 1e3),
                queue.marked,
                queue.dropped
            );
        }
        let more = |text: &mut String, count: usize, most: usize, what: &str| {
            if count > most {
                let _ = writeln!(text, "  and {} more {what}; --json has all", count - most);
            }
        };
        more(&mut text, queues.len(), NAMED, "queues");
        let (between, others): (Vec<&LinkPauses>, Vec<&LinkPauses>) =
            outcome.pauses.iter().partition(|link| link.is_between_switches);
        for (links, most, what) in [(between, BETWEEN_SWITCHES, " between switches:"), (others, NAMED, "")] {
            for link in links.iter().take(most) {
                let micros = number(link.paused.as_nanos() as f64 / 1e3);
                let _ = writeln!(
                    text,
                    "  paused{what} {}: {} times, {micros} us in the whole run",
                    link.name, link.pauses
                );
            }
            more(&mut text, links.len(), most, "paused links");
        }
        text
    }
}

impl Case {
    /// The work that was not completed, for each run.
    pub(crate) fn complaints(&self) -> Vec<String> {
        self.runs
            .iter()
            .filter_map(|run| Some(format!("{}{}", self.prefix(run.seed), run.complaint.as_ref()?)))
            .collect()
    }

    /// A note on stalled flows, from the first run that has any.
    pub(crate) fn note(&self) -> Option<String> {
        let mut of = self.runs.iter().filter_map(|run| Some((run.seed, run.still.as_ref()?)));
        let (seed, still) = of.next()?;
        let more = match of.count() {
            0 => String::new(),
            more => format!("; with {more} more seeds some do as well"),
        };
        let prefix =
            if self.runs.len() > 1 || !self.label.is_empty() { self.prefix(seed) } else { String::new() };
        Some(format!("{prefix}{still}{more}"))
    }

    fn prefix(&self, seed: u64) -> String {
        let label = if self.label.is_empty() { String::new() } else { format!("{}, ", self.label) };
        format!("{label}seed {seed}: ")
    }
}

impl Run {
    pub(crate) fn new(compiled: &Compiled, mut outcome: Outcome, command: String, keeping: Keeping) -> Run {
        let Compiled { plan, groups } = compiled;
        let measures = measures(&outcome, groups, !plan.failures.is_empty());
        let complaint = complaint(&outcome, groups);
        let still = still(&outcome);
        if !keeping.series {
            outcome.forget_series();
        }
        if !keeping.details {
            outcome.forget_details();
        }
        Run { seed: plan.seed, groups: groups.clone(), measures, outcome, command, complaint, still }
    }
}

/// The number of stalled flows at the end of a run, and since when.
fn still(outcome: &Outcome) -> Option<String> {
    let still = outcome.still_flows();
    let longest = still.iter().max_by_key(|flow| flow.still_at_end)?;
    let (count, of, from, to) = (still.len(), outcome.flows.len(), longest.from, longest.to);
    let time = legible_time(longest.still_at_end);
    Some(format!("{count} of {of} flows are stalled at the end, host{from} to host{to} for {time}"))
}

/// The work that was not completed.
fn complaint(outcome: &Outcome, groups: &[Group]) -> Option<String> {
    let failed = outcome.flows.iter().filter_map(|flow| Some((flow, flow.failure.as_ref()?)));
    let failed: Vec<_> = failed.collect();
    let messages = outcome.messages.len();
    let unfinished = outcome.messages.iter().filter(|message| message.completed.is_none()).count();
    let mut complaints = Vec::new();
    if outcome.fabric.delivered == 0 {
        complaints.push("nothing was delivered".to_owned());
    }
    if outcome.measured.is_zero() && groups.iter().any(|group| group.is_endless) {
        complaints.push("nothing was measured: it ended before the warm-up".to_owned());
    }
    if let Some((flow, status)) = failed.first() {
        let (count, from, to) = (failed.len(), flow.from, flow.to);
        complaints
            .push(format!("{count} queue pairs failed, the first from host{from} to host{to}: {status}"));
    }
    if unfinished > 0 {
        let time = legible_time(outcome.duration);
        let more = if failed.is_empty() { "; --limit gives more time" } else { "" };
        complaints.push(format!("{unfinished} of {messages} messages were not completed by {time}{more}"));
    }
    (!complaints.is_empty()).then(|| complaints.join("; "))
}

/// A time as text, rounded if it is long.
pub(crate) fn legible_time(time: Duration) -> String {
    let nanos = time.as_nanos() as u64;
    match nanos {
        ..1_000_000 => Time(Duration::from_nanos(nanos)).to_string(),
        _ if nanos.is_multiple_of(1_000_000) => Time(time).to_string(),
        _ => format!("{}ms", number(nanos as f64 / 1e6)),
    }
}

/// The process's peak memory, as the kernel reports it.
pub(crate) fn memory() -> String {
    let megabytes = peak_memory_kb().map_or("?".to_owned(), |kilobytes| (kilobytes / 1000).to_string());
    format!("{megabytes} MB of memory in all")
}

/// A value, or the mean of several with their standard deviation.
fn cell(values: &[f64]) -> String {
    match (mean(values), deviation(values)) {
        (None, _) => "-".into(),
        (Some(mean), None) => number(mean),
        (Some(mean), Some(deviation)) => format!("{} ±{}", number(mean), number(deviation)),
    }
}

/// A number with about four digits.
pub(crate) fn number(value: f64) -> String {
    match value.abs() {
        _ if !value.is_finite() => "-".to_owned(),
        _ if value == value.round() && value.abs() < 1e15 => format!("{value:.0}"),
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 100.0 => format!("{value:.1}"),
        size if size >= 1.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}
