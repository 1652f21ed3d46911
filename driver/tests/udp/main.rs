//! The UDP driver, on addresses of the loopback interface, where every user may open sockets, and, as root, between
//! namespaces, where the packets of an interface can be captured.
#![allow(clippy::unwrap_used)] // in helpers of tests

mod namespaces;

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use ferroce_driver::pcap::Recorder;
use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Error, FrameSource, Nanos, NextHop, PacketDriver, RefusalReason};
use ferroce_driver_test_support::patience::until;
use ferroce_driver_test_support::readiness;

/// Writes packets and renumbers them, like the engine.
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

    /// An IP packet with a UDP datagram of `len` bytes, which is identified by `n`.
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

/// Clears the header fields that the kernel does not take from the sender: identification and checksums.
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

/// A port that was just closed may still be held by a child of another test that has not executed its program yet.
fn open_with(config: &UdpConfig) -> Udp {
    patiently(|| Udp::open(config))
}

fn open_group(address: IpAddr, count: usize) -> Vec<Udp> {
    patiently(|| Udp::open_group(&UdpConfig::new(address), count))
}

fn patiently<T>(open: impl Fn() -> Result<T, Error>) -> T {
    let opened = || match open() {
        Err(Error::PortInUse { .. }) => None,
        opened => Some(opened.unwrap()),
    };
    until(Duration::from_secs(5), opened, || "the port, which is in use".to_owned())
}

/// Lengths for all kinds of sends: equal, a shorter last one, longer ones.
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
            let config = UdpConfig::new(loopback(last)).segmentation(segmentation).aggregation(aggregation);
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

/// Without aggregation a packet has the identification of a single packet; packets sent at once and aggregated have
/// those of their positions.
#[test]
fn identifications_are_positions_in_a_send() {
    let [mut a, mut b] = [3, 4].map(|last| open(loopback(last)));
    let shape = Shape::new(loopback(3), loopback(4));
    let packets: Vec<_> =
        [1056, 1040, 1040, 1040, 516, 1040].iter().map(|len| shape.packet(*len, 0)).collect();
    send(&mut a, &packets);
    let numbers: Vec<_> = receive(&mut b, 6).iter().map(|packet| packet[5]).collect();
    assert_eq!(numbers, [0, 1, 0, 1, 2, 0]);
    // A queue pair with an odd number may share its receiver's address with other sockets, so its packets are not sent
    // together with those of others.
    let packets: Vec<_> =
        [4, 6, 4, 5, 5, 7, 8].iter().map(|qpn| Shape { qpn: *qpn, ..shape }.packet(1040, 0)).collect();
    send(&mut a, &packets);
    let numbers: Vec<_> = receive(&mut b, 7).iter().map(|packet| packet[5]).collect();
    assert_eq!(numbers, [0, 1, 2, 0, 1, 0, 0]);
}

/// After a send, one burst makes no receive call, so that other pending packets can be sent. A port that sends all the
/// time makes a call in every third burst.
#[test]
fn receiving_waits_for_pending_sends_but_not_for_long() {
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
        // One burst without a call, and one that finds nothing.
        assert_eq!([look(&mut a), look(&mut a)], [0, 0]);
    }
    send(&mut b, &[to_a.packet(64, 0)]);
    assert_eq!(look(&mut a), 1, "nothing has come or left just before");
}

/// Even if more is sent than is written at once.
#[test]
fn sends_are_as_long_as_possible() {
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
fn packets_reach_the_slot_of_their_queue_pair() {
    for count in [4, 3] {
        let mut group = open_group(loopback(5), count);
        let mut peer = open(loopback(6));
        expect_dealt(&mut group, &mut peer, Shape::new(loopback(6), loopback(5)));
    }
    assert!(Udp::open_group(&UdpConfig::new(loopback(5)), 0).is_err());
}

/// Checks that each of `group` receives the packets of `peer` for its queue pair numbers.
#[track_caller]
fn expect_dealt(group: &mut [Udp], peer: &mut Udp, shape: Shape) {
    let count = group.len();
    // The numbers of slot 0 and of the other slots.
    let slot_of = |qpn: u32| if qpn.is_multiple_of(2) { 0 } else { (qpn % 128 / 2) as usize };
    let qpns = (0..4000u32).map(|n| (n * 0x9e3b) & 0x00ff_ffff);
    let qpns: Vec<u32> = qpns.filter(|qpn| *qpn > 1 && slot_of(*qpn) < count).take(400).collect();
    let packets: Vec<_> =
        qpns.iter().enumerate().map(|(n, qpn)| Shape { qpn: *qpn, ..shape }.packet(64, n)).collect();
    for batch in packets.chunks(100) {
        send(peer, batch);
    }
    for (index, port) in group.iter_mut().enumerate() {
        let capabilities = port.capabilities();
        let (rest, divisor) = if index == 0 { (0, 2) } else { (2 * index as u32 + 1, 128) };
        assert_eq!((capabilities.qpns, capabilities.comm_ids), ((rest, divisor), (index as u32, 64)));
        let mine = qpns.iter().zip(&packets).filter(|(qpn, _)| slot_of(**qpn) == index);
        let mine: Vec<_> = mine.map(|(_, packet)| comparable(packet)).collect();
        assert!(mine.len() > 3);
        let received: Vec<_> = receive(port, mine.len()).iter().map(|packet| comparable(packet)).collect();
        assert!(received == mine, "socket {index} of {count}");
    }
}

/// Ports opened at the same time get a slot each, or are refused if the address is not shared.
#[test]
fn many_may_open_an_address_at_once() {
    for round in 0..20 {
        let (count, sharing) = (1 + round % 2, round % 4 < 2);
        let start = std::sync::Barrier::new(4);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let open = || {
                start.wait();
                Udp::open_group(&UdpConfig::new(loopback(10)).sharing(sharing), count)
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let has = opened.iter().filter(|opened| opened.is_ok()).count();
        assert_eq!(has, if sharing { 4 } else { 1 }, "round {round}");
        for refused in opened.iter().filter_map(|opened| opened.as_ref().err()) {
            assert!(matches!(refused, Error::PortInUse { .. }), "{refused}");
        }
        let mut slots: Vec<_> = opened.into_iter().flatten().flatten().map(|port| slot_of(&port)).collect();
        slots.sort();
        assert_eq!(slots, (0..has * count).collect::<Vec<_>>());
    }
}

fn slot_of(port: &Udp) -> usize {
    port.capabilities().comm_ids.0 as usize
}

/// Only the option with which Linux admits the same user admits a foreign socket. Then the kernel's order is unknown,
/// and nothing else can join.
#[test]
fn foreign_sockets_do_not_get_an_open_address() {
    use rustix::net::{AddressFamily, SocketType, bind, socket, sockopt};
    let bind_with = |(reuse_address, reuse_port)| {
        let stranger = socket(AddressFamily::INET, SocketType::DGRAM, None).unwrap();
        sockopt::set_socket_reuseaddr(&stranger, reuse_address).unwrap();
        sockopt::set_socket_reuseport(&stranger, reuse_port).unwrap();
        bind(&stranger, &std::net::SocketAddr::new(loopback(11), 4791)).map(|()| stranger)
    };
    let both = [false, true];
    for count in [1, 3] {
        let _group = open_group(loopback(11), count);
        for (address, port) in both.into_iter().flat_map(|address| both.map(|port| (address, port))) {
            let expected = if port { Ok(()) } else { Err(rustix::io::Errno::ADDRINUSE) };
            assert_eq!(bind_with((address, port)).map(drop), expected, "{count}: {address}, {port}");
        }
        let stranger = bind_with((false, true)).unwrap();
        let refused = Udp::open(&UdpConfig::new(loopback(11))).unwrap_err().to_string();
        let expected =
            format!("{} sockets are on its port 4791 and {} of them are ferroce's", count + 3, count + 2);
        assert!(refused.contains(&expected), "{refused}");
        drop(stranger);
        assert_eq!(slot_of(&open(loopback(11))), count);
    }
}

#[test]
fn refusals_name_what_is_wrong() {
    let _taken = open_with(&UdpConfig::new(loopback(7)).sharing(false));
    let error = |address: &str| {
        Udp::open(&UdpConfig::new(address.parse().unwrap())).map(|_| ()).unwrap_err().to_string()
    };
    let refusal = error("127.78.0.7");
    assert!(refusal.contains("port 4791 of 127.78.0.7 is in use"), "{refusal}");
    let refusal = error("192.0.2.77");
    assert!(refusal.contains("192.0.2.77") && refusal.contains("127.0.0.1"), "{refusal}");
    let refusal = UdpConfig::of_interface("no-such-if").unwrap_err().to_string();
    assert!(refusal.contains("'no-such-if'") && refusal.contains("lo"), "{refusal}");
    // The loopback interface has no route to other hosts.
    let mut port = open(loopback(8));
    let refusal = port.resolve("192.0.2.77".parse().unwrap()).unwrap_err();
    assert!(matches!(refusal, Error::NoRoute { .. }), "{refusal}");
    assert_eq!(port.resolve(loopback(9)).unwrap(), NextHop::Found([0; 6]));
}

#[test]
fn a_recorder_refuses_a_udp_port_with_a_message() {
    let error = Recorder::create(open(loopback(40)), "x.pcapng").err().unwrap().to_string();
    assert!(
        error.contains("udp on 'lo' has none, so record its packets with `tcpdump -i lo -w FILE"),
        "{error}"
    );
    assert!(!error.contains('{'), "Debug output: {error}");
}

/// A missing listener or a packet that is too large only causes a loss.
#[test]
fn refused_packets_are_counted_and_the_port_continues() {
    let [mut a, mut b] = [10, 11].map(|last| open(loopback(last)));
    let nowhere = Shape::new(loopback(10), loopback(12));
    for _ in 0..3 {
        send(&mut a, &[nowhere.packet(100, 1)]);
        assert_eq!(receive_now(&mut a), 0);
    }
    // The host has reported by ICMP that the port is closed, and for which packet.
    let told = a.next_refusal().expect("word of the packet that came back");
    assert_eq!((told.peer, told.from, told.reason), (loopback(12), loopback(12), RefusalReason::Port));
    assert_eq!(told.quoted, nowhere.packet(100, 1)[28..][..told.quoted.len()]);
    let unreachable = Shape::new(loopback(10), "192.0.2.77".parse().unwrap());
    assert_eq!(send(&mut a, &[unreachable.packet(100, 1), unreachable.packet(100, 2)]), 2);
    assert_eq!(a.stats().tx_dropped, 2);
    // A packet of the wrong IP version, and an invalid one.
    let wrong: IpAddr = "::1".parse().unwrap();
    send(&mut a, &[Shape::new(wrong, wrong).packet(100, 1), vec![0x45; 20]]);
    assert_eq!(a.stats().tx_dropped, 4);
    cross(&mut a, &mut b, Shape::new(loopback(10), loopback(11)), 4112);
    assert_eq!(a.stats().tx_dropped, 4);
}

/// Receives pending packets. A burst with packets is followed by one without.
fn receive_now(port: &mut Udp) -> usize {
    let mut burst = || port.rx_burst(Nanos::ZERO, &mut |_: &[u8]| {}).unwrap();
    burst() + burst()
}

/// A socket that is not read drops packets without room, and counts them.
#[test]
fn packets_without_room_are_counted() {
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
    // A waker of another thread ends it too, even one called before.
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

#[test]
fn a_wait_by_the_caller_ends_with_each_event() {
    let [mut a, mut b] = [27, 28].map(|last| open(loopback(last)));
    let packet = Shape::new(loopback(27), loopback(28)).packet(64, 1);
    readiness::ends_with_each(&mut b, || send(&mut a, &[packet]));
    assert_eq!(receive(&mut b, 1).len(), 1);
}
