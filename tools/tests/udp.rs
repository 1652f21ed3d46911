//! The command over UDP sockets, with every byte compared: as an ordinary user over the loopback interface, and between
//! namespaces.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod ends;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use ends::{Ferroce, Namespaces, Outcome, SERVER, VETH, alone};

/// A copy of the program that every user may run; the build's folder may not be accessible to others.
struct Program(PathBuf);

impl Program {
    fn new() -> Program {
        let path = std::env::temp_dir().join(format!("ferroce-udp-test-{}", std::process::id()));
        fs::copy(env!("CARGO_BIN_EXE_ferroce"), &path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Program(path)
    }

    /// Runs `command` at both ends, each on its device and as nobody if possible.
    fn both(
        &self,
        command: &str,
        namespaces: Option<&Namespaces>,
        devices: [&str; 2],
        host: &str,
    ) -> [Outcome; 2] {
        let start = |namespace: Option<&String>, arguments: &str| {
            let mut words: Vec<String> = Vec::new();
            if let Some(namespace) = namespace {
                words.extend(["ip", "netns", "exec", namespace].map(str::to_owned));
            }
            if ends::is_root() {
                let nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
                words.extend(nobody.map(str::to_owned));
            }
            words.push(self.0.to_str().unwrap().to_owned());
            let mut command = Command::new(&words[0]);
            command.args(&words[1..]).current_dir("/");
            Ferroce::spawn(command, arguments)
        };
        let mut server = start(namespaces.map(|pair| &pair.a), &format!("{command} -d {}", devices[0]));
        server.ready();
        let client =
            start(namespaces.map(|pair| &pair.b), &format!("{command} -d {} {host}", devices[1])).end();
        if client.code != Some(0) {
            // It may not have noticed.
            server.interrupt();
        }
        [server.end(), client]
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn all_right(outcomes: &[Outcome; 2], command: &str) {
    for outcome in outcomes {
        assert_eq!(outcome.code, Some(0), "{command}: {outcome:#?}");
        assert!(outcome.stderr.contains("udp: "), "{outcome:#?}");
    }
}

#[test]
fn over_the_loopback_interface_as_anybody() {
    let _alone = alone();
    let program = Program::new();
    let devices = ["udp:127.81.0.1", "udp:127.81.0.2"];
    for command in [
        "pingpong -s 100000 -n 50 -c",
        "perf write bw -s 65536 -n 300 --check --json",
        "perf read bw -s 65536 -n 300 --check --json",
        "perf send bw -s 3000 -n 300 -m 1024 --check --json",
        "perf write lat -s 8 -n 300 --json",
        "perf atomic lat -n 100 --json",
    ] {
        let outcomes = program.both(command, None, devices, "127.81.0.1");
        all_right(&outcomes, command);
        if command.contains("--json") {
            let report = outcomes[1].json();
            assert_eq!(report["dropped_packets"], 0, "{report}");
        }
    }
}

#[test]
fn between_namespaces_with_every_offload_on_and_off() {
    if !ends::has("ethtool") || !ends::has("setpriv") {
        return println!("skipped: no `ethtool` or `setpriv` command (packages ethtool, util-linux)");
    }
    let _alone = alone();
    let program = Program::new();
    for mtu in [1500, 9000] {
        let Some(pair) = Namespaces::new(mtu) else { return };
        for features in ["tx-udp-segmentation on gso on gro off", "tx-udp-segmentation off gso off gro off"] {
            for namespace in [&pair.a, &pair.b] {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace, "ethtool", "-K", VETH]);
                assert!(command.args(features.split_whitespace()).status().unwrap().success());
            }
            for command in [
                "pingpong -s 100000 -n 50 -c",
                "perf write bw -s 65536 -n 2000 --check",
                "perf read bw -s 65536 -n 500 --check",
                "perf send bw -s 5000 -n 500 -q 8 --check",
            ] {
                // An ordinary user who names the interface gets the same driver.
                let devices = [&format!("udp:{SERVER}"), VETH];
                let outcomes = program.both(command, Some(&pair), devices, SERVER);
                all_right(&outcomes, command);
                assert!(outcomes[1].stderr.contains("because af_xdp is not available"), "{outcomes:#?}");
            }
        }
    }
}
