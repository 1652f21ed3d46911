//! NVRTC, which compiles kernels at run time. It is itself loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

use super::library::{functions, loaders_words};
use crate::gpu::GpuError;

/// The library's names. CUDA 12 first: drivers of CUDA 13 load its code too. The last is the name in a toolkit.
const NAMES: [&str; 4] = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11.2", "libnvrtc.so"];

const SUCCESS: u32 = nvrtcResult::NVRTC_SUCCESS as u32;

/// The most bytes of a compiler log and of a program; a larger reported size is rejected.
const TEXT_MAX: usize = 16 << 20;

functions! {
    /// The functions of libnvrtc.
    sys => nvrtcResult, "NVRTC 11.2 or later";
    {
        create: nvrtcCreateProgram(
            *mut nvrtcProgram, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char
        );
        destroy: nvrtcDestroyProgram(*mut nvrtcProgram);
        compile: nvrtcCompileProgram(nvrtcProgram, c_int, *const *const c_char);
        log_size: nvrtcGetProgramLogSize(nvrtcProgram, *mut usize);
        log: nvrtcGetProgramLog(nvrtcProgram, *mut c_char);
        ptx_size: nvrtcGetPTXSize(nvrtcProgram, *mut usize);
        ptx: nvrtcGetPTX(nvrtcProgram, *mut c_char);
        cubin_size: nvrtcGetCUBINSize(nvrtcProgram, *mut usize);
        cubin: nvrtcGetCUBIN(nvrtcProgram, *mut c_char);
        architecture_count: nvrtcGetNumSupportedArchs(*mut c_int);
        architectures: nvrtcGetSupportedArchs(*mut c_int);
    }
    {
        error_string: nvrtcGetErrorString(u32) -> *const c_char;
    }
}

/// Compiles kernels for a device of compute capability `major.minor`, in the format of `cuModuleLoadData`: machine code,
/// which any driver of the same major version loads. For a device newer than NVRTC it is PTX of the newest known
/// architecture, which needs a driver at least as new as NVRTC.
///
/// # Errors
/// [`GpuError::Unsupported`] without NVRTC, and for a device older than all that it supports; [`GpuError::Call`] with its
/// message about the source.
pub(super) fn compile(device: &str, source: &CStr, (major, minor): (i32, i32)) -> Result<Vec<u8>, GpuError> {
    let nvrtc = load(device)?;
    let wanted = 10 * major + minor;
    let known = nvrtc.known().map_err(|reason| GpuError::Call {
        device: device.to_owned(),
        call: "nvrtcGetSupportedArchs",
        reason,
    })?;
    let Some(chosen) = known.iter().copied().filter(|known| *known <= wanted).max() else {
        return Err(GpuError::Unsupported {
            device: device.to_owned(),
            what: "reductions".to_owned(),
            reason: format!(
                "NVRTC compiles for no device as old as compute capability {major}.{minor}: use that of an older CUDA"
            ),
        });
    };
    let is_exact = chosen == wanted;
    let failed = |call, reason: String| GpuError::Call { device: device.to_owned(), call, reason };
    let program = Program::new(nvrtc, source).map_err(|reason| failed("nvrtcCreateProgram", reason))?;
    // As the CPU computes: each operation is rounded, and subnormal numbers are kept.
    let architecture = format!("{}_{chosen}", if is_exact { "sm" } else { "compute" });
    let architecture = CString::new(format!("--gpu-architecture={architecture}")).unwrap_or_default();
    let options = [&*architecture, c"--fmad=false", c"--ftz=false"].map(CStr::as_ptr);
    // SAFETY: a program, and `options.len()` NUL-terminated strings.
    let code = unsafe { (nvrtc.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
    if code != SUCCESS {
        let log = program.bytes(nvrtc.log_size, nvrtc.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let reason = format!("{} for compute capability {chosen}: {log}", nvrtc.meaning(code));
        return Err(failed("nvrtcCompileProgram", reason.trim_end_matches(['\0', '\n', ' ']).to_owned()));
    }
    match is_exact {
        true => {
            program.bytes(nvrtc.cubin_size, nvrtc.cubin).map_err(|reason| failed("nvrtcGetCUBIN", reason))
        }
        // With the terminating NUL.
        false => program.bytes(nvrtc.ptx_size, nvrtc.ptx).map_err(|reason| failed("nvrtcGetPTX", reason)),
    }
}

/// Loads the library once; it stays loaded.
fn load(device: &str) -> Result<&'static Functions, GpuError> {
    static LOADED: OnceLock<Result<(Functions, Library), String>> = OnceLock::new();
    match LOADED.get_or_init(find) {
        Ok((functions, _)) => Ok(functions),
        Err(reason) => Err(GpuError::Unsupported {
            device: device.to_owned(),
            what: "reductions".to_owned(),
            reason: reason.clone(),
        }),
    }
}

fn find() -> Result<(Functions, Library), String> {
    let mut first = None;
    for name in NAMES {
        // SAFETY: NVIDIA's library, with its own initialisers.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let functions = Functions::find(&library).map_err(|lack| format!("{name}: {lack}"))?;
                return Ok((functions, library));
            }
            Err(error) => drop(first.get_or_insert(error)),
        }
    }
    Err(format!(
        "{}; it compiles them, and comes with CUDA's toolkit (Debian: libnvrtc12; or pip install nvidia-cuda-nvrtc-cu12, and its folder in \
         LD_LIBRARY_PATH; of the major version that `nvidia-smi` shows, or an older one)",
        first.as_ref().map(loaders_words).unwrap_or_default()
    ))
}

impl Functions {
    /// The supported architectures: 75 is compute capability 7.5.
    fn known(&self) -> Result<Vec<c_int>, String> {
        let checked = |code| if code == SUCCESS { Ok(()) } else { Err(self.meaning(code)) };
        let mut count = 0;
        // SAFETY: a valid pointer to store the number.
        checked(unsafe { (self.architecture_count)(&mut count) })?;
        let mut known = vec![0; usize::try_from(count).unwrap_or_default()];
        // SAFETY: a buffer for as many numbers as reported.
        checked(unsafe { (self.architectures)(known.as_mut_ptr()) })?;
        Ok(known)
    }

    fn meaning(&self, code: u32) -> String {
        // SAFETY: any number is valid.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a string of the library, which stays loaded.
        let text = unsafe { CStr::from_ptr(text) };
        format!("{} ({code})", text.to_string_lossy())
    }
}

struct Program<'a> {
    nvrtc: &'a Functions,
    raw: nvrtcProgram,
}

impl Program<'_> {
    fn new<'a>(nvrtc: &'a Functions, source: &CStr) -> Result<Program<'a>, String> {
        let mut raw = null_mut();
        let name = c"reduce.c";
        // SAFETY: NUL-terminated strings, no headers, and a valid pointer to store the program.
        let code = unsafe { (nvrtc.create)(&mut raw, source.as_ptr(), name.as_ptr(), 0, null(), null()) };
        match code {
            SUCCESS => Ok(Program { nvrtc, raw }),
            _ => Err(nvrtc.meaning(code)),
        }
    }

    /// A log or the code of the program, with the functions that return its size and copy it.
    fn bytes(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        copy: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Result<Vec<u8>, String> {
        let checked = |code| if code == SUCCESS { Ok(()) } else { Err(self.nvrtc.meaning(code)) };
        let mut len = 0;
        // SAFETY: a program, and a valid pointer to store the size.
        checked(unsafe { size(self.raw, &mut len) })?;
        if len > TEXT_MAX {
            return Err(format!("{len} bytes"));
        }
        let mut bytes = vec![0; len];
        // SAFETY: a buffer of as many bytes as reported.
        checked(unsafe { copy(self.raw, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: it was created by this value, and is destroyed once.
        unsafe { (self.nvrtc.destroy)(&mut self.raw) };
    }
}
