//! `ferroce devinfo`, as a user runs it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use ends::{Ferroce, Namespaces, VETH, alone, refused};
use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::rnic_stub::Stub;

#[test]
fn loopback_says_what_it_is() {
    let info = Ferroce::start(None, "devinfo -d loopback --json").end().json();
    assert_eq!(info["device"]["driver"], "loopback");
    assert_eq!(info["device"]["gids"][0]["gid"], "::ffff:127.0.0.1");
    assert_eq!(info["device"]["pkeys"], serde_json::json!(["0xffff"]));
    let text = Ferroce::start(None, "devinfo -d loopback").end();
    assert!(text.stdout.contains("GID  0  ::ffff:127.0.0.1"), "{text:#?}");
    assert!(text.stdout.contains("P_Key 0  0xffff"), "{text:#?}");
}

/// RNICs are listed besides interfaces, from the libibverbs that the loader finds: here one that the test builds.
#[test]
fn rnics_are_listed_beside_interfaces() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    let run = |arguments: &[&str]| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroce"));
        let output = command.args(arguments).env("LD_LIBRARY_PATH", stub.folder()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let info: serde_json::Value = serde_json::from_str(&run(&["devinfo", "--json"])).unwrap();
    let rnics = &info["rnics"];
    assert!(rnics["unavailable"].is_null(), "{rnics}");
    assert_eq!(
        (&rnics["devices"][0]["name"], &rnics["devices"][1]["name"]),
        (&"stub0".into(), &"stub1".into())
    );
    let port = &rnics["devices"][0]["ports"][0];
    assert_eq!((&port["active"], &port["path_mtu"]), (&true.into(), &4096.into()));
    let gid =
        serde_json::json!({ "index": 1, "gid": "::ffff:10.0.0.2", "type": "RoCE v2", "interface": "lo" });
    assert_eq!(port["gids"][1], gid);
    let text = run(&["devinfo"]);
    assert!(text.contains("stub0 (RNIC), firmware 16.35.2000"), "{text}");
    // Nothing is claimed about an unknown RNIC.
    let stub0 = &rnics["devices"][0];
    assert_eq!((&stub0["rxe"], &stub0["keys"]), (&false.into(), &"unknown".into()));
    assert!(stub0["absent_events"].is_null() && stub0.get("absent_events").is_some(), "{stub0}");
    assert!(port["congestion"].is_null() && port.get("congestion").is_some(), "{port}");
    for line in [
        "  keys: unknown whether they can be guessed\n",
        "  events that it does not raise: unknown\n",
        "  congestion control of the card: not reported\n",
    ] {
        assert!(text.contains(line), "'{line}' is not in {text}");
    }
    assert!(text.contains("  GID  1  ::ffff:10.0.0.2"), "{text}");

    // A driver's name selects that driver, and never an RNIC on the same interface; the stub's RNICs are on lo.
    let text = run(&["devinfo", "-d", "udp:lo"]);
    assert!(text.contains("-d udp:lo selects udp: the name says so\n"), "{text}");
    assert!(text.contains("  an RNIC is on this interface too, and is faster: -d ibverbs:stub0\n"), "{text}");
    let card: serde_json::Value =
        serde_json::from_str(&run(&["devinfo", "-d", "ibverbs:stub1", "--json"])).unwrap();
    assert_eq!(card["choice"]["driver"], "ibverbs");
    assert_eq!(card["rnics"]["devices"].as_array().unwrap().len(), 1);
    assert_eq!(card["rnics"]["devices"][0]["name"], "stub1");

    // An RNIC's name alone is not that of an interface.
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_ferroce"));
    command.args(["devinfo", "-d", "stub0"]).env("LD_LIBRARY_PATH", stub.folder());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("'stub0' is an RNIC, not an interface: -d ibverbs:stub0"), "{text}");
}

#[test]
fn an_interface_with_its_gids_and_what_it_lacks() {
    let _alone = alone();
    let Some(pair) = ends::pair(4170) else { return };
    let info = Ferroce::start(Some(&pair.a), "devinfo --json").end().json();
    let interface = &info["interfaces"][0];
    assert_eq!((&interface["name"], &interface["mtu"]), (&VETH.into(), &4170.into()));
    assert_eq!(interface["line_rate"], 10_000_000_000_u64);
    // For veth, the kernel answers that it supports none of these.
    for unknown in ["pause", "pfc", "dscp"] {
        assert!(interface[unknown].is_null() && interface.get(unknown).is_some(), "{unknown} in {interface}");
    }
    assert_eq!(interface["path_mtu_ipv4"], 4096);
    assert_eq!(interface["path_mtu_ipv6"], 2048);
    let gids: Vec<_> =
        interface["gids"].as_array().unwrap().iter().map(|row| row["gid"].as_str().unwrap()).collect();
    assert!(gids[0].starts_with("fe80::"), "{gids:?}");
    assert_eq!(gids[1..], ["::ffff:10.9.0.1", "fd09::1"]);
    assert!(info["device"].is_null());

    let opened = Ferroce::start(Some(&pair.a), &format!("devinfo -d {VETH} --json")).end().json();
    assert_eq!(opened["device"]["driver"], "af_xdp");
    assert_eq!(opened["device"]["mtu"], 4170);
    assert_eq!(opened["choice"]["driver"], "af_xdp");
    assert_eq!(opened["choice"]["reason"], "the lowest latency in this build");
    assert_eq!(opened["choice"]["rnics"], serde_json::json!([]));

    // Packets of path MTU 1024 would fit, and there is no IPv6.
    let least = Namespaces::new(1400).unwrap();
    let shrink = ["-n", &least.a, "link", "set", VETH, "mtu", "1108"];
    assert!(std::process::Command::new("ip").args(shrink).status().unwrap().success());
    let info = Ferroce::start(Some(&least.a), "devinfo --json").end().json();
    assert_eq!(info["interfaces"][0]["path_mtu_ipv4"], 1024);
    assert!(info["interfaces"][0]["path_mtu_ipv6"].is_null(), "{info}");

    let small = Namespaces::new(1400).unwrap();
    let text = Ferroce::start(Some(&small.a), "devinfo").end();
    assert!(
        text.stdout.contains("path MTU 4096 needs an MTU of 4160 over IPv4 and 4180 over IPv6"),
        "{text:#?}"
    );
    let line = "  pause frames, PFC and classes of DSCPs unknown (the kernel's driver does not report it)\n";
    assert!(text.stdout.contains(line), "{text:#?}");
}

/// For an ordinary user, and in a user namespace (`unshare -U`): the usable driver is shown all the same.
#[test]
fn missing_rights_are_listed() {
    if !ends::is_root() {
        return println!("skipped: only root can become another user");
    }
    let run = |wrapper: &str| {
        let command = format!("cd / && exec {wrapper} '{}' devinfo", env!("CARGO_BIN_EXE_ferroce"));
        let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set -all";
    let text = run(nobody);
    assert!(text.contains("AF_XDP lacks CAP_NET_RAW, CAP_NET_ADMIN, CAP_BPF: run as root"), "{text}");
    assert!(
        text.contains("`-d INTERFACE` uses udp, which has a higher latency and needs no privilege\n"),
        "{text}"
    );
    // A report that can't be written is rejected before any work.
    let command = format!("cd / && exec {nobody} '{}' devinfo --json=/x.json", env!("CARGO_BIN_EXE_ferroce"));
    let output = std::process::Command::new("sh").args(["-c", &command]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("'/': Permission denied"), "{output:?}");
    if !ends::has_user_namespaces() {
        return;
    }
    let text = run("unshare --map-root-user --net");
    assert!(text.contains("AF_XDP lacks capabilities outside this user namespace"), "{text}");
    assert!(!text.contains("setcap"), "{text}");
    assert!(text.contains("no network interface except lo; `-d loopback`"), "{text}");
}

#[test]
fn bad_input_is_named() {
    refused(&[
        ("devinfo -d no-such-if0", &["'no-such-if0'", "lo"]),
        ("devinfo -d loopback:1", &["'loopback:1'"]),
    ]);
}

/// PoCL is a GPU for OpenCL, without a bus; NVIDIA's library is missing, or lists its own GPUs.
#[test]
fn gpus_are_listed_with_what_they_lack() {
    let Some(gpu) = gpu::first() else { return };
    let text = Ferroce::start(None, "devinfo").end().stdout;
    let name = gpu.name();
    let line = text.lines().find(|line| line.starts_with(&format!("GPU {name}: ")));
    let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
    assert!(line.contains(" GiB, ") && line.contains("PCI "), "{line}");
    if name.starts_with("opencl") {
        assert!(
            text.contains("  no dma-buf, so no RNIC can access its memory: OpenCL exports none\n"),
            "{text}"
        );
    }
    assert!(text.contains("cuda: libcuda.so.1: ") || text.contains("GPU cuda:0: "), "{text}");

    let report = Ferroce::start(None, "devinfo --json").end().json();
    let found = report["gpus"]["devices"].as_array().unwrap().iter().find(|found| found["name"] == name);
    let found = found.unwrap_or_else(|| panic!("no {name} in {report}"));
    if name.starts_with("opencl") {
        assert_eq!(found["no_dma_buf"], "OpenCL exports none", "{report}");
    }
    assert!(found["memory"].as_u64().unwrap() > 1 << 20 && found["distances"].is_array(), "{found}");
}
