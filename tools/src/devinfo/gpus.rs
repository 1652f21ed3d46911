//! GPUs, and how far they are from the ports.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use ferroce_driver::gpu::{FoundGpu, GpuSpec};
use serde::Serialize;

use crate::failure::{Failure, legible};
use crate::output::say;

#[derive(Debug, Serialize)]
pub(super) struct Gpus {
    devices: Vec<GpuInfo>,
    /// Why there is none of a library.
    absent: Vec<String>,
}

#[derive(Debug, Serialize)]
struct GpuInfo {
    /// As `--memory` names it.
    name: String,
    description: String,
    /// Bytes.
    memory: u64,
    /// Null where it is at no PCI bus, or its library does not tell.
    pci: Option<String>,
    numa_node: Option<u32>,
    /// What keeps an RNIC from reaching its memory; null if nothing does as far as is known.
    no_dma_buf: Option<String>,
    /// From interfaces and RNICs.
    distances: Vec<FarPort>,
}

#[derive(Debug, Serialize)]
struct FarPort {
    port: String,
    distance: Distance,
}

/// What lies between a GPU and a port. Nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Distance {
    /// A PCI bridge or switch below the root complex has both.
    SameBridge,
    /// A root complex has both.
    SameRootComplex,
    /// They are at the same NUMA node.
    SameNode,
    /// Bytes pass from one NUMA node to another.
    OtherNode,
    /// One of both is at no PCI bus, or the kernel does not tell.
    Unknown,
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Distance::SameBridge => "behind the same PCI bridge",
            Distance::SameRootComplex => "at the same root complex",
            Distance::SameNode => "at the same NUMA node",
            Distance::OtherNode => "at another NUMA node",
            Distance::Unknown => "unknown",
        })
    }
}

impl Gpus {
    /// All there are, and their distances to these interfaces and RNICs.
    pub(super) fn find<'a>(
        interfaces: impl Iterator<Item = &'a str>,
        rnics: impl Iterator<Item = &'a str>,
    ) -> Gpus {
        let sys = Path::new("/sys");
        let (found, absent) = GpuSpec::all();
        let ports: Vec<(String, PathBuf)> = interfaces
            .map(|name| (name.to_owned(), sys.join("class/net").join(name).join("device")))
            .chain(rnics.map(|name| {
                (format!("ibverbs:{name}"), sys.join("class/infiniband").join(name).join("device"))
            }))
            .collect();
        Gpus {
            devices: found.into_iter().map(|gpu| GpuInfo::new(sys, gpu, &ports)).collect(),
            absent: absent.iter().map(|error| legible(&error.to_string())).collect(),
        }
    }

    pub(super) fn print(&self) -> Result<(), Failure> {
        if self.devices.is_empty() {
            say!("GPUs: none")?;
        }
        self.devices.iter().try_for_each(GpuInfo::print)?;
        self.absent.iter().try_for_each(|why| say!("  {why}"))
    }
}

impl GpuInfo {
    fn new(sys: &Path, gpu: FoundGpu, ports: &[(String, PathBuf)]) -> GpuInfo {
        let place = gpu.pci.as_ref().map(|pci| sys.join("bus/pci/devices").join(pci));
        let distances = ports.iter().map(|(name, port)| FarPort {
            port: legible(name),
            distance: place.as_ref().map_or(Distance::Unknown, |place| distance(place, port)),
        });
        GpuInfo {
            name: gpu.spec.to_string(),
            description: legible(&gpu.name),
            memory: gpu.memory,
            numa_node: place.as_deref().and_then(numa_node),
            pci: gpu.pci,
            no_dma_buf: gpu.no_dma_buf,
            distances: distances.collect(),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let gib = self.memory as f64 / (1_u64 << 30) as f64;
        let place = self.pci.as_ref().map_or("at no PCI bus that it tells of".to_owned(), |pci| {
            let node = self.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
            format!("PCI {pci}{node}")
        });
        say!("GPU {}: {}, {gib:.1} GiB, {place}", self.name, self.description)?;
        let known = self.distances.iter().filter(|far| far.distance != Distance::Unknown);
        known.clone().try_for_each(|far| say!("  {}: {}", far.port, far.distance))?;
        match &self.no_dma_buf {
            Some(missing) => say!("  no dma-buf, so no RNIC reaches its memory: {missing}"),
            None => {
                say!("  dma-buf: it has them; whether the RNIC takes one is seen when memory is registered")
            }
        }
    }
}

/// Between two devices, by their links in sysfs.
fn distance(one: &Path, other: &Path) -> Distance {
    let (Some(a), Some(b)) = (pci_path(one), pci_path(other)) else { return Distance::Unknown };
    // The root complex, the bridges, and last the device itself.
    match a.iter().zip(&b).take_while(|(a, b)| a == b).count() {
        0 => match (numa_node(one), numa_node(other)) {
            (Some(a), Some(b)) if a == b => Distance::SameNode,
            (Some(_), Some(_)) => Distance::OtherNode,
            _ => Distance::Unknown,
        },
        1 => Distance::SameRootComplex,
        _ => Distance::SameBridge,
    }
}

/// The parts of a PCI device's path, from the root complex on.
fn pci_path(link: &Path) -> Option<Vec<String>> {
    let path = fs::canonicalize(link).ok()?;
    let parts: Vec<String> = path.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let root = parts.iter().position(|part| part.starts_with("pci"))?;
    Some(parts[root..].to_vec())
}

/// The kernel has −1 for none.
fn numa_node(link: &Path) -> Option<u32> {
    fs::read_to_string(link.join("numa_node")).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A tree as the kernel has it: two sockets, of which one has a switch with a GPU and a card.
    #[test]
    fn distances_are_those_of_the_tree() {
        let root = std::env::temp_dir().join(format!("ferroce-sysfs-{}", std::process::id()));
        let devices = [
            ("gpu", "pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0", "0"),
            ("near", "pci0000:16/0000:16:01.0/0000:17:00.0/0000:19:00.0", "0"),
            ("root", "pci0000:16/0000:16:02.0/0000:1a:00.0", "0"),
            ("node", "pci0000:30/0000:30:01.0/0000:31:00.0", "0"),
            ("far", "pci0000:97/0000:97:01.0/0000:98:00.0", "1"),
            ("untold", "pci0000:a0/0000:a0:01.0", "-1"),
            ("veth", "virtual/net/veth0", "0"),
        ];
        for (name, path, node) in devices {
            let folder = root.join("devices").join(path);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("numa_node"), format!("{node}\n")).unwrap();
            symlink(&folder, root.join(name)).unwrap();
        }
        let to = |name: &str| distance(&root.join("gpu"), &root.join(name));
        assert_eq!(["near", "root", "node", "far", "untold", "veth", "nothing"].map(to), {
            use Distance::*;
            [SameBridge, SameRootComplex, SameNode, OtherNode, Unknown, Unknown, Unknown]
        });
        fs::remove_dir_all(&root).unwrap();
    }
}
