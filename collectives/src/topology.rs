//! The placement of a host's ranks: the network card (NIC) of each GPU, the order of ranks, and costly placements.
//!
//! It is computed from a [`Topology`] of this machine, or a recorded one. Nothing is measured. `ferroce topo` prints it. The
//! collectives do not use it themselves: the program chooses a rank's device, and the launcher its number.
//!
//! ```
//! use ferroce_collectives::ferroce::driver::topology::Topology;
//! use ferroce_collectives::topology::Placement;
//!
//! let host = Topology::this()?;
//! let placement = Placement::new(&host);
//! for (number, rank) in placement.ranks.iter().enumerate() {
//!     println!("rank {number}: {}; {}", rank.name, rank.reason);
//! }
//! for warning in &placement.warnings {
//!     println!("{warning}");
//! }
//! # Ok::<(), ferroce_collectives::ferroce::driver::Error>(())
//! ```
//!
//! # Rules
//!
//! - **Ranks** are the GPUs; on a host without GPUs, the NICs.
//! - **NICs** count if they are up (or their state is unknown), are Ethernet, are on a PCI bus or have an RNIC, and have at least
//!   a quarter of the rate of the fastest; slower ones are for management. Of a card and its virtual functions only the card
//!   counts.
//! - **The NIC of a GPU** is the nearest ([`Distance`], then the firmware's distance of NUMA nodes). Of several equally near ones
//!   it is the one with the fewest GPUs, then the first. GPUs with the fewest choices are assigned first.
//! - **Ranks are numbered along a ring** that crosses sockets as rarely as possible, and then is as short as possible: the
//!   optimum for up to 12 ranks; for more, each rank is followed by the nearest remaining one.
//!   [`Algorithm::Ring`](crate::Algorithm::Ring) goes from rank to rank in the order of their numbers.
//! - **Trees** are those of [`Algorithm::Tree`](crate::Algorithm::Tree) over ranks of these numbers.
//! - **A rail** is a NIC that ranks use: the first NICs of all hosts are rail 0, and so on.

mod costs;
mod nics;
mod ring;
#[cfg(test)]
mod tests;

use ferroce::driver::topology::{CpuSet, Distance, Nic, PciAddress, Topology};

pub use costs::{Warning, WarningKind};
pub use ring::{Ring, Tree};

/// The most ranks of a host; further ones are left out.
pub const MAX_RANKS: usize = 256;

/// The placement of a host's ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Placement {
    /// The ranks, by their numbers on the host.
    pub ranks: Vec<Rank>,
    /// The rails, by the positions of their NICs.
    pub rails: Vec<Rail>,
    /// The reason for these rails.
    pub rails_reason: String,
    /// The ring of ranks.
    pub ring: Ring,
    /// Both trees.
    pub trees: [Tree; 2],
    /// Costly placements.
    pub warnings: Vec<Warning>,
}

/// A rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rank {
    /// Its name: `GPU 0`, or that of its NIC.
    pub name: String,
    /// The GPU; `None` on a host without GPUs.
    pub gpu: Option<PciAddress>,
    /// Its NIC, by its position in [`Topology::nics`]; `None` if there is no suitable NIC.
    pub nic: Option<usize>,
    /// The distance from the GPU to the NIC; [`Distance::Pix`] for a NIC that is a rank itself.
    pub distance: Distance,
    /// The reason for this NIC.
    pub reason: String,
}

/// A NIC with the ranks that use it. (The rails of [`Collectives::add_rail`](crate::Collectives::add_rail) are several ports of one
/// rank.)
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Rail {
    /// Its position in [`Topology::nics`].
    pub nic: usize,
    /// The numbers of its ranks.
    pub ranks: Vec<usize>,
    /// Bits per second, if its driver reports it.
    pub rate: Option<u64>,
}

impl Placement {
    /// The placement for a host.
    pub fn new(host: &Topology) -> Placement {
        let ranks = nics::ranks(host);
        let (order, is_exact) = ring::order(host, &ranks);
        let ranks: Vec<Rank> = order.iter().filter_map(|at| ranks.get(*at).cloned()).collect();
        let (rails, rails_reason) = nics::rails(host, &ranks);
        let ring = Ring::new(host, &ranks, is_exact);
        let trees = [0, 1].map(|tree| Tree::new(host, &ranks, tree));
        let warnings = costs::find(host, &ranks, &rails);
        Placement { ranks, rails, rails_reason, ring, trees, warnings }
    }

    /// Warnings for a process that may run on these CPUs, as the rank with this number; without one, as any rank.
    pub fn check_process(&self, host: &Topology, cpus: &CpuSet, rank: Option<usize>) -> Vec<Warning> {
        costs::of_process(host, &self.ranks, cpus, rank)
    }
}

impl Rank {
    /// The device that determines its position: its GPU, or its NIC.
    fn place(&self, host: &Topology) -> Option<PciAddress> {
        self.gpu.or_else(|| self.nic_of(host)?.pci)
    }

    fn nic_of<'a>(&self, host: &'a Topology) -> Option<&'a Nic> {
        host.nics.get(self.nic?)
    }

    /// The NUMA nodes of its GPU and its NIC.
    fn nodes(&self, host: &Topology) -> Vec<u32> {
        let places = [self.gpu, self.nic_of(host).and_then(|nic| nic.pci)];
        let mut nodes: Vec<u32> =
            places.into_iter().flatten().filter_map(|at| host.device(at)?.numa_node).collect();
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }
}

/// Sort key: nearest first, equal distances by the firmware's table.
fn remoteness(host: &Topology, a: PciAddress, b: PciAddress) -> (Distance, u32) {
    let node = |at| host.device(at).and_then(|device| device.numa_node);
    let between = node(a).zip(node(b)).and_then(|(a, b)| host.node_distance(a, b));
    (host.distance(a, b), between.unwrap_or(0))
}

/// Its usual name: the interface, and the RNICs on it.
fn label(nic: &Nic) -> String {
    match (&nic.interface, &nic.rnics[..]) {
        (Some(interface), [_, ..]) => format!("{interface} ({})", nic.rnics.join(", ")),
        _ => nic.name().to_owned(),
    }
}

fn gigabits(rate: u64) -> String {
    format!("{} Gb/s", (rate as f64 / 1e8).round() / 10.0)
}
