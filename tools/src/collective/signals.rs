//! Signals to a rank: writing a flight recording, and ending.

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

/// SIGINT and SIGTERM end the process at once, and the other ranks notice. SIGTERM, by which launchers end ranks when one has failed,
/// has it leave a recording before, where a directory is named for that.
pub(super) struct EndingSignals {
    /// Whether SIGTERM does so without a recording.
    at_once: Arc<AtomicBool>,
}

impl EndingSignals {
    pub(super) fn install() -> Result<EndingSignals, Failure> {
        let at_once = Arc::new(AtomicBool::new(true));
        end_at_once_while(&Arc::new(AtomicBool::new(true)), SIGINT, INTERRUPTED)?;
        end_at_once_while(&at_once, SIGTERM, INTERRUPTED)?;
        Ok(EndingSignals { at_once })
    }

    /// From now on a thread of its own leaves recordings, at SIGUSR1, too: the one that works may hang.
    pub(super) fn dump_first(self, recorder: FlightRecorder) -> Result<(), Failure> {
        let mut signals = Signals::new([SIGUSR1, SIGTERM]).or_fail(|| "handling signals".into())?;
        let folder = std::env::var_os(FOLDER).map(PathBuf::from);
        let EndingSignals { at_once } = self;
        at_once.store(folder.is_none(), Ordering::Relaxed);
        let folder = folder.unwrap_or_else(|| PathBuf::from("."));
        thread::spawn(move || {
            for signal in signals.forever() {
                // Writing may take long. Who can't wait sends it again.
                at_once.fetch_or(signal == SIGTERM, Ordering::Relaxed);
                match recorder.dump_into(&folder) {
                    Ok(path) => warn!("a flight recording is in {path:?}"),
                    Err(error) => warn!("no flight recording in {folder:?}: {error}"),
                }
                if signal == SIGTERM {
                    // Without what libraries do at the end: the other thread uses them.
                    exit(INTERRUPTED.into());
                }
            }
        });
        Ok(())
    }
}
