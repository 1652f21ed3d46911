//! `ferroce perf`, as a user runs it.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::time::{Duration, Instant};

use ends::{
    Ferroce, Namespaces, Outcome, SERVER, VETH, alone, both, refused, sent_packets, wait_for_traffic,
};
use ferroce_driver_test_support::gpu;
use serde_json::Value;

const OPERATIONS: [&str; 4] = ["write", "read", "send", "atomic"];

#[test]
fn every_operation_over_loopback() {
    let _alone = alone();
    for operation in OPERATIONS {
        let report = loopback(&format!("{operation} bw -n 300 -q 2 --check"));
        let result = &report["results"][0];
        assert_eq!(result["messages"], 300, "{report}");
        // For atomics, 300 original values and the two counters.
        let verified = if operation == "atomic" { 302 * 8 } else { 300 * 65536 };
        assert_eq!(result["verified_bytes"], verified, "{operation}: {report}");

        let report = loopback(&format!("{operation} lat -n 200 --check"));
        let latency = &report["results"][0]["latency"];
        let at = |name: &str| latency[name].as_f64().unwrap();
        assert!(0.0 < at("min") && at("min") <= at("p50") && at("p50") <= at("p99"), "{report}");
        assert!(at("p99") <= at("p99.9") && at("p99.9") <= at("p99.99"), "{report}");
    }
}

#[test]
fn options_reach_the_other_end() {
    let _alone = alone();
    let report = loopback("write bw -m 512 -s 1000 -t 3 --bytes 100000 --check");
    assert_eq!(report["path_mtu"], 512);
    assert_eq!(
        (&report["results"][0]["messages"], &report["results"][0]["bytes"]),
        (&100.into(), &100_000.into())
    );
    let report = loopback("send bw --all -n 4 --check");
    let sizes: Vec<_> =
        report["results"].as_array().unwrap().iter().map(|r| r["size"].as_u64().unwrap()).collect();
    assert_eq!(sizes, (1..=23).map(|power| 1 << power).collect::<Vec<u64>>());
    let report = loopback("read bw -s 4K -D 0.3 --check");
    assert!(report["results"][0]["messages"].as_u64().unwrap() > 0, "{report}");
    let report = loopback("atomic bw -A CMP_AND_SWAP -n 1000 -o 1 --check");
    assert_eq!(report["results"][0]["verified_bytes"], 1001 * 8, "{report}");
    let text = Ferroce::start(None, "perf send lat -d loopback -n 50").end();
    for column in ["p50", "p99", "p99.9", "p99.99", "path MTU 4096", "0 packets retransmitted"] {
        assert!(text.stdout.contains(column), "no '{column}' in {}", text.stdout);
    }
}

#[test]
fn every_operation_by_selective_repeat() {
    let _alone = alone();
    assert_eq!(loopback("write bw -n 10")["selective_repeat"], false);
    for operation in OPERATIONS {
        let report = loopback(&format!("{operation} bw -n 300 -q 2 --check --selective-repeat"));
        assert_eq!(
            (&report["selective_repeat"], &report["results"][0]["messages"]),
            (&true.into(), &300.into())
        );
    }
}

#[test]
fn both_ways_and_over_each_service() {
    let _alone = alone();
    for (test, messages) in [
        ("write bw -b -n 300 -q 2 --check", 600),
        ("read bw -b -n 300 --check", 600),
        ("send bw --bidirectional -n 300 --check", 600),
        // 3200 packets: the sender is not slowed down, and a port's queue holds 4096 while the other thread has to
        // wait.
        ("write bw -c UC -n 200", 200),
        ("send bw --service uc -n 300 -s 3000", 300),
        ("send bw --service ud -n 300", 300),
        ("send bw -c UD -b -n 300 -q 2", 600),
        ("send lat -c UD -n 100", 100),
        ("send lat -c UC -n 100 -s 5000", 100),
        ("write lat -c UC -n 100", 100),
    ] {
        let report = loopback(test);
        let result = &report["results"][0];
        assert_eq!(result["messages"], messages, "{test}: {report}");
        // Of a WRITE of several packets over UC, only the first one is counted.
        let (exact, least) = match test {
            "write bw -c UC -n 200" => (Value::Null, 0.into()),
            _ if report["service"] == "rc" => (Value::Null, Value::Null),
            _ => (0.into(), Value::Null),
        };
        assert_eq!(
            (&result["lost_messages"], &result["lost_messages_at_least"]),
            (&exact, &least),
            "{test}: {report}"
        );
        assert_eq!(result["counted"], if least == Value::Null { "arrived" } else { "begun" });
        if test.contains("--check") {
            assert_eq!(result["verified_bytes"], messages * 65536, "{test}: {report}");
        }
        assert_eq!(report["bidirectional"], test.contains("-b"), "{report}");
    }
    // Both ends send until the time is up.
    let report = loopback("write bw -b -D 0.3");
    assert!(report["results"][0]["messages"].as_u64().unwrap() > 0, "{report}");
}

#[test]
fn the_smallest_queues_do() {
    let _alone = alone();
    for test in ["write lat", "send lat", "send bw", "read bw", "atomic bw"] {
        loopback(&format!("{test} -t 1 -r 1 -o 1 -n 200 --check"));
    }
}

#[test]
fn a_recorded_run_dissects_without_fault() {
    let _alone = alone();
    let file = std::env::temp_dir().join(format!("ferroce-perf-{}.pcapng", std::process::id()));
    let path = file.to_str().unwrap();
    loopback(&format!("write bw -s 10000 -n 20 --core 0 --spin --pcap {path}"));
    let dissected = Ferroce::start(None, &format!("dissect --json {path}")).end();
    std::fs::remove_file(&file).unwrap();
    assert_eq!(dissected.code, Some(0), "{dissected:#?}");
    let last: Value = serde_json::from_str(dissected.stdout.lines().last().unwrap()).unwrap();
    // Three packets per message, and the acknowledgements.
    assert!(last["summary"]["roce_packets"].as_u64().unwrap() > 60, "{last}");
    assert_eq!(last["summary"]["roce_packets"], last["summary"]["icrc_ok"], "{last}");
}

/// The address may be another host's, which would be flooded.
#[test]
fn messages_to_another_address_than_the_clients_are_refused() {
    let _alone = alone();
    let Some(pair) = ends::pair(1500) else { return };
    // TCP uses IPv4, the GID is an IPv6 one.
    let run = |test: &str, ours: &str, theirs: &str| {
        let server = Ferroce::server(&pair.a, &format!("perf {test} -d {VETH} {ours}"));
        let client =
            Ferroce::start(Some(&pair.b), &format!("perf {test} -d {VETH} -x 0 {theirs} {SERVER}")).end();
        if client.code != Some(0) {
            server.interrupt();
        }
        (server.end(), client)
    };
    for test in [
        "send bw -b -c UD -n 100",
        "write bw -b -c UC -n 100",
        "send lat -c UC -n 100",
        // Anyone who knows queue pair and PSN can send an ACK, and the client knows both.
        "write bw -b -n 100",
        "send bw -b -n 100",
        "write lat -s 1000 -n 100",
        "read bw -n 100",
    ] {
        for theirs in ["", "--perftest"] {
            let (server, client) = run(test, "", theirs);
            assert_eq!(server.code, Some(2), "{test} {theirs}: {server:#?} {client:#?}");
            for word in ["10.9.0.2", "::", "--any-gid"] {
                assert!(server.stderr.contains(word), "no '{word}' in {server:#?}");
            }
            let (server, client) = run(test, "--any-gid", theirs);
            assert_eq!((server.code, client.code), (Some(0), Some(0)), "{test}: {server:#?} {client:#?}");
        }
    }
    // The server's answers are no longer than the requests.
    for test in
        ["write bw -n 100", "send bw -n 100", "atomic bw -n 100", "send lat -n 100", "write lat -n 100"]
    {
        let (server, client) = run(test, "", "");
        assert_eq!((server.code, client.code), (Some(0), Some(0)), "{test}: {server:#?} {client:#?}");
    }
}

#[test]
fn every_operation_over_af_xdp() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(4200) else { return };
    for mtu in [1024, 4096] {
        for operation in OPERATIONS {
            for mode in ["bw -n 500", "lat -n 300"] {
                let command = format!("perf {operation} {mode} -m {mtu} -u 17 --check --json");
                let [server, client] = both(&pair, &command);
                for (report, role) in [(server.json(), "server"), (client.json(), "client")] {
                    assert_eq!(report["driver"], "af_xdp", "{command}");
                    assert_eq!(report["path_mtu"], mtu, "{command}");
                    assert_eq!(report["role"], role, "{command}");
                }
                assert!(client.json()["results"][0]["verified_bytes"].as_u64().unwrap() > 0, "{command}");
            }
        }
    }
}

/// Between devices, and between a device and the host; every byte is compared.
#[test]
fn every_operation_between_devices() {
    let _alone = alone();
    let Some(gpu) = gpu::first() else { return };
    let memory = gpu.name();
    let pair = Namespaces::new(4200);
    for operation in ["write", "read", "send"] {
        for mode in ["bw -n 300 -q 2", "lat -n 50"] {
            let report = loopback(&format!("{operation} {mode} --check --memory {memory}"));
            assert_eq!(report["memory"], memory, "{report}");
            assert!(report["results"][0]["verified_bytes"].as_u64().unwrap() > 0, "{report}");
            assert!(report["counters"]["device_bytes"].as_u64().unwrap() > 0, "{report}");
            let Some(pair) = &pair else { continue };
            let command = format!("perf {operation} {mode} -u 17 --check --json");
            let [_, client] = both(pair, &format!("{command} --memory {memory}"));
            assert!(client.json()["results"][0]["verified_bytes"].as_u64().unwrap() > 0, "{command}");
            let server = Ferroce::server(&pair.a, &format!("{command} -d {VETH}"));
            let client =
                Ferroce::start(Some(&pair.b), &format!("{command} -d {VETH} --memory {memory} {SERVER}"));
            let (client, server) = (client.end(), server.end());
            assert_eq!((client.code, server.code), (Some(0), Some(0)), "{command}: {client:#?} {server:#?}");
        }
    }
    // Datagrams, without an answer.
    let report = loopback(&format!("send bw -c UD -n 300 --memory {memory}"));
    assert!(report["results"][0]["messages"].as_u64().unwrap() > 0, "{report}");
    let text = Ferroce::start(None, &format!("perf send lat -d loopback -n 50 --memory {memory}")).end();
    assert!(text.stdout.contains(&format!("memory: {memory}")), "{text:#?}");
}

/// Before a server waits for a client, and before a client keeps a server waiting.
#[test]
fn a_gpu_that_is_not_there_is_refused_at_once() {
    for peer in ["", "127.0.0.1"] {
        let refused =
            Ferroce::start(None, &format!("perf write bw -d udp:127.0.0.1 --memory cuda:99 {peer}")).end();
        assert_eq!(refused.code, Some(2), "{refused:#?}");
        assert!(refused.stderr.contains("--memory cuda:99: "), "{refused:#?}");
    }
}

#[test]
fn a_peer_that_is_killed_ends_the_work_of_devices_in_error() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(4200) else { return };
    let Some(gpu) = gpu::first() else { return };
    let memory = gpu.name();
    for test in ["write bw", "read bw", "send bw"] {
        for server_dies in [true, false] {
            let survivor = kill_one(&pair, &format!("{test} --memory {memory}"), server_dies);
            assert_eq!(survivor.code, Some(1), "{test}: {survivor:#?}");
            assert!(survivor.took < Duration::from_secs(6), "{test}: {survivor:#?}");
            let last = survivor.stderr.lines().last().unwrap();
            assert!(last.starts_with("ferroce perf: the other end has ended"), "{test}: {survivor:#?}");
        }
    }
}

#[test]
fn a_gibibyte_by_write_and_by_read() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(4200) else { return };
    for mtu in [1024, 4096] {
        for operation in ["write", "read"] {
            let command = format!("perf {operation} bw --bytes 1GiB -m {mtu} -u 17 --check --json");
            let [_, client] = both(&pair, &command);
            let result = &client.json()["results"][0];
            assert_eq!(result["verified_bytes"], 1_u64 << 30, "{command}");
            println!("{operation}, path MTU {mtu}: {} Gb/s", result["gigabits_per_second"]);
        }
    }
}

#[test]
fn a_peer_that_is_killed_ends_the_work_in_error() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    for test in ["write bw", "read bw", "send bw", "atomic bw", "write lat", "send lat"] {
        for server_dies in [true, false] {
            let survivor = kill_one(&pair, test, server_dies);
            assert_eq!(survivor.code, Some(1), "{test}: {survivor:#?}");
            // The retry budget with the default timeout is 2.6 s.
            assert!(survivor.took < Duration::from_secs(6), "{test}: {survivor:#?}");
            // The client's outstanding work exhausts its retries; queued work is flushed.
            let statuses: &[&str] =
                if server_dies { &["RetryExcErr", "WrFlushErr"] } else { &["WrFlushErr", "RetryExcErr"] };
            assert!(statuses.iter().any(|status| survivor.stderr.contains(status)), "{test}: {survivor:#?}");
            if server_dies && test.ends_with("bw") {
                assert!(survivor.stderr.contains("RetryExcErr"), "{test}: {survivor:#?}");
            }
            // The cause precedes its consequences.
            let last = survivor.stderr.lines().last().unwrap();
            assert!(last.starts_with("ferroce perf: the other end has ended"), "{test}: {survivor:#?}");
            assert!(!survivor.stderr.contains("0.0 s to complete"), "{test}: {survivor:#?}");
        }
        // Both ends can start again at once.
        let [server, client] = both(&pair, &format!("perf {test} -n 20 --check --json"));
        assert_eq!(server.code, Some(0), "{server:#?}");
        client.json();
    }
}

#[test]
fn an_interrupted_client_ends_cleanly_and_so_does_its_server() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    let command = format!("perf write bw -D 60 -d {VETH}");
    for both_ways in ["", " -b"] {
        let server = Ferroce::server(&pair.a, &format!("{command}{both_ways}"));
        let before = sent_packets(&pair.b);
        let client = Ferroce::start(Some(&pair.b), &format!("{command}{both_ways} {SERVER}"));
        wait_for_traffic(&pair.b, before);
        client.interrupt();
        let (client, server) = (client.end(), server.end());
        assert_eq!((client.code, server.code), (Some(130), Some(1)), "{client:#?} {server:#?}");
        assert!(client.stderr.contains("interrupted"), "{client:#?}");
        assert!(server.stderr.contains("the other end failed: interrupted"), "{server:#?}");
        assert!(!server.stderr.contains("doctor"), "{server:#?}");
    }

    let waiting = Ferroce::server(&pair.a, &command);
    waiting.interrupt();
    assert_eq!(waiting.end().code, Some(0));
}

/// Connecting waits 5 s for a host that does not answer.
#[test]
fn a_signal_ends_a_client_that_still_connects() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    let nobody = ["-n", &pair.b, "neigh", "add", "10.9.0.77", "lladdr", "02:00:00:00:00:77", "dev", VETH];
    assert!(std::process::Command::new("ip").args(nobody).status().unwrap().success());
    let client = Ferroce::start(Some(&pair.b), &format!("perf write bw -d {VETH} 10.9.0.77"));
    let is_connecting = || {
        let table = pair.in_b(|| std::fs::read_to_string("/proc/thread-self/net/tcp")).unwrap();
        // SYN_SENT
        table.lines().any(|line| line.split_whitespace().nth(3) == Some("02"))
    };
    let start = Instant::now();
    while !is_connecting() {
        assert!(start.elapsed() < Duration::from_secs(20), "it does not connect");
        std::thread::sleep(Duration::from_millis(5));
    }
    let start = Instant::now();
    client.interrupt();
    let client = client.end();
    assert_eq!(client.code, Some(130), "{client:#?}");
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
}

#[test]
fn an_interface_that_goes_down_is_named() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    let command = format!("perf write bw -D 60 -d {VETH}");
    let _server = Ferroce::server(&pair.a, &command);
    let client = Ferroce::start(Some(&pair.b), &format!("{command} {SERVER}"));
    wait_for_traffic(&pair.b, 0);
    let down = ["-n", &pair.b, "link", "set", VETH, "down"];
    assert!(std::process::Command::new("ip").args(down).status().unwrap().success());
    let client = client.end();
    assert_eq!(client.code, Some(1), "{client:#?}");
    assert!(client.stderr.contains(&format!("'{VETH}' here is down")), "{client:#?}");
}

#[test]
fn ends_that_do_not_fit_say_so() {
    let _alone = alone();
    let Some(pair) = Namespaces::new(1500) else { return };
    let server = Ferroce::server(&pair.a, &format!("perf read bw -d {VETH}"));
    let client = Ferroce::start(Some(&pair.b), &format!("perf write bw -d {VETH} {SERVER}")).end();
    for end in [client, server.end()] {
        assert!(end.code != Some(0) && end.stderr.contains("perf read bw"), "{end:#?}");
        assert!(end.stderr.contains("perf write bw"), "{end:#?}");
    }
    let [server, client] = both(&pair, "perf write bw -m 4096");
    for end in [server, client] {
        assert!(
            end.code != Some(0) && end.stderr.contains("4096") && end.stderr.contains("1024"),
            "{end:#?}"
        );
    }
}

#[test]
fn bad_input_is_named() {
    refused(&[
        ("perf", &["<OPERATION>"]),
        ("perf erase bw -d loopback", &["'erase'", "write, read, send, atomic"]),
        ("perf write bw -d loopback -s 64Q", &["'64Q'", "64K", "1MiB"]),
        ("perf write bw -d loopback -s 2GiB", &["2147483648", "1073741824"]),
        ("perf write bw -d loopback -t 0", &["0", "16384"]),
        ("perf write bw -d loopback -q 65", &["-q", "65", "64"]),
        ("perf write lat -d loopback -q 2", &["-q", "2", "write lat"]),
        ("perf atomic bw -d loopback -s 16", &["-s", "16", "8 bytes"]),
        ("perf read bw -d loopback -c UC", &["-c UC", "read bw", "RC"]),
        ("perf write bw -d loopback -c UD", &["-c UD", "write bw", "RC"]),
        ("perf write bw -d loopback -R", &["-R, -z", "rdma_cm"]),
        ("perf write bw -d loopback -z", &["-R, -z", "rdma_cm"]),
        ("perf write bw -d loopback -c XRC", &["'XRC'", "rc, uc, ud"]),
        ("perf send bw -d loopback -c UD -s 5000", &["-s", "5000", "4096"]),
        ("perf send bw -d loopback -c UD --all", &["--all", "-s"]),
        ("perf send bw -d loopback -c UC --check", &["--check", "UC"]),
        ("perf send lat -d loopback -b", &["-b", "send lat"]),
        ("perf atomic bw -d loopback -b", &["-b", "atomic bw"]),
        ("perf write bw -d loopback -D 0", &["'0'", "seconds"]),
        ("perf write bw -d loopback --memory gpu", &["'gpu'", "host", "opencl:N", "cuda:N"]),
        ("perf write bw -d loopback --memory opencl:99 -n 1", &["--memory opencl:99: "]),
        ("perf write bw -d loopback --memory cuda:99 -n 1", &["--memory cuda:99: "]),
        ("perf atomic bw -d loopback --memory opencl", &["--memory opencl:0", "atomics", "host"]),
        ("perf write bw -d loopback -x 7", &["GID index 7", "::ffff:127.0.0."]),
        ("perf write bw -d loopback --core 4096 -n 1", &["--core", "4096", "0"]),
        ("perf write bw -d loopback --pcap /no/such/folder/file -n 1", &["/no/such/folder/file"]),
    ]);
}

fn loopback(arguments: &str) -> Value {
    Ferroce::start(None, &format!("perf {arguments} -d loopback -u 17 --json")).end().json()
}

/// Kills one end of a long run; returns how the other one ended.
fn kill_one(pair: &Namespaces, test: &str, server_dies: bool) -> Outcome {
    let command = format!("perf {test} -D 60 -d {VETH}");
    let before = sent_packets(&pair.b);
    let mut server = Ferroce::server(&pair.a, &command);
    let mut client = Ferroce::start(Some(&pair.b), &format!("{command} {SERVER}"));
    wait_for_traffic(&pair.b, before);
    if server_dies {
        server.kill();
        client.end()
    } else {
        client.kill();
        server.end()
    }
}

#[test]
fn two_devices_in_turn() {
    let _alone = alone();
    let Some(pair) = ends::pair(9000) else { return };
    let test = "perf write bw -n 200 -s 4096";
    let server = Ferroce::server(&pair.a, &format!("{test} -d {VETH} --compare=udp:{VETH}"));
    let client = format!("{test} -d {VETH} --compare=udp:{VETH} --json {SERVER}");
    let report = Ferroce::start(Some(&pair.b), &client).end().json();
    let server = server.end();
    assert!(
        server.stdout.contains(&format!("served 3 runs over {VETH} and 3 over udp:{VETH}")),
        "{server:#?}"
    );
    assert_eq!(report["devices"], serde_json::json!([VETH, format!("udp:{VETH}")]));
    assert_eq!((&report["rounds"], &report["unit"]), (&3.into(), &"Gb/s".into()));
    for (runs, driver) in report["runs"].as_array().unwrap().iter().zip(["af_xdp", "udp"]) {
        let runs = runs.as_array().unwrap();
        assert_eq!(runs.len(), 3, "{report}");
        assert!(runs.iter().all(|run| run["driver"] == driver), "{report}");
    }
    let row = &report["sizes"][0];
    let value = |device: usize, name: &str| row["values"][device][name].as_f64().unwrap();
    assert_eq!(row["size"], 4096);
    for device in 0..2 {
        assert!(0.0 < value(device, "min") && value(device, "median") <= value(device, "max"), "{row}");
    }
    let ratio = value(1, "median") / value(0, "median");
    assert!((row["ratio"].as_f64().unwrap() - ratio).abs() < 1e-9, "{row}");

    // A server without -P is missing at the second run.
    let server = Ferroce::server(&pair.a, &format!("{test} -d {VETH}"));
    let client = format!("{test} -d {VETH} --compare=udp:{VETH} {SERVER}");
    let outcome = Ferroce::start(Some(&pair.b), &client).end();
    assert_eq!(outcome.code, Some(1), "{outcome:#?}");
    assert!(outcome.stderr.contains(&format!("run 2 of 6, over udp:{VETH}: ")), "{outcome:#?}");
    assert_eq!(server.end().code, Some(0));

    // A missing device is reported before the measurement.
    for (devices, reason) in [
        (format!("-d {VETH} --compare"), "RNIC"),
        (format!("-d {VETH} --compare=ibverbs:no_such0"), "'ibverbs:no_such0' can't be opened: "),
        ("-d udp:192.0.2.9 --compare".to_owned(), "no interface of 'udp:192.0.2.9'"),
    ] {
        let outcome = Ferroce::start(Some(&pair.b), &format!("{test} {devices} {SERVER}")).end();
        assert!(matches!(outcome.code, Some(1 | 2)), "{outcome:#?}");
        assert!(outcome.stderr.contains(reason), "{outcome:#?}");
    }
    refused(&[
        ("perf write bw -d loopback --compare=udp:127.0.0.1", &["'loopback'"]),
        ("perf write bw -d udp:127.0.0.1 --compare=a/b", &["'a/b'"]),
        ("perf write bw -d udp:127.0.0.1 --compare --perftest h", &["--perftest"]),
        ("perf write bw -d udp:127.0.0.1 --compare -x 0 h", &["--gid-index"]),
    ]);
}
