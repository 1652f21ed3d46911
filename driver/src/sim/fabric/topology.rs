//! Fabrics of common shapes.

use std::net::{IpAddr, Ipv4Addr};

use super::{Fabric, FabricConfig, HostConfig, HostId, LinkId, Node, SwitchConfig, SwitchId};
use crate::Error;
use crate::sim::{LinkConfig, invalid};

/// The parts of a fabric. It can be changed before it is [built](Topology::build).
///
/// ```
/// use std::time::Duration;
/// use ferroce_driver::sim::LinkConfig;
/// use ferroce_driver::sim::fabric::{FabricConfig, Part, SwitchConfig, Topology};
///
/// let link = LinkConfig::default().rate(100_000_000_000).delay(Duration::from_micros(1));
/// // Two leaves of 16 hosts each, below 4 spines: twice as much goes into a leaf as out of it.
/// let topology = Topology::leaf_spine(2, 16, 4, &link, &link.clone().rate(200_000_000_000), SwitchConfig::default())?;
/// assert_eq!((topology.hosts.len(), topology.switches.len(), topology.links.len()), (32, 6, 40));
/// assert_eq!(topology.links[32].ends, [Part::Switch(0), Part::Switch(2)]);
/// let built = topology.build(1, FabricConfig::default())?;
/// assert_eq!(built.hosts.len(), 32);
/// # Ok::<(), ferroce_driver::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Topology {
    /// The hosts. Host n has the address that [`address`] returns for n.
    pub hosts: Vec<HostConfig>,
    /// The switches.
    pub switches: Vec<SwitchConfig>,
    /// The links.
    pub links: Vec<Cable>,
}

/// A host or a switch of a [`Topology`], by its index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// A host.
    Host(usize),
    /// A switch.
    Switch(usize),
}

/// A link of a [`Topology`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cable {
    /// The two ends.
    pub ends: [Part; 2],
    /// The rate, the delay and the impairments.
    pub link: LinkConfig,
}

/// A fabric that was built, and the IDs of its parts, in the order of the [`Topology`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Built {
    /// The fabric.
    pub fabric: Fabric,
    /// Its hosts.
    pub hosts: Vec<HostId>,
    /// Its switches.
    pub switches: Vec<SwitchId>,
    /// Its links.
    pub links: Vec<LinkId>,
}

/// The address of host n of a topology: 10.0.0.1 and so on.
pub fn address(host: usize) -> IpAddr {
    Ipv4Addr::from(0x0a00_0001 + host as u32).into()
}

impl Topology {
    /// Hosts around one switch.
    pub fn star(hosts: usize, link: &LinkConfig, switch: SwitchConfig) -> Topology {
        let mut topology = Topology::default();
        let switch = topology.add_switch(switch);
        topology.add_hosts(hosts, switch, link);
        topology
    }

    /// Two switches with `left` and `right` hosts, and one link between them.
    pub fn dumbbell(
        left: usize,
        right: usize,
        link: &LinkConfig,
        between: &LinkConfig,
        switch: SwitchConfig,
    ) -> Topology {
        let mut topology = Topology::default();
        let switches = [topology.add_switch(switch), topology.add_switch(switch)];
        topology.add_hosts(left, switches[0], link);
        topology.add_hosts(right, switches[1], link);
        topology.add_link(switches[0], switches[1], between);
        topology
    }

    /// Leaves with hosts, and a link from each leaf to each spine. The leaves come before the spines, the links of the hosts
    /// before the others.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are several leaves and no spine.
    pub fn leaf_spine(
        leaves: usize,
        hosts_per_leaf: usize,
        spines: usize,
        link: &LinkConfig,
        uplink: &LinkConfig,
        switch: SwitchConfig,
    ) -> Result<Topology, Error> {
        if leaves > 1 && spines == 0 {
            return Err(invalid("spines", spines, "at least 1, for several leaves"));
        }
        let mut topology = Topology::default();
        let leaves: Vec<Part> = (0..leaves).map(|_| topology.add_switch(switch)).collect();
        let spines: Vec<Part> = (0..spines).map(|_| topology.add_switch(switch)).collect();
        for leaf in &leaves {
            topology.add_hosts(hosts_per_leaf, *leaf, link);
        }
        for leaf in &leaves {
            for spine in &spines {
                topology.add_link(*leaf, *spine, uplink);
            }
        }
        Ok(topology)
    }

    /// A fat tree of switches with `k` ports (Al-Fares et al., SIGCOMM 2008): k pods of k/2 edge and k/2 aggregation switches,
    /// (k/2)² core switches, and k/2 hosts at each edge switch: k³/4 in all. The edge switches come first, then those of
    /// aggregation, pod by pod, then the core.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an odd `k`, 0, or more than 64.
    pub fn fat_tree(k: usize, link: &LinkConfig, switch: SwitchConfig) -> Result<Topology, Error> {
        if k == 0 || k % 2 == 1 || k > 64 {
            return Err(invalid("k", k, "an even number of ports, 2 to 64"));
        }
        let half = k / 2;
        let mut topology = Topology::default();
        let mut add =
            |count: usize| -> Vec<Part> { (0..count).map(|_| topology.add_switch(switch)).collect() };
        let (edges, aggregations, cores) = (add(k * half), add(k * half), add(half * half));
        for edge in &edges {
            topology.add_hosts(half, *edge, link);
        }
        for pod in 0..k {
            for edge in &edges[pod * half..][..half] {
                for aggregation in &aggregations[pod * half..][..half] {
                    topology.add_link(*edge, *aggregation, link);
                }
            }
            for (at, aggregation) in aggregations[pod * half..][..half].iter().enumerate() {
                for core in &cores[at * half..][..half] {
                    topology.add_link(*aggregation, *core, link);
                }
            }
        }
        Ok(topology)
    }

    /// Adds a switch.
    pub fn add_switch(&mut self, switch: SwitchConfig) -> Part {
        self.switches.push(switch);
        Part::Switch(self.switches.len() - 1)
    }

    /// Adds hosts, each with a link to `switch`.
    pub fn add_hosts(&mut self, hosts: usize, switch: Part, link: &LinkConfig) {
        for _ in 0..hosts {
            self.hosts.push(HostConfig::default());
            self.add_link(Part::Host(self.hosts.len() - 1), switch, link);
        }
    }

    /// Adds a link.
    pub fn add_link(&mut self, a: Part, b: Part, link: &LinkConfig) {
        self.links.push(Cable { ends: [a, b], link: link.clone() });
    }

    /// Builds the fabric.
    ///
    /// # Errors
    /// As [`Fabric::new`], [`Fabric::add_host`], [`Fabric::add_switch`] and [`Fabric::link`]; [`Error::Invalid`] for a link
    /// to a part that does not exist.
    pub fn build(&self, seed: u64, config: FabricConfig) -> Result<Built, Error> {
        let fabric = Fabric::new(seed, config)?;
        let hosts = self.hosts.iter().enumerate();
        let hosts = hosts.map(|(number, host)| fabric.add_host(*host, &[address(number)]));
        let hosts: Vec<HostId> = hosts.collect::<Result<_, _>>()?;
        let switches = self.switches.iter().map(|switch| fabric.add_switch(*switch));
        let switches: Vec<SwitchId> = switches.collect::<Result<_, _>>()?;
        let node = |part: Part| -> Result<Node, Error> {
            let node = match part {
                Part::Host(number) => hosts.get(number).copied().map(Node::Host),
                Part::Switch(number) => switches.get(number).copied().map(Node::Switch),
            };
            let expected = format!("one of {} hosts and {} switches", hosts.len(), switches.len());
            node.ok_or_else(|| invalid("end of a link", format!("{part:?}"), &expected))
        };
        let link = |cable: &Cable| {
            let [a, b] = cable.ends;
            fabric.link(node(a)?, node(b)?, &cable.link)
        };
        let links = self.links.iter().map(link).collect::<Result<_, _>>()?;
        Ok(Built { fabric, hosts, switches, links })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn degrees(topology: &Topology) -> Vec<usize> {
        let ends = topology.links.iter().flat_map(|cable| cable.ends);
        let mut degrees = vec![0; topology.switches.len()];
        for end in ends {
            if let Part::Switch(number) = end {
                degrees[number] += 1;
            }
        }
        degrees
    }

    #[test]
    fn shapes_have_the_expected_parts() {
        let link = LinkConfig::default().rate(1_000_000_000);
        let switch = SwitchConfig::default();
        assert_eq!(degrees(&Topology::star(5, &link, switch)), [5]);
        assert_eq!(degrees(&Topology::dumbbell(3, 2, &link, &link, switch)), [4, 3]);
        let leaf_spine = Topology::leaf_spine(4, 8, 2, &link, &link, switch).unwrap();
        assert_eq!(degrees(&leaf_spine), [10, 10, 10, 10, 4, 4]);
        let fat_tree = Topology::fat_tree(4, &link, switch).unwrap();
        assert_eq!((fat_tree.hosts.len(), fat_tree.links.len()), (16, 48));
        assert_eq!(degrees(&fat_tree), [4; 20]);
        for topology in [leaf_spine, fat_tree] {
            assert_eq!(topology.build(1, FabricConfig::default()).unwrap().links.len(), topology.links.len());
        }
        for k in [0, 3, 66] {
            assert!(Topology::fat_tree(k, &link, switch).is_err());
        }
        assert!(Topology::leaf_spine(2, 1, 0, &link, &link, switch).is_err());
        let mut wrong = Topology::star(1, &link, switch);
        wrong.add_link(Part::Switch(0), Part::Switch(7), &link);
        let error = wrong.build(1, FabricConfig::default()).unwrap_err().to_string();
        assert_eq!(error, "end of a link = Switch(7): one of 1 hosts and 1 switches");
    }
}
