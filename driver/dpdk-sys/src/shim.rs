//! Finding and loading the shim.

use std::error::Error;
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, fmt, mem};

use libloading::Library;
use libloading::os::unix;

use crate::abi::{ABI, Functions};

/// The file of the shim.
pub const SHIM: &str = "libferroce_dpdk.so";

/// The reason why the shim can't be loaded: the loader's message, with the remedy.
#[derive(Clone, Debug)]
pub struct LoadError(String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for LoadError {}

/// The functions of the shim. The first call loads it from the directory of the program, or from the paths of the
/// system's loader (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`). It stays loaded.
///
/// # Errors
/// If there is no shim, if the system has no suitable DPDK, or if the shim is of another release of ferroce.
pub fn load() -> Result<&'static Functions, LoadError> {
    static LOADED: OnceLock<&'static Functions> = OnceLock::new();
    if let Some(functions) = LOADED.get() {
        return Ok(functions);
    }
    let functions = find()?;
    Ok(LOADED.get_or_init(|| functions))
}

fn find() -> Result<&'static Functions, LoadError> {
    let beside = beside_the_program().filter(|path| path.exists());
    let file = beside.map_or_else(|| OsString::from(SHIM), PathBuf::into_os_string);
    // Resolves all symbols now, so that a missing one of DPDK is detected here and not in a burst.
    // SAFETY: the constructors of the shim and of DPDK only register them.
    let library = unsafe { unix::Library::open(Some(&file), unix::RTLD_NOW | unix::RTLD_LOCAL) };
    let library = Library::from(library.map_err(|error| missing(&error))?);
    // SAFETY: this symbol is such a table in every release: the first two fields are never moved.
    let found = unsafe { library.get::<*const Functions>(b"ferroce_dpdk\0") };
    let table = *found.map_err(|error| foreign(&file, &said(&error)))?;
    // SAFETY: the table exists as long as the library, and begins with these fields.
    let (abi, size) = unsafe { ((*table).abi, (*table).size) };
    if abi != ABI || size as usize != size_of::<Functions>() {
        return Err(foreign(&file, &format!("it has ABI {abi} with {size} bytes")));
    }
    // DPDK keeps threads, and pointers into the shim.
    mem::forget(library);
    // SAFETY: a constant table with this layout, in a library that stays loaded.
    Ok(unsafe { &*table })
}

fn beside_the_program() -> Option<PathBuf> {
    Some(env::current_exe().ok()?.parent()?.join(SHIM))
}

fn missing(error: &libloading::Error) -> LoadError {
    LoadError(format!(
        "{}. It needs DPDK 22.11 or later on this system (Debian: dpdk), and ferroce's shim over it, {SHIM}, beside the \
         program or where the system's loader looks. `./do dpdk` in a checkout of ferroce builds it, and `build-shim` in the \
         sources of ferroce-dpdk-sys does after `cargo install`",
        said(error)
    ))
}

fn foreign(file: &OsString, why: &str) -> LoadError {
    LoadError(format!(
        "{} is not of this release of ferroce: {why}, and it should have ABI {ABI} with {} bytes; build it again with \
         `./do dpdk`, or `build-shim` in the sources of ferroce-dpdk-sys",
        file.display(),
        size_of::<Functions>()
    ))
}

/// The loader's message.
fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
