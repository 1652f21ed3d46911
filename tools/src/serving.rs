//! A server that takes its clients one by one.

use std::thread;
use std::time::Duration;

use tracing::{info, warn};

use crate::failure::Failure;

/// What every server of one client at a time can be told.
//
// A client that comes while another one is served finds no listener, and is refused without waiting.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ServingArgs {
    /// Server: serve one client after another until SIGINT or SIGTERM, which end it with status 0 unless a client is being
    /// served. A client that fails does not end it. A client that comes while another one is served is refused, and can try
    /// again later.
    #[arg(short = 'P', long, conflicts_with_all = ["host", "pcap"])]
    persistent: bool,
}

/// After a client that failed, lest a server that can't serve anybody spins.
const PAUSE: Duration = Duration::from_millis(100);

impl ServingArgs {
    /// Serves one client, or many. `open` prepares for the next one, and `serve` returns whether one has come before a signal.
    pub(crate) fn run<E>(
        &self,
        mut open: impl FnMut() -> Result<E, Failure>,
        mut serve: impl FnMut(E) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let mut served = 0;
        loop {
            match serve(open()?) {
                Ok(true) if !self.persistent => return Ok(()),
                Ok(true) => served += 1,
                Ok(false) => {
                    info!("a signal ends the server, which has served {served} clients");
                    return Ok(());
                }
                Err(failure @ (Failure::Run(_) | Failure::Usage(_))) if self.persistent => {
                    warn!("a client was not served to its end: {failure}");
                    thread::sleep(PAUSE);
                }
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// Where a server waits for a client, a signal is no failure: `None`.
pub(crate) fn until_signal<T>(waited: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match waited {
        Err(Failure::Interrupted) => Ok(None),
        waited => waited.map(Some),
    }
}
