//! Network namespaces for ranks on one machine, connected by a bridge.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use tracing::{info, warn};

/// The interface that ferroce uses in each namespace.
pub(crate) const INTERFACE: &str = "veth0";
/// The networks between the namespaces: the interface in each, and the bridge of its peers. An XDP program on an
/// interface disables segmentation offload for the kernel's TCP there, so TCP has its own network.
const NETWORKS: [(&str, &str, Network); 2] =
    [(INTERFACE, "br0", Network::Ferroce), ("veth1", "br1", Network::Tcp)];

/// One of the two networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Network {
    /// The network of the interfaces that ferroce uses.
    Ferroce = 0,
    /// The network of the kernel's TCP.
    Tcp = 1,
}

/// A namespace for each rank with an interface in each network, and one more namespace with the bridges, so that
/// nothing is visible in the caller's own. They are removed on drop.
#[derive(Debug)]
pub(crate) struct Lab {
    namespaces: Vec<String>,
}

/// The reason that namespaces could not be created.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LabError {
    /// The `ip` command could not be started.
    #[error("the command `ip` can't be run ({0}); it is in the package iproute2")]
    NoIp(io::Error),
    /// The `ip` command failed.
    #[error("`ip {arguments}`: {reason}")]
    Ip {
        /// Its arguments.
        arguments: String,
        /// Its error output.
        reason: String,
    },
}

impl Lab {
    /// Creates the namespaces `ferroce-<purpose>-<pid>-<rank>` with interfaces of the given MTU, at least 1280 bytes
    /// (IPv6's minimum).
    ///
    /// Namespaces of a killed process with the same purpose are removed first.
    ///
    /// # Errors
    /// [`LabError`]; created namespaces are removed again.
    pub(crate) fn new(purpose: &str, ranks: u32, mtu: u32) -> Result<Lab, LabError> {
        remove_abandoned(purpose);
        let prefix = format!("ferroce-{purpose}-{}", std::process::id());
        let mut lab = Lab { namespaces: Vec::new() };
        let switch = lab.namespace(format!("{prefix}-switch"))?;
        for (_, bridge, _) in NETWORKS {
            // No spanning tree: a port forwards as soon as it is up.
            ip(&format!("-n {switch} link add {bridge} mtu {mtu} type bridge stp_state 0 mcast_snooping 0"))?;
            up(&switch, bridge)?;
        }
        for rank in 0..ranks {
            let namespace = lab.namespace(format!("{prefix}-{rank}"))?;
            for (interface, bridge, network) in NETWORKS {
                let port = format!("{bridge}-{rank}");
                ip(&format!(
                    "-n {namespace} link add {interface} mtu {mtu} type veth peer name {port} mtu {mtu} netns {switch}"
                ))?;
                ip(&format!("-n {switch} link set {port} master {bridge}"))?;
                up(&switch, &port)?;
                ip(&format!("-n {namespace} addr add {}/24 dev {interface}", address(network, rank)))?;
                up(&namespace, interface)?;
            }
            ip(&format!("-n {namespace} link set lo up"))?;
        }
        Ok(lab)
    }

    /// A command that executes `program` in the namespace of a rank, in the started process itself (the pid is
    /// `program`'s own).
    pub(crate) fn command(&self, rank: u32, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.namespaces[rank as usize + 1]]).arg(program);
        command
    }

    fn namespace(&mut self, name: String) -> Result<String, LabError> {
        ip(&format!("netns add {name}"))?;
        self.namespaces.push(name.clone());
        Ok(name)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for namespace in &self.namespaces {
            if let Err(error) = ip(&format!("netns del {namespace}")) {
                warn!("a network namespace could not be removed: {error}");
            }
        }
    }
}

/// The address of a rank, of at most 254, in a network.
pub(crate) fn address(network: Network, rank: u32) -> IpAddr {
    Ipv4Addr::new(10, 77, network as u8, rank as u8 + 1).into()
}

/// Sets a link up. It gets no IPv6 address of its own (the ranks use IPv4), so no duplicate address detection and no
/// router solicitation run on it.
fn up(namespace: &str, interface: &str) -> Result<(), LabError> {
    if Path::new("/proc/sys/net/ipv6").exists() {
        ip(&format!("-n {namespace} link set {interface} addrgenmode none"))?;
    }
    ip(&format!("-n {namespace} link set {interface} up"))
}

/// Removes namespaces whose creator was killed before it could remove them.
fn remove_abandoned(purpose: &str) {
    let prefix = format!("ferroce-{purpose}-");
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let pid = name.strip_prefix(&prefix).and_then(|rest| rest.split('-').next());
        if pid.is_some_and(|pid| pid.parse::<u32>().is_ok() && !Path::new("/proc").join(pid).exists()) {
            match ip(&format!("netns del {name}")) {
                Ok(()) => info!("removed the network namespace {name}, which a killed process had left"),
                Err(error) => warn!("a network namespace of a killed process could not be removed: {error}"),
            }
        }
    }
}

fn ip(arguments: &str) -> Result<(), LabError> {
    let mut command = Command::new("ip");
    // A process group of its own, so that Ctrl-C does not interrupt it, in particular not its cleanup.
    command.args(arguments.split_whitespace()).stdin(Stdio::null()).process_group(0);
    let output = command.output();
    let Output { status, stderr, .. } = output.map_err(LabError::NoIp)?;
    if status.success() {
        return Ok(());
    }
    let reason = String::from_utf8_lossy(&stderr).trim().to_owned();
    Err(LabError::Ip { arguments: arguments.to_owned(), reason })
}
