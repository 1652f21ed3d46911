//! Huge pages for the heap of a large fabric.

use std::env;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Hosts from which on it is worth it.
const LARGE: usize = 256;

/// glibc reads this when a program starts, and at no other time. With the system's setting of transparent huge pages at
/// "never" it does nothing.
const VARIABLE: &str = "GLIBC_TUNABLES";
const HUGE_PAGES: &str = "glibc.malloc.hugetlb=1:glibc.malloc.top_pad=67108864";

/// Starts this program anew with huge pages, if it is for a large fabric and the user has not set the allocator himself:
/// contexts of a thousand hosts lie on more pages than a TLB has entries. Returns where it can't; all is the same then but
/// the time that it takes.
pub(super) fn begin_anew(hosts: usize) {
    if hosts < LARGE || cfg!(not(target_env = "gnu")) || env::var_os(VARIABLE).is_some() {
        return;
    }
    let Ok(program) = env::current_exe() else { return };
    let error = Command::new(program).args(env::args_os().skip(1)).env(VARIABLE, HUGE_PAGES).exec();
    tracing::debug!("no huge pages: {error}");
}
