use ferroce::driver::topology::Distance::{Node, Pxb, Sys};
use ferroce_driver_test_support::sysfs::{DGX_A100_FAULTY, DGX_H100, Sysfs, VIRTUAL_MACHINE};

use super::*;

fn read(server: &str) -> Topology {
    Topology::read(Sysfs::of(server).root()).unwrap()
}

fn rnics(host: &Topology, placement: &Placement) -> Vec<String> {
    placement.ranks.iter().map(|rank| rank.nic_of(host).unwrap().rnics[0].clone()).collect()
}

fn found(placement: &Placement) -> Vec<(&'static str, &str)> {
    placement.warnings.iter().map(|warning| (warning.kind.name(), warning.subject.as_str())).collect()
}

/// The NICs are those that NVIDIA's guide assigns to these GPUs.
#[test]
fn a_server_without_faults() {
    let host = read(DGX_H100);
    let placement = Placement::new(&host);
    assert_eq!(
        rnics(&host, &placement),
        ["mlx5_0", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_9", "mlx5_10", "mlx5_11"]
    );
    assert!(placement.ranks.iter().all(|rank| rank.distance == Pxb), "{:#?}", placement.ranks);
    let names: Vec<&str> = placement.ranks.iter().map(|rank| rank.name.as_str()).collect();
    assert_eq!(names, ["GPU 0", "GPU 1", "GPU 2", "GPU 3", "GPU 4", "GPU 5", "GPU 6", "GPU 7"]);
    assert_eq!(placement.ring.hops, [Node, Node, Node, Sys, Node, Node, Node, Sys]);
    assert!(placement.ring.is_exact);
    assert_eq!(placement.rails.len(), 8);
    assert!(
        placement.rails_reason.contains("8 NICs are used")
            && placement.rails_reason.contains("all have 400 Gb/s")
    );
    assert_eq!(placement.warnings, []);
    // As in the schedule: 7 members after the root.
    let parents = |tree: usize| -> Vec<Option<usize>> {
        (0..8).map(|rank| crate::schedule::position_in_tree(8, rank, tree).parent).collect()
    };
    assert_eq!(
        placement.trees[0].parents,
        [None, Some(2), Some(4), Some(2), Some(0), Some(6), Some(4), Some(6)]
    );
    assert_eq!(placement.trees[1].parents, parents(1));
    assert_eq!(placement.trees[0].depth, 3);
}

#[test]
fn costly_placements_are_reported_with_their_cost() {
    let host = read(DGX_A100_FAULTY);
    let placement = Placement::new(&host);
    // GPUs of one socket are adjacent, and so are those of one node.
    assert_eq!(placement.ring.crossings, 2, "{:?}", placement.ring);
    // Two GPUs below one switch have two equally near NICs: each uses one.
    let by_name = |name: &str| placement.ranks.iter().find(|rank| rank.name == name).unwrap();
    let rnic = |name: &str| by_name(name).nic_of(&host).unwrap().rnics[0].as_str();
    assert_eq!(["GPU 0", "GPU 1", "GPU 2", "GPU 3"].map(rnic), ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]);
    assert_eq!(["GPU 4", "GPU 5", "GPU 6", "GPU 7"].map(rnic), ["mlx5_6", "mlx5_7", "mlx5_6", "mlx5_7"]);
    assert_eq!((by_name("GPU 5").distance, by_name("GPU 6").distance), (Pxb, Node));
    assert_eq!(
        found(&placement),
        [
            ("far_nic", "GPU 6"),
            ("far_nic", "GPU 7"),
            ("nic_down", "enp204s0 (mlx5_9)"),
            ("shared_nic", "enp141s0 (mlx5_6)"),
            ("shared_nic", "enp148s0 (mlx5_7)"),
            ("slow_nic", "enp84s0 (mlx5_3)"),
            ("link_below_maximum", "enp141s0 (mlx5_6)"),
        ]
    );
    let said: Vec<String> = placement.warnings.iter().map(ToString::to_string).collect();
    let said = said.join("\n");
    for expected in [
        "1.2 times the latency of node 5's own memory for that of node 7",
        "other GPUs have their NIC at PXB",
        "GPU 6, GPU 7 would have it at PXB, and have enp141s0 at NODE",
        "`ip link set enp204s0 up`",
        "each has 100 Gb/s of its 200 Gb/s",
        "all rails run at 100 Gb/s: 600 Gb/s for the host in place of 1100 Gb/s",
        "runs at 16 GT/s x8, although both ends support 16 GT/s x16",
        "at most 126 Gb/s of its 200 Gb/s",
    ] {
        assert!(said.contains(expected), "'{expected}' is not in:\n{said}");
    }
}

#[test]
fn without_a_gpu_each_nic_is_a_rank() {
    let host = read(VIRTUAL_MACHINE);
    let placement = Placement::new(&host);
    assert_eq!(placement.ranks.len(), 1);
    assert_eq!((placement.ranks[0].name.as_str(), placement.ranks[0].gpu), ("eth0", None));
    assert_eq!((placement.ring.hops.len(), placement.trees[0].parents.len()), (0, 1));
    assert_eq!(placement.warnings, []);
    let empty = Placement::new(&Topology::default());
    assert_eq!(found(&empty), [("no_nic", "host")]);
    assert_eq!((empty.ranks.len(), empty.ring.hops.len(), empty.trees[1].depth), (0, 0, 0));
}

#[test]
fn an_interface_without_an_address_is_reported() {
    let mut host = read(VIRTUAL_MACHINE);
    host.nics[0].addresses = Some(Vec::new());
    let placement = Placement::new(&host);
    assert_eq!(found(&placement), [("no_address", "eth0")]);
    assert!(placement.warnings[0].remedy.contains("ip addr add ADDRESS/PREFIX dev eth0"));
    host.nics[0].addresses = Some(vec!["192.0.2.1".parse().unwrap()]);
    assert_eq!(Placement::new(&host).warnings, []);
}

/// A card in a slot of an older generation, two ports behind one link, a slow upstream link, a port set to InfiniBand.
#[test]
fn links_that_are_slower_than_their_ports() {
    let of = |edit: &dyn Fn(&Sysfs)| {
        let sysfs = Sysfs::of(DGX_H100);
        edit(&sysfs);
        let host = Topology::read(sysfs.root()).unwrap();
        let warnings = Placement::new(&host).warnings;
        warnings
            .iter()
            .map(|warning| format!("{} {warning}", warning.kind.name()))
            .collect::<Vec<_>>()
            .join("\n")
    };
    let bridge = "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0";
    let card = format!("{bridge}/0000:18:00.0");
    let slot = of(&|sysfs| {
        sysfs.write(format!("{card}/current_link_speed"), "16.0 GT/s PCIe");
        sysfs.write(format!("{bridge}/max_link_speed"), "16.0 GT/s PCIe");
        sysfs.write(format!("{bridge}/current_link_speed"), "16.0 GT/s PCIe");
    });
    assert!(
        slot.starts_with(
            "slow_pcie enp24s0np0 (mlx5_0): its PCIe link runs at 16 GT/s x16; the card supports 32 GT/s x16"
        ),
        "{slot}"
    );
    assert!(slot.contains("at most 252.1 Gb/s of its 400 Gb/s") && slot.contains("faster slot"), "{slot}");

    let above = of(&|sysfs| sysfs.write("devices/pci0000:15/0000:15:01.0/current_link_width", "4"));
    assert!(above.contains("32 GT/s x4 at 0000:15:01.0, above it"), "{above}");

    let two = of(&|sysfs| {
        let port = format!("{}1", &card[..card.len() - 1]);
        for (file, text) in
            [("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x1021"), ("numa_node", "0")]
        {
            sysfs.write(format!("{port}/{file}"), text);
        }
        sysfs.link("bus/pci/devices/0000:18:00.1", &port);
        sysfs.write(format!("{port}/net/second/speed"), "400000");
        sysfs.link("class/net/second", &format!("{port}/net/second"));
    });
    assert!(two.contains("at most 504.1 Gb/s of its 800 Gb/s of 2 ports"), "{two}");

    let infiniband = of(&|sysfs| sysfs.write(format!("{card}/net/enp24s0np0/type"), "32"));
    assert!(
        infiniband.contains("infiniband enp24s0np0 (mlx5_0): its port is set to InfiniBand"),
        "{infiniband}"
    );
    assert!(infiniband.contains("mlxconfig -d 0000:18:00.0 set LINK_TYPE_P1=2"), "{infiniband}");
    assert!(infiniband.contains("far_nic GPU 0"), "{infiniband}");

    let lanes = of(&|sysfs| {
        let gpu = "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0/0000:19:00.0/0000:1a:00.0/0000:1b:00.0";
        sysfs.write(format!("{gpu}/current_link_width"), "8");
        // The speed of an idle GPU, which is not a problem.
        sysfs.write(format!("{gpu}/current_link_speed"), "2.5 GT/s PCIe");
    });
    assert!(
        lanes.contains("GPU 0: its PCIe link has 8 of 16 lanes. Cost: transfers to and from it have 50 %"),
        "{lanes}"
    );
    assert_eq!(lanes.lines().count(), 1, "{lanes}");
}

#[test]
fn a_process_on_another_node_is_reported() {
    let host = read(DGX_H100);
    let placement = Placement::new(&host);
    let check = |cpus: &str, rank| -> Vec<String> {
        let found = placement.check_process(&host, &cpus.parse().unwrap(), rank);
        found.iter().map(ToString::to_string).collect()
    };
    for (cpus, rank) in [("0-55", Some(0)), ("60,170", Some(7)), ("0-3", None)] {
        assert_eq!(check(cpus, rank), Vec::<String>::new(), "{cpus}");
    }
    let wrong = check("60-63", Some(0)).join("");
    assert!(
        wrong.contains("process of rank 0: it runs on NUMA node 1, and its GPU and NIC are on NUMA node 0"),
        "{wrong}"
    );
    assert!(wrong.contains("2.1 times the latency of node 1's own memory for that of node 0"), "{wrong}");
    assert!(
        wrong.contains("numactl --cpunodebind=0 --membind=0") && wrong.contains("taskset -c 0-55,112-167"),
        "{wrong}"
    );
    let loose = check("0-223", Some(0)).join("");
    assert!(
        loose.contains("it may run on NUMA node 1 too, and its GPU and NIC are on NUMA node 0"),
        "{loose}"
    );
    let any = check("0-223", None).join("");
    assert!(any.contains("it may run on each of NUMA nodes 0, 1"), "{any}");
    // Nodes without a GPU.
    let host = read(DGX_A100_FAULTY);
    let placement = Placement::new(&host);
    let found = placement.check_process(&host, &"0-15".parse().unwrap(), None);
    assert_eq!(found[0].kind, WarningKind::WrongNode);
    assert!(
        found[0]
            .what
            .contains("it runs on NUMA node 0, and all GPUs and NICs in use are on NUMA nodes 1, 3, 5, 7")
    );
}

/// Virtual functions belong to the card, and a much slower NIC is for management.
#[test]
fn nics_that_do_not_count() {
    let sysfs = Sysfs::of(DGX_H100);
    let card = "devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0/0000:18:00";
    let function = format!("{card}.2");
    for (file, text) in
        [("class", "0x020000"), ("vendor", "0x15b3"), ("device", "0x101e"), ("numa_node", "0")]
    {
        sysfs.write(format!("{function}/{file}"), text);
    }
    sysfs.link("bus/pci/devices/0000:18:00.2", &function);
    sysfs.link(format!("{function}/physfn"), &format!("{card}.0"));
    sysfs.write(format!("{function}/net/virtual0/speed"), "400000");
    sysfs.link("class/net/virtual0", &format!("{function}/net/virtual0"));
    let host = Topology::read(sysfs.root()).unwrap();
    let usable: Vec<&str> = nics::usable(&host).iter().map(|nic| host.nics[*nic].name()).collect();
    assert_eq!(usable.len(), 12, "{usable:?}");
    assert!(!usable.contains(&"virtual0") && !usable.contains(&"eno3"), "{usable:?}");
    assert_eq!(Placement::new(&host).ranks[0].distance, Pxb);
}
