//! Arguments and output of benchmarks: a table as text, and JSON.

use std::path::{Path, PathBuf};
use std::{fs, io};

use clap::Parser;
use ferroce::driver::machine::Rounds;
use serde_json::Value;

use crate::state;

/// Arguments of a benchmark, behind `--`.
#[derive(Parser)]
pub struct Options {
    /// Also writes the results there, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// As `cargo bench` says; without it one short round shows that the benchmark works
    #[arg(long, hide = true)]
    bench: bool,
}

impl Options {
    /// The options of this process.
    pub fn from_args() -> Options {
        Options::parse()
    }

    /// `thorough` under `cargo bench`, `quick` under `cargo test --benches`.
    pub fn scale<T>(&self, quick: T, thorough: T) -> T {
        if self.bench { thorough } else { quick }
    }

    /// Prints the machine's state in the rounds of the results, and writes both to the requested file, if any.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn save_with(&self, rounds: &Rounds, mut results: Value) -> io::Result<()> {
        println!("machine's state: {rounds}");
        if let Some(results) = results.as_object_mut() {
            results.insert("state".to_owned(), state::json(rounds));
        }
        self.save(&results)
    }

    /// Writes the results to the requested file, if any.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn save(&self, results: &Value) -> io::Result<()> {
        let Some(path) = &self.json else { return Ok(()) };
        write(path, &format!("{results:#}\n"))
    }
}

/// Options of a benchmark that has rounds, and a sheet of charts.
#[derive(clap::Args)]
pub struct SheetOptions {
    /// Also writes everything there, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also draws charts there
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// How often each case is measured
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// Two short rounds: whether it works, and roughly how it stands
    #[arg(long)]
    quick: bool,
    /// As `cargo bench` says; without it the rounds are short
    #[arg(long, hide = true)]
    pub bench: bool,
}

impl SheetOptions {
    /// Whether rounds are few, and short.
    pub fn is_quick(&self) -> bool {
        self.quick || !self.bench
    }

    /// The number of measurements of each case.
    pub fn rounds(&self) -> usize {
        self.rounds.clamp(1, if self.is_quick() { 2 } else { usize::MAX })
    }

    /// Writes the requested files.
    ///
    /// # Errors
    /// A file can't be written.
    pub fn save(&self, json: impl FnOnce() -> Value, svg: impl FnOnce() -> String) -> io::Result<()> {
        if let Some(path) = &self.json {
            write(path, &format!("{:#}\n", json()))?;
        }
        self.svg.as_ref().map_or(Ok(()), |path| write(path, &svg()))
    }
}

/// A number of bytes as text: in whole KiB and MiB if possible.
pub fn bytes(count: u64) -> String {
    match count {
        _ if count >= 1 << 20 && count.is_multiple_of(1 << 20) => format!("{} MiB", count >> 20),
        _ if count >= 1 << 10 && count.is_multiple_of(1 << 10) => format!("{} KiB", count >> 10),
        _ => format!("{count} B"),
    }
}

/// Writes a requested file, and prints its name. `cargo bench` runs a benchmark in the folder of its package: a
/// relative path is relative to the folder above, where the command was typed.
///
/// # Errors
/// The file can't be written; the error has the path.
pub fn write(path: &Path, text: &str) -> io::Result<()> {
    let typed_in = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let folder = typed_in.as_deref().and_then(Path::parent).unwrap_or(Path::new(""));
    let path = folder.join(path);
    fs::write(&path, text).map_err(|error| io::Error::other(format!("{}: {error}", path.display())))?;
    println!("written: {}", path.display());
    Ok(())
}

/// The median of several runs, and their spread.
#[derive(Clone, Copy, Debug)]
pub struct Median {
    /// The median.
    pub value: f64,
    /// (Maximum − minimum) / median.
    pub spread: f64,
}

impl Median {
    /// Of at least one run.
    pub fn of(mut runs: Vec<f64>) -> Median {
        runs.sort_by(f64::total_cmp);
        let value = runs[runs.len() / 2];
        Median { value, spread: (runs[runs.len() - 1] - runs[0]) / value }
    }

    /// Of each value that at least one round has.
    pub fn of_each<const N: usize>(rounds: &[[f64; N]]) -> [Median; N] {
        std::array::from_fn(|n| Median::of(rounds.iter().map(|round| round[n]).collect()))
    }
}

/// The median of several runs, the minimum and the maximum.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// The minimum.
    pub least: f64,
    /// The median.
    pub median: f64,
    /// The maximum.
    pub most: f64,
}

impl Spread {
    /// `None` without runs.
    pub fn of(mut values: Vec<f64>) -> Option<Spread> {
        values.sort_by(f64::total_cmp);
        let (least, most) = (*values.first()?, *values.last()?);
        let middle = values.len() / 2;
        let median =
            if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 };
        Some(Spread { least, median, most })
    }
}

/// A stopwatch of the time in which this thread has a core: time that other processes take on a shared machine does not
/// count.
#[derive(Clone, Copy, Debug)]
pub struct CpuTime(u128);

impl CpuTime {
    /// Starts a stopwatch.
    pub fn start() -> CpuTime {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        CpuTime(time.tv_sec as u128 * 1_000_000_000 + time.tv_nsec as u128)
    }

    /// Nanoseconds since the start, divided by `count`.
    pub fn each(self, count: u64) -> f64 {
        (CpuTime::start().0 - self.0) as f64 / count as f64
    }
}

/// Resident bytes of this process, as reported by Linux; 0 elsewhere.
pub fn resident_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok());
    1024 * kib.unwrap_or_default()
}
