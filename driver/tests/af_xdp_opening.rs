//! Opening AF_XDP ports: refusals with their reasons, and that nothing remains after a port. Needs root; otherwise
//! prints the reason and passes.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::io::{self, BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::Error;
use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::netlink::{Netlink, XdpMode};
use ferroce_driver_test_support::exchange::cross;
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, ip};
use ferroce_driver_test_support::patience::until;

// ---------------------------------------------------------------- remains of a port

#[test]
fn nothing_stays_after_drop_and_opening_again_works_at_once() {
    let Some(pair) = Namespaces::new(9000) else { return };
    for round in 0..5 {
        let (mut a, mut b) = pair.in_both(open);
        assert_eq!(pair.in_b(attached), Some(XdpMode::Native), "round {round}");
        cross(&mut a, &mut b, 1082, 100);
        drop((a, b));
        assert_eq!(pair.in_b(attached), None, "round {round}");
    }
}

#[test]
fn nothing_stays_after_a_kill_or_a_panic() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let mut a = pair.in_a(open);
    for end in ["hold", "panic"] {
        let mut child = spawn(&pair.b, end);
        assert_eq!(read_line(&mut child), "open");
        assert_eq!(pair.in_b(attached), Some(XdpMode::Native));
        match end {
            "hold" => child.kill().unwrap(),
            _ => drop(child.stdin.take()), // panics now, after the program was checked
        }
        child.wait().unwrap();
        assert_eq!(pair.in_b(attached), None, "after {end}");
        let mut b = pair.in_b(open);
        cross(&mut a, &mut b, 1082, 100);
    }
}

#[test]
fn queues_of_one_interface_share_a_program_that_outlives_its_first_user() {
    let Some(pair) = Namespaces::with_queues(1500, 2) else { return };
    let on = |queue| AfXdpConfig::new(VETH).sharing(false).queue(queue);
    let mut a = [0, 1].map(|queue| pair.in_a(|| AfXdp::open(&on(queue))).unwrap());
    let mut first = spawn(&pair.b, "hold");
    assert_eq!(read_line(&mut first), "open");
    let program = pair.in_b(program);
    let mut b = pair.in_b(|| AfXdp::open(&on(1))).unwrap();
    assert_eq!(pair.in_b(self::program), program);
    cross(&mut a[1], &mut b, 1082, 100);

    let error = pair.in_b(|| AfXdp::open(&on(1).roce_v1(true))).unwrap_err().to_string();
    assert!(error.starts_with("roce_v1 = true: false, as the other"), "{error}");

    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(pair.in_b(self::program), program);
    cross(&mut a[1], &mut b, 1082, 100);
    let mut again = pair.in_b(|| AfXdp::open(&on(0))).unwrap();
    cross(&mut a[0], &mut again, 1082, 100);
    drop((b, again));
    assert_eq!(pair.in_b(attached), None);
}

// ---------------------------------------------------------------- errors

#[test]
fn a_missing_or_down_interface_is_named() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let error = open_in_a(&pair, AfXdpConfig::new("nosuch0"));
    assert_eq!(error, "no interface named 'nosuch0' in this network namespace; there are: lo, veth0");
    ip(&format!("-n {} link set {VETH} down", pair.a));
    let error = open_in_a(&pair, AfXdpConfig::new(VETH).sharing(false));
    assert_eq!(error, "interface 'veth0' is down; `ip link set veth0 up`");
}

#[test]
fn parameters_out_of_range_are_named() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let config = AfXdpConfig::new(VETH).sharing(false);
    let error = open_in_a(&pair, config.clone().queue(3));
    assert_eq!(error, "queue = 3: 'veth0' has 1 queue(s), counted from 0");
    let error = open_in_a(&pair, config.clone().rx_frames(1000));
    assert_eq!(error, "rx_frames = 1000: a power of two from 64 to 65536");
    let error = open_in_a(&pair, config.tx_frames(0));
    assert_eq!(error, "tx_frames = 0: 1 to 1024");
}

#[test]
fn a_busy_queue_is_named_and_its_owner_undisturbed() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
    let start = Instant::now();
    let error = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))).unwrap_err();
    assert!(matches!(&error, Error::QueueBusy { queue: 0, interface, .. } if interface == VETH), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5));
    cross(&mut a, &mut b, 1082, 100);
    cross(&mut b, &mut a, 1082, 100);
}

#[test]
fn missing_capabilities_are_named_with_the_remedy() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let without = |capabilities: &[u32]| {
        pair.in_a(|| {
            drop_capabilities(capabilities);
            AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap_err().to_string()
        })
    };
    let error = without(&[CAP_NET_RAW]);
    assert!(error.starts_with("opening an AF_XDP socket on 'veth0' needs CAP_NET_RAW: "), "{error}");
    assert!(error.contains("the process lacks CAP_NET_RAW; run as root, or `setcap"), "{error}");
    // The kernel detaches the program of the first attempt a moment after its last holder has closed it, and checking
    // an attached program needs more privileges.
    let is_gone = || pair.in_a(program).is_none().then_some(());
    until(Duration::from_secs(10), is_gone, || "the end of a failed open's program".to_owned());
    let error = without(&(0..64).collect::<Vec<_>>());
    assert!(error.contains("on 'veth0' needs CAP_BPF and CAP_NET_ADMIN: "), "{error}");
    assert!(error.contains("lacks CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF;"), "{error}");
}

#[test]
fn the_documented_capabilities_are_enough() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let others: Vec<_> =
        (0..64).filter(|c| ![CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK, CAP_BPF].contains(c)).collect();
    let open = || {
        drop_capabilities(&others);
        AfXdp::open(&AfXdpConfig::new(VETH).sharing(false))
    };
    let (mut a, mut b) = (pair.in_a(open).unwrap(), pair.in_b(open).unwrap());
    cross(&mut a, &mut b, 1082, 100);
    // Only checking other programs needs more.
    let error = pair.in_a(open).unwrap_err().to_string();
    assert!(error.contains("on 'veth0' needs CAP_SYS_ADMIN: run as root, or detach it"), "{error}");
}

#[test]
fn too_little_locked_memory_is_named_with_the_remedy() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let mut child = spawn(&pair.a, "memlock");
    let error = read_line(&mut child);
    child.wait().unwrap();
    assert!(
        error.contains("on 'veth0' needs more locked memory (RLIMIT_MEMLOCK) or CAP_IPC_LOCK"),
        "{error}"
    );
    assert!(
        error.contains("18432 KiB are needed in addition to the memory that this user has already locked"),
        "{error}"
    );
}

// ---------------------------------------------------------------- helpers

/// The body of child processes, not a test: see `spawn`.
#[test]
fn child() {
    let Ok(role) = std::env::var("FERROCE_TEST_CHILD") else { return };
    if role == "memlock" {
        // The limit is for the process, so it must not affect other tests.
        let limit = libc::rlimit { rlim_cur: 65536, rlim_max: 65536 };
        // SAFETY: a pointer to an `rlimit` that outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
        drop_capabilities(&[CAP_IPC_LOCK, CAP_SYS_RESOURCE]);
        println!("\nchild: {}", AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap_err());
        return;
    }
    let _port = AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).queue(0)).unwrap();
    println!("\nchild: open");
    if role == "panic" {
        let _ = io::stdin().read_line(&mut String::new());
        panic!("as told");
    }
    thread::sleep(Duration::from_secs(60));
}

/// Starts this test program in a namespace as a child with the role `role`.
fn spawn(namespace: &str, role: &str) -> Child {
    let program = std::env::current_exe().unwrap();
    Command::new("ip")
        .args(["netns", "exec", namespace])
        .arg(program)
        .args(["--exact", "child", "--nocapture"])
        .env("FERROCE_TEST_CHILD", role)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// The line that a child prints.
fn read_line(child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let said = lines.map_while(Result::ok).find_map(|l| l.strip_prefix("child: ").map(str::to_owned));
    said.unwrap_or_else(|| format!("the child ended with {:?}", child.wait()))
}

fn open() -> AfXdp {
    AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap()
}

fn open_in_a(pair: &Namespaces, config: AfXdpConfig) -> String {
    pair.in_a(|| AfXdp::open(&config)).unwrap_err().to_string()
}

fn attached() -> Option<XdpMode> {
    Netlink::open().unwrap().interface(VETH).unwrap().xdp.map(|xdp| xdp.mode)
}

fn program() -> Option<u32> {
    Netlink::open().unwrap().interface(VETH).unwrap().xdp.map(|xdp| xdp.program)
}

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_RESOURCE: u32 = 24;
const CAP_BPF: u32 = 39;

/// Removes capabilities from the calling thread.
fn drop_capabilities(drop: &[u32]) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable: low words, then high words.
    let mut data = [0u32; 6];
    // SAFETY: header and data have the layout of version 3 and outlive the call.
    let got = unsafe { libc::syscall(libc::SYS_capget, header.as_ptr(), data.as_mut_ptr()) };
    assert_eq!(got, 0, "capget: {}", io::Error::last_os_error());
    for capability in drop {
        let word = (capability / 32) as usize * 3;
        for set in &mut data[word..word + 3] {
            *set &= !(1 << (capability % 32));
        }
    }
    // SAFETY: as above.
    let set = unsafe { libc::syscall(libc::SYS_capset, header.as_ptr(), data.as_ptr()) };
    assert_eq!(set, 0, "capset: {}", io::Error::last_os_error());
}
