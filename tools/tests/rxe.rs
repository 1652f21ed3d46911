//! The kernel's rdma_rxe in a virtual machine, as the peer.
//!
//! Runs where `FERROCE_RXE_CACHE` names the folder of a built guest (`./do test` sees to that as
//! root); elsewhere it says why not. One boot serves all cases.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `ibv_rc_pingpong`'s port.
const PORT: u16 = 18515;
/// The guest's addresses, and ours.
const GUEST: [&str; 2] = ["10.77.0.11", "fd77::11"];
const OURS: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Jumbo frames, so that every path MTU fits.
const MTU: &str = "9000";
/// The whole of one ping-pong, in an emulated guest on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

struct Guest {
    cache: PathBuf,
    netns: String,
}

impl Guest {
    fn boot() -> Option<Guest> {
        let Some(cache) = std::env::var_os("FERROCE_RXE_CACHE") else {
            println!(
                "skipped: FERROCE_RXE_CACHE is not set, so there is no guest with rdma_rxe; ./do test as root makes one"
            );
            return None;
        };
        let guest = Guest { cache: cache.into(), netns: format!("ferroce-rxe-{}", std::process::id()) };
        let up = guest.script(&["up", MTU]).status().expect("tools/interop/rxe runs");
        assert!(up.success(), "the guest does not come up");
        Some(guest)
    }

    fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/rxe"));
        command.env("RXE_CACHE", &self.cache).env("RXE_NETNS", &self.netns).args(arguments);
        command
    }

    /// Starts a command in the guest.
    fn start(&self, command: &str) -> Running {
        Running::new(command, self.script(&["run", command]))
    }

    /// Starts a command of `ferroce` beside the guest.
    fn start_ferroce(&self, arguments: &str) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, env!("CARGO_BIN_EXE_ferroce")]);
        command.args(arguments.split_whitespace()).env("NO_COLOR", "1").env("RUST_LOG", "info");
        Running::new(&format!("ferroce {arguments}"), command)
    }

    /// Starts a server of `ferroce`, and waits until clients may come.
    fn start_server(&self, arguments: &str) -> Running {
        let mut server = self.start_ferroce(arguments);
        server.wait_for("waiting for");
        server
    }

    /// Waits until the guest's connection manager listens on a port.
    fn wait_for_cm_listener(&self, port: u16) {
        self.start(&format!(
            "for i in $(seq 100); do rdma resource show cm_id | grep -q 'LISTEN.*:{port} ' && exit; sleep 0.1; done; exit 1"
        ))
        .succeed();
    }

    /// Waits until something listens on `PORT` in the guest.
    fn wait_for_listener(&self) {
        let wait = format!(
            "for i in $(seq 100); do grep -q ':{PORT:04X} 00000000:0000 0A' /proc/net/tcp /proc/net/tcp6 && exit; \
             grep -q ':{PORT:04X} 0\\{{32\\}}:0000 0A' /proc/net/tcp6 && exit; sleep 0.1; done; exit 1"
        );
        self.start(&wait).succeed();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.script(&["down"]).status();
    }
}

struct Running {
    name: String,
    child: Child,
    /// What has been read of its errors.
    said: String,
}

impl Running {
    fn new(name: &str, mut command: Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.unwrap_or_else(|e| panic!("{name}: {e}"));
        Running { name: name.to_owned(), child, said: String::new() }
    }

    /// Waits until it says that on stderr.
    fn wait_for(&mut self, text: &str) {
        let stderr = self.child.stderr.as_mut().expect("it is piped");
        while !self.said.contains(text) {
            // A byte at a time, for what comes behind is read at the end.
            let mut byte = [0];
            let count = stderr.read(&mut byte).expect("its errors can be read");
            assert!(count > 0, "{} ends without '{text}':\n{}", self.name, self.said);
            self.said.push(byte[0].into());
        }
    }

    /// Waits for it; it must end well and in time. Returns what it printed.
    fn succeed(mut self) -> String {
        let start = Instant::now();
        while self.child.try_wait().expect("a child can be waited for").is_none() {
            if start.elapsed() > PATIENCE {
                let _ = self.child.kill();
                break;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        let Output { status, stdout, stderr } =
            self.child.wait_with_output().expect("its output can be read");
        let text =
            format!("{}{}{}", self.said, String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "{}: {status}\n{text}", self.name);
        text
    }
}

#[test]
fn the_kernels_rdma_rxe() {
    let Some(guest) = Guest::boot() else { return };
    let cases = pingpong(&guest) + connection_manager(&guest) + with_loss(&guest);
    println!("{cases} runs with rdma_rxe");
}

fn report(case: &str, device: &str, role: &str) {
    println!("{case:<62} | {device:<14} | ferroce is the {role:<6} | right");
}

fn pingpong(guest: &Guest) -> u32 {
    let sizes = [1u32, 1000, 4097, 65536, 1 << 20];
    let mut runs = Vec::new();
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for path_mtu in [1024, 4096] {
            runs.extend(sizes.map(|size| (device, "rc", format!("-m {path_mtu} -s {size}"), size)));
        }
        // The unreliable services lose what a queue has no room for.
        runs.extend([1, 1000, 4097].map(|size| (device, "uc", format!("-m 1024 -s {size}"), size)));
        runs.extend([1, 1000, 4096].map(|size| (device, "ud", format!("-s {size}"), size)));
    }
    for (device, service, kind, size) in &runs {
        let rounds = if *size > 100_000 { 10 } else { 50 };
        // GID 1 of rdma_rxe is its IPv4 address; a socket has but one.
        let common = format!("{kind} -n {rounds} -c");
        let options = format!("-g 1 {common}");
        let own = if device.starts_with("udp") { &common } else { &options };
        let own = format!("pingpong -d {device} -t {service} {own}");
        let program = format!("ibv_{service}_pingpong");
        both_roles(guest, &format!("{program}, {kind}"), device, &format!("{program} {options}"), &own);
    }
    2 * runs.len() as u32
}

/// One of the ping-pongs, which checks what it receives.
fn both_roles(guest: &Guest, case: &str, device: &str, theirs: &str, own: &str) {
    let running = guest.start(theirs);
    guest.wait_for_listener();
    let here = guest.start_ferroce(&format!("{own} {}", GUEST[0])).succeed();
    let there = running.succeed();
    assert!(here.contains("iters in") && there.contains("iters in"), "{case}: {here}\n{there}");
    report(case, device, "client");

    let running = guest.start_server(own);
    let there = guest.start(&format!("{theirs} {}", OURS[0])).succeed();
    let here = running.succeed();
    assert!(here.contains("iters in") && there.contains("iters in"), "{case}: {here}\n{there}");
    report(case, device, "server");
}

/// The guest loses one packet of a hundred, of those that it sends and of those that it receives.
fn with_loss(guest: &Guest) -> u32 {
    let lossy = "tc qdisc add dev eth0 root netem loss 1% limit 100000 && \
                 ip link set ifb0 mtu 9000 up && tc qdisc add dev ifb0 root netem loss 1% limit 100000 && \
                 tc qdisc add dev eth0 ingress && \
                 tc filter add dev eth0 ingress matchall action mirred egress redirect dev ifb0";
    guest.start(lossy).succeed();
    let mut cases = 0;
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for (size, rounds) in [(1000, 200), (65536, 20), (1 << 20, 2)] {
            let gid = if device.starts_with("udp") { "" } else { "-g 1" };
            let kind = format!("-m 1024 -s {size} -n {rounds} -c");
            let case = format!("ibv_rc_pingpong, {kind}, 1 % loss each way");
            let theirs = format!("ibv_rc_pingpong -g 1 {kind}");
            both_roles(guest, &case, device, &theirs, &format!("pingpong -d {device} {gid} {kind}"));
            cases += 2;
        }
    }
    let lost = guest.start("tc -s qdisc show | grep -A1 netem | grep -o 'dropped [0-9]*'").succeed();
    let lost: Vec<u32> =
        lost.lines().filter_map(|line| line.strip_prefix("dropped ")?.parse().ok()).collect();
    println!("lost on the way out and in: {lost:?}");
    assert!(lost.len() == 2 && lost.iter().all(|packets| *packets > 0), "{lost:?}");
    cases
}

/// rdma_cm's own programs, unmodified, against the commands of the same name.
fn connection_manager(guest: &Guest) -> u32 {
    /// With the port, and what both ends say at a good end.
    struct Program {
        name: &'static str,
        port: u16,
        theirs: &'static str,
        ours: &'static str,
    }
    let programs = [
        Program { name: "rping", port: 7174, theirs: "DISCONNECT EVENT", ours: "pings" },
        Program { name: "ucmatose", port: 7471, theirs: "return status 0", ours: "disconnected" },
        Program { name: "udaddy", port: 7174, theirs: "return status 0", ours: "5 received" },
    ];
    let mut cases = 0;
    for (device, versions) in [("af_xdp:fe0", 0..2), ("udp:10.77.0.1", 0..1), ("udp:fd77::1", 1..2)] {
        for version in versions {
            let (theirs, ours) = (GUEST[version], OURS[version]);
            for Program { name, port, theirs: good, ours: good_here } in &programs {
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
                assert!(here.contains(good_here) && there.contains(good), "{case}: {here}\n{there}");
                report(&case, device, "client");

                let running = guest.start_server(&format!("{name} -d {device} {options}"));
                let there = guest.start(&format!("{client} {options}")).succeed();
                let here = running.succeed();
                assert!(here.contains(good_here) && there.contains(good), "{case}: {here}\n{there}");
                report(&case, device, "server");
                cases += 2;
            }
        }
    }
    cases
}
