//! Signals to processes, without the program `kill`, which a bare Debian lacks.

pub use rustix::process::Signal;
use rustix::process::{Pid, kill_process};

/// Sends a signal to a process of the test's own.
pub fn signal(process: u32, signal: Signal) {
    let process = Pid::from_raw(process as i32).expect("a process has a number above 0");
    kill_process(process, signal).expect("the process is there");
}
