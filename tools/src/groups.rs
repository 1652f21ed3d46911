//! A port that records the groups that are joined and left, for tests of its wrappers.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use ferroce::driver::loopback::{self, Loopback};
use ferroce::driver::{Error, Wrapper};

type Calls = Arc<Mutex<Vec<(&'static str, IpAddr)>>>;

/// Forwards everything except the two calls to a loopback port.
pub(crate) struct Groups {
    port: Loopback,
    calls: Calls,
}

impl Groups {
    pub(crate) fn new() -> (Groups, Calls) {
        let (port, _) = loopback::pair(&[[10, 0, 0, 1].into()], &[[10, 0, 0, 2].into()]);
        let calls = Calls::default();
        (Groups { port, calls: calls.clone() }, calls)
    }
}

impl Wrapper for Groups {
    type Inner = Loopback;

    fn inner(&self) -> &Loopback {
        &self.port
    }

    fn inner_mut(&mut self) -> &mut Loopback {
        &mut self.port
    }

    fn join(&mut self, group: IpAddr) -> Result<(), Error> {
        self.calls.lock().unwrap().push(("join", group));
        Ok(())
    }

    fn leave(&mut self, group: IpAddr) -> Result<(), Error> {
        self.calls.lock().unwrap().push(("leave", group));
        Ok(())
    }
}
