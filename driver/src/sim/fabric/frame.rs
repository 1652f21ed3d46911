//! Frames in flight, and the fields that a switch reads.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::contents::Contents;
use crate::prefetch;
use crate::sim::ip::{self, Version};

/// The state of a frame in flight.
#[derive(Clone, Copy, Default)]
#[repr(align(64))]
pub(super) struct Frame {
    pub(super) len: u32,
    /// The destination host.
    pub(super) to: u32,
    /// The last port on its path, and that port's switch; an invalid number if a host has it.
    pub(super) last: u32,
    pub(super) target: u32,
    /// The hash of its 5-tuple.
    pub(super) flow: u64,
    pub(super) dscp: u8,
    /// Its class at the current switch.
    pub(super) class: u8,
    pub(super) is_pfc: bool,
    /// Its ingress port at the current switch, and that port's number there.
    pub(super) ingress: u32,
    pub(super) ingress_number: u32,
}

/// All frames, by number. Memory is allocated when needed, and kept.
#[derive(Default)]
pub(super) struct Frames {
    frames: Vec<Frame>,
    /// The contents of each frame; separate, because a switch that does not mark needs only the state above.
    contents: Vec<Contents>,
    spare: Vec<u32>,
}

impl Frames {
    /// Adds a frame with these bytes.
    pub(super) fn put(&mut self, bytes: &[u8]) -> u32 {
        let number = self.take();
        self.contents[number as usize].set(bytes);
        self.frames[number as usize] = Frame { len: bytes.len() as u32, ..Frame::default() };
        number
    }

    fn take(&mut self) -> u32 {
        if let Some(number) = self.spare.pop() {
            return number;
        }
        self.frames.push(Frame::default());
        self.contents.push(Contents::empty());
        self.frames.len() as u32 - 1
    }

    /// Frees a frame.
    pub(super) fn give_back(&mut self, number: u32) {
        self.spare.push(number);
    }

    pub(super) fn at(&self, number: u32) -> &Frame {
        &self.frames[number as usize]
    }

    pub(super) fn at_mut(&mut self, number: u32) -> &mut Frame {
        &mut self.frames[number as usize]
    }

    /// The headers of a frame, possibly with bytes that follow.
    pub(super) fn headers(&self, number: u32) -> &[u8] {
        self.contents[number as usize].headers(self.at(number).len as usize)
    }

    pub(super) fn headers_mut(&mut self, number: u32) -> &mut [u8] {
        let len = self.at(number).len as usize;
        self.contents[number as usize].headers_mut(len)
    }

    /// Prefetches the data of [`read`](Frames::read).
    pub(super) fn prefetch(&self, number: u32) {
        prefetch(&self.contents[number as usize]);
    }

    /// Writes a frame to `buffer`, which must be long enough; returns its length.
    pub(super) fn read(&self, number: u32, buffer: &mut [u8]) -> usize {
        let len = self.at(number).len as usize;
        self.contents[number as usize].write(&mut buffer[..len]);
        len
    }

    /// The bytes of a frame.
    pub(super) fn to_vec(&self, number: u32) -> Vec<u8> {
        self.contents[number as usize].to_vec(self.at(number).len as usize)
    }

    /// Flips a bit of a frame.
    pub(super) fn flip(&mut self, number: u32, bit: usize) {
        let mut bytes = self.to_vec(number);
        bytes[bit / 8] ^= 1 << (bit % 8);
        self.contents[number as usize].set(&bytes);
    }

    /// Copies a frame.
    pub(super) fn copy(&mut self, number: u32) -> u32 {
        let copy = self.take();
        self.contents[copy as usize] = self.contents[number as usize].clone();
        self.frames[copy as usize] = self.frames[number as usize];
        copy
    }

    /// The number of frames in flight.
    pub(super) fn under_way(&self) -> usize {
        self.frames.len() - self.spare.len()
    }
}

/// Addresses, protocol and ports of an IP packet, as far as it has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FiveTuple {
    pub(super) source: IpAddr,
    pub(super) destination: IpAddr,
    pub(super) protocol: u8,
    pub(super) ports: [u8; 4],
    pub(super) dscp: u8,
}

impl FiveTuple {
    /// The 5-tuple of an Ethernet frame, untagged or with one 802.1Q tag; `None` without an IP packet.
    pub(super) fn of(frame: &[u8]) -> Option<FiveTuple> {
        let (version, at) = ip::locate(frame)?;
        let packet = &frame[at..];
        let ports =
            |at: usize| packet.get(at..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; 4]);
        match version {
            Version::V4 => {
                let header: &[u8; 20] = packet.first_chunk()?;
                let [source, destination] = [12, 16].map(|at| {
                    Ipv4Addr::new(header[at], header[at + 1], header[at + 2], header[at + 3]).into()
                });
                let length = usize::from(header[0] & 0xf) * 4;
                let (protocol, dscp) = (header[9], header[1] >> 2);
                Some(FiveTuple { source, destination, protocol, ports: ports(length), dscp })
            }
            Version::V6 => {
                let header: &[u8; 40] = packet.first_chunk()?;
                let address = |at: usize| {
                    let bytes: [u8; 16] = std::array::from_fn(|n| header[at + n]);
                    IpAddr::from(Ipv6Addr::from(bytes))
                };
                let dscp = ((header[0] & 0xf) << 2) | (header[1] >> 6);
                let (source, destination) = (address(8), address(24));
                Some(FiveTuple { source, destination, protocol: header[6], ports: ports(40), dscp })
            }
        }
    }

    /// A number that is the same for each packet of a flow, and evenly distributed over flows.
    pub(super) fn hash(&self) -> u64 {
        let address = |address: IpAddr| match address {
            IpAddr::V4(address) => u128::from(u32::from(address)),
            IpAddr::V6(address) => u128::from(address),
        };
        let mut hash = u64::from(self.protocol) << 32 | u64::from(u32::from_be_bytes(self.ports));
        for address in [address(self.source), address(self.destination)] {
            hash = mix(hash ^ address as u64);
            hash = mix(hash ^ (address >> 64) as u64);
        }
        hash
    }
}

/// Each bit of the result depends on each bit of the number (the finalizer of SplitMix64: Steele, Lea, Flood, 2014).
pub(super) fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_reads_addresses_ports_and_dscp() {
        let mut frame = vec![0; 14];
        frame[12..].copy_from_slice(&[0x08, 0x00]);
        frame.extend([0x46, 0x6a, 0, 0, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
        // A header with an option.
        frame.extend([1, 1, 1, 1, 0xc0, 0x01, 0x12, 0xb7]);
        let tuple = FiveTuple::of(&frame).unwrap();
        assert_eq!((tuple.source, tuple.destination), ([10, 0, 0, 1].into(), [10, 0, 0, 2].into()));
        assert_eq!((tuple.protocol, tuple.ports, tuple.dscp), (17, [0xc0, 1, 0x12, 0xb7], 26));
        let mut tagged = frame[..12].to_vec();
        tagged.extend([0x81, 0, 0, 5]);
        tagged.extend(&frame[12..]);
        assert_eq!(FiveTuple::of(&tagged), Some(tuple));
        let mut v6 = frame[..12].to_vec();
        v6.extend([0x86, 0xdd]);
        v6.extend([0x6c, 0x0a, 0xbc, 0xde, 0, 8, 17, 64]);
        v6.extend(Ipv6Addr::LOCALHOST.octets());
        v6.extend(Ipv6Addr::UNSPECIFIED.octets());
        v6.extend([0xc0, 0x01, 0x12, 0xb7]);
        let tuple = FiveTuple::of(&v6).unwrap();
        assert_eq!((tuple.source, tuple.dscp), (Ipv6Addr::LOCALHOST.into(), 48));
        assert_eq!((tuple.protocol, tuple.ports), (17, [0xc0, 1, 0x12, 0xb7]));
        for length in 0..frame.len() {
            let _ = FiveTuple::of(&frame[..length]);
        }
    }
}
