use zerocopy::FromBytes;

use crate::frame::pad;
use crate::{
    Bth, Encapsulation, Extensions, FrameBuilder, ICRC_LEN, Link, MacAddr, Network, Opcode, Packet,
    ParseError, PathAddress, PathHeader, Psn, Qpn, Sack,
};

/// A packet as values: the contents of a [`Packet`] without the borrowed frame.
///
/// For programs that keep, compare or construct packets. The packet path borrows instead. A packet that is
/// [emitted](OwnedPacket::emit) and parsed is equal to the original, for every pad, reserved bits and transport
/// version. Fields that the ICRC does not cover and that are never read are not kept: IPv4 flags, checksums, the DEI
/// bit of a VLAN tag.
///
/// ```
/// use ferroce_wire::*;
///
/// # let path = PathAddress {
/// #     source_mac: MacAddr([2, 0, 0, 0, 0, 1]),
/// #     destination_mac: MacAddr([2, 0, 0, 0, 0, 2]),
/// #     vlan: None,
/// #     source: Gid::from_ipv4([192, 0, 2, 1].into()),
/// #     destination: Gid::from_ipv4([192, 0, 2, 2].into()),
/// #     encapsulation: Encapsulation::RoceV2 { source_port: 0xc011 },
/// #     traffic_class: 0,
/// #     flow_label: 0,
/// #     hop_limit: 64,
/// #     identification: 0,
/// # };
/// let mut write = OwnedPacket::new(&path, Opcode::RC_WRITE_ONLY, Qpn::new(0x11), Psn::new(254));
/// write.extensions.reth = Some(Reth::new(0x1000, RKey::new(7), 5));
/// write.set_payload(b"hello".to_vec());
/// let frame = write.emit();
///
/// let parsed = OwnedPacket::parse(&frame).unwrap();
/// assert_eq!(parsed.extensions.reth.unwrap().va(), 0x1000);
/// assert_eq!(parsed.payload, b"hello");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OwnedPacket {
    /// The Ethernet header, if the bytes started with one.
    pub link: Option<Link>,
    /// The contents of the network headers.
    pub network: Network,
    /// The opcode, known to be valid.
    pub opcode: Opcode,
    /// The base transport header. Emitting replaces its opcode by [`opcode`](OwnedPacket::opcode).
    pub bth: Bth,
    /// The headers between BTH and payload.
    pub extensions: Extensions,
    /// The payload without the pad; not longer than a packet allows.
    pub payload: Vec<u8>,
    /// The packet's ICRC, right or wrong; 0 in a constructed packet.
    pub icrc: u32,
}

impl OwnedPacket {
    /// A packet without payload, with the BTH of [`Bth::new`] and zeros for extension headers.
    pub fn new(path: &PathAddress, opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> OwnedPacket {
        let (link, network) = headers(path);
        OwnedPacket {
            link: Some(link),
            network,
            opcode,
            bth: Bth::new(opcode, dest_qpn, psn),
            extensions: Extensions::default(),
            payload: Vec::new(),
            icrc: 0,
        }
    }

    /// As [`Packet::parse`].
    ///
    /// # Errors
    /// The first check that fails.
    pub fn parse(frame: &[u8]) -> Result<OwnedPacket, ParseError> {
        Packet::parse(frame).map(|packet| OwnedPacket::from(&packet))
    }

    /// Sets the payload, and the matching pad.
    pub fn set_payload(&mut self, payload: Vec<u8>) {
        self.bth.set_pad(pad(payload.len()));
        self.payload = payload;
    }

    /// The frame, from the network header on if the packet has no [`link`](OwnedPacket::link). Its ICRC is computed
    /// regardless of [`icrc`](OwnedPacket::icrc); its pad is that of the BTH.
    pub fn emit(&self) -> Vec<u8> {
        let mut path = PathHeader::over(self.network.header, &self.path());
        if self.link.is_none() {
            path = path.without_link();
        }
        let mut bth = self.bth;
        bth.set_opcode(self.opcode);
        let transport = Bth::LEN + self.opcode.extensions_len() + self.payload.len() + bth.pad() + ICRC_LEN;
        let mut buffer = vec![0; path.len() + transport];
        let frame = FrameBuilder::start_padded(&mut buffer, &path, bth, self.payload.len());
        let Some(mut frame) = frame else { unreachable!("a buffer that is as long as the frame") };
        frame.put_extensions(&self.extensions);
        frame.payload().copy_from_slice(&self.payload);
        frame.finish();
        buffer
    }

    /// The addresses and the traffic class. Without a [`link`](OwnedPacket::link) the hardware addresses are zeros.
    pub fn path(&self) -> PathAddress {
        let nowhere = Link { destination: MacAddr::default(), source: MacAddr::default(), vlan: None };
        let (link, network) = (self.link.unwrap_or(nowhere), &self.network);
        PathAddress {
            source_mac: link.source,
            destination_mac: link.destination,
            vlan: link.vlan,
            source: network.source,
            destination: network.destination,
            encapsulation: match network.header.has_udp() {
                true => Encapsulation::RoceV2 { source_port: network.source_port.unwrap_or(0) },
                false => Encapsulation::RoceV1,
            },
            traffic_class: network.traffic_class,
            flow_label: network.flow_label,
            hop_limit: network.hop_limit,
            identification: network.identification,
        }
    }

    /// Replaces the addresses and the traffic class.
    pub fn set_path(&mut self, path: &PathAddress) {
        let (link, network) = headers(path);
        (self.link, self.network) = (Some(link), network);
    }

    /// The contents of a selective acknowledgement; `None` if its length is wrong, or for another packet.
    pub fn sack(&self) -> Option<&Sack> {
        if self.opcode != Opcode::SELECTIVE_ACKNOWLEDGE {
            return None;
        }
        Sack::ref_from_bytes(&self.payload).ok()
    }
}

impl From<&Packet<'_>> for OwnedPacket {
    fn from(packet: &Packet<'_>) -> OwnedPacket {
        OwnedPacket {
            link: packet.link(),
            network: packet.network(),
            opcode: packet.opcode,
            bth: *packet.bth,
            extensions: packet.extensions(),
            payload: packet.payload.to_vec(),
            icrc: packet.icrc,
        }
    }
}

/// The headers before the BTH of a packet on this path.
fn headers(path: &PathAddress) -> (Link, Network) {
    let link = Link { destination: path.destination_mac, source: path.source_mac, vlan: path.vlan };
    let network = Network {
        header: PathHeader::new(path).network(),
        source: path.source,
        destination: path.destination,
        traffic_class: path.traffic_class,
        hop_limit: path.hop_limit,
        flow_label: path.flow_label,
        source_port: match path.encapsulation {
            Encapsulation::RoceV2 { source_port } => Some(source_port),
            Encapsulation::RoceV1 => None,
        },
        identification: path.identification,
    };
    (link, network)
}
