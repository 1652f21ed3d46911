//! Ports that exchange frames which the XDP program knows as RoCE.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use ferroce_driver::{Capabilities, Nanos, PacketDriver};

/// A frame that the XDP program should know as RoCE.
#[derive(Clone, Copy, Debug)]
pub struct Roce {
    /// The receiver's hardware address.
    pub to: [u8; 6],
    /// The sender's hardware address.
    pub from: [u8; 6],
    /// The tag of a VLAN: priority and number.
    pub vlan: Option<u16>,
    /// The receiver's IP address.
    pub ip: IpAddr,
    /// The destination port of UDP; RoCEv2 has 4791.
    pub port: u16,
}

impl Roce {
    /// RoCEv2 over IPv4, untagged, to the address of the second of two [`Namespaces`](crate::namespaces::Namespaces).
    pub fn v4(to: [u8; 6], from: [u8; 6]) -> Roce {
        Roce { to, from, vlan: None, ip: [10, 9, 0, 2].into(), port: 4791 }
    }

    /// The same to a port's own address, if it has one of IPv4.
    pub fn to(port: &Capabilities, from: [u8; 6]) -> Roce {
        let roce = Roce::v4(port.mac, from);
        let ip = port.addresses.iter().copied().find(IpAddr::is_ipv4);
        Roce { ip: ip.unwrap_or(roce.ip), ..roce }
    }

    /// `len` bytes in all, the payload's derived from `seed`.
    pub fn build(self, len: usize, seed: usize) -> Vec<u8> {
        let mut f = Vec::with_capacity(len);
        f.extend_from_slice(&self.to);
        f.extend_from_slice(&self.from);
        if let Some(tag) = self.vlan {
            f.extend_from_slice(&[0x81, 0x00]);
            f.extend_from_slice(&tag.to_be_bytes());
        }
        if let IpAddr::V6(ip) = self.ip {
            f.extend_from_slice(&[0x86, 0xdd, 0x60, 0, 0, 0]);
            f.extend_from_slice(&((len - f.len() - 36) as u16).to_be_bytes());
            f.extend_from_slice(&[17, 64]);
            f.extend_from_slice(&[0xfd; 16]);
            f.extend_from_slice(&ip.octets());
        } else if let IpAddr::V4(ip) = self.ip {
            f.extend_from_slice(&[0x08, 0x00, 0x45, 0]);
            f.extend_from_slice(&((len - f.len() + 2) as u16).to_be_bytes());
            f.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 10, 9, 0, 1]);
            f.extend_from_slice(&ip.octets());
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
pub fn one(frame: &[u8]) -> impl FnMut(&mut [u8]) -> Option<usize> {
    let mut frame = Some(frame);
    move |buffer| {
        let frame = frame.take()?;
        buffer[..frame.len()].copy_from_slice(frame);
        Some(frame.len())
    }
}

/// Sends one frame, when there is room for it.
pub fn send(port: &mut dyn PacketDriver, frame: &[u8]) {
    let deadline = Instant::now() + Duration::from_secs(5);
    while port.tx_burst(Nanos::ZERO, &mut one(frame)).unwrap() == 0 {
        assert!(Instant::now() < deadline, "no room to send for 5 s");
    }
}

/// Receives `count` frames.
pub fn receive(port: &mut dyn PacketDriver, count: usize) -> Vec<Vec<u8>> {
    let mut frames = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(5);
    while frames.len() < count && Instant::now() < deadline {
        port.rx_burst(Nanos::ZERO, &mut |frame: &[u8]| frames.push(frame.to_vec())).unwrap();
    }
    frames
}

/// Receives what comes until nothing has come for a time.
pub fn drain(port: &mut dyn PacketDriver, quiet: Duration) -> Vec<Vec<u8>> {
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
pub fn cross(from: &mut dyn PacketDriver, to: &mut dyn PacketDriver, size: usize, count: usize) {
    let kind = Roce::to(to.capabilities(), from.capabilities().mac);
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
