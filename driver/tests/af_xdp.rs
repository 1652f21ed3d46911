//! AF_XDP and rtnetlink on real interfaces: veth pairs between namespaces of the test's own. Needs
//! root; prints why and passes where it can't run.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;

use std::io::{self, BufRead, BufReader};
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Pair, VETH, ip};
use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::netlink::{Neighbour, Netlink, XdpMode};
use ferroce_driver::{Error, Nanos, PacketDriver};

// ---------------------------------------------------------------- frames

#[test]
fn frames_cross_bit_exact_at_mtu_9000() {
    let Some(pair) = Pair::new(9000) else { return };
    let (mut a, mut b) = open_both(&pair);
    assert_eq!(a.capabilities().max_frame, 9018);
    for size in [64, 1082, 2106, 3840, 3841, 4154, 7680, 7681, 9014] {
        cross(&mut a, &mut b, size, 3000);
        cross(&mut b, &mut a, size, 3000);
    }
    assert_eq!((a.stats().rx_dropped, b.stats().rx_dropped), (0, 0));
    assert_eq!((a.stats().tx_dropped, b.stats().tx_dropped), (0, 0));
}

#[test]
fn frames_cross_bit_exact_at_smaller_mtus() {
    for mtu in [1500, 3506, 4200] {
        let Some(pair) = Pair::new(mtu) else { return };
        let (mut a, mut b) = open_both(&pair);
        for size in [60, 64, 1082, mtu as usize + 14] {
            cross(&mut a, &mut b, size, 3000);
            cross(&mut b, &mut a, size, 3000);
        }
    }
}

#[test]
fn both_directions_at_once_from_two_threads() {
    let Some(pair) = Pair::new(9000) else { return };
    let (mut a, mut b) = open_both(&pair);
    let exchange = |port: &mut AfXdp, to: [u8; 6], seed: usize, expect: usize| {
        let (mut sent, mut received) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(30);
        while (sent < 20_000 || received < 20_000) && Instant::now() < deadline {
            // No more under way than the other side has buffers for.
            let limit = (received + 512).min(20_000).max(sent);
            let mac = port.capabilities().mac;
            let mut next = sent..limit;
            sent += port
                .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                    let n = next.next()?;
                    let frame = Roce::v4(to, mac).build(4154, n + seed);
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                })
                .unwrap();
            port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
                assert!(frame == Roce::v4(mac, to).build(4154, received + expect), "frame {received}");
                received += 1;
            })
            .unwrap();
        }
        (sent, received)
    };
    let (mac_a, mac_b) = (a.capabilities().mac, b.capabilities().mac);
    thread::scope(|scope| {
        let other = scope.spawn(|| exchange(&mut b, mac_a, 7, 3));
        assert_eq!(exchange(&mut a, mac_b, 3, 7), (20_000, 20_000));
        assert_eq!(other.join().unwrap(), (20_000, 20_000));
    });
}

#[test]
fn only_roce_is_redirected() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, mut b) = open_both(&pair);
    let (to, from) = (b.capabilities().mac, a.capabilities().mac);
    let roce = || Roce::v4(to, from);
    let mut long_header = roce().build(200, 1);
    long_header[14] = 0x47; // IHL 7: 8 bytes of options before the UDP header
    long_header.splice(34..34, [1u8; 8]);
    let redirected = [
        ("IPv4", roce().build(64, 1)),
        ("IPv6", Roce { v6: true, ..roce() }.build(90, 2)),
        ("IPv4 in a VLAN", Roce { vlan: Some(5), ..roce() }.build(100, 3)),
        ("IPv6 in a VLAN", Roce { vlan: Some(5), v6: true, ..roce() }.build(100, 4)),
        ("broadcast", Roce { to: [0xff; 6], ..roce() }.build(64, 5)),
    ];
    let fragment = |bits: u16| {
        let mut frame = roce().build(100, 6);
        frame[20..22].copy_from_slice(&bits.to_be_bytes());
        frame
    };
    let mut tcp = roce().build(100, 7);
    tcp[23] = 6;
    let mut short_header = roce().build(100, 8);
    short_header[14] = 0x44;
    let mut v1 = roce().build(100, 9);
    v1[12..14].copy_from_slice(&0x8915u16.to_be_bytes());
    let mut double_tag = Roce { vlan: Some(5), ..roce() }.build(100, 10);
    double_tag[16..18].copy_from_slice(&0x8100u16.to_be_bytes());
    let passed = [
        ("another UDP port", Roce { port: 4792, ..roce() }.build(64, 11)),
        ("another UDP port, IPv6", Roce { port: 4790, v6: true, ..roce() }.build(90, 11)),
        ("TCP", tcp),
        ("a first fragment", fragment(0x2000)),
        ("a later fragment", fragment(0x0010)),
        ("IHL 4", short_header),
        ("IPv4 with options", long_header),
        ("RoCE v1, not asked for", v1.clone()),
        ("two tags", double_tag),
        ("a frame cut inside the UDP header", roce().build(64, 12)[..40].to_vec()),
        ("another station's", Roce { to: [2, 0, 0, 0, 0, 9], ..roce() }.build(64, 13)),
    ];
    for (what, frame) in &redirected {
        send(&mut a, frame);
        assert_eq!(receive(&mut b, 1), std::slice::from_ref(frame), "{what} should arrive");
    }
    let marker = roce().build(64, 99);
    for (what, frame) in &passed {
        send(&mut a, frame);
        send(&mut a, &marker);
        assert_eq!(receive(&mut b, 1), std::slice::from_ref(&marker), "{what} should not arrive");
    }
    // The same frame, on a socket that asks for RoCE v1.
    drop(b);
    let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig { roce_v1: true, ..AfXdpConfig::new(VETH) })).unwrap();
    for frame in [v1, marker] {
        send(&mut a, &frame);
        assert_eq!(receive(&mut b, 1), [frame]);
    }
}

#[test]
fn other_traffic_still_reaches_the_kernel() {
    let Some(pair) = Pair::new(1500) else { return };
    let (_a, _b) = open_both(&pair);
    for (address, from) in [("10.9.0.2", "10.9.0.1"), ("fd09::2", "fd09::1")] {
        let at = |address: &str, port| (address.parse::<IpAddr>().unwrap(), port);
        let server = pair.in_b(|| UdpSocket::bind(at(address, 5000))).unwrap();
        let client = pair.in_a(|| UdpSocket::bind(at(from, 0))).unwrap();
        server.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.send_to(b"through the kernel", at(address, 5000)).unwrap();
        let mut buffer = [0; 64];
        let n = loop {
            match server.recv_from(&mut buffer) {
                Ok((n, _)) => break n,
                // A socket with a timeout is not restarted by itself.
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => panic!("{address}: {e}"),
            }
        };
        assert_eq!(&buffer[..n], b"through the kernel");

        let listener = pair.in_b(|| TcpListener::bind(at(address, 0))).unwrap();
        let port = listener.local_addr().unwrap().port();
        pair.in_a(|| TcpStream::connect_timeout(&at(address, port).into(), Duration::from_secs(5))).unwrap();
    }
}

#[test]
fn the_interface_joins_multicast_groups() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, mut b) = open_both(&pair);
    for (group, link) in [("239.9.1.2", "01:00:5e:09:01:02"), ("ff15::9:1:2", "33:33:00:01:00:02")] {
        let member = || {
            let shown =
                Command::new("ip").args(["-n", &pair.b, "maddr", "show", "dev", VETH]).output().unwrap();
            let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
            shown.contains(group) && shown.contains(link)
        };
        let group = group.parse::<IpAddr>().unwrap();
        assert!(!member());
        b.join(group).unwrap();
        assert!(member(), "{group}");
        let refusal = b.join(group).unwrap_err().to_string();
        assert!(refusal.contains("multicast group") && refusal.contains(VETH), "{refusal}");
        b.leave(group).unwrap();
        assert!(!member(), "{group}");
    }
    // Frames to a group come through the ring.
    b.join("239.9.1.2".parse().unwrap()).unwrap();
    let mac = a.capabilities().mac;
    let frame = Roce::v4([0x01, 0x00, 0x5e, 9, 1, 2], mac).build(100, 1);
    send(&mut a, &frame);
    assert_eq!(receive(&mut b, 1), [frame]);
}

#[test]
fn generic_mode_where_the_interface_has_no_native_one() {
    let Some(pair) = Pair::new(9000) else { return };
    ip(&format!("-n {} link add br0 mtu 9000 type bridge", pair.b));
    ip(&format!("-n {} link set {VETH} master br0", pair.b));
    ip(&format!("-n {} link set br0 up", pair.b));
    // A bridge forwards nothing until it has noticed that its port is up.
    let ready = || Netlink::open().unwrap().interface("br0").unwrap().carrier;
    while !pair.in_b(ready) {
        thread::sleep(Duration::from_millis(10));
    }
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap();
    let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig::new("br0"))).unwrap();
    let description = &b.capabilities().description;
    assert!(description.starts_with("generic XDP, copy (native XDP refused: "), "{description}");
    let description = &a.capabilities().description;
    assert!(description.starts_with("native XDP, copy (zero-copy refused: "), "{description}");
    for size in [64, 1082, 4154] {
        cross(&mut a, &mut b, size, 2000);
        cross(&mut b, &mut a, size, 2000);
    }
}

// ---------------------------------------------------------------- flow control, losses, waiting

#[test]
fn the_source_is_not_asked_without_a_free_slot() {
    let Some(pair) = Pair::new(1500) else { return };
    let config = AfXdpConfig { tx_frames: 4, ..AfXdpConfig::new(VETH) };
    let mut a = pair.in_a(|| AfXdp::open(&config)).unwrap();
    let frame = Roce::v4([2; 6], a.capabilities().mac).build(64, 1);
    for _ in 0..100 {
        let mut asked = 0;
        let sent = a
            .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                asked += 1;
                buffer[..frame.len()].copy_from_slice(&frame);
                Some(frame.len())
            })
            .unwrap();
        assert!(sent <= 4 && asked == sent, "{asked} asked, {sent} sent");
        a.wait(Duration::from_micros(100)).unwrap();
    }
    let sent = a.stats().tx_frames;
    assert!(sent > 100, "slots come back: {sent} sent");
}

#[test]
fn losses_are_counted() {
    let Some(pair) = Pair::new(1500) else { return };
    let config = AfXdpConfig { rx_frames: 64, ..AfXdpConfig::new(VETH) };
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap();
    let mut b = pair.in_b(|| AfXdp::open(&config)).unwrap();
    let frame = Roce::v4(b.capabilities().mac, a.capabilities().mac).build(64, 1);
    for _ in 0..1000 {
        send(&mut a, &frame);
    }
    let received = drain(&mut b, Duration::from_millis(50)).len();
    let stats = b.stats();
    assert_eq!(received, 64);
    assert_eq!((stats.rx_frames, stats.rx_bytes, stats.rx_dropped), (64, 64 * 64, 1000 - 64));
    assert_eq!((a.stats().tx_frames, a.stats().tx_bytes), (1000, 64_000));
}

#[test]
fn wait_ends_with_a_frame_or_with_its_time() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, mut b) = open_both(&pair);
    let start = Instant::now();
    b.wait(Duration::from_millis(50)).unwrap();
    let waited = start.elapsed();
    assert!(waited >= Duration::from_millis(50) && waited < Duration::from_secs(2), "{waited:?}");
    let frame = Roce::v4(b.capabilities().mac, a.capabilities().mac).build(64, 1);
    let start = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(50));
            send(&mut a, &frame);
        });
        b.wait(Duration::from_secs(20)).unwrap();
    });
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(receive(&mut b, 1), [frame]);
}

#[test]
fn wait_ends_with_its_waker() {
    let Some(pair) = Pair::new(1500) else { return };
    let (_a, mut b) = open_both(&pair);
    let waker = b.waker().unwrap();
    let start = Instant::now();
    for _ in 0..20 {
        // Each of these would last 100 ms by itself.
        waker.wake_by_ref();
        b.wait(Duration::from_secs(20)).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn a_removed_interface_is_an_error() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, mut b) = open_both(&pair);
    ip(&format!("-n {} link del {VETH}", pair.a));
    let frame = Roce::v4([2; 6], [2; 6]).build(64, 1);
    let error = (0..100)
        .find_map(|_| {
            thread::sleep(Duration::from_millis(10));
            a.tx_burst(Nanos::ZERO, &mut one(&frame)).err()
        })
        .expect("sending fails");
    assert!(error.to_string().contains(VETH), "{error}");
    let error = (0..100).find_map(|_| b.wait(Duration::from_millis(10)).err()).expect("waiting fails");
    assert!(error.to_string().contains("removed"), "{error}");
}

// ---------------------------------------------------------------- what stays behind

#[test]
fn nothing_stays_after_drop_and_opening_again_works_at_once() {
    let Some(pair) = Pair::new(9000) else { return };
    for round in 0..5 {
        let (mut a, mut b) = open_both(&pair);
        assert_eq!(pair.in_b(attached), Some(XdpMode::Native), "round {round}");
        cross(&mut a, &mut b, 1082, 100);
        drop((a, b));
        assert_eq!(pair.in_b(attached), None, "round {round}");
    }
}

#[test]
fn nothing_stays_after_a_kill_or_a_panic() {
    let Some(pair) = Pair::new(1500) else { return };
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap();
    for end in ["hold", "panic"] {
        let mut child = spawn(&pair.b, end);
        assert_eq!(read_line(&mut child), "open");
        assert_eq!(pair.in_b(attached), Some(XdpMode::Native));
        if end == "hold" {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        assert_eq!(pair.in_b(attached), None, "after {end}");
        let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap();
        cross(&mut a, &mut b, 1082, 100);
    }
}

#[test]
fn queues_of_one_interface_share_a_program_that_outlives_its_first_user() {
    let Some(pair) = Pair::with_queues(1500, 2) else { return };
    let on = |queue| AfXdpConfig { queue, ..AfXdpConfig::new(VETH) };
    let mut a = [0, 1].map(|queue| pair.in_a(|| AfXdp::open(&on(queue))).unwrap());
    let mut first = spawn(&pair.b, "hold");
    assert_eq!(read_line(&mut first), "open");
    let program = pair.in_b(program);
    let mut b = pair.in_b(|| AfXdp::open(&on(1))).unwrap();
    assert_eq!(pair.in_b(self::program), program);
    cross(&mut a[1], &mut b, 1082, 100);

    let error = pair.in_b(|| AfXdp::open(&AfXdpConfig { roce_v1: true, ..on(1) })).unwrap_err().to_string();
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
    let Some(pair) = Pair::new(1500) else { return };
    let error = open_in_a(&pair, AfXdpConfig::new("nosuch0"));
    assert_eq!(error, "no interface named 'nosuch0' in this network namespace; there are: lo, veth0");
    ip(&format!("-n {} link set {VETH} down", pair.a));
    let error = open_in_a(&pair, AfXdpConfig::new(VETH));
    assert_eq!(error, "interface 'veth0' is down; `ip link set veth0 up`");
}

#[test]
fn parameters_out_of_range_are_named() {
    let Some(pair) = Pair::new(1500) else { return };
    let config = AfXdpConfig::new(VETH);
    let error = open_in_a(&pair, AfXdpConfig { queue: 3, ..config.clone() });
    assert_eq!(error, "queue = 3: 'veth0' has 1 queue(s), counted from 0");
    let error = open_in_a(&pair, AfXdpConfig { rx_frames: 1000, ..config.clone() });
    assert_eq!(error, "rx_frames = 1000: a power of two from 64 to 65536");
    let error = open_in_a(&pair, AfXdpConfig { tx_frames: 0, ..config });
    assert_eq!(error, "tx_frames = 0: 1 to 1024");
}

#[test]
fn a_busy_queue_is_named_and_its_owner_undisturbed() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, mut b) = open_both(&pair);
    let start = Instant::now();
    let error = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap_err();
    assert!(matches!(&error, Error::QueueBusy { queue: 0, interface } if interface == VETH), "{error}");
    assert!(start.elapsed() < Duration::from_secs(5));
    cross(&mut a, &mut b, 1082, 100);
    cross(&mut b, &mut a, 1082, 100);
}

#[test]
fn missing_rights_are_named_with_the_cure() {
    let Some(pair) = Pair::new(1500) else { return };
    let without = |capabilities: &[u32]| {
        pair.in_a(|| {
            drop_capabilities(capabilities);
            AfXdp::open(&AfXdpConfig::new(VETH)).unwrap_err().to_string()
        })
    };
    let error = without(&[CAP_NET_RAW]);
    assert!(error.starts_with("opening an AF_XDP socket on 'veth0' needs CAP_NET_RAW: "), "{error}");
    assert!(error.contains("the process lacks CAP_NET_RAW; run as root, or `setcap"), "{error}");
    // The kernel detaches the program of the first try a moment after its last holder has let go,
    // and to look at one that is still there takes more rights.
    let patience = Instant::now() + Duration::from_secs(10);
    while pair.in_a(program).is_some() {
        assert!(Instant::now() < patience, "the program of a failed open stays");
        thread::yield_now();
    }
    let error = without(&(0..64).collect::<Vec<_>>());
    assert!(error.contains("on 'veth0' needs CAP_BPF and CAP_NET_ADMIN: "), "{error}");
    assert!(error.contains("lacks CAP_NET_ADMIN, CAP_NET_RAW, CAP_BPF;"), "{error}");
}

#[test]
fn the_documented_capabilities_are_enough() {
    let Some(pair) = Pair::new(1500) else { return };
    let others: Vec<_> =
        (0..64).filter(|c| ![CAP_NET_ADMIN, CAP_NET_RAW, CAP_IPC_LOCK, CAP_BPF].contains(c)).collect();
    let open = || {
        drop_capabilities(&others);
        AfXdp::open(&AfXdpConfig::new(VETH))
    };
    let (mut a, mut b) = (pair.in_a(open).unwrap(), pair.in_b(open).unwrap());
    cross(&mut a, &mut b, 1082, 100);
    // Only a look at other programs takes more.
    let error = pair.in_a(open).unwrap_err().to_string();
    assert!(error.contains("on 'veth0' needs CAP_SYS_ADMIN: run as root, or take it off"), "{error}");
}

#[test]
fn too_little_locked_memory_is_named_with_the_cure() {
    let Some(pair) = Pair::new(1500) else { return };
    let mut child = spawn(&pair.a, "memlock");
    let error = read_line(&mut child);
    child.wait().unwrap();
    assert!(
        error.contains("on 'veth0' needs more locked memory (RLIMIT_MEMLOCK) or CAP_IPC_LOCK"),
        "{error}"
    );
    assert!(error.contains("18432 KiB are needed: `ulimit -l 18432`"), "{error}");
}

// ---------------------------------------------------------------- netlink

#[test]
fn interfaces_are_listed_with_their_attributes() {
    let Some(pair) = Pair::with_queues(4200, 2) else { return };
    pair.in_a(|| {
        let netlink = Netlink::open().unwrap();
        let all = netlink.interfaces().unwrap();
        assert_eq!(all.iter().map(|i| i.name.as_str()).collect::<Vec<_>>(), ["lo", VETH]);
        let veth = &all[1];
        assert_eq!((veth.mtu, veth.kind.as_deref(), veth.loopback), (4200, Some("veth"), false));
        assert!(veth.up && veth.carrier && veth.xdp.is_none());
        assert_eq!((veth.rx_queues, veth.tx_queues), (2, 2));
        let sys = Command::new("ip").args(["link", "show", VETH]).output().unwrap();
        let mac = veth.mac.map(|b| format!("{b:02x}")).join(":");
        assert!(String::from_utf8_lossy(&sys.stdout).contains(&mac), "{mac}");
        let gids = veth.gid_order();
        assert!(matches!(gids[0], IpAddr::V6(v6) if v6.is_unicast_link_local()), "{gids:?}");
        assert_eq!(gids[1..], ["10.9.0.1", "fd09::1"].map(|s| s.parse::<IpAddr>().unwrap()));
        ip(&format!("-n {} link set {VETH} down", pair.a));
        assert!(!netlink.interface(VETH).unwrap().up);
    });
}

#[test]
fn neighbours_are_resolved_by_the_kernel() {
    let Some(pair) = Pair::new(1500) else { return };
    let (mut a, b) = open_both(&pair);
    let own: IpAddr = "10.9.0.1".parse().unwrap();
    assert_eq!(a.resolve(own).unwrap(), a.capabilities().mac);
    // Not in the namespace's thread: the driver stays with the namespace that it was opened in.
    for peer in ["10.9.0.2", "fd09::2"] {
        let start = Instant::now();
        assert_eq!(a.resolve(peer.parse().unwrap()).unwrap(), b.capabilities().mac, "{peer}");
        assert!(start.elapsed() < Duration::from_secs(3));
    }
    let link_local = b.capabilities().addresses[0];
    assert_eq!(a.resolve(link_local).unwrap(), b.capabilities().mac, "{link_local}");
}

#[test]
fn a_silent_or_unreachable_peer_is_named() {
    let Some(pair) = Pair::new(1500) else { return };
    let mut a = pair.in_a(|| AfXdp::open(&AfXdpConfig::new(VETH))).unwrap();
    for (peer, protocol) in [("10.9.0.77", "ARP"), ("fd09::77", "neighbour discovery")] {
        let start = Instant::now();
        let error = a.resolve(peer.parse().unwrap()).unwrap_err();
        assert_eq!(error.to_string(), format!("{peer} does not answer {protocol} on 'veth0'"));
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
    }
    for peer in ["192.0.2.1", "2001:db8::1"] {
        let error = a.resolve(peer.parse().unwrap()).unwrap_err();
        assert_eq!(error.to_string(), format!("no route to {peer} from 'veth0'"));
    }
}

#[test]
fn routes_have_gateways_sources_and_mtus() {
    let Some(pair) = Pair::new(1500) else { return };
    ip(&format!("-n {} route add 192.0.2.0/24 via 10.9.0.2 mtu 1280", pair.a));
    ip(&format!("-n {} route add 2001:db8::/32 via fd09::2 dev {VETH}", pair.a));
    ip(&format!("-n {} route add 198.51.100.0/24 via inet6 fd09::2 dev {VETH}", pair.a));
    ip(&format!("-n {} route add unreachable 203.0.113.0/24", pair.a));
    let mac = pair.in_b(|| Netlink::open().unwrap().interface(VETH).unwrap().mac);
    pair.in_a(|| {
        let netlink = Netlink::open().unwrap();
        let veth = netlink.interface(VETH).unwrap();
        let of = |s: &str| s.parse::<IpAddr>().unwrap();
        let route = netlink.route(&veth, of("192.0.2.9")).unwrap();
        assert_eq!(route.gateway, Some(of("10.9.0.2")));
        assert_eq!((route.source, route.mtu), (Some(of("10.9.0.1")), Some(1280)));
        let route = netlink.route(&veth, of("10.9.0.2")).unwrap();
        assert_eq!((route.gateway, route.mtu), (None, None));
        for gateway in ["2001:db8::9", "198.51.100.9"] {
            assert_eq!(netlink.route(&veth, of(gateway)).unwrap().gateway, Some(of("fd09::2")));
        }
        assert!(matches!(netlink.route(&veth, of("203.0.113.1")), Err(Error::NoRoute { .. })));
        assert_eq!(netlink.neighbour(&veth, of("10.9.0.2")).unwrap(), Neighbour::Absent);
        for peer in ["192.0.2.9", "2001:db8::9", "198.51.100.9"] {
            assert_eq!(netlink.resolve(&veth, of(peer)).unwrap(), mac, "{peer}");
        }
        assert_eq!(netlink.neighbour(&veth, of("10.9.0.2")).unwrap(), Neighbour::Fresh(mac));
    });
}

// ---------------------------------------------------------------- helpers

/// The body of child processes; a test only in name. See `spawn`.
#[test]
fn child() {
    let Ok(role) = std::env::var("FERROCE_TEST_CHILD") else { return };
    if role == "memlock" {
        // The limit is the process's, so other tests must not see it.
        let limit = libc::rlimit { rlim_cur: 65536, rlim_max: 65536 };
        // SAFETY: a pointer to an `rlimit` that outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
        drop_capabilities(&[CAP_IPC_LOCK, CAP_SYS_RESOURCE]);
        println!("\nchild: {}", AfXdp::open(&AfXdpConfig::new(VETH)).unwrap_err());
        return;
    }
    let _port = AfXdp::open(&AfXdpConfig::new(VETH)).unwrap();
    println!("\nchild: open");
    assert_ne!(role, "panic", "as told");
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
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// What a child says.
fn read_line(child: &mut Child) -> String {
    let lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let said = lines.map_while(Result::ok).find_map(|l| l.strip_prefix("child: ").map(str::to_owned));
    said.unwrap_or_else(|| format!("the child ended with {:?}", child.wait()))
}

fn open_both(pair: &Pair) -> (AfXdp, AfXdp) {
    let open = || AfXdp::open(&AfXdpConfig::new(VETH)).unwrap();
    (pair.in_a(open), pair.in_b(open))
}

fn open_in_a(pair: &Pair, config: AfXdpConfig) -> String {
    pair.in_a(|| AfXdp::open(&config)).unwrap_err().to_string()
}

fn attached() -> Option<XdpMode> {
    Netlink::open().unwrap().interface(VETH).unwrap().xdp.map(|xdp| xdp.mode)
}

fn program() -> Option<u32> {
    Netlink::open().unwrap().interface(VETH).unwrap().xdp.map(|xdp| xdp.program)
}

/// A frame that the XDP program should know as RoCE.
#[derive(Clone, Copy)]
struct Roce {
    to: [u8; 6],
    from: [u8; 6],
    vlan: Option<u16>,
    v6: bool,
    port: u16,
}

impl Roce {
    fn v4(to: [u8; 6], from: [u8; 6]) -> Roce {
        Roce { to, from, vlan: None, v6: false, port: 4791 }
    }

    /// `len` bytes in all, the payload's derived from `seed`.
    fn build(self, len: usize, seed: usize) -> Vec<u8> {
        let mut f = Vec::with_capacity(len);
        f.extend_from_slice(&self.to);
        f.extend_from_slice(&self.from);
        if let Some(tag) = self.vlan {
            f.extend_from_slice(&[0x81, 0x00]);
            f.extend_from_slice(&tag.to_be_bytes());
        }
        if self.v6 {
            f.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            f.extend_from_slice(&((len - f.len() - 36) as u16).to_be_bytes());
            f.extend_from_slice(&[17, 64]);
            f.extend_from_slice(&[0xfd; 32]);
        } else {
            f.extend_from_slice(&[0x08, 0x00, 0x45, 0]);
            f.extend_from_slice(&((len - f.len() + 2) as u16).to_be_bytes());
            f.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1, 10, 9, 0, 2]);
            // A bridge drops packets with a wrong header checksum.
            let header = f.len() - 20;
            let sum: u32 = f[header..].chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]]))).sum();
            let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
            f[header + 10..header + 12].copy_from_slice(&checksum.to_be_bytes());
        }
        f.extend_from_slice(&0xc000u16.to_be_bytes());
        f.extend_from_slice(&self.port.to_be_bytes());
        f.extend_from_slice(&((len - f.len() + 4) as u16).to_be_bytes());
        f.extend_from_slice(&[0, 0]);
        let mut state = seed as u32;
        f.extend((f.len()..len).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        }));
        f
    }
}

/// A source of one frame.
fn one(frame: &[u8]) -> impl FnMut(&mut [u8]) -> Option<usize> {
    let mut frame = Some(frame);
    move |buffer| {
        let frame = frame.take()?;
        buffer[..frame.len()].copy_from_slice(frame);
        Some(frame.len())
    }
}

/// Sends one frame, when there is room for it.
fn send(port: &mut AfXdp, frame: &[u8]) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while port.tx_burst(Nanos::ZERO, &mut one(frame)).unwrap() == 0 {
        assert!(Instant::now() < deadline, "no room to send for 5 s");
    }
}

/// Receives `count` frames.
fn receive(port: &mut AfXdp, count: usize) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while frames.len() < count && Instant::now() < deadline {
        port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| frames.push(frame.to_vec())).unwrap();
    }
    frames
}

/// Receives what comes until nothing has come for a time.
fn drain(port: &mut AfXdp, quiet: Duration) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let mut last = Instant::now();
    while last.elapsed() < quiet {
        if port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| frames.push(frame.to_vec())).unwrap() > 0 {
            last = Instant::now();
        }
    }
    frames
}

/// Sends `count` different frames of `size` bytes and checks every byte of every one, in order.
fn cross(from: &mut AfXdp, to: &mut AfXdp, size: usize, count: usize) {
    let kind = Roce::v4(to.capabilities().mac, from.capabilities().mac);
    let (mut sent, mut received) = (0, 0);
    let deadline = Instant::now() + Duration::from_secs(20);
    while received < count {
        let mut next = sent..(sent + 100).min(count);
        sent += from
            .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                let frame = kind.build(size, next.next()?);
                buffer[..size].copy_from_slice(&frame);
                Some(size)
            })
            .unwrap();
        to.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
            assert!(frame == kind.build(size, received), "frame {received} of {size} bytes");
            received += 1;
        })
        .unwrap();
        assert!(Instant::now() < deadline, "{received} of {sent} frames of {size} bytes arrived");
    }
}

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_RESOURCE: u32 = 24;
const CAP_BPF: u32 = 39;

/// Takes capabilities from the calling thread.
fn drop_capabilities(drop: &[u32]) {
    const VERSION_3: u32 = 0x2008_0522;
    let header = [VERSION_3, 0];
    // Effective, permitted, inheritable; low words, then high words.
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
