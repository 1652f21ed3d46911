//! `libcuda.so.1`, the library of NVIDIA's driver, loaded at run time.
//!
//! The types are cudarc's, and the compiler checks each function's type against cudarc's binding. Only results are plain
//! numbers: cudarc's enumeration lacks the errors of later drivers, and its bindings panic if a function is missing.

use std::error::Error as _;
use std::ffi::{CStr, c_char, c_int, c_uchar, c_uint, c_void};
use std::ptr::null;
use std::sync::OnceLock;

use cudarc::driver::sys::{
    self, CUcontext, CUdevice, CUdevice_attribute, CUdeviceptr, CUevent, CUfunction, CUmemRangeHandleType,
    CUmodule, CUpointer_attribute, CUresult, CUstream,
};
use libloading::Library;

use crate::gpu::GpuError;

/// The name of its ABI, found by the loader's search path.
const NAME: &str = "libcuda.so.1";

/// The result of a successful call.
pub(super) const SUCCESS: u32 = CUresult::CUDA_SUCCESS as u32;
/// The event has not completed.
pub(super) const NOT_READY: u32 = CUresult::CUDA_ERROR_NOT_READY as u32;
/// There is no GPU.
pub(super) const NO_DEVICE: u32 = CUresult::CUDA_ERROR_NO_DEVICE as u32;

/// A table of functions that are called by name, and the code that looks them up. The types of those in the first braces
/// are `$bindings`'s.
macro_rules! functions {
    (
        $(#[$meta:meta])* $bindings:path => $status:ty, $since:literal;
        { $($field:ident: $symbol:ident($($argument:ty),*);)* }
        { $($other:ident: $other_symbol:ident($($other_argument:ty),*) -> $result:ty;)* }
    ) => {
        $(#[$meta])*
        #[derive(Debug)]
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> u32,)*
            $(pub(super) $other: unsafe extern "C" fn($($other_argument),*) -> $result,)*
        }

        // Checks the types.
        const _: () = {
            use $bindings as bindings;
            $(const _: unsafe fn($($argument),*) -> $status = bindings::$symbol;)*
        };

        impl Functions {
            /// Fails with the name of a missing function.
            fn find(library: &libloading::Library) -> Result<Functions, String> {
                Ok(Functions {
                    // SAFETY: the types are those of NVIDIA's headers, as in the bindings; all results have 32 bits.
                    $($field: match unsafe { library.get(concat!(stringify!($symbol), "\0").as_bytes()) } {
                        Ok::<libloading::Symbol<'_, _>, _>(found) => *found,
                        Err(_) => return Err(format!("it has no function {}: {} has it", stringify!($symbol), $since)),
                    },)*
                    // SAFETY: as above, with the types of the header itself.
                    $($other: match unsafe { library.get(concat!(stringify!($other_symbol), "\0").as_bytes()) } {
                        Ok::<libloading::Symbol<'_, _>, _>(found) => *found,
                        Err(_) => return Err(format!("it has no function {}: {} has it", stringify!($other_symbol), $since)),
                    },)*
                })
            }
        }
    };
}
pub(super) use functions;

functions! {
    /// The functions of libcuda.
    sys => CUresult, "a driver for CUDA 11.7 or later (515)";
    {
        init: cuInit(c_uint);
        device_count: cuDeviceGetCount(*mut c_int);
        device: cuDeviceGet(*mut CUdevice, c_int);
        device_name: cuDeviceGetName(*mut c_char, c_int, CUdevice);
        device_memory: cuDeviceTotalMem_v2(*mut usize, CUdevice);
        device_pci: cuDeviceGetPCIBusId(*mut c_char, c_int, CUdevice);
        device_attribute: cuDeviceGetAttribute(*mut c_int, CUdevice_attribute, CUdevice);
        retain_context: cuDevicePrimaryCtxRetain(*mut CUcontext, CUdevice);
        release_context: cuDevicePrimaryCtxRelease_v2(CUdevice);
        push_context: cuCtxPushCurrent_v2(CUcontext);
        pop_context: cuCtxPopCurrent_v2(*mut CUcontext);
        allocate: cuMemAlloc_v2(*mut CUdeviceptr, usize);
        free: cuMemFree_v2(CUdeviceptr);
        fill: cuMemsetD8Async(CUdeviceptr, c_uchar, usize, CUstream);
        copy_to_device: cuMemcpyHtoDAsync_v2(CUdeviceptr, *const c_void, usize, CUstream);
        copy_to_host: cuMemcpyDtoHAsync_v2(*mut c_void, CUdeviceptr, usize, CUstream);
        copy_inside: cuMemcpyDtoDAsync_v2(CUdeviceptr, CUdeviceptr, usize, CUstream);
        address_range: cuMemGetAddressRange_v2(*mut CUdeviceptr, *mut usize, CUdeviceptr);
        pointer_attribute: cuPointerGetAttribute(*mut c_void, CUpointer_attribute, CUdeviceptr);
        set_pointer_attribute: cuPointerSetAttribute(*const c_void, CUpointer_attribute, CUdeviceptr);
        handle: cuMemGetHandleForAddressRange(*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, u64);
        register_host: cuMemHostRegister_v2(*mut c_void, usize, c_uint);
        unregister_host: cuMemHostUnregister(*mut c_void);
        create_stream: cuStreamCreate(*mut CUstream, c_uint);
        destroy_stream: cuStreamDestroy_v2(CUstream);
        wait_in_stream: cuStreamWaitEvent(CUstream, CUevent, c_uint);
        end_stream: cuStreamSynchronize(CUstream);
        create_event: cuEventCreate(*mut CUevent, c_uint);
        destroy_event: cuEventDestroy_v2(CUevent);
        record_event: cuEventRecord(CUevent, CUstream);
        query_event: cuEventQuery(CUevent);
        load_module: cuModuleLoadData(*mut CUmodule, *const c_void);
        unload_module: cuModuleUnload(CUmodule);
        kernel: cuModuleGetFunction(*mut CUfunction, CUmodule, *const c_char);
        launch: cuLaunchKernel(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
        );
    }
    {
        error_name: cuGetErrorName(u32, *mut *const c_char) -> u32;
        exchange_capture_mode: cuThreadExchangeStreamCaptureMode(*mut u32) -> u32;
    }
}

/// The library's functions. It is loaded once, and stays loaded.
///
/// # Errors
/// [`GpuError::NoDevice`] with what is missing.
pub(super) fn functions_for(device: &str) -> Result<&'static Functions, GpuError> {
    static LOADED: OnceLock<Result<(Functions, Library), String>> = OnceLock::new();
    match LOADED.get_or_init(load) {
        Ok((functions, _)) => Ok(functions),
        Err(reason) => Err(GpuError::NoDevice { device: device.to_owned(), reason: reason.clone() }),
    }
}

fn load() -> Result<(Functions, Library), String> {
    // SAFETY: the driver's library, with its own initialisers.
    let library = unsafe { Library::new(NAME) }.map_err(|error| {
        format!(
            "{}; it comes with NVIDIA's driver, 515 or later (Debian: libcuda1, Ubuntu: nvidia-driver-580; containers: nvidia-container-toolkit)",
            loaders_words(&error)
        )
    })?;
    let functions = Functions::find(&library).map_err(|lack| format!("{NAME}: {lack}"))?;
    Ok((functions, library))
}

/// The loader's message about a library that could not be loaded.
pub(super) fn loaders_words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}

impl Functions {
    /// The result of a call.
    pub(super) fn check(&self, device: &str, call: &'static str, code: u32) -> Result<(), GpuError> {
        match code {
            SUCCESS => Ok(()),
            _ => Err(GpuError::Call { device: device.to_owned(), call, reason: self.meaning(code) }),
        }
    }

    /// The driver's name for an error code.
    pub(super) fn meaning(&self, code: u32) -> String {
        let mut name: *const c_char = null();
        // SAFETY: a valid pointer to store the name's address.
        let found = unsafe { (self.error_name)(code, &mut name) };
        if found != SUCCESS || name.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a string of the library, which stays loaded.
        let name = unsafe { CStr::from_ptr(name) };
        format!("{} ({code})", name.to_string_lossy())
    }
}
