//! The sources of recordings: running processes, and files.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use ferroce_collectives::flight::Recording;
use rustix::fs::OFlags;
use tracing::warn;

use crate::failure::{Failure, OrFail, legible};
use crate::output::say;
use crate::process::command_line;

/// Prefix of the files that are read from a directory.
const PREFIX: &str = "ferroce-flight";
/// A limit above the length of any recording.
const LONGEST: u64 = 16 << 20;
/// The most files that are read from a directory.
const FILES_MAX: usize = 65_536;
/// The most processes and files that are listed one per line.
const LINES_MAX: usize = 64;

/// Recordings, and the source of each.
#[derive(Default)]
pub(super) struct Sources {
    pub(super) recordings: Vec<Recording>,
    /// The source of each recording.
    pub(super) origins: Vec<Origin>,
    /// The reasons that files in directories could not be read.
    pub(super) unread: Vec<Failure>,
}

pub(super) enum Origin {
    /// A running process.
    Process {
        /// Its command line, if it is readable.
        command: Option<String>,
    },
    File(PathBuf),
}

impl Origin {
    pub(super) fn command(&self) -> Option<&str> {
        match self {
            Origin::Process { command } => command.as_deref(),
            Origin::File(_) => None,
        }
    }

    pub(super) fn file(&self) -> Option<String> {
        match self {
            Origin::Process { .. } => None,
            Origin::File(path) => Some(legible(&path.display().to_string())),
        }
    }
}

impl Sources {
    /// Reads the named files, directories and processes; without any, all processes of this host.
    pub(super) fn find(named: &[PathBuf]) -> Result<Sources, Failure> {
        let mut all = Sources::default();
        if named.is_empty() {
            for (pid, read) in Recording::running() {
                match read {
                    Ok(recording) => all.add_process(recording),
                    Err(why) => warn!("process {pid}: {}", legible(&why)),
                }
            }
        }
        for source in named {
            if let Some(pid) = process(source) {
                let before = all.recordings.len();
                for (_, read) in Recording::running().into_iter().filter(|(of, _)| *of == pid) {
                    all.add_process(read.map_err(|why| Failure::run(format!("process {pid}: {why}")))?);
                }
                if all.recordings.len() == before {
                    return Err(not_seen(pid));
                }
            } else if source.is_dir() {
                let files = files(source)?;
                if files.is_empty() {
                    return Err(Failure::run(format!(
                        "{}: no file in it is called {PREFIX}...",
                        shown(source)
                    )));
                }
                for file in files {
                    // One unreadable file must not hide the other recordings.
                    let unread = all.add_file(file).err();
                    all.unread.extend(unread);
                }
            } else {
                all.add_file(source.clone())?;
            }
        }
        Ok(all)
    }

    fn add_process(&mut self, recording: Recording) {
        self.origins.push(Origin::Process { command: command_line(recording.process) });
        self.recordings.push(recording);
    }

    fn add_file(&mut self, path: PathBuf) -> Result<(), Failure> {
        self.recordings.push(read(&path)?);
        self.origins.push(Origin::File(path));
        Ok(())
    }

    /// A line for each running process that is part of these communicators, and for each file whose parts all have
    /// later recordings.
    pub(super) fn heading(&self, communicators: &[u64]) -> String {
        let mut lines: Vec<String> = Vec::new();
        // By communicator and rank: the latest recording.
        let mut latest: BTreeMap<(u64, u32), usize> = BTreeMap::new();
        let parts = |index: usize| {
            let all = self.recordings[index].communicators.iter();
            all.filter(|own| communicators.contains(&own.id)).map(|own| (own.id, own.rank))
        };
        for (index, recording) in self.recordings.iter().enumerate() {
            for part in parts(index) {
                let known = latest.entry(part).or_insert(index);
                if self.recordings[*known].taken <= recording.taken {
                    *known = index;
                }
            }
        }
        for (index, (recording, origin)) in self.recordings.iter().zip(&self.origins).enumerate() {
            let Some(first) = parts(index).next() else { continue };
            let by = parts(index).all(|part| latest[&part] != index).then(|| &self.origins[latest[&first]]);
            match (origin, by) {
                (Origin::Process { command }, _) => {
                    let command = command.as_deref().unwrap_or("its command can't be seen");
                    let line = format!("process {}: {command}", recording.process);
                    // A process may have several recorders.
                    if lines.last() != Some(&line) {
                        lines.push(line);
                    }
                }
                (Origin::File(path), Some(Origin::File(later))) => lines.push(format!(
                    "{} is not shown: {} is a later recording of the same process; to see the earlier one, give it \
                     alone",
                    shown(path),
                    shown(later)
                )),
                (Origin::File(path), Some(Origin::Process { .. })) => {
                    lines.push(format!("{} is not shown: its process runs", shown(path)));
                }
                (Origin::File(_), None) => {}
            }
        }
        let more = lines.len().saturating_sub(LINES_MAX);
        lines.truncate(LINES_MAX);
        if more > 0 {
            lines.push(format!("and {more} more"));
        }
        lines.iter().map(|line| format!("{line}\n")).collect()
    }
}

/// Writes files for the named processes; without any, for all processes of this host. Prints their paths and returns
/// their number.
pub(super) fn dump(folder: &Path, named: &[PathBuf]) -> Result<usize, Failure> {
    let pid = |source: &PathBuf| {
        process(source)
            .ok_or_else(|| Failure::usage(format!("{}: with --dump must be a process id", shown(source))))
    };
    let pids: Vec<u32> = named.iter().map(pid).collect::<Result<_, _>>()?;
    if !folder.is_dir() {
        return Err(Failure::usage(format!("--dump {}: must be an existing directory", shown(folder))));
    }
    let dumped = Recording::dump_running(folder, |pid| pids.is_empty() || pids.contains(&pid));
    let mut written = 0;
    for (pid, path) in &dumped {
        match path {
            Ok(path) => {
                say!("{}", path.display())?;
                written += 1;
            }
            Err(why) => warn!("process {pid}: {}", legible(why)),
        }
    }
    let is_written = |pid: &&u32| dumped.iter().any(|(of, path)| of == *pid && path.is_ok());
    match pids.iter().find(|pid| !is_written(pid)) {
        Some(pid) if dumped.iter().any(|(of, _)| of == pid) => {
            Err(Failure::run(format!("process {pid}: its recording is not written")))
        }
        Some(pid) => Err(not_seen(*pid)),
        None if written == 0 && !dumped.is_empty() => Err(Failure::run("no recording is written")),
        None => Ok(written),
    }
}

/// The process id, if the source is a number.
fn process(source: &Path) -> Option<u32> {
    source.to_str().and_then(|text| text.parse().ok()).filter(|_| !source.exists())
}

fn not_seen(pid: u32) -> Failure {
    Failure::run(format!(
        "process {pid} has no visible flight recorder: it has no collectives, belongs to another user, or has ended"
    ))
}

fn shown(path: &Path) -> String {
    format!("'{}'", legible(&path.display().to_string()))
}

fn files(folder: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = fs::read_dir(folder).or_fail(|| shown(folder))?;
    let is_one = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with(PREFIX) && !name.ends_with(".part")
    };
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(is_one).take(FILES_MAX).collect();
    files.sort();
    Ok(files)
}

fn read(path: &Path) -> Result<Recording, Failure> {
    // In a world-writable directory, a file may be a FIFO without a writer.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).or_fail(|| shown(path))?;
    if !file.metadata().or_fail(|| shown(path))?.is_file() {
        return Err(Failure::run(format!("{}: must be a regular file, not a pipe or device", shown(path))));
    }
    let mut bytes = Vec::new();
    file.take(LONGEST).read_to_end(&mut bytes).or_fail(|| shown(path))?;
    Recording::parse(&bytes).map_err(|why| Failure::run(format!("{}: {why}", shown(path))))
}
