//! The instructions of a process, counted by callgrind: the same on every run and every machine with the same compiler.

use std::error::Error;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Whether valgrind is installed.
pub fn is_there() -> bool {
    Command::new("valgrind").arg("--version").stdout(Stdio::null()).status().is_ok()
}

/// The instruction count and the output of a process.
pub struct Counted {
    /// Instructions of the whole process.
    pub instructions: u64,
    /// Its standard output, trimmed.
    pub said: String,
}

/// Runs a program under valgrind.
///
/// # Errors
/// It ends with an error, which contains its output.
pub fn count(program: &Path, arguments: &[impl AsRef<OsStr>]) -> Result<Counted, Box<dyn Error>> {
    let profile = Profile::new();
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "-q"])
        .arg(format!("--callgrind-out-file={}", profile.0.display()))
        .arg(program)
        .args(arguments)
        .output()?;
    if !output.status.success() {
        let arguments: Vec<_> =
            arguments.iter().map(|argument| argument.as_ref().to_string_lossy()).collect();
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(format!("valgrind, {}: {}", arguments.join(" "), said.trim()).into());
    }
    let profile = std::fs::read_to_string(&profile.0)?;
    let total = profile.lines().find_map(|line| line.strip_prefix("summary:"));
    let total = total.ok_or("callgrind wrote no summary")?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    Ok(Counted { instructions: total.trim().parse()?, said })
}

/// A file that is removed after reading.
struct Profile(PathBuf);

impl Profile {
    fn new() -> Profile {
        Profile(std::env::temp_dir().join(format!("ferroce-callgrind-{}", std::process::id())))
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}
