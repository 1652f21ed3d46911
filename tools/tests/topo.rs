//! `ferroce topo`, as a user runs it: on this machine, and on trees of servers.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::Duration;

use ends::{Ferroce, Outcome};
use ferroce::is_unprintable;
use ferroce_driver_test_support::sysfs::{DGX_A100_FAULTY, DGX_H100, Sysfs, VIRTUAL_MACHINE};

fn topo(sysfs: &Path, arguments: &str) -> Outcome {
    let outcome = Ferroce::start(None, &format!("topo --sysfs {} {arguments}", sysfs.display())).end();
    assert_eq!(outcome.code, Some(0), "{arguments}: {outcome:#?}");
    outcome
}

fn check(text: &str, expected: &[&str]) {
    for line in expected {
        assert!(text.contains(line), "'{line}' is not in:\n{text}");
    }
}

#[test]
fn a_server_as_text() {
    let sysfs = Sysfs::of(DGX_H100);
    let text = topo(sysfs.root(), "").stdout;
    println!("{text}");
    check(
        &text,
        &[
            ": 2 sockets, 2 NUMA nodes, 224 CPUs, 2014.0 GiB; 8 GPUs, 13 network ports\n",
            "\nNUMA node 1, socket 1: CPUs 56-111,168-223; 1007.0 GiB; distances of the nodes 21 10\n",
            "\n  pci0000:15 0000:15:01.0 0000:16:00.0\n",
            "0000:18:00.0 NIC 1 enp24s0np0 (mlx5_0): up, 400 Gb/s, MTU 9000; PCIe 32 GT/s x16 (504.1 Gb/s)\n",
            "0000:1b:00.0 GPU 0: NVIDIA 10de:2330, driver nvidia; PCIe 32 GT/s x16 (504.1 Gb/s)\n",
            "\n  GPU 0  NODE  PXB NODE NODE NODE NODE NODE  SYS  SYS  SYS  SYS  SYS  SYS\n",
            "\n  PXB: by several PCI switches of one host bridge\n",
            "\n  rank 0: GPU 0 uses enp24s0np0 (mlx5_0) at PXB; no other is as near",
            "\n  rail 7: enp220s0np0 (mlx5_11), 400 Gb/s, rank 7\n",
            "\n  0 -NODE- 1 -NODE- 2 -NODE- 3 -SYS- 4 -NODE- 5 -NODE- 6 -NODE- 7 -SYS- 0\n",
            "\n  why: 2 of 8 hops cross sockets; no other order has fewer, and no order with as many is shorter\n",
            "\ntree 0\n  0 > 4; 4 > 2, 6; 2 > 1, 3; 6 > 5, 7\n",
            "\nplacement: no problem found\n",
        ],
    );
    // The console is neither a GPU nor a NIC.
    assert!(!text.contains("0000:03:00.0"), "{text}");
    let bound = topo(sysfs.root(), "--cpus 56-60 --local-rank 0").stdout;
    check(
        &bound,
        &[
            "process with --cpus, rank 0: CPUs 56-60, of NUMA nodes 1\n",
            "process of rank 0: it runs on NUMA node 1, and its GPU and NIC are on NUMA node 0\n",
            "`numactl --cpunodebind=0 --membind=0`, or `taskset -c 0-55,112-167`",
        ],
    );
}

#[test]
fn a_server_with_faults_as_json() {
    let sysfs = Sysfs::of(DGX_A100_FAULTY);
    println!("{}", topo(sysfs.root(), "").stdout);
    let report = topo(sysfs.root(), "--json").json();
    assert_eq!(report["sockets"], serde_json::json!([0, 1]));
    assert_eq!(report["nodes"].as_array().unwrap().len(), 8);
    assert_eq!(report["nodes"][5]["distances"], serde_json::json!([32, 32, 32, 32, 12, 10, 12, 12]));
    let gpu = &report["gpus"][0];
    assert_eq!(
        (&gpu["pci"], &gpu["numa_node"], &gpu["id"]),
        (&"0000:07:00.0".into(), &3.into(), &"10de:20b0".into())
    );
    assert!(gpu["library"].is_null() && gpu.get("library").is_some(), "{gpu}");
    let nics = report["nics"].as_array().unwrap();
    let slow = nics.iter().find(|nic| nic["rnics"][0] == "mlx5_3").unwrap();
    assert_eq!(
        (&slow["rate"], &slow["function"]["pci"]),
        (&100_000_000_000_u64.into(), &"0000:54:00.0".into())
    );
    let narrow = nics.iter().find(|nic| nic["rnics"][0] == "mlx5_6").unwrap();
    let lanes = |of: &str| narrow["function"]["link"][of]["lanes"].clone();
    assert_eq!((lanes("current"), lanes("max")), (8.into(), 16.into()));
    assert!(narrow["addresses"].is_null(), "{narrow}");
    assert_eq!(report["distances"].as_array().unwrap().len(), 8 * 8);
    assert_eq!(report["ring"]["crossings"], 2);
    assert_eq!(report["trees"][0]["parents"].as_array().unwrap().len(), 8);
    let kinds: Vec<&str> = report["warnings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|warning| warning["kind"].as_str().unwrap())
        .collect();
    let expected =
        ["far_nic", "far_nic", "nic_down", "shared_nic", "shared_nic", "slow_nic", "link_below_maximum"];
    assert_eq!(kinds, expected);
    for part in ["subject", "what", "cost", "remedy"] {
        assert!(report["warnings"][0][part].as_str().is_some_and(|text| !text.is_empty()), "{part}");
    }
    assert!(report["process"].is_null());
    // Only to a file.
    let file = sysfs.root().join("report.json");
    let outcome = topo(sysfs.root(), &format!("--json={}", file.display()));
    assert_eq!(outcome.stdout, "");
    let written: serde_json::Value = serde_json::from_str(&fs::read_to_string(file).unwrap()).unwrap();
    assert_eq!(written["warnings"], report["warnings"]);
}

#[test]
fn pictures() {
    for (server, parts) in [
        (DGX_H100, ["GPU 7", "enp220s0np0", "pci0000:d9"]),
        (
            DGX_A100_FAULTY,
            ["tree 1", "placement that costs performance: 7", "600 Gb/s for the host in place of 1100"],
        ),
        (VIRTUAL_MACHINE, ["eth0", "rate not reported", "NUMA node not reported"]),
    ] {
        let sysfs = Sysfs::of(server);
        let file = sysfs.root().join("host.svg");
        let outcome = topo(sysfs.root(), &format!("--svg {}", file.display()));
        assert!(outcome.stdout.starts_with("host "), "{outcome:#?}");
        let svg = fs::read_to_string(file).unwrap();
        assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>"), "{svg:.200}");
        check(&svg, &parts);
    }
}

#[test]
fn a_virtual_machine() {
    let sysfs = Sysfs::of(VIRTUAL_MACHINE);
    let text = topo(sysfs.root(), "").stdout;
    println!("{text}");
    check(
        &text,
        &[
            ": 1 socket, 1 NUMA node, 4 CPUs, 7.0 GiB; 0 GPUs, 1 network port\n",
            "devices without a reported NUMA node\n  pci0000:00\n    0000:00:03.0 NIC 0 eth0: up, rate not reported, \
             MTU 1500\n",
            "rank 0: eth0; no GPU is here, so each NIC is a rank\n",
            "placement: no problem found\n",
        ],
    );
}

/// The recorded tree gives the same report as this machine, except for addresses and information from libraries.
#[test]
fn this_machine_and_its_record() {
    let copy = Sysfs::empty();
    let folder = copy.root().join("record");
    let here = Ferroce::start(None, &format!("topo --json --pid self --record {}", folder.display())).end();
    assert!(here.stderr.contains("recorded into"), "{here:#?}");
    let here = here.json();
    let there = topo(&folder, "--json").json();
    assert_eq!(there["nodes"], here["nodes"]);
    assert_eq!(there["host"], "record");
    assert!(!here["process"]["cpus"].as_str().unwrap().is_empty(), "{here}");
    let names = |report: &serde_json::Value| -> Vec<String> {
        let nics = report["nics"].as_array().unwrap().iter().filter(|nic| nic["is_virtual"] == false);
        nics.map(|nic| nic["name"].to_string()).collect()
    };
    assert_eq!(names(&there), names(&here));
    let again = Ferroce::start(None, &format!("topo --record {}", folder.display())).end();
    assert_eq!(again.code, Some(2), "{again:#?}");
    assert!(again.stderr.contains("it is not empty"), "{again:#?}");
}

#[test]
fn what_can_not_be_shown_is_refused() {
    let sysfs = Sysfs::empty();
    let folder = sysfs.root().join("nothing");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("mtu"), "1500").unwrap();
    let (shown, recorded) = (folder.display(), folder.join("mtu").display().to_string());
    for (arguments, why) in [
        (format!("--sysfs {shown}"), format!("'{shown}': it holds no sysfs tree")),
        (format!("--sysfs {shown}/x"), format!("'{shown}/x': No such file")),
        ("--pid 4294967295".into(), "pid = 4294967295: a process that runs".into()),
        ("--pid me".into(), "must be a process id, or 'self'".into()),
        ("--cpus 3-1".into(), "3-1: numbers and ranges as 0-3,8".into()),
        ("--local-rank 0".into(), "--local-rank needs --pid or --cpus".into()),
        ("--cpus 0 --local-rank 999".into(), "--local-rank 999: this host has".into()),
        ("--cpus 0,8191".into(), "--cpus 0,8191: this host has no CPU 8191".into()),
        ("--cpus=".into(), "--cpus: must be a list, as 0-7,64-71".into()),
        (format!("--sysfs {shown} --svg {recorded}"), "must not be a file of the tree of --sysfs".into()),
        (format!("--sysfs {shown} --json={recorded}"), "must not be a file of the tree of --sysfs".into()),
        (format!("--pid self --sysfs {shown}"), "cannot be used with".into()),
        (format!("--svg {shown}"), "it is a directory; name a file in it".into()),
    ] {
        let refused = Ferroce::start(None, &format!("topo {arguments}")).end();
        assert_eq!(refused.code, Some(2), "{arguments}: {refused:#?}");
        assert!(refused.stderr.contains(&why), "{arguments}: '{why}' is not in {refused:#?}");
    }
}

/// A tree from an untrusted source. Nothing in it controls a terminal or breaks the picture.
#[test]
fn a_hostile_tree_does_no_harm() {
    let sysfs = Sysfs::of(DGX_H100);
    let root = sysfs.root();
    let names = ["\u{1b}[2J", "<script>&\"'", "\u{202e}gnp", "a\u{7}\nb"];
    let chain: String = (0..100).map(|nth| format!("0000:{nth:02x}:01.0/")).collect();
    for (nth, name) in names.iter().enumerate() {
        let function = format!("devices/pci0000:00/{chain}0000:fe:0{nth}.0");
        sysfs.write(format!("{function}/class"), "0x020000");
        sysfs.write(format!("{function}/numa_node"), "77");
        sysfs.write(format!("{function}/net/{name}/speed"), "400000");
        sysfs.write(format!("{function}/net/{name}/mtu"), "\u{1b}]0;x\u{7}");
        sysfs.link(format!("bus/pci/devices/0000:fe:0{nth}.0"), &function);
        sysfs.link(format!("class/net/{name}"), &format!("{function}/net/{name}"));
    }
    // Very many GPUs, links in a circle, files that never end.
    for nth in 0..600 {
        let address = format!("0001:{:02x}:{:02x}.0", nth / 32, nth % 32);
        let function = format!("devices/pci0001:00/{address}");
        sysfs.write(format!("{function}/class"), "0x030200");
        sysfs.link(format!("bus/pci/devices/{address}"), &function);
    }
    symlink("circle", root.join("class/net/circle")).unwrap();
    symlink("/dev/zero", root.join("class/net/zero")).unwrap();
    fs::write(root.join("devices/system/node/node0/meminfo"), vec![0xff; 1 << 20]).unwrap();
    let svg = root.join("host.svg");
    for arguments in ["".to_owned(), "--json".to_owned(), format!("--svg {}", svg.display())] {
        let outcome = topo(root, &arguments);
        let bad = |c: char| is_unprintable(c) && c != '\n';
        assert!(!outcome.stdout.contains(bad), "{arguments}");
        assert!(outcome.took < Duration::from_secs(60), "{:?}", outcome.took);
    }
    let text = topo(root, "").stdout;
    check(&text, &["note: class/net/circle: Too many levels", "more than 256 GPUs; the rest is left out"]);
    let svg = fs::read_to_string(svg).unwrap();
    assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;"), "names are escaped in the picture");
    assert!(!svg.contains(|c: char| is_unprintable(c) && c != '\n'), "the picture");
}
