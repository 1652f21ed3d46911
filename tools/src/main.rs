//! The `ferroce` command: its arguments, its log, and its exit status. What it does is in `ferroce_tools`.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use ferroce_tools::{Command, Failure};
use tracing::warn;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// RoCEv2 in user space.
#[derive(Parser)]
#[command(version, after_help = CONVENTIONS)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Print only errors and warnings to standard error, no progress; the report stays.
    // `perf` has -q for its queue pairs, as perftest has.
    #[arg(short, long, global = true)]
    quiet: bool,
}

/// What holds for every sub-command.
const CONVENTIONS: &str = "\
Results go to standard output; progress, warnings and errors to standard error.

Environment:
  RUST_LOG  what is logged to standard error: a level (error, warn, info, debug, trace, off), or TARGET=LEVEL for a part of
            ferroce, with commas between them, as RUST_LOG=warn,ferroce_driver=debug. What it does not name is logged at
            info. --quiet stands for RUST_LOG=warn.
  NO_COLOR  if it is set, there are no ANSI codes. There are none either with TERM=dumb, or if standard error is no
            terminal.

Exit status:
  0    the work was done
  1    it failed, or a check found something
  2    the command line can't be carried out as it is
  130  a signal (SIGINT, SIGTERM) ended it before the work was done
If the reader of standard output closes it (`| head -1`), the rest is not printed, and the exit status is that of the work. If
standard output can't be written, that is an error.";

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(said) => return answer(&said),
    };
    if let Err(failure) = start_log(cli.quiet) {
        return end("", &failure);
    }
    let name = cli.command.name();
    cli.command.run().unwrap_or_else(|failure| end(name, &failure))
}

const LOG: &str = "RUST_LOG";
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Logs to standard error what RUST_LOG says.
fn start_log(quiet: bool) -> Result<(), Failure> {
    let given = std::env::var_os(LOG).unwrap_or_default();
    let (filter, strange) = read_filter(&given)?;
    tracing_subscriber::fmt()
        .with_env_filter(if quiet { EnvFilter::new("warn") } else { filter })
        .with_writer(io::stderr)
        .with_ansi(has_color())
        // Standard error may be a pipe that nobody reads.
        .log_internal_errors(false)
        .init();
    for word in strange {
        warn!("{LOG}: '{word}' is neither a level ({}) nor a part of ferroce", LEVELS.join(", "));
    }
    Ok(())
}

/// Reads the value of RUST_LOG. Returns also the words that select nothing here: this variable is often set for other
/// programs, so they are no error.
fn read_filter(given: &OsStr) -> Result<(EnvFilter, Vec<&str>), Failure> {
    let wrong = |part: &str| {
        Failure::Usage(format!(
            "{LOG}: '{part}' must be a level ({}) or TARGET=LEVEL, as warn or ferroce_driver=debug",
            LEVELS.join(", ")
        ))
    };
    let text = given.to_str().ok_or_else(|| wrong(&given.to_string_lossy()))?;
    let mut filter = EnvFilter::new("info");
    let mut strange = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        filter = filter.add_directive(part.parse().map_err(|_| wrong(part))?);
        if part.parse::<LevelFilter>().is_err() && !part.contains('=') && !part.starts_with("ferroce") {
            strange.push(part);
        }
    }
    Ok((filter, strange))
}

/// Whether standard error takes ANSI escape codes.
fn has_color() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Prints the help that was asked for, or what is wrong with the command line.
fn answer(said: &clap::Error) -> ExitCode {
    let status = ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(2));
    match said.print().and_then(|()| io::stdout().flush()) {
        Err(error) if !said.use_stderr() && error.kind() != io::ErrorKind::BrokenPipe => {
            end("--help", &Failure::Run(format!("standard output: {error}")))
        }
        _ => status,
    }
}

/// Says why a command failed.
fn end(command: &str, failure: &Failure) -> ExitCode {
    let space = if command.is_empty() { "" } else { " " };
    // If that can't be written, the exit status says it alone.
    let _ = writeln!(io::stderr(), "ferroce{space}{command}: {failure}");
    failure.exit_code()
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_of_all_commands_fit_together() {
        Cli::command().debug_assert();
        for (arguments, quiet) in [
            (&["ferroce", "-q", "stat"][..], true),
            (&["ferroce", "stat", "-q"], true),
            (&["ferroce", "stat"], false),
            // -q is of queue pairs here.
            (&["ferroce", "perf", "write", "bw", "-d", "loopback", "-q", "2"], false),
            (&["ferroce", "perf", "write", "bw", "-d", "loopback", "--quiet"], true),
        ] {
            assert_eq!(Cli::parse_from(arguments).quiet, quiet, "{arguments:?}");
        }
    }

    #[test]
    fn the_log_variable_is_read_or_refused() {
        let read = |text: &str| read_filter(text.as_ref()).map(|(filter, _)| filter.to_string());
        assert_eq!(read("").unwrap(), "info");
        assert_eq!(read("debug").unwrap(), "debug");
        assert_eq!(read("ferroce_driver=trace").unwrap(), "ferroce_driver=trace,info");
        let (_, strange) = read_filter("inof".as_ref()).unwrap();
        assert_eq!(strange, ["inof"]);
        for wrong in ["ferroce=verbose", "a=b=c", "warn,[x"] {
            let said = read(wrong).unwrap_err().to_string();
            let part = wrong.trim_start_matches("warn,");
            assert!(said.contains(&format!("'{part}'")) && said.contains("trace"), "{wrong}: {said}");
        }
    }
}
