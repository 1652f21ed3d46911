//! CPU cycles of a thread, for benchmarks, if the machine counts them.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::FromRawFd;

/// A counter of the thread that opened it, which counts while that thread runs, in user space and in the kernel.
#[derive(Debug)]
pub struct ThreadCycles(File);

impl ThreadCycles {
    /// Starts a counter for this thread.
    ///
    /// # Errors
    /// `NotFound` or `Unsupported` if the machine (usually a virtual one) has no such counter, `PermissionDenied` if
    /// `kernel.perf_event_paranoid` forbids it.
    pub fn open() -> io::Result<ThreadCycles> {
        open(HARDWARE, HARDWARE_CPU_CYCLES).map(ThreadCycles)
    }

    /// Cycles so far.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn read(&self) -> io::Result<u64> {
        read(&self.0)
    }
}

/// The first version of `perf_event_attr` (`PERF_ATTR_SIZE_VER0`): the kernel accepts any known size.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attributes>() == 64);
/// `PERF_FLAG_FD_CLOEXEC`
const FLAG_FD_CLOEXEC: libc::c_ulong = 8;
const HARDWARE: u32 = 0;
const HARDWARE_CPU_CYCLES: u64 = 0;

fn open(kind: u32, config: u64) -> io::Result<File> {
    let attributes =
        Attributes { kind, size: size_of::<Attributes>() as u32, config, ..Attributes::default() };
    let (this_thread, any_cpu, no_group) = (0, -1, -1);
    // SAFETY: `perf_event_open` reads `size` bytes of the structure, which outlives the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            this_thread,
            any_cpu,
            no_group,
            FLAG_FD_CLOEXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a new descriptor without another owner.
    Ok(unsafe { File::from_raw_fd(fd as i32) })
}

fn read(mut count: &File) -> io::Result<u64> {
    let mut value = [0; 8];
    count.read_exact(&mut value)?;
    Ok(u64::from_ne_bytes(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOFTWARE: u32 = 1;
    const SOFTWARE_TASK_CLOCK: u64 = 1;

    #[test]
    fn the_count_rises_while_the_thread_runs() {
        // The kernel's software clock uses the same call, and exists on machines without counters.
        let count = match open(SOFTWARE, SOFTWARE_TASK_CLOCK) {
            Ok(count) => count,
            Err(error) => return println!("skipped: no performance events here: {error}"),
        };
        let before = read(&count).unwrap();
        let start = std::time::Instant::now();
        while start.elapsed().as_millis() < 5 {}
        assert!(read(&count).unwrap() > before);
        match ThreadCycles::open() {
            Ok(cycles) => assert!(cycles.read().unwrap() > 0),
            Err(error) => println!("skipped: this machine counts no cycles: {error}"),
        }
    }
}
