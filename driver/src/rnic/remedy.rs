//! Remedies for refusals by the kernel or libibverbs. They are determined after a refusal, and are in the error's text.

use std::error::Error as _;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// The kernel's devices: directories named after them.
const KERNEL: &str = "/sys/class/infiniband";
/// The interfaces for programs: directories named after them, with the device's name in the file `ibdev`.
const VERBS: &str = "/sys/class/infiniband_verbs";
/// The directory of their device files.
const NODES: &str = "/dev/infiniband";
/// The most kernel devices that are checked.
const DEVICES_MAX: usize = 256;

/// Why a library was not loaded: the loader's message, and the packages that contain it.
pub(super) fn of_library(error: &libloading::Error, packages: &str) -> String {
    let loader = error.source().map_or_else(|| error.to_string(), ToString::to_string);
    format!("{loader}; it comes with rdma-core 33 or later (Debian: {packages})")
}

/// Why a device could not be opened.
pub(super) fn of_open(device: &str) -> String {
    let nodes = fs::read_dir(VERBS).into_iter().flatten().flatten().take(DEVICES_MAX);
    let is_its = |name: &String| {
        let of = fs::read_to_string(Path::new(VERBS).join(name).join("ibdev"));
        of.is_ok_and(|of| of.trim_end() == device)
    };
    let node = nodes.filter_map(|entry| entry.file_name().into_string().ok()).find(is_its);
    node.map(|node| of_node(&format!("{NODES}/{node}"), "ib_uverbs")).unwrap_or_default()
}

/// Why there is no rdma_cm channel.
pub(super) fn of_rdma_cm() -> String {
    of_node(&format!("{NODES}/rdma_cm"), "rdma_ucm")
}

/// Empty if this process may use the file.
fn of_node(node: &str, module: &str) -> String {
    match OpenOptions::new().read(true).write(true).open(node) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            format!("there is no {node}; `modprobe {module}` creates it")
        }
        Err(error) => format!("{node}: {error}; this user must be able to read and write it"),
        Ok(_) => String::new(),
    }
}

/// Why memory could not be registered.
pub(super) fn of_registration(bytes: usize, error: &io::Error) -> String {
    let limit = match error.raw_os_error() {
        Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => locked_memory(),
        _ => None,
    };
    let limit =
        limit.map(|bytes| format!("; this process may lock {} KiB in all (`ulimit -l`)", bytes >> 10));
    format!("the memory has {bytes} bytes{}", limit.unwrap_or_default())
}

/// Why memory of a GPU could not be registered.
pub(super) fn of_dma_buf(bytes: usize, gpu: &str, error: &io::Error) -> String {
    let copy = super::COPY_INSTEAD;
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS | libc::ENOTTY) => {
            format!(
                "the card, its driver or this kernel does not accept memory of a GPU ({bytes} bytes of {gpu}) as a \
                 dma-buf: {copy}"
            )
        }
        _ => format!("the memory is a dma-buf with {bytes} bytes of {gpu}: {copy}"),
    }
}

/// The limit in bytes; `None` if unlimited.
fn locked_memory() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Memlock).current
}

/// The kernel's devices that libibverbs does not list.
pub(super) fn unlisted(listed: &[String]) -> Vec<String> {
    let names = fs::read_dir(KERNEL).into_iter().flatten().flatten().take(DEVICES_MAX);
    let mut names: Vec<String> = names.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.retain(|name| !listed.contains(name));
    names.sort();
    names
}

/// Whether the kernel has a device of this name.
pub(crate) fn is_device(name: &str) -> bool {
    Path::new(KERNEL).join(name).exists()
}

/// The names of rdma_rxe devices, each with its network interface. Other devices have no socket in the kernel.
fn soft_devices() -> impl Iterator<Item = (String, String)> {
    let names = fs::read_dir(KERNEL).into_iter().flatten().flatten().take(DEVICES_MAX);
    names.filter_map(|entry| {
        // Only software devices have this file.
        let interface = fs::read_to_string(entry.path().join("parent")).ok()?;
        Some((entry.file_name().into_string().ok()?, interface.trim_end().to_owned()))
    })
}

/// Whether there is an rdma_rxe device.
pub(crate) fn has_rxe() -> bool {
    soft_devices().next().is_some()
}

/// The rdma_rxe device on this network interface, if any.
#[cfg(feature = "af_xdp")]
pub(crate) fn rxe_on(interface: &str) -> Option<String> {
    soft_devices().find(|(_, parent)| parent == interface).map(|(name, _)| name)
}
