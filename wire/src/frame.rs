use zerocopy::{Immutable, IntoBytes};

use crate::icrc::{self, Crc32};
use crate::{
    Bth, Extensions, Gid, Grh, ICRC_LEN, MacAddr, NetworkHeader, Opcode, Qpn, ROCE_V1_ETHERTYPE,
    ROCE_V2_PORT, VlanTag,
};

/// The encapsulation of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encapsulation {
    /// UDP over IPv4 or IPv6, according to the GIDs.
    RoceV2 {
        /// The UDP source port; constant for a QP, so that all its packets use one path.
        source_port: u16,
    },
    /// Directly over Ethernet, with a GRH.
    RoceV1,
}

/// Explicit congestion notification (RFC 3168): the lower two bits of the traffic class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Ecn {
    /// Not-ECT: a congested switch drops the packet.
    NotCapable = 0,
    /// ECT(0): a congested switch marks the packet.
    Capable = 2,
    /// CE: a switch has marked the packet.
    CongestionExperienced = 3,
}

impl Ecn {
    /// Its bits in a traffic class.
    pub const MASK: u8 = 3;
}

/// Addresses and traffic class of a path: the contents of all headers before the BTH.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathAddress {
    /// The sender's hardware address.
    pub source_mac: MacAddr,
    /// The next hop's hardware address.
    pub destination_mac: MacAddr,
    /// The 802.1Q tag, if the path has one.
    pub vlan: Option<VlanTag>,
    /// The sender.
    pub source: Gid,
    /// The receiver; of the same IP version as the sender.
    pub destination: Gid,
    /// RoCEv2 or v1.
    pub encapsulation: Encapsulation,
    /// TOS or traffic class.
    pub traffic_class: u8,
    /// Flow label, 20 bits; unused over IPv4.
    pub flow_label: u32,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// IPv4 identification. With DF set it has no meaning (RFC 6864), but the ICRC covers it.
    pub identification: u16,
}

/// The UDP source port for a flow label, or for a pair of QPNs if the label is 0 (docs/protocol.md §1; the hash of
/// rdma-core's `ibv_flow_label_to_udp_sport`).
pub fn source_port(flow_label: u32, local: Qpn, remote: Qpn) -> u16 {
    let label = match flow_label & 0x000f_ffff {
        0 => {
            let mut v = u64::from(local.value()) * u64::from(remote.value());
            v ^= v >> 20;
            v ^= v >> 40;
            (v & 0x000f_ffff) as u32
        }
        label => label,
    };
    ((label & 0x3fff) ^ (label & 0xf_c000) >> 14) as u16 | 0xc000
}

/// The bytes before the BTH for one path, made once. A frame only adds its lengths.
#[derive(Clone, Copy, Debug)]
pub struct PathHeader {
    bytes: [u8; PathHeader::MAX],
    network: NetworkHeader,
    network_start: u8,
    len: u8,
    /// One's complement sum of the IPv4 header with total length and checksum zero.
    ipv4_sum: u32,
}

impl PathHeader {
    /// Ethernet, 802.1Q tag, IPv6, UDP.
    const MAX: usize = 14 + 4 + 40 + 8;

    /// The headers of `path`.
    pub fn new(path: &PathAddress) -> PathHeader {
        let network = match path.encapsulation {
            Encapsulation::RoceV1 => NetworkHeader::Grh,
            Encapsulation::RoceV2 { .. } if path.destination.is_ipv6() => NetworkHeader::Ipv6,
            Encapsulation::RoceV2 { .. } => NetworkHeader::Ipv4,
        };
        PathHeader::over(network, path)
    }

    /// The headers of `path`, with this network header.
    pub(crate) fn over(network: NetworkHeader, path: &PathAddress) -> PathHeader {
        let mut bytes = [0; PathHeader::MAX];
        let mut len = 0;
        let mut put = |part: &[u8]| {
            bytes[len..len + part.len()].copy_from_slice(part);
            len += part.len();
        };
        put(&path.destination_mac.0);
        put(&path.source_mac.0);
        if let Some(tag) = path.vlan {
            put(&[0x81, 0x00]);
            put(&(u16::from(tag.priority & 7) << 13 | tag.id & 0x0fff).to_be_bytes());
        }
        let ethertype = match network {
            NetworkHeader::Ipv4 => 0x0800,
            NetworkHeader::Ipv6 => 0x86dd,
            NetworkHeader::Grh => ROCE_V1_ETHERTYPE,
        };
        put(&u16::to_be_bytes(ethertype));
        match network {
            NetworkHeader::Ipv4 => {
                put(&[0x45, path.traffic_class, 0, 0]);
                put(&path.identification.to_be_bytes());
                put(&[0x40, 0, path.hop_limit, 17, 0, 0]);
                // An IPv4-mapped GID ends with the IPv4 address.
                put(&path.source.0[12..]);
                put(&path.destination.0[12..]);
            }
            NetworkHeader::Ipv6 | NetworkHeader::Grh => {
                let next = match network {
                    NetworkHeader::Grh => Grh::NEXT_HEADER_BTH,
                    _ => Grh::NEXT_HEADER_UDP,
                };
                let PathAddress { traffic_class, flow_label, hop_limit, source, destination, .. } = *path;
                let grh = Grh::new(traffic_class, flow_label, 0, next, hop_limit, source, destination);
                put(grh.as_bytes());
            }
        }
        if let Encapsulation::RoceV2 { source_port } = path.encapsulation {
            put(&source_port.to_be_bytes());
            put(&ROCE_V2_PORT.to_be_bytes());
            put(&[0, 0, 0, 0]); // length, and checksum 0: the ICRC covers the packet
        }
        let udp_len = if network.has_udp() { 8 } else { 0 };
        let network_start = len - udp_len - network.len();
        let ipv4_sum = match network {
            NetworkHeader::Ipv4 => bytes[network_start..network_start + 20]
                .chunks_exact(2)
                .map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]])))
                .sum(),
            _ => 0,
        };
        PathHeader { bytes, network, network_start: network_start as u8, len: len as u8, ipv4_sum }
    }

    /// The header for ports whose frames start at the network header.
    pub fn without_link(mut self) -> PathHeader {
        let (start, end) = (usize::from(self.network_start), self.len());
        self.bytes.copy_within(start..end, 0);
        self.len -= self.network_start;
        self.network_start = 0;
        self
    }

    /// Changes the UDP source port; RoCE v1 has none.
    pub fn set_source_port(&mut self, port: u16) {
        if self.network.has_udp() {
            let udp = self.len() - 8;
            self.bytes[udp..udp + 2].copy_from_slice(&port.to_be_bytes());
        }
    }

    /// The traffic class: DSCP in the upper six bits, ECN in the lower two.
    pub fn traffic_class(&self) -> u8 {
        let start = usize::from(self.network_start);
        match self.network {
            NetworkHeader::Ipv4 => self.bytes[start + 1],
            NetworkHeader::Ipv6 | NetworkHeader::Grh => self.bytes[start] << 4 | self.bytes[start + 1] >> 4,
        }
    }

    /// Changes the traffic class.
    pub fn set_traffic_class(&mut self, class: u8) {
        let start = usize::from(self.network_start);
        match self.network {
            NetworkHeader::Ipv4 => {
                self.ipv4_sum = self.ipv4_sum + u32::from(class) - u32::from(self.bytes[start + 1]);
                self.bytes[start + 1] = class;
            }
            NetworkHeader::Ipv6 | NetworkHeader::Grh => {
                self.bytes[start] = self.bytes[start] & 0xf0 | class >> 4;
                self.bytes[start + 1] = self.bytes[start + 1] & 0x0f | class << 4;
            }
        }
    }

    /// Changes the ECN bits of the traffic class.
    pub fn set_ecn(&mut self, ecn: Ecn) {
        self.set_traffic_class(self.traffic_class() & !3 | ecn as u8);
    }

    /// Changes the priority code point of the 802.1Q tag, if there is one.
    pub fn set_priority(&mut self, priority: u8) {
        const TAGGED: u8 = 14 + 4;
        if self.network_start == TAGGED {
            self.bytes[14] = self.bytes[14] & 0x1f | priority << 5;
        }
    }

    /// Changes the destination hardware address; has no effect without a link header.
    pub fn set_destination_mac(&mut self, mac: MacAddr) {
        if self.network_start > 0 {
            self.bytes[..6].copy_from_slice(&mac.0);
        }
    }

    /// The number of bytes before the BTH.
    pub const fn len(&self) -> usize {
        self.len as usize
    }

    /// Writes the lengths, and the IPv4 checksum, of a frame that ends at `end`.
    #[inline(always)]
    fn put_lengths(&self, frame: &mut [u8], end: usize) {
        let network_start = usize::from(self.network_start);
        let packet = &mut frame[network_start..];
        let packet_len = (end - network_start) as u16;
        match self.network {
            NetworkHeader::Ipv4 => {
                // The length is then checked only once.
                let packet = &mut packet[..28];
                packet[2..4].copy_from_slice(&packet_len.to_be_bytes());
                let mut sum = self.ipv4_sum + u32::from(packet_len);
                sum = (sum & 0xffff) + (sum >> 16);
                sum = (sum & 0xffff) + (sum >> 16);
                packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
                packet[24..26].copy_from_slice(&(packet_len - 20).to_be_bytes());
            }
            NetworkHeader::Ipv6 => {
                packet[4..6].copy_from_slice(&(packet_len - 40).to_be_bytes());
                packet[44..46].copy_from_slice(&(packet_len - 40).to_be_bytes());
            }
            NetworkHeader::Grh => packet[4..6].copy_from_slice(&(packet_len - 40).to_be_bytes()),
        }
    }

    /// The destination in the network header: 4 or 16 bytes.
    #[inline]
    pub fn destination(&self) -> &[u8] {
        let start = usize::from(self.network_start);
        match self.network {
            NetworkHeader::Ipv4 => &self.bytes[start + 16..start + 20],
            NetworkHeader::Ipv6 | NetworkHeader::Grh => &self.bytes[start + 24..start + 40],
        }
    }

    /// The kind of its network header.
    pub const fn network(&self) -> NetworkHeader {
        self.network
    }
}

/// Writes a frame from front to back: headers, payload, pad, lengths, ICRC.
///
/// The payload is copied once, from registered memory to the frame, or is not copied and only read for the ICRC.
#[derive(Debug)]
pub struct FrameBuilder<'a> {
    /// The frame; without payload, pad and ICRC if those are `apart`.
    frame: &'a mut [u8],
    /// Pad and ICRC of a frame whose payload is not copied.
    apart: Option<&'a mut [u8; TAIL_MAX]>,
    path: &'a PathHeader,
    /// The position of the next extension header.
    cursor: usize,
    payload_start: usize,
    payload_len: usize,
}

/// Pad and ICRC.
const TAIL_MAX: usize = 8;

/// Shorter payloads are first copied, and then included in the ICRC together with the headers: two registers cost more
/// than a second pass.
const FUSED_MIN: usize = 256;

impl<'a> FrameBuilder<'a> {
    /// Starts a frame with `bth` (its pad is set here) and `payload_len` bytes of payload. Returns `None` if `buffer`
    /// is too small.
    ///
    /// Extension headers are then [`put`](FrameBuilder::put) in the order of [`Opcode::extensions`]; omitted ones are
    /// zero.
    #[inline]
    pub fn start(
        buffer: &'a mut [u8],
        path: &'a PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'a>> {
        FrameBuilder::start_with(buffer, None, path, bth, payload_len, pad(payload_len))
    }

    /// As [`start`](FrameBuilder::start), with the pad of `bth`, even if it does not match the payload. Not for
    /// [`fill`](FrameBuilder::fill).
    pub(crate) fn start_padded(
        buffer: &'a mut [u8],
        path: &'a PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'a>> {
        FrameBuilder::start_with(buffer, None, path, bth, payload_len, bth.pad())
    }

    /// As [`start`](FrameBuilder::start), for a payload that is not copied: `head` is for the part before it, `tail`
    /// for the part after it.
    #[inline]
    pub fn start_apart(
        head: &'a mut [u8],
        tail: &'a mut [u8; TAIL_MAX],
        path: &'a PathHeader,
        bth: Bth,
        payload_len: usize,
    ) -> Option<FrameBuilder<'a>> {
        FrameBuilder::start_with(head, Some(tail), path, bth, payload_len, pad(payload_len))
    }

    /// `pad` is the number of zero bytes after the payload.
    #[inline(always)]
    fn start_with(
        buffer: &'a mut [u8],
        mut apart: Option<&'a mut [u8; TAIL_MAX]>,
        path: &'a PathHeader,
        mut bth: Bth,
        payload_len: usize,
        pad: usize,
    ) -> Option<FrameBuilder<'a>> {
        bth.set_pad(pad);
        let extensions_len = Opcode::from_byte(bth.opcode_byte())?.extensions_len();
        let cursor = path.len() + Bth::LEN;
        let payload_start = cursor + extensions_len;
        let behind = payload_len + pad + ICRC_LEN;
        let end = payload_start + if apart.is_none() { behind } else { 0 };
        if buffer.len() < end {
            return None;
        }
        // Copies the whole template, whose length is constant, if there is room: its end is overwritten.
        match buffer.first_chunk_mut() {
            Some(front) => *front = path.bytes,
            None => buffer[..path.len()].copy_from_slice(&path.bytes[..path.len()]),
        }
        let frame = &mut buffer[..end];
        // The pad must be zero; the other bytes are overwritten.
        let tail = apart.as_deref_mut().or(frame.last_chunk_mut());
        tail.into_iter().for_each(|tail| *tail = [0; TAIL_MAX]);
        frame[path.len()..cursor].copy_from_slice(bth.as_bytes());
        path.put_lengths(frame, payload_start + behind);
        Some(FrameBuilder { frame, apart, path, cursor, payload_start, payload_len })
    }

    /// Appends an extension header. A header beyond those of the opcode is dropped (and is a bug).
    #[inline]
    pub fn put(&mut self, header: &(impl IntoBytes + Immutable)) {
        let bytes = header.as_bytes();
        let end = self.cursor + bytes.len();
        debug_assert!(end <= self.payload_start, "more headers than the opcode has");
        // A slice of the header's length, which is constant: an instruction or two without a call.
        if let Some(room) = self.frame.get_mut(self.cursor..self.cursor + bytes.len())
            && end <= self.payload_start
        {
            room.copy_from_slice(bytes);
            self.cursor = end;
        }
    }

    /// Appends the extension headers of the opcode, in its order. Headers that are `None` are written as zeros; headers
    /// that the opcode does not have are omitted.
    pub fn put_extensions(&mut self, extensions: &Extensions) {
        let opcode = Opcode::from_byte(self.frame[self.path.len()]);
        for extension in opcode.map_or(&[][..], Opcode::extensions) {
            extensions.put(*extension, self);
        }
    }

    /// The payload, to be written before [`finish`](FrameBuilder::finish); empty if it is apart.
    #[inline]
    pub fn payload(&mut self) -> &mut [u8] {
        match self.apart {
            Some(_) => &mut [],
            None => &mut self.frame[self.payload_start..self.payload_start + self.payload_len],
        }
    }

    /// Finishes a frame whose [`payload`](FrameBuilder::payload) is written. Returns its length.
    pub fn finish(self) -> usize {
        self.finish_with(icrc::Portable)
    }

    /// As [`finish`](FrameBuilder::finish), with the ICRC computed by `crc`.
    #[inline(always)]
    pub fn finish_with(mut self, crc: impl Crc32) -> usize {
        self.end_headers();
        let network = usize::from(self.path.network_start);
        let icrc = self.frame.len() - ICRC_LEN;
        let register = icrc::register(self.path.network, &self.frame[network..icrc], crc);
        self.frame[icrc..].copy_from_slice(&(!register).to_le_bytes());
        self.frame.len()
    }

    /// Finishes a frame with the payload in `pieces`, whose total length must be the stated one. Returns the frame's
    /// length and 0, or, for a payload that is apart, the lengths of `head` and `tail`.
    #[inline(always)]
    pub fn fill<C: Crc32>(mut self, crc: C, pieces: impl Iterator<Item = impl Piece<C>>) -> (usize, usize) {
        if self.apart.is_none() && self.payload_len < FUSED_MIN {
            let mut rest = self.payload();
            for piece in pieces {
                let (to, behind) = rest.split_at_mut(piece.len());
                piece.copy_to(to);
                rest = behind;
            }
            return (self.finish_with(crc), 0);
        }
        self.end_headers();
        let FrameBuilder { frame, apart, path, payload_start, payload_len, .. } = self;
        let (head, mut rest) = frame.split_at_mut(payload_start);
        let mut register = icrc::register(path.network, &head[usize::from(path.network_start)..], crc);
        let pad = pad(payload_len);
        let (tail, written) = match apart {
            Some(tail) => {
                register = pieces.fold(register, |register, piece| piece.update(crc, register));
                (&mut tail[..pad + ICRC_LEN], (payload_start, pad + ICRC_LEN))
            }
            None => {
                for piece in pieces {
                    let (to, behind) = rest.split_at_mut(piece.len());
                    register = piece.copy(crc, register, to);
                    rest = behind;
                }
                (rest, (payload_start + payload_len + pad + ICRC_LEN, 0))
            }
        };
        if pad > 0 {
            register = crc.update(register, &tail[..pad]);
        }
        tail[pad..].copy_from_slice(&(!register).to_le_bytes());
        written
    }

    /// Writes zeros for omitted headers.
    #[inline]
    fn end_headers(&mut self) {
        if self.cursor < self.payload_start {
            self.frame[self.cursor..self.payload_start].fill(0);
        }
    }
}

/// A piece of a payload: a slice, or memory that others may write meanwhile, which is accessed only by copies.
#[expect(clippy::len_without_is_empty, reason = "nobody asks")]
pub trait Piece<C: Crc32>: Copy {
    /// The number of bytes.
    fn len(self) -> usize;

    /// Copies all bytes to `to`, which has the same length.
    fn copy_to(self, to: &mut [u8]);

    /// The register after it ([`Crc32::update`]).
    fn update(self, crc: C, register: u32) -> u32;

    /// The register after the copy that this makes ([`Crc32::copy`]).
    fn copy(self, crc: C, register: u32, to: &mut [u8]) -> u32;
}

impl<C: Crc32> Piece<C> for &[u8] {
    fn len(self) -> usize {
        self.len()
    }

    fn copy_to(self, to: &mut [u8]) {
        to.copy_from_slice(self);
    }

    fn update(self, crc: C, register: u32) -> u32 {
        crc.update(register, self)
    }

    fn copy(self, crc: C, register: u32, to: &mut [u8]) -> u32 {
        crc.copy(register, self, to)
    }
}

/// The number of bytes that pad a payload to a multiple of four.
pub(crate) fn pad(payload_len: usize) -> usize {
    payload_len.wrapping_neg() & 3
}
