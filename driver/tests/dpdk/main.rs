//! Ports of DPDK on its virtual devices. EAL starts once in a process, so each port is opened by a separate process:
//! this program again, with its role in the environment.
#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod frames;

use std::collections::VecDeque;
use std::env;
use std::fs::File;
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::dpdk::{Dpdk, DpdkConfig};
use ferroce_driver::pcap::Reader;
use ferroce_driver::{Error, Memory, Nanos, PacketDriver, Refusal, RefusalReason};
use ferroce_driver_test_support::dpdk;
use ferroce_driver_test_support::exchange::send;
use ferroce_driver_test_support::keep;
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, ip};
use ferroce_driver_test_support::patience::until;
use frames::{Numbered, frame, gathered, ours};

// ---------------------------------------------------------------- tests

#[test]
fn memif_carries_every_size_both_ways() {
    if !dpdk::is_there() {
        return;
    }
    let device = |role| format!("net_memif0,role={role},bsize=9100,rsize=9");
    memif(&device("server"), &device("client"), &[60, 64, 1082, 2106, 4154, 9000]);
}

#[test]
fn memif_carries_frames_of_a_small_buffer() {
    if !dpdk::is_there() {
        return;
    }
    let device = |role| format!("net_memif0,role={role},rsize=5");
    memif(&device("server"), &device("client"), &[60, 1082, 2048]);
}

#[test]
fn a_zero_copy_client_sends_and_receives() {
    if !dpdk::is_there() {
        return;
    }
    let device = |role| format!("net_memif0,role={role},bsize=4352,rsize=8,zero-copy=yes");
    let both = memif(&device("server"), &device("client"), &[60, 1082, 4154]);
    assert!(both.iter().all(|said| said.contains("payloads copied (a memif copies as well")), "{both:?}");
}

#[test]
fn a_ring_returns_what_it_is_given() {
    if !dpdk::is_there() {
        return;
    }
    let said = Role::new("echo", "net_ring0@10.0.0.1", "--vdev=net_ring0").sizes(&[60, 4154, 9000]).run();
    assert!(said.contains("payloads copied (the other end of a ring"), "{said}");
}

#[test]
fn buffers_of_kept_frames_come_back() {
    if !dpdk::is_there() {
        return;
    }
    Role::new("keep", "net_ring0@10.0.0.1", "--vdev=net_ring0").run();
}

#[test]
fn null_takes_everything() {
    if !dpdk::is_there() {
        return;
    }
    Role::new("null", "net_null0@10.0.0.1", "--vdev=net_null0").run();
}

#[test]
fn a_written_capture_is_read_back() {
    if !dpdk::is_there() {
        return;
    }
    let file = scratch("pcap");
    let device = format!("--vdev=net_pcap0,tx_pcap={}", file.display());
    Role::new("write", "net_pcap0@10.0.0.1", &device).sizes(&SIZES).run();
    let mut reader = Reader::open(&file).unwrap();
    for n in 0..WRITTEN {
        let record = reader.next_record().unwrap().unwrap();
        assert!(record.captured == frame(SIZES[n % SIZES.len()], n), "record {n}");
    }
    assert!(reader.next_record().unwrap().is_none());
    let device = format!("--vdev=net_pcap0,rx_pcap={}", file.display());
    Role::new("read", "net_pcap0@10.0.0.1", &device).sizes(&SIZES).run();
    std::fs::remove_file(file).unwrap();
}

#[test]
fn ports_of_one_process_are_opened_and_opened_again() {
    if !dpdk::is_there() {
        return;
    }
    Role::new("ports", "", "--vdev=net_ring0 --vdev=net_null0 --vdev=net_null1").run();
}

#[test]
fn af_packet_on_a_veth_has_the_kernels_addresses() {
    if !dpdk::is_there() {
        return;
    }
    let Some(pair) = Namespaces::new(1500) else { return };
    let said = between(&pair, "net_af_packet0", &format!("--vdev=net_af_packet0,iface={VETH},blocksz=65536"));
    let gathers = "payloads sent from registered memory, the kernel's ARP and ND";
    assert!(said.contains(gathers), "{said}");
}

#[test]
fn af_packet_has_large_frames_if_its_argument_allows() {
    if !dpdk::is_there() {
        return;
    }
    let Some(pair) = Namespaces::new(4200) else { return };
    let device = format!("--vdev=net_af_packet0,iface={VETH},blocksz=65536,framesz=8192");
    let role = |name, namespace: &str| {
        Role::new(name, "net_af_packet0", &device).sizes(&[60, 4154]).inside(namespace)
    };
    pair_up(role("echo-back", &pair.b), role("echo", &pair.a));
}

#[test]
fn af_xdp_by_dpdk_on_a_veth_answers_arp_itself() {
    if !dpdk::is_there() {
        return;
    }
    let Some(pair) = Namespaces::new(1500) else { return };
    let said = between(&pair, "net_af_xdp0", &format!("--vdev=net_af_xdp0,iface={VETH},busy_budget=0"));
    assert!(said.contains("own ARP and ND"), "{said}");
}

#[test]
fn tap_and_the_kernel_find_each_other() {
    if !dpdk::is_there() {
        return;
    }
    let Some(pair) = Namespaces::new(1500) else { return };
    if !std::path::Path::new("/dev/net/tun").exists() {
        println!("skipped: no /dev/net/tun");
        return;
    }
    let role = Role::new("tap", "net_tap0@10.7.0.2/24,fd07::2/64", "--vdev=net_tap0,iface=dtap0");
    role.inside(&pair.a).run();
}

#[test]
fn what_cannot_be_opened_is_named() {
    if !dpdk::is_there() {
        return;
    }
    Role::new("refusals", "", "--vdev=net_memif0,role=server,socket=ferroce-unused --vdev=net_null0").run();
}

/// Not a test: the code of a process with a role.
#[test]
fn role() {
    let Ok(role) = env::var(ROLE) else { return };
    let config = config();
    match role.as_str() {
        "echo" => echo(&mut open(&config)),
        "echo-back" => echo_back(&mut open(&config)),
        "keep" => keep(open(&config)),
        "null" => null(&mut open(&config)),
        "write" => write(&mut open(&config)),
        "read" => read(&mut open(&config)),
        "tap" => tap(&mut open(&config)),
        "ports" => ports(config.eal),
        "refusals" => refusals(config.eal),
        other => panic!("no role {other}"),
    }
    println!("{DONE}");
}

// ---------------------------------------------------------------- roles

/// Keeps frames, which outlive the port. Their buffers become available again.
fn keep(mut port: Dpdk) {
    let limit = port.keeps();
    let kept = keep::keeps_frames(
        limit,
        true,
        |n| frame(1082, n),
        |frame, sink| {
            let deadline = Instant::now() + LIMIT;
            let mut unsent = Some(());
            let mut source = |buffer: &mut [u8]| {
                unsent.take()?;
                buffer[..frame.len()].copy_from_slice(frame);
                Some(frame.len())
            };
            assert_eq!(port.tx_burst(Nanos::ZERO, &mut source).unwrap(), 1);
            while port.rx_burst(Nanos::ZERO, sink).unwrap() == 0 {
                assert!(Instant::now() < deadline, "nothing came back");
            }
        },
    );
    let copies: Vec<_> = kept.iter().map(|frame| frame.to_vec()).collect();
    drop(port);
    assert!(!kept.is_empty() && kept.iter().zip(&copies).all(|(kept, copy)| **kept == **copy));
}

/// Sends frames of each size, contiguous and gathered, receives them back, and compares every byte.
fn echo(port: &mut Dpdk) {
    if let Ok(peer) = env::var(PEER) {
        let mac = port.resolve_blocking(peer.parse().unwrap(), LIMIT).unwrap();
        assert_ne!(mac, port.capabilities().mac);
    }
    let payload = Memory::copy_of(&frame(9000, 0)).unwrap();
    let gathers = port.capabilities().description.contains("payloads sent from registered memory");
    for size in sizes() {
        for gather in [false, gathers] {
            let (mut sent, mut received) = (0, 0);
            let deadline = Instant::now() + LIMIT;
            while received < ROUNDS {
                let mut source =
                    Numbered { size, next: sent, end: ROUNDS.min(received + WINDOW), payload: None };
                source.payload = gather.then_some(&payload);
                sent += port.tx_burst(Nanos::ZERO, &mut source).unwrap();
                port.rx_burst(Nanos::ZERO, &mut |bytes: &[u8]| {
                    if ours(bytes) {
                        let expected = if gather { gathered(size, received) } else { frame(size, received) };
                        assert!(bytes == expected, "frame {received} of {size} bytes, gathered: {gather}");
                        received += 1;
                    }
                })
                .unwrap();
                assert!(Instant::now() < deadline, "{received} of {sent} frames of {size} bytes came back");
            }
        }
    }
    // Tells the echoing process to end.
    let mut last = Some(());
    port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
        last.take()?;
        let bytes = frame(60, END);
        buffer[..60].copy_from_slice(&bytes);
        Some(60)
    })
    .unwrap();
    let stats = port.stats();
    assert_eq!((stats.rx_dropped, stats.tx_dropped), (0, 0));
    if port.capabilities().description.starts_with("net_ring") {
        // For an existing frame, a wait of any duration ends immediately.
        port.wait(Duration::MAX).unwrap();
    }
    // Frames that the peer has not received yet would be lost with the port, and frames left in a ring would stay
    // there. A memif is not polled any more: DPDK unmaps it during a poll when its peer ends.
    thread::sleep(Duration::from_millis(200));
    if port.capabilities().description.starts_with("net_ring") {
        while port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap() > 0 {}
    }
}

/// Sends received frames back until the last one.
fn echo_back(port: &mut Dpdk) {
    let mut waiting = VecDeque::new();
    let mut ended = false;
    let deadline = Instant::now() + LIMIT;
    while !ended {
        port.rx_burst(Nanos::ZERO, &mut |bytes: &[u8]| {
            if bytes[..] == frame(60, END) {
                ended = true;
            } else if ours(bytes) {
                waiting.push_back(bytes.to_vec());
            }
        })
        .unwrap();
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            let bytes: Vec<u8> = waiting.pop_front()?;
            buffer[..bytes.len()].copy_from_slice(&bytes);
            Some(bytes.len())
        })
        .unwrap();
        if waiting.is_empty() {
            port.wait(Duration::from_millis(1)).unwrap();
        }
        assert!(Instant::now() < deadline, "no end");
    }
}

fn null(port: &mut Dpdk) {
    assert!(port.capabilities().description.contains("payloads copied (no process reads them)"));
    let mut source = Numbered { size: 1082, next: 0, end: 5000, payload: None };
    while source.next < source.end {
        port.tx_burst(Nanos::ZERO, &mut source).unwrap();
    }
    assert_eq!((port.stats().tx_frames, port.stats().tx_bytes), (5000, 5000 * 1082));
    // It receives zeros, which have no valid destination.
    for _ in 0..100 {
        port.rx_burst(Nanos::ZERO, &mut |bytes: &[u8]| assert_eq!(bytes[..6], [0; 6])).unwrap();
    }
}

fn write(port: &mut Dpdk) {
    let mut n = 0;
    while n < WRITTEN {
        port.tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
            let size = SIZES[n % SIZES.len()];
            buffer[..size].copy_from_slice(&frame(size, n));
            n += 1;
            (n <= WRITTEN).then_some(size)
        })
        .unwrap();
    }
    assert_eq!(port.stats().tx_frames, WRITTEN as u64);
}

fn read(port: &mut Dpdk) {
    let mut n = 0;
    let deadline = Instant::now() + LIMIT;
    while n < WRITTEN {
        port.rx_burst(Nanos::ZERO, &mut |bytes: &[u8]| {
            assert!(bytes == frame(SIZES[n % SIZES.len()], n), "frame {n}");
            n += 1;
        })
        .unwrap();
        assert!(Instant::now() < deadline, "{n} frames");
    }
}

/// The kernel is the other end.
fn tap(port: &mut Dpdk) {
    ip("link set dtap0 address 02:00:00:00:00:07");
    ip("addr add 10.7.0.1/24 dev dtap0");
    ip("addr add fd07::1/64 dev dtap0 nodad");
    ip("link set dtap0 up");
    for (kernel, own) in [("10.7.0.1", "10.7.0.2"), ("fd07::1", "fd07::2")] {
        // The port asks, and the kernel answers.
        let peer: IpAddr = kernel.parse().unwrap();
        assert_eq!(port.resolve_blocking(peer, LIMIT).unwrap(), [2, 0, 0, 0, 0, 7], "{kernel}");
        // The kernel asks, and the port answers. The kernel keeps the datagram until then.
        ip("neigh flush dev dtap0");
        let socket = UdpSocket::bind((peer, 0)).unwrap();
        socket.send_to(b"to port 4791", (own.parse::<IpAddr>().unwrap(), 4791)).unwrap();
        let mut arrived = false;
        let deadline = Instant::now() + LIMIT;
        while !arrived {
            port.wait(Duration::from_millis(10)).unwrap();
            // No descriptor signals frames: a caller that waits checks again soon.
            let armed = port.arm().unwrap();
            assert!(armed.fd.is_none() && armed.longest <= Duration::from_micros(50), "{armed:?}");
            port.rx_burst(Nanos::ZERO, &mut |bytes: &[u8]| arrived |= bytes.ends_with(b"to port 4791"))
                .unwrap();
            assert!(Instant::now() < deadline, "nothing from {kernel}");
        }
    }
    // The kernel has no socket on port 4791, and reports this.
    let mut packet = frame(150, 0);
    packet[..6].copy_from_slice(&[2, 0, 0, 0, 0, 7]);
    packet[24..34].copy_from_slice(&[0x26, 0x55, 10, 7, 0, 2, 10, 7, 0, 1]);
    send(port, &packet);
    let look = || port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).map(|_| port.next_refusal()).unwrap();
    let refusal = until(LIMIT, look, || "no word of the kernel".to_owned());
    assert_eq!((refusal.peer, refusal.reason), ("10.7.0.1".parse().unwrap(), RefusalReason::Port));
    assert_eq!(refusal.quoted[..], packet[42..42 + Refusal::QUOTED]);
    let nobody = port.resolve_blocking("10.7.0.9".parse().unwrap(), LIMIT);
    assert!(matches!(nobody, Err(Error::NoNeighbour { protocol: "ARP", .. })), "{nobody:?}");
    let beyond = port.resolve("10.8.0.1".parse().unwrap());
    assert!(matches!(beyond, Err(Error::NoRoute { .. })), "{beyond:?}");
}

/// Several ports, later opens, several queues, and a port that was closed.
fn ports(eal: Vec<String>) {
    let address = [("10.0.0.1".parse().unwrap(), 24)];
    let with = |port: &str, eal: &[String]| DpdkConfig::new(port, &address).eal(eal.to_vec());
    let ring = open(&with("net_ring0", &eal));
    let null = open(&with("net_null0", &[]));
    let again = Dpdk::open(&with("net_ring0", &eal)).unwrap_err().to_string();
    assert!(again.contains("not open in this process"), "{again}");
    let other = Dpdk::open(&with("net_null1", &["-m".into(), "1".into()])).unwrap_err().to_string();
    assert!(other.contains("once per process"), "{other}");
    drop((ring, null));
    for _ in 0..3 {
        echo(&mut open(&with("net_ring0", &eal)));
    }
    let mut two = Dpdk::open_queues(&with("net_null1", &[]), 2).unwrap();
    assert!(two[1].capabilities().description.contains("queue 1 of 2"));
    // Each in its own thread.
    thread::scope(|scope| {
        for port in &mut two {
            scope.spawn(|| {
                let mut source = Numbered { size: 64, next: 0, end: 1000, payload: None };
                while source.next < source.end {
                    port.tx_burst(Nanos::ZERO, &mut source).unwrap();
                }
            });
        }
    });
    assert!(two.iter().all(|port| port.stats().tx_frames == 1000));
}

fn refusals(eal: Vec<String>) {
    let address = [("10.0.0.1".parse().unwrap(), 24)];
    let config = |port: &str, mtu: Option<u32>| DpdkConfig::new(port, &address).eal(eal.clone()).mtu(mtu);
    for (config, words) in [
        (config("net_nosuch0", None), ["'net_nosuch0'", "net_memif0, net_null0"]),
        (config("net_memif0", Some(4096)), ["mtu = 4096", "68 to 2030"]),
        (config("net_null0", Some(40)), ["mtu = 40", "68 to"]),
        (DpdkConfig::new("net_null0", &[]).eal(eal.clone()), ["addresses", "net_null0@10.0.0.1/24"]),
    ] {
        let refusal = Dpdk::open(&config).unwrap_err().to_string();
        assert!(words.iter().all(|word| refusal.contains(word)), "{refusal}");
    }
    // The refusals leave nothing behind.
    open(&config("net_null0", None));
}

// ---------------------------------------------------------------- processes

const ROLE: &str = "FERROCE_DPDK_ROLE";
const PORT: &str = "FERROCE_DPDK_PORT";
const EAL: &str = "FERROCE_DPDK_EAL";
const FRAMES: &str = "FERROCE_DPDK_SIZES";
const READY: &str = "FERROCE_DPDK_READY";
const PEER: &str = "FERROCE_DPDK_PEER";
const DONE: &str = "the role is played";

/// The arguments of all processes: each has its own memory, which others do not see.
const COMMON: &str = "--no-huge -m 384 --no-shconf --no-pci --no-telemetry --log-level=lib.eal:warning";
const LIMIT: Duration = Duration::from_secs(60);
const ROUNDS: usize = 2000;
/// Less than the smallest ring on the path has room for.
const WINDOW: usize = 24;
/// The number of the frame that ends an echo.
const END: usize = 0xffff_ffff;
const SIZES: [usize; 4] = [60, 1082, 4154, 9000];
const WRITTEN: usize = 1000;

/// The role of a process.
struct Role {
    name: String,
    environment: Vec<(&'static str, String)>,
    namespace: Option<String>,
}

impl Role {
    fn new(name: &str, port: &str, devices: &str) -> Role {
        let environment = vec![
            (ROLE, name.to_owned()),
            (PORT, port.to_owned()),
            (EAL, format!("{COMMON} {devices}")),
            (FRAMES, "60".to_owned()),
        ];
        Role { name: format!("{name} of {port}"), environment, namespace: None }
    }

    fn sizes(mut self, sizes: &[usize]) -> Role {
        let list: Vec<_> = sizes.iter().map(usize::to_string).collect();
        self.environment.push((FRAMES, list.join(" ")));
        self
    }

    fn peer(mut self, peer: &str) -> Role {
        self.environment.push((PEER, peer.to_owned()));
        self
    }

    fn inside(mut self, namespace: &str) -> Role {
        self.namespace = Some(namespace.to_owned());
        self
    }

    fn start(&self) -> Child {
        let program = env::current_exe().unwrap();
        let mut command = match &self.namespace {
            None => Command::new(program),
            Some(namespace) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", namespace]).arg(program);
                command
            }
        };
        command.args(["role", "--exact", "--nocapture"]).envs(self.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    /// Waits for the end, and returns the output.
    fn end(&self, child: Child) -> String {
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        let said = format!("{}{}", String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        assert!(status.success() && said.contains(DONE), "{}: {status}\n{said}", self.name);
        said
    }

    fn run(self) -> String {
        self.end(self.start())
    }
}

/// Runs two roles at once. Returns their outputs.
fn pair_up(mut first: Role, second: Role) -> [String; 2] {
    // A memif's client tries once to reach its server, and a message to a missing socket is lost.
    let ready = scratch("ready");
    first.environment.push((READY, ready.display().to_string()));
    let mut one = first.start();
    let deadline = Instant::now() + LIMIT;
    while !ready.exists() && one.try_wait().unwrap().is_none() {
        assert!(Instant::now() < deadline, "{} does not get ready", first.name);
        thread::sleep(Duration::from_millis(5));
    }
    let _ = std::fs::remove_file(ready);
    let two = second.start();
    let said = two.wait_with_output().unwrap();
    if !said.status.success() {
        let _ = one.kill();
    }
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(said.status.success() && text.contains(DONE), "{}: {}\n{text}", second.name, said.status);
    [first.end(one), text]
}

fn memif(server: &str, client: &str, sizes: &[usize]) -> [String; 2] {
    let socket = scratch("sock");
    let eal = |device: &str| {
        format!("--single-file-segments --vdev={device},socket-abstract=no,socket={}", socket.display())
    };
    let server = Role::new("echo-back", "net_memif0@10.0.0.1/24,fd00::1/64", &eal(server)).sizes(sizes);
    let client = Role::new("echo", "net_memif0@10.0.0.2/24,fd00::2/64", &eal(client)).sizes(sizes);
    pair_up(server, client.peer("fd00::1"))
}

fn between(pair: &Namespaces, port: &str, device: &str) -> String {
    let role =
        |name, namespace: &str| Role::new(name, port, device).sizes(&[60, 1082, 1514]).inside(namespace);
    let [_, said] = pair_up(role("echo-back", &pair.b), role("echo", &pair.a).peer("10.9.0.2"));
    said
}

fn config() -> DpdkConfig {
    let port = env::var(PORT).unwrap();
    let (name, list) = port.split_once('@').unwrap_or((&port, ""));
    let address = |text: &str| {
        let (address, prefix) = text.split_once('/').unwrap_or((text, "24"));
        (address.parse().unwrap(), prefix.parse().unwrap())
    };
    let addresses: Vec<_> = list.split(',').filter(|item| !item.is_empty()).map(address).collect();
    let eal = env::var(EAL).unwrap().split_whitespace().map(str::to_owned).collect();
    DpdkConfig::new(name, &addresses).eal(eal)
}

fn open(config: &DpdkConfig) -> Dpdk {
    let port = Dpdk::open(config).unwrap_or_else(|error| panic!("{}: {error}", config.port));
    println!("{}", port.capabilities().description);
    if let Ok(ready) = env::var(READY) {
        File::create(ready).unwrap();
    }
    port
}

fn sizes() -> Vec<usize> {
    env::var(FRAMES).unwrap().split_whitespace().map(|size| size.parse().unwrap()).collect()
}

/// A file of this test, which does not exist yet.
fn scratch(extension: &str) -> PathBuf {
    use std::sync::atomic::{AtomicU32, Ordering};
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let name = format!("ferroce-dpdk-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    let file = env::temp_dir().join(name).with_extension(extension);
    assert!(File::open(&file).is_err());
    file
}
