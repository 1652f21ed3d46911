//! Sysfs trees as files: of real servers, made by hand from public descriptions, and of what a test wants.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use serde::Deserialize;

/// NVIDIA's DGX H100: two sockets, eight GPUs, eight cards of 400 Gb/s.
pub const DGX_H100: &str = include_str!("sysfs/dgx-h100.toml");
/// NVIDIA's DGX A100 (AMD, four NUMA nodes a socket), with faults: a slow card, one that is missing, one down, one of half the lanes.
pub const DGX_A100_FAULTY: &str = include_str!("sysfs/dgx-a100-faulty.toml");
/// A virtual machine with a network card and no GPU.
pub const VIRTUAL_MACHINE: &str = include_str!("sysfs/virtual-machine.toml");

/// A tree in a folder, until it is dropped.
pub struct Sysfs(PathBuf);

/// A server as the files here have it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Server {
    /// Where its facts are from; for the reader of the file.
    #[serde(rename = "source")]
    _source: String,
    #[serde(default)]
    node: Vec<Node>,
    /// Links of the bridges that are not among the devices.
    bridges: Option<String>,
    #[serde(default)]
    device: Vec<Device>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Node {
    number: u32,
    package: u32,
    cpus: String,
    gib: u64,
    distances: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Device {
    /// From the host bridge on; bridges on the way are made, too.
    path: String,
    node: i32,
    class: String,
    /// Vendor and device.
    id: String,
    driver: String,
    /// Its PCIe link, as `32 x16`; without one for those of virtual machines.
    link: Option<String>,
    /// What the link can; by default what it does.
    max: Option<String>,
    /// The folder between the function and its interface, as of virtio.
    below: Option<String>,
    net: Option<String>,
    /// Mb/s.
    speed: Option<i64>,
    mtu: Option<u32>,
    state: Option<String>,
    rdma: Option<String>,
}

impl Sysfs {
    /// A tree without anything.
    pub fn empty() -> Sysfs {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let root = env::temp_dir().join(format!("ferroce-sysfs-{}-{count}", process::id()));
        fs::create_dir_all(root.join("devices")).unwrap();
        Sysfs(root)
    }

    /// One of the servers that are constants here, or such a text.
    pub fn of(server: &str) -> Sysfs {
        let server: Server = toml::from_str(server).unwrap();
        let sysfs = Sysfs::empty();
        for node in &server.node {
            sysfs.add_node(node);
        }
        let numbers: Vec<String> = server.node.iter().map(|node| node.number.to_string()).collect();
        sysfs.write("devices/system/node/online", &numbers.join(","));
        for device in &server.device {
            sysfs.add_bridges(device, server.bridges.as_deref());
            sysfs.add_device(device);
        }
        sysfs
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.0
    }

    /// Writes a file, and makes its folder; with a line end, as the kernel has it.
    pub fn write(&self, path: impl AsRef<Path>, text: &str) {
        let place = self.folder_of(path.as_ref());
        fs::write(place, format!("{text}\n")).unwrap();
    }

    /// Makes a link to another place of the tree.
    pub fn link(&self, path: impl AsRef<Path>, to: &str) {
        let place = self.folder_of(path.as_ref());
        let depth = path.as_ref().components().count() - 1;
        symlink(format!("{}{to}", "../".repeat(depth)), place).unwrap();
    }

    fn folder_of(&self, path: &Path) -> PathBuf {
        let place = self.0.join(path);
        fs::create_dir_all(place.parent().unwrap()).unwrap();
        place
    }

    fn add_node(&self, node: &Node) {
        let folder = format!("devices/system/node/node{}", node.number);
        self.write(format!("{folder}/cpulist"), &node.cpus);
        self.write(format!("{folder}/distance"), &node.distances);
        let kibibytes = node.gib << 20;
        let meminfo =
            format!("Node {0} MemTotal:       {kibibytes} kB\nNode {0} MemFree:        1024 kB", node.number);
        self.write(format!("{folder}/meminfo"), &meminfo);
        for range in node.cpus.split(',').filter(|range| !range.is_empty()) {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            for cpu in first.parse::<u32>().unwrap()..=last.parse::<u32>().unwrap() {
                let file = format!("devices/system/cpu/cpu{cpu}/topology/physical_package_id");
                self.write(file, &node.package.to_string());
            }
        }
    }

    fn add_bridges(&self, device: &Device, link: Option<&str>) {
        let mut parts: Vec<&str> = device.path.split('/').collect();
        while parts.pop().is_some() && parts.len() > 1 {
            let folder = format!("devices/{}", parts.join("/"));
            if self.0.join(&folder).join("class").exists() {
                break;
            }
            self.add_function(&folder, "0x060400", "1000:c030", device.node, "pcieport");
            if let Some(link) = link {
                self.add_link(&folder, link, link);
            }
        }
    }

    fn add_device(&self, device: &Device) {
        let folder = format!("devices/{}", device.path);
        self.add_function(&folder, &device.class, &device.id, device.node, &device.driver);
        if let Some(link) = &device.link {
            self.add_link(&folder, link, device.max.as_ref().unwrap_or(link));
        }
        let below = device.below.as_ref().map_or(folder.clone(), |below| format!("{folder}/{below}"));
        let state = device.state.as_deref().unwrap_or("up");
        if let Some(name) = &device.net {
            let net = format!("{below}/net/{name}");
            self.link(format!("class/net/{name}"), &net);
            self.write(format!("{net}/type"), "1");
            self.write(format!("{net}/dev_port"), "0");
            self.write(format!("{net}/operstate"), state);
            self.write(format!("{net}/mtu"), &device.mtu.unwrap_or(9000).to_string());
            self.write(format!("{net}/speed"), &device.speed.unwrap_or(-1).to_string());
        }
        if let Some(name) = &device.rdma {
            let rdma = format!("{below}/infiniband/{name}");
            self.link(format!("class/infiniband/{name}"), &rdma);
            let port = format!("{rdma}/ports/1");
            self.write(format!("{port}/link_layer"), "Ethernet");
            self.write(format!("{port}/state"), if state == "up" { "4: ACTIVE" } else { "1: DOWN" });
            let gigabits = device.speed.unwrap_or(40_000) / 1000;
            self.write(format!("{port}/rate"), &format!("{gigabits} Gb/sec (4X NDR)"));
            if let Some(net) = &device.net {
                self.write(format!("{port}/gid_attrs/ndevs/0"), net);
            }
        }
    }

    fn add_function(&self, folder: &str, class: &str, id: &str, node: i32, driver: &str) {
        let (vendor, device) = id.split_once(':').unwrap();
        self.write(format!("{folder}/class"), class);
        self.write(format!("{folder}/vendor"), &format!("0x{vendor}"));
        self.write(format!("{folder}/device"), &format!("0x{device}"));
        self.write(format!("{folder}/numa_node"), &node.to_string());
        let drivers = format!("bus/pci/drivers/{driver}");
        fs::create_dir_all(self.0.join(&drivers)).unwrap();
        self.link(format!("{folder}/driver"), &drivers);
        let address = folder.rsplit('/').next().unwrap();
        self.link(format!("bus/pci/devices/{address}"), folder);
    }

    /// A link that runs as `link` says and could run as `max` does.
    fn add_link(&self, folder: &str, link: &str, max: &str) {
        for (name, text) in [("current", link), ("max", max)] {
            let (speed, width) = text.split_once(" x").unwrap();
            self.write(format!("{folder}/{name}_link_speed"), &format!("{speed}.0 GT/s PCIe"));
            self.write(format!("{folder}/{name}_link_width"), width);
        }
    }
}

impl Drop for Sysfs {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
