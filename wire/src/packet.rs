use etherparse::Ipv4HeaderSlice;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::icrc;
use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extension, Extensions, Feth, Gid, Grh, ICRC_LEN,
    Identifications, Ieth, ImmDt, MacAddr, Opcode, Qpn, ROCE_V1_ETHERTYPE, ROCE_V2_PORT, Reth, Sack, VlanTag,
};

/// The reason why a frame is not a valid RoCE packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Not RoCE at all: another EtherType, protocol or port.
    #[error("not RoCE")]
    NotRoce,
    /// The frame ends before its headers, or before the length that they state.
    #[error("frame truncated: {needed} bytes needed, {present} present")]
    Truncated {
        /// The number of bytes that the headers require.
        needed: usize,
        /// The number of bytes present.
        present: usize,
    },
    /// The IP version does not match the EtherType.
    #[error("IP version {0} does not fit the EtherType")]
    IpVersion(u8),
    /// IPv4 with options; RoCEv2 has none.
    #[error("IPv4 options (header of {0} bytes; RoCEv2 has 20)")]
    IpOptions(usize),
    /// An IPv4 fragment.
    #[error("IPv4 fragment")]
    Fragment,
    /// The UDP length is below the shortest RoCE packet or beyond the IP packet.
    #[error("UDP length {length}: must be 24 to {available}")]
    UdpLength {
        /// The length in the UDP header.
        length: usize,
        /// The length available in the IP packet.
        available: usize,
    },
    /// An opcode that is not in the standard (a manufacturer may define it), or that is not implemented anywhere (RD).
    #[error("opcode {0:#04x} is none of the standard's")]
    Opcode(u8),
    /// Shorter than the headers of its opcode, its pad and its ICRC.
    #[error("{present} bytes after the network headers; opcode and pad need {needed}")]
    Short {
        /// The number of bytes of BTH, extension headers, pad and ICRC.
        needed: usize,
        /// The number of bytes present.
        present: usize,
    },
    /// The ICRC is wrong.
    #[error("ICRC {found:#010x}: must be {expected:#010x}")]
    Icrc {
        /// The ICRC computed from the packet's bytes.
        expected: u32,
        /// The packet's ICRC.
        found: u32,
    },
    /// A transport header version that does not exist.
    #[error("transport header version {0}: must be 0")]
    TransportVersion(u8),
}

/// The network header of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NetworkHeader {
    /// RoCEv2 over IPv4, 20 bytes.
    Ipv4,
    /// RoCEv2 over IPv6, 40 bytes.
    Ipv6,
    /// RoCE v1, 40 bytes.
    Grh,
}

impl NetworkHeader {
    /// Bytes on the wire.
    pub const fn len(self) -> usize {
        match self {
            NetworkHeader::Ipv4 => 20,
            NetworkHeader::Ipv6 | NetworkHeader::Grh => 40,
        }
    }

    /// Whether a UDP header follows.
    pub const fn has_udp(self) -> bool {
        !matches!(self, NetworkHeader::Grh)
    }

    /// The number of bytes from its start to the BTH.
    pub const fn bth_start(self) -> usize {
        self.len() + if self.has_udp() { 8 } else { 0 }
    }
}

/// The Ethernet header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// The receiver.
    pub destination: MacAddr,
    /// The sender.
    pub source: MacAddr,
    /// The 802.1Q tag, if there is one.
    pub vlan: Option<VlanTag>,
}

/// The contents of a packet's network headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// The kind of header.
    pub header: NetworkHeader,
    /// The sender.
    pub source: Gid,
    /// The receiver.
    pub destination: Gid,
    /// TOS or traffic class: DSCP in the upper six bits, ECN in the lower two.
    pub traffic_class: u8,
    /// TTL or hop limit.
    pub hop_limit: u8,
    /// The flow label; 0 over IPv4.
    pub flow_label: u32,
    /// The UDP source port; `None` for RoCE v1.
    pub source_port: Option<u16>,
    /// The IPv4 identification, which the ICRC covers; 0 over IPv6 and for RoCE v1.
    pub identification: u16,
}

impl Network {
    /// The contents of the first 40 bytes of a UD receive: an IPv6 header or GRH, or 20 zeros and an IPv4 header
    /// (docs/protocol.md §6). `None` for anything else.
    pub fn of_grh_area(area: &[u8; 40]) -> Option<Network> {
        if area[0] >> 4 == 6 {
            let grh = Grh::ref_from_bytes(area).ok()?;
            let header = match grh.next_header() {
                Grh::NEXT_HEADER_BTH => NetworkHeader::Grh,
                Grh::NEXT_HEADER_UDP => NetworkHeader::Ipv6,
                _ => return None,
            };
            return Some(Network::of_grh(grh, header));
        }
        let (zeros, ip) = area.split_last_chunk::<20>()?;
        let header_len = Ipv4HeaderSlice::from_slice(ip).ok()?.slice().len();
        let is_ipv4 = zeros.iter().all(|byte| *byte == 0) && header_len == ip.len();
        is_ipv4.then(|| Network::of_ipv4(ip))
    }

    /// The contents of a GRH or an IPv6 header, which has the same format; `header` is the kind. It does not include a
    /// UDP header, so the source port is `None`.
    pub fn of_grh(grh: &Grh, header: NetworkHeader) -> Network {
        Network {
            header,
            source: grh.sgid(),
            destination: grh.dgid(),
            traffic_class: grh.traffic_class(),
            hop_limit: grh.hop_limit(),
            flow_label: grh.flow_label(),
            source_port: None,
            identification: 0,
        }
    }

    /// The contents of the first 20 bytes of an IPv4 header. They do not include a UDP header, so the source port is
    /// `None`.
    pub fn of_ipv4(ip: &[u8; 20]) -> Network {
        let gid = |at: usize| Gid::from_ipv4([ip[at], ip[at + 1], ip[at + 2], ip[at + 3]].into());
        Network {
            header: NetworkHeader::Ipv4,
            source: gid(12),
            destination: gid(16),
            traffic_class: ip[1],
            hop_limit: ip[8],
            flow_label: 0,
            source_port: None,
            identification: u16::from_be_bytes([ip[4], ip[5]]),
        }
    }
}

/// A RoCE packet, parsed and checked. It borrows the frame.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The Ethernet header; empty if the bytes did not start with one.
    link: &'a [u8],
    /// The kind of network header.
    pub header: NetworkHeader,
    /// The opcode of the BTH, known to be valid.
    pub opcode: Opcode,
    /// The base transport header.
    pub bth: &'a Bth,
    /// The headers between BTH and payload, with the exact length for the opcode.
    extensions: &'a [u8],
    /// The payload without the pad.
    pub payload: &'a [u8],
    /// The bytes from the network header to the ICRC.
    covered: &'a [u8],
    /// The packet's ICRC.
    pub icrc: u32,
}

impl<'a> Packet<'a> {
    /// Parses an Ethernet frame (without FCS), and checks, in this order: network headers, opcode, lengths, ICRC,
    /// transport version.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn parse(frame: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let packet = Packet::decode(frame)?;
        packet.check(icrc::Portable)?;
        Ok(packet)
    }

    /// As [`parse`](Packet::parse), but without checks of the ICRC and the transport version: for dissectors, and for
    /// callers that [`check`](Packet::check) later.
    ///
    /// # Errors
    /// The first check that fails.
    #[inline]
    pub fn decode(frame: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let truncated = |needed| ParseError::Truncated { needed, present: frame.len() };
        let mut link_len = ETHERNET_LEN;
        let (addresses, mut rest) = frame.split_at_checked(ETHERNET_LEN).ok_or(truncated(ETHERNET_LEN))?;
        let mut ethertype = u16::from_be_bytes([addresses[12], addresses[13]]);
        if ethertype == VLAN_ETHERTYPE {
            let (tag, inner) = rest.split_first_chunk::<4>().ok_or(truncated(ETHERNET_LEN + 4))?;
            ethertype = u16::from_be_bytes([tag[2], tag[3]]);
            (link_len, rest) = (ETHERNET_LEN + 4, inner);
        }
        let mut packet = match ethertype {
            IPV4_ETHERTYPE | IPV6_ETHERTYPE => {
                let version = rest.first().map_or(0, |byte| byte >> 4);
                if (version == 6 && ethertype == IPV4_ETHERTYPE)
                    || (version == 4 && ethertype == IPV6_ETHERTYPE)
                {
                    return Err(ParseError::IpVersion(version));
                }
                Packet::decode_ip(rest)?
            }
            ROCE_V1_ETHERTYPE => Packet::decode_grh(rest)?,
            _ => return Err(ParseError::NotRoce),
        };
        packet.link = &frame[..link_len];
        Ok(packet)
    }

    /// As [`decode`](Packet::decode), for a bare IPv4 or IPv6 packet.
    ///
    /// # Errors
    /// The first check that fails.
    #[inline(always)]
    pub fn decode_ip(packet: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let truncated = |needed| ParseError::Truncated { needed, present: packet.len() };
        let (header, end) = match packet.first().map(|b| b >> 4) {
            Some(4) => {
                let ip = packet.first_chunk::<20>().ok_or(truncated(20))?;
                let header_len = usize::from(ip[0] & 0x0f) * 4;
                if header_len < ip.len() || header_len > packet.len() {
                    return Err(truncated(20));
                }
                if header_len != ip.len() {
                    return Err(ParseError::IpOptions(header_len));
                }
                if ip[9] != UDP_PROTOCOL {
                    return Err(ParseError::NotRoce);
                }
                if u16::from_be_bytes([ip[6], ip[7]]) & IPV4_FRAGMENT != 0 {
                    return Err(ParseError::Fragment);
                }
                let end = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                if end < ip.len() || end > packet.len() {
                    return Err(truncated(end.max(28)));
                }
                (NetworkHeader::Ipv4, end)
            }
            Some(6) => {
                let ip = packet.first_chunk::<40>().ok_or(truncated(40))?;
                if ip[6] != UDP_PROTOCOL {
                    return Err(ParseError::NotRoce);
                }
                let end = ip.len() + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                if end > packet.len() {
                    return Err(truncated(end));
                }
                (NetworkHeader::Ipv6, end)
            }
            Some(version) => return Err(ParseError::IpVersion(version)),
            None => return Err(truncated(20)),
        };
        let available = end - header.len();
        let udp = packet[header.len()..end].first_chunk::<8>();
        let udp = udp.ok_or(ParseError::UdpLength { length: available, available })?;
        if u16::from_be_bytes([udp[2], udp[3]]) != ROCE_V2_PORT {
            return Err(ParseError::NotRoce);
        }
        let length = usize::from(u16::from_be_bytes([udp[4], udp[5]]));
        if length < udp.len() + Bth::LEN + ICRC_LEN || length > available {
            return Err(ParseError::UdpLength { length, available });
        }
        Packet::decode_transport(header, &packet[..header.len() + length])
    }

    /// As [`decode`](Packet::decode), for a bare RoCE v1 packet, which starts with its GRH.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn decode_grh(packet: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let truncated = |needed| ParseError::Truncated { needed, present: packet.len() };
        let (grh, _) = Grh::ref_from_prefix(packet).map_err(|_| truncated(Grh::LEN))?;
        if grh.version() != 6 {
            return Err(ParseError::IpVersion(grh.version()));
        }
        if grh.next_header() != Grh::NEXT_HEADER_BTH {
            return Err(ParseError::NotRoce);
        }
        let end = Grh::LEN + usize::from(grh.payload_length());
        let packet = packet.get(..end).ok_or(truncated(end))?;
        Packet::decode_transport(NetworkHeader::Grh, packet)
    }

    /// `packet` starts at the network header and ends with the ICRC.
    #[inline(always)]
    fn decode_transport(header: NetworkHeader, packet: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let transport = &packet[header.bth_start()..];
        let short = |needed| ParseError::Short { needed, present: transport.len() };
        let (bth, rest) = Bth::ref_from_prefix(transport).map_err(|_| short(Bth::LEN + ICRC_LEN))?;
        let opcode = Opcode::from_byte(bth.opcode_byte()).ok_or(ParseError::Opcode(bth.opcode_byte()))?;
        let (extensions_len, pad) = (opcode.extensions_len(), bth.pad());
        let needed = Bth::LEN + extensions_len + pad + ICRC_LEN;
        if transport.len() < needed {
            return Err(short(needed));
        }
        let (body, icrc) = rest.split_last_chunk::<ICRC_LEN>().ok_or(short(needed))?;
        let (extensions, padded) = body.split_at(extensions_len);
        Ok(Packet {
            link: &[],
            header,
            opcode,
            bth,
            extensions,
            payload: &padded[..padded.len() - pad],
            covered: &packet[..packet.len() - ICRC_LEN],
            icrc: u32::from_le_bytes(*icrc),
        })
    }

    /// The destination queue pair of an untagged RoCEv2 frame over IPv4, without any checks, for prefetching. `None`
    /// for all other frames.
    #[inline]
    pub fn peek_dest_qpn(frame: &[u8]) -> Option<Qpn> {
        const AT: usize = ETHERNET_LEN + NetworkHeader::Ipv4.bth_start() + 5;
        let [first, .., third] = *frame.get(12..15)? else { return None };
        let is_plain = first == 8 && third == 0x45;
        frame.get(AT..AT + 3).filter(|_| is_plain)?.first_chunk().map(|bytes| Qpn::from_bytes(*bytes))
    }

    /// The remaining checks of [`parse`](Packet::parse): the ICRC, then the transport version.
    ///
    /// # Errors
    /// [`ParseError::Icrc`], [`ParseError::TransportVersion`].
    #[inline]
    pub fn check(&self, crc: impl icrc::Crc32) -> Result<(), ParseError> {
        self.check_icrc_with(crc)?;
        self.check_version()
    }

    /// All checks except the ICRC, for packets that were never on a wire and were sent without it.
    ///
    /// # Errors
    /// [`ParseError::TransportVersion`].
    #[inline]
    pub fn check_version(&self) -> Result<(), ParseError> {
        match self.bth.transport_version() {
            0 => Ok(()),
            version => Err(ParseError::TransportVersion(version)),
        }
    }

    /// As [`check`](Packet::check), for a packet whose IPv4 identification is a guess: if another one makes the ICRC
    /// right, the packet had it, and it is returned.
    ///
    /// # Errors
    /// As [`check`](Packet::check).
    #[inline]
    pub fn check_guessed(
        &self,
        crc: impl icrc::Crc32,
        identifications: &mut Identifications,
    ) -> Result<Option<u16>, ParseError> {
        match self.check(crc) {
            Ok(()) => Ok(None),
            Err(ParseError::Icrc { expected, found }) if self.header == NetworkHeader::Ipv4 => {
                let said = u16::from_be_bytes([self.covered[4], self.covered[5]]);
                let len = self.covered.len() + ICRC_LEN;
                let solved = identifications.solve(len, said, expected ^ found);
                let solved = solved.ok_or(ParseError::Icrc { expected, found })?;
                self.check_version().map(|()| Some(solved))
            }
            Err(error) => Err(error),
        }
    }

    /// Computes the ICRC and compares it.
    ///
    /// # Errors
    /// [`ParseError::Icrc`].
    pub fn check_icrc(&self) -> Result<(), ParseError> {
        self.check_icrc_with(icrc::Portable)
    }

    #[inline]
    fn check_icrc_with(&self, crc: impl icrc::Crc32) -> Result<(), ParseError> {
        let expected = !icrc::register(self.header, self.covered, crc);
        if expected == self.icrc { Ok(()) } else { Err(ParseError::Icrc { expected, found: self.icrc }) }
    }

    /// The Ethernet header, if the bytes started with one.
    pub fn link(&self) -> Option<Link> {
        let (ethernet, rest) = etherparse::Ethernet2Header::from_slice(self.link).ok()?;
        let tag = etherparse::SingleVlanHeader::from_slice(rest).ok();
        let vlan = tag.map(|(tag, _)| VlanTag { id: tag.vlan_id.value(), priority: tag.pcp.value() });
        Some(Link { destination: MacAddr(ethernet.destination), source: MacAddr(ethernet.source), vlan })
    }

    /// The sender's hardware address, if the bytes started with an Ethernet header.
    pub fn source_mac(&self) -> Option<MacAddr> {
        self.link.get(6..)?.first_chunk().copied().map(MacAddr)
    }

    /// The VLAN in the 802.1Q tag, if there is one.
    pub fn vlan(&self) -> Option<u16> {
        let tag = self.link.get(ETHERNET_LEN..)?.first_chunk()?;
        Some(u16::from_be_bytes(*tag) & 0x0fff)
    }

    /// The contents of the network headers.
    pub fn network(&self) -> Network {
        let header = self.header;
        let network = match header {
            NetworkHeader::Ipv4 => self.covered.first_chunk().map(Network::of_ipv4),
            NetworkHeader::Ipv6 | NetworkHeader::Grh => {
                Grh::ref_from_prefix(self.covered).ok().map(|(grh, _)| Network::of_grh(grh, header))
            }
        };
        // `decode` has checked that there are more than 20 or 40 bytes.
        let Some(network) = network else { unreachable!("a packet without its network header") };
        let udp = &self.covered[header.len()..];
        let source_port = header.has_udp().then(|| u16::from_be_bytes([udp[0], udp[1]]));
        Network { source_port, ..network }
    }

    /// The bytes of the network header, 20 or 40 (UD receivers get them).
    pub fn network_bytes(&self) -> &'a [u8] {
        &self.covered[..self.header.len()]
    }

    /// The bytes of source and destination in the network header: 8 or 32.
    #[inline]
    pub fn address_bytes(&self) -> &'a [u8] {
        match self.header {
            NetworkHeader::Ipv4 => &self.covered[12..20],
            NetworkHeader::Ipv6 | NetworkHeader::Grh => &self.covered[8..40],
        }
    }

    /// Whether a switch has marked the packet: ECN is Congestion Experienced.
    #[inline]
    pub fn congestion_experienced(&self) -> bool {
        let ecn = match self.header {
            NetworkHeader::Ipv4 => self.covered[1],
            NetworkHeader::Ipv6 => self.covered[1] >> 4,
            NetworkHeader::Grh => 0,
        };
        ecn & 3 == 3
    }

    /// Whether the pad matches the payload: up to the next multiple of 4 bytes.
    pub fn pad_fits(&self) -> bool {
        self.bth.pad() == self.payload.len().wrapping_neg() & 3
    }

    /// The bytes that the ICRC covers, before masking: from the network header to the pad.
    pub fn covered(&self) -> &'a [u8] {
        self.covered
    }

    /// The extension headers as values.
    pub fn extensions(&self) -> Extensions {
        Extensions::of(self)
    }

    /// DETH, on UD packets.
    pub fn deth(&self) -> Option<&'a Deth> {
        self.extension(Extension::Deth)
    }

    /// RETH, on the first packet of a WRITE, on READ requests, FLUSH and ATOMIC WRITE.
    pub fn reth(&self) -> Option<&'a Reth> {
        self.extension(Extension::Reth)
    }

    /// AtomicETH, on atomics.
    pub fn atomic_eth(&self) -> Option<&'a AtomicEth> {
        self.extension(Extension::AtomicEth)
    }

    /// AETH, on responses other than READ Middle.
    pub fn aeth(&self) -> Option<&'a Aeth> {
        self.extension(Extension::Aeth)
    }

    /// AtomicAckETH, on Atomic Acknowledge.
    pub fn atomic_ack_eth(&self) -> Option<&'a AtomicAckEth> {
        self.extension(Extension::AtomicAckEth)
    }

    /// Immediate data.
    pub fn immdt(&self) -> Option<&'a ImmDt> {
        self.extension(Extension::ImmDt)
    }

    /// IETH, on SEND with invalidate.
    pub fn ieth(&self) -> Option<&'a Ieth> {
        self.extension(Extension::Ieth)
    }

    /// FETH, on FLUSH.
    pub fn feth(&self) -> Option<&'a Feth> {
        self.extension(Extension::Feth)
    }

    /// The contents of a selective acknowledgement; `None` if its length is wrong.
    pub fn sack(&self) -> Option<&'a Sack> {
        if self.opcode != Opcode::SELECTIVE_ACKNOWLEDGE {
            return None;
        }
        Sack::ref_from_bytes(self.payload).ok()
    }

    fn extension<T: FromBytes + KnownLayout + Immutable + Unaligned>(
        &self,
        which: Extension,
    ) -> Option<&'a T> {
        let offset = self.opcode.offset_of(which)?;
        let (header, _) = T::ref_from_prefix(self.extensions.get(offset..)?).ok()?;
        Some(header)
    }
}

const ETHERNET_LEN: usize = 14;
const UDP_PROTOCOL: u8 = 17;
/// The bits of flags and offset that indicate a fragment: more fragments, or not the first one.
const IPV4_FRAGMENT: u16 = 0x3fff;
const VLAN_ETHERTYPE: u16 = 0x8100;
const IPV4_ETHERTYPE: u16 = 0x0800;
const IPV6_ETHERTYPE: u16 = 0x86dd;
