//! `ferroce flight`: what the ranks of communicators have done last, from their flight recorders.

mod merged;
mod report;
mod table;
mod timeline;

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ferroce_collectives::flight::{Diagnosis, Recording};
use tracing::warn;

use crate::failure::{Failure, OrFail, legible};
use crate::output::{JsonArg, check_files, write};
use merged::Merged;
use report::Report;

/// Shows what the ranks of communicators have done last, who waits for whom, and who is late or slow.
///
/// Each process with collectives records its last operations in memory that others can read while it works, hangs or is stopped. Root
/// sees the processes of all users, others their own. A communicator that fails leaves a file where FERROCE_FLIGHT_DIR names a directory;
/// `ferroce collective` leaves one at SIGUSR1, too, and programs do by FlightRecorder::dump. Files of several hosts are read as one:
/// times are by the hosts' clocks, but who came late and who waits is not.
///
/// Exit status: 0 if there was a recording of every file and process that was named, 1 if not, 2 for wrong usage.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Files, directories of files, and numbers of processes; all processes of this host by default.
    #[arg(value_name = "FILE|PID")]
    sources: Vec<PathBuf>,
    /// Only the communicator whose id begins so.
    #[arg(long, value_name = "ID")]
    communicator: Option<String>,
    /// So many operations of each communicator, the last ones.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=256))]
    last: u32,
    /// Draws them as a time line: a row for each rank.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

const EXAMPLES: &str = "\
Examples:
  ferroce flight                                    the communicators of this host's processes, as they are now
  kill -USR1 PID                                    a rank of `ferroce collective` leaves a file in its directory
  FERROCE_FLIGHT_DIR=/var/tmp/job torchrun ...      each rank leaves a file there if its communicator fails
  ferroce flight /var/tmp/job --svg job.svg         those files as one, those of other hosts copied there before";

/// What files of recorders are called in a directory that is given.
const PREFIX: &str = "ferroce-flight";
/// Longer than a recording is.
const LONGEST: u64 = 16 << 20;
/// Files that are taken from a directory.
const FILES_MAX: usize = 65_536;

/// Prints what is found; see [`Args`] for the exit status.
///
/// # Errors
/// There is no recording, one that was named can't be read, or the output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let json = args.json.file().map(|file| ("--json", file));
    let inputs: Vec<(&str, &Path)> = args.sources.iter().map(|path| ("a recording", &**path)).collect();
    check_files(&inputs, args.svg.as_deref().map(|file| ("--svg", file)).into_iter().chain(json))?;
    let recordings = args.recordings()?;
    let wanted =
        |id: u64| args.communicator.as_ref().is_none_or(|start| format!("{id:016x}").starts_with(start));
    let diagnoses: Vec<Diagnosis> =
        Diagnosis::all(&recordings).into_iter().filter(|of| wanted(of.communicator)).collect();
    if diagnoses.is_empty() {
        return Err(Failure::run(args.nothing(&recordings)));
    }
    let merged: Vec<Merged<'_>> =
        diagnoses.iter().map(|diagnosis| Merged::new(diagnosis, &recordings, args.last as usize)).collect();
    if let Some(path) = &args.svg {
        timeline::write(path, &merged)?;
    }
    if args.json.is_asked() {
        let reports: Vec<Report<'_>> = merged.iter().map(Report::new).collect();
        args.json.write(&reports)?;
    } else {
        let texts: Vec<String> = merged.iter().map(table::draw).collect();
        write(format_args!("{}", texts.join("\n")))?;
    }
    Ok(ExitCode::SUCCESS)
}

impl Args {
    fn recordings(&self) -> Result<Vec<Recording>, Failure> {
        if self.sources.is_empty() {
            let read = |(pid, read): (u32, Result<Recording, String>)| {
                read.inspect_err(|why| warn!("process {pid}: {}", legible(why))).ok()
            };
            return Ok(Recording::running().into_iter().filter_map(read).collect());
        }
        let mut all = Vec::new();
        for source in &self.sources {
            let named = || format!("'{}'", legible(&source.display().to_string()));
            let pid = source.to_str().and_then(|text| text.parse::<u32>().ok()).filter(|_| !source.exists());
            if let Some(pid) = pid {
                let before = all.len();
                for (_, read) in Recording::running().into_iter().filter(|(of, _)| *of == pid) {
                    all.push(read.map_err(|why| Failure::run(format!("process {pid}: {why}")))?);
                }
                if all.len() == before {
                    return Err(Failure::run(format!(
                        "process {pid} has no flight recorder that can be seen: it has no collectives, is another user's, or has ended"
                    )));
                }
            } else if source.is_dir() {
                let files = self.files(source)?;
                if files.is_empty() {
                    return Err(Failure::run(format!("{}: no file in it is called {PREFIX}...", named())));
                }
                for file in files {
                    all.push(read(&file)?);
                }
            } else {
                all.push(read(source)?);
            }
        }
        Ok(all)
    }

    fn files(&self, folder: &Path) -> Result<Vec<PathBuf>, Failure> {
        let entries =
            fs::read_dir(folder).or_fail(|| format!("'{}'", legible(&folder.display().to_string())))?;
        let is_one = |path: &PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            name.starts_with(PREFIX) && !name.ends_with(".part")
        };
        let mut files: Vec<PathBuf> =
            entries.flatten().map(|entry| entry.path()).filter(is_one).take(FILES_MAX).collect();
        files.sort();
        Ok(files)
    }

    /// Why there is nothing to show.
    fn nothing(&self, recordings: &[Recording]) -> String {
        let ids: Vec<String> =
            Diagnosis::all(recordings).iter().map(|of| format!("{:016x}", of.communicator)).collect();
        match &self.communicator {
            Some(wanted) if !ids.is_empty() => {
                format!("--communicator {}: none begins so; there are {}", legible(wanted), ids.join(", "))
            }
            _ if recordings.is_empty() => {
                "no process with collectives is to be seen on this host; those of other users can't be seen without being root".to_owned()
            }
            _ => "no communicator of two ranks or more is recorded".to_owned(),
        }
    }
}

fn read(path: &Path) -> Result<Recording, Failure> {
    let named = || format!("'{}'", legible(&path.display().to_string()));
    let file = File::open(path).or_fail(named)?;
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes).or_fail(named)?;
    Recording::parse(&bytes).map_err(|why| Failure::run(format!("{}: {why}", named())))
}
