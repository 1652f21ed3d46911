//! Keeps the program's signal handlers.
//!
//! PoCL's compiler (LLVM) installs handlers for SIGINT, SIGTERM and other signals when it is loaded or first used, and ends
//! the process with them. A program that embeds ferroce has its own handlers, or none.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use libc::{c_int, sigaction};

/// Makes a call of OpenCL, and restores the signal handlers that it has changed. A handler that another thread sets
/// meanwhile may be lost.
pub(super) fn keep_signals<T>(call: impl FnOnce() -> T) -> T {
    let before = SIGNALS.map(|signal| (signal, taken(signal)));
    let result = call();
    for (signal, before) in before {
        if let (Some(before), Some(now)) = (before, taken(signal))
            && now.sa_sigaction != before.sa_sigaction
        {
            // SAFETY: the action that the kernel returned for this signal before.
            unsafe { sigaction(signal, &raw const before, null_mut()) };
        }
    }
    result
}

/// The signals for which LLVM installs handlers.
const SIGNALS: [c_int; 16] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGUSR2,
    libc::SIGPIPE,
    libc::SIGQUIT,
    libc::SIGILL,
    libc::SIGTRAP,
    libc::SIGABRT,
    libc::SIGBUS,
    libc::SIGFPE,
    libc::SIGSEGV,
    libc::SIGSYS,
    libc::SIGXCPU,
    libc::SIGXFSZ,
];

/// The current action of a signal.
fn taken(signal: c_int) -> Option<sigaction> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: a query only, with a valid pointer to store the action.
    let asked = unsafe { sigaction(signal, null(), now.as_mut_ptr()) };
    // SAFETY: the call has initialised it.
    (asked == 0).then(|| unsafe { now.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Device, opencl};

    /// Opening a device and building its kernels run the compiler for the first time, in whichever test does it first.
    #[test]
    fn a_device_keeps_signal_handlers() {
        let Ok(device) = opencl::open(0) else {
            println!("skipped: there is no OpenCL device");
            return;
        };
        device.reducer().unwrap();
        device.allocate(4096).unwrap();
        let handlers = SIGNALS.map(|signal| taken(signal).unwrap().sa_sigaction);
        let is_own = |signal: c_int| matches!(signal, libc::SIGSEGV | libc::SIGBUS | libc::SIGPIPE);
        for (signal, handler) in SIGNALS.into_iter().zip(handlers).filter(|(signal, _)| !is_own(*signal)) {
            assert_eq!(handler, libc::SIG_DFL, "signal {signal}");
        }
    }
}
