//! Staging that the device reads and writes itself.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::sys::CU_MEMHOSTREGISTER_PORTABLE;

use super::context::Context;
use crate::gpu::{GpuError, Staging};

/// What is pinned now, by all devices. Host memory is pinned for all contexts at once, and must not be unpinned under the copies of a second
/// queue.
static PINNED: Mutex<Vec<Pinned>> = Mutex::new(Vec::new());

/// Staging that was pinned by us.
#[derive(Debug)]
struct Pinned {
    address: usize,
    /// In which it was.
    context: Arc<Context>,
    queues: usize,
}

/// A queue's share in pinned staging, which is unpinned with the last.
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
        // Nobody else knows these bytes: whoever has pinned them did so at this address, to other pages.
        // SAFETY: so many bytes, which stay where they are for as long as they are pinned: every share in them has the staging.
        context.enter()?.call("cuMemHostRegister, of staging", |cuda| unsafe {
            (cuda.register_host)(first, staging.len(), CU_MEMHOSTREGISTER_PORTABLE)
        })?;
        pinned.push(Pinned { address: first as usize, context: Arc::clone(context), queues: 1 });
        Ok(shared())
    }

    /// Where these bytes are.
    ///
    /// # Panics
    /// If there are fewer.
    pub(super) fn place(&self, at: usize, len: usize) -> *mut c_void {
        self.staging.place(at, len).as_ptr().cast()
    }
}

/// Its owner has ended its copies.
impl Drop for PinnedStaging {
    fn drop(&mut self) {
        let first = address(&self.staging);
        let mut pinned = PINNED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = pinned.iter().position(|pinned| pinned.address == first as usize) else { return };
        pinned[index].queues -= 1;
        if pinned[index].queues == 0 {
            let last = pinned.swap_remove(index);
            // SAFETY: it was pinned by us, and is unpinned once, behind the copies of all queues.
            last.context.give_back("cuMemHostUnregister", |cuda| unsafe { (cuda.unregister_host)(first) });
        }
    }
}

fn address(staging: &Staging) -> *mut c_void {
    staging.place(0, staging.len()).as_ptr().cast()
}
