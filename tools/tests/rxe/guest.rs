//! The guest, and programs that run in it and outside.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver_test_support::namespaces::{self, ip};

use crate::share::{self, Share};

/// The guest's addresses, and ours.
pub(crate) const GUEST: [&str; 2] = ["10.77.0.11", "fd77::11"];
pub(crate) const OURS: [&str; 2] = ["10.77.0.1", "fd77::1"];
/// Our address behind the guest's other port, and the guest's there.
pub(crate) const FAR: &str = "10.78.0.1";
const GUEST_FAR: &str = "10.78.0.11";
/// Jumbo frames, so that every path MTU fits.
const MTU: &str = "9000";
/// The time limit of one ping-pong, in an emulated guest on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) struct Guest {
    cache: PathBuf,
    netns: String,
    share: Share,
}

impl Guest {
    /// Boots the guest, or prints the reason that it can't.
    pub(crate) fn boot() -> Option<Guest> {
        let Some(cache) = std::env::var_os("FERROCE_RXE_CACHE") else {
            println!(
                "skipped: FERROCE_RXE_CACHE is not set, so there is no guest with rdma_rxe; ./do test as root makes one"
            );
            return None;
        };
        let guest = Guest {
            cache: cache.into(),
            netns: format!("ferroce-rxe-{}", std::process::id()),
            share: Share::new(),
        };
        let up = guest.script(&["up", MTU]).status().expect("tools/interop/rxe runs");
        assert!(up.success(), "the guest does not come up");
        Some(guest)
    }

    /// Runs `f` in a thread inside the guest's network namespace.
    pub(crate) fn inside<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        namespaces::inside(&self.netns, f)
    }

    /// The same on the far side of the guest, at its other port.
    pub(crate) fn inside_far<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        namespaces::inside(&self.far_netns(), f)
    }

    fn far_netns(&self) -> String {
        format!("{}-far", self.netns)
    }

    fn script(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/rxe"));
        command.env("RXE_CACHE", &self.cache).env("RXE_NETNS", &self.netns).args(arguments);
        command.env("RXE_SHARE", self.share.folder());
        command
    }

    /// Starts a command in the guest.
    pub(crate) fn start(&self, command: &str) -> Running {
        Running::new(command, self.script(&["run", command]))
    }

    /// Starts a program of the [`Share`] in the guest: `ferroce` or `test`, with these environment variables.
    pub(crate) fn start_inside(&self, environment: &str, program: &str, arguments: &str) -> Running {
        self.start(&format!("{environment} {}", share::command(program, arguments)))
    }

    /// Starts a command of `ferroce` outside the guest.
    pub(crate) fn start_ferroce(&self, arguments: &str) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, env!("CARGO_BIN_EXE_ferroce")]);
        command.args(arguments.split_whitespace()).env("NO_COLOR", "1").env("RUST_LOG", "info");
        Running::new(&format!("ferroce {arguments}"), command)
    }

    /// Starts a shell command outside the guest.
    pub(crate) fn start_beside(&self, line: &str) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, "sh", "-c", line]).env("NO_COLOR", "1");
        Running::new(line, command)
    }

    /// Starts a server of `ferroce`, and waits until it accepts clients.
    pub(crate) fn start_server(&self, arguments: &str) -> Running {
        let mut server = self.start_ferroce(arguments);
        server.wait_for("waiting for");
        server
    }

    /// From now on the guest loses this percentage of the packets that it sends and receives.
    pub(crate) fn lose_packets(&self, percent: u32) {
        self.impair(&format!("loss {percent}%"));
    }

    /// From now on netem applies this impairment to the packets that the guest sends and receives.
    pub(crate) fn impair(&self, how: &str) {
        let impaired = format!(
            "tc qdisc add dev eth0 root netem {how} limit 100000 && \
             ip link set ifb0 mtu 9000 up && tc qdisc add dev ifb0 root netem {how} limit 100000 && \
             tc qdisc add dev eth0 ingress && \
             tc filter add dev eth0 ingress matchall action mirred egress redirect dev ifb0"
        );
        self.start(&impaired).succeed();
    }

    /// Ends the impairment.
    pub(crate) fn impair_nothing(&self) {
        let whole =
            "tc qdisc del dev eth0 ingress && tc qdisc del dev ifb0 root && tc qdisc del dev eth0 root";
        self.start(whole).succeed();
    }

    /// From now on a switch between the guest and us sets Congestion Experienced in each RoCE packet of the guest.
    pub(crate) fn mark(&self) {
        let rule = |network: &str| format!("add rule bridge marks forward iifname tap1 {network} ecn set ce");
        let chain =
            "add table bridge marks; add chain bridge marks forward { type filter hook forward priority 0; }";
        let (ipv4, ipv6) =
            (rule("ip protocol udp udp dport 4791 ip"), rule("ip6 nexthdr udp udp dport 4791 ip6"));
        self.nft(&format!("{chain}; {ipv4}; {ipv6}"));
    }

    /// Ends the marking.
    pub(crate) fn mark_nothing(&self) {
        self.nft("delete table bridge marks");
    }

    fn nft(&self, commands: &str) {
        let nft = Command::new("ip").args(["netns", "exec", &self.netns, "nft", commands]).output();
        let Output { status, stderr, .. } = nft.expect("ip runs");
        assert!(status.success(), "nft {commands}: {}", String::from_utf8_lossy(&stderr));
    }

    /// From now on the guest forwards between its ports, and both sides have a route to each other through it.
    pub(crate) fn forward(&self) {
        self.start("echo 1 >/proc/sys/net/ipv4/ip_forward").succeed();
        ip(&format!("-n {} route replace {FAR}/32 via {}", self.netns, GUEST[0]));
        ip(&format!("-n {} route replace {}/32 via {GUEST_FAR}", self.far_netns(), OURS[0]));
    }

    /// Prints the number of lost packets in each direction; there must have been some.
    pub(crate) fn check_losses(&self) {
        let lost = self.start("tc -s qdisc show | grep -A1 netem | grep -o 'dropped [0-9]*'").succeed();
        let lost: Vec<u32> =
            lost.lines().filter_map(|line| line.strip_prefix("dropped ")?.parse().ok()).collect();
        println!("lost on the way out and in: {lost:?}");
        assert!(lost.len() == 2 && lost.iter().all(|packets| *packets > 0), "{lost:?}");
    }

    /// Waits until the guest's connection manager listens on a port.
    pub(crate) fn wait_for_cm_listener(&self, port: u16) {
        self.start(&format!(
            "for i in $(seq 100); do rdma resource show cm_id | grep -q 'LISTEN.*:{port} ' && exit; sleep 0.1; done; exit 1"
        ))
        .succeed();
    }

    /// Waits for a listener on a TCP port of the guest.
    pub(crate) fn wait_for_listener(&self, port: u16) {
        let wait = format!(
            "for i in $(seq 100); do grep -q ':{port:04X} 00000000:0000 0A' /proc/net/tcp /proc/net/tcp6 && exit; \
             grep -q ':{port:04X} 0\\{{32\\}}:0000 0A' /proc/net/tcp6 && exit; sleep 0.1; done; exit 1"
        );
        self.start(&wait).succeed();
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.script(&["down"]).status();
    }
}

/// A running program.
pub(crate) struct Running {
    name: String,
    child: Child,
    /// Standard error as far as it was read.
    said: String,
}

impl Running {
    fn new(name: &str, mut command: Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.unwrap_or_else(|e| panic!("{name}: {e}"));
        Running { name: name.to_owned(), child, said: String::new() }
    }

    /// Waits for this text on stderr.
    pub(crate) fn wait_for(&mut self, text: &str) {
        let stderr = self.child.stderr.as_mut().expect("it is piped");
        while !self.said.contains(text) {
            // One byte at a time, since the rest is read at the end.
            let mut byte = [0];
            let count = stderr.read(&mut byte).expect("its errors can be read");
            assert!(count > 0, "{} ends without '{text}':\n{}", self.name, self.said);
            self.said.push(byte[0].into());
        }
    }

    /// Waits for its end, which must be successful and in time. Returns its output.
    pub(crate) fn succeed(self) -> String {
        self.finish().unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Waits for its end, and returns its output; as an error if it fails or takes too long.
    pub(crate) fn finish(self) -> Result<String, String> {
        self.finish_in(PATIENCE)
    }

    /// The same, with another time limit.
    pub(crate) fn finish_in(mut self, patience: Duration) -> Result<String, String> {
        let start = Instant::now();
        while self.child.try_wait().expect("a child can be waited for").is_none() {
            if start.elapsed() > patience {
                let _ = self.child.kill();
                break;
            }
            thread::sleep(Duration::from_millis(20));
        }
        let Output { status, stdout, stderr } =
            self.child.wait_with_output().expect("its output can be read");
        let text =
            format!("{}{}{}", self.said, String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        if status.success() { Ok(text) } else { Err(format!("{}: {status}\n{text}", self.name)) }
    }
}

/// Prints a line of the matrix.
pub(crate) fn report(case: &str, device: &str, role: &str) {
    println!("{case:<62} | {device:<14} | ferroce is the {role:<6} | right");
}

/// Prints a line of the matrix of verbs.
pub(crate) fn report_outcome(case: &str, device: &str, asker: &str, outcome: &str) {
    println!("{case:<50} | {device:<13} | {asker:>7} asks | {outcome}");
}
