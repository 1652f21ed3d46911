//! A port that dies when told.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Waker;

use ferroce_driver::loopback::Loopback;
use ferroce_driver::{Error, FrameSink, Nanos, PacketDriver, Wrapper};

/// A loopback port whose receiving fails with "it is gone" once it is `dead`, and that counts how often it is used.
pub struct Mortal {
    port: Loopback,
    dead: Arc<AtomicBool>,
    polls: Arc<AtomicU64>,
    waker: bool,
}

impl Mortal {
    /// Over `port`, alive until `dead` is set.
    pub fn new(port: Loopback, dead: Arc<AtomicBool>) -> Mortal {
        Mortal { port, dead, polls: Arc::default(), waker: true }
    }

    /// Counts its bursts there.
    pub fn counting(self, polls: Arc<AtomicU64>) -> Mortal {
        Mortal { polls, ..self }
    }

    /// Whether it has the port's waker; it has by default.
    pub fn waker(self, waker: bool) -> Mortal {
        Mortal { waker, ..self }
    }
}

impl Wrapper for Mortal {
    type Inner = Loopback;

    fn inner(&self) -> &Loopback {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }

    fn rx_burst(&mut self, now: Nanos, sink: &mut dyn FrameSink) -> Result<usize, Error> {
        self.polls.fetch_add(1, Ordering::Relaxed);
        if self.dead.load(Ordering::Relaxed) {
            let (what, interface) = ("using the port", "mortal0".to_owned());
            return Err(Error::Os { what, interface, source: io::Error::other("it is gone") });
        }
        self.port.rx_burst(now, sink)
    }

    fn waker(&self) -> Option<Waker> {
        self.port.waker().filter(|_| self.waker)
    }
}
