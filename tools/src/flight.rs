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

/// Shows what the ranks of communicators have done last, who waits for whom, and who is late or slow.
///
/// Each process with collectives records its last operations in memory that others can read while it works, hangs or is stopped. Root
/// sees the processes of all users, others their own. A communicator that fails leaves a file where FERROCE_FLIGHT_DIR names a directory;
/// `ferroce collective` leaves one at SIGUSR1 and SIGTERM, too, programs do by FlightRecorder::dump, and --dump writes them from outside. Files of several hosts are read as one:
/// times are by the hosts' clocks, but who came late and who waits is not.
///
/// Exit status: 0 if there was a recording of every file and process that was named, 1 if not, 2 for wrong usage. Of a directory
/// those that can be read are shown all the same.
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
    /// Writes the recordings of these processes, or of all of this host, to new files in DIR, for their owner alone, and shows
    /// nothing but their names: for ranks of any launcher, on each host.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["communicator", "last", "svg", "json"])]
    dump: Option<PathBuf>,
    #[command(flatten)]
    json: JsonArg,
}

const EXAMPLES: &str = "\
Examples:
  ferroce flight                                    the communicators of this host's processes, as they are now
  ferroce flight --dump /var/tmp/job                a file of each process there, for another host to read
  kill -USR1 PID                                    a rank of `ferroce collective` leaves a file in its directory
  FERROCE_FLIGHT_DIR=/var/tmp/job torchrun ...      each rank leaves a file there if its communicator fails
  ferroce flight /var/tmp/job --svg job.svg         those files as one, those of other hosts copied there before";

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
                format!("--communicator {}: none begins so; there are {}", legible(wanted), ids.join(", "))
            }
            _ if recordings.is_empty() => {
                "no process with collectives is to be seen on this host; those of other users can't be seen without being root".to_owned()
            }
            _ => "no communicator of two ranks or more is recorded".to_owned(),
        }
    }
}
