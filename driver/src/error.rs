//! Why a driver could not be opened, or why it stopped.

use std::fmt;
use std::io;
use std::net::IpAddr;

use crate::{Capabilities, MemoryError, holder, rnic};

/// The RNICs in place of one that there is not.
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
        /// The name asked for.
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
        /// What was tried.
        what: &'static str,
        /// On which interface.
        interface: String,
        /// The missing capability or limit.
        capability: &'static str,
        /// What to do about it.
        cure: String,
    },
    /// Somebody else holds the queue.
    #[error(
        "queue {queue} of '{interface}' is in use by another AF_XDP socket{}; stop that process or take another queue",
        holder::there(holders)
    )]
    QueueBusy {
        /// The interface.
        interface: String,
        /// The queue.
        queue: u32,
        /// The other processes with AF_XDP ports on the interface, as far as this one may know.
        holders: Vec<holder::Holder>,
    },
    /// The interface has an XDP program of somebody else, which is not replaced.
    #[error(
        "'{interface}' already has the XDP program '{program}' (id {id}), which is not ferroce's; stop its owner, \
         or take it off with `ip link set {interface} xdp off`"
    )]
    ForeignProgram {
        /// The interface.
        interface: String,
        /// The program's name.
        program: String,
        /// The program's id, as `bpftool prog` lists it.
        id: u32,
    },
    /// A system call failed for a reason that has no variant of its own.
    #[error("{what} on '{interface}': {source}")]
    Os {
        /// What was tried.
        what: &'static str,
        /// On which interface.
        interface: String,
        /// The kernel's word.
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
    /// The kernel has no interface of the VLAN, so nobody can be asked for a next hop in it.
    #[error(
        "'{interface}' has no VLAN {vlan}: `ip link add link {interface} name {interface}.{vlan} type vlan id {vlan}`, \
         set it up and give it an address, or give the address vector the hardware address of the next hop"
    )]
    NoVlan {
        /// The interface that the VLAN should be on.
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
    /// Somebody else hears the RoCE packets to the address.
    #[error(
        "UDP port {port} of {address} is in use by {}; {}stop it or take another address",
        holder.as_ref().map_or("somebody who can't be told".to_owned(), ToString::to_string),
        holder.as_ref().map_or(String::new(), |holder| holder.why_not_shared(*address))
    )]
    PortInUse {
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
        /// Who has it, as far as this process may know.
        holder: Option<holder::Holder>,
    },
    /// What processes of this host share could not be joined or changed.
    #[error("{what} can't be shared: {reason}")]
    Sharing {
        /// What is shared.
        what: String,
        /// Why it failed.
        reason: String,
    },
    /// Another process on the same address has the service.
    #[error(
        "service {service:#x} (port {}) of {of} is another process's{}; take another port",
        service & 0xffff,
        if *pid == 0 { String::new() } else { format!(" (pid {pid})") }
    )]
    ServiceInUse {
        /// The service ID.
        service: u64,
        /// The address, and what else it is a part of.
        of: String,
        /// The process; 0 where it is not known.
        pid: u32,
    },
    /// The driver can't do this.
    #[error("the {driver} driver has no means of {what}")]
    Unsupported {
        /// The driver.
        driver: &'static str,
        /// What was asked of it.
        what: &'static str,
    },
    /// A parameter is outside what the driver can do.
    #[error("{parameter} = {value}: {expected}")]
    Invalid {
        /// The parameter.
        parameter: &'static str,
        /// Its value.
        value: String,
        /// What would be right.
        expected: String,
    },
    /// This system has no DPDK, or no shim of ferroce over it, so a port of DPDK can't be opened.
    #[error("DPDK can't be loaded: {reason}")]
    NoDpdk {
        /// What the loader says, and what to do.
        reason: String,
    },
    /// There is no libibverbs that serves, so RNICs can't be reached.
    #[error("{library} can't be loaded: {reason}")]
    NoVerbs {
        /// The library asked for.
        library: String,
        /// What the loader says, or what the library lacks.
        reason: String,
    },
    /// There is no librdmacm that serves, so an RNIC has no connection manager.
    #[error("the connection manager of an RNIC needs {library}, which can't be loaded: {reason}")]
    NoRdmaCm {
        /// The library asked for.
        library: String,
        /// What the loader says, or what the library lacks.
        reason: String,
    },
    /// There is no RNIC of that name.
    #[error(
        "there is no RNIC '{}'{}", name.escape_debug(),
        rnics_there(there, unlisted)
    )]
    NoRnic {
        /// The name asked for.
        name: String,
        /// Those that there are.
        there: Vec<String>,
        /// Those that the kernel has beside them, and libibverbs does not list.
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
        /// The device; empty where it is about none.
        device: String,
        /// What it said.
        source: io::Error,
        /// What it was asked for, and what would be right; empty where that is not known.
        remedy: String,
    },
    /// A GPU gives out no dma-buf of its memory, by which an RNIC reaches it.
    #[error(
        "{card} reaches memory of a GPU by a dma-buf, and there is none: {source}; {}",
        rnic::COPY_INSTEAD
    )]
    NoDmaBuf {
        /// The RNIC.
        card: String,
        /// What the GPU says.
        source: MemoryError,
    },
    /// A sysfs tree can't be read, or recorded.
    #[error("sysfs tree '{path}': {reason}")]
    Topology {
        /// The folder.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A capture file can't be read or written.
    #[error("capture '{path}': {reason}")]
    Capture {
        /// The file.
        path: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// As it reads: `main() -> Result` prints it so.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Error {
    /// Says, of a function of libibverbs or librdmacm that failed, what it was asked for and what would be right.
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

    /// The driver asks for next hops without a tag alone.
    pub(crate) fn no_vlans(capabilities: &Capabilities) -> Error {
        let what = "looking for a next hop in a VLAN (give the address vector its hardware address)";
        Error::Unsupported { driver: capabilities.driver, what }
    }

    /// Nobody answers for `peer`, which is the next hop.
    pub(crate) fn no_neighbour(peer: IpAddr, interface: &str) -> Error {
        let protocol = if peer.is_ipv4() { "ARP" } else { "neighbour discovery" };
        Error::NoNeighbour { peer, protocol, interface: interface.to_owned() }
    }
}
