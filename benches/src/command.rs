//! The `ferroce` command, for benchmarks that run it.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The path of the command, next to the benchmark. A thorough run builds it first.
///
/// # Errors
/// It does not exist, or can't be built.
pub fn built(build: bool) -> Result<PathBuf, Box<dyn Error>> {
    let path = std::env::current_exe()?;
    let folder = path.parent().and_then(Path::parent).ok_or("no folder of build outputs")?;
    let command = folder.join("ferroce");
    if build {
        let arguments = ["build", "--release", "--quiet", "-p", "ferroce-tools"];
        let features: &[&str] = if cfg!(feature = "af_xdp") { &["--features", "af_xdp"] } else { &[] };
        let built = Command::new(env!("CARGO")).args(arguments).args(features).status()?;
        if !built.success() {
            return Err("the command can't be built".into());
        }
    }
    if !command.exists() {
        return Err(format!("no {}: cargo build -p ferroce-tools makes it", command.display()).into());
    }
    Ok(command)
}
