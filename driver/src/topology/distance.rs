//! The distance between two PCI devices.

use std::fmt;

use super::{PciDevice, Topology};

/// The components that bytes pass between two PCI devices, nearest first, with the names of `nvidia-smi topo -m` and NCCL.
///
/// | name | bytes pass |
/// |---|---|
/// | `PIX` | one PCI switch or bridge, or the two are functions of one card |
/// | `PXB` | several switches or bridges, and no host bridge |
/// | `PHB` | a host bridge: the root complex, which is a part of the CPU |
/// | `NODE` | two host bridges of one socket |
/// | `SYS` | the link between sockets (UPI, xGMI) |
///
/// Those programs report `SYS` already for different NUMA nodes. Here a socket that is configured as several nodes (NPS4,
/// SNC) is one socket; [`Topology::node_distance`] distinguishes such nodes. Links between GPUs (NVLink, xGMI) are not in
/// sysfs, and not considered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// One switch.
    Pix,
    /// Several switches.
    Pxb,
    /// One host bridge.
    Phb,
    /// One socket.
    Node,
    /// Several sockets.
    Sys,
    /// One of them is not on a PCI bus, or the kernel does not report its NUMA node and there are several.
    Unknown,
}

impl Distance {
    /// The name in `nvidia-smi topo -m`: `PIX`; `?` if it is unknown.
    pub fn name(self) -> &'static str {
        match self {
            Distance::Pix => "PIX",
            Distance::Pxb => "PXB",
            Distance::Phb => "PHB",
            Distance::Node => "NODE",
            Distance::Sys => "SYS",
            Distance::Unknown => "?",
        }
    }

    /// The meaning, as part of a sentence: `behind the same PCI switch`.
    pub fn meaning(self) -> &'static str {
        match self {
            Distance::Pix => "behind the same PCI switch",
            Distance::Pxb => "by several PCI switches of one host bridge",
            Distance::Phb => "at the same host bridge",
            Distance::Node => "at the same socket, by another host bridge",
            Distance::Sys => "at another socket",
            Distance::Unknown => "at a distance that the kernel does not report",
        }
    }

    /// Whether bytes pass through the CPU.
    pub fn passes_cpu(self) -> bool {
        !matches!(self, Distance::Pix | Distance::Pxb)
    }
}

/// Its name.
impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

pub(super) fn between(topology: &Topology, a: &PciDevice, b: &PciDevice) -> Distance {
    if a.host_bridge != b.host_bridge {
        return between_host_bridges(topology, a, b);
    }
    if a.address.is_same_card(b.address) {
        return Distance::Pix;
    }
    let common = a.bridges.iter().zip(&b.bridges).take_while(|(a, b)| a == b).count();
    if common == 0 {
        return Distance::Phb;
    }
    // Behind a common upstream port, each device may have one downstream port of the same switch. A further bridge is in
    // another switch.
    let is_near = |device: &PciDevice| device.bridges.len() - common <= 1;
    if is_near(a) && is_near(b) { Distance::Pix } else { Distance::Pxb }
}

fn between_host_bridges(topology: &Topology, a: &PciDevice, b: &PciDevice) -> Distance {
    let same = |is_same: bool| if is_same { Distance::Node } else { Distance::Sys };
    match (a.numa_node, b.numa_node) {
        (Some(a), Some(b)) if a == b => Distance::Node,
        (Some(a), Some(b)) => match (topology.package_of(a), topology.package_of(b)) {
            (Some(a), Some(b)) => same(a == b),
            // Without packages a node counts as a socket.
            _ => Distance::Sys,
        },
        // With a single node, the kernel does not report the nodes of devices.
        _ if topology.nodes.len() < 2 && topology.packages.len() < 2 => Distance::Node,
        _ => Distance::Unknown,
    }
}
