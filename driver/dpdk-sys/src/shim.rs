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

/// Why there is no shim: in the loader's words, with the remedy.
#[derive(Clone, Debug)]
pub struct LoadError(String);

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Error for LoadError {}

/// The functions of the shim, which is loaded at the first call and stays: beside the program, or where the system's
/// loader looks (`LD_LIBRARY_PATH`, `/etc/ld.so.conf`).
///
/// # Errors
/// There is no shim, the system has no DPDK that it can use, or it is of another release of ferroce.
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
    // All of its symbols now: a DPDK that lacks one is found out here and not in a burst.
    // SAFETY: the shim and DPDK run constructors that only register themselves.
    let library = unsafe { unix::Library::open(Some(&file), unix::RTLD_NOW | unix::RTLD_LOCAL) };
    let library = Library::from(library.map_err(|error| missing(&error))?);
    // SAFETY: this symbol is such a table in every release: the first two fields stay where they are.
    let found = unsafe { library.get::<*const Functions>(b"ferroce_dpdk\0") };
    let table = *found.map_err(|error| foreign(&file, &said(&error)))?;
    // SAFETY: the table is there as long as the library, and begins with these fields.
    let (abi, size) = unsafe { ((*table).abi, (*table).size) };
    if abi != ABI || size as usize != size_of::<Functions>() {
        return Err(foreign(&file, &format!("it has ABI {abi} with {size} bytes")));
    }
    // DPDK keeps threads, and pointers into the shim.
    mem::forget(library);
    // SAFETY: a table of this layout, constant, in a library that stays.
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

/// The loader's own words.
fn said(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
