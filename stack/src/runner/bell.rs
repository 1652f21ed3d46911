use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes the one thread that waits for changes which another one makes. Costs a fence and a load
/// while nobody waits.
#[derive(Debug, Default)]
pub(super) struct Bell {
    waiting: AtomicBool,
    rung: Mutex<bool>,
    ringing: Condvar,
}

impl Bell {
    /// Something has changed.
    pub(super) fn ring(&self) {
        // Either the other thread sees the change in its last look, or this one sees it waiting.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) {
            *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
            self.ringing.notify_one();
        }
    }

    /// Sleeps until it rings, or for `timeout`; not at all if `is_ready` says so. May end early.
    pub(super) fn sleep(&self, timeout: Duration, is_ready: impl FnOnce() -> bool) {
        self.waiting.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if !is_ready() {
            let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
            let result = self.ringing.wait_timeout_while(rung, timeout, |rung| !*rung);
            *result.unwrap_or_else(PoisonError::into_inner).0 = false;
        }
        self.waiting.store(false, Ordering::Relaxed);
    }
}
