//! The kernel's rdma_rxe in a virtual machine, as the peer.
//!
//! Runs where `FERROCE_RXE_CACHE` names the folder of a built guest (`./do test` sees to that as
//! root); elsewhere it says why not. One boot serves all cases.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// `ibv_rc_pingpong`'s port.
const PORT: u16 = 18515;
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

    /// Starts `ferroce pingpong` beside the guest.
    fn start_ferroce(&self, device: &str, arguments: &str) -> Running {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.netns, env!("CARGO_BIN_EXE_ferroce"), "pingpong", "-d", device]);
        command.args(arguments.split_whitespace());
        Running::new(&format!("ferroce pingpong -d {device} {arguments}"), command)
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
}

impl Running {
    fn new(name: &str, mut command: Command) -> Running {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        Running { name: name.to_owned(), child: child.unwrap_or_else(|e| panic!("{name}: {e}")) }
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
        let text = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success(), "{}: {status}\n{text}", self.name);
        text
    }
}

#[test]
fn pingpong_with_ibv_rc_pingpong_in_both_roles() {
    let Some(guest) = Guest::boot() else { return };
    let mut cases = 0;
    for device in ["af_xdp:fe0", "udp:10.77.0.1"] {
        for path_mtu in [1024, 4096] {
            for size in [1u32, 1000, 4097, 65536, 1 << 20] {
                let rounds = if size > 100_000 { 10 } else { 50 };
                // GID 1 of rdma_rxe is its IPv4 address; a socket has but one.
                let common = format!("-m {path_mtu} -s {size} -n {rounds} -c");
                let options = format!("-g 1 {common}");
                let own = if device.starts_with("udp") { &common } else { &options };

                let theirs = guest.start(&format!("ibv_rc_pingpong {options}"));
                guest.wait_for_listener();
                let ours = guest.start_ferroce(device, &format!("{own} 10.77.0.11")).succeed();
                let theirs = theirs.succeed();
                assert!(ours.contains("iters in") && theirs.contains("iters in"), "{ours}\n{theirs}");

                let ours = guest.start_ferroce(device, own);
                std::thread::sleep(Duration::from_millis(500));
                let theirs = guest.start(&format!("ibv_rc_pingpong {options} 10.77.0.1")).succeed();
                let ours = ours.succeed();
                assert!(ours.contains("iters in") && theirs.contains("iters in"), "{ours}\n{theirs}");

                println!("{device}, path MTU {path_mtu}, {size} bytes, {rounds} rounds: either way right");
                cases += 2;
            }
        }
    }
    println!("{cases} ping-pongs with rdma_rxe");
}
