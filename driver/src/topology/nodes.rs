//! NUMA nodes, and their sockets.

use super::CpuSet;
use super::tree::Tree;

/// A NUMA node.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NumaNode {
    /// Its number.
    pub number: u32,
    /// Its CPUs; none for a node with memory only.
    pub cpus: CpuSet,
    /// Bytes of its memory.
    pub memory: Option<u64>,
    /// The relative cost of access to the memory of each node, as reported by the firmware (SLIT): 10 is its own, 21 is 2.1
    /// times that.
    pub distances: Vec<(u32, u32)>,
}

/// A socket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Package {
    /// Its number.
    pub number: u32,
    /// Its CPUs.
    pub cpus: CpuSet,
}

impl NumaNode {
    /// All online nodes.
    pub(super) fn all(tree: &Tree) -> Vec<NumaNode> {
        const FOLDER: &str = "devices/system/node";
        let mut numbers = numbered(tree, FOLDER, "node");
        // The kernel reports only their distances.
        if let Some(online) = cpus(tree, &format!("{FOLDER}/online")) {
            numbers.retain(|number| online.contains(*number));
        }
        let node = |number: &u32| {
            let folder = format!("{FOLDER}/node{number}");
            let distances = tree.text(format!("{folder}/distance")).unwrap_or_default();
            let distances = distances.split_whitespace().map_while(|distance| distance.parse().ok());
            NumaNode {
                number: *number,
                cpus: cpus(tree, &format!("{folder}/cpulist")).unwrap_or_default(),
                memory: tree.text(format!("{folder}/meminfo")).as_deref().and_then(memory),
                distances: numbers.iter().copied().zip(distances).collect(),
            }
        };
        numbers.iter().map(node).collect()
    }
}

impl Package {
    /// All sockets that have a CPU.
    pub(super) fn all(tree: &Tree) -> Vec<Package> {
        const FOLDER: &str = "devices/system/cpu";
        let mut packages: Vec<Package> = Vec::new();
        for cpu in numbered(tree, FOLDER, "cpu") {
            // A CPU that is offline has none; −1 is reported by an architecture without sockets.
            let file = format!("{FOLDER}/cpu{cpu}/topology/physical_package_id");
            let Some(number) = tree.number::<u32>(file, &["-1"]) else { continue };
            match packages.iter_mut().find(|package| package.number == number) {
                Some(package) => package.cpus.insert(cpu),
                None => {
                    let mut cpus = CpuSet::default();
                    cpus.insert(cpu);
                    packages.push(Package { number, cpus });
                }
            }
        }
        packages.sort_by_key(|package| package.number);
        packages
    }
}

/// The numbers of `node0`, `node1`, … in a directory.
fn numbered(tree: &Tree, folder: &str, prefix: &str) -> Vec<u32> {
    let names = tree.names(folder);
    let mut numbers: Vec<u32> =
        names.iter().filter_map(|name| name.strip_prefix(prefix)?.parse().ok()).collect();
    numbers.sort_unstable();
    numbers
}

fn cpus(tree: &Tree, path: &str) -> Option<CpuSet> {
    let list = tree.text(path)?.parse();
    list.map_err(|error| tree.note(format!("{path}: {error}"))).ok()
}

/// Parsed from lines such as `Node 0 MemTotal:       527898112 kB`.
fn memory(meminfo: &str) -> Option<u64> {
    // Line ends were replaced when the text was made printable.
    let (_, total) = meminfo.split_once("MemTotal:")?;
    let kibibytes: u64 = total.split_whitespace().next()?.parse().ok()?;
    kibibytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_node_is_its_total() {
        let meminfo = "Node 0 MemTotal:       131072 kB\u{fffd}Node 0 MemFree:         1000 kB";
        assert_eq!(memory(meminfo), Some(128 << 20));
        assert_eq!(memory("Node 0 MemTotal: 99999999999999999999 kB"), None);
        assert_eq!(memory("Node 0 MemTotal: 18446744073709551615 kB"), None);
        assert_eq!(memory(""), None);
    }
}
