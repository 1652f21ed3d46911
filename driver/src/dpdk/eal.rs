//! DPDK's environment (EAL), which is started once in a process, with the application's arguments.
//!
//! EAL starts on a thread of its own, because it ties its caller to a core. Every thread that polls a port registers
//! itself: pools have caches only for registered threads.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferroce_dpdk_sys as sys;

use crate::Error;

/// The shim over this system's DPDK.
pub(super) fn load() -> Result<&'static sys::Functions, Error> {
    sys::load().map_err(|error| Error::NoDpdk { reason: error.to_string() })
}

/// Loads the shim and starts EAL with `arguments`, or sees that it runs with them. No arguments are those it runs
/// with.
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
                expected: format!("DPDK accepts arguments once per process, and has received {}", quoted(first)),
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

/// Gives the calling thread a place in DPDK's per-thread caches of packet buffers, until it ends.
/// Without one each burst takes its buffers from the shared part of a pool, and cold ones.
#[inline]
pub(super) fn enter() {
    // A thread that is ending does without.
    let _ = REGISTRATION.try_with(|_| ());
}

/// DPDK's error numbers are the system's, negated, and a few of its own, which have no text there.
pub(super) fn os_error(what: &'static str, port: &str, result: i32) -> Error {
    Error::Os { what, interface: port.to_owned(), source: io::Error::from_raw_os_error(result.abs()) }
}

const PARAMETER: &str = "EAL arguments";

/// The arguments of the first start, and the error number if it failed. EAL can't be tried again.
static RUNNING: Mutex<Option<(Vec<String>, Started)>> = Mutex::new(None);

/// The same as EAL has them: it keeps pointers to them and changes their order.
static ARGUMENTS: AtomicPtr<*mut c_char> = AtomicPtr::new(std::ptr::null_mut());

/// Whether EAL runs, or DPDK's error number.
type Started = Result<(), i32>;

thread_local! {
    static REGISTRATION: ThreadRegistration = ThreadRegistration::take();
}

/// What gives the place back; `None` if there was none to be had.
struct ThreadRegistration(Option<&'static sys::Functions>);

impl ThreadRegistration {
    fn take() -> ThreadRegistration {
        // SAFETY: EAL runs, for a port is open; the thread is none of EAL's, for those run no code
        // of ours but `initialise`.
        ThreadRegistration(sys::load().ok().filter(|shim| unsafe { (shim.thread_register)() } == 0))
    }
}

impl Drop for ThreadRegistration {
    fn drop(&mut self) {
        if let Some(shim) = self.0 {
            // SAFETY: this thread registered itself.
            unsafe { (shim.thread_unregister)() };
        }
    }
}

/// Runs DPDK's `rte_eal_init` on a thread of its own: it ties its caller to a core, and makes it the "main
/// lcore", of which there is one, while ports here move between threads.
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
        // SAFETY: an argument vector as main() gets it, never freed; the first and only call.
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
    // SAFETY: always a string, static or this thread's.
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
