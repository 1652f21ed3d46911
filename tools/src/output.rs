//! Standard output and standard error, each of which can be a full disk or a closed pipe. This module also implements
//! `--json`.
//!
//! A report that can't be written is a failure. If the reader closes its pipe, the rest is not written, and the exit
//! status is that of the work. Progress and other messages go to standard error; a failure to write them is ignored.

use std::fmt::Arguments;
use std::fs::{self, File};
use std::io::{self, BufWriter, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Access, access};
use serde::Serialize;
use tracing::Level;

use crate::failure::{Failure, OrFail, legible};

/// Writes a line to standard output; fails if it can't be written.
macro_rules! say {
    ($($what:tt)*) => { $crate::output::line(format_args!($($what)*)) };
}

/// Writes a progress line to standard error, unless `--quiet` or RUST_LOG silences it.
macro_rules! note {
    ($($what:tt)*) => { $crate::output::note_line(format_args!($($what)*)) };
}

pub(crate) use {note, say};

/// See [`say`].
pub(crate) fn line(text: Arguments<'_>) -> Result<(), Failure> {
    write(format_args!("{text}\n")).map(drop)
}

/// Writes to standard output. Returns whether the reader is still there.
pub(crate) fn write(text: Arguments<'_>) -> Result<bool, Failure> {
    // Keeps the lines of several threads apart; the same thread may lock it again.
    let _held = io::stdout().lock();
    Output::stdout().write(text)
}

/// See [`note`].
pub(crate) fn note_line(text: Arguments<'_>) {
    if is_verbose() {
        let _ = writeln!(io::stderr(), "{text}");
    }
}

/// Whether progress is shown on standard error.
pub(crate) fn is_verbose() -> bool {
    tracing::enabled!(Level::INFO)
}

const STDOUT: &str = "standard output";

/// The destination of a report: standard output or a file. It is written in large blocks, since standard output writes
/// line by line, and a report can have 200,000 lines.
pub(crate) struct Output {
    /// Its name in an error.
    pub(crate) name: String,
    pub(crate) to: BufWriter<Box<dyn Write + Send>>,
}

impl Output {
    pub(crate) fn stdout() -> Output {
        Output { name: STDOUT.into(), to: BufWriter::new(Box::new(io::stdout())) }
    }

    pub(crate) fn nobody() -> Output {
        Output { name: "nobody".into(), to: BufWriter::new(Box::new(io::sink())) }
    }

    fn file(path: &Path, append: bool) -> Result<Output, Failure> {
        let name = format!("'{}'", path.display());
        let file = if append { File::options().append(true).open(path) } else { File::create(path) };
        let file = file.or_fail(|| name.clone())?;
        Ok(Output { name, to: BufWriter::new(Box::new(file)) })
    }

    /// Writes all of it now. Returns whether the reader is still there.
    pub(crate) fn write(&mut self, text: Arguments<'_>) -> Result<bool, Failure> {
        match self.to.write_fmt(text).and_then(|()| self.to.flush()) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
            written => written.or_fail(|| self.name.clone()).map(|()| true),
        }
    }
}

/// `--json`, of every command that has a report.
#[derive(clap::Args, Clone, Debug, Default)]
pub(crate) struct JsonArg {
    /// Print the report as JSON instead of text: to standard output, with nothing else there, or into FILE
    /// (--json=FILE; --json=- is standard output).
    #[arg(
        id = "json",
        long = "json",
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "-",
        value_parser = json_target
    )]
    to: Option<PathBuf>,
    /// Whether the file has a report already, which the next one follows: a server may write one for each client.
    #[arg(skip)]
    is_begun: Arc<AtomicBool>,
}

impl JsonArg {
    pub(crate) fn to_stdout() -> JsonArg {
        JsonArg { to: Some("-".into()), ..JsonArg::default() }
    }

    pub(crate) fn is_asked(&self) -> bool {
        self.to.is_some()
    }

    /// The file, if the report goes to one.
    pub(crate) fn file(&self) -> Option<&Path> {
        self.to.as_deref().filter(|path| path.as_os_str() != "-")
    }

    /// The destination of a report, text or JSON.
    pub(crate) fn open(&self) -> Result<Output, Failure> {
        let Some(file) = self.file() else { return Ok(Output::stdout()) };
        Output::file(file, self.is_begun.swap(true, Ordering::Relaxed))
    }

    /// Refuses to overwrite the capture that the report is about. A capture that is still to be recorded exists
    /// already.
    pub(crate) fn spare(&self, capture: &fs::Metadata) -> Result<(), Failure> {
        let is_capture =
            |to: &fs::Metadata| to.is_file() && (to.dev(), to.ino()) == (capture.dev(), capture.ino());
        match &self.to {
            Some(to) if fs::metadata(to).is_ok_and(|to| is_capture(&to)) => Err(Failure::usage(format!(
                "--json={} would overwrite the capture; name another file",
                to.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Refuses a file that is that of a recording, before anything is run.
    pub(crate) fn check_beside(&self, recording: Option<&Path>) -> Result<(), Failure> {
        let recording = recording.map(|path| ("--pcap", path));
        check_files(&[], recording.into_iter().chain(self.file().map(|path| ("--json", path))))
    }

    /// Writes the report if JSON is requested. Returns whether it is.
    pub(crate) fn write(&self, report: &impl Serialize) -> Result<bool, Failure> {
        if self.is_asked() {
            let text = serde_json::to_string_pretty(report);
            let text = text.map_err(|error| Failure::run(format!("report: {error}")))?;
            self.open()?.write(format_args!("{text}\n"))?;
        }
        Ok(self.is_asked())
    }
}

/// Refuses outputs that can't be written, or that would overwrite an input or another output, before anything is run.
/// Each is given with its option.
pub(crate) fn check_files<'a>(
    inputs: &[(&'a str, &'a Path)],
    outputs: impl Iterator<Item = (&'a str, &'a Path)>,
) -> Result<(), Failure> {
    // Existing files are compared by their target: links are followed. A new file is compared by its folder and name.
    let to_be = |path: &Path| Some(folder(path).canonicalize().ok()?.join(path.file_name()?));
    let real =
        |path: &Path| path.canonicalize().ok().or_else(|| to_be(path)).unwrap_or_else(|| path.to_owned());
    let mut taken: Vec<_> = inputs.iter().map(|(what, path)| (*what, real(path))).collect();
    for (option, path) in outputs {
        let named = format!("{option} {}", legible(&path.display().to_string()));
        can_be_written(path).map_err(|why| Failure::usage(format!("{named}: {why}")))?;
        // A device such as /dev/null may be given several times.
        let is_file = path.is_file() || !path.exists();
        if let Some((other, _)) = taken.iter().find(|(_, other)| is_file && *other == real(path)) {
            return Err(Failure::usage(format!("{named}: must be another file; {other} has this one")));
        }
        taken.push((option, real(path)));
    }
    Ok(())
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn can_be_written(path: &Path) -> Result<(), String> {
    let folder = folder(path);
    if path.is_dir() {
        return Err("it is a directory; name a file in it".into());
    }
    if !folder.is_dir() {
        return Err(format!("there is no directory '{}'", folder.display()));
    }
    let place = if path.exists() { path } else { folder };
    access(place, Access::WRITE_OK).map_err(|error| format!("'{}': {error}", place.display()))
}

/// Refuses early what can't become a file, since some reports take hours.
fn json_target(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    match text {
        "" => return Err("a file, as --json=report.json, or --json alone".into()),
        "-" => {}
        _ => can_be_written(&path)?,
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_can_not_be_are_refused_early() {
        assert_eq!(json_target("-"), Ok("-".into()));
        assert_eq!(json_target("report.json"), Ok("report.json".into()));
        for (wrong, why) in
            [("", "--json=report.json"), ("/", "directory"), ("/no/such/x.json", "'/no/such'")]
        {
            assert!(json_target(wrong).is_err_and(|said| said.contains(why)), "{wrong}");
        }
    }

    /// As a server writes one for each client.
    #[test]
    fn reports_follow_each_other_in_a_file() {
        let file = std::env::temp_dir().join(format!("ferroce-reports-{}.json", std::process::id()));
        fs::write(&file, "of an earlier run").unwrap();
        let json = JsonArg { to: Some(file.clone()), ..JsonArg::default() };
        for report in [1, 2] {
            assert!(json.clone().write(&report).unwrap());
        }
        assert_eq!(fs::read_to_string(&file).unwrap(), "1\n2\n");
        fs::remove_file(&file).unwrap();
    }

    #[test]
    fn each_output_has_a_file_of_its_own() {
        let check = |inputs: &[(&'static str, &'static Path)], outputs: &[(&'static str, &'static str)]| {
            let outputs = outputs.iter().map(|(option, path)| (*option, Path::new(*path)));
            check_files(inputs, outputs).map_err(|failure| failure.to_string())
        };
        assert_eq!(check(&[], &[("--pcap", "a.pcapng"), ("--json", "a.json")]), Ok(()));
        assert_eq!(check(&[], &[("--pcap", "/dev/null"), ("--json", "/dev/null")]), Ok(()));
        for same in ["a.json", "./a.json", "src/../a.json"] {
            let refused = check(&[], &[("--pcap", same), ("--json", "a.json")]).unwrap_err();
            assert!(
                refused.contains("--json a.json") && refused.contains("--pcap has this one"),
                "{refused}"
            );
        }
        let source = Path::new("Cargo.toml");
        let refused = check(&[("the scenario", source)], &[("--svg", "./Cargo.toml")]).unwrap_err();
        assert!(refused.contains("the scenario has this one"), "{refused}");
    }
}
