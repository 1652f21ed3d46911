//! NVRTC, which compiles kernels at run time, itself loaded at run time.

use std::ffi::{CStr, CString, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use libloading::Library;

use super::library::{functions, loaders_words};
use crate::gpu::GpuError;

/// Its names. First that of CUDA 12, whose kernels the drivers of 13 load too; the last is that of a toolkit.
const NAMES: [&str; 4] = ["libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so.11.2", "libnvrtc.so"];

const SUCCESS: u32 = nvrtcResult::NVRTC_SUCCESS as u32;

/// Bytes of what it has to say about a program, and of the program: more is not believed.
const TEXT_MAX: usize = 16 << 20;

functions! {
    /// Those of libnvrtc.
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
    }
    {
        error_string: nvrtcGetErrorString(u32) -> *const c_char;
    }
}

/// Compiles kernels for devices of compute capability `major.minor` and later.
///
/// # Errors
/// [`GpuError::Unsupported`] without NVRTC; [`GpuError::Call`] with what it says about the source.
pub(super) fn compile(device: &str, source: &CStr, (major, minor): (i32, i32)) -> Result<CString, GpuError> {
    let nvrtc = load(device)?;
    let failed = |call, reason: String| GpuError::Call { device: device.to_owned(), call, reason };
    let program = Program::new(nvrtc, source).map_err(|reason| failed("nvrtcCreateProgram", reason))?;
    // As the processor computes: each operation is rounded, and subnormal numbers are numbers.
    let architecture = CString::new(format!("--gpu-architecture=compute_{major}{minor}")).unwrap_or_default();
    let options = [&*architecture, c"--fmad=false", c"--ftz=false"].map(CStr::as_ptr);
    // SAFETY: a program, and so many texts that end with a zero.
    let code = unsafe { (nvrtc.compile)(program.raw, options.len() as c_int, options.as_ptr()) };
    if code != SUCCESS {
        let log = program.text(nvrtc.log_size, nvrtc.log).unwrap_or_default();
        let reason = format!("{} for compute_{major}{minor}: {}", nvrtc.meaning(code), log.to_string_lossy());
        return Err(failed("nvrtcCompileProgram", reason.trim_end().to_owned()));
    }
    program.text(nvrtc.ptx_size, nvrtc.ptx).map_err(|reason| failed("nvrtcGetPTX", reason))
}

/// It is loaded once, and stays.
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
        // SAFETY: NVIDIA's library, whose initialisers are its own.
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
         LD_LIBRARY_PATH)",
        first.as_ref().map(loaders_words).unwrap_or_default()
    ))
}

impl Functions {
    fn meaning(&self, code: u32) -> String {
        // SAFETY: it takes any number.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            return format!("error {code}");
        }
        // SAFETY: a text of the library's, which stays loaded.
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
        // SAFETY: texts that end with a zero, no headers, and where the program is to be.
        let code = unsafe { (nvrtc.create)(&mut raw, source.as_ptr(), name.as_ptr(), 0, null(), null()) };
        match code {
            SUCCESS => Ok(Program { nvrtc, raw }),
            _ => Err(nvrtc.meaning(code)),
        }
    }

    /// A text of the program, by the functions that tell its size and copy it.
    fn text(
        &self,
        size: unsafe extern "C" fn(nvrtcProgram, *mut usize) -> u32,
        copy: unsafe extern "C" fn(nvrtcProgram, *mut c_char) -> u32,
    ) -> Result<CString, String> {
        let checked = |code| if code == SUCCESS { Ok(()) } else { Err(self.nvrtc.meaning(code)) };
        let mut len = 0;
        // SAFETY: a program, and where the size is to be.
        checked(unsafe { size(self.raw, &mut len) })?;
        if len > TEXT_MAX {
            return Err(format!("a text of {len} bytes"));
        }
        let mut text = vec![0; len];
        // SAFETY: room for so many bytes as it said.
        checked(unsafe { copy(self.raw, text.as_mut_ptr().cast()) })?;
        text.truncate(text.iter().position(|byte| *byte == 0).unwrap_or(len));
        CString::new(text).map_err(|error| error.to_string())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: it was made by this value, and is destroyed once.
        unsafe { (self.nvrtc.destroy)(&mut self.raw) };
    }
}
