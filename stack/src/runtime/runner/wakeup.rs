//! How a runner and its handles sleep and wake each other, without locks on the path through their rings, and how the end is
//! reported to all of them.
//!
//! Before the runner blocks it stores that it sleeps, executes a fence, and checks every ring once more. A thread that posts
//! executes a fence and checks whether the runner sleeps. So one of the two sees the store of the other, and posting to a runner
//! that does not sleep needs no system call. `PacketDriver::waker` ends the runner's wait: an eventfd, in addition to the
//! descriptors of AF_XDP and UDP sockets, and with loopback. The other direction is the same, with a condition variable for
//! threads that wait for deliveries, and with the waker of a task (`task.rs`).
//!
//! `./do loom` (`stack/loom`) compiles this file with loom's atomics and runs it against a stub of the rings in every
//! order that the memory model allows. It also runs it without each of the four fences, and these runs must fail. (It
//! found a lost wake-up: a handle cleared the runner's mark that it is stalled before the handle had made room, while
//! the runner was not yet asleep.)

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::Duration;

use super::sync::{AtomicBool, AtomicU32, Condvar, Mutex, MutexGuard, OnceLock, fence};

/// The runner's sleep, and what it must check besides rings.
pub(super) struct Sleep {
    /// The runner is about to block, or blocks: a thread that has work for it must wake it.
    sleeping: AtomicBool,
    /// Counts created and dropped handles, and requests to stop.
    news: AtomicU32,
    stopping: AtomicBool,
}

impl Sleep {
    pub(super) fn new() -> Sleep {
        Sleep { sleeping: AtomicBool::new(false), news: AtomicU32::new(0), stopping: AtomicBool::new(false) }
    }

    /// A ring has an entry, or room again: calls `wake` if the runner sleeps.
    pub(super) fn nudge(&self, wake: impl FnOnce()) {
        // Either the runner sees it in its last check, or this thread sees that it sleeps.
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.take() {
            wake();
        }
    }

    /// The first thread that sees the runner sleep wakes it. (A swap would suffice: it reads the value that it replaces, so the
    /// runner's next store is ordered after it. loom does not model this for a swap that changes nothing.)
    fn take(&self) -> bool {
        self.sleeping.compare_exchange(true, false, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// There are changes, which were stored before.
    pub(super) fn tell_news(&self, wake: impl FnOnce()) {
        self.news.fetch_add(1, Ordering::Release);
        self.nudge(wake);
    }

    /// The runner is to stop.
    pub(super) fn stop(&self, wake: impl FnOnce()) {
        self.stopping.store(true, Ordering::Release);
        self.tell_news(wake);
    }

    /// Whether the runner is to stop; checked after changes.
    pub(super) fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// The number of changes so far.
    pub(super) fn news(&self) -> u32 {
        self.news.load(Ordering::Acquire)
    }

    /// Calls `block`, which `wake` ends, unless there are changes after those `seen`, or the last check of the rings finds
    /// something to do.
    pub(super) fn sleep<R>(
        &self,
        seen: u32,
        may_rest: impl FnOnce() -> bool,
        block: impl FnOnce() -> R,
    ) -> Option<R> {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        let result = (self.news() == seen && may_rest()).then(block);
        self.sleeping.store(false, Ordering::Relaxed);
        result
    }

    #[cfg(test)]
    pub(super) fn sleeping(&self) -> &AtomicBool {
        &self.sleeping
    }
}

/// Wakes the thread or task that waits for changes by another one. Without a waiting thread it costs a fence and a load.
#[derive(Debug)]
pub(super) struct Bell {
    waiting: AtomicBool,
    sleeper: Mutex<Sleeper>,
    ringing: Condvar,
}

#[derive(Debug)]
struct Sleeper {
    rung: bool,
    /// Woken once. It may since wait for something else.
    task: Option<Waker>,
}

impl Bell {
    fn new() -> Bell {
        let sleeper = Sleeper { rung: false, task: None };
        Bell { waiting: AtomicBool::new(false), sleeper: Mutex::new(sleeper), ringing: Condvar::new() }
    }

    /// Something has changed.
    pub(super) fn ring(&self) {
        // Either the other thread sees the change in its last check, or this one sees that it waits.
        fence(Ordering::SeqCst);
        if self.waiting.load(Ordering::Relaxed) {
            let mut sleeper = lock(&self.sleeper);
            sleeper.rung = true;
            let task = sleeper.task.take();
            if task.is_some() {
                self.waiting.store(false, Ordering::Relaxed);
            }
            drop(sleeper);
            self.ringing.notify_one();
            if let Some(task) = task {
                task.wake();
            }
        }
    }

    /// Sleeps until it rings, or for `timeout`; not at all if `is_ready` returns true. May end early.
    pub(super) fn sleep(&self, timeout: Duration, is_ready: impl FnOnce() -> bool) {
        if !self.look(is_ready) {
            let mut sleeper = lock(&self.sleeper);
            if !sleeper.rung {
                let woken = self.ringing.wait_timeout(sleeper, timeout);
                sleeper = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            sleeper.rung = false;
        }
        self.waiting.store(false, Ordering::Relaxed);
    }

    /// Wakes `task` when it rings next, unless `is_ready` returns true. Returns the result of `is_ready`.
    pub(super) fn tell(&self, task: &Waker, is_ready: impl FnOnce() -> bool) -> bool {
        let mut sleeper = lock(&self.sleeper);
        if !sleeper.task.as_ref().is_some_and(|known| known.will_wake(task)) {
            sleeper.task = Some(task.clone());
        }
        drop(sleeper);
        self.look(is_ready)
    }

    /// The last check of a thread that waits from now on.
    fn look(&self, is_ready: impl FnOnce() -> bool) -> bool {
        self.waiting.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        is_ready()
    }
}

/// The state shared by a handle and the runner's side of it, besides the rings.
#[derive(Debug)]
pub(super) struct Desk {
    /// Rung by the runner when commands were taken or something was delivered.
    pub(super) bell: Bell,
    /// The runner sleeps, or is about to, although it could not deliver everything: the handle must wake it when it makes room.
    /// Only the runner stores this: if a handle cleared it before it has made room, and while the runner is not yet asleep,
    /// nothing would wake the runner.
    stalled: AtomicBool,
    /// The handle was dropped.
    left: AtomicBool,
}

impl Desk {
    pub(super) fn new() -> Desk {
        Desk { bell: Bell::new(), stalled: AtomicBool::new(false), left: AtomicBool::new(false) }
    }

    /// The runner stores before its last check whether it has deliveries that do not fit, and clears it after the sleep.
    pub(super) fn announce(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Relaxed);
    }

    /// Whether the handle must wake the runner after it made room. Without a fence: a late store is seen at the next call, or
    /// after the fence of the handle's own sleep.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// The handle is dropped; it must report the change.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Release);
    }

    pub(super) fn has_left(&self) -> bool {
        self.left.load(Ordering::Acquire)
    }
}

/// The end of the runner, which is reported to every handle.
pub(super) struct End {
    reason: OnceLock<Arc<str>>,
    desks: Mutex<Vec<Arc<Desk>>>,
}

impl End {
    pub(super) fn new() -> End {
        End { reason: OnceLock::new(), desks: Mutex::new(Vec::new()) }
    }

    /// Adds a handle, which must check the reason afterwards: a later end finds its desk and rings.
    pub(super) fn join(&self, desk: Arc<Desk>) {
        lock(&self.desks).push(desk);
    }

    /// Removes a handle.
    pub(super) fn forget(&self, desk: &Arc<Desk>) {
        lock(&self.desks).retain(|other| !Arc::ptr_eq(other, desk));
    }

    /// Why the runner has ended, if it has.
    pub(super) fn reason(&self) -> Option<&Arc<str>> {
        self.reason.get()
    }

    /// The runner has ended; the first reason counts.
    pub(super) fn set(&self, reason: &str) {
        let _ = self.reason.set(reason.into());
    }

    /// Wakes every handle, which then reads the reason.
    pub(super) fn tell(&self) {
        lock(&self.desks).iter().for_each(|desk| desk.bell.ring());
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No operation under these locks can be left incomplete.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
