//! DPDK's environment (EAL), which is started once in a process, with the application's arguments.
//!
//! EAL starts on a separate thread, because it pins its caller to a core. Every thread that polls a port registers
//! itself, because pools have caches only for registered threads.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferroce_dpdk_sys as sys;

use crate::Error;

/// Loads the shim over this system's DPDK.
pub(super) fn load() -> Result<&'static sys::Functions, Error> {
    sys::load().map_err(|error| Error::NoDpdk { reason: error.to_string() })
}

/// Loads the shim and starts EAL with `arguments`, or checks that it runs with them. Empty arguments match any.
pub(super) fn start(arguments: &[String]) -> Result<&'static sys::Functions, Error> {
    let shim = load()?;
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    match &*running {
        Some((first, result)) if arguments.is_empty() || arguments == first => {
            (*result).map_err(|code| refused(shim, first, code))?;
        }
        Some((first, _)) => {
            return Err(Error::Invalid {
                parameter: PARAMETER,
                value: quoted(arguments),
                expected: format!(
                    "DPDK accepts arguments once per process, and has received {}",
                    quoted(first)
                ),
            });
        }
        None => {
            let result = initialise(shim, arguments)?;
            *running = Some((arguments.to_vec(), result));
            result.map_err(|code| refused(shim, arguments, code))?;
        }
    }
    Ok(shim)
}

/// Registers the calling thread for DPDK's per-thread caches of packet buffers, until it ends. Otherwise each burst
/// would take its buffers from the shared part of a pool, where they are not in the cache.
#[inline]
pub(super) fn enter() {
    // Not registered while the thread is ending.
    let _ = REGISTRATION.try_with(|_| ());
}

/// DPDK's error numbers are negated system error numbers, and some of its own, which have no system text.
pub(super) fn os_error(what: &'static str, port: &str, result: i32) -> Error {
    Error::Os { what, interface: port.to_owned(), source: io::Error::from_raw_os_error(result.abs()) }
}

const PARAMETER: &str = "EAL arguments";

/// The arguments of the first start, and the error number if it failed. EAL can't be started again.
static RUNNING: Mutex<Option<(Vec<String>, Started)>> = Mutex::new(None);

/// The arguments as passed to EAL, which keeps pointers to them and changes their order.
static ARGUMENTS: AtomicPtr<*mut c_char> = AtomicPtr::new(std::ptr::null_mut());

/// The result of starting EAL, with DPDK's error number.
type Started = Result<(), i32>;

thread_local! {
    static REGISTRATION: ThreadRegistration = ThreadRegistration::take();
}

/// Unregisters the thread; `None` if registration failed.
struct ThreadRegistration(Option<&'static sys::Functions>);

impl ThreadRegistration {
    fn take() -> ThreadRegistration {
        // SAFETY: EAL runs, because a port is open. The thread is not one of EAL's, because those execute none of this
        // crate's code except `initialise`.
        ThreadRegistration(sys::load().ok().filter(|shim| unsafe { (shim.thread_register)() } == 0))
    }
}

impl Drop for ThreadRegistration {
    fn drop(&mut self) {
        if let Some(shim) = self.0 {
            // SAFETY: this thread was registered.
            unsafe { (shim.thread_unregister)() };
        }
    }
}

/// Calls DPDK's `rte_eal_init` on a separate thread: it pins its caller to a core and makes it the only "main lcore",
/// while ports here are moved between threads.
fn initialise(shim: &'static sys::Functions, arguments: &[String]) -> Result<Started, Error> {
    let mut owned = vec![CString::from(c"ferroce")];
    for argument in arguments {
        owned.push(CString::new(argument.as_str()).map_err(|_| Error::Invalid {
            parameter: PARAMETER,
            value: quoted(arguments),
            expected: "no NUL bytes".to_owned(),
        })?);
    }
    let start = move || {
        let mut pointers: Vec<*mut c_char> = owned.into_iter().map(CString::into_raw).collect();
        pointers.push(std::ptr::null_mut());
        let count = pointers.len() as i32 - 1;
        let pointers = Vec::leak(pointers).as_mut_ptr();
        ARGUMENTS.store(pointers, Ordering::Relaxed);
        // SAFETY: an argument vector as for main(), which is never freed. This is the only call.
        match unsafe { (shim.eal_start)(count, pointers) } {
            0 => Ok(()),
            code => Err(code.abs()),
        }
    };
    match thread::Builder::new().name("dpdk-start".into()).spawn(start).map(thread::JoinHandle::join) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(source) => Err(Error::Os { what: "starting a thread", interface: "DPDK".into(), source }),
    }
}

fn refused(shim: &sys::Functions, arguments: &[String], code: i32) -> Error {
    // SAFETY: always a string, either static or of this thread.
    let reason = unsafe { CStr::from_ptr((shim.error_text)(code)) }.to_string_lossy();
    Error::Invalid {
        parameter: PARAMETER,
        value: quoted(arguments),
        expected: format!(
            "arguments that DPDK's EAL accepts; it reports '{reason}', and more on stderr. Without huge pages it \
             needs `--no-huge -m 512`; several processes need a `--file-prefix` each, or `--no-shconf`"
        ),
    }
}

fn quoted(arguments: &[String]) -> String {
    format!("'{}'", arguments.join(" "))
}
