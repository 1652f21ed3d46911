//! Device memory.

use std::any::Any;
use std::ffi::c_void;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use cl3::command_queue::{enqueue_fill_buffer, enqueue_read_buffer, enqueue_write_buffer};
use cl3::event::wait_for_events;
use cl3::memory::{
    CL_MEM_CONTEXT, CL_MEM_FLAGS, CL_MEM_HOST_NO_ACCESS, CL_MEM_HOST_READ_ONLY, CL_MEM_HOST_WRITE_ONLY,
    CL_MEM_OBJECT_BUFFER, CL_MEM_READ_WRITE, CL_MEM_SIZE, CL_MEM_TYPE, create_buffer, get_mem_object_data,
};

use super::OpenCl;
use super::object::{Kind, Object};
use crate::gpu::{Block, Device, DmaBuf, GpuError};
use crate::memory::{EmptyRange, Memory};

/// A `cl_mem`.
#[derive(Debug)]
pub(super) struct Buffer {
    opencl: Arc<OpenCl>,
    device: Arc<dyn Device>,
    object: Object,
    /// OpenCL reports no addresses. This reserved range of addresses stands for the buffer.
    _addresses: EmptyRange,
}

impl Buffer {
    /// `len` bytes, zeroed.
    pub(super) fn allocated(opencl: Arc<OpenCl>, len: usize) -> Result<Memory, GpuError> {
        // SAFETY: a context, and no host memory.
        let raw = unsafe { create_buffer(opencl.context(), CL_MEM_READ_WRITE, len.max(1), null_mut()) };
        let raw = raw.map_err(opencl.failed("clCreateBuffer"))?;
        // SAFETY: it was just created, and has no other owner.
        let object = unsafe { Object::owned(Kind::Memory, raw) };
        let zero = [0_u8];
        opencl.wait("clEnqueueFillBuffer", |commands| {
            // SAFETY: the range of the buffer, and a pattern that OpenCL copies during the call.
            unsafe { enqueue_fill_buffer(commands, raw, zero.as_ptr().cast(), 1, 0, len.max(1), 0, null()) }
        })?;
        Buffer::memory(opencl, object, len)
    }

    /// The whole of a buffer of the device's context.
    pub(super) fn imported(opencl: Arc<OpenCl>, object: Object) -> Result<Memory, GpuError> {
        let asked = |what: u32| -> Result<usize, GpuError> {
            let data =
                get_mem_object_data(object.raw(), what).map_err(opencl.failed("clGetMemObjectInfo"))?;
            let bytes = data.try_into().map_err(|_| opencl.failed("clGetMemObjectInfo")(0))?;
            Ok(usize::from_ne_bytes(bytes))
        };
        if asked(CL_MEM_CONTEXT)? != opencl.context() as usize {
            return Err(GpuError::Call {
                device: opencl.name.clone(),
                call: "import",
                reason: "a buffer of another context: OpenCl::of_context makes a device of it".to_owned(),
            });
        }
        let number = |what: u32| -> Result<u64, GpuError> {
            let data =
                get_mem_object_data(object.raw(), what).map_err(opencl.failed("clGetMemObjectInfo"))?;
            let mut bytes = [0; 8];
            data.iter().zip(&mut bytes).for_each(|(from, to)| *to = *from);
            Ok(u64::from_le_bytes(bytes))
        };
        if number(CL_MEM_TYPE)? != u64::from(CL_MEM_OBJECT_BUFFER) {
            return Err(opencl.unsupported("import", "an image or a pipe, where a buffer is needed"));
        }
        let flags = number(CL_MEM_FLAGS)?;
        let closed = [
            (CL_MEM_HOST_NO_ACCESS, "CL_MEM_HOST_NO_ACCESS"),
            (CL_MEM_HOST_READ_ONLY, "CL_MEM_HOST_READ_ONLY"),
            (CL_MEM_HOST_WRITE_ONLY, "CL_MEM_HOST_WRITE_ONLY"),
        ];
        if let Some((_, name)) = closed.into_iter().find(|(flag, _)| flags & flag != 0) {
            let reason = format!("a buffer with {name}, which can't be copied both ways: make it without");
            return Err(opencl.unsupported("import", reason));
        }
        let len = asked(CL_MEM_SIZE)?;
        Buffer::memory(opencl, object, len)
    }

    fn memory(opencl: Arc<OpenCl>, object: Object, len: usize) -> Result<Memory, GpuError> {
        let addresses = EmptyRange::new(len).map_err(|error| GpuError::Call {
            device: opencl.name.clone(),
            call: "mmap",
            reason: format!("{len} bytes of addresses: {error}"),
        })?;
        let first = addresses.base();
        let device: Arc<dyn Device> = Arc::clone(&opencl) as _;
        Ok(Memory::of_device(Arc::new(Buffer { opencl, device, object, _addresses: addresses }), first, len))
    }

    pub(super) fn object(&self) -> &Object {
        &self.object
    }
}

impl Block for Buffer {
    fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError> {
        let (raw, offset) = (self.object.raw(), offset as usize);
        self.opencl.wait("clEnqueueReadBuffer", |commands| {
            // SAFETY: OpenCL checks the range; the slice is borrowed uniquely until the copy has ended, because the call
            // waits for it.
            unsafe {
                enqueue_read_buffer(commands, raw, 0, offset, to.len(), to.as_mut_ptr().cast(), 0, null())
            }
        })
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError> {
        let (raw, offset) = (self.object.raw(), offset as usize);
        self.opencl.wait("clEnqueueWriteBuffer", |commands| {
            // SAFETY: OpenCL checks the range; the slice is valid until the copy has ended, because the call waits for it.
            unsafe {
                enqueue_write_buffer(commands, raw, 0, offset, from.len(), from.as_ptr().cast(), 0, null())
            }
        })
    }

    /// OpenCL has no export that all drivers support.
    fn export(&self) -> Result<DmaBuf, GpuError> {
        Err(self.opencl.unsupported("a dma-buf of its memory", "OpenCL exports none: use cuda:N for a card"))
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl OpenCl {
    /// Submits a command and waits for its end.
    fn wait(
        &self,
        call: &'static str,
        submit: impl FnOnce(*mut c_void) -> Result<*mut c_void, i32>,
    ) -> Result<(), GpuError> {
        self.with_copies(|commands| {
            let event = submit(commands.raw()).map_err(self.failed(call))?;
            // SAFETY: it was just created, and has no other owner.
            let event = unsafe { Object::owned(Kind::Event, event) };
            wait_for_events(&[event.raw()]).map_err(self.failed(call))
        })
    }
}
