//! Staging memory that the device accesses directly.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CU_MEMHOSTREGISTER_PORTABLE;

use super::context::Context;
use crate::gpu::{GpuError, Staging};

/// The staging that is pinned now, for all devices. Host memory is pinned for all contexts at once, and must not be
/// unpinned during the copies of a second queue.
static PINNED: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Staging that this module has pinned.
#[derive(Debug)]
struct Pinned {
    address: usize,
    /// The context that pinned it.
    context: Arc<Context>,
    queues: usize,
}

/// A queue's reference to pinned staging, which is unpinned with the last reference.
#[derive(Debug)]
pub(super) struct PinnedStaging {
    staging: Staging,
}

impl PinnedStaging {
    pub(super) fn new(context: &Arc<Context>, staging: &Staging) -> Result<PinnedStaging, GpuError> {
        let first = address(staging);
        let shared = || PinnedStaging { staging: staging.clone() };
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pinned) = pinned.iter_mut().find(|pinned| pinned.address == first as usize) {
            pinned.queues += 1;
            return Ok(shared());
        }
        // No other code knows these bytes: code that pinned memory at this address did so for other pages.
        // SAFETY: `len` bytes, which stay at their address while they are pinned: every reference keeps the staging.
        context.enter()?.call("cuMemHostRegister, of staging", |cuda| unsafe {
            (cuda.register_host)(first, staging.len(), CU_MEMHOSTREGISTER_PORTABLE)
        })?;
        pinned.push(Pinned { address: first as usize, context: Arc::clone(context), queues: 1 });
        Ok(shared())
    }

    /// The address of these bytes.
    ///
    /// # Panics
    /// If they exceed the staging.
    pub(super) fn place(&self, at: usize, len: usize) -> *mut c_void {
        self.staging.place(at, len).as_ptr().cast()
    }
}

/// The owner's copies have ended.
impl Drop for PinnedStaging {
    fn drop(&mut self) {
        let first = address(&self.staging);
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = pinned.iter().position(|pinned| pinned.address == first as usize) else { return };
        pinned[index].queues -= 1;
        if pinned[index].queues == 0 {
            let last = pinned.swap_remove(index);
            // SAFETY: pinned by this module, and unpinned once, after the copies of all queues.
            last.context.give_back("cuMemHostUnregister", |cuda| unsafe { (cuda.unregister_host)(first) });
        }
    }
}

fn address(staging: &Staging) -> *mut c_void {
    staging.place(0, staging.len()).as_ptr().cast()
}
