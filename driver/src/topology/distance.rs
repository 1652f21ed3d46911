//! How far two PCI devices are from each other.

use std::fmt;

use super::{PciDevice, Topology};

/// What bytes pass between two PCI devices, nearest first, under the names that `nvidia-smi topo -m` and NCCL have.
///
/// | name | bytes pass |
/// |---|---|
/// | `PIX` | one PCI switch or bridge, or the two are functions of one card |
/// | `PXB` | several switches or bridges, and no host bridge |
/// | `PHB` | a host bridge: the root complex, which is a part of the CPU |
/// | `NODE` | two host bridges of one socket |
/// | `SYS` | the link between sockets (UPI, xGMI) |
///
/// Those programs say `SYS` already where NUMA nodes differ. Here a socket that is configured as several nodes (NPS4, SNC) is one
/// socket; [`Topology::node_distance`] tells such nodes apart. Links of GPUs among each other (NVLink, xGMI) are not in sysfs, and
/// not in this.
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
    /// One of both is at no PCI bus, or the kernel does not tell its NUMA node and there are several.
    Unknown,
}

impl Distance {
    /// As `nvidia-smi topo -m` has it: `PIX`; `?` if it is unknown.
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

    /// What it means, as part of a sentence: `behind the same PCI switch`.
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

    /// Whether bytes pass the CPU.
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
    // Behind the upstream port that both have, each has a downstream port of the same switch. What comes behind that is another one.
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
        // The kernel tells no nodes of devices where there is one.
        _ if topology.nodes.len() < 2 && topology.packages.len() < 2 => Distance::Node,
        _ => Distance::Unknown,
    }
}
