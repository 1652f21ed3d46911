use std::fs;
use std::os::unix::fs::symlink;
use std::process::Command;

use ferroce_driver_test_support::random::Random;
use ferroce_driver_test_support::sysfs::{DGX_A100_FAULTY, DGX_H100, Sysfs, VIRTUAL_MACHINE};

use super::*;

fn at(address: &str) -> PciAddress {
    address.parse().unwrap()
}

fn nic<'a>(topology: &'a Topology, name: &str) -> &'a Nic {
    topology.nics.iter().find(|nic| nic.name() == name).unwrap()
}

#[test]
fn a_server_is_read() {
    let sysfs = Sysfs::of(DGX_H100);
    let host = Topology::read(sysfs.root()).unwrap();
    assert_eq!(host.notes, Vec::<String>::new());
    assert_eq!(host.nodes.len(), 2);
    assert_eq!((host.nodes[1].number, host.nodes[1].memory), (1, Some(1007 << 30)));
    assert_eq!(host.nodes[1].cpus.to_string(), "56-111,168-223");
    assert_eq!((host.node_distance(0, 1), host.node_distance(1, 1)), (Some(21), Some(10)));
    assert_eq!((host.package_of(0), host.package_of(1), host.package_of(2)), (Some(0), Some(1), None));
    assert_eq!(host.nodes_of(&"3,60".parse().unwrap()), [0, 1]);
    // The console's display controller is not a GPU.
    let gpus: Vec<String> = host.gpus().map(|gpu| gpu.address.to_string()).collect();
    assert_eq!(gpus.len(), 8);
    assert_eq!((&gpus[0][..], &gpus[7][..]), ("0000:1b:00.0", "0000:df:00.0"));
    let gpu = host.device(at("0000:1b:00.0")).unwrap();
    assert_eq!((gpu.vendor, gpu.device, gpu.driver.as_deref()), (Some(0x10de), Some(0x2330), Some("nvidia")));
    assert_eq!((&gpu.host_bridge[..], gpu.bridges.len(), gpu.numa_node), ("pci0000:15", 5, Some(0)));
    let card = nic(&host, "enp24s0np0");
    assert_eq!((card.rate, card.mtu, card.state), (Some(400_000_000_000), Some(9000), NicState::Up));
    assert_eq!((&card.rnics[..], card.pci), (&["mlx5_0".to_owned()][..], Some(at("0000:18:00.0"))));
    assert_eq!((card.is_virtual, card.is_infiniband, &card.addresses), (false, false, &None));
    let (_, slowest) = host.slowest_link(at("0000:18:00.0")).unwrap();
    assert_eq!(slowest.to_string(), "32 GT/s x16");
}

#[test]
fn a_virtual_machine_reports_little() {
    let sysfs = Sysfs::of(VIRTUAL_MACHINE);
    let host = Topology::read(sysfs.root()).unwrap();
    assert_eq!(host.notes, Vec::<String>::new());
    assert_eq!(host.gpus().count(), 0);
    let card = nic(&host, "eth0");
    assert_eq!((card.rate, card.pci, card.is_virtual), (None, Some(at("0000:00:03.0")), false));
    let device = host.device(at("0000:00:03.0")).unwrap();
    assert_eq!((device.numa_node, device.link), (None, None));
    assert_eq!(host.slowest_link(device.address), None);
}

#[test]
fn distances_follow_the_pci_tree() {
    let sysfs = Sysfs::of(DGX_A100_FAULTY);
    let host = Topology::read(sysfs.root()).unwrap();
    let from = |a: &str, b: &str| host.distance(at(a), at(b));
    assert_eq!(from("0000:07:00.0", "0000:0c:00.0"), Distance::Pxb);
    // Another NUMA node of the socket, and the other socket.
    assert_eq!(from("0000:07:00.0", "0000:4b:00.0"), Distance::Node);
    assert_eq!(from("0000:4b:00.0", "0000:07:00.0"), Distance::Node);
    assert_eq!(from("0000:07:00.0", "0000:8d:00.0"), Distance::Sys);
    assert_eq!(from("0000:07:00.0", "0000:99:00.0"), Distance::Unknown);

    let tree = Sysfs::of(
        r#"
        source = "a switch, a root port beside it, two functions of a card"
        [[node]]
        number = 0
        package = 0
        cpus = "0-1"
        gib = 1
        distances = "10 20"
        [[node]]
        number = 1
        package = 1
        cpus = "2-3"
        gib = 1
        distances = "20 10"
        "#,
    );
    for (path, node) in [
        ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:00.0/0000:19:00.0", "0"),
        ("pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/0000:1a:00.0", "0"),
        ("pci0000:16/0000:16:02.0/0000:1b:00.0", "0"),
        ("pci0000:16/0000:16:02.0/0000:1b:00.1", "0"),
        ("pci0000:30/0000:30:01.0", "0"),
        ("pci0000:97/0000:97:01.0", "1"),
        ("pci0000:a0/0000:a0:01.0", "-1"),
    ] {
        tree.write(format!("devices/{path}/numa_node"), node);
        let address = path.rsplit('/').next().unwrap();
        tree.link(format!("bus/pci/devices/{address}"), &format!("devices/{path}"));
    }
    let host = Topology::read(tree.root()).unwrap();
    let from = |other: &str| host.distance(at("0000:19:00.0"), at(other));
    let others = ["0000:1a:00.0", "0000:1b:00.0", "0000:30:01.0", "0000:97:01.0", "0000:a0:01.0"];
    assert_eq!(others.map(|other| from(other).name()), ["PIX", "PHB", "NODE", "SYS", "?"]);
    assert_eq!(host.distance(at("0000:1b:00.0"), at("0000:1b:00.1")), Distance::Pix);
}

/// A recorded tree reads the same as the original, and contains nothing else of it.
#[test]
fn a_recorded_tree_reads_the_same() {
    let sysfs = Sysfs::of(DGX_H100);
    sysfs.write("devices/secret", "of somebody");
    let copy = Sysfs::empty();
    let to = copy.root().join("record");
    Topology::record(sysfs.root(), &to).unwrap();
    assert_eq!(Topology::read(&to).unwrap(), Topology::read(sysfs.root()).unwrap());
    assert!(!to.join("devices/secret").exists());
    let error = Topology::record(sysfs.root(), &to).unwrap_err().to_string();
    assert!(error.contains("it is not empty"), "{error}");
    // Also of this machine, where interfaces may appear and disappear meanwhile.
    let folder = copy.root().join("here");
    Topology::record(Path::new("/sys"), &folder).unwrap();
    let (recorded, here) = (Topology::read(&folder).unwrap(), Topology::read(Path::new("/sys")).unwrap());
    assert_eq!((recorded.nodes, recorded.packages, recorded.pci), (here.nodes, here.packages, here.pci));
}

#[test]
fn an_invalid_tree_is_an_error() {
    let sysfs = Sysfs::empty();
    let folder = sysfs.root().join("x");
    fs::create_dir(&folder).unwrap();
    for (path, why) in [(folder.as_path(), "holds no sysfs tree"), (&folder.join("y"), "No such file")] {
        let error = Topology::read(path).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(&path.display().to_string()), "{error}");
    }
}

/// A malicious tree: reading ends, follows no link out of the tree, and notes the entries that it left out.
#[test]
fn a_malicious_tree_is_read_safely() {
    let sysfs = Sysfs::of(VIRTUAL_MACHINE);
    let root = sysfs.root();
    let net = root.join("devices/pci0000:00/0000:00:03.0/virtio0/net/eth0");
    fs::write(net.join("mtu"), vec![b'9'; 1 << 20]).unwrap();
    fs::write(net.join("operstate"), b"up\x1b[2J\xff").unwrap();
    fs::remove_file(net.join("speed")).unwrap();
    assert!(Command::new("mkfifo").arg(net.join("speed")).status().unwrap().success());
    // Links in a circle, out of the tree, and to an endless device.
    symlink("eth1", root.join("class/net/eth1")).unwrap();
    symlink("/proc/self", root.join("class/net/eth2")).unwrap();
    symlink("/dev/zero", root.join("devices/system/node/node0/zero")).unwrap();
    fs::remove_file(root.join("devices/system/node/node0/cpulist")).unwrap();
    symlink("zero", root.join("devices/system/node/node0/cpulist")).unwrap();
    sysfs.write("devices/system/node/node1/cpulist", "0-4294967295");
    sysfs.write("devices/system/node/online", "0-1");
    sysfs.write("devices/system/cpu/cpu0/topology/physical_package_id", "-7");
    // A name that clears the screen, on bridges in an endless loop.
    let bad = "\u{1b}[2J\u{202e}";
    let chain: String = (0..120).map(|nth| format!("0000:{nth:02x}:01.0/")).collect();
    let deep = format!("devices/pci0000:00/{chain}0000:fe:00.0");
    sysfs.write(format!("{deep}/class"), "0x020000");
    sysfs.write(format!("{deep}/numa_node"), "4711");
    sysfs.write(format!("{deep}/current_link_speed"), "as fast as light");
    sysfs.link("bus/pci/devices/0000:fe:00.0", &deep);
    sysfs.write(format!("{deep}/net/{bad}/mtu"), "-1");
    sysfs.link(format!("class/net/{bad}"), &format!("{deep}/net/{bad}"));
    for nth in 0..5000 {
        symlink("nowhere", root.join(format!("class/infiniband-{nth}"))).unwrap();
    }
    fs::create_dir_all(root.join("class/infiniband")).unwrap();
    for nth in 0..5000 {
        symlink("nowhere", root.join(format!("class/infiniband/mlx5_{nth}"))).unwrap();
    }

    let host = Topology::read(root).unwrap();
    let said = format!("{host:?}{}", host.notes.join(" "));
    assert!(!host.notes.iter().any(|note| note.contains(crate::is_unprintable)), "{:?}", host.notes);
    assert!(!host.nics.iter().any(|nic| nic.name().contains(crate::is_unprintable)), "{:?}", host.nics);
    assert_eq!(host.device(at("0000:fe:00.0")).unwrap().bridges.len(), 120);
    assert_eq!(nic(&host, "eth0").mtu, None);
    for expected in [
        "mtu: it is longer than 16384 bytes",
        "speed: it is no file",
        "class/net/eth1: Too many levels of symbolic links",
        "class/net/eth2: it points outside the tree",
        "node0/cpulist: it points outside the tree",
        "node1/cpulist: list of CPUs = 0-4294967295: numbers and ranges",
        "physical_package_id: '-7' is not a number",
        "'as fast as light' is not a speed",
        "0000:fe:00.0: NUMA node 4711 is not in use",
        "class/infiniband: more than 4096 entries",
    ] {
        assert!(said.contains(expected), "'{expected}' is not in {:#?}", host.notes);
    }
}

/// A tree with random changes of bytes is read or refused, without a panic.
#[test]
fn random_changes_do_not_cause_panics() {
    let sysfs = Sysfs::of(VIRTUAL_MACHINE);
    let mut random = Random::from_env("FERROCE_TOPOLOGY_SEED");
    let seed = random.seed();
    let mut files = Vec::new();
    let mut folders = vec![sysfs.root().to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let kind = entry.file_type().unwrap();
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_file() {
                files.push(entry.path());
            }
        }
    }
    for _ in 0..300 {
        let file = &files[random.below(files.len() as u64) as usize];
        let mut bytes = vec![0; random.below(64) as usize];
        random.fill(&mut bytes);
        fs::write(file, &bytes).unwrap();
        let host = Topology::read(sysfs.root()).unwrap();
        let bad = host.notes.iter().find(|note| note.contains(crate::is_unprintable));
        assert_eq!(bad, None, "FERROCE_TOPOLOGY_SEED={seed}");
    }
}
