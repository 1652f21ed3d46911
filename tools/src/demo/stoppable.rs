//! A driver that can be stopped, so that a rank in the middle of an all-reduce returns, closes its port and completes
//! its capture.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ferroce_driver::{Error, FrameSink, Nanos, NextHop, PacketDriver};

/// Forwards everything to the driver until the flag is set; then the port fails.
pub(super) struct Stoppable {
    /// The driver.
    pub(super) driver: Box<dyn PacketDriver>,
    /// Set by another thread.
    pub(super) stop: Arc<AtomicBool>,
}

impl Stoppable {
    fn check(&self) -> Result<(), Error> {
        if !self.stop.load(Ordering::Relaxed) {
            return Ok(());
        }
        Err(Error::Os {
            what: "going on",
            interface: self.driver.capabilities().interface.clone(),
            source: io::Error::new(io::ErrorKind::Interrupted, "told to stop"),
        })
    }
}

impl ferroce_driver::Wrapper for Stoppable {
    type Inner = dyn PacketDriver;

    fn inner(&self) -> &Self::Inner {
        &*self.driver
    }

    fn inner_mut(&mut self) -> &mut Self::Inner {
        &mut *self.driver
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.check()?;
        self.inner_mut().rx_burst(now, sink)
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        self.check()?;
        self.inner_mut().resolve(peer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::groups::Groups;

    #[test]
    fn groups_are_joined_and_left_inside() {
        let (driver, calls) = Groups::new();
        let mut port = Stoppable { driver: Box::new(driver), stop: Arc::default() };
        let group = [239, 0, 0, 1].into();
        PacketDriver::join(&mut port, group).unwrap();
        PacketDriver::leave(&mut port, group).unwrap();
        assert_eq!(*calls.lock().unwrap(), [("join", group), ("leave", group)]);
    }
}
