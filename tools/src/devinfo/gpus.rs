//! GPUs, and their distance from the ports.

use std::path::Path;

use ferroce::driver::topology::{Distance, Nic, PciAddress, Topology};
use ferroce_driver::gpu::{FoundGpu, GpuSpec};
use serde::Serialize;

use crate::failure::{Failure, legible};
use crate::output::say;

#[derive(Debug, Serialize)]
pub(super) struct Gpus {
    devices: Vec<GpuInfo>,
    /// The reason that a library has no GPUs, for each.
    absent: Vec<String>,
}

#[derive(Debug, Serialize)]
struct GpuInfo {
    /// As named for `--memory`.
    name: String,
    description: String,
    /// In bytes.
    memory: u64,
    /// Null if it is not on a PCI bus, or its library does not report it.
    pci: Option<String>,
    numa_node: Option<u32>,
    /// The reason that an RNIC can't access its memory; null if none is known.
    no_dma_buf: Option<String>,
    /// To interfaces and RNICs.
    distances: Vec<FarPort>,
}

#[derive(Debug, Serialize)]
struct FarPort {
    port: String,
    /// As in `nvidia-smi topo -m`; null if one of the two is not on a PCI bus, or the kernel does not report it.
    distance: Option<&'static str>,
    #[serde(skip)]
    meaning: &'static str,
}

impl Gpus {
    /// All GPUs, and their distances to these interfaces and RNICs.
    pub(super) fn find<'a>(
        interfaces: impl Iterator<Item = &'a str>,
        rnics: impl Iterator<Item = &'a str>,
    ) -> Gpus {
        // Without sysfs, distances are unknown.
        let host = Topology::read(Path::new("/sys")).unwrap_or_default();
        let place =
            |has: &dyn Fn(&Nic) -> bool| host.nics.iter().find(|nic| has(nic)).and_then(|nic| nic.pci);
        let interfaces =
            interfaces.map(|name| (name.to_owned(), place(&|nic| nic.interface.as_deref() == Some(name))));
        let rnics = rnics
            .map(|name| (format!("ibverbs:{name}"), place(&|nic| nic.rnics.iter().any(|rnic| rnic == name))));
        let ports: Vec<(String, Option<PciAddress>)> = interfaces.chain(rnics).collect();
        let (found, absent) = GpuSpec::all();
        Gpus {
            devices: found.into_iter().map(|gpu| GpuInfo::new(&host, gpu, &ports)).collect(),
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
    fn new(host: &Topology, gpu: FoundGpu, ports: &[(String, Option<PciAddress>)]) -> GpuInfo {
        let place = gpu.pci.as_ref().and_then(|pci| pci.parse::<PciAddress>().ok());
        let distances = ports.iter().map(|(name, port)| {
            let distance = place.zip(*port).map(|(place, port)| host.distance(place, port));
            let known = distance.filter(|distance| *distance != Distance::Unknown);
            FarPort {
                port: legible(name),
                distance: known.map(Distance::name),
                meaning: known.map_or("", Distance::meaning),
            }
        });
        GpuInfo {
            name: gpu.spec.to_string(),
            description: legible(&gpu.name),
            memory: gpu.memory,
            numa_node: place.and_then(|place| host.device(place)?.numa_node),
            pci: gpu.pci,
            no_dma_buf: gpu.no_dma_buf,
            distances: distances.collect(),
        }
    }

    fn print(&self) -> Result<(), Failure> {
        let gib = self.memory as f64 / (1_u64 << 30) as f64;
        let place = self.pci.as_ref().map_or("PCI address not reported".to_owned(), |pci| {
            let node = self.numa_node.map_or(String::new(), |node| format!(", NUMA node {node}"));
            format!("PCI {pci}{node}")
        });
        say!("GPU {}: {}, {gib:.1} GiB, {place}", self.name, self.description)?;
        for FarPort { port, distance, meaning } in &self.distances {
            if let Some(distance) = distance {
                say!("  {port}: {meaning} ({distance})")?;
            }
        }
        match &self.no_dma_buf {
            Some(missing) => say!("  no dma-buf, so no RNIC can access its memory: {missing}"),
            None => {
                say!("  dma-buf: supported; whether the RNIC accepts it is known when memory is registered")
            }
        }
    }
}
