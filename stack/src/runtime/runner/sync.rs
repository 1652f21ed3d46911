//! The atomics and locks of [`wakeup`](super::wakeup). `stack/loom` compiles that file with those of loom.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
