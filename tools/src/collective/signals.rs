//! Signals to a rank: they make it write a flight recording, or end.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use ferroce_collectives::flight::{FOLDER, FlightRecorder};
use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;
use signal_hook::low_level::exit;
use tracing::warn;

use crate::endpoint::end_at_once_while;
use crate::failure::{Failure, INTERRUPTED, OrFail};

/// SIGINT and SIGTERM end the process at once, and the other ranks notice. Launchers send SIGTERM to the remaining
/// ranks when one has failed, so on SIGTERM the rank first writes a recording if a directory is set for it.
pub(super) struct EndingSignals {
    /// Whether SIGTERM ends the process without a recording.
    at_once: Arc<AtomicBool>,
}

impl EndingSignals {
    pub(super) fn install() -> Result<EndingSignals, Failure> {
        let at_once = Arc::new(AtomicBool::new(true));
        end_at_once_while(&Arc::new(AtomicBool::new(true)), SIGINT, INTERRUPTED)?;
        end_at_once_while(&at_once, SIGTERM, INTERRUPTED)?;
        Ok(EndingSignals { at_once })
    }

    /// Starts a thread that writes recordings, also on SIGUSR1: the main thread may hang.
    pub(super) fn dump_first(self, recorder: FlightRecorder) -> Result<(), Failure> {
        let mut signals = Signals::new([SIGUSR1, SIGTERM]).or_fail(|| "handling signals".into())?;
        let folder = std::env::var_os(FOLDER).map(PathBuf::from);
        let EndingSignals { at_once } = self;
        at_once.store(folder.is_none(), Ordering::Relaxed);
        let folder = folder.unwrap_or_else(|| PathBuf::from("."));
        thread::spawn(move || {
            for signal in signals.forever() {
                // Writing may take long. A second SIGTERM ends the process without waiting for it.
                at_once.fetch_or(signal == SIGTERM, Ordering::Relaxed);
                match recorder.dump_into(&folder) {
                    Ok(path) => warn!("a flight recording is in {path:?}"),
                    Err(error) => warn!("no flight recording in {folder:?}: {error}"),
                }
                if signal == SIGTERM {
                    // Without the exit handlers of libraries: the other thread still uses these libraries.
                    exit(INTERRUPTED.into());
                }
            }
        });
        Ok(())
    }
}
