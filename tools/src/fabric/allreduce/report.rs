//! The results, as text and as JSON.

use std::fmt::Write;
use std::time::Duration;

use ferroce_collectives::{Algorithm, Pace};
use serde_json::{Value, json};

use super::section::{AllreduceSection, over_the_fabric};
use super::sweep::{Cell, Excess, Simulated, Size, Sweep};
use crate::fabric::description::Description;
use crate::fabric::report::number;
use crate::quantity::Bytes;

/// If the chosen algorithm is slower than the best by more than this fraction, the report lists the size.
const NEAR: f64 = 0.10;

/// If the cost model deviates from the simulation by more than this fraction, the report says so.
const FAR: f64 = 0.20;

/// A setting and its results.
pub(super) struct Case {
    pub(super) label: String,
    pub(super) sweep: Sweep,
}

/// One table for each setting.
pub(super) fn text(section: &AllreduceSection, ranks: usize, cases: &[Case]) -> String {
    let each = section.ranks_per_host;
    let rails = if section.rails == 1 { String::new() } else { format!("{} rails, ", section.rails) };
    let mut text = format!("allreduce {ranks} ranks, {rails}{each} on a host, u64, in place; ");
    let rounds =
        if section.count == 1 { String::new() } else { format!("mean of {} rounds, ", section.count) };
    let _ = writeln!(text, "{rounds}µs simulated / µs by the cost model");
    for case in cases {
        text.push('\n');
        if !case.label.is_empty() {
            let _ = writeln!(text, "{}", case.label);
        }
        case.write(&mut text);
    }
    text
}

impl Case {
    fn write(&self, text: &mut String) {
        let Sweep { model, sizes, checked, .. } = &self.sweep;
        let Some(model) = model else {
            text.push_str("nothing is known\n");
            return;
        };
        let _ = writeln!(text, "measured  {model}");
        let columns: Vec<usize> = (0..over_the_fabric().count())
            .filter(|at| sizes.iter().any(|size| size.cells[*at].simulated != Simulated::No))
            .collect();
        let mut rows = vec![vec!["size".to_owned()]];
        rows[0].extend(
            over_the_fabric()
                .enumerate()
                .filter(|(at, _)| columns.contains(at))
                .map(|(_, of)| of.to_string()),
        );
        rows[0].extend(["the library's choice".to_owned(), "above the best".to_owned()]);
        for size in sizes {
            let mut row = vec![Bytes(size.bytes).to_string()];
            row.extend(columns.iter().map(|at| size.cells[*at].text()));
            row.push(size.choice());
            row.push(match (size.excess(), size.best()) {
                (Some(Excess { above, is_least }), Some((best, _))) if best != size.chosen => {
                    format!("{}{:.1} % ({best})", if is_least { "> " } else { "" }, 100.0 * above)
                }
                (Some(_), _) => "it is the best".to_owned(),
                (None, _) => "-".to_owned(),
            });
            rows.push(row);
        }
        write_columns(text, &rows);
        if sizes.iter().flat_map(|size| &size.cells).any(|cell| matches!(cell.simulated, Simulated::Above(_)))
        {
            text.push_str(
                "> not simulated: the bytes over the link of a rank alone take longer than another \
                algorithm did\n",
            );
        }
        let needed = sizes.iter().flat_map(|size| &size.cells).filter_map(|cell| match cell.simulated {
            Simulated::TooMuch(bytes) => Some(bytes),
            _ => None,
        });
        if let Some(needed) = needed.max() {
            let _ = writeln!(
                text,
                "* not simulated: the ranks would need {} MB for messages of other ranks; a smaller --chunk needs less",
                needed / 1_000_000
            );
        }
        let not_checked = sizes.iter().map(|size| size.bytes).filter(|bytes| bytes > checked).min();
        match not_checked {
            None => text.push_str("elements  checked, each one at all ranks\n"),
            Some(least) => {
                let _ = writeln!(
                    text,
                    "elements  checked below {0}; not checked from {0} on, where all ranks share one buffer",
                    Bytes(least)
                );
            }
        }
        let _ = writeln!(text, "choice    {}", self.verdict());
        for algorithm in over_the_fabric() {
            if let Some(note) = self.misjudged(algorithm) {
                let _ = writeln!(text, "note      {note}");
            }
        }
        let Sweep { events, trace_hash, wall, .. } = &self.sweep;
        let _ = writeln!(
            text,
            "took      {} s, {events} events, trace hash {trace_hash:016x}",
            number(wall.as_secs_f64())
        );
    }

    fn verdict(&self) -> String {
        let sizes = || self.sweep.sizes.iter().filter_map(|size| Some((size, size.excess()?)));
        let Some(worst) = sizes().map(|(_, excess)| excess).reduce(Excess::max) else {
            return "unknown: the algorithm that the library chooses was not simulated".to_owned();
        };
        let compared = sizes()
            .all(|(size, _)| size.cells.iter().filter(|cell| cell.simulated != Simulated::No).count() > 1);
        if !compared {
            return "was not compared with others at each size".to_owned();
        }
        let far: Vec<String> = sizes()
            .filter(|(_, excess)| excess.above > NEAR)
            .map(|(size, _)| Bytes(size.bytes).to_string())
            .collect();
        let percent = 100.0 * worst.above;
        let mut text = match worst.is_least {
            false => format!("within {percent:.1} % of the best"),
            true => format!("at one size at least {percent:.1} % above the best"),
        };
        if !far.is_empty() {
            let _ = write!(text, "; more than {:.0} % above it at {}", 100.0 * NEAR, far.join(", "));
        }
        let unknown = self.sweep.sizes.iter().filter(|size| size.excess().is_none());
        let unknown: Vec<String> = unknown.map(|size| Bytes(size.bytes).to_string()).collect();
        if !unknown.is_empty() {
            let _ = write!(
                text,
                "; unknown at {}: what the library chooses was not simulated",
                unknown.join(", ")
            );
        }
        text
    }

    /// Where the cost model of an algorithm deviates far from the simulation, if anywhere.
    fn misjudged(&self, algorithm: Algorithm) -> Option<String> {
        let mut sizes = Vec::new();
        let mut worst = 0.0_f64;
        for size in &self.sweep.sizes {
            for cell in size.cells.iter().filter(|cell| cell.algorithm == algorithm) {
                let (Simulated::Time(time), Ok(model)) = (cell.simulated, cell.model) else { continue };
                let off = model.as_secs_f64() / time.as_secs_f64() - 1.0;
                if off.abs() > FAR {
                    sizes.push(Bytes(size.bytes).to_string());
                    worst = if off.abs() > worst.abs() { off } else { worst };
                }
            }
        }
        let what = format!(
            "the cost model is more than {:.0} % off for {algorithm} at {}",
            100.0 * FAR,
            sizes.join(", ")
        );
        (!sizes.is_empty()).then(|| format!("{what}, by {:+.0} % at most", 100.0 * worst))
    }
}

impl Size {
    /// The library's choice, with the cost model's time if nothing was simulated.
    fn choice(&self) -> String {
        let chosen = self.cells.iter().find(|cell| cell.algorithm == self.chosen);
        match chosen.map(|cell| (cell.simulated, cell.model)) {
            Some((Simulated::No, Ok(model))) => {
                format!("{} ({} by the model, not simulated)", self.chosen, micros(model))
            }
            _ => self.chosen.to_string(),
        }
    }
}

impl Cell {
    fn text(&self) -> String {
        let simulated = match self.simulated {
            Simulated::Time(time) => micros(time),
            Simulated::Above(time) => format!("> {}", micros(time)),
            Simulated::TooMuch(_) => "*".to_owned(),
            Simulated::No => return "-".to_owned(),
        };
        match self.model {
            Ok(model) => format!("{simulated} / {}", micros(model)),
            Err(_) => simulated,
        }
    }
}

fn micros(time: Duration) -> String {
    number(time.as_nanos() as f64 / 1e3)
}

/// The first column is left-aligned, the others are right-aligned.
fn write_columns(text: &mut String, rows: &[Vec<String>]) {
    let width = |at: usize| {
        rows.iter().filter_map(|row| row.get(at)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    for row in rows {
        for (at, cell) in row.iter().enumerate() {
            let width = width(at);
            let _ = if at == 0 { write!(text, "{cell:<width$}") } else { write!(text, "  {cell:>width$}") };
        }
        text.push('\n');
    }
}

/// The report as JSON.
pub(super) fn json(
    description: &Description,
    command: &str,
    interrupted: Option<&str>,
    notes: &[String],
    cases: &[Case],
) -> Value {
    let cell = |cell: &Cell| {
        let (time, least, needed) = match cell.simulated {
            Simulated::Time(time) => (Some(time), None, None),
            Simulated::Above(least) => (None, Some(least), None),
            Simulated::TooMuch(bytes) => (None, None, Some(bytes)),
            Simulated::No => (None, None, None),
        };
        let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
        json!({
            "algorithm": cell.algorithm.to_string(), "time_us": time.map(micros), "at_least_us": least.map(micros), "needed_bytes": needed,
            "model_us": cell.model.ok().map(micros), "problem": cell.model.err(),
        })
    };
    let pace = |pace: Pace| json!({ "latency_us": pace.latency.as_nanos() as f64 / 1e3, "bytes_per_second": pace.bytes_per_second });
    let case = |case: &Case| {
        let Sweep { model, sizes, checked, events, trace_hash, wall } = &case.sweep;
        let size = |size: &Size| {
            json!({
                "bytes": size.bytes, "checked": size.bytes <= *checked, "chosen": size.chosen.to_string(),
                "best": size.best().map(|(best, _)| best.to_string()), "above_best": size.excess().map(|excess| excess.above),
                "above_best_at_least": size.excess().is_some_and(|excess| excess.is_least),
                "algorithms": size.cells.iter().map(cell).collect::<Vec<_>>(),
            })
        };
        json!({
            "label": case.label, "trace_hash": format!("{trace_hash:016x}"), "events": events,
            "wall_ms": wall.as_secs_f64() * 1e3,
            "model": model.map(|model| json!({
                "latency_us": model.latency.as_nanos() as f64 / 1e3, "overhead_us": model.overhead.as_nanos() as f64 / 1e3,
                "bytes_per_second": model.bytes_per_second, "exchanged_per_second": model.exchanged_per_second,
                "halving": pace(model.halving), "hosts": pace(model.hosts),
            })),
            "sizes": sizes.iter().map(size).collect::<Vec<_>>(),
        })
    };
    json!({
        "description": description, "command": command, "interrupted": interrupted.is_some(), "left_out": interrupted, "notes": notes,
        "peak_memory_kb": crate::fabric::json::peak_memory_kb(), "cases": cases.iter().map(case).collect::<Vec<_>>(),
    })
}
