//! Why a driver could not be opened, or why it stopped.

use std::fmt;
use std::io;
use std::net::IpAddr;

use crate::{Capabilities, MemoryError, holder, rnic};

/// The existing RNICs, for an error about a missing one.
fn rnics_there(there: &[String], unlisted: &[String]) -> String {
    match (there, unlisted) {
        ([], []) => ", nor any other".into(),
        ([], unlisted) => format!(
            ": libibverbs lists none; the kernel has {}, of which it lacks the provider (Debian: ibverbs-providers) \
             or /dev/infiniband/uverbs* (`modprobe ib_uverbs`)",
            unlisted.join(", ")
        ),
        (there, _) => format!("; there are {}", there.join(", ")),
    }
}

/// Why a driver could not be opened, or why it stopped.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The interface does not exist in this network namespace.
    #[error(
        "no interface named '{name}' in this network namespace; there are: {present}{}",
        if *is_rnic { format!("; '{name}' is an RNIC: ibverbs:{name}") } else { String::new() }
    )]
    NoInterface {
        /// The requested name.
        name: String,
        /// Whether it is the name of an RNIC.
        is_rnic: bool,
        /// The names that exist, comma-separated.
        present: String,
    },
    /// The interface is down.
    #[error("interface '{name}' is down; `ip link set {name} up`")]
    InterfaceDown {
        /// The interface.
        name: String,
    },
    /// The process lacks a privilege.
    #[error("{what} on '{interface}' needs {capability}: {cure}")]
    Permission {
        /// The operation.
        what: &'static str,
        /// The interface.
        interface: String,
        /// The missing capability or limit.
        capability: &'static str,
        /// The remedy.
        cure: String,
    },
    /// Another process uses the queue.
    #[error(
        "queue {queue} of '{interface}' is in use by another AF_XDP socket{}; stop that process or use another queue",
        holder::there(holders)
    )]
    QueueBusy {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The other processes with AF_XDP ports on the interface, as far as this one can see them.
        holders: Vec<holder::Holder>,
    },
    /// The interface has another XDP program, which is not replaced.
    #[error(
        "'{interface}' already has the XDP program '{program}' (id {id}), which is not ferroce's; stop its owner, or \
         detach it with `ip link set {interface} xdp off`"
    )]
    ForeignProgram {
        /// The interface.
        interface: String,
        /// The program's name.
        program: String,
        /// The program's id, as `bpftool prog` lists it.
        id: u32,
    },
    /// A system call failed for another reason.
    #[error("{what} on '{interface}': {source}")]
    Os {
        /// The operation.
        what: &'static str,
        /// The interface.
        interface: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel has no route to the peer.
    #[error("no route to {peer} from '{interface}'")]
    NoRoute {
        /// The peer.
        peer: IpAddr,
        /// The interface.
        interface: String,
    },
    /// The kernel has no interface of the VLAN, so a next hop in it can't be resolved.
    #[error(
        "'{interface}' has no VLAN {vlan}: `ip link add link {interface} name {interface}.{vlan} type vlan id {vlan}`, \
         set it up and give it an address, or give the address vector the hardware address of the next hop"
    )]
    NoVlan {
        /// The interface on which the VLAN is missing.
        interface: String,
        /// The VLAN.
        vlan: u16,
    },
    /// The peer (or its gateway) does not answer ARP or neighbour discovery.
    #[error("{peer} does not answer {protocol} on '{interface}'")]
    NoNeighbour {
        /// The next hop.
        peer: IpAddr,
        /// ARP or ND.
        protocol: &'static str,
        /// The interface.
        interface: String,
    },
    /// The interface has no IP address.
    #[error("interface '{interface}' has no IP address; `ip addr add ADDRESS/PREFIX dev {interface}`")]
    NoAddress {
        /// The interface.
        interface: String,
    },
    /// Another process or the kernel receives the RoCE packets to the address.
    #[error(
        "UDP port {port} of {address} is in use by {}; {}stop it or use another address",
        holder.as_ref().map_or("an unknown process".to_owned(), ToString::to_string),
        holder.as_ref().map_or(String::new(), |holder| holder.why_not_shared(*address))
    )]
    PortInUse {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// The holder, as far as this process can see it.
        holder: Option<holder::Holder>,
    },
    /// A resource shared by processes of this host could not be joined or changed.
    #[error("{what} can't be shared: {reason}")]
    Sharing {
        /// The resource.
        what: String,
        /// Why it failed.
        reason: String,
    },
    /// Another process on the same address listens for the service.
    #[error(
        "service {service:#x} (port {}) of {of} is in use by another process{}; use another port",
        service & 0xffff,
        if *pid == 0 { String::new() } else { format!(" (pid {pid})") }
    )]
    ServiceInUse {
        /// The service ID.
        service: u64,
        /// The address, with the group that it belongs to.
        of: String,
        /// The process; 0 if unknown.
        pid: u32,
    },
    /// The driver can't do this.
    #[error("the {driver} driver does not support {what}")]
    Unsupported {
        /// The driver.
        driver: &'static str,
        /// The requested operation.
        what: &'static str,
    },
    /// A parameter is out of the driver's range.
    #[error("{parameter} = {value}: {expected}")]
    Invalid {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: String,
    },
    /// This system has no DPDK, or no ferroce shim for it, so a port of DPDK can't be opened.
    #[error("DPDK can't be loaded: {reason}")]
    NoDpdk {
        /// The loader's error, and the remedy.
        reason: String,
    },
    /// There is no suitable libibverbs, so RNICs can't be used.
    #[error("{library} can't be loaded: {reason}")]
    NoVerbs {
        /// The requested library.
        library: String,
        /// The loader's error, or what the library lacks.
        reason: String,
    },
    /// There is no suitable librdmacm, so an RNIC has no connection manager.
    #[error("the connection manager of an RNIC needs {library}, which can't be loaded: {reason}")]
    NoRdmaCm {
        /// The requested library.
        library: String,
        /// The loader's error, or what the library lacks.
        reason: String,
    },
    /// There is no RNIC of that name.
    #[error(
        "there is no RNIC '{}'{}", name.escape_debug(),
        rnics_there(there, unlisted)
    )]
    NoRnic {
        /// The requested name.
        name: String,
        /// The existing names.
        there: Vec<String>,
        /// Names of the kernel that libibverbs does not list.
        unlisted: Vec<String>,
    },
    /// A function of libibverbs failed.
    #[error(
        "{call}{}{device}: {source}{}{remedy}",
        if device.is_empty() { "" } else { " of " },
        if remedy.is_empty() { "" } else { "; " }
    )]
    Verbs {
        /// The function.
        call: &'static str,
        /// The device; empty if none is concerned.
        device: String,
        /// Its error.
        source: io::Error,
        /// The request, and the valid values; empty if unknown.
        remedy: String,
    },
    /// A GPU does not export its memory as a dma-buf, which an RNIC needs.
    #[error(
        "{card} accesses memory of a GPU through a dma-buf, and there is none: {source}; {}",
        rnic::COPY_INSTEAD
    )]
    NoDmaBuf {
        /// The RNIC.
        card: String,
        /// The GPU's error.
        source: MemoryError,
    },
    /// A sysfs tree can't be read, or recorded.
    #[error("sysfs tree '{path}': {reason}")]
    Topology {
        /// The directory.
        path: String,
        /// The problem.
        reason: String,
    },
    /// A capture file can't be read or written.
    #[error("capture '{path}': {reason}")]
    Capture {
        /// The file.
        path: String,
        /// The problem.
        reason: String,
    },
}

/// The same text as `Display`, because `main() -> Result` prints it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Adds the request and the valid values to the error of a function of libibverbs or librdmacm.
    #[must_use]
    pub fn remedied(mut self, words: impl FnOnce(&io::Error) -> String) -> Error {
        if let Error::Verbs { source, remedy, .. } = &mut self
            && remedy.is_empty()
        {
            *remedy = words(source);
        }
        self
    }

    pub(crate) fn sharing(what: &str, reason: impl Into<String>) -> Error {
        Error::Sharing { what: what.to_owned(), reason: reason.into() }
    }

    /// The driver resolves next hops only without a tag.
    pub(crate) fn no_vlans(capabilities: &Capabilities) -> Error {
        let what = "looking for a next hop in a VLAN (give the address vector its hardware address)";
        Error::Unsupported { driver: capabilities.driver, what }
    }

    /// `peer`, which is the next hop, does not answer.
    pub(crate) fn no_neighbour(peer: IpAddr, interface: &str) -> Error {
        let protocol = if peer.is_ipv4() { "ARP" } else { "neighbour discovery" };
        Error::NoNeighbour { peer, protocol, interface: interface.to_owned() }
    }
}
