//! Objects of OpenCL, which are counted.

use std::ffi::c_void;

use cl3::{command_queue, context, error_codes, event, kernel, memory, program};

use crate::gpu::GpuError;

/// What an object is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Context,
    Commands,
    Memory,
    Program,
    Kernel,
    Event,
}

/// A share in an object.
#[derive(Debug)]
pub(super) struct Object {
    kind: Kind,
    raw: *mut c_void,
}

// SAFETY: functions of OpenCL may be called by any thread; the pointer is only given to them. Kernels, whose arguments are no
// thread's but one's, are only called by `&mut` of their queue.
unsafe impl Send for Object {}
// SAFETY: as above.
unsafe impl Sync for Object {}

impl Object {
    /// Takes a share over.
    ///
    /// # Safety
    /// `raw` is an object of that kind, with a share that nobody else gives back.
    pub(super) unsafe fn owned(kind: Kind, raw: *mut c_void) -> Object {
        Object { kind, raw }
    }

    /// Takes a share of its own.
    ///
    /// # Safety
    /// `raw` is an object of that kind, a context or a buffer.
    pub(super) unsafe fn shared(device: &str, kind: Kind, raw: *mut c_void) -> Result<Object, GpuError> {
        // SAFETY: it is an object of that kind, as the caller says.
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
        // SAFETY: this value's share, which is given back once.
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

/// The error that a call has failed.
pub(super) fn said(device: &str, call: &'static str) -> impl Fn(i32) -> GpuError {
    move |code| GpuError::Call { device: device.to_owned(), call, reason: meaning(code) }
}

/// What a status means.
pub(super) fn meaning(code: i32) -> String {
    format!("{} ({code})", error_codes::error_text(code))
}
