//! The programs of rdma-core, unmodified in the guest.

use std::ops::Range;

use crate::guest::{GUEST, Guest, OURS, report};

/// The port of the ping-pongs.
const PORT: u16 = 18515;

/// Runs all of them; returns the number of runs.
pub(crate) fn run(guest: &Guest) -> u32 {
    let devices = [("af_xdp:fe0", 0..2), ("udp:10.77.0.1", 0..1), ("udp:fd77::1", 1..2)];
    pingpong(guest) + connection_manager(guest, &devices) + shared(guest)
}

/// The same on an address that another process had first, which serves the guest in the end: packets of queue pairs and
/// of QP1 reach the right process.
fn shared(guest: &Guest) -> u32 {
    const DEVICE: &str = "udp:10.77.0.1";
    let options = "-C 5 -S 300 -p 7400";
    let first = guest.start_server(&format!("rping -d {DEVICE} {options}"));
    for size in [1000, 65536] {
        let kind = format!("-m 1024 -s {size} -n 50 -c");
        let (theirs, own) = (format!("ibv_rc_pingpong -g 1 {kind}"), format!("pingpong -d {DEVICE} {kind}"));
        both_roles(guest, &format!("ibv_rc_pingpong, {kind}, shared"), DEVICE, &theirs, &own);
    }
    let cases = connection_manager(guest, &[(DEVICE, 0..1)]);
    let there = guest.start(&format!("rping -c -v -a {} {options}", OURS[0])).succeed();
    let here = first.succeed();
    assert!(here.contains("5 pings") && there.contains("rdma-ping-4:"), "{here}\n{there}");
    report("rping, to the first of two", DEVICE, "server");
    4 + cases + 1
}

fn pingpong(guest: &Guest) -> u32 {
    let sizes = [1u32, 1000, 4097, 65536, 1 << 20];
    let mut runs = Vec::new();
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for path_mtu in [1024, 4096] {
            runs.extend(sizes.map(|size| (device, "rc", format!("-m {path_mtu} -s {size}"), size)));
        }
        // The unreliable services lose packets that a queue has no room for.
        runs.extend([1, 1000, 4097].map(|size| (device, "uc", format!("-m 1024 -s {size}"), size)));
        runs.extend([1, 1000, 4096].map(|size| (device, "ud", format!("-s {size}"), size)));
    }
    for (device, service, kind, size) in &runs {
        let rounds = if *size > 100_000 { 10 } else { 50 };
        // GID 1 of rdma_rxe is its IPv4 address; a socket has only one.
        let common = format!("{kind} -n {rounds} -c");
        let options = format!("-g 1 {common}");
        let own = if device.starts_with("udp") { &common } else { &options };
        let own = format!("pingpong -d {device} -t {service} {own}");
        let program = format!("ibv_{service}_pingpong");
        both_roles(guest, &format!("{program}, {kind}"), device, &format!("{program} {options}"), &own);
    }
    2 * runs.len() as u32
}

/// One of the ping-pongs, which checks received data.
fn both_roles(guest: &Guest, case: &str, device: &str, theirs: &str, own: &str) {
    for role in ["client", "server"] {
        let (here, there) = exchange(guest, role, theirs, own);
        check(case, &here.unwrap_or_else(|e| panic!("{e}")), &there.unwrap_or_else(|e| panic!("{e}")));
        report(case, device, role);
    }
}

/// The output of the engine's end and of the guest's; `role` is the engine's.
fn exchange(
    guest: &Guest,
    role: &str,
    theirs: &str,
    own: &str,
) -> (Result<String, String>, Result<String, String>) {
    if role == "client" {
        let running = guest.start(theirs);
        guest.wait_for_listener(PORT);
        let here = guest.start_ferroce(&format!("{own} {}", GUEST[0])).finish();
        return (here, running.finish());
    }
    let running = guest.start_server(own);
    let there = guest.start(&format!("{theirs} {}", OURS[0])).finish();
    (running.finish(), there)
}

fn check(case: &str, here: &str, there: &str) {
    assert!(here.contains("iters in") && there.contains("iters in"), "{case}: {here}\n{there}");
}

/// The ping-pongs of the reliable service, while the guest loses packets; returns the number of runs.
pub(crate) fn with_loss(guest: &Guest) -> u32 {
    let mut cases = 0;
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for (size, rounds) in [(1000, 200), (65536, 20), (1 << 20, 2)] {
            let gid = if device.starts_with("udp") { "" } else { "-g 1" };
            let kind = format!("-m 1024 -s {size} -n {rounds} -c");
            let case = format!("ibv_rc_pingpong, {kind}, 1 % loss each way");
            let theirs = format!("ibv_rc_pingpong -g 1 {kind}");
            let own = format!("pingpong -d {device} {gid} {kind}");
            let last = format!("SEND {} of {rounds} completed with RetryExcErr", rounds - 1);
            for role in ["client", "server"] {
                // An end that has received everything closes, and if its last ACK is lost, the other end fails. That is
                // no evidence, so the exchange is repeated.
                let mut runs = (0..5).map(|_| exchange(guest, role, &theirs, &own));
                let good = runs.find_map(|outcome| match outcome {
                    (Ok(here), Ok(there)) => Some((here, there)),
                    (Err(here), Ok(_)) if here.contains(&last) => None,
                    (Ok(_), Err(there)) if there.contains("transport retry counter exceeded") => None,
                    (here, there) => panic!("{case}: {here:?}\n{there:?}"),
                });
                let (here, there) =
                    good.unwrap_or_else(|| panic!("{case}: the last ACK was lost five times"));
                check(&case, &here, &there);
                report(&case, device, role);
                cases += 1;
            }
        }
    }
    cases
}

/// rdma_cm's own programs, unmodified, against the commands of the same name.
fn connection_manager(guest: &Guest, devices: &[(&str, Range<usize>)]) -> u32 {
    /// With the port, and the output of both ends on success.
    struct Program {
        name: &'static str,
        port: u16,
        /// As server, and as client.
        theirs: [&'static str; 2],
        ours: &'static str,
    }
    let programs = [
        // rping's client may end before its other thread has reported the end.
        Program { name: "rping", port: 7174, theirs: ["DISCONNECT EVENT", "rdma-ping-4:"], ours: "5 pings" },
        Program { name: "ucmatose", port: 7471, theirs: ["return status 0"; 2], ours: "disconnected" },
        Program { name: "udaddy", port: 7174, theirs: ["return status 0"; 2], ours: "5 received" },
    ];
    let mut cases = 0;
    for (device, versions) in devices {
        for version in versions.clone() {
            let (theirs, ours) = (GUEST[version], OURS[version]);
            for Program { name, port, theirs: [as_server, as_client], ours: good_here } in &programs {
                let options = "-C 5 -S 300";
                // udaddy and ucmatose listen on all addresses of one IP version.
                let (server, client) = match (*name, version) {
                    ("rping", _) => (format!("rping -s -v -a {theirs}"), format!("rping -c -v -a {ours}")),
                    (_, 0) => ((*name).to_owned(), format!("{name} -s {ours}")),
                    (_, _) => (format!("{name} -b {theirs}"), format!("{name} -s {ours}")),
                };
                let case = format!("{name}, IPv{}", if version == 0 { 4 } else { 6 });

                let running = guest.start(&format!("{server} {options}"));
                guest.wait_for_cm_listener(*port);
                let here = guest.start_ferroce(&format!("{name} -d {device} {options} {theirs}")).succeed();
                let there = running.succeed();
                assert!(here.contains(good_here) && there.contains(as_server), "{case}: {here}\n{there}");
                report(&case, device, "client");

                let running = guest.start_server(&format!("{name} -d {device} {options}"));
                let there = guest.start(&format!("{client} {options}")).succeed();
                let here = running.succeed();
                assert!(here.contains(good_here) && there.contains(as_client), "{case}: {here}\n{there}");
                report(&case, device, "server");
                cases += 2;
            }
        }
    }
    cases
}
