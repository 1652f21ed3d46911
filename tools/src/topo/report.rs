//! The report as JSON.

use ferroce::driver::topology::{
    CpuSet, Nic, NicState, NumaNode, PciAddress, PciDevice, PciKind, PcieLink, PcieRate, Topology,
};
use ferroce_collectives::topology::{self as placement, MAX_RANKS, Placement};
use ferroce_driver::gpu::{FoundGpu, GpuError};
use serde::Serialize;

use crate::failure::legible;

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) host: String,
    /// Socket numbers.
    pub(super) sockets: Vec<u32>,
    pub(super) nodes: Vec<Node>,
    pub(super) gpus: Vec<Gpu>,
    /// GPUs that a library reports and that are not on a PCI bus.
    pub(super) other_gpus: Vec<Library>,
    pub(super) nics: Vec<Port>,
    /// Network controllers without an interface: a user-space driver, or no driver, is bound to them.
    pub(super) controllers: Vec<Function>,
    /// Between GPUs and NICs on PCI buses.
    pub(super) distances: Vec<Far>,
    pub(super) ranks: Vec<Rank>,
    pub(super) ring: Ring,
    pub(super) trees: [Tree; 2],
    pub(super) rails: Vec<Rail>,
    pub(super) rails_reason: String,
    pub(super) warnings: Vec<Warning>,
    /// Null unless `--pid` or `--cpus` was given.
    pub(super) process: Option<Process>,
    /// Entries of sysfs that could not be read and were left out; GPU libraries that are not installed.
    pub(super) notes: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Node {
    pub(super) number: u32,
    /// Null for a node without CPUs, or with CPUs of several sockets.
    pub(super) socket: Option<u32>,
    pub(super) cpus: String,
    /// In bytes.
    pub(super) memory: Option<u64>,
    /// Distances to all nodes, in order, from the firmware (SLIT): 10 is the node itself.
    pub(super) distances: Vec<u32>,
    #[serde(skip)]
    pub(super) cpu_count: usize,
}

/// A PCI function.
#[derive(Debug, Serialize)]
pub(super) struct Function {
    pub(super) pci: String,
    /// Null if sysfs does not report it.
    pub(super) numa_node: Option<u32>,
    pub(super) host_bridge: String,
    /// From the host bridge downwards.
    pub(super) bridges: Vec<String>,
    /// Such as 10de:2330.
    pub(super) id: Option<String>,
    pub(super) vendor: Option<&'static str>,
    pub(super) driver: Option<String>,
    pub(super) link: Option<Link>,
    pub(super) virtual_function_of: Option<String>,
    #[serde(skip)]
    pub(super) address: PciAddress,
}

#[derive(Debug, Serialize)]
pub(super) struct Link {
    pub(super) current: Rate,
    pub(super) max: Rate,
}

#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Rate {
    /// GT/s per lane.
    pub(super) gigatransfers: f64,
    pub(super) lanes: u32,
    /// In one direction, after encoding.
    pub(super) bits_per_second: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Gpu {
    pub(super) number: usize,
    #[serde(flatten)]
    pub(super) function: Function,
    /// Null if no library reports the GPU.
    pub(super) library: Option<Library>,
}

#[derive(Debug, Serialize)]
pub(super) struct Library {
    /// The name for `--memory`.
    pub(super) name: String,
    pub(super) description: String,
    /// In bytes.
    pub(super) memory: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Port {
    pub(super) number: usize,
    pub(super) name: String,
    pub(super) interface: Option<String>,
    pub(super) rnics: Vec<String>,
    pub(super) state: &'static str,
    /// In bit/s; null if unknown.
    pub(super) rate: Option<u64>,
    pub(super) mtu: Option<u32>,
    /// Null in a recorded tree.
    pub(super) addresses: Option<Vec<String>>,
    pub(super) part_of: Option<String>,
    pub(super) is_virtual: bool,
    pub(super) is_infiniband: bool,
    /// Null for a NIC that is not on a PCI bus.
    pub(super) function: Option<Function>,
}

#[derive(Debug, Serialize)]
pub(super) struct Far {
    pub(super) gpu: usize,
    pub(super) nic: usize,
    pub(super) distance: &'static str,
}

#[derive(Debug, Serialize)]
pub(super) struct Rank {
    pub(super) name: String,
    pub(super) gpu: Option<String>,
    /// Index among the NICs.
    pub(super) nic: Option<usize>,
    /// Null without a GPU or a NIC.
    pub(super) distance: Option<&'static str>,
    pub(super) reason: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Ring {
    pub(super) hops: Vec<&'static str>,
    pub(super) crossings: usize,
    pub(super) is_exact: bool,
    pub(super) reason: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Tree {
    pub(super) parents: Vec<Option<usize>>,
    pub(super) depth: usize,
    pub(super) crossings: usize,
    pub(super) reason: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Rail {
    pub(super) nic: usize,
    pub(super) ranks: Vec<usize>,
    pub(super) rate: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct Warning {
    pub(super) kind: &'static str,
    pub(super) subject: String,
    pub(super) what: String,
    pub(super) cost: String,
    pub(super) remedy: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Process {
    /// Its number, or the name that was given.
    pub(super) name: String,
    pub(super) cpus: String,
    pub(super) nodes: Vec<u32>,
    pub(super) rank: Option<usize>,
    pub(super) warnings: Vec<Warning>,
}

impl Report {
    pub(super) fn new(
        name: &str,
        host: &Topology,
        placement: &Placement,
        process: Option<Process>,
        libraries: &[FoundGpu],
        absent: &[GpuError],
    ) -> Report {
        let gpus: Vec<&PciDevice> = host.gpus().take(MAX_RANKS).collect();
        let at = |gpu: &FoundGpu| gpu.pci.as_ref().and_then(|pci| pci.parse::<PciAddress>().ok());
        let of = |gpu: &PciDevice| libraries.iter().find(|found| at(found) == Some(gpu.address));
        let is_elsewhere = |found: &&FoundGpu| !gpus.iter().any(|gpu| at(found) == Some(gpu.address));
        let mut notes = host.notes.clone();
        if host.gpus().count() > MAX_RANKS {
            notes.push(format!("more than {MAX_RANKS} GPUs; the rest is left out"));
        }
        // Without a GPU, a missing library is not worth a note.
        if !gpus.is_empty() {
            notes.extend(absent.iter().map(|error| legible(&error.to_string())));
        }
        Report {
            host: name.to_owned(),
            sockets: host.packages.iter().map(|package| package.number).collect(),
            nodes: host.nodes.iter().map(|node| Node::new(host, node)).collect(),
            gpus: gpus
                .iter()
                .enumerate()
                .map(|(number, gpu)| Gpu {
                    number,
                    function: Function::new(gpu),
                    library: of(gpu).map(Library::new),
                })
                .collect(),
            other_gpus: libraries.iter().filter(is_elsewhere).map(Library::new).collect(),
            nics: host.nics.iter().enumerate().map(|(number, nic)| Port::new(host, number, nic)).collect(),
            controllers: controllers(host).map(Function::new).collect(),
            distances: distances(host, &gpus),
            ranks: placement.ranks.iter().map(Rank::new).collect(),
            ring: Ring::new(&placement.ring),
            trees: [0, 1].map(|tree| Tree::new(&placement.trees[tree])),
            rails: placement.rails.iter().map(Rail::new).collect(),
            rails_reason: placement.rails_reason.clone(),
            warnings: placement.warnings.iter().map(Warning::new).collect(),
            process,
            notes,
        }
    }
}

fn controllers(host: &Topology) -> impl Iterator<Item = &PciDevice> {
    let has_nic = |device: &PciDevice| host.nics.iter().any(|nic| nic.pci == Some(device.address));
    host.pci.iter().filter(move |device| {
        device.kind() == PciKind::Network && device.physical.is_none() && !has_nic(device)
    })
}

fn distances(host: &Topology, gpus: &[&PciDevice]) -> Vec<Far> {
    let nics = || host.nics.iter().enumerate().filter_map(|(number, nic)| Some((number, nic.pci?)));
    let pairs = gpus
        .iter()
        .enumerate()
        .flat_map(|(gpu, device)| nics().map(move |(nic, place)| (gpu, device, nic, place)));
    pairs
        .map(|(gpu, device, nic, place)| Far {
            gpu,
            nic,
            distance: host.distance(device.address, place).name(),
        })
        .collect()
}

impl Node {
    fn new(host: &Topology, node: &NumaNode) -> Node {
        Node {
            number: node.number,
            socket: host.package_of(node.number),
            cpus: node.cpus.to_string(),
            memory: node.memory,
            distances: node.distances.iter().map(|(_, distance)| *distance).collect(),
            cpu_count: node.cpus.len(),
        }
    }
}

impl Function {
    fn new(device: &PciDevice) -> Function {
        let id =
            device.vendor.zip(device.device).map(|(vendor, device)| format!("{vendor:04x}:{device:04x}"));
        Function {
            pci: device.address.to_string(),
            numa_node: device.numa_node,
            host_bridge: device.host_bridge.clone(),
            bridges: device.bridges.iter().map(PciAddress::to_string).collect(),
            id,
            vendor: device.vendor.and_then(vendor),
            driver: device.driver.clone(),
            link: device.link.as_ref().map(Link::new),
            virtual_function_of: device.physical.as_ref().map(PciAddress::to_string),
            address: device.address,
        }
    }
}

/// Vendors of GPUs and network cards, with names from the PCI ID repository.
fn vendor(number: u32) -> Option<&'static str> {
    Some(match number {
        0x1002 => "AMD",
        0x10de => "NVIDIA",
        0x14e4 => "Broadcom",
        0x15b3 => "Mellanox",
        0x1af4 => "Virtio",
        0x1d0f => "Amazon",
        0x1dd8 => "AMD Pensando",
        0x8086 => "Intel",
        _ => return None,
    })
}

impl Link {
    fn new(link: &PcieLink) -> Link {
        Link { current: Rate::new(&link.current), max: Rate::new(&link.max) }
    }
}

impl Rate {
    fn new(rate: &PcieRate) -> Rate {
        Rate {
            gigatransfers: f64::from(rate.megatransfers) / 1000.0,
            lanes: rate.lanes,
            bits_per_second: rate.bits_per_second(),
        }
    }
}

impl Library {
    fn new(gpu: &FoundGpu) -> Library {
        Library { name: gpu.spec.to_string(), description: legible(&gpu.name), memory: gpu.memory }
    }
}

impl Port {
    fn new(host: &Topology, number: usize, nic: &Nic) -> Port {
        Port {
            number,
            name: nic.name().to_owned(),
            interface: nic.interface.clone(),
            rnics: nic.rnics.clone(),
            state: match nic.state {
                NicState::Up => "up",
                NicState::Down => "down",
                _ => "unknown",
            },
            rate: nic.rate,
            mtu: nic.mtu,
            addresses: nic.addresses.as_ref().map(|all| all.iter().map(ToString::to_string).collect()),
            part_of: nic.part_of.clone(),
            is_virtual: nic.is_virtual,
            is_infiniband: nic.is_infiniband,
            function: nic.pci.and_then(|at| host.device(at)).map(Function::new),
        }
    }
}

impl Rank {
    fn new(rank: &placement::Rank) -> Rank {
        let has_both = rank.gpu.is_some() && rank.nic.is_some();
        Rank {
            name: rank.name.clone(),
            gpu: rank.gpu.as_ref().map(PciAddress::to_string),
            nic: rank.nic,
            distance: has_both.then(|| rank.distance.name()),
            reason: rank.reason.clone(),
        }
    }
}

impl Ring {
    fn new(ring: &placement::Ring) -> Ring {
        Ring {
            hops: ring.hops.iter().map(|hop| hop.name()).collect(),
            crossings: ring.crossings,
            is_exact: ring.is_exact,
            reason: ring.reason.clone(),
        }
    }
}

impl Tree {
    fn new(tree: &placement::Tree) -> Tree {
        let placement::Tree { parents, depth, crossings, reason, .. } = tree.clone();
        Tree { parents, depth, crossings, reason }
    }
}

impl Rail {
    fn new(rail: &placement::Rail) -> Rail {
        Rail { nic: rail.nic, ranks: rail.ranks.clone(), rate: rail.rate }
    }
}

impl Warning {
    fn new(warning: &placement::Warning) -> Warning {
        let placement::Warning { kind, subject, what, cost, remedy, .. } = warning.clone();
        Warning { kind: kind.name(), subject, what, cost, remedy }
    }
}

impl Process {
    pub(super) fn new(
        host: &Topology,
        name: String,
        cpus: &CpuSet,
        rank: Option<usize>,
        warnings: &[placement::Warning],
    ) -> Process {
        Process {
            name,
            cpus: cpus.to_string(),
            nodes: host.nodes_of(cpus),
            rank,
            warnings: warnings.iter().map(Warning::new).collect(),
        }
    }
}
