//! A RoCE packet, recorded or sent by the engine, taken apart once.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

use ferroce::wire::{
    Aeth, AtomicEth, Bth, Deth, Feth, ICRC_LEN, NetworkHeader, Opcode, Operation, Packet, ParseError,
    Position, Reth, Service,
};
use ferroce::{Gid, Nanos, Psn, RKey};

/// One packet with a transport header that could be read.
#[derive(Clone, Debug)]
pub(super) struct Seen {
    /// Its number in the capture, from 1; of an engine's packet, that of the recorded packet before it.
    pub(super) frame: u64,
    pub(super) at: Nanos,
    pub(super) header: NetworkHeader,
    pub(super) source: Gid,
    pub(super) destination: Gid,
    pub(super) traffic_class: u8,
    pub(super) source_port: Option<u16>,
    pub(super) opcode: Opcode,
    pub(super) bth: Bth,
    pub(super) deth: Option<Deth>,
    pub(super) reth: Option<Reth>,
    pub(super) feth: Option<Feth>,
    pub(super) atomic: Option<AtomicEth>,
    pub(super) aeth: Option<Aeth>,
    /// What an atomic found.
    pub(super) original: Option<u64>,
    pub(super) immediate: Option<u32>,
    pub(super) invalidates: Option<RKey>,
    pub(super) icrc_is_right: bool,
    pub(super) pad_fits: bool,
    /// From the network header to the ICRC; of an engine's packet none.
    pub(super) bytes: Vec<u8>,
    payload: Range<usize>,
    /// Of the payload: two packets are told apart by it when one of them is not kept.
    digest: u64,
}

impl Seen {
    /// Takes a packet apart that begins with its network header.
    pub(super) fn new(frame: u64, at: Nanos, bytes: &[u8], is_roce_v1: bool) -> Result<Seen, ParseError> {
        let packet = if is_roce_v1 { Packet::decode_grh(bytes) } else { Packet::decode_ip(bytes) }?;
        let network = packet.network();
        let extensions = packet.opcode.extensions_len();
        let start = packet.header.bth_start() + Bth::LEN + extensions;
        let len = packet.covered().len() + ICRC_LEN;
        let mut digest = DefaultHasher::new();
        packet.payload.hash(&mut digest);
        Ok(Seen {
            frame,
            at,
            header: packet.header,
            source: network.source,
            destination: network.destination,
            traffic_class: network.traffic_class,
            source_port: network.source_port,
            opcode: packet.opcode,
            bth: *packet.bth,
            deth: packet.deth().copied(),
            reth: packet.reth().copied(),
            feth: packet.feth().copied(),
            atomic: packet.atomic_eth().copied(),
            aeth: packet.aeth().copied(),
            original: packet.atomic_ack_eth().map(|header| header.original()),
            immediate: packet.immdt().map(|header| header.value()),
            invalidates: packet.ieth().map(|header| header.rkey()),
            icrc_is_right: packet.check_icrc().is_ok(),
            pad_fits: packet.pad_fits(),
            payload: start..start + packet.payload.len(),
            digest: digest.finish(),
            bytes: bytes[..len].to_vec(),
        })
    }

    /// As [`new`](Seen::new), of a packet that the engine sent. The engine may send much more than was recorded: its
    /// bytes are not kept, but for a CNP's, whose payload belongs to its shape.
    pub(super) fn sent(frame: u64, at: Nanos, bytes: &[u8], is_roce_v1: bool) -> Result<Seen, ParseError> {
        let mut packet = Seen::new(frame, at, bytes, is_roce_v1)?;
        if !packet.is_cnp() {
            packet.bytes = Vec::new();
        }
        Ok(packet)
    }

    pub(super) fn is_roce_v1(&self) -> bool {
        self.header == NetworkHeader::Grh
    }

    /// Extension headers and payload.
    pub(super) fn contents(&self) -> &[u8] {
        self.bytes.get(self.header.bth_start() + Bth::LEN..self.payload.end).unwrap_or_default()
    }

    /// The IPv4 identification.
    pub(super) fn identification(&self) -> Option<u16> {
        let bytes = self.bytes.get(4..6).filter(|_| self.header == NetworkHeader::Ipv4)?;
        Some(u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Whether its sender sent it after another one, as far as the identifications tell.
    pub(super) fn was_sent_behind(&self, other: &Seen) -> bool {
        let numbers = self.identification().zip(other.identification());
        numbers.is_some_and(|(here, there)| (1..1 << 15).contains(&here.wrapping_sub(there)))
    }

    pub(super) fn icrc_bytes(&self) -> &[u8] {
        self.bytes.last_chunk::<ICRC_LEN>().map_or(&[], |icrc| icrc)
    }

    /// Whether all that no router changes is the same: what the ICRC covers.
    pub(super) fn is_same_as(&self, other: &Seen) -> bool {
        // FECN, BECN and the reserved bits beside them are a byte of the BTH that it does not cover.
        const UNCOVERED: usize = 4;
        fn transport(packet: &Seen) -> Option<(&[u8], &[u8])> {
            let (before, rest) =
                packet.bytes.get(packet.header.bth_start()..)?.split_at_checked(UNCOVERED)?;
            Some((before, rest.get(1..)?))
        }
        self.identification() == other.identification()
            && transport(self).is_some_and(|here| transport(other) == Some(here))
    }

    /// Of a recorded packet; the engine's are told apart by their digests.
    pub(super) fn payload(&self) -> &[u8] {
        self.bytes.get(self.payload.clone()).unwrap_or_default()
    }

    pub(super) fn payload_len(&self) -> usize {
        self.payload.len()
    }

    pub(super) fn payload_digest(&self) -> (usize, u64) {
        (self.payload_len(), self.digest)
    }

    /// Whether both have the same payload.
    pub(super) fn carries_the_same_as(&self, other: &Seen) -> bool {
        self.payload_digest() == other.payload_digest()
    }

    pub(super) fn psn(&self) -> Psn {
        self.bth.psn()
    }

    pub(super) fn service(&self) -> Service {
        self.opcode.service()
    }

    /// Whether it may carry the solicited event bit.
    pub(super) fn may_solicit(&self) -> bool {
        self.ends() && (self.opcode.operation() == Operation::Send || self.immediate.is_some())
    }

    pub(super) fn is_request(&self) -> bool {
        self.opcode.is_request()
    }

    /// Whether it answers requests: an ACK, a NAK, a READ response, an Atomic Acknowledge.
    pub(super) fn is_response(&self) -> bool {
        use Operation::{Acknowledge, AtomicAcknowledge, ReadResponse};
        matches!(self.opcode.operation(), ReadResponse | Acknowledge | AtomicAcknowledge)
    }

    /// Whether it is a request with a right ICRC.
    pub(super) fn is_whole_request(&self) -> bool {
        self.is_request() && self.icrc_is_right
    }

    /// Whether it is a response with a right ICRC.
    pub(super) fn is_whole_response(&self) -> bool {
        self.is_response() && self.icrc_is_right
    }

    /// Whether its kind is one that answers a request of this operation; a NAK may answer any.
    pub(super) fn may_answer(&self, request: Operation) -> bool {
        self.is_nak() || answers(self.opcode.operation(), request)
    }

    pub(super) fn is_rnr_nak(&self) -> bool {
        self.is_response() && self.aeth.is_some_and(|aeth| aeth.syndrome_byte() >> 5 == 1)
    }

    /// Whether it refuses a request for good.
    pub(super) fn is_refusal(&self) -> bool {
        self.is_response() && self.aeth.is_some_and(|aeth| matches!(aeth.syndrome_byte(), 0x61..=0x64))
    }

    /// Whether it is a NAK of any kind, RNR too.
    pub(super) fn is_nak(&self) -> bool {
        self.is_response() && self.aeth.is_some_and(|aeth| aeth.syndrome_byte() >= 0x20)
    }

    pub(super) fn is_cnp(&self) -> bool {
        self.opcode == Opcode::CNP
    }

    pub(super) fn is_marked(&self) -> bool {
        self.traffic_class & 3 == 3
    }

    /// Whether a message starts with it.
    pub(super) fn starts(&self) -> bool {
        matches!(self.opcode.position(), Position::First | Position::Only)
    }

    /// Whether a message ends with it.
    pub(super) fn ends(&self) -> bool {
        matches!(self.opcode.position(), Position::Last | Position::Only)
    }
}

/// Whether an answer of one operation is what a request of another one asks for.
pub(super) fn answers(answer: Operation, request: Operation) -> bool {
    use Operation::{
        AtomicAcknowledge, AtomicWrite, CompareSwap, FetchAdd, Flush, ReadRequest, ReadResponse,
    };
    match answer {
        ReadResponse => matches!(request, ReadRequest | Flush | AtomicWrite),
        AtomicAcknowledge => matches!(request, CompareSwap | FetchAdd),
        _ => !matches!(request, ReadRequest | CompareSwap | FetchAdd | Flush | AtomicWrite),
    }
}
