//! The failures of a command, and the exit statuses: 0 success, 1 failed, 2 wrong usage, 130 interrupted.

use std::io;
use std::process::ExitCode;

use ferroce::{driver, is_unprintable};

/// The exit status of a command that a signal ended, as in shells.
pub(crate) const INTERRUPTED: u8 = 130;

/// The reason that a command failed, which determines its exit status.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// The arguments are invalid or can't be carried out. Exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The command failed. Exit status 1.
    #[error("{0}")]
    Run(String),
    /// SIGINT or SIGTERM. Exit status 130.
    #[error("interrupted")]
    Interrupted,
}

impl Failure {
    pub(crate) fn run(reason: impl Into<String>) -> Failure {
        Failure::Run(reason.into())
    }

    pub(crate) fn usage(reason: impl Into<String>) -> Failure {
        Failure::Usage(reason.into())
    }

    /// The exit status of the command.
    pub fn exit_code(&self) -> ExitCode {
        match self {
            Failure::Usage(_) => ExitCode::from(2),
            Failure::Run(_) => ExitCode::from(1),
            Failure::Interrupted => ExitCode::from(INTERRUPTED),
        }
    }
}

/// A peer's bytes as text: escaped, and truncated if they are long.
pub(crate) fn quote(bytes: &[u8]) -> String {
    const MOST: usize = 128;
    match bytes.get(..MOST).filter(|_| bytes.len() > MOST) {
        None => format!("'{}'", bytes.escape_ascii()),
        Some(start) => format!("'{}'... ({} bytes)", start.escape_ascii(), bytes.len()),
    }
}

/// A peer's text: without control characters for the terminal, and truncated if it is long.
pub(crate) fn legible(text: &str) -> String {
    const MOST: usize = 1024;
    let cut = if text.chars().nth(MOST).is_some() { "..." } else { "" };
    let visible = |c: char| if is_unprintable(c) { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().take(MOST).map(visible).chain(cut.chars()).collect()
}

impl From<ferroce::Error> for Failure {
    fn from(error: ferroce::Error) -> Failure {
        use ferroce::Error as E;
        match error {
            E::Driver(error) => error.into(),
            E::Invalid { .. } | E::PathMtu { .. } | E::AddressFamily { .. } => {
                Failure::Usage(error.to_string())
            }
            _ => Failure::Run(error.to_string()),
        }
    }
}

impl From<driver::Error> for Failure {
    fn from(error: driver::Error) -> Failure {
        use driver::Error as E;
        match error {
            E::NoInterface { .. }
            | E::NoRnic { .. }
            | E::InterfaceDown { .. }
            | E::Invalid { .. }
            | E::Topology { .. }
            | E::Capture { .. } => Failure::Usage(error.to_string()),
            _ => Failure::Run(error.to_string()),
        }
    }
}

impl From<driver::gpu::GpuError> for Failure {
    fn from(error: driver::gpu::GpuError) -> Failure {
        match error {
            driver::gpu::GpuError::NoDevice { .. } => Failure::Usage(format!("--memory {error}")),
            error => Failure::Run(error.to_string()),
        }
    }
}

impl From<ferroce_collectives::Error> for Failure {
    fn from(error: ferroce_collectives::Error) -> Failure {
        use ferroce_collectives::Error as E;
        match error {
            E::Verbs(error) => error.into(),
            E::Gpu(error) => error.into(),
            E::Environment { .. } | E::Invalid { .. } => Failure::Usage(error.to_string()),
            _ => Failure::Run(error.to_string()),
        }
    }
}

impl From<ferroce::MemoryError> for Failure {
    fn from(error: ferroce::MemoryError) -> Failure {
        Failure::Run(error.to_string())
    }
}

impl From<ferroce::RegisterError> for Failure {
    fn from(error: ferroce::RegisterError) -> Failure {
        Failure::from(error.source)
    }
}

/// The context of a failed system call.
pub(crate) trait OrFail<T> {
    /// Fails with `what` and the reason.
    fn or_fail(self, what: impl FnOnce() -> String) -> Result<T, Failure>;
}

impl<T> OrFail<T> for io::Result<T> {
    fn or_fail(self, what: impl FnOnce() -> String) -> Result<T, Failure> {
        self.map_err(|error| Failure::Run(format!("{}: {error}", what())))
    }
}
