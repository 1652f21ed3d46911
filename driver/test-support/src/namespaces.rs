//! Network namespaces joined by a veth pair, for tests that need real interfaces.
#![allow(dead_code)] // no test program uses all of it

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

/// The interface in either namespace.
pub(crate) const VETH: &str = "veth0";

/// Two namespaces with `veth0` in each: 10.9.0.1 / fd09::1 in `a`, 10.9.0.2 / fd09::2 in `b`. They
/// are removed on drop, also when the test panics.
pub(crate) struct Pair {
    pub(crate) a: String,
    pub(crate) b: String,
}

static COUNTER: AtomicU32 = AtomicU32::new(0);

impl Pair {
    /// Makes the pair; prints why and returns `None` where that is not possible.
    pub(crate) fn new(mtu: u32) -> Option<Pair> {
        Pair::with_queues(mtu, 1)
    }

    pub(crate) fn with_queues(mtu: u32, queues: u32) -> Option<Pair> {
        // SAFETY: no arguments, no failure.
        if unsafe { libc::geteuid() } != 0 {
            println!("skipped: needs root, for network namespaces and AF_XDP");
            return None;
        }
        // SAFETY: no pointers; the descriptor is closed at once.
        let socket = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW, 0) };
        if socket < 0 {
            println!("skipped: this kernel has no AF_XDP ({})", std::io::Error::last_os_error());
            return None;
        }
        // SAFETY: `socket` is ours and open.
        unsafe { libc::close(socket) };
        if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_err() {
            println!("skipped: no `ip` command (package iproute2)");
            return None;
        }
        let id = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let pair = Pair { a: format!("ferroce-{id}-a"), b: format!("ferroce-{id}-b") };
        ip(&format!("netns add {}", pair.a));
        ip(&format!("netns add {}", pair.b));
        let queues = format!("numrxqueues {queues} numtxqueues {queues}");
        ip(&format!(
            "-n {} link add {VETH} mtu {mtu} {queues} type veth peer name {VETH} netns {} mtu {mtu} {queues}",
            pair.a, pair.b
        ));
        for (namespace, last) in [(&pair.a, 1), (&pair.b, 2)] {
            ip(&format!("-n {namespace} addr add 10.9.0.{last}/24 dev {VETH}"));
            ip(&format!("-n {namespace} addr add fd09::{last}/64 dev {VETH} nodad"));
            ip(&format!("-n {namespace} link set lo up"));
            ip(&format!("-n {namespace} link set {VETH} up"));
        }
        Some(pair)
    }

    /// Runs `f` in namespace `a`.
    pub(crate) fn in_a<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        inside(&self.a, f)
    }

    /// Runs `f` in namespace `b`.
    pub(crate) fn in_b<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        inside(&self.b, f)
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        for namespace in [&self.a, &self.b] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).stderr(Stdio::null()).status();
        }
    }
}

/// Runs `f` on a thread of its own in the namespace.
pub(crate) fn inside<T: Send>(namespace: &str, f: impl FnOnce() -> T + Send) -> T {
    let file = File::open(format!("/run/netns/{namespace}")).expect("the namespace exists");
    thread::scope(|scope| {
        let run = scope.spawn(move || {
            // SAFETY: `file` is an open namespace; only this thread changes over.
            let result = unsafe { libc::setns(file.as_raw_fd(), libc::CLONE_NEWNET) };
            assert_eq!(result, 0, "setns: {}", std::io::Error::last_os_error());
            f()
        });
        match run.join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs the `ip` command, which must succeed.
pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}
