//! Down to the transport: link headers of captures, and where a RoCE packet's BTH is.

use etherparse::{Ethernet2HeaderSlice, Ipv4HeaderSlice, Ipv6HeaderSlice, SingleVlanHeaderSlice};
use ferroce_driver::pcap::LinkType;
use ferroce_wire::{Gid, Grh, MacAddr, NetworkHeader, ROCE_V1_ETHERTYPE, ROCE_V2_PORT, VlanTag};
use zerocopy::FromBytes;

/// The link headers of a frame, and the rest.
pub(crate) struct Layers<'a> {
    /// Source and destination, where the frame has an Ethernet header.
    pub(crate) ethernet: Option<(MacAddr, MacAddr)>,
    /// Outermost first.
    pub(crate) vlans: Vec<VlanTag>,
    ethertype: u16,
    /// From the network header on.
    pub(crate) network: &'a [u8],
}

/// What stands in front of a BTH.
#[derive(Clone, Copy)]
pub(crate) struct Transport {
    pub(crate) header: NetworkHeader,
    pub(crate) source: Gid,
    pub(crate) destination: Gid,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
    /// IPv6 and GRH.
    pub(crate) flow_label: Option<u32>,
    /// IPv4.
    pub(crate) identification: Option<u16>,
    pub(crate) source_port: Option<u16>,
    pub(crate) udp_checksum: Option<u16>,
    /// Where the BTH starts in the network packet.
    pub(crate) bth_start: usize,
    /// Where the ICRC ends by the innermost length field.
    pub(crate) end: usize,
}

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
/// 802.1Q, 802.1ad, and what QinQ used before the latter.
const VLAN: [u16; 3] = [0x8100, 0x88a8, 0x9100];

impl<'a> Layers<'a> {
    /// `None` if the frame ends in its link headers.
    pub(crate) fn split(link_type: LinkType, frame: &'a [u8]) -> Option<Layers<'a>> {
        let u16_at = |at: usize| Some(u16::from_be_bytes(*frame.get(at..)?.first_chunk()?));
        let (ethernet, ethertype, rest) = match link_type {
            LinkType::Ethernet => {
                let header = Ethernet2HeaderSlice::from_slice(frame).ok()?;
                let macs = (MacAddr(header.source()), MacAddr(header.destination()));
                (Some(macs), header.ether_type().0, &frame[header.slice().len()..])
            }
            LinkType::RawIp => (None, if frame.first()? >> 4 == 6 { IPV6 } else { IPV4 }, frame),
            LinkType::LinuxCooked => (None, u16_at(14)?, frame.get(16..)?),
            LinkType::LinuxCooked2 => (None, u16_at(0)?, frame.get(20..)?),
            LinkType::Other(_) => return None,
        };
        let mut layers = Layers { ethernet, vlans: Vec::new(), ethertype, network: rest };
        while VLAN.contains(&layers.ethertype) {
            let tag = SingleVlanHeaderSlice::from_slice(layers.network).ok()?;
            layers.vlans.push(VlanTag {
                id: tag.vlan_identifier().value(),
                priority: tag.priority_code_point().value(),
            });
            layers.ethertype = tag.ether_type().0;
            layers.network = &layers.network[tag.slice().len()..];
        }
        Some(layers)
    }

    /// Whether this is a packet that starts with a GRH.
    pub(crate) fn is_roce_v1(&self) -> bool {
        self.ethertype == ROCE_V1_ETHERTYPE
    }

    /// The headers in front of the BTH; `None` if this is not RoCE, or cut off before that shows.
    pub(crate) fn transport(&self) -> Option<Transport> {
        let packet = self.network;
        match self.ethertype {
            IPV4 => {
                let ip = Ipv4HeaderSlice::from_slice(packet).ok()?;
                if ip.protocol() != etherparse::IpNumber::UDP || ip.fragments_offset().value() != 0 {
                    return None;
                }
                with_udp(
                    packet,
                    ip.slice().len(),
                    Transport {
                        header: NetworkHeader::Ipv4,
                        source: Gid::from_ipv4(ip.source_addr()),
                        destination: Gid::from_ipv4(ip.destination_addr()),
                        traffic_class: packet[1],
                        hop_limit: ip.ttl(),
                        flow_label: None,
                        identification: Some(ip.identification()),
                        source_port: None,
                        udp_checksum: None,
                        bth_start: 0,
                        end: 0,
                    },
                )
            }
            IPV6 => {
                let ip = Ipv6HeaderSlice::from_slice(packet).ok()?;
                if ip.next_header() != etherparse::IpNumber::UDP {
                    return None;
                }
                with_udp(
                    packet,
                    ip.slice().len(),
                    Transport {
                        header: NetworkHeader::Ipv6,
                        source: Gid(ip.source()),
                        destination: Gid(ip.destination()),
                        traffic_class: ip.traffic_class(),
                        hop_limit: ip.hop_limit(),
                        flow_label: Some(ip.flow_label().value()),
                        identification: None,
                        source_port: None,
                        udp_checksum: None,
                        bth_start: 0,
                        end: 0,
                    },
                )
            }
            ROCE_V1_ETHERTYPE => {
                let (grh, _) = Grh::ref_from_prefix(packet).ok()?;
                Some(Transport {
                    header: NetworkHeader::Grh,
                    source: grh.sgid(),
                    destination: grh.dgid(),
                    traffic_class: grh.traffic_class(),
                    hop_limit: grh.hop_limit(),
                    flow_label: Some(grh.flow_label()),
                    identification: None,
                    source_port: None,
                    udp_checksum: None,
                    bth_start: Grh::LEN,
                    end: Grh::LEN + usize::from(grh.payload_length()),
                })
            }
            _ => None,
        }
    }
}

/// Adds what the UDP header at `start` says, if it is RoCE's.
fn with_udp(packet: &[u8], start: usize, transport: Transport) -> Option<Transport> {
    let udp = packet.get(start..)?.first_chunk::<8>()?;
    let [source_port, destination_port, length, checksum] =
        [0, 2, 4, 6].map(|at| u16::from_be_bytes([udp[at], udp[at + 1]]));
    (destination_port == ROCE_V2_PORT).then_some(Transport {
        source_port: Some(source_port),
        udp_checksum: Some(checksum),
        bth_start: start + 8,
        end: start + usize::from(length),
        ..transport
    })
}
