//! Waiting for what the kernel, or another process, does a moment later.

use std::thread;
use std::time::{Duration, Instant};

/// Looks once a millisecond until there is something, and returns it.
///
/// # Panics
/// When there has been nothing for `limit`, with what `missing` says then.
#[track_caller]
pub fn until<T>(limit: Duration, mut look: impl FnMut() -> Option<T>, missing: impl FnOnce() -> String) -> T {
    let deadline = Instant::now() + limit;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "not within {limit:?}: {}", missing());
        thread::sleep(Duration::from_millis(1));
    }
}
