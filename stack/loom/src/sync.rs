//! loom's atomics and locks under the names that `wakeup.rs` uses.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::panic::Location;

use loom::sync::atomic::Ordering;
pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32};
pub(super) use loom::sync::{Condvar, Mutex, MutexGuard};

thread_local! {
    /// The lines of fences that were passed. (The threads of a model are coroutines of one thread.)
    static PASSED: RefCell<BTreeSet<u32>> = const { RefCell::new(BTreeSet::new()) };
    /// The line of the fence that is left out.
    static OMITTED: Cell<Option<u32>> = const { Cell::new(None) };
}

/// A fence, unless it is the one that is left out.
#[track_caller]
pub(super) fn fence(order: Ordering) {
    let line = Location::caller().line();
    PASSED.with_borrow_mut(|passed| passed.insert(line));
    if OMITTED.get() != Some(line) {
        loom::sync::atomic::fence(order);
    }
}

/// Runs `model` with the fence of this line left out.
pub(super) fn without(line: u32, model: impl FnOnce()) {
    OMITTED.set(Some(line));
    model();
}

/// The lines of the fences that have been passed on this thread.
pub(super) fn passed() -> BTreeSet<u32> {
    PASSED.with_borrow(Clone::clone)
}

/// As std's: whoever sees the value sees what was done before it was set.
#[derive(Debug)]
pub(super) struct OnceLock<T> {
    is_set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(super) fn new() -> OnceLock<T> {
        OnceLock { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(super) fn set(&self, value: T) -> Result<(), T> {
        self.value.set(value)?;
        self.is_set.store(true, Ordering::Release);
        Ok(())
    }

    pub(super) fn get(&self) -> Option<&T> {
        if self.is_set.load(Ordering::Acquire) { self.value.get() } else { None }
    }
}
