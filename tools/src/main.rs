//! The `ferroce` command: parses the arguments, sets up the log, and ends the process with the exit status. The work is
//! done in `ferroce_tools`.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use ferroce_tools::{Cli, Failure};
use tracing::warn;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

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

/// Logs to standard error, as RUST_LOG says.
fn start_log(quiet: bool) -> Result<(), Failure> {
    let given = std::env::var_os(LOG).unwrap_or_default();
    let (filter, strange) = if quiet {
        (Targets::new().with_default(LevelFilter::WARN), Vec::new())
    } else {
        read_filter(&given)?
    };
    // Standard error may be a pipe without a reader.
    let lines = fmt::layer().with_writer(io::stderr).with_ansi(has_color()).log_internal_errors(false);
    tracing_subscriber::registry().with(lines).with(filter).init();
    for word in strange {
        warn!("{LOG}: '{word}' is neither a level ({}) nor a part of ferroce", LEVELS.join(", "));
    }
    Ok(())
}

/// Parses RUST_LOG. Also returns the words that select nothing here: this variable is often set for other programs, so
/// they are no error.
fn read_filter(given: &OsStr) -> Result<(Targets, Vec<&str>), Failure> {
    let wrong = |part: &str| {
        Failure::Usage(format!(
            "{LOG}: '{part}' must be a level ({}) or TARGET=LEVEL, as warn or ferroce_driver=debug",
            LEVELS.join(", ")
        ))
    };
    let text = given.to_str().ok_or_else(|| wrong(&given.to_string_lossy()))?;
    let mut filter = Targets::new().with_default(LevelFilter::INFO);
    let mut strange = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        if let Ok(level) = part.parse::<LevelFilter>() {
            filter = filter.with_default(level);
            continue;
        }
        if !part.starts_with("ferroce") {
            strange.push(part);
            continue;
        }
        let (target, level) = part.split_once('=').unwrap_or((part, "trace"));
        if !target.chars().all(|c| c.is_alphanumeric() || "_-:".contains(c)) {
            return Err(wrong(part));
        }
        filter = filter.with_target(target, level.parse::<LevelFilter>().map_err(|_| wrong(part))?);
    }
    Ok((filter, strange))
}

/// Whether standard error supports ANSI escape codes.
fn has_color() -> bool {
    let is_set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
    let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    io::stderr().is_terminal() && !is_set("NO_COLOR") && !is_dumb
}

/// Prints the requested help, or the error in the command line.
fn answer(said: &clap::Error) -> ExitCode {
    let status = ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(2));
    match said.print().and_then(|()| io::stdout().flush()) {
        Err(error) if !said.use_stderr() && error.kind() != io::ErrorKind::BrokenPipe => {
            end("--help", &Failure::Run(format!("standard output: {error}")))
        }
        _ => status,
    }
}

/// Prints the reason that a command failed.
fn end(command: &str, failure: &Failure) -> ExitCode {
    let space = if command.is_empty() { "" } else { " " };
    // If that can't be written, only the exit status reports it.
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
            // Here -q is the number of queue pairs.
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
        for strange in ["inof", "a=b=c", "[x", "myapp[conn{id=3}]=debug"] {
            assert_eq!(read_filter(strange.as_ref()).unwrap().1, [strange]);
        }
        for wrong in ["ferroce=verbose", "warn,ferroce[x"] {
            let said = read(wrong).unwrap_err().to_string();
            let part = wrong.trim_start_matches("warn,");
            assert!(said.contains(&format!("'{part}'")) && said.contains("trace"), "{wrong}: {said}");
        }
    }
}
