//! A driver that can be told to stop, so that a rank in the middle of an all-reduce unwinds, closes
//! its port and completes its capture.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;
use std::time::Duration;

use ferroce_driver::{
    Armed, Capabilities, Error, FrameSink, FrameSource, Nanos, NextHop, PacketDriver, Refusal, Stats,
};

/// Passes everything on, until the flag is set: from then on its port is gone.
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

impl PacketDriver for Stoppable {
    fn capabilities(&self) -> &Capabilities {
        self.driver.capabilities()
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.check()?;
        self.driver.rx_burst(now, sink)
    }

    fn tx_burst(&mut self, now: Nanos, source: &mut dyn FrameSource) -> Result<usize, Error> {
        self.driver.tx_burst(now, source)
    }

    fn wait(&mut self, timeout: Duration) -> Result<(), Error> {
        self.driver.wait(timeout)
    }

    fn waker(&self) -> Option<Waker> {
        self.driver.waker()
    }

    fn arm(&mut self) -> Result<Armed<'_>, Error> {
        self.driver.arm()
    }

    fn disarm(&mut self) {
        self.driver.disarm();
    }

    fn resolve(&mut self, peer: IpAddr) -> Result<NextHop, Error> {
        self.check()?;
        self.driver.resolve(peer)
    }

    fn next_refusal(&mut self) -> Option<Refusal> {
        self.driver.next_refusal()
    }

    fn stats(&self) -> Stats {
        self.driver.stats()
    }
}
