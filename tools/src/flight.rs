//! `ferroce flight`: the last operations of the ranks of communicators, from their flight recorders.

mod merged;
mod report;
mod sources;
mod table;
mod timeline;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ferroce_collectives::flight::{Diagnosis, Recording};

use crate::failure::{Failure, legible};
use crate::output::{JsonArg, check_files, write};
use merged::Merged;
use report::Report;
use sources::Sources;

/// Shows the last operations of the ranks (processes) of collective jobs, which rank waits for which, and which is late or slow.
///
/// Each process with collectives records its last operations in memory that other processes can read while it works, hangs or is
/// stopped. Root sees the processes of all users, others their own. Files are written by --dump, by programs that call
/// FlightRecorder::dump, and by `ferroce collective` on SIGUSR1. If FERROCE_FLIGHT_DIR names a directory, files are also written
/// there when a communicator fails, and by `ferroce collective` on SIGTERM. Files of several hosts are shown together. Times then
/// depend on the hosts' clocks; late and waiting ranks are found without the clocks.
///
/// Exit status: 0 if there is something to show, and every file and process that was named has a recording; 1 if not; 2 for wrong
/// usage. If some files of a directory can't be read, the others are still shown, and the exit status is 1.
#[derive(clap::Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Files, directories of files, and process ids; by default all processes of this host.
    #[arg(value_name = "FILE|PID")]
    sources: Vec<PathBuf>,
    /// Only the communicator whose id begins with ID.
    #[arg(long, value_name = "ID")]
    communicator: Option<String>,
    /// Show the last N operations of each communicator.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=256))]
    last: u32,
    /// Write these operations as a time line with a row per rank.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the recordings of the named processes, or of all of this host, to new files in DIR, which must exist, and print only
    /// the file names. Only their owner can read the files. For ranks of any launcher; run it on each host.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["communicator", "last", "svg", "json"])]
    dump: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

const EXAMPLES: &str = "\
Examples:
  ferroce flight                                the communicators of this host's processes now
  ferroce flight --dump /var/tmp/job            one file per process, in an existing directory
  kill -USR1 PID                                a rank of `ferroce collective` writes a file
  FERROCE_FLIGHT_DIR=/var/tmp/job torchrun ...  ranks whose communicator fails write files there
  ferroce flight /var/tmp/job --svg job.svg     all files there; first copy those of other hosts";

/// Prints the recordings; see [`Args`] for the exit status.
///
/// # Errors
/// There is no recording, a named one can't be read, or the output can't be written.
pub fn run(args: Args) -> Result<ExitCode, Failure> {
    let json = args.json.file().map(|file| ("--json", file));
    let inputs: Vec<(&str, &Path)> = args.sources.iter().map(|path| ("a recording", &**path)).collect();
    check_files(&inputs, args.svg.as_deref().map(|file| ("--svg", file)).into_iter().chain(json))?;
    if let Some(folder) = &args.dump {
        if sources::dump(folder, &args.sources)? == 0 {
            return Err(Failure::run(args.nothing(&[])));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut sources = Sources::find(&args.sources)?;
    let mut unread = std::mem::take(&mut sources.unread).into_iter();
    let wanted =
        |id: u64| args.communicator.as_ref().is_none_or(|start| format!("{id:016x}").starts_with(start));
    let diagnoses: Vec<Diagnosis> =
        Diagnosis::all(&sources.recordings).into_iter().filter(|of| wanted(of.communicator)).collect();
    if diagnoses.is_empty() {
        if let Some(why) = unread.next() {
            return Err(why);
        }
        return Err(Failure::run(args.nothing(&sources.recordings)));
    }
    let merged: Vec<Merged<'_>> =
        diagnoses.iter().map(|diagnosis| Merged::new(diagnosis, &sources, args.last as usize)).collect();
    if let Some(path) = &args.svg {
        timeline::write(path, &merged)?;
    }
    if args.json.is_asked() {
        let reports: Vec<Report<'_>> = merged.iter().map(Report::new).collect();
        args.json.write(&reports)?;
    } else {
        let shown: Vec<u64> = diagnoses.iter().map(|of| of.communicator).collect();
        let heading = sources.heading(&shown);
        let gap = if heading.is_empty() { "" } else { "\n" };
        let texts: Vec<String> = merged.iter().map(table::draw).collect();
        write(format_args!("{heading}{gap}{}", texts.join("\n")))?;
    }
    unread.next().map_or(Ok(ExitCode::SUCCESS), Err)
}

impl Args {
    /// The reason that there is nothing to show.
    fn nothing(&self, recordings: &[Recording]) -> String {
        let ids: Vec<String> =
            Diagnosis::all(recordings).iter().map(|of| format!("{:016x}", of.communicator)).collect();
        match &self.communicator {
            Some(wanted) if !ids.is_empty() => {
                format!(
                    "--communicator {}: no id begins with it; there are {}",
                    legible(wanted),
                    ids.join(", ")
                )
            }
            _ if recordings.is_empty() => {
                "no process with collectives is visible on this host; only root sees those of other users"
                    .to_owned()
            }
            _ => "no communicator of two or more ranks is recorded".to_owned(),
        }
    }
}
