//! The `ferroce` command: its arguments, its log, and its exit status. What it does is in `ferroce_tools`.

use std::io::{self, ErrorKind, IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use ferroce_tools::{Cli, Failure};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(said) => return answer(&said),
    };
    let level = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let has_color = io::stderr().is_terminal() && !is_plain;
    tracing_subscriber::fmt().with_env_filter(level).with_writer(io::stderr).with_ansi(has_color).init();
    let name = cli.command.name();
    cli.command.run().unwrap_or_else(|failure| end(name, &failure))
}

/// Prints the help that was asked for, or what is wrong with the command line.
fn answer(said: &clap::Error) -> ExitCode {
    match said.print().and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            end("--help", &Failure::Run(format!("standard output: {error}")))
        }
        _ => ExitCode::from(u8::try_from(said.exit_code()).unwrap_or(2)),
    }
}

/// Says why a command failed.
fn end(command: &str, failure: &Failure) -> ExitCode {
    // If that can't be written, the exit status says it alone.
    let _ = writeln!(io::stderr(), "ferroce {command}: {failure}");
    failure.exit_code()
}
