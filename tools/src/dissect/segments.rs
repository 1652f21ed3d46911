//! Datagrams that contain several RoCE packets, and how they are split, for `dissect` and `replay`.
//!
//! If a sender leaves segmentation to the kernel or to the network card (UDP segmentation offload), a capture has the
//! datagram before segmentation, with one header. A receiver's capture has the same if its kernel merges packets (UDP
//! GRO).

use ferroce_wire::{Bth, Grh, ICRC_LEN, NetworkHeader, Opcode};
use zerocopy::FromBytes;

use super::layers::{Layers, Transport};

/// The description of frames with several packets.
pub(crate) const JOINED: &str = "recorded before they were cut apart: UDP segmentation offload";

const UDP_HEADER: usize = 8;
/// A BTH and the ICRC.
pub(super) const SHORTEST: usize = Bth::LEN + ICRC_LEN;
/// The most lengths that are tried. A second packet is recognized by its BTH, so one or two suffice for any real
/// datagram.
const TRIES: usize = 64;

/// The packets of a datagram that contains several, each starting with its network header, as on the wire; empty if it
/// is one packet, or truncated.
#[derive(Default)]
pub(crate) struct Segments(Vec<Vec<u8>>);

impl Segments {
    /// Splits a datagram.
    ///
    /// All packets except the last one have the same length, and the kernel numbers them starting with the
    /// identification of the datagram. The length is the one at which the ICRC of the first packet is valid and another
    /// BTH follows.
    pub(crate) fn of(layers: &Layers<'_>, transport: &Transport) -> Segments {
        Segments::cut(layers, transport).unwrap_or_default()
    }

    /// Whether there are any.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The packets of the frame that was split, or its only packet.
    pub(crate) fn packets<'a>(&'a self, whole: (Layers<'a>, Transport)) -> Vec<(Layers<'a>, Transport)> {
        match self.is_empty() {
            true => vec![whole],
            false => self.0.iter().filter_map(|segment| whole.0.around(segment)).collect(),
        }
    }

    fn cut(layers: &Layers<'_>, transport: &Transport) -> Option<Segments> {
        let whole = layers.network;
        let is_roce_v2 = transport.network.source_port.is_some();
        let (found, expected) = transport.icrc(whole).filter(|_| is_roce_v2)?;
        if found == expected || transport.end != transport.network_end {
            return None;
        }
        let (headers, payload) = whole.get(..transport.end)?.split_at_checked(transport.bth_start)?;
        let is_ipv4 = transport.network.header == NetworkHeader::Ipv4;
        let packet = |index: usize, bytes: &[u8]| {
            let mut packet = [headers, bytes].concat();
            write_headers(&mut packet, headers.len(), is_ipv4, index as u16);
            packet
        };
        let pkey = payload.get(2..4)?;
        let is_followed = |length: &usize| {
            let second = &payload[*length..];
            second[2..4] == *pkey
                && Bth::read_from_prefix(second).is_ok_and(|(bth, _)| {
                    bth.transport_version() == 0 && Opcode::from_byte(bth.opcode_byte()).is_some()
                })
        };
        let is_right = |length: &usize| {
            let first = packet(0, &payload[..*length]);
            let transport = Transport { end: first.len(), ..*transport };
            transport.icrc(&first).is_some_and(|(found, expected)| found == expected)
        };
        let lengths = (SHORTEST..=payload.len().checked_sub(SHORTEST)?).step_by(4);
        let length = lengths.filter(is_followed).take(TRIES).find(is_right)?;
        let packets = payload.chunks(length).enumerate().map(|(index, bytes)| packet(index, bytes));
        Some(Segments(packets.collect()))
    }
}

/// Changes the headers of a datagram to those of one of its packets, except the checksums, which are not read.
fn write_headers(packet: &mut [u8], headers: usize, is_ipv4: bool, index: u16) {
    let (length, udp) = (packet.len(), headers - UDP_HEADER);
    // Each value is less than the datagram's own, which fitted.
    let mut put = |at: usize, value: usize| packet[at..at + 2].copy_from_slice(&(value as u16).to_be_bytes());
    put(udp + 4, length - udp);
    if is_ipv4 {
        put(2, length);
    } else {
        put(4, length - Grh::LEN);
    }
    if is_ipv4 && let Some(identification) = packet[4..].first_chunk() {
        let identification = u16::from_be_bytes(*identification).wrapping_add(index);
        packet[4..6].copy_from_slice(&identification.to_be_bytes());
    }
}
