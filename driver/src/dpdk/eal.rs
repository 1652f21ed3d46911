//! DPDK's environment (EAL): once a process, with the application's arguments.

use std::ffi::{CStr, CString, c_char};
use std::io;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use ferroce_dpdk_sys as sys;

use crate::Error;

/// Starts EAL with `arguments`, or sees that it runs with them. No arguments are those it runs with.
pub(super) fn start(arguments: &[String]) -> Result<(), Error> {
    let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
    match &*running {
        Some((first, result)) if arguments.is_empty() || arguments == first => {
            result.as_ref().copied().map_err(|&code| refused(first, code))
        }
        Some((first, _)) => Err(Error::Invalid {
            parameter: PARAMETER,
            value: quoted(arguments),
            expected: format!("DPDK takes arguments once a process, and has had {}", quoted(first)),
        }),
        None => {
            let result = initialise(arguments)?;
            *running = Some((arguments.to_vec(), result));
            result.map_err(|code| refused(arguments, code))
        }
    }
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

/// What a call without a result left as its error.
pub(super) fn last_error(what: &'static str, port: &str) -> Error {
    // SAFETY: reads a variable of this thread.
    os_error(what, port, unsafe { sys::ferroce_errno() })
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

struct ThreadRegistration {
    taken: bool,
}

impl ThreadRegistration {
    fn take() -> ThreadRegistration {
        // SAFETY: EAL runs, for a port is open; the thread is none of EAL's, for those run no code
        // of ours but `initialise`.
        ThreadRegistration { taken: unsafe { sys::rte_thread_register() } == 0 }
    }
}

impl Drop for ThreadRegistration {
    fn drop(&mut self) {
        if self.taken {
            // SAFETY: this thread registered itself.
            unsafe { sys::rte_thread_unregister() };
        }
    }
}

/// Runs `rte_eal_init` on a thread of its own: it ties its caller to a core, and makes it the "main
/// lcore", of which there is one, while ports here move between threads.
fn initialise(arguments: &[String]) -> Result<Started, Error> {
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
        let result = unsafe { sys::rte_eal_init(count, pointers) };
        // SAFETY: reads a variable of this thread.
        if result < 0 { Err(unsafe { sys::ferroce_errno() }) } else { Ok(()) }
    };
    match thread::Builder::new().name("dpdk-start".into()).spawn(start).map(thread::JoinHandle::join) {
        Ok(Ok(result)) => Ok(result),
        Ok(Err(panic)) => std::panic::resume_unwind(panic),
        Err(source) => Err(Error::Os { what: "starting a thread", interface: "DPDK".into(), source }),
    }
}

fn refused(arguments: &[String], code: i32) -> Error {
    // SAFETY: always a string, static or this thread's.
    let reason = unsafe { CStr::from_ptr(sys::rte_strerror(code)) }.to_string_lossy();
    Error::Invalid {
        parameter: PARAMETER,
        value: quoted(arguments),
        expected: format!(
            "arguments that DPDK's EAL starts with; it says '{reason}', and more on stderr. Without huge pages \
             it wants `--no-huge -m 512`; several processes want a `--file-prefix` each, or `--no-shconf`"
        ),
    }
}

fn quoted(arguments: &[String]) -> String {
    format!("'{}'", arguments.join(" "))
}
