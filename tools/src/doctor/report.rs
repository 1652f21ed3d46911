//! The results of the check, as a table and as JSON.

use std::process::ExitCode;

use serde::Serialize;

use crate::failure::Failure;
use crate::output::{JsonArg, say};

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum CheckVerdict {
    Ok,
    /// Not a fault, but worth knowing.
    Note,
    Failed,
    /// It could not be checked; the text says why.
    NotChecked,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Check {
    pub(super) check: &'static str,
    pub(super) result: CheckVerdict,
    pub(super) seen: String,
    /// The remedy: a command or a setting.
    pub(super) cure: Option<String>,
}

impl Check {
    pub(super) fn ok(check: &'static str, seen: impl Into<String>) -> Check {
        Check { check, result: CheckVerdict::Ok, seen: seen.into(), cure: None }
    }

    pub(super) fn note(check: &'static str, seen: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { check, result: CheckVerdict::Note, seen: seen.into(), cure: Some(cure.into()) }
    }

    pub(super) fn failed(check: &'static str, seen: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { check, result: CheckVerdict::Failed, seen: seen.into(), cure: Some(cure.into()) }
    }

    pub(super) fn not_checked(check: &'static str, why: impl Into<String>) -> Check {
        Check { check, result: CheckVerdict::NotChecked, seen: why.into(), cure: None }
    }
}

/// Whether the checks use UDP port 4791.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Mode {
    /// They send and receive packets on it.
    Active,
    /// The port is left to the program that has it.
    Passive,
}

/// All of them.
#[derive(Debug, Serialize)]
pub(super) struct DoctorReport {
    /// The peer as given, if any.
    pub(super) peer: Option<String>,
    pub(super) device: String,
    pub(super) mode: Mode,
    /// The reason for the mode.
    pub(super) why: String,
    /// Whether no check failed.
    pub(super) well: bool,
    pub(super) checks: Vec<Check>,
}

impl DoctorReport {
    pub(super) fn new(
        peer: Option<&str>,
        device: String,
        (mode, why): (Mode, String),
        checks: Vec<Check>,
    ) -> DoctorReport {
        let well = checks.iter().all(|check| check.result != CheckVerdict::Failed);
        DoctorReport { peer: peer.map(str::to_owned), device, mode, why, well, checks }
    }

    /// Returns the exit status: 0 if no check failed, otherwise 1.
    pub(super) fn print(&self, json: &JsonArg) -> Result<ExitCode, Failure> {
        if !json.write(self)? {
            self.print_table()?;
        }
        Ok(ExitCode::from(u8::from(!self.well)))
    }

    fn print_table(&self) -> Result<(), Failure> {
        let width = self.checks.iter().map(|check| check.check.chars().count()).max().unwrap_or(0);
        match &self.peer {
            Some(peer) => say!("{peer} seen from {}", self.device)?,
            None => say!("{} by itself", self.device)?,
        }
        let mode = match self.mode {
            Mode::Active => "active",
            Mode::Passive => "passive",
        };
        say!("{mode}: {}", self.why.replace(ferroce::is_unprintable, "?"))?;
        say!("{:<width$} | result      | what was seen, and the remedy", "check")?;
        for Check { check, result, seen, cure } in &self.checks {
            // Text of the other end must not contain control characters for the terminal.
            let seen = seen.replace(ferroce::is_unprintable, "?");
            say!("{check:<width$} | {:<11} | {seen}", result.word())?;
            if let Some(cure) = cure {
                say!("{:<width$} |             | remedy: {cure}", "")?;
            }
        }
        let failed = self.checks.iter().filter(|check| check.result == CheckVerdict::Failed).count();
        match failed {
            0 => say!("no fault found, as far as it could be checked"),
            1 => say!("1 check failed"),
            _ => say!("{failed} checks failed"),
        }
    }
}

impl CheckVerdict {
    fn word(self) -> &'static str {
        match self {
            CheckVerdict::Ok => "ok",
            CheckVerdict::Note => "note",
            CheckVerdict::Failed => "FAILED",
            CheckVerdict::NotChecked => "not checked",
        }
    }
}
