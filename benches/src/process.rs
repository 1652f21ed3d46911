//! Processes beside a benchmark.

use std::process::Child;

/// A process that ends with the value.
pub struct Stopped(pub Child);

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
