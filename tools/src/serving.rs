//! A server that serves its clients one by one.
//!
//! While it serves a client it does not listen, so another client is refused at once. A signal without a client ends
//! the server with exit status 0.

use std::thread;
use std::time::Duration;

use tracing::{info, warn};

use crate::endpoint::Interrupt;
use crate::failure::Failure;

/// What every server of one client at a time can be told.
//
// A client that connects while another one is served finds no listener, and is refused at once.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct ServingArgs {
    /// Server: serve clients one after another until SIGINT or SIGTERM, which end it with status 0 if no client is
    /// being served. A failed client does not end it. While one client is served, others are refused and can try again
    /// later.
    #[arg(short = 'P', long, conflicts_with_all = ["host", "pcap"])]
    persistent: bool,
}

/// The pause after a failed client, so that a server that can't serve any client does not spin.
const PAUSE: Duration = Duration::from_millis(100);
/// The interval for opening an unavailable device or port again.
const REOPEN_PAUSE: Duration = Duration::from_secs(1);

impl ServingArgs {
    /// Serves one client, or many. `open` prepares for the next one, and `serve` returns whether a client arrived
    /// before a signal.
    pub(crate) fn run<E>(
        &self,
        interrupt: &Interrupt,
        mut open: impl FnMut() -> Result<E, Failure>,
        mut serve: impl FnMut(E) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let mut served = 0;
        let mut end = open()?;
        loop {
            match serve(end) {
                Ok(true) if !self.persistent => return Ok(()),
                Ok(true) => served += 1,
                Ok(false) => return ended(served),
                Err(failure @ (Failure::Run(_) | Failure::Usage(_))) if self.persistent => {
                    warn!("serving a client failed: {failure}");
                    thread::sleep(PAUSE);
                }
                Err(failure) => return Err(failure),
            }
            // Another process may have taken the TCP port or the device meanwhile, and may release it.
            let mut is_told = false;
            end = loop {
                match open() {
                    Ok(end) => break end,
                    Err(_) if interrupt.is_set() => return ended(served),
                    Err(failure) if !is_told => {
                        warn!("no client can be served until this is resolved: {failure}");
                        is_told = true;
                    }
                    Err(_) => {}
                }
                thread::sleep(REOPEN_PAUSE);
            };
        }
    }
}

fn ended(served: u64) -> Result<(), Failure> {
    info!("a signal ends the server after {served} clients");
    Ok(())
}

/// For a server that waits for a client, a signal is not a failure: `None`.
pub(crate) fn until_signal<T>(waited: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match waited {
        Err(Failure::Interrupted) => Ok(None),
        waited => waited.map(Some),
    }
}
