//! The UDP driver, on addresses of the loopback interface, where everybody may open sockets, and, as
//! root, between namespaces, where what leaves an interface can be seen.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod common;

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{Pair, VETH};
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Error, FrameSource, Layer, Nanos, PacketDriver};

/// Writes packets and gives them other identifications, as the engine does.
struct Source<'a>(&'a mut dyn Iterator<Item = Vec<u8>>);

impl FrameSource for Source<'_> {
    fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let packet = self.0.next()?;
        buffer[..packet.len()].copy_from_slice(&packet);
        Some(packet.len())
    }

    fn renumber(&mut self, frame: &mut [u8], identification: u16) {
        frame[4..6].copy_from_slice(&identification.to_be_bytes());
    }
}

#[derive(Clone, Copy)]
struct Shape {
    from: IpAddr,
    to: IpAddr,
    tos: u8,
    ttl: u8,
    qpn: u32,
}

impl Shape {
    fn new(from: IpAddr, to: IpAddr) -> Shape {
        Shape { from, to, tos: 0, ttl: 64, qpn: 0x123456 }
    }

    /// An IP packet with a UDP datagram of `len` bytes in it, each of which is known by `n`.
    fn packet(self, len: usize, n: usize) -> Vec<u8> {
        let udp_len = (8 + len) as u16;
        let mut packet = match (self.from, self.to) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let total = (20 + udp_len).to_be_bytes();
                let mut ip = vec![0x45, self.tos, total[0], total[1], 0, 0, 0x40, 0, self.ttl, 17, 0, 0];
                ip.extend(from.octets());
                ip.extend(to.octets());
                ip
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let mut ip = vec![0x60 | self.tos >> 4, self.tos << 4, 0, 0];
                ip.extend(udp_len.to_be_bytes());
                ip.extend([17, self.ttl]);
                ip.extend(from.octets());
                ip.extend(to.octets());
                ip
            }
            _ => unreachable!("addresses of two versions"),
        };
        packet.extend(4791u16.to_be_bytes());
        packet.extend(4791u16.to_be_bytes());
        packet.extend(udp_len.to_be_bytes());
        packet.extend([0, 0]);
        let datagram = (0..len).map(|i| (n.wrapping_mul(31) ^ i.wrapping_mul(7) ^ i >> 8) as u8);
        let start = packet.len();
        packet.extend(datagram);
        packet[start + 4..start + 8].copy_from_slice(&self.qpn.to_be_bytes());
        packet
    }
}

/// What the kernel's own headers can't have taken from the sender: identification and checksums.
fn comparable(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    if packet[0] >> 4 == 4 {
        packet[4..6].fill(0);
        packet[10..12].fill(0);
    }
    packet
}

fn send(port: &mut Udp, packets: &[Vec<u8>]) -> usize {
    port.tx_burst(Nanos::ZERO, &mut Source(&mut packets.iter().cloned())).unwrap()
}

/// Waits for `count` packets.
fn receive(port: &mut Udp, count: usize) -> Vec<Vec<u8>> {
    let mut packets = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while packets.len() < count && Instant::now() < deadline {
        port.rx_burst(Nanos::ZERO, &mut |packet: &[u8]| packets.push(packet.to_vec())).unwrap();
        if packets.len() < count {
            port.wait(Duration::from_millis(10)).unwrap();
        }
        assert!(packets.len() <= count, "more than {count} packets");
    }
    packets
}

fn loopback(last: u8) -> IpAddr {
    Ipv4Addr::new(127, 78, 0, last).into()
}

fn open(address: IpAddr) -> Udp {
    open_with(&UdpConfig::new(address))
}

/// A port that was just let go of may still be held by a child of another test, as long as that has not
/// become another program.
fn open_with(config: &UdpConfig) -> Udp {
    patiently(|| Udp::open(config))
}

fn open_group(address: IpAddr, count: usize) -> Vec<Udp> {
    patiently(|| Udp::open_group(&UdpConfig::new(address), count))
}

fn patiently<T>(open: impl Fn() -> Result<T, Error>) -> T {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match open() {
            Err(Error::PortInUse { .. }) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened.unwrap(),
        }
    }
}

/// Lengths by which sends are put together in every way: equal, a shorter last, longer ones.
fn lengths(max: usize) -> Vec<usize> {
    let mut lengths = vec![16, 16, 20, 20, 16, 40, 20, 1040, 1040, 1040, 516, 1056, 1040, 1040];
    lengths.extend([1040; 200]);
    lengths.extend([max; 40]);
    lengths.extend([24, 20, 20, max, 28, 28, 28, 28]);
    lengths.retain(|len| *len <= max);
    lengths
}

fn cross(a: &mut Udp, b: &mut Udp, shape: Shape, max: usize) {
    let packets: Vec<_> = lengths(max).iter().enumerate().map(|(n, len)| shape.packet(*len, n)).collect();
    for batch in packets.chunks(90) {
        assert_eq!(send(a, batch), batch.len());
        let received = receive(b, batch.len());
        assert_eq!(received.len(), batch.len());
        for (n, (sent, received)) in batch.iter().zip(&received).enumerate() {
            assert_eq!(comparable(received), comparable(sent), "packet {n} of {} bytes", sent.len());
        }
    }
}

#[test]
fn packets_cross_bit_exact_with_their_marks() {
    for (segmentation, aggregation) in [(true, true), (true, false), (false, true), (false, false)] {
        let [mut a, mut b] = [1, 2].map(|last| {
            let config = UdpConfig { segmentation, aggregation, ..UdpConfig::new(loopback(last)) };
            open_with(&config)
        });
        for (tos, ttl) in [(0, 64), (0x6a, 64), (3, 1), (0xff, 255)] {
            let shape = Shape { tos, ttl, ..Shape::new(loopback(1), loopback(2)) };
            cross(&mut a, &mut b, shape, 9000);
            let back = Shape { tos, ttl, ..Shape::new(loopback(2), loopback(1)) };
            cross(&mut b, &mut a, back, 4112);
        }
        for port in [&a, &b] {
            let stats = port.stats();
            assert_eq!((stats.rx_dropped, stats.tx_dropped), (0, 0));
            assert_eq!((stats.rx_frames > 1000, stats.tx_frames > 1000), (true, true));
        }
        assert_eq!(a.stats().tx_bytes, b.stats().rx_bytes);
        assert_eq!(a.stats().tx_frames, b.stats().rx_frames);
    }
}

#[test]
fn packets_cross_over_ipv6() {
    let own: IpAddr = "::1".parse().unwrap();
    let mut port = match Udp::open(&UdpConfig::new(own)) {
        Ok(port) => port,
        Err(error) => return println!("skipped: no IPv6 on the loopback interface ({error})"),
    };
    let shape = Shape { tos: 0x6b, ttl: 9, ..Shape::new(own, own) };
    for (n, len) in lengths(4112).into_iter().enumerate() {
        let packets: Vec<_> = (0..5).map(|i| shape.packet(len, n + i)).collect();
        assert_eq!(send(&mut port, &packets), 5);
        assert_eq!(receive(&mut port, 5), packets);
    }
}

/// What comes without segmentation has the identification of a packet alone; what was sent at once
/// and kept together, those of its places.
#[test]
fn identifications_are_the_places_in_what_was_sent_at_once() {
    let [mut a, mut b] = [3, 4].map(|last| open(loopback(last)));
    let shape = Shape::new(loopback(3), loopback(4));
    let packets: Vec<_> =
        [1056, 1040, 1040, 1040, 516, 1040].iter().map(|len| shape.packet(*len, 0)).collect();
    send(&mut a, &packets);
    let numbers: Vec<_> = receive(&mut b, 6).iter().map(|packet| packet[5]).collect();
    assert_eq!(numbers, [0, 1, 0, 1, 2, 0]);
    // With an odd number, a queue pair may share its receiver's address with other sockets: then its
    // packets leave apart from those to others.
    let packets: Vec<_> =
        [4, 6, 4, 5, 5, 7, 8].iter().map(|qpn| Shape { qpn: *qpn, ..shape }.packet(1040, 0)).collect();
    send(&mut a, &packets);
    let numbers: Vec<_> = receive(&mut b, 7).iter().map(|packet| packet[5]).collect();
    assert_eq!(numbers, [0, 1, 2, 0, 1, 0, 0]);
}

/// Behind what was sent comes a burst without a look, in which what else there is can leave. Whoever
/// sends all the time looks with every third.
#[test]
fn a_look_waits_for_what_is_to_be_sent_but_not_for_long() {
    let [mut a, mut b] = [9, 10].map(|last| open(loopback(last)));
    let [to_a, to_b] = [(10, 9), (9, 10)].map(|(from, to)| Shape::new(loopback(from), loopback(to)));
    let look = |port: &mut Udp| port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap();
    for _ in 0..3 {
        send(&mut b, &[to_a.packet(64, 0)]);
        let seen: Vec<_> = (0..3)
            .map(|n| {
                send(&mut a, &[to_b.packet(64, n)]);
                look(&mut a)
            })
            .collect();
        assert_eq!(seen, [0, 0, 1]);
        // One without a look, and one that finds nothing.
        assert_eq!([look(&mut a), look(&mut a)], [0, 0]);
    }
    send(&mut b, &[to_a.packet(64, 0)]);
    assert_eq!(look(&mut a), 1, "nothing has come or left just before");
}

/// Also where more is sent than is written at once.
#[test]
fn no_send_is_cut_short() {
    let [mut a, mut b] = [7, 8].map(|last| open(loopback(last)));
    let shape = Shape::new(loopback(7), loopback(8));
    let packets: Vec<_> = (0..4 * 62 + 5).map(|n| shape.packet(1040, n)).collect();
    send(&mut a, &packets);
    let numbers: Vec<_> =
        receive(&mut b, packets.len()).iter().map(|packet| usize::from(packet[5])).collect();
    let full: Vec<_> = (0..packets.len()).map(|n| n % 62).collect();
    assert_eq!(numbers, full);
}

#[test]
fn a_group_has_each_packet_where_its_queue_pair_is() {
    for count in [4, 3] {
        let mut group = open_group(loopback(5), count);
        let mut peer = open(loopback(6));
        expect_dealt(&mut group, &mut peer, Shape::new(loopback(6), loopback(5)));
    }
    assert!(Udp::open_group(&UdpConfig::new(loopback(5)), 0).is_err());
}

/// What `peer` sends comes to each of `group` by its queue pair numbers.
#[track_caller]
fn expect_dealt(group: &mut [Udp], peer: &mut Udp, shape: Shape) {
    let count = group.len();
    let qpns: Vec<u32> = (0..400).map(|n| (n * 0x9e3b) & 0x00ff_ffff | 1).collect();
    let packets: Vec<_> =
        qpns.iter().enumerate().map(|(n, qpn)| Shape { qpn: *qpn, ..shape }.packet(64, n)).collect();
    for batch in packets.chunks(100) {
        send(peer, batch);
    }
    for (index, port) in group.iter_mut().enumerate() {
        let Layer::Ip(terms) = port.capabilities().layer else { panic!("a socket") };
        let (rest, count) = (2 * index as u32 + 1, 2 * count as u32);
        assert_eq!(terms.qpns, (rest, count));
        let mine = qpns.iter().zip(&packets).filter(|(qpn, _)| *qpn % count == rest);
        let mine: Vec<_> = mine.map(|(_, packet)| comparable(packet)).collect();
        assert!(mine.len() > 60);
        let received: Vec<_> = receive(port, mine.len()).iter().map(|packet| comparable(packet)).collect();
        assert!(received == mine, "socket {index} of {count}");
    }
}

/// MADs leave by a socket of their own, from the same address and port, and nothing comes to it, whatever
/// the kernel's order is of sockets that share an address.
#[test]
fn mads_leave_by_a_socket_that_receives_nothing() {
    let Some(pair) = pair(1500) else { return };
    for [near, far] in [["10.9.0.1", "10.9.0.2"], ["fd09::1", "fd09::2"]] {
        let [near, far]: [IpAddr; 2] = [near, far].map(|address| address.parse().unwrap());
        let mut peer = pair.in_a(|| Udp::open(&UdpConfig::new(near)).unwrap());
        for count in [1, 3] {
            let open = || Udp::open_group(&UdpConfig::new(far), count).unwrap();
            let mut group = pair.in_b(open);
            if count > 1 {
                expect_dealt(&mut group, &mut peer, Shape::new(near, far));
            }
            let (out, back) = (Shape { qpn: 1, ..Shape::new(near, far) }, Shape::new(far, near));
            for (n, qpn) in [1, 6, 1, 1, 8, 10, 1].into_iter().enumerate() {
                let asked = out.packet(256, n);
                send(&mut peer, std::slice::from_ref(&asked));
                assert_eq!(comparable(&receive(&mut group[0], 1)[0]), comparable(&asked));
                // Answers of both kinds leave in one burst, from one port.
                let answers = [qpn, 1, 4].map(|qpn| Shape { qpn, ..back }.packet(256, n));
                send(&mut group[0], &answers);
                let mut received: Vec<_> = receive(&mut peer, 3).iter().map(|p| comparable(p)).collect();
                let mut expected: Vec<_> = answers.iter().map(|p| comparable(p)).collect();
                received.sort();
                expected.sort();
                assert!(received == expected, "{count} sockets on {far}, round {n}");
            }
            // Nobody else finds room there.
            let refusal = pair.in_b(|| Udp::open(&UdpConfig::new(far)).map(drop)).unwrap_err();
            assert!(matches!(refusal, Error::PortInUse { .. }), "{refusal}");
        }
    }
}

/// Whoever comes at the same time is refused by all that are opened, or has the address alone.
#[test]
fn one_of_many_that_open_an_address_has_it() {
    for round in 0..100 {
        let count = 1 + round % 2;
        let start = std::sync::Barrier::new(4);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                Udp::open_group(&UdpConfig::new(loopback(10)), count)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let has = opened.iter().filter(|opened| opened.is_ok()).count();
        assert!(has <= 1, "round {round}: {has} have it, in groups of {count}");
        for refused in opened.iter().filter_map(|opened| opened.as_ref().err()) {
            assert!(matches!(refused, Error::PortInUse { .. }), "{refused}");
        }
    }
}

/// Once it is open, no option gets a stranger in; into a group only the one that Linux gives the same user.
#[test]
fn an_address_stays_with_who_has_it() {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let bind_with = |(reuse_address, reuse_port)| {
        let stranger = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        sockopt::set_socket_reuseaddr(&stranger, reuse_address).unwrap();
        sockopt::set_socket_reuseport(&stranger, reuse_port).unwrap();
        bind(&stranger, &std::net::SocketAddr::new(loopback(11), 4791))
    };
    let both = [false, true];
    for count in [1, 3] {
        let _group = open_group(loopback(11), count);
        for (address, port) in both.into_iter().flat_map(|address| both.map(|port| (address, port))) {
            let expected = if count > 1 && port { Ok(()) } else { Err(rustix::io::Errno::ADDRINUSE) };
            assert_eq!(bind_with((address, port)), expected, "{count}: {address}, {port}");
        }
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let _taken = open(loopback(7));
    let error = |address: &str| {
        Udp::open(&UdpConfig::new(address.parse().unwrap())).map(|_| ()).unwrap_err().to_string()
    };
    let refusal = error("127.78.0.7");
    assert!(refusal.contains("port 4791 of 127.78.0.7 is in use"), "{refusal}");
    let refusal = error("192.0.2.77");
    assert!(refusal.contains("192.0.2.77") && refusal.contains("127.0.0.1"), "{refusal}");
    let refusal = UdpConfig::of_interface("no-such-if").unwrap_err().to_string();
    assert!(refusal.contains("'no-such-if'") && refusal.contains("lo"), "{refusal}");
    // The loopback interface is no way to others.
    let mut port = open(loopback(8));
    let refusal = port.resolve("192.0.2.77".parse().unwrap()).unwrap_err();
    assert!(matches!(refusal, Error::NoRoute { .. }), "{refusal}");
    assert_eq!(port.resolve(loopback(9)).unwrap(), [0; 6]);
}

/// Nobody listens, or the packet is too large: that is a loss, and nothing more.
#[test]
fn what_the_kernel_refuses_is_counted_and_the_port_lives() {
    let [mut a, mut b] = [10, 11].map(|last| open(loopback(last)));
    let nowhere = Shape::new(loopback(10), loopback(12));
    for _ in 0..3 {
        send(&mut a, &[nowhere.packet(100, 1)]);
        assert_eq!(receive_now(&mut a), 0);
    }
    let unreachable = Shape::new(loopback(10), "192.0.2.77".parse().unwrap());
    assert_eq!(send(&mut a, &[unreachable.packet(100, 1), unreachable.packet(100, 2)]), 2);
    assert_eq!(a.stats().tx_dropped, 2);
    // No packet of this IP version, and none at all.
    let wrong: IpAddr = "::1".parse().unwrap();
    send(&mut a, &[Shape::new(wrong, wrong).packet(100, 1), vec![0x45; 20]]);
    assert_eq!(a.stats().tx_dropped, 4);
    cross(&mut a, &mut b, Shape::new(loopback(10), loopback(11)), 4112);
    assert_eq!(a.stats().tx_dropped, 4);
}

/// Takes what is there. After a burst with packets there is one without.
fn receive_now(port: &mut Udp) -> usize {
    let mut burst = || port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap();
    burst() + burst()
}

/// A socket that is not read loses what finds no room, and knows how much that was.
#[test]
fn what_finds_no_room_is_counted() {
    let [mut a, mut b] = [13, 14].map(|last| open(loopback(last)));
    let packet = Shape::new(loopback(13), loopback(14)).packet(4112, 1);
    let sent = 40_000;
    let mut left = std::iter::repeat_n(packet, sent);
    while a.tx_burst(Nanos::ZERO, &mut Source(&mut left)).unwrap() > 0 {}
    let mut received = 0;
    loop {
        match receive_now(&mut b) {
            0 => break,
            count => received += count,
        }
    }
    let stats = b.stats();
    assert!(received > 50 && received < sent && stats.rx_dropped > 0, "{received} of {sent}, {stats:?}");
}

#[test]
fn waiting_ends_with_a_packet() {
    let [mut a, mut b] = [15, 16].map(|last| open(loopback(last)));
    let start = Instant::now();
    b.wait(Duration::from_millis(30)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(25));
    send(&mut a, &[Shape::new(loopback(15), loopback(16)).packet(64, 1)]);
    let start = Instant::now();
    b.wait(Duration::from_secs(5)).unwrap();
    assert!(start.elapsed() < Duration::from_secs(2));
    assert_eq!(receive(&mut b, 1).len(), 1);
    // Another thread's word ends it too, also one from before.
    let waker = b.waker().unwrap();
    waker.wake_by_ref();
    b.wait(Duration::from_secs(5)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            waker.wake_by_ref();
        });
        b.wait(Duration::from_secs(5)).unwrap();
    });
    assert!(start.elapsed() < Duration::from_secs(4));
}

// ---------------------------------------------------------------- between namespaces

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));

fn pair(mtu: u32) -> Option<Pair> {
    if Command::new("ethtool").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: no `ethtool` command (package ethtool)");
        return None;
    }
    Pair::new(mtu)
}

fn ethtool(namespace: &str, features: &str) {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, "ethtool", "-K", VETH]);
    assert!(command.args(features.split_whitespace()).status().unwrap().success());
}

/// Sees the IP packets that come to an interface.
fn listen(namespace: &str) -> UdpSocket {
    common::inside(namespace, || {
        let all = (libc::ETH_P_IP as u16).to_be();
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, i32::from(all)) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: `fd` is a descriptor that nobody else owns. `UdpSocket` reads from any socket.
        let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
        socket.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
        let size = 8i32 << 20;
        // SAFETY: pointer and length describe `size`, which outlives the call.
        unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVBUFFORCE,
                (&raw const size).cast(),
                size_of_val(&size) as u32,
            )
        };
        socket
    })
}

fn heard(socket: &UdpSocket) -> Vec<u8> {
    let mut buffer = [0; 65536];
    loop {
        // SAFETY: pointer and length describe `buffer`, which outlives the call.
        let len = unsafe { libc::recv(socket.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) };
        assert!(len > 0, "nothing more comes: {}", std::io::Error::last_os_error());
        if buffer[9] == 17 && buffer[22..24] == 4791u16.to_be_bytes() {
            return buffer[..len as usize].to_vec();
        }
    }
}

/// Each packet has on the wire the identification that it was given, so that its ICRC is right
/// there, also when the interface has the kernel cut up what was sent at once.
#[test]
fn what_leaves_the_interface_has_the_identification_it_was_given() {
    for mtu in [1500, 9000] {
        let Some(pair) = pair(mtu) else { return };
        // Nobody cuts up for the sender, and nobody puts together for the receiver.
        ethtool(&pair.a, "tx-udp-segmentation off gso off");
        ethtool(&pair.b, "gro off");
        for segmentation in [true, false] {
            let config = |address| UdpConfig { segmentation, ..UdpConfig::new(address) };
            let mut a = pair.in_a(|| open_with(&config(A)));
            let mut b = pair.in_b(|| open_with(&config(B)));
            let wire = listen(&pair.b);
            let shape = Shape { tos: 0x6a, ..Shape::new(A, B) };
            let packets: Vec<_> =
                lengths(mtu as usize - 28).iter().enumerate().map(|(n, len)| shape.packet(*len, n)).collect();
            let mut told = Vec::new();
            struct Told<'a>(std::slice::Iter<'a, Vec<u8>>, &'a mut Vec<u16>);
            impl FrameSource for Told<'_> {
                fn write(&mut self, buffer: &mut [u8]) -> Option<usize> {
                    let packet = self.0.next()?;
                    self.1.push(0);
                    buffer[..packet.len()].copy_from_slice(packet);
                    Some(packet.len())
                }
                fn renumber(&mut self, _: &mut [u8], identification: u16) {
                    *self.1.last_mut().unwrap() = identification;
                }
            }
            let mut received = Vec::new();
            for batch in packets.chunks(90) {
                a.tx_burst(Nanos::ZERO, &mut Told(batch.iter(), &mut told)).unwrap();
                received.extend(receive(&mut b, batch.len()));
            }
            assert_eq!(told.len(), packets.len());
            assert_eq!(told.iter().any(|number| *number > 20), segmentation);
            for (n, (sent, number)) in packets.iter().zip(&told).enumerate() {
                let seen = heard(&wire);
                assert_eq!(seen[4..6], number.to_be_bytes(), "packet {n}, MTU {mtu}");
                assert_eq!(seen[6..8], [0x40, 0], "DF, no fragment");
                // But for the UDP checksum, which the kernel makes.
                assert_eq!(comparable(&seen)[..26], comparable(sent)[..26]);
                assert_eq!(seen[28..], sent[28..]);
                assert_eq!(comparable(&received[n]), comparable(sent));
            }
        }
    }
}

#[test]
fn packets_cross_between_namespaces_with_every_offload_on_and_off() {
    for mtu in [1500, 9000] {
        let Some(pair) = pair(mtu) else { return };
        for (sender, receiver) in [
            ("tx-udp-segmentation on gso on", "gro on"),
            ("tx-udp-segmentation off gso off", "gro on rx-udp-gro-forwarding on"),
            ("tx-udp-segmentation off gso off", "gro off"),
            ("tx-udp-segmentation on gso on tx off", "gro off"),
        ] {
            ethtool(&pair.a, sender);
            ethtool(&pair.b, receiver);
            let mut a = pair.in_a(|| open(A));
            let mut b = pair.in_b(|| open_with(&UdpConfig::of_interface(VETH).unwrap()));
            assert_eq!((b.capabilities().addresses.clone(), b.capabilities().mtu), (vec![B], mtu));
            cross(&mut a, &mut b, Shape::new(A, B), mtu as usize - 28);
            cross(&mut b, &mut a, Shape::new(B, A), mtu as usize - 28);
            let [v6_a, v6_b] = ["fd09::1", "fd09::2"].map(|text| text.parse().unwrap());
            let mut a = pair.in_a(|| open(v6_a));
            let mut b = pair.in_b(|| open(v6_b));
            cross(&mut a, &mut b, Shape { tos: 0x6a, ..Shape::new(v6_a, v6_b) }, mtu as usize - 48);
        }
    }
}

/// A packet that the way does not take is dropped with a word, and the next one passes.
#[test]
fn a_packet_too_large_for_the_way_is_dropped() {
    let Some(pair) = pair(9000) else { return };
    let mut a = pair.in_a(|| open(A));
    let mut b = pair.in_b(|| open(B));
    common::ip(&format!("-n {} route change 10.9.0.0/24 dev {VETH} mtu lock 1500", pair.a));
    a.resolve(B).unwrap();
    let shape = Shape::new(A, B);
    send(&mut a, &[shape.packet(4112, 1), shape.packet(4112, 2)]);
    assert_eq!(a.stats().tx_dropped, 2);
    cross(&mut a, &mut b, shape, 1472);
    assert_eq!(a.stats().tx_dropped, 2);
}

#[test]
fn packets_to_a_group_come_to_its_members() {
    let Some(pair) = pair(1500) else { return };
    for (own, other, group) in [("10.9.0.1", "10.9.0.2", "239.1.2.3"), ("fd09::1", "fd09::2", "ff12::7")] {
        let [own, other, group]: [IpAddr; 3] = [own, other, group].map(|text| text.parse().unwrap());
        let mut a = pair.in_a(|| open(own));
        let mut b = pair.in_b(|| open(other));
        let packet = |n| Shape { tos: 0x20, ..Shape::new(own, group) }.packet(64, n);
        send(&mut a, &[packet(1)]);
        pair.in_b(|| b.join(group)).unwrap();
        // An interface that is new has multicast routes of IPv6 only after a while.
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut heard = Vec::new();
        while heard.is_empty() && Instant::now() < deadline {
            send(&mut a, &[packet(2)]);
            b.wait(Duration::from_millis(100)).unwrap();
            b.rx_burst(Nanos::ZERO, &mut |packet: &[u8]| heard.push(packet.to_vec())).unwrap();
        }
        assert_eq!(heard.iter().map(|p| comparable(p)).collect::<Vec<_>>(), [comparable(&packet(2))]);
        b.leave(group).unwrap();
        send(&mut a, &[packet(3), Shape::new(own, other).packet(64, 4)]);
        let heard = receive(&mut b, 1);
        assert_eq!(comparable(&heard[0]), comparable(&Shape::new(own, other).packet(64, 4)));
        assert_eq!(receive_now(&mut b), 0);
    }
}
