//! Tests that need two hosts: the packets that leave an interface, and the effect of the path.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use ferroce_driver::udp::{Udp, UdpConfig};
use ferroce_driver::{Error, FrameSource, Nanos, PacketDriver};
use ferroce_driver_test_support::namespaces::{Namespaces, VETH, inside, ip};

use crate::{Shape, comparable, cross, expect_dealt, lengths, open, open_with, receive, receive_now, send};

const A: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 1));
const B: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 9, 0, 2));

fn pair(mtu: u32) -> Option<Namespaces> {
    if Command::new("ethtool").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: no `ethtool` command (package ethtool)");
        return None;
    }
    Namespaces::new(mtu)
}

fn ethtool(namespace: &str, features: &str) {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, "ethtool", "-K", VETH]);
    assert!(command.args(features.split_whitespace()).status().unwrap().success());
}

/// Captures the IP packets received on an interface.
fn listen(namespace: &str) -> UdpSocket {
    inside(namespace, || {
        let all = (libc::ETH_P_IP as u16).to_be();
        // SAFETY: no pointers; the result is checked.
        let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM, i32::from(all)) };
        assert!(fd >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: `fd` is a new descriptor without another owner. `UdpSocket` reads from any socket.
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

/// MADs are sent by a separate socket, with the same address and port. It receives nothing, regardless of the kernel's
/// order of sockets that share an address.
#[test]
fn mads_are_sent_by_a_socket_that_receives_nothing() {
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
                // Answers of both kinds are sent in one burst, from one port.
                let answers = [qpn, 1, 4].map(|qpn| Shape { qpn, ..back }.packet(256, n));
                send(&mut group[0], &answers);
                let mut received: Vec<_> = receive(&mut peer, 3).iter().map(|p| comparable(p)).collect();
                let mut expected: Vec<_> = answers.iter().map(|p| comparable(p)).collect();
                received.sort();
                expected.sort();
                assert!(received == expected, "{count} sockets on {far}, round {n}");
            }
            // A port that does not share is refused.
            let alone = UdpConfig::new(far).sharing(false);
            let refusal = pair.in_b(|| Udp::open(&alone).map(drop)).unwrap_err();
            assert!(matches!(refusal, Error::PortInUse { .. }), "{refusal}");
        }
    }
}

/// On the wire each packet has the identification that it was given, so that its ICRC is right, even if the kernel
/// divides a send into segments for the interface.
#[test]
fn packets_on_the_wire_have_their_identification() {
    for mtu in [1500, 9000] {
        let Some(pair) = pair(mtu) else { return };
        // Neither the sender's segmentation nor the receiver's aggregation is offloaded.
        ethtool(&pair.a, "tx-udp-segmentation off gso off");
        ethtool(&pair.b, "gro off");
        for segmentation in [true, false] {
            let config = |address| UdpConfig::new(address).segmentation(segmentation);
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
                // Except for the UDP checksum, which the kernel computes.
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

/// A packet that the interface no longer supports is dropped and logged, and the next one passes.
#[test]
fn a_packet_too_large_for_the_interface_is_dropped() {
    let Some(pair) = pair(9000) else { return };
    let mut a = pair.in_a(|| open(A));
    let mut b = pair.in_b(|| open(B));
    ip(&format!("-n {} link set {VETH} mtu 1500", pair.a));
    a.resolve(B).unwrap();
    let shape = Shape::new(A, B);
    send(&mut a, &[shape.packet(4112, 1), shape.packet(4112, 2)]);
    assert_eq!(a.stats().tx_dropped, 2);
    cross(&mut a, &mut b, shape, 1472);
    assert_eq!(a.stats().tx_dropped, 2);
}

#[test]
fn packets_to_a_group_reach_its_members() {
    let Some(pair) = pair(1500) else { return };
    for (own, other, group) in [("10.9.0.1", "10.9.0.2", "239.1.2.3"), ("fd09::1", "fd09::2", "ff12::7")] {
        let [own, other, group]: [IpAddr; 3] = [own, other, group].map(|text| text.parse().unwrap());
        let mut a = pair.in_a(|| open(own));
        let mut b = pair.in_b(|| open(other));
        let packet = |n| Shape { tos: 0x20, ..Shape::new(own, group) }.packet(64, n);
        send(&mut a, &[packet(1)]);
        pair.in_b(|| b.join(group)).unwrap();
        // A new interface has multicast routes of IPv6 only after a while.
        let deadline = Instant::now() + Duration::from_secs(5);
        let mut heard = Vec::new();
        while heard.is_empty() && Instant::now() < deadline {
            send(&mut a, &[packet(2)]);
            b.wait(Duration::from_millis(100)).unwrap();
            b.rx_burst(Nanos::ZERO, &mut |packet: &[u8]| heard.push(packet.to_vec())).unwrap();
        }
        assert_eq!(heard.iter().map(|p| comparable(p)).collect::<Vec<_>>(), [comparable(&packet(2))]);
        // Such a packet ends a wait like any other.
        send(&mut a, &[packet(5)]);
        let start = Instant::now();
        b.wait(Duration::from_secs(20)).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10));
        assert_eq!(receive(&mut b, 1).len(), 1);
        b.leave(group).unwrap();
        send(&mut a, &[packet(3), Shape::new(own, other).packet(64, 4)]);
        let heard = receive(&mut b, 1);
        assert_eq!(comparable(&heard[0]), comparable(&Shape::new(own, other).packet(64, 4)));
        assert_eq!(receive_now(&mut b), 0);
    }
}

/// ICMP's "fragmentation needed" and "packet too big" may be sent by anyone, need only the two addresses, and remain in
/// effect for ten minutes. The path MTU is the one that both ends have negotiated.
#[test]
fn a_forged_icmp_message_stops_nothing() {
    let Some(pair) = pair(1500) else { return };
    let [a6, b6]: [IpAddr; 2] = ["fd09::1", "fd09::2"].map(|text| text.parse().unwrap());
    // Reports of a packet that was too long, and of a closed port.
    let messages = [
        (A, B, 1, [3, 4], 552u32),
        (a6, b6, 58, [2, 0], 1280),
        (A, B, 1, [3, 3], 0),
        (a6, b6, 58, [1, 4], 0),
    ];
    for (from, to, protocol, kind, mtu) in messages {
        let mut a = pair.in_a(|| open(from));
        let mut b = pair.in_b(|| open(to));
        let shape = Shape::new(from, to);
        let full = if from.is_ipv4() { 1472 } else { 1452 };
        cross(&mut a, &mut b, shape, full);
        pair.in_b(|| {
            let family = if from.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
            // SAFETY: no pointers; the result is checked.
            let fd = unsafe { libc::socket(family, libc::SOCK_RAW, protocol) };
            assert!(fd >= 0, "{}", std::io::Error::last_os_error());
            // SAFETY: `fd` is a new descriptor without another owner. `UdpSocket` sends from any socket.
            let socket = UdpSocket::from(unsafe { OwnedFd::from_raw_fd(fd) });
            for _ in 0..100 {
                socket.send_to(&message(kind, mtu, &shape.packet(64, 1)), (from, 0)).unwrap();
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        cross(&mut a, &mut b, shape, full);
        assert_eq!(a.stats().tx_dropped, 0, "{to}");
    }
}

/// The message about `packet`. The kernel computes the checksum of ICMPv6, but not that of ICMP.
fn message([kind, code]: [u8; 2], mtu: u32, packet: &[u8]) -> Vec<u8> {
    let mut message = vec![kind, code, 0, 0];
    message.extend(mtu.to_be_bytes());
    message.extend(packet);
    let words = message.chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(*word.get(1).unwrap_or(&0)));
    let sum: u32 = words.sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    let checksum = !(((sum & 0xffff) + (sum >> 16)) as u16);
    message[2..4].copy_from_slice(&checksum.to_be_bytes());
    message
}
