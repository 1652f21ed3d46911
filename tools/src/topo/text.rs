//! The report as text.

use std::fmt::Write;

use ferroce::driver::topology::{Distance, PciAddress, Topology};

use super::report::{Function, Gpu, Node, Port, Process, Rate, Report, Tree, Warning};
use super::tree::{Branch, grow};
use crate::failure::Failure;
use crate::output::say;

/// The most columns of the distance table.
const MOST_COLUMNS: usize = 40;
/// The most indentation levels.
const MOST_LEVELS: usize = 12;

pub(super) fn print(report: &Report, host: &Topology) -> Result<(), Failure> {
    let all = [
        head(report),
        devices(report, host),
        distances(report),
        ranks(report),
        warnings(report),
        notes(report),
    ];
    let text: Vec<String> =
        all.into_iter().filter(|part| !part.is_empty()).map(|lines| lines.join("\n")).collect();
    say!("{}", text.join("\n\n"))
}

fn head(report: &Report) -> Vec<String> {
    let cpus: usize = report.nodes.iter().map(|node| node.cpu_count).sum();
    let memory: Vec<u64> = report.nodes.iter().filter_map(|node| node.memory).collect();
    let hardware = report.nics.iter().filter(|nic| nic.function.is_some()).count();
    vec![format!(
        "host {}: {}, {}, {}, {}; {}, {}",
        report.host,
        count(report.sockets.len(), "socket"),
        count(report.nodes.len(), "NUMA node"),
        count(cpus, "CPU"),
        gibibytes(memory.iter().sum()),
        count(report.gpus.len(), "GPU"),
        count(hardware, "network port"),
    )]
}

fn count(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn gibibytes(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1_u64 << 30) as f64)
}

pub(super) fn gigabits(rate: u64) -> String {
    format!("{} Gb/s", (rate as f64 / 1e8).round() / 10.0)
}

/// The devices of each node, then those without a node.
fn devices(report: &Report, host: &Topology) -> Vec<String> {
    let mut lines = Vec::new();
    for node in &report.nodes {
        lines.push(node_line(node));
        branches(report, &grow(host, &places(report, Some(node.number))), 1, &mut lines);
    }
    let without = places(report, None);
    if !without.is_empty() {
        lines.push("devices without a reported NUMA node".to_owned());
        branches(report, &grow(host, &without), 1, &mut lines);
    }
    for nic in
        report.nics.iter().filter(|nic| nic.function.is_none() && !(nic.is_virtual && nic.rnics.is_empty()))
    {
        lines.push(format!("at no PCI bus: {}", port(nic)));
    }
    let is_plain = |nic: &&Port| nic.is_virtual && nic.rnics.is_empty();
    let made: Vec<&str> = report.nics.iter().filter(is_plain).map(|nic| nic.name.as_str()).collect();
    if !made.is_empty() {
        lines.push(format!("virtual interfaces: {}", made.join(", ")));
    }
    for gpu in &report.other_gpus {
        lines.push(format!("at no PCI bus: {}, {}, {}", gpu.name, gpu.description, gibibytes(gpu.memory)));
    }
    lines
}

fn functions(report: &Report) -> impl Iterator<Item = &Function> {
    let gpus = report.gpus.iter().map(|gpu| &gpu.function);
    gpus.chain(report.nics.iter().filter_map(|nic| nic.function.as_ref())).chain(&report.controllers)
}

/// The addresses of a node's devices.
pub(super) fn places(report: &Report, node: Option<u32>) -> Vec<PciAddress> {
    let mut all: Vec<PciAddress> = functions(report)
        .filter(|function| function.numa_node == node)
        .map(|function| function.address)
        .collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn node_line(node: &Node) -> String {
    let mut line = format!("NUMA node {}", node.number);
    if let Some(socket) = node.socket {
        let _ = write!(line, ", socket {socket}");
    }
    let _ = match &node.cpus[..] {
        "" => write!(line, ": no CPUs"),
        cpus => write!(line, ": CPUs {cpus}"),
    };
    if let Some(memory) = node.memory {
        let _ = write!(line, "; {}", gibibytes(memory));
    }
    if node.distances.len() > 1 {
        let distances: Vec<String> = node.distances.iter().map(u32::to_string).collect();
        let _ = write!(line, "; distances of the nodes {}", distances.join(" "));
    }
    line
}

fn branches(report: &Report, all: &[Branch], level: usize, lines: &mut Vec<String>) {
    let indent = "  ".repeat(level.min(MOST_LEVELS));
    for branch in all {
        match branch.device {
            None => lines.push(format!("{indent}{}", branch.names.join(" "))),
            Some(address) => {
                lines.extend(of_device(report, address).iter().map(|line| format!("{indent}{line}")))
            }
        }
        branches(report, &branch.below, level + 1, lines);
    }
}

/// A function may have several ports.
fn of_device(report: &Report, address: PciAddress) -> Vec<String> {
    let has = |function: &Function| function.address == address;
    if let Some(gpu) = report.gpus.iter().find(|gpu| has(&gpu.function)) {
        return vec![format!("{address} {}{}", gpu_line(gpu), link(&gpu.function))];
    }
    let ports = report.nics.iter().filter_map(|nic| Some((nic, nic.function.as_ref().filter(|f| has(f))?)));
    let ports = ports.map(|(nic, function)| format!("{address} {}{}", port(nic), link(function)));
    let controllers = report.controllers.iter().filter(|controller| has(controller)).map(|controller| {
        let driver = controller
            .driver
            .as_ref()
            .map_or("without a driver".to_owned(), |driver| format!("driver {driver}"));
        format!("{address} network controller without an interface ({driver}){}", link(controller))
    });
    ports.chain(controllers).collect()
}

fn gpu_line(gpu: &Gpu) -> String {
    let vendor = gpu.function.vendor.unwrap_or("vendor");
    let mut line =
        format!("GPU {}: {vendor} {}", gpu.number, gpu.function.id.as_deref().unwrap_or("unknown"));
    if let Some(library) = &gpu.library {
        line = format!(
            "GPU {}: {}, {}, {}",
            gpu.number,
            library.name,
            library.description,
            gibibytes(library.memory)
        );
    }
    match &gpu.function.driver {
        Some(driver) => format!("{line}, driver {driver}"),
        None => format!("{line}, without a driver"),
    }
}

/// The label of a NIC in all tables.
fn label(nic: &Port) -> String {
    match (&nic.interface, &nic.rnics[..]) {
        (Some(interface), [_, ..]) => format!("{interface} ({})", nic.rnics.join(", ")),
        _ => nic.name.clone(),
    }
}

fn port(nic: &Port) -> String {
    let mut line = format!("NIC {} {}: ", nic.number, label(nic));
    line += match nic.state {
        "unknown" => "state not reported",
        state => state,
    };
    match nic.rate {
        Some(rate) => line += &format!(", {}", gigabits(rate)),
        None => line += ", rate not reported",
    }
    if let Some(mtu) = nic.mtu {
        line += &format!(", MTU {mtu}");
    }
    if nic.is_infiniband {
        line += ", InfiniBand";
    }
    if let Some(whole) = &nic.part_of {
        line += &format!(", part of {whole}");
    }
    if let Some(physical) = nic.function.as_ref().and_then(|function| function.virtual_function_of.as_ref()) {
        line += &format!(", virtual function of {physical}");
    }
    if nic.addresses.as_ref().is_some_and(Vec::is_empty) && nic.interface.is_some() {
        line += ", no IP address";
    }
    line
}

fn link(function: &Function) -> String {
    let Some(link) = &function.link else { return String::new() };
    let rate = |rate: &Rate| format!("{} GT/s x{}", rate.gigatransfers, rate.lanes);
    let current = format!("; PCIe {} ({})", rate(&link.current), gigabits(link.current.bits_per_second));
    if link.current == link.max { current } else { format!("{current} of {}", rate(&link.max)) }
}

fn distances(report: &Report) -> Vec<String> {
    let mut columns: Vec<usize> = report.distances.iter().map(|far| far.nic).collect();
    columns.sort_unstable();
    columns.dedup();
    let left_out = columns.len().saturating_sub(MOST_COLUMNS);
    columns.truncate(MOST_COLUMNS);
    if columns.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["distances of GPUs (rows) and NICs (columns)".to_owned()];
    let numbers: String = columns.iter().map(|nic| format!(" {nic:>4}")).collect();
    lines.push(format!("        {numbers}"));
    for gpu in &report.gpus {
        let own = report.distances.iter().filter(|far| far.gpu == gpu.number && columns.contains(&far.nic));
        let row: String = own.map(|far| format!(" {:>4}", far.distance)).collect();
        lines.push(format!("  GPU {:<2}{row}", gpu.number));
    }
    if left_out > 0 {
        lines.push(format!("  and {left_out} more NICs, which --json has"));
    }
    let kinds = [Distance::Pix, Distance::Pxb, Distance::Phb, Distance::Node, Distance::Sys];
    let used = kinds.iter().filter(|kind| report.distances.iter().any(|far| far.distance == kind.name()));
    lines.extend(used.map(|kind| format!("  {}: {}", kind.name(), kind.meaning())));
    lines
}

fn ranks(report: &Report) -> Vec<String> {
    if report.ranks.is_empty() {
        return Vec::new();
    }
    let mut lines = vec!["ranks".to_owned()];
    for (number, rank) in report.ranks.iter().enumerate() {
        let nic = rank.nic.and_then(|nic| report.nics.get(nic)).map(label);
        let way = match (&rank.gpu, nic, rank.distance) {
            (Some(_), Some(nic), Some(distance)) => format!("{} uses {nic} at {distance}", rank.name),
            (Some(_), ..) => format!("{} without a NIC", rank.name),
            (None, Some(nic), _) => nic,
            (None, None, _) => rank.name.clone(),
        };
        lines.push(format!("  rank {number}: {way}; {}", rank.reason));
    }
    lines.push("rails".to_owned());
    for (number, rail) in report.rails.iter().enumerate() {
        let nic = report.nics.get(rail.nic).map(label).unwrap_or_default();
        let rate = rail.rate.map_or("rate not reported".to_owned(), gigabits);
        let ranks: Vec<String> = rail.ranks.iter().map(usize::to_string).collect();
        let noun = if ranks.len() == 1 { "rank" } else { "ranks" };
        lines.push(format!("  rail {number}: {nic}, {rate}, {noun} {}", ranks.join(", ")));
    }
    lines.push(format!("  why: {}", report.rails_reason));
    if report.ranks.len() > 1 {
        lines.push("ring".to_owned());
        let hops: String =
            report.ring.hops.iter().enumerate().map(|(at, hop)| format!("{at} -{hop}- ")).collect();
        lines.push(format!("  {hops}0"));
        lines.push(format!("  why: {}", report.ring.reason));
        for (number, tree) in report.trees.iter().enumerate() {
            lines.push(format!("tree {number}"));
            lines.push(format!("  {}", children(tree)));
            lines.push(format!("  why: {}", tree.reason));
        }
    }
    lines
}

/// `0 > 4; 4 > 2, 6; …`, from the root downwards.
fn children(tree: &Tree) -> String {
    let of = |parent: usize| -> Vec<usize> {
        (0..tree.parents.len()).filter(|rank| tree.parents[*rank] == Some(parent)).collect()
    };
    let (mut parts, mut turn) = (Vec::new(), vec![0]);
    // Each rank has one parent, so each rank is visited once.
    while !turn.is_empty() {
        let mut next = Vec::new();
        for parent in turn {
            let below = of(parent);
            if !below.is_empty() {
                let names: Vec<String> = below.iter().map(usize::to_string).collect();
                parts.push(format!("{parent} > {}", names.join(", ")));
            }
            next.extend(below);
        }
        turn = next;
    }
    parts.join("; ")
}

fn warnings(report: &Report) -> Vec<String> {
    let mut lines = Vec::new();
    if let Some(Process { name, cpus, nodes, rank, .. }) = &report.process {
        let nodes: Vec<String> = nodes.iter().map(u32::to_string).collect();
        let rank = rank.map_or(String::new(), |rank| format!(", rank {rank}"));
        lines.push(format!("process {name}{rank}: CPUs {cpus}, of NUMA nodes {}", nodes.join(", ")));
    }
    let all: Vec<&Warning> =
        report.warnings.iter().chain(report.process.iter().flat_map(|process| &process.warnings)).collect();
    lines.push(match all.len() {
        0 => "placement: no problem found".to_owned(),
        number => format!("placement that costs performance: {number}"),
    });
    for Warning { subject, what, cost, remedy, .. } in all {
        lines.push(format!("  {subject}: {what}"));
        lines.push(format!("    cost: {cost}"));
        lines.push(format!("    remedy: {remedy}"));
    }
    lines
}

fn notes(report: &Report) -> Vec<String> {
    report.notes.iter().map(|note| format!("note: {note}")).collect()
}
