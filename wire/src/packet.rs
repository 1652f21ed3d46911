use etherparse::{Ipv4HeaderSlice, Ipv6HeaderSlice, UdpHeaderSlice};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use crate::icrc;
use crate::{
    Aeth, AtomicAckEth, AtomicEth, Bth, Deth, Extension, Feth, Gid, Grh, ICRC_LEN, Ieth, ImmDt, MacAddr,
    Opcode, ROCE_V1_ETHERTYPE, ROCE_V2_PORT, Reth, Sack, VlanTag,
};

/// Why a frame is no RoCE packet that may be looked at further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum ParseError {
    /// Not RoCE at all: another EtherType, protocol or port.
    #[error("not RoCE")]
    NotRoce,
    /// The frame ends before its headers, or before the length they state.
    #[error("frame truncated: {needed} bytes needed, {present} present")]
    Truncated {
        /// Bytes that the headers call for.
        needed: usize,
        /// Bytes that are there.
        present: usize,
    },
    /// The IP version is not what the EtherType says.
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
        /// What the UDP header says.
        length: usize,
        /// What the IP header leaves.
        available: usize,
    },
    /// An opcode that does not exist, or is not implemented by anyone (RD).
    #[error("opcode {0:#04x} does not exist")]
    Opcode(u8),
    /// Shorter than the headers of its opcode, its pad and its ICRC.
    #[error("{present} bytes after the network headers; opcode and pad need {needed}")]
    Short {
        /// Bytes that BTH, extension headers, pad and ICRC take.
        needed: usize,
        /// Bytes that are there.
        present: usize,
    },
    /// The ICRC is wrong.
    #[error("ICRC {found:#010x}: must be {expected:#010x}")]
    Icrc {
        /// What the packet's bytes call for.
        expected: u32,
        /// What it carries.
        found: u32,
    },
    /// A transport header version that does not exist.
    #[error("transport header version {0}: must be 0")]
    TransportVersion(u8),
}

/// Which network header a packet has.
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
}

/// The Ethernet header of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Link {
    /// Who it is for.
    pub destination: MacAddr,
    /// Who sent it.
    pub source: MacAddr,
    /// The 802.1Q tag, if there is one.
    pub vlan: Option<VlanTag>,
}

/// What the network headers of a packet say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Network {
    /// Which header it is.
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
}

impl Network {
    /// What the first 40 bytes of a UD receive say: an IPv6 header or GRH, or 20 zeros and an IPv4
    /// header (protocol.md §6). `None` for anything else.
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
        let (zeros, ip) = area.split_at(20);
        let ip = Ipv4HeaderSlice::from_slice(ip).ok()?;
        let is_ipv4 = zeros.iter().all(|byte| *byte == 0) && ip.slice().len() == 20;
        is_ipv4.then(|| Network::of_ipv4(&ip))
    }

    fn of_grh(grh: &Grh, header: NetworkHeader) -> Network {
        Network {
            header,
            source: grh.sgid(),
            destination: grh.dgid(),
            traffic_class: grh.traffic_class(),
            hop_limit: grh.hop_limit(),
            flow_label: grh.flow_label(),
            source_port: None,
        }
    }

    fn of_ipv4(ip: &Ipv4HeaderSlice<'_>) -> Network {
        Network {
            header: NetworkHeader::Ipv4,
            source: Gid::from_ipv4(ip.source_addr()),
            destination: Gid::from_ipv4(ip.destination_addr()),
            traffic_class: ip.slice()[1],
            hop_limit: ip.ttl(),
            flow_label: 0,
            source_port: None,
        }
    }

    /// Whether a switch has marked the packet: ECN is Congestion Experienced.
    pub const fn congestion_experienced(&self) -> bool {
        self.traffic_class & 3 == 3
    }
}

/// A RoCE packet, taken apart and checked; it borrows the frame.
#[derive(Clone, Copy, Debug)]
pub struct Packet<'a> {
    /// The Ethernet header, if the bytes started with one.
    pub link: Option<Link>,
    /// The network headers.
    pub network: Network,
    /// The opcode of the BTH, known to exist.
    pub opcode: Opcode,
    /// The base transport header.
    pub bth: &'a Bth,
    /// The headers between BTH and payload, exactly as long as the opcode says.
    extensions: &'a [u8],
    /// The payload without the pad.
    pub payload: &'a [u8],
    /// From the network header up to the ICRC.
    covered: &'a [u8],
    /// The network header as it came, 20 or 40 bytes (UD receivers get it).
    pub network_bytes: &'a [u8],
    /// The ICRC that the packet carries.
    pub icrc: u32,
}

impl<'a> Packet<'a> {
    /// Takes an Ethernet frame (without FCS) apart and checks, in this order: network headers,
    /// opcode, lengths, ICRC, transport version.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn parse(frame: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let packet = Packet::decode(frame)?;
        packet.check_icrc()?;
        match packet.bth.transport_version() {
            0 => Ok(packet),
            version => Err(ParseError::TransportVersion(version)),
        }
    }

    /// As [`parse`](Packet::parse), but the ICRC and the transport version may be wrong: for
    /// dissectors.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn decode(frame: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let (link, ethertype, rest) = split_link(frame)?;
        let mut packet = match ethertype {
            ROCE_V1_ETHERTYPE => Packet::decode_grh(rest)?,
            0x0800 | 0x86dd => {
                let packet = Packet::decode_ip(rest)?;
                if (packet.network.header == NetworkHeader::Ipv6) != (ethertype == 0x86dd) {
                    return Err(ParseError::IpVersion(rest[0] >> 4));
                }
                packet
            }
            _ => return Err(ParseError::NotRoce),
        };
        packet.link = Some(link);
        Ok(packet)
    }

    /// As [`decode`](Packet::decode), of a bare IPv4 or IPv6 packet.
    ///
    /// # Errors
    /// The first check that fails.
    pub fn decode_ip(packet: &'a [u8]) -> Result<Packet<'a>, ParseError> {
        let truncated = |needed| ParseError::Truncated { needed, present: packet.len() };
        let (network, udp) = match packet.first().map(|b| b >> 4) {
            Some(4) => {
                let ip = Ipv4HeaderSlice::from_slice(packet).map_err(|_| truncated(20))?;
                if ip.slice().len() != 20 {
                    return Err(ParseError::IpOptions(ip.slice().len()));
                }
                if ip.protocol() != etherparse::IpNumber::UDP {
                    return Err(ParseError::NotRoce);
                }
                if ip.is_fragmenting_payload() {
                    return Err(ParseError::Fragment);
                }
                let end = usize::from(ip.total_len());
                let udp = packet.get(20..end).ok_or(truncated(end.max(28)))?;
                (Network::of_ipv4(&ip), udp)
            }
            Some(6) => {
                let ip = Ipv6HeaderSlice::from_slice(packet).map_err(|_| truncated(40))?;
                if ip.next_header() != etherparse::IpNumber::UDP {
                    return Err(ParseError::NotRoce);
                }
                let end = 40 + usize::from(ip.payload_length());
                let udp = packet.get(40..end).ok_or(truncated(end))?;
                let network = Network {
                    header: NetworkHeader::Ipv6,
                    source: Gid(ip.source()),
                    destination: Gid(ip.destination()),
                    traffic_class: ip.traffic_class(),
                    hop_limit: ip.hop_limit(),
                    flow_label: ip.flow_label().value(),
                    source_port: None,
                };
                (network, udp)
            }
            Some(version) => return Err(ParseError::IpVersion(version)),
            None => return Err(truncated(20)),
        };
        let header = UdpHeaderSlice::from_slice(udp)
            .map_err(|_| ParseError::UdpLength { length: udp.len(), available: udp.len() })?;
        if header.destination_port() != ROCE_V2_PORT {
            return Err(ParseError::NotRoce);
        }
        let (length, available) = (usize::from(header.length()), udp.len());
        if length < 8 + Bth::LEN + ICRC_LEN || length > available {
            return Err(ParseError::UdpLength { length, available });
        }
        let network = Network { source_port: Some(header.source_port()), ..network };
        let bth_start = network.header.len() + 8;
        Packet::decode_transport(network, &packet[..bth_start + length - 8], bth_start)
    }

    /// As [`decode`](Packet::decode), of a bare RoCE v1 packet, which starts with its GRH.
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
        Packet::decode_transport(Network::of_grh(grh, NetworkHeader::Grh), packet, Grh::LEN)
    }

    /// `packet` starts at the network header and ends with the ICRC; the BTH is at `bth_start`.
    fn decode_transport(
        network: Network,
        packet: &'a [u8],
        bth_start: usize,
    ) -> Result<Packet<'a>, ParseError> {
        let transport = &packet[bth_start..];
        let short = |needed| ParseError::Short { needed, present: transport.len() };
        let (bth, rest) = Bth::ref_from_prefix(transport).map_err(|_| short(Bth::LEN + ICRC_LEN))?;
        let opcode = Opcode::from_byte(bth.opcode_byte()).ok_or(ParseError::Opcode(bth.opcode_byte()))?;
        let needed = Bth::LEN + opcode.extensions_len() + bth.pad() + ICRC_LEN;
        if transport.len() < needed {
            return Err(short(needed));
        }
        let (body, icrc) = rest.split_last_chunk::<ICRC_LEN>().ok_or(short(needed))?;
        let (extensions, padded) = body.split_at(opcode.extensions_len());
        Ok(Packet {
            link: None,
            network,
            opcode,
            bth,
            extensions,
            payload: &padded[..padded.len() - bth.pad()],
            covered: &packet[..packet.len() - ICRC_LEN],
            network_bytes: &packet[..network.header.len()],
            icrc: u32::from_le_bytes(*icrc),
        })
    }

    /// Computes the ICRC and compares.
    ///
    /// # Errors
    /// [`ParseError::Icrc`].
    pub fn check_icrc(&self) -> Result<(), ParseError> {
        match icrc::compute(self.network.header, self.covered) {
            Some(expected) if expected == self.icrc => Ok(()),
            Some(expected) => Err(ParseError::Icrc { expected, found: self.icrc }),
            None => Err(ParseError::Truncated { needed: self.covered.len(), present: self.covered.len() }),
        }
    }

    /// Whether the pad is what the payload calls for: up to the next multiple of 4 bytes.
    pub fn pad_fits(&self) -> bool {
        self.bth.pad() == self.payload.len().wrapping_neg() & 3
    }

    /// The bytes that the ICRC covers before masking: from the network header to the pad.
    pub fn covered(&self) -> &'a [u8] {
        self.covered
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

    /// What a selective acknowledge says; `None` if its length is wrong.
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

/// Splits an Ethernet frame into its header (with at most one 802.1Q tag), EtherType and the rest.
fn split_link(frame: &[u8]) -> Result<(Link, u16, &[u8]), ParseError> {
    let truncated = |needed| ParseError::Truncated { needed, present: frame.len() };
    let (ethernet, mut rest) = etherparse::Ethernet2Header::from_slice(frame).map_err(|_| truncated(14))?;
    let mut ethertype = ethernet.ether_type;
    let mut vlan = None;
    if ethertype == etherparse::EtherType::VLAN_TAGGED_FRAME {
        let (tag, inner) = etherparse::SingleVlanHeader::from_slice(rest).map_err(|_| truncated(18))?;
        vlan = Some(VlanTag { id: tag.vlan_id.value(), priority: tag.pcp.value() });
        ethertype = tag.ether_type;
        rest = inner;
    }
    let link = Link { destination: MacAddr(ethernet.destination), source: MacAddr(ethernet.source), vlan };
    Ok((link, ethertype.0, rest))
}
