//! `ferroce demo`, as a user runs it: what it prints, how it ends, and what it leaves behind.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod judge;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::UdpSocket;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver_test_support::gpu;
use ferroce_driver_test_support::rnic_stub::Stub;
use ferroce_driver_test_support::signal::{Signal, signal};
use serde_json::Value;

const FERROCE: &str = env!("CARGO_BIN_EXE_ferroce");
/// The longest time of any test here.
const LIMIT: Duration = Duration::from_secs(60);
/// Elements of the first 20 tensors: conv1 with its normalisation, the first block with its
/// downsampling, and the second one up to half of its second normalisation.
const ELEMENTS_OF_20: u64 = 9_408 + 2 * 64                    // conv1, bn1
    + 4_096 + 2 * 64 + 36_864 + 2 * 64 + 16_384 + 2 * 256     // layer1.0
    + 16_384 + 2 * 256                                        // layer1.0.downsample
    + 16_384 + 2 * 64 + 36_864 + 64; // layer1.1

#[test]
fn over_loopback_every_element_is_right() {
    let _alone = alone();
    let json = json(&demo(&["-d", "loopback", "--tensors", "20", "--rounds", "2", "--json"]));
    check_report(&json, "loopback", 4, 2);

    let table = demo(&["-d", "loopback", "--tensors", "20", "--ranks", "3", "--rounds", "1"]);
    let text = text(&table.stdout);
    assert!(table.status.success(), "{table:?}");
    for expected in [
        "20 parameter tensors over 3 ranks",
        "as --device says",
        "loopback:loopback0 10.77.0.1, MTU 4160, path MTU 4096",
        "0 retransmitted",
        "413,952 elements, and 413,952 over TCP", // 3 × 137,984
        "all elements right",
        "exit status 0",
    ] {
        assert!(
            text.split_whitespace().collect::<Vec<_>>().join(" ").contains(expected),
            "no '{expected}' in\n{text}"
        );
    }
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    let said = self::text(&table.stderr);
    assert!(said.contains("round 1 of 1: all-reduced over ferroce in"), "{said}");
    assert!(said.contains("round 1 of 1: all-reduced over TCP in"), "{said}");
}

#[test]
fn a_wrong_element_is_named_at_every_rank() {
    let _alone = alone();
    let output = demo(&["-d", "loopback", "--tensors", "3", "--rounds", "1", "--fault", "1:0:5"]);
    let text = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for rank in 0..4 {
        for transport in ["ferroce", "TCP"] {
            let wrong = format!("WRONG at rank {rank} over {transport}: conv1.weight[5] is ");
            assert!(text.contains(&wrong), "{text}");
        }
    }
    // 4 × 9,536 over each transport.
    assert!(text.contains("8 of 76,288 elements WRONG; exit status 1"), "{text}");
}

#[test]
fn wrong_usage_is_told_apart_from_failure() {
    for (args, value) in [
        (["--path-mtu", "1500"], "1500"),
        (["--ranks", "1"], "'1'"),
        (["--ranks", "65"], "'65'"),
        (["--device", "eth0"], "'eth0'"),
        (["--device", "ibverbs:"], "'ibverbs:'"),
        (["--rounds", "0"], "'0'"),
    ] {
        let output = demo(&args);
        let text = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(value), "{text}");
    }
}

/// Ranks on an RNIC are processes. The RNIC of these tests reaches no other, so only the rejections are tested here;
/// the rest is tested in the guest with rdma_rxe.
#[test]
fn a_card_that_is_not_there_is_named() {
    let Some(stub) = Stub::build(&["NOTHING_WRONG"]) else { return };
    for (device, reason) in [("ibverbs:stub7", "stub7"), ("ibverbs:stub0:9", "port = 9")] {
        let mut command = Command::new(FERROCE);
        command.args(["demo", "--tensors", "1", "-d", device]).env("LD_LIBRARY_PATH", stub.folder());
        let output = run(&mut command);
        let why = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{why}");
        assert!(why.contains("ibverbs can't be used: ") && why.contains(reason), "{why}");
    }
}

#[test]
fn without_rights_it_says_why_and_takes_the_next_driver() {
    let _alone = alone();
    let directory = Scratch::new();
    let program = directory.0.join("ferroce");
    fs::copy(FERROCE, &program).unwrap();
    let unprivileged = |args: &[&str]| {
        let mut command = Command::new(&program);
        command.arg("demo").args(args).current_dir("/");
        if is_root() {
            command.uid(65534).gid(65534);
        }
        run(&mut command)
    };
    let few = ["--tensors", "20", "--rounds", "1", "--json"];
    let output = unprivileged(&few);
    let why = text(&output.stderr);
    let lacking = if cfg!(feature = "af_xdp") { "CAP_NET_ADMIN" } else { "without the feature `af_xdp`" };
    assert!(why.contains(lacking) && why.contains("over udp"), "{why}");
    check_report(&json(&output), "udp", 4, 1);

    // Another process has the port on one rank's address.
    let taken = UdpSocket::bind("127.77.0.2:4791").unwrap();
    let output = unprivileged(&few);
    let why = text(&output.stderr);
    assert!(why.contains("127.77.0.2 is in use") && why.contains("over loopback"), "{why}");
    check_report(&json(&output), "loopback", 4, 1);
    drop(taken);

    // A driver given by name is not replaced.
    let output = unprivileged(&["-d", "af_xdp", "--tensors", "20"]);
    let why = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains(lacking) && !why.contains("over"), "{why}");
    let capture = directory.0.join("capture.pcapng");
    let output = unprivileged(&["-d", "udp", "--tensors", "20", "--pcap", capture.to_str().unwrap()]);
    let why = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains("capture") && !why.contains("over"), "{why}");
}

#[test]
fn over_af_xdp_every_element_is_right_and_nothing_stays() {
    let _alone = alone();
    let Some(()) = af_xdp() else { return };
    let directory = Scratch::new();
    let capture = directory.0.join("rank0.pcapng");
    let args = ["--tensors", "20", "--rounds", "2", "--json", "--pcap", capture.to_str().unwrap()];
    let mut child = start(&args);
    let id = child.id();
    let stdout = read_all(child.stdout.take());
    let status = wait(&mut child);
    assert_eq!(namespaces_of(id), [""; 0]);
    let report: Value = serde_json::from_str(stdout.join().unwrap().trim()).unwrap();
    assert!(status.success(), "{report}");
    check_report(&report, "af_xdp", 4, 2);
    check_capture(&capture);
}

/// The sums are computed on the device, and the packets to its neighbours conform.
#[test]
fn tensors_of_a_device_are_added_up_there() {
    let _alone = alone();
    let Some(gpu) = gpu::first() else { return };
    let memory = gpu.name();
    let directory = Scratch::new();
    let capture = directory.0.join("rank0.pcapng");
    let recorded = capture.to_str().unwrap();
    let device = if af_xdp().is_some() { "af_xdp" } else { "loopback" };
    let args = ["-d", device, "--memory", memory, "--tensors", "20", "--json", "--pcap", recorded];
    let report = json(&demo(&args));
    assert_eq!(report["elements_checked"], ELEMENTS_OF_20 * 4, "{report}");
    assert_eq!(report["wrong"], Value::Array(Vec::new()), "{report}");
    assert_eq!((&report["ports"][0]["memory"], &report["total"]["tcp"]), (&memory.into(), &Value::Null));
    check_capture(&capture);
    let replayed = run(Command::new(FERROCE).arg("replay").arg(&capture));
    let said = text(&replayed.stdout);
    assert!(replayed.status.success() && !said.contains("violation"), "{said} {}", text(&replayed.stderr));
    // Both ends of a connection, and of control messages, with each of the three others.
    assert_eq!(said.matches("as recorded: conforms").count(), 2 * 2 * 3, "{said}");
    assert_eq!(said.matches("as recorded: ").count(), 2 * 2 * 3, "{said}");
    // A wrong element is found, also on the device.
    let args = ["-d", "loopback", "--memory", memory, "--tensors", "3", "--rounds", "1", "--fault", "1:0:5"];
    let wrong = demo(&args);
    assert_eq!(wrong.status.code(), Some(1), "{}", text(&wrong.stdout));
    assert!(text(&wrong.stdout).contains("WRONG at rank 0 over ferroce: conv1.weight[5] is "));
    let args = ["-d", "loopback", "--memory", "cuda:99", "--tensors", "1"];
    let refused = demo(&args);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stderr).contains("--memory cuda:99: "), "{}", text(&refused.stderr));
}

#[test]
fn over_af_xdp_at_the_smallest_path_mtu() {
    let _alone = alone();
    let Some(()) = af_xdp() else { return };
    let output = demo(&["-d", "af_xdp", "--tensors", "20", "--rounds", "1", "--json", "--path-mtu", "256"]);
    let report = json(&output);
    check_report(&report, "af_xdp", 4, 1);
    assert_eq!(report["ports"][0]["path_mtu"], 256);
}

#[test]
fn an_interruption_ends_ranks_removes_namespaces_and_completes_the_capture() {
    let _alone = alone();
    let Some(()) = af_xdp() else { return };
    let directory = Scratch::new();
    let capture = directory.0.join("rank0.pcapng");
    let args = ["--tensors", "20", "--rounds", "100", "--pcap", capture.to_str().unwrap()];
    let (mut child, ranks, stderr) = start_and_see_a_round(&args);
    signal(child.id(), Signal::INT);
    let start = Instant::now();
    let status = wait(&mut child);
    let said = stderr.join().unwrap();
    assert_eq!(status.code(), Some(130), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    assert!(start.elapsed() < Duration::from_secs(5), "it took {:?}", start.elapsed());
    check_nothing_is_left(child.id(), &ranks);
    check_capture(&capture);
}

#[test]
fn the_death_of_a_rank_is_told_and_ends_the_others() {
    let _alone = alone();
    let Some(()) = af_xdp() else { return };
    let (mut child, ranks, stderr) = start_and_see_a_round(&["--rounds", "100"]);
    signal(ranks[2], Signal::KILL);
    let status = wait(&mut child);
    let said = stderr.join().unwrap();
    assert_eq!(status.code(), Some(1), "{said}");
    let why = format!("(process {}) ended with signal: 9 (SIGKILL)", ranks[2]);
    assert!(said.contains(&why) && said.contains("rounds"), "no '{why}' in: {said}");
    check_nothing_is_left(child.id(), &ranks);
}

#[test]
fn ranks_outlive_no_demo_and_the_next_one_removes_its_namespaces() {
    let _alone = alone();
    let Some(()) = af_xdp() else { return };
    let (mut child, ranks, _) = start_and_see_a_round(&["--rounds", "100"]);
    let id = child.id();
    child.kill().unwrap();
    child.wait().unwrap();
    let start = Instant::now();
    while ranks.iter().any(|rank| is_alive(*rank)) {
        assert!(start.elapsed() < Duration::from_secs(5), "ranks go on without their demo");
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(namespaces_of(id).len(), 5);
    let next = demo(&["-d", "af_xdp", "--tensors", "2", "--rounds", "1"]);
    assert!(next.status.success(), "{next:?}");
    assert_eq!(namespaces_of(id), [""; 0]);
}

// --- checks of reports

fn check_report(report: &Value, driver: &str, ranks: u64, rounds: u64) {
    for checked in ["elements_checked", "tcp_elements_checked"] {
        assert_eq!(report[checked], ELEMENTS_OF_20 * ranks * rounds, "{report}");
    }
    assert!(report["machine"]["cores"].as_u64().unwrap() > 0 && report["why"] != "", "{report}");
    assert_eq!(report["wrong"], Value::Array(Vec::new()), "{report}");
    assert_eq!((&report["ranks"], &report["rounds"]), (&ranks.into(), &rounds.into()), "{report}");
    let ports = report["ports"].as_array().unwrap();
    assert_eq!(ports.len() as u64, ranks);
    // Each rank sends 2 (n − 1) / n of the tensors' bytes to its neighbour.
    let bytes = ELEMENTS_OF_20 * 4 * rounds * 2 * (ranks - 1) / ranks;
    for port in ports {
        assert_eq!(port["driver"], driver, "{report}");
        let needed = bytes / port["path_mtu"].as_u64().unwrap();
        for direction in ["sent", "received"] {
            assert!(
                port[direction].as_u64().unwrap() >= needed,
                "{direction} of {port}: not {needed} packets"
            );
        }
    }
    let sizes = report["sizes"].as_array().unwrap();
    let row = |bytes: u64| sizes.iter().find(|row| row["bytes"] == bytes).unwrap();
    assert_eq!(row(256)["tensors"], 9, "{report}");
    assert_eq!(report["total"]["bytes"], ELEMENTS_OF_20 * 4);
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
    let classes = report["classes"].as_array().unwrap();
    for row in sizes.iter().chain(classes).chain([&report["total"]]) {
        let bytes = row["bytes"].as_f64().unwrap();
        for times in [row, &row["tcp"]] {
            let value = |name: &str| times[name].as_f64().unwrap();
            let median = value("median_us");
            assert!(value("least_us") <= median && median <= value("most_us") && median > 1.0, "{row}");
            let algbw = bytes / median / 1e3;
            let busbw = algbw * 2.0 * (ranks as f64 - 1.0) / ranks as f64;
            assert!(near(value("algbw_gb_s"), algbw) && near(value("busbw_gb_s"), busbw), "{row}");
        }
        let medians = [&row["tcp"], row].map(|times| times["median_us"].as_f64().unwrap());
        assert!(near(row["tcp_ratio"].as_f64().unwrap(), medians[0] / medians[1]), "{row}");
    }
    let tensors = |rows: &[Value]| rows.iter().map(|row| row["tensors"].as_u64().unwrap()).sum::<u64>();
    assert_eq!((tensors(sizes), tensors(classes)), (20, 20), "{report}");
}

/// Every frame of the capture is RoCE, complete, with a valid ICRC; tshark and a second ICRC agree.
fn check_capture(file: &Path) {
    let output = run(Command::new(FERROCE).args(["dissect", "--json"]).arg(file));
    let (said, lines) = (text(&output.stderr), text(&output.stdout));
    assert!(output.status.success(), "{said}");
    let mut packets: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let last = packets.pop().unwrap();
    let (summary, count) = (&last["summary"], packets.len());
    assert!(count > 100, "{summary}");
    assert_eq!((&summary["roce_packets"], &summary["icrc_ok"]), (&count.into(), &count.into()), "{summary}");
    assert_eq!((&summary["icrc_bad"], &summary["icrc_truncated"]), (&0.into(), &0.into()), "{summary}");
    assert_eq!(judge::icrcs_are_right(file), count);
    judge::tshark_agrees(file, &packets);
}

// --- running the program

fn demo(args: &[&str]) -> Output {
    run(Command::new(FERROCE).arg("demo").args(args))
}

fn run(command: &mut Command) -> Output {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (stdout, stderr) = (read_all(child.stdout.take()), read_all(child.stderr.take()));
    let status = wait(&mut child);
    Output { status, stdout: stdout.join().unwrap().into(), stderr: stderr.join().unwrap().into() }
}

fn start(args: &[&str]) -> Child {
    let mut command = Command::new(FERROCE);
    command.args(["demo", "-d", "af_xdp"]).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

/// Starts a demo over AF_XDP and waits until its first round is reported; returns it with the process ids of its ranks,
/// by rank.
fn start_and_see_a_round(args: &[&str]) -> (Child, Vec<u32>, thread::JoinHandle<String>) {
    let mut child = start(args);
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut line = String::new();
    while !line.starts_with("round 1 of 100") {
        line.clear();
        assert_ne!(stderr.read_line(&mut line).unwrap(), 0, "it ended before the first round");
    }
    let ranks = children_of(child.id());
    assert_eq!(ranks.len(), 4, "rank processes");
    assert_eq!(namespaces_of(child.id()).len(), 5, "namespaces");
    (child, ranks, read_all(Some(stderr)))
}

fn wait(child: &mut Child) -> std::process::ExitStatus {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status;
        }
        if start.elapsed() > LIMIT {
            child.kill().unwrap();
            panic!("it runs for more than {LIMIT:?}");
        }
        thread::sleep(Duration::from_millis(5));
    }
}

fn read_all(from: Option<impl Read + Send + 'static>) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut text = String::new();
        if let Some(mut from) = from {
            from.read_to_string(&mut text).unwrap();
        }
        text
    })
}

fn json(output: &Output) -> Value {
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_str(text(&output.stdout).trim()).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

// --- the machine

/// One demo at a time: four ranks suffice to load any machine.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether AF_XDP is available here, checked independently of the program under test; prints the reason if not.
fn af_xdp() -> Option<()> {
    let protocols = fs::read_to_string("/proc/net/protocols").unwrap_or_default();
    let why = if !is_root() {
        "needs root, for network namespaces and AF_XDP"
    } else if !protocols.lines().any(|line| line.starts_with("XDP ")) {
        "this kernel has no AF_XDP (/proc/net/protocols)"
    } else if Command::new("ip").arg("-V").stdout(Stdio::null()).status().is_err() {
        "no `ip` command (package iproute2)"
    } else {
        return Some(());
    };
    println!("skipped: {why}");
    None
}

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap();
    uids.split_whitespace().nth(1) == Some("0")
}

/// The processes started by `parent`, oldest first. (A demo starts its ranks in their order.)
fn children_of(parent: u32) -> Vec<u32> {
    let mut children: Vec<(u64, u32)> = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // After the name in parentheses: state, parent, …, and the start time as the 20th.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
        if fields[1] == parent.to_string() {
            children.push((fields[19].parse().unwrap(), process));
        }
    }
    children.sort_unstable();
    children.into_iter().map(|(_, process)| process).collect()
}

fn is_alive(process: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim().starts_with('Z'))
}

/// The network namespaces with a process id in their names.
fn namespaces_of(process: u32) -> Vec<String> {
    let entries = fs::read_dir("/run/netns").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(&format!("ferroce-demo-{process}-"))).collect()
}

fn check_nothing_is_left(demo: u32, ranks: &[u32]) {
    assert_eq!(namespaces_of(demo), [""; 0]);
    let left: Vec<_> = ranks.iter().filter(|rank| is_alive(**rank)).collect();
    assert!(left.is_empty(), "processes left: {left:?}");
}

/// A directory with rights for all users, removed on drop.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Scratch {
        static COUNTER: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("ferroce-demo-test-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        Scratch(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
