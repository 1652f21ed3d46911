//! What [`wakeup`](super::wakeup) is made of. `stack/loom` compiles that file with loom's instead.

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, fence};
pub(super) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};
