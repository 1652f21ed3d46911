//! Costly placements.

use std::fmt;

use ferroce::driver::topology::{CpuSet, Distance, Nic, NicState, PciAddress, PcieRate, Topology};

use super::{Rail, Rank, gigabits, label, nics, remoteness};

/// A costly placement.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Warning {
    /// Its kind.
    pub kind: WarningKind,
    /// The names of the devices concerned.
    pub subject: String,
    /// The problem.
    pub what: String,
    /// Its cost.
    pub cost: String,
    /// The remedy.
    pub remedy: String,
}

/// Kinds of costly placements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WarningKind {
    /// There is no suitable NIC for the ranks.
    NoNic,
    /// A GPU is on another socket than its NIC, or farther from it than other GPUs are from theirs.
    FarNic,
    /// A NIC has more ranks than others.
    SharedNic,
    /// A NIC is slower than others that ranks use.
    SlowNic,
    /// A PCIe link is slower than the ports of its card.
    SlowPcie,
    /// A PCIe link runs below the capabilities of its two ends.
    LinkBelowMaximum,
    /// A NIC that is nearer than those in use is down.
    NicDown,
    /// A NIC has no IP address, and so no GID for RoCE v2.
    NoAddress,
    /// A NIC that is nearer than those in use is set to InfiniBand.
    InfiniBand,
    /// A process may run on CPUs of another NUMA node than that of its GPU and NIC.
    WrongNode,
}

impl WarningKind {
    /// Its name in reports: `far_nic`.
    pub fn name(self) -> &'static str {
        match self {
            WarningKind::NoNic => "no_nic",
            WarningKind::FarNic => "far_nic",
            WarningKind::SharedNic => "shared_nic",
            WarningKind::SlowNic => "slow_nic",
            WarningKind::SlowPcie => "slow_pcie",
            WarningKind::LinkBelowMaximum => "link_below_maximum",
            WarningKind::NicDown => "nic_down",
            WarningKind::NoAddress => "no_address",
            WarningKind::InfiniBand => "infiniband",
            WarningKind::WrongNode => "wrong_node",
        }
    }
}

/// In one line.
impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Warning { subject, what, cost, remedy, .. } = self;
        write!(f, "{subject}: {what}. Cost: {cost}. Remedy: {remedy}.")
    }
}

/// All costly placements of a host.
pub(super) fn find(host: &Topology, ranks: &[Rank], rails: &[Rail]) -> Vec<Warning> {
    let mut found = Vec::new();
    found.extend(no_nic(ranks));
    found.extend(far_nics(host, ranks));
    found.extend(unused_nics(host, ranks));
    found.extend(shared_nics(host, ranks, rails));
    found.extend(slow_nics(host, rails));
    found.extend(rails.iter().filter_map(|rail| slow_link(host, host.nics.get(rail.nic)?)));
    found.extend(ranks.iter().filter_map(|rank| narrow_gpu(host, rank)));
    found.extend(rails.iter().filter_map(|rail| no_address(host.nics.get(rail.nic)?)));
    found
}

fn no_nic(ranks: &[Rank]) -> Option<Warning> {
    let is_without = ranks.iter().all(|rank| rank.nic.is_none());
    is_without.then(|| Warning {
        kind: WarningKind::NoNic,
        subject: "host".to_owned(),
        what: "no network card is up that carries Ethernet".to_owned(),
        cost: "its ranks can't reach other hosts".to_owned(),
        remedy: "`ip link` lists the interfaces; `ip link set NAME up`".to_owned(),
    })
}

fn far_nics(host: &Topology, ranks: &[Rank]) -> Vec<Warning> {
    let nearest = ranks.iter().map(|rank| rank.distance).min();
    let is_far = |rank: &Rank| {
        let is_farther = Some(rank.distance) > nearest && rank.distance.passes_cpu();
        rank.gpu.is_some()
            && rank.distance != Distance::Unknown
            && (rank.distance == Distance::Sys || is_farther)
    };
    let warning = |rank: &Rank| {
        let nic = rank.nic_of(host)?;
        let way = match rank.distance {
            Distance::Sys => "each byte passes the link between the sockets",
            _ => "each byte passes the CPU's root complex in place of a PCI switch",
        };
        let others = match nearest {
            Some(nearest) if nearest < rank.distance => {
                format!("; other GPUs have their NIC at {nearest}, and wait for this one")
            }
            _ => String::new(),
        };
        Some(Warning {
            kind: WarningKind::FarNic,
            subject: rank.name.clone(),
            what: format!("its nearest NIC is {}, {} ({})", label(nic), rank.distance.meaning(), rank.distance),
            cost: format!("{way}{}{others}", nodes_apart(host, rank.gpu, nic.pci)),
            remedy: "bring a NIC up, or put one, behind the PCI switch of the GPU; or leave the GPU out (CUDA_VISIBLE_DEVICES)"
                .to_owned(),
        })
    };
    ranks.iter().filter(|rank| is_far(rank)).filter_map(warning).collect()
}

/// `, and access to memory of node 1 from node 0 costs 2.1 times …`, if the firmware reports it.
fn nodes_apart(host: &Topology, from: Option<PciAddress>, to: Option<PciAddress>) -> String {
    let node = |at: Option<PciAddress>| host.device(at?)?.numa_node;
    let told = node(from).zip(node(to)).filter(|(from, to)| from != to);
    told.and_then(|(from, to)| times(host, from, to)).map_or(String::new(), |times| format!(", {times}"))
}

/// The firmware's cost of memory of another node.
fn times(host: &Topology, from: u32, to: u32) -> Option<String> {
    let (own, other) = (host.node_distance(from, from)?, host.node_distance(from, to)?);
    let times = f64::from(other) / f64::from(own.max(1));
    Some(format!(
        "and the firmware states {times:.1} times the latency of node {from}'s own memory for that of node {to}"
    ))
}

/// NICs that would be better for ranks than theirs, and can't be used.
fn unused_nics(host: &Topology, ranks: &[Rank]) -> Vec<Warning> {
    let candidates = host.nics.iter().filter(|nic| nics::is_candidate(host, nic));
    candidates.filter_map(|nic| unused(host, ranks, nic)).collect()
}

fn unused(host: &Topology, ranks: &[Rank], nic: &Nic) -> Option<Warning> {
    let place = nic.pci?;
    let is_nearer = |rank: &&Rank| {
        let own = rank.nic_of(host).and_then(|nic| nic.pci);
        rank.gpu.is_some_and(|gpu| {
            let far = remoteness(host, gpu, place);
            far.0 != Distance::Unknown && own.is_none_or(|own| far < remoteness(host, gpu, own))
        })
    };
    let nearer: Vec<&Rank> = ranks.iter().filter(is_nearer).collect();
    let names: Vec<&str> = nearer.iter().map(|rank| rank.name.as_str()).collect();
    let first = nearer.first()?;
    let distance = host.distance(first.gpu?, place);
    let instead =
        first.nic_of(host).map_or("no NIC".to_owned(), |nic| format!("{} at {}", nic.name(), first.distance));
    let cost = format!("{} would have it at {distance}, and have {instead}", names.join(", "));
    let name = nic.name();
    let (kind, what, remedy) = match (nic.is_infiniband, nic.state) {
        (true, _) => (
            WarningKind::InfiniBand,
            "its port is set to InfiniBand, and RoCE needs Ethernet".to_owned(),
            format!(
                "on a ConnectX card of both kinds `mlxconfig -d {place} set LINK_TYPE_P1=2`, and restart the host"
            ),
        ),
        (false, NicState::Down) => (
            WarningKind::NicDown,
            "it is down".to_owned(),
            format!(
                "`ip link set {name} up`; if it stays down, look at the cable and at the switch (`ethtool {name}`)"
            ),
        ),
        _ => return None,
    };
    Some(Warning { kind, subject: label(nic), what, cost, remedy })
}

fn shared_nics(host: &Topology, ranks: &[Rank], rails: &[Rail]) -> Vec<Warning> {
    let least = rails.iter().map(|rail| rail.ranks.len()).min().unwrap_or(0);
    let warning = |rail: &Rail| {
        let nic = host.nics.get(rail.nic)?;
        let count = rail.ranks.len();
        let names: Vec<&str> =
            rail.ranks.iter().filter_map(|rank| Some(ranks.get(*rank)?.name.as_str())).collect();
        let cost = match rail.rate {
            Some(rate) => format!("each has {} of its {}", gigabits(rate / count as u64), gigabits(rate)),
            None => format!("each has 1/{count} of its rate"),
        };
        Some(Warning {
            kind: WarningKind::SharedNic,
            subject: label(nic),
            what: format!("{count} ranks use it ({}), and other NICs have {least}", names.join(", ")),
            cost: format!("{cost}, and ranks that wait for them are delayed"),
            remedy: "bring up, or add, a NIC near these GPUs".to_owned(),
        })
    };
    rails.iter().filter(|rail| rail.ranks.len() > least).filter_map(warning).collect()
}

fn slow_nics(host: &Topology, rails: &[Rail]) -> Vec<Warning> {
    let rates = || rails.iter().filter_map(|rail| rail.rate);
    let (Some(least), Some(most)) = (rates().min(), rates().max()) else { return Vec::new() };
    let warning = |rail: &Rail| {
        let (nic, rate) = (host.nics.get(rail.nic)?, rail.rate?);
        let whole = gigabits(rates().sum());
        let of_all = gigabits(least * rates().count() as u64);
        Some(Warning {
            kind: WarningKind::SlowNic,
            subject: label(nic),
            what: format!("it has {}, and the fastest rail {}", gigabits(rate), gigabits(most)),
            cost: format!(
                "ranks of a collective wait for each other, so all rails run at {}: {of_all} for the host in place of {whole}",
                gigabits(least)
            ),
            remedy: format!(
                "give all rails cards and cables of one speed; `ethtool {}` shows which speeds both ends of its link offer",
                nic.name()
            ),
        })
    };
    rails.iter().filter(|rail| rail.rate.is_some_and(|rate| rate < most)).filter_map(warning).collect()
}

/// The slowest PCIe link of a NIC, if it is slower than the ports of its card.
fn slow_link(host: &Topology, nic: &Nic) -> Option<Warning> {
    let place = nic.pci?;
    let (at, link) = host.slowest_link(place)?;
    let ports: Vec<u64> = host
        .nics
        .iter()
        .filter(|other| {
            other.pci.is_some_and(|other| other.is_same_card(place)) && other.state != NicState::Down
        })
        .filter_map(|port| port.rate)
        .collect();
    let rate: u64 = ports.iter().sum();
    if link.bits_per_second() >= rate {
        return None;
    }
    let of = if ports.len() > 1 { format!(" of {} ports", ports.len()) } else { String::new() };
    let (kind, below, remedy) = match trained_below(host, place).filter(|_| at.is_same_card(place)) {
        Some((can, true)) => (
            WarningKind::LinkBelowMaximum,
            format!(", although both ends support {can}"),
            "reseat the card, look at the riser and at the slot's settings in the firmware; `dmesg` has PCIe errors".to_owned(),
        ),
        Some((can, false)) => (
            WarningKind::SlowPcie,
            format!("; the card supports {can}, the slot does not"),
            "put the card into a faster slot".to_owned(),
        ),
        None if at.is_same_card(place) => {
            (WarningKind::SlowPcie, String::new(), "use fewer of its ports, or another card".to_owned())
        }
        None => (
            WarningKind::SlowPcie,
            format!(" at {at}, above it"),
            "put the card into a slot that is not behind this link".to_owned(),
        ),
    };
    Some(Warning {
        kind,
        subject: label(nic),
        what: format!("its PCIe link runs at {link}{below}"),
        cost: format!(
            "at most {} of its {}{of}, less the headers",
            gigabits(link.bits_per_second()),
            gigabits(rate)
        ),
        remedy,
    })
}

/// If the link of a function runs below its capabilities: these, and whether the upstream port has them too.
fn trained_below(host: &Topology, place: PciAddress) -> Option<(PcieRate, bool)> {
    let device = host.device(place)?;
    let link = device.link?;
    let is_below = |of: PcieRate| link.current.bits_per_second() < of.bits_per_second();
    let above = device.bridges.last().and_then(|bridge| host.device(*bridge)?.link);
    is_below(link.max).then(|| (link.max, above.is_none_or(|above| is_below(above.max))))
}

/// Idle GPUs reduce the speed of their links, but not the lanes.
fn narrow_gpu(host: &Topology, rank: &Rank) -> Option<Warning> {
    let link = host.device(rank.gpu?)?.link?;
    (link.current.lanes < link.max.lanes).then(|| Warning {
        kind: WarningKind::LinkBelowMaximum,
        subject: rank.name.clone(),
        what: format!("its PCIe link has {} of {} lanes", link.current.lanes, link.max.lanes),
        cost: format!(
            "transfers to and from it have {:.0} % of the rate",
            100.0 * f64::from(link.current.lanes) / f64::from(link.max.lanes)
        ),
        remedy: "reseat the GPU, look at the riser and at the slot's settings in the firmware".to_owned(),
    })
}

fn no_address(nic: &Nic) -> Option<Warning> {
    let is_without = nic.addresses.as_ref().is_some_and(Vec::is_empty) && nic.part_of.is_none();
    let name = nic.interface.as_ref().filter(|_| is_without)?;
    Some(Warning {
        kind: WarningKind::NoAddress,
        subject: label(nic),
        what: "it has no IP address".to_owned(),
        cost: "it has no GID for RoCE v2, so no rank can use it".to_owned(),
        remedy: format!("`ip addr add ADDRESS/PREFIX dev {name}`"),
    })
}

/// For a process that is one of the ranks, or any if unspecified.
pub(super) fn of_process(
    host: &Topology,
    ranks: &[Rank],
    cpus: &CpuSet,
    rank: Option<usize>,
) -> Vec<Warning> {
    if host.nodes.len() < 2 {
        return Vec::new();
    }
    let chosen = ranks.iter().enumerate().filter(|(number, _)| rank.is_none_or(|rank| rank == *number));
    let mut near: Vec<u32> = chosen.flat_map(|(_, rank)| rank.nodes(host)).collect();
    near.sort_unstable();
    near.dedup();
    let may = host.nodes_of(cpus);
    let outside: Vec<u32> = may.iter().copied().filter(|node| !near.contains(node)).collect();
    let (what, is_bound) = match (rank, &near[..], &outside[..]) {
        // Its position is unknown.
        (_, [], _) => return Vec::new(),
        (_, _, outside) if outside.len() == may.len() && !may.is_empty() => {
            (format!("it runs on {}, and {} on {}", nodes(&may), of_rank(rank), nodes(&near)), true)
        }
        (_, _, [_, ..]) => (
            format!("it may run on {} too, and {} on {}", nodes(&outside), of_rank(rank), nodes(&near)),
            true,
        ),
        (None, _, []) if may.len() > 1 => {
            (format!("it may run on each of {}, so on another node than its GPU and NIC", nodes(&may)), false)
        }
        _ => return Vec::new(),
    };
    let from = outside.first().or(may.last()).copied();
    let to = near.iter().copied().find(|node| Some(*node) != from);
    let cost = from.zip(to).and_then(|(from, to)| times(host, from, to));
    let best = near.first().and_then(|node| host.node(*node));
    let on = match (is_bound && rank.is_some(), best) {
        (true, Some(node)) => format!("`numactl --cpunodebind={0} --membind={0}`, or `taskset -c {1}`", node.number, node.cpus),
        _ => "bind each rank to the node of its GPU: `numactl --cpunodebind=NODE --membind=NODE`; --local-rank checks one".to_owned(),
    };
    vec![Warning {
        kind: WarningKind::WrongNode,
        subject: rank.map_or("process".to_owned(), |rank| format!("process of rank {rank}")),
        what,
        cost: format!(
            "its polls, doorbells and copies pass from node to node{}",
            cost.map_or(String::new(), |cost| format!(", {cost}"))
        ),
        remedy: on,
    }]
}

fn of_rank(rank: Option<usize>) -> &'static str {
    if rank.is_some() { "its GPU and NIC are" } else { "all GPUs and NICs in use are" }
}

fn nodes(nodes: &[u32]) -> String {
    let numbers: Vec<String> = nodes.iter().map(u32::to_string).collect();
    let noun = if nodes.len() == 1 { "NUMA node" } else { "NUMA nodes" };
    format!("{noun} {}", numbers.join(", "))
}
