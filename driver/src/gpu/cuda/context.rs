//! A device's primary context, and objects in it. Each call makes the context current, and restores the thread's own
//! afterwards.

use std::ffi::{c_int, c_uint};
use std::marker::PhantomData;
use std::ptr::null_mut;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUcontext, CUdevice, CUevent, CUevent_flags, CUmodule, CUstream, CUstream_flags, CUstreamCaptureMode,
};

use super::library::{Functions, NOT_READY, SUCCESS};
use crate::gpu::GpuError;

/// A reference to the device's primary context.
#[derive(Debug)]
pub(super) struct Context {
    /// The device's name.
    pub(super) name: String,
    /// The device's number.
    pub(super) index: c_int,
    pub(super) device: CUdevice,
    raw: CUcontext,
    functions: &'static Functions,
}

// SAFETY: functions of CUDA may be called by any thread; the pointer is only passed to them.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context, which CUDA creates if it does not exist. `device` is a device of CUDA.
    pub(super) fn primary(
        functions: &'static Functions,
        name: String,
        (index, device): (c_int, CUdevice),
    ) -> Result<Arc<Context>, GpuError> {
        let mut raw = null_mut();
        // SAFETY: a valid pointer to store the context.
        let code = unsafe { (functions.retain_context)(&mut raw, device) };
        functions.check(&name, "cuDevicePrimaryCtxRetain", code)?;
        Ok(Arc::new(Context { name, index, device, raw, functions }))
    }

    pub(super) fn raw(&self) -> CUcontext {
        self.raw
    }

    /// Makes it the thread's current context.
    pub(super) fn enter(&self) -> Result<Current<'_>, GpuError> {
        // SAFETY: the context exists, because this value holds a reference to it.
        let code = unsafe { (self.functions.push_context)(self.raw) };
        self.functions.check(&self.name, "cuCtxPushCurrent", code)?;
        let mut current = Current { context: self, capture_mode: None, _of_this_thread: PhantomData };
        current.permit_calls();
        Ok(current)
    }

    /// Calls a function that releases a resource, and logs a failure, which no caller can handle.
    pub(super) fn give_back(&self, call: &'static str, function: impl FnOnce(&Functions) -> u32) {
        if let Err(error) = self.enter().and_then(|current| current.call(call, function)) {
            tracing::warn!("{error}");
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: this value's reference, which is released once.
        let code = unsafe { (self.functions.release_context)(self.device) };
        if let Err(error) = self.functions.check(&self.name, "cuDevicePrimaryCtxRelease", code) {
            tracing::warn!("{error}");
        }
    }
}

/// A current context, until it is dropped.
pub(super) struct Current<'a> {
    context: &'a Context,
    /// The thread's own mode, to be restored.
    capture_mode: Option<u32>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Current<'_> {
    pub(super) fn call(
        &self,
        call: &'static str,
        function: impl FnOnce(&Functions) -> u32,
    ) -> Result<(), GpuError> {
        let functions = self.context.functions;
        functions.check(&self.context.name, call, function(functions))
    }

    /// Whether the event has completed.
    pub(super) fn has_come(&self, event: &Event) -> Result<bool, GpuError> {
        // SAFETY: the event exists.
        let code = unsafe { (self.context.functions.query_event)(event.raw) };
        match code {
            SUCCESS => Ok(true),
            NOT_READY => Ok(false),
            _ => self.context.functions.check(&self.context.name, "cuEventQuery", code).map(|()| true),
        }
    }

    /// Permits calls during graph capture. While a thread captures a graph, by default no thread may allocate or query an
    /// event, and the capture fails if one does. The restriction is for calls that the graph may depend on; it does not
    /// depend on ours.
    fn permit_calls(&mut self) {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as u32;
        // SAFETY: a valid pointer to read the mode and to store the thread's former one.
        let code = unsafe { (self.context.functions.exchange_capture_mode)(&mut mode) };
        self.capture_mode = (code == SUCCESS).then_some(mode);
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let functions = self.context.functions;
        if let Some(mut mode) = self.capture_mode {
            // SAFETY: the thread's former mode.
            unsafe { (functions.exchange_capture_mode)(&mut mode) };
        }
        let mut popped = null_mut();
        // SAFETY: it was pushed by this thread, which this value does not leave, and contexts pushed on top of it were
        // popped before.
        unsafe { (functions.pop_context)(&mut popped) };
    }
}

/// Commands that are executed in order.
#[derive(Debug)]
pub(super) struct Stream {
    context: Arc<Context>,
    raw: CUstream,
}

// SAFETY: as of `Context`.
unsafe impl Send for Stream {}
// SAFETY: as of `Context`.
unsafe impl Sync for Stream {}

impl Stream {
    /// A stream that does not synchronise with the default stream, which may be a framework's.
    pub(super) fn new(context: &Arc<Context>) -> Result<Stream, GpuError> {
        let mut raw = null_mut();
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: a valid pointer to store the stream.
        context.enter()?.call("cuStreamCreate", |cuda| unsafe { (cuda.create_stream)(&mut raw, flags) })?;
        Ok(Stream { context: Arc::clone(context), raw })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    /// Waits until all submitted commands have ended.
    pub(super) fn end(&self) -> Result<(), GpuError> {
        // SAFETY: the stream exists.
        self.context.enter()?.call("cuStreamSynchronize", |cuda| unsafe { (cuda.end_stream)(self.raw) })
    }

    /// As [`end`](Stream::end), without a caller that could handle an error.
    pub(super) fn end_at_last(&self) {
        if let Err(error) = self.end() {
            tracing::warn!("{error}");
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: it was created by this value, and is destroyed once.
        self.context.give_back("cuStreamDestroy", |cuda| unsafe { (cuda.destroy_stream)(self.raw) });
    }
}

/// An event in a stream, which completes when all earlier commands have ended.
#[derive(Debug)]
pub(super) struct Event {
    context: Arc<Context>,
    raw: CUevent,
}

// SAFETY: as of `Context`.
unsafe impl Send for Event {}
// SAFETY: as of `Context`.
unsafe impl Sync for Event {}

impl Event {
    pub(super) fn new(context: &Arc<Context>) -> Result<Event, GpuError> {
        let mut raw = null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as c_uint;
        // SAFETY: a valid pointer to store the event.
        context.enter()?.call("cuEventCreate", |cuda| unsafe { (cuda.create_event)(&mut raw, flags) })?;
        Ok(Event { context: Arc::clone(context), raw })
    }

    pub(super) fn raw(&self) -> CUevent {
        self.raw
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created by this value, and is destroyed once.
        self.context.give_back("cuEventDestroy", |cuda| unsafe { (cuda.destroy_event)(self.raw) });
    }
}

/// Loaded kernels.
#[derive(Debug)]
pub(super) struct Module {
    context: Arc<Context>,
    raw: CUmodule,
}

// SAFETY: as of `Context`.
unsafe impl Send for Module {}
// SAFETY: as of `Context`.
unsafe impl Sync for Module {}

impl Module {
    /// Loads the compiler's output: machine code, or PTX with a terminating NUL.
    pub(super) fn load(context: &Arc<Context>, kernels: &[u8]) -> Result<Module, GpuError> {
        let mut raw = null_mut();
        let loaded = context
            .enter()?
            // SAFETY: machine code, which contains its length, or a NUL-terminated string; and a valid pointer to store the
            // module.
            .call("cuModuleLoadData", |cuda| unsafe {
                (cuda.load_module)(&mut raw, kernels.as_ptr().cast())
            });
        loaded.map(|()| Module { context: Arc::clone(context), raw })
    }

    pub(super) fn raw(&self) -> CUmodule {
        self.raw
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: it was loaded by this value, and is unloaded once; reducers, which use its kernels, hold a reference to
        // the device.
        self.context.give_back("cuModuleUnload", |cuda| unsafe { (cuda.unload_module)(self.raw) });
    }
}
