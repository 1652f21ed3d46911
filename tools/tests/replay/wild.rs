//! Captures that are parsed, changed and written again.

use std::path::Path;

use ferroce_driver::pcap::{LinkType, Reader};
use ferroce_wire::{Bth, ICRC_LEN, NetworkHeader, Packet, icrc};

/// The Ethernet frames of a capture, with their times and original lengths.
#[derive(Clone)]
pub(crate) struct Frames(Vec<(u64, Vec<u8>, u32)>);

impl Frames {
    /// `None` if the capture contains other frames.
    pub(crate) fn read(path: &Path) -> Option<Frames> {
        let mut reader = Reader::open(path).expect("a capture");
        let mut frames = Vec::new();
        while let Some(record) = reader.next_record().expect("a whole capture") {
            if record.link_type != LinkType::Ethernet {
                return None;
            }
            frames.push((record.timestamp, record.captured.to_vec(), record.original_len));
        }
        Some(Frames(frames))
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// The frames of a range, counted from 0.
    pub(crate) fn part(&self, from: usize, to: usize) -> Frames {
        Frames(self.0[from..to].to_vec())
    }

    /// Without one of them, counted from 0.
    pub(crate) fn without(&self, number: usize) -> Frames {
        let mut frames = self.clone();
        frames.0.remove(number);
        frames
    }

    /// Truncated to this length, as by `tcpdump -s`.
    pub(crate) fn cut(&self, length: usize) -> Frames {
        let mut frames = self.clone();
        frames.0.iter_mut().for_each(|(_, bytes, _)| bytes.truncate(length));
        frames
    }

    /// Only those of one sender: that of the frame `number`, counted from 0.
    pub(crate) fn one_way(&self, number: usize) -> Frames {
        let source = |frame: &[u8]| frame.get(6..12).map(<[u8]>::to_vec);
        let wanted = source(&self.0[number].1);
        Frames(self.0.iter().filter(|(_, bytes, _)| source(bytes) == wanted).cloned().collect())
    }

    /// As a pcap file with nanoseconds.
    pub(crate) fn write(&self, path: &Path) {
        let mut bytes = Vec::new();
        for word in [0xa1b2_3c4d_u32, 2 | 4 << 16, 0, 0, 65535, 1] {
            bytes.extend(word.to_le_bytes());
        }
        for (time, frame, original) in &self.0 {
            let len = frame.len() as u32;
            for word in [(time / 1_000_000_000) as u32, (time % 1_000_000_000) as u32, len, *original] {
                bytes.extend(word.to_le_bytes());
            }
            bytes.extend(frame);
        }
        std::fs::write(path, bytes).expect("the file can be written");
    }

    /// Changes a frame, counted from 1, starting at its BTH, and corrects its ICRC.
    pub(crate) fn edit(&mut self, number: usize, change: impl FnOnce(&mut [u8])) {
        let frame = &mut self.0[number - 1].1;
        let packet = Packet::decode(frame).expect("a RoCE packet");
        let header: NetworkHeader = packet.header;
        let start = ETHERNET + header.bth_start();
        let end = ETHERNET + packet.covered().len();
        assert!(end >= start + Bth::LEN);
        change(&mut frame[start..end]);
        let right = icrc::compute(header, &frame[ETHERNET..end]).expect("its headers");
        frame[end..end + ICRC_LEN].copy_from_slice(&right.to_le_bytes());
    }

    /// Changes an IPv4 frame, counted from 1, starting at its network header, and corrects its ICRC.
    pub(crate) fn edit_network(&mut self, number: usize, change: impl FnOnce(&mut [u8])) {
        change(&mut self.0[number - 1].1[ETHERNET..]);
        self.edit(number, |_| {});
    }

    /// Sets the identification of each IPv4 packet, by its number from 0.
    pub(crate) fn identify(&mut self, identification: impl Fn(usize) -> u16) {
        for number in 0..self.len() {
            let bytes = identification(number).to_be_bytes();
            self.edit_network(number + 1, |packet| packet[4..6].copy_from_slice(&bytes));
        }
    }

    /// Sets the UDP source port of an IPv4 packet, counted from 1.
    pub(crate) fn set_port(&mut self, number: usize, port: u16) {
        self.0[number - 1].1[ETHERNET + 20..ETHERNET + 22].copy_from_slice(&port.to_be_bytes());
        self.edit(number, |_| {});
    }

    /// Replaces the IPv4 and UDP headers of a frame, counted from 1, by a GRH.
    pub(crate) fn make_roce_v1(&mut self, number: usize) {
        let frame = &mut self.0[number - 1].1;
        let packet = Packet::decode(frame).expect("a RoCE packet");
        let start = ETHERNET + packet.header.bth_start();
        let network = packet.network();
        let transport = frame[start..ETHERNET + packet.covered().len() + ICRC_LEN].to_vec();
        let mut grh = vec![0x60, 0, 0, 0, 0, 0, 0x1b, 64];
        grh[4..6].copy_from_slice(&(transport.len() as u16).to_be_bytes());
        grh.extend(network.source.0);
        grh.extend(network.destination.0);
        frame.truncate(ETHERNET - 2);
        frame.extend([0x89, 0x15]);
        frame.extend(grh);
        frame.extend(transport);
        self.0[number - 1].2 = self.0[number - 1].1.len() as u32;
        self.edit(number, |_| {});
    }

    /// Removes bytes before the ICRC of an IPv4 packet, counted from 1.
    pub(crate) fn shorten(&mut self, number: usize, bytes: usize) {
        let frame = &mut self.0[number - 1].1;
        let end = frame.len() - ICRC_LEN;
        frame.drain(end - bytes..end);
        for at in [ETHERNET + 2, ETHERNET + 24] {
            let length = u16::from_be_bytes([frame[at], frame[at + 1]]) - bytes as u16;
            frame[at..at + 2].copy_from_slice(&length.to_be_bytes());
        }
    }

    /// Duplicates a frame, counted from 1, directly after itself.
    pub(crate) fn repeat(&mut self, number: usize) {
        let (time, frame, original) = self.0[number - 1].clone();
        self.0.insert(number, (time + 1000, frame, original));
    }

    /// Invalidates the ICRC of a frame, counted from 1.
    pub(crate) fn damage(&mut self, number: usize) {
        if let Some(last) = self.0[number - 1].1.last_mut() {
            *last ^= 0xff;
        }
    }

    /// Adds four bytes of options to the IPv4 header of a frame, counted from 1.
    pub(crate) fn give_options(&mut self, number: usize) {
        let (_, frame, original) = &mut self.0[number - 1];
        frame[ETHERNET] = 0x46;
        let length = u16::from_be_bytes([frame[ETHERNET + 2], frame[ETHERNET + 3]]) + 4;
        frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&length.to_be_bytes());
        frame.splice(ETHERNET + 20..ETHERNET + 20, [1, 1, 1, 0]);
        *original += 4;
    }

    /// Truncates a frame, counted from 1, and its original length.
    pub(crate) fn cut_silently(&mut self, number: usize, length: usize) {
        let (_, frame, original) = &mut self.0[number - 1];
        frame.truncate(length);
        *original = frame.len() as u32;
    }

    /// Replaces the EtherType of a frame, counted from 1, by these bytes.
    pub(crate) fn wrap(&mut self, number: usize, front: &[u8]) {
        let (_, frame, original) = &mut self.0[number - 1];
        frame.splice(ETHERNET - 2..ETHERNET - 2, front.iter().copied());
        *original = frame.len() as u32;
    }

    /// Encapsulates a frame, counted from 1, in a tunnel.
    pub(crate) fn tunnel(&mut self, number: usize, tunnel: Tunnel) {
        let (_, frame, original) = &mut self.0[number - 1];
        let macs = frame[..12].to_vec();
        let mut packet = frame[ETHERNET..].to_vec();
        packet[10..12].fill(0);
        let sum: u32 = packet[..20].chunks(2).map(|word| u32::from(word[0]) << 8 | u32::from(word[1])).sum();
        let sum = !((sum & 0xffff) + (sum >> 16)) as u16;
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        let labels = [0, 1, 0x20, 64, 0, 2, 0x31, 64];
        let udp = |port: u16, front: &[u8]| {
            let len = (front.len() + frame.len() + 28) as u16;
            let mut bytes = vec![0x45, 0, 0, 0, 0, 1, 0, 0, 64, 17, 0, 0, 10, 1, 1, 1, 10, 1, 1, 2];
            bytes[2..4].copy_from_slice(&len.to_be_bytes());
            bytes.extend([0xc0, 0]);
            bytes.extend(port.to_be_bytes());
            bytes.extend((len - 20).to_be_bytes());
            bytes.extend([0, 0]);
            bytes.extend(front);
            bytes
        };
        let gre = |header: &[u8]| {
            let mut outer = udp(0, &[])[..20].to_vec();
            outer[9] = 47;
            [&outer, header].concat()
        };
        let (kind, front, inner): ([u8; 2], Vec<u8>, &[u8]) = match tunnel {
            Tunnel::MplsIp => ([0x88, 0x47], labels.to_vec(), &packet),
            Tunnel::MplsEthernet => ([0x88, 0x47], [&labels[..], &[0; 4]].concat(), frame),
            Tunnel::MplsBare => ([0x88, 0x47], labels.to_vec(), frame),
            Tunnel::Vxlan => ([8, 0], udp(4789, &VXLAN), frame),
            Tunnel::VxlanOfLinux => ([8, 0], udp(8472, &VXLAN), frame),
            Tunnel::VxlanInVxlan => {
                let within = [&VXLAN, &frame[..12], &[8, 0], &udp(4789, &VXLAN)].concat();
                ([8, 0], udp(4789, &within), frame)
            }
            Tunnel::Gre => ([8, 0], gre(&[0x20, 0, 0x65, 0x58, 0, 0, 0, 9]), frame),
            Tunnel::Erspan => {
                let header = [0x10, 0, 0x88, 0xbe, 0, 0, 0, 9, 0x10, 0, 0, 0, 0, 0, 0, 0];
                ([8, 0], gre(&header), frame)
            }
        };
        *frame = [&macs[..], &kind, &front, inner].concat();
        *original = frame.len() as u32;
    }

    /// `count` frames with the link and network headers of the first one, and these transports.
    pub(crate) fn many(&self, count: u32, transport: impl Fn(u32) -> Vec<u8>) -> Frames {
        self.talk((0..count).map(|number| (false, transport(number))))
    }

    /// Frames with the link and network headers of the first one, or those of its responses, and these transports.
    pub(crate) fn talk(&self, packets: impl IntoIterator<Item = (bool, Vec<u8>)>) -> Frames {
        let (time, first, _) = &self.0[0];
        let frames = packets.into_iter().zip(0..).map(|((is_answer, transport), number)| {
            let mut frame = first[..ETHERNET + 28].to_vec();
            if is_answer {
                frame[..12].rotate_left(6);
                frame[ETHERNET + 12..ETHERNET + 20].rotate_left(4);
            }
            frame.extend(transport);
            frame.extend([0; ICRC_LEN]);
            let len = (frame.len() - ETHERNET) as u16;
            frame[ETHERNET + 2..ETHERNET + 4].copy_from_slice(&len.to_be_bytes());
            frame[ETHERNET + 24..ETHERNET + 26].copy_from_slice(&(len - 20).to_be_bytes());
            let len = frame.len() as u32;
            (time + number * 10_000, frame, len)
        });
        let mut frames = Frames(frames.collect());
        for (_, frame, _) in &mut frames.0 {
            let end = frame.len() - ICRC_LEN;
            let right = icrc::compute(NetworkHeader::Ipv4, &frame[ETHERNET..end]).expect("its headers");
            frame[end..].copy_from_slice(&right.to_le_bytes());
        }
        frames
    }

    /// Sets the time of each frame, in nanoseconds after the first one, by its number from 0.
    pub(crate) fn set_times(&mut self, times: impl Fn(u64) -> u64) {
        let start = self.0.first().map_or(0, |(time, ..)| *time);
        self.0.iter_mut().zip(0..).for_each(|((time, ..), number)| *time = start + times(number));
    }

    /// These Ethernet frames, one per microsecond.
    pub(crate) fn raw(frames: Vec<Vec<u8>>) -> Frames {
        let each = frames.into_iter().zip(1..);
        Frames(
            each.map(|(frame, number): (_, u64)| (number * 1000, frame.clone(), frame.len() as u32))
                .collect(),
        )
    }

    /// The frames of both, those of `other` last.
    pub(crate) fn and(mut self, mut other: Frames) -> Frames {
        let (end, start) =
            (self.0.last().map_or(0, |last| last.0), other.0.first().map_or(0, |first| first.0));
        other.0.iter_mut().for_each(|(time, ..)| *time = *time - start + end + 1_000_000);
        self.0.extend(other.0);
        self
    }

    /// Changes bytes of a frame, counted from 1, starting at its BTH, as a bad link does: its ICRC is wrong then.
    pub(crate) fn corrupt(&mut self, number: usize, at: usize, byte: u8) {
        self.0[number - 1].1[ETHERNET + 28 + at] = byte;
    }

    /// Sets a byte of a frame, counted from 1.
    pub(crate) fn set_byte(&mut self, number: usize, at: usize, byte: u8) {
        self.0[number - 1].1[at] = byte;
    }

    /// Changes the destination MAC address of a frame, counted from 1.
    pub(crate) fn send_to(&mut self, number: usize, mac: [u8; 6]) {
        self.0[number - 1].1[..6].copy_from_slice(&mac);
    }

    /// Moves a frame and all later ones to an earlier time.
    pub(crate) fn hurry(&mut self, number: usize, nanoseconds: u64) {
        for (time, ..) in &mut self.0[number - 1..] {
            *time -= nanoseconds;
        }
    }
}

const ETHERNET: usize = 14;

/// The header of network 42.
const VXLAN: [u8; 8] = [8, 0, 0, 0, 0, 0, 42, 0];

/// The encapsulation of a frame.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Tunnel {
    MplsIp,
    MplsEthernet,
    /// Without a control word.
    MplsBare,
    Vxlan,
    /// To Linux' default port.
    VxlanOfLinux,
    VxlanInVxlan,
    Gre,
    Erspan,
}

pub(crate) const TUNNELS: [Tunnel; 8] = [
    Tunnel::MplsIp,
    Tunnel::MplsEthernet,
    Tunnel::MplsBare,
    Tunnel::Vxlan,
    Tunnel::VxlanOfLinux,
    Tunnel::VxlanInVxlan,
    Tunnel::Gre,
    Tunnel::Erspan,
];

/// A packet from its BTH to its payload.
pub(crate) fn transport(opcode: u8, to: u32, psn: u32, rest: &[u8]) -> Vec<u8> {
    let (to, psn) = (to.to_be_bytes(), psn.to_be_bytes());
    [&[opcode, 0x40, 0xff, 0xff, 0], &to[1..], &psn, rest].concat()
}

/// The RETH of a READ or WRITE.
pub(crate) fn reth(va: u64, rkey: u32, length: u32) -> Vec<u8> {
    [&va.to_be_bytes()[..], &rkey.to_be_bytes(), &length.to_be_bytes()].concat()
}
