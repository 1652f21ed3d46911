//! Datagrams that hold several RoCE packets, and how they are split, for `dissect` and `replay`.
//!
//! If a sender leaves segmentation to the kernel or to the card (UDP segmentation offload), a capture has the datagram
//! before segmentation, with one header. A receiver's capture has the same if its kernel merges packets (UDP GRO).

use ferroce_wire::{Bth, Grh, ICRC_LEN, NetworkHeader, Opcode};
use zerocopy::FromBytes;

use super::layers::{Layers, Transport};

/// What frames with several packets are, for people.
pub(crate) const JOINED: &str = "recorded before they were cut apart: UDP segmentation offload";

const UDP_HEADER: usize = 8;
/// A BTH and the ICRC.
pub(super) const SHORTEST: usize = Bth::LEN + ICRC_LEN;
/// Lengths that are tried. A second packet shows by its BTH, so one or two are enough unless somebody made it up.
const TRIES: usize = 64;

/// The packets of a datagram that holds several, each from its network header on, as they are on the wire; none if it is
/// one packet, or not whole.
#[derive(Default)]
pub(crate) struct Segments(Vec<Vec<u8>>);

impl Segments {
    /// Cuts a datagram apart.
    ///
    /// All packets but the last one are of one length, and the kernel numbers them from the identification of the datagram
    /// on. The length is the one at which the ICRC of the first packet is right and another BTH follows.
    pub(crate) fn of(layers: &Layers<'_>, transport: &Transport) -> Segments {
        Segments::cut(layers, transport).unwrap_or_default()
    }

    /// Whether there are any.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The packets of the frame that these were cut from, or it alone.
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

/// Makes the headers of a datagram those of one of its packets, but for checksums, which nobody reads.
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
