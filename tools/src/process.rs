//! Other processes of this host.

use std::fs::File;
use std::io::Read;

use crate::failure::legible;

/// The command line of a process, truncated if it is long; `None` if the process has ended or is hidden.
pub(crate) fn command_line(pid: u32) -> Option<String> {
    const MOST: u64 = 160;
    let mut bytes = Vec::new();
    File::open(format!("/proc/{pid}/cmdline")).ok()?.take(MOST + 1).read_to_end(&mut bytes).ok()?;
    let is_cut = bytes.len() as u64 > MOST;
    bytes.truncate(MOST as usize);
    let arguments = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect::<Vec<_>>().join(" ");
    let line = legible(arguments.trim_end());
    (!line.is_empty()).then(|| if is_cut { format!("{line}...") } else { line })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_of_a_process_is_found() {
        let own = command_line(std::process::id()).unwrap();
        let program = std::env::args().next().unwrap();
        assert!(own.starts_with(&program.chars().take(100).collect::<String>()), "{own}");
        assert_eq!(command_line(u32::MAX), None);
    }
}
