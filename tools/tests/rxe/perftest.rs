//! perftest's programs, unmodified in the guest: the eight for RC, in both roles, the other services, and
//! configurations that are recognized and rejected.

use crate::guest::{GUEST, Guest, OURS, Running, report};

/// The port of their exchange.
const PORT: u16 = 18515;
const OPERATIONS: [&str; 4] = ["write", "read", "send", "atomic"];

/// Runs all of them in both roles; returns the number of runs. One has several queue pairs, and some use IPv6.
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
                // Atomics always have 8 bytes.
                ("atomic", _) => ("-n 100", "-n 50"),
                ("send", false) => ("-s 3000 -n 50 -q 3 -m 1024", "-s 100 -n 50"),
                _ => ("-s 4096 -n 100", "-s 100 -n 50"),
            };
            runs += both_roles(guest, operation, "bw", device, many, gid);
            runs += both_roles(guest, operation, "lat", device, one, gid);
        }
    }
    for (operation, mode, kind) in [
        ("write", "bw", "-b -s 4096 -n 100"),
        ("read", "bw", "-b -s 4096 -n 100 -q 2"),
        ("send", "bw", "-b -s 4096 -n 100"),
        ("send", "bw", "-c UD -s 1024 -n 100"),
        ("send", "bw", "-c UD -b -s 1024 -n 100"),
        ("send", "lat", "-c UD -s 100 -n 50"),
        ("send", "bw", "-c UC -s 5000 -n 50"),
        ("write", "bw", "-c UC -s 5000 -n 50"),
        ("write", "lat", "-c UC -s 100 -n 50"),
    ] {
        runs += both_roles(guest, operation, mode, "af_xdp:fe0", kind, 1);
    }
    runs + refusals(guest)
}

/// Programs and options that are not supported; each error names the reason.
fn refusals(guest: &Guest) -> u32 {
    let servers = [
        ("ib_write_bw -F -x 1 -c UC -n 100", "perf write bw", "the peer sends UC packets"),
        ("ib_send_bw -F -x 1 -c UD -n 100", "perf send bw", "the peer sends UD packets"),
        ("ib_write_bw -F -x 1 -n 100", "perf read bw", "the same operation"),
        ("ib_send_bw -F -x 1 -n 100 -s 4096", "perf send bw -s 2048", "the size (-s)"),
        ("ib_send_bw -F -x 1 -n 100 -s 4096", "perf send bw -n 200 -s 4096", "-n"),
        ("ibv_srq_pingpong -g 1", "pingpong -g 1", "ibv_srq_pingpong"),
        ("riostream -S 64 -C 10 -p 7471 -s", "rping -p 7471", "without a ping"),
    ];
    for (theirs, ours, named) in servers {
        let running = guest.start_server(&format!("{ours} -d af_xdp:fe0"));
        let there = guest.start(&format!("timeout 20 {theirs} {}", OURS[0]));
        is_named(running, theirs, ours, named);
        // It may fail, too.
        let _ = there.finish();
    }
    // Such a client does not end the server.
    let running = guest.start_server("perf write bw -d af_xdp:fe0 -n 100");
    let _ = guest.start(&format!("timeout 20 ib_write_bw -F -x 1 -R {}", OURS[0])).finish();
    guest.start(&format!("timeout 20 ib_write_bw -F -x 1 -n 100 {}", OURS[0])).succeed();
    let said = running.succeed();
    assert!(said.contains("-R"), "{said}");
    let running = guest.start("timeout 30 ib_write_bw -F -x 1 -R");
    guest.wait_for_cm_listener(PORT);
    let ours = "perf write bw -d af_xdp:fe0 --perftest";
    is_named(guest.start_ferroce(&format!("{ours} {}", GUEST[0])), "ib_write_bw -R", ours, "-R");
    let _ = running.finish();
    servers.len() as u32 + 2
}

fn is_named(running: Running, theirs: &str, ours: &str, named: &str) {
    let said = running.finish().expect_err("what can't be served is a failure");
    assert!(said.contains("exit status: 1") && said.contains(named), "{theirs}: no '{named}' in {said}");
    println!("{theirs:<62} | {ours}: names '{named}'");
}

/// One program, which counts its messages, with the guest's GID of that index.
fn both_roles(guest: &Guest, operation: &str, mode: &str, device: &str, kind: &str, gid: u32) -> u32 {
    let program = format!("ib_{operation}_{mode}");
    // -F: ignores the guest's CPU frequency settings.
    let theirs = format!("timeout 40 {program} -F -x {gid} -u 18 {kind}");
    let ours = format!("perf {operation} {mode} -d {device} -u 18 {kind}");
    let case = format!("{program}, {kind}, IPv{}", if gid == 1 { 4 } else { 6 });
    // TCP uses IPv4, whatever the GIDs are.
    let messages = |report: &str| count(report, kind, 1);
    // A ferroce client counts both directions.
    let ways = if kind.contains("-b") { 2 } else { 1 };

    let running = guest.start(&theirs);
    guest.wait_for_listener(PORT);
    let here = guest.start_ferroce(&format!("{ours} --perftest {}", GUEST[0])).succeed();
    let there = running.succeed();
    assert!(count(&here, kind, ways), "{case}: {here}\n{there}");
    // For READ and atomic latency, a passive server reports nothing.
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

/// Whether a report has a line with the message count of `kind`, in `ways` directions, and their size.
fn count(report: &str, kind: &str, ways: u64) -> bool {
    let option = |name: &str, default: u64| {
        let mut words = kind.split_whitespace().skip_while(|word| *word != name).skip(1);
        words.next().map_or(default, |value| value.parse().expect("a number"))
    };
    let wanted = [option("-s", 8), option("-n", 0) * option("-q", 1) * ways];
    report.lines().any(|line| {
        let numbers: Vec<_> = line.split_whitespace().map_while(|word| word.parse::<f64>().ok()).collect();
        numbers.len() > 3 && numbers.starts_with(&wanted.map(|number| number as f64))
    })
}
