//! GPUs of NVIDIA by CUDA: `libcuda.so.1` of driver 515 or later is loaded when the first is asked for.
//!
//! A device's primary context is used, which is the one of CUDA's runtime and so of frameworks such as PyTorch: their memory is
//! [imported](Cuda::import) by its address.
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
//! Reductions are compiled by NVRTC (`libnvrtc.so.12`), for the first reducer.

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

/// A device that CUDA has found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// Its number: `cuda:N`. `CUDA_VISIBLE_DEVICES` hides devices, and so renumbers them.
    pub index: usize,
    /// What it calls itself.
    pub name: String,
    /// Bytes of its memory.
    pub memory: u64,
    /// Its place on the PCI bus, as `0000:3b:00.0`, if it tells.
    pub pci: Option<String>,
    /// Whether its memory can be [exported](Memory::export) to a network card.
    pub has_dma_buf: bool,
}

/// The devices, in CUDA's order.
///
/// # Errors
/// [`GpuError::NoDevice`] with what is missing, if there is no driver or it has no device; [`GpuError::Call`].
pub fn devices() -> Result<Vec<Description>, GpuError> {
    let (functions, count) = found("cuda")?;
    (0..count).map(|index| describe(functions, index)).collect()
}

/// Opens the device `cuda:N`. Memory and queues belong to the handle that made them: open a device once.
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

/// The library, and how many devices it has: one at least.
fn found(name: &str) -> Result<(&'static Functions, c_int), GpuError> {
    let none = |reason: String| GpuError::NoDevice { device: name.to_owned(), reason };
    let functions = library::functions_for(name)?;
    // SAFETY: it may be called again and by any thread, and has no flags.
    let mut code = unsafe { (functions.init)(0) };
    let mut count = 0;
    if code == SUCCESS {
        // SAFETY: where the number is to be.
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
    // SAFETY: where the device is to be.
    let code = unsafe { (functions.device)(&mut device, index) };
    functions.check(name, "cuDeviceGet", code).map(|()| device)
}

fn describe(functions: &Functions, index: c_int) -> Result<Description, GpuError> {
    let name = format!("cuda:{index}");
    let device = device(functions, &name, index)?;
    let mut memory = 0;
    // SAFETY: where the number is to be.
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

/// What a function says about the device, which writes no more bytes than it is told.
fn text(
    function: unsafe extern "C" fn(*mut c_char, c_int, CUdevice) -> u32,
    device: CUdevice,
) -> Option<String> {
    let mut bytes = [0_u8; 256];
    // SAFETY: room for so many bytes.
    let code = unsafe { function(bytes.as_mut_ptr().cast(), bytes.len() as c_int, device) };
    let text = CStr::from_bytes_until_nul(&bytes).ok().filter(|_| code == SUCCESS)?;
    Some(text.to_string_lossy().into_owned())
}

fn has_dma_buf(functions: &Functions, device: CUdevice) -> bool {
    attribute(functions, device, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)
        .is_ok_and(|supported| supported != 0)
}

/// A number that the device is asked for, or why it does not tell.
fn attribute(functions: &Functions, device: CUdevice, what: CUdevice_attribute) -> Result<c_int, u32> {
    let mut number = 0;
    // SAFETY: where the number is to be.
    match unsafe { (functions.device_attribute)(&mut number, what, device) } {
        SUCCESS => Ok(number),
        code => Err(code),
    }
}

/// A device of CUDA.
#[derive(Debug)]
pub struct Cuda {
    this: Weak<Cuda>,
    /// The reductions, once they are built.
    module: OnceLock<Result<Module, GpuError>>,
    /// For copies that are waited for.
    copies: Stream,
    context: Arc<Context>,
    functions: &'static Functions,
}

impl Cuda {
    /// Memory that somebody else has allocated on this device, such as a tensor's: `len` bytes from `pointer` on, by CUDA's runtime
    /// or in the device's primary context. `owner` is kept until the memory is dropped and its last copy has ended, and is to keep
    /// the bytes where they are.
    ///
    /// While it is registered, peers and copies read and write it at any time, by streams of their own which wait for no other. The
    /// program orders its own kernels with completions: what it has written is there for peers when its stream has ended
    /// (`cudaStreamSynchronize`, or an event), and what peers have written when the completion says so.
    ///
    /// A tensor of PyTorch is imported by `t.untyped_storage().data_ptr()` and `.nbytes()`: `t.data_ptr()` begins
    /// `t.storage_offset()` elements behind, and only of a contiguous tensor (`t.is_contiguous()`) do the bytes lie in the order of the elements. `owner` holds a
    /// reference to it (by PyO3 a `Py<PyAny>`; from C++ a `torch::Tensor`): once PyTorch has none, its cache gives the bytes to the
    /// next tensor, and they stay allocated all the same. Memory of `cudaMallocAsync` and of expandable segments has not been tried.
    ///
    /// Once it is registered with an RNIC, all calls of the program on the whole allocation are synchronous
    /// (`CU_POINTER_ATTRIBUTE_SYNC_MEMOPS`), so that a card sees what has been said to have ended.
    ///
    /// # Safety
    /// The bytes stay allocated for as long as `owner` is there.
    ///
    /// # Errors
    /// [`GpuError::Call`]: it is no memory of this device and context, or its allocation has fewer bytes.
    pub unsafe fn import(
        &self,
        pointer: u64,
        len: usize,
        owner: Arc<dyn Any + Send + Sync>,
    ) -> Result<Memory, GpuError> {
        // SAFETY: as the caller says.
        unsafe { Buffer::imported(self.this(), pointer, len, owner) }
    }

    /// The `CUdeviceptr` of the first of these bytes, for programs that compute with them; of a registered region by
    /// `Context::piece`. It is valid for as long as the memory is. `None` for memory of other libraries.
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

    /// The reductions, which are built for the first reducer.
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
