//! A port that counts how often it is waited for.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ferroce_driver::loopback::Loopback;
use ferroce_driver::{Error, PacketDriver, Wrapper};

/// Counts in `waits`.
pub struct Waited {
    /// The port.
    pub port: Loopback,
    /// How often it was waited for.
    pub waits: Arc<AtomicU64>,
}

impl Wrapper for Waited {
    type Inner = Loopback;

    fn inner(&self) -> &Loopback {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        PacketDriver::wait(&mut self.port, timeout)
    }
}
