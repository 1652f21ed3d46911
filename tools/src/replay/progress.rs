//! The progress of a replay on standard error, and its interruption.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use crate::endpoint::Interrupt;
use crate::failure::Failure;
use crate::output::is_verbose;

/// The time of the last line.
pub(super) struct Progress {
    interrupt: Interrupt,
    last: Instant,
    /// Whether a line is overwritten by the next one.
    in_place: bool,
    is_shown: bool,
}

/// The intervals between lines on a terminal, and in a log.
const IN_PLACE: Duration = Duration::from_millis(250);
const IN_LOG: Duration = Duration::from_secs(5);

impl Progress {
    pub(super) fn start(interrupt: Interrupt) -> Progress {
        let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
        let in_place = io::stderr().is_terminal() && !is_dumb;
        Progress { interrupt, last: Instant::now(), in_place, is_shown: false }
    }

    /// Prints the progress, at most every few seconds, unless RUST_LOG disables it.
    pub(super) fn tell(&mut self, how_far: impl FnOnce() -> String) {
        let interval = if self.in_place { IN_PLACE } else { IN_LOG };
        if self.last.elapsed() < interval || !is_verbose() {
            return;
        }
        // The report does not depend on whether this succeeds.
        let _ = match self.in_place {
            true => write!(io::stderr(), "\r\x1b[Kferroce replay: {}", how_far()),
            false => writeln!(io::stderr(), "ferroce replay: {}", how_far()),
        };
        self.is_shown = self.in_place;
        self.last = Instant::now();
    }

    /// As [`tell`](Progress::tell); fails after a signal.
    pub(super) fn step(&mut self, how_far: impl FnOnce() -> String) -> Result<(), Failure> {
        self.tell(how_far);
        self.interrupt.check()
    }

    /// Clears the line, before other output.
    pub(super) fn clear(&mut self) {
        if self.is_shown {
            let _ = write!(io::stderr(), "\r\x1b[K");
            self.is_shown = false;
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.clear();
    }
}
