//! Reference-counted OpenCL objects.

use std::ffi::c_void;

use cl3::{command_queue, context, error_codes, event, kernel, memory, program};

use crate::gpu::GpuError;

/// The type of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Context,
    Commands,
    Memory,
    Program,
    Kernel,
    Event,
}

/// A reference to an object.
#[derive(Debug)]
pub(super) struct Object {
    kind: Kind,
    raw: *mut c_void,
}

// SAFETY: functions of OpenCL may be called by any thread; the pointer is only passed to them. A kernel's arguments must be
// set by one thread at a time: kernels are only used through `&mut` of their queue.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Takes over a reference.
    ///
    /// # Safety
    /// `raw` is an object of that kind, with a reference that nothing else releases.
    pub(super) unsafe fn owned(kind: Kind, raw: *mut c_void) -> Object {
        Object { kind, raw }
    }

    /// Takes a new reference.
    ///
    /// # Safety
    /// `raw` is an object of that kind, a context or a buffer.
    pub(super) unsafe fn shared(device: &str, kind: Kind, raw: *mut c_void) -> Result<Object, GpuError> {
        // SAFETY: it is an object of that kind, as guaranteed by the caller.
        let retained = unsafe {
            match kind {
                Kind::Context => context::retain_context(raw).map_err(said(device, "clRetainContext")),
                _ => memory::retain_mem_object(raw).map_err(said(device, "clRetainMemObject")),
            }
        };
        retained?;
        Ok(Object { kind, raw })
    }

    pub(super) fn raw(&self) -> *mut c_void {
        self.raw
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // SAFETY: this value's reference, which is released once.
        let released = unsafe {
            match self.kind {
                Kind::Context => context::release_context(self.raw),
                Kind::Commands => command_queue::release_command_queue(self.raw),
                Kind::Memory => memory::release_mem_object(self.raw),
                Kind::Program => program::release_program(self.raw),
                Kind::Kernel => kernel::release_kernel(self.raw),
                Kind::Event => event::release_event(self.raw),
            }
        };
        if let Err(code) = released {
            tracing::warn!("OpenCL: {:?} can't be released: {}", self.kind, meaning(code));
        }
    }
}

/// The error of a failed call.
pub(super) fn said(device: &str, call: &'static str) -> impl Fn(i32) -> GpuError {
    move |code| GpuError::Call { device: device.to_owned(), call, reason: meaning(code) }
}

/// The name of a status code.
pub(super) fn meaning(code: i32) -> String {
    format!("{} ({code})", error_codes::error_text(code))
}
