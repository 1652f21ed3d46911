//! Network namespaces joined by a veth pair, for tests that need real interfaces.

use std::fs::File;
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use rustix::net::{AddressFamily, SocketType, socket};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The interface in either namespace.
pub const VETH: &str = "veth0";

/// Two namespaces with `veth0` in each: 10.9.0.1 / fd09::1 in `a`, 10.9.0.2 / fd09::2 in `b`. They
/// are removed on drop, also when the test panics.
#[derive(Debug)]
pub struct Namespaces {
    /// The name of the one, as `ip netns` takes it.
    pub a: String,
    /// The name of the other.
    pub b: String,
}

impl Namespaces {
    /// Makes both, with interfaces of this MTU and one queue; prints why and returns `None` where that is not
    /// possible.
    pub fn new(mtu: u32) -> Option<Namespaces> {
        Namespaces::with_queues(mtu, 1)
    }

    /// As [`new`](Namespaces::new), with so many receive and transmit queues.
    pub fn with_queues(mtu: u32, queues: u32) -> Option<Namespaces> {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        if !rustix::process::geteuid().is_root() {
            println!("skipped: needs root, for network namespaces and AF_XDP");
            return None;
        }
        if let Err(error) = socket(AddressFamily::XDP, SocketType::RAW, None) {
            println!("skipped: this kernel has no AF_XDP ({error})");
            return None;
        }
        if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_err() {
            println!("skipped: no `ip` command (package iproute2)");
            return None;
        }
        let id = format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let pair = Namespaces { a: format!("ferroce-{id}-a"), b: format!("ferroce-{id}-b") };
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
    pub fn in_a<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        inside(&self.a, f)
    }

    /// Runs `f` in namespace `b`.
    pub fn in_b<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        inside(&self.b, f)
    }

    /// Runs `f` in `a`, and then in `b`.
    pub fn in_both<T: Send>(&self, f: impl Fn() -> T + Sync) -> (T, T) {
        (self.in_a(&f), self.in_b(&f))
    }
}

impl Drop for Namespaces {
    fn drop(&mut self) {
        for namespace in [&self.a, &self.b] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).stderr(Stdio::null()).status();
        }
    }
}

/// Runs `f` on a thread of its own in the namespace.
pub fn inside<T: Send>(namespace: &str, f: impl FnOnce() -> T + Send) -> T {
    let file = File::open(format!("/run/netns/{namespace}")).expect("the namespace exists");
    thread::scope(|scope| {
        let run = scope.spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("root may enter it");
            f()
        });
        match run.join() {
            Ok(value) => value,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}

/// Runs the `ip` command, which must succeed.
pub fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}
