//! Processes that a benchmark starts.

use std::process::Child;

/// A process that is killed on drop.
pub struct Stopped(pub Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
