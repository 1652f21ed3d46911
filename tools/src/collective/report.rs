//! The results, as text and as JSON.

use std::fmt;
use std::path::PathBuf;
use std::process::ExitCode;

use ferroce_collectives::DataType;
use serde::{Deserialize, Serialize};

use super::values::text_of;
use super::{Args, plot};
use crate::failure::Failure;
use crate::output::{JsonArg, note, say};

/// An event that a rank reports. Only rank 0 reports events other than failures.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Event {
    /// All ranks have met.
    Header(Header),
    /// One size was measured.
    Row(Row),
    /// The rank has finished.
    Finished,
    /// The rank can't continue.
    Failed {
        /// Whether the arguments are the cause.
        is_usage: bool,
        reason: String,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Header {
    /// The launcher that started the ranks.
    pub(super) launcher: Option<String>,
    /// The location of each rank.
    pub(super) places: Vec<String>,
    /// The machine of rank 0.
    pub(super) machine: String,
    /// The instruction set that reductions use on that machine, or the GPU.
    pub(super) reduces_by: String,
    /// At every size, the ranks work on shared memory, without packets.
    pub(super) sends_nothing: bool,
    pub(super) sizes: usize,
}

/// The results of one size.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) bytes: u64,
    pub(super) count: u64,
    pub(super) algorithm: String,
    /// The cost of each algorithm, with `--explain`.
    pub(super) explanation: Option<String>,
    pub(super) out_of_place: Option<Timing>,
    pub(super) in_place: Option<Timing>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Timing {
    /// The mean of the iterations at the slowest rank.
    pub(super) time_us: f64,
    /// The minimum of the same iterations at the same rank.
    pub(super) min_us: f64,
    pub(super) median_us: f64,
    pub(super) max_us: f64,
    pub(super) algbw_gb_s: f64,
    pub(super) busbw_gb_s: f64,
    /// Wrong elements of all ranks; `None` if the output was not checked.
    pub(super) wrong: Option<u64>,
    pub(super) first_wrong: Option<Wrong>,
}

/// An output element with a wrong value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wrong {
    pub(super) rank: u32,
    pub(super) index: u64,
    /// As bits.
    pub(super) expected: u64,
    pub(super) got: u64,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    operation: String,
    ranks: usize,
    launcher: Option<&'a str>,
    places: &'a [String],
    machine: &'a str,
    reduces_by: &'a str,
    /// The ranks use shared memory, and no packet is sent.
    sends_nothing: bool,
    data_type: String,
    reduction: Option<String>,
    root: Option<u32>,
    iterations: u32,
    warmup: u32,
    check: bool,
    forced: Vec<String>,
    results: &'a [Row],
    mean_busbw_gb_s: f64,
    /// Number of elements; null if the output was not checked.
    wrong: Option<u64>,
}

/// Prints the events of rank 0.
pub(super) struct Printer {
    args: Args,
    json: JsonArg,
    svg: Option<PathBuf>,
    header: Option<Header>,
    rows: Vec<Row>,
}

impl Printer {
    pub(super) fn new(args: &Args) -> Printer {
        let (json, svg) = (args.json.clone(), args.svg.clone());
        Printer { args: args.clone(), json, svg, header: None, rows: Vec::new() }
    }

    pub(super) fn hear(&mut self, event: Event) -> Result<(), Failure> {
        match event {
            Event::Header(header) => {
                if !self.json.is_asked() {
                    self.print_header(&header)?;
                }
                self.header = Some(header);
            }
            Event::Row(row) => {
                if self.json.is_asked() {
                    let times = row.timings().map(|timing| format!("{:.2} us", timing.time_us));
                    note!("{} B: {}", row.bytes, times.collect::<Vec<_>>().join(", "));
                } else {
                    self.print_row(&row)?;
                }
                self.rows.push(row);
            }
            Event::Finished | Event::Failed { .. } => {}
        }
        Ok(())
    }

    /// The progress so far, for a failure message.
    pub(super) fn progress(&self) -> String {
        match &self.header {
            None => ", before all ranks had joined".to_owned(),
            Some(header) => format!(", after {} of {} sizes", self.rows.len(), header.sizes),
        }
    }

    /// Prints the end of the report. Returns the exit status.
    pub(super) fn finish(self) -> Result<ExitCode, Failure> {
        let Some(header) = &self.header else {
            return Err(Failure::run("rank 0 has reported nothing"));
        };
        let wrong = self.rows.iter().flat_map(Row::timings).filter_map(|timing| timing.wrong);
        let wrong: Option<u64> = self.args.checks().then(|| wrong.sum());
        let mean = self.mean_busbw();
        let Args { operation, data_type, root, iterations, warmup, check, .. } = self.args;
        let report = Report {
            operation: operation.to_string(),
            ranks: header.places.len(),
            launcher: header.launcher.as_deref(),
            places: &header.places,
            machine: &header.machine,
            reduces_by: &header.reduces_by,
            sends_nothing: header.sends_nothing,
            data_type: data_type.to_string(),
            reduction: operation.reduces().then(|| self.args.reduction.to_string()),
            root: operation.has_root().then_some(root),
            iterations,
            warmup,
            check,
            forced: self.args.forced(),
            results: &self.rows,
            mean_busbw_gb_s: mean,
            wrong,
        };
        if let Some(file) = &self.svg {
            let title = format!("{operation}, {} ranks, {data_type}", header.places.len());
            plot::write(file, &title, &self.rows)?;
        }
        if !self.json.write(&report)? {
            let verdict = match wrong {
                None => "not checked".to_owned(),
                Some(0) => "0 OK".to_owned(),
                Some(wrong) => format!("{wrong} FAILED"),
            };
            say!("# Out of bounds values : {verdict}")?;
            say!("# Avg bus bandwidth    : {mean:.4} GB/s")?;
        }
        match self.first_wrong() {
            Some((bytes, first)) => {
                let all = wrong.unwrap_or(0);
                Err(Failure::run(format!(
                    "{operation} of {bytes} B: {}; {all} wrong elements in all",
                    Named(first, data_type)
                )))
            }
            None => Ok(ExitCode::SUCCESS),
        }
    }

    fn first_wrong(&self) -> Option<(u64, Wrong)> {
        let of =
            |row: &Row| row.timings().find_map(|timing| timing.first_wrong).map(|wrong| (row.bytes, wrong));
        self.rows.iter().find_map(of)
    }

    fn mean_busbw(&self) -> f64 {
        let all: Vec<f64> = self.rows.iter().flat_map(Row::timings).map(|timing| timing.busbw_gb_s).collect();
        all.iter().sum::<f64>() / all.len().max(1) as f64
    }

    fn print_header(&self, header: &Header) -> Result<(), Failure> {
        let args = &self.args;
        let Args { operation, iterations, warmup, .. } = args;
        let launcher = header.launcher.as_deref().filter(|_| args.ranks.is_none());
        let started = launcher.map(|launcher| format!(", started by {launcher}")).unwrap_or_default();
        let count = header.places.len();
        let ranks = if count == 1 { "rank" } else { "ranks" };
        let checked = if args.checks() { "every element checked" } else { "nothing checked" };
        say!(
            "# {operation}: {count} {ranks}{started}; {iterations} iterations, {warmup} before them, {checked}"
        )?;
        for (rank, place) in header.places.iter().enumerate() {
            say!("#   rank {rank}: {place}")?;
        }
        say!("# {}; reductions by {}", header.machine, header.reduces_by)?;
        if header.sends_nothing {
            say!("# the ranks share memory: no packets (--shared-memory off sends them by -d)")?;
        }
        let forced = args.forced();
        if !forced.is_empty() {
            say!("# forced: {}", forced.join(", "))?;
        }
        say!("#")?;
        let line = |columns: [&str; 5], [time, algbw, busbw, wrong]: [&str; 4], last: &str| {
            let [size, count, data_type, reduction, root] = columns;
            let each = format!("{time:>9} {algbw:>8} {busbw:>8} {wrong:>8}");
            let start = format!("# {size:>11} {count:>11} {data_type:>7} {reduction:>9} {root:>4}");
            say!("{}", format!("{start} {each} {each}  {last}").trim_end())
        };
        say!("# {:46} {:^36} {:>22}", "", "out-of-place", "in-place")?;
        line(["size", "count", "type", "redop", "root"], ["time", "algbw", "busbw", "#wrong"], "algorithm")?;
        line(["(B)", "(elements)", "", "", ""], ["(us)", "(GB/s)", "(GB/s)", ""], "")
    }

    fn print_row(&self, row: &Row) -> Result<(), Failure> {
        let Args { operation, data_type, reduction, root, .. } = &self.args;
        let reduction = if operation.reduces() { reduction.to_string() } else { "none".to_owned() };
        let root = if operation.has_root() { root.to_string() } else { "-1".to_owned() };
        say!(
            "  {:>11} {:>11} {:>7} {reduction:>9} {root:>4} {} {}  {}",
            row.bytes,
            row.count,
            data_type.to_string(),
            columns(row.out_of_place.as_ref()),
            columns(row.in_place.as_ref()),
            row.algorithm,
        )?;
        row.explanation.iter().flat_map(|text| text.lines()).try_for_each(|line| say!("#   {line}"))
    }
}

impl Row {
    pub(super) fn timings(&self) -> impl Iterator<Item = &Timing> {
        self.out_of_place.iter().chain(&self.in_place)
    }
}

/// The columns of nccl-tests.
fn columns(timing: Option<&Timing>) -> String {
    let Some(Timing { time_us, algbw_gb_s, busbw_gb_s, wrong, .. }) = timing else {
        return format!("{:>9} {:>8} {:>8} {:>8}", "-", "-", "-", "-");
    };
    let wrong = wrong.map_or("-".to_owned(), |wrong| wrong.to_string());
    let decimals = if *time_us < 10_000.0 { 2 } else { 0 };
    format!("{time_us:>9.decimals$} {algbw_gb_s:>8.3} {busbw_gb_s:>8.3} {wrong:>8}")
}

/// A wrong element, displayed as text.
struct Named(Wrong, DataType);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Named(Wrong { rank, index, expected, got }, data_type) = *self;
        let [expected, got] = [expected, got].map(|bits| text_of(data_type, bits));
        write!(f, "element {index} of rank {rank} is {got}, not {expected}")
    }
}
