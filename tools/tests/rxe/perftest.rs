//! The eight programs of perftest for RC, unmodified in the guest.

use crate::guest::{GUEST, Guest, OURS, report};

/// The port of their exchange.
const PORT: u16 = 18515;
const OPERATIONS: [&str; 4] = ["write", "read", "send", "atomic"];

/// Runs them all in both roles; returns how often. One has several queue pairs, and some have IPv6.
pub(crate) fn run(guest: &Guest) -> u32 {
    let mut runs = 0;
    for sockets in [false, true] {
        for operation in OPERATIONS {
            let (device, gid) = match (sockets, operation) {
                (false, _) => ("af_xdp:fe0", 1),
                (true, "write") => ("udp:fd77::1", 2),
                (true, _) => ("udp:10.77.0.1", 1),
            };
            let (many, one) = match (operation, sockets) {
                // Whatever the size, atomics have 8 bytes.
                ("atomic", _) => ("-n 100", "-n 50"),
                ("send", false) => ("-s 3000 -n 50 -q 3 -m 1024", "-s 100 -n 50"),
                _ => ("-s 4096 -n 100", "-s 100 -n 50"),
            };
            runs += both_roles(guest, operation, "bw", device, many, gid);
            runs += both_roles(guest, operation, "lat", device, one, gid);
        }
    }
    runs
}

/// One program, which counts what it sends or receives, with the GID of that index in the guest.
fn both_roles(guest: &Guest, operation: &str, mode: &str, device: &str, kind: &str, gid: u32) -> u32 {
    let program = format!("ib_{operation}_{mode}");
    // -F: it does not mind how the guest's processor saves power.
    let theirs = format!("timeout 40 {program} -F -x {gid} -u 18 {kind}");
    let ours = format!("perf {operation} {mode} -d {device} -u 18 {kind}");
    let case = format!("{program}, {kind}, IPv{}", if gid == 1 { 4 } else { 6 });
    // TCP is over IPv4, whatever the GIDs are.
    let messages = |report: &str| count(report, kind);

    let running = guest.start(&theirs);
    guest.wait_for_listener(PORT);
    let here = guest.start_ferroce(&format!("{ours} --perftest {}", GUEST[0])).succeed();
    let there = running.succeed();
    assert!(messages(&here), "{case}: {here}\n{there}");
    // Of READs and atomics for latency, a passive server tells nothing.
    let passive = mode == "lat" && (operation == "read" || operation == "atomic");
    assert!(passive || messages(&there), "{case}: {here}\n{there}");
    report(&case, device, "client");

    let running = guest.start_server(&ours);
    let there = guest.start(&format!("{theirs} {}", OURS[0])).succeed();
    let here = running.succeed();
    assert!(messages(&there) && here.contains("connected"), "{case}: {here}\n{there}");
    report(&case, device, "server");
    2
}

/// Whether a report has a line of the messages that `kind` asks for, and of their size.
fn count(report: &str, kind: &str) -> bool {
    let option = |name: &str, default: u64| {
        let mut words = kind.split_whitespace().skip_while(|word| *word != name).skip(1);
        words.next().map_or(default, |value| value.parse().expect("a number"))
    };
    let wanted = [option("-s", 8), option("-n", 0) * option("-q", 1)];
    report.lines().any(|line| {
        let numbers: Vec<_> = line.split_whitespace().map_while(|word| word.parse::<f64>().ok()).collect();
        numbers.len() > 3 && numbers.starts_with(&wanted.map(|number| number as f64))
    })
}
