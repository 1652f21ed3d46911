//! Frames over AF_XDP on real interfaces: veth pairs between namespaces of the test. Needs root; otherwise prints the
//! reason and passes.
#![cfg(feature = "af_xdp")]
#![allow(clippy::unwrap_used)] // in helpers of tests

use std::io;
use std::net::{IpAddr, TcpListener, TcpStream, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use ferroce_driver::af_xdp::{AfXdp, AfXdpConfig};
use ferroce_driver::netlink::Netlink;
use ferroce_driver::{Capabilities, FrameSink, Nanos, PacketDriver, RxFrame};
use ferroce_driver_test_support::exchange::{Roce, cross, drain, one, receive, send};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, ip};
use ferroce_driver_test_support::readiness;

fn open() -> AfXdp {
    AfXdp::open(&AfXdpConfig::new(VETH).sharing(false)).unwrap()
}

// ---------------------------------------------------------------- frames

#[test]
fn frames_cross_bit_exact_at_mtu_9000() {
    let Some(pair) = Namespaces::new(9000) else { return };
    let (mut a, mut b) = pair.in_both(open);
    assert_eq!(a.capabilities().max_frame, 9018);
    for size in [64, 1082, 2106, 3840, 3841, 4154, 7680, 7681, 9014] {
        cross(&mut a, &mut b, size, 3000);
        cross(&mut b, &mut a, size, 3000);
    }
    assert_eq!((a.stats().rx_dropped, b.stats().rx_dropped), (0, 0));
    assert_eq!((a.stats().tx_dropped, b.stats().tx_dropped), (0, 0));
    assert_eq!((a.stats().bad_descriptors, b.stats().bad_descriptors), (0, 0));
}

#[test]
fn frames_cross_bit_exact_at_smaller_mtus() {
    for mtu in [1500, 3506, 4200] {
        let Some(pair) = Namespaces::new(mtu) else { return };
        let (mut a, mut b) = pair.in_both(open);
        for size in [60, 64, 1082, mtu as usize + 14] {
            cross(&mut a, &mut b, size, 3000);
            cross(&mut b, &mut a, size, 3000);
        }
    }
}

#[test]
fn both_directions_at_once_from_two_threads() {
    let Some(pair) = Namespaces::new(9000) else { return };
    let (mut a, mut b) = pair.in_both(open);
    let exchange = |port: &mut AfXdp, to: &Capabilities, seed: usize, expect: usize| {
        let own = port.capabilities().clone();
        let (mut sent, mut received) = (0, 0);
        let deadline = Instant::now() + Duration::from_secs(30);
        while (sent < 20_000 || received < 20_000) && Instant::now() < deadline {
            // No more frames in flight than the other side has buffers for.
            let limit = (received + 512).min(20_000).max(sent);
            let mut next = sent..limit;
            sent += port
                .tx_burst(Nanos::ZERO, &mut |buffer: &mut [u8]| {
                    let n = next.next()?;
                    let frame = Roce::to(to, own.mac).build(4154, n + seed);
                    buffer[..frame.len()].copy_from_slice(&frame);
                    Some(frame.len())
                })
                .unwrap();
            port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| {
                assert!(frame == Roce::to(&own, to.mac).build(4154, received + expect), "frame {received}");
                received += 1;
            })
            .unwrap();
        }
        (sent, received)
    };
    let [of_a, of_b] = [&a, &b].map(|port| port.capabilities().clone());
    thread::scope(|scope| {
        let other = scope.spawn(|| exchange(&mut b, &of_a, 7, 3));
        assert_eq!(exchange(&mut a, &of_b, 3, 7), (20_000, 20_000));
        assert_eq!(other.join().unwrap(), (20_000, 20_000));
    });
}

#[test]
fn a_burst_is_announced_before_it_is_taken() {
    #[derive(Default)]
    struct Sink {
        announced: Vec<Vec<u8>>,
        taken: Vec<Vec<u8>>,
    }
    impl FrameSink for Sink {
        fn announce(&mut self, frame: &[u8]) {
            assert!(self.taken.is_empty());
            self.announced.push(frame.to_vec());
        }
        fn take(&mut self, frame: RxFrame<'_>) {
            self.taken.push(frame.bytes().to_vec());
        }
    }
    let Some(pair) = Namespaces::new(9000) else { return };
    let (mut a, mut b) = pair.in_both(open);
    let kind = Roce::v4(b.capabilities().mac, a.capabilities().mac);
    let mut sink = Sink::default();
    let sizes = [64, 4154, 9014, 1082, 7680, 64, 3841, 100, 9014, 9014];
    let sent: Vec<_> = sizes.iter().enumerate().map(|(i, size)| kind.build(*size, i)).collect();
    sent.iter().for_each(|frame| send(&mut a, frame));
    assert_eq!(b.rx_burst(Nanos::ZERO, &mut sink).unwrap(), sizes.len());
    assert!(sink.taken == sent);
    assert_eq!(sink.announced.len(), sizes.len());
    for (announced, frame) in sink.announced.iter().zip(&sent) {
        assert!(announced.len() >= frame.len().min(100) && frame.starts_with(announced));
    }
    // A burst of one frame is not announced.
    let mut sink = Sink::default();
    send(&mut a, &sent[0]);
    assert_eq!(b.rx_burst(Nanos::ZERO, &mut sink).unwrap(), 1);
    assert_eq!((sink.announced.len(), sink.taken.len()), (0, 1));
}

/// A burst takes 64 descriptors: 21 frames of three and the first third of the last one, whose chunk the kernel gets
/// back before the rest is taken, because it has no other chunk for this frame.
#[test]
fn a_frame_across_two_bursts_arrives_whole() {
    let Some(pair) = Namespaces::new(9000) else { return };
    let mut a = pair.in_a(open);
    let config = AfXdpConfig::new(VETH).sharing(false).rx_frames(128);
    let mut b = pair.in_b(|| AfXdp::open(&config)).unwrap();
    let kind = Roce::v4(b.capabilities().mac, a.capabilities().mac);
    let mut received = Vec::new();
    let mut sink = |frame: &[u8]| received.push(frame.to_vec());
    (0..42).for_each(|i| send(&mut a, &kind.build(9014, i)));
    assert_eq!(b.rx_burst(Nanos::ZERO, &mut sink).unwrap(), 21);
    (42..64).for_each(|i| send(&mut a, &kind.build(9014, i)));
    while b.rx_burst(Nanos::ZERO, &mut sink).unwrap() > 0 {}
    assert_eq!(received.len(), 64);
    for (i, frame) in received.iter().enumerate() {
        assert!(*frame == kind.build(9014, i), "frame {i}");
    }
}

#[test]
fn only_roce_is_redirected() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
    let (to, from) = (b.capabilities().mac, a.capabilities().mac);
    let roce = || Roce::v4(to, from);
    let v6: IpAddr = "fd09::2".parse().unwrap();
    let mut long_header = roce().build(200, 1);
    long_header[14] = 0x47; // IHL 7: 8 bytes of options before the UDP header
    long_header.splice(34..34, [1u8; 8]);
    let redirected = [
        ("IPv4", roce().build(64, 1)),
        ("IPv6", Roce { ip: v6, ..roce() }.build(90, 2)),
        ("IPv4 in a VLAN", Roce { vlan: Some(5), ..roce() }.build(100, 3)),
        ("IPv6 in a VLAN", Roce { vlan: Some(5), ip: v6, ..roce() }.build(100, 4)),
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
        ("another address", Roce { ip: [10, 9, 0, 3].into(), ..roce() }.build(64, 11)),
        ("another address, IPv6", Roce { ip: "fd09::12".parse().unwrap(), ..roce() }.build(90, 11)),
        ("a group that it is not in", Roce { ip: [239, 9, 0, 2].into(), ..roce() }.build(64, 11)),
        ("another UDP port, IPv6", Roce { port: 4790, ip: v6, ..roce() }.build(90, 11)),
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
    // The same frame, on a socket with RoCE v1.
    drop(b);
    let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig::new(VETH).sharing(false).roce_v1(true))).unwrap();
    for frame in [v1, marker] {
        send(&mut a, &frame);
        assert_eq!(receive(&mut b, 1), [frame]);
    }
}

#[test]
fn other_traffic_still_reaches_the_kernel() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (_a, _b) = pair.in_both(open);
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
                // A call with a timeout is not restarted automatically.
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
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
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
    // Frames to a group are received through the ring as long as the port is a member.
    let group = "239.9.1.2".parse().unwrap();
    let roce = Roce::v4([0x01, 0x00, 0x5e, 9, 1, 2], a.capabilities().mac);
    let frame = Roce { ip: group, ..roce }.build(100, 1);
    let marker = Roce::to(b.capabilities(), a.capabilities().mac).build(64, 99);
    for is_member in [false, true, false] {
        if is_member { b.join(group) } else { b.leave(group).or(Ok(())) }.unwrap();
        send(&mut a, &frame);
        send(&mut a, &marker);
        let expected: Vec<_> = is_member.then(|| frame.clone()).into_iter().chain([marker.clone()]).collect();
        assert_eq!(receive(&mut b, expected.len()), expected);
    }
}

#[test]
fn generic_mode_if_the_interface_has_no_native_one() {
    let Some(pair) = Namespaces::new(9000) else { return };
    ip(&format!("-n {} link add br0 mtu 9000 type bridge", pair.b));
    ip(&format!("-n {} link set {VETH} master br0", pair.b));
    ip(&format!("-n {} link set br0 up", pair.b));
    ip(&format!("-n {} addr flush dev {VETH}", pair.b));
    ip(&format!("-n {} addr add 10.9.0.2/24 dev br0", pair.b));
    // A bridge forwards nothing until it has detected that its port is up.
    let ready = || Netlink::open().unwrap().interface("br0").unwrap().carrier;
    while !pair.in_b(ready) {
        thread::sleep(Duration::from_millis(10));
    }
    let mut a = pair.in_a(open);
    let mut b = pair.in_b(|| AfXdp::open(&AfXdpConfig::new("br0").sharing(false))).unwrap();
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
    let Some(pair) = Namespaces::new(1500) else { return };
    let config = AfXdpConfig::new(VETH).sharing(false).tx_frames(4);
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
    let Some(pair) = Namespaces::new(1500) else { return };
    let config = AfXdpConfig::new(VETH).sharing(false).rx_frames(64);
    let mut a = pair.in_a(open);
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
fn wait_ends_with_a_frame_or_its_timeout() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
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
    let Some(pair) = Namespaces::new(1500) else { return };
    let (_a, mut b) = pair.in_both(open);
    let waker = b.waker().unwrap();
    let start = Instant::now();
    for _ in 0..20 {
        // Without the waker each wait would last 100 ms.
        waker.wake_by_ref();
        b.wait(Duration::from_secs(20)).unwrap();
    }
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
}

#[test]
fn a_wait_by_the_caller_ends_with_each_event() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
    let frame = Roce::v4(b.capabilities().mac, a.capabilities().mac).build(64, 1);
    readiness::ends_with_each(&mut b, || send(&mut a, &frame));
    assert_eq!(receive(&mut b, 1).len(), 1);
}

#[test]
fn a_removed_interface_is_an_error() {
    let Some(pair) = Namespaces::new(1500) else { return };
    let (mut a, mut b) = pair.in_both(open);
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
