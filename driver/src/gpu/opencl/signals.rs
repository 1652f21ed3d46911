//! Signals are the program's.
//!
//! PoCL's compiler takes SIGINT, SIGTERM and others for itself when it is loaded or first used, as LLVM does in a compiler, and ends the
//! process with them. A program that embeds ferroce has handlers of its own, or none.

use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

use libc::{c_int, sigaction};

/// Makes a call of OpenCL, and puts back what it has changed of how signals are taken. Whoever sets a handler in another thread meanwhile
/// may lose it.
pub(super) fn keep_signals<T>(call: impl FnOnce() -> T) -> T {
    let before = SIGNALS.map(|signal| (signal, taken(signal)));
    let result = call();
    for (signal, before) in before {
        if let (Some(before), Some(now)) = (before, taken(signal))
            && now.sa_sigaction != before.sa_sigaction
        {
            // SAFETY: what the system has said of this signal before.
            unsafe { sigaction(signal, &raw const before, null_mut()) };
        }
    }
    result
}

/// Those that LLVM takes.
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

/// How a signal is taken now.
fn taken(signal: c_int) -> Option<sigaction> {
    let mut now = MaybeUninit::uninit();
    // SAFETY: it is only asked for, and written where there is room for it.
    let asked = unsafe { sigaction(signal, null(), now.as_mut_ptr()) };
    // SAFETY: the call has written it.
    (asked == 0).then(|| unsafe { now.assume_init() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::{Device, opencl};

    /// A device that is found, and its kernels, are compiled here for the first time, whichever test does it.
    #[test]
    fn a_device_leaves_signals_as_they_were() {
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
