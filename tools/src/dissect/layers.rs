//! The layers down to the transport: link headers of captures, tunnels, and the position of a RoCE packet's BTH.

use etherparse::{Ethernet2HeaderSlice, Ipv4HeaderSlice, SingleVlanHeaderSlice};
use ferroce_driver::pcap::LinkType;
use ferroce_wire::{
    Grh, ICRC_LEN, MacAddr, Network, NetworkHeader, ROCE_V1_ETHERTYPE, ROCE_V2_PORT, VlanTag, icrc,
};
use zerocopy::FromBytes;

use super::tunnel::{self, Inside};
use super::unopened::Name;

/// The contents of a frame.
pub(crate) enum Contents<'a> {
    /// A RoCE packet, complete or not.
    Roce(Layers<'a>, Transport),
    /// Other contents, by name: another protocol, or an encapsulation that is not decoded.
    Unopened(Name),
}

/// The link headers of a frame, and the rest.
#[derive(Clone)]
pub(crate) struct Layers<'a> {
    /// Source and destination of the innermost Ethernet header.
    pub(crate) ethernet: Option<(MacAddr, MacAddr)>,
    /// Outermost first.
    pub(crate) vlans: Vec<VlanTag>,
    /// The tunnels around the packet, outermost first.
    pub(crate) tunnels: Vec<&'static str>,
    ethertype: u16,
    /// From the network header on.
    pub(crate) network: &'a [u8],
}

/// The headers before a BTH.
#[derive(Clone, Copy)]
pub(crate) struct Transport {
    pub(crate) network: Network,
    pub(crate) udp_checksum: Option<u16>,
    /// Where the BTH starts in the network packet.
    pub(crate) bth_start: usize,
    /// The end of the ICRC by the innermost length field.
    pub(crate) end: usize,
    /// The end of the packet by the network header.
    pub(crate) network_end: usize,
}

pub(super) const IPV4: u16 = 0x0800;
pub(super) const IPV6: u16 = 0x86dd;
/// 802.1Q, 802.1ad, and the value that QinQ used before 802.1ad.
const VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];
/// The most nested tunnels that are decoded.
const DEPTH: usize = 8;
/// The most tags of one frame.
const TAGS: usize = 16;

impl<'a> Contents<'a> {
    /// Decodes a frame down to its RoCE packet.
    pub(crate) fn of(link_type: LinkType, frame: &'a [u8]) -> Contents<'a> {
        Contents::open(link_type, frame)
            .unwrap_or(Contents::Unopened("cut before it shows what it is".into()))
    }

    fn open(link_type: LinkType, frame: &'a [u8]) -> Option<Contents<'a>> {
        let u16_at = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        let mut layers =
            Layers { ethernet: None, vlans: Vec::new(), tunnels: Vec::new(), ethertype: 0, network: frame };
        match link_type {
            LinkType::Ethernet => layers.ethernet()?,
            LinkType::RawIp => layers.ethertype = if frame.first()? >> 4 == 6 { IPV6 } else { IPV4 },
            LinkType::LinuxCooked => (layers.ethertype, layers.network) = (u16_at(14)?, frame.get(16..)?),
            LinkType::LinuxCooked2 => (layers.ethertype, layers.network) = (u16_at(0)?, frame.get(20..)?),
            LinkType::Other(number) => {
                return Some(Contents::Unopened(format!("link type {number}").into()));
            }
        }
        for _ in 0..DEPTH {
            layers.tags()?;
            if VLAN.contains(&layers.ethertype) {
                return Some(Contents::Unopened(format!("more than {TAGS} VLAN tags").into()));
            }
            if let Some(transport) = layers.transport() {
                return Some(Contents::Roce(layers, transport));
            }
            match tunnel::inside(layers.ethertype, layers.network)? {
                Inside::Ethernet(name, frame) => {
                    layers.tunnels.push(name);
                    layers.network = frame;
                    layers.ethernet()?;
                }
                Inside::Network(name, ethertype, packet) => {
                    layers.tunnels.push(name);
                    (layers.ethertype, layers.network) = (ethertype, packet);
                }
                Inside::Closed(name) => return Some(Contents::Unopened(name)),
            }
        }
        Some(Contents::Unopened("too many tunnels in each other".into()))
    }
}

impl Layers<'_> {
    /// Removes an Ethernet header.
    fn ethernet(&mut self) -> Option<()> {
        let header = Ethernet2HeaderSlice::from_slice(self.network).ok()?;
        self.ethernet = Some((MacAddr(header.source()), MacAddr(header.destination())));
        self.ethertype = header.ether_type().0;
        self.network = &self.network[header.slice().len()..];
        Some(())
    }

    /// Removes VLAN tags.
    fn tags(&mut self) -> Option<()> {
        while VLAN.contains(&self.ethertype) && self.vlans.len() < TAGS {
            let tag = SingleVlanHeaderSlice::from_slice(self.network).ok()?;
            self.vlans.push(VlanTag {
                id: tag.vlan_identifier().value(),
                priority: tag.priority_code_point().value(),
            });
            self.ethertype = tag.ether_type().0;
            self.network = &self.network[tag.slice().len()..];
        }
        Some(())
    }

    /// The same headers around one of the packets that this one contains.
    pub(crate) fn around<'a>(&self, network: &'a [u8]) -> Option<(Layers<'a>, Transport)> {
        let layers = Layers { network, vlans: self.vlans.clone(), tunnels: self.tunnels.clone(), ..*self };
        let transport = layers.transport()?;
        Some((layers, transport))
    }

    /// Whether this is a packet that starts with a GRH.
    pub(crate) fn is_roce_v1(&self) -> bool {
        self.ethertype == ROCE_V1_ETHERTYPE
    }

    /// The headers before the BTH; `None` if this is not RoCE, or truncated before that is visible.
    fn transport(&self) -> Option<Transport> {
        let packet = self.network;
        match self.ethertype {
            IPV4 => {
                let ip = Ipv4HeaderSlice::from_slice(packet).ok()?;
                if ip.protocol() != etherparse::IpNumber::UDP || ip.fragments_offset().value() != 0 {
                    return None;
                }
                let network = Network::of_ipv4(packet.first_chunk()?);
                Transport::over_udp(packet, network, ip.slice().len(), usize::from(ip.total_len()))
            }
            IPV6 => {
                let (ip, _) = Grh::ref_from_prefix(packet).ok()?;
                if ip.version() != 6 || ip.next_header() != Grh::NEXT_HEADER_UDP {
                    return None;
                }
                let network = Network::of_grh(ip, NetworkHeader::Ipv6);
                Transport::over_udp(packet, network, Grh::LEN, Grh::LEN + usize::from(ip.payload_length()))
            }
            ROCE_V1_ETHERTYPE => {
                let (grh, _) = Grh::ref_from_prefix(packet).ok()?;
                let end = Grh::LEN + usize::from(grh.payload_length());
                Some(Transport {
                    network: Network::of_grh(grh, NetworkHeader::Grh),
                    udp_checksum: None,
                    bth_start: Grh::LEN,
                    end,
                    network_end: end,
                })
            }
            _ => None,
        }
    }
}

impl Transport {
    /// The headers up to the UDP header at `start`; `None` if it is not RoCE's.
    fn over_udp(packet: &[u8], network: Network, start: usize, network_end: usize) -> Option<Transport> {
        let udp = packet.get(start..)?.first_chunk::<8>()?;
        let [source_port, destination_port, length, checksum] =
            [0, 2, 4, 6].map(|at| u16::from_be_bytes([udp[at], udp[at + 1]]));
        (destination_port == ROCE_V2_PORT).then_some(Transport {
            network: Network { source_port: Some(source_port), ..network },
            udp_checksum: Some(checksum),
            bth_start: start + 8,
            end: start + usize::from(length),
            network_end,
        })
    }

    /// The ICRC of a packet and the expected one, by its lengths only, whatever its opcode.
    pub(crate) fn icrc(&self, packet: &[u8]) -> Option<(u32, u32)> {
        let (covered, found) = packet.get(..self.end)?.split_last_chunk::<ICRC_LEN>()?;
        Some((u32::from_le_bytes(*found), icrc::compute(self.network.header, covered)?))
    }

    /// The original length of a packet if the capture has fewer bytes than its headers say, and they agree: the
    /// recorder truncated it, whether or not the record says so.
    pub(crate) fn length_before_cut(&self, present: usize) -> Option<usize> {
        (self.end == self.network_end && self.end > present).then_some(self.end)
    }
}
