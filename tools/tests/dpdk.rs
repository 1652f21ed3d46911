//! `ferroce perf` over DPDK ports. EAL can start once per process, so each end is a process.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::path::Path;
use std::thread;
use std::time::Duration;

use ends::{Ferroce, Namespaces, Outcome, SERVER, VETH, alone};
use ferroce_driver_test_support::dpdk;
use ferroce_driver_test_support::signal::Signal;

const EAL: &str = "--no-huge -m 384 --no-shconf --no-pci --no-telemetry --log-level=lib.eal:warning";

#[test]
fn every_operation_over_memif() {
    if !dpdk::is_there() {
        return;
    }
    let _alone = alone();
    for (number, operation) in ["write", "read", "send", "atomic"].into_iter().enumerate() {
        for (mode, zero_copy) in [("bw -n 300 -q 2", "no"), ("lat -n 200", "yes")] {
            let socket = std::env::temp_dir()
                .join(format!("ferroce-perf-{}-{number}-{zero_copy}.sock", std::process::id()));
            let [server, client] = memif(zero_copy, &socket);
            // A separate port, since tests that run at the same time have their own.
            let command = format!("perf {operation} {mode} -m 4096 -p 18517 --check --json");
            let mut server = start(None, &command, &server, None);
            server.ready();
            let client = start(None, &command, &client, Some("127.0.0.1")).end();
            judge(&command, server, &client);
        }
    }
}

/// DPDK's server panics when a client closes before it was answered, and a zero-copy client has only one attempt.
#[test]
fn a_memif_client_gives_its_server_time_to_answer() {
    if !dpdk::is_there() {
        return;
    }
    let _alone = alone();
    for zero_copy in ["no", "yes"] {
        let socket =
            std::env::temp_dir().join(format!("ferroce-slow-{}-{zero_copy}.sock", std::process::id()));
        let [server, client] = memif(zero_copy, &socket);
        let command = "perf write bw -n 10 -m 4096 -p 18519 --check --json";
        let mut server = start(None, command, &server, None);
        server.ready();
        server.signal(Signal::STOP);
        let client = start(None, command, &client, Some("127.0.0.1"));
        thread::sleep(Duration::from_millis(700));
        server.signal(Signal::CONT);
        judge(command, server, &client.end());
    }
}

#[test]
fn writes_over_af_packet() {
    if !dpdk::is_there() {
        return;
    }
    let _alone = alone();
    let Some(pair) = Namespaces::new(4200) else { return };
    let device = format!(
        "dpdk:net_af_packet0 {EAL} --vdev=net_af_packet0,iface={VETH},blocksz=65536,framesz=8192,framecnt=1024"
    );
    let command = "perf write bw -n 100 -t 4 -s 4KiB -u 17 --check --json";
    let mut server = start(Some(&pair.a), command, &device, None);
    server.ready();
    let client = start(Some(&pair.b), command, &device, Some(SERVER)).end();
    judge(command, server, &client);
}

/// The two ends of a memif.
fn memif(zero_copy: &str, socket: &Path) -> [String; 2] {
    [("server", 1), ("client", 2)].map(|(role, last)| {
        format!(
            "dpdk:net_memif0@10.5.0.{last}/24 {EAL} --single-file-segments --vdev=net_memif0,role={role},\
             bsize=4352,rsize=9,zero-copy={zero_copy},socket-abstract=no,socket={}",
            socket.display()
        )
    })
}

/// The device is one argument, which contains spaces.
fn start(namespace: Option<&str>, command: &str, device: &str, host: Option<&str>) -> Ferroce {
    let mut process = match namespace {
        None => std::process::Command::new(env!("CARGO_BIN_EXE_ferroce")),
        Some(namespace) => {
            let mut process = std::process::Command::new("ip");
            process.args(["netns", "exec", namespace, env!("CARGO_BIN_EXE_ferroce")]);
            process
        }
    };
    process.args(command.split_whitespace()).args(["-d", device]);
    Ferroce::spawn(process, host.unwrap_or_default())
}

fn judge(command: &str, server: Ferroce, client: &Outcome) {
    if client.code != Some(0) {
        server.interrupt();
    }
    let server = server.end();
    assert_eq!(
        (client.code, server.code),
        (Some(0), Some(0)),
        "{command}: server {server:#?}, client {client:#?}"
    );
    let report = client.json();
    assert_eq!(report["driver"], "dpdk", "{command}");
    assert!(report["results"][0]["verified_bytes"].as_u64().unwrap() > 0, "{command}: {report}");
}
