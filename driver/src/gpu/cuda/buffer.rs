//! Device memory.

use std::any::Any;
use std::ffi::c_int;
use std::os::fd::{FromRawFd, OwnedFd};
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::Arc;

use cudarc::driver::sys::{CUcontext, CUdeviceptr, CUmemRangeHandleType, CUmemorytype, CUpointer_attribute};

use super::Cuda;
use super::context::{Current, Stream};
use crate::gpu::{Block, Device, DmaBuf, GpuError};
use crate::memory::Memory;

/// Bytes at a device address.
#[derive(Debug)]
pub(super) struct Buffer {
    cuda: Arc<Cuda>,
    device: Arc<dyn Device>,
    pointer: CUdeviceptr,
    len: usize,
    owner: Owner,
}

/// The allocator of the memory, which determines how it is freed.
#[derive(Debug)]
enum Owner {
    Us,
    Other { _kept: Arc<dyn Any + Send + Sync> },
}

impl Buffer {
    /// `len` bytes, zeroed.
    pub(super) fn allocated(cuda: Arc<Cuda>, len: usize) -> Result<Memory, GpuError> {
        let mut pointer = 0;
        let bytes = len.max(1);
        // SAFETY: a valid pointer to store the address.
        cuda.context.enter()?.call("cuMemAlloc", |cuda| unsafe { (cuda.allocate)(&mut pointer, bytes) })?;
        let buffer = Buffer::new(cuda, pointer, len, Owner::Us);
        buffer.wait(|current, stream| {
            // SAFETY: `bytes` bytes, which were just allocated.
            current.call("cuMemsetD8Async", |cuda| unsafe { (cuda.fill)(pointer, 0, bytes, stream.raw()) })
        })?;
        buffer.into_memory()
    }

    /// # Safety
    /// The bytes stay allocated as long as `owner` exists.
    pub(super) unsafe fn imported(
        cuda: Arc<Cuda>,
        pointer: CUdeviceptr,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Memory, GpuError> {
        check_pointer(&cuda, pointer, len)?;
        Buffer::new(cuda, pointer, len, Owner::Other { _kept: owner }).into_memory()
    }

    fn new(cuda: Arc<Cuda>, pointer: CUdeviceptr, len: usize, owner: Owner) -> Buffer {
        let device: Arc<dyn Device> = Arc::clone(&cuda) as _;
        Buffer { cuda, device, pointer, len, owner }
    }

    fn into_memory(self) -> Result<Memory, GpuError> {
        let address = NonNull::new(without_provenance_mut(self.pointer as usize));
        let address = address.ok_or_else(|| self.cuda.refused("allocate", "memory at address 0"))?;
        let len = self.len;
        Ok(Memory::of_device(Arc::new(self), address, len))
    }

    pub(super) fn pointer(&self) -> CUdeviceptr {
        self.pointer
    }

    /// Submits a command, and waits for its end. It uses a separate stream, because the default one would wait for a
    /// framework's work.
    fn wait(
        &self,
        submit: impl FnOnce(&Current<'_>, &Stream) -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let current = self.cuda.context.enter()?;
        submit(&current, &self.cuda.copies)?;
        self.cuda.copies.end()
    }
}

/// Checks that `len` bytes are memory of this device and its primary context.
fn check_pointer(cuda: &Cuda, pointer: CUdeviceptr, len: usize) -> Result<(), GpuError> {
    let refused = |reason: String| cuda.refused("import", format!("{len} bytes at {pointer:#x}: {reason}"));
    let current = cuda.context.enter()?;
    let mut kind: u32 = 0;
    let mut index: c_int = 0;
    let mut context: CUcontext = null_mut();
    // SAFETY: the attribute is an unsigned number, as `kind` is.
    let asked = current.call("cuPointerGetAttribute", |cuda| unsafe {
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE;
        (cuda.pointer_attribute)((&raw mut kind).cast(), attribute, pointer)
    });
    asked.map_err(|error| refused(format!("no address of CUDA's: {error}")))?;
    if kind != CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
        return Err(refused("memory of the host, which Memory::from_raw takes".to_owned()));
    }
    // SAFETY: the attribute is a signed number, as `index` is.
    current.call("cuPointerGetAttribute", |cuda| unsafe {
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
        (cuda.pointer_attribute)((&raw mut index).cast(), attribute, pointer)
    })?;
    if index != cuda.context.index {
        return Err(refused(format!("memory of the device cuda:{index}")));
    }
    // CUDA reports no context for memory of pools and for mapped memory, which belong to the device.
    // SAFETY: the attribute is a context, as `context` is.
    let _ = current.call("cuPointerGetAttribute", |cuda| unsafe {
        let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_CONTEXT;
        (cuda.pointer_attribute)((&raw mut context).cast(), attribute, pointer)
    });
    if !context.is_null() && context != cuda.context.raw() {
        return Err(refused("memory of another context than the device's primary one".to_owned()));
    }
    let end = pointer.checked_add(len as u64).ok_or_else(|| refused("no such addresses".to_owned()))?;
    let mut next = pointer;
    // Memory that is mapped in pieces, such as PyTorch's expandable segments, has one range per piece.
    loop {
        let (mut base, mut size) = (0, 0);
        // SAFETY: valid pointers to store both numbers.
        let asked = current
            .call("cuMemGetAddressRange", |cuda| unsafe { (cuda.address_range)(&mut base, &mut size, next) });
        let behind = base.saturating_add(size as u64);
        if asked.is_err() && next > pointer || asked.is_ok() && behind <= next {
            return Err(refused(format!("its allocation is {} bytes from there on", next - pointer)));
        }
        asked?;
        if behind >= end {
            return Ok(());
        }
        next = behind;
    }
}

impl Block for Buffer {
    fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    fn read(&self, offset: u64, to: &mut [u8]) -> Result<(), GpuError> {
        let from = self.pointer + offset;
        self.wait(|current, stream| {
            // SAFETY: `Memory` has checked the range; the slice is borrowed uniquely until the copy has ended, because the
            // call waits for it.
            current.call("cuMemcpyDtoHAsync", |cuda| unsafe {
                (cuda.copy_to_host)(to.as_mut_ptr().cast(), from, to.len(), stream.raw())
            })
        })
    }

    fn write(&self, offset: u64, from: &[u8]) -> Result<(), GpuError> {
        let to = self.pointer + offset;
        self.wait(|current, stream| {
            // SAFETY: `Memory` has checked the range; the slice is valid until the copy has ended, because the call waits
            // for it.
            current.call("cuMemcpyHtoDAsync", |cuda| unsafe {
                (cuda.copy_to_device)(to, from.as_ptr().cast(), from.len(), stream.raw())
            })
        })
    }

    fn export(&self) -> Result<DmaBuf, GpuError> {
        if !self.cuda.has_dma_buf() {
            return Err(GpuError::Unsupported {
                device: self.cuda.context.name.clone(),
                what: "a dma-buf of its memory".to_owned(),
                reason: "its driver exports none: NVIDIA's open kernel modules (515 or later) and Linux 5.12 or later are needed"
                    .to_owned(),
            });
        }
        let current = self.cuda.context.enter()?;
        let (pointer, on) = (self.pointer, 1_u32);
        // With this attribute, a copy of the program has ended when its call returns, before an RNIC accesses the memory.
        // Some memory does not support it; then the program must wait.
        // SAFETY: the attribute is an unsigned number.
        let set = current.call("cuPointerSetAttribute", |cuda| unsafe {
            let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_SYNC_MEMOPS;
            (cuda.set_pointer_attribute)((&raw const on).cast(), attribute, pointer)
        });
        if let Err(error) = set {
            tracing::debug!("{error}: the program's copies of this memory must be waited for");
        }
        // Only whole pages can be exported.
        let page = rustix::param::page_size() as u64;
        let offset = pointer % page;
        let len = (offset + self.len.max(1) as u64).next_multiple_of(page) as usize;
        let mut fd: c_int = -1;
        // SAFETY: a valid pointer to store the file descriptor; the driver checks the range.
        current.call("cuMemGetHandleForAddressRange", |cuda| unsafe {
            let kind = CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
            (cuda.handle)((&raw mut fd).cast(), pointer - offset, len, kind, 0)
        })?;
        if fd < 0 {
            return Err(self
                .cuda
                .refused("cuMemGetHandleForAddressRange", format!("the file descriptor {fd}")));
        }
        // SAFETY: it was just opened, and has no other owner.
        Ok(DmaBuf { fd: unsafe { OwnedFd::from_raw_fd(fd) }, offset })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Owner::Us = self.owner {
            let pointer = self.pointer;
            // SAFETY: it was allocated by this value and is freed once. Copies, which hold references to this value, have
            // ended.
            self.cuda.context.give_back("cuMemFree", |cuda| unsafe { (cuda.free)(pointer) });
        }
    }
}
