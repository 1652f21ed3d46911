//! GPUs with OpenCL 1.2 or later, of any manufacturer. `libOpenCL.so.1` is loaded on first use.
//!
//! On Debian this needs `ocl-icd-libopencl1` and a driver: the manufacturer's, or `pocl-opencl-icd`, which makes the CPU a
//! device and is what ferroce is tested with.
//!
//! ```no_run
//! use ferroce_driver::gpu::{Device, opencl};
//!
//! for found in opencl::devices()? {
//!     println!("opencl:{}: {} of {}", found.index, found.name, found.platform);
//! }
//! let memory = opencl::open(0)?.allocate(1 << 20)?; // to be registered, and written by peers
//! # Ok::<(), ferroce_driver::gpu::GpuError>(())
//! ```
//!
//! Memory that a program has allocated itself is [imported](OpenCl::import), with a device handle in its own context
//! ([`OpenCl::of_context`]).

mod buffer;
mod object;
mod queue;
mod reducer;
mod signals;

use std::ffi::{CString, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use cl3::command_queue::{CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, create_command_queue};
use cl3::context::create_context;
use cl3::device::{self, get_device_data, get_device_ids};
use cl3::platform::{self, get_platform_data, get_platform_ids};
use cl3::program::{CL_PROGRAM_BUILD_LOG, build_program, create_program_with_source, get_program_build_data};

use self::buffer::Buffer;
use self::object::{Kind, Object, meaning, said};
use self::queue::PinnedStaging;
use self::signals::keep_signals;
use super::{Device, GpuError, Queue, Reducer, Staging, share};
use crate::memory::{Memory, Piece};
use crate::reduction::{Computation, DataType, Reduction};

/// A device found by OpenCL.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Description {
    /// Its number, as in `opencl:N`.
    pub index: usize,
    /// The name of the implementation.
    pub platform: String,
    /// The device's name.
    pub name: String,
    /// Whether it is the CPU.
    pub is_cpu: bool,
    /// Bytes of its memory.
    pub memory: u64,
    /// Its PCI address, such as `0000:3b:00.0`, if it has one and reports it.
    pub pci: Option<String>,
}

/// The devices of all implementations, in the order in which OpenCL lists them.
///
/// # Errors
/// [`GpuError::NoDevice`] with what is missing, if there is no OpenCL or it has no device.
pub fn devices() -> Result<Vec<Description>, GpuError> {
    Ok(found("opencl")?.iter().enumerate().map(|(index, id)| describe(index, *id)).collect())
}

/// Opens the device `opencl:N`. Memory and queues belong to the handle that created them: open a device only once.
///
/// # Errors
/// [`GpuError::NoDevice`]; [`GpuError::Call`].
pub fn open(index: usize) -> Result<Arc<OpenCl>, GpuError> {
    let name = format!("opencl:{index}");
    let found = found(&name)?;
    let Some(Id(device)) = found.get(index).copied() else {
        return Err(GpuError::NoDevice { device: name, reason: super::choices("opencl", found.len()) });
    };
    let context =
        create_context(&[device], null(), None, null_mut()).map_err(said(&name, "clCreateContext"))?;
    // SAFETY: it was just created, and has no other owner.
    OpenCl::new(name, unsafe { Object::owned(Kind::Context, context) }, device)
}

/// A `cl_device_id`. Those of whole devices are never freed.
#[derive(Clone, Copy, Debug)]
struct Id(*mut c_void);

fn found(name: &str) -> Result<Vec<Id>, GpuError> {
    let none = |reason: String| GpuError::NoDevice { device: name.to_owned(), reason };
    if !cl3::is_opencl_runtime_available() {
        return Err(none(
            "libOpenCL.so.1 can't be loaded (apt-get install ocl-icd-libopencl1, and the driver of a GPU or pocl-opencl-icd)"
                .to_owned(),
        ));
    }
    // If two threads make the first query at the same time, PoCL 3.1 reports no devices to one of them.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _guard = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let remedy = "install the driver of a GPU, or pocl-opencl-icd";
    let platforms = keep_signals(get_platform_ids)
        .map_err(|code| none(format!("OpenCL has no implementation: {} ({remedy})", meaning(code))))?;
    let (mut ids, mut refused) = (Vec::new(), String::new());
    for platform in &platforms {
        match keep_signals(|| get_device_ids(*platform, device::CL_DEVICE_TYPE_ALL)) {
            Ok(found) => ids.extend(found.into_iter().map(Id)),
            Err(code) => refused = format!(": {}", meaning(code)),
        }
    }
    if ids.is_empty() {
        let count = platforms.len();
        return Err(none(format!("OpenCL has {count} implementations and no device{refused} ({remedy})")));
    }
    Ok(ids)
}

fn describe(index: usize, Id(id): Id) -> Description {
    let platform = number(id, device::CL_DEVICE_PLATFORM).map(|platform| platform as usize as *mut c_void);
    let platform = platform.and_then(|id| get_platform_data(id, platform::CL_PLATFORM_NAME).ok());
    let name = get_device_data(id, device::CL_DEVICE_NAME).ok();
    let kind = number(id, device::CL_DEVICE_TYPE).unwrap_or_default();
    Description {
        index,
        platform: text(platform),
        name: text(name),
        is_cpu: kind & device::CL_DEVICE_TYPE_CPU != 0,
        memory: number(id, device::CL_DEVICE_GLOBAL_MEM_SIZE).unwrap_or_default(),
        pci: pci(id),
    }
}

/// A number that the device reports, of any size.
fn number(id: *mut c_void, what: u32) -> Option<u64> {
    let data = get_device_data(id, what).ok()?;
    let mut bytes = [0; 8];
    bytes.get_mut(..data.len())?.copy_from_slice(&data);
    Some(u64::from_le_bytes(bytes))
}

fn text(bytes: Option<Vec<u8>>) -> String {
    let text = String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
    text.trim_matches(['\0', ' ']).to_owned()
}

/// From `cl_khr_pci_bus_info`, which reports four numbers.
fn pci(id: *mut c_void) -> Option<String> {
    let data = get_device_data(id, device::CL_DEVICE_PCI_BUS_INFO_KHR).ok()?;
    let (numbers, []) = data.as_chunks::<4>() else { return None };
    let [domain, bus, device, function] = *numbers else { return None };
    let [domain, bus, device, function] = [domain, bus, device, function].map(u32::from_le_bytes);
    Some(format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
}

/// An OpenCL device.
#[derive(Debug)]
pub struct OpenCl {
    this: Weak<OpenCl>,
    name: String,
    context: Object,
    id: *mut c_void,
    /// For synchronous copies.
    copies: Mutex<Object>,
    /// Staging of its queues.
    pinned: Mutex<Vec<Weak<PinnedStaging>>>,
    /// The kernels of the reductions, once they are built.
    program: OnceLock<Result<Object, GpuError>>,
}

// SAFETY: functions of OpenCL may be called by any thread, for any object (except `clSetKernelArg`, which queues call only
// for their own kernels); pointers are only passed to them.
unsafe impl Send for OpenCl {}
// SAFETY: as above.
unsafe impl Sync for OpenCl {}

impl OpenCl {
    /// A device in a context of the program, with which memory can be [imported](OpenCl::import); `name` is its name in
    /// errors. It holds a reference to the context.
    ///
    /// # Safety
    /// `context` is a `cl_context`, and `device` a `cl_device_id` of that context.
    ///
    /// # Errors
    /// [`GpuError::Call`].
    pub unsafe fn of_context(
        name: impl Into<String>,
        context: *mut c_void,
        device: *mut c_void,
    ) -> Result<Arc<OpenCl>, GpuError> {
        let name = name.into();
        // SAFETY: it is a context, as guaranteed by the caller.
        let context = unsafe { Object::shared(&name, Kind::Context, context) }?;
        OpenCl::new(name, context, device)
    }

    fn new(name: String, context: Object, id: *mut c_void) -> Result<Arc<OpenCl>, GpuError> {
        let copies = commands(&name, &context, id, 0)?;
        Ok(Arc::new_cyclic(|this| OpenCl {
            this: this.clone(),
            name,
            context,
            id,
            copies: Mutex::new(copies),
            pinned: Mutex::default(),
            program: OnceLock::new(),
        }))
    }

    /// The `cl_context` that [`open`] created, for programs that compute with the device. It is valid as long as this
    /// handle.
    pub fn context(&self) -> *mut c_void {
        self.context.raw()
    }

    /// Its `cl_device_id`.
    pub fn id(&self) -> *mut c_void {
        self.id
    }

    /// Imports memory that other code has allocated: a whole `cl_mem` of this device's context (for a part, use
    /// `clCreateSubBuffer`). It holds a reference to the buffer until the memory is dropped; the buffer lives on if the
    /// program holds one too.
    ///
    /// While it is registered, peers and copies read and write it at any time: the program orders its own commands with
    /// completions.
    ///
    /// # Safety
    /// `buffer` is a `cl_mem`.
    ///
    /// # Errors
    /// [`GpuError::Call`], also for a buffer of another context; [`GpuError::Unsupported`] for an image or a pipe, or for a
    /// buffer that the host may not both read and write (`CL_MEM_HOST_NO_ACCESS` and similar flags).
    pub unsafe fn import(&self, buffer: *mut c_void) -> Result<Memory, GpuError> {
        // SAFETY: it is a buffer, as guaranteed by the caller.
        let object = unsafe { Object::shared(&self.name, Kind::Memory, buffer) }?;
        Buffer::imported(self.this(), object)
    }

    /// The `cl_mem` of these bytes and their offset in it, for programs that compute with them; `Context::piece` returns
    /// the piece of a registered region. It is valid as long as the memory. `None` for memory of other libraries.
    pub fn buffer(piece: Piece<'_>) -> Option<(*mut c_void, u64)> {
        piece.block_as::<Buffer>().map(|buffer| (buffer.object().raw(), piece.offset()))
    }

    fn this(&self) -> Arc<OpenCl> {
        share(&self.this)
    }

    fn failed(&self, call: &'static str) -> impl Fn(i32) -> GpuError {
        said(&self.name, call)
    }

    fn unsupported(&self, what: impl Into<String>, reason: impl Into<String>) -> GpuError {
        GpuError::Unsupported { device: self.name.clone(), what: what.into(), reason: reason.into() }
    }

    /// An out-of-order queue, if the device supports it.
    fn commands_in_any_order(&self) -> Result<Object, GpuError> {
        let has = number(self.id, device::CL_DEVICE_QUEUE_ON_HOST_PROPERTIES).unwrap_or_default();
        commands(&self.name, &self.context, self.id, has & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE)
    }

    fn commands_in_order(&self) -> Result<Object, GpuError> {
        commands(&self.name, &self.context, self.id, 0)
    }

    /// Calls with the queue for synchronous copies.
    fn with_copies<T>(&self, call: impl FnOnce(&Object) -> T) -> T {
        call(&self.copies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The kernels of the reductions, built for the first reducer.
    fn program(&self) -> Result<&Object, GpuError> {
        self.program.get_or_init(|| self.build()).as_ref().map_err(GpuError::clone)
    }

    fn build(&self) -> Result<Object, GpuError> {
        let rounding = number(self.id, device::CL_DEVICE_SINGLE_FP_CONFIG).unwrap_or_default();
        let needed = device::CL_FP_DENORM | device::CL_FP_ROUND_TO_NEAREST | device::CL_FP_INF_NAN;
        if rounding & needed != needed {
            let reason = "it has no subnormal numbers, infinities or rounding to the nearest, so that its sums would differ";
            return Err(self.unsupported("reductions", reason));
        }
        // As one string: cl3 0.13 passes the addresses of several wrongly.
        let source = concat!(include_str!("opencl/prelude.c"), include_str!("reduce.c"));
        let program = create_program_with_source(self.context.raw(), &[source]);
        let program = program.map_err(self.failed("clCreateProgramWithSource"))?;
        // SAFETY: it was just created, and has no other owner.
        let program = unsafe { Object::owned(Kind::Program, program) };
        let options = CString::from(match self.divides_exactly() {
            true => c"-cl-std=CL1.2 -cl-fp32-correctly-rounded-divide-sqrt",
            false => c"-cl-std=CL1.2",
        });
        let build = || build_program(program.raw(), &[self.id], &options, None, null_mut());
        keep_signals(build).map_err(|code| {
            let log = text(get_program_build_data(program.raw(), self.id, CL_PROGRAM_BUILD_LOG).ok());
            let GpuError::Call { device, call, reason } = self.failed("clBuildProgram")(code) else {
                unreachable!("a failed call")
            };
            GpuError::Call { device, call, reason: format!("{reason}: {log}") }
        })?;
        Ok(program)
    }

    fn computes(&self, computation: Computation) -> Result<(), GpuError> {
        let data_type = computation.data_type();
        if !self.has(data_type) {
            return Err(self.unsupported("reductions of f64", "it has no double precision (cl_khr_fp64)"));
        }
        let is_divided = matches!(computation, Computation::Reduce(Reduction { divide_by: Some(_), .. }));
        if is_divided && data_type.is_float() && data_type != DataType::F64 && !self.divides_exactly() {
            return Err(self
                .unsupported(format!("quotients of {data_type}"), "it does not round them to the nearest"));
        }
        Ok(())
    }

    /// Whether the device computes with this type.
    fn has(&self, data_type: DataType) -> bool {
        data_type != DataType::F64
            || number(self.id, device::CL_DEVICE_DOUBLE_FP_CONFIG).unwrap_or_default() != 0
    }

    /// Whether the device can round quotients of floats as the CPU does.
    fn divides_exactly(&self) -> bool {
        let rounding = number(self.id, device::CL_DEVICE_SINGLE_FP_CONFIG).unwrap_or_default();
        rounding & device::CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT != 0
    }
}

fn commands(name: &str, context: &Object, id: *mut c_void, properties: u64) -> Result<Object, GpuError> {
    // SAFETY: a device of the context.
    let queue = unsafe { create_command_queue(context.raw(), id, properties) };
    let queue = queue.map_err(said(name, "clCreateCommandQueue"))?;
    // SAFETY: it was just created, and has no other owner.
    Ok(unsafe { Object::owned(Kind::Commands, queue) })
}

impl Device for OpenCl {
    fn name(&self) -> &str {
        &self.name
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
