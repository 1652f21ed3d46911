//! Ranks with two ports, as a user runs them, between two network namespaces.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use ferroce_driver_test_support::namespaces::{Namespaces, ip};
use serde_json::Value;

const FERROCE: &str = env!("CARGO_BIN_EXE_ferroce");

/// A veth for each of two rails: 10.9.0.0/24, and 10.9.1.0/24.
fn two_rails() -> Option<Namespaces> {
    let pair = Namespaces::new(9000)?;
    ip(&format!("-n {} link add veth1 mtu 9000 type veth peer name veth1 netns {} mtu 9000", pair.a, pair.b));
    for (namespace, last) in [(&pair.a, 1), (&pair.b, 2)] {
        ip(&format!("-n {namespace} addr add 10.9.1.{last}/24 dev veth1"));
        ip(&format!("-n {namespace} link set veth1 up"));
    }
    Some(pair)
}

/// Both ranks of an operation.
fn start(pair: &Namespaces, port: u16, args: &[&str]) -> [Child; 2] {
    [(&pair.a, "0", "1"), (&pair.b, "1", "2")].map(|(namespace, rank, last)| {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace, FERROCE, "collective"]).args(args);
        command.args([
            "--device",
            &format!("udp:10.9.0.{last}+udp:10.9.1.{last}"),
            "--shared-memory",
            "off",
            "--json",
        ]);
        command.env("FERROCE_RANK", rank).env("FERROCE_SIZE", "2").env("RUST_LOG", "info");
        command.env("FERROCE_MASTER_ADDR", "10.9.0.1").env("FERROCE_MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    })
}

/// The report of rank 0, and the log of both ranks.
fn end(ranks: [Child; 2]) -> (Value, String) {
    let [first, second] = ranks.map(|rank| thread::spawn(|| rank.wait_with_output().unwrap()));
    let (first, second) = (first.join().unwrap(), second.join().unwrap());
    let said =
        [&first.stderr, &second.stderr].map(|said| String::from_utf8_lossy(said).into_owned()).concat();
    assert!(first.status.success() && second.status.success(), "{said}");
    (serde_json::from_slice(&first.stdout).unwrap(), said)
}

#[test]
fn every_operation_is_right_by_two_rails() {
    let Some(pair) = two_rails() else { return };
    for (operation, port) in
        ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_receive"]
            .into_iter()
            .zip(29_601..)
    {
        let (report, said) =
            end(start(&pair, port, &[operation, "-b", "64", "-e", "4M", "-f", "16", "-n", "2"]));
        assert_eq!(report["wrong"], 0, "{report}");
        assert!(said.contains("rails=2"), "{said}");
    }
}

/// Operations continue while a link is down, and use it again when it is back.
#[test]
fn a_link_goes_down_and_comes_back() {
    let Some(pair) = two_rails() else { return };
    // A call takes at least 35 ms, so there are some before, during and after the outage.
    for namespace in [&pair.a, &pair.b] {
        for rail in [0, 1] {
            let shaped =
                format!("-n {namespace} qdisc add dev veth{rail} root tbf rate 1gbit burst 512k limit 16m");
            let tc = Command::new("tc").args(shaped.split_whitespace()).status();
            assert!(tc.unwrap().success(), "tc {shaped}");
        }
    }
    for (rail, port) in [0, 1].into_iter().zip(29_621..) {
        let ranks = start(
            &pair,
            port,
            &["all_reduce", "-b", "8M", "-e", "8M", "-n", "250", "-w", "0", "--out-of-place"],
        );
        thread::sleep(Duration::from_millis(1500));
        ip(&format!("-n {} link set veth{rail} down", pair.b));
        thread::sleep(Duration::from_millis(2500));
        ip(&format!("-n {} link set veth{rail} up", pair.b));
        let (report, said) = end(ranks);
        println!("rail {rail}: {}", report["results"][0]["out_of_place"]);
        assert_eq!(report["wrong"], 0, "{report}");
        for due in ["is no longer used", "is used again"] {
            assert!(said.contains(&format!("rail {rail} (veth{rail}) {due}")), "{said}");
        }
    }
}
