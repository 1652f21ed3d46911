//! The topology of a host that matters for transfers between memory, GPUs and the network: NUMA nodes and sockets, the PCI tree,
//! network interfaces and RNICs. It is read from sysfs, of this machine or a copy of another one's ([`Topology::record`]).
//!
//! The files need not be trusted: files and directories are read up to a limit, invalid entries are left out and listed in
//! [`Topology::notes`], links out of the tree are not followed, and texts have no control characters.
//!
//! ```
//! use ferroce_driver::topology::Topology;
//!
//! let here = Topology::this()?;
//! for gpu in here.gpus() {
//!     for nic in &here.nics {
//!         let distance = nic.pci.map(|nic| here.distance(gpu.address, nic));
//!         println!("{} to {}: {distance:?}", gpu.address, nic.name());
//!     }
//! }
//! # Ok::<(), ferroce_driver::Error>(())
//! ```

mod cpus;
mod distance;
mod nics;
mod nodes;
mod pci;
mod tree;

use std::path::Path;

use crate::Error;
use crate::netlink::Netlink;
use tree::Tree;

pub use cpus::CpuSet;
pub use distance::Distance;
pub use nics::{Nic, NicState};
pub use nodes::{NumaNode, Package};
pub use pci::{PciAddress, PciDevice, PciKind, PcieLink, PcieRate};

/// The topology of a host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Topology {
    /// NUMA nodes, by their numbers. Empty if the kernel was built without them.
    pub nodes: Vec<NumaNode>,
    /// Sockets, by their numbers.
    pub packages: Vec<Package>,
    /// All PCI functions, by their addresses.
    pub pci: Vec<PciDevice>,
    /// Network ports: those on a PCI bus by their addresses, then the others.
    pub nics: Vec<Nic>,
    /// Invalid entries of the tree, which were left out.
    pub notes: Vec<String>,
}

impl Topology {
    /// The topology of this machine, with the IP addresses of the interfaces.
    ///
    /// # Errors
    /// [`Error::Topology`] if there is no sysfs; [`Error::Os`] if the kernel does not list addresses.
    pub fn this() -> Result<Topology, Error> {
        let mut topology = Topology::read(Path::new("/sys"))?;
        let interfaces = Netlink::open()?.interfaces()?;
        for nic in &mut topology.nics {
            let interface =
                interfaces.iter().find(|interface| Some(&interface.name) == nic.interface.as_ref());
            let addresses =
                interface.map(|interface| interface.addresses.iter().map(|(address, _)| *address));
            nic.addresses = addresses.map(Iterator::collect);
        }
        Ok(topology)
    }

    /// The topology of the sysfs tree in a directory.
    ///
    /// # Errors
    /// [`Error::Topology`] if the directory holds none.
    pub fn read(sysfs: &Path) -> Result<Topology, Error> {
        Ok(Topology::from_tree(Tree::open(sysfs)?))
    }

    /// Copies the parts of a sysfs tree that [`read`](Topology::read) reads into a new or empty directory, for use elsewhere. It
    /// has names of interfaces, but no addresses.
    ///
    /// # Errors
    /// [`Error::Topology`].
    pub fn record(sysfs: &Path, to: &Path) -> Result<(), Error> {
        let tree = Tree::open(sysfs)?;
        Topology::take(&tree);
        tree.save(to)
    }

    fn from_tree(tree: Tree) -> Topology {
        let topology = Topology::take(&tree);
        Topology { notes: tree.into_notes(), ..topology }
    }

    fn take(tree: &Tree) -> Topology {
        let nodes = NumaNode::all(tree);
        let mut pci = PciDevice::all(tree);
        for device in &mut pci {
            let known = device.numa_node.filter(|number| nodes.iter().any(|node| node.number == *number));
            if let Some(unknown) = device.numa_node.filter(|_| known.is_none()) {
                tree.note(format!("{}: NUMA node {unknown} is not in use", device.address));
            }
            device.numa_node = known;
        }
        Topology { nodes, packages: Package::all(tree), pci, nics: Nic::all(tree), notes: Vec::new() }
    }

    /// The GPUs, by their addresses; no virtual functions.
    pub fn gpus(&self) -> impl Iterator<Item = &PciDevice> {
        self.pci.iter().filter(|device| device.kind() == PciKind::Gpu && device.physical.is_none())
    }

    /// The PCI function at an address.
    pub fn device(&self, address: PciAddress) -> Option<&PciDevice> {
        let at = self.pci.binary_search_by_key(&address, |device| device.address).ok()?;
        self.pci.get(at)
    }

    /// The distance of two PCI functions.
    pub fn distance(&self, a: PciAddress, b: PciAddress) -> Distance {
        match (self.device(a), self.device(b)) {
            (Some(a), Some(b)) => distance::between(self, a, b),
            _ => Distance::Unknown,
        }
    }

    /// The slowest link between a PCI function and its host bridge, by its function.
    pub fn slowest_link(&self, address: PciAddress) -> Option<(PciAddress, PcieRate)> {
        let device = self.device(address)?;
        let chain = device.bridges.iter().copied().chain([address]);
        let links = chain.filter_map(|at| Some((at, self.device(at)?.link?.current)));
        // The last of equal ones is usually the device itself.
        links.rev().min_by_key(|(_, rate)| rate.bits_per_second())
    }

    /// The NUMA node of this number.
    pub fn node(&self, number: u32) -> Option<&NumaNode> {
        self.nodes.iter().find(|node| node.number == number)
    }

    /// The socket of a NUMA node; `None` if it has no CPU, or CPUs of several sockets.
    pub fn package_of(&self, node: u32) -> Option<u32> {
        let cpus = &self.node(node)?.cpus;
        let mut packages = self.packages.iter().filter(|package| package.cpus.meets(cpus));
        let package = packages.next()?;
        packages.next().is_none().then_some(package.number)
    }

    /// The firmware's cost of access from `from` to memory of `to` (SLIT): 10 is that of a node to itself.
    pub fn node_distance(&self, from: u32, to: u32) -> Option<u32> {
        let distances = &self.node(from)?.distances;
        distances.iter().find(|(node, _)| *node == to).map(|(_, distance)| *distance)
    }

    /// The NUMA nodes that have any of these CPUs.
    pub fn nodes_of(&self, cpus: &CpuSet) -> Vec<u32> {
        let nodes = self.nodes.iter().filter(|node| node.cpus.meets(cpus));
        nodes.map(|node| node.number).collect()
    }
}

#[cfg(test)]
mod tests;
