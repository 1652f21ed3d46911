//! NVIDIA GPUs with CUDA. `libcuda.so.1` of driver 515 or later is loaded on first use.
//!
//! The driver uses a device's primary context, which the CUDA runtime, and so frameworks such as PyTorch, use too: their
//! memory can be [imported](Cuda::import) by its address.
//!
//! ```no_run
//! use ferroce_driver::gpu::{Device, cuda};
//!
//! for found in cuda::devices()? {
//!     println!("cuda:{}: {}, dma-bufs: {}", found.index, found.name, found.has_dma_buf);
//! }
//! let memory = cuda::open(0)?.allocate(1 << 20)?; // to be registered, and written by peers
//! # Ok::<(), ferroce_driver::gpu::GpuError>(())
//! ```
//!
//! Reductions are compiled by NVRTC (`libnvrtc.so.12`) when the first reducer is created.

mod buffer;
mod compiler;
mod context;
mod library;
mod pinned;
mod queue;
mod reducer;
mod under_way;

use std::any::Any;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, OnceLock, Weak};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute};

use self::buffer::Buffer;
use self::context::{Context, Module, Stream};
use self::library::{Functions, NO_DEVICE, SUCCESS};
use super::{Device, GpuError, Queue, Reducer, Staging, share};
use crate::memory::{Memory, Piece};

/// A device found by CUDA.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// Its number, as in `cuda:N`. `CUDA_VISIBLE_DEVICES` hides devices, and so renumbers them.
    pub index: usize,
    /// The device's name.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Its PCI address, such as `0000:3b:00.0`, if reported.
    pub pci: Option<String>,
    /// Whether its memory can be [exported](Memory::export) to an RNIC.
    pub has_dma_buf: bool,
}

/// All devices, in CUDA's order.
///
/// # Errors
/// [`GpuError::NoDevice`] with what is missing, if there is no driver or it has no device; [`GpuError::Call`].
pub fn devices() -> Result<Vec<Description>, GpuError> {
    let (functions, count) = found("cuda")?;
    (0..count).map(|index| describe(functions, index)).collect()
}

/// Opens the device `cuda:N`. Memory and queues belong to the handle that created them: open a device only once.
///
/// # Errors
/// [`GpuError::NoDevice`]; [`GpuError::Call`].
pub fn open(index: usize) -> Result<Arc<Cuda>, GpuError> {
    let name = format!("cuda:{index}");
    let (functions, count) = found(&name)?;
    let Some(number) = c_int::try_from(index).ok().filter(|number| *number < count) else {
        return Err(GpuError::NoDevice { device: name, reason: super::choices("cuda", count as usize) });
    };
    let device = device(functions, &name, number)?;
    let context = Context::primary(functions, name, (number, device))?;
    let copies = Stream::new(&context)?;
    Ok(Arc::new_cyclic(|this| Cuda {
        this: this.clone(),
        context,
        functions,
        copies,
        module: OnceLock::new(),
    }))
}

/// The library, and its number of devices, which is at least one.
fn found(name: &str) -> Result<(&'static Functions, c_int), GpuError> {
    let none = |reason: String| GpuError::NoDevice { device: name.to_owned(), reason };
    let functions = library::functions_for(name)?;
    // SAFETY: it may be called repeatedly and by any thread, and has no flags.
    let mut code = unsafe { (functions.init)(0) };
    let mut count = 0;
    if code == SUCCESS {
        // SAFETY: a valid pointer to store the number.
        code = unsafe { (functions.device_count)(&mut count) };
    }
    match code {
        SUCCESS if count > 0 => Ok((functions, count)),
        SUCCESS | NO_DEVICE => Err(none(
            "NVIDIA's driver finds no GPU (`nvidia-smi` lists them; CUDA_VISIBLE_DEVICES may hide them)"
                .to_owned(),
        )),
        _ => Err(none(format!("cuInit: {} (does `nvidia-smi` work?)", functions.meaning(code)))),
    }
}

fn device(functions: &Functions, name: &str, index: c_int) -> Result<CUdevice, GpuError> {
    let mut device = 0;
    // SAFETY: a valid pointer to store the device.
    let code = unsafe { (functions.device)(&mut device, index) };
    functions.check(name, "cuDeviceGet", code).map(|()| device)
}

fn describe(functions: &Functions, index: c_int) -> Result<Description, GpuError> {
    let name = format!("cuda:{index}");
    let device = device(functions, &name, index)?;
    let mut memory = 0;
    // SAFETY: a valid pointer to store the number.
    let code = unsafe { (functions.device_memory)(&mut memory, device) };
    functions.check(&name, "cuDeviceTotalMem", code)?;
    Ok(Description {
        index: index as usize,
        name: text(functions.device_name, device).unwrap_or_default(),
        memory: memory as u64,
        pci: text(functions.device_pci, device).map(|place| place.to_lowercase()),
        has_dma_buf: has_dma_buf(functions, device),
    })
}

/// The text that a function reports about the device. The function writes no more bytes than the length that it is passed.
fn text(
    function: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> u32,
    device: CUdevice,
) -> Option<String> {
    let mut bytes = [0_u8; 256];
    // SAFETY: a buffer of the length passed.
    let code = unsafe { function(bytes.as_mut_ptr().cast(), bytes.len() as c_int, device) };
    let text = CStr::from_bytes_until_nul(&bytes).ok().filter(|_| code == SUCCESS)?;
    Some(text.to_string_lossy().into_owned())
}

fn has_dma_buf(functions: &Functions, device: CUdevice) -> bool {
    attribute(functions, device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
        .is_ok_and(|supported| supported != 0)
}

/// An attribute of the device, or the error code.
fn attribute(functions: &Functions, device: CUdevice, what: CUdevice_attribute) -> Result<c_int, u32> {
    let mut number = 0;
    // SAFETY: a valid pointer to store the number.
    match unsafe { (functions.device_attribute)(&mut number, what, device) } {
        SUCCESS => Ok(number),
        code => Err(code),
    }
}

/// A CUDA device.
#[derive(Debug)]
pub struct Cuda {
    this: Weak<Cuda>,
    /// The kernels of the reductions, once they are compiled.
    module: OnceLock<Result<Module, GpuError>>,
    /// For synchronous copies.
    copies: Stream,
    context: Arc<Context>,
    functions: &'static Functions,
}

impl Cuda {
    /// Imports memory that other code has allocated on this device, such as a tensor's: `len` bytes from `pointer` on,
    /// allocated with the CUDA runtime or in the device's primary context. `owner` is kept until the memory is dropped and
    /// its last copy has ended; it must keep the bytes at their address.
    ///
    /// While the memory is registered, peers and copies read and write it at any time, in streams that do not synchronise
    /// with others. The program orders its own kernels with completions: peers see its writes once its stream has been
    /// synchronised (`cudaStreamSynchronize`, or an event), and it sees a peer's writes once the completion reports them.
    ///
    /// For a PyTorch tensor, pass `t.untyped_storage().data_ptr()` and `.nbytes()`. `t.data_ptr()` starts
    /// `t.storage_offset()` elements later, and only a contiguous tensor (`t.is_contiguous()`) has its bytes in the order
    /// of the elements. `owner` holds a reference to the tensor (a `Py<PyAny>` of PyO3; from C++ a `torch::Tensor`):
    /// without one, PyTorch's cache reuses the bytes for the next tensor, although they stay allocated. Memory of
    /// `cudaMallocAsync` and of expandable segments is untested.
    ///
    /// Once the memory is registered with an RNIC, the program's memory operations on the whole allocation are synchronous
    /// (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`), so that the RNIC sees the bytes of completed copies.
    ///
    /// # Safety
    /// The bytes stay allocated as long as `owner` exists.
    ///
    /// # Errors
    /// [`GpuError::Call`]: it is not memory of this device and context, or its allocation has fewer bytes.
    pub unsafe fn import(
        &self,
        pointer: u64,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Memory, GpuError> {
        // SAFETY: guaranteed by the caller.
        unsafe { Buffer::imported(self.this(), pointer, len, owner) }
    }

    /// The `CUdeviceptr` of the first byte, for programs that compute with the memory; `Context::piece` returns the piece
    /// of a registered region. It is valid as long as the memory. `None` for memory of other libraries.
    pub fn pointer(piece: Piece<'_>) -> Option<u64> {
        piece.block_as::<Buffer>().map(|buffer| buffer.pointer() + piece.offset())
    }

    fn this(&self) -> Arc<Cuda> {
        share(&self.this)
    }

    fn refused(&self, call: &'static str, reason: impl Into<String>) -> GpuError {
        GpuError::Call { device: self.context.name.clone(), call, reason: reason.into() }
    }

    fn has_dma_buf(&self) -> bool {
        has_dma_buf(self.functions, self.context.device)
    }

    /// The kernels of the reductions, compiled for the first reducer.
    fn module(&self) -> Result<&Module, GpuError> {
        self.module.get_or_init(|| self.build()).as_ref().map_err(GpuError::clone)
    }

    fn build(&self) -> Result<Module, GpuError> {
        let asked = |what| {
            attribute(self.functions, self.context.device, what)
                .map_err(|code| self.refused("cuDeviceGetAttribute", self.functions.meaning(code)))
        };
        let capability = (
            asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            asked(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let kernels = compiler::compile(&self.context.name, reducer::SOURCE, capability)?;
        Module::load(&self.context, &kernels)
    }
}

impl Device for Cuda {
    fn name(&self) -> &str {
        &self.context.name
    }

    fn allocate(&self, len: usize) -> Result<Memory, GpuError> {
        Buffer::allocated(self.this(), len)
    }

    fn queue(&self, staging: &Staging) -> Result<Box<dyn Queue>, GpuError> {
        Ok(Box::new(queue::CopyQueue::new(self.this(), staging)?))
    }

    fn reducer(&self) -> Result<Box<dyn Reducer>, GpuError> {
        Ok(Box::new(reducer::KernelQueue::new(self.this())?))
    }
}

#[cfg(test)]
mod tests;
